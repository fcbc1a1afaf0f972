"""Models in which one step differs: functions of the reader, which the rows of these models name.

Source of each function: the code that its row names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from ropewalk._checks import error, integer, nearest, number, possible, short_key, shown
from ropewalk.configs.architecture import HeadQueryScale, QueryScale
from ropewalk.configs.layers import ALL, NO_ROPE, Every, LayerIndices, check_kinds
from ropewalk.configs.reader import MAX_LAYERS, ConfigValue, Reader
from ropewalk.schemes import Scaling

# the pairing


def minimind_pairing(c: Reader) -> str:
    """Return "interleaved" if the config states the width with Meta's key, as early versions of MiniMind do."""
    return "interleaved" if c.has("dim") else "half"


def chatglm_pairing(c: Reader) -> str:
    """Return "half" if original_rope is false."""
    return "interleaved" if c.boolean("original_rope", True) else "half"


# the number of layers


def nemotron_h_layers(c: Reader) -> int:
    """Return num_hidden_layers, or the length of layers_block_type if that key is missing."""
    key = "layers_block_type"
    layer_kinds = c.get(key)
    listed = not c.has("num_hidden_layers") and isinstance(layer_kinds, list) and layer_kinds
    c.origins["layers"] = f"the length of {key}" if listed else "num_hidden_layers"
    return len(layer_kinds) if listed else c.layers(("num_hidden_layers",))


def longcat_layers(c: Reader) -> int:
    """Return the number of attention modules: each layer has two, which count as layers in `ModelRopes`."""
    c.origins["layers"] = "num_layers"
    return 2 * c.layers(("num_layers",))


def dory_layers(c: Reader) -> int:
    """Return the number of layers, half of num_hidden_layers in files that list each MLP as a layer of its own."""
    listed = c.get("layer_types")
    count = c.layers(("num_hidden_layers",))
    blocks = isinstance(listed, list | tuple) and "mlp" in listed
    c.origins["layers"] = "num_hidden_layers, of which half are MLPs" if blocks else "num_hidden_layers"
    return count // 2 if blocks else count


# the kinds of the layers


def dory_kinds(c: Reader, count: int) -> list[str]:
    """Return the kind of each layer, from a list in which an entry "mlp" may follow each of them. See `dory_layers`."""
    full, sliding = "full_attention", "sliding_attention"
    names = c.layer_list("layer_types", c.layers(("num_hidden_layers",)))
    if names is None:
        return Every(4, full, sliding).kinds(c, count)
    if len(names) > count:
        check_kinds(c, "layer_types", names[1::2], ("mlp",))
        names = names[::2]
    return check_kinds(c, "layer_types", names, (full, sliding))


def lara_mini_kinds(c: Reader, count: int) -> list[str]:
    """Return the kinds in `layer_types`. Without it, five kinds repeat."""
    linear, sliding, full = "linear_attention", "sliding_attention", "full_attention"
    repeated = [(linear, sliding, linear, full, sliding)[i % 5] for i in range(count)]
    return check_kinds(c, "layer_types", c.layer_list("layer_types", count) or repeated, (linear, sliding, full))


def recurrent_gemma_kinds(c: Reader, count: int) -> list[str]:
    """Repeat the short list `block_types` until all layers have a kind."""
    key = "block_types"
    block_types = c.get(key)
    if not isinstance(block_types, list) or not block_types:
        raise c.error(key, "must be a list of kinds of layers", shown(block_types), "Add it.")
    return check_kinds(c, key, [block_types[i % len(block_types)] for i in range(count)], ("attention", "recurrent"))


def nemotron_nas_kinds(c: Reader, count: int) -> list[str]:
    """Read `block_configs`. Layers whose attention was removed, or replaced by a linear layer, do not rotate."""
    key = "block_configs"
    kinds = []
    for block in c.layer_list(key, count) or []:
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            must, fix = "must contain objects with the key attention", "Check that it is the list of this model."
            raise c.error(key, must, shown(block), fix)
        absent = attention.get("no_op") or attention.get("replace_with_linear")
        kinds.append(NO_ROPE if absent else ALL)
    if not kinds:
        must = "must be given, since some layers have no attention"
        raise c.error(key, must, "none", "Add a list with one entry for each layer.")
    c.origins["layer_types"] = f"{key}: blocks with attention rotate"
    return kinds


