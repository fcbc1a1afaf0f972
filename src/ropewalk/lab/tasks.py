"""The two tasks: what each trains on, how long, and what is measured at each length.

The recipes are what fits: both tasks on three seeds with all fine-tunes within an hour on two cores.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ropewalk
from ropewalk.lab import copying, measure, text
from ropewalk.lab.measure import Plan
from ropewalk.lab.methods import FACTOR
from ropewalk.lab.model import LanguageModel, Size
from ropewalk.lab.train import Batch, Recipe

BASE = 10_000.0
_WIDTH = 32


@dataclass(frozen=True)
class Task(ABC):
    """A task and its recipe.

    Args:
        size: of the model.
        trained: the longest sequence of the training, in tokens; fine-tunes have FACTOR times as many.
        lengths: at which models are measured, ascending, the trained one among them; in the unit `length_is`.
        recipe, sequences: of the training, and how many sequences each of its steps has.
        tune_recipe, tune_sequences: of the fine-tunes.
        test_sequences: how many are measured at each length.
    """

    name: ClassVar[str]
    length_is: ClassVar[str]
    measures: ClassVar[Mapping[str, str]]
    """What `measure` gives for tables → the same in words, with the unit."""
    position_width: ClassVar[int | None] = None
    """Of the loss by position, where `measure` gives one: tokens in each mean."""

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
        """What the model is trained with."""
        return ropewalk.Rope(head_dim=self.size.head_dim, base=BASE, pairing="half")

    @property
    def tuned(self) -> int:
        """The longest sequence of the fine-tunes, in tokens."""
        return round(FACTOR * self.trained)

    @abstractmethod
    def tokens(self, length: int) -> int:
        """Tokens of a sequence of that length."""

    @abstractmethod
    def batches(self, seed: int, *, longest: int, sequences: int) -> Callable[[int], Batch]:
        """step → a batch of so many sequences of at most `longest` tokens."""

    @abstractmethod
    def measure(self, model: LanguageModel, plan: Plan | None, length: int) -> dict[str, Any]:
        """The measures at one length."""

    def about(self) -> dict[str, Any]:
        """What beside size, rope and recipe decides a training: plain JSON."""
        return {"task": self.name, "trained": self.trained, "sequences": self.sequences}


@dataclass(frozen=True)
class Copy(Task):
    """BOS w BOS w, with |w| from `shortest` to what fits."""

    name: ClassVar[str] = "copy"
    length_is: ClassVar[str] = "symbols of w"
    measures: ClassVar[Mapping[str, str]] = {
        "accuracy": "share of the second w that is right",
        "loss": "loss on the second w, nats for each symbol",
    }

    shortest: int = 16

    def tokens(self, length: int) -> int:
        return 2 * length + 2

    def batches(self, seed: int, *, longest: int, sequences: int) -> Callable[[int], Batch]:
        return copying.batches(seed=seed, sequences=sequences, shortest=self.shortest, longest=(longest - 2) // 2)

    def measure(self, model: LanguageModel, plan: Plan | None, length: int) -> dict[str, Any]:
        batch = copying.test_batch(length, sequences=self.test_sequences)
        accuracy, loss = measure.copied(model, plan, batch)
        return {"accuracy": accuracy, "loss": loss}

    def about(self) -> dict[str, Any]:
        return {**super().about(), "shortest": self.shortest}


@dataclass(frozen=True)
class Text(Task):
    """The bytes of the standard library; measured on files that the training has not seen."""

    name: ClassVar[str] = "text"
    length_is: ClassVar[str] = "tokens"
    measures: ClassVar[Mapping[str, str]] = {
        "perplexity": "perplexity per byte over the window",
        "last": f"perplexity per byte over its last {measure.LAST} bytes",
    }
    position_width: ClassVar[int | None] = _WIDTH

    def tokens(self, length: int) -> int:
        return length

    def batches(self, seed: int, *, longest: int, sequences: int) -> Callable[[int], Batch]:
        return text.batches(_corpus().train, batch=sequences, seq=longest, seed=seed)

    def measure(self, model: LanguageModel, plan: Plan | None, length: int) -> dict[str, Any]:
        windows = text.windows(_corpus().held_out, count=self.test_sequences, seq=self.lengths[-1])
        losses = measure.token_losses(model, plan, measure.ending(windows, length))
        return {
            "perplexity": measure.perplexity(losses),
            "last": measure.perplexity(losses[:, -measure.LAST :]),
            "by_position": measure.by_position(losses, width=_WIDTH),
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
