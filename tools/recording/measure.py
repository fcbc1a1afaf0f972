"""Measure which channels a layer rotates, and by which angles, from one-hot inputs at position 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .model import CannotRecordError, Frequencies, Recorder

LABEL_STEP = 2**17  # more than the channels of a projection; float32 stores the labels of 127 projections exactly


@dataclass
class Pairs:
    """The rotated pairs of channels of a layer."""

    pairs: list[tuple[int, int]]
    """The two channels of each pair."""
    angles: list[float]
    """The angle of each pair at position 1, in radians."""
    scale: float
    """The length of a rotated one-hot input: the attention factor, times any scale of the query."""
    permuted: bool
    """Whether the outputs have another order than the inputs."""
    axes: list[Any] | None = None
    """The axis of each pair if tokens have several positions; see `axes_of`. Otherwise None."""

    @property
    def distances(self) -> set[int]:
        return {b - a for a, b in self.pairs}


def pairs_of(rotated: Tensor) -> list[tuple[int, int, float, float]]:
    """Return the two channels of each pair, its angle at position 1 in radians, and its scale.

    Args:
        rotated: each channel alone, in a head of its own, at positions 0, 1 and any others, [seq, channels, channels].
    """
    pairs = []
    for i, (start, turned) in enumerate(zip(rotated[0], rotated[1], strict=True)):
        partners = [j for j in turned.nonzero().flatten().tolist() if j != i]
        if len(partners) > 1:
            raise CannotRecordError("a channel rotates with several others")
        if partners and partners[0] > i:
            angle = math.atan2(turned[partners[0]].item(), turned[i].item())
            pairs.append((i, partners[0], angle, start[i].item()))
    return pairs


def labels(number: int, channels: int) -> Tensor:
    """Return two rows for a projection: ones, and the label of each channel, a number that no other channel has."""
    named = torch.arange(channels, dtype=torch.float32) + number * LABEL_STEP
    return torch.stack((torch.ones(channels), named))


def sources(seen: Tensor) -> Tensor:
    """Return, for each channel of a head, the label of the projected channel that it came from.

    Args:
        seen: the queries or keys at position 0 for the inputs `labels`, [2, ..., head_dim].

    Returns:
        [..., head_dim], int64.
    """
    ones, named = seen[0].double(), seen[1].double()
    if (ones == 0).any():
        raise CannotRecordError("a channel of the query comes from no projection")
    return (named / ones).round().long()


def measure(recorder: Recorder, index: int, indexer: bool = False) -> Pairs | None:
    """Measure the pairs of projected channels that one layer rotates. Return None if it rotates nothing."""
    captured = recorder.run(index, 2, labels, indexer=indexer)
    side = "query" if (captured.query[0] != 0).all() else "key"  # queries may come from experts
    seen = getattr(captured, side)[:, :, 0]
    source = sources(seen[:, 0])
    if not (seen[0] == seen[0, :1]).all():
        raise CannotRecordError("it rotates by the index of the head instead of the position of the token")
    channels = sorted(source.tolist())
    if len(set(channels)) != len(channels):
        raise CannotRecordError("two channels of the query come from the same projected channel")
    place = {label: i for i, label in enumerate(channels)}
    order = torch.tensor([place[label] for label in source.tolist()])

    def one_hot(number: int, width: int) -> Tensor:
        rows = torch.zeros(len(channels), width)
        for i, label in enumerate(channels):
            if label // LABEL_STEP == number:
                if label % LABEL_STEP >= width:
                    raise CannotRecordError("a channel of the query is a mean of several projections")
                rows[i, label % LABEL_STEP] = 1
        return rows

    def rotate(positions: Tensor | None = None) -> Tensor:
        """Return the output for each one-hot input at the second token, [input, output]."""
        outputs = getattr(recorder.run(index, len(channels), one_hot, positions, indexer), side)[:, 0]
        by_input = torch.zeros(len(channels), len(channels), dtype=torch.float64)
        by_input[:, order] = outputs[:, 1].double()  # outputs in the order of the inputs
        return by_input

    matrix = rotate()
    off = (matrix - torch.diag(matrix.diag())).abs() > 1e-12
    pairs, angles = [], []
    for a in range(len(channels)):
        partners = off[a].nonzero().flatten().tolist()
        if len(partners) > 1:
            raise CannotRecordError("a channel is mixed with more than one other channel, which no rotation does")
        if partners and partners[0] > a:
            pairs.append((a, partners[0]))
            angles.append(float(torch.atan2(matrix[a, partners[0]], matrix[a, a])))
    permuted = bool((order != torch.arange(len(order))).any())
    if not pairs:
        return None
    axes = None if indexer or not recorder.several_axes else axes_of(pairs, rotate)
    return Pairs(pairs, angles, float(matrix[pairs[0][0]].norm()), permuted, axes)


def axes_of(pairs: list[tuple[int, int]], rotate: Callable[[Tensor], Tensor]) -> list[Any]:
    """Find the axis of each pair, by giving the second token position 1 on one axis at a time.

    Args:
        pairs: the channels of each pair.
        rotate: a function from positions, [axes, 2], to the outputs for one-hot inputs at the second token.

    Returns:
        The axis of each pair, or a list of two axes if its channels have different ones.

    Raises:
        CannotRecordError: the model accepts neither two, three nor four axes, or a channel has no axis or several.
    """
    for count in (2, 3, 4):
        rows = torch.eye(count, dtype=torch.long)
        try:
            matrices = [rotate(torch.stack((torch.zeros_like(row), row), dim=-1)) for row in rows]
        except CannotRecordError:
            continue
        axis_of_channel = {}
        for channel in {channel for pair in pairs for channel in pair}:
            unrotated = torch.zeros(len(matrices[0]), dtype=torch.float64)
            unrotated[channel] = 1
            moved = [a for a, matrix in enumerate(matrices) if ((matrix[:, channel] - unrotated).abs() > 1e-12).any()]
            if len(moved) != 1:
                raise CannotRecordError(f"channel {channel} takes positions of axes {moved}")
            axis_of_channel[channel] = moved[0]
        axes = [[axis_of_channel[a], axis_of_channel[b]] for a, b in pairs]
        return [a if a == b else [a, b] for a, b in axes]
    raise CannotRecordError("it accepts neither two, three nor four positions for each token")


def frequencies_of(recorder: Recorder, measured: Pairs) -> tuple[Frequencies, Tensor]:
    """Find the buffer with the frequencies of a layer. Return it, and the frequencies in the order of the pairs.

    Raises:
        CannotRecordError: no buffer has the angles that were measured at position 1.
    """
    angles = torch.tensor(measured.angles, dtype=torch.float64)
    for buffer in sorted(recorder.frequencies(), key=lambda each: abs(each.attention_factor - measured.scale)):
        nonzero = buffer.inv_freq[buffer.inv_freq != 0].double()
        if len(nonzero) != len(angles):
            continue
        if torch.allclose(nonzero, angles, rtol=1e-4):
            return buffer, buffer.inv_freq
        if torch.allclose(nonzero.sort().values, angles.sort().values, rtol=1e-4):
            # The model assigns its frequencies to the pairs in another order.
            return buffer, buffer.inv_freq.sort().values[angles.argsort().argsort()]
    raise CannotRecordError("no inv_freq of a rotary module has the measured angles")
