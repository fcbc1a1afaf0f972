"""xPos: rotation whose scores also fade with the distance, since q and k are scaled by powers that nearly cancel.

Pair i of q is multiplied by ζᵢ^((p − centre) / scale_base), and that of k divided by it, so a score carries
ζᵢ^((p − p′) / scale_base), whatever the centre. ζᵢ = (2i + 0.4 · d) / (1.4 · d), from 0.286 for the fastest pair to
nearly 1.

Source: Sun et al. 2022, "A Length-Extrapolatable Transformer", arXiv:2212.10554, section 3.2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation

_WHO = "xpos.at"
_GAMMA = 0.4
_LARGEST = math.log(torch.finfo(torch.float32).max)


class Rotations(NamedTuple):
    """The rotation of queries and that of keys. A key keeps its own: cached keys need no change as the text grows.

    `Rotation.inverse` does not undo the scale, and `Rope.shift` does not move it.
    """

    q: Rotation
    k: Rotation


def at(rope: Rope, positions: Tensor, *, centre: int, scale_base: float = 512.0) -> Rotations:
    """The rotations of these tokens: as `Rope.at`, times the scale of xPos for q, divided by it for k.

    Args:
        rope: of one axis, static.
        positions: as in `Rope.at`, `[seq]` or `[batch, seq]`, in tokens.
        centre: the position of scale 1, in tokens. It must be the same for all queries and keys of a text. It changes
            no score, only how far the numbers of q and k are from 1; the middle of the longest text is best.
        scale_base: how slowly scores fade, in tokens, greater than 0. xPos and all known code take 512.

    Returns:
        `Rotations`, float32 on the device of positions; the scale is worked out in float64.

    Raises:
        RopeError: rope has axes or depends on the length; positions are none; centre or scale_base is no such number;
            or, on the CPU and not under torch.compile, a position is further from the centre than the scale fits into
            float32: 70.8 · scale_base, 36,260 tokens for 512. (In float16, q and k overflow beyond 4,530.)

    Example:
        >>> from ropewalk import Rope, xpos
        >>> places = torch.arange(4)
        >>> q, k = xpos.at(Rope(head_dim=4, base=10_000.0, pairing="half"), places, centre=2)
        >>> (q.cos * k.cos)[:, 1]  # the scales cancel at distance 0
        tensor([1.0000, 0.9999, 0.9996, 0.9991])
    """
    if not isinstance(rope, Rope) or rope.axes is not None:
        cure = "Read one with from_config(...).rope; no model is known that scales several axes."
        raise _checks.error(_WHO, "rope must be a Rope of one axis", _checks.shown(rope), cure)
    centre = _checks.integer(_WHO, "centre", centre, at_least=-(2**31), at_most=2**31)
    scale_base = _checks.number(_WHO, "scale_base", scale_base, above=0.0)
    turn = rope.at(positions, dtype=torch.float64)
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float64, device=positions.device)
    zeta = (2 * pairs + _GAMMA * rope.rotary_dim) / ((1 + _GAMMA) * rope.rotary_dim)
    away = (positions - centre).to(torch.float64)
    _check_range(away, scale_base)
    scale = torch.exp(zeta.log() * (away / scale_base).unsqueeze(-1))
    return Rotations(_rotation(rope, turn, scale), _rotation(rope, turn, 1 / scale))


def _rotation(rope: Rope, turn: Rotation, scale: Tensor) -> Rotation:
    return Rotation(
        (turn.cos * scale).float(),
        (turn.sin * scale).float(),
        pairing=rope.pairing,
        head_dim=rope.head_dim,
        rotary_offset=rope.rotary_offset,
        attention_factor=rope.attention_factor,
    )


def _check_range(away: Tensor, scale_base: float) -> None:
    if torch.compiler.is_compiling() or away.device.type != "cpu" or away.numel() == 0:
        return  # reading a value would wait for the device
    furthest = int(scale_base * _LARGEST / math.log((1 + _GAMMA) / _GAMMA))
    worst = float(away.abs().max())
    if worst > furthest:
        must = f"every position must be within {furthest} of the centre, since the scale overflows float32 beyond"
        raise _checks.error(_WHO, must, f"one {worst:.0f} away", "Pass the middle of the text, or a larger scale_base.")
