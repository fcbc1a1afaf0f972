"""Cohere 2 MoE: layers with a sliding window rotate. Some layers with full attention and a dense MLP rotate as well.

The first `first_k_dense_replace` layers have dense MLPs. Of these layers, the last of every
`prefix_dense_sliding_window_pattern` has full attention, and the others have a sliding window. If the pattern is 1,
layers with full attention and a dense MLP rotate. If it is not 1, no layer with full attention rotates.

Source: transformers 5.23 models/cohere2_moe.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.layers import check_kinds
from ropewalk.configs.reader import Reader

_FULL, _SLIDING, _DENSE_FULL = "full_attention", "sliding_attention", "dense full_attention"


@dataclass(frozen=True)
class Cohere2MoE(Architecture):
    """The `Architecture` of Cohere 2 MoE, in which a layer's attention and MLP decide whether the layer rotates."""

    def kinds_of_layers(self, c: Reader) -> list[str]:
        """Return the kind of each layer, from the lists `layer_types` and `mlp_layer_types`.

        A missing list is computed from `first_k_dense_replace`, and `layer_types` also from
        `prefix_dense_sliding_window_pattern` and `sliding_window_pattern`, which applies to the remaining layers.
        """
        fields, count = c.fields, self.number_of_layers(c)
        prefix = "prefix_dense_sliding_window_pattern"
        own = fields.size(prefix) if fields.has(prefix) else 1
        rest = fields.size("sliding_window_pattern") if fields.has("sliding_window_pattern") else 4
        first = fields.optional_count("first_k_dense_replace", at_most=count)
        kinds = fields.layer_list("layer_types", count)
        origin = (
            f"one of every {own} of the first {first} layers is full, and one of every {rest} of the others"
            if kinds is None
            else "layer_types"
        )
        if kinds is None:
            kinds = [_FULL if (i + 1) % own == 0 else _SLIDING for i in range(first)]
            kinds += [_FULL if (i + 1) % rest == 0 else _SLIDING for i in range(count - first)]
        mlps = fields.layer_list("mlp_layer_types", count) or ["dense"] * first + ["sparse"] * (count - first)
        check_kinds(fields, "layer_types", kinds, {_SLIDING: 0, _FULL: 0}, c.origins)
        check_kinds(fields, "mlp_layer_types", mlps, {"dense": 0, "sparse": 0}, c.origins)
        c.origins["layer_types"] = origin
        rotates = own == 1  # whether full layers with a dense MLP rotate
        return [
            _DENSE_FULL if rotates and kind == _FULL and mlp == "dense" else str(kind)
            for kind, mlp in zip(kinds, mlps, strict=True)
        ]


MODELS = {
    "cohere2_moe": Cohere2MoE(
        source="transformers 5.23 models/cohere2_moe",
        pairing="interleaved",
        head_dim_divides=False,
        kinds={_SLIDING: Kind(), _FULL: None, _DENSE_FULL: Kind()},
        flat=True,
    )
}
