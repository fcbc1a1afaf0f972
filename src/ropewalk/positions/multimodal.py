"""Positions of text, images and videos in one sequence: time, row and column of each token (M-RoPE).

Each text token advances all three axes by one. An image or a video is a box: its times, rows and columns are counted
from the position that follows the preceding text. Models differ in where the text after a box continues, in how time is
counted, and in how audio is interleaved with frames. `RULES` describes each family of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.positions.grids import mesh
from ropewalk.positions.segments import Image, Markers, Segment, Text, Video

_WHO = "positions.mrope"
RuleName = Literal["qwen2_vl", "qwen2_5_omni", "qwen3_omni"]


class Placed(NamedTuple):
    """The positions of the tokens of a row or of a batch, and of the tokens to generate.

    Args:
        positions: `[axes, seq]`, or `[axes, batch, seq]` of a batch; int64, or float32 if time is not counted in whole
            positions.
        next: the largest position + 1, `[]`, or `[batch]` of a batch, in the dtype of positions. The first generated
            token is there on every axis, and each further one a position later. `rope_deltas` of transformers is this
            number minus the number of tokens.
    """

    positions: Tensor
    next: Tensor


@dataclass(frozen=True)
class _Rule:
    """The way in which one family of models counts positions."""

    dtype: torch.dtype
    time: Callable[[Tensor, Tensor, float], Tensor]
    """Maps the number of each frame, the seconds per frame (float32) and the positions per second to the time of each
    frame, in positions."""
    moves_by_size: bool
    """Where the text after a box continues. True: at the start of the box plus the larger of its rows and columns,
    regardless of time. False: after the largest position of the box on any axis."""
    interleave: Callable[[Tensor, Tensor, Tensor, int], list[Tensor]] | None = None
    """Interleaves frames and audio. Its arguments are the positions of the frames `[3, tokens]`, the positions of the
    audio `[3, tokens]`, the position at which both start, and the number of positions in a chunk. It returns the
    positions in the order of the tokens, as a list of pieces `[3, tokens]`. None if the family has no audio."""
    chunks: bool = False
    """Whether `interleave` uses the number of positions in a chunk."""


def mrope(
    segments: Sequence[Segment],
    rule: RuleName = "qwen2_vl",
    *,
    per_second: float | None = None,
    seconds_per_chunk: float | None = None,
    device: torch.device | str | None = None,
) -> Placed:
    """Return time, row and column of each token of one row. `padded` combines several rows into a batch.

    Args:
        segments: the contents of the row, in order and without padding: `Text`, `Image`, `Video`, `Markers`.
        rule: "qwen2_vl": for Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4V and others, as in transformers 5. The text
            after a video continues after the rows and columns of the video, even if its last frame has a larger
            time.
            "qwen2_5_omni": the text continues after the largest position of the video. vLLM does so for Qwen2-VL and
            Qwen2.5-VL too.
            "qwen3_omni": as "qwen2_5_omni", but times are not truncated to integers, and audio is ordered by time.
        per_second: positions per second, greater than 0, for videos that state their seconds (`tokens_per_second` or
            `position_id_per_seconds` in a config). None if time counts frames.
        seconds_per_chunk: the seconds in each chunk, for videos with audio under rule "qwen2_5_omni". This rule
            alternates between chunks of frames and chunks of audio.
        device: device of the result; the CPU when None.

    Returns:
        `Placed`: positions `[3, seq]`, int64 (rule "qwen3_omni": float32), and the next position.

    Raises:
        RopeError: segments are not such a list; the rule is unknown; a video has seconds but per_second is None, or has
            none but per_second is passed; a video has audio but the rule does not support it; or seconds_per_chunk is
            missing, or passed to a rule without chunks.

    Precision:
        Times are float32 products, multiplied in the order of the models' code. Another order would round differently,
        which could change the integer to which a time is truncated.

    Source:
        `get_rope_index` of each model in transformers; Wang et al. 2024 (Qwen2-VL), arXiv:2409.12191.

    Examples:
        >>> mrope([Text(2), Image(2, 2), Text(1)]).positions
        tensor([[0, 1, 2, 2, 2, 2, 4],
                [0, 1, 2, 2, 3, 3, 4],
                [0, 1, 2, 3, 2, 3, 4]])
        >>> mrope([Text(2), Image(2, 2), Text(1)]).next
        tensor(5)
    """
    _checks.choice(_WHO, "rule", rule, RULES)
    family = RULES[rule]
    _check_segments(_WHO, segments, (Text, Markers, Image, Video))
    if per_second is not None:
        _checks.number(_WHO, "per_second", per_second, above=0.0)
    chunk = _chunk_length(rule, per_second, seconds_per_chunk)
    with torch.device("cpu"):
        start = torch.zeros((), dtype=family.dtype)
        parts: list[Tensor] = []
        for segment in segments:
            if isinstance(segment, Text):
                parts.append(_consecutive(segment.tokens, start))
                start = start + segment.tokens
            elif isinstance(segment, Markers):
                parts.append(start.expand(3, segment.tokens))
                start = start + 1
            else:
                pieces = _box_positions(segment, start, rule, per_second, chunk)
                parts.extend(pieces)
                by_size = family.moves_by_size
                # Without moves_by_size, text continues after the last piece: the whole box, or the rest of the audio.
                start = start + max(segment.height, segment.width) if by_size else pieces[-1].max() + 1
        return _placed(torch.cat(parts, dim=1), device)


def xdrope(
    segments: Sequence[Text | Image],
    axes: int = 4,
    *,
    images_before: int = 0,
    device: torch.device | str | None = None,
) -> Placed:
    """Return the positions of Hunyuan VL on the axes [sequence, ..., column, row, image].

    Every token is at its index in the row on all axes, with one exception: for the tokens of an image, the last three
    axes hold the column and the row in the image, and the number of the image, all counted from 0.

    Args:
        segments: `Text` and `Image`, in order and without padding. The width of an image includes the token that ends
            each of its rows: a grid of patches (t, h, w) is Image(h // 2, w // 2 + 1).
        axes: at least 3, the number of sections of the rope (`mrope_section`, `xdrope_section`).
        images_before: the number of the first image of the row. transformers continues counting images over the
            rows of a batch. To match transformers, pass the number of images in the preceding rows.
        device: device of the result; the CPU when None.

    Returns:
        `Placed`: positions `[axes, seq]`, int64, and the next position.

    Raises:
        RopeError: segments are not such a list, or a number is out of range.

    Source:
        `get_rope_index` of hunyuan_vl in transformers.

    Examples:
        >>> xdrope([Text(1), Image(2, 2), Text(1)]).positions
        tensor([[0, 1, 2, 3, 4, 5],
                [0, 0, 1, 0, 1, 5],
                [0, 0, 0, 1, 1, 5],
                [0, 0, 0, 0, 0, 5]])
    """
    who = "positions.xdrope"
    _check_segments(who, segments, (Text, Image))
    _checks.integer(who, "axes", axes, at_least=3)
    image = _checks.integer(who, "images_before", images_before, at_least=0)
    with torch.device("cpu"):
        positions = torch.arange(sum(segment.tokens for segment in segments)).repeat(axes, 1)
        first = 0
        for segment in segments:
            if isinstance(segment, Image):
                rows, columns = torch.arange(segment.height), torch.arange(segment.width)
                inside = positions[-3:, first : first + segment.tokens]
                inside.copy_(mesh(torch.tensor([image]), rows, columns)[[2, 1, 0]])
                image += 1
            first += segment.tokens
        return _placed(positions, device)


def _placed(positions: Tensor, device: torch.device | str | None) -> Placed:
    following = positions.max() + 1
    return Placed(positions, following) if device is None else Placed(positions.to(device), following.to(device))


def _check_segments(who: str, segments: object, known: tuple[type, ...]) -> None:
    """Raise unless `segments` is a non-empty list of instances of the classes `known`."""
    names = ", ".join(kind.__name__ for kind in known)
    if not isinstance(segments, Sequence) or not segments:
        fix = "Pass e.g. [positions.Text(3), positions.Image(4, 6)]."
        raise _checks.error(who, f"segments must be a non-empty list of {names}", _checks.describe(segments), fix)
    for segment in segments:
        if not isinstance(segment, known):
            fix = "Pass one row at a time, and combine their positions with positions.padded."
            raise _checks.error(who, f"each segment must be one of {names}", _checks.describe(segment), fix)


def _consecutive(tokens: int, start: Tensor) -> Tensor:
    """Return the positions of consecutive text tokens, `[3, tokens]`."""
    return (torch.arange(tokens) + start).expand(3, -1)


def _box_positions(
    segment: Image | Video, start: Tensor, rule: str, per_second: float | None, chunk: int | None
) -> list[Tensor]:
    """Return the positions of an image or a video in the order of its tokens, as pieces `[3, tokens]`."""
    family = RULES[rule]
    frames = torch.arange(segment.frames if isinstance(segment, Video) else 1)
    if isinstance(segment, Video) and (segment.seconds is None) != (per_second is None):
        must = "per_second must be passed if and only if the video has seconds"
        fix = "Pass the positions per second of the model's config and the seconds of each video, or neither."
        raise _checks.error(_WHO, must, f"per_second {per_second} and {segment}", fix)
    if isinstance(segment, Video) and segment.seconds is not None and per_second is not None:
        last = segment.frames * segment.seconds * per_second
        _checks.number(_WHO, "the time of a video in positions", last, at_most=2.0**31, fix="Check its seconds.")
        frames = family.time(frames, torch.tensor(segment.seconds, dtype=torch.float32), per_second)
    box = mesh(frames.to(family.dtype), torch.arange(segment.height), torch.arange(segment.width)) + start
    if not isinstance(segment, Video) or segment.audio is None:
        return [box]
    if family.interleave is None or (family.chunks and chunk is None):
        must = "for a video with audio, the rule must define the order of frames and audio"
        fix = "Pass rule='qwen2_5_omni' with per_second and seconds_per_chunk, or rule='qwen3_omni'."
        raise _checks.error(_WHO, must, f"rule {rule!r} and {segment}", fix)
    return family.interleave(box, _consecutive(segment.audio, start), start, chunk or 0)


def _chunk_length(rule: str, per_second: float | None, seconds: float | None) -> int | None:
    """Return the number of positions in a chunk, or None if `seconds` is None."""
    if seconds is None:
        return None
    if not RULES[rule].chunks or per_second is None:
        must = "seconds_per_chunk must be None, except for rule 'qwen2_5_omni' with per_second"
        fix = "Omit seconds_per_chunk: the other rules have no chunks."
        raise _checks.error(_WHO, must, f"rule {rule!r} and per_second {per_second}", fix)
    chunk = per_second * _checks.number(_WHO, "seconds_per_chunk", seconds, above=0.0)
    fix = f"A chunk must have at least one position: change seconds_per_chunk, {seconds}."
    return int(_checks.number(_WHO, "per_second · seconds_per_chunk", chunk, at_least=1.0, fix=fix))


def _alternate_chunks(video: Tensor, audio: Tensor, start: Tensor, chunk: int) -> list[Tensor]:
    """Alternate between chunks of frames and chunks of audio; the remaining chunks of the longer input come last."""
    parts = [torch.split(x, _chunk_sizes((x[0] - start).tolist(), chunk), dim=1) for x in (video, audio)]
    return [piece for pair in zip_longest(*parts) for piece in pair if piece is not None]


def _chunk_sizes(times: list[int], chunk: int) -> list[int]:
    """Return the number of tokens in each chunk.

    A token opens the next chunk if its time has reached the start of that chunk. It never skips a chunk. So if a frame
    is longer than a chunk, the first tokens of the next frame can each be alone in a chunk, as in the models' code.
    """
    sizes = [0]
    for time in times:
        if time >= len(sizes) * chunk:
            sizes.append(0)
        sizes[-1] += 1
    return sizes


def _merge_by_time(video: Tensor, audio: Tensor, _start: Tensor, _chunk: int) -> list[Tensor]:
    """Merge frames and audio in order of time, with frames first at equal times.

    The result is two pieces. The second holds the remaining tokens of one input after the other has ended.
    """
    both = torch.cat((video, audio), dim=1)
    _, order = both[0].sort(stable=True)
    of_video = order < video.shape[1]
    rest = int((of_video == of_video[-1]).flip(0).long().cumprod(0).sum())
    merged = both[:, order]
    return [merged[:, :-rest], merged[:, -rest:]]


def _product_first(frame: Tensor, seconds: Tensor, per_second: float) -> Tensor:
    return (frame * (per_second * seconds)).to(torch.int64)


def _seconds_first(frame: Tensor, seconds: Tensor, per_second: float) -> Tensor:
    return (frame * seconds * per_second).to(torch.int64)


def _fractional(frame: Tensor, seconds: Tensor, per_second: float) -> Tensor:
    return frame * seconds * per_second


RULES: dict[str, _Rule] = {
    "qwen2_vl": _Rule(torch.int64, _product_first, moves_by_size=True),
    "qwen2_5_omni": _Rule(torch.int64, _seconds_first, moves_by_size=False, interleave=_alternate_chunks, chunks=True),
    "qwen3_omni": _Rule(torch.float32, _fractional, moves_by_size=False, interleave=_merge_by_time),
}
