"""The small tensors of a checkpoint that are part of a rope, such as the learned factors of its frequencies.

`ropewalk convert` opens safetensors files here as well, so that the same bounds hold for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ropewalk._checks import RopeError, error, missing_package, short_key, shown, unreadable_file
from ropewalk.configs.source import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 2**24  # a tensor needs about 100 bytes
_MAX_INDEX_BYTES = 2**25  # the index of the largest mixture of experts has about 10 MB
_MAX_NUMBERS = 2**20
_TEXT_MODEL = r"(?:(?:module|base_model|model|language_model|text_model)\.)*"
"""What precedes the names of the tensors of a text model, but not those of a vision tower or of a draft."""


class Weights:
    """Tensors by name: those that the caller passed, or those of the safetensors files beside a config.

    Only the headers of the files are read, and then the tensors that a rope needs.

    Args:
        passed: maps names to tensors, arrays or lists, such as a state dict; None to use the files.

    Attributes:
        folder: the folder of the config, or None if the config did not come from a file.
        needed: whether the model has been found to need a tensor.
    """

    def __init__(self, passed: Mapping[str, Any] | None) -> None:
        if passed is not None and not isinstance(passed, Mapping):
            fix = "Pass a state dict, e.g. model.state_dict(), or a dict with the tensors that the message names."
            raise error("from_config", "weights must map names to tensors", shown(passed), fix)
        self._passed = passed
        self.folder: Path | None = None
        self.needed = False

    def find(self, pattern: str) -> dict[str, re.Match[str]]:
        """Return the names of the text model's tensors that match the pattern, in their order, and the matches."""
        self.needed = True
        own, names = re.compile(_TEXT_MODEL + pattern), self._files if self._passed is None else self._passed
        return {name: found for name in names if isinstance(name, str) and (found := own.fullmatch(name))}

    def numbers(self, name: str) -> list[float]:
        """Return the numbers of a tensor as float64, row by row.

        Raises:
            RopeError: it is not a tensor of numbers, is too large, or its file cannot be read.
        """
        import torch

        try:
            values = torch.as_tensor(self._load(name)).detach()
            if values.numel() > _MAX_NUMBERS or values.is_complex() or values.dtype == torch.bool:
                raise ValueError(f"it has {values.numel():,} numbers of {values.dtype}")
            if type(values) is torch.Tensor and values.numel() and not values.untyped_storage().nbytes():
                raise ValueError("its memory was freed")
            return [float(value) for value in values.double().flatten().tolist()]
        except RopeError:
            raise
        except Exception as e:  # torch may refuse the value with any error
            must = f"{short_key(name)} must be a tensor of at most {_MAX_NUMBERS:,} real numbers"
            raise error("from_config", must, shown(e), "Pass the tensor of the checkpoint.") from e

    def _load(self, name: str) -> Any:
        if self._passed is not None:
            return self._passed[name]
        with open_safetensors("from_config", Path(str(self.folder), self._files[name]), "pt") as file:
            shape = file.get_slice(name).get_shape()
            if math.prod(shape) > _MAX_NUMBERS:
                raise ValueError(f"it has the shape {shape}")
            return file.get_tensor(name)

    @cached_property
    def _files(self) -> dict[str, str]:
        """The file of each tensor: the one of the standard name, as in transformers, or those that the index names."""
        if self.folder is None:
            return {}
        single, index = self.folder / SINGLE, self.folder / INDEX
        try:
            if single.exists():
                with open_safetensors("from_config", single, "np") as file:
                    return dict.fromkeys(file.keys(), SINGLE)
            return dict(read_index("from_config", index)["weight_map"]) if index.exists() else {}
        except OSError as e:
            raise unreadable_file(str(self.folder), e) from e


def open_safetensors(who: str, file: Path, framework: str) -> Any:
    """Open a safetensors file with the package of that name, which checks its header.

    Args:
        who: the context, for messages.
        file: the file.
        framework: "np" or "pt".

    Raises:
        RopeError: safetensors is not installed, or this is not a complete safetensors file, or its header is too large.
    """
    try:
        import safetensors
    except ImportError as e:
        raise missing_package(who, "safetensors", "convert") from e
    try:
        if not file.is_file():
            came = "something else" if file.exists() else "none"
            raise error(who, f"{file} must be a file", came, "Download or copy the file again.")
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has {size:,} bytes, which is more than {_MAX_HEADER_BYTES:,}")
        return safetensors.safe_open(file, framework)
    except RopeError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError, MemoryError) as e:
        must, came = f"{file} must be a complete safetensors file", f"a truncated or damaged one ({e})"
        raise error(who, must, came, "Download or copy the file again.") from e


def read_index(who: str, index: Path) -> dict[str, Any]:
    """Return the content of an index. Its weight_map maps the name of each tensor to that of its file.

    Raises:
        RopeError: the file cannot be read, has no weight_map, or names other files than safetensors in its folder.
    """
    content: dict[str, Any] = read_json(index, _MAX_INDEX_BYTES)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        must = f"{index} must have a weight_map with entries"
        raise error(who, must, shown(weight_map), "Download or copy it again.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\:]+\.safetensors", file):
            must, fix = (
                f"{index} must name safetensors files of its own folder",
                "Correct the index: files outside of the folder are not read.",
            )
            raise error(who, must, f"{shown(file)} for {short_key(name)}", fix)
    return content
