"""The ropes of Megatron: Megatron-Bridge reads a config, and megatron-core's own classes rotate, on the CPU.

The bridge of a model makes a provider from the config. The provider builds megatron-core's model without layers, whose
rotary class and rotating function are called. Transformer Engine is missing, so its fused rotation is not run.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import math
import typing
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .engines import replaced
from .mlx_models import rope_of
from .model import CannotRecordError
from .model_files import TOKENS, AbsentError, Engine, Rope
from .stubbed import Stub, stubs
from .transformers_models import class_of


class Megatron:
    """The modules of megatron-core, and the bridges, with stubs for missing packages until the process ends."""

    def __init__(self) -> None:
        if not hasattr(typing, "override"):  # Python 3.11
            typing.override = importlib.import_module("typing_extensions").override  # type: ignore[attr-defined]
        logging.disable(logging.CRITICAL)
        self.stack = stack = ExitStack()  # never closed
        stack.enter_context(replaced(torch.cuda, "current_device", lambda: "cpu"))
        self.model = importlib.import_module("megatron.core.models.gpt.gpt_model")
        self.mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
        self.attention = importlib.import_module("megatron.core.transformer.attention")
        importlib.import_module("megatron.core.models.mamba")
        embeddings = "megatron.core.models.common.embeddings"
        self.rotate = importlib.import_module(f"{embeddings}.rope_utils")._apply_rotary_pos_emb_bshd
        self.yarn = importlib.import_module(f"{embeddings}.yarn_rotary_pos_embedding")
        stack.enter_context(stubs("megatron.bridge"))
        self.bridge = importlib.import_module("megatron.bridge").AutoBridge
        self.layer = importlib.import_module("megatron.core.transformer.spec_utils").ModuleSpec(module=Stub)
        for name in ("TransformerBlock", "LanguageModelEmbedding"):
            stack.enter_context(replaced(self.model, name, Stub))
        for name in ("_set_attention_backend", "setup_embeddings_and_output_layer"):
            stack.enter_context(replaced(self.model.GPTModel, name, lambda _: None))
        self.model.GPTModel.output_layer = property(lambda _: Stub())  # some providers change it
        transformers = importlib.import_module("transformers")
        self.config = transformers.AutoConfig.for_model


@functools.cache
def megatron() -> Megatron:
    """Return the modules."""
    return Megatron()


def bridge(config: dict[str, Any]) -> Any:
    """Return the bridge of a config."""
    found = class_of(config, megatron().bridge.list_supported_models())
    try:
        values = megatron().config(**json.loads(json.dumps(config)))
    except ValueError as error:
        if "Unrecognized model identifier" in str(error):
            raise CannotRecordError("its config class is not in transformers") from error
        raise
    values.architectures = [found]
    return megatron().bridge.from_hf_config(values)


def file(config: dict[str, Any]) -> str:
    """Return the file of the bridge."""
    try:
        found = type(bridge(config)._model_bridge)
    except (AbsentError, CannotRecordError):
        raise
    except Exception as error:
        raise CannotRecordError(f"{type(error).__name__}: {error}") from error
    return f"{found.__module__.replace('.', '/')}.py"


class _Groups:
    """Stands for groups of processes."""

    def __getattr__(self, name: str) -> None:
        return None


def _init_attention(self: Any, config: Any, **_: Any) -> None:
    """Stand for the constructor of the base class of MLA."""
    nn.Module.__init__(self)
    self.config, self.pg_collection = config, _Groups()
    self.layer_number, self.attn_mask_type, self.attention_type = 1, None, "self"


def rotary(provider: Any) -> Any:
    """Return megatron-core's rotary module for a provider."""
    modules = megatron()
    if provider.multi_latent_attention:
        submodules = SimpleNamespace(core_attention=None, linear_proj=Stub)
        with (
            replaced(modules.attention.Attention, "__init__", _init_attention),
            replaced(modules.mla, "build_module", Stub),
            replaced(modules.mla, "not_none", lambda value: value),
            replaced(modules.mla.MultiLatentAttention, "__abstractmethods__", frozenset()),
        ):
            return modules.mla.MultiLatentAttention(provider, submodules, 1, None, "self").rotary_pos_emb
    provider.transformer_layer_spec, provider.mtp_num_layers = modules.layer, None
    provider._pg_collection = _Groups()
    if provider.kv_channels is None:  # as TransformerConfig.__post_init__, which also needs Transformer Engine
        provider.kv_channels = provider.hidden_size // provider.num_attention_heads
    try:
        model = provider.provide(pre_process=False, post_process=False)
    except AttributeError:  # some providers change the embedding
        model = provider.provide(pre_process=True, post_process=False)
    if isinstance(model, Stub) or getattr(model, "rotary_pos_emb", None) is None:
        raise CannotRecordError(f"{type(provider).__name__} has no rotary module")
    return model.rotary_pos_emb


