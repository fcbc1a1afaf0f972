"""Test losses, perplexity and accuracy against sums by hand in float64, on a model with known logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import ropewalk
from ropewalk.tools.lab import tasks
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.train import Batch

SIZE = Size(vocab_size=5, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2)
ROPE = ropewalk.Rope(head_dim=4, base=100.0, pairing="half")


class Known:
    """A stub of a model, whose logits are a formula of token and position."""

    size = SIZE

    def __init__(self):
        self.asked = []

    def __call__(self, tokens, rotation, *, positions=None):
        self.asked.append((tuple(tokens.shape), rotation, positions))
        place, channel = torch.arange(tokens.shape[1], dtype=torch.float64), torch.arange(5, dtype=torch.float64)
        return torch.sin(tokens[..., None] + 0.3 * place[:, None] + 1.7 * channel).float()


def by_hand(tokens, targets):
    """Compute −log softmax in float64 with the module math only."""
    losses, best = [], []
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        logits = [
            [float(np.float32(math.sin(token + 0.3 * i + 1.7 * c))) for c in range(5)] for i, token in enumerate(row)
        ]
        losses.append([math.log(sum(map(math.exp, each))) - each[t] for each, t in zip(logits, wanted, strict=True)])
        best.append([each.index(max(each)) for each in logits])
    return np.array(losses), np.array(best)


def batch(rows=7, seq=12, mask=None):
    generator = torch.Generator().manual_seed(3)
    return Batch(*torch.randint(5, (2, rows, seq), generator=generator), mask)


def test_losses_by_hand():
    made = batch()
    wanted, _ = by_hand(*made[:2])
    losses = tasks.token_losses(Known(), None, made)
    assert losses.dtype == torch.float64
    # The logits are rounded to float32, which may go the other way where the sines differ: by 2⁻²⁴, twice in a loss.
    np.testing.assert_allclose(losses.numpy(), wanted, rtol=0, atol=2**-23)


def test_perplexity_by_hand():
    losses = torch.tensor([[math.log(2), math.log(8)], [math.log(4), math.log(4)]], dtype=torch.float64)
    assert tasks.perplexity(losses) == pytest.approx(4.0, rel=1e-14)
    assert tasks.perplexity(losses[:, -1:]) == pytest.approx(math.sqrt(32), rel=1e-14)


def test_by_position_by_hand():
    losses = torch.arange(14, dtype=torch.float64).view(2, 7)
    # Columns have means 3.5, 4.5, …; the seventh is left over.
    assert tasks.loss_by_position(losses, width=2) == [4.0, 6.0, 8.0]


def test_copied_by_hand():
    mask = torch.zeros(7, 12, dtype=torch.bool)
    mask[:, 7:] = True
    mask[0, 8] = False
    made = batch(mask=mask)
    losses, best = by_hand(*made[:2])
    counts = mask.numpy()
    accuracy, loss = tasks.copy_accuracy(Known(), None, made)
    assert accuracy == (best == made.targets.numpy())[counts].mean()
    assert 0 < accuracy < 1
    assert loss == pytest.approx(losses[counts].mean(), abs=2**-23)


def test_a_few_sequences_at_a_time(monkeypatch):
    monkeypatch.setattr(tasks, "_TOKENS_AT_ONCE", 36)
    model = Known()
    made = batch()
    losses = tasks.token_losses(model, None, made)
    assert [shape for shape, _, _ in model.asked] == [(3, 12), (3, 12), (1, 12)]
    monkeypatch.undo()
    assert torch.equal(losses, tasks.token_losses(Known(), None, made))


def test_all_windows_end_with_the_same_text():
    long, short = tasks.TEXT.test_batch(700), tasks.TEXT.test_batch(5)
    for whole, end in zip(long[:2], short[:2], strict=True):
        assert end.shape == (24, 5)
        assert torch.equal(whole[:, -5:], end)


def test_the_plan_gets_the_right_positions():
    model = Known()
    tasks.token_losses(model, ROPE, batch())
    rotation = model.asked[0][1]
    wanted = [[math.cos(p * 100.0 ** (-i / 2)) for i in range(2)] for p in range(12)]
    np.testing.assert_allclose(rotation.cos.numpy(), wanted, rtol=0, atol=2**-24)


def test_a_model_with_absolute_positions_gets_them():
    torch.manual_seed(0)
    size = Size(vocab_size=5, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, absolute="sinusoidal")
    losses = tasks.token_losses(LanguageModel(size), None, batch())
    assert losses.shape == (7, 12)
    assert not losses.requires_grad
