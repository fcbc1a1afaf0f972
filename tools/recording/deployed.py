"""deployed.json: what classes and functions of engines compute, of which each is run alone.

--source names a folder that contains the packages mlx_lm, sglang, transformers and vllm, which need not be installed,
riflex_utils.py, and the files of models' own code that tests/golden/README.md lists.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from . import files
from .model import CannotRecordError
from .peers import package
from .rotated import golden, shortest
from .sglang_models import Recorded
from .stubbed import Nothing


def run(source: Path, file: str, *names: str, **scope: Any) -> dict[str, Any]:
    """Execute the classes and functions with these names of a file, and return the resulting namespace.

    Raises:
        CannotRecordError: the file or a name does not exist.
    """
    if not (source / file).is_file():
        raise CannotRecordError(f"{source} has no {file}")
    tree = ast.parse((source / file).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    if len(tree.body) != len(names):
        raise CannotRecordError(f"{file} lacks one of {names}")
    scope |= {"math": math, "torch": torch, **{name: getattr(typing, name) for name in typing.__all__}}
    exec(compile(tree, file, "exec"), scope)
    return scope


class Base:
    """Replaces the base class of rotary classes: it keeps the arguments, and its table is that of the base class."""

    inv_freq: torch.Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        mrope_section: list[int] | None = None,
    ) -> None:
        self.head_size, self.rotary_dim, self.base = head_size, rotary_dim, base
        self.max_position_embeddings, self.is_neox_style = max_position_embeddings, is_neox_style


class Table(torch.nn.Module):
    """Replaces the base class of a rotary class with weights."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        for name, value in arguments.items():
            setattr(self, name, value)


def axes(select: Callable[[Any, torch.Tensor], Any], module: Any) -> list[int]:
    """Return the axis of each pair: in the table, cos of the position a of axis a is a for every pair."""
    pairs = module.rotary_dim // 2
    module.cos_sin_cache = torch.arange(3).unsqueeze(1).repeat(1, 2 * pairs).float()
    cos = select(module, torch.arange(3).unsqueeze(1))[0]
    return [int(axis) for axis in cos.flatten()[:pairs].tolist()]


