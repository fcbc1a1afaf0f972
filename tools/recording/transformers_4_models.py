"""The ropes of the models of transformers 4, whose classes do not read `rope_parameters`. It needs that version."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch

from . import files
from .configs import modeling_file
from .model import CannotRecordError
from .model_files import FRACTIONS, TOKENS, AbsentError, Engine, Rope, inner_type
from .parts import is_rotary, model_classes, rotary_on_cpu, without_towers

_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "decoder_num_hidden_layers")
_TWO, _THREE = {"type", "factor"}, {"type", "short_factor", "long_factor"}
_FIELDS = {**dict.fromkeys(("olmo", "olmo2"), _TWO), "phi3": _THREE, "phi4_multimodal": _THREE}
"""The keys of `rope_scaling` for model_types whose class rejects further ones. `fill` says to leave them out."""
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_LISTS = ("layer_types", "layers_block_type")


def config_of(config: dict[str, Any]) -> Any:
    """Return the config object of the text model in a config."""
    if not files.installed("transformers").startswith("4."):
        raise CannotRecordError("it needs transformers 4")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    name = config["model_type"]
    if name not in CONFIG_MAPPING_NAMES:
        raise AbsentError("not in CONFIG_MAPPING_NAMES")
    return CONFIG_MAPPING[name].from_dict(copy.deepcopy(config)).get_text_config(decoder=True)


def file(config: dict[str, Any]) -> str:
    """Return the file of the model."""
    module = modeling_file(config_of(config)).__name__
    return f"{module.removeprefix('transformers.').replace('.', '/')}.py"


def layers(config: dict[str, Any]) -> list[Rope | None]:
    """Build the model of a config, and return the rope of the rotary module that each layer gets."""
    scaling, fields = config.get("rope_scaling"), _FIELDS.get(config["model_type"])
    if scaling and fields and "_bare" in config:
        config = {**config, "rope_scaling": {key: value for key, value in scaling.items() if key in fields}}
    text = config_of(config)
    if 'self.rope_scaling["mrope_section"]' in inspect.getsource(modeling_file(text)):  # its attention reads it
        text.rope_scaling["mrope_section"]
    model = _build(text)
    count = next(n for key in _DEPTHS if (n := getattr(text, key, None)))
    kinds = next((kinds for key in _LISTS if (kinds := getattr(text, key, None) or config.get(key))), ["all"] * count)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    ropes: dict[str | int, Rope] = {}
    for name, module in model.named_modules():
        if is_rotary(module) and not re.search("vision|visual|audio|protein", name):
            layer = re.search(r"(?:layers|layer|blocks|h)\.(\d+)\.", name)
            place = int(layer[1]) if layer else "local" if re.search("local|sliding", name) else "global"
            if ropes.setdefault(place, found := _measure(module, head_dim)) != found:
                raise CannotRecordError("a layer has several ropes")
    found: list[Rope | None] = []
    for index, kind in enumerate(kinds):
        place = "local" if kind == "sliding_attention" and "local" in ropes else "global"
        found.append(ropes.get(index, ropes.get(place)))
    return found


def _build(text: Any) -> Any:
    errors = []
    text.pad_token_id = None  # it may be outside of a smaller vocabulary
    for key in _EXPERTS:
        if isinstance(getattr(text, key, None), int):
            setattr(text, key, 4)
    for cls in model_classes(text):
        cls.post_init = lambda self: None  # it would initialize the weights
        try:
            with torch.device("meta"), rotary_on_cpu(modeling_file(text)), without_towers():
                model = cls(copy.deepcopy(text))
        except Exception as error:
            errors.append(error)
            continue
        if any(map(is_rotary, model.modules())):
            return model
    raise errors[0] if errors else CannotRecordError("it builds no rotary module")


def _measure(module: Any, head_dim: int) -> Rope:
    """Return the rope that the module applies in a call with `TOKENS` tokens."""
    if getattr(module, "rope_type", "") in ("dynamic", "longrope"):
        positions = torch.arange(TOKENS)[None]
        try:
            module(torch.zeros(1), positions)
        except (IndexError, RuntimeError):  # tokens have several positions
            module(torch.zeros(1), positions.expand(3, 1, -1))
    if "inv_freq" not in module._buffers:
        raise CannotRecordError("its rotary module has no frequencies")
    inv_freq = module.inv_freq
    return {
        "head_dim": head_dim,
        "rotary_dim": 2 * len(inv_freq),
        "pairing": "",
        "inv_freq": inv_freq.tolist(),
        "attention_factor": float(getattr(module, "attention_scaling", 1.0)),
    }


def fill(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Add the keys of the rotated fraction that only the class of transformers 4 has."""
    if inner_type(config):
        raise CannotRecordError("the row of its text model counts")
    if "hidden_size" not in config:
        raise CannotRecordError("its config has no hidden_size")
    text = config_of(config)
    if text.hidden_size != config["hidden_size"] or config["model_type"] in ("chameleon", "fuyu", "llava"):
        raise CannotRecordError("its text model reads other keys, or it divides positions")
    added = {key: value for key in FRACTIONS if key not in config and (value := getattr(text, key, None))}
    if getattr(text, "head_dim", 0) is None:  # with which the functions of most schemes fail
        added["head_dim"] = text.hidden_size // text.num_attention_heads
    return {**config, **added, "_bare": True}, []


_MROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
_ALWAYS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"rope_scaling": None},
    **dict.fromkeys(("glm4v", "glm4v_text", "glm4v_moe", "glm4v_moe_text", "qwen2_vl", "qwen2_vl_text"), _MROPE),
    **dict.fromkeys(
        ("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_omni_moe_text", "qwen3_omni_moe_talker_text"),
        _MROPE,
    ),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text"), _MROPE),
}
ENGINE = Engine(
    "transformers_4",
    "transformers",
    file,
    layers,
    fill,
    _ALWAYS,
    extra={"mrope_section": _MROPE["rope_scaling"]["mrope_section"]},
)
