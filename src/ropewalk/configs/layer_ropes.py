"""The result of reading a config, as dataclasses: the rope of each layer, and the key that each number came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ropewalk.rope.rope import Rope


@dataclass(frozen=True)
class QueryScale:
    """A factor that an architecture applies to q in addition to the rotation, dimensionless.

    The factor is constant · (1 + beta · ln(1 + floor(position / original_max_position_embeddings))).

    Args:
        constant: the part of the factor that is the same at every position (ESM: head_dim^-0.5).
        scales_keys: whether the model also multiplies k by `constant`.
        beta: how strongly the factor grows with the position (Ministral 3: `llama_4_scaling_beta`).
        original_max_position_embeddings: the number of tokens after which the factor first grows. It has an effect only
            if beta is not 0.
    """

    constant: float = 1.0
    scales_keys: bool = False
    beta: float = 0.0
    original_max_position_embeddings: int = 1

    def at(self, position: int) -> float:
        """Return the factor for the query at `position`, in tokens."""
        return self.constant * (1.0 + self.beta * math.log(1 + position // self.original_max_position_embeddings))


@dataclass(frozen=True)
class VisionRopes:
    """The ropes of a vision tower, the part of a model that encodes images. All layers of the tower share them.

    Args:
        ropes: the ropes that are applied to q and k one after another, at the same positions. There is one, except in
            Gemma 4, which rotates each half of the head separately.
        axis_names: the names of the axes of the positions, in the order that `Rope.at` expects.
        positions: what the positions on these axes are, in words, and which tokens are not rotated.
        model_type: the model_type of the tower, from its config or implied by the whole config.
        source: the file or object that was read.
        origins: maps the name of a value, such as "base", to where it came from, in words.
    """

    ropes: tuple[Rope, ...]
    axis_names: tuple[str, ...]
    positions: str
    model_type: str
    source: str
    origins: Mapping[str, str] = field(default_factory=dict, hash=False)


class Assumed(str):
    """A sentence of `.warnings` about a value that a config does not state and that was assumed."""


@dataclass(frozen=True)
class LayerRopes:
    """The fields of `ModelRopes`, without the methods that need other modules. `ModelRopes` documents the fields."""

    layers: tuple[Rope | None, ...]
    model_type: str
    source: str
    trained_length: int | None = None
    max_position_embeddings: int | None = None
    extra_ropes: Mapping[str, Rope] = field(default_factory=dict, hash=False)
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
        """Return each distinct rope with the indices of its layers, in order of first appearance."""
        layers_of: dict[Rope | None, list[int]] = {}
        for index, rope in enumerate(self.layers):
            layers_of.setdefault(rope, []).append(index)
        return list(layers_of.items())
