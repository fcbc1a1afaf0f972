"""Axes: which coordinate of a token each pair of channels listens to, and which frequency it has there.

An image patch has a row and a column, a video patch a frame as well. Each pair of channels rotates by one of these
positions: its angle is its frequency times the position on its axis. Frequencies are a geometric progression, and
models differ in two things: the axis of each pair, and whether one progression runs over all pairs of the head (M-RoPE)
or a progression of its own over the pairs of each axis (axial).

The rotation itself knows nothing of it: after cos and sin, several axes are like one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ropewalk import _checks
from ropewalk.schemes import Scaling, default
from ropewalk.schemes import frequencies as of_scheme

_MOST_PAIRS = _checks.MAX_HEAD_DIM // 2
_MOST_AXES = 64  # far above any model: known ones have two to four
_WHO = "Axes"


@dataclass(frozen=True, repr=False)
class Axes:
    """The axis of each pair, and its place in a geometric progression of frequencies.

    Frozen, hashable and compared by value; the constructors below say the same in a word. Pairs are counted in the
    order of the head, axes in the order of `positions`: `Rope.at` takes a row of positions for each.

    Args:
        axis: the axis of each pair, from 0.
        freq_index: the place of each pair in its progression, from 0, the fastest; its place in the head when None.
        lengths: for each axis, how many pairs its progression has; that of all pairs, for every axis, when None. A pair
            rotates by base^(−freq_index / length) radians per position.

    Raises:
        RopeError: a number is impossible, or the lists do not fit each other.

    Example:
        >>> Axes.sections((2, 1, 1)).axis
        (0, 0, 1, 2)
        >>> Axes([0, 0, 1, 2]) == Axes.sections((2, 1, 1))
        True
    """

    axis: tuple[int, ...]
    freq_index: tuple[int, ...] = cast("tuple[int, ...]", None)  # tuples from __post_init__ on
    lengths: tuple[int, ...] = cast("tuple[int, ...]", None)
    _name: str | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        axis = _as_integers("axis", self.axis, at_most=_MOST_AXES - 1)
        pairs = len(axis)
        lengths = (pairs,) * (max(axis) + 1) if self.lengths is None else self.lengths
        lengths = _as_integers("lengths", lengths, at_least=1, at_most=_MOST_PAIRS, most=_MOST_AXES)
        index = tuple(range(pairs)) if self.freq_index is None else self.freq_index
        index = _as_integers("freq_index", index, at_most=_MOST_PAIRS - 1)
        if len(index) != pairs:
            raise _checks.error(
                _WHO,
                "freq_index must have a number for each pair",
                f"{len(index)} for {pairs} pairs",
                "Pass both lists as the model has them.",
            )
        for pair, (a, i) in enumerate(zip(axis, index, strict=True)):
            if a >= len(lengths) or i >= lengths[a]:
                raise _checks.error(
                    _WHO,
                    "each pair must have an axis in lengths, and a place within its length",
                    f"axis {a} and freq_index {i} for pair {pair}, and lengths {_checks.shown(lengths)}",
                    "Axes and places are counted from 0.",
                )
        for name, value in (("axis", axis), ("freq_index", index), ("lengths", lengths)):
            object.__setattr__(self, name, value)

    @classmethod
    def sections(cls, sections: Sequence[int]) -> Axes:
        """M-RoPE in contiguous sections: the first pairs listen to axis 0, the next to axis 1, and so on.

        One progression over all pairs. Source: Wang et al. 2024, "Qwen2-VL", arXiv:2409.12191, section 2.1
        (`mrope_section` [16, 24, 24] for time, height, width); also GLM-4V, PaddleOCR-VL, llama.cpp's mode MROPE, and
        Hunyuan (`xdrope_section`) as vLLM has it. In Hunyuan of transformers 5.23 the two channels of a pair listen to
        different axes: no rotation, and nothing that an `Axes` says.

        Args:
            sections: pairs of each axis; 0 for an axis that no pair listens to.

        Raises:
            RopeError: sections are no such list.
        """
        sizes = _parse_sections("sections", sections)
        axis = tuple(a for a, size in enumerate(sizes) for _ in range(size))
        return cls(axis, lengths=(len(axis),) * len(sizes))._named(f"sections({sizes})")

    @classmethod
    def interleaved(cls, sections: Sequence[int]) -> Axes:
        """M-RoPE with the axes in turn: of t, h and w, the pairs listen to t, h, w, t, h, w, ..., the last ones to t.

        One progression over all pairs. Of n axes, pair i listens to axis i mod n where i < n · sections[that axis],
        else to axis 0. So an axis with more pairs in its section than it has turns gets fewer, without an error:
        [8, 12, 12] gives 11, 11 and 10, in transformers as in timm.

        Source: `recomposition_frequencies` of Qwen3-VL in transformers 5.23 (`mrope_section` [24, 20, 20]; [11, 11, 10]
        in Qwen3.5); Cohere Compass, Cosmos 3; NeoMME with two axes. llama.cpp's mode IMROPE has another boundary: pair
        i listens to t only where i mod 3 is 0 and i < 3 · sections[0], and to a fourth axis where nothing else holds.
        With [24, 20, 20], pairs 61 and 62 listen to t here and to that fourth row of positions there; `Axes` with the
        list of axes says it.

        Args:
            sections: pairs of each axis; their sum is the number of pairs.

        Raises:
            RopeError: sections are no such list.
        """
        sizes = _parse_sections("sections", sections)
        n, pairs = len(sizes), sum(sizes)
        axis = tuple(i % n if i < n * sizes[i % n] else 0 for i in range(pairs))
        return cls(axis, lengths=(pairs,) * n)._named(f"interleaved({sizes})")

    @classmethod
    def time_last(cls, sections: Sequence[int]) -> Axes:
        """M-RoPE with time at the slow end: the pairs listen to h, w, h, w, ..., and the last ones to t.

        One progression over all pairs. Source: Ernie 4.5 VL in transformers 5.23, whose `mrope_section` [22, 22, 20] is
        in the order h, w, t; Bailing (Ling-omni) in vLLM, whose sections are in the order t, h, w.

        Args:
            sections: pairs of t, h and w, in this order: (20, 22, 22) for Ernie 4.5 VL. h and w have as many.

        Raises:
            RopeError: sections are no such list, or h and w differ.
        """
        sizes = _parse_sections("sections", sections)
        if len(sizes) != 3 or sizes[1] != sizes[2]:
            must, cure = "sections must be pairs of t, h and w, as many of w as of h", "Ernie's order is h, w, t."
            raise _checks.error(f"{_WHO}.time_last", must, _checks.shown(sizes), cure)
        axis = (1, 2) * sizes[1] + (0,) * sizes[0]
        return cls(axis, lengths=(len(axis),) * 3)._named(f"time_last({sizes})")

    @classmethod
    def axial(cls, channels: Sequence[int], *, order: Sequence[int] | None = None) -> Axes:
        """Axial rope: a block of channels for each axis, each with a progression of its own.

        Every block has frequencies base^(−2i / its channels), as a head of that size would. Source: Heo et al. 2024,
        "Rotary Position Embedding for Vision Transformer", arXiv:2403.13298, section 3.1. Deployed in the vision towers
        of Qwen-VL, GLM-V, Llama 4 (x first), SAM 2, DINOv3, MiniMax M3, and in FLUX (`axes_dim` (16, 56, 56)), Wan and
        HunyuanVideo.

        Args:
            channels: rotated channels of each axis, in the order of the blocks, even: two for each pair.
            order: the axis of each block, where it is not the order of positions: (1, 0) for width first where
                positions are height, width (Step 3.7, Inkling 2).

        Raises:
            RopeError: channels are no such list, or order does not name every axis once.
        """
        sizes, of_block, name = _parse_blocks("axial", channels, order)
        places = [(a, i) for a, size in zip(of_block, sizes, strict=True) for i in range(size // 2)]
        return cls._from_places(places, _pairs_per_axis(sizes, of_block))._named(name)

    @classmethod
    def alternating(cls, channels: Sequence[int], *, order: Sequence[int] | None = None) -> Axes:
        """Axial rope with the axes in turn: pair 0 listens to the first, pair 1 to the second, and so on round.

        Each axis has a progression of its own, as in `axial`. Source: the vision tower of Kimi K2.5 in transformers
        5.23, which begins with the width: `Axes.alternating((36, 36), order=(1, 0))` for positions height, width.

        Args:
            channels: rotated channels of each axis, even and equal.
            order: the axes in turn, where that is not the order of positions.

        Raises:
            RopeError: channels are no such list, or order does not name every axis once.
        """
        sizes, of_block, name = _parse_blocks("alternating", channels, order, equal=True)
        places = [(a, i) for i in range(sizes[0] // 2) for a in of_block]
        return cls._from_places(places, _pairs_per_axis(sizes, of_block))._named(name)

    @classmethod
    def strided(cls, channels: Sequence[int], *, order: Sequence[int] | None = None) -> Axes:
        """A block of channels for each axis, each with every n-th frequency of one progression over all pairs.

        With two axes the first takes the even places and the second the odd ones. Source: the vision tower of Pixtral
        in transformers 5.23 (`Axes.strided((32, 32))`), also in Devstral Small 2.

        Args:
            channels: rotated channels of each axis, even and equal.
            order: the axis of each block, where that is not the order of positions.

        Raises:
            RopeError: channels are no such list, or order does not name every axis once.
        """
        sizes, of_block, name = _parse_blocks("strided", channels, order, equal=True)
        n, pairs = len(sizes), sum(sizes) // 2
        places = [(a, i) for block, a in enumerate(of_block) for i in range(block, pairs, n)]
        return cls._from_places(places, (pairs,) * n)._named(name)

    @property
    def count(self) -> int:
        """How many axes there are: rows of positions for `Rope.at`."""
        return len(self.lengths)

    @property
    def pairs(self) -> int:
        """How many pairs there are: rotary_dim // 2 of the rope."""
        return len(self.axis)

    @property
    def one_progression(self) -> bool:
        """Whether one progression of frequencies runs over all pairs, as with one axis."""
        return all(length == self.pairs for length in self.lengths)

    def of_each_pair(self, progression: Callable[[int], tuple[float, ...]]) -> tuple[float, ...]:
        """The frequency of each pair, from `progression(channels)`: those of a rope of so many rotated channels."""
        made = {length: progression(2 * length) for length in set(self.lengths)}
        return tuple(made[self.lengths[a]][i] for a, i in zip(self.axis, self.freq_index, strict=True))

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
    def _from_places(cls, places: list[tuple[int, int]], lengths: tuple[int, ...]) -> Axes:
        axis, index = zip(*places, strict=True)
        return cls(axis, index, lengths)

    def _named(self, name: str) -> Axes:
        object.__setattr__(self, "_name", name)
        return self


