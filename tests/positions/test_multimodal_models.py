"""Positions of multimodal sequences, compared with the functions of transformers for each model."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.positions import Image, Markers, Placed, Text, Video, mrope, padded, segments_of, xdrope

pytest.importorskip("transformers", "5.23")
TEXT, IMAGE, VIDEO, AUDIO = 10, 1, 2, 3
VISION_START, VISION_END, AUDIO_START, AUDIO_END = 11, 12, 13, 14


def model_of(name: str, **config: Any) -> Any:
    """Return an object with the methods and the config that `get_rope_index` of a model needs."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    owner = next(
        value for value in vars(module).values() if isinstance(value, type) and "get_rope_index" in vars(value)
    )
    model = SimpleNamespace(config=SimpleNamespace(**config), spatial_merge_size=config.get("spatial_merge_size"))
    for method in ("get_vision_position_ids", "get_llm_pos_ids_for_vision", "get_chunked_index", "get_rope_index"):
        if method in vars(owner):
            setattr(model, method, functools.partial(getattr(owner, method), model))
    return model


@dataclass
class Row:
    """A row in the form of transformers, and in the form of ropewalk."""

    ids: list[int] = field(default_factory=list)
    images: list[list[int]] = field(default_factory=list)
    videos: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    audios: list[int] = field(default_factory=list)
    segments: list[Any] = field(default_factory=list)
    joined: bool = True
    """Whether texts behind one another are one segment. It makes a difference in the last bit where positions are no
    integers, and then there are as many sums as in the code of transformers."""

    def text(self, ids: list[int]) -> None:
        self.ids += ids
        if self.joined and self.segments and isinstance(self.segments[-1], Text):
            self.segments[-1] = Text(self.segments[-1].tokens + len(ids))
        else:
            self.segments.append(Text(len(ids)))


def batch(rows: list[Row], side: str) -> tuple[Tensor, Tensor]:
    """Return padded ids, and the mask of real tokens."""
    longest = max(len(row.ids) for row in rows) + 1
    empty = [[0] * (longest - len(row.ids)) for row in rows]
    ids = [gap + row.ids if side == "left" else row.ids + gap for row, gap in zip(rows, empty, strict=True)]
    ids_of = torch.tensor(ids)
    return ids_of, (ids_of != 0).long()


def grids(rows: list[Row], name: str) -> Tensor | None:
    every = [grid for row in rows for grid in getattr(row, name)]
    return torch.tensor(every) if every else None


def check(rows: list[Row], placed: list[Placed], theirs: tuple[Tensor, Tensor], side: Any, mask: Tensor) -> None:
    positions, deltas = theirs
    ours = padded([one.positions for one in placed], side, length=mask.shape[1])
    real = mask.bool()
    assert torch.equal(ours[:, real].to(positions.dtype), positions[:, real]), rows
    assert not ours[:, ~real].any()
    # Qwen Omni puts padding at position 1, which counts if a batch has only text.
    longer = real.sum(dim=1) > 1
    if positions[:, ~real].any() and not longer.all():
        placed, deltas = [one for one, many in zip(placed, longer, strict=True) if many], deltas[longer]
    assert [one.delta for one in placed] == deltas.flatten().tolist(), rows


def sizes(rng: random.Random) -> tuple[int, int]:
    return rng.randint(1, 7), rng.randint(1, 7)


