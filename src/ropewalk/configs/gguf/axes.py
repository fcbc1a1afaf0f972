"""Compute the `Axes` of a GGUF file: rope.dimension_sections assigns each pair to one of ggml's four axes.

Source: ggml_mrope_cache_init in ggml/src/ggml-cpu/ops.cpp of llama.cpp, modes MROPE and IMROPE.
"""

from __future__ import annotations

from ropewalk.rope.axes import Axes

NAMES = ("time", "height", "width", "fourth row")


def axes_of(sections: tuple[int, ...], pairs: int, *, is_interleaved: bool) -> Axes:
    """Return the axis of each pair. The result has three axes, or four if a pair uses the fourth.

    Args:
        sections: the number of pairs for time, height, width and the fourth axis. If their sum is less than `pairs`,
            ggml repeats the sections.
        pairs: the number of pairs that rotate.
        is_interleaved: whether the axes alternate (IMROPE). Once an axis has as many pairs as its section says, the
            pairs that would use it next use the fourth axis.
    """
    bounds = [sum(sections[: a + 1]) for a in range(4)]
    axis = []
    for pair in range(pairs):
        sector = pair % sum(sections)
        if is_interleaved:
            axis.append(sector % 3 if sector < 3 * sections[sector % 3] else 3)
        else:
            axis.append(next(a for a in range(4) if sector < bounds[a]))
    axes = Axes(tuple(axis), lengths=(pairs,) * max(3, max(axis) + 1))
    standard = Axes.interleaved(sections[:3]) if is_interleaved else Axes.sections(sections[:3])
    return standard if standard == axes else axes  # the standard form has a shorter repr
