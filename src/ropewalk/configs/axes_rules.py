"""How models share the pairs of a head out over the axes of their tokens: one rule each, and the keys that say it.

The patterns themselves are those of `Axes`. A config says the sections, or the model's class has some by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ropewalk._checks import MAX_HEAD_DIM, integer, shown
from ropewalk.axes import Axes
from ropewalk.configs.fields import Fields, Given

_FLAGS = ("mrope_interleaved", "interleaved")
KEYS = frozenset({"mrope_section", "xdrope_section", *_FLAGS})
"""Keys by which a config shares pairs out."""
THW = ("time", "height", "width")
TEXT_ONLY = "text only: positions of images and video have several axes and are not described."
"""What `from_config(text_only=True)` warns of."""


def interleaved(sections: tuple[int, ...], pairs: int) -> Axes:
    """`Axes.interleaved`; the pairs after the sections, which only class defaults leave, listen to the first axis."""
    if sum(sections) == pairs:
        return Axes.interleaved(sections)
    n = len(sections)
    return Axes(tuple(i % n if i < n * sections[i % n] else 0 for i in range(pairs)), lengths=(pairs,) * n)


def in_halves(_: tuple[int, ...], pairs: int) -> Axes:
    """`Axes.interleaved` of two axes with half of the pairs each (NeoMME)."""
    return Axes.interleaved((pairs - pairs // 2, pairs // 2))


def time_last(sections: tuple[int, ...], _: int) -> Axes:
    """`Axes.time_last`, of sections in the order height, width, time (Ernie 4.5 VL)."""
    height, width, time = sections
    return Axes.time_last((time, height, width))


@dataclass(frozen=True)
class AxesRule:
    """How a model gets its `Axes` from the sections of its config.

    Args:
        default: the sections of the model's class, where a config gives none; None where it must.
        names: the axes, in the order of the rows of positions; the last of them where there may be fewer sections.
        pattern: the axes of sections, and of how many pairs.
        in_turn: whether the pairs of the axes stand in turn: what `mrope_interleaved` must say where it is given.
        order: for each of the sections, its axis; () where sections are in the order of the axes.
        fewest: how many sections there must be at least; one for each of `names` where it is None.
        keys: keys of sections; () where the number of pairs says them.
        warning: what a reader should know.
    """

    default: tuple[int, ...] | None
    names: tuple[str, ...] = THW
    pattern: Callable[[tuple[int, ...], int], Axes] = lambda sections, _: Axes.sections(sections)
    in_turn: bool = False
    order: tuple[int, ...] = ()
    fewest: int | None = None
    keys: tuple[str, ...] = ("mrope_section",)
    warning: str = ""

    @property
    def beside(self) -> frozenset[str]:
        """Keys of `rope_parameters` that say something of axes, and nothing of frequencies."""
        return frozenset((*self.keys, *_FLAGS))

    def read(self, fields: Fields, given: Mapping[str, Given], pairs: int, source: str) -> tuple[Axes, str]:
        """The axes of a kind of layer, and where they came from.

        Args:
            fields: the config, for messages.
            given: what it says of these layers.
            pairs: how many pairs rotate.
            source: model_type and source of the row.

        Raises:
            RopeError: the sections are missing, are none, or do not fit the pairs.
        """
        if not self.keys:
            return self.pattern((), pairs), f"implied by model_type {source}"
        self._check_flags(fields, given, source)
        stated = [given[key] for key in self.keys if key in given]
        for each in stated[1:]:
            if each.value != stated[0].value:
                must = f"it must agree with {stated[0].where}, which is {shown(stated[0].value)}"
                raise fields.error(each.where, must, shown(each.value), "Which one is the model's?")
        if not stated and self.default is None:
            cure = "Its class has no default. text_only=True gives the rope that its text tokens use."
            raise fields.error(self.keys[0], "it must be given in rope_parameters", "none", cure)
        sections = self._sections(fields, stated[0]) if stated else self.default or ()
        where = stated[0].where if stated else f"{list(sections)}, implied by model_type {source}"
        if not stated and self.in_turn and sum(sections) < pairs:
            where += f"; the pairs after the first {sum(sections)} listen to {self.names[0]}"
        elif sum(sections) != pairs:
            key = stated[0].where if stated else self.keys[0]
            got = f"{list(sections) if stated else where}, which add up to {sum(sections)}"
            must = f"its numbers must add up to the {pairs} pairs that rotate"
            raise fields.error(key, must, got, "Is it the list of another model, or is rotary_dim another?")
        with fields.named():
            return self.pattern(sections, pairs), where

    def sections(self, axes: Axes) -> list[int] | None:
        """The sections that a config must give for these axes; None where this rule has no such."""
        found = tuple(axes.axis.count(a) for a in self.order or range(axes.count))
        return list(found) if self.pattern(found, axes.pairs) == axes else None

    def _check_flags(self, fields: Fields, given: Mapping[str, Given], source: str) -> None:
        for flag in _FLAGS:
            if flag in given and given[flag].value is not self.in_turn:
                must = f"it must be {str(self.in_turn).lower()}, as {source} has it"
                cure = "Is it the config of another model?"
                raise fields.error(given[flag].where, must, shown(given[flag].value), cure)

    def _sections(self, fields: Fields, given: Given) -> tuple[int, ...]:
        value, most = given.value, len(self.names)
        least = most if self.fewest is None else self.fewest
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            got = f"{len(value)} entries" if isinstance(value, list | tuple) else shown(value)
            count = str(most) if least == most else f"{least} to {most}"
            must = f"it must be a list of {count} numbers of pairs: {', '.join(self.names)}"
            raise fields.error(given.where, must, got, "Is it the list of another model?")
        return tuple(
            integer(fields.source, f"{given.where}[{i}]", pairs, at_least=0, at_most=MAX_HEAD_DIM)
            for i, pairs in enumerate(value)
        )


QWEN2_VL = AxesRule((16, 24, 24))
QWEN3_VL = AxesRule((24, 20, 20), pattern=interleaved, in_turn=True)
QWEN3_5 = AxesRule((11, 11, 10), pattern=interleaved, in_turn=True)
GLM4V = AxesRule((8, 12, 12))
ERNIE = AxesRule((22, 22, 20), pattern=time_last, order=(1, 2, 0))
NEOMME = AxesRule(None, names=("row", "column"), pattern=in_halves, in_turn=True, keys=())
HUNYUAN = AxesRule(
    None,
    names=("sequence", "width", "height", "image"),
    fewest=3,
    keys=("mrope_section", "xdrope_section"),
    warning="transformers 5.23 gives the channels of a pair positions of different axes, which rotates text alone; "
    "these axes are those of vLLM, where each pair has one.",
)
