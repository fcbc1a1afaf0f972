"""What stands in the place of projections, norms and tables while a layer is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.baddbmm, torch.einsum)


@dataclass
class Fed:
    """What the projections return: `row(stub, channels)` for every row of the batch, the same for every token."""

    rows: int = 1
    row: Callable[[int, int], Tensor] | None = None


class Projection(nn.Module):
    """A projection that returns what it is fed, whatever comes in."""

    def __init__(self, number: int, channels: int, fed: Fed) -> None:
        super().__init__()
        self.number, self.out_features, self.fed = number, channels, fed
        self.weight, self.bias = torch.zeros(1), None

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.fed.row is None or x.shape[0] != self.fed.rows:
            return x.new_zeros((*x.shape[:-1], self.out_features))
        values = self.fed.row(self.number, self.out_features).to(x.dtype)
        return values.view(len(values), *[1] * (x.dim() - 2), -1).expand(*x.shape[:-1], -1).clone()


class Same(nn.Module):
    """A norm, or a layer, that changes nothing."""

    def __init__(self, like: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = torch.ones(1)
        for name, value in vars(like).items() if like is not None else ():
            if isinstance(value, (str, int, float, bool, type(None))) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, x: Tensor | None = None, *_: Any, **others: Any) -> Any:
        return x if x is not None else others["hidden_states"]


class Looked(nn.Module):
    """An embedding table of which only the width matters."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.embedding_dim = channels
        self.weight = torch.zeros(1, channels)

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(*ids.shape, self.embedding_dim)


class CaptureError(Exception):
    """Carries the query out of the model."""


class FirstProduct(TorchFunctionMode):
    """Ends the run at the first product of queries and keys inside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside and (func in PRODUCTS or func is nn.functional.scaled_dot_product_attention):
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            if func is torch.baddbmm:
                tensors = tensors[1:]  # the first is added
            if len(tensors) >= 2 and tensors[0].dim() >= 3:
                raise CaptureError(tensors[0], tensors[1])
        return func(*args, **kwargs)
