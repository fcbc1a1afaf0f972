"""What was read, with what can be asked of it: in words, and as a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ropewalk._checks import error
from ropewalk.configs import explain, hf_write
from ropewalk.configs.layer_ropes import LayerRopes
from ropewalk.configs.layer_ropes import QueryScale as QueryScale
from ropewalk.configs.layer_ropes import VisionRopes as VisionRopes
from ropewalk.rope import Rope


@dataclass(frozen=True)
class ModelRopes(LayerRopes):
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
        axis_names: where the ropes have `axes`: what the rows of positions are ("time", "height", "width"), in the
            order that `Rope.at` takes; () where a token has one position. Text has its position in every row.
        vision: the ropes of the vision tower; None where there is none, or none that ropewalk describes. Of a config
            that is a tower alone, `layers` is ().
        config: what was read, for `to_hf_config`; not compared.
        origins: name of a value → where it came from, in words.
        warnings: what a reader should know, in words.
    """

    @property
    def rope(self) -> Rope:
        """The rope of every layer.

        Raises:
            RopeError: the layers differ; the message lists them. Use `layers`.
        """
        distinct = set(self.layers)
        if len(distinct) == 1 and (rope := self.layers[0]) is not None:
            return rope
        if not self.layers:
            raise error(self.source, "rope must be that of a text model", "a vision tower alone", "Use .vision.ropes.")
        listed = "; ".join(f"layers {explain.ranges(rows)}: {rope}" for rope, rows in self.groups())
        raise error(self.source, "rope must be the same in all layers", listed, "Use .layers[i].")

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