DENSE_FULL = "dense full_attention"
"""The kind of the layers of Cohere 2 MoE with full attention and a dense MLP, if they rotate."""


def cohere2_moe_kinds(c: Reader, count: int) -> list[str]:
    """Return the kind of each layer, from the lists `layer_types` and `mlp_layer_types`.

    The first `first_k_dense_replace` layers have dense MLPs. Of these layers, the last of every
    `prefix_dense_sliding_window_pattern` has full attention, and of the remaining ones the last of every
    `sliding_window_pattern`. If the first pattern is 1, full layers with a dense MLP rotate. No other full layer does.
    """
    full, sliding = "full_attention", "sliding_attention"
    prefix = "prefix_dense_sliding_window_pattern"
    own = c.size(prefix) if c.has(prefix) else 1
    rest = c.size("sliding_window_pattern") if c.has("sliding_window_pattern") else 4
    first = c.optional_count("first_k_dense_replace", at_most=count)
    kinds, origin = c.layer_list("layer_types", count), "layer_types"
    if kinds is None:
        origin = f"one of every {own} of the first {first} layers is full, and one of every {rest} of the others"
        kinds = [full if (i + 1) % own == 0 else sliding for i in range(first)]
        kinds += [full if (i + 1) % rest == 0 else sliding for i in range(count - first)]
    mlps = c.layer_list("mlp_layer_types", count) or ["dense"] * first + ["sparse"] * (count - first)
    check_kinds(c, "layer_types", kinds, (sliding, full))
    check_kinds(c, "mlp_layer_types", mlps, ("dense", "sparse"))
    c.origins["layer_types"] = origin
    dense_full_rotates = own == 1
    return [
        DENSE_FULL if dense_full_rotates and kind == full and mlp == "dense" else str(kind)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]


def bailing_kinds(c: Reader, count: int) -> list[str]:
    """Return full attention for the last of every `layer_group_size` layers, and for those after the last group."""
    group = c.size("layer_group_size")
    c.origins["layer_types"] = "layer_group_size: the last layer of each group rotates, and those after the last group"
    whole = count - count % group
    return ["full_attention" if (i + 1) % group == 0 or i >= whole else "linear_attention" for i in range(count)]


def plamo2_kinds(c: Reader, count: int) -> list[str]:
    """Return full attention for the middle of every `mamba_step` layers, or for all without Mamba."""
    if not c.boolean("mamba_enabled", True):
        return ["full_attention"] * count
    step = c.size("mamba_step") if c.has("mamba_step") else 2
    c.origins["layer_types"] = "mamba_step: one of so many layers has attention"
    middle = step // 2
    return [
        "full_attention" if (i % step == middle if count > middle else i == count - 1) else "mamba"
        for i in range(count)
    ]


def minicpm_sala_kinds(c: Reader, count: int) -> list[str]:
    """Repeat the list `mixer_types`. A switch says whether the layers of each of the two types rotate."""
    key = "mixer_types"
    types = c.get(key) or ["minicpm4"]
    if not isinstance(types, list):
        raise c.error(
            key, "must be a list of kinds of layers", shown(types), "Check that it is the list of this model."
        )
    switches = {"minicpm4": "attn_use_rope", "lightning-attn": "lightning_use_rope"}
    kinds = ["lightning-attn" if kind in ("lightning", "lightning_attn") else kind for kind in types]
    kinds = check_kinds(c, key, [kinds[i % len(kinds)] for i in range(count)], switches)
    c.origins["layer_types"] = f"{key}, attn_use_rope and lightning_use_rope"
    return [kind if c.boolean(switches[kind], True) else NO_ROPE for kind in kinds]


