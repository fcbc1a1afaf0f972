"""engine_rules/: the frequencies and attention factors that engines compute from small configs.

A row states the config, the length of the sequence, and the length for which the engine is configured. The engine's own
code rotates (1, 0) at positions 0 and 1, which gives cos and sin. Only the angle is computed from them here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import files
from .model import CannotRecordError
from .peers import package
from .rotated import shortest
from .stubbed import Plain, stubs

Probe = Callable[[dict[str, Any], int, int], tuple[Tensor, Tensor]]
"""A function of a config, the length of the sequence, and that of the engine.

It returns cos and sin of all pairs at positions 0 and 1.
"""


def record(row: dict[str, Any], probe: Probe) -> dict[str, Any]:
    """Record a row again: frequencies and attention factor, or the error of the engine.

    Args:
        row: the committed row.
        probe: calls the engine.
    """
    result = {name: row[name] for name in ("case", "config", "sequence", "setting")}
    try:
        cos, sin = probe(row["config"], row["sequence"], row["setting"])
    except (KeyError, TypeError, ValueError) as error:
        return {**result, "refused": f"{type(error).__name__}: {error}"[:160]}
    angles = torch.atan2(sin[1].double(), cos[1].double()).float()
    if angles.dim() != 1:
        raise CannotRecordError(f"angles of shape {tuple(angles.shape)}")
    return {**result, "inv_freq": shortest(angles), "attention_factor": shortest(cos[0].max().reshape(1))[0]}


def _ones(head_dim: int, tokens: int) -> Tensor:
    """Return x [tokens, head_dim] with (1, 0) in every pair (i, i + head_dim/2)."""
    return torch.cat((torch.ones(tokens, head_dim // 2), torch.zeros(tokens, head_dim // 2)), dim=-1)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of rotated `_ones`: the first channels and the second channels of the pairs."""
    cos, sin = x.float().chunk(2, dim=-1)
    return cos, sin


_CLASSES = {
    "deepseek_v3": ("deepseek_v3", "DeepseekV3"),
    "gemma3_text": ("gemma3", "Gemma3"),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", "HunYuanDenseV1"),
    "qwen2_vl_text": ("qwen2_vl", "Qwen2VL"),
}


def transformers(config: dict[str, Any], sequence: int, setting: int) -> tuple[Tensor, Tensor]:
    """Call the rotary class of the model type in transformers."""
    library, name = package("transformers"), config["model_type"]
    rotary_module = library.AutoConfig.for_model(**config)
    folder, prefix = _CLASSES.get(name, (name, name.capitalize()))
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    rotary = getattr(module, f"{prefix}RotaryEmbedding")(rotary_module)
    positions = torch.tensor([[0, 1, sequence - 1]])
    if name == "qwen2_vl_text":  # three positions for each token
        positions = positions.expand(3, 1, 3)
    cos, sin = rotary(torch.zeros(1), positions, *(("full_attention",) if name == "gemma3_text" else ()))
    half = cos.shape[-1] // 2
    return cos[0, :2, :half].float(), sin[0, :2, :half].float()


def _parameters(config: dict[str, Any], *, nested: str = "full_attention") -> dict[str, Any]:
    """Return the rope section of a config, with the base in it, as transformers 5 passes it to other code."""
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {"rope_type": "default"})
    parameters = dict(parameters.get(nested, parameters))
    parameters.setdefault("rope_theta", config.get("rope_theta"))
    return parameters


def _size(config: dict[str, Any]) -> int:
    return int(config.get("qk_rope_head_dim") or config["head_dim"])


