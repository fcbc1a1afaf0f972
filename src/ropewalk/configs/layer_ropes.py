"""What was read, as plain data: the ropes of a model, layer by layer, and where each number came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ropewalk.rope import Rope


@dataclass(frozen=True)
class QueryScale:
    """What an architecture multiplies q with beside the rotation, dimensionless.

    constant · (1 + beta · ln(1 + floor(position / original_max_position_embeddings)))

    Args:
        constant: at every position (ESM: head_dim^-0.5).
        scales_keys: whether k is multiplied by the constant too.
        beta: growth with the position (Ministral 3: `llama_4_scaling_beta`).
        original_max_position_embeddings: in tokens; needed where beta is not 0.
    """

    constant: float = 1.0
    scales_keys: bool = False
    beta: float = 0.0
    original_max_position_embeddings: int = 1

    def at(self, position: int) -> float:
        """The multiplier of the query at a position, in tokens."""
        return self.constant * (1.0 + self.beta * math.log(1 + position // self.original_max_position_embeddings))


@dataclass(frozen=True)
class VisionRopes:
    """How a vision tower rotates: all its layers alike.

    Args:
        ropes: applied to q and k one after another, all at the same positions: one, but for Gemma 4, which rotates
            each half of the head by itself.
        axis_names: what the rows of positions are, in the order that `Rope.at` takes.
        positions: what they hold, in words; tokens that are not rotated are named.
        model_type: the tower, as its config names it or the whole config implies.
        source: the file, or what else was read.
        origins: name of a value → where it came from, in words.
    """

    ropes: tuple[Rope, ...]
    axis_names: tuple[str, ...]
    positions: str
    model_type: str
    source: str
    origins: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class LayerRopes:
    """The fields of `ModelRopes`, which says what they are."""

    layers: tuple[Rope | None, ...]
    model_type: str
    source: str
    trained_length: int | None = None
    max_position_embeddings: int | None = None
    others: Mapping[str, Rope] = field(default_factory=dict, hash=False)
    softmax_factor: float = 1.0
    query_scale: QueryScale | None = None
    output_order: str | None = None
    rotates_values: bool = False
    layer_kinds: tuple[str, ...] = ()
    axis_names: tuple[str, ...] = ()
    vision: VisionRopes | None = None
    config: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, hash=False)
    warnings: tuple[str, ...] = ()

    def groups(self) -> list[tuple[Rope | None, list[int]]]:
        """Each distinct rope with the layers that have it, in order of first appearance."""
        layers_of: dict[Rope | None, list[int]] = {}
        for index, rope in enumerate(self.layers):
            layers_of.setdefault(rope, []).append(index)
        return list(layers_of.items())
