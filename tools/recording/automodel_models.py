"""The ropes of NeMo Automodel: its own class of a model is built on the meta device, and rotates on the CPU.

Models without a class of its own run with the code of transformers. Transformer Engine, whose fused rotation Automodel
uses if it is installed, is missing.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .engines import replaced
from .measure import pairs_of
from .mlx_models import rope_of
from .model import CannotRecordError
from .model_files import TOKENS, Engine, Rope
from .stubbed import stubs
from .transformers_models import class_of

MODELS = "nemo_automodel.components.models"
LEFT_OUT = {
    "ernie4_5_moe": "the keys of the base were not found",
    "minimax_m3_vl": "its config class has parameters of its own",
    "mistral4": "its config class has parameters of its own",
}
"""Models of which the recorded keys do not describe what the class reads."""


class Automodel:
    """The registry of Automodel's models, with stubs for packages that are missing, until the process ends."""

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        self.stack = stack = ExitStack()  # never closed
        stack.enter_context(replaced(torch.cuda, "current_device", lambda: 0))
        stack.enter_context(stubs("nemo_automodel.components"))
        registry = importlib.import_module("nemo_automodel._transformers.registry")
        self.models = registry.MODEL_ARCH_MAPPING
        self.backend = importlib.import_module(f"{MODELS}.common").BackendConfig
        self.gpt_oss = importlib.import_module(f"{MODELS}.gpt_oss.rope_utils")
        self.deepseek = importlib.import_module(f"{MODELS}.deepseek_v3.rope_utils")
        transformers = importlib.import_module("transformers")
        for name, (module, cls) in registry._CUSTOM_CONFIG_REGISTRATIONS.items():
            config = getattr(importlib.import_module(module), cls)
            transformers.AutoConfig.register(name, config, exist_ok=True)
        self.transformers = transformers


@functools.cache
def automodel() -> Automodel:
    """Return the modules."""
    return Automodel()


def architecture(config: dict[str, Any]) -> str:
    """Return the class that Automodel has for a config.

    Raises:
        BorrowedError: only transformers has the class.
    """
    modules = automodel()
    return class_of(config, modules.models, lambda name: hasattr(modules.transformers, name))


def file(config: dict[str, Any]) -> str:
    """Return the file of the model."""
    return f"{automodel().models[architecture(config)][0].replace('.', '/')}.py"


def build(config: dict[str, Any]) -> tuple[Any, list[tuple[Any, ...]]]:
    """Build the model of a config on the meta device. Return it, and the calls of the function for DeepSeek."""
    modules = automodel()
    if config["model_type"] in LEFT_OUT:
        raise CannotRecordError(LEFT_OUT[config["model_type"]])
    name, cls, *_ = modules.models[architecture(config)]
    module = importlib.import_module(name)
    values = modules.transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    calls: list[tuple[Any, ...]] = []
    with ExitStack() as stack:
        if hasattr(module, "precompute_freqs_cis"):
            stack.enter_context(replaced(module, "precompute_freqs_cis", _recorded(calls)))
        attention = "flex" if cls == "GptOssForCausalLM" else "sdpa"
        backend = modules.backend(
            attn=attention, linear="torch", rope_fusion=False, experts="torch", dispatcher="torch"
        )
        with torch.device("meta"):
            return getattr(module, cls)(values, backend=backend), calls


def rotary_of(model: Any) -> Any:
    """Return the rotary module of a model."""
    found = [each for each in model.modules() if hasattr(each, "rotary_emb") and not _is_image(each)]
    if len(found) != 1:
        raise CannotRecordError(f"{len(found)} modules have a rotary module")
    return found[0].rotary_emb


def layers(config: dict[str, Any], tokens: int = TOKENS) -> list[Rope | None]:
    """Return the rope of each layer of Automodel's model."""
    modules = automodel()
    model, calls = build(config)
    values = model.config.get_text_config()
    if calls:
        rope = _deepseek(modules.deepseek.precompute_freqs_cis(*calls[-1][0], **calls[-1][1]))
    else:
        rotary = rotary_of(model)
        shared = isinstance(rotary, modules.gpt_oss.RotaryEmbedding)
        rope = _gpt_oss(rotary) if shared else _tables(type(rotary)(values), tokens)
    return [rope] * int(values.num_hidden_layers)


def _recorded(calls: list[tuple[Any, ...]]) -> Any:
    def record(*arguments: Any, **named: Any) -> torch.Tensor:
        calls.append((arguments, named))
        return torch.zeros(1)

    return record


def _is_image(module: nn.Module) -> bool:
    return any(word in type(module).__name__.lower() for word in ("vision", "visual", "image", "mtp"))


POSITIONS = torch.tensor([[0, 1]])


def _deepseek(frequencies: torch.Tensor) -> Rope:
    """Rotate each channel alone with the functions for DeepSeek."""
    functions = automodel().deepseek
    table = functions.freqs_cis_from_position_ids(POSITIONS, frequencies.cpu())
    channels = 2 * table.shape[-1]
    rotated = functions.apply_rotary_emb(torch.eye(channels).repeat(1, 2, 1, 1), table)
    return rope_of(pairs_of(rotated[0]), rotated.shape[-1])


def _gpt_oss(rotary: Any) -> Rope:
    """Rotate each channel alone with the functions for gpt-oss, which most files share."""
    functions = automodel().gpt_oss
    rotary.device = None
    table = functions.position_ids_to_freqs_cis(rotary, POSITIONS, for_fused_rope=False)
    one_hot = torch.eye(rotary.head_dim).repeat(1, 2, 1, 1)
    rotated = functions._apply_rotary_emb_qk(one_hot, one_hot, table)[0][0]
    return rope_of(pairs_of(rotated), rotary.head_dim)


def _tables(rotary: Any, tokens: int) -> Rope:
    """Return the rope of a class with the interface of transformers, of which cos and sin hold each pair twice."""
    positions = torch.tensor([[0, 1, tokens - 1]])
    cos, sin = (table[0, :2] for table in rotary(torch.zeros(1, 1, 3, 1), positions))
    half = cos.shape[-1] // 2
    angles = torch.atan2(sin[1].double(), cos[1].double()).tolist()
    return rope_of([(i, i + half, angles[i], cos[0, i].item()) for i in range(half)], cos.shape[-1])


# With these betas, the small lengths of the recordings pass the assertion in the function of gpt-oss.
ENGINE = Engine("automodel", "nemo-automodel", file, layers, extra={"beta_fast": 8.0, "beta_slow": 1.0}, described=True)
