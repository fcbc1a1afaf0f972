"""Positions of multimodal sequences, compared with a plain loop, and rejected arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopeError
from ropewalk.positions import Image, Markers, Text, Video, mrope, xdrope

few = st.integers(1, 5)
texts, images = st.builds(Text, few), st.builds(Image, few, few)
videos = st.builds(Video, few, few, few)
rows = st.lists(texts | images | videos, min_size=1, max_size=6)


def by_hand(row: list[Any], *, behind_time: bool) -> list[tuple[int, int, int]]:
    """Compute the positions in a loop over tokens."""
    tokens, start = [], 0
    for one in row:
        if isinstance(one, Text):
            tokens += [(start + i,) * 3 for i in range(one.tokens)]
            start += one.tokens
            continue
        frames = one.frames if isinstance(one, Video) else 1
        box = [(t, h, w) for t in range(frames) for h in range(one.height) for w in range(one.width)]
        tokens += [(start + t, start + h, start + w) for t, h, w in box]
        start += max(one.height, one.width, frames if behind_time else 1)
    return tokens


@given(rows, st.sampled_from(["qwen2_vl", "qwen2_5_omni", "qwen3_omni"]))
def test_mrope(row: list[Any], rule: Any) -> None:
    made = mrope(row, rule)
    wanted = by_hand(row, behind_time=rule != "qwen2_vl")
    assert made.positions.dtype == (torch.float32 if rule == "qwen3_omni" else torch.int64)
    assert [tuple(one) for one in made.positions.T.tolist()] == wanted
    assert made.next == max(max(one) for one in wanted) + 1
    assert made.positions.shape[1] == sum(one.tokens for one in row)


def test_device() -> None:
    with torch.device("meta"):
        assert mrope([Text(1), Image(1, 2)]).next == 3
        assert xdrope([Text(1), Image(1, 2)]).positions.device.type == "cpu"
    assert {one.device.type for one in mrope([Text(1)], device="meta")} == {"meta"}
    assert xdrope([Text(1)], device="meta").positions.device.type == "meta"


def test_time_is_truncated_after_the_product() -> None:
    video = [Text(1), Video(4, 1, 1, seconds=0.4)]
    assert mrope(video, per_second=2).positions[0].tolist() == [0, 1, 1, 2, 3]  # 0, 0.8, 1.6, 2.4
    assert mrope(video, "qwen2_5_omni", per_second=2).positions[0].tolist() == [0, 1, 1, 2, 3]
    exact = mrope(video, "qwen3_omni", per_second=2).positions[0]
    assert torch.allclose(exact, torch.tensor([0, 1, 1.8, 2.6, 3.4]), atol=1e-6)
    assert torch.equal(mrope([Image(1, 2)], "qwen2_5_omni", per_second=25).positions[0], torch.tensor([0, 0]))


def test_audio_ordered_by_time() -> None:
    clip = [Text(2), Video(2, 1, 2, seconds=2.0, audio=5), Text(1)]
    made = mrope(clip, "qwen3_omni", per_second=1).positions
    # At equal times, frames are first. The text continues after the remaining audio.
    assert made.tolist() == [
        [0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 2, 2, 4, 5, 6, 7],
        [0, 1, 2, 3, 2, 3, 2, 3, 4, 5, 6, 7],
    ]


def test_audio_in_alternating_chunks() -> None:
    clip = [Markers(2), Video(3, 1, 1, seconds=1.0, audio=2), Markers(2), Text(1)]
    made = mrope(clip, "qwen2_5_omni", per_second=2, seconds_per_chunk=1)
    # frame and audio of second 0, frame of second 1, frame of second 2. Text continues after the last piece
    assert made.positions[0].tolist() == [0, 0, 1, 1, 2, 3, 5, 6, 6, 7]


@pytest.mark.parametrize("rule", ["qwen2_5_omni", "qwen3_omni"])
def test_text_continues_after_the_last_piece(rule: Any) -> None:
    """Text follows the audio, which comes last, although the rows of the preceding frame reach further."""
    clip = [Video(1, 4, 1, seconds=1.0, audio=2), Text(1)]
    chunk = {"seconds_per_chunk": 2} if rule == "qwen2_5_omni" else {}
    made = mrope(clip, rule, per_second=1, **chunk)
    assert made.positions.tolist() == [[0, 0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2], [0, 0, 0, 0, 0, 1, 2]]
    assert made.next == 4


def test_a_frame_longer_than_a_chunk() -> None:
    clip = [Video(2, 2, 2, seconds=10.0, audio=1)]
    made = mrope(clip, "qwen2_5_omni", per_second=1, seconds_per_chunk=1).positions
    # The four tokens of the second frame are at time 10, and each opens a chunk.
    assert made[0].tolist() == [0, 0, 0, 0, 0, 10, 10, 10, 10]
    assert made[1].tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]


@given(st.lists(texts | images, min_size=1, max_size=6), st.integers(3, 5), st.integers(0, 3))
def test_xdrope(row: list[Any], axes: int, before: int) -> None:
    tokens: list[list[int]] = []
    image = before
    for one in row:
        for i in range(one.tokens):
            place = [len(tokens)] * axes
            if isinstance(one, Image):
                place[-3:] = [i % one.width, i // one.width, image]
            tokens.append(place)
        image += isinstance(one, Image)
    made = xdrope(row, axes, images_before=before)
    assert made.positions.T.tolist() == tokens
    assert made.next == max(max(one) for one in tokens) + 1


TIMED = Video(2, 1, 1, seconds=1.0)
SOUND = Video(2, 1, 1, seconds=1.0, audio=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Text(0), "positions.Text: tokens must be an integer of at least 1, got 0"),
        (lambda: Markers(2.0), "positions.Markers: tokens must be an integer of at least 1, got 2.0"),
        (lambda: Image(0, 3), "positions.Image: height must be an integer of at least 1, got 0"),
        (lambda: Image(3, True), "width must be an integer of at least 1, got True"),
        (lambda: Video(1, 2, -3), "positions.Video: width must be an integer of at least 1, got -3"),
        (lambda: Video(1, 2, 3, 0.0), "seconds must be a finite number greater than 0, got 0.0"),
        (lambda: Video(1, 2, 3, 1.0, 0), "audio must be an integer of at least 1, got 0"),
        (
            lambda: mrope([]),
            "positions.mrope: segments must be a non-empty list of Text, Markers, Image, Video, got []",
        ),
        (lambda: mrope(Text(3)), "got Text(tokens=3). Pass e.g."),
        (lambda: mrope([[Text(3)]]), "each segment must be one of Text, Markers, Image, Video, got [Text(tokens=3)]"),
        (lambda: mrope([Text(3)], "qwen"), "rule must be one of 'qwen2_vl', 'qwen2_5_omni', 'qwen3_omni'"),
        (lambda: mrope([Text(3)], per_second=0), "per_second must be a finite number greater than 0, got 0"),
        (lambda: mrope([TIMED]), "per_second must be passed if and only if the video has seconds, got"),
        (lambda: mrope([Video(2, 1, 1)], per_second=2), "got per_second 2 and Video(frames=2, height=1, width=1, sec"),
        (
            lambda: mrope([SOUND], per_second=2),
            "for a video with audio, the rule must define the order of frames and audio",
        ),
        (lambda: mrope([SOUND], "qwen2_5_omni", per_second=2), "Pass rule='qwen2_5_omni' with per_second and seconds_"),
        (
            lambda: mrope([Text(1)], per_second=2, seconds_per_chunk=2),
            "seconds_per_chunk must be None, except for rule 'qwen2_5_omni' with per_second, "
            "got rule 'qwen2_vl' and per_second 2",
        ),
        (lambda: mrope([Text(1)], "qwen2_5_omni", seconds_per_chunk=2), "and per_second None. Omit seconds_per_chunk"),
        (
            lambda: mrope([SOUND], "qwen2_5_omni", per_second=2, seconds_per_chunk=0.1),
            "per_second · seconds_per_chunk must be a finite number of at least 1, got 0.2. A chunk must have at least",
        ),
        (
            lambda: mrope([SOUND], "qwen2_5_omni", per_second=1e200, seconds_per_chunk=1e200),
            "per_second · seconds_per_chunk must be a finite number of at least 1, got inf",
        ),
        (
            lambda: mrope([Video(3, 1, 1, seconds=1e9)], per_second=1.0),
            "the time of a video in positions must be a finite number and at most 2.14748e+09, got 3000000000.0",
        ),
        (
            lambda: mrope([SOUND], "qwen2_5_omni", per_second=2, seconds_per_chunk=-1),
            "seconds_per_chunk must be a finite number greater than 0, got -1",
        ),
        (lambda: xdrope([]), "positions.xdrope: segments must be a non-empty list of Text, Image, got []"),
        (lambda: xdrope([Video(1, 2, 3)]), "each segment must be one of Text, Image, got Video("),
        (lambda: xdrope([Text(1)], 2), "axes must be an integer of at least 3, got 2"),
        (lambda: xdrope([Text(1)], images_before=-1), "images_before must be an integer of at least 0, got -1"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(RopeError) as raised:
        call()
    assert message in str(raised.value)
