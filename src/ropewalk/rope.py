"""Rope: how fast each pair of channels turns. A description made of plain numbers; it holds no tensor."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from ropewalk import _checks, _fixed_point
from ropewalk._layout import Numerics as Numerics
from ropewalk._layout import Pairing as Pairing
from ropewalk.axes import Axes, check_axes, frequencies
from ropewalk.schemes import Scaling, check_scaling

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

    from ropewalk.rotation.api import Rotation


@dataclass(frozen=True, repr=False)
class Rope:
    """What a model means by "rotary position embedding": which channels form pairs and how fast each pair turns.

    Frozen, hashable and compared by value. `base` and `pairing` have no default: a silent 10000 or a silent pairing
    is how models break.

    Args:
        head_dim: channels of a head.
        base: base of the geometric progression of frequencies, dimensionless, greater than 1. Called `rope_theta` in
            Hugging Face configs, `theta` in Meta's code, `freq_base` in llama.cpp.
        pairing: "half" pairs channel i with i + rotary_dim/2 (GPT-NeoX, Hugging Face's Llama); "interleaved" pairs 2i
            with 2i + 1 (GPT-J, Meta's Llama). Called `is_neox_style` (True is half) in vLLM, `traditional` (True is
            interleaved) in MLX.
        rotary_dim: channels that are rotated, even; all from `rotary_offset` on when None. The others pass unchanged.
            `dataclasses.replace` keeps the number that None became: to widen the head, replace both.
        rotary_offset: the first rotated channel (DeepSeek's MLA rotates the last 64 of 192: offset 128). For a tensor
            that is the rotated slice alone, use `dataclasses.replace(rope, head_dim=rope.rotary_dim,
            rotary_offset=0)`.
        scaling: a scheme of `ropewalk.schemes` that changes the frequencies for long contexts, or None.
        axes: which of several positions of a token each pair listens to, and its frequency there (images, video,
            multimodal text): an `Axes` of rotary_dim // 2 pairs. None: one position, one progression.

    Raises:
        RopeError: a value is impossible, or scaling returns no frequencies; the message says which and what to pass.

    Example:
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
    rotary_dim: int = cast(int, None)  # an int from __post_init__ on
    rotary_offset: int = 0
    scaling: Scaling | None = None
    axes: Axes | None = None

    # Worked out once in __post_init__: torch.compile can trace a tuple of numbers, but no NumPy and no cached_property.
    # None for a scheme that depends on the length.
    _attention_factor: float | None = field(init=False, compare=False)
    _inv_freq: tuple[float, ...] | None = field(init=False, compare=False)
    _steps: tuple[int, ...] | None = field(init=False, compare=False)
    _packed_steps: bytes = field(init=False, compare=False)  # the same as int64 numbers
    _packed_axis: bytes = field(init=False, compare=False)  # that of each pair

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
            cure=f"The rotated channels must lie inside head_dim={head_dim} from rotary_offset={offset} on.",
        )
        if rotary_dim % 2:
            raise _checks.error(
                "Rope",
                "rotary_dim must be even, since channels turn in pairs",
                str(rotary_dim),
                f"Pass rotary_dim={rotary_dim - 1} to leave the last channel unrotated.",
            )
        check_scaling("Rope", self.scaling)
        check_axes("Rope", self.axes, rotary_dim)
        for name, value in (
            ("head_dim", head_dim),
            ("base", base),
            ("rotary_offset", offset),
            ("rotary_dim", rotary_dim),
        ):
            object.__setattr__(self, name, value)
        self._precompute()

    def _precompute(self) -> None:
        known = frequencies(self.base, self.rotary_dim, self.scaling, self.axes)
        inv_freq, factor = (None, None) if known is None else known
        object.__setattr__(self, "_attention_factor", factor)
        object.__setattr__(self, "_inv_freq", inv_freq)
        steps = None if inv_freq is None else tuple(_fixed_point.step(w) for w in inv_freq)
        object.__setattr__(self, "_steps", steps)
        object.__setattr__(self, "_packed_steps", np.array(steps or (), dtype=np.int64).tobytes())
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
        """Multiplies cos and sin, dimensionless: YaRN, LongRoPE; else 1.0. Scores of q and k change by its square.

        Raises:
            RopeError: it depends on the length (use `at_length`).
        """
        if self._attention_factor is None:
            raise self._unresolved()
        return self._attention_factor

    @property
    def inv_freq(self) -> np.ndarray:
        """Speed of each pair in radians per position, scaling applied; a new float64 array of rotary_dim // 2.

        Raises:
            RopeError: it depends on the length (use `at_length`).
        """
        return np.array(self._frequencies(), dtype=np.float64)

    @property
    def wavelength(self) -> np.ndarray:
        """Tokens in a full turn of each pair, 2π / inv_freq; float64, rotary_dim // 2; inf for an idle pair.

        Raises:
            RopeError: it depends on the length (use `at_length`).
        """
        return np.array([2 * math.pi / w if w else math.inf for w in self._frequencies()], dtype=np.float64)

    @property
    def is_static(self) -> bool:
        """Whether the frequencies are known; else they depend on the length, and `at_length` resolves them."""
        return self._inv_freq is not None

    def at(
        self,
        positions: torch.Tensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        numerics: Numerics = "exact",
    ) -> Rotation:
        """The rotation of exactly these tokens. Make it once for each forward pass and hand it to every layer.

        Args:
            positions: place of each token, in tokens: int32 or int64, `[seq]` or `[batch, seq]`, any value in ±2³¹,
                negative too (beyond, the error grows by 1.7e-19 for each; nothing is checked, which would wait for a
                GPU, and nan gives nan). float32 or float64 for places between tokens (image grids). With `axes`: one
                row for each, `[axes, seq]` or `[axes, batch, seq]`. A DTensor gives DTensors sharded as it is.
            device: where cos and sin are made; that of positions when None.
            dtype: torch.float32 (when None) or torch.float64.
            numerics: "exact"; or, to reproduce a model bit for bit, "float32": the float32 frequencies of transformers
                and Meta, one float32 product, float32 cos and sin, which drift (positions beyond 2²⁴ are themselves
                rounded; dtype is float32); or "float32-frequencies": those frequencies taken as exact, no other drift.

        Returns:
            A `Rotation` with cos and sin of shape `positions.shape + (rotary_dim // 2,)`, without the axes, attention
            factor included.

        Raises:
            RopeError: positions are no tensor, or of another dtype or shape; dtype or device cannot be had; numerics is
                unknown, or a frequency is not finite in float32.

        Precision:
            Against the float64 `inv_freq` taken as exact: |error| of cos and sin ≤ 2⁻²⁵ + |p|·2π·2⁻⁶⁵ in float32 (times
            the attention factor; 2⁻²⁵ times the next power of two) at every integer position p; 1e-7 on devices without
            float64. Float positions go through a float64 product.
        """
        from ropewalk import angles

        axes = None if self.axes is None else self.axes.count
        factor = self.attention_factor
        tables = None
        if numerics == "exact":
            steps, axis = self._packed_steps, self._packed_axis
            tables = angles.fast_path(positions, steps, factor, device, dtype, axis, axes or 0)
        if tables is None:
            _checks.check_numerics("Rope.at", numerics)
            angles.check_positions(positions, axes)
            tables = self._cos_sin(positions, factor, device, dtype, numerics)
        return self._rotation(tables, factor)

    def tables(self, positions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of these positions in NumPy, for JAX, MLX and others. Imports no torch.

        Args:
            positions: place of each token, in tokens: an int, a list of them (nested for more axes), or an array of any
                shape and integer dtype, of NumPy or what NumPy can read (JAX); any value in ±2³¹, as in `at`. Places
                between tokens are refused: for those take `at`, or NumPy's cos and sin of `positions[..., None] *
                rope.inv_freq`, times `attention_factor`. With `axes`, the first axis is that of the rows, as in `at`.

        Returns:
            (cos, sin): two new float64 arrays of shape `positions.shape + (rotary_dim // 2,)`, without the axes,
            dimensionless, attention factor included.

        Raises:
            RopeError: positions are no integers, do not fit into int64, or have no row for each of `axes`; the
                frequencies depend on the length (use `at_length`).

        Precision:
            Against the float64 `inv_freq` taken as exact: |error| ≤ 4e-16 + |p|·2π·2⁻⁶⁵ (times the attention factor) at
            every integer position p. Bit for bit those of `at(positions, dtype=torch.float64)` where compiled kernels
            make them; the plain PyTorch reference rounds its angles, and differs by up to 1.5e-15 (times the factor).

        Example:
            >>> rope = Rope(head_dim=4, base=10_000.0, pairing="half")
            >>> cos, sin = rope.tables([0, 1, 131_072])
            >>> cos.shape
            (3, 2)
            >>> sin[1].round(4)
            array([0.8415, 0.01  ])
        """
        from ropewalk import _tables

        factor = self.attention_factor
        if self._steps is None:
            raise self._unresolved()
        count, axis = (None, None) if self.axes is None else (self.axes.count, self.axes.axis)
        return _tables.cos_sin(positions, self._steps, factor, axis, count)

    def shift(
        self,
        delta: int | tuple[int, ...] | torch.Tensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Rotation:
        """The rotation that moves keys already rotated by `delta` positions: no attention factor a second time.

        Args:
            delta: how far, in tokens, negative is back: an int (or an integer tensor `[]`) for all tokens, or an
                integer tensor `[seq]` or `[batch, seq]`. With `axes`, one for each: a tuple of ints, or a tensor
                `[axes]`, `[axes, seq]` or `[axes, batch, seq]`.
            device, dtype: as in `at`; an int delta is on the CPU when device is None.

        Returns:
            A `Rotation`; cos and sin have shape `delta.shape + (rotary_dim // 2,)`, without the axes; `(rotary_dim //
            2,)` for an int or a tuple.

        Raises:
            RopeError: delta is neither an int in ±2⁶³ nor a tensor of integers, or not one for each axis.

        Example:
            >>> import torch
            >>> rope = Rope(head_dim=4, base=10_000.0, pairing="half")
            >>> key = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
            >>> moved = rope.shift(-5)(rope.at(torch.tensor([7]))(key, layout="thd"), layout="thd")
            >>> torch.allclose(moved, rope.at(torch.tensor([2]))(key, layout="thd"))
            True
        """
        from ropewalk import angles

        moved = angles.delta_tensor(delta, device, None if self.axes is None else self.axes.count)
        return self._rotation(self._cos_sin(moved, 1.0, device, dtype), 1.0)

    def at_length(self, n: int) -> Rope:
        """The static rope for sequences of up to n tokens.

        Dynamic NTK and LongRoPE have other frequencies for longer sequences. Say once how long they will be, and use
        the result throughout: keys in a cache keep the rotation they were given. A static rope returns itself.

        Args:
            n: the longest sequence, in tokens, at least 1.

        Raises:
            RopeError: n is not such an integer.

        Example:
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
            raise self._unresolved()
        return self._inv_freq

    def _unresolved(self) -> _checks.RopeError:
        return _checks.error(
            "Rope",
            f"the length must be said, since the frequencies of {'' if self.scaling is None else self.scaling.label} "
            "depend on it",
            "a rope that is not resolved",
            "Use rope.at_length(n), once, with n the longest sequence you will run.",
        )

    def _cos_sin(
        self,
        positions: torch.Tensor,
        factor: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        numerics: Numerics = "exact",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from ropewalk import angles

        steps, inv_freq = self._steps, self._inv_freq
        if steps is None or inv_freq is None:
            raise self._unresolved()
        axis = None if self.axes is None else self.axes.axis
        if numerics != "exact":
            from ropewalk import _float32

            inv_freq, steps = _float32.frequencies(self.base, self.rotary_dim, self.scaling, self.axes)
        if numerics == "float32":
            return angles.in_float32(positions, inv_freq, factor, device=device, dtype=dtype, axis=axis)
        return angles.cos_sin(positions, steps, inv_freq, factor, device=device, dtype=dtype, axis=axis)

    def _rotation(self, tables: tuple[torch.Tensor, torch.Tensor], factor: float) -> Rotation:
        """The one place where frequencies, positions and the rotation meet."""
        from ropewalk.rotation import api

        cos, sin = tables
        return api.unchecked(cos, sin, self.pairing, self.head_dim, self.rotary_dim, self.rotary_offset, factor)
