"""Read Hugging Face's config.json in the schemas of transformers 4 (`rope_scaling`) and 5 (`rope_parameters`).

The `Architecture` of the model_type, from `models.py`, reads the config. Then any key about rotation that was not read
is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from ropewalk._checks import RopeError, argument, error, nearest, option, possible, shown, with_context
from ropewalk.configs import axes_rules, unread_keys
from ropewalk.configs.architecture import Architecture
from ropewalk.configs.layers import NO_ROPE, windows
from ropewalk.configs.model_ropes import ModelRopes, VisionRopes
from ropewalk.configs.models import ARCHITECTURES, name_of, vocabulary
from ropewalk.configs.reader import TRAINED, ConfigValue, Fields, Reader
from ropewalk.configs.source import Request
from ropewalk.configs.tables.no_rope import FOPE
from ropewalk.configs.tables.wrappers import FLAT_OR_NESTED, TOWER_KEYS, WRAPPERS
from ropewalk.configs.weights import Weights
from ropewalk.configs.wrappers import other_parts, text_model
from ropewalk.rope.rope import Pairing, Rope
from ropewalk.schemes import SCHEMES, Scaling, build

SHARED = ("rope_type", "rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that are allowed with every scheme."""
_OF_ENGINES = {
    "rope_traditional": "only mlx-lm reads it, and true means interleaved pairs there",
    "attn_rotary_emb": "only llama.cpp's converter reads it, as the number of channels that rotate",
}

_DRAFT = (
    "the file of a draft states no pairing, so it is that of its type. Drafts of Llama 4 were trained with interleaved "
    "pairs (TensorRT-LLM#19036). SGLang raises an error if max_position_embeddings is below the length of the target."
)


def read(config: Mapping[str, Any], source: str, asked: Request, weights: Weights | None = None) -> ModelRopes:
    """Read the ropes of a Hugging Face config. See `from_config` for arguments and errors."""
    fields = Fields(config, source)
    if (tower := _standalone_tower(fields)) is not None:
        asked.refuse(f"{tower.model_type}, a vision tower", "pairing", "base", "text_only", "like")
        return ModelRopes((), tower.model_type, source, vision=tower)
    if asked.like is not None:
        return _read_like(fields, asked.like, asked, weights)
    text = text_model(fields, asked.pairing is not None)
    ropes = _read_text(Reader(text.config, text.source, text.path, asked, weights))
    extra_ropes, tower, warnings = dict(ropes.extra_ropes), None, [*ropes.warnings, *text.warnings]
    warnings += [_DRAFT] * (fields.has("draft_vocab_size") or fields.has("speculators_model_type"))
    for key, part in [] if asked.text_only else other_parts(fields):
        read_part = _read_text(Reader(part.config, part.source, part.path, Request(text_only=True)))
        if len(set(read_part.layers)) == 1:
            extra_ropes[key] = read_part.rope
        else:
            kinds = zip(read_part.layer_kinds, read_part.layers, strict=True)
            extra_ropes |= {f"{key}.{kind}": rope for kind, rope in kinds if rope is not None}
        warnings += [*read_part.warnings, *part.warnings]
    if not asked.text_only and any(map(fields.has, TOWER_KEYS)):
        from ropewalk.configs import vision

        tower = vision.nested_tower(fields, warnings)
    return replace(ropes, extra_ropes=extra_ropes, vision=tower, warnings=tuple(warnings))


def _read_like(fields: Fields, like: str, asked: Request, weights: Weights | None) -> ModelRopes:
    """Read a config whose model_type, or that of its text model, is unknown, by the rules of the model_type `like`.

    Raises:
        RopeError: as `read`, or the model_type is known, or `like` is not.
    """
    if like not in ARCHITECTURES and like not in WRAPPERS:
        fix = f"`ropewalk explain --list` lists them.{nearest(like, [*ARCHITECTURES, *WRAPPERS])}"
        raise error("from_config", f"{option('like')} must be a model_type that ropewalk knows", shown(like), fix)
    text = text_model(fields)
    own = text.get("model_type")
    if own is not None and (not isinstance(own, str) or own in ARCHITECTURES):
        must = f"must be one that ropewalk does not know if {option('like')} is passed"
        raise text.error("model_type", must, shown(own), f"Omit {option('like')}.")
    path = text.path.split(".")[:-1]
    config = _with_model_type(fields.config, path, like)
    ropes = read(config, fields.source, replace(asked, like=None), weights)
    unknown = "The missing model_type" if own is None else f"model_type {own!a:.80} is not known and"
    warning = f"{unknown} is read by the rules of {like}, as {argument('like', like)} asks."
    ropes = replace(ropes, warnings=(warning, *ropes.warnings))
    if own is None or ropes.model_type != like:  # a model that contains others
        return ropes
    return replace(ropes, model_type=own, like=like, config={**(ropes.config or {}), "model_type": own})


