"""Read litgpt's model_config.yaml. The first half of the rotated channels pairs with the second.

Source: litgpt 0.5.13, litgpt/config.py and litgpt/model.py (GPT.rope_cache, build_rope_cache).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropewalk._checks import shown
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.reader import Fields
from ropewalk.rope.rope import Rope
from ropewalk.schemes import Linear, Llama3

FORMAT = "model_config.yaml of litgpt"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
_FIX = "Read the config.json of the model instead."
_REFUSED = {"latent_attention": "the keys of latent attention", "rope_interleave": "interleaved pairs in another order"}
_FAMILIES = {"codellama": "llama", "gemma-2": "gemma2", "gemma-3": "gemma3_text", "llama": "llama"}
_FAMILIES |= {"meta-llama": "llama", "mistral": "mistral", "pythia": "gpt_neox", "qwen2.5": "qwen2", "qwen3": "qwen3"}
"""Maps the beginning of the name in `hf_config` to the model_type of the same model on the hub, if it is dense."""


def read(config: Mapping[str, Any], source: str, *, base: float | None) -> ModelRopes:
    """Read the ropes of a model_config.yaml. A RopeError names a key that is invalid, or that no scheme means."""
    c = Fields(config, source, base=base)
    for key, why in _REFUSED.items():
        if c.get(key):
            raise c.error(key, f"must not be given: {why} were not looked up", shown(c.get(key)), _FIX)
    head_dim = c.channels("head_size") if c.has("head_size") else c.head_width(("n_embd",), ("n_head",), "head_size")
    part = c.number("rotary_percentage", above=0.0) or 1.0
    base, count, length = c.check_base("rope_base", c.get("rope_base")), c.layers(("n_layer",)), c.size("block_size")
    condensed = c.number("rope_condense_ratio", at_least=1.0) or 1.0
    with c.prefix_errors():
        rope = Rope(head_dim, base, "half", rotary_dim=int(part * head_dim), scaling=_scaling(c, condensed))
        layers = [rope] * count
        local_base = c.number("rope_local_base_freq", above=1.0)
        if local_base is not None:  # rope_adjustments do not apply there, but positions are divided
            local = replace(rope, base=local_base, scaling=None if condensed == 1.0 else Linear(condensed))
            layers = [local if is_local else rope for is_local in _flags(c, "rope_indices", count)]
    sizes: dict[str, Any] = {"hidden_size": c.size("n_embd"), "num_attention_heads": c.size("n_head")}
    sizes |= {"num_hidden_layers": count, "head_dim": head_dim, "max_position_embeddings": length}
    windows: tuple[int | None, ...] = ()
    if c.has("sliding_window_size"):
        sizes["sliding_window"], slides = c.size("sliding_window_size"), _flags(c, "sliding_window_indices", count)
        sizes["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
        windows = tuple(sizes["sliding_window"] if slide else None for slide in slides)
    hub = c.get("hf_config")
    name = str(hub.get("name") if isinstance(hub, Mapping) else c.get("name"))
    families = [] if c.get("n_expert") else [new for old, new in _FAMILIES.items() if name.lower().startswith(old)]
    return ModelRopes(
        layers=tuple(layers),
        model_type=name,
        source=source,
        trained_length=length if rope.scaling is None else rope.scaling.trained_length(length),
        max_position_embeddings=length,
        windows=windows,
        config={"model_type": families[0], **sizes} if families else None,
        file_format=FORMAT,
        origins={"pairing": FORMAT, "layers": "n_layer", **c.origins},
    )


def _scaling(c: Fields, condensed: float) -> Linear | Llama3 | None:
    """Return the scheme of the layers that have `rope_base`."""
    given = c.get("rope_adjustments") or {}
    inner = Fields(given if isinstance(given, Mapping) else {"": given}, c.source, "rope_adjustments")
    must = ""
    if not isinstance(given, Mapping) or {"beta_fast", "beta_slow"} & given.keys():
        must = "must have no YaRN: litgpt's code slows the fast pairs instead of the slow ones"
    elif {"low_freq_factor", "high_freq_factor"} & given.keys():
        if condensed == 1.0 and all(map(inner.has, _LLAMA3)):
            return Llama3(*map(inner.get, _LLAMA3))
        must = f"must have {', '.join(_LLAMA3)}, and rope_condense_ratio must be 1"
    if must:
        raise c.error("rope_adjustments", must, shown(given), _FIX)
    factor = condensed * (inner.number("factor", at_least=1.0) or 1.0)
    return None if factor == 1.0 else Linear(factor)


def _flags(c: Fields, key: str, count: int) -> list[int]:
    """Return a list of 0 and 1 for each layer. litgpt takes the first ones of a longer list, and 1 for none."""
    flags = c.get(key) if c.has(key) else [1] * count
    if not isinstance(flags, list) or len(flags) < count or any(flag not in (0, 1) for flag in flags):
        raise c.error(key, f"must be a list of at least {count} numbers, 0 or 1", shown(flags), _FIX)
    return flags[:count]
