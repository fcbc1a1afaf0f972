"""LearnedRope: frequencies that are trained, on one axis or several, for all heads or for each its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk._layout import Pairing
from ropewalk.rope import Rope
from ropewalk.rotation import api
from ropewalk.rotation.api import Rotation

_FLOATS = (torch.float32, torch.float64)
_POSITIONS = (torch.int32, torch.int64, *_FLOATS)
_WHO = "LearnedRope"


class LearnedRope(torch.nn.Module):
    """A module whose only parameter is the frequencies; called with positions, it gives their `Rotation`.

    The angle of a pair is the sum over the axes of position · frequency. Gradients reach the frequencies through cos
    and sin. Where each layer learns its own (RoPE-Mixed), each has a module of its own; where all share them (Mochi),
    call it once for each forward pass and hand the rotation to every layer.

    `.half()`, `.bfloat16()` and `.to(dtype)` leave the frequencies in their dtype, since 16 bits lose the angle: with
    the 8 bits of bfloat16, position 256 is off by up to half a radian. What casts them all the same (the mixed
    precision of FSDP, `load_state_dict(assign=True)` from a file in 16 bits) makes the next call an error.

    Args:
        inv_freq: the frequencies to begin with, in radians per position, which are copied: float32 or float64, `[axes,
            pairs]` for all heads, or `[axes, heads, pairs]`.
        pairing, head_dim, rotary_offset, attention_factor: as in `Rotation`.

    Attributes:
        inv_freq: the parameter, of that shape and dtype; `inv_freq` in `state_dict`, and nothing else is.
        axes: how many coordinates a position has.
        heads: how many heads have frequencies of their own; None where all have the same.

    Raises:
        RopeError: inv_freq is no such tensor, or a number does not fit.

    Example:
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
            raise _checks.error(_WHO, must, _checks.described(inv_freq), "For one axis, add it with unsqueeze(0).")
        if 0 in inv_freq.shape:
            must = "inv_freq must have an axis, a head and a pair at least"
            raise _checks.error(_WHO, must, f"shape {tuple(inv_freq.shape)}", "Pass the frequencies to begin with.")
        row = torch.zeros(inv_freq.shape[-1], device="cpu")
        # The numbers are those of a Rotation, which checks them.
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
        cls, begin: Callable[[], Tensor], inv_freq: Tensor | None = None, **numbers: Any
    ) -> LearnedRope:
        """With what `begin` gives, again at each `reset_parameters`; or with inv_freq, the first time."""
        made = cls(begin() if inv_freq is None else inv_freq, **numbers)
        made._initializer = begin
        return made

    def reset_parameters(self) -> None:
        """Give the frequencies what `from_rope`, `mixed` or `projected` began with, on the device where they are.

        For a module that was made on the meta device, after `to_empty`. `mixed` draws other directions, from PyTorch's
        own generator of the CPU.

        Raises:
            RopeError: the frequencies were passed as a tensor, which is not kept.
        """
        if self._initializer is None:
            must = "the module must come from from_rope, mixed or projected, which know how it begins"
            cure = "Copy the frequencies into inv_freq."
            raise _checks.error("LearnedRope.reset_parameters", must, "frequencies that were passed", cure)
        with torch.no_grad(), torch.device("cpu"):
            self.inv_freq.copy_(self._initializer())

    @classmethod
    def from_rope(cls, rope: Rope, *, heads: int | None = None, dtype: torch.dtype = torch.float32) -> LearnedRope:
        """From the frequencies of a rope; its attention factor, which is not learned, goes with it.

        Of a rope with axes, a pair begins with 0 for every axis but its own, and may learn to listen to all.

        Args:
            rope: static; one that depends on the length is resolved first, with `at_length`.
            heads: how many heads get frequencies of their own, all equal to begin with; None: all heads share them.
            dtype: of the frequencies. float32 rounds those of the rope, which moves the angle at position p by up to
                p · 3e-8 radians; float64 does not.

        Raises:
            RopeError: rope is no static Rope, or heads or dtype is something else.
        """
        who = "LearnedRope.from_rope"
        if not isinstance(rope, Rope):
            raise _checks.error(who, "rope must be a Rope", _checks.shown(rope), "Read one with from_config(...).rope.")
        if dtype not in _FLOATS:
            must = "dtype must be torch.float32 or torch.float64"
            raise _checks.error(who, must, _checks.shown(dtype), "q and k keep their own dtype.")
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
        """RoPE-Mixed: two axes, and for each head two directions of the plane, which are at right angles.

        The first half of the pairs turns along one of them and the second along the other, with the speeds base^(−4i /
        head_dim). The direction of each head is drawn at random. A position is (x, y), in patches; whatever does not
        rotate, such as a class token, stands at (0, 0).

        Source: Heo et al. 2024, arXiv:2403.13298; `init_random_2d_freqs` in naver-ai/rope-vit, which pairs neighbours:
        pairing "interleaved".

        Args:
            head_dim: channels of a head, a multiple of 4.
            heads: how many heads there are.
            base: of the geometric progression of speeds, dimensionless, greater than 1.
            generator: what the directions are drawn from; PyTorch's own when None.

        Raises:
            RopeError: a number does not fit.
        """
        who = "LearnedRope.mixed"
        head_dim = _checks.integer(who, "head_dim", head_dim, at_least=4, at_most=_checks.MAX_HEAD_DIM)
        if head_dim % 4:
            must = "head_dim must be a multiple of 4, since half of the pairs go along each direction"
            raise _checks.error(who, must, str(head_dim), "Rotate fewer channels, with LearnedRope(inv_freq, ...).")
        heads = _checks.integer(who, "heads", heads, at_least=1)
        base = _checks.number(who, "base", base, above=1.0)
        begin = partial(_init_mixed, head_dim, heads, base)
        return cls._from_initializer(begin, begin(generator), pairing=pairing)

    @classmethod
    def projected(cls, head_dim: int, heads: int, *, pairing: Pairing, axes: int = 3) -> LearnedRope:
        """Mochi's learned projection of coordinates to angles, for each head. All begins at 0: nothing rotates.

        Source: `pos_frequencies` of `MochiTransformer3DModel` in diffusers 0.42.1, `[3, heads, head_dim / 2]`, for
        (time, height, width); it pairs neighbours: pairing "interleaved".

        Args:
            head_dim: channels of a head, even.
            heads: how many heads there are.
            axes: coordinates of a position.

        Raises:
            RopeError: a number does not fit.
        """
        who = "LearnedRope.projected"
        head_dim = _checks.integer(who, "head_dim", head_dim, at_least=2, at_most=_checks.MAX_HEAD_DIM)
        if head_dim % 2:
            raise _checks.error(who, "head_dim must be even", str(head_dim), "Channels rotate in pairs.")
        heads = _checks.integer(who, "heads", heads, at_least=1)
        axes = _checks.integer(who, "axes", axes, at_least=1)
        return cls._from_initializer(
            partial(torch.zeros, axes, heads, head_dim // 2, dtype=torch.float32), pairing=pairing
        )

    def forward(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Rotation:
        """The rotation of exactly these tokens.

        Args:
            positions: int32, int64, float32 or float64, on the device of the frequencies. `[axes, seq]` or `[axes,
                batch, seq]`; for one axis `[seq]` or `[batch, seq]`, as for `Rope.at`.
            dtype: of cos and sin, torch.float32 or torch.float64.

        Returns:
            A `Rotation`; with cos and sin of each head where the frequencies are.

        Raises:
            RopeError: positions do not fit, the frequencies were cast, or the device has no float64.

        Precision:
            angles in float64, also under autocast, rounded once as cos and sin; gradients come back the same way.
        """
        self._check(positions, dtype)
        places, speeds = positions.to(torch.float64), self.inv_freq.to(torch.float64)
        places = places.unsqueeze(0) if self.axes == 1 else places
        if self.heads is not None:
            places, speeds = places.unsqueeze(-2), speeds.unsqueeze(-2)
        angle = places[0].unsqueeze(-1) * speeds[0]
        for axis in range(1, self.axes):
            angle = angle + places[axis].unsqueeze(-1) * speeds[axis]
        factor = self.attention_factor
        cos, sin = ((table * factor).to(dtype) for table in (angle.cos(), angle.sin()))
        return api.unchecked(
            *(cos, sin, self.pairing, self.head_dim, self.rotary_dim, self.rotary_offset, factor),
            self.heads is not None,
        )

    def _check(self, positions: Tensor, dtype: torch.dtype) -> None:
        if self.inv_freq.dtype not in _FLOATS:
            raise _checks.error(
                _WHO,
                "inv_freq must be float32 or float64",
                str(self.inv_freq.dtype),
                "Something cast and rounded it. With FSDP, fully_shard this module first, with a policy of its own; "
                "after load_state_dict(assign=True), load the frequencies again.",
            )
        if dtype not in _FLOATS:
            must, cure = "dtype must be torch.float32 or torch.float64", "q and k keep their own dtype."
            raise _checks.error(_WHO, must, _checks.shown(dtype), cure)
        shapes = "[seq] or [batch, seq]" if self.axes == 1 else f"[{self.axes}, seq] or [{self.axes}, batch, seq]"
        if not isinstance(positions, Tensor) or positions.dtype not in _POSITIONS:
            must = f"positions must be an int32, int64, float32 or float64 tensor {shapes}"
            raise _checks.error(_WHO, must, _checks.described(positions), "Pass where each token is on each axis.")
        if positions.ndim not in ((1, 2) if self.axes == 1 else (2, 3)) or (
            self.axes > 1 and positions.shape[0] != self.axes
        ):
            must = f"positions must have shape {shapes}"
            raise _checks.error(_WHO, must, f"shape {tuple(positions.shape)}", "The axes stand first.")
        if positions.device != self.inv_freq.device:
            must = f"positions must be on {self.inv_freq.device}, where the frequencies are"
            raise _checks.error(_WHO, must, str(positions.device), "Move the positions, or the module.")
        if positions.device.type == "mps":
            raise _checks.error(_WHO, "the device must have float64", "mps", "Use the CPU or another GPU.")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedRope:
        """What `.to`, `.half`, `.cuda` and the others call: it moves the frequencies, and never makes them 16 bits."""

        def moved(x: Tensor) -> Tensor:
            made = fn(x)
            return made if made.dtype in _FLOATS else x.to(made.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        heads = "" if self.heads is None else f"heads={self.heads}, "
        return f"axes={self.axes}, {heads}pairs={self.rotary_dim // 2}, pairing={self.pairing!r}"


def _init_from_rope(rope: Rope, heads: int | None, dtype: torch.dtype) -> Tensor:
    """What `LearnedRope.from_rope` begins with."""
    inv_freq = torch.tensor(rope.inv_freq.tolist(), dtype=dtype).unsqueeze(0)
    if rope.axes is not None:
        own = torch.arange(rope.axes.count).unsqueeze(1) == torch.tensor(rope.axes.axis)
        inv_freq = inv_freq * own
    return inv_freq if heads is None else inv_freq.unsqueeze(1).repeat(1, heads, 1)


def _init_mixed(head_dim: int, heads: int, base: float, generator: torch.Generator | None = None) -> Tensor:
    """What `LearnedRope.mixed` begins with."""
    speed = base ** (-torch.arange(0, head_dim, 4, dtype=torch.float64) / head_dim)
    device = None if generator is None else generator.device
    direction = 2 * math.pi * torch.rand(heads, 1, generator=generator, device=device, dtype=torch.float64)
    speed = speed.to(direction.device)
    x, y = speed * direction.cos(), speed * direction.sin()
    return torch.stack((torch.cat((x, -y), dim=-1), torch.cat((y, x), dim=-1))).float()
