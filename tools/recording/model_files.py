"""engine_models/: what an engine's file for a model reads from a config, found by changing one key at a time.

Every engine has a probe, which builds the engine's own model from a config and returns the rope of each layer. A row of
`models_of_ENGINE.json` states which keys decide this rope. To find the keys of the base, each candidate gets another
value, and the base of the rope shows which one was read. That key is removed, and so on until no candidate is left. The
same is done for the objects that hold the scaling, and for the rotated fraction of the head.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from . import files
from .model import CannotRecordError

Rope = dict[str, Any]
"""The rope of a layer: rotary_dim, pairing, inv_freq (of all pairs that rotate) and attention_factor."""
Probe = Callable[[dict[str, Any]], list[Rope | None]]


@dataclass(frozen=True)
class Engine:
    """An engine whose models can be built.

    Args:
        name: the name of its golden files.
        package: the package to install.
        file: returns the file of the model of a config. It raises `AbsentError` if there is none, and `BorrowedError`
            if the engine runs the model with the code of transformers.
        layers: builds the model of a config, and returns the rope of each layer, or None for a layer without one. It
            raises `CannotRecordError` if the ropes cannot be measured, and any other exception if the engine cannot
            load the config.
        fill: completes a config, and returns it with the names of the added keys.
        always: maps a model_type to keys about rotation without which its file cannot be built.
        by_transformers: the model_types whose file computes frequencies with the functions of transformers.
        permutes: the model_types whose weights of q and k the engine permutes when it loads them. The pairing with
            which it rotates them says nothing about the original weights.
        runs: whether `layers` returns the ropes that a forward pass applies, and not only those that were built.
        extra: keys that the engine requires in every object that holds a scaling.
        loaded: changes a config as the engine does when it loads the file, if `layers` does not.
        described: whether the rules say what is applied in place of another scheme. Then rows leave it out.
    """

    name: str
    package: str
    file: Callable[[dict[str, Any]], str]
    layers: Probe
    fill: Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]] = lambda config: (config, [])
    always: dict[str, dict[str, Any]] = field(default_factory=dict)
    by_transformers: frozenset[str] = frozenset()
    permutes: frozenset[str] = frozenset()
    runs: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    loaded: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    described: bool = False

    def ropes(self, config: dict[str, Any]) -> list[Rope | None]:
        """Return the rope of each layer, with the pairing "" if the engine permutes the weights."""
        found = self.layers(config)
        if config["model_type"] not in self.permutes:
            return found
        return [None if rope is None else {**rope, "pairing": ""} for rope in found]

    def record(self, row: dict[str, Any]) -> dict[str, Any]:
        """Record the row of a model_type."""
        name = row["model_type"]
        if row.get("how") == "read":
            raise CannotRecordError("read by hand")
        errors = []
        for config in references(*name.split("/")):
            try:
                file = self.file(config)
            except AbsentError as error:
                return {"model_type": name, "absent": message(error)}
            except BorrowedError as error:
                return {"model_type": name, "file": str(error), "borrowed": "transformers"}
            try:
                found, needs = self._trace(config)
            except Exception as error:
                errors.append(message(error))
                continue
            needs += found.pop("needs", [])
            if self.described:
                found = _without_other(found)
            found |= {"by_transformers": True} if name.partition("/")[0] in self.by_transformers else {}
            return {"model_type": name, "file": file, **({"needs": needs} if needs else {}), **found}
        raise CannotRecordError("; ".join(dict.fromkeys(errors)) or "there is no config")

    def _trace(self, config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the row of a config, and the keys that had to be added because the engine does not load it."""
        always = self.always.get(config["model_type"])
        filled, needs = self.fill(config)
        if filled != config and not {*FRACTIONS} & filled.keys():  # those are needed to see which of them it reads
            with contextlib.suppress(Exception):
                return Trace(self, Reference(config, always, self.extra)).row(), []
        return Trace(self, Reference(filled, always, self.extra)).row(), needs


