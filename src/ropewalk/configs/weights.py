"""The small tensors of a checkpoint that are part of a rope, such as the learned factors of its frequencies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ropewalk._checks import RopeError, error, missing_package, shown, unreadable_file

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 2**25  # the index of the largest mixture of experts has about 10 MB
_MAX_NUMBERS = 2**20


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
        """Return the names in which the pattern occurs, in their order, and its matches."""
        self.needed = True
        names = self._files if self._passed is None else self._passed
        return {name: found for name in names if (found := re.search(pattern, str(name)))}

    def numbers(self, name: str) -> list[float]:
        """Return the numbers of a tensor as float64, row by row.

        Raises:
            RopeError: it is not a tensor of numbers, is too large, or its file cannot be read.
        """
        import torch

        tensor = self._load(name) if self._passed is None else self._passed[name]
        try:
            values = torch.as_tensor(tensor).detach()
            if values.numel() > _MAX_NUMBERS or values.is_complex():
                raise ValueError(f"it has {values.numel():,} numbers of {values.dtype}")
            return [float(value) for value in values.double().flatten().tolist()]
        except (TypeError, ValueError, RuntimeError) as e:
            must = f"{name} must be a tensor of at most {_MAX_NUMBERS:,} real numbers"
            raise error("from_config", must, shown(e), "Pass the tensor of the checkpoint.") from e

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The file of each tensor."""
        if self.folder is None:
            return {}
        index = self.folder / _INDEX
        try:
            if index.is_file():
                if index.stat().st_size > _MAX_INDEX_BYTES:
                    raise ValueError(f"it has more than {_MAX_INDEX_BYTES:,} bytes")
                files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {name: self.folder / Path(file).name for name, file in files.items()}
            return {name: file for file in sorted(self.folder.glob("*.safetensors")) for name in _open(file).keys()}  # noqa: SIM118
        except RopeError:
            raise
        except Exception as e:  # a damaged file may raise anything
            raise unreadable_file(str(index if index.is_file() else self.folder), e) from e

    def _load(self, name: str) -> Any:
        try:
            return _open(self._files[name]).get_tensor(name)
        except RopeError:
            raise
        except Exception as e:  # likewise
            raise unreadable_file(str(self._files[name]), e) from e


def _open(file: Path) -> Any:
    try:
        import safetensors
    except ImportError as e:
        raise missing_package("from_config", "safetensors", "convert") from e
    return safetensors.safe_open(file, "pt")
