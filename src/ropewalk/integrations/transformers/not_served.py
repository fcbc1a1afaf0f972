"""Models that are refused by name, with the reason."""

from __future__ import annotations

from typing import Any

from ropewalk._checks import error, shown

_REASONS = {
    "deepseek_v4": "It turns the values too, and turns the attention's output back with minus sin.",
    "nanochat": "It turns q and k the other way, by minus the angle.",
}


def check_served(config: Any) -> None:
    """Raise for a model that is not served; the message says why."""
    find = getattr(config, "get_text_config", None)
    for each in (config, config if find is None else find()):
        model_type = getattr(each, "model_type", None) or ""
        reason = _REASONS.get(model_type)
        if reason is not None:
            raise error("accelerate", "the model must be one that ropewalk can serve", shown(model_type), reason)
