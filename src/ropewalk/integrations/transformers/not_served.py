"""Models that are refused by their model_type, and vision towers that keep their own rotation, with the reasons."""

from __future__ import annotations

from typing import Any

from ropewalk._checks import error, shown

_REASONS = {
    "deepseek_v4": "It also rotates the values, and rotates the attention's output back with minus sin.",
    "nanochat": "It rotates q and k by minus the angle.",
}

_KEYS_OF_FRAMES = (
    "Its keys belong to several frames: its function repeats the tables and does not rotate the last keys."
)
_LEARNED_CLASS = "It prepends the learned angles of the class token to those of the patches."
_TOWERS = {
    "edgetam_video": _KEYS_OF_FRAMES,
    "mlcd": _LEARNED_CLASS,
    "mlcd_vision_model": _LEARNED_CLASS,
    "sam2_video": _KEYS_OF_FRAMES,
    "sam3_tracker_video": _KEYS_OF_FRAMES,
}


def check_tower_served(model_type: str) -> None:
    """Raise RopeError with the reason for a vision tower that is not supported."""
    if model_type in _TOWERS:
        must = "the tower must rotate q and k by the tables of their own tokens"
        raise error("accelerate", must, shown(model_type), _TOWERS[model_type])


def check_served(config: Any) -> None:
    """Raise RopeError with the reason for a model that is not supported."""
    find = getattr(config, "get_text_config", None)
    for each in (config, config if find is None else find()):
        model_type = getattr(each, "model_type", None) or ""
        reason = _REASONS.get(model_type)
        if reason is not None:
            raise error("accelerate", "the model must be one that ropewalk supports", shown(model_type), reason)
