"""Run the GPU kernels on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1.

`test_interpreter.py` runs `test_kernels.py` that way, in a process of its own: Triton reads the variable when it is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def device() -> Iterator[str]:
    """Make the GPU, or the CPU with the interpreter, the default device of new tensors."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("there is no GPU; test_interpreter.py runs this in Triton's interpreter")
    where = "cpu" if INTERPRETED else "cuda"
    with torch.device(where):
        yield where


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and there is none")
