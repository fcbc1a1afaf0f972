"""Resumable training with AdamW, warm-up, a cosine schedule and gradient clipping."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ropewalk
from ropewalk import _checks
from ropewalk.tools.lab import checkpoint, ranks
from ropewalk.tools.lab.model import LanguageModel


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


def mean_loss(logits: Tensor, batch: Batch, targets: int | None = None) -> Tensor:
    """Compute the mean cross-entropy in nats over the targets that count.

    Args:
        logits: `[batch, seq, vocab_size]`.
        batch: the targets and the mask.
        targets: divisor of the sum, if batch is a part of a larger batch: the number of targets that count in the
            larger one. None means the number in batch.
    """
    target_losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    counted = target_losses if batch.mask is None else target_losses[batch.mask.flatten()]
    return counted.sum() / (counted.numel() if targets is None else targets)


def train(
    model: LanguageModel,
    rope: ropewalk.Rope | None,
    batch: Callable[[int], Batch],
    recipe: Recipe,
    *,
    file: Path,
    about: Mapping[str, Any],
    progress: Callable[[int, int, float], object] | None = None,
) -> list[float]:
    """Train the model in place, and save a checkpoint after every step.

    If there is a checkpoint of the same training, the training resumes from it. A completed training is only loaded. If
    the process is killed, only the current step is lost. The final weights are bitwise equal to those of an
    uninterrupted training (with the same machine, versions, and numbers of processes and threads).

    Several processes (`ranks.process_group`) must all call this with the same arguments. FSDP2 shards the model over
    them, and each gets a part of the sequences of every batch. After every step, the first process writes the same file
    as a single process would, from which any number of processes can resume. The losses equal those of one process up
    to the rounding of sums.

    Args:
        model: the model with its initial weights, which must be the same in every call for the same training.
        rope: a static rope, or None for no rotation.
        batch: function from a step, counted from 0, to its data. It must depend only on the step.
        recipe: hyperparameters.
        file: file of the checkpoint. Its folder is created. Only one run may write it at a time.
        about: everything else that determines the result (task, digest of the text, seed), as plain JSON. It is stored
            in the checkpoint and compared.
        progress: is called after every step, with the number of completed steps, that of all steps, and the loss.

    Returns:
        The loss of every step in nats.

    Raises:
        RopeError: the file is a checkpoint of another training, or no checkpoint; a loss or weight is not finite; or
            the processes have different trainings. An existing checkpoint is unchanged.
        OSError: the file cannot be written. An existing checkpoint is unchanged.
    """
    training = checkpoint.describe(model, rope, asdict(recipe), about)
    all_trainings = ranks.gather_objects(training)
    ranks.on_first(lambda: _check_agreement(all_trainings))
    state = ranks.on_first(lambda: checkpoint.begin(file, training))
    if state is not None:
        checkpoint.load_weights(model, state.tensors)
    sharded, device = ranks.shard(model), ranks.device()
    parameters = list(sharded.parameters())
    decayed, plain = ([p for p in parameters if (p.ndim > 1) == matrices] for matrices in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=recipe.betas,
        fused=True,
    )
    losses: list[float] = []
    if state is not None:
        checkpoint.load_moments(sharded, optimizer, state)
        losses += state.losses
    rotations: dict[int, ropewalk.Rotation | None] = {}
    sharded.train()
    with _deterministic():
        for step in range(len(losses), recipe.steps):
            whole = batch(step)
            targets = whole.targets.numel() if whole.mask is None else int(whole.mask.sum())
            own = _select_sequences(whole, device)
            positions = torch.arange(own.tokens.shape[1], device=device)
            if len(positions) not in rotations:
                rotations[len(positions)] = None if rope is None else rope.at(positions)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            optimizer.zero_grad()
            placed = positions if model.size.absolute else None
            loss = mean_loss(sharded(own.tokens, rotations[len(positions)], positions=placed), own, targets)
            # FSDP2 averages the gradients of all processes, but the gradient of the whole batch is their sum.
            (loss * ranks.count()).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
            optimizer.step()
            losses.append(ranks.sum_over_processes(loss))
            state = checkpoint.State(checkpoint.tensors_of(sharded, optimizer), losses)
            ranks.on_first(functools.partial(checkpoint.save, file, state, training))
            if progress is not None:
                progress(step + 1, recipe.steps, losses[-1])
    if sharded is not model and state is not None:
        checkpoint.load_weights(model, state.tensors)
    model.eval()
    return losses


def _check_agreement(trainings: Sequence[Mapping[str, Any]]) -> None:
    """Check that all processes have the same training. Initial weights or texts may differ between machines."""
    first = trainings[0]
    if different := [key for key in first if any(other[key] != first[key] for other in trainings)]:
        fix = "Start all of them with the same command and the same versions of Python, PyTorch and ropewalk."
        must = "every process must train the same model on the same data"
        raise _checks.error("lab", must, f"processes that differ in {', '.join(different)}", fix)


def _select_sequences(batch: Batch, device: torch.device) -> Batch:
    """Select this process's sequences. A process that would get none gets the first one, with an all-False mask."""
    if ranks.count() == 1:
        return batch
    rows = torch.arange(len(batch.tokens)).tensor_split(ranks.count())[ranks.rank()]
    mask = torch.ones_like(batch.targets, dtype=torch.bool) if batch.mask is None else batch.mask
    if not len(rows):
        rows, mask = torch.tensor([0]), torch.zeros_like(mask)
    return Batch(batch.tokens[rows].to(device), batch.targets[rows].to(device), mask[rows].to(device))


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
