"""The copy task: each sequence is BOS w BOS w, with random symbols w, and the model must predict the second w.

The first w cannot be predicted, so only the second one counts. To copy a symbol, the model must attend over exactly the
distance between the two w. The task therefore shows clearly whether a model can use positions beyond the trained ones.

Source: repeated random tokens as in Olsson et al. 2022, "In-context Learning and Induction Heads", arXiv:2209.11895.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ropewalk.tools.lab.train import Batch

SYMBOLS = 64
BOS = SYMBOLS
VOCAB_SIZE = SYMBOLS + 1

# Separate random streams, so that test sequences differ from training sequences.
_TRAINING, _TEST = 0, 1


def batches(*, seed: int, sequences: int, shortest: int, longest: int) -> Callable[[int], Batch]:
    """Return a function that draws training batches, which depend only on the seed and the step.

    Args:
        seed: an integer of at least 0.
        sequences: number of sequences in a batch.
        shortest, longest: inclusive bounds of |w| in symbols. All w of a batch have the same length.

    Returns:
        A function from a step to a `Batch`, as returned by `batch`.
    """

    def at(step: int) -> Batch:
        generator = np.random.default_rng((_TRAINING, seed, step))
        return batch(_words(generator, sequences, int(generator.integers(shortest, longest + 1))))

    return at


def test_batch(symbols: int, *, sequences: int) -> Batch:
    """Draw the test sequences with |w| = symbols. They do not depend on the seed of the training."""
    return batch(_words(np.random.default_rng((_TEST, symbols)), sequences, symbols))


def batch(words: Tensor) -> Batch:
    """Build the tokens, targets and mask of sequences BOS w BOS w.

    Args:
        words: int64 `[sequences, |w|]`, symbols from 0 to 63.

    Returns:
        A `Batch` of `[sequences, 2·|w| + 1]`. The tokens omit the last symbol and the targets omit the first one. The
        mask is True in the second w.
    """
    bos = torch.full_like(words[:, :1], BOS)
    sequences = torch.cat([bos, words, bos, words], dim=1)
    counts = torch.zeros_like(sequences[:, 1:], dtype=torch.bool)
    counts[:, -words.shape[1] :] = True
    return Batch(sequences[:, :-1], sequences[:, 1:], counts)


def _words(generator: np.random.Generator, sequences: int, symbols: int) -> Tensor:
    return torch.from_numpy(generator.integers(SYMBOLS, size=(sequences, symbols)))
