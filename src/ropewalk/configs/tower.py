"""`Tower`: what the model_type of a vision tower implies about rotation, and the ropes that towers have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Pairing, Rope

GRID = "integers: row and column of each patch in the grid of patches, from 0"


@dataclass(frozen=True)
class Tower:
    """The facts that the model_type of a vision tower implies about rotation.

    Args:
        source: the code from which these facts were taken.
        ropes: a function from head_dim and the base to the ropes, which are applied one after another.
        axis_names: the names of the axes of the positions.
        positions: the meaning of the positions on these axes, in words.
        base: the base for configs that state none.
        width, heads: config keys of the width of the tower and of its number of heads.
        sizes: the defaults of the tower's class: width, number of heads, and head_dim or None. Nested configs that
            transformers wrote omit values that equal the defaults.
        divided_by: config key of a divisor of the head size; "" if there is none.
        position_keys: other keys about rotation, which do not change the rope but only the positions.
    """

    source: str
    ropes: Callable[[int, float], tuple[Rope, ...]]
    axis_names: tuple[str, ...] = ("height", "width")
    positions: str = GRID
    base: float = 10_000.0
    width: tuple[str, ...] = ("hidden_size",)
    heads: tuple[str, ...] = ("num_attention_heads", "num_heads")
    sizes: tuple[int, int, int | None] = (1152, 16, None)
    divided_by: str = ""
    position_keys: tuple[str, ...] = ()


def axial(
    pairing: Pairing = "half", *, order: tuple[int, int] | None = None, layout: Callable[..., Axes] = Axes.axial
) -> Callable[..., tuple[Rope, ...]]:
    """Return a function that builds one rope with half of the channels of a head for each of two axes.

    `layout` says which pairs belong to which axis, and whether each axis has a progression of its own.
    """

    def ropes(head_dim: int, base: float) -> tuple[Rope, ...]:
        half = head_dim // 2
        return (Rope(head_dim, base, pairing, axes=layout((half, half), order=order)),)

    return ropes


def minimax(head_dim: int, base: float) -> tuple[Rope, ...]:
    """Build one rope with three axes. Each gets a third of the channels of a head, rounded down to an even number."""
    third = 2 * (head_dim // 3 // 2)
    return (Rope(head_dim, base, "half", rotary_dim=3 * third, axes=Axes.axial((third,) * 3)),)


def gemma4(head_dim: int, base: float) -> tuple[Rope, ...]:
    """Build two ropes, one for each half of the head. All pairs of a half use the same axis."""
    half = head_dim // 2
    pairs = half // 2
    return tuple(
        Rope(
            head_dim,
            base,
            "half",
            rotary_dim=half,
            rotary_offset=axis * half,
            axes=Axes.sections((pairs, 0) if axis == 0 else (0, pairs)),
        )
        for axis in (0, 1)
    )