def iquest_q1_kinds(c: Reader, count: int) -> list[str]:
    """Join three lists of kinds, of which the middle one repeats. The layers in `no_rope_layers` do not rotate."""
    full, sliding = "full_attention", "sliding_attention"
    middle = "hybrid_layers_types_block"
    parts = [
        c.get("first_layers_types") or [full],
        c.get(middle) or [full, sliding, sliding, sliding],
        c.get("last_layers_types") or [full] * 3,
    ]
    repeated = c.size("num_hybrid_layers_block") if c.has("num_hybrid_layers_block") else 21
    if (
        not all(isinstance(part, list) for part in parts)
        or len(parts[0] + parts[2]) + len(parts[1]) * repeated != count
    ):
        must = f"must give the kinds of {count} layers, with first_layers_types and last_layers_types"
        raise c.error(middle, must, shown(c.get(middle)), c.list_fix)
    kinds = check_kinds(c, middle, parts[0] + parts[1] * repeated + parts[2], (full, sliding))
    if not (c.boolean("use_hybrid_layers", True) and c.boolean("use_sliding_window", True)):
        kinds = [full] * count
    rotates = LayerIndices("no_rope_layers", NO_ROPE, ALL, otherwise=ALL).kinds(c, count) or []
    c.origins["layer_types"] = f"{middle} and no_rope_layers"
    return [kind if how == ALL else NO_ROPE for kind, how in zip(kinds, rotates, strict=True)]


# configs that no Rope describes, and warnings


def refuse_baichuan_13b(c: Reader) -> None:
    """Raise a RopeError for Baichuan 13B, which uses ALiBi. Only the hidden size distinguishes it from the 7B."""
    if c.get("hidden_size") != 4096:
        must = "must be 4096, since only Baichuan 7B has a rope"
        fix = "The 13B uses ALiBi, so there is no rope to describe."
        raise c.error("hidden_size", must, shown(c.get("hidden_size")), fix)


def refuse_rope_head_dim(c: Reader) -> None:
    """Raise a RopeError if only some pairs of K2 Horizon rotate: their partners are half a whole head away."""
    head_dim = c.head_width(("hidden_size",), ("num_attention_heads",), "head_dim")
    head_dim = c.channels("head_dim") if c.has("head_dim") else head_dim
    if c.has("rope_head_dim") and (part := c.channels("rope_head_dim")) != head_dim:
        only = f"channels i and i + {head_dim // 2} rotate for i < {part // 2}, by rope_theta^(-2i/{part})"
        own = f"base=rope_theta ** ({head_dim} / {part}), scaling=Proportional({part} / {head_dim})"
        fix = f"Not supported: in vLLM {only}. Rope({head_dim}, {own}, pairing='half') does so without a scaling."
        raise c.error("rope_head_dim", f"must be the head size {head_dim}", f"{part}", fix)


def own_length(key: str) -> Callable[[Reader], int | None]:
    """Return a function that returns the trained length that a key states, or max_position_embeddings without it."""
    return lambda c: c.length(key) or c.longest


def qwen3_length(c: Any) -> int | None:
    """Return the trained length of Qwen 3, whose 40,960 tokens have room for a prompt too (Qwen's documentation)."""
    return 32_768 if c.longest == 40_960 else c.longest


def warn_of_qwen_ntk(c: Reader) -> None:
    """Add a warning if the config of Qwen 1 enables its dynamic scaling, which no scheme describes."""
    if c.boolean("use_dynamic_ntk", False):
        c.warnings.append(
            f"use_dynamic_ntk: beyond {own_length('seq_length')(c)} tokens the model's own code uses NTK with "
            "alpha = 2^ceil(log2(n / seq_length) + 1) - 1 at n tokens, and vLLM does not. These ropes do not "
            f"include it.{possible(' For longer texts use dataclasses.replace(rope, scaling=NTK(alpha)).')}"
        )


def warn_of_olmo3_base(c: Reader) -> None:
    """Add a warning if OLMo 3 has a base that transformers 5 gives to the layers with full attention only."""
    base = c.get("rope_theta")
    if base not in (None, 500_000) and not c.nested:
        c.warnings.append(
            f"rope_theta ({shown(base)}) is the base of layers with full attention in transformers 5, and the base of "
            "those with a sliding window is 500000. Other programs give rope_theta to all layers."
        )


def require_interleaved(c: Reader) -> None:
    """Raise a RopeError if no key says that the axes alternate. vLLM then uses another order, which no model has."""
    if c.sections and c.section_value("mrope_section") and c.section_value("mrope_interleaved") is None:
        raise c.error("mrope_interleaved", "must be given beside mrope_section", "none", "Add it: openPangu has true.")


# the keys that define the rope


