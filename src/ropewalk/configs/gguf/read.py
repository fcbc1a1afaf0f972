"""Read the ropes of a GGUF file, as llama.cpp interprets its keys and tensors.

Source: llama.cpp as vendored in llama-cpp-python 0.3.36: src/llama-model.cpp (load_hparams,
get_rope_factors), src/llama-context.cpp (the attention factor of YaRN), src/models/*.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ropewalk._checks import RopeError, argument, nearest, shown, unreadable_file
from ropewalk.configs.architecture import QueryScale
from ropewalk.configs.axes_rules import TEXT_ONLY
from ropewalk.configs.explain import ranges
from ropewalk.configs.families.functions import qwen3_length
from ropewalk.configs.gguf import header, scheme
from ropewalk.configs.gguf.axes import NAMES, axes_of
from ropewalk.configs.gguf.keys import ARCHITECTURES, Keys
from ropewalk.configs.gguf.row import BASE, DIM, HEAD, HEAD_MLA, KV_HEADS, LEADING, ORIGINAL, SECTIONS, SOURCE, Layers
from ropewalk.configs.layers import ALL, NO_ROPE, Every, Kind, LayerFlags, windows
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.reader import other_pairing
from ropewalk.configs.source import Request, without_keys
from ropewalk.configs.tables.gguf import HF_MODEL_TYPES, UNROTATED
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Pairing, Rope
from ropewalk.schemes import Scaling

_HF_SIZES = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
}
_HF_KINDS = {"conv", "full_attention", "linear_attention", "sliding_attention"}
_SYMMETRIC = ("gemma-embedding", "modern-bert")  # LLAMA_SWA_TYPE_SYMMETRIC: half on each side


def read(path: Path, asked: Request) -> ModelRopes:
    """Read the ropes of a GGUF file. See `from_config` for arguments and errors."""
    try:
        values, tensors = header.read(path)
    except RopeError:
        raise
    except (OSError, ValueError) as e:
        raise unreadable_file(str(path), e) from e
    values = without_keys(values, asked.ignore, str(path))
    return _read(Keys(values, str(path), tensors, asked))


def _read(c: Keys) -> ModelRopes:
    sections = _sections(c)
    pairing = _pairing(c, sections)
    c.refuse_unsupported()
    layers = _kinds_of_layers(c)
    of_row = c.row.kinds()
    kinds = {name: of_row[name] for name in dict.fromkeys(layers)}
    rotating = {name: kind for name, kind in kinds.items() if kind is not None}
    shapes = {name: (*_shape(c, kind), _base(c, kind)) for name, kind in rotating.items()}
    query_scale = _query_scale(c)
    window = {"sliding_window": c.get("attention.sliding_window")}
    window |= {"use_bidirectional_attention": "all"} if c.architecture in _SYMMETRIC else {}
    ropes: dict[str, Rope | None] = dict.fromkeys(kinds)
    scaling, scaling_type, extra_ropes = None, "none", {}
    with c.prefix_errors():
        if rotating:
            scaling, scaling_type = scheme.read(c)
            _check_unscaled(c, list(rotating.values()), scaling)
        for name, kind in rotating.items():
            head_dim, rotary_dim, offset, base = shapes[name]
            own: Any = scaling if kind.scaled else None
            if kind.halved and hasattr(own, "factors"):  # the tensor has factors for the pairs of all kinds of layers
                own = replace(own, factors=own.factors[: rotary_dim // 2])
            axes = _axes(c, sections, rotary_dim)
            rope = Rope(head_dim, base, pairing, rotary_dim=rotary_dim, rotary_offset=offset, scaling=own, axes=axes)
            ropes[name] = rope
            extra_ropes.update(_indexer(c, name, rope))
    unscaled = qwen3_length(c) if c.architecture in ("qwen3", "qwen3moe") else c.longest
    return ModelRopes(
        layers=tuple(ropes[name] for name in layers),
        model_type=c.architecture,
        source=c.source,
        trained_length=c.original or (unscaled if scaling is None else scaling.trained_length(c.longest)),
        max_position_embeddings=c.longest,
        extra_ropes=extra_ropes,
        softmax_factor=_softmax_factor(c, scaling, scaling_type, ropes),
        query_scale=query_scale,
        rotates_values=c.row.rotates_values,
        layer_kinds=() if c.row.layers is None else tuple(layers),
        windows=windows(window, "", layers),
        axis_names=NAMES[: max((r.axes.count for r in ropes.values() if r is not None and r.axes), default=0)],
        config=_hf_sizes(c, layers, ropes),
        file_format="GGUF file",
        origins=c.origins,
        warnings=tuple(filter(None, (*c.warnings, c.row.warning))),
    )


def _hf_sizes(c: Keys, layers: list[str], ropes: Mapping[str, Rope | None]) -> dict[str, Any] | None:
    """Return what the config.json of the same model states beside its rope, or None if its model_type is not known."""
    model_type = HF_MODEL_TYPES.get(c.architecture)
    if model_type is None:
        return None
    stated = {key: c.get(name) for key, name in _HF_SIZES.items()}
    heads = {rope.head_dim for rope in ropes.values() if rope is not None}
    sections: dict[str, Any] = {}
    if c.row.axes != "one" and c.has(SECTIONS):  # which the ropes of text tokens do not say
        flag = {"mrope_interleaved": True} if c.row.axes == "imrope" else {}
        sections = {"rope_parameters": {"mrope_section": [*c.get(SECTIONS)][:3], **flag}}
    return {
        "model_type": model_type,
        "num_hidden_layers": len(layers),
        **({"head_dim": heads.pop()} if len(heads) == 1 else {}),
        **({"layer_types": layers} if _HF_KINDS.issuperset(layers) else {}),
        **{key: value for key, value in stated.items() if type(value) is int and value},
        **sections,
    }


def _kinds_of_layers(c: Keys) -> list[str]:
    """Return the kind of each layer, one of the names in `GgufRow.kinds`. All layers of a kind share a rope.

    Raises:
        RopeError: a key has an invalid value, or the kinds cannot be determined.
    """
    count, switch = _number_of_layers(c), "rope.scaling.finetuned"
    if not c.boolean(switch, True) and c.row.finetuned_is_switch:
        c.origins["layer_types"] = f"{c.full(switch)} is false, so nothing rotates"
        return [NO_ROPE] * count
    layers, of_row = c.row.layers, c.row.kinds()
    if layers is None or _are_alike(c, layers, count):
        return [layers.alike if layers is not None else ALL] * count
    if isinstance(layers.pattern, str):
        return [layers.pattern] * count
    kinds = layers.pattern.kinds(c, count)
    if kinds is None:
        raise c.error(min(layers.pattern.keys()), "must be given, since the layers differ", "none", c.missing_list_fix)
    if layers.ignores_list and isinstance(layers.pattern, LayerFlags) and isinstance(layers.pattern.otherwise, Every):
        origin = c.origins["layer_types"]
        if kinds != replace(layers.pattern.otherwise, key="").kinds(c, count):
            must = f"must agree with the implied kinds ({c.origins['layer_types'].removeprefix('implied: ')})"
            fix = f"llama.cpp ignores the key ({c.row.source}). Convert the model again."
            raise c.error(layers.pattern.key, must, "another list", fix)
        c.origins["layer_types"] = origin
    leading = c.size(layers.leading) if layers.leading and c.get(layers.leading) != 0 else 0
    return [kind if i >= leading or of_row[kind] is not None else LEADING for i, kind in enumerate(kinds)]


def _number_of_layers(c: Keys) -> int:
    """Return the number of blocks without those at the end that only predict further tokens."""
    blocks = c.layers(("block_count",))
    c.origins["layers"] = c.full("block_count")
    if c.row.drafts or c.get(c.further_key) in (None, 0):
        return blocks
    c.origins["layers"] += f" - {c.full(c.further_key)}"
    return blocks - c.size(c.further_key, at_most=blocks - 1)


def _are_alike(c: Keys, layers: Layers, count: int) -> bool:
    """Whether all layers of this file are alike, although the layers of its architecture usually differ."""
    key = "attention.sliding_window"
    slides = c.get(key) not in (None, 0) and c.size(key) > 0
    if layers.zero_window_refusal and c.has(key) and not slides:
        raise c.error(key, "must not be 0", shown(c.get(key)), layers.zero_window_refusal)
    if layers.alike_without_window and not slides:
        c.origins["layer_types"] = f"no {c.full(key)} is given, so all layers are alike"
        return True
    if layers.count in (None, count):
        return False
    if slides:
        must = f"must be 0 or missing, since {c.architecture} has {count} layers instead of {layers.count}"
        fix = f"llama.cpp then rotates all layers ({c.row.source}). Read the model's config.json instead."
        raise c.error(key, must, shown(c.get(key)), fix)
    c.origins["layer_types"] = f"{count} layers instead of {layers.count}, so all are alike ({c.row.source})"
    return True


def _sections(c: Keys) -> tuple[int, ...] | None:
    """Return the number of pairs of each axis, or None if tokens have one position."""
    key, axes = SECTIONS, c.row.axes
    value = c.get(key)
    if axes == "one" or (axes == "mrope if sections" and value is None):
        return None
    if not isinstance(value, tuple) or len(value) != 4 or not all(type(n) is int and n >= 0 for n in value):
        raise c.error(key, "must be a list of 4 numbers of pairs", shown(value), "Convert the model again.")
    if axes == "mrope if sections" and not (value[0] and value[1]):
        return None
    if not any(value):
        raise c.error(key, "must assign at least one pair to an axis", shown(value), "Convert the model again.")
    if value[3]:
        fix = "The content of the fourth row of positions is not known. Read the model's config.json instead."
        raise c.error(key, "must not assign pairs to a fourth axis", shown(value), fix)
    if c.text_only:
        c.warnings.append(TEXT_ONLY)
    return value


def _axes(c: Keys, sections: tuple[int, ...] | None, rotary_dim: int) -> Axes | None:
    """Return the axis of each pair, or None if tokens have one position.

    Add warnings if the sections do not cover exactly the rotated pairs, or leave pairs to the fourth axis of ggml.
    """
    if sections is None:
        return None
    pairs, covered = rotary_dim // 2, sum(sections)
    axes = axes_of(sections, pairs, is_interleaved=c.row.axes == "imrope")
    if covered != pairs and not c.text_only:
        effect = (
            f"repeats the sections from pair {covered} on"
            if covered < pairs
            else f"ignores the sections beyond pair {pairs - 1}"
        )
        c.warnings.append(
            f"{c.full(SECTIONS)} = {list(sections)} covers {covered} pairs, but {pairs} rotate: "
            f"llama.cpp {effect}. The model's own code may not."
        )
    fourth = [i for i, a in enumerate(axes.axis) if a == 3]
    if fourth and c.text_only:
        c.warnings.append(
            f"llama.cpp does not rotate pairs {ranges(fourth)} of text tokens, since no axis of {SECTIONS} covers "
            "them. These ropes rotate them, as the model does."
        )
    elif fourth:
        c.warnings.append(
            f"no axis of {SECTIONS} covers pairs {ranges(fourth)}: llama.cpp gives them a fourth row of positions "
            "filled with 0, so pass zeros to reproduce it. The model's own code gives them the time."
        )
    if c.text_only:
        return None
    c.origins["axes"] = c.full(SECTIONS)
    return axes


def _pairing(c: Keys, sections: tuple[int, ...] | None) -> Pairing:
    if c.row.pairing is None:
        if c.pairing is None:
            known = [name for name, row in ARCHITECTURES.items() if row.pairing]
            raise c.error(
                "general.architecture",
                "must be one that ropewalk knows",
                shown(c.architecture),
                f"The file does not define its rotation.{nearest(c.architecture, known)} If all layers "
                f"rotate alike, pass {argument('pairing', 'half')} (NEOX in llama.cpp) or "
                f"{argument('pairing', 'interleaved')} (NORM).",
            )
        c.origins["pairing"] = "passed by the caller"
        return cast(Pairing, c.pairing)
    pairing: Pairing = c.row.pairing if sections is None else "half"  # MROPE always has the half pairing
    if c.pairing not in (None, pairing):
        raise c.error(
            "general.architecture",
            f"{c.architecture} requires the pairing {pairing!r} ({SOURCE})",
            argument("pairing", c.pairing),
            other_pairing(),
        )
    name = "NEOX" if sections is None else "MROPE"
    name = "NONE" if c.row.layers == UNROTATED else "NORM" if pairing == "interleaved" else name
    source = c.row.source if c.row.whole_head == "always" else SOURCE  # its own code passes the type and the channels
    c.origins["pairing"] = f"general.architecture {c.architecture}: {name} ({source})"
    return pairing


def _shape(c: Keys, kind: Kind) -> tuple[int, int, int]:
    """Return head_dim, rotary_dim and rotary_offset of a kind of layer, in channels."""
    head_dim = _head_dim(c, kind)
    rotary_dim = _rotary_dim(c, kind, head_dim)
    if not c.row.latent:
        return head_dim, rotary_dim, 0
    if not c.has(DIM) or rotary_dim >= head_dim:
        must = f"must be less than the {head_dim} channels of the head"
        raise c.error(DIM, must, shown(c.get(DIM)), "Convert the model again.")
    c.origins["rotary_dim"] = f"{c.full(DIM)}, the last of the head"
    return head_dim, rotary_dim, head_dim - rotary_dim


def _head_dim(c: Keys, kind: Kind) -> int:
    own = c.first_present(tuple(filter(None, (kind.head_dim_key, HEAD_MLA if c.row.latent else "", HEAD))))
    if c.has(own):
        c.record_origin("head_dim", c.full(own))
        return c.channels(own)
    if c.row.latent:
        fix = "Its head_dim is not embedding_length / head_count. Convert the model again."
        raise c.error(own, "must be given", "none", fix)
    width, heads = ("embedding_length",), ("attention.head_count",)
    c.record_origin("head_dim", c.quotient(width, heads))
    return c.head_width(width, heads, c.full(HEAD), fix=f"It is required if {c.full(HEAD)} is not given.")


def _rotary_dim(c: Keys, kind: Kind, head_dim: int) -> int:
    key = c.first_present(tuple(filter(None, (kind.dim_key, DIM))))
    if not c.has(key) or c.row.whole_head == "always":
        c.record_origin("rotary_dim", f"the whole head{' / 2' if kind.halved else ''}")
        return head_dim // (2 if kind.halved else 1)
    c.record_origin("rotary_dim", f"{c.full(key)}{' / 2' if kind.halved else ''}")
    rotary_dim = c.channels(key) // (2 if kind.halved else 1)
    if c.row.whole_head and rotary_dim != head_dim:
        must = f"must be the whole head of {head_dim} channels for {c.architecture}"
        raise c.error(key, must, str(rotary_dim), "llama.cpp refuses other values. Convert the model again.")
    return rotary_dim


def _base(c: Keys, kind: Kind) -> float:
    """Return the base of a kind of layer, from the first key in `bases` that has a value, or the implied base."""
    name = next((name for name in kind.bases if c.has(name)), BASE if BASE in kind.bases else "")
    if name == BASE:
        return _model_base(c)
    if base := c.number(name, above=1.0) if name else None:
        c.record_origin("base", c.full(name))
        return base
    if not kind.bases and c.get(BASE) not in (None, kind.implied_base):
        fix = f"llama.cpp has no other base for {c.architecture}. Read the model's config.json instead."
        raise c.error(BASE, f"must be {kind.implied_base:g}", shown(c.get(BASE)), fix)
    if kind.implied_base is None:
        fix = "llama.cpp uses 10000, which may not be the model's base. Convert the model again."
        others = "".join(f"or {c.full(name)} " for name in kind.bases[1:])
        raise c.error(kind.bases[0], f"{others}must be given, since it is the base", "none", fix)
    where = " in sliding layers" if kind.bases else ""
    c.record_origin("base", f"implied by {c.architecture}: {kind.implied_base:g}{where}")
    return kind.implied_base


def _model_base(c: Keys) -> float:
    if c.has(BASE):
        c.record_origin("base", c.full(BASE))
        return c.check_base(BASE, c.get(BASE))
    if c.passed_base is not None:
        c.record_origin("base", "passed by the caller")
        return c.passed_base
    implied = c.row.implied_base
    if implied is None:
        others = tuple(key for key in c.config if key.endswith(".freq_base"))  # as Ollama's own converter wrote
        unread = f" llama.cpp does not read {', '.join(others)}: pass {argument('ignore', others)}, too." * bool(others)
        fix = f"llama.cpp uses 10000, which may not be the model's base. Pass {argument('base')}.{unread}"
        raise c.error(BASE, "must be given, since it is the base", "none", fix)
    c.record_origin("base", f"implied: {implied.origin}")
    missing = f"the file has no {c.full(BASE)}, for which llama.cpp uses {implied.value:g}."
    c.assume(f"{missing} {implied.warning}")
    return implied.value


def _check_unscaled(c: Keys, kinds: list[Kind], scheme: Scaling | None) -> None:
    """Raise a RopeError if rope.scaling.attn_factor would multiply cos and sin of layers without a scheme."""
    key = "rope.scaling.attn_factor"
    if scheme is not None and not all(kind.scaled for kind in kinds) and c.get(key) not in (None, 1):
        fix = "A factor for sliding layers, which have no scaling, is not supported yet."
        raise c.error(key, "must be 1 or missing", shown(c.get(key)), fix)


def _indexer(c: Keys, kind: str, rope: Rope) -> dict[str, Rope]:
    indexer, key = c.row.indexer, "attention.indexer.key_length"
    if indexer is None or kind != indexer.kind or (indexer.optional and not c.has(key)):
        return {}
    width = c.channels(key)
    c.origins["indexer"] = c.full(key)
    offset = width - rope.rotary_dim if indexer.tail else 0
    return {"indexer": replace(rope, head_dim=width, pairing=indexer.pairing, rotary_offset=offset)}


def _softmax_factor(c: Keys, scaling: Scaling | None, scaling_type: str, ropes: dict[str, Rope | None]) -> float:
    """Return the factor by which llama.cpp multiplies the softmax scale (DeepSeek), dimensionless."""
    if not c.row.scales_softmax or scaling is None:
        return 1.0
    if scaling_type != "yarn":
        must = f"must be yarn for {c.architecture}"
        fix = "With another type llama.cpp changes the softmax scale, which is not supported."
        raise c.error("rope.scaling.type", must, scaling.rope_type, fix)
    yarn_factor = next(rope.attention_factor for rope in ropes.values() if rope is not None and rope.scaling)
    if yarn_factor != 1.0:
        c.warnings.append(
            f"llama.cpp multiplies cos and sin by {yarn_factor:.6g} and also the softmax scale by its square. The "
            "model's own code may not."
        )
    factor = scaling.softmax_factor * yarn_factor * yarn_factor
    if not math.isfinite(factor):
        must = "must give a finite softmax factor"
        raise c.error("rope.scaling.yarn_log_multiplier", must, "infinity", "Released models have about 0.1.")
    return factor


def _query_scale(c: Keys) -> QueryScale | None:
    """Return the factor of q that grows with its position, or None."""
    if c.row.query_scale is not None:
        return c.row.query_scale
    name = c.row.temperature_length
    beta = c.number("attention.temperature_scale", at_least=0.0) if name else None
    if not beta:
        return None
    length = c.length(name)
    if length is None and name == ORIGINAL:
        length = c.longest
    length = c.require(name, length, "attention.temperature_scale needs it.")
    c.origins["query_scale"] = c.full("attention.temperature_scale")
    return QueryScale(beta=beta, original_max_position_embeddings=cast(int, length))
