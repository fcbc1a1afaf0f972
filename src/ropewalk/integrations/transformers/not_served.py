"""Models that are refused by name, with the reason."""

from __future__ import annotations

from typing import Any

from ropewalk._checks import error, shown

_REASONS = {
    "deepseek_v4": "It turns the values too, and turns the attention's output back with minus sin.",
    "neomme": "Its tokens have two axes, which are not supported yet.",
    "nanochat": "It turns q and k the other way, by minus the angle.",
}


def check_served(config: Any) -> None:
    """Raise for a model that is not served; the message says why."""
    find = getattr(config, "get_text_config", None)
    for each in (config, config if find is None else find()):
        model_type = getattr(each, "model_type", None) or ""
        reason = _REASONS.get(model_type)
        if _several_axes(getattr(each, "rope_parameters", None)):
            reason = "Its tokens have several axes (M-RoPE), which are not supported yet."
        if reason is not None:
            raise error("accelerate", "the model must be one that ropewalk can serve", shown(model_type), reason)


def check_one_axis(name: str, module: Any) -> None:
    """Raise for a rotary module that shares its channels out over axes, whether its config says so or not."""
    if getattr(module, "mrope_section", None):
        must, cure = (
            f"{name} must be given one position for each token",
            "Models of several axes are not supported yet.",
        )
        raise error("accelerate", must, f"mrope_section {shown(module.mrope_section)}", cure)


def _several_axes(parameters: Any) -> bool:
    """Whether rope parameters, or those of a layer type, share the channels out over axes."""
    if not isinstance(parameters, dict):
        return False
    return "mrope_section" in parameters or any(_several_axes(each) for each in parameters.values())
