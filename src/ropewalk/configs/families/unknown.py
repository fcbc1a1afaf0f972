"""The `Architecture` of an unknown model_type, for which the caller passed the pairing.

All layers must be alike, as in Llama. The sizes, the base and the rotated fraction are read from any of the keys that
are common among known models.
"""

from __future__ import annotations

from typing import Any

from ropewalk.configs.architecture import Architecture
from ropewalk.configs.families.latent import Latent
from ropewalk.configs.layers import ALL, Kind
from ropewalk.configs.reader import Reader

_NAMES: dict[str, Any] = {
    "source": "passed by the caller",
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "head_dim_keys": ("head_dim", "kv_channels", "attention_head_dim"),
    "partial_keys": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
    "partial": 1.0,
    "kinds": {ALL: Kind(bases=("rope_theta", "rotary_emb_base"))},
    "known": False,
}


def architecture(c: Reader, pairing: str) -> Architecture:
    """Build the `Architecture` of an unknown model_type. Latent attention is assumed if there is a qk_rope_head_dim."""
    if c.get("qk_rope_head_dim") in (None, 0):
        return Architecture(**_NAMES, dim_key="rotary_dim", pairing=pairing, check=_refuse_different_layers)
    order = "half" if pairing == "interleaved" else None
    return Latent(**_NAMES, pairing=pairing, output_order=order, check=_check_latent)


def _check_latent(c: Reader) -> None:
    _refuse_different_layers(c)
    c.assume(
        "the model_type is not known, so its latent attention is read like that of DeepSeek-V3: the last "
        "qk_rope_head_dim channels of a head rotate, and mscale_all_dim scales the softmax."
    )


def _refuse_different_layers(c: Reader) -> None:
    for key in ("layer_types", "no_rope_layers"):
        entries = c.get(key)
        if isinstance(entries, list) and any(entry != entries[0] for entry in entries):
            raise c.error(
                key,
                "must be the same for all layers if ropewalk does not know the model_type",
                "layers of several kinds",
                "Build the Rope of each kind by hand.",
            )
