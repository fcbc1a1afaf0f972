"""vision_towers.json: known queries, rotated by the rotary class and the function of a vision tower.

The class is built from the class defaults of the config, and computes cos and sin at a few places of the grid. Nothing
here imports ropewalk.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from . import files
from .configs import config_of, modeling_file, plain
from .model import CannotRecordError
from .rotated import golden, shortest

PLACES = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 2, 3), (0, 5, 2))  # time, and two sides of a grid of 6 × 4
SIDES = (6, 4)
FUNCTIONS = (
    "apply_multidimensional_rope",
    "apply_rotary_pos_emb_vision",
    "apply_rotary_pos_emb_2d",
    "apply_rotary_pos_emb_2d_self_attn",
    "vision_apply_rotary_emb",
    "apply_rotary_pos_emb",
)


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record a row of vision_towers.json.

    Raises:
        CannotRecordError: the tower has no rotary class of a known kind.
        KeyError: the installed transformers does not have the model_type.
    """
    config = config_of(row["model_type"])
    module = modeling_file(config)
    rotary = _rotary(module, config)
    function = next(getattr(module, name) for name in FUNCTIONS if hasattr(module, name))
    if hasattr(rotary, "freqs_ci"):
        positions, rotated = _complex(rotary, function, config)
    elif "pixel_values" in inspect.signature(rotary.forward).parameters:
        positions, rotated = _centres(rotary, function, config)
    else:
        positions, rotated = _grid(rotary, function)
    return {
        "model_type": row["model_type"],
        "config": plain(config),
        "positions": positions,
        "head_dim": rotated.shape[-1],
        "q_rot": shortest(rotated),
    }


def _rotary(module: Any, config: Any) -> Any:
    """Return the module of the rotary class that is built from this config."""
    for name, cls in vars(module).items():
        if name.endswith(("RotaryEmbedding", "RopePositionEmbedding")) and isinstance(cls, type):
            taken = [p for p in inspect.signature(cls.__init__).parameters.values() if p.name == "config"]
            if taken and type(config).__name__ in str(taken[0].annotation) + str(_class_name(cls, config)):
                return cls(config).eval()
    raise CannotRecordError("no rotary class is built from this config alone")


def _class_name(cls: type, config: Any) -> str:
    """Return the name of the config's class if a rotary class of a tower has no annotation for it."""
    return type(config).__name__ if "Vision" in cls.__name__ or "Rope" in cls.__name__ else ""


def _queries(tokens: int, channels: int) -> Tensor:
    """Return queries [1, 1, tokens, channels] by the formula of the golden files."""
    return golden("q", [1, 1, tokens, channels])


def _grid(rotary: Any, function: Any) -> tuple[list[list[int]], Tensor]:
    """Rotate with a class that takes positions [tokens, axes], or a batch of them."""
    ids = torch.tensor(PLACES)
    axes = 3 if "MiniMax" in type(rotary).__name__ else 2
    ids = ids[:, 3 - axes :]
    positions = ids[None] if function.__name__ == "apply_multidimensional_rope" else ids
    cos, sin = rotary(torch.zeros(1), positions)
    channels = _channels(rotary.config)
    q = _queries(len(ids), channels)
    if function.__name__ == "apply_multidimensional_rope":
        rotated = function(q.transpose(1, 2), cos, sin, positions).transpose(1, 2)
    elif function.__name__ == "apply_rotary_pos_emb_vision":
        rotated = function(q[0].transpose(0, 1), q[0].transpose(0, 1), cos, sin)[0].transpose(0, 1)[None]
    elif function.__name__ == "apply_rotary_pos_emb":  # Pixtral
        rotated = function(q, q, cos, sin, unsqueeze_dim=0)[0]
    else:
        rotated = function(q, q, cos, sin)[0]
    return ids.T.tolist(), rotated


def _channels(config: Any) -> int:
    """Return the number of channels of a head."""
    if (own := getattr(config, "head_dim", None)) is not None:
        return int(own)
    if hasattr(config, "memory_attention_hidden_size"):
        heads = config.memory_attention_num_attention_heads * config.memory_attention_downsample_rate
        return int(config.memory_attention_hidden_size // heads)
    width = getattr(config, "embed_dim", None) or config.hidden_size
    heads = getattr(config, "num_heads", None) or config.num_attention_heads
    return int(width // heads)


def _centres(rotary: Any, function: Any, config: Any) -> tuple[list[list[float]], Tensor]:
    """Rotate with a class that takes an image (DINOv3). Positions are 2π times the centres of patches in [-1, 1]."""
    patch = config.patch_size
    cos, sin = rotary(torch.zeros(1, 3, *(patch * side for side in SIDES)))
    places = [place[1:] for place in PLACES]
    rows = torch.tensor([i * SIDES[1] + j for i, j in places])
    q = _queries(len(rows), cos.shape[-1])
    rotated = function(q, q, cos[rows], sin[rows])[0]
    positions = [
        [2 * math.pi * (2 * (place[axis] + 0.5) / side - 1) for place in places] for axis, side in enumerate(SIDES)
    ]
    return positions, rotated


def _complex(rotary: Any, function: Any, config: Any) -> tuple[list[list[int]], Tensor]:
    """Rotate with Llama 4's table: columns and rows count from 1, and the class token is last."""
    side = config.image_size // config.patch_size
    places = [place[1:] for place in PLACES]
    table = rotary(torch.zeros(1))
    rows = torch.tensor([i * side + j for i, j in places] + [side * side])
    channels = config.hidden_size // config.num_attention_heads
    q = _queries(len(rows), channels).transpose(1, 2)
    rotated = function(q, q, table[rows])[0].transpose(1, 2)
    return [[*(j + 1 for _, j in places), 0], [*(i + 1 for i, _ in places), 0]], rotated


def name(row: dict[str, Any]) -> str:
    """Return the name of a row."""
    return str(row["model_type"])


GOLDEN = files.Golden("vision_towers.json", name, record)
