"""The copy task: BOS w BOS w. A model that has learned it attends to where the same symbol stood before.

Nothing is read: w is drawn from a generator. Only the second w can be known, so only it counts. How far apart the two
are is how far the model must see, which makes the task a sharp test of positions beyond the trained ones.

Source: repeated random tokens as in Olsson et al. 2022, "In-context Learning and Induction Heads", arXiv:2209.11895.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ropewalk.lab.train import Batch

SYMBOLS = 64
BOS = SYMBOLS
VOCAB_SIZE = SYMBOLS + 1

# Streams of random numbers: what is tested must not be what was trained on.
_TRAINING, _TEST = 0, 1


def batches(*, seed: int, sequences: int, shortest: int, longest: int) -> Callable[[int], Batch]:
    """Sequences to train on, from (seed, step) alone.

    Args:
        seed: a number of at least 0.
        sequences: of a batch.
        shortest, longest: bounds of |w|, in symbols, both included. All w of a batch are of one length.

    Returns:
        step → a `Batch` as of `batch`.
    """

    def at(step: int) -> Batch:
        generator = np.random.default_rng((_TRAINING, seed, step))
        return batch(_words(generator, sequences, int(generator.integers(shortest, longest + 1))))

    return at


def test_batch(symbols: int, *, sequences: int) -> Batch:
    """The sequences that every model is tested on: |w| = symbols, the same for every seed of a training."""
    return batch(_words(np.random.default_rng((_TEST, symbols)), sequences, symbols))


def batch(words: Tensor) -> Batch:
    """BOS w BOS w: what a model reads, what comes next, and what of it counts.

    Args:
        words: int64 `[sequences, |w|]`, symbols from 0 to 63.

    Returns:
        A `Batch` of `[sequences, 2·|w| + 1]`: all but the last symbol, all but the first, True in the second w.
    """
    bos = torch.full_like(words[:, :1], BOS)
    whole = torch.cat([bos, words, bos, words], dim=1)
    counts = torch.zeros_like(whole[:, 1:], dtype=torch.bool)
    counts[:, -words.shape[1] :] = True
    return Batch(whole[:, :-1], whole[:, 1:], counts)


def _words(generator: np.random.Generator, sequences: int, symbols: int) -> Tensor:
    return torch.from_numpy(generator.integers(SYMBOLS, size=(sequences, symbols)))
