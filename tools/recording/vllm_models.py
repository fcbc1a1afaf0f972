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
from .model_files import TOKENS, BorrowedError, Engine, Rope, filled
from .sglang_models import (
    MIMO,
    Recorded,
    architecture,
    config_object,
    function,
    measure,
    open_towers,
    per_layer,
)
from .stubbed import TOWERS, Nothing, Plain, Stub, package_folder, stub_parts, stubs
from .transformers_models import classes

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
            "current_device": lambda: "meta",
            "device_type": "meta",
            "dtype": torch.float32,
            "extract_layer_index": lambda prefix, *_: int(next(each for each in prefix.split(".") if each.isdecimal())),
            "get_2d_sincos_pos_embed": lambda *_, **__: np.zeros((1, 1)),
            "get_act_fn": lambda *_, **__: Stub(),
            "get_pp_indices": lambda count, *_: (0, count),
            "get_video_pruning_spec": lambda: None,
            "initialize_model": self._text_model,
            "head_dtype": torch.float32,
            "is_first_rank": True,
            "is_flash_attn_varlen_func_available": lambda: True,
            "is_last_rank": True,
            "getattr_iter": _getattr_iter,
            "is_rope_parameters_nested": names["is_rope_parameters_nested"],
            "melscale_fbanks": lambda *_, **__: torch.zeros(1),
            "kv_cache_dtype_str_to_dtype": lambda *_: torch.bfloat16,
            "maybe_prefix": lambda *parts: ".".join(filter(None, parts)),
            "set_default_rope_theta": names["set_default_rope_theta"],
            "tie_weights": lambda *_: Stub(),
            "try_get_generation_config": lambda *_, **__: {},
            "wrap_modules": list,
            "static_forward_context": _Always(),
            "supports_kw": lambda *_, **__: True,
            "support_torch_compile": lambda *given, **_: given[0] if given else lambda decorated: decorated,
        }
        real = ("model_executor.models", "models", "transformers_utils.configs", _ROTARY)
        stack.enter_context(stubs("vllm", *real, values=values))
        stack.enter_context(replaced(torch.cuda, "Stream", Stub))
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

    def _text_model(self, vllm_config: Any, prefix: str = "", model_class: Any = None, **_: Any) -> Any:
        """Build the text model inside another model."""
        return (model_class or self.model_class(vllm_config.architecture))(vllm_config=vllm_config, prefix=prefix)

    def model_class(self, name: str) -> Any:
        """Return the class of an architecture."""
        module, cls = self.registry[name]
        full = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
        found = importlib.import_module(full)
        stub_parts(found, TOWERS)
        return getattr(found, cls)


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
    name = architecture(config, {**engine.registry, **dict.fromkeys(engine.borrowed)}, engine.configs)
    if name in engine.borrowed:
        raise BorrowedError(name)
    module = engine.registry[name][0]
    return (
        module.removeprefix("vllm.").replace(".", "/")
        if module.startswith("vllm.")
        else f"model_executor/models/{module}.py"
    )


class _Always(dict):  # type: ignore[type-arg]
    """A dictionary that keeps no key, since a model is built again and again."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Settings(Nothing):
    """vLLM's configuration: the config of the model, and stubs. It is no module, since models store it early."""

    def __init__(self, config: Any, architecture: str = "") -> None:
        text = config.get_text_config()
        model, cache = Nothing(), Nothing()
        model.__dict__ |= {"hf_config": config, "hf_text_config": text, "max_model_len": TOKENS, "enforce_eager": True}
        model.__dict__ |= {"dtype": torch.bfloat16, "use_mla": bool(getattr(text, "kv_lora_rank", None))}
        model.__dict__ |= {"multimodal_config": Stub(), "get_multimodal_config": Stub}
        cache.__dict__ |= {"cache_dtype": "bfloat16"}
        self.__dict__ |= {"model_config": model, "cache_config": cache, "quant_config": None, "lora_config": None}
        self.__dict__ |= {"architecture": architecture, "device_config": SimpleNamespace(device="meta")}

    def with_hf_config(self, config: Any, architectures: list[str] | None = None) -> _Settings:
        named = [*(architectures or config.architectures or []), *classes().get(config.model_type, ())]
        config.tie_word_embeddings = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        return _Settings(config, named[0] if named else "")


def layers(config: dict[str, Any], tokens: int = TOKENS) -> list[Rope | None]:
    """Build the model of a config, and return the rope that each layer builds."""
    engine = vllm()
    name = architecture(config, engine.registry, engine.configs)
    values = engine.remap(config_object(config, engine.configs, name))
    for each in (values, values.get_text_config()):
        engine.patch(each)
    text = values.get_text_config()
    if not hasattr(text, "tie_word_embeddings"):
        text.tie_word_embeddings = getattr(values, "tie_word_embeddings", False)
    open_towers(values, text)
    settings = _Settings(values)
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
    "afmoe": {"n_group": 1, "route_norm": True, "route_scale": 1.0, "score_func": "sigmoid", "topk_group": 1},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm4v_moe": {"text_config.use_qk_norm": True},
    "ernie4_5_vl_moe": {"pixel_hidden_size": 64},
    "gemma4_unified": {"vision_config": {}},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [], "spatial_target_layers": []},
    "hy_v3": {"expert_hidden_dim": 64, "first_k_dense_replace": 1, "route_norm": True},
    "lfm2_vl": {"text_config.block_dim": 64, "text_config.conv_dim": 64, "text_config.conv_dim_out": 64},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mimo_v2_flash": MIMO,
    "minimax_m2": {"rotary_dim": 64},
    "minimax_m3_vl": {"vision_config": {"model_type": "clip_vision_model"}},
    "qianfan_ocr": {"force_image_size": 448, "downsample_ratio": 0.5, "ps_version": "v2", "select_layer": -1},
    "step3p7": {"text_config.architectures": ["Step3p5ForCausalLM"]},
}
"""Values of keys that a file of vLLM reads and that the class of transformers does not have."""


def fill(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Add the keys in `FILLED`."""
    return filled(config, FILLED.get(config["model_type"], {}))


ENGINE = Engine(
    "vllm", "vllm", file, layers, fill, permutes=frozenset({"llama4", "llama4_text"})
)  # permute_qk_weight_for_rotary
