"""What a multimodal sequence is made of: text, images and videos, in tokens of the language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ropewalk import _checks

_KINDS = {1: "image", 2: "video"}


@dataclass(frozen=True)
class Text:
    """Tokens that follow one another: text, markers such as <|vision_start|>, audio by itself.

    Args:
        tokens: how many, at least 1.

    Raises:
        RopeError: tokens is no such integer.
    """

    tokens: int

    def __post_init__(self) -> None:
        _checks.length("positions.Text", "tokens", self.tokens)


@dataclass(frozen=True)
class Markers:
    """Tokens that share one position: the begin markers, or the end markers, of a video with audio in Qwen2.5-Omni.

    Args:
        tokens: how many, at least 1.

    Raises:
        RopeError: tokens is no such integer.
    """

    tokens: int

    def __post_init__(self) -> None:
        _checks.length("positions.Markers", "tokens", self.tokens)


@dataclass(frozen=True)
class Image:
    """An image, or one frame of a video whose frames have text between them (Qwen3-VL, GLM-4.1V).

    Args:
        height, width: its tokens in a column and in a row, at least 1: after the merge of the vision tower, so that a
            grid of patches (t, h, w) of transformers is Image(h // 2, w // 2) where the tower merges 2 × 2 patches.

    Raises:
        RopeError: a size is no such integer.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        _checks.length("positions.Image", "height", self.height)
        _checks.length("positions.Image", "width", self.width)

    @property
    def tokens(self) -> int:
        """All of them, row after row."""
        return self.height * self.width


@dataclass(frozen=True)
class Video:
    """A video whose frames follow one another without text between them.

    Args:
        frames: frames in time after the merge of the vision tower, at least 1.
        height, width: tokens of a frame in a column and in a row, as of an `Image`.
        seconds: time from one of these frames to the next, in seconds, greater than 0 (`second_per_grid_ts`); None
            where the model does not know the time.
        audio: tokens of its sound that stand between those of its frames, at least 1; None where there are none.

    Raises:
        RopeError: a size is no such integer, or seconds is no such number.
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
        """All of them, frame after frame, and those of the sound."""
        return self.frames * self.height * self.width + (self.audio or 0)


Segment = Text | Markers | Image | Video


def segments_of(
    token_types: Tensor | Sequence[int], images: Sequence[Image] = (), videos: Sequence[Video | Image] = ()
) -> list[Segment]:
    """The segments of a row of which each token is marked as text, image or video.

    Args:
        token_types: of the real tokens of one row, without padding: 0 for text, 1 for image, 2 for video; int or bool,
            `[seq]` (`mm_token_type_ids` of transformers). A tensor is read back to the host.
        images, videos: the segments that the marked tokens belong to, in their order; an `Image` for each frame where
            the frames of a video stand by themselves.

    Returns:
        A list for `mrope` or `xdrope`.

    Raises:
        RopeError: token_types is no such tensor, or the marked tokens are not those of images and videos.

    Example:
        >>> segments_of([0, 0, 1, 1, 0], images=[Image(1, 2)])
        [Text(tokens=2), Image(height=1, width=2), Text(tokens=1)]
    """
    who = "positions.segments_of"
    if isinstance(token_types, Tensor):
        if token_types.ndim != 1 or token_types.is_floating_point() or token_types.is_complex():
            fix = "Pass one row at a time, without its padding: mm_token_type_ids[0][attention_mask[0].bool()]."
            must = "token_types must be bool or integer [seq]"
            raise _checks.error(who, must, _checks.described(token_types), fix)
        token_types = token_types.to(torch.int64).tolist()
    waiting: dict[str, list[Segment]] = {"image": list(images), "video": list(videos)}
    made: list[Segment] = []
    for kind, run in groupby(token_types):
        tokens = len(list(run))
        if kind == 0:
            made.append(Text(tokens))
            continue
        if kind not in _KINDS:
            raise _checks.error(who, "token_types must be 0, 1 or 2", _checks.shown(kind), "Pass audio as 0, as text.")
        while tokens > 0 and waiting[_KINDS[kind]]:
            made.append(waiting[_KINDS[kind]].pop(0))
            tokens -= made[-1].tokens
        if tokens:
            must = f"the tokens marked as {_KINDS[kind]} must be those of {_KINDS[kind]}s"
            came = f"{tokens} more" if tokens > 0 else f"{-tokens} fewer"
            raise _checks.error(who, must, came, "Are sizes those after the merge of the vision tower?")
    for kind, left in waiting.items():
        if left:
            must = f"each of {kind}s must have its tokens in the row"
            raise _checks.error(who, must, f"{len(left)} without", f"Pass the {kind}s of this row only.")
    return made
