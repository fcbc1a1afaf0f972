"""`from_processor`, compared with positions that transformers computed for random batches, and its errors."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk import RopeError
from ropewalk.positions import context_parallel, from_processor, with_unrotated

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from recording import multimodal  # noqa: E402

FILE = ROOT / "tests" / "golden" / "positions" / "multimodal.json"
CASES = json.loads(FILE.read_text())["cases"]
MODELS = list(dict.fromkeys(case["model"] for case in CASES))
ALIKE = {
    "qwen2_vl": ["paddleocr_vl"],
    "glm4v": ["glm46v", "glm4v_moe", "glm_ocr", "cosmos3_omni"],
    "qwen3_vl": [
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
        "cohere_compass",
        "cosmos3_edge",
        "cosmos3_omni",
    ],
}


def dtype_of(model: str) -> torch.dtype:
    return torch.float32 if model == "qwen3_omni_moe" else torch.int64


@pytest.mark.parametrize("model", MODELS)
def test_equals_transformers(model: str) -> None:
    for case in [case for case in CASES if case["model"] == model]:
        batch, dtype = case["batch"], dtype_of(model)
        lengths = torch.tensor(batch["attention_mask"]).sum(1)
        tensors = {key: torch.tensor(value) for key, value in batch.items()}
        only_ids = {key: np.array(value) for key, value in batch.items() if key != "mm_token_type_ids"}
        for name in (model, *ALIKE.get(model, ())):
            config = {**case["config"], "model_type": name}
            for given in (batch, tensors, only_ids):
                placed = from_processor(config, given)
                assert torch.equal(placed.positions, torch.tensor(case["positions"], dtype=dtype)), case["id"]
                assert torch.equal(placed.next - lengths, torch.tensor(case["deltas"], dtype=dtype)), case["id"]


@pytest.mark.parametrize("model", multimodal.MODELS)
def test_random_batches_of_the_installed_transformers(model: str) -> None:
    """The batch, padded to a multiple of 8, and each of its rows alone. ROPEWALK_CASES=1000 tries more batches."""
    pytest.importorskip("transformers", "5.23")
    for seed in range(int(os.environ.get("ROPEWALK_CASES", 5))):
        draw = random.Random(seed)
        config, rows, sound = multimodal.random_rows(model, draw)
        batch = multimodal.batch_of(rows, model, draw, multiple=8)
        placed, real = from_processor(config, batch), torch.tensor(batch["attention_mask"]).bool()
        theirs, deltas = multimodal.rope_index(model, config, batch, sound=sound)
        assert torch.equal(placed.positions[:, real], theirs[:, real]), seed
        assert torch.equal(placed.next - real.sum(1), deltas), seed
        alone: list[Any] = []
        for row in rows:
            one = multimodal.batch_of([row], model, draw)
            one["attention_mask"] = [[1] * len(row.ids)]
            if "image_grid_thw" in one or "video_grid_thw" in one or model not in multimodal.OMNI:
                alone.append(multimodal.rope_index(model, config, one, sound=sound)[0][:, 0])
            else:
                alone.append(torch.arange(len(row.ids)).expand(3, -1))
        packed = torch.cat(alone, dim=1)
        if model == "hunyuan_vl":  # it counts the images of a batch, and not of a row
            packed[-1], placed.positions[-1] = 0, 0
        assert torch.equal(placed.positions[:, real], packed), seed


def test_packed_padded_and_sharded() -> None:
    """Tokens are packed, padded and sharded on their axis, the last one, and their positions in the same way."""
    case = next(case for case in CASES if case["model"] == "qwen3_vl" and len(case["deltas"]) == 3)
    wanted, real = torch.tensor(case["positions"]), torch.tensor(case["batch"]["attention_mask"]).bool()
    positions = from_processor(case["config"], case["batch"]).positions
    packed = positions[:, real]
    assert packed.equal(torch.cat([wanted[:, row, kept] for row, kept in enumerate(real)], dim=1))
    padded = with_unrotated(packed, after=-packed.shape[-1] % 8)
    assert padded.shape[-1] % 8 == 0
    assert padded[:, : packed.shape[-1]].equal(packed)
    assert not padded[:, packed.shape[-1] :].any()
    length = padded.shape[-1] // 8
    shards = [padded[..., context_parallel(padded.shape[-1], rank, 4, "head-tail")] for rank in range(4)]
    for rank, shard in enumerate(shards):
        chunks = padded[:, rank * length : (rank + 1) * length], padded[:, (7 - rank) * length : (8 - rank) * length]
        assert shard.equal(torch.cat(chunks, dim=1))


@pytest.mark.parametrize("model", MODELS)
def test_documents_that_a_mask_numbers(model: str) -> None:
    """All rows of a batch as documents of one row, with padding between them, each have the positions of their row."""
    for case in [case for case in CASES if case["model"] == model]:
        batch, lengths = dict(case["batch"]), torch.tensor(case["batch"]["attention_mask"]).sum(1)
        for key in {"mm_token_type_ids", "input_ids"} & batch.keys():
            batch[key] = [[x for row in batch[key] for x in row]]
        numbers = torch.tensor(case["batch"]["attention_mask"]) * torch.arange(1, len(lengths) + 1)[:, None]
        placed = from_processor(
            {**case["config"], "model_type": model}, batch | {"attention_mask": numbers.view(1, -1)}
        )
        wanted = torch.tensor(case["positions"], dtype=dtype_of(model))
        assert placed.positions[:, 0, numbers.view(-1) > 0].equal(wanted[:, numbers > 0]), case["id"]
        assert placed.next == (lengths + torch.tensor(case["deltas"]))[-1], case["id"]


def test_device_and_objects() -> None:
    """The result is on the device of the tokens, or where the caller wants it; a config may be an object."""

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return QWEN

    with torch.device("meta"):
        here = from_processor(Config(), BATCH)
    assert here.positions.tolist() == [[[0, 1, 1, 3]], [[0, 1, 1, 3]], [[0, 1, 2, 3]]]
    assert here.next.tolist() == [4]
    assert {one.device.type for one in from_processor(QWEN, BATCH, device="meta")} == {"meta"}


def test_tokens_of_one_glm_video_are_found_by_its_markers() -> None:
    config = {"model_type": "glm4v", "vision_config": {"spatial_merge_size": 1}, "image_token_id": 1}
    batch = {"input_ids": [[1, 5, 1, 6, 1]], "image_grid_thw": [[1, 1, 1]] * 2, "video_grid_thw": [[1, 1, 1]]}
    marked = {**config, "video_start_token_id": 5, "video_end_token_id": 6}
    assert from_processor(marked, batch).positions[0].tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(
        RopeError,
        match="the tokens of images must be those of image_grid_thw, 0 tokens after merging patches, got 1 to",
    ):
        from_processor(config, batch)


QWEN = {"model_type": "qwen2_vl", "vision_config": {"spatial_merge_size": 2}, "image_token_id": 7}
OMNI = {"model_type": "qwen2_5_omni", "thinker_config": QWEN | {"model_type": "qwen2_5_omni_thinker"}}
TIMED = QWEN | {"model_type": "qwen2_5_vl", "vision_config": {"spatial_merge_size": 2, "tokens_per_second": 2}}
MARKERS = {"image_start_id": 20, "image_end_id": 21, "slice_start_id": 22, "slice_end_id": 23, "newline_id": 24}
CANVAS = {"model_type": "minicpmv4_7", "image_token_id": 7, **MARKERS}
SLICED = {"input_ids": [[20, 7, 7, 21]], "target_sizes": [[4, 8]]}
BATCH = {"input_ids": [[3, 7, 7, 3]], "image_grid_thw": [[1, 2, 4]]}
FILM = {"mm_token_type_ids": [[0, 2, 2, 0]], "video_grid_thw": [[1, 2, 4]]}


@pytest.mark.parametrize(
    ("config", "batch", "message"),
    [
        ("qwen2_vl", BATCH, "config and batch must be dicts, got 'qwen2_vl' and {"),
        (QWEN, [BATCH], "config and batch must be dicts"),
        (QWEN | {"model_type": "llama"}, BATCH, "cosmos3_omni, ernie4_5_vl_moe, qwen2_5_omni, qwen3_omni_moe, hunyuan"),
        ({}, BATCH, "got 'None'. Pass the segments of each row to mrope"),
        (QWEN, {}, "batch must have input_ids, got []. Pass input_ids as well."),
        (QWEN, {"input_ids": [[1], [1, 2]]}, "input_ids cannot be read: ValueError: "),
        (QWEN, {"input_ids": [1, 2]}, "input_ids must be integers of shape [any, any], got torch.int64 of shape (2,)"),
        (QWEN, {"input_ids": torch.zeros(0, 3)}, "input_ids must be integers of shape [any, any], got torch.float32"),
        (QWEN, {"input_ids": torch.zeros(0, 3).int()}, "the number of rows must be an integer of at least 1, got 0"),
        (QWEN, BATCH | {"cu_seqlens": [0, 2, 4]}, "must be those of attention_mask, got cu_seqlens. Number the docume"),
        (QWEN, BATCH | {"attention_mask": [[1, 1]]}, "attention_mask must be integers of shape [1, 4]"),
        (QWEN, BATCH | {"attention_mask": [[0] * 4]}, "row 0: types of tokens must be 0 to 2, and a row must have a"),
        (QWEN, {"mm_token_type_ids": [[0], [3]]}, "row 1: types of tokens must be 0 to 2, and a row must have a toke"),
        (QWEN, BATCH | {"image_grid_thw": [1, 2, 4]}, "image_grid_thw must be integers of shape [any, 3]"),
        (QWEN, BATCH | {"image_grid_thw": None}, "row 0: the tokens of images must be those of image_grid_thw, 0 tok"),
        (QWEN, BATCH | {"image_grid_thw": [[1, 2, 6]]}, "w, 3 tokens after merging patches, got 2 tokens. Pass"),
        (QWEN, BATCH | {"image_grid_thw": [[1, 2, 4]] * 2}, "image of image_grid_thw must have tokens in the batch,"),
        (QWEN, BATCH | {"input_ids": [[3]]}, "every image of image_grid_thw must have tokens in the batch, got 1 wit"),
        (QWEN, BATCH | FILM, "every image of image_grid_thw must have tokens in the batch"),
        (QWEN | {"vision_config": None}, BATCH, "vision_config.spatial_merge_size must be a finite number greater th"),
        (TIMED, FILM, "batch must have second_per_grid_ts"),
        (TIMED, FILM | {"second_per_grid_ts": [1.0, 2.0]}, "second_per_grid_ts must be numbers of shape [1]"),
        (OMNI, BATCH, "position_id_per_seconds must be a finite number greater than 0, got None. Pass model.config"),
        (QWEN | {"model_type": "hunyuan_vl"}, {"input_ids": [[3]]}, "number of mrope_section (xdrope_section) in con"),
        (QWEN | {"model_type": "glm_image"}, BATCH, "batch must have images_per_sample"),
        (CANVAS, {"mm_token_type_ids": [[0, 1, 1]], "target_sizes": [[4, 8]]}, "batch must have input_ids"),
        (CANVAS | {"newline_id": None}, SLICED, "newline_id must be a finite number greater than 0, got None"),
        (CANVAS | {"downsample_mode": "8x"}, SLICED, "downsample_mode must be one of '4x', '16x', got '8x'"),
        (CANVAS, SLICED | {"target_sizes": [[8, 8]]}, "row 0: each run of tokens of an image or video must f"),
        (CANVAS, SLICED | {"input_ids": [[7, 7]]}, "the size of the next crop, got 2 tokens from 0 on, and"),
        (CANVAS, SLICED | {"target_sizes": [[4, 8]] * 2}, "every image of target_sizes must have tokens in the batch"),
    ],
)  # fmt: skip
def test_refusals(config: Any, batch: Any, message: str) -> None:
    with pytest.raises(RopeError) as raised:
        from_processor(config, batch)
    assert message in str(raised.value)


def test_markers_are_required() -> None:
    """Qwen-Omni has a begin and an end marker around each image."""
    config = {**OMNI["thinker_config"], "position_id_per_seconds": 25, "seconds_per_chunk": 2}  # type: ignore[dict-item]
    batch = {"input_ids": [[7, 3, 7]], "image_grid_thw": [[1, 2, 2]] * 2}
    with pytest.raises(RopeError, match="images, videos and audio must have text for their begin and end markers betw"):
        from_processor(config, batch)