def _with_model_type(config: Mapping[str, Any], path: list[str], model_type: str) -> dict[str, Any]:
    """Return the config with another model_type in the object at the end of `path`."""
    if not path:
        return {**config, "model_type": model_type}
    return {**config, path[0]: _with_model_type(config[path[0]], path[1:], model_type)}


def _standalone_tower(fields: Fields) -> VisionRopes | None:
    """Read the ropes of a config that describes only a vision tower, else return None."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type in ARCHITECTURES or model_type in WRAPPERS:
        return None
    from ropewalk.configs import vision

    return vision.standalone_tower(fields, model_type)


def find_text(config: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any]]:
    """Return the keys that lead to the config of the text model inside a config that can be read, and that config."""
    path = text_model(Fields(config, "config")).path.split(".")[:-1]
    return path, functools.reduce(operator.getitem, path, config)


def text_path(config: Mapping[str, Any]) -> list[str]:
    """Return the keys that lead to the text model in the object that transformers 5 makes of a config."""
    return find_text(config)[0] or [key for name, key in FLAT_OR_NESTED.items() if name == config.get("model_type")]


def _read_text(c: Reader) -> ModelRopes:
    unread_keys.check_size(c)
    row = _find_row(c)
    if row.length_key:
        c.longest = c.length(row.length_key) or c.longest
    try:
        ropes = _read_ropes(row, c)
    except RopeError:
        if not row.refusal:
            unread_keys.refuse_misspelt(c, vocabulary())
        raise
    if any(row.kinds.values()):  # in a model that never rotates, such keys have no effect
        c.warnings += unread_keys.refuse(c, {**_OF_ENGINES, **row.keys_without_effect}, row.keys())
    return replace(ropes, warnings=tuple(c.warnings))


def _read_ropes(row: Architecture, c: Reader) -> ModelRopes:
    """Read the ropes of all layers of a text model, by the steps of its row."""
    row.choose_sections(c)
    row.refuse_unsupported(c)
    pairing = row.read_pairing(c)
    layers = c.layer_kinds = row.kinds_of_layers(c)
    ropes: dict[str, Rope | None] = {NO_ROPE: None}
    extra_ropes: dict[str, Rope] = {}
    schemes: list[Scaling] = []
    for name in dict.fromkeys(layers):
        kind = row.kinds.get(name)
        if kind is None or c.is_null_kind(kind.section or name):
            ropes[name] = None
            continue
        rope_keys = row.collect(c, name, kind)
        base = row.base(c, name, kind, rope_keys)
        scheme = _scheme(row, c, rope_keys, bool(schemes))
        head_dim, rotary_dim, offset = row.shape(c, name, kind, rope_keys, scheme)
        axes = row.axes_of(c, rope_keys, rotary_dim)
        scheme = scheme if row.learned is None else row.learned(c, scheme, rotary_dim)
        with c.prefix_errors():
            if row.backwards:
                from ropewalk.schemes.reversed import Reversed

                scheme = Reversed(cast(Any, scheme))
            own = cast(Pairing, kind.pairing or pairing)
            rope = Rope(head_dim, base, own, rotary_dim=rotary_dim, rotary_offset=offset, scaling=scheme, axes=axes)
        ropes[name] = rope
        schemes += [] if scheme is None else [scheme]
        extra_ropes.update(row.extra_ropes(c, name, rope))
    c.warnings += [w for scheme in dict.fromkeys(schemes) for w in scheme.warnings(c.longest)]
    *_, last = ropes.values()
    if (c.get("model_type"), c.longest, last and (last.base, last.scaling)) == ("llama", 131_072, (500_000.0, None)):
        c.warnings.append("if the model is Llama 3.1 to 3.3, its file has lost rope_scaling, which it needs.")
    if chunked := c.length(f"dual_chunk_attention_config.{TRAINED}"):
        read = "dual_chunk_attention_config, which vLLM and SGLang read"
        c.warnings.append(f"beyond {chunked:,} tokens the model needs {read}.")
    return ModelRopes(
        layers=tuple(ropes[name] for name in layers),
        model_type=str(c.get("model_type")),
        source=c.source,
        trained_length=_trained_length(c.longest, schemes, row.trained_length(c) if row.trained_length else chunked),
        max_position_embeddings=c.longest,
        layer_kinds=tuple(layers),
        windows=windows(c.config, str(c.get("model_type")), layers),
        config=dict(c.config),
        extra_ropes=extra_ropes,
        softmax_factor=row.softmax_factor(c, schemes),
        query_scale=row.read_query_scale(c),
        rotates_values=row.rotates_values,
        output_order=row.output_order if pairing == "interleaved" else None,
        axis_names=row.axis_names(ropes),
        origins=c.origins,
        stated_twice=frozenset(  # a class that keeps both sections has one base
            c.stated_twice & {"rope_theta"} if row.sections == "rope_parameters" else c.stated_twice
        ),
    )


def _scheme(row: Architecture, c: Reader, rope_keys: dict[str, ConfigValue], scaled: bool) -> Scaling | None:
    """Return the scheme of a kind of layer, or None for rope_type "default". Its fields name the keys that it reads.

    Record where its parameters came from, unless only other layers have a scheme (`scaled`).

    Raises:
        RopeError: the scheme is unknown, a parameter is missing or invalid, or the scheme does not read a key.
    """
    rope_type = rope_keys.get("rope_type", ConfigValue("default", "rope_type"))
    name = rope_type.value
    if name != "default" and (not isinstance(name, str) or name not in SCHEMES):
        near = nearest(name, SCHEMES) if isinstance(name, str) else ""
        must, fix = f"must be one of default, {', '.join(SCHEMES)}", f"ropewalk knows no other scheme.{near}"
        raise c.error(rope_type.where, must, shown(name), fix)
    origins = {"scaling": rope_type.where if "rope_type" in rope_keys else "no rope_type is given"}
    scheme = None if name == "default" else SCHEMES[name].class_for_keys(rope_keys.keys())
    parameters = _parameters(row, c, rope_keys, str(name), scheme)
    if scheme is None:
        if not scaled:
            c.record_origin("scaling", origins["scaling"])
        return None
    values = {key: entry.value for key, entry in parameters.items()}
    origins.update({key: entry.where for key, entry in parameters.items()})
    for key, (value, where) in scheme.derived_fields(values, c.longest).items():
        values[key], origins[key] = value, where
    if name in ("yarn", "llama3") and TRAINED not in values and c.longest and row.known and row.in_transformers:
        values[TRAINED], origins[TRAINED] = c.longest, "max_position_embeddings"
        c.assume(
            f"the file has no {TRAINED} for rope_type {name!r}, for which transformers takes "
            f"max_position_embeddings ({c.longest}). Other engines may take another length."
        )
    _refuse_missing(c, str(name), scheme, values)
    try:
        found = build(scheme, values)
    except RopeError as e:
        sections = sorted({entry.where.split(".")[0] for entry in parameters.values()}) or ["rope_parameters"]
        raise with_context(f"{c.source}: {' and '.join(sections)}", e) from None
    if not scaled:
        c.origins.pop("scaling", None)  # the origin that layers without a scheme recorded
    for key, where in origins.items():
        c.record_origin(key, where)
    return found


def _parameters(
    row: Architecture, c: Reader, rope_keys: dict[str, ConfigValue], name: str, scheme: type[Scaling] | None
) -> dict[str, ConfigValue]:
    """Return the entries of `rope_keys` that the scheme reads. Add a warning for each key without an effect.

    Raises:
        RopeError: a key of `rope_scaling` or `rope_parameters` has no known meaning.
    """
    known = {f.name for f in dataclasses.fields(cast(Any, scheme))} if scheme is not None else set()
    without_effect = {} if scheme is None else scheme.keys_without_effect
    parameters = {}
    for key, entry in rope_keys.items():
        if key in known:
            parameters[key] = entry
        elif key in SHARED or "." not in entry.where or not entry.own or key in row.section_keys():
            continue
        elif key in without_effect or (key in ("attn_factor", "extrapolation_factor") and entry.value == 1):
            c.warnings.append(f"{entry.where} has no effect: it {without_effect.get(key, 'is 1, as without it')}.")
        elif key in ("fope_init_factor", "fope_sep_head", "num_inv_freq"):
            raise c.error(entry.where, "must not be given", shown(entry.value), FOPE)
        elif key in axes_rules.KEYS:
            reads = "knows this model_type" if row.known else "reads an unknown model_type"
            must = f"must not be given, since ropewalk {reads} with one position for each token"
            build = ": build Rope(..., axes=Axes.sections(...)) by hand, or Axes.interleaved(...) if axes alternate"
            keys = tuple(c.path + other.where for k, other in rope_keys.items() if k in axes_rules.KEYS)
            fix = f"It assigns pairs to several axes{possible(build)}. For text alone, pass {argument('ignore', keys)}."
            raise c.error(entry.where, must, shown(entry.value), fix)
        else:
            from ropewalk.engines import ENGINE_KEYS

            effect = "It would have no effect." if row.known else "The model_type is not known."
            effect += "" if "rope_type" in rope_keys else " Check whether rope_type is missing."
            close = nearest(key, [*sorted(known), *SHARED])
            effect += " Some engine reads it: see `ropewalk diff`." if key in ENGINE_KEYS else close
            raise c.unread(
                entry.where,
                f"must be a key that rope_type {name!r} reads",
                shown(entry.value),
                f"{effect} If the model's code does not read it, pass {argument('ignore', (c.path + entry.where,))}.",
            )
    return parameters


def _refuse_missing(c: Reader, name: str, scheme: type[Scaling], values: dict[str, Any]) -> None:
    for f in dataclasses.fields(cast(Any, scheme)):
        needed = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if f.name not in values and needed:
            fix = "Add it: without it, engines take another value or refuse the config."
            raise c.error(f.name, f"must be given for rope_type {name!r}", "none", fix)


def _trained_length(longest: int | None, schemes: list[Scaling], own: int | None) -> int | None:
    """Return the length in tokens that the model was trained on before scaling, or None if it is not known."""
    known = [length for scheme in schemes if (length := scheme.trained_length(longest)) is not None]
    stated = own if own is not None or schemes else longest
    return min(known) if known and len(known) == len(schemes) else stated


def _find_row(c: Reader) -> Architecture:
    """Return the `Architecture` of the config's model_type.

    If the model_type is unknown and the caller passed a pairing, build a general `Architecture`.
    """
    model_type = c.get("model_type")
    if not isinstance(model_type, str):
        fix = 'Add it, such as "llama", if the keys are those of transformers. Other programs use other keys.'
        if c.has("peft_type"):
            fix = f"An adapter rotates as its base model, {shown(c.get('base_model_name_or_path'))}. Read that config."
        raise c.error("model_type", "must be a string", shown(model_type), fix)
    if (row := ARCHITECTURES.get(name_of(model_type, c.config))) is not None:
        return row
    if c.passed_pairing is not None:
        from ropewalk.configs.families import unknown

        return unknown.architecture(c, c.passed_pairing)
    inside = [key for key, value in c.config.items() if isinstance(value, Mapping) and "model_type" in value]
    hint = _class_hint(c) or (f" It contains other models: pass config[{inside[0]!r}]." if inside else "")
    raise c.error(
        "model_type",
        "must be one that ropewalk knows",
        shown(model_type),
        f"The config alone does not define its rotation.{nearest(model_type, ARCHITECTURES)}{hint} If all layers "
        f"rotate alike, as in Llama, pass {argument('pairing', 'half')} or {argument('pairing', 'interleaved')}.",
    )


def _class_hint(c: Reader) -> str:
    """Return a hint if the key `architectures` names a class of a known model, with any head, else ""."""
    classes = c.get("architectures")
    known = {model_type.replace("_", "").lower(): model_type for model_type in (*WRAPPERS, *ARCHITECTURES)}
    for name in classes if isinstance(classes, list) else ():
        body = _CLASS.fullmatch(name) if isinstance(name, str) else None
        model_type = known.get(body[1].replace("_", "").lower()) if body is not None else None
        if model_type is not None:
            alike = f" If it rotates as {model_type} does, pass {argument('like', model_type)}."
            return f" Its class is {name}.{possible(alike, 'like')}"
    return ""


_CLASS = re.compile(r"(\w{2,60}?)(?:For[A-Z]\w{1,60}|(?:Reward|LMHead)?Model)")
"""The name of a class of transformers: that of the model, and its head (ForCausalLM, ForRewardModel, RewardModel)."""
