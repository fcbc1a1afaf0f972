"""The two tasks: their data, recipes and measures.

With these recipes, both tasks on three seeds with all fine-tunes take less than an hour on two cores.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ropewalk
from ropewalk.tools.lab import copying, measure, text
from ropewalk.tools.lab.measure import Plan
from ropewalk.tools.lab.methods import FACTOR
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.train import Batch, Recipe

BASE = 10_000.0
_WIDTH = 32


@dataclass(frozen=True)
class Task(ABC):
    """A task and its recipe.

    Args:
        size: size of the model.
        trained: longest sequence of the training, in tokens. Sequences of fine-tunes are FACTOR times as long.
        lengths: ascending lengths at which models are measured, in the unit `length_is`, including the trained one.
        recipe, sequences: recipe of the training, and number of sequences in each step.
        tune_recipe, tune_sequences: recipe and number of sequences for fine-tunes.
        test_sequences: number of sequences measured at each length.
    """

    name: ClassVar[str]
    length_is: ClassVar[str]
    measures: ClassVar[Mapping[str, str]]
    """Name of a measure in tables → description with the unit."""
    position_width: ClassVar[int | None] = None
    """Number of tokens in each mean of the loss by position. None if the task has no loss by position."""

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
    """The copy task: BOS w BOS w, with |w| from `shortest` to the longest that fits."""

    name: ClassVar[str] = "copy"
    length_is: ClassVar[str] = "symbols of w"
    measures: ClassVar[Mapping[str, str]] = {
        "accuracy": "accuracy of the copy",
        "loss": "loss on the copy in nats per symbol",
    }

    shortest: int = 16

    def tokens(self, length: int) -> int:
        return 2 * length + 2

    def batches(self, seed: int, *, longest: int, sequences: int) -> Callable[[int], Batch]:
        return copying.batches(seed=seed, sequences=sequences, shortest=self.shortest, longest=(longest - 2) // 2)

    def measure(self, model: LanguageModel, plan: Plan | None, length: int) -> dict[str, Any]:
        batch = copying.test_batch(length, sequences=self.test_sequences)
        accuracy, loss = measure.copy_accuracy(model, plan, batch)
        return {"accuracy": accuracy, "loss": loss}

    def about(self) -> dict[str, Any]:
        return {**super().about(), "shortest": self.shortest}


@dataclass(frozen=True)
class Text(Task):
    """The text task: bytes of the standard library, measured on files held out from training."""

    name: ClassVar[str] = "text"
    length_is: ClassVar[str] = "tokens"
    measures: ClassVar[Mapping[str, str]] = {
        "perplexity": "perplexity per byte over the window",
        "last": f"perplexity per byte over the last {measure.LAST} bytes of the window",
    }
    position_width: ClassVar[int | None] = _WIDTH

    def tokens(self, length: int) -> int:
        return length

    def batches(self, seed: int, *, longest: int, sequences: int) -> Callable[[int], Batch]:
        return text.batches(_corpus().train, batch=sequences, seq=longest, seed=seed)

    def measure(self, model: LanguageModel, plan: Plan | None, length: int) -> dict[str, Any]:
        windows = text.windows(_corpus().held_out, count=self.test_sequences, seq=self.lengths[-1])
        losses = measure.token_losses(model, plan, measure.last_tokens(windows, length))
        return {
            "perplexity": measure.perplexity(losses),
            "last": measure.perplexity(losses[:, -measure.LAST :]),
            "by_position": measure.loss_by_position(losses, width=_WIDTH),
        }

    def about(self) -> dict[str, Any]:
        return {**super().about(), "text": _corpus().digest}


@functools.cache
def _corpus() -> text.Corpus:
    return text.corpus()


COPY = Copy(
    size=Size(vocab_size=copying.VOCAB_SIZE, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4),
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
