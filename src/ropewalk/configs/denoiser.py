"""`Denoiser`: what a transformer class of diffusers implies about rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Denoiser:
    """The facts that a transformer class of diffusers implies about rotation.

    Args:
        axis_names: the names of the axes of the positions.
        positions: what the positions on these axes are, in words.
        channels: the number of channels of each axis for configs that do not state it, or a function that computes
            these numbers from head_dim.
        key: config key of the number of channels of each axis; "" if head_dim determines it.
        head: maps config keys to the defaults of the class. There is one key, that of head_dim, or there are two: that
            of the width of the model and that of the number of heads.
        base: the default base of the class, and the config key of the base; "" if there is no such key.
        layers: maps config keys to the defaults of the class. The number of layers is the sum of their values.
        switch: config key that enables the rotation. Nothing rotates unless its value is true. "" if there is none.
        position_keys: other keys about rotation, which change only the positions and not the rope.
    """

    axis_names: tuple[str, ...]
    positions: str
    channels: tuple[int, ...] | Callable[[int], tuple[int, ...]]
    key: str
    head: Mapping[str, int]
    base: tuple[float, str]
    layers: Mapping[str, int]
    switch: str = ""
    position_keys: tuple[str, ...] = ()


def wan_channels(head_dim: int) -> tuple[int, ...]:
    """Return the numbers of channels of time, height and width.

    Height and width each have a third of the head, rounded down to an even number. Time has the other channels.
    """
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def cogvideox_channels(head_dim: int) -> tuple[int, ...]:
    """Return the numbers of channels of time (a quarter), height (three eighths) and width (three eighths)."""
    return head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3
