"""Measure a model: loss of each token, perplexity, loss by position, accuracy of copying."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ropewalk.tools.lab.model import LanguageModel
from ropewalk.tools.lab.train import Batch

_TOKENS_AT_ONCE = 4096

LAST = 64
"""Number of bytes at the end of a window that are also measured separately, because their positions are the largest."""


class Plan(Protocol):
    """The protocol of objects that compute the rotation at positions, such as a static `Rope` or a `SelfExtend`."""

    def at(self, positions: Tensor, /) -> Any:
        """Return the rotation of a `LanguageModel` for tokens at these positions."""


def token_losses(model: LanguageModel, plan: Plan | None, batch: Batch) -> Tensor:
    """Compute the cross-entropy of every target in nats, float64 `[batch, seq]`. The mask is ignored."""
    rows = [
        torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none").view(
            targets.shape
        )
        for logits, targets, _ in _forward(model, plan, batch)
    ]
    return torch.cat(rows)


def perplexity(losses: Tensor) -> float:
    """Compute exp of the mean loss, dimensionless: 1 for perfect prediction, 256 for a uniform guess of bytes.

    Args:
        losses: the result of `token_losses`, or a slice of it.
    """
    return math.exp(float(losses.mean()))


def loss_by_position(losses: Tensor, *, width: int) -> list[float]:
    """Compute the mean loss in nats of each block of `width` positions. An incomplete last block is omitted."""
    whole = losses.shape[1] // width * width
    means: list[float] = losses[:, :whole].mean(0).view(-1, width).mean(1).tolist()
    return means


def copy_accuracy(model: LanguageModel, plan: Plan | None, batch: Batch) -> tuple[float, float]:
    """Return the top-1 accuracy and the mean loss in nats, over the targets in the mask."""
    correct = counted = 0
    loss = 0.0
    for logits, targets, mask in _forward(model, plan, batch):
        predicted, expected = logits[mask].double(), targets[mask]
        correct += int((predicted.argmax(dim=-1) == expected).sum())
        loss += float(torch.nn.functional.cross_entropy(predicted, expected, reduction="sum"))
        counted += len(expected)
    return correct / counted, loss / counted


def last_tokens(batch: Batch, tokens: int) -> Batch:
    """Return the last `tokens` tokens of each sequence, so that windows of all lengths end with the same text."""
    mask = None if batch.mask is None else batch.mask[:, -tokens:]
    return Batch(batch.tokens[:, -tokens:], batch.targets[:, -tokens:], mask)


def _forward(model: LanguageModel, plan: Plan | None, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield logits, targets and mask of a few sequences at a time, to limit memory."""
    seq = batch.tokens.shape[1]
    mask = torch.ones_like(batch.targets, dtype=torch.bool) if batch.mask is None else batch.mask
    positions = torch.arange(seq)
    places = positions if model.size.absolute is not None else None
    at_once = max(1, _TOKENS_AT_ONCE // seq)
    with torch.no_grad():
        rotation = None if plan is None else plan.at(positions)
        for first in range(0, len(mask), at_once):
            rows = slice(first, first + at_once)
            yield model(batch.tokens[rows], rotation, positions=places), batch.targets[rows], mask[rows]
