"""GGUF files for tests, written with llama.cpp's own package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write(
    path: Path,
    keys: dict[str, Any],
    tensors: dict[str, Any] | None = None,
    *,
    architecture: str = "llama",
    more: dict[str, Any] | None = None,
) -> Path:
    """Write a model with these keys, omitting those that are None. `more` has keys with full names."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("a model")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "a", "rope"])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.0, -2.0])
    for key, value in {**{f"{architecture}.{k}": v for k, v in keys.items()}, **(more or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.array(values, dtype=getattr(values, "dtype", np.float32)))
    writer.add_tensor("output.weight", np.zeros((2, 3), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
