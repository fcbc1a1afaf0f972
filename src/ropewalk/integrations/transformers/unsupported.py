"""Models and vision towers that `accelerate` does not support, by model_type, each with the reason."""

from __future__ import annotations

from typing import Any

from ropewalk._checks import error, shown

_MODELS = {
    "deepseek_v4": "It also rotates the values, and rotates the attention's output back with minus sin.",
    "nanochat": "It rotates q and k by minus the angle.",
}

_KEYS_OF_FRAMES = (
    "Its keys belong to several frames. Its function repeats the tables for them, and does not rotate the last keys."
)
_LEARNED_CLASS = "It prepends the learned angles of the class token to those of the patches."
_TOWERS = {
    "edgetam_video": _KEYS_OF_FRAMES,
    "mlcd": _LEARNED_CLASS,
    "mlcd_vision_model": _LEARNED_CLASS,
    "sam2_video": _KEYS_OF_FRAMES,
    "sam3_tracker_video": _KEYS_OF_FRAMES,
}


def check_tower_supported(model_type: str) -> None:
    """Raise a RopeError with the reason if this vision tower is not supported."""
    if model_type in _TOWERS:
        must = "the tower must rotate q and k by the tables of their own tokens"
        raise error("accelerate", must, shown(model_type), _TOWERS[model_type])


def check_model_supported(config: Any) -> None:
    """Raise a RopeError with the reason if the model of this config, or its text model, is not supported."""
    find = getattr(config, "get_text_config", None)
    for part in (config, config if find is None else find()):
        model_type = getattr(part, "model_type", None) or ""
        reason = _MODELS.get(model_type)
        if reason is not None:
            raise error("accelerate", "the model must be one that ropewalk supports", shown(model_type), reason)
