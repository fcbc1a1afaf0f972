"""ModelRopes: the ropes of a model, with methods that explain them and write them as a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ropewalk._checks import error
from ropewalk.configs import explain, hf_write
from ropewalk.configs.layer_ropes import LayerRopes
from ropewalk.configs.layer_ropes import QueryScale as QueryScale
from ropewalk.configs.layer_ropes import VisionRopes as VisionRopes
from ropewalk.rope.rope import Rope


@dataclass(frozen=True)
class ModelRopes(LayerRopes):
    """The ropes of a model.

    Args:
        layers: one `Rope` for each layer, or None for a layer that does not rotate.
        model_type: the architecture, as the config names it.
        source: the file or object that was read.
        trained_length: the length in tokens that the model was trained on before scaling; None if it is not known.
        max_position_embeddings: the length in tokens that the config states, or None.
        extra_ropes: maps a name to a rope that layers have besides their own (DeepSeek-V3.2's "indexer").
        softmax_factor: the factor of the attention's softmax scale, dimensionless (in DeepSeek, its mscale squared).
        query_scale: the factor that q is multiplied by in addition to the rotation, or None.
        output_order: "half" if the model's code reads interleaved pairs and writes them in half order (DeepSeek-V3).
            None if it writes each value to the channel that it was read from.
        rotates_values: whether the model rotates the values like the keys, and then rotates the output of the attention
            back by the position of the query (DeepSeek-V4, in which keys and values are the same).
        layer_kinds: the kind of each layer as the config names it ("sliding_attention"); () if all layers are alike.
        axis_names: the names of the axes of the positions ("time", "height", "width"), in the order that `Rope.at`
            expects; () if tokens have one position. A text token has the same position on every axis.
        vision: the ropes of the vision tower; None if the model has no tower or ropewalk does not know it. If the
            config describes only a tower, `layers` is ().
        config: the config that was read, for `to_hf_config`. It is ignored in comparisons.
        origins: maps the name of a value, such as "base", to where it came from, in words.
        warnings: sentences for the user.
    """

    @property
    def rope(self) -> Rope:
        """The rope that all layers share.

        Raises:
            RopeError: the layers differ, or there are none because the config describes only a vision tower. The
                message names the attribute to use instead.
        """
        distinct = set(self.layers)
        if len(distinct) == 1 and (rope := self.layers[0]) is not None:
            return rope
        if not self.layers:
            raise error(self.source, "rope needs a text model", "only a vision tower", "Use .vision.ropes.")
        descriptions = "; ".join(f"layers {explain.ranges(rows)}: {rope}" for rope, rows in self.groups())
        raise error(self.source, "rope must be the same in all layers", descriptions, "Use .layers[i].")

    def to_hf_config(self, *, version: int) -> dict[str, Any]:
        """Return the Hugging Face config that was read, with its rope keys in the schema of transformers 4 or 5.

        Args:
            version: 4 for `rope_theta` and `rope_scaling`, or 5 for `rope_parameters`, which has an object for each
                layer type if layers differ.

        Returns:
            A new dict, from which `from_config` reads the same ropes.

        Raises:
            RopeError: the ropes were not read from a Hugging Face config, or the schema cannot express them.
        """
        return hf_write.write(self, version)

    def facts(self, length: int | None = None) -> dict[str, Any]:
        """Return the content of `explain` as a dict of JSON values.

        Args:
            length: as in `explain`.
        """
        return explain.facts(self, length)

    def explain(self, length: int | None = None) -> str:
        """Describe in words how fast the pairs rotate, which pairs a scheme slows, and where each value came from.

        Args:
            length: a length in tokens, at least 1. If it is passed, the text also describes sequences of that length.
        """
        return explain.text(self.facts(length))
