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
from ropewalk import _checks
from ropewalk.lab import checkpoint, ranks, shards
from ropewalk.lab.model import LanguageModel
from ropewalk.lab.progress import Progress

EVERY = 10
"""Steps from one checkpoint of several processes to the next: writing one takes as long as a few small steps."""


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


def loss_of(logits: Tensor, batch: Batch, targets: int | None = None) -> Tensor:
    """Mean cross-entropy in nats for each target that counts.

    Args:
        targets: what the sum is divided by: those that count in a whole batch of which this one is a part; those of
            `batch` when None.
    """
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    counted = each if batch.mask is None else each[batch.mask.flatten()]
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
    """Train the model in place, keeping checkpoints.

    Where there is a checkpoint of the same training, go on from its step; of a finished one, only load it. The
    weights in the end are bitwise those of an undisturbed training (same machine, same versions, same number of
    processes and threads).

    One process keeps every step in `file`: if it is killed, the step it was in is lost and nothing more.

    Several processes (`ranks.joined`) must all call this with the same arguments. FSDP2 splits the model over them,
    and each takes its share of the sequences of every batch. They keep every EVERY-th step in `shards.folder_of(file)`,
    which all machines must see; in the end the first process writes `file` and deletes that folder. Any number of
    processes goes on from either. The losses are those of one process but for the rounding of sums.

    Args:
        model: with its initial weights: the same whenever the same training is called again.
        rope: rotates q and k; static. None does not rotate.
        batch: step, counted from 0 → what it learns from. Must depend on the step alone.
        recipe: how.
        file: of the checkpoint; its folder is made.
        about: what else decides the outcome (the task, the digest of the text, the seed): plain JSON, kept in the
            checkpoint and compared.
        progress: told of every step.

    Raises:
        RopeError: the file holds a checkpoint of another training, or is none; it cannot be written; another process
            trains with it; loss or weights are no longer finite; the processes were given different trainings. What
            was kept before stays as it was.
    """
    with ranks.locked(file.with_name(f"{file.name}.lock"), str(file)):
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
    trained = shards.split(model) if several else model
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
            whole = batch(step)
            targets = whole.targets.numel() if whole.mask is None else int(whole.mask.sum())
            now = _share(whole, device)
            positions = torch.arange(now.tokens.shape[1], device=device)
            if len(positions) not in rotations:
                rotations[len(positions)] = None if rope is None else rope.at(positions)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            optimizer.zero_grad()
            placed = positions if model.size.absolute else None
            loss = loss_of(trained(now.tokens, rotations[len(positions)], positions=placed), now, targets)
            # FSDP2 takes the mean of the gradients of all processes; the gradient of the whole batch is their sum.
            (loss * ranks.count()).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.clip)
            optimizer.step()
            losses.append(ranks.total(loss))
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
    """Check that all processes were given the same training: an initial weight or a text may differ by machine."""
    identities = ranks.from_all(identity)
    if different := [key for key in identity if any(other[key] != identities[0][key] for other in identities)]:
        cure = "Start all of them with the same command, and with the same versions of Python, PyTorch and ropewalk."
        must = "every process must train the same model on the same data"
        ranks.fail(_checks.error("lab", must, f"processes that differ in {', '.join(different)}", cure))


def _resume(
    file: Path, identity: Mapping[str, Any], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> tuple[list[float], float]:
    """Load the last checkpoint of this training, if there is one: the losses of its steps, and their seconds."""

    def latest() -> checkpoint.Checkpoint | shards.Last | None:
        whole = checkpoint.read(file) if file.exists() else None
        last = shards.read(file)
        if whole is not None:
            checkpoint.check_same(file, whole.identity, identity)
        if last is not None:
            checkpoint.check_same(shards.folder_of(file), last.identity, identity)
        if last is not None and (whole is None or len(last.losses) > len(whole.losses)):
            shards.tidy(file, keep=last.folder)
            return last
        shards.tidy(file, keep=None)
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
    if ranks.count() == 1 and isinstance(found, shards.Last):
        checkpoint.save(file, identity, tensors, found.losses, found.seconds)
        shards.tidy(file, keep=None)
    return found.losses, found.seconds


def _gather(
    model: LanguageModel,
    file: Path,
    identity: Mapping[str, Any],
    state: Mapping[str, Tensor],
    losses: list[float],
    seconds: float,
) -> None:
    """Bring the trained weights into the whole model of every process; leave the file that one process leaves."""
    tensors = shards.whole(state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"weights.{name}"])

    def keep() -> None:
        if not shards.folder_of(file).exists():
            return  # the file was finished before
        checkpoint.save(file, identity, tensors, losses, seconds)
        shards.tidy(file, keep=None)

    ranks.on_first(keep)


def _share(batch: Batch, device: torch.device) -> Batch:
    """The sequences of this process. One for which none is left gets the first one, with no target that counts."""
    if ranks.count() == 1:
        return batch
    rows = torch.arange(len(batch.tokens)).tensor_split(ranks.count())[ranks.rank()]
    mask = torch.ones_like(batch.targets, dtype=torch.bool) if batch.mask is None else batch.mask
    if not len(rows):
        rows, mask = torch.tensor([0]), torch.zeros_like(mask)
    return Batch(batch.tokens[rows].to(device), batch.targets[rows].to(device), mask[rows].to(device))


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
