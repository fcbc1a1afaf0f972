"""trainers/: the ropes that trainers have built in for their models, recorded from their own functions.

A row is one model of a trainer: its shape, and for each kind of layer the numbers of its rope, and the frequencies,
the attention factor and the pairing of its rotary module. "weights" is the pairing of the weights that its converter
reads, which it permutes if this differs.
Rows with "rotated" also have one vector in bfloat16 after its rotation, which shows what the module rounds.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import files
from .model import CannotRecordError
from .peers import package
from .rotated import shortest
from .stubbed import package_folder, stubs

POSITIONS = (0, 1, 17, 4095)

Rotate = Callable[[Tensor], Tensor]
"""A function that rotates a tensor [4, head_dim] at `POSITIONS`."""


def vector(head_dim: int) -> Tensor:
    """Return the vector of "rotated", whose values bfloat16 represents exactly."""
    return torch.tensor([(37 * i % 64 - 31) / 16 for i in range(head_dim)])


def measure(rotate: Rotate, head_dim: int, rotary_dim: int) -> dict[str, Any]:
    """Return the pairing, the frequencies and the attention factor of a rotation in float32."""
    columns = torch.stack([rotate(row.expand(4, -1))[1] for row in torch.eye(head_dim)[:rotary_dim]], dim=1)
    partner = int(columns[0, 1:].abs().argmax()) + 1  # the other input channel of the first output channel
    pairing = {1: "interleaved", rotary_dim // 2: "half"}[partner]
    first = slice(0, rotary_dim, 2) if pairing == "interleaved" else slice(0, rotary_dim // 2)
    x = torch.zeros(4, head_dim)
    x[:, first] = 1.0
    turned = rotate(x).double()[:, :rotary_dim]
    # MaxText's YaRN takes neighbouring channels and returns them half a head apart.
    apart = columns[1:, 0].abs().argmax() + 1 == rotary_dim // 2
    cos, sin = turned.chunk(2, dim=-1) if apart else (turned[:, ::2], turned[:, 1::2])
    angles = torch.atan2(sin[1], cos[1]).float()
    return {
        "pairing": pairing,
        "inv_freq": shortest(angles),
        "attention_factor": shortest(cos[0].max().reshape(1))[0],
    }


def record(row: dict[str, Any], read: Callable[[str], tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Record a row again.

    Args:
        row: the committed row.
        read: returns the fields of a model, and its ropes. Each rope has a function "rotate", which gets a tensor and
            its dtype, the factor "scores" by which the model multiplies scores in place of cos and sin, and "permuted",
            whether the converter permutes q and k of weights with the pairing half.
    """
    fields, ropes = read(row["case"])
    result = {"case": row["case"], "models": row["models"], **fields, "ropes": {}}
    for kind, rope in ropes.items():
        rotate, scores, permuted = rope.pop("rotate"), rope.pop("scores", 1.0), rope.pop("permuted", False)
        head_dim = rope["head_dim"]
        found = measure(rotate, head_dim, rope.get("rotary_dim", head_dim))
        found["attention_factor"] *= scores
        found = {"weights": "half" if permuted else found["pairing"], **found}
        old = row.get("ropes", {}).get(kind, {})
        if "rotated" in old:
            x = vector(head_dim).bfloat16().expand(4, -1)
            found["rotated"] = [shortest(y) for y in rotate(x)]
        result["ropes"][kind] = {**rope, **found}
    return result


def _rope(
    rotary: Any, head_dim: int, base: float, scaling: dict[str, Any] | None, rotary_dim: int | None = None
) -> dict[str, Any]:
    """Return the numbers of a rope, without those that are the default, and the class that rotates."""
    rope: dict[str, Any] = {"class": type(rotary).__name__, "head_dim": head_dim, "base": float(base)}
    if scaling is not None:
        rope["scaling"] = scaling
    if rotary_dim not in (None, head_dim):
        rope["rotary_dim"] = rotary_dim
    return rope


