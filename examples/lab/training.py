"""Training with AdamW, warm-up, a cosine schedule and gradient clipping, which continues after a kill."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from model import LanguageModel
from safetensors.torch import load_file, save_file
from torch import Tensor

import ropewalk

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Batch(NamedTuple):
    """The data of one training step.

    Args:
        tokens, targets: int64 `[batch, seq]`.
        mask: bool `[batch, seq]`, True for targets that count. None means that all count.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training.

    Args:
        steps: total number of steps.
        learning_rate: peak learning rate, reached after the warm-up.
        warmup: number of steps of the linear warm-up from 0.
        floor: final learning rate of the cosine schedule, as a fraction of the peak.
        weight_decay: weight decay of matrices and embeddings. Norms have none.
        betas: betas of AdamW.
        clip: maximum norm of the gradient of all parameters.
    """

    steps: int
    learning_rate: float
    warmup: int = 100
    floor: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step. Steps are counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


def mean_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Compute the mean cross-entropy in nats over the targets that count."""
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    counted = losses if batch.mask is None else losses[batch.mask.flatten()]
    return counted.sum() / counted.numel()


def train(
    model: LanguageModel,
    rope: ropewalk.Rope | None,
    batch: Callable[[int], Batch],
    recipe: Recipe,
    file: Path,
    progress: Callable[[int, float], object] = lambda done, loss: None,
) -> list[float]:
    """Train the model in place, and replace the checkpoint after every step.

    If the file exists, the training continues from it, and a completed training is only loaded. The final weights are
    bitwise equal to those of an uninterrupted training on the same machine with the same number of threads.

    Args:
        model: the model with its initial weights, which must be the same in every call for the same training.
        rope: a static rope, or None for no rotation.
        batch: function from a step, counted from 0, to its data. It must depend only on the step.
        recipe: hyperparameters.
        file: the checkpoint: weights, moments of AdamW, and the losses of all completed steps.
        progress: is called after every step, with the number of completed steps and the loss.

    Returns:
        The loss of every step in nats.
    """
    parameters = list(model.parameters())
    decayed, plain = ([p for p in parameters if (p.ndim > 1) == matrices] for matrices in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=recipe.betas,
        fused=True,
    )
    losses = _load(file, model, optimizer) if file.exists() else []
    model.train()
    with _deterministic():
        for step in range(len(losses), recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            optimizer.zero_grad()
            now = batch(step)
            loss = mean_loss(model(now.tokens, rope), now)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
            optimizer.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise SystemExit(f"The loss of step {step + 1} is {losses[-1]}: choose a lower learning rate.")
            _save(file, model, optimizer, losses)
            progress(step + 1, losses[-1])
    model.eval()
    return losses


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yield a temporary path, and move what the body has written there to `file`, at once."""
    partial = file.with_name(f"{file.name}.partial")
    yield partial
    os.replace(partial, file)


def _save(file: Path, model: LanguageModel, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    tensors = {"losses": torch.tensor(losses, dtype=torch.float64)}
    for name, parameter in model.named_parameters():
        tensors[f"weights.{name}"] = parameter.detach()
        tensors.update({f"{moment}.{name}": optimizer.state[parameter][moment] for moment in _MOMENTS})
    with replaced(file) as new:
        save_file(tensors, new)


def _load(file: Path, model: LanguageModel, optimizer: torch.optim.Optimizer) -> list[float]:
    tensors: Mapping[str, Tensor] = load_file(file)
    losses: list[float] = tensors["losses"].tolist()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[f"weights.{name}"])
        moments = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(len(losses))), **moments}
    return losses


@contextmanager
def _deterministic() -> Iterator[None]:
    """Enable PyTorch's deterministic algorithms, and restore the previous setting afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
