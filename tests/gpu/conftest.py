"""Where the GPU kernels run: on a GPU; without one in Triton's interpreter, where TRITON_INTERPRET=1 asks for it.

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
    """New tensors are made there."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("there is no GPU; test_interpreter.py runs this in Triton's interpreter")
    where = "cpu" if INTERPRETED else "cuda"
    with torch.device(where):
        yield where


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and there is none")
