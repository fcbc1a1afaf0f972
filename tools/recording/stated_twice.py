"""stated_twice.json: what transformers computes for configs that state a rope parameter twice, for each model type.

The configs are the class defaults in class_defaults.json, in which the keys of the rope are replaced. The rotary
modules that the model builds are built from each of them. For a case that transformers refuses, the name of its error
is recorded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import commands, files, vllm_models
from .configs import COPIED, config_of, modeling_file
from .engines import replaced
from .model import CannotRecordError
from .model_files import FRACTIONS, AbsentError, BorrowedError, Engine, message, shrink
from .parts import is_rotary, model_classes, without_towers
from .rotated import shortest

A, B, C = 123_456.0, 654_321.0, 777_777.0
"""Three bases that no class has."""
_PARAMETERS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}
_STATED = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
# Keys of a section that no scheme reads, and that a case keeps.
_KEPT = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
# Keys at the top level that some classes read, the key in a section that they stand for, and a value.
_ALIASES = {
    "rotary_emb_base": ("rope_theta", B),
    "rope_local_base_freq": ("rope_theta", B),
    "local_rope_theta": ("rope_theta", B),
    "global_rope_theta": ("rope_theta", B),
    "swa_rope_theta": ("rope_theta", B),
    "rotary_pct": ("partial_rotary_factor", 0.5),
    "rotary_dim": ("partial_rotary_factor", 32),
}


def cases(model_type: str, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return name → the keys of the rope, for each way to state a parameter twice that makes sense for the class."""
    own = config.get("rope_parameters") or {}
    nested = [key for key, value in own.items() if isinstance(value, dict)]
    return _nested_cases(model_type, own, nested) if nested else _flat_cases(model_type, own)


