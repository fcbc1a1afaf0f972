"""Test training: the arithmetic of AdamW, and bitwise resumption. test_ranks.py kills processes."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk import LongRoPE, Rope, RopeError, YaRN
from ropewalk.tools import lab
from ropewalk.tools.lab import checkpoint
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.train import Batch, Recipe, mean_loss, train

SIZE = Size(16, 8, 12, 1, 2)
ROPE = Rope(4, 1e4, "half")
RECIPE = Recipe(6, 1e-2, warmup=2, clip=0.05)


def batch(step: int, mask: bool = True) -> Batch:
    rows = torch.from_numpy(np.random.default_rng((1, step)).integers(0, 16, size=(3, 6)))
    return Batch(rows[:, :-1], rows[:, 1:], rows[:, 1:] > 3 if mask else None)


def fresh(size: Size = SIZE, seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    model = LanguageModel(size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    return model


def weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class Stops:
    """Replaces Progress: stops the training after a step, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, done: int, steps: int, loss: float) -> None:
        if done == self.after:
            raise KeyboardInterrupt


def test_learning_rate() -> None:
    """It rises linearly to the peak, and then falls in half a cosine to a tenth of it."""
    recipe = Recipe(12, 1.0, warmup=4)
    wanted = [0.25, 0.5, 0.75, 1.0, *(0.1 + 0.9 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(8))]
    assert [recipe.rate(step) for step in range(12)] == pytest.approx(wanted, rel=1e-12)
    assert Recipe(2, 1.0, warmup=0).rate(0) == 1.0


@pytest.mark.parametrize("mask", [True, False])
def test_steps_of_adamw_written_out(mask: bool, tmp_path: Path) -> None:
    """Loshchilov and Hutter 2019 (1711.05101), algorithm 2, with the clipping of Pascanu et al. 2013, in float64."""
    model = fresh()
    reference = fresh().double()
    losses = train(model, ROPE, lambda step: batch(step, mask), RECIPE, file=tmp_path / "x", about={})
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in reference.named_parameters()}
    rotation = ROPE.at(torch.arange(5), dtype=torch.float64)
    for step in range(RECIPE.steps):
        now = batch(step, mask)
        reference.zero_grad()
        log_p = torch.log_softmax(reference(now.tokens, rotation), dim=-1)
        each = -log_p.gather(-1, now.targets.unsqueeze(-1)).squeeze(-1)
        counts = torch.ones_like(each) if now.mask is None else now.mask.double()
        loss = (each * counts).sum() / counts.sum()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-4)
        loss.backward()
        length = math.sqrt(sum((p.grad**2).sum().item() for p in reference.parameters()))
        assert length > RECIPE.clip
        rate = RECIPE.rate(step)
        with torch.no_grad():
            for name, p in reference.named_parameters():
                g = p.grad * RECIPE.clip / length
                m, v = moments[name]
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.95).add_(0.05 * g * g)
                p.mul_(1 - rate * (0.1 if p.ndim > 1 else 0.0))
                p.sub_(rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8))
    # A step moves a weight by up to the rate, 0.01. A hundredth of that; measured after six steps in float32: 1.2e-5.
    for (name, mine), p in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), p, rtol=0, atol=1e-4, msg=name)


def test_stopped_and_resumed_is_bitwise(tmp_path: Path) -> None:
    whole = fresh()
    wanted = train(whole, ROPE, batch, RECIPE, file=tmp_path / "whole", about={"seed": 1})
    file = tmp_path / "folder" / "parts"
    for stop in (1, 4):
        with pytest.raises(KeyboardInterrupt):
            train(fresh(), ROPE, batch, RECIPE, file=file, about={"seed": 1}, progress=Stops(stop))
    parts = fresh()
    asked = []

    def asking(step: int) -> Batch:
        asked.append(step)
        return batch(step)

    trained = train(parts, ROPE, asking, RECIPE, file=file, about={"seed": 1})
    assert asked == [4, 5]
    assert trained == wanted
    assert len(trained) == 6
    for name, value in weights(whole).items():
        assert torch.equal(weights(parts)[name], value)
    loaded = fresh()
    assert train(loaded, ROPE, asking, RECIPE, file=file, about={"seed": 1}) == trained  # finished: it only loads
    assert asked == [4, 5]
    for name, value in weights(whole).items():
        assert torch.equal(weights(loaded)[name], value)
    assert {path.name for path in file.parent.iterdir()} == {"parts", "parts.json"}
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("absolute", ["learned", "sinusoidal", None])
def test_without_rotation(absolute: Any, tmp_path: Path) -> None:
    size = replace(SIZE, absolute=absolute, max_positions=5 if absolute == "learned" else None)
    model = fresh(size)
    train(model, None, batch, RECIPE, file=tmp_path / "x", about={})
    again, rope, about = checkpoint.load(tmp_path / "x")
    assert (again.size, rope, about) == (size, None, {})
    for name, value in weights(model).items():
        assert torch.equal(weights(again)[name], value)


