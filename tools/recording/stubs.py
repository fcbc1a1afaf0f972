"""What stands in the place of projections, norms and tables while a layer is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.baddbmm, torch.einsum)


@dataclass
class Fed:
    """What the projections return: `row(stub, channels)`, [rows, channels] for all, or [rows, tokens, channels]."""

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
        if values.dim() == 3:
            return values.reshape(*x.shape[:-1], -1).clone()
        return values.view(len(values), *[1] * (x.dim() - 2), -1).expand(*x.shape[:-1], -1).clone()


class Several(nn.Module):
    """Projections of queries, keys and values that a model mixes with each other: each alone."""

    def __init__(self, heads: list[int], head_dim: int, fed: Fed) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.parts = nn.ModuleList(Projection(0, count * head_dim, fed) for count in heads)

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return tuple(part(x).view(*x.shape[:-1], -1, self.head_dim) for part in self.parts)


class Same(nn.Module):
    """A norm, or a layer, that changes nothing."""

    def __init__(self, like: nn.Module | None = None, outputs: int = 1) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = torch.ones(1)
        for name, value in vars(like).items() if like is not None else ():
            if isinstance(value, (str, int, float, bool, type(None))) and not name.startswith("_"):
                setattr(self, name, value)

        self.both = type(like).__name__.endswith("QKNorm")

    def forward(self, x: Tensor | None = None, *more: Any, **others: Any) -> Any:
        if self.both and more:
            return x, more[0]
        x = x if x is not None else others["hidden_states"]
        # What else a layer returns: the tokens that an indexer chose.
        return x if self.outputs == 1 else (x, torch.zeros(*x.shape[:2], 1, dtype=torch.long))


class Looked(nn.Module):
    """An embedding table of which only the width matters."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.embedding_dim = channels
        self.weight = torch.zeros(1, channels)

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(*ids.shape, self.embedding_dim)


@dataclass
class Captured:
    """The operands of the first product of queries and keys."""

    left: Tensor
    right: Tensor
    scale: float | None
    """What the attention multiplies the product with before the softmax; None where it is not handed over."""
    rows: int = 0
    tokens: int = 0
    chosen: Tensor = field(default_factory=lambda: torch.arange(0))

    def of(self, rows: int, tokens: int, chosen: Tensor) -> Captured:
        """The same, with the batch size, the length, and the tokens that are wanted."""
        return replace(self, rows=rows, tokens=tokens, chosen=chosen)

    @property
    def query(self) -> Tensor:
        """[rows, heads, chosen tokens, head_dim]."""
        return self._heads_first(self.left, "query")

    @property
    def key(self) -> Tensor:
        """[rows, heads of keys, chosen tokens, head_dim]; every head is repeated where the model repeats it."""
        right = self.right
        if right.shape[-1] == self.tokens and right.shape[-2] == self.left.shape[-1]:
            right = right.transpose(-1, -2)
        return self._heads_first(right, "key")

    def _heads_first(self, x: Tensor, name: str) -> Tensor:
        tokens = self.tokens
        if x.dim() == 5:
            x = x.flatten(1, 2)
        if x.dim() == 3:
            x = x.view(self.rows, -1, *x.shape[1:])
        if x.shape[-2] != tokens and x.shape[1] == tokens:
            x = x.transpose(1, 2)
        if x.dim() != 4 or x.shape[0] != self.rows or x.shape[2] != tokens:
            raise ValueError(f"a {name} of shape {tuple(x.shape)} is not read")
        return x[:, :, self.chosen]


class CaptureError(Exception):
    """Carries queries and keys out of the model."""


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
                raise CaptureError(Captured(tensors[0], tensors[1], kwargs.get("alpha")))
        return func(*args, **kwargs)


@contextlib.contextmanager
def scaled_product(module: Any, mode: FirstProduct) -> Iterator[None]:
    """End the run where a file of transformers hands queries and keys to its plain attention, with their scale."""
    original = vars(module).get("eager_attention_forward")

    def end(part: nn.Module, query: Tensor, key: Tensor, *others: Any, **kwargs: Any) -> Any:
        if mode.inside:
            raise CaptureError(Captured(query, key, kwargs.get("scaling")))
        return original(part, query, key, *others, **kwargs)

    if original is not None:
        module.eager_attention_forward = end
    try:
        yield
    finally:
        if original is not None:
            module.eager_attention_forward = original
