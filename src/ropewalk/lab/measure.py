"""What a model is worth: loss of every token, perplexity, loss by position, share of symbols copied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ropewalk.lab.model import LanguageModel
from ropewalk.lab.train import Batch

_TOKENS_AT_ONCE = 4096

LAST = 64
"""Bytes at the end of a window that are also measured alone: they show what the far end of a long window is worth."""


class Plan(Protocol):
    """What q and k are turned by, before the tokens are known: a static `Rope`, or a `SelfExtend`."""

    def at(self, positions: Tensor, /) -> Any:
        """What a `LanguageModel` takes as rotation for the tokens at these positions."""


def token_losses(model: LanguageModel, plan: Plan | None, batch: Batch) -> Tensor:
    """Cross-entropy of every target, in nats, float64 `[batch, seq]`: the mask is not looked at."""
    rows = [
        torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none").view(
            targets.shape
        )
        for logits, targets, _ in _forward(model, plan, batch)
    ]
    return torch.cat(rows)


def perplexity(losses: Tensor) -> float:
    """exp of the mean loss: 1 for a model that knows every byte, 256 for one that knows nothing. Dimensionless.

    Args:
        losses: as of `token_losses`, or a slice of them.
    """
    return math.exp(float(losses.mean()))


def by_position(losses: Tensor, *, width: int) -> list[float]:
    """Mean loss in nats of positions 0 … width − 1, of the next width ones, and so on; a shorter rest is left out."""
    whole = losses.shape[1] // width * width
    means: list[float] = losses[:, :whole].mean(0).view(-1, width).mean(1).tolist()
    return means


def accuracy(model: LanguageModel, plan: Plan | None, batch: Batch) -> float:
    """Share of the targets that count of which the most likely token is the target: from 0 to 1."""
    right = counted = 0
    for logits, targets, mask in _forward(model, plan, batch):
        right += int((logits.argmax(dim=-1) == targets)[mask].sum())
        counted += int(mask.sum())
    return right / counted


def ending(batch: Batch, tokens: int) -> Batch:
    """The last so many tokens of each sequence: windows of every length end with the same text."""
    return Batch(*(None if part is None else part[:, -tokens:] for part in batch))


def _forward(model: LanguageModel, plan: Plan | None, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Logits, targets and mask of a few sequences at a time, so that memory does not grow with their number."""
    seq = batch.tokens.shape[1]
    mask = torch.ones_like(batch.targets, dtype=torch.bool) if batch.mask is None else batch.mask
    positions = torch.arange(seq)
    places = positions if model.size.absolute is not None else None
    at_once = max(1, _TOKENS_AT_ONCE // seq)
    with torch.no_grad():
        rotation = None if plan is None else plan.at(positions)
        parts: Sequence[tuple[Tensor, ...]] = [p.split(at_once) for p in (batch.tokens, batch.targets, mask)]
        for tokens, targets, counts in zip(*parts, strict=True):
            yield model(tokens, rotation, positions=places), targets, counts