def _flat_cases(model_type: str, own: dict[str, Any]) -> dict[str, dict[str, Any]]:
    kept = {key: value for key, value in own.items() if key in _KEPT}

    def scheme(name: str, **more: Any) -> dict[str, Any]:
        lists = {key: own[key] for key in ("short_factor", "long_factor") if key in own}
        return {**kept, "rope_type": name, **(_PARAMETERS.get(name) or lists), **more}

    def both(new: dict[str, Any], old: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        return {"rope_parameters": new, "rope_scaling": old, **more}

    unscaled, linear = scheme("default", rope_theta=A), scheme("linear", rope_theta=A)
    found = {f"base lost, {name}": both(scheme(name, rope_theta=A), scheme(name)) for name in _PARAMETERS}
    found |= {f"type replaced, {name}": both(unscaled, scheme(name)) for name in list(_PARAMETERS)[1:]}
    typed = {"type": "linear", "factor": 4.0, **kept}
    found |= {
        "type replaced, type": both(unscaled, typed),
        "scaling removed": both(linear, scheme("default")),
        "two bases": both(scheme("yarn", rope_theta=A), scheme("linear", rope_theta=B)),
        "empty scaling": both(linear, {}),
        "null scaling": both(linear, None),
        "base also at the top": {"rope_theta": B, "rope_parameters": linear},
        "base also at the top, old": {"rope_theta": B, "rope_scaling": linear},
        "base lost, at the top": both(unscaled, scheme("linear"), rope_theta=C),
        "base only at the top": {"rope_theta": B},
        "two types": {"rope_parameters": {"type": "dynamic", **linear}},
        "original length also at the top, yarn": {
            "original_max_position_embeddings": 2048,
            "rope_parameters": scheme("yarn", rope_theta=A),
        },
        "original length also at the top, llama3": {
            "original_max_position_embeddings": 2048,
            "rope_parameters": scheme("llama3", rope_theta=A),
        },
    }
    if "partial_rotary_factor" in own:
        quarter, half = {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.5}
        found |= {
            "fraction also at the top": {**half, "rope_parameters": {**unscaled, **quarter}},
            "fraction also at the top, old": {**half, "rope_theta": A, "rope_scaling": {**scheme("linear"), **quarter}},
            "two fractions": both({**unscaled, **half}, {**linear, **quarter}),
        }
    for alias in _aliases(model_type):
        key, value = _ALIASES[alias]
        found[f"also {alias}"] = {alias: value, "rope_parameters": {**unscaled, **({} if value == B else {key: 0.25})}}
    return found


def _nested_cases(model_type: str, own: dict[str, Any], nested: list[str]) -> dict[str, dict[str, Any]]:
    bases = dict(zip(nested, (A, A + 1, A + 2), strict=False))
    stated = {key: {**value, "rope_theta": bases[key]} if key in bases else value for key, value in own.items()}
    linear = {"rope_type": "linear", "factor": 4.0}
    found: dict[str, dict[str, Any]] = {
        "base also beside": {"rope_parameters": {**stated, "rope_theta": C, "rope_type": "default"}},
        "base also at the top": {"rope_parameters": stated, "rope_theta": B},
        "scaling beside": {"rope_parameters": stated, "rope_scaling": linear},
        "scaling beside, type": {"rope_parameters": stated, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "scaling with a base beside": {"rope_parameters": stated, "rope_scaling": {**linear, "rope_theta": C}},
        "empty scaling": {"rope_parameters": stated, "rope_scaling": {}},
        "flat, base also at the top": {"rope_parameters": {**linear, "rope_theta": A}, "rope_theta": B},
        "flat and scaling": {
            "rope_parameters": {"rope_type": "default", "rope_theta": A},
            "rope_scaling": linear,
            "rope_theta": B,
        },
    }
    if any("partial_rotary_factor" in own[key] for key in nested):
        found["fraction also at the top"] = {"rope_parameters": stated, "partial_rotary_factor": 0.5}
    for alias in _aliases(model_type):
        found[f"also {alias}"] = {alias: _ALIASES[alias][1], "rope_parameters": stated}
    return found


def _aliases(model_type: str) -> list[str]:
    source = inspect.getsource(sys.modules[type(config_of(model_type)).__module__])
    return [alias for alias in _ALIASES if alias in source]


@functools.cache
def _defaults() -> dict[str, dict[str, Any]]:
    rows = files.load(files.FOLDER / "class_defaults.json")["rows"]
    return {row["model_type"]: row["config"] for row in rows if "variant" not in row}


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record the cases of a model type.

    Raises:
        CannotRecordError: the model has no rotary module.
    """
    name = row["model_type"]
    config = _defaults()[name]
    modules = _rotary_modules(name, config)
    without = {key: value for key, value in config.items() if key not in _STATED}
    found = {}
    for case, keys in cases(name, config).items():
        try:
            frequencies: Any = _frequencies(modules, _config(name, {**without, **keys}))
        except Exception as error:
            frequencies = type(error).__name__
        found[case] = {"keys": keys, "frequencies": frequencies}
    return {"model_type": name, "default_base": _default_base(name), "cases": found}


def _default_base(name: str) -> Any:
    return getattr(type(config_of(name)), "default_theta", None)


def _config(name: str, values: dict[str, Any]) -> Any:
    values = json.loads(json.dumps(values).replace('"inf"', "Infinity"))
    config = type(config_of(name)).from_dict(values)
    for key, value in COPIED.get(name, {}).items():
        setattr(config, key, value)
    return config


def _rotary_modules(name: str, values: dict[str, Any]) -> list[tuple[type, dict[str, Any]]]:
    """Return the classes of the rotary modules of a model, with the further arguments that it passes to each."""
    config = _config(name, values)
    for cls in model_classes(config):
        built: list[tuple[type, dict[str, Any]]] = []
        with contextlib.suppress(Exception), torch.device("meta"), without_towers(), _noted(config, built):
            cls(copy.deepcopy(config))
        if built:
            return [entry for i, entry in enumerate(built) if entry not in built[:i]]
    raise CannotRecordError("it builds no rotary module")


@contextlib.contextmanager
def _noted(config: Any, built: list[tuple[type, dict[str, Any]]]) -> Iterator[None]:
    """Note each rotary module that is built from a config."""
    originals = {}
    for cls in vars(modeling_file(config)).values():
        if isinstance(cls, type) and issubclass(cls, nn.Module) and is_rotary(cls) and "__init__" in vars(cls):
            originals[cls] = cls.__init__

            def build(self: Any, *args: Any, __original: Any = cls.__init__, **kwargs: Any) -> None:
                __original(self, *args, **kwargs)
                bound = inspect.signature(__original).bind(self, *args, **kwargs).arguments
                if isinstance(bound.get("config"), type(config)):
                    built.append(
                        (type(self), {k: v for k, v in bound.items() if k not in ("self", "config", "device")})
                    )

            cls.__init__ = build
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.__init__ = original


def _frequencies(modules: list[tuple[type, dict[str, Any]]], config: Any) -> dict[str, list[float]]:
    """Return kind of layer → rotary_dim, the second, the middle and the last frequency, and the attention factor."""
    found = {}
    for index, (cls, arguments) in enumerate(modules):
        module = cls(config=config, **arguments)
        for name, buffer in module.named_buffers():
            if name.endswith("inv_freq") and "original" not in name:
                prefix = name.removesuffix("inv_freq")
                inv_freq = shortest(buffer.sort(descending=True).values)
                last = len(inv_freq) - 1
                chosen = [inv_freq[i] for i in (min(1, last), last // 2, last)]
                factor = float(getattr(module, f"{prefix}attention_scaling", 1.0))
                found[prefix.strip("_") or f"module {index}"] = [2 * len(inv_freq), *chosen, factor]
    return found


GOLDEN = files.Golden("stated_twice.json", lambda row: row["model_type"], record)


_DEEPSEEK = {"moe_layer_freq": 1, "num_experts_per_tok": 2, "scoring_func": "softmax", "topk_method": "greedy"}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "axk1": {"first_k_dense_replace": 1, "moe_layer_freq": 1},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": {**_DEEPSEEK, "topk_method": "noaux_tc"},
    "deepseek_v32": {**_DEEPSEEK, "topk_method": "noaux_tc"},
    "dots1": {"num_experts_per_tok": 2},
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "falcon_h1": {"head_dim": 128},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "glm_moe_dsa": {**_DEEPSEEK, "topk_method": "noaux_tc"},
    "granitemoehybrid": {
        "layer_types": ["attention"] * 4,
        "num_hidden_layers": 4,
        "position_embedding_type": "rope",
    },
    "lfm2": {
        "block_dim": 2560,
        "conv_dim": 2560,
        "conv_dim_out": 2560,
        "full_attn_idxs": [0],
        "layer_types": ["full_attention", "conv"],
        "num_hidden_layers": 2,
    },
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid"},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "solar_open": {"head_dim": 128},
}
"""Keys of published configs without which an engine does not build the model, or builds it with other heads."""


def record_in(engine: Engine, row: dict[str, Any]) -> dict[str, Any]:
    """Record the same cases of a model type in another engine: case → the first layer with a rope → its numbers.

    The numbers are those of `_frequencies`. A case has the error instead if the engine rejects the config. `added` has
    keys that the engine requires.
    """
    name = row["model_type"]
    config = {key: value for key, value in _defaults()[name].items() if key not in _STATED}
    config = json.loads(json.dumps(config).replace('"inf"', "Infinity"))
    shrink(config)
    published = _PUBLISHED.get(name, {})
    filled = engine.fill({**config, **published})[0]
    added = {key: value for key, value in filled.items() if key not in (*config, *FRACTIONS)} | published
    cases = {case: _numbers(engine, {**config, **added, **keys}) for case, keys in _keys(name)}
    return {"model_type": name, **({"added": added} if added else {}), "cases": cases}


def _keys(name: str) -> list[tuple[str, dict[str, Any]]]:
    [row] = [row for row in files.load(files.FOLDER / GOLDEN.path)["rows"] if row["model_type"] == name]
    return [(case, recorded["keys"]) for case, recorded in row["cases"].items()]


def _numbers(engine: Engine, config: dict[str, Any]) -> dict[str, list[float]] | str:
    try:
        ropes = engine.ropes(engine.loaded(copy.deepcopy(config)))
    except (AbsentError, BorrowedError):
        raise
    except CannotRecordError:
        return "not recorded"
    except Exception as error:
        return message(error)
    found: dict[str, list[float]] = {}
    for index, rope in enumerate(ropes):
        if rope is not None:
            inv_freq = sorted(rope["inv_freq"], reverse=True)
            last = len(inv_freq) - 1
            chosen = [inv_freq[min(1, last)], inv_freq[last // 2], inv_freq[last], rope["attention_factor"]]
            numbers = [2 * len(inv_freq), *shortest(torch.tensor(chosen))]
            if numbers not in found.values():
                found[str(index)] = numbers
    return found


OVERRIDE = {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}
"""An override without a base."""


def record_override(engine: Engine, row: dict[str, Any]) -> dict[str, Any]:
    """Record what vLLM has after --hf-overrides with `OVERRIDE`, for a config that states the base A."""
    name, loaded = row["model_type"], vllm_models.vllm()
    config = {key: value for key, value in _defaults()[name].items() if key not in _STATED}
    config = json.loads(json.dumps(config).replace('"inf"', "Infinity"))
    shrink(config)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": A}

    def patch(each: Any, __before: Any = loaded.patch) -> None:
        __before(each)
        commands.apply_in_vllm(each, copy.deepcopy(OVERRIDE), loaded.folder)

    with replaced(loaded, "patch", patch):
        return {"model_type": name, "frequencies": _numbers(engine, config)}