def layers(config: dict[str, Any], tokens: int = TOKENS) -> list[Rope | None]:
    """Return the rope of each layer of the model that the bridge makes from a config."""
    provider = bridge(config).to_megatron_provider(load_weights=False)
    module = rotary(provider)
    angles = module(tokens)
    mscale = 1.0
    if isinstance(angles, tuple):  # the rotary class of YaRN
        angles, mscale = angles
    if not provider.multi_latent_attention:  # it reads the factor again from the provider
        mscale = megatron().attention._yarn_get_concentration_factor_from_config(provider)
    kinds = [angles] if angles.dim() == 4 else list(angles)
    channels = provider.qk_pos_emb_head_dim if provider.multi_latent_attention else provider.kv_channels
    ropes = [measure(provider, each, channels, mscale) for each in kinds]
    if type(module).__name__ == "Gemma4DenseRotaryEmbedding":
        raise CannotRecordError("it has several rotary classes")
    if len(ropes) == 1:
        return [None if skipped else ropes[0] for skipped in _skipped(provider)]
    found = importlib.import_module(type(provider).__module__)
    if not hasattr(found, "_is_local_attn_layer"):
        raise CannotRecordError("how it chooses between several ropes is not known")
    pattern = provider.interleaved_attn_pattern
    local = [found._is_local_attn_layer(index + 1, pattern) for index in range(provider.num_layers)]
    return [ropes[0] if each else ropes[1] for each in local]


def _skipped(provider: Any) -> list[bool]:
    """Return for each layer whether it does not rotate."""
    skip, count = provider.no_rope_freq, provider.num_layers
    if isinstance(skip, int):
        return [(index + 1) % skip == 0 for index in range(count)]
    return [bool(each) for each in skip] if skip else [False] * count


def measure(provider: Any, angles: torch.Tensor, channels: int, mscale: float) -> Rope:
    """Rotate each channel alone at positions 0 and 1, with megatron-core's function without kernels.

    For MLA this function moves the channels of a pair to the two halves of the head. They are moved back.
    """
    if angles.shape[-1] > channels:
        raise ValueError(f"{angles.shape[-1]} channels of angles for a head of {channels}")
    one_hot = torch.eye(channels).repeat(2, 1, 1, 1)
    mla = bool(provider.multi_latent_attention)
    interleaved = provider.rotary_interleaved and not mla
    rotated = megatron().rotate(one_hot, angles[:2], interleaved, mla, mscale)[:, 0]
    slots = rotated[0].abs().argmax(-1).tolist()
    pairs = []
    for i in range(channels):
        turned = rotated[1, i]
        partners = [slots.index(j) for j in turned.nonzero().flatten().tolist() if j != slots[i]]
        if len(partners) > 1:
            raise CannotRecordError("a channel rotates with several others")
        if partners and partners[0] > i:
            angle = math.atan2(turned[slots[partners[0]]].item(), turned[slots[i]].item())
            pairs.append((i, partners[0], angle, rotated[0, i, slots[i]].item()))
    return rope_of(pairs, channels)


ENGINE = Engine(
    "megatron", "megatron-bridge", file, layers, extra={"beta_fast": 32.0, "beta_slow": 1.0}, described=True
)
