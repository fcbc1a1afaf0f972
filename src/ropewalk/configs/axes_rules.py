"""`AxesRule`: how a model assigns the pairs of a head to the axes of the positions, such as time, height and width.

A section is the number of pairs of one axis. The sections come from the config (`mrope_section`) or from the defaults
of the model's class. A pattern is one of the orders of axes that `Axes` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ropewalk._checks import MAX_HEAD_DIM, argument, integer, possible, shown
from ropewalk.configs.reader import ConfigValue, Fields
from ropewalk.rope.axes import Axes

_FLAGS = ("mrope_interleaved", "interleaved")
KEYS = frozenset({"mrope_section", "xdrope_section", *_FLAGS})
"""Keys with which a config assigns pairs to axes."""
THW = ("time", "height", "width")
TEXT_ONLY = "text only: the several axes of the positions of images and video are not described."
"""The warning of `from_config(text_only=True)`."""


def interleaved_axes(sections: tuple[int, ...], pairs: int) -> Axes:
    """Return `Axes.interleaved` of the sections. Any pairs beyond the sum of the sections use the first axis."""
    if sum(sections) == pairs:
        return Axes.interleaved(sections)
    n = len(sections)
    return Axes(tuple(i % n if i < n * sections[i % n] else 0 for i in range(pairs)), lengths=(pairs,) * n)


def half_for_each(_: tuple[int, ...], pairs: int) -> Axes:
    """Return `Axes.interleaved` of two axes, each with half of the pairs (NeoMME)."""
    return Axes.interleaved((pairs - pairs // 2, pairs // 2))


def time_last(sections: tuple[int, ...], _: int) -> Axes:
    """Return `Axes.time_last` for sections in the order height, width, time (Ernie 4.5 VL)."""
    height, width, time = sections
    return Axes.time_last((time, height, width))


def in_turn(sections: tuple[int, ...], _: int) -> Axes:
    """Return axes that take turns so that each is always as far through its pairs as the others (openPangu).

    The next axis is the one with the smallest share of its pairs taken, but not the previous one if another is left. Of
    three sections, the first keeps one pair for the end.
    """
    kept = [0] if len(sections) == 3 else []
    counts = [size - kept.count(a) for a, size in enumerate(sections)]
    axis: list[int] = []
    while left := [a for a, size in enumerate(counts) if axis.count(a) < size]:
        others = [a for a in left if axis[-1:] != [a]]
        axis.append(min(others or left, key=lambda a: axis.count(a) / counts[a]))
    return Axes((*axis, *kept), lengths=(len(axis) + len(kept),) * len(sections))


@dataclass(frozen=True)
class AxesRule:
    """A rule that computes the `Axes` of a model from its config.

    Args:
        default: the sections of the model's class, for configs that state none. None makes them required.
        names: the names of the axes, in the order of the positions. A config with fewer sections uses the last names.
        pattern: a function from the sections and the number of pairs to `Axes`.
        is_interleaved: whether axes alternate. The keys `mrope_interleaved` and `interleaved` may have only this value.
        order: the index of the axis of each section; () if the sections are in the order of the axes.
        min_sections: the minimum number of sections. None means one for each of `names`.
        keys: config keys of the sections; () if the number of pairs determines them.
        warning: a warning for the user, or "".
    """

    default: tuple[int, ...] | None
    names: tuple[str, ...] = THW
    pattern: Callable[[tuple[int, ...], int], Axes] = lambda sections, _: Axes.sections(sections)
    is_interleaved: bool = False
    order: tuple[int, ...] = ()
    min_sections: int | None = None
    keys: tuple[str, ...] = ("mrope_section",)
    warning: str = ""

    @property
    def other_keys(self) -> frozenset[str]:
        """The keys of `rope_parameters` that concern axes and not frequencies."""
        return frozenset((*self.keys, *_FLAGS))

    def read(self, fields: Fields, rope_keys: Mapping[str, ConfigValue], pairs: int, source: str) -> tuple[Axes, str]:
        """Return the `Axes` of a kind of layer, and a text that names the key or model_type that they came from.

        Args:
            fields: the config, for messages.
            rope_keys: the keys that define the rope of this kind of layer.
            pairs: the number of pairs that rotate.
            source: the model_type and the code that the rule was taken from, for messages.

        Raises:
            RopeError: the sections are missing or invalid, or their sum is not the number of pairs.
        """
        if not self.keys:
            return self.pattern((), pairs), f"implied by model_type {source}"
        self._check_flags(fields, rope_keys, source)
        entries = [rope_keys[key] for key in self.keys if key in rope_keys]
        for entry in entries[1:]:
            if entry.value != entries[0].value:
                must = f"must agree with {entries[0].where}, which is {shown(entries[0].value)}"
                raise fields.error(entry.where, must, shown(entry.value), "Remove the wrong one.")
        if not entries and self.default is None:
            text_only = f" Or pass {argument('text_only', True)} for the rope of text tokens."
            fix = f"Add it: the model's class has no default.{possible(text_only, 'text_only')}"
            raise fields.error(self.keys[0], "must be given in rope_parameters", "none", fix)
        sections = self._sections(fields, entries[0]) if entries else self.default or ()
        where = entries[0].where if entries else f"{list(sections)}, implied by model_type {source}"
        if not entries and self.is_interleaved and sum(sections) < pairs:
            where += f"; the pairs after the first {sum(sections)} take {self.names[0]}"
        elif sum(sections) != pairs:
            key = entries[0].where if entries else self.keys[0]
            got = f"{list(sections) if entries else where}, which adds up to {sum(sections)}"
            must = f"must add up to the {pairs} pairs that rotate"
            raise fields.error(
                key, must, got, "Check that the list and the number of rotated channels belong together."
            )
        with fields.prefix_errors():
            return self.pattern(sections, pairs), where

    def sections(self, axes: Axes) -> list[int] | None:
        """Return the sections that a config must state for these axes, or None if this rule cannot express them."""
        counts = tuple(axes.axis.count(a) for a in self.order or range(axes.count))
        return list(counts) if self.pattern(counts, axes.pairs) == axes else None

    def _check_flags(self, fields: Fields, rope_keys: Mapping[str, ConfigValue], source: str) -> None:
        for flag in _FLAGS:
            if flag in rope_keys and rope_keys[flag].value is not self.is_interleaved:
                must = f"must be {str(self.is_interleaved).lower()}, as in {source}"
                fix = "Check that the config belongs to this model_type."
                raise fields.error(rope_keys[flag].where, must, shown(rope_keys[flag].value), fix)

    def _sections(self, fields: Fields, entry: ConfigValue) -> tuple[int, ...]:
        value, most = entry.value, len(self.names)
        least = most if self.min_sections is None else self.min_sections
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            got = f"{len(value)} entries" if isinstance(value, list | tuple) else shown(value)
            count = str(most) if least == most else f"{least} to {most}"
            must = f"must be a list of {count} numbers of pairs: {', '.join(self.names)}"
            raise fields.error(entry.where, must, got, "Check that it is the list of this model.")
        return tuple(
            integer(fields.source, f"{entry.where}[{i}]", pairs, at_least=0, at_most=MAX_HEAD_DIM)
            for i, pairs in enumerate(value)
        )
