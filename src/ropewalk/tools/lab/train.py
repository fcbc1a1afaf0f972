"""Resumable training with AdamW, warm-up, a cosine schedule and gradient clipping."""

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
from ropewalk import _checks
from ropewalk.tools.lab import checkpoint, ranks, shards
from ropewalk.tools.lab.model import LanguageModel
from ropewalk.tools.lab.progress import Progress

EVERY = 10
"""Steps between checkpoints of several processes, because writing one takes as long as a few small steps."""


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

    Raises:
        RopeError: a number is out of range. The message names it.
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
        """Return the learning rate of a step. Steps are counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Trained:
    """The result of a training besides the weights: the loss of every step in nats, and the duration in seconds."""

    losses: tuple[float, ...]
    seconds: float


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
    progress: Progress | None = None,
) -> Trained:
    """Train the model in place, and save checkpoints.

    If there is a checkpoint of the same training, the training resumes from it. A completed training is only loaded.
    The final weights are bitwise equal to those of an uninterrupted training (with the same machine, versions, and
    numbers of processes and threads).

    A single process saves every step in `file`. If it is killed, only the current step is lost.

    Several processes (`ranks.process_group`) must all call this with the same arguments. FSDP2 shards the model over
    them, and each gets a part of the sequences of every batch. At intervals of `EVERY` steps they save a checkpoint in
    `shards.folder_of(file)`, which all machines must be able to access. At the end the first process writes `file` and
    deletes that folder. Any number of processes can resume from either. The losses equal those of one process up to
    the rounding of sums.

    Args:
        model: the model with its initial weights, which must be the same in every call for the same training.
        rope: a static rope, or None for no rotation.
        batch: function from a step, counted from 0, to its data. It must depend only on the step.
        recipe: hyperparameters.
        file: file of the checkpoint. Its folder is created.
        about: everything else that determines the result (task, digest of the text, seed), as plain JSON. It is stored
            in the checkpoint and compared.
        progress: is called after every step.

    Raises:
        RopeError: the file is a checkpoint of another training, or no checkpoint; it cannot be written; another process
            trains with it; a loss or weight is not finite; or the processes have different trainings. Existing
            checkpoints are unchanged.
    """
    with ranks.hold_lock(file.with_name(f"{file.name}.lock"), str(file)):
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
    _check_agreement(identity)
    several, device = ranks.count() > 1, ranks.device()
    trained = shards.shard(model) if several else model
    parameters = dict(trained.named_parameters())
    decayed = [p for p in parameters.values() if p.ndim > 1]
    plain = [p for p in parameters.values() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=recipe.betas,
        fused=True,
    )
    losses, seconds = _resume(file, identity, parameters, optimizer)
    rotations: dict[int, ropewalk.Rotation | None] = {}
    trained.train()
    with _deterministic():
        for step in range(len(losses), recipe.steps):
            began = time.perf_counter()
            full_batch = batch(step)
            targets = full_batch.targets.numel() if full_batch.mask is None else int(full_batch.mask.sum())
            own_batch = _select_sequences(full_batch, device)
            positions = torch.arange(own_batch.tokens.shape[1], device=device)
            if len(positions) not in rotations:
                rotations[len(positions)] = None if rope is None else rope.at(positions)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            optimizer.zero_grad()
            placed = positions if model.size.absolute else None
            loss = mean_loss(trained(own_batch.tokens, rotations[len(positions)], positions=placed), own_batch, targets)
            # FSDP2 averages the gradients of all processes, but the gradient of the whole batch is their sum.
            (loss * ranks.count()).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.clip)
            optimizer.step()
            losses.append(ranks.sum_over_processes(loss))
            seconds += time.perf_counter() - began
            if not several:
                checkpoint.save(file, identity, checkpoint.state(parameters, optimizer), losses, seconds)
            elif len(losses) % EVERY == 0 or len(losses) == recipe.steps:
                shards.save(file, identity, checkpoint.state(parameters, optimizer), losses, seconds)
            if progress is not None:
                progress.step(step + 1, recipe.steps, losses[-1])
    if several:
        _gather(model, file, identity, checkpoint.state(parameters, optimizer), losses, seconds)
    model.eval()
    return Trained(tuple(losses), seconds)


def _check_agreement(identity: Mapping[str, Any]) -> None:
    """Check that all processes have the same training. Initial weights or texts may differ between machines."""
    identities = ranks.gather_objects(identity)
    if different := [key for key in identity if any(other[key] != identities[0][key] for other in identities)]:
        fix = "Start all of them with the same command and the same versions of Python, PyTorch and ropewalk."
        must = "every process must train the same model on the same data"
        ranks.fail(_checks.error("lab", must, f"processes that differ in {', '.join(different)}", fix))


def _resume(
    file: Path, identity: Mapping[str, Any], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> tuple[list[float], float]:
    """Load the last checkpoint of this training, if any. Return the losses and the duration of the completed steps."""

    def latest() -> checkpoint.Checkpoint | shards.Manifest | None:
        whole = checkpoint.read(file) if file.exists() else None
        last = shards.read(file)
        if whole is not None:
            checkpoint.check_same(file, whole.identity, identity)
        if last is not None:
            checkpoint.check_same(shards.folder_of(file), last.identity, identity)
        if last is not None and (whole is None or len(last.losses) > len(whole.losses)):
            shards.delete_checkpoints(file, keep=last.folder)
            return last
        shards.delete_checkpoints(file, keep=None)
        return whole

    found = ranks.on_first(latest)
    if found is None:
        return [], 0.0
    if isinstance(found, checkpoint.Checkpoint):
        tensors = found.tensors
    else:
        tensors = {name: torch.empty_like(value) for name, value in checkpoint.state(parameters, optimizer).items()}
        shards.load(file, found, tensors)
    checkpoint.restore(parameters, optimizer, tensors, len(found.losses))
    if ranks.count() == 1 and isinstance(found, shards.Manifest):
        checkpoint.save(file, identity, tensors, found.losses, found.seconds)
        shards.delete_checkpoints(file, keep=None)
    return found.losses, found.seconds


def _gather(
    model: LanguageModel,
    file: Path,
    identity: Mapping[str, Any],
    state: Mapping[str, Tensor],
    losses: list[float],
    seconds: float,
) -> None:
    """Copy the gathered weights to the model of every process. Write the same checkpoint as a single process would."""
    tensors = shards.gather(state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"weights.{name}"])

    def save() -> None:
        if not shards.folder_of(file).exists():
            return  # an earlier run has written the file
        checkpoint.save(file, identity, tensors, losses, seconds)
        shards.delete_checkpoints(file, keep=None)

    ranks.on_first(save)


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
