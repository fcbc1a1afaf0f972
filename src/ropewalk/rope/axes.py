"""Axes: the coordinate of a token that each pair of channels uses, and the frequency of the pair.

A patch of an image has a row and a column; a patch of a video also has a frame. Each pair of channels rotates by one of
these positions: its angle is its frequency times the position on its axis. The frequencies form geometric progressions.
Models differ in the axis of each pair, and in whether one progression runs over all pairs of the head (M-RoPE) or each
axis has a progression of its own (axial).

The rotation itself does not depend on the axes: once cos and sin are computed, every rope rotates in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ropewalk import _checks
from ropewalk.schemes import Scaling, default
from ropewalk.schemes import frequencies as of_scheme

_MAX_PAIRS = _checks.MAX_HEAD_DIM // 2
_MAX_AXES = 64  # far above any model: known ones have two to four
_WHO = "Axes"


@dataclass(frozen=True, repr=False)
class Axes:
    """The axis of each pair, and its index in a geometric progression of frequencies.

    Use one of the constructors below for a known pattern, or pass the lists themselves. The object is frozen, hashable
    and compared by value. Pairs are in the order of the head, and axes in the order of positions in `Rope.at`.

    Args:
        axis: the axis of each pair, counted from 0.
        freq_index: the index of each pair in its progression, counted from 0, which has the highest frequency. None
            means the index of the pair in the head.
        lengths: for each axis, the number of pairs in its progression. None means the number of all pairs for every
            axis. A pair rotates by base^(−freq_index / length) radians per position.

    Raises:
        RopeError: a number is out of range, or the lists do not match.

    Examples:
        >>> Axes.sections((2, 1, 1)).axis
        (0, 0, 1, 2)
        >>> Axes([0, 0, 1, 2]) == Axes.sections((2, 1, 1))
        True
    """

    axis: tuple[int, ...]
    if not TYPE_CHECKING:
        freq_index: tuple[int, ...] | None = None
        lengths: tuple[int, ...] | None = None
    else:  # from __post_init__ on
        freq_index: tuple[int, ...] = ()
        lengths: tuple[int, ...] = ()
    _name: str | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        axis = _as_integers("axis", self.axis, at_most=_MAX_AXES - 1)
        pairs = len(axis)
        lengths = (pairs,) * (max(axis) + 1) if self.lengths is None else self.lengths
        lengths = _as_integers("lengths", lengths, at_least=1, at_most=_MAX_PAIRS, max_length=_MAX_AXES)
        index = tuple(range(pairs)) if self.freq_index is None else self.freq_index
        index = _as_integers("freq_index", index, at_most=_MAX_PAIRS - 1)
        if len(index) != pairs:
            raise _checks.error(
                _WHO,
                "freq_index must have one number per pair",
                f"{len(index)} for {pairs} pairs",
                "Pass lists of the same length.",
            )
        for pair, (a, i) in enumerate(zip(axis, index, strict=True)):
            if a >= len(lengths) or i >= lengths[a]:
                raise _checks.error(
                    _WHO,
                    "lengths must contain the axis of each pair, and freq_index must be less than that length",
                    f"axis {a} and freq_index {i} for pair {pair}, and lengths {_checks.shown(lengths)}",
                    "Count axes and indices from 0.",
                )
        for name, value in (("axis", axis), ("freq_index", index), ("lengths", lengths)):
            object.__setattr__(self, name, value)

    @classmethod
    def sections(cls, sections: Sequence[int]) -> Axes:
        """Create M-RoPE with contiguous sections: the first pairs use axis 0, the next ones axis 1, and so on.

        One progression runs over all pairs. Source: Wang et al. 2024, "Qwen2-VL", arXiv:2409.12191, section 2.1
        (`mrope_section` [16, 24, 24] for time, height, width). GLM-4V, PaddleOCR-VL, llama.cpp's mode MROPE, and
        Hunyuan (`xdrope_section`) in vLLM use this pattern as well. In transformers, the two channels of a pair of
        Hunyuan use different axes. That is not a rotation, and no `Axes` describes it.

        Args:
            sections: number of pairs of each axis; 0 for an unused axis.

        Raises:
            RopeError: sections is not a list of integers ≥ 0, or their sum is 0 or too large.
        """
        sizes = _parse_sections("sections", sections)
        axis = tuple(a for a, size in enumerate(sizes) for _ in range(size))
        return cls(axis, lengths=(len(axis),) * len(sizes))._with_name(f"sections({sizes})")

    @classmethod
    def interleaved(cls, sections: Sequence[int]) -> Axes:
        """Create M-RoPE with interleaved axes: the pairs use t, h, w, t, h, w, ..., and the last ones use t.

        One progression runs over all pairs. With n axes, pair i uses axis a = i mod n if i < n · sections[a], and
        otherwise axis 0. The number of pairs of an axis may therefore differ from its section, without an error:
        [8, 12, 12] gives 11, 11 and 10 pairs, both in transformers and in timm.

        The mode IMROPE of llama.cpp has another rule for the last pairs: pair i uses t only if i mod 3 is 0 and
        i < 3 · sections[0], and pairs to which the rule assigns none of t, h and w use a fourth axis. With
        [24, 20, 20], pairs 61 and 62 use t here, and the fourth axis in llama.cpp. To describe llama.cpp's rule, pass
        the axis of each pair to `Axes`.

        Source: `recomposition_frequencies` of Qwen3-VL in transformers (`mrope_section` [24, 20, 20]; [11, 11, 10]
        in Qwen3.5). Cohere Compass, Cosmos 3 and, with two axes, NeoMME use this pattern as well.

        Args:
            sections: the section of each axis. Their sum is the number of all pairs.

        Raises:
            RopeError: sections is not a list of integers ≥ 0, or their sum is 0 or too large.
        """
        sizes = _parse_sections("sections", sections)
        n, pairs = len(sizes), sum(sizes)
        axis = tuple(i % n if i < n * sizes[i % n] else 0 for i in range(pairs))
        return cls(axis, lengths=(pairs,) * n)._with_name(f"interleaved({sizes})")

    @classmethod
    def time_last(cls, sections: Sequence[int]) -> Axes:
        """Create M-RoPE with time at the lowest frequencies: the pairs use h, w, h, w, ..., and the last ones use t.

        One progression runs over all pairs. Source: Ernie 4.5 VL in transformers, whose `mrope_section` [22, 22,
        20] is in the order h, w, t. Bailing (Ling-omni) in vLLM uses this pattern with sections in the order t, h, w.

        Args:
            sections: number of pairs of t, h and w, in this order: (20, 22, 22) for Ernie 4.5 VL. Those of h and w must
                be equal.

        Raises:
            RopeError: sections is not a list of three integers ≥ 0, or those of h and w differ.
        """
        sizes = _parse_sections("sections", sections)
        if len(sizes) != 3 or sizes[1] != sizes[2]:
            must = "sections must be the numbers of pairs of t, h and w, with equal h and w"
            fix = "Pass them in the order t, h, w; Ernie's config has h, w, t."
            raise _checks.error(f"{_WHO}.time_last", must, _checks.shown(sizes), fix)
        axis = (1, 2) * sizes[1] + (0,) * sizes[0]
        return cls(axis, lengths=(len(axis),) * 3)._with_name(f"time_last({sizes})")

    @classmethod
    def axial(cls, channels: Sequence[int], *, order: Sequence[int] | None = None) -> Axes:
        """Create an axial rope: a block of channels for each axis, with a separate progression for each block.

        Pair i of a block with c channels has the frequency base^(−2i / c), as in a head of c channels. Source: Heo et
        al. 2024, "Rotary Position Embedding for Vision Transformer", arXiv:2403.13298, section 3.1. Deployed in the
        vision encoders of Qwen-VL, GLM-V, Llama 4 (x first), SAM 2, DINOv3 and MiniMax M3, and in FLUX (`axes_dim`
        (16, 56, 56)), Wan and HunyuanVideo.

        Args:
            channels: number of rotated channels of each block, in the order of the head; even, two per pair.
            order: the axis of each block, if it differs from the order of positions: (1, 0) if the width comes first
                and positions are (height, width) (Step 3.7, Inkling 2).

        Raises:
            RopeError: channels is not a list of even integers ≥ 2, or order does not name every axis once.
        """
        sizes, block_axes, name = _parse_blocks("axial", channels, order)
        axis_and_index = [(a, i) for a, size in zip(block_axes, sizes, strict=True) for i in range(size // 2)]
        return cls._from_pairs(axis_and_index, _pairs_per_axis(sizes, block_axes))._with_name(name)

    @classmethod
    def alternating(cls, channels: Sequence[int], *, order: Sequence[int] | None = None) -> Axes:
        """Create an axial rope with alternating axes: pair 0 uses the first axis, pair 1 the second, cyclically.

        Each axis has its own progression, as in `axial`. Source: the vision encoder of Kimi K2.5 in transformers,
        which begins with the width: `Axes.alternating((36, 36), order=(1, 0))` for positions (height, width).

        Args:
            channels: number of rotated channels of each axis, even and equal.
            order: the cycle of axes, if it differs from the order of positions.

        Raises:
            RopeError: channels is not a list of equal even integers ≥ 2, or order does not name every axis once.
        """
        sizes, block_axes, name = _parse_blocks("alternating", channels, order, equal=True)
        axis_and_index = [(a, i) for i in range(sizes[0] // 2) for a in block_axes]
        return cls._from_pairs(axis_and_index, _pairs_per_axis(sizes, block_axes))._with_name(name)

    @classmethod
    def strided(cls, channels: Sequence[int], *, order: Sequence[int] | None = None) -> Axes:
        """Create an axial rope, with a block of channels for each axis, whose blocks share one progression.

        With n axes, each block has every n-th frequency of a progression over all pairs. With two axes, the first block
        has the frequencies with even indices, and the second block those with odd indices. Source: the vision encoder
        of Pixtral in transformers (`Axes.strided((32, 32))`), which Devstral Small 2 uses as well.

        Args:
            channels: number of rotated channels of each axis, even and equal.
            order: the axis of each block, if it differs from the order of positions.

        Raises:
            RopeError: channels is not a list of equal even integers ≥ 2, or order does not name every axis once.
        """
        sizes, block_axes, name = _parse_blocks("strided", channels, order, equal=True)
        n, pairs = len(sizes), sum(sizes) // 2
        axis_and_index = [(a, i) for block, a in enumerate(block_axes) for i in range(block, pairs, n)]
        return cls._from_pairs(axis_and_index, (pairs,) * n)._with_name(name)

    @property
    def count(self) -> int:
        """The number of axes, which is the number of positions that `Rope.at` needs for each token."""
        return len(self.lengths)

    @property
    def pairs(self) -> int:
        """The number of pairs, which is rotary_dim // 2 of the rope."""
        return len(self.axis)

    @property
    def one_progression(self) -> bool:
        """Whether a single progression of frequencies runs over all pairs, as with one axis."""
        return all(length == self.pairs for length in self.lengths)

    def of_each_pair(self, progressions: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """Return the frequency of each pair.

        Args:
            progressions: for each axis, the frequencies of a rope with one axis and the channels of its progression.
        """
        return tuple(progressions[a][i] for a, i in zip(self.axis, self.freq_index, strict=True))

    def __repr__(self) -> str:
        if self._name is not None:
            return f"Axes.{self._name}"
        parts = [str(self.axis)]
        if self.freq_index != tuple(range(self.pairs)):
            parts.append(f"freq_index={self.freq_index}")
        if self.lengths != (self.pairs,) * (max(self.axis) + 1):
            parts.append(f"lengths={self.lengths}")
        return f"Axes({', '.join(parts)})"

    @classmethod
    def _from_pairs(cls, axis_and_index: list[tuple[int, int]], lengths: tuple[int, ...]) -> Axes:
        axis, index = zip(*axis_and_index, strict=True)
        return cls(axis, index, lengths)

    def _with_name(self, name: str) -> Axes:
        object.__setattr__(self, "_name", name)
        return self


def check_axes(who: str, value: object, rotary_dim: int) -> None:
    """Raise unless `value` is None or an `Axes` with rotary_dim // 2 pairs."""
    if value is None:
        return
    if not isinstance(value, Axes):
        fix = "Build one, e.g. Axes.sections((16, 24, 24))."
        raise _checks.error(who, "axes must be an Axes or None", _checks.shown(value), fix)
    if value.pairs != rotary_dim // 2:
        raise _checks.error(
            who,
            f"axes must have rotary_dim // 2 = {rotary_dim // 2} pairs",
            f"{value.pairs} in {_checks.shown(value)}",
            "Check rotary_dim: the sections of all axes must add up to the rotated pairs.",
        )


def frequencies(
    base: float, rotary_dim: int, scaling: Scaling | None, axes: Axes | None
) -> tuple[tuple[float, ...], float] | None:
    """Return inv_freq of each pair and the attention factor, or None if they depend on the length of the text.

    With axes, the scheme is applied to each progression as to a rope with one axis and the channels of the progression.

    Raises:
        RopeError: as raised by the scheme; or the scheme applies only to one progression over the whole head.
    """
    if not (scaling is None or axes is None or axes.one_progression or scaling.per_axis):
        raise _checks.error(
            "Rope",
            "scaling must be a scheme that applies to the frequencies of each axis, such as NTK or Linear",
            f"{scaling.label} with {_checks.shown(axes)}",
            "Its numbers assume one progression over the whole head. Pass PerAxis with a scheme or None for each axis.",
        )
    lengths = (rotary_dim // 2,) if axes is None else axes.lengths
    schemes = [None] * len(lengths) if scaling is None else scaling.of_axes(len(lengths))
    keys = [(pairs, id(scheme)) for pairs, scheme in zip(lengths, schemes, strict=True)]
    resolved = {}
    for (pairs, _), scheme in dict(zip(keys, schemes, strict=True)).items():
        found = (default.inv_freq(base, 2 * pairs), 1.0) if scheme is None else of_scheme(scheme, base, 2 * pairs)
        if found is None:
            return None
        resolved[pairs, id(scheme)] = found
    progressions, factors = zip(*map(resolved.__getitem__, keys), strict=True)
    return progressions[0] if axes is None else axes.of_each_pair(progressions), max(factors)


def _parse_blocks(
    name: str, channels: Any, order: Any, *, equal: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Check the arguments of a constructor. Return the channels and axis of each block, and the call for the repr."""
    who = f"{_WHO}.{name}"
    sizes = _as_integers("channels", channels, at_least=2, at_most=_checks.MAX_HEAD_DIM, max_length=_MAX_AXES, who=who)
    if any(size % 2 for size in sizes) or (equal and len(set(sizes)) > 1):
        must = f"channels must be even{' and equal' if equal else ''}, two per pair"
        raise _checks.error(who, must, _checks.shown(sizes), "Pass the rotated channels of each axis.")
    in_order = tuple(range(len(sizes)))
    block_axes = in_order if order is None else _as_integers("order", order, at_most=_MAX_AXES - 1, who=who)
    if tuple(sorted(block_axes)) != in_order:
        must = f"order must name each of the {len(in_order)} axes once, from 0"
        raise _checks.error(who, must, _checks.shown(block_axes), "Omit order to use the order of positions.")
    return sizes, block_axes, f"{name}({sizes}{'' if block_axes == in_order else f', order={block_axes}'})"


def _pairs_per_axis(sizes: tuple[int, ...], block_axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of pairs of each axis, given the channels and the axis of each block."""
    return tuple(size // 2 for _, size in sorted(zip(block_axes, sizes, strict=True)))


def _parse_sections(name: str, sections: Any) -> tuple[int, ...]:
    """Return sections as a tuple, after checking that they contain at least one pair."""
    sizes = _as_integers(name, sections, at_most=_MAX_PAIRS, max_length=_MAX_AXES)
    if sum(sizes) == 0:
        must = f"{name} must contain at least one pair"
        raise _checks.error(_WHO, must, _checks.shown(sizes), "Pass the number of pairs of each axis.")
    return sizes


def _as_integers(
    name: str, values: Any, *, at_least: int = 0, at_most: int, max_length: int = _MAX_PAIRS, who: str = _WHO
) -> tuple[int, ...]:
    """Return a list of integers as a tuple. The bounds limit memory use and the length of error messages."""
    if not isinstance(values, (list, tuple)) or not 1 <= len(values) <= max_length:
        must = f"{name} must be a list of 1 to {max_length} integers"
        raise _checks.error(who, must, _checks.shown(values), f"Pass a list or a tuple as {name}.")
    return tuple(
        _checks.integer(who, f"{name}[{i}]", value, at_least=at_least, at_most=at_most)
        for i, value in enumerate(values)
    )