def _rotate_ones(rotary_module: Any, config: dict[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a module of vLLM or SGLang, from its PyTorch code. DeepSeek's has an axis for heads."""
    size, interleaved = _size(config), config["model_type"] == "deepseek_v3"
    x = _ones(size, len(positions))
    if not interleaved:
        return _halves(
            getattr(rotary_module, "forward_native", rotary_module.forward)(positions, x.clone(), x.clone())[0][:2]
        )
    x = torch.tensor([1.0, 0.0]).repeat(len(positions), 1, size // 2)
    y = rotary_module.forward_native(positions, x.clone(), x.clone())[0][:2, 0]
    return y[:, ::2], y[:, 1::2]


def vllm(config: dict[str, Any], sequence: int, setting: int) -> tuple[Tensor, Tensor]:
    """Call vLLM's `get_rope`, and the module that it returns. As in DeepSeek's models, change the rope_type first."""
    package("vllm")
    rotary = importlib.import_module("vllm.model_executor.layers.rotary_embedding")
    long = importlib.import_module("vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope")
    context = importlib.import_module("vllm.config")
    parameters, size = _parameters(config), _size(config)
    if config["model_type"] == "deepseek_v3" and parameters["rope_type"] != "default":
        parameters["rope_type"] = (
            "deepseek_llama_scaling" if parameters.get("attention_factor") == 1.0 else "deepseek_yarn"
        )
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=setting))
    rotary._ROPE_DICT.clear()
    with (
        replaced(long, "get_current_vllm_config", lambda: vllm_config),
        context.set_current_vllm_config(context.VllmConfig(device_config=context.DeviceConfig("cpu"))),
    ):
        rotary_module = rotary.get_rope(
            size,
            config["max_position_embeddings"],
            is_neox_style=config["model_type"] != "deepseek_v3",
            rope_parameters=parameters,
            dtype=torch.float32,
        )
        return _rotate_ones(rotary_module, config, torch.tensor([0, 1]))


def sglang(config: dict[str, Any], sequence: int, setting: int) -> tuple[Tensor, Tensor]:
    """Call SGLang's `get_rope` of srt/layers/rotary_embedding, with stubs for the rest of the package."""
    eager = replaced(torch, "compile", lambda *_, **__: lambda function: function)
    values = {"BaseFusedOp": Plain, "is_cpu": lambda: True, "rl_on_policy_target": None, "get_device": lambda *_: "cpu"}
    with eager, stubs("sglang", "srt.layers.rotary_embedding", values=values):
        factory = importlib.import_module("sglang.srt.layers.rotary_embedding.factory")
        parameters, size = _parameters(config), _size(config)
        base = parameters.pop("rope_theta")
        if config["model_type"] == "deepseek_v3":  # as srt/models/deepseek_v2.py
            parameters["rope_type"] = "deepseek_yarn"
        share = parameters.get("partial_rotary_factor", 1.0)
        rotary_module = factory.get_rope(
            size,
            size,
            config["max_position_embeddings"],
            base,
            is_neox_style=config["model_type"] != "deepseek_v3",
            rope_scaling=parameters,
            dtype=torch.float32,
            partial_rotary_factor=share,
        )
        rows = rotary_module.max_position_embeddings  # the table does not grow
        return _rotate_ones(rotary_module, config, torch.tensor([0, 1, min(sequence, rows) - 1]))


@contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute while the body runs."""
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def mlx_lm(config: dict[str, Any], sequence: int, setting: int) -> tuple[Tensor, Tensor]:
    """Call mlx-lm's `initialize_rope`, or the class that a model uses instead, and the layer that it returns."""
    core = package("mlx.core")
    utils = importlib.import_module("mlx_lm.models.rope_utils")
    core.set_default_device(core.cpu)
    size, parameters = _size(config), _parameters(config)
    base, longest = parameters["rope_theta"], config["max_position_embeddings"]
    if config["model_type"] == "phimoe":  # as models/phimoe.py
        arguments = {key: value for key, value in parameters.items() if key not in ("rope_type", "rope_theta")}
        rope = utils.SuScaledRoPE(size, base=base, max_position_embeddings=longest, **arguments)
    elif config["model_type"] == "hunyuan_v1_dense":
        hunyuan = importlib.import_module("mlx_lm.models.hunyuan_v1_dense")
        rope = hunyuan.DynamicNTKAlphaRoPE(size, base, parameters["alpha"])
    else:
        rope = utils.initialize_rope(size, base, False, parameters, max_position_embeddings=longest)

    def rotate(position: int) -> Tensor:
        x = core.array(_ones(size, 1).numpy()).reshape(1, 1, 1, size)
        if parameters["rope_type"] == "dynamic" and config["model_type"] == "llama":  # it uses the length of the input
            x = core.broadcast_to(x, (1, 1, sequence, size))
            return torch.tensor(rope(x)[0, 0, position].tolist())
        return torch.tensor(rope(x, offset=position)[0, 0, 0].tolist())

    return _halves(torch.stack((rotate(0), rotate(1))))


def exllamav3(config: dict[str, Any], sequence: int, setting: int) -> tuple[Tensor, Tensor]:
    """Call the class RoPE of exllamav3's util/rope.py. The extension is not loaded, because it needs a GPU."""
    with stubs("exllamav3", "util"):
        module = importlib.import_module("exllamav3.util.rope")
        parameters = _parameters(config)
        settings = module.RopeSettings(
            head_dim=_size(config),
            rope_theta=parameters["rope_theta"],
            rope_scaling=parameters,
            partial_rotary_factor=parameters.get("partial_rotary_factor", 1.0),
            max_position_embeddings=config["max_position_embeddings"],
            override_max_position_embeddings=setting if parameters["rope_type"] == "longrope" else None,
            yarn_mscale_ratio=config["model_type"] == "deepseek_v3",
        )
        sin, cos = module.RoPE("cpu", settings).compute_sincos(torch.tensor([0, 1]))
    half = cos.shape[-1] // 2
    return cos[:, :half], sin[:, :half]


def _golden(probe: Probe, name: str) -> files.Golden:
    return files.Golden(
        f"engine_rules/rules_of_{probe.__name__}.json",
        lambda row: str(row["case"]),
        lambda row: record(row, probe),
        package=name,
    )


GOLDEN = [
    _golden(transformers, "transformers"),
    _golden(vllm, "vllm"),
    _golden(sglang, "sglang"),
    _golden(mlx_lm, "mlx-lm"),
    _golden(exllamav3, "exllamav3"),
]
