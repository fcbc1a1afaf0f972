"""A default device (torch.device as a context, torch.set_default_device) does not move CPU inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ropewalk import Axes, Rope, Rotation, positions

ROPE = Rope(head_dim=8, base=10_000.0, pairing="half")
PLACES = torch.tensor([3, 0, 70_000])
TABLES = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
X = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))


def gradients() -> tuple[Any, ...]:
    cos, sin = (table.clone().requires_grad_() for table in TABLES)
    x = X.clone().requires_grad_()
    return torch.autograd.grad(Rotation(cos, sin, pairing="half")(x, layout="thd").square().sum(), (x, cos, sin))


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "at": lambda: (ROPE.at(PLACES).cos, ROPE.at(PLACES, device="cpu").sin),
    "in float64": lambda: (ROPE.at(PLACES, dtype=torch.float64).cos,),
    "between tokens": lambda: (ROPE.at(PLACES + 0.5).cos,),
    "as deployed": lambda: (ROPE.at(PLACES, numerics="float32").cos,),
    "shift": lambda: (ROPE.shift(5, device="cpu").cos, ROPE.shift(PLACES).cos),
    "several axes": lambda: (Rope(8, 1e4, "half", axes=Axes.sections((2, 2))).at(PLACES.expand(2, 3)).cos,),
    "rotation": lambda: (ROPE.at(PLACES)(X, layout="thd"),),
    "gradients": gradients,
    "ragged": lambda: (positions.ragged(PLACES, 2),),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_default_device_changes_nothing(name: str) -> None:
    wanted = CALLS[name]()
    with torch.device("meta"):
        found = CALLS[name]()
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))
