"""The `Architecture` of an unknown model_type, for which the caller passed the pairing.

All layers must be alike, as in Llama. The sizes, the base and the rotated fraction are read from any of the keys that
are common among known models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.families.latent import Latent
from ropewalk.configs.layer_ropes import Assumed
from ropewalk.configs.layers import ALL
from ropewalk.configs.reader import Reader

_NAMES: dict[str, Any] = {
    "source": "passed by the caller",
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "head_dim_keys": ("head_dim", "kv_channels", "attention_head_dim"),
    "partial_keys": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
    "dim_key": "rotary_dim",
    "partial": 1.0,
    "kinds": {ALL: Kind(bases=("rope_theta", "rotary_emb_base"))},
}


@dataclass(frozen=True)
class Unknown(Architecture):
    """The `Architecture` of an unknown model."""

    known = False

    def check(self, c: Reader) -> None:
        """Raise a RopeError if the config says that layers differ."""
        super().check(c)
        _refuse_different_layers(c)


@dataclass(frozen=True)
class UnknownLatent(Latent):
    """The `Architecture` of an unknown model with latent attention, whose config is read like that of DeepSeek-V3."""

    known = False

    def check(self, c: Reader) -> None:
        """Raise a RopeError if the config says that layers differ, and warn that DeepSeek-V3 is assumed."""
        super().check(c)
        _refuse_different_layers(c)
        c.warnings.append(
            Assumed(
                "the model_type is not known, so its latent attention is read like that of DeepSeek-V3: the last "
                "qk_rope_head_dim channels of a head rotate, and mscale_all_dim scales the softmax."
            )
        )


def architecture(c: Reader, pairing: str) -> Architecture:
    """Build the `Architecture` of an unknown model_type. Latent attention is assumed if there is a qk_rope_head_dim."""
    if c.fields.get("qk_rope_head_dim") not in (None, 0):
        order = "half" if pairing == "interleaved" else None
        return UnknownLatent(**{**_NAMES, "dim_key": ""}, pairing=pairing, output_order=order)
    return Unknown(**_NAMES, pairing=pairing)


def _refuse_different_layers(c: Reader) -> None:
    for key in ("layer_types", "no_rope_layers"):
        entries = c.fields.get(key)
        if isinstance(entries, list) and any(entry != entries[0] for entry in entries):
            raise c.fields.error(
                key,
                "must be the same for all layers if ropewalk does not know the model_type",
                "layers of several kinds",
                "Build the Rope of each kind by hand.",
            )
