"""The ropes of exllamav3's models: its own classes read the config and build the model, with stubs for the modules.

The attention of each layer gets `rope_settings`, from which exllamav3's class RoPE computes cos and sin.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .mlx_models import rope_of
from .model import CannotRecordError
from .model_files import TOKENS, Engine, Rope
from .stubbed import CALLS, stubs
from .transformers_models import class_of


class _Model:
    """Stands for the base class of exllamav3's models."""

    def __init__(self, config: Any, **_: Any) -> None:
        self.config, self.modules, self.caps = config, [], {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@functools.cache
def _classes() -> dict[str, Any]:
    """Return the entry of each architecture: the classes of its config and model. The stubs stay from then on."""
    stack = ExitStack()
    _classes.stack = stack  # type: ignore[attr-defined]
    values = {"INT8_GEMV_MODE": 0, "Model": _Model}
    stack.enter_context(stubs("exllamav3", "architecture", "util.rope", "util.file", "model.config", values=values))
    module = importlib.import_module("exllamav3.architecture.architectures")
    return module.get_architectures()  # type: ignore[no-any-return]


def architecture(config: dict[str, Any]) -> str:
    """Return the class that a config names, else the class of transformers for its model_type."""
    return class_of(config, _classes())


def file(config: dict[str, Any]) -> str:
    """Return the file of the model."""
    return f"architecture/{_classes()[architecture(config)]['config_class'].__module__.rpartition('.')[2]}.py"


def layers(config: dict[str, Any], tokens: int = TOKENS) -> list[Rope | None]:
    """Build the model of a config, and return the rope of each layer."""
    name = architecture(config)
    entry = _classes()[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
        for other in ("preprocessor_config.json", "processor_config.json"):
            (Path(folder) / other).write_text("{}")
        read = entry["config_class"](folder)
    CALLS.clear()
    entry["model_class"](read)
    found: dict[int, Rope] = {}
    for call in CALLS:
        settings, place = call.get("rope_settings"), re.search(r"layers\.(\d+)\.", str(call.get("key", "")))
        if settings is None or place is None or re.search("vision|visual", call["key"]):
            continue
        rope = _measure(settings, tokens)
        if found.setdefault(int(place[1]), rope) != rope:
            raise CannotRecordError(f"layer {place[1]} has several ropes")
    return [found.get(index) for index in range(max(found, default=-1) + 1)]


def _measure(settings: Any, tokens: int) -> Rope:
    module = importlib.import_module("exllamav3.util.rope")
    settings.override_max_position_embeddings = tokens if _type(settings) in ("longrope", "su") else None
    sin, cos = module.RoPE("cpu", settings).compute_sincos(torch.tensor([0, 1]))
    half = settings.rope_style == module.RopeStyle.NEOX
    pairs, step = cos.shape[-1] // 2, cos.shape[-1] // 2 if half else 1
    columns = range(pairs) if half else range(0, 2 * pairs, 2)
    angles = torch.atan2(sin[1], cos[1]).tolist()
    turning = [i for i in columns if angles[i]]
    return rope_of([(i, i + step, angles[i], cos[0, i].item()) for i in turning], settings.head_dim)


def _type(settings: Any) -> str:
    scaling = settings.rope_scaling or {}
    return str(scaling.get("rope_type", scaling.get("type")))


ENGINE = Engine("exllamav3", "exllamav3", file, layers)
