"""deployed.json: what classes and functions of engines compute, of which each is run alone.

--source names a folder that contains the packages mlx_lm, sglang, transformers and vllm, which need not be installed.
"""

from __future__ import annotations

import ast
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from . import files
from .model import CannotRecordError
from .peers import package
from .rotated import golden, shortest


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


_RECORDERS = {recorder.__name__: recorder for recorder in (fope, grok, telechat3, bailing, openpangu, nanochat, talkie)}


def record(row: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a row again."""
    recorder = _RECORDERS.get(row["id"].split()[0])
    if recorder is None:
        raise CannotRecordError("code of one commit, which gives the same numbers again")
    if source is None:
        raise CannotRecordError("pass a folder with the packages as --source")
    return {**row, **recorder(row, source)}


GOLDEN = files.Golden("deployed.json", lambda row: str(row["id"]), record, "torch", source=True)
