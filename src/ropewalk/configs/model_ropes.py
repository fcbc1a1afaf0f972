"""What was read: the ropes of a model, layer by layer, and where each number came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ropewalk._checks import RopeError
from ropewalk.configs import explain, hf_write
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
class ModelRopes:
    """The ropes of a model.

    Args:
        layers: one `Rope` for each layer, None where the layer does not rotate.
        model_type: the architecture, as the config names it.
        source: the file, or what else was read.
        trained_length: tokens the positions were trained on before any scaling; None where the file does not say.
        max_position_embeddings: tokens, as the config says; None where it does not.
        others: name → a second rope that the layers have (DeepSeek-V3.2's "indexer").
        softmax_factor: multiplies the softmax scale of the attention, dimensionless (DeepSeek: its mscale squared).
        query_scale: what q is multiplied with beside the rotation, or None.
        output_order: "half" where pairs are read interleaved and written in half order (DeepSeek-V3); None: in place.
        rotates_values: the values are turned as the keys are, and the attention's output is turned back by the
            inverse at the query's position (DeepSeek-V4, whose keys are its values).
        layer_kinds: the kind of each layer, as the config calls it ("sliding_attention"); () where all are alike.
        config: what was read, for `to_hf_config`; not compared.
        origins: name of a value → where it came from, in words.
        warnings: what a reader should know, in words.
    """

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
    config: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, hash=False)
    warnings: tuple[str, ...] = ()

    @property
    def rope(self) -> Rope:
        """The rope of every layer.

        Raises:
            RopeError: the layers differ; the message lists them. Use `layers`.
        """
        distinct = set(self.layers)
        if len(distinct) == 1 and (rope := self.layers[0]) is not None:
            return rope
        listed = "; ".join(f"layers {explain.ranges(rows)}: {rope}" for rope, rows in self.groups())
        raise RopeError(f"{self.source}: rope must be the same in all layers, got {listed}. Use .layers[i].")

    def groups(self) -> list[tuple[Rope | None, list[int]]]:
        """Each distinct rope with the layers that have it, in order of first appearance."""
        layers_of: dict[Rope | None, list[int]] = {}
        for index, rope in enumerate(self.layers):
            layers_of.setdefault(rope, []).append(index)
        return list(layers_of.items())

    def to_hf_config(self, *, version: int) -> dict[str, Any]:
        """The Hugging Face config that was read, with its rope keys said anew.

        Args:
            version: 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`, by layer type where layers differ).

        Returns:
            A new dict; `from_config` reads the same ropes from it.

        Raises:
            RopeError: the ropes come from elsewhere, or the schema cannot say them.
        """
        return hf_write.write(self, version)

    def facts(self, length: int | None = None) -> dict[str, Any]:
        """What `explain` says as plain data, ready for JSON. `length`: as there."""
        return explain.facts(self, length)

    def explain(self, length: int | None = None) -> str:
        """In plain words: which pairs turn how fast, what a scheme slows, and where each value came from.

        Args:
            length: tokens you want to run, at least 1; adds what holds at that length.
        """
        return explain.text(self.facts(length))
