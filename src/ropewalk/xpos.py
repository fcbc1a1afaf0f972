"""xPos: rotations that also scale q and k, so that attention scores decay with distance.

Pair i of q at position p is multiplied by ζᵢ^((p − centre) / scale_base), and pair i of k is divided by the same power
at its position p′. A score is therefore scaled by ζᵢ^((p − p′) / scale_base), which does not depend on the centre.
ζᵢ = (2i + 0.4 · d) / (1.4 · d) ranges from 0.286 for the fastest pair to nearly 1.

Source: Sun et al. 2022, "A Length-Extrapolatable Transformer", arXiv:2212.10554, section 3.2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.rope.rope import Rope
from ropewalk.rotation.api import Rotation

__all__ = ["Rotations", "at"]
__dir__ = __all__.copy

_WHO = "xpos.at"
_GAMMA = 0.4
_LOG_MAX = math.log(torch.finfo(torch.float32).max)


class Rotations(NamedTuple):
    """The rotation of queries and the rotation of keys. Cached keys stay valid as the sequence grows.

    `Rotation.inverse` does not undo the scale, and `Rope.shift` does not adjust it.
    """

    q: Rotation
    k: Rotation


def at(rope: Rope, positions: Tensor, *, centre: int, scale_base: float = 512.0) -> Rotations:
    """Return the rotations of q and of k at these positions.

    Both are `rope.at(positions)`, with the tables of q multiplied by the scale of xPos and those of k divided by it.

    Args:
        rope: a static rope with one axis.
        positions: as in `Rope.at`, `[seq]` or `[batch, seq]`, in tokens.
        centre: the position with scale 1, in tokens. It must be the same for all queries and keys of a sequence. It
            does not change scores, only the magnitude of q and k; the middle of the longest sequence is best.
        scale_base: the distance in tokens over which scores decay, greater than 0. xPos and all known code use 512.

    Returns:
        `Rotations`, float32 on the device of positions. The scale is computed in float64.

    Raises:
        RopeError: rope has axes or depends on the length; positions are invalid; centre or scale_base is out of range;
            or, on the CPU and not under torch.compile, the scale overflows float32 because a position is more than
            70.8 · scale_base from the centre (36,260 tokens for 512). In float16, channels
            of size 1 overflow at more than 4,530 tokens from the centre.

    Examples:
        >>> from ropewalk import Rope, xpos
        >>> positions = torch.arange(4)
        >>> q, k = xpos.at(Rope(head_dim=4, base=10_000.0, pairing="half"), positions, centre=2)
        >>> (q.cos * k.cos)[:, 1]  # the scales cancel at distance 0
        tensor([1.0000, 0.9999, 0.9996, 0.9991])
    """
    if not isinstance(rope, Rope) or rope.axes is not None:
        fix = "Read one with from_config(...).rope. No known model uses xPos with several axes."
        raise _checks.error(_WHO, "rope must be a Rope of one axis", _checks.shown(rope), fix)
    centre = _checks.integer(_WHO, "centre", centre, at_least=-(2**31), at_most=2**31)
    scale_base = _checks.number(_WHO, "scale_base", scale_base, above=0.0)
    rotation = rope.at(positions, dtype=torch.float64)
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float64, device=positions.device)
    zeta = (2 * pairs + _GAMMA * rope.rotary_dim) / ((1 + _GAMMA) * rope.rotary_dim)
    distance = positions.to(torch.float64) - centre
    _check_range(distance, scale_base)
    scale = torch.exp(zeta.log() * (distance / scale_base).unsqueeze(-1))
    return Rotations(_scale_rotation(rope, rotation, scale), _scale_rotation(rope, rotation, 1 / scale))


def _scale_rotation(rope: Rope, rotation: Rotation, scale: Tensor) -> Rotation:
    return Rotation(
        (rotation.cos * scale).float(),
        (rotation.sin * scale).float(),
        pairing=rope.pairing,
        head_dim=rope.head_dim,
        rotary_offset=rope.rotary_offset,
        attention_factor=rope.attention_factor,
    )


def _check_range(distance: Tensor, scale_base: float) -> None:
    if torch.compiler.is_compiling() or distance.device.type != "cpu" or distance.numel() == 0:
        return  # reading a value would synchronize with the device
    limit = scale_base * _LOG_MAX / math.log((1 + _GAMMA) / _GAMMA) // 1
    largest = float(distance.abs().max())
    if largest > limit:
        must = (
            f"every position must be within {limit:.0f} tokens of the centre, beyond which the scale overflows float32"
        )
        fix = "Pass the middle of the sequence as centre, or a larger scale_base."
        raise _checks.error(_WHO, must, f"a distance of {largest:.0f}", fix)