# Models with separate images and videos between texts. They differ in how they count time.
def by_token_type(name: str, rng: random.Random, *, count: int) -> None:
    merge, tokens_per_second = rng.choice([1, 2, 3]), rng.choice([1, 2, 4, 25])
    frame_wise = name not in ("qwen2_vl", "qwen2_5_vl", "ernie4_5_vl_moe", "paddleocr_vl")
    timed = name == "qwen2_5_vl"
    time_merge = 2 if name.startswith("ernie") else 1
    vision = SimpleNamespace(
        spatial_merge_size=merge, temporal_merge_size=time_merge, tokens_per_second=tokens_per_second
    )
    model = model_of(name, vision_config=vision)
    rows = []
    for _ in range(count):
        row = Row()
        for number in range(rng.randint(1, 5)):
            if number or rng.random() < 0.8:
                row.text([TEXT] * rng.randint(1, 12))
            (h, w), t = sizes(rng), rng.randint(1, 9) * time_merge
            kind = rng.choice(["text", "image", "video"])
            if kind == "image":
                row.images.append([1, h * merge, w * merge])
                row.segments.append(Image(h, w))
                row.ids += [IMAGE] * (h * w)
            elif kind == "video":
                row.videos.append([t, h * merge, w * merge])
                row.seconds.append(rng.choice([1.0, 0.5, 2.0, 0.08, 1 / 3, rng.uniform(0.01, 3)]))
                frames = [Image(h, w)] * t if frame_wise else [Video(t // time_merge, h, w, None)]
                for i, frame in enumerate(frames):
                    if i:
                        row.text([TEXT] * rng.randint(1, 4))
                    segment = frame if not timed else Video(t, h, w, row.seconds[-1])
                    row.segments.append(segment)
                    row.ids += [VIDEO] * segment.tokens
        if not row.ids:
            row.text([TEXT])
        rows.append(row)
    side = rng.choice(["left", "right"])
    ids, mask = batch(rows, side)
    types = torch.where(ids == IMAGE, 1, torch.where(ids == VIDEO, 2, 0))
    more = {"second_per_grid_ts": torch.tensor([s for row in rows for s in row.seconds])} if timed else {}
    theirs = model.get_rope_index(ids, types, grids(rows, "images"), grids(rows, "videos"), attention_mask=mask, **more)
    per_second = tokens_per_second if timed else None
    placed = [mrope(row.segments, per_second=per_second) for row in rows]
    check(rows, placed, theirs, side, mask)
    for row, kinds, real in zip(rows, types, mask.bool(), strict=True):
        seen = [one for one in row.segments if isinstance(one, Video | Image)]
        images = [one for one, kind in zip(seen, kinds_of(row), strict=True) if kind == IMAGE]
        videos = [one for one, kind in zip(seen, kinds_of(row), strict=True) if kind == VIDEO]
        assert segments_of(kinds[real], images, videos) == row.segments


def kinds_of(row: Row) -> list[int]:
    """Return the kind of each segment that is not text."""
    first, kinds = 0, []
    for one in row.segments:
        if not isinstance(one, Text):
            kinds.append(row.ids[first])
        first += one.tokens
    return kinds


def omni(name: str, rng: random.Random, *, count: int) -> None:
    merge, per_second, chunk = rng.choice([1, 2]), rng.choice([13, 25]), rng.choice([1, 2])
    whole = name == "qwen2_5_omni"
    model = model_of(
        name,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        vision_start_token_id=VISION_START,
        audio_start_token_id=AUDIO_START,
        position_id_per_seconds=per_second,
        seconds_per_chunk=chunk,
        audio_config=SimpleNamespace(n_window=50),
        spatial_merge_size=merge,
    )
    in_video = rng.random() < 0.6
    rows = []
    for _ in range(count):
        row = Row(joined=whole)
        for _ in range(rng.randint(1, 5)):
            if rng.random() < 0.8:
                row.text([TEXT] * rng.randint(1, 12))
            (h, w), t = sizes(rng), rng.randint(1, 9)
            seconds = rng.choice([1.0, 0.5, 2.0, 0.08, 1 / 3, 5.0, rng.uniform(0.01, 6)])
            kind = rng.choice(["text", "image", "video", "audio"])
            if kind == "image":
                row.images.append([1, h * merge, w * merge])
                row.text([VISION_START])
                row.segments.append(Image(h, w))
                row.ids += [IMAGE] * (h * w)
                row.text([VISION_END])
            elif kind == "audio":
                row.audios.append(rng.randint(1, 90))
                row.text([AUDIO_START] + [AUDIO] * row.audios[-1] + [AUDIO_END])
            elif kind == "video":
                row.videos.append([t, h * merge, w * merge])
                row.seconds.append(seconds)
                if in_video:
                    row.audios.append(rng.choice([rng.randint(1, 6), rng.randint(1, 250)]))
                    if whole:
                        row.ids += [VISION_START, AUDIO_START]
                        row.segments.append(Markers(2))
                    else:
                        row.text([VISION_START, AUDIO_START])
                    row.segments.append(Video(t, h, w, seconds, row.audios[-1]))
                    row.ids += [VIDEO] * (t * h * w) + [AUDIO] * row.audios[-1]
                    if whole:
                        row.ids += [AUDIO_END, VISION_END]
                        row.segments.append(Markers(2))
                    else:
                        row.text([AUDIO_END, VISION_END])
                else:
                    row.text([VISION_START])
                    row.segments.append(Video(t, h, w, seconds))
                    row.ids += [VIDEO] * (t * h * w)
                    row.text([VISION_END])
        if not row.ids:
            row.text([TEXT])
        rows.append(row)
    side = rng.choice(["left", "right"])
    ids, mask = batch(rows, side)
    of = (lambda n: 4 * n) if whole else (lambda n: 100 * (n // 13) + 8 * (n % 13))
    theirs = model.get_rope_index(
        ids,
        grids(rows, "images"),
        grids(rows, "videos"),
        mask,
        in_video,
        torch.tensor([of(n) for row in rows for n in row.audios]),
        torch.tensor([s for row in rows for s in row.seconds]),
    )
    if whole:
        placed = [mrope(row.segments, "qwen2_5_omni", per_second=per_second, seconds_per_chunk=chunk) for row in rows]
    else:
        placed = [mrope(row.segments, "qwen3_omni", per_second=per_second) for row in rows]
        assert all(one.positions.dtype == torch.float32 for one in placed)
    check(rows, placed, theirs, side, mask)


def hunyuan(name: str, rng: random.Random, *, count: int) -> None:
    merge, axes = rng.choice([1, 2]), rng.choice([3, 4])
    text = SimpleNamespace(rope_parameters={"mrope_section": [16] * axes})
    model = model_of(name, text_config=text, vision_config=SimpleNamespace(spatial_merge_size=merge))
    rows = []
    for _ in range(count):
        row = Row()
        for number in range(rng.randint(1, 5)):
            if number or rng.random() < 0.8:
                row.text([TEXT] * rng.randint(1, 12))
            if rng.random() < 0.6:
                h, w = sizes(rng)
                marked = rng.random() < 0.5  # the begin and end markers may count as tokens of the image
                row.images.append([1, h * merge, w * merge])
                if marked:
                    row.text([IMAGE])
                row.segments.append(Image(h, w + 1))
                row.ids += [IMAGE] * (h * (w + 1))
                if marked:
                    row.text([IMAGE])
        if not row.ids:
            row.text([TEXT])
        rows.append(row)
    side = rng.choice(["left", "right"])
    ids, mask = batch(rows, side)
    theirs = model.get_rope_index(ids, (ids == IMAGE).int(), grids(rows, "images"), attention_mask=mask)
    before = [sum(len(one.images) for one in rows[:i]) for i in range(len(rows))]
    placed = [xdrope(row.segments, axes, images_before=n) for row, n in zip(rows, before, strict=True)]
    check(rows, placed, theirs, side, mask)


def glm_image(name: str, rng: random.Random, *, count: int) -> None:
    """Images of the prompt and, in a separate row, the images to be generated, in reverse order."""
    model = model_of(name, image_start_token_id=VISION_START, image_end_token_id=VISION_END)
    rows, wanted = [], []
    for _ in range(count):
        row = Row()
        for _ in range(rng.randint(0, 3)):
            row.text([TEXT] * rng.randint(0, 9) + [VISION_START])
            row.images.append([1, *sizes(rng)])
            row.segments.append(Image(*row.images[-1][1:]))
            row.ids += [IMAGE] * row.segments[-1].tokens
            row.text([VISION_END])
        row.text([TEXT] * rng.randint(1, 9))
        rows.append(row)
        wanted.append([[1, *sizes(rng)] for _ in range(rng.randint(1, 2))])
    side = rng.choice(["left", "right"])
    ids, mask = batch(rows, side)
    every = [torch.tensor(row.images + more) for row, more in zip(rows, wanted, strict=True)]
    counts = torch.tensor([len(one) for one in every])
    positions, _ = model.get_rope_index(ids, torch.cat(every), counts, mask)
    ours = padded([mrope(row.segments).positions for row in rows], side, length=ids.shape[1])
    assert torch.equal(ours[:, mask.bool()], positions[:, mask.bool()])
    for row, more, theirs in zip(rows, wanted, model._cached_decode_position_ids, strict=True):
        made = mrope([*row.segments, *(Image(*size[1:]) for size in reversed(more)), Text(1)]).positions
        new = made[:, len(row.ids) :]
        assert torch.equal(new, theirs[:, : new.shape[1]])


# One model of each kind. The others have the same function and are tested with fewer cases.
FAMILIES: dict[str, Callable[..., None]] = {
    "qwen2_vl": by_token_type,
    "qwen2_5_vl": by_token_type,
    "qwen3_vl": by_token_type,
    "glm4v": by_token_type,
    "ernie4_5_vl_moe": by_token_type,
    "qwen2_5_omni": omni,
    "qwen3_omni_moe": omni,
    "hunyuan_vl": hunyuan,
    "glm_image": glm_image,
}
ALIKE = (
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
    "glm46v",
    "glm4v_moe",
    "glm_ocr",
    "paddleocr_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl_moe",
    "qwen4_exp",
)


@pytest.mark.parametrize("name", [*FAMILIES, *ALIKE])
def test_model(name: str) -> None:
    for seed in range(25):
        FAMILIES.get(name, by_token_type)(name, random.Random(seed), count=1 + seed % 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_hundreds_of_mixtures(name: str) -> None:
    for seed in range(300):
        FAMILIES[name](name, random.Random(1000 + seed), count=1 + seed % 3)
