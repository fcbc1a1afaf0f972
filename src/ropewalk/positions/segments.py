"""The segments of a multimodal sequence: text, images and videos, counted in tokens of the language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import index

from torch import Tensor

from ropewalk import _checks

_KINDS = {1: "image", 2: "video"}


@dataclass(frozen=True)
class Text:
    """Consecutive tokens: text, markers such as <|vision_start|>, or audio without a video.

    Args:
        tokens: number of tokens, at least 1.

    Raises:
        RopeError: tokens is not an integer of at least 1.
    """

    tokens: int

    def __post_init__(self) -> None:
        _checks.length("positions.Text", "tokens", self.tokens)


@dataclass(frozen=True)
class Markers:
    """Tokens that share one position: the begin markers, or the end markers, of a video with audio in Qwen2.5-Omni.

    Args:
        tokens: number of tokens, at least 1.

    Raises:
        RopeError: tokens is not an integer of at least 1.
    """

    tokens: int

    def __post_init__(self) -> None:
        _checks.length("positions.Markers", "tokens", self.tokens)


@dataclass(frozen=True)
class Image:
    """An image, or one frame of a video whose frames have text between them (Qwen3-VL, GLM-4.1V).

    Args:
        height, width: tokens in a column and in a row, at least 1, after the vision tower has merged patches. If the
            tower merges 2 × 2 patches, a grid (t, h, w) of transformers is Image(h // 2, w // 2).

    Raises:
        RopeError: a size is not an integer of at least 1.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        _checks.length("positions.Image", "height", self.height)
        _checks.length("positions.Image", "width", self.width)

    @property
    def tokens(self) -> int:
        """The number of tokens, which are in row-major order."""
        return self.height * self.width


@dataclass(frozen=True)
class Video:
    """A video whose frames have no text between them.

    Args:
        frames: number of frames after the vision tower has merged them, at least 1.
        height, width: tokens in a column and in a row of a frame, counted as for an `Image`.
        seconds: time between consecutive frames, in seconds, greater than 0 (`second_per_grid_ts`); None if the model
            does not use the time.
        audio: number of audio tokens that are interleaved with those of the frames, at least 1; None without audio.

    Raises:
        RopeError: a size is not an integer of at least 1, or seconds is not greater than 0.
    """

    frames: int
    height: int
    width: int
    seconds: float | None = None
    audio: int | None = None

    def __post_init__(self) -> None:
        for name in ("frames", "height", "width"):
            _checks.length("positions.Video", name, getattr(self, name))
        if self.seconds is not None:
            _checks.number("positions.Video", "seconds", self.seconds, above=0.0)
        if self.audio is not None:
            _checks.length("positions.Video", "audio", self.audio)

    @property
    def tokens(self) -> int:
        """The number of tokens of all frames and of the audio."""
        return self.frames * self.height * self.width + (self.audio or 0)


Segment = Text | Markers | Image | Video


def segments_of(
    token_types: Tensor | Sequence[int], images: Sequence[Image] = (), videos: Sequence[Video | Image] = ()
) -> list[Segment]:
    """Split a row into segments, given the type of each token.

    Args:
        token_types: 0 for text, 1 for image, 2 for video, for each token of one row without padding; int or bool,
            `[seq]` (`mm_token_type_ids` of transformers). A tensor is read back to the host.
        images, videos: the images and videos of the row, in order. If the frames of a video are separated by text, pass
            one `Image` per frame in videos.

    Returns:
        A list of segments for `mrope` or `xdrope`.

    Raises:
        RopeError: token_types has a wrong type, shape or value, or the numbers of image and video tokens do not match
            images and videos.

    Examples:
        >>> segments_of([0, 0, 1, 1, 0], images=[Image(1, 2)])
        [Text(tokens=2), Image(height=1, width=2), Text(tokens=1)]
    """
    who = "positions.segments_of"
    try:
        kinds = [index(kind) for kind in (token_types.tolist() if isinstance(token_types, Tensor) else token_types)]
    except TypeError as e:
        fix = "Pass one row at a time, without its padding: mm_token_type_ids[0][attention_mask[0].bool()]."
        must = "token_types must be bool or integer [seq]"
        raise _checks.error(who, must, _checks.describe(token_types), fix) from e
    remaining: dict[str, list[Segment]] = {"image": list(images), "video": list(videos)}
    segments: list[Segment] = []
    for kind, run in groupby(kinds):
        tokens = len(list(run))
        if kind == 0:
            segments.append(Text(tokens))
            continue
        if kind not in _KINDS:
            raise _checks.error(who, "token_types must be 0, 1 or 2", _checks.shown(kind), "Pass audio as 0, as text.")
        while tokens > 0 and remaining[_KINDS[kind]]:
            segments.append(remaining[_KINDS[kind]].pop(0))
            tokens -= segments[-1].tokens
        if tokens:
            must = f"the number of {_KINDS[kind]} tokens must be that of {_KINDS[kind]}s"
            got = f"{tokens} more" if tokens > 0 else f"{-tokens} fewer"
            raise _checks.error(who, must, got, "Pass sizes after the vision tower has merged patches.")
    for name, unused in remaining.items():
        if unused:
            must = f"each of {name}s must have tokens in the row"
            raise _checks.error(who, must, f"{len(unused)} without tokens", f"Pass only the {name}s of this row.")
    return segments
