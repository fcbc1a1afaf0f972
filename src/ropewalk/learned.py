"""LearnedRope: trainable frequencies on one or several axes, shared by all heads or separate for each head."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk._layout import Pairing
from ropewalk.kernels.backend import has_float64
from ropewalk.rope.rope import Rope
from ropewalk.rotation import api
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.placements import is_dtensor, replicate

_FLOATS = (torch.float32, torch.float64)
_POSITIONS = (torch.int32, torch.int64, *_FLOATS)
_WHO = "LearnedRope"


class LearnedRope(torch.nn.Module):
    """A module with trainable frequencies. Calling it with positions returns their `Rotation`.

    The frequencies are its only parameter. The angle of a pair is the sum over all axes of position · frequency.
    Gradients reach the frequencies through cos and sin. If each layer learns its own frequencies (RoPE-Mixed), use one
    module per layer. If all layers share them (Mochi), call one module once per forward pass, and pass the rotation to
    every layer.

    `.half()`, `.bfloat16()` and `.to(dtype)` do not change the dtype of the frequencies, because 16 bits lose the
    angle: with the 8 significant bits of bfloat16, the angle at position 256 is off by up to half a radian. If
    something else casts them (the mixed precision of FSDP, `load_state_dict(assign=True)` from a 16-bit file), the next
    call raises.

    Args:
        inv_freq: the initial frequencies in radians per position, float32 or float64: `[axes, pairs]` if all heads
            share them, otherwise `[axes, heads, pairs]`. The tensor is copied.
        pairing, head_dim, rotary_offset, attention_factor: as in `Rotation`.

    Attributes:
        inv_freq: the parameter, with the shape and dtype of the argument. It is the only entry of `state_dict`.
        axes: number of coordinates of a position.
        heads: number of heads with frequencies of their own; None if all heads share them.

    Raises:
        RopeError: inv_freq is not such a tensor, or a number is out of range.

    Examples:
        >>> learned = LearnedRope.from_rope(Rope(head_dim=4, base=10_000.0, pairing="half"))
        >>> rotation = learned(torch.arange(3))
        >>> rotation(torch.ones(1, 3, 2, 4), layout="bshd").sum().backward()
        >>> learned.inv_freq.grad.shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        inv_freq: Tensor,
        *,
        pairing: Pairing,
        head_dim: int | None = None,
        rotary_offset: int = 0,
        attention_factor: float = 1.0,
    ) -> None:
        super().__init__()
        if not isinstance(inv_freq, Tensor) or inv_freq.dtype not in _FLOATS or inv_freq.ndim not in (2, 3):
            must = "inv_freq must be a float32 or float64 tensor [axes, pairs] or [axes, heads, pairs]"
            raise _checks.error(_WHO, must, _checks.describe(inv_freq), "For one axis, add it with unsqueeze(0).")
        if 0 in inv_freq.shape:
            must = "inv_freq must have at least one axis, one head and one pair"
            raise _checks.error(_WHO, must, f"shape {tuple(inv_freq.shape)}", "Pass the initial frequencies.")
        row = torch.zeros(inv_freq.shape[-1], device="cpu")
        # Rotation checks the remaining arguments.
        checked = Rotation(
            row,
            row,
            pairing=pairing,
            head_dim=head_dim,
            rotary_offset=rotary_offset,
            attention_factor=attention_factor,
        )
        self.pairing, self.head_dim, self.rotary_dim = checked.pairing, checked.head_dim, checked.rotary_dim
        self.rotary_offset, self.attention_factor = checked.rotary_offset, checked.attention_factor
        self.axes = inv_freq.shape[0]
        self.heads = inv_freq.shape[1] if inv_freq.ndim == 3 else None
        self.inv_freq = torch.nn.Parameter(inv_freq.detach().clone())
        self._initializer: Callable[[], Tensor] | None = None

    @classmethod
    def _from_initializer(
        cls, initializer: Callable[[], Tensor], inv_freq: Tensor | None = None, **numbers: Any
    ) -> LearnedRope:
        """Create a module with an initializer for `reset_parameters`.

        Args:
            initializer: function that returns initial frequencies.
            inv_freq: the frequencies to start with. None means the result of the initializer.
            numbers: the other arguments of the constructor.
        """
        module = cls(initializer() if inv_freq is None else inv_freq, **numbers)
        module._initializer = initializer
        return module

    def reset_parameters(self) -> None:
        """Initialize the frequencies again, as `from_rope`, `mixed` or `projected` did, on their current device.

        Call this after `to_empty` on a module that was created on the meta device. `mixed` draws new directions from
        PyTorch's default CPU generator.

        Raises:
            RopeError: the module was created from a tensor of frequencies, of which it keeps no copy.
        """
        if self._initializer is None:
            must = "the module must be created by from_rope, mixed or projected"
            fix = "Copy the frequencies into inv_freq instead."
            raise _checks.error("LearnedRope.reset_parameters", must, "one created from a tensor of frequencies", fix)
        with torch.no_grad(), torch.device("cpu"):
            self.inv_freq.copy_(self._initializer())

    @classmethod
    def from_rope(cls, rope: Rope, *, heads: int | None = None, dtype: torch.dtype = torch.float32) -> LearnedRope:
        """Start from the frequencies of a rope. Its attention factor is copied, and not learned.

        If the rope has axes, the frequency of a pair starts at 0 on all axes but its own. Training may change all of
        them.

        Args:
            rope: a static rope. If its frequencies depend on the length, resolve them first with `at_length`.
            heads: number of heads with their own frequencies, which are equal at first. None means that all heads share
                their frequencies.
            dtype: dtype of the frequencies. float32 rounds them, which moves the angle at position p by up to p · 3e-8
                radians; float64 does not round them.

        Raises:
            RopeError: rope is not a static Rope, heads is not an integer of at least 1, or dtype is neither
                torch.float32 nor torch.float64.
        """
        who = "LearnedRope.from_rope"
        if not isinstance(rope, Rope):
            raise _checks.error(who, "rope must be a Rope", _checks.shown(rope), "Read one with from_config(...).rope.")
        if dtype not in _FLOATS:
            must = "dtype must be torch.float32 or torch.float64"
            fix = "Pass one of them: q and k keep their own dtype in any case."
            raise _checks.error(who, must, _checks.shown(dtype), fix)
        if heads is not None:
            heads = _checks.integer(who, "heads", heads, at_least=1)
        return cls._from_initializer(
            partial(_init_from_rope, rope, heads, dtype),
            pairing=rope.pairing,
            head_dim=rope.head_dim,
            rotary_offset=rope.rotary_offset,
            attention_factor=rope.attention_factor,
        )

    @classmethod
    def mixed(
        cls,
        head_dim: int,
        heads: int,
        *,
        pairing: Pairing,
        base: float = 10.0,
        generator: torch.Generator | None = None,
    ) -> LearnedRope:
        """Start from RoPE-Mixed: two axes, and for each head two perpendicular directions of the plane.

        The first half of the pairs rotates with the position along one direction, the second half with the position
        along the other. Pair i of each half has the frequency base^(−4i / head_dim), counted from i = 0. The first of
        the two directions is drawn at random for each head. A position is (x, y), in patches. Tokens that do not
        rotate, such as a class token, are at (0, 0).

        Source: Heo et al. 2024, arXiv:2403.13298; `init_random_2d_freqs` in naver-ai/rope-vit, which pairs
        neighbouring channels (pairing "interleaved").

        Args:
            head_dim: channels of a head, a multiple of 4.
            heads: number of heads.
            base: base of the geometric progression of frequencies, dimensionless, greater than 1.
            generator: generator for the directions. None means PyTorch's default generator.

        Raises:
            RopeError: head_dim is not a multiple of 4, or a number is out of range.
        """
        who = "LearnedRope.mixed"
        head_dim = _checks.integer(who, "head_dim", head_dim, at_least=4, at_most=_checks.MAX_HEAD_DIM)
        if head_dim % 4:
            must = "head_dim must be a multiple of 4, since each direction has half of the pairs"
            raise _checks.error(who, must, str(head_dim), "Rotate fewer channels, with LearnedRope(inv_freq, ...).")
        heads = _checks.integer(who, "heads", heads, at_least=1)
        base = _checks.number(who, "base", base, above=1.0)
        initializer = partial(_init_mixed, head_dim, heads, base)
        return cls._from_initializer(initializer, initializer(generator), pairing=pairing)

    @classmethod
    def projected(cls, head_dim: int, heads: int, *, pairing: Pairing, axes: int = 3) -> LearnedRope:
        """Start from frequencies of 0, as Mochi does: each head learns to project coordinates to angles.

        So nothing rotates before training. Source: `pos_frequencies` of `MochiTransformer3DModel` in diffusers 0.42.1,
        of shape `[3, heads, head_dim / 2]`, for (time, height, width). Mochi pairs neighbouring channels (pairing
        "interleaved").

        Args:
            head_dim: channels of a head, even.
            heads: number of heads.
            axes: number of coordinates of a position.

        Raises:
            RopeError: head_dim is odd, or a number is out of range.
        """
        who = "LearnedRope.projected"
        head_dim = _checks.integer(who, "head_dim", head_dim, at_least=2, at_most=_checks.MAX_HEAD_DIM)
        if head_dim % 2:
            fix = f"Pass {head_dim - 1} or {head_dim + 1}: channels rotate in pairs."
            raise _checks.error(who, "head_dim must be even", str(head_dim), fix)
        heads = _checks.integer(who, "heads", heads, at_least=1)
        axes = _checks.integer(who, "axes", axes, at_least=1)
        return cls._from_initializer(
            partial(torch.zeros, axes, heads, head_dim // 2, dtype=torch.float32), pairing=pairing
        )

    def forward(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Rotation:
        """Return the rotation of tokens at these positions.

        If positions or frequencies are DTensors, cos and sin are DTensors that are sharded like the positions. If only
        one of the two is a DTensor, the other must be equal on every rank. If the frequencies are then a plain tensor,
        the backward pass sums their gradient over the ranks.

        Args:
            positions: int32, int64, float32 or float64, on the device of the frequencies: `[axes, seq]` or `[axes,
                batch, seq]`. With one axis, `[seq]` or `[batch, seq]`, as for `Rope.at`.
            dtype: dtype of cos and sin, torch.float32 or torch.float64.

        Returns:
            A `Rotation`, with one table per head if each head has its own frequencies.

        Raises:
            RopeError: positions have a wrong type, shape, device or mesh, dtype is neither torch.float32 nor
                torch.float64, the frequencies were cast to a 16-bit dtype, or the device does not support float64.

        Precision:
            Angles are computed in float64, also under autocast; cos and sin are rounded once. Gradients are computed in
            float64 as well, and rounded once.
        """
        self._check(positions, dtype)
        inv_freq: Tensor = self.inv_freq
        if is_dtensor(positions) and not is_dtensor(inv_freq):
            inv_freq = replicate(inv_freq, positions.device_mesh)
        elif is_dtensor(inv_freq) and not is_dtensor(positions):
            positions = replicate(positions, inv_freq.device_mesh)
        coordinates, frequencies = positions.to(torch.float64), inv_freq.to(torch.float64)
        coordinates = coordinates.unsqueeze(0) if self.axes == 1 else coordinates
        if self.heads is not None:
            coordinates, frequencies = coordinates.unsqueeze(-2), frequencies.unsqueeze(-2)
        angle = coordinates[0].unsqueeze(-1) * frequencies[0]
        for axis in range(1, self.axes):
            angle = angle + coordinates[axis].unsqueeze(-1) * frequencies[axis]
        factor = self.attention_factor
        cos, sin = ((table * factor).to(dtype) for table in (angle.cos(), angle.sin()))
        return api.create_unchecked(
            *(cos, sin, self.pairing, self.head_dim, self.rotary_dim, self.rotary_offset, factor),
            self.heads is not None,
        )

    def _check(self, positions: Tensor, dtype: torch.dtype) -> None:
        if self.inv_freq.dtype not in _FLOATS:
            raise _checks.error(
                _WHO,
                "inv_freq must be float32 or float64",
                str(self.inv_freq.dtype),
                "Something cast and rounded it. With FSDP, call fully_shard on this module first, with its own policy. "
                "After load_state_dict(assign=True), load the frequencies again.",
            )
        if dtype not in _FLOATS:
            fix = "Pass one of them: q and k keep their own dtype in any case."
            raise _checks.error(_WHO, "dtype must be torch.float32 or torch.float64", _checks.shown(dtype), fix)
        shapes = "[seq] or [batch, seq]" if self.axes == 1 else f"[{self.axes}, seq] or [{self.axes}, batch, seq]"
        if not isinstance(positions, Tensor) or positions.dtype not in _POSITIONS:
            must = f"positions must be an int32, int64, float32 or float64 tensor {shapes}"
            raise _checks.error(_WHO, must, _checks.describe(positions), "Pass the position of each token.")
        if positions.ndim not in ((1, 2) if self.axes == 1 else (2, 3)) or (
            self.axes > 1 and positions.shape[0] != self.axes
        ):
            must = f"positions must have shape {shapes}"
            fix = "Pass one position per token." if self.axes == 1 else "The axes must come first."
            raise _checks.error(_WHO, must, f"shape {tuple(positions.shape)}", fix)
        if positions.device != self.inv_freq.device:
            must = f"positions must be on {self.inv_freq.device}, where the frequencies are"
            raise _checks.error(_WHO, must, str(positions.device), "Move the positions or the module.")
        if is_dtensor(positions) and is_dtensor(self.inv_freq) and positions.device_mesh != self.inv_freq.device_mesh:
            fix = "Distribute both over one mesh."
            raise _checks.error(_WHO, "positions must be on the mesh of the frequencies", "DTensors of two meshes", fix)
        if not has_float64(positions.device):
            raise _checks.error(
                _WHO, "the device must support float64", str(positions.device), "Use the CPU or another GPU."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedRope:
        """Apply `.to`, `.half`, `.cuda` and similar methods, but never cast the frequencies to 16 bits."""

        def apply_unless_16_bits(x: Tensor) -> Tensor:
            result = fn(x)
            return result if result.dtype in _FLOATS else x.to(result.device)

        super()._apply(apply_unless_16_bits, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Return the arguments that `print(model)` shows."""
        heads = "" if self.heads is None else f"heads={self.heads}, "
        return f"axes={self.axes}, {heads}pairs={self.rotary_dim // 2}, pairing={self.pairing!r}"


def _init_from_rope(rope: Rope, heads: int | None, dtype: torch.dtype) -> Tensor:
    """Return the initial frequencies of `LearnedRope.from_rope`."""
    inv_freq = torch.tensor(rope.inv_freq.tolist(), dtype=dtype).unsqueeze(0)
    if rope.axes is not None:
        is_axis_of_pair = torch.arange(rope.axes.count).unsqueeze(1) == torch.tensor(rope.axes.axis)
        inv_freq = inv_freq * is_axis_of_pair
    return inv_freq if heads is None else inv_freq.unsqueeze(1).repeat(1, heads, 1)


def _init_mixed(head_dim: int, heads: int, base: float, generator: torch.Generator | None = None) -> Tensor:
    """Return the initial frequencies of `LearnedRope.mixed`."""
    frequency = base ** (-torch.arange(0, head_dim, 4, dtype=torch.float64) / head_dim)
    device = None if generator is None else generator.device
    direction = 2 * math.pi * torch.rand(heads, 1, generator=generator, device=device, dtype=torch.float64)
    frequency = frequency.to(direction.device)
    x, y = frequency * direction.cos(), frequency * direction.sin()
    return torch.stack((torch.cat((x, -y), dim=-1), torch.cat((y, x), dim=-1))).float()
