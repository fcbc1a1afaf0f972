"""Positions of text, images and videos in one sequence: time, row and column of each token (M-RoPE).

Text moves on by one on all three axes. An image is a box: its corner stands where the text before it ended, and rows
and columns count from there. The models differ in where the text after a box continues, in how time is counted, and in
how sound stands between frames; `RULES` says it for each.
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
    """Where the tokens of a row are, and where generation goes on.

    Args:
        positions: `[axes, seq]`; int64, or float32 where time is not counted in whole positions.
        delta: the largest position + 1 − seq, in positions; an int, and a float where positions are float32. Token n of
            the row (n = seq, seq + 1, … as they are generated) is at n + delta on every axis.
    """

    positions: Tensor
    delta: float


@dataclass(frozen=True)
class _Rule:
    """What one family of models does."""

    dtype: torch.dtype
    time: Callable[[Tensor, Tensor, float], Tensor]
    """The place of each frame in time, of its number, the seconds of a frame (float32) and positions per second."""
    moves_by_size: bool
    """After a box, text goes on at its corner + the larger of rows and columns, whatever its time. Otherwise it goes
    on after the largest position of the box on any axis."""
    weave: Callable[[Tensor, Tensor, Tensor, int], list[Tensor]] | None = None
    """Positions of frames and of sound in the order of their tokens, in pieces; of them, where both start, and
    positions in a chunk."""
    chunks: bool = False
    """Whether `weave` wants to know how long a chunk is."""


def mrope(
    segments: Sequence[Segment],
    rule: RuleName = "qwen2_vl",
    *,
    per_second: float | None = None,
    seconds_per_chunk: float | None = None,
    device: torch.device | str | None = None,
) -> Placed:
    """Time, row and column of each token of one row. `padded` makes a batch of several.

    Args:
        segments: what the row is made of, in order: `Text`, `Image`, `Video`, `Markers`; without padding.
        rule: "qwen2_vl": also Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4V and others, as transformers 5 has them. The text
            after a video goes on after its rows and columns, even where its time is further.
            "qwen2_5_omni": the text goes on after the latest time, as in vLLM for Qwen2-VL and Qwen2.5-VL too.
            "qwen3_omni": the same, and time is not cut off to integers.
        per_second: positions per second, greater than 0, for videos with seconds (`tokens_per_second`,
            `position_id_per_seconds`); None where time counts frames.
        seconds_per_chunk: for videos with audio under rule "qwen2_5_omni": frames and sound take turns, a chunk of as
            many seconds of each.
        device: where the result is copied to; it stays on the CPU when None.

    Returns:
        `Placed`: positions `[3, seq]`, int64 (rule "qwen3_omni": float32), and the delta for generation.

    Raises:
        RopeError: segments are no such list; the rule is unknown; a video has seconds and per_second is None, or the
            other way round; it has audio and the rule has no place for it; or seconds_per_chunk is missing or not
            wanted.

    Precision:
        Times are products in float32 in the order of the models' code, since they are then cut off to integers.

    Source:
        `get_rope_index` of each model in transformers 5.23; Wang et al. 2024 (Qwen2-VL), arXiv:2409.12191.

    Example:
        >>> mrope([Text(2), Image(2, 2), Text(1)]).positions
        tensor([[0, 1, 2, 2, 2, 2, 4],
                [0, 1, 2, 2, 3, 3, 4],
                [0, 1, 2, 3, 2, 3, 4]])
        >>> mrope([Text(2), Image(2, 2), Text(1)]).delta
        -2
    """
    if isinstance(rule, str) and rule in _SERVED:
        must, fix = "rule must be the name of a rule, not of a model", f"Pass {_SERVED[rule]}."
        raise _checks.error(_WHO, must, _checks.shown(rule), fix)
    _checks.choice(_WHO, "rule", rule, RULES)
    ruled = RULES[rule]
    _check_segments(_WHO, segments, (Text, Markers, Image, Video))
    if per_second is not None:
        _checks.number(_WHO, "per_second", per_second, above=0.0)
    chunk = _chunk(rule, per_second, seconds_per_chunk)
    with torch.device("cpu"):
        start = torch.zeros((), dtype=ruled.dtype)
        made: list[Tensor] = []
        for segment in segments:
            if isinstance(segment, Text):
                made.append(_consecutive(segment.tokens, start))
                start = start + segment.tokens
            elif isinstance(segment, Markers):
                made.append(start.expand(3, segment.tokens))
                start = start + 1
            else:
                pieces = _box(segment, start, rule, per_second, chunk)
                made.extend(pieces)
                by_size = ruled.moves_by_size
                # Behind the last piece, which is all of the box unless there is sound in it.
                start = start + max(segment.height, segment.width) if by_size else pieces[-1].max() + 1
        return _placed(torch.cat(made, dim=1), device)


def xdrope(
    segments: Sequence[Text | Image],
    axes: int = 4,
    *,
    images_before: int = 0,
    device: torch.device | str | None = None,
) -> Placed:
    """Positions of Hunyuan VL: [sequence, ..., column, row, image], the last three of an image counted from 0.

    Text is at its number in the row on all axes, and an image takes as many numbers as it has tokens.

    Args:
        segments: `Text` and `Image`, in order, without padding. The width of an image counts the token that ends each
            row of it: a grid of patches (t, h, w) is Image(h // 2, w // 2 + 1).
        axes: at least 3, the number of sections of the rope (`mrope_section`, `xdrope_section`).
        images_before: the number of the first image. It is 0, but transformers 5.23 counts on over the rows of a batch.
        device: where the result is copied to; it stays on the CPU when None.

    Returns:
        `Placed`: positions `[axes, seq]`, int64, and the delta for generation.

    Raises:
        RopeError: segments are no such list, or a number is no such integer.

    Source:
        `get_rope_index` of hunyuan_vl in transformers 5.23.

    Example:
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
        positions = torch.arange(sum(one.tokens for one in segments)).repeat(axes, 1)
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
    delta = positions.max() + 1 - positions.shape[1]
    return Placed(positions if device is None else positions.to(device), delta.item())


def _check_segments(who: str, segments: object, known: tuple[type, ...]) -> None:
    """`segments` is a list of these classes, not empty."""
    names = ", ".join(one.__name__ for one in known)
    if not isinstance(segments, Sequence) or not segments:
        fix = "Pass e.g. [positions.Text(3), positions.Image(4, 6)]."
        raise _checks.error(who, f"segments must be a list of {names}, not empty", _checks.described(segments), fix)
    for one in segments:
        if not isinstance(one, known):
            fix = "Pass one row at a time; positions.padded makes a batch of their positions."
            raise _checks.error(who, f"each segment must be one of {names}", _checks.described(one), fix)


def _consecutive(tokens: int, start: Tensor) -> Tensor:
    """Tokens that follow one another, `[3, tokens]`."""
    return (torch.arange(tokens) + start).expand(3, -1)


def _box(segment: Image | Video, start: Tensor, rule: str, per_second: float | None, chunk: int | None) -> list[Tensor]:
    """Positions of an image or a video, in pieces of `[3, tokens]`."""
    ruled = RULES[rule]
    frames = torch.arange(segment.frames if isinstance(segment, Video) else 1)
    if isinstance(segment, Video) and (segment.seconds is None) != (per_second is None):
        must = "a video must have seconds where per_second is given, and none where it is not"
        fix = "Pass the positions per second of the model's config, and the seconds of each video."
        raise _checks.error(_WHO, must, f"per_second {per_second} and {segment}", fix)
    if isinstance(segment, Video) and segment.seconds is not None and per_second is not None:
        frames = ruled.time(frames, torch.tensor(segment.seconds, dtype=torch.float32), per_second)
    box = mesh(frames.to(ruled.dtype), torch.arange(segment.height), torch.arange(segment.width)) + start
    if not isinstance(segment, Video) or segment.audio is None:
        return [box]
    if ruled.weave is None or (ruled.chunks and chunk is None):
        must = "a video with audio must have a rule that says where its sound stands"
        fix = "Pass rule='qwen2_5_omni' with per_second and seconds_per_chunk, or rule='qwen3_omni'."
        raise _checks.error(_WHO, must, f"rule {rule!r} and {segment}", fix)
    return ruled.weave(box, _consecutive(segment.audio, start), start, chunk or 0)


def _chunk(rule: str, per_second: float | None, seconds: float | None) -> int | None:
    """Positions in a chunk."""
    if seconds is None:
        return None
    if not RULES[rule].chunks or per_second is None:
        must = "seconds_per_chunk belongs to rule 'qwen2_5_omni' with per_second"
        fix = "Leave seconds_per_chunk out: the other rules have no chunks."
        raise _checks.error(_WHO, must, f"rule {rule!r} and per_second {per_second}", fix)
    chunk = int(per_second * _checks.number(_WHO, "seconds_per_chunk", seconds, above=0.0))
    if chunk == 0:
        must = "a chunk must have at least one position"
        raise _checks.error(_WHO, must, f"{per_second} · {seconds}", "Pass longer chunks.")
    return chunk


def _alternate_chunks(video: Tensor, audio: Tensor, start: Tensor, chunk: int) -> list[Tensor]:
    """A chunk of frames, one of sound, and so on; what is left over at the end."""
    parts = [torch.split(one, _chunk_sizes((one[0] - start).tolist(), chunk), dim=1) for one in (video, audio)]
    return [piece for pair in zip_longest(*parts) for piece in pair if piece is not None]


def _chunk_sizes(times: list[int], chunk: int) -> list[int]:
    """Tokens in each chunk. A token opens the next one if it is not before that one's time, and no more than the next:
    where one frame is longer than a chunk, its first tokens stand alone in chunks, as in the models' code."""
    sizes = [0]
    for time in times:
        if time >= len(sizes) * chunk:
            sizes.append(0)
        sizes[-1] += 1
    return sizes


def _merge_by_time(video: Tensor, audio: Tensor, _start: Tensor, _chunk: int) -> list[Tensor]:
    """Each token in order of time, frames first where both are at one time. The last piece is the rest of the one when
    the other has come to its end."""
    both = torch.cat((video, audio), dim=1)
    _, order = both[0].sort(stable=True)
    of_video = order < video.shape[1]
    rest = int((of_video == of_video[-1]).flip(0).long().cumprod(0).sum())
    woven = both[:, order]
    return [woven[:, :-rest], woven[:, -rest:]]


def _product_first(frame: Tensor, seconds: Tensor, per_second: float) -> Tensor:
    return (frame * (per_second * seconds)).to(torch.int64)


def _seconds_first(frame: Tensor, seconds: Tensor, per_second: float) -> Tensor:
    return (frame * seconds * per_second).to(torch.int64)


def _fractional(frame: Tensor, seconds: Tensor, per_second: float) -> Tensor:
    return frame * seconds * per_second


RULES: dict[str, _Rule] = {
    "qwen2_vl": _Rule(torch.int64, _product_first, moves_by_size=True),
    "qwen2_5_omni": _Rule(torch.int64, _seconds_first, moves_by_size=False, weave=_alternate_chunks, chunks=True),
    "qwen3_omni": _Rule(torch.float32, _fractional, moves_by_size=False, weave=_merge_by_time),
}

_AS_QWEN2_VL = (
    "qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe glm4v glm4v_moe glm46v glm_ocr glm_image ernie4_5_vl_moe "
    "paddleocr_vl cohere_compass cosmos3_edge"
)
_SERVED = {
    **dict.fromkeys(_AS_QWEN2_VL.split(), "rule='qwen2_vl', which serves it"),
    "qwen3_omni_moe": "rule='qwen3_omni', which serves it",
    "hunyuan_vl": "its segments to positions.xdrope",
}
"""model_type → what serves it, as docs/positions.md lists them."""