def torchtitan(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a flavor from the registry of a model in torchtitan."""
    folder, _, flavor = case.partition(" ")
    with stubs("torchtitan", "models", "protocols", "tools", "config", "components", "distributed", "ops"):
        module = importlib.import_module(f"torchtitan.models.{folder}")
        spec = module.model_registry(flavor)
        found = [layer.attention for layer in spec.model.layers if hasattr(layer.attention, "rope")]
        attention, config = found[0], found[0].rope
        if any(dataclasses.replace(other.rope) != config for other in found):
            raise CannotRecordError("its layers have several ropes")
        rotary = dataclasses.replace(config, max_seq_len=max(POSITIONS) + 1).build()
        scores = 1.0
        if folder == "gpt_oss":  # it rotates the whole head, so a factor of the scores is that of cos and sin, squared
            with torch.device("meta"):
                scores = (attention.build().softmax_scale * attention.head_dim**0.5) ** 0.5
        permuted = hasattr(spec.state_dict_adapter, "_reverse_permute")
    heads = attention.n_heads
    head_dim = getattr(attention, "head_dim", None) or spec.model.dim // heads
    if hasattr(attention, "qk_rope_head_dim"):
        head_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    scaling: dict[str, Any] | None = None
    if config.scaling == "llama":
        keys = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = {
            "rope_type": "llama3",
            "factor": config.scaling_factor,
            **{key: getattr(config, key) for key in keys},
        }
    elif config.scaling == "yarn":
        scaling = {"rope_type": "yarn", "factor": config.rope_factor}
        scaling |= {key: getattr(config, key) for key in ("beta_fast", "beta_slow", "truncate")}
        scaling |= {"original_max_position_embeddings": config.original_seq_len, "attention_factor": scores}

    def rotate(x: Tensor) -> Tensor:
        part, rest = x.split((config.dim, head_dim - config.dim), dim=-1)
        part = part.reshape(1, len(x), 1, config.dim)
        return torch.cat((rotary(part, part, torch.tensor([POSITIONS]))[0].reshape(len(x), -1), rest), dim=-1)

    shape = {"hidden_size": spec.model.dim, "layers": len(spec.model.layers), "heads": heads}
    rope = _rope(rotary, head_dim, config.theta, scaling, config.dim)
    rope |= {"rotate": rotate, "scores": scores, "permuted": permuted}
    shape |= {"vocab_size": spec.model.vocab_size}
    return {"file": f"models/{folder}/__init__.py", **shape}, {"all": rope}


def maxtext(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build the rotary modules of a model of MaxText from its configs, with the method that builds them there."""
    jnp, yaml = package("jax.numpy"), package("yaml")
    folder = Path(package_folder("maxtext")) / "configs"
    values = yaml.safe_load((folder / "base.yml").read_text())
    config = SimpleNamespace(**{**values, **yaml.safe_load((folder / "models" / f"{case}.yml").read_text())})
    real = ("layers.embeddings", "layers.attentions", "common.common_types")
    with stubs("maxtext", *real):
        types = importlib.import_module("maxtext.common.common_types")
        attentions = importlib.import_module("maxtext.layers.attentions")
        embeddings = importlib.import_module("maxtext.layers.embeddings")
    config.shard_mode, config.model_name = types.ShardMode.AUTO, case
    block = types.DecoderBlockType(config.decoder_block)

    def build(kind: str, dtype: Any) -> Any:
        """Build a module as `Attention.__init__` does, with the arguments of the models' files."""
        full = kind == "full_attention"
        attention = SimpleNamespace(
            config=config,
            head_dim=sizes(kind),
            qk_rope_head_dim=config.qk_rope_head_dim,
            is_vision=False,
            rope_type=config.rope_type.lower(),
            use_mrope=config.use_mrope,
            mrope_section=config.mrope_section,
            rope_max_timescale=config.rope_max_timescale,
            attention_type=types.AttentionType.GLOBAL if full else types.AttentionType.LOCAL_SLIDING,
            partial_rotary_factor=None,
            is_qwen3_hybrid=block in (types.DecoderBlockType.QWEN3_NEXT, types.DecoderBlockType.QWEN3_5),
            dtype=dtype,
            mesh=None,
            rngs=None,
        )
        if case.startswith("gemma4"):  # models/gemma4.py and gemma4_small.py
            which = "global" if full else "local"
            attention.rope_max_timescale = getattr(config, f"{which}_rope_max_timescale")
            attention.partial_rotary_factor = getattr(config, f"{which}_rope_proportion")
        config.dtype = dtype
        if case.startswith("deepseek4"):  # layers/attention_compressed.py
            theta = config.rope_max_timescale if kind == "sliding_attention" else config.compressed_rope_max_timescale
            share = config.qk_rope_head_dim / config.head_dim
            return embeddings.DeepSeekV4RotaryEmbedding(config.head_dim, share, theta, dtype)
        return attentions.Attention.init_rotary_embedding(attention)

    def sizes(kind: str) -> int:
        if case.startswith("gemma4") and kind == "full_attention":
            return config.global_head_dim
        return config.head_dim

    def rope(kind: str) -> dict[str, Any]:
        modules = {dtype: build(kind, dtype) for dtype in (jnp.float32, jnp.bfloat16)}
        module, head_dim = modules[jnp.float32], sizes(kind)
        rotary_dim = head_dim
        name, base, scaling = type(module).__name__, getattr(module, "max_timescale", None), None
        if name == "YarnRotaryEmbedding":
            base, rotary_dim = module.rope_theta, module.embedding_dims
            scaling = {"rope_type": "yarn", "factor": module.rope_factor}
            scaling |= {key: getattr(module, key) for key in ("beta_fast", "beta_slow", "truncate")}
            length = module.original_max_position_embeddings
            factor = 0.1 * math.log(module.rope_factor) + 1.0 if module.attention_scaling else 1.0
            scaling |= {"original_max_position_embeddings": length, "attention_factor": factor}
            if config.attention_type == "mla":
                head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        elif name == "LLaMARotaryEmbedding" and module.use_scale:  # the numbers in `_apply_scaling_factor`
            scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
            scaling["original_max_position_embeddings"] = 8192
        elif name == "Gemma4PartialRotaryEmbedding":
            scaling = {"rope_type": "proportional", "partial_rotary_factor": module.partial_rotary_factor}
        elif name == "DeepSeekV4RotaryEmbedding":
            base, rotary_dim = module.rope_theta, module.dim
        elif getattr(module, "rope_linear_scaling_factor", 1.0) != 1.0:
            scaling = {"rope_type": "linear", "factor": module.rope_linear_scaling_factor}
        if name != "Gemma4PartialRotaryEmbedding":
            rotary_dim = getattr(module, "rotary_dim", None) or rotary_dim

        def rotate(x: Tensor) -> Tensor:
            dtype = jnp.bfloat16 if x.dtype == torch.bfloat16 else jnp.float32
            part = x.split((rotary_dim, x.shape[-1] - rotary_dim), dim=-1)
            if name in ("YarnRotaryEmbedding", "DeepSeekV4RotaryEmbedding"):  # the caller passes the rotated channels
                array, rest = jnp.asarray(part[0].float().numpy(), dtype), part[1]
            else:
                array, rest = jnp.asarray(x.float().numpy(), dtype), x[:, :0]
            positions = jnp.asarray([POSITIONS])
            if config.use_mrope:
                positions = jnp.stack([positions] * 3, axis=-1)
            turned = modules[dtype](array[None, :, None, :], positions, *((2,) if "V4" in name else ()))[0, :, 0]
            return torch.cat((torch.tensor(turned.astype(jnp.float32).tolist()).to(x.dtype), rest), dim=-1)

        permuted = case.startswith("llama3.1")  # checkpoint_conversion/utils/param_mapping.py
        return {**_rope(module, head_dim, base, scaling, rotary_dim), "rotate": rotate, "permuted": permuted}

    kinds: tuple[str, ...] = ("all",)
    if case.startswith(("gemma3", "gemma4")):
        kinds = ("sliding_attention", "full_attention")
    elif case.startswith("deepseek4"):
        kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    ropes = {kind: rope(kind) for kind in kinds}
    pairs = 2 if case.startswith("gemma2") else 1  # a layer of MaxText is a local and a global one
    shape = {"hidden_size": config.base_emb_dim, "layers": pairs * config.base_num_decoder_layers}
    shape |= {"heads": config.base_num_query_heads, "vocab_size": config.vocab_size}
    if case.startswith(("gemma4", "deepseek4")):  # the arguments above are those of the models' files
        shape["evidence"] = "read"
    return {"file": f"configs/models/{case}.yml", **shape}, ropes


def _golden(read: Callable[[str], tuple[dict[str, Any], dict[str, Any]]]) -> files.Golden:
    return files.Golden(
        f"trainers/models_of_{read.__name__}.json",
        lambda row: str(row["case"]),
        lambda row: record(row, read),
        package=read.__name__,
    )


GOLDEN = [_golden(read) for read in (torchtitan, maxtext)]
