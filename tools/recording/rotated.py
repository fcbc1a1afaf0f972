"""text_models.json and models/: q and k of known inputs, rotated by a model's own attention.

The projections of one layer return the inputs of a row. Which of their channels make up which head is read from labels
at position 0, so that fused and permuted projections need no rule of their own.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import files
from .configs import text_config
from .measure import LABEL_STEP, Pairs, frequencies_of, labels, measure, sources
from .model import CannotRecordError, Recorder
from .parts import model_classes

HEADS = {"q_heads": 1, "k_heads": 1}  # that are kept where a row does not say


def golden(name: str, shape: list[int]) -> Tensor:
    """The inputs of the golden files, by their formula in tests/golden/README.md; float32."""
    i = np.arange(math.prod(shape), dtype=np.int64)
    values = np.sin(0.1 + 0.7 * i + 0.3 * (i * i % 11)) if name == "q" else np.cos(0.2 + 0.9 * i + 0.5 * (i * i % 13))
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def shortest(values: Tensor) -> list[float]:
    """Float32 numbers as the shortest decimals that give them back."""
    return [float(str(value)) for value in values.detach().float().flatten().numpy()]


def recorder_of(config: Any) -> Recorder:
    """A recorder of the first class that can be built from a config.

    Raises:
        CannotRecordError: no class can.
    """
    reasons = []
    for cls in model_classes(config):
        try:
            return Recorder(copy.deepcopy(config), cls)
        except Exception as error:
            reasons.append(f"{cls.__name__}: {type(error).__name__}: {str(error)[:120]}")
    raise CannotRecordError(reasons[0] if reasons else "no class of its file is built from this config alone")


def record_case(recorder: Recorder, case: dict[str, Any]) -> dict[str, Any]:
    """One case again. Its layer, positions and shapes of the inputs are taken from it; all else is recorded."""
    index, indexer = case.get("layer_idx", 0), case["id"] == "dsa_indexer"
    tokens = len(case["positions"]) if isinstance(case["positions"][0], int) else len(case["positions"][0])
    made: dict[str, Any] = {"seq_len": int(np.max(case["positions"])) + 1}
    measured = measure(recorder, index, indexer)
    if measured is None or not recorder.frequencies():
        buffer = next(iter(recorder.frequencies()), None)
    else:
        buffer, _ = frequencies_of(recorder, measured)
    kept = {name: case.get(name, heads) for name, heads in HEADS.items()}
    seen = recorder.run(index, 2, labels, indexer=indexer)
    query, key = sources(seen.query[:, :, 0]), seen.key[:, :, 0]
    key = sources(key[..., -case["k_shape"][-1] :])  # the channels before come from the latent, and have no position
    if key.shape[0] == query.shape[0] != case["k_shape"][1]:  # repeated for every query of a group
        key = torch.stack([head for i, head in enumerate(key) if i == 0 or (head != key[i - 1]).any()])
    fed: dict[int, dict[int, Tensor]] = {}
    for name, source in (("q", query), ("k", key)):
        inputs = golden(name, case[f"{name}_shape"])
        if inputs.shape[-1] != source.shape[-1]:
            raise CannotRecordError(f"a head of {name} has {source.shape[-1]} channels")
        for head, of_head in zip(inputs[0, : len(source)], source, strict=False):
            for channel, label in enumerate(sorted(of_head.tolist())):
                fed.setdefault(label // LABEL_STEP, {})[label % LABEL_STEP] = head[:, channel]

    def inputs_of(number: int, channels: int) -> Tensor:
        values = torch.zeros(1, length, channels)
        for channel, of_tokens in fed.get(number, {}).items():
            values[0, chosen, channel] = of_tokens
        return values

    positions = torch.tensor(case["positions"])
    length, chosen = recorder.tokens(positions)
    turned = recorder.run(index, 1, inputs_of, positions, indexer)
    q, k = turned.query[0], turned.key[0]
    made |= {
        "q_rot": shortest(q[: kept["q_heads"]]),
        "k_rot": shortest(k[: kept["k_heads"], :, -case["k_shape"][-1] :]),
        "head_dim": case["k_shape"][-1],
        "softmax_scale": turned.scale,
        "inv_freq": shortest(buffer.inv_freq) if buffer else None,
        "attention_scaling": buffer.attention_factor if buffer else 1.0,
        **layout(measured),
    }
    if len(q[0]) != tokens:
        raise CannotRecordError(f"{len(q[0])} tokens came out")
    return {name: made.get(name, value) for name, value in case.items()}


def layout(measured: Pairs | None) -> dict[str, Any]:
    """How the channels are paired, in the words of the file."""
    if measured is None:
        return {"layout": "none", "rotary_dim": 0}
    rotary_dim = 2 * len(measured.pairs)
    channels = [channel for pair in measured.pairs for channel in pair]
    names = {1: "interleaved", rotary_dim // 2: "half"}
    if len(measured.distances) != 1:
        raise CannotRecordError(f"pairs at distances {sorted(measured.distances)} have no name")
    distance = next(iter(measured.distances))
    name = names.get(distance, f"offset-{distance}") + ("+permuted-output" if measured.permuted else "")
    return {"layout": name, "rotary_dim": rotary_dim, "moved_range": [min(channels), max(channels)]}


def record_row(row: dict[str, Any]) -> dict[str, Any]:
    """A model of text_models.json again."""
    recorder = recorder_of(text_config(row["config"]))
    return {**row, "cases": [record_case(recorder, case) for case in row["cases"]]}


def record_model(row: dict[str, Any]) -> dict[str, Any]:
    """A file of models/ again."""
    return {**row, "case": record_case(recorder_of(text_config(row["config"])), row["case"])}


def name(row: dict[str, Any]) -> str:
    return str(row["name"])


TEXT_MODELS = files.Golden("text_models.json", name, record_row)
MODELS = files.Golden("models", name, record_model)
