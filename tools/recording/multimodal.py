"""positions/multimodal.json: positions that `get_rope_index` of transformers gives to random multimodal batches."""

from __future__ import annotations

import functools
import importlib
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import files

TEXT, PAD, IMAGE, VIDEO, AUDIO = 10, 0, 1, 2, 3
VISION_START, VISION_END, AUDIO_START, AUDIO_END, VIDEO_START, VIDEO_END = 11, 12, 13, 14, 15, 16
SLICE_START, SLICE_END, NEWLINE = 17, 18, 19
GLM = ("glm4v", "glm46v", "glm4v_moe", "glm_ocr")
TIMESTAMPS = (*GLM, "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "cohere_compass", "cosmos3_edge",
              "cosmos3_omni")  # fmt: skip
WHOLE = ("qwen2_vl", "qwen2_5_vl", "ernie4_5_vl_moe", "paddleocr_vl")
OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
CANVAS = "minicpmv4_7"
MODELS = (*WHOLE, *TIMESTAMPS, *OMNI, "hunyuan_vl", "hy_v4_vl", "glm_image", CANVAS)


@dataclass
class Row:
    """A row of a batch, in the form of transformers."""

    ids: list[int] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    images: list[list[int]] = field(default_factory=list)
    videos: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    audios: list[int] = field(default_factory=list)

    def add(self, *runs: tuple[int, int], kind: int = 0) -> None:
        """Add runs of (id, number) tokens."""
        for token, number in runs:
            self.ids += [token] * number
            self.types += [kind] * number


