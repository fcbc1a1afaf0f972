"""Which channels a layer rotates, and with which frequencies: read from one-hot inputs at position 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .model import CannotRecordError, Frequencies, Recorder

LABEL_STEP = 2**17  # channels of one projection stay below; float32 holds the labels of 127 projections exactly


@dataclass
class Pairs:
    """Which channels a layer rotates, one-hot inputs at position 1."""

    pairs: list[tuple[int, int]]
    angles: list[float]
    scale: float
    """Length of a rotated one-hot input: the attention factor, times any scale of the query."""
    permuted: bool
    """Whether the outputs have another order than the inputs."""
    axes: list[Any] | None = None
    """The axis of each pair where tokens have several positions; see `axes_of`."""

    @property
    def distances(self) -> set[int]:
        return {b - a for a, b in self.pairs}


def labels(number: int, channels: int) -> Tensor:
    """Two rows for every projection: ones, and a number of its own for every channel."""
    named = torch.arange(channels, dtype=torch.float32) + number * LABEL_STEP
    return torch.stack((torch.ones(channels), named))


def sources(seen: Tensor) -> Tensor:
    """Which channel of which projection each channel came from, as its label.

    Args:
        seen: [2, ..., head_dim], what the labels became at position 0.

    Returns:
        [..., head_dim], int64.
    """
    ones, named = seen[0].double(), seen[1].double()
    if (ones == 0).any():
        raise CannotRecordError("a channel of the query comes from no projection")
    return (named / ones).round().long()


def measure(recorder: Recorder, index: int, indexer: bool = False) -> Pairs | None:
    """The pairs of input channels that one layer rotates and their angle at position 1; None if it rotates nothing."""
    captured = recorder.run(index, 2, labels, indexer=indexer)
    side = "query" if (captured.query[0] != 0).all() else "key"  # queries may come from experts
    seen = getattr(captured, side)[:, :, 0]
    source = sources(seen[:, 0])
    if not (seen[0] == seen[0, :1]).all():
        raise CannotRecordError("it rotates by the number of the head, and not by the position of the token")
    channels = sorted(source.tolist())
    if len(set(channels)) != len(channels):
        raise CannotRecordError("two channels of the query come from one of a projection")
    place = {label: i for i, label in enumerate(channels)}
    order = torch.tensor([place[label] for label in source.tolist()])

    def one_hot(number: int, width: int) -> Tensor:
        rows = torch.zeros(len(channels), width)
        for i, label in enumerate(channels):
            if label // LABEL_STEP == number:
                if label % LABEL_STEP >= width:
                    raise CannotRecordError("a channel of the query is a mean of more than one of the projections")
                rows[i, label % LABEL_STEP] = 1
        return rows

    def turned(positions: Tensor | None = None) -> Tensor:
        """What each one-hot input becomes at the second token, [input, output]."""
        moved = getattr(recorder.run(index, len(channels), one_hot, positions, indexer), side)[:, 0]
        made = torch.zeros(len(channels), len(channels), dtype=torch.float64)
        made[:, order] = moved[:, 1].double()  # outputs back to the order of the inputs
        return made

    matrix = turned()
    off = (matrix - torch.diag(matrix.diag())).abs() > 1e-12
    pairs, angles = [], []
    for a in range(len(channels)):
        partners = off[a].nonzero().flatten().tolist()
        if len(partners) > 1:
            raise CannotRecordError("a channel is mixed with more than one other: no rotation")
        if partners and partners[0] > a:
            pairs.append((a, partners[0]))
            angles.append(float(torch.atan2(matrix[a, partners[0]], matrix[a, a])))
    permuted = bool((order != torch.arange(len(order))).any())
    if not pairs:
        return None
    axes = None if indexer or not recorder.several_axes else axes_of(pairs, turned)
    return Pairs(pairs, angles, float(matrix[pairs[0][0]].norm()), permuted, axes)


def axes_of(pairs: list[tuple[int, int]], turned: Callable[[Tensor], Tensor]) -> list[Any]:
    """Which row of positions turns each pair: that of which alone the second token has position 1.

    Args:
        pairs: the channels of each.
        turned: from positions, [axes, 2], to what one-hot inputs become at the second token.

    Returns:
        The axis of each pair; a list of two where its channels do not take the same.

    Raises:
        CannotRecordError: the model takes neither two, three nor four rows; a channel takes none, or several.
    """
    for count in (2, 3, 4):
        rows = torch.eye(count, dtype=torch.long)
        try:
            made = [turned(torch.stack((torch.zeros_like(row), row), dim=-1)) for row in rows]
        except CannotRecordError:
            continue
        of_channel = {}
        for channel in {channel for pair in pairs for channel in pair}:
            stays = torch.zeros(len(made[0]), dtype=torch.float64)
            stays[channel] = 1
            moved = [a for a, matrix in enumerate(made) if ((matrix[:, channel] - stays).abs() > 1e-12).any()]
            if len(moved) != 1:
                raise CannotRecordError(f"channel {channel} takes positions of axes {moved}")
            of_channel[channel] = moved[0]
        both = [[of_channel[a], of_channel[b]] for a, b in pairs]
        return [a if a == b else [a, b] for a, b in both]
    raise CannotRecordError("it takes neither two, three nor four positions for each token")


def frequencies_of(recorder: Recorder, measured: Pairs) -> tuple[Frequencies, Tensor]:
    """The buffer of a rotary module whose frequencies turn a layer, and they in the order of the pairs.

    Raises:
        CannotRecordError: the angles at position 1 are those of no buffer.
    """
    angles = torch.tensor(measured.angles, dtype=torch.float64)
    for found in sorted(recorder.frequencies(), key=lambda each: abs(each.attention_factor - measured.scale)):
        turning = found.inv_freq[found.inv_freq != 0].double()
        if len(turning) != len(angles):
            continue
        if torch.allclose(turning, angles, rtol=1e-4):
            return found, found.inv_freq
        if torch.allclose(turning.sort().values, angles.sort().values, rtol=1e-4):
            # The model gives its frequencies to pairs in an order of its own.
            return found, found.inv_freq.sort().values[angles.argsort().argsort()]
    raise CannotRecordError("no inv_freq of a rotary module gives the measured angles")
