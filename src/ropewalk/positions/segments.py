"""The segments of a multimodal sequence: text, images and videos, counted in tokens of the language model."""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk import _checks


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