def _without_other(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the exceptions that another scheme is applied."""
    kept = {cause: outcome for cause, outcome in row.get("others", {}).items() if outcome != OTHER}
    own = {kind: _without_other(each) for kind, each in row.get("kinds", {}).items()}
    rest = {key: value for key, value in row.items() if key not in ("others", "kinds")}
    return {**rest, **({"others": kept} if kept else {}), **({"kinds": own} if own else {})}


class AbsentError(Exception):
    """The engine has no model of this model_type."""


class BorrowedError(Exception):
    """The engine runs the model with the code of transformers. The message is the file that does so."""


@functools.cache
def configs() -> dict[str, list[dict[str, Any]]]:
    """Return the golden configs of each model_type."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in ("class_defaults", "text_models", "released"):
        for row in files.load(files.FOLDER / f"{file}.json")["rows"]:
            found.setdefault(row["config"].get("model_type"), []).append(row["config"])
    return found


LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}
_MOE = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
_GLM = {"attention_bias": True, "head_dim": 64, "partial_rotary_factor": 0.5, "tie_word_embeddings": False}
_GRANITE = {
    "attention_bias": False,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "layer_types": ["attention"] * 4,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
_HUNYUAN = {
    "attention_bias": False,
    "cla_share_factor": 2,
    "moe_topk": 2,
    "num_experts": 4,
    "num_shared_expert": 1,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
}
_DBRX = {
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 2},
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
}
OWN: dict[str, list[dict[str, Any]]] = {
    "dbrx": [{"d_model": 256, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "vocab_size": 64, **_DBRX}],
    "deepseek": [{**LLAMA, **_MOE}],
    "dots1": [{**LLAMA, **_MOE, "attention_bias": False, "head_dim": 64, "tie_word_embeddings": False}],
    "glm4_moe": [{**LLAMA, **_MOE, **_GLM, "use_qk_norm": True}],
    "granitemoehybrid": [{**LLAMA, **_GRANITE, "position_embedding_type": "rope"}],
    "hunyuan": [{**LLAMA, **_HUNYUAN}],
    "llava": [{"text_config": {**LLAMA, "model_type": name}} for name in ("llama", "mistral", "qwen2")],
    "minicpm": [{**LLAMA, "dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 12.0}],
    "mistral3": [{"text_config": {**LLAMA, "model_type": "mistral"}}],
    "phi": [{**LLAMA, "hidden_size": 320, "layer_norm_eps": 1e-6, "partial_rotary_factor": 0.4}],
    "qwen2_5_vl": [LLAMA],
    "xverse": [LLAMA],
}
"""Configs of model_types of which no golden file has a config from which an engine builds the model."""


def references(model_type: str, text: str = "") -> list[dict[str, Any]]:
    """Return configs of a model_type: its class defaults in transformers, and published ones.

    Configs with more kinds of layers come first. Also return one that contains the text model, by default that of the
    same name. If there is no such config, the config has no other key, and an engine can still say whether it has
    the model.

    Args:
        model_type: the model_type.
        text: the model_type of the text model inside, "" for any.
    """
    own = [{"model_type": model_type, **each} for each in OWN.get(model_type, [])]
    name = text or f"{model_type}_text"
    inner = [{"model_type": model_type, "text_config": each} for each in configs().get(name, ())[:1]]
    if model_type in ("qwen2_5_omni", "qwen3_omni_moe"):
        inner = [{"model_type": model_type, "thinker_config": each} for each in inner]
    found = [*own, *configs().get(model_type, ()), *inner]
    found.sort(key=lambda config: -len(set(config.get("layer_types") or ())))
    return [each for each in found if text in ("", inner_type(each))] or [{"model_type": model_type}]


TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "vlm_config")
"""Keys of the text model in the config of a model that contains one."""


def inside_of(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys that lead to the text model inside a config, or () if there is none."""
    key = next((key for key in TEXT if isinstance(config.get(key), dict)), "")
    return (key, *inside_of(config[key])) if key else ()


def inner_type(config: dict[str, Any]) -> str:
    """Return the model_type of the text model inside a config, or "" if there is none."""
    inside = inside_of(config)
    return str(functools.reduce(dict.__getitem__, inside, config).get("model_type", "")) if inside else ""


BASES = (
    "rope_theta",
    "rotary_emb_base",
    "rope_local_base_freq",
    "swa_rope_theta",
    "global_rope_theta",
    "local_rope_theta",
    "compress_rope_theta",
    "attn_config.rope_theta",
)
OF_LAYERS = "layer_rope_theta"
"""A key with the base of each layer, or 0 for a layer that does not rotate."""
FRACTIONS = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_dim", "attn_rotary_emb")
SECTIONS = ("rope_scaling", "rope_parameters")
_PRIMES = (20011.0, 30011.0, 40009.0, 50021.0, 60013.0, 70001.0, 80021.0, 90001.0, 110017.0, 120011.0, 130003.0)
MISSING = object()
_LONG, _TRAINED, _BASE = 256, 64, 20011.0
TOKENS = 2 * _LONG
"""The length of the sequence for which a probe measures a rope, in tokens."""


def scaling(scheme: str, pairs: int, factor: float = 8.0) -> dict[str, Any]:
    """Return the keys of a scheme, without its name."""
    trained = {"original_max_position_embeddings": _TRAINED}
    return {
        "default": {},
        "linear": {"factor": factor},
        "su": _lists(pairs, factor),
        "dynamic": {"factor": factor, "max_trained_positions": _TRAINED},  # vLLM divides by this length
        "llama3": {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **trained},
        "yarn": {"factor": factor, **trained},
        "longrope": _lists(pairs, factor),
    }[scheme]


def _lists(pairs: int, factor: float) -> dict[str, Any]:
    short, long = [2.0 + factor] * pairs, [4.0 + factor] * pairs
    lengths = {"factor": _LONG / _TRAINED, "original_max_position_embeddings": _TRAINED}
    return {"short_factor": short, "long_factor": long, **lengths}


OTHER = "another scheme"
_NAMES = ("type", "rope_type")
SCHEMES = ("linear", "dynamic", "llama3", "yarn", "longrope", "su")


YARN_BY_ONE = {"type": "yarn", "rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": _TRAINED}
EXTRA: dict[str, dict[str, Any]] = {
    "gpt_oss": {"factor": 1.0, "original_max_position_embeddings": _TRAINED, "beta_fast": 32.0, "beta_slow": 1.0},
    "hunyuan": {"alpha": 1000.0},
    "hunyuan_v1_dense": {"alpha": 1000.0},
    "hunyuan_v1_moe": {"alpha": 1000.0},
    "ministral3": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": _TRAINED},
    "mistral3": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": _TRAINED},
    "mistral4": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": _TRAINED},
    "phimoe": {"short_mscale": 1.1, "long_mscale": 1.3},
}
"""Keys of `rope_scaling` and `rope_parameters` that a file for the model_type requires, besides those of the scheme."""


_SMALL = ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size", "vocab_size")
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


def shrink(config: dict[str, Any]) -> None:
    """Make a model smaller, in place: feed-forward layers, vocabulary, and the number of layers."""
    for values in [config, *(value for value in config.values() if isinstance(value, dict))]:
        values.update({key: 64 for key in _SMALL if isinstance(values.get(key), int)})
    for key in _DEPTHS:
        depth = config.get(key)
        if not isinstance(depth, int):
            continue
        lists = {name: value for name, value in config.items() if isinstance(value, list) and len(value) == depth}
        kept = min(depth, 12 if lists else 8)
        if all({*map(str, value[:kept])} == {*map(str, value)} for value in lists.values()):
            config.update({key: kept, **{name: value[:kept] for name, value in lists.items()}})
            if layers := config.get("per_layer_config"):
                config["per_layer_config"] = {index: own for index, own in layers.items() if int(index) < kept}


def filled(config: dict[str, Any], values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a config with values under paths such as "text_config.head_dim", and the paths that it did not have."""
    whole, added = copy.deepcopy(config), []
    for path, value in values.items():
        *folders, key = path.split(".")
        place = functools.reduce(lambda inside, folder: inside.setdefault(folder, {}), folders, whole)
        added += [] if key in place else [path]
        place[key] = copy.deepcopy(value)
    return whole, added


def _nested_parameters(model_type: str) -> dict[str, Any]:
    """Return nested `rope_parameters` of a text model, or {} if no config of it has them."""
    known = (config.get("rope_parameters") or {} for config in configs().get(model_type, ()))
    return next((each for each in known if any(isinstance(value, dict) for value in each.values())), {})


class Reference:
    """A config from which an engine builds a model, without the keys about rotation.

    Args:
        config: the config.
        always: keys about rotation without which no engine's file for this model can be built.
        extra: keys that the engine requires in every object that holds a scaling.
    """

    def __init__(
        self, config: dict[str, Any], always: dict[str, Any] | None = None, extra: dict[str, Any] | None = None
    ) -> None:
        self.always = always or {}
        self.whole = copy.deepcopy(config)
        self.inside = inside_of(config)
        text = self.text(self.whole)
        self.extra = {**(extra or {}), **EXTRA.get(str(config["model_type"]), {})}
        text.update({key: value for key, value in self.always.items() if key in FRACTIONS})
        parameters = text.get("rope_parameters") or _nested_parameters(str(text.get("model_type")))
        self.sections = [name for name, value in parameters.items() if isinstance(value, dict)]
        self.mla = mla = text.get("qk_rope_head_dim")  # a slice of the head, which rotates as a whole
        stated = any(key in text for key in FRACTIONS) or "partial_rotary_factor" in json.dumps(parameters)
        self.has_fraction = stated and not mla
        self.fraction_keys = [key for key in FRACTIONS if text.get(key) is not None]
        attention = text.get("attn_config")
        for key in (*BASES, *FRACTIONS, *SECTIONS):
            text.pop(key, None)
        if isinstance(attention, dict):
            attention.pop("rope_theta", None)
        shrink(text)
        self.of_layers = text.pop(OF_LAYERS, None)
        if text.get("max_position_embeddings"):
            text["max_position_embeddings"] = _LONG

    def text(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config of the text model inside a config."""
        return functools.reduce(dict.__getitem__, self.inside, config)

    def with_keys(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the config with further keys, and without those that are `MISSING`. "a.b" is the key b inside a."""
        whole = copy.deepcopy(self.whole)
        for path, value in values.items():
            if path == OF_LAYERS:
                value = [value if base else 0 for base in self.of_layers or ()]
            place = self.text(whole)
            *folders, key = path.split(".")
            for folder in folders:
                if not isinstance(place.get(folder), dict):
                    place[folder] = {}
                place = place[folder]
            place[key] = copy.deepcopy(value)
            if value is MISSING:
                del place[key]
        return whole

    def kinds(self, layers: list[Any]) -> dict[str, int]:
        """Map each kind of layer that rotates to the first such layer."""
        names = self.text(self.whole).get("layer_types")
        named = names if isinstance(names, list) and len(names) == len(layers) else ["all"] * len(layers)
        first: dict[str, int] = {}
        for index, (name, rope) in enumerate(zip(named, layers, strict=True)):
            if rope is not None:
                first.setdefault(name, index)
        return first


def base_of(rope: Rope, candidates: Iterable[float]) -> float | None:
    """Return the base of an unscaled rope: one of the candidates if it fits, else rounded to five digits.

    Pair i has the frequency base^(−2i / dim), where dim is the number of channels that rotate, or of all channels in
    Gemma 4. Return None if the frequencies are not of this form.
    """
    found = rope["inv_freq"]
    last = len(found) - 1
    if any(not math.isclose(w, found[-1] ** (i / last), rel_tol=1e-5) for i, w in enumerate(found)):
        return None
    for dim in dict.fromkeys((rope["rotary_dim"], rope["head_dim"])):
        for base in candidates:
            if math.isclose(base ** (-2 * last / dim), found[-1], rel_tol=5e-6):
                return base
    base = float(f"{found[-1] ** (-rope['rotary_dim'] / (2 * last)):.5g}")
    return base if base > 1000.0 else None  # no such base is a default, so the rope has a scaling by default


class Trace:
    """The row of one model in one engine."""

    def __init__(self, engine: Engine, reference: Reference) -> None:
        self.probe, self.runs, self.reference = engine.ropes, engine.runs, reference
        self.loaded = engine.loaded
        # In nested rope_parameters, a file reads the object of the kind of layer.
        self.nested = bool(reference.sections)

    def _section(self, section: str, kind: str) -> str:
        return f"{section}.{kind}" if section == "rope_parameters" and self.nested else section

    def _sections(self) -> list[str]:
        names = self.reference.sections if self.nested else [""]
        return [f"rope_parameters.{name}".rstrip(".") for name in names]

    def _values(
        self, bases: dict[str, float], fractions: dict[str, float] | None = None, *, always: bool = True
    ) -> dict[str, Any]:
        """Return keys for a config: these bases and fractions, and the type "default" in `rope_parameters`."""
        values: dict[str, Any] = {}
        fractions = self._fractions() if fractions is None else fractions
        for section in self._sections():
            inner = [path for path in (*bases, *fractions) if path.startswith(f"{section}.")]
            if inner:
                values[f"{section}.rope_type"] = "default"
                values.update({f"{section}.{key}": value for key, value in self.reference.extra.items()})
        kept = {key: value for key, value in self.reference.always.items() if always and key not in FRACTIONS}
        return {**kept, **values, **bases, **fractions}

    def _fractions(self) -> dict[str, float]:
        """Return every key of the rotated fraction of the head, with the value for half of the head."""
        if not self.reference.has_fraction:
            return {}
        paths = [*self.reference.fraction_keys, *(f"{section}.partial_rotary_factor" for section in self._sections())]
        return {path: self._fraction(path, 0.5) for path in dict.fromkeys(("partial_rotary_factor", *paths))}

    def _fraction(self, path: str, fraction: float) -> float:
        return int(self.head * fraction) if path in ("rotary_dim", "attn_rotary_emb") else fraction

    def _bases(self) -> list[str]:
        of_layers = [OF_LAYERS] if self.reference.of_layers else []
        return [*of_layers, *BASES, *(f"{section}.rope_theta" for section in self._sections())]

    def row(self) -> dict[str, Any]:
        """Record the row."""
        everywhere = dict.fromkeys(self._bases(), _BASE)
        text = self.reference.text(self.reference.whole)
        # A file may pass only the channels that rotate, so the head size comes from the config.
        width, heads = (
            first_of(text, *names)
            for names in (("hidden_size", "n_embd", "d_model"), ("num_attention_heads", "n_head", "n_heads"))
        )
        self.head_is_stated = "head_dim" in text
        self.head = int(text.get("head_dim") or text.get("qk_rope_head_dim") or width // heads)
        self.everywhere = everywhere
        layers = self.probe(self.reference.with_keys(self._values(everywhere)))
        kinds = self.reference.kinds(layers)
        if not kinds and self.reference.inside:
            raise CannotRecordError("no layer of its text model has a rope")
        if not kinds:
            return {"rotates": False}
        self.same_pairs = len({len(layers[index]["inv_freq"]) for index in kinds.values()}) == 1
        rows = {kind: self._kind(kind, index) for kind, index in kinds.items()}
        first = next(iter(rows.values()))
        if self.reference.inside and not first["base"]:
            raise CannotRecordError("it reads the text model from another place, or no key of its base")
        needs = self._needed_base(first)
        alike = not self.nested and all(row == first for row in rows.values())
        return {**needs, **(first if alike else {"kinds": rows}), **(self._pattern() if self.runs else {})}

    def _needed_base(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the key without which the file does not load a config, although the key is not its base."""
        paths = [path for path in self._bases() if path.startswith("rope_parameters")]
        if any(path in BASES for path in row["base"]) and isinstance(row["otherwise"], str):
            return {}
        for more in ((), *((path,) for path in BASES)):
            try:
                self.probe(self.reference.with_keys(self._values(dict.fromkeys((*paths, *more), _BASE))))
            except Exception:
                continue
            return {"needs": [".".join((*self.reference.inside, path)) for path in more]} if more else {}
        return {}

    def _pattern(self) -> dict[str, Any]:
        """Record which key assigns the kinds of layers, if it is not `layer_types`."""
        text = self.reference.text(self.reference.whole)
        kinds = text.get("layer_types")
        if not isinstance(kinds, list) or len(set(kinds)) < 2 or kinds == kinds[::-1]:
            return {}
        if self._groups({"layer_types": kinds[::-1]}) == groups(kinds[::-1]):
            return {}
        count, key = len(kinds), PATTERN
        if all(self._groups({key: n}) == groups(every(n, count)) for n in (2, 3)):
            default = next(
                (n for n in range(2, count + 1) if self._groups({key: MISSING}) == groups(every(n, count))), 0
            )
            try:
                self.probe(self.reference.with_keys({**self._values(self.everywhere), key: count + 1}))
            except Exception as error:
                return {"every": [key, default, message(error)]}
            return {"every": [key, default, ""]}
        return {"every": None}

    def _groups(self, keys: dict[str, Any]) -> list[int] | None:
        """Number the layers of a config by their ropes, which differ if the kinds of the layers do."""
        values = {**self._values(dict(zip(self._bases(), _PRIMES, strict=False))), **keys}
        values |= {"rope_scaling.type": "linear", "rope_scaling.rope_type": "linear", "rope_scaling.factor": 3.0}
        try:
            return groups([repr(rope) for rope in self.probe(self.reference.with_keys(values))])
        except Exception:
            return None

    def _kind(self, kind: str, index: int) -> dict[str, Any]:
        keys, otherwise = self._read_base(index)
        rope = self._rope(self._values(self.everywhere), index)
        row: dict[str, Any] = {"base": keys, "otherwise": otherwise, "pairing": rope["pairing"]}
        row |= self._read_scaling(kind, index, rope)
        known = self.head_is_stated or rope["head_dim"] == self.head
        if known and rope["rotary_dim"] < self.head and not self.reference.mla:
            self.reference.has_fraction = True  # it rotates a part by its own default
        if self.reference.has_fraction:
            row |= self._read_fraction(index)
        return row

    def _rope(self, values: dict[str, Any], index: int) -> Rope:
        rope = self.probe(self.reference.with_keys(values))[index]
        if rope is None:
            raise CannotRecordError("the layer stops rotating")
        return rope

    def _read_base(self, index: int) -> tuple[list[str], float | str | None]:
        """Return the keys of the base in the order in which they are read, and the base of a config without them."""
        found, _, _ = self._trace_base(index, self._bases())
        older = [path for path in self._bases() if not path.startswith("rope_parameters")]
        more, without, loads = self._trace_base(index, older)  # some files read these keys without rope_parameters only
        if not loads:
            return [path for path in found if path not in older], without
        return [*found, *(path for path in more if path not in found)], without

    def _trace_base(self, index: int, paths: list[str]) -> tuple[list[str], float | str | None, bool]:
        """Return the keys, the base without them, and whether the file loads a config with all of these keys."""
        left = dict(zip(paths, _PRIMES, strict=False))
        found: list[str] = []
        newer = any(path.startswith("rope_parameters") for path in paths)
        fractions = {p: v for p, v in self._fractions().items() if newer or not p.startswith("rope_parameters")}
        while True:
            try:
                base = base_of(self._rope(self._values(left, fractions), index), left.values())
            except (CannotRecordError, AbsentError):
                raise
            except Exception as error:
                return found, message(error), len(left) < len(paths)
            read = next((path for path, value in left.items() if value == base), None)
            if read is None:
                return found, base, True
            found.append(read)
            del left[read]

    def _read_fraction(self, index: int) -> dict[str, Any]:
        left = list(self._fractions())
        shares = dict(zip(left, (0.375, 0.625, 0.875, 0.125), strict=False))
        found: list[str] = []
        while True:
            values = {path: self._fraction(path, shares[path]) for path in left}
            try:
                rope = self._rope(self._values(self.everywhere, values), index)
            except (CannotRecordError, AbsentError):
                raise
            except Exception as error:
                return {"fraction": found, "otherwise_fraction": self._loaded_fraction(index) or message(error)}
            share = rope["rotary_dim"] / max(rope["head_dim"], self.head)
            read = next((path for path in left if shares[path] == share), None)
            if read is None:
                return {"fraction": found, "otherwise_fraction": share}
            found.append(read)
            left.remove(read)

    def _loaded_fraction(self, index: int) -> float | None:
        """Return the fraction that an engine adds when it loads a config without one, or None if it adds none."""
        config = self.loaded(self.reference.with_keys(self._values(self.everywhere, {})))
        with contextlib.suppress(Exception):
            rope = self.probe(config)[index]
            return None if rope is None else float(rope["rotary_dim"] / max(rope["head_dim"], self.head))
        return None

    def _read_scaling(self, kind: str, index: int, plain: Rope) -> dict[str, Any]:
        """Find the objects whose scaling the file applies, and the schemes that it treats in another way."""
        pairs = len(plain["inv_freq"])
        schemes = SCHEMES if self.same_pairs else SCHEMES[:-2]  # the lists of LongRoPE would fit one kind only
        if "alpha" in self.reference.extra:  # Hunyuan's scheme depends on numbers that a file may compare
            schemes = tuple(scheme for scheme in schemes if scheme != "dynamic")
        outcomes = {
            (section, scheme): self._outcome(section, kind, index, plain, scheme, pairs)
            for section in SECTIONS
            for scheme in schemes
        }
        self._mark_others(outcomes, kind, index, pairs, plain)
        read = [section for section in SECTIONS if any(outcomes[section, scheme] == "applied" for scheme in schemes)]
        both = [scheme for scheme in schemes if all(outcomes[section, scheme] == "applied" for section in SECTIONS)]
        if len(read) == 2 and both:
            read = self._order(kind, index, both[0], pairs)
        row: dict[str, Any] = {"scaling": read}
        others: dict[str, str] = {}
        needed: list[str] = []
        for section in read:
            for scheme in schemes:
                if outcomes[section, scheme] != "applied":
                    others[scheme if len(read) == 1 else f"{section} {scheme}"] = outcomes[section, scheme]
            applied = next(scheme for scheme in schemes if outcomes[section, scheme] == "applied")
            stated = dict(self._form(section, index, plain)[0])
            stated.pop(section, None)
            stated |= self._scaled(section, kind, applied, pairs, 8.0, _NAMES)
            for key in self.reference.extra:
                try:
                    self._rope({path: each for path, each in stated.items() if not path.endswith(f".{key}")}, index)
                except (KeyError, TypeError):
                    needed.append(key)
            for key in ("type", "rope_type"):
                alone = self._outcome(section, kind, index, plain, applied, pairs, (key,))
                if alone != "applied":
                    others[f"only {key}" if len(read) == 1 else f"{section} only {key}"] = alone
            default = self._outcome(section, kind, index, plain, "default", pairs)
            if default == "applied" or OTHER in others.values():  # it may apply its own scheme with a factor of 1
                others.update({cause: OTHER for cause, outcome in others.items() if outcome == "dropped"})
            if default != "dropped":
                others["default" if len(read) == 1 else f"{section} default"] = (
                    OTHER if default == "applied" else default
                )
        if needed:
            row["section_needs"] = list(dict.fromkeys(needed))
        values = self._values(self.everywhere, always=False)
        for name, more in (("none", {}), ("null", {"rope_scaling": None}), ("empty", {"rope_scaling": {}})):
            outcome = self._attempt({**values, **more}, index, plain)
            if outcome != "dropped":
                others[name] = OTHER if outcome == "applied" else outcome
        if not read:  # a file that reads no scaling may still reject it
            for section in SECTIONS:
                for key in _NAMES:
                    outcomes[section, f"only {key}"] = self._outcome(
                        section, kind, index, plain, "linear", pairs, (key,)
                    )
            others.update({" ".join(key): outcome for key, outcome in outcomes.items() if outcome != "dropped"})
        return {**row, "others": others} if others else row

    def _mark_others(
        self, outcomes: dict[tuple[str, str], str], kind: str, index: int, pairs: int, plain: Rope
    ) -> None:
        """Mark schemes in place of which the file applies another one.

        Schemes that give the same rope are marked. If the slowest pair is slowed by the factor and the fastest is not,
        this scheme is YaRN. Linear scaling slows every pair by the factor. LongRoPE with the short list for a sequence
        above the trained length is another scheme, unless the reference states a trained length of its own.
        """
        states = "original_max_position_embeddings" in self.reference.text(self.reference.whole)
        short = None if states else {round(1 / _lists(1, 8.0)["short_factor"][0], 4)}
        for section in SECTIONS:
            same: dict[str, list[str]] = {}
            for scheme in ("linear", "dynamic", "llama3", "yarn", "longrope"):
                if outcomes.get((section, scheme)) == "applied":
                    values, unscaled = self._form(section, index, plain)
                    rope = self._rope(values | self._scaled(section, kind, scheme, pairs, 8.0, _NAMES), index)
                    slowed = {round(a / b, 4) for a, b in zip(rope["inv_freq"], unscaled["inv_freq"], strict=False)}
                    is_own = slowed == {0.125} if scheme == "linear" else scheme == "yarn" and slowed >= {1.0, 0.125}
                    if scheme == "linear" and not is_own and base_of(unscaled, ()) is not None:
                        outcomes[section, scheme] = OTHER
                    if scheme == "longrope" and slowed == short:
                        outcomes[section, scheme] = OTHER
                    same.setdefault(repr(rope), []).append("" if is_own else scheme)
            marked = [each for schemes in same.values() if len(schemes) > 1 for each in schemes if each]
            outcomes.update({(section, each): OTHER for each in marked})

    def _scaled(
        self, section: str, kind: str, scheme: str, pairs: int, factor: float, keys: tuple[str, ...]
    ) -> dict[str, Any]:
        names = dict.fromkeys(keys, scheme)
        path = self._section(section, kind)
        values = {**self.reference.extra, **names, **scaling(scheme, pairs, factor)}
        return {f"{path}.{key}": value for key, value in values.items()}

    def _outcome(
        self,
        section: str,
        kind: str,
        index: int,
        plain: Rope,
        scheme: str,
        pairs: int,
        keys: tuple[str, ...] = _NAMES,
    ) -> str:
        """Return "applied", "dropped", or the error, for a scheme in one of the two objects."""
        values, plain = self._form(section, index, plain)
        if section == "rope_parameters" and keys == ("type",):
            values = {path: value for path, value in values.items() if not path.endswith(".rope_type")}
        values.pop(section, None)
        return self._attempt(values | self._scaled(section, kind, scheme, pairs, 8.0, keys), index, plain)

    def _form(self, section: str, index: int, plain: Rope) -> tuple[dict[str, Any], Rope]:
        """Return keys with every base, for a config that has this object, and the rope without a scaling.

        The one for `rope_scaling` has no `rope_parameters`, because some files read only one of the two objects. An
        exception is a file that does not load such a config.
        """
        values = self._values(self.everywhere)
        if section == "rope_parameters":
            return values, plain
        older = {path: value for path, value in values.items() if not path.startswith("rope_parameters")}
        try:
            return older, self._rope(older, index)
        except (CannotRecordError, AbsentError):
            raise
        except Exception:
            return values, plain

    def _attempt(self, values: dict[str, Any], index: int, plain: Rope) -> str:
        """Return "dropped" if the rope of a config is the one without scaling, "applied" if not, or the error."""
        try:
            rope = self._rope(values, index)
        except (CannotRecordError, AbsentError):
            raise
        except Exception as error:
            return message(error)
        numbers, before = ([*each["inv_freq"], each["attention_factor"]] for each in (rope, plain))
        alike = len(numbers) == len(before) and all(map(functools.partial(math.isclose, rel_tol=1e-6), numbers, before))
        return "dropped" if alike else "applied"

    def _order(self, kind: str, index: int, scheme: str, pairs: int) -> list[str]:
        """Return the two objects in the order in which the file reads them."""

        def rope(factors: dict[str, float]) -> Rope:
            values = self._values(self.everywhere)
            for section, factor in factors.items():
                values |= self._scaled(section, kind, scheme, pairs, factor, _NAMES)
            return self._rope(values, index)

        first, second = SECTIONS
        together = rope({first: 4.0, second: 8.0})["inv_freq"]
        return [first, second] if together == rope({first: 4.0})["inv_freq"] else [second, first]


PATTERN = "sliding_window_pattern"
"""A key with a number n: the last of every n layers is of another kind."""


def every(n: int, count: int) -> list[str]:
    """Return the kind of each layer for a number n under `PATTERN`."""
    return ["full" if (i + 1) % n == 0 else "sliding" for i in range(count)]


def groups(names: list[str]) -> list[int]:
    """Number names in the order in which they first appear."""
    seen: dict[str, int] = {}
    return [seen.setdefault(name, len(seen)) for name in names]


def first_of(config: dict[str, Any], *keys: str) -> int:
    """Return the value of the first of the keys that the config has."""
    return next(int(config[key]) for key in keys if config.get(key))


def message(error: Exception) -> str:
    """Return an error as one short line. The items of a set are sorted, because their order changes in each process."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return re.sub(r"\{('[^{}:]*')\}", lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", text)[:160]