def check_axes(who: str, value: object, rotary_dim: int) -> None:
    """Raise unless `value` is None, or axes of as many pairs as so many channels have."""
    if value is None:
        return
    if not isinstance(value, Axes):
        cure = "Build them, e.g. Axes.sections((16, 24, 24))."
        raise _checks.error(who, "axes must be an Axes or None", _checks.shown(value), cure)
    if value.pairs != rotary_dim // 2:
        raise _checks.error(
            who,
            f"axes must have rotary_dim // 2 = {rotary_dim // 2} pairs",
            f"{value.pairs} in {_checks.shown(value)}",
            "The sections of all axes together are the pairs that rotate; is rotary_dim right?",
        )


def frequencies(
    base: float, rotary_dim: int, scaling: Scaling | None, axes: Axes | None
) -> tuple[tuple[float, ...], float] | None:
    """inv_freq of each pair, and the attention factor; None where they depend on the length.

    With axes, the scheme is asked for each progression, as for a rope with so many rotated channels.

    Raises:
        RopeError: the scheme's own, or it means nothing for a progression that is not that of the whole head.
    """
    if not (scaling is None or axes is None or axes.one_progression or scaling.per_axis):
        raise _checks.error(
            "Rope",
            "scaling must be one that is meant for frequencies of each axis, such as NTK or Linear",
            f"{scaling.label} with {_checks.shown(axes)}",
            "Its numbers are about one progression over the whole head. Leave it out; or is axes another?",
        )
    made: dict[int, tuple[tuple[float, ...], float]] = {}
    for channels in {rotary_dim} if axes is None else {2 * length for length in axes.lengths}:
        known = (default.inv_freq(base, channels), 1.0) if scaling is None else of_scheme(scaling, base, channels)
        if known is None:
            return None
        made[channels] = known
    factor = max(factor for _, factor in made.values())
    return (made[rotary_dim][0] if axes is None else axes.of_each_pair(lambda channels: made[channels][0])), factor


