"""Test the copy task: its sequences, the targets that count, and that a batch depends only on seed and step."""

from __future__ import annotations

import dataclasses

import torch

from ropewalk.tools.lab import tasks


def test_a_sequence_by_hand():
    made = tasks.copy_batch(torch.tensor([[5, 63, 0]]))
    assert made.tokens.tolist() == [[64, 5, 63, 0, 64, 5, 63]]
    assert made.targets.tolist() == [[5, 63, 0, 64, 5, 63, 0]]
    assert made.mask.tolist() == [[False, False, False, False, True, True, True]]


def test_only_the_second_w_counts():
    made = dataclasses.replace(tasks.COPY, test_sequences=4).test_batch(31)
    assert made.tokens.shape == made.targets.shape == made.mask.shape == (4, 63)
    assert made.mask.sum(1).tolist() == [31] * 4
    first, second = made.tokens[:, 1:32], made.targets[:, -31:]
    assert torch.equal(first, second)
    assert (made.tokens == tasks.BOS).sum(1).tolist() == [2] * 4
    assert made.targets[made.mask].max() < tasks.SYMBOLS


def test_batches_depend_on_seed_and_step_alone():
    def tokens(seed, step):
        return dataclasses.replace(tasks.COPY, shortest=4).batches(seed, longest=20, sequences=3)(step).tokens

    at = dataclasses.replace(tasks.COPY, shortest=4).batches(7, longest=20, sequences=3)
    later = at(5).tokens
    _ = torch.rand(3)  # neither the global generator nor earlier steps matter
    assert torch.equal(later, tokens(7, 5))
    others = [tokens(7, 6), tokens(8, 5), tokens(6, 5)]
    assert not any(torch.equal(tokens(7, 5), other) for other in others)


def test_lengths_are_within_their_bounds_and_both_are_reached():
    at = dataclasses.replace(tasks.COPY, shortest=4).batches(0, longest=20, sequences=1)
    assert {(at(step).tokens.shape[1] - 1) // 2 for step in range(100)} == set(range(4, 10))


def test_symbols_are_spread_evenly():
    symbols = dataclasses.replace(tasks.COPY, test_sequences=64).test_batch(500).targets[:, -500:].flatten()
    counts = torch.bincount(symbols, minlength=64).double()
    # χ² with 63 degrees of freedom is above 124 once in 100,000 tries; the generator is seeded, so it passes or not.
    assert ((counts - 500) ** 2 / 500).sum() < 124


def test_what_is_tested_is_not_trained_on():
    at = dataclasses.replace(tasks.COPY, shortest=31).batches(0, longest=64, sequences=64)
    trained = {tuple(row) for step in range(50) for row in at(step).tokens[:, 1:32].tolist()}
    assert not trained & {
        tuple(row) for row in dataclasses.replace(tasks.COPY, test_sequences=64).test_batch(31).tokens[:, 1:32].tolist()
    }
