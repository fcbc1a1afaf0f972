"""`Denoiser`: what a transformer class of diffusers implies about rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk._layout import Pairing
from ropewalk.configs.reader import Fields
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Rope


@dataclass(frozen=True)
class Denoiser:
    """The facts that a transformer class of diffusers implies about rotation.

    Args:
        axis_names: the names of the axes of the positions. If there is one, tokens have one position.
        positions: what the positions on these axes are, in words.
        channels: the number of channels of each axis for configs that do not state it, or a function that computes
            these numbers from head_dim. () if the config must state them.
        key: config key of the number of channels of each axis; "" if head_dim determines it.
        head: maps config keys to the defaults of the class. There is one key, that of head_dim, or there are two: that
            of the width of the model and that of the number of heads. {} if the channels of all axes are the head.
        base: the default base of the class, and the config key of the base; "" if there is no such key.
        layers: maps config keys to the defaults of the class. The number of layers is the sum of their values.
        switch: config key that enables the rotation, and its default. Nothing rotates if its value is false. The key is
            "" if there is none.
        position_keys: other keys about rotation, which change only the positions and not the rope.
        pairing: the pairing of the class.
        whole: whether the channels of all axes must fill the head. Otherwise, its other channels do not rotate.
        unit: if the value of `key` is one integer for all axes, the number of channels of each axis that it is
            multiplied by; 0 if it is a list.
        axes: function that computes the axis of each pair from the channels and head_dim. By default, each axis has a
            block of channels.
        more: function that completes the rope. It is passed the config, and returns the rope and further arguments of
            `ModelRopes`. None if the rope is complete.
    """

    axis_names: tuple[str, ...]
    positions: str
    channels: tuple[int, ...] | Callable[[int], tuple[int, ...]]
    key: str
    head: Mapping[str, int]
    base: tuple[float, str]
    layers: Mapping[str, int]
    switch: tuple[str, bool] = ("", False)
    position_keys: tuple[str, ...] = ()
    pairing: Pairing = "interleaved"
    whole: bool = True
    unit: int = 0
    axes: Callable[[tuple[int, ...], int], Axes] = lambda channels, _: Axes.axial(channels)
    more: Callable[[Fields, Rope], tuple[Rope, dict[str, Any]]] | None = None


def wan_channels(head_dim: int) -> tuple[int, ...]:
    """Return the numbers of channels of time, height and width.

    Height and width each have a third of the head, rounded down to an even number. Time has the other channels.
    """
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def cogvideox_channels(head_dim: int) -> tuple[int, ...]:
    """Return the numbers of channels of time (a quarter), height (three eighths) and width (three eighths)."""
    return head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3


def parts(count: int, of: int) -> Callable[[int], tuple[int, ...]]:
    """Return the function that gives each of `count` axes one of `of` equal parts of the head."""
    return lambda head_dim: (head_dim // of,) * count


def interleaved(sections: tuple[int, ...], head_dim: int) -> Axes:
    """Return interleaved M-RoPE. Time has the pairs that the sections of height and width leave."""
    _, height, width = sections
    return Axes.interleaved((head_dim // 2 - height - width, height, width))