def _parse_blocks(
    name: str, channels: Any, order: Any, *, equal: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Channels and axis of each block, and the constructor with its arguments, for the repr."""
    who = f"{_WHO}.{name}"
    sizes = _as_integers("channels", channels, at_least=2, at_most=_checks.MAX_HEAD_DIM, most=_MOST_AXES, who=who)
    if any(size % 2 for size in sizes) or (equal and len(set(sizes)) > 1):
        must = f"channels must be even{' and equal' if equal else ''}, two for each pair"
        raise _checks.error(who, must, _checks.shown(sizes), "Pass the rotated channels of each axis.")
    own = tuple(range(len(sizes)))
    of_block = own if order is None else _as_integers("order", order, at_most=_MOST_AXES - 1, who=who)
    if tuple(sorted(of_block)) != own:
        must = f"order must name each of the {len(own)} axes once, from 0"
        raise _checks.error(who, must, _checks.shown(of_block), "Leave it out for the order of positions.")
    return sizes, of_block, f"{name}({sizes}{'' if of_block == own else f', order={of_block}'})"


def _pairs_per_axis(sizes: tuple[int, ...], of_block: tuple[int, ...]) -> tuple[int, ...]:
    """Pairs of each axis, from channels of each block."""
    return tuple(size // 2 for _, size in sorted(zip(of_block, sizes, strict=True)))


def _parse_sections(name: str, sections: Any) -> tuple[int, ...]:
    """Sections, of which at least one has a pair."""
    sizes = _as_integers(name, sections, at_most=_MOST_PAIRS, most=_MOST_AXES)
    if sum(sizes) == 0:
        raise _checks.error(_WHO, f"{name} must have pairs", _checks.shown(sizes), "Pass the pairs of each axis.")
    return sizes


def _as_integers(
    name: str, values: Any, *, at_least: int = 0, at_most: int, most: int = _MOST_PAIRS, who: str = _WHO
) -> tuple[int, ...]:
    """A list of integers as a tuple; bounded, so that no memory and no message grows with it."""
    if not isinstance(values, (list, tuple)) or not 1 <= len(values) <= most:
        must = f"{name} must be a list of 1 to {most} integers"
        raise _checks.error(who, must, _checks.shown(values), f"Pass a list or a tuple as {name}.")
    return tuple(
        _checks.integer(who, f"{name}[{i}]", value, at_least=at_least, at_most=at_most)
        for i, value in enumerate(values)
    )
