"""diffusers.json: known queries, rotated by the tables of the position class of a transformer of diffusers.

The class is built from the default arguments of its transformer. The transformer itself is not built. Nothing here
imports ropewalk.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from . import files
from .model import CannotRecordError
from .rotated import golden, shortest

PLACES = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 2, 3), (2, 5, 7))
SIZES = (3, 6, 8)  # of the grid: frames, rows, columns
_FILES = {
    "Flux": "flux",
    "Chroma": "chroma",
    "LongCatImage": "longcat_image",
    "OvisImage": "ovis_image",
    "Bria": "bria",
    "BriaFibo": "bria_fibo",
    "Krea2": "krea2",
    "Flux2": "flux2",
    "QwenImage": "qwenimage",
    "Wan": "wan",
    "WanVACE": "wan_vace",
    "WanAnimate": "wan_animate",
    "ChronoEdit": "chronoedit",
    "SkyReelsV2": "skyreels_v2",
    "HunyuanVideo": "hunyuan_video",
    "HunyuanVideoFramepack": "hunyuan_video_framepack",
    "HunyuanVideo15": "hunyuan_video15",
    "HunyuanImage": "hunyuanimage",
    "Lumina2": "lumina2",
    "ZImage": "z_image",
}


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record a row of diffusers.json.

    Raises:
        CannotRecordError: diffusers is not installed.
        KeyError: the installed version does not have the class.
    """
    name = row["class_name"]
    short = name.partition("Transformer")[0]
    try:
        embeddings = importlib.import_module("diffusers.models.embeddings")
        file = "cogvideox_transformer_3d" if short == "CogVideoX" else f"transformer_{_FILES[short]}"
        module: Any = importlib.import_module(f"diffusers.models.transformers.{file}")
    except ImportError as error:
        raise CannotRecordError("diffusers is not installed") from error
    if not hasattr(module, name):
        raise KeyError(name)
    parameters = inspect.signature(getattr(module, name).__init__).parameters
    config = {
        key: list(p.default) if isinstance(p.default, tuple) else p.default
        for key, p in parameters.items()
        if isinstance(p.default, (int, float, str, tuple, list))
    }
    if short == "CogVideoX":  # by default, it rotates nothing
        config["use_rotary_positional_embeddings"] = True
    positions, tables = _tables(short, module, embeddings, config)
    channels = tables.shape[-1] * 2 if tables.is_complex() else tables.shape[-1]
    q = golden("q", [1, 1, len(PLACES), channels])
    if tables.is_complex():
        rotated = torch.view_as_real(torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2)) * tables).flatten(3)
    else:
        rotated = embeddings.apply_rotary_emb(q, (tables[0], tables[1]))
    return {
        "class_name": name,
        "config": {"_class_name": name, **config},
        "positions": positions,
        "head_dim": channels,
        "q_rot": shortest(rotated),
    }


def _tables(short: str, module: Any, embeddings: Any, config: dict[str, Any]) -> tuple[list[list[int]], Tensor]:
    """Return positions [axes, tokens], and tables: cos and sin [2, tokens, channels], or complex [tokens, pairs]."""
    ids = torch.tensor(PLACES)
    flat = [(t * SIZES[1] + h) * SIZES[2] + w for t, h, w in PLACES]
    theta = config.get("rope_theta", 10000)
    if short == "CogVideoX":
        head, grid = config["attention_head_dim"], SIZES[1:]
        tables = embeddings.get_3d_rotary_pos_embed(head, ((0, 0), grid), grid, SIZES[0])
        return ids.T.tolist(), torch.stack(tables)[:, flat]
    if short == "QwenImage":
        tables = module.QwenEmbedRope(theta=theta, axes_dim=config["axes_dims_rope"], scale_rope=True)
        tables, _ = tables([SIZES], device=torch.device("cpu"), max_txt_seq_len=1)
        return (ids - torch.tensor([0, SIZES[1] - SIZES[1] // 2, SIZES[2] - SIZES[2] // 2])).T.tolist(), tables[flat]
    if short in ("Lumina2", "ZImage"):
        cls = module.Lumina2RotaryPosEmbed if short == "Lumina2" else module.RopeEmbedder
        key = "axes_dim_rope" if short == "Lumina2" else "axes_dims"
        tables = cls(theta, config[key], config["axes_lens"])
        return ids.T.tolist(), (tables._get_freqs_cis(ids[None])[0] if short == "Lumina2" else tables(ids))
    if "rope_axes_dim" in config:
        cls = next(value for key, value in vars(module).items() if key.endswith("RotaryPosEmbed"))
        axes = config["rope_axes_dim"]
        sides = SIZES[3 - len(axes) :]
        ones = {"patch_size": [1] * len(axes)} if short == "HunyuanImage" else {"patch_size": 1, "patch_size_t": 1}
        frames = torch.arange(SIZES[0])
        arguments = (frames, *SIZES[1:], "cpu") if short == "HunyuanVideoFramepack" else (torch.zeros(1, 1, *sides),)
        tables = cls(**ones, rope_dim=axes, theta=theta)(*arguments)
        flat = flat if len(axes) == 3 else [h * SIZES[2] + w for _, h, w in PLACES]
        return ids[:, 3 - len(axes) :].T.tolist(), torch.stack(tables)[:, flat]
    if "rope_max_seq_len" in config:
        cls = next(value for key, value in vars(module).items() if key.endswith("RotaryPosEmbed"))
        tables = cls(config["attention_head_dim"], (1, 1, 1), 64)(torch.zeros(1, 1, *SIZES))
        return ids.T.tolist(), torch.stack(tables)[:, 0, flat, 0]
    cls = next(value for key, value in vars(module).items() if key.endswith(("PosEmbed", "EmbedND")))
    axes = config["axes_dims_rope"]
    ids = torch.cat((ids, torch.arange(5)[:, None] * 3), dim=1)[:, : len(axes)]
    tables = cls(theta=theta, axes_dim=axes)(ids)
    return ids.T.tolist(), torch.stack(tuple(tables))


def name(row: dict[str, Any]) -> str:
    """Return the name of a row."""
    return str(row["class_name"])


GOLDEN = files.Golden("diffusers.json", name, record, package="diffusers")
