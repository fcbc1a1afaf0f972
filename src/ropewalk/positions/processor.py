"""Positions of the batches that processors of transformers return, for each model that has a `get_rope_index`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.positions.canvas import canvas
from ropewalk.positions.multimodal import Placed, RuleName, mrope, xdrope
from ropewalk.positions.segments import Image, Markers, Segment, Text, Video
from ropewalk.positions.tokens import document_starts

_WHO = "positions.from_processor"
_TEXT, _IMAGE, _VIDEO, _AUDIO = range(4)


@dataclass(frozen=True)
class _Family:
    """What the models of a family have in common. The other fields name keys of their configs."""

    rule: RuleName | None = "qwen2_vl"
    """The rule of `mrope`; None for `xdrope`."""
    newlines: bool = False
    """Whether a token ends each row of an image or a frame."""
    frames_apart: bool = False
    """Whether each frame of a video is an image of its own, with or without text between them."""
    generates: bool = False
    """Whether the grids of a row also list the images to generate, which have no tokens yet."""
    audio: bool = False
    """Whether there may be audio, also between the frames of a video."""
    on_canvas: bool = False
    """Whether images are cut into slices, whose places depend on `input_ids`."""
    time_merge: str | None = None
    per_second: str | None = None
    chunk: str | None = None


_TEXT_BETWEEN_FRAMES = (
    "qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe qwen4_exp glm4v glm4v_moe glm46v glm_ocr cohere_compass cosmos3_edge "
    "cosmos3_omni"
)
_FAMILIES = {
    **dict.fromkeys(("qwen2_vl", "paddleocr_vl"), _Family()),
    "qwen2_5_vl": _Family(per_second="vision_config.tokens_per_second"),
    **dict.fromkeys(_TEXT_BETWEEN_FRAMES.split(), _Family(frames_apart=True)),
    "ernie4_5_vl_moe": _Family(time_merge="vision_config.temporal_merge_size"),
    "qwen2_5_omni": _Family(
        "qwen2_5_omni", audio=True, per_second="position_id_per_seconds", chunk="seconds_per_chunk"
    ),
    "qwen3_omni_moe": _Family("qwen3_omni", audio=True, per_second="position_id_per_seconds"),
    "hunyuan_vl": _Family(None, newlines=True),
    "hy_v4_vl": _Family(newlines=True, frames_apart=True),
    "glm_image": _Family(generates=True),
    "minicpmv4_7": _Family(on_canvas=True, frames_apart=True),
}


def from_processor(config: Any, batch: Mapping[str, Any], *, device: torch.device | str | None = None) -> Placed:
    """Return the positions of a batch of a processor, equal to `get_rope_index` of the model in transformers.

    Call it where the batch is made, such as in a collator: then everything is computed on the host. Tensors of another
    device are read back, once each.

    Args:
        config: the config of the model, a dict or an object with `to_dict()`. Its `model_type` selects the rule. It
            gives the sizes that the vision tower merges, the positions per second, and the ids of special tokens.
        batch: the output of the processor, as tensors, arrays or lists of equal length:
            `mm_token_type_ids` `[batch, seq]`, or without it `input_ids`;
            `attention_mask` `[batch, seq]`, 0 for padding on any side, and for real tokens 1, or the number of their
            document in a packed row, as in `from_mask`;
            `image_grid_thw`, `video_grid_thw` `[n, 3]`, for all rows in order;
            `second_per_grid_ts` (Qwen2.5-VL) or `video_second_per_grid` (Omni) `[videos]`, in seconds;
            `images_per_sample` of each text (GLM-Image). MiniCPM-V 4.7 has `target_sizes` and `target_sizes_videos`
            `[n, 2]` instead of grids, and always needs `input_ids`. Other keys are not read; `cu_seqlens` is an error.
        device: device of the result. None means that of the tokens.

    Returns:
        `Placed`: positions `[axes, batch, seq]`, int64 (Qwen3-Omni: float32), with padding at 0, and the next position
        of each row, `[batch]`. Positions of each document begin at 0.

    Raises:
        RopeError: there is no rule for the model; a key is missing or has a wrong shape; a row has only padding; or the
            tokens of images and videos are not those of the grids.

    Source:
        `get_rope_index` of each model in transformers.

    Examples:
        >>> config = {"model_type": "qwen2_vl", "vision_config": {"spatial_merge_size": 2}}
        >>> batch = {"mm_token_type_ids": [[0, 1, 1, 0], [0, 0, 0, 0]], "image_grid_thw": [[1, 2, 4]],
        ...          "attention_mask": [[1, 1, 1, 1], [0, 0, 1, 1]]}
        >>> placed = from_processor(config, batch)
        >>> placed.positions[2]
        tensor([[0, 1, 2, 3],
                [0, 0, 0, 1]])
        >>> placed.next
        tensor([4, 2])
    """
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping) or not isinstance(batch, Mapping):
        got, fix = f"{_checks.describe(config)} and {_checks.describe(batch)}", "Pass model.config and processor(...)."
        raise _checks.error(_WHO, "config and batch must be dicts", got, fix)
    values = values.get("thinker_config", values)
    model = str(values.get("model_type")).removesuffix("_thinker")
    if model not in _FAMILIES:
        must, fix = f"model_type must be one of {', '.join(_FAMILIES)}", "Pass the segments of each row to mrope."
        raise _checks.error(_WHO, must, _checks.shown(model), fix)
    family = _FAMILIES[model]
    if packed := [key for key in ("cu_seqlens", "cu_seq_lens_q", "seq_idx") if batch.get(key) is not None]:
        fix = "Number the documents of a row in attention_mask instead, [1, 1, 2, 2, 2, 0], or pass a row for each."
        raise _checks.error(_WHO, "the documents of batch must be those of attention_mask", packed[0], fix)
    kinds = _token_types(values, batch)
    target, kinds = kinds.device if device is None else device, kinds.cpu()
    _checks.length(_WHO, "the number of rows", len(kinds))
    has_mask = batch.get("attention_mask") is not None
    mask = _read(batch, "attention_mask", (*kinds.shape,)).cpu() if has_mask else torch.ones_like(kinds)
    begins = document_starts(_WHO, mask)
    texts = [(row, n) for row, of_row in enumerate(mask) for n in of_row[begins[row]].tolist() or [1]]
    images, videos = _sizes(values, family, batch)
    of_texts = [images] * len(texts)
    if family.generates:
        counts = _read(batch, "images_per_sample", (len(texts),)).tolist()
        of_texts = [iter(list(islice(images, count))) for count in counts]
    keys = {"per_second": family.per_second, "seconds_per_chunk": family.chunk}
    options: dict[str, Any] = {name: _number(values, key) for name, key in keys.items() if key is not None}
    ids = _read(batch, "input_ids", (*kinds.shape,)).cpu() if family.on_canvas else kinds
    placed, before = [], 0
    for (row, number), in_text in zip(texts, of_texts, strict=True):
        who, kept = f"{_WHO}: row {row}", mask[row] == number
        types = kinds[row][kept].tolist()
        if family.on_canvas:
            placed.append(_on_canvas(who, values, ids[row][kept].tolist(), types, in_text, videos))
            continue
        segments = _segments(who, types, family, in_text, videos)
        if family.rule is None:
            placed.append(xdrope(segments, _axes(values), images_before=before))  # type: ignore[arg-type]
            before += sum(isinstance(segment, Image) for segment in segments)
        else:
            placed.append(mrope(segments, family.rule, **options))
    for name, key, left in zip(("image", "video"), _grids(family), (len([*images]), len([*videos])), strict=True):
        if left:
            must = f"every {name} of {key} must have tokens in the batch"
            fix = f"Pass the grids of this batch only, and mm_token_type_ids or the config with {name}_token_id."
            raise _checks.error(_WHO, must, f"{left} without tokens", fix)
    positions = placed[0].positions.new_zeros(len(placed[0].positions), *kinds.shape)
    after = positions.new_zeros(len(kinds))
    for (row, number), one in zip(texts, placed, strict=True):
        positions[:, row, mask[row] == number], after[row] = one.positions, one.next
    return Placed(positions.to(target, non_blocking=True), after.to(target, non_blocking=True))


def _token_types(config: Mapping[str, Any], batch: Mapping[str, Any]) -> Tensor:
    """Return 0 for each token of text, 1 of images, 2 of videos, and 3 of audio, int64 `[batch, seq]`."""
    if batch.get("mm_token_type_ids") is not None:
        return _read(batch, "mm_token_type_ids", (None, None)).to(torch.int64)
    ids = _read(batch, "input_ids", (None, None))
    types = torch.zeros_like(ids, dtype=torch.int64)
    for kind, name in ((_IMAGE, "image"), (_VIDEO, "video"), (_AUDIO, "audio")):
        types.masked_fill_(ids == config.get(f"{name}_token_id", config.get(f"{name}_token_index", -1)), kind)
    if "video_start_token_id" in config:  # GLM marks the frames of videos as images
        opened, closed = ((ids == config[f"video_{edge}_token_id"]).cumsum(1) for edge in ("start", "end"))
        types.masked_fill_((types == _IMAGE) & (opened > closed), _VIDEO)
    return types


def _sizes(
    config: Mapping[str, Any], family: _Family, batch: Mapping[str, Any]
) -> tuple[Iterator[Image], Iterator[Video | Image]]:
    """Return the images and the videos of all rows, in tokens. A frame between texts is an image."""
    one = [1] if family.on_canvas else []  # its sizes are those of single frames
    image, video = (
        [] if batch.get(key) is None else [one + size for size in _read(batch, key, (None, 3 - len(one))).tolist()]
        for key in _grids(family)
    )
    if not image and not video:
        return iter(()), iter(())
    if family.on_canvas:
        mode = config.get("downsample_mode", "16x")
        _checks.choice(_WHO, "downsample_mode", mode, ("4x", "16x"))
        merge = 2 if mode == "4x" else 4
    else:
        merge = int(_number(config, "vision_config.spatial_merge_size"))

    def picture(h: int, w: int) -> Image:
        return Image(h // merge, w // merge + family.newlines)

    images = [picture(h, w) for _, h, w in image]
    if family.frames_apart:
        return iter(images), iter([picture(h, w) for t, h, w in video for _ in range(t)])
    time_merge = 1 if family.time_merge is None else int(_number(config, family.time_merge))
    seconds: list[float | None] = [None] * len(video)
    if video and family.per_second is not None:
        key = "video_second_per_grid" if family.audio else "second_per_grid_ts"
        seconds = _read(batch, key, (len(video),)).to(torch.float32).tolist()
    sizes = zip(video, seconds, strict=True)
    return iter(images), iter([Video(t // time_merge, h // merge, w // merge, s) for (t, h, w), s in sizes])


def _grids(family: _Family) -> tuple[str, str]:
    """Return the keys of a batch that have the sizes of images and of videos, in patches."""
    return ("target_sizes", "target_sizes_videos") if family.on_canvas else ("image_grid_thw", "video_grid_thw")


def _on_canvas(
    who: str, config: Mapping[str, Any], ids: list[int], types: list[int], images: Iterator[Image], videos: Any
) -> Placed:
    """Place a row of MiniCPM-V 4.7."""
    _check_types(who, types, 2)
    names = ("slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id")
    markers = [int(_number(config, name)) for name in names] if any(types) else [-1]
    with torch.device("cpu"):
        positions = canvas(who, ids, types, {_IMAGE: images, _VIDEO: videos}, markers[0], markers)
    return Placed(positions, positions.max() + 1)


def _check_types(who: str, types: list[int], most: int) -> None:
    if not set(types) <= set(range(most + 1)) or not types:
        must = f"types of tokens must be 0 to {most}, and a row must have a token"
        fix = "Pass mm_token_type_ids and attention_mask as the processor returns them."
        raise _checks.error(who, must, _checks.shown(sorted(set(types))), fix)


def _segments(
    who: str, types: list[int], family: _Family, images: Iterator[Image], videos: Iterator[Video | Image]
) -> list[Segment]:
    """Return the segments of a row. Take as many images and videos as it has."""
    _check_types(who, types, _AUDIO if family.audio else _VIDEO)
    runs = [list(run) for _, run in groupby(types, key=lambda kind: min(kind, _VIDEO))]
    # In the Omni models, the markers around an image, a video or audio are separate segments.
    markers = [len(set(run)) if family.audio and run[0] else 0 for run in runs]
    segments: list[Segment] = []
    for run, ending, beginning in zip(runs, [0, *markers], [*markers[1:], 0], strict=False):
        if run[0] == _TEXT:
            parts = ((ending, True), (len(run) - ending - beginning, False), (beginning, True))
            if parts[1][0] < 0:
                must = "images, videos and audio must have text for their begin and end markers between them"
                raise _checks.error(who, must, f"{len(run)} tokens", "Pass input_ids as the processor returns them.")
            shared = family.chunk is not None
            segments += [Markers(n) if shared and mark and n > 1 else Text(n) for n, mark in parts if n]
            continue
        sound = run.count(_AUDIO)
        name, sizes = ("image", images) if run[0] == _IMAGE else ("video", videos)
        found = _take(who, name, sizes, len(run) - sound, marked=family.rule is None)
        if sound:
            found = [replace(found[0], audio=sound)] if found else [Text(sound)]
        segments += found
    return segments


def _take(who: str, name: str, sizes: Iterator[Any], tokens: int, *, marked: bool) -> list[Any]:
    """Return the next images or videos, which have this number of tokens. If marked, two more may be its markers."""
    found, missing = [], tokens
    while missing > 0 and (one := next(sizes, None)) is not None:
        edge = [Text(1)] if marked and missing == one.tokens + 2 else []
        found += [*edge, one, *edge]
        missing -= one.tokens + 2 * len(edge)
    if missing:
        must = (
            f"the tokens of {name}s must be those of {name}_grid_thw, {tokens - missing} tokens after merging patches"
        )
        fix = "Pass the grids of all rows in order, and check that no tokens were cut off."
        raise _checks.error(who, must, f"{tokens} tokens", fix)
    return found


def _axes(config: Mapping[str, Any]) -> int:
    """Return the number of axes of the rope of Hunyuan VL."""
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section") or rope.get("xdrope_section") or ()
    return _checks.length(_WHO, "the number of mrope_section (xdrope_section) in config", len(sections), at_least=3)


def _number(config: Mapping[str, Any], path: str) -> float:
    """Return a number of the config, given the path of its key."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return _checks.number(_WHO, path, value, above=0.0, fix="Pass model.config, the whole config of transformers.")


def _read(batch: Mapping[str, Any], key: str, shape: tuple[int | None, ...]) -> Tensor:
    """Return an entry of the batch as a tensor of this shape, where None is any size."""
    if batch.get(key) is None:
        raise _checks.error(_WHO, f"batch must have {key}", _checks.shown(sorted(batch)), f"Pass {key} as well.")
    try:
        given = batch[key]
        tensor = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError) as e:
        raise _checks.error_from(f"{_WHO}: {key} cannot be read", e, "Pass padding=True to the processor.") from e
    fits = len(shape) == tensor.ndim and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
    kind = "numbers" if "second" in key else "integers"
    if not fits or (kind == "integers" and tensor.is_floating_point()):
        must = f"{key} must be {kind} of shape [{', '.join('any' if n is None else str(n) for n in shape)}]"
        raise _checks.error(_WHO, must, _checks.describe(tensor), "Pass the output of the processor unchanged.")
    return tensor
