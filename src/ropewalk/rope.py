"""Rope: how fast each pair of channels turns. A description made of plain numbers; it holds no tensor."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from ropewalk import _checks, _fixed_point
from ropewalk.schemes import Scheme, default

if TYPE_CHECKING:
    import torch

    from ropewalk.rotation.api import Rotation

Pairing = Literal["half", "interleaved"]
PAIRINGS = ("half", "interleaved")

# Far above any model (the widest known head has 512 channels); it keeps a corrupt config from filling the memory.
_MAX_HEAD_DIM = 65_536


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
        rotary_offset: the first rotated channel (DeepSeek's MLA rotates the last 64 of 192: offset 128). For a tensor
            that is the rotated slice alone, use `dataclasses.replace(rope, head_dim=rope.rotary_dim,
            rotary_offset=0)`.
        scaling: a scheme of `ropewalk.schemes` that changes the frequencies for long contexts, or None.

    Raises:
        RopeError: a value is impossible; the message says which and what to pass.

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
    scaling: Scheme | None = None

    # Worked out once in __post_init__: torch.compile can trace a tuple of numbers, but no NumPy and no cached_property.
    attention_factor: float = field(init=False, compare=False)
    """Multiplies cos and sin, dimensionless: YaRN's temperature, else 1.0. Scores of q and k change by its square."""
    _inv_freq: tuple[float, ...] = field(init=False, compare=False)
    _steps: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        head_dim = _checks.integer("Rope", "head_dim", self.head_dim, at_least=2, at_most=_MAX_HEAD_DIM)
        base = _checks.number("Rope", "base", self.base, above=1.0)
        _checks.choice("Rope", "pairing", self.pairing, PAIRINGS)
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
        if self.scaling is not None and not isinstance(self.scaling, Scheme):
            raise _checks.error(
                "Rope",
                "scaling must be a scheme of ropewalk.schemes or None",
                _checks.shown(self.scaling),
                "Build one, e.g. Llama3(...), or read a config with from_config.",
            )
        scheme = self.scaling
        inv_freq = default.inv_freq(base, rotary_dim) if scheme is None else scheme.inv_freq(base, rotary_dim)
        for name, value in (
            ("head_dim", head_dim),
            ("base", base),
            ("rotary_offset", offset),
            ("rotary_dim", rotary_dim),
            ("attention_factor", 1.0 if scheme is None else scheme.table_factor()),
            ("_inv_freq", inv_freq),
            ("_steps", tuple(_fixed_point.step(w) for w in inv_freq)),
        ):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        parts = [f"head_dim={self.head_dim}", f"base={self.base!r}", f"pairing={self.pairing!r}"]
        if self.rotary_dim != self.head_dim - self.rotary_offset:
            parts.append(f"rotary_dim={self.rotary_dim}")
        if self.rotary_offset:
            parts.append(f"rotary_offset={self.rotary_offset}")
        if self.scaling is not None:
            parts.append(f"scaling={self.scaling!r}")
        return f"Rope({', '.join(parts)})"

    @property
    def inv_freq(self) -> np.ndarray:
        """Speed of each pair in radians per position, scaling applied; a new float64 array of rotary_dim // 2."""
        return np.array(self._inv_freq, dtype=np.float64)

    @property
    def wavelength(self) -> np.ndarray:
        """Tokens in a full turn of each pair, 2π / inv_freq; float64, rotary_dim // 2; inf for an idle pair."""
        return np.array([2 * math.pi / w if w else math.inf for w in self._inv_freq], dtype=np.float64)

    def at(
        self,
        positions: torch.Tensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Rotation:
        """The rotation of exactly these tokens. Make it once for each forward pass and hand it to every layer.

        Args:
            positions: place of each token, in tokens: int32 or int64, `[seq]` or `[batch, seq]`, any value in ±2³¹,
                negative too. float32 or float64 for places between tokens (image grids).
            device: where cos and sin are made; that of positions when None.
            dtype: torch.float32 (when None) or torch.float64.

        Returns:
            A `Rotation` with cos and sin of shape `positions.shape + (rotary_dim // 2,)`, attention factor included.

        Raises:
            RopeError: positions are no tensor, or of another dtype or shape; dtype or device cannot be had.

        Precision:
            Against the float64 `inv_freq` taken as exact: |error| of cos and sin ≤ 2⁻²⁵ + |p|·2π·2⁻⁶⁵ in float32 (times
            the attention factor) at every integer position p; 1e-7 on devices without float64. Float positions go
            through a float64 product.
        """
        from ropewalk import angles

        angles.check_positions(positions)
        return self._rotation(positions, self.attention_factor, device, dtype)

    def shift(
        self,
        delta: int | torch.Tensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Rotation:
        """The rotation that moves keys already rotated by `delta` positions: no attention factor a second time.

        Args:
            delta: how far, in tokens, negative is back: an int for all tokens, or an integer tensor `[seq]` or
                `[batch, seq]`.
            device, dtype: as in `at`; an int delta is on the CPU when device is None.

        Returns:
            A `Rotation`; cos and sin have shape `delta.shape + (rotary_dim // 2,)`, `(rotary_dim // 2,)` for an int.

        Raises:
            RopeError: delta is neither an int in ±2⁶³ nor a tensor of integers.

        Example:
            >>> import torch
            >>> rope = Rope(head_dim=4, base=10_000.0, pairing="half")
            >>> key = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
            >>> moved = rope.shift(-5)(rope.at(torch.tensor([7]))(key, layout="thd"), layout="thd")
            >>> torch.allclose(moved, rope.at(torch.tensor([2]))(key, layout="thd"))
            True
        """
        from ropewalk import angles

        return self._rotation(angles.delta_tensor(delta, device), 1.0, device, dtype)

    def at_length(self, n: int) -> Rope:
        """The static rope for sequences of up to n tokens. Every scheme here is static, so this rope itself.

        Raises:
            RopeError: n is not an integer of at least 1.
        """
        _checks.integer("Rope.at_length", "n", n, at_least=1)
        return self

    def _rotation(
        self,
        positions: torch.Tensor,
        factor: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> Rotation:
        """The one place where frequencies, positions and the rotation meet."""
        from ropewalk import angles
        from ropewalk.rotation.api import Rotation

        cos, sin = angles.cos_sin(positions, self._steps, self._inv_freq, factor, device=device, dtype=dtype)
        return Rotation(
            cos,
            sin,
            pairing=self.pairing,
            head_dim=self.head_dim,
            rotary_offset=self.rotary_offset,
            attention_factor=factor,
        )
