"""Stubs that replace projections, norms and tables of a model while one of its layers is recorded."""

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
class ProjectionOutputs:
    """The outputs of all `Projection` stubs of a model.

    Args:
        rows: the batch size.
        row: a function of the number of a projection and its channels. It returns [rows, channels] for every token, or
            [rows, tokens, channels]. None means zeros.
    """

    rows: int = 1
    row: Callable[[int, int], Tensor] | None = None


class Projection(nn.Module):
    """Replaces a projection. It ignores its input and returns what `ProjectionOutputs` states."""

    def __init__(self, number: int, channels: int, numbers: ProjectionOutputs) -> None:
        super().__init__()
        self.number, self.out_features, self.numbers = number, channels, numbers
        self.weight, self.bias = torch.zeros(1), None

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.numbers.row is None or x.shape[0] != self.numbers.rows:
            return x.new_zeros((*x.shape[:-1], self.out_features))
        values = self.numbers.row(self.number, self.out_features).to(x.dtype)
        if values.dim() == 3:
            return values.reshape(*x.shape[:-1], -1).clone()
        return values.view(len(values), *[1] * (x.dim() - 2), -1).expand(*x.shape[:-1], -1).clone()


class SeparateProjections(nn.Module):
    """Replaces a module that projects queries, keys and values together. Here each is projected separately."""

    def __init__(self, heads: list[int], head_dim: int, numbers: ProjectionOutputs) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.parts = nn.ModuleList(Projection(0, count * head_dim, numbers) for count in heads)

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return tuple(part(x).view(*x.shape[:-1], -1, self.head_dim) for part in self.parts)


class Identity(nn.Module):
    """Replaces a norm or a layer by the identity.

    Args:
        like: the replaced module, whose plain attributes are copied.
        outputs: the number of outputs of a layer, 1 or 2.
    """

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
        # The second output of a layer is the tokens that an indexer chose.
        return x if self.outputs == 1 else (x, torch.zeros(*x.shape[:2], 1, dtype=torch.long))


class ZeroEmbedding(nn.Module):
    """Replaces an embedding table. Its rows are zero, because only their width matters."""

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
    """The factor of the product before the softmax. None if it is not passed to the product."""
    rows: int = 0
    tokens: int = 0
    chosen: Tensor = field(default_factory=lambda: torch.arange(0))

    def with_tokens(self, rows: int, tokens: int, chosen: Tensor) -> Captured:
        """Return a copy with the batch size, the number of tokens, and the tokens to return."""
        return replace(self, rows=rows, tokens=tokens, chosen=chosen)

    @property
    def query(self) -> Tensor:
        """The queries, [rows, heads, chosen tokens, head_dim]."""
        return self._heads_first(self.left, "query")

    @property
    def key(self) -> Tensor:
        """The keys, [rows, key heads, chosen tokens, head_dim]. Heads are repeated if the model repeats them."""
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
            raise ValueError(f"a {name} of shape {tuple(x.shape)} is not supported")
        return x[:, :, self.chosen]


class CaptureError(Exception):
    """Ends the run of a model, and carries the queries and keys out of it."""


class FirstProduct(TorchFunctionMode):
    """Raises CaptureError at the first product of queries and keys inside the recorded layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside and (func in PRODUCTS or func is nn.functional.scaled_dot_product_attention):
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            if func is torch.baddbmm:
                tensors = tensors[1:]  # the first tensor is added to the product
            if len(tensors) >= 2 and tensors[0].dim() >= 3:
                raise CaptureError(Captured(tensors[0], tensors[1], kwargs.get("alpha")))
        return func(*args, **kwargs)


@contextlib.contextmanager
def scaled_product(module: Any, mode: FirstProduct) -> Iterator[None]:
    """Raise CaptureError where a modeling file passes queries, keys and scale to eager_attention_forward."""
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