def add_sections(c: Reader, rope_keys: dict[str, ConfigValue]) -> None:
    """Add the sections of the axes, which are beside the text model."""
    key = "mrope_section"
    if c.has(key):
        value = c.get(key)
        inner = rope_keys.setdefault(key, ConfigValue(value, key))
        if inner.value != value:
            must = f"must agree with {inner.where}, which is {shown(inner.value)}"
            raise c.error(key, must, shown(value), "Remove the wrong one.")


def add_whole_head(c: Reader, rope_keys: dict[str, ConfigValue]) -> None:
    """Let the whole head rotate if a section states no fraction: the default of these classes is for files without."""
    if c.sections:
        rope_keys.setdefault("partial_rotary_factor", ConfigValue(1.0, f"implied by {c.get('model_type')}"))


def add_bases_of_layers(c: Reader, rope_keys: dict[str, ConfigValue]) -> None:
    """Add the base from Granite's list with the base of each layer, which is 0 if the layer does not rotate.

    All layers that rotate must have the same base.
    """
    key = "layer_rope_theta"
    bases = c.get(key)
    for i, base in enumerate(bases if isinstance(bases, list) else []):
        c.add(rope_keys, "rope_theta", base or None, f"{key}[{i}]")


def add_chatglm_base(c: Reader, rope_keys: dict[str, ConfigValue]) -> None:
    """Add the base 10000 · rope_ratio, unless the config or the caller states the base itself."""
    key, base = "rope_ratio", 10_000.0
    if "rope_theta" in rope_keys or c.passed_base is not None or not c.has(key):
        return
    factor = number(c.source, key, c.get(key), above=0.0)
    name = c.get("_name_or_path")
    if factor != 1.0 and isinstance(name, str) and "chatglm2" in name.lower():
        must = "must multiply the base, as in ChatGLM3 and GLM-4"
        fix = f"ChatGLM2-32K divides positions by it{possible(f': build the Rope by hand with Linear({key})')}."
        raise c.error(key, must, f"a file of {shown(name)}", fix)
    if factor != 1.0:
        c.warnings.append(f"{key} multiplies the base, as in ChatGLM3 and GLM-4. ChatGLM2-32K divides positions by it.")
    rope_keys["rope_theta"] = ConfigValue(base * factor, key, origin=f"{base:g} · {key}")


_INTERNLM_KEYS = {"base": "rope_theta", "type": "rope_type", "scaling_factor": "factor"}


def add_internlm_rotary(c: Reader, rope_keys: dict[str, ConfigValue]) -> None:
    """Add the base and the scaling from the object `rotary`, which some configs of InternLM have.

    `rotary.type` is "origin" (no scaling) or "dynamic", whose factor is 1 by default.
    """
    rotary = c.get("rotary")
    if rotary is None:
        return
    if not isinstance(rotary, Mapping):
        fix = "Write an object with the keys base and type."
        raise c.error("rotary", "must be an object or null", shown(rotary), fix)
    for key, value in rotary.items():
        where = f"rotary.{short_key(key)}"
        if key not in _INTERNLM_KEYS:
            fix = f"The model's own code reads no other key.{nearest(str(key), _INTERNLM_KEYS)}"
            raise c.error(where, f"must be one of {', '.join(_INTERNLM_KEYS)}", shown(value), fix)
        c.add(rope_keys, _INTERNLM_KEYS[key], "default" if (key, value) == ("type", "origin") else value, where)
    if "rope_type" in rope_keys and rope_keys["rope_type"].value == "dynamic":
        rope_keys.setdefault("factor", ConfigValue(1.0, "implied by internlm"))
    else:
        rope_keys.pop("factor", None)