def config_of(model: str, draw: random.Random) -> dict[str, Any]:
    """Return the keys of a config that decide the positions."""
    vision: dict[str, Any] = {"spatial_merge_size": draw.choice([1, 2, 3])}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    config: dict[str, Any] = {"model_type": model, "vision_config": vision, **tokens}
    if model == "qwen2_5_vl":
        vision["tokens_per_second"] = draw.choice([1, 2, 4, 25])
    elif model == "ernie4_5_vl_moe":
        vision["temporal_merge_size"] = 2
    elif model in GLM:
        config |= {"video_start_token_id": VIDEO_START, "video_end_token_id": VIDEO_END}
    elif model == "hunyuan_vl":
        config["text_config"] = {"rope_parameters": {"mrope_section": [16] * draw.choice([3, 4])}}
    elif model == "glm_image":
        vision["spatial_merge_size"] = 1
        config |= {"image_start_token_id": VISION_START, "image_end_token_id": VISION_END}
    elif model == CANVAS:
        del config["vision_config"]
        config |= {"downsample_mode": draw.choice(["4x", "16x"]), "newline_id": NEWLINE}
        config |= {"image_start_id": VISION_START, "image_end_id": VISION_END}
        config |= {"slice_start_id": SLICE_START, "slice_end_id": SLICE_END}
    elif model in OMNI:
        config |= {"model_type": f"{model}_thinker", "audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START}
        config |= {"vision_start_token_id": VISION_START, "audio_config": {"n_window": 50}}
        config |= {"position_id_per_seconds": draw.choice([13, 25]), "seconds_per_chunk": draw.choice([1, 2])}
        config = {"model_type": model, "thinker_config": config}
    return config


def add_media(row: Row, model: str, config: dict[str, Any], draw: random.Random, *, sound: bool) -> None:
    """Add an image, a video or audio, as the processor of the model does."""
    merge = config["vision_config"]["spatial_merge_size"]
    (h, w), t = (draw.randint(1, 5) for _ in range(2)), draw.randint(1, 5)
    kind = draw.choice(["image", "video", "audio"] if model in OMNI else ["image", "video"])
    if kind == "audio":
        row.audios.append(draw.randint(1, 40))
        row.add((AUDIO_START, 1))
        row.add((AUDIO, row.audios[-1]), kind=AUDIO)
        row.add((AUDIO_END, 1))
    elif kind == "image" or model in ("hunyuan_vl", "glm_image"):
        row.images.append([1, h * merge, w * merge])
        marked = 2 * draw.randint(0, 1)  # Hunyuan VL may mark the tokens around an image as tokens of it
        row.add((VISION_START, 1))
        columns = w + (model in ("hunyuan_vl", "hy_v4_vl"))  # a token ends each row
        row.add((IMAGE, h * columns + (marked if model == "hunyuan_vl" else 0)), kind=1)
        row.add((VISION_END, 1))
    else:
        row.videos.append([t * config["vision_config"].get("temporal_merge_size", 1), h * merge, w * merge])
        row.seconds.append(draw.choice([1.0, 0.5, 2.0, 0.08, 1 / 3, draw.uniform(0.01, 3)]))
        if model in TIMESTAMPS:
            row.add((VIDEO_START, 1))
            for _ in range(t):
                row.add((VISION_START, 1))
                row.add((IMAGE if model in GLM else VIDEO, h * w), kind=2)
                row.add((VISION_END, 1), (TEXT, draw.randint(1, 3)))
            row.add((VIDEO_END, 1))
        elif sound:
            row.audios.append(draw.choice([draw.randint(1, 6), draw.randint(1, 120)]))
            row.add((VISION_START, 1), (AUDIO_START, 1))
            row.add((VIDEO, t * h * w), kind=VIDEO)  # get_rope_index does not read in which order the tokens are
            row.add((AUDIO, row.audios[-1]), kind=AUDIO)
            row.add((AUDIO_END, 1), (VISION_END, 1))
        else:
            row.add((VISION_START, 1))
            row.add((VIDEO, t * h * (w + (model == "hy_v4_vl"))), kind=2)
            row.add((VISION_END, 1))


def add_on_canvas(row: Row, config: dict[str, Any], draw: random.Random) -> None:
    """Add an image, or the frames of a video, as thumbnails with slices. Some markers and slices are missing."""
    merge = 2 if config["downsample_mode"] == "4x" else 4
    kind = draw.choice([IMAGE, VIDEO])

    def crop(size: tuple[int, int] | None = None) -> None:
        h, w = size or (draw.randint(1, 5), draw.randint(1, 5))
        patches = [h * merge + draw.randrange(merge), w * merge + draw.randrange(merge)]
        (row.images if kind == IMAGE else row.videos).append(patches)
        row.add((kind, h * w), kind=kind)

    for _ in range(1 if kind == IMAGE else draw.randint(1, 3)):
        row.add((VISION_START, 1))
        crop()
        row.add((VISION_END, draw.random() < 0.9))
        down, across = draw.choice([(0, 0), (draw.randint(1, 3), draw.randint(1, 3))])
        size = draw.choice([None, (draw.randint(1, 4), draw.randint(1, 4))])
        for i in range(down * across):
            row.add((NEWLINE, draw.randint(1, 2) if i and i % across == 0 else 0))
            if draw.random() < 0.97:
                row.add((SLICE_START, 1))
                crop(size)
                row.add((SLICE_END, 1))
        row.add((draw.choice([NEWLINE, TEXT]), draw.randint(0, 2)))


def random_rows(model: str, draw: random.Random) -> tuple[dict[str, Any], list[Row], bool]:
    """Return a config, rows, and whether videos have audio."""
    config = config_of(model, draw)
    sound, rows = model in OMNI and draw.random() < 0.6, []
    for _ in range(draw.randint(1, 3)):
        row = Row()
        row.add((TEXT, draw.randint(0, 9)))
        for _ in range(draw.randint(0, 3)):
            if model == CANVAS:
                add_on_canvas(row, config, draw)
            else:
                add_media(row, model, config.get("thinker_config", config), draw, sound=sound)
            row.add((TEXT, draw.randint(0, 9)))
        row.add((TEXT, 2))  # in Qwen-Omni, a row of one token in a batch without images has another delta
        rows.append(row)
    if model in OMNI and not any(row.images + row.videos for row in rows):
        merge = config["thinker_config"]["vision_config"]["spatial_merge_size"]
        rows[0].images.append([1, merge, 2 * merge])
        rows[0].add((VISION_START, 1))
        rows[0].add((IMAGE, 2), kind=1)
        rows[0].add((VISION_END, 1), (TEXT, 1))
    return config, rows, sound


def batch_of(rows: list[Row], model: str, draw: random.Random, *, multiple: int = 1) -> dict[str, Any]:
    """Return the output of a processor, padded on one side to a multiple."""
    longest = -(-max(len(row.ids) for row in rows) // multiple) * multiple
    left = draw.random() < 0.5

    def padded(values: list[int]) -> list[int]:
        gap = [PAD] * (longest - len(values))
        return gap + values if left else values + gap

    batch: dict[str, Any] = {"input_ids": [padded(row.ids) for row in rows]}
    batch["attention_mask"] = [padded([1] * len(row.ids)) for row in rows]
    if model not in (*OMNI, "glm_image"):
        batch["mm_token_type_ids"] = [padded(row.types) for row in rows]
    for key, grids in (("image", "images"), ("video", "videos")):
        if every := [grid for row in rows for grid in getattr(row, grids)]:
            batch[f"{key}_grid_thw"] = every
    if model == CANVAS:
        names = {"image_grid_thw": "target_sizes", "video_grid_thw": "target_sizes_videos"}
        batch = {names.get(key, key): value for key, value in batch.items()}
    seconds = torch.tensor([one for row in rows for one in row.seconds]).tolist()
    if seconds and model in ("qwen2_5_vl", *OMNI):
        batch["second_per_grid_ts" if model == "qwen2_5_vl" else "video_second_per_grid"] = seconds
    if model == "glm_image":  # the processor adds the images to generate to those of each row
        wanted = [[[1, draw.randint(1, 5), draw.randint(1, 5)]] * draw.randint(1, 2) for _ in rows]
        both = [[*row.images, *more] for row, more in zip(rows, wanted, strict=True)]
        batch["image_grid_thw"] = [grid for one in both for grid in one]
        batch["images_per_sample"] = [len(one) for one in both]
    return batch


def as_object(value: Any) -> Any:
    return SimpleNamespace(**{k: as_object(v) for k, v in value.items()}) if isinstance(value, dict) else value


def rope_index(model: str, config: dict[str, Any], batch: dict[str, Any], *, sound: bool) -> tuple[Tensor, Tensor]:
    """Return positions and deltas from transformers. Padding keeps the number that the model gives it."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    owner = next(one for one in vars(module).values() if isinstance(one, type) and "get_rope_index" in vars(one))
    settings = as_object(config.get("thinker_config", config))
    if model == "hunyuan_vl":
        settings.text_config.rope_parameters = config["text_config"]["rope_parameters"]
    them = SimpleNamespace(config=settings)
    if model == CANVAS:
        them._frame_end_idx = owner._frame_end_idx
    else:
        them.spatial_merge_size = settings.vision_config.spatial_merge_size
    for method in ("get_vision_position_ids", "get_llm_pos_ids_for_vision", "get_chunked_index", "get_rope_index",
                   "_group_visual_frames"):  # fmt: skip
        if method in vars(owner):
            setattr(them, method, functools.partial(getattr(owner, method), them))
    given = {key: torch.tensor(value) for key, value in batch.items()}
    if model in OMNI:
        given["second_per_grids"] = given.pop("video_second_per_grid", None)
        starts = [[i for i, token in enumerate(row) if token == AUDIO_START] for row in batch["input_ids"]]
        counts = [
            sum(token == AUDIO for token in row[at : row.index(AUDIO_END, at)])
            for row, every in zip(batch["input_ids"], starts, strict=True) for at in every
        ]  # fmt: skip
        of = (lambda n: 4 * n) if model == "qwen2_5_omni" else (lambda n: 100 * (n // 13) + 8 * (n % 13))
        given |= {"audio_seqlens": torch.tensor([of(n) for n in counts]), "use_audio_in_video": sound}
    positions, deltas = them.get_rope_index(**given)
    if model == "glm_image":  # it has no deltas: the images to generate follow the prompt
        return positions, them._cached_decode_position_ids[:, 0, 0] - given["attention_mask"].sum(1)
    return positions, deltas.flatten()


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record the positions of a batch again; those of padding as 0."""
    files.quiet()
    try:
        positions, deltas = rope_index(row["model"], row["config"], row["batch"], sound=row["sound"])
    except ModuleNotFoundError as e:
        raise KeyError(row["model"]) from e
    positions = positions * torch.tensor(row["batch"]["attention_mask"])
    return {**row, "positions": positions.tolist(), "deltas": deltas.tolist()}


GOLDEN = files.Golden("positions/multimodal.json", lambda row: str(row["id"]), record, rows="cases")