@pytest.mark.parametrize(
    "rope",
    [
        ROPE,
        Rope(4, 5e5, "interleaved", rotary_dim=2, rotary_offset=2),
        Rope(4, 1e4, "half", scaling=YaRN(4.0, 64, beta_fast=16.0)),
        Rope(4, 1e4, "half", scaling=LongRoPE([1.0, 2.0], [1.5, 4.0], 64, factor=4.0)).at_length(9),
    ],
)
def test_load(rope: Rope, tmp_path: Path) -> None:
    model = fresh(replace(SIZE, tied=True, num_kv_heads=1))
    about = {"task": "copy", "seeds": [1, 2]}
    train(model, rope, batch, RECIPE, file=tmp_path / "x", about=about)
    again, read, said = checkpoint.load(tmp_path / "x")
    assert (read, said, again.size, again.training) == (rope, about, model.size, False)
    for name, value in weights(model).items():
        assert torch.equal(weights(again)[name], value)


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    train(fresh(), ROPE, batch, RECIPE, file=file, about={"seed": 1})
    before = file.read_bytes()
    others: dict[str, tuple[LanguageModel, Rope | None, Recipe, dict[str, Any]]] = {
        "about": (fresh(), ROPE, RECIPE, {"seed": 2}),
        "recipe": (fresh(), ROPE, replace(RECIPE, steps=7), {"seed": 1}),
        "rope": (fresh(), None, RECIPE, {"seed": 1}),
        "initial weights": (fresh(seed=1), ROPE, RECIPE, {"seed": 1}),
        "size, initial weights": (fresh(replace(SIZE, tied=True)), ROPE, RECIPE, {"seed": 1}),
    }
    for differs, (model, rope, recipe, about) in others.items():
        message = rf"lab: .*x\.safetensors must be a checkpoint of this training, got one that differs in {differs}\. "
        with pytest.raises(RopeError, match=message):
            train(model, rope, batch, recipe, file=file, about=about)
    assert file.read_bytes() == before


def test_what_was_being_written_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(fresh(), ROPE, batch, RECIPE, file=file, about={}, progress=Stops(3))
    (tmp_path / "x.safetensors.partial").write_bytes(b"half of it")
    assert len(train(fresh(), ROPE, batch, RECIPE, file=file, about={})) == 6
    assert {path.name for path in tmp_path.iterdir()} == {"x.safetensors", "x.json"}


def test_a_training_that_diverges_keeps_the_steps_before(tmp_path: Path) -> None:
    model = fresh()

    def breaks(step: int) -> Batch:
        if step == 2:
            model.lm_head.weight.data[0] = float("nan")
        return batch(step)

    with pytest.raises(RopeError, match="lab: loss and weights must be finite, got inf or nan after step 3"):
        train(model, ROPE, breaks, RECIPE, file=tmp_path / "x", about={})
    assert len(checkpoint.read(tmp_path / "x")[1].losses) == 2


def test_a_full_disk_keeps_the_steps_before(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")  # not on Windows
    file, before = tmp_path / "x.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)

    def filling(step: int) -> Batch:
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        return batch(step)

    try:
        with pytest.raises(OSError, match=r"x\.safetensors"):
            train(fresh(), ROPE, filling, RECIPE, file=file, about={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path.name for path in tmp_path.iterdir()} == {"x.safetensors", "x.json"}
    assert len(checkpoint.read(file)[1].losses) == 2


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RopeError, match=r'safetensors must be installed\. Run pip install "\.\[lab\]"'):
        importlib.reload(lab)


def test_loss_counts_what_the_mask_says() -> None:
    logits = torch.zeros(1, 3, 2)
    logits[0, 1, 1] = math.log(3)  # probability 3/4 of token 1
    targets = torch.tensor([[0, 1, 0]])
    counted = Batch(targets, targets, torch.tensor([[False, True, False]]))
    assert mean_loss(logits, counted).item() == pytest.approx(math.log(4 / 3))
    everything = Batch(targets, targets)
    assert mean_loss(logits, everything).item() == pytest.approx((2 * math.log(2) + math.log(4 / 3)) / 3)