def grok(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record the frequencies of Grok's class, and the largest cos, which is the factor that it applies."""
    folder = "sglang/srt/layers/rotary_embedding"
    ramp = run(source, f"{folder}/yarn.py", "yarn_find_correction_dim", "yarn_find_correction_range")
    scope = run(
        source,
        "sglang/srt/models/grok.py",
        "_yarn_linear_ramp_mask",
        "ScalingRotaryEmbedding",
        RotaryEmbedding=Base,
        _is_npu=False,
        _yarn_get_mscale=lambda scale: 1.0,
        _yarn_find_correction_range=ramp["yarn_find_correction_range"],
    )
    params = {"is_neox_style": True, "dtype": torch.float32, **row["params"]}
    module = scope["ScalingRotaryEmbedding"](params["rotary_dim"], **params)
    inv_freq = module._compute_inv_freq(module.scaling_factor)
    module.max_position_embeddings, module._compute_inv_freq = 1, lambda _: inv_freq
    return {"inv_freq": shortest(inv_freq), "largest_cos": float(module._compute_cos_sin_cache().max())}


def telechat3(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record what vLLM makes of the rope parameters."""
    scope = run(
        source,
        "vllm/transformers_utils/config.py",
        "patch_legacy_rope_type",
        logger=SimpleNamespace(info=print, warning=lambda *_: None),
        is_rope_parameters_nested=lambda _: False,
    )
    parameters = dict(row["params"])
    scope["patch_legacy_rope_type"](parameters)
    return {"read_as": parameters}


def bailing(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record the axis of each pair in vLLM's class."""
    scope = run(
        source,
        "vllm/model_executor/layers/rotary_embedding/bailing_mrope.py",
        "_validate_bailing_mrope_config",
        "_validate_bailing_positions",
        "BailingMRotaryEmbedding",
        MRotaryEmbedding=Base,
    )
    module = scope["BailingMRotaryEmbedding"](64, 64, 1, 1e4, False, torch.float32, **row["params"])
    return {"axis": axes(lambda own, positions: own.select_cos_sin(positions), module)}


def openpangu(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record the axis of each pair in vLLM's class."""
    file = "vllm/model_executor/layers/rotary_embedding/mrope_interleaved.py"
    cls = run(source, file, "MRotaryEmbeddingInterleaved", MRotaryEmbedding=Base)["MRotaryEmbeddingInterleaved"]
    pairs = sum(row["params"]["mrope_section"])
    module = cls(2 * pairs, 2 * pairs, 1, 1e4, True, torch.float32, **row["params"])
    return {"axis": axes(lambda own, positions: own._rebuild_pos_emb(positions), module)}


def fope(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record q and k after vLLM's class, whose coefficients are known numbers."""
    file = "vllm/model_executor/layers/rotary_embedding/fope.py"
    scope = run(
        source,
        file,
        "FourierRotaryEmbedding",
        RotaryEmbedding=Table,
        nn=torch.nn,
        F=torch.nn.functional,
        rotate_neox=lambda x: torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1),
    )
    p = row["params"]
    module = scope["FourierRotaryEmbedding"](
        p["dim"], p["dim"], p["tokens"], 1e4, True, torch.float32, False, p["key_heads"], p["pairs"], True, 0.5
    )
    with torch.no_grad():
        for name, values in (("cos_coef", "q"), ("sin_coef", "k")):
            getattr(module, name).copy_(golden(values, [p["key_heads"], p["pairs"], p["pairs"]]))
    q, k = golden("q", [p["tokens"], p["heads"] * p["dim"]]), golden("k", [p["tokens"], p["key_heads"] * p["dim"]])
    rotated = module.forward_native(torch.arange(p["tokens"]), q, k)
    return {"q": shortest(rotated[0].flatten()), "k": shortest(rotated[1].flatten())}


class RecordOuter(TorchFunctionMode):
    """Records the frequencies that `torch.outer` multiplies with positions."""

    inv_freq: torch.Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.outer:
            self.inv_freq = args[1]
        return func(*args, **(kwargs or {}))


def riflex(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record the frequencies of RIFLEx's function: those that it multiplies with positions."""
    scope = run(source, "riflex_utils.py", "get_1d_rotary_pos_embed_riflex", np=np)
    with RecordOuter() as outer:
        scope["get_1d_rotary_pos_embed_riflex"](pos=np.arange(2), use_real=True, **row["params"])
    return {"inv_freq": shortest(outer.inv_freq)}


def nanochat(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record q after the functions of transformers, with the cos and sin that its rotary class computes."""
    file = "transformers/models/nanochat/modeling_nanochat.py"
    functions = run(
        source, file, "apply_rotary_pos_emb", "rotate_half", use_kernel_forward_from_hub=lambda _: lambda f: f
    )
    q = golden("q", row["params"]["shape"])
    tokens, dim = q.shape[-2:]
    angle = torch.arange(tokens).float()[:, None] * (1.0 / (1e4 ** (torch.arange(0, dim, 2).float() / dim)))
    angle = torch.cat((angle, angle), dim=-1)[None]
    return {"rotated": shortest(functions["apply_rotary_pos_emb"](q, q, angle.cos(), angle.sin())[0].flatten())}


def talkie(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record q after mlx-lm's attention has rotated it."""
    core, layers = package("mlx.core"), package("mlx.nn")
    core.set_default_device(core.cpu)
    q = golden("q", row["params"]["shape"])
    names = ("ModelArgs", "rms_norm", "HeadGain", "Attention")
    scope = run(
        source, "mlx_lm/models/talkie.py", *names, mx=core, nn=layers, dataclass=dataclass, BaseModelArgs=object
    )
    arguments = scope["ModelArgs"](hidden_size=q.shape[-1], num_attention_heads=1, head_dim=q.shape[-1], rope_theta=1e4)
    rotated = scope["Attention"](arguments)._rope(core.array(q.numpy()), 0)
    return {"rotated": shortest(torch.tensor(rotated.tolist()).flatten())}


def dream(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record q after Dream's rotary class and its function, with the config class of a model with the same keys."""
    functions = importlib.import_module("transformers.modeling_rope_utils")
    scope = run(
        source,
        "modeling_dream.py",
        "DreamRotaryEmbedding",
        "rotate_half",
        "apply_rotary_pos_emb",
        nn=torch.nn,
        DreamConfig=object,
        ROPE_INIT_FUNCTIONS=functions.ROPE_INIT_FUNCTIONS,
    )
    config = importlib.import_module("transformers").Qwen2Config(**row["config"])
    q = golden("q", row["params"]["shape"])
    cos, sin = scope["DreamRotaryEmbedding"](config=config)(q, torch.arange(q.shape[2])[None])
    return {"rotated": shortest(scope["apply_rotary_pos_emb"](q, q, cos, sin)[0].flatten())}


def llada(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record q after LLaDA's rotary class."""
    scope = run(
        source,
        "modeling_llada.py",
        "RotaryEmbedding",
        nn=torch.nn,
        einsum=torch.einsum,
        ModelConfig=object,
        BufferCache=dict,
        _non_meta_init_device=lambda _: torch.device("cpu"),
    )
    q = golden("q", row["params"]["shape"])
    config = SimpleNamespace(**row["config"], max_sequence_length=q.shape[2], rope_full_precision=True)
    return {"rotated": shortest(scope["RotaryEmbedding"](config, {})(q, q)[0].flatten())}


def bidir_mistral(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record q after the rotary class of NV-Embed's model, and the function that Mistral's attention calls."""
    mistral = importlib.import_module("transformers.models.mistral.modeling_mistral")
    names = {"MistralModel": mistral.MistralModel, "MistralConfig": mistral.MistralConfig}
    cls = run(source, "modeling_nvembed.py", "BidirectionalMistralModel", BidirectionalMistralConfig=None, **names)
    config = mistral.MistralConfig(**row["config"])
    q = golden("q", row["params"]["shape"])
    model = cls["BidirectionalMistralModel"](config)
    assert isinstance(model.layers[0].self_attn, mistral.MistralAttention)
    cos, sin = model.rotary_emb(q, torch.arange(q.shape[2])[None])
    return {"rotated": shortest(mistral.apply_rotary_pos_emb(q, q, cos, sin)[0].flatten())}


def _call(source: Path, file: str, cls: str, *arguments: Any, **named: Any) -> dict[str, Any]:
    """Return the arguments with which an attention class calls `get_rope`, with stubs for all else that it names."""
    text = (source / file).read_text()
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} - {*dir(builtins), cls}
    sizes = {name: lambda: 1 for name in names if name.endswith("_size")}
    scope = {**dict.fromkeys(names, Nothing()), **sizes, "nn": torch.nn, "get_rope": Recorded}
    module = run(source, file, cls, **scope)[cls](*arguments, **named).rotary_emb
    return {"read_as": {"head_size": module.arguments[0], **module.named}}


def arctic(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record the call of `get_rope` in vLLM's attention of Arctic, which vLLM 0.32 no longer has."""
    return _call(source, "arctic.py", "ArcticAttention", SimpleNamespace(**row["config"]))


def grovemoe(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Record the call of `get_rope` in SGLang's attention of GroveMoE, from the repository of the model."""
    config = {key: value for key, value in row["config"].items() if key not in ("model_type", "num_hidden_layers")}
    heads = {"num_heads": config.pop("num_attention_heads"), "num_kv_heads": config.pop("num_key_value_heads")}
    return _call(source, "grovemoe.py", "Qwen3MoeAttention", **config, **heads)


_RECORDERS = {
    recorder.__name__: recorder
    for recorder in (
        fope,
        grok,
        telechat3,
        bailing,
        openpangu,
        riflex,
        nanochat,
        talkie,
        dream,
        llada,
        bidir_mistral,
        arctic,
        grovemoe,
    )
}


def record(row: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a row again."""
    if source is None:
        raise CannotRecordError("pass a folder with the packages as --source")
    return {**row, **_RECORDERS[row["id"].split()[0]](row, source)}


GOLDEN = files.Golden("deployed.json", lambda row: str(row["id"]), record, "torch", source=True)
