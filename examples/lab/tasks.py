"""The two tasks: their data, recipes and measures.

With these recipes, both tasks on three seeds with all fine-tunes take less than an hour on two cores.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import text
import torch
from methods import FACTOR, Plan
from model import LanguageModel, Size
from torch import Tensor
from training import Batch, Recipe

import ropewalk

BASE = 10_000.0
SYMBOLS = BOS = 64
LAST = 64
"""Number of bytes at the end of a window that are also measured separately, because their positions are the largest."""

_TOKENS_AT_ONCE = 4096
# Separate random streams, so that test sequences differ from training sequences.
_TRAINING, _TEST = 0, 1


@dataclass(frozen=True)
class Task(ABC):
    """A task and its recipe.

    Args:
        size: size of the model.
        trained: longest sequence of the training, in tokens. Sequences of fine-tunes are FACTOR times as long.
        lengths: ascending lengths at which models are measured, including the trained one. `tokens` converts them.
        recipe, sequences: recipe of the training, and number of sequences in each step.
        tune_recipe, tune_sequences: recipe and number of sequences for fine-tunes.
        test_sequences: number of sequences measured at each length.
    """

    name: ClassVar[str]
    measures: ClassVar[Mapping[str, str]]
    """Name of a measure in tables → description with the unit."""

    size: Size
    trained: int
    lengths: tuple[int, ...]
    recipe: Recipe
    sequences: int
    tune_recipe: Recipe
    tune_sequences: int
    test_sequences: int

    @property
    def rope(self) -> ropewalk.Rope:
        """Rope of the training."""
        return ropewalk.Rope(head_dim=self.size.head_dim, base=BASE, pairing="half")

    @property
    def tuned(self) -> int:
        """Longest sequence of fine-tunes, in tokens."""
        return round(FACTOR * self.trained)

    @abstractmethod
    def tokens(self, length: int) -> int:
        """Return the number of tokens in a sequence of this length."""

    @abstractmethod
    def batches(self, seed: int, *, longest: int, sequences: int) -> Callable[[int], Batch]:
        """Return a function from a step to a batch of sequences with at most `longest` tokens."""

    @abstractmethod
    def measure(self, model: LanguageModel, plan: Plan | None, length: int) -> dict[str, Any]:
        """Measure a model at one length."""

    def about(self) -> dict[str, Any]:
        """Return what determines a training in addition to size, rope and recipe, as plain JSON."""
        return {"task": self.name, "trained": self.trained, "sequences": self.sequences}


@dataclass(frozen=True)
class Copy(Task):
    """The copy task: each sequence is BOS w BOS w, with random symbols w, and the model must predict the second w.

    |w| is from `shortest` to the longest that fits. The first w cannot be predicted, so only the second one counts. To
    copy a symbol, the model must attend over exactly the distance between the two w. The task therefore shows clearly
    whether a model can use positions beyond the trained ones.

    Source: repeated random tokens as in Olsson et al. 2022, "In-context Learning and Induction Heads",
    arXiv:2209.11895.
    """

    name: ClassVar[str] = "copy"
    measures: ClassVar[Mapping[str, str]] = {
        "accuracy": "accuracy of the copy",
        "loss": "loss on the copy in nats per symbol",
    }

    shortest: int = 16

    def tokens(self, length: int) -> int:
        return 2 * length + 2

    def batches(self, seed: int, *, longest: int, sequences: int) -> Callable[[int], Batch]:
        def at(step: int) -> Batch:
            generator = np.random.default_rng((_TRAINING, seed, step))
            symbols = int(generator.integers(self.shortest, (longest - 2) // 2 + 1))  # the same in the whole batch
            return copy_batch(_words(generator, sequences, symbols))

        return at

    def test_batch(self, length: int) -> Batch:
        """Draw the test sequences with |w| = length. They do not depend on the seed of the training."""
        return copy_batch(_words(np.random.default_rng((_TEST, length)), self.test_sequences, length))

    def measure(self, model: LanguageModel, plan: Plan | None, length: int) -> dict[str, Any]:
        accuracy, loss = copy_accuracy(model, plan, self.test_batch(length))
        return {"accuracy": accuracy, "loss": loss}

    def about(self) -> dict[str, Any]:
        return {**super().about(), "shortest": self.shortest}


def copy_batch(words: Tensor) -> Batch:
    """Build the tokens, targets and mask of sequences BOS w BOS w.

    Args:
        words: int64 `[sequences, |w|]`, symbols from 0 to 63.

    Returns:
        A `Batch` of `[sequences, 2·|w| + 1]`. The tokens omit the last symbol and the targets omit the first one. The
        mask is True in the second w.
    """
    bos = torch.full_like(words[:, :1], BOS)
    sequences = torch.cat([bos, words, bos, words], dim=1)
    counts = torch.zeros_like(sequences[:, 1:], dtype=torch.bool)
    counts[:, -words.shape[1] :] = True
    return Batch(sequences[:, :-1], sequences[:, 1:], counts)


def _words(generator: np.random.Generator, sequences: int, symbols: int) -> Tensor:
    return torch.from_numpy(generator.integers(SYMBOLS, size=(sequences, symbols)))


@dataclass(frozen=True)
class Text(Task):
    """The text task: bytes of the standard library, measured on files held out from training."""

    name: ClassVar[str] = "text"
    measures: ClassVar[Mapping[str, str]] = {
        "perplexity": "perplexity per byte over the window",
        "last": f"perplexity per byte over the last {LAST} bytes of the window",
    }

    def tokens(self, length: int) -> int:
        return length

    def batches(self, seed: int, *, longest: int, sequences: int) -> Callable[[int], Batch]:
        return text.batches(_corpus().train, batch=sequences, seq=longest, seed=seed)

    def measure(self, model: LanguageModel, plan: Plan | None, length: int) -> dict[str, Any]:
        losses = token_losses(model, plan, self.test_batch(length))
        return {"perplexity": perplexity(losses), "last": perplexity(losses[:, -LAST:])}

    def test_batch(self, length: int) -> Batch:
        """Return the ends of the test windows, so that windows of all lengths end with the same text."""
        windows = text.windows(_corpus().held_out, count=self.test_sequences, seq=self.lengths[-1])
        return Batch(windows.tokens[:, -length:], windows.targets[:, -length:])

    def about(self) -> dict[str, Any]:
        return {**super().about(), "text": _corpus().digest}


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


def _forward(model: LanguageModel, plan: Plan | None, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield logits, targets and mask of a few sequences at a time, to limit memory."""
    seq = batch.tokens.shape[1]
    mask = torch.ones_like(batch.targets, dtype=torch.bool) if batch.mask is None else batch.mask
    at_once = max(1, _TOKENS_AT_ONCE // seq)
    with torch.no_grad():
        for first in range(0, len(mask), at_once):
            rows = slice(first, first + at_once)
            yield model(batch.tokens[rows], plan), batch.targets[rows], mask[rows]


@functools.cache
def _corpus() -> text.Corpus:
    return text.corpus()


COPY = Copy(
    size=Size(vocab_size=SYMBOLS + 1, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4),
    trained=128,
    lengths=(31, 63, 95, 127, 191, 255, 511),
    recipe=Recipe(steps=1200, learning_rate=2e-3),
    sequences=64,
    tune_recipe=Recipe(steps=100, learning_rate=5e-4, warmup=10),
    tune_sequences=16,
    test_sequences=32,
)

TEXT = Text(
    size=Size(vocab_size=256, hidden_size=128, intermediate_size=256, num_layers=4, num_heads=4, tied=True),
    trained=256,
    lengths=(128, 256, 384, 512, 768, 1024, 2048),
    recipe=Recipe(steps=1500, learning_rate=2e-3),
    sequences=16,
    tune_recipe=Recipe(steps=100, learning_rate=1e-3, warmup=10),
    tune_sequences=4,
    test_sequences=24,
)
