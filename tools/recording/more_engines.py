"""engine_rules/ of engines of which few models were looked up: their own rotary code, with stubs for the rest.

A row is a config as transformers' AutoConfig reads it, because these engines read configs with it.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import files
from .engines import record, replaced
from .model import CannotRecordError
from .peers import package
from .stubbed import package_folder, stubs
from .transformers_models import classes


def _read(config: dict[str, Any]) -> Any:
    small = {"vocab_size": 64, "intermediate_size": 64, "pad_token_id": 0}
    return package("transformers").AutoConfig.for_model(**{**small, **config})


def onnxruntime_genai(config: dict[str, Any], sequence: int, setting: int) -> tuple[Tensor, Tensor]:
    """Build the class of the model builder, and its tables of cos and sin."""
    folder = Path(package_folder("onnxruntime_genai")) / "models"
    text = (folder / "builder.py").read_text()
    name = classes()[config["model_type"]][0]
    lines = re.findall(rf'architectures\[0\] == "{name}"(.*?):\n.*?onnx_model = (\w+)\(', text, re.DOTALL)
    read = _read(config)
    read.architectures, read._name_or_path = [name], ""
    long = getattr(read, "original_max_position_embeddings", None) != read.max_position_embeddings
    found = [cls for condition, cls in lines if not condition or ("!=" in condition) == long]
    if not found:
        raise CannotRecordError(f"there is no class for {name}")
    tables: list[tuple[Tensor, Tensor]] = []
    with stubs("onnxruntime_genai", "models.builders"):
        builders = importlib.import_module("onnxruntime_genai.models.builders")
        base = importlib.import_module("onnxruntime_genai.models.builders.base")
        make = getattr(builders, found[0]).make_rotary_embedding_caches_from_scratch

        def keep(model: Any) -> tuple[Tensor, Tensor]:
            tables.append(make(model))
            return tables[-1]

        with (
            replaced(base, "to_torch_dtype", lambda _: torch.float32),
            replaced(getattr(builders, found[0]), "make_rotary_embedding_caches_from_scratch", keep),
        ):
            model = getattr(builders, found[0])(read, "", "", "cpu", "", {})
            if not tables:
                model.make_rotary_embedding_caches()
    # The first table is the long one, and the other is read up to the trained length.
    cos, sin = tables[1 if len(tables) > 1 and sequence <= model.original_context_length else 0]
    dim = int(model.rope_attrs["partial_rotary_factor"] * model.head_size)
    return cos[:2, : dim // 2], sin[:2, : dim // 2]


def lmdeploy(config: dict[str, Any], sequence: int, setting: int) -> tuple[Tensor, Tensor]:
    """Call lmdeploy's `build_rotary_embedding_from_config` in PyTorch, and the module that it returns."""
    real = ("nn.rotary_embedding", "backends.rotary_embedding", "backends.base", "backends.default.rotary_embedding")
    with stubs("lmdeploy", *(f"pytorch.{name}" for name in real)):
        builder = importlib.import_module("lmdeploy.pytorch.nn.rotary_embedding")
        default = importlib.import_module("lmdeploy.pytorch.backends.default.rotary_embedding")
        backend = SimpleNamespace(build_op=lambda spec, **_: default._build_rotary_embedding(spec))
        eager = replaced(torch, "compile", lambda function, **_: function)
        with eager, replaced(builder, "get_backend", lambda: backend):
            read = _read(config)
            if config["model_type"] == "deepseek_v3":  # as models/deepseek_v2.py
                read.head_dim = config["qk_rope_head_dim"]
            rotary = builder.build_rotary_embedding_from_config(read)
            cos, sin = rotary(torch.zeros(1), torch.tensor([[0, 1, sequence - 1]]))
    half = cos.shape[-1] // 2
    return cos[0, :2, :half], sin[0, :2, :half]


_REFUSES = (AssertionError, NotImplementedError, RuntimeError, ZeroDivisionError)
GOLDEN = [
    files.Golden(
        f"engine_rules/rules_of_{probe.__name__}.json",
        lambda row: str(row["case"]),
        lambda row, probe=probe: record(row, probe, _REFUSES),  # type: ignore[misc]
        package=name,
    )
    for probe, name in ((onnxruntime_genai, "onnxruntime-genai"), (lmdeploy, "lmdeploy"))
]
