"""Rope: which channels a model rotates, and at which frequencies, described by plain numbers."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ropewalk import _checks
from ropewalk._layout import Numerics as Numerics
from ropewalk._layout import Pairing as Pairing
from ropewalk.angles import fixed_point
from ropewalk.rope import _torch
from ropewalk.rope.axes import Axes, check_axes, frequencies
from ropewalk.schemes import Scaling, check_scaling

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

    from ropewalk.rotation.api import Rotation


@dataclass(frozen=True, repr=False)
class Rope:
    """The rotary position embedding of a model: which channels form pairs, and the frequency of each pair.

    Frozen, hashable and compared by value. `base` and `pairing` have no default, because a wrong default of either
    breaks models silently.

    Args:
        head_dim: channels of a head.
        base: base of the geometric progression of frequencies, dimensionless, greater than 1. Called `rope_theta` in
            Hugging Face configs, `theta` in Meta's code, `freq_base` in llama.cpp.
        pairing: "half" pairs channel i with i + rotary_dim/2 (GPT-NeoX, Hugging Face's Llama); "interleaved" pairs 2i
            with 2i + 1 (GPT-J, Meta's Llama). Called `is_neox_style` (True is half) in vLLM, `traditional` (True is
            interleaved) in MLX.
        rotary_dim: number of rotated channels, even. None means all channels from `rotary_offset` on. None is resolved
            at construction, so when changing `head_dim` with `dataclasses.replace`, pass `rotary_dim` as well.
        rotary_offset: the first rotated channel (DeepSeek's MLA rotates the last 64 of 192: offset 128). To rotate a
            tensor that holds only the rotated slice, use `dataclasses.replace(rope, head_dim=rope.rotary_dim,
            rotary_offset=0)`.
        scaling: a scheme of `ropewalk.schemes` that changes the frequencies for long contexts, or None.
        axes: for tokens with several positions (images, video, multimodal text), the position that each pair uses and
            its frequency, as an `Axes` of rotary_dim // 2 pairs. None means that each token has one position, and that
            the frequencies of all pairs form one geometric progression.

    Raises:
        RopeError: a value is invalid, or scaling returns no frequencies.

    Examples:
        >>> rope = Rope(head_dim=4, base=10_000.0, pairing="half")
        >>> rope
        Rope(head_dim=4, base=10000.0, pairing='half')
        >>> rope.inv_freq
        array([1.  , 0.01])
    """

    head_dim: int
    base: float
    pairing: Pairing
    _: KW_ONLY
    if not TYPE_CHECKING:
        rotary_dim: int | None = None
    else:  # from __post_init__ on
        rotary_dim: int = 0
    rotary_offset: int = 0
    scaling: Scaling | None = None
    axes: Axes | None = None

    # Computed once in __post_init__: torch.compile can trace a tuple of numbers, but neither NumPy nor cached_property.
    # The first three are None if the scheme depends on the length.
    _attention_factor: float | None = field(init=False, compare=False)
    _inv_freq: tuple[float, ...] | None = field(init=False, compare=False)
    _phase_steps: tuple[int, ...] | None = field(init=False, compare=False)
    _packed_phase_steps: bytes = field(init=False, compare=False)  # _phase_steps as int64 numbers
    _packed_axis: bytes = field(init=False, compare=False)  # the axis of each pair as int64 numbers

    def __post_init__(self) -> None:
        head_dim = _checks.integer("Rope", "head_dim", self.head_dim, at_least=2, at_most=_checks.MAX_HEAD_DIM)
        base = _checks.number("Rope", "base", self.base, above=1.0)
        _checks.check_pairing("Rope", self.pairing)
        offset = _checks.integer("Rope", "rotary_offset", self.rotary_offset, at_least=0, at_most=head_dim - 2)
        rotary_dim = head_dim - offset if self.rotary_dim is None else self.rotary_dim
        rotary_dim = _checks.integer(
            "Rope",
            "rotary_dim",
            rotary_dim,
            at_least=2,
            at_most=head_dim - offset,
            fix=f"The rotated channels start at rotary_offset={offset} and must fit into head_dim={head_dim}.",
        )
        if rotary_dim % 2:
            fits, up = rotary_dim < head_dim - offset, rotary_dim + 1
            more = f", or rotary_dim={up} and base ** ({up} / {rotary_dim}), as GPT-NeoX does in transformers" * fits
            raise _checks.error(
                "Rope",
                "rotary_dim must be even, since channels rotate in pairs",
                str(rotary_dim),
                f"Pass rotary_dim={rotary_dim - 1} to leave the last channel unrotated{more}.",
            )
        check_scaling("Rope", self.scaling)
        check_axes("Rope", self.axes, rotary_dim)
        checked = {"head_dim": head_dim, "base": base, "rotary_offset": offset, "rotary_dim": rotary_dim}
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._precompute()

    def _precompute(self) -> None:
        resolved = frequencies(self.base, self.rotary_dim, self.scaling, self.axes)
        inv_freq, factor = (None, None) if resolved is None else resolved
        object.__setattr__(self, "_attention_factor", factor)
        object.__setattr__(self, "_inv_freq", inv_freq)
        phase_steps = None if inv_freq is None else tuple(fixed_point.phase_step(w) for w in inv_freq)
        object.__setattr__(self, "_phase_steps", phase_steps)
        object.__setattr__(self, "_packed_phase_steps", np.array(phase_steps or (), dtype=np.int64).tobytes())
        axis = () if self.axes is None else self.axes.axis
        object.__setattr__(self, "_packed_axis", np.array(axis, dtype=np.int64).tobytes())

    def __repr__(self) -> str:
        parts = [f"head_dim={self.head_dim}", f"base={self.base!r}", f"pairing={self.pairing!r}"]
        if self.rotary_dim != self.head_dim - self.rotary_offset:
            parts.append(f"rotary_dim={self.rotary_dim}")
        if self.rotary_offset:
            parts.append(f"rotary_offset={self.rotary_offset}")
        if self.scaling is not None:
            parts.append(f"scaling={self.scaling!r}")
        if self.axes is not None:
            parts.append(f"axes={self.axes!r}")
        return f"Rope({', '.join(parts)})"

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin, dimensionless: 1.0 unless the scheme sets it. Scores scale by its square.

        Raises:
            RopeError: the factor depends on the length (use `at_length`).
        """
        if self._attention_factor is None:
            raise self._unresolved_error()
        return self._attention_factor

    @property
    def inv_freq(self) -> np.ndarray:
        """The frequency of each pair in radians per position, scaling included; a new float64 `[rotary_dim // 2]`.

        Raises:
            RopeError: the frequencies depend on the length (use `at_length`).
        """
        return np.array(self._frequencies(), dtype=np.float64)

    @property
    def wavelength(self) -> np.ndarray:
        """The wavelength of each pair in tokens, 2π / |inv_freq|: float64 `[rotary_dim // 2]`; inf if inv_freq is 0.

        Raises:
            RopeError: the frequencies depend on the length (use `at_length`).
        """
        return np.array([2 * math.pi / abs(w) if w else math.inf for w in self._frequencies()], dtype=np.float64)

    @property
    def is_static(self) -> bool:
        """Whether the frequencies are fixed. If not, they depend on the length, and `at_length` resolves them."""
        return self._inv_freq is not None

    def at(
        self,
        positions: torch.Tensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        numerics: Numerics = "exact",
    ) -> Rotation:
        """Return the rotation of tokens at these positions. Call this once per forward pass for all layers.

        Args:
            positions: position of each token, `[seq]` or `[batch, seq]`. Pass int32 or int64 for positions in tokens,
                and float32 or float64 for fractional positions, as in image grids. With `axes`, pass one row per axis:
                `[axes, seq]` or `[axes, batch, seq]`. The precision below holds for integers in ±2³¹. Beyond that
                range, the error grows by 1.7e-19 per position. Values are not validated, because reading them would
                synchronize with the GPU; nan gives nan. For DTensor positions, cos and sin are DTensors with the same
                placements.
            device: device of cos and sin. None means the device of positions.
            dtype: torch.float32 (the default) or torch.float64.
            numerics: "exact" (the default), or one of two ways to reproduce the angles of deployed models.
                "float32" reproduces the code of transformers bit for bit on the same CPU, and the angles of Meta's:
                float32 frequencies, one float32 product, and float32 cos and sin. The error of these angles grows with
                the position. Positions beyond 2²⁴ are rounded, and dtype must be torch.float32.
                "float32-frequencies" uses the float32 frequencies of that code, and computes their angles exactly.
                Under torch.compile, these two need PyTorch 2.12 or newer.

        Returns:
            A `Rotation` with cos and sin of shape `positions.shape + (rotary_dim // 2,)`, including the attention
            factor. With `axes`, the first axis of positions is dropped.

        Raises:
            RopeError: positions have an unsupported type, dtype or shape; dtype, device or numerics is not supported; a
                frequency is not finite in float32; or the frequencies depend on the length (use `at_length`).

        Precision:
            Taking the float64 `inv_freq` as exact, |error| of cos and sin ≤ 2⁻²⁵ + |p|·2π·2⁻⁶⁵ in float32 at every
            integer position p (both terms times the attention factor, the first with the factor rounded up to a power
            of two), or 1e-7 on devices without float64. Angles of fractional positions are float64 products.
        """
        axes = None if self.axes is None else self.axes.count
        factor = self.attention_factor
        tables = None
        if numerics == "exact":
            phase_steps, axis = self._packed_phase_steps, self._packed_axis
            tables = _torch.exact.fast_path(positions, phase_steps, factor, device, dtype, axis, axes or 0)
        if tables is None:
            _checks.check_numerics("Rope.at", numerics)
            _torch.exact.check_positions(positions, axes)
            tables = self._cos_sin(positions, factor, device, dtype, numerics)
        return self._rotation(tables, factor)

    def tables(self, positions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin of these positions as NumPy arrays, for JAX, MLX and others. torch is not imported.

        Args:
            positions: position of each token: an int, a (nested) list of ints, or an integer array of any shape that
                NumPy can read (NumPy, JAX). Values are in ±2³¹, as in `at`. With `axes`, the first axis of the array
                has one row per axis. Fractional positions are rejected: use `at`, or NumPy's cos and sin of
                `positions[..., None] * rope.inv_freq`, times `attention_factor`.

        Returns:
            (cos, sin): two new float64 arrays of shape `positions.shape + (rotary_dim // 2,)`, dimensionless, including
            the attention factor. With `axes`, the first axis of positions is dropped.

        Raises:
            RopeError: positions are not integers, do not fit into int64, or do not have one row per axis; or the
                frequencies depend on the length (use `at_length`).

        Precision:
            Taking the float64 `inv_freq` as exact, |error| ≤ 4e-16 + |p|·2π·2⁻⁶⁵ (times the attention factor) at every
            integer position p. The compiled kernels give the same bits for `at(positions, dtype=torch.float64)`. The
            plain PyTorch reference rounds its angles, and differs by up to 1.5e-15 (times the factor).

        Examples:
            >>> rope = Rope(head_dim=4, base=10_000.0, pairing="half")
            >>> cos, sin = rope.tables([0, 1, 131_072])
            >>> cos.shape
            (3, 2)
            >>> sin[1].round(4)
            array([0.8415, 0.01  ])
        """
        from ropewalk.angles import numpy

        factor = self.attention_factor
        if self._phase_steps is None:
            raise self._unresolved_error()
        count, axis = (None, None) if self.axes is None else (self.axes.count, self.axes.axis)
        return numpy.cos_sin(positions, self._phase_steps, factor, axis, count)

    def shift(
        self,
        delta: int | tuple[int, ...] | torch.Tensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Rotation:
        """Return the rotation, without the attention factor, that moves already rotated keys by `delta` positions.

        Args:
            delta: number of tokens, negative for earlier positions: an int (or an integer tensor `[]`) for all tokens,
                or an integer tensor `[seq]` or `[batch, seq]`. With `axes`, one value per axis: a tuple of ints, or a
                tensor `[axes]`, `[axes, seq]` or `[axes, batch, seq]`.
            device, dtype: as in `at`. For an int, the default device is the CPU.

        Returns:
            A `Rotation` with cos and sin of shape `delta.shape + (rotary_dim // 2,)`; with `axes`, the first axis of
            delta is dropped. For an int or a tuple, the shape is `(rotary_dim // 2,)`.

        Raises:
            RopeError: delta is not an int in ±2⁶³ or an integer tensor (one value per axis), or the rope is not static.

        Examples:
            >>> import torch
            >>> rope = Rope(head_dim=4, base=10_000.0, pairing="half")
            >>> key = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
            >>> moved = rope.shift(-5)(rope.at(torch.tensor([7]))(key, layout="thd"), layout="thd")
            >>> torch.allclose(moved, rope.at(torch.tensor([2]))(key, layout="thd"))
            True
        """
        shifts = _torch.exact.delta_tensor(delta, device, None if self.axes is None else self.axes.count)
        return self._rotation(self._cos_sin(shifts, 1.0, device, dtype), 1.0)

    def at_length(self, n: int) -> Rope:
        """Return the static rope for sequences of up to n tokens. A static rope returns itself.

        Dynamic NTK and LongRoPE change the frequencies beyond the trained length. Resolve them once for the longest
        sequence, because cached keys keep the rotation with which they were stored.

        Args:
            n: length of the longest sequence, in tokens, at least 1.

        Raises:
            RopeError: n is not an integer of at least 1.

        Examples:
            >>> from ropewalk import DynamicNTK
            >>> rope = Rope(head_dim=8, base=10_000.0, pairing="half", scaling=DynamicNTK(2.0, 4096))
            >>> rope.at_length(4096)
            Rope(head_dim=8, base=10000.0, pairing='half')
            >>> rope.at_length(8192)
            Rope(head_dim=8, base=10000.0, pairing='half', scaling=NTK(alpha=3.0))
        """
        n = _checks.length("Rope.at_length", "n", n)
        return self if self.scaling is None or self.is_static else replace(self, scaling=self.scaling.at_length(n))

    def _frequencies(self) -> tuple[float, ...]:
        if self._inv_freq is None:
            raise self._unresolved_error()
        return self._inv_freq

    def _unresolved_error(self) -> _checks.RopeError:
        label = "" if self.scaling is None else self.scaling.label
        return _checks.error(
            "Rope",
            f"the length must be resolved, because the frequencies of {label} depend on it",
            "an unresolved rope",
            "Call rope.at_length(n) once, with n the length of the longest sequence.",
        )

    def _cos_sin(
        self,
        positions: torch.Tensor,
        factor: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        numerics: Numerics = "exact",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from ropewalk.angles import exact
        from ropewalk.rotation import placements

        if placements.is_dtensor(positions):
            of_shard = partial(self._cos_sin, factor=factor, device=None, dtype=dtype, numerics=numerics)
            return placements.tables_of_shards(positions, device, of_shard, has_axes=self.axes is not None)
        phase_steps, inv_freq = self._phase_steps, self._inv_freq
        if phase_steps is None or inv_freq is None:
            raise self._unresolved_error()
        axis = None if self.axes is None else self.axes.axis
        if numerics != "exact":
            from ropewalk.rope import float32

            inv_freq, phase_steps = float32.frequencies(self.base, self.rotary_dim, self.scaling, self.axes)
        if numerics == "float32":
            return exact.cos_sin_as_deployed(positions, inv_freq, factor, device=device, dtype=dtype, axis=axis)
        return exact.cos_sin(positions, phase_steps, inv_freq, factor, device=device, dtype=dtype, axis=axis)

    def _rotation(self, tables: tuple[torch.Tensor, torch.Tensor], factor: float) -> Rotation:
        """Create a Rotation from cos, sin, the attention factor that they include, and the fields of this rope."""
        cos, sin = tables
        return _torch.api.create_unchecked(
            cos, sin, self.pairing, self.head_dim, self.rotary_dim, self.rotary_offset, factor, False
        )
