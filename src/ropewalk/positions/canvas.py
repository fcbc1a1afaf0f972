"""Positions of images that are cut into slices, on a canvas that they share: MiniCPM-V 4.7.

An image or a frame of a video is a thumbnail and, if it is large, slices that show its parts at a higher resolution.
The slices lie side by side on a canvas, and the thumbnail is stretched over the whole of it. All tokens of the frame
have one time. Special tokens mark the edges: `<image>` lies in front of the canvas and `</image>` behind it, `<slice>`
and `</slice>` are at the first and last token of a slice, and a newline lies to the right of a row of slices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.positions.segments import Image


class Crop(NamedTuple):
    """A thumbnail or a slice: its size, and the indices of its first token and of the token after its last one."""

    size: Image
    begin: int
    end: int


def canvas(
    who: str,
    ids: list[int],
    types: list[int],
    sizes: Mapping[int, Iterator[Image]],
    opens_slice: int,
    markers: Collection[int],
) -> Tensor:
    """Return time, row and column of each token of one row, int64 `[3, tokens]`.

    Args:
        who: what errors name.
        ids, types: id of each token, and its type: 0 is text, and each run of another type is a thumbnail or a slice.
        sizes: sizes of the thumbnails and slices of each type, in the order of the tokens.
        opens_slice: id of the token before a slice.
        markers: ids of all special tokens at the edges. Those after a frame belong to it.

    Raises:
        RopeError: a size is not that of its tokens, or nothing precedes a thumbnail.
    """
    frames = _frames(who, ids, types, sizes, opens_slice)
    positions, done, following = torch.empty(3, len(ids), dtype=torch.int64), 0, 0
    for crops in frames:
        begin, end = crops[0].begin - 1, crops[-1].end
        while end < len(ids) and ids[end] in markers:
            end += 1
        if begin > done:
            positions[:, done:begin] = torch.arange(begin - done) + following
            following += begin - done
        height, width = _place(positions[:, begin:end], following, [_moved(crop, -begin) for crop in crops])
        done, following = end, following + max(height, width) + 1
    positions[:, done:] = torch.arange(len(ids) - done) + following
    return positions


def _moved(crop: Crop, by: int) -> Crop:
    return Crop(crop.size, crop.begin + by, crop.end + by)


def _frames(
    who: str, ids: list[int], types: list[int], sizes: Mapping[int, Iterator[Image]], opens_slice: int
) -> list[list[Crop]]:
    """Return the crops of each frame: the thumbnail, and its slices."""
    frames: list[list[Crop]] = []
    index = 0
    for kind, run in groupby(types):
        begin, index = index, index + len(list(run))
        if kind == 0:
            continue
        size = next(sizes[kind], None)
        if size is None or size.tokens != index - begin or begin == 0:
            must = "each run of tokens of an image or video must follow a marker and have the size of the next crop"
            got = f"{index - begin} tokens from {begin} on, and {'no size' if size is None else size}"
            raise _checks.error(
                who, must, got, "Pass the output of the processor, and the config that it was made for."
            )
        crop = Crop(size, begin, index)
        if frames and ids[begin - 1] == opens_slice:
            frames[-1].append(crop)
        else:
            frames.append([crop])
    return frames


def _place(positions: Tensor, origin: int, crops: list[Crop]) -> tuple[int, int]:
    """Write the positions of a frame, and return the rows and columns of its canvas.

    Args:
        positions: the result, `[3, tokens]` from the token before the thumbnail on.
        origin: time of the frame, and position of the first row and column of the canvas.
        crops: the thumbnail and its slices.
    """
    thumbnail, *slices = crops
    gaps = [after.begin - before.end for before, after in pairwise(slices)]
    ends = [k for k, gap in enumerate(gaps, 1) if gap > 2]  # a newline between the two markers ends a row of slices
    columns = ends[0] if ends else len(slices)
    if slices and len(slices) % columns:
        columns = len(slices)
    of_slice = slices[0].size if slices else thumbnail.size
    height = of_slice.height * (len(slices) // columns if slices else 1)
    width = of_slice.width * (columns if slices else 1)
    place = positions.fill_(origin)[1:]  # row and column
    place[:, 0] = max(origin - 1, 0)
    _mark(place, thumbnail.end, origin + height, origin + width)
    stretched = (
        torch.linspace(0, canvas - 1, tokens, dtype=torch.float32).round().long() + origin
        for canvas, tokens in ((height, thumbnail.size.height), (width, thumbnail.size.width))
    )
    _fill(place, thumbnail, *stretched)
    for k, one in enumerate(slices):
        row, column = k // columns * of_slice.height + origin, k % columns * of_slice.width + origin
        _mark(place, one.begin - 1, row, column)
        _mark(place, one.end, row + one.size.height - 1, column + one.size.width - 1)
        _fill(place, one, torch.arange(one.size.height) + row, torch.arange(one.size.width) + column)
    for k in ends:
        row = ((k - 1) // columns + 1) * of_slice.height - 1
        for newline in range(slices[k - 1].end + 1, slices[k].begin - 1):
            _mark(place, newline, origin + row, origin + width)
    return height, width


def _mark(place: Tensor, index: int, row: int, column: int) -> None:
    """Place one token, unless it is behind the frame."""
    if index < place.shape[1]:
        place[0, index], place[1, index] = row, column


def _fill(place: Tensor, crop: Crop, rows: Tensor, columns: Tensor) -> None:
    """Place the tokens of a crop, in row-major order."""
    inside = place[:, crop.begin : crop.end].view(2, len(rows), len(columns))
    inside[0], inside[1] = rows[:, None], columns
