"""What a model is worth: loss of every token, perplexity, loss by position, what was copied."""

from __future__ import annotations

import math
from collections.abc import Iterator
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


def copied(model: LanguageModel, plan: Plan | None, batch: Batch) -> tuple[float, float]:
    """Of the targets that count: the share of which the target is the most likely token, and the mean loss in nats."""
    right = counted = 0
    loss = 0.0
    for logits, targets, mask in _forward(model, plan, batch):
        at, wanted = logits[mask].double(), targets[mask]
        right += int((at.argmax(dim=-1) == wanted).sum())
        loss += float(torch.nn.functional.cross_entropy(at, wanted, reduction="sum"))
        counted += len(wanted)
    return right / counted, loss / counted


def ending(batch: Batch, tokens: int) -> Batch:
    """The last so many tokens of each sequence: windows of every length end with the same text."""
    mask = None if batch.mask is None else batch.mask[:, -tokens:]
    return Batch(batch.tokens[:, -tokens:], batch.targets[:, -tokens:], mask)


def _forward(model: LanguageModel, plan: Plan | None, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Logits, targets and mask of a few sequences at a time, so that memory does not grow with their number."""
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
