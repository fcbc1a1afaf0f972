"""Tensors and contexts that the fast path in compiled code must leave to Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad


def resized(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


class Subclass(Tensor):
    pass


# Maps each case to the tensor that it replaces (q, k, cos or sin) and to the function that makes the replacement.
TENSORS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "no tensor": ("q", lambda x: x.tolist()),
    "k is no tensor": ("k", lambda x: 1),
    "a subclass": ("q", lambda x: x.as_subclass(Subclass)),
    "a parameter": ("cos", nn.Parameter),
    "negative by a flag": ("q", lambda x: torch.complex(x, x).conj().imag),
    "a table negative by a flag": ("sin", lambda x: torch.complex(x, x).conj().imag),
    "a zero tensor": ("q", lambda x: torch._efficientzerotensor(x.shape)),
    "without memory": ("k", resized),
    "a table without memory": ("cos", resized),
    "on meta": ("q", lambda x: x.to("meta")),
    "sparse": ("q", lambda x: x.to_sparse()),
    "nested": ("q", lambda x: torch.nested.nested_tensor(list(x))),
    "integers": ("q", lambda x: x.long()),
    "complex": ("q", lambda x: torch.complex(x, x)),
    "fake": ("q", lambda x: FakeTensorMode().from_tensor(x)),
    "with a gradient": ("q", lambda x: x.requires_grad_()),
    "k with a gradient": ("k", lambda x: x.requires_grad_()),
    "a table with a gradient": ("sin", lambda x: x.requires_grad_()),
    "another dtype": ("k", lambda x: x.double()),
    "a table of 16 bits": ("cos", lambda x: x.half()),
    "tables of two dtypes": ("cos", lambda x: x.double()),
    "tables of two shapes": ("cos", lambda x: x[:, :4]),
    "a table of one row": ("cos", lambda x: x[0]),
    "tables of too many axes": ("cos", lambda x: x[None, None]),
    "a token too many": ("q", lambda x: x[:, [0, 0, 1, 2, 3, 4]]),
    "another batch": ("k", lambda x: x[:1]),
    "another head_dim": ("q", lambda x: x[..., :20]),
    "three axes": ("q", lambda x: x[0]),
    "no tokens": ("q", lambda x: x[:, :0]),
}


def in_forward_ad() -> AbstractContextManager[Any]:
    return forward_ad.dual_level()


class FunctionMode(torch.overrides.TorchFunctionMode):
    pass


OBSERVERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a mode of operators": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "a mode of functions": FunctionMode,
    "a device mode": lambda: torch.device("meta"),
    "forward-mode AD": in_forward_ad,
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}
