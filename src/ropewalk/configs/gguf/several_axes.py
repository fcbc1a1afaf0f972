"""Axes of a GGUF file: which of ggml's four rows of positions each pair takes, by rope.dimension_sections.

Source: ggml_mrope_cache_init in ggml/src/ggml-cpu/ops.cpp of llama.cpp, modes MROPE and IMROPE.
"""

from __future__ import annotations

from ropewalk.axes import Axes

NAMES = ("time", "height", "width", "fourth row")


def axes_of(sections: tuple[int, ...], pairs: int, *, in_turn: bool) -> Axes:
    """The axes of so many pairs. They have a fourth row of positions only where a pair takes it.

    Args:
        sections: pairs of t, h, w and the fourth row; where they are fewer than the pairs, ggml begins anew.
        pairs: how many pairs rotate.
        in_turn: whether the axes stand in turn (IMROPE): a pair whose axis has no more takes the fourth row.
    """
    bounds = [sum(sections[: a + 1]) for a in range(4)]
    axis = []
    for pair in range(pairs):
        sector = pair % sum(sections)
        if in_turn:
            axis.append(sector % 3 if sector < 3 * sections[sector % 3] else 3)
        else:
            axis.append(next(a for a in range(4) if sector < bounds[a]))
    made = Axes(tuple(axis), lengths=(pairs,) * max(3, max(axis) + 1))
    named = Axes.interleaved(sections[:3]) if in_turn else Axes.sections(sections[:3])
    return named if named == made else made
