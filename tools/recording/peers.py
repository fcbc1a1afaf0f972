"""peers/, torchtitan.json and moved_keys.json: known q and k, rotated by other packages.

The packages are torchtitan, rotary-embedding-torch, MLX and LMCache. If one is not installed, its file is
kept.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import files
from .model import CannotRecordError
from .rotated import golden, shortest

Rotate = Callable[[Tensor], Tensor]
"""A function that rotates a tensor [1, heads, tokens, head_dim]."""


def package(name: str) -> Any:
    """Import a module.

    Raises:
        CannotRecordError: it is not installed, or cannot be loaded on this machine.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise CannotRecordError(f"{name} is not installed, or does not load: {error}") from error


def single_file(name: str, file: str) -> Any:
    """Load one file of a package as a module, without the rest of the package, which may need other packages.

    Raises:
        CannotRecordError: the package is not installed, or the file cannot be loaded alone.
    """
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise CannotRecordError(f"{name} is not installed")
    return load_file(Path(found.submodule_search_locations[0]) / file)


def load_file(path: Path) -> Any:
    """Load a file as a module.

    Raises:
        CannotRecordError: the file does not exist, or cannot be loaded alone.
    """
    spec = importlib.util.spec_from_file_location(f"recorded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise CannotRecordError(f"{path.name} does not load: {error}") from error
    return module


def record(case: dict[str, Any], rotate: Rotate, inv_freq: Tensor | None = None) -> dict[str, Any]:
    """Record a case again: the rotated q and k, and the pairing and the channels, which one-hot inputs show."""
    recorded: dict[str, Any] = {"inv_freq": None if inv_freq is None else shortest(inv_freq), **channels(case, rotate)}
    for name in ("q", "k"):
        x = golden(name, case[f"{name}_shape"])
        recorded[f"{name}_rot"] = shortest(rotate(x)[:, : case[f"{name}_heads"]])
    return {name: recorded.get(name, value) for name, value in case.items()}


def channels(case: dict[str, Any], rotate: Rotate) -> dict[str, Any]:
    """Return the pairing, the number of rotated channels and the number of channels of a head.

    They are measured with one-hot inputs at the first token with position 1.
    """
    tokens, dim = case["q_shape"][-2:]
    token = case["positions"].index(1)
    x = torch.eye(dim).view(1, dim, 1, dim).repeat(1, 1, tokens, 1)
    off = rotate(x)[0, :, token].fill_diagonal_(0).nonzero()
    distances = {int(b - a) for a, b in off.tolist() if b > a}
    rotary_dim = len(off)
    names = {1: "interleaved", rotary_dim // 2: "half"}
    if len(distances) != 1 or next(iter(distances)) not in names:
        raise CannotRecordError(f"pairs at distances {sorted(distances)} have no name")
    return {"layout": names[distances.pop()], "rotary_dim": rotary_dim, "head_dim": dim}


def rotary_embedding_torch(case: dict[str, Any]) -> dict[str, Any]:
    """Record a case of rotary-embedding-torch."""
    module, params = package("rotary_embedding_torch"), dict(case["params"])
    if "offset" in params:
        offset = params.pop("offset")
        rotary = module.RotaryEmbedding(**params)
        return record(case, lambda x: rotary.rotate_queries_or_keys(x, offset=offset).detach())
    rotary = module.RotaryEmbedding(**params)
    angles = rotary(torch.tensor(case["positions"]).float())
    return record(case, lambda x: module.apply_rotary_emb(angles, x).detach(), rotary.freqs)


def torchtitan(case: dict[str, Any]) -> dict[str, Any]:
    """Record a case of torchtitan. The frequencies are the angles in row 1 of the module's table."""
    module = getattr(package("torchtitan.models.common.rope"), case["class"])
    rotary = module.Config(**case["params"], max_seq_len=max(case["positions"]) + 1).build()
    positions = torch.tensor([case["positions"]])
    row = rotary.cache[1]
    cos, sin = (row.real, row.imag) if row.is_complex() else row.chunk(2)
    inv_freq = torch.atan2(sin.double(), cos.double())[: case["params"]["dim"] // 2].float()

    def rotate(x: Tensor) -> Tensor:  # torchtitan has the heads after the tokens, and rotates q and k in one call
        return rotary(x.transpose(1, 2), x.transpose(1, 2), positions)[0].transpose(1, 2)  # type: ignore[no-any-return]

    return record(case, rotate, inv_freq)


def mlx(case: dict[str, Any]) -> dict[str, Any]:
    """Record a case of MLX."""
    core, params = package("mlx.core"), dict(case["params"])
    offset = params.pop("offset", None)
    freqs = params.pop("freqs", None)
    params |= {"freqs": None if freqs is None else core.array(freqs), "scale": 1.0}
    params.setdefault("base", None)
    core.set_default_device(core.cpu)

    def rotate(x: Tensor) -> Tensor:
        array = core.array(x.numpy())
        if offset is not None:
            out = core.fast.rope(array, offset=offset, **params)
        else:
            rotated = [
                core.fast.rope(array[:, :, t : t + 1], offset=position, **params)
                for t, position in enumerate(case["positions"])
            ]
            out = core.concatenate(rotated, axis=2)
        return torch.tensor(out.tolist(), dtype=torch.float32)

    return record(case, rotate)


def lmcache(case: dict[str, Any]) -> dict[str, Any]:
    """Record a case of LMCache: the keys that its FusedRope moves, computed by its operator in PyTorch.

    The table is that of vLLM's RotaryEmbedding, which LMCache passes to the operator: cos and sin side by side.
    """
    module, dim = single_file("lmcache", "v1/platform/torch_ops/pos_kernels.py"), case["k_shape"][-1]
    inv_freq = 1.0 / case["base"] ** (torch.arange(0, dim, 2).float() / dim)
    old, new = torch.tensor(case["old"]), torch.tensor(case["new"])
    angles = torch.outer(torch.arange(int(torch.stack([old, new]).max()) + 1).float(), inv_freq)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    keys = golden("k", case["k_shape"])
    module.rotary_embedding_k_fused(old, new, keys, dim, table, case["pairing"] == "half")
    return case | {"moved": shortest(keys)}


def _golden(record_case: Callable[[dict[str, Any]], dict[str, Any]], name: str) -> files.Golden:
    return files.Golden(
        f"peers/{record_case.__name__}.json", lambda case: str(case["id"]), record_case, package=name, rows="cases"
    )


GOLDEN = [
    _golden(rotary_embedding_torch, "rotary-embedding-torch"),
    _golden(mlx, "mlx"),
    files.Golden("moved_keys.json", lambda case: str(case["id"]), lmcache, package="lmcache", rows="cases"),
    files.Golden("torchtitan.json", lambda case: str(case["id"]), torchtitan, package="torchtitan", rows="cases"),
]
