"""`check` ends with a RopeError of one line, and never with another exception, whatever the target does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk import RopeError, conformance


class Refusing(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("no functions")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


class UnreadableError(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Stop(BaseException):
    pass


class Strange(torch.nn.Module):
    def __init__(self, dim: int = 64, base: float = 10_000.0) -> None:
        super().__init__()
        self.dim = dim

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


def raising(e: BaseException) -> Any:
    def f(x: Tensor, positions: Tensor) -> Tensor:
        raise e

    return f


@pytest.mark.parametrize(
    "result",
    [
        lambda x: x.to("meta"),
        lambda x: x > 0,
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to(torch.complex64),
        lambda x: x.to_sparse(),
        lambda x: {"x": 1},
        lambda x: (),
    ],
    ids=["meta", "bool", "float8", "complex", "sparse", "dict", "empty"],
)
def test_results_that_are_no_plain_tensors(result: Any) -> None:
    with pytest.raises(RopeError, match="must be callable in a known way, and rotate tensors, got it returns"):
        conformance.check(lambda x, positions: result(x))


def test_a_subclass_of_tensor_is_judged_by_its_numbers() -> None:
    assert conformance.check(lambda x, positions: x.as_subclass(Refusing)).codes == ["not-rotated"]


@pytest.mark.parametrize("e", [UnprintableError(), UnreadableError(), Stop("now"), SystemExit(0)])
def test_exceptions(e: BaseException) -> None:
    with pytest.raises(RopeError, match=f"got {type(e).__name__}: "):
        conformance.check(raising(e))


def test_attributes_that_raise() -> None:
    with pytest.raises(RopeError, match=r"TARGET cannot be judged: RuntimeError: no __self__\."):
        conformance.check(Strange)


def test_the_default_device(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ntorch.set_default_device('meta')\ndef f(x): return x\n")
    try:
        with pytest.raises(RopeError, match="the default device must be the CPU, got meta"):
            conformance.check(f"{tmp_path / 'mine.py'}:f")
    finally:
        torch.set_default_device(None)


def test_ctrl_c_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        conformance.check(raising(KeyboardInterrupt()))