def add_grok_scaling(c: Reader, rope_keys: dict[str, ConfigValue]) -> None:
    """Add the scaling, of which Grok has the keys at the top level, and the fraction of the head that rotates.

    The code computes an attention factor for each type, and applies none.
    """
    if c.boolean("rope_rotate_half_dims", False):
        c.add(rope_keys, "partial_rotary_factor", 0.5, "rope_rotate_half_dims")
    rope_type = c.get("rope_type")
    for own, name in (("original", "default"), ("yarn_linear", "yarn")):
        rope_type = name if rope_type == own else rope_type
    c.add(rope_keys, "rope_type", rope_type, "rope_type")
    for key, name in (("scaling_factor", "factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
        c.add(rope_keys, name, c.get(key), key)
    if rope_type == "yarn":
        c.add(rope_keys, "attention_factor", 1.0, f"model_type {c.get('model_type')}")


def add_telechat_scaling(c: Reader, rope_keys: dict[str, ConfigValue]) -> None:
    """Add the NTK scaling of TeleChat, with alpha = 2^ceil(log2(training_seqlen / base_seqlen) + 1) - 1."""
    trained, base_length = (c.size(key) if c.has(key) else 8192 for key in ("training_seqlen", "base_seqlen"))
    alpha = max(2 ** math.ceil(math.log2(trained / base_length) + 1) - 1, 1)
    where = "training_seqlen / base_seqlen"
    c.warnings.append(f"beyond {trained} tokens the model's own code changes the base with the length.")
    if alpha > 1:
        c.add(rope_keys, "rope_type", "dynamic", where)
        c.add(rope_keys, "alpha", float(alpha), where)


def add_gte_scaling(c: Reader, rope_keys: dict[str, ConfigValue]) -> None:
    """Replace the NTK scaling of gte, by a factor s, by the same as linear scaling.

    Its base is multiplied by s, and its positions are divided by s^(2 / d) in heads of d channels.
    """
    named, base, entry = (rope_keys.get(key) for key in ("rope_type", "rope_theta", "factor"))
    if named is None or named.value != "ntk" or base is None or entry is None:
        return
    factor = number(c.source, entry.where, entry.value, at_least=1.0)
    width = c.head_width(("hidden_size",), ("num_attention_heads",), "head_dim")
    larger = factor * c.check_base(base.where, base.value)
    rope_keys["rope_type"] = ConfigValue("linear", named.where)
    rope_keys["rope_theta"] = ConfigValue(larger, f"{base.where} · {entry.where}")
    rope_keys["factor"] = ConfigValue(factor ** (2 / width), entry.where)


# the factor of q


def longcat_query_scale(c: Reader) -> QueryScale:
    """Return the factor √(hidden_size / q_lora_rank)."""
    c.origins["query_scale"] = "square root of hidden_size / q_lora_rank"
    return QueryScale(constant=math.sqrt(c.size("hidden_size") / c.size("q_lora_rank")))


def esm_query_scale(c: Reader) -> QueryScale:
    """Return the factor head_dim^-0.5."""
    return QueryScale(constant=c.head_width(("hidden_size",), ("num_attention_heads",), "head_dim") ** -0.5)


def privacy_filter_query_scale(c: Reader) -> QueryScale:
    """Return the factor head_dim^-0.25, of q and of k."""
    return QueryScale(constant=c.channels("head_dim") ** -0.25, scales_keys=True)


def llama4_query_scale(c: Reader) -> QueryScale | None:
    """Return the factor of the layers without rotation, which `attn_temperature_tuning` switches on (by default)."""
    if c.has("attn_temperature_tuning") and not c.get("attn_temperature_tuning"):  # true or, in older files, 4
        return None
    beta = c.number("attn_scale", at_least=0.0)
    length = c.size("floor_scale") if c.has("floor_scale") else 8192
    c.origins["query_scale"] = "attn_scale, floor_scale, or 0.1 and 8192 without them"
    return QueryScale(
        beta=0.1 if beta is None else beta, original_max_position_embeddings=length, offset=1, only_unrotated=True
    )


def grok_query_scale(c: Reader) -> QueryScale | None:
    """Return the factor of the positions after attn_temperature_len, or None if that key is missing or negative."""
    key = "attn_temperature_len"
    length = c.number(key)
    if length is None or length <= 0:
        return None
    c.origins["query_scale"] = key
    c.warnings.append(
        f"{key}: SGLang multiplies the scores by this factor after it has capped them (attn_logit_softcapping), so it "
        "is a factor of q only without the cap."
    )
    length = integer(c.source, key, c.get(key), at_least=2)
    return QueryScale(logarithmic=True, original_max_position_embeddings=length)


def lerope(c: Reader, scheme: Scaling | None, rotary_dim: int) -> Scaling:
    """Return LeRoPE with the learned factors of the checkpoint, on top of the scheme of the config."""
    from ropewalk.schemes.lerope import LeRoPE

    name = _only(c, r"(lerope|rotary_emb)\.alpha", "lerope.alpha", f"{rotary_dim // 2} learned numbers")
    alpha = tuple(c.weights.numbers(name))
    if len(alpha) != rotary_dim // 2:
        must = f"tensor {name} must have a number for each of {rotary_dim // 2} pairs"
        raise error(c.source, must, f"{len(alpha)}", "Check that the checkpoint belongs to this config.")
    c.origins["alpha"] = f"{name} of the checkpoint"
    with c.prefix_errors():
        return LeRoPE(alpha, cast(Any, scheme))


def _only(c: Reader, pattern: str, name: str, what: str) -> str:
    """Return the name of the one tensor in which the pattern occurs. Messages call it `name`."""
    found = list(c.weights.find(pattern))
    if len(found) != 1:
        must = f"tensor {name} of the checkpoint must be known: the rope of {c.get('model_type')} depends on {what}"
        in_python = f", or pass weights={{{name!r}: tensor}} or weights=model.state_dict()"
        fix = f"Pass the folder that holds config.json and the model's safetensors files{possible(in_python)}."
        raise error(c.source, must, " and ".join(found) or "no such tensor", fix)
    return found[0]


def ssmax_query_scale(c: Reader) -> HeadQueryScale | None:
    """Return the learned factors of q, or None with a warning if the checkpoint's tensors are not known."""
    count = c.layers(("num_hidden_layers",))
    names = (r"ssmax_scaling\.s|softmax_scaling\.scale", r"ssmax_scaling\.b|softmax_scaling\.bias")
    parts = [_of_layers(c, either, count) for either in names]
    if any(i not in part for part in parts for i in range(count)):
        c.warnings.append(
            "q is also multiplied by ssmax_scaling.s · ln(position + 1) + ssmax_scaling.b, learned for each head. "
            "These tensors were not found for every layer, so .query_scale is None."
        )
        return None
    c.origins["query_scale"] = "ssmax_scaling.s and .b of the checkpoint"
    with c.prefix_errors():
        scale = HeadQueryScale(*(tuple(tuple(c.weights.numbers(part[i])) for i in range(count)) for part in parts))
    heads = len(scale.scale[0])
    if c.has("num_attention_heads") and c.size("num_attention_heads") != heads:
        must = f"must be {heads}, the numbers in the tensor {short_key(parts[0][0])}"
        got, fix = shown(c.get("num_attention_heads")), "Check that the checkpoint belongs to this config."
        raise c.error("num_attention_heads", must, got, fix)
    return scale


def _of_layers(c: Reader, names: str, count: int) -> dict[int, str]:
    """Return the name of the one tensor of each layer. Layers after the last one predict further tokens."""
    end = count + c.optional_count(c.further_key, at_most=MAX_LAYERS)
    layers: dict[int, str] = {}
    for name, match in c.weights.find(rf"layers\.(\d+)\.[^.]+\.({names})").items():
        layer = int(match[1]) if len(match[1]) < 8 else end
        if layer >= end or layer in layers:
            must = f"every layer from 0 to {count - 1} must have one tensor with the factors of q"
            got = " and ".join(short_key(each) for each in (layers.get(layer), name) if each is not None)
            raise error(c.source, must, got, "Check that the checkpoint belongs to this config.")
        layers[layer] = name
    return layers


def scale_by(key: str) -> Callable[[Reader], QueryScale | None]:
    """Return a function that returns the value of the key as the factor of q, or None if it is missing."""

    def query_scale(c: Reader) -> QueryScale | None:
        if not c.has(key):
            return None
        c.origins["query_scale"] = key
        return QueryScale(constant=number(c.source, key, c.get(key), above=0.0))

    return query_scale


def zamba2_kinds(c: Reader, count: int) -> list[str]:
    """Return the kinds of the layers of Zamba 2, whose key has the meaning of `layer_types`."""
    key = "layers_block_type"
    names = c.layer_list(key, count)
    if names is None:
        raise c.error(key, "must be given, since the layers differ", "none", c.missing_list_fix)
    return check_kinds(c, key, names, ("hybrid", "linear_attention", "mamba"))
