"""Training that can be stopped at any moment and goes on there: AdamW, warm-up, cosine, clipped gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ropewalk
from ropewalk import _checks, _lock
from ropewalk.lab import checkpoint
from ropewalk.lab.model import LanguageModel
from ropewalk.lab.progress import Progress


class Batch(NamedTuple):
    """What a step learns from.

    tokens and targets: int64 `[batch, seq]`; mask: bool `[batch, seq]`, True where the target counts, or None for all.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Args:
        steps: steps in all.
        learning_rate: its peak, after the warm-up.
        warmup: steps in which it grows from 0 in a straight line.
        floor: where the cosine ends, as a share of the peak.
        weight_decay: of matrices and embeddings, not of norms.
        betas: of AdamW.
        clip: the longest gradient, all parameters together.

    Raises:
        RopeError: a number is impossible; the message says which.
    """

    steps: int
    learning_rate: float
    warmup: int = 100
    floor: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    def __post_init__(self) -> None:
        _checks.integer("Recipe", "steps", self.steps, at_least=1)
        _checks.integer("Recipe", "warmup", self.warmup, at_least=0)
        for name in ("learning_rate", "clip"):
            _checks.number("Recipe", name, getattr(self, name), above=0.0)
        for name in ("floor", "weight_decay"):
            _checks.number("Recipe", name, getattr(self, name), at_least=0.0, at_most=1.0)
        betas = self.betas
        if not isinstance(betas, tuple) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise _checks.error(
                "Recipe",
                "betas must be two numbers of at least 0 and below 1",
                _checks.shown(betas),
                "(0.9, 0.95) is usual.",
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Trained:
    """What a training leaves beside the weights: the loss of every step, and the seconds all of them took."""

    losses: tuple[float, ...]
    seconds: float


def loss_of(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats for each target that counts."""
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    return each.mean() if batch.mask is None else each[batch.mask.flatten()].mean()


def train(
    model: LanguageModel,
    rope: ropewalk.Rope | None,
    batch: Callable[[int], Batch],
    recipe: Recipe,
    *,
    file: Path,
    about: Mapping[str, Any],
    progress: Progress | None = None,
) -> Trained:
    """Train the model in place, keeping a checkpoint of every step.

    Where the file holds a checkpoint of the same training, go on from its step; of a finished one, only load it. A
    killed process loses the step it was in and nothing more, and the weights in the end are bitwise those of an
    undisturbed training (same machine, same versions, same number of threads).

    Args:
        model: with its initial weights: the same whenever the same training is called again.
        rope: turns q and k; static. None does not rotate.
        batch: step, counted from 0 → what it learns from. Must depend on the step alone.
        recipe: how.
        file: of the checkpoint; its folder is made.
        about: what else decides the outcome (the task, the digest of the text, the seed): plain JSON, kept in the
            checkpoint and compared.
        progress: told of every step.

    Raises:
        RopeError: the file holds a checkpoint of another training, or is none; it cannot be written; another process
            trains with it; loss or weights are no longer finite. What was kept before stays as it was.
    """
    with _lock.held("lab", file.with_name(f"{file.name}.lock"), str(file)):
        return _train(model, rope, batch, recipe, file, about, progress)


def _train(
    model: LanguageModel,
    rope: ropewalk.Rope | None,
    batch: Callable[[int], Batch],
    recipe: Recipe,
    file: Path,
    about: Mapping[str, Any],
    progress: Progress | None,
) -> Trained:
    identity = checkpoint.identity(model, rope, asdict(recipe), about)
    parameters = dict(model.named_parameters())
    decayed = [p for p in parameters.values() if p.ndim > 1]
    plain = [p for p in parameters.values() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=recipe.betas,
        fused=True,
    )
    losses, seconds = checkpoint.resume(file, identity, parameters, optimizer)
    rotations: dict[int, ropewalk.Rotation | None] = {}
    model.train()
    with _deterministic():
        for step in range(len(losses), recipe.steps):
            began = time.perf_counter()
            now = batch(step)
            positions = torch.arange(now.tokens.shape[1])
            if len(positions) not in rotations:
                rotations[len(positions)] = None if rope is None else rope.at(positions)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            optimizer.zero_grad()
            placed = positions if model.size.absolute else None
            loss = loss_of(model(now.tokens, rotations[len(positions)], positions=placed), now)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.clip)
            optimizer.step()
            losses.append(loss.item())
            seconds += time.perf_counter() - began
            checkpoint.save(file, identity, parameters, optimizer, losses, seconds)
            if progress is not None:
                progress.step(step + 1, recipe.steps, losses[-1])
    model.eval()
    return Trained(tuple(losses), seconds)


@contextmanager
def _deterministic() -> Iterator[None]:
    """PyTorch's deterministic algorithms, and afterwards what was set before."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
