"""text_models.json and models/: known q and k, rotated by a model's own attention.

The projections of one layer return the inputs of a row. Labels at position 0 show which projected channels form which
head, so fused and permuted projections need no special treatment. The rotated values of one head are stored, and if a
case has `tokens`, only those of these tokens.
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

HEADS = {"q_heads": 1, "k_heads": 1}  # the number of heads to record if a row does not state it


def golden(name: str, shape: list[int]) -> Tensor:
    """Compute the inputs "q" or "k" of the golden files by the formula in tests/golden/README.md, float32."""
    i = np.arange(math.prod(shape), dtype=np.int64)
    values = np.sin(0.1 + 0.7 * i + 0.3 * (i * i % 11)) if name == "q" else np.cos(0.2 + 0.9 * i + 0.5 * (i * i % 13))
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def shortest(values: Tensor) -> list[float]:
    """Return float32 numbers as the shortest decimals that convert back to them."""
    return [float(str(value)) for value in values.detach().float().flatten().numpy()]


def recorder_of(config: Any) -> Recorder:
    """Return a recorder of the first class that can be built from a config.

    Raises:
        CannotRecordError: no class can be built.
    """
    reasons = []
    for cls in model_classes(config):
        try:
            return Recorder(copy.deepcopy(config), cls)
        except Exception as error:
            reasons.append(f"{cls.__name__}: {type(error).__name__}: {str(error)[:120]}")
    raise CannotRecordError(reasons[0] if reasons else "no class of its file is built from this config alone")


def record_case(recorder: Recorder, case: dict[str, Any]) -> dict[str, Any]:
    """Record a case again. The layer, the positions and the shapes of the inputs are those of the committed case."""
    index, indexer = case.get("layer_idx", 0), case["id"] == "dsa_indexer"
    tokens = len(case["positions"]) if isinstance(case["positions"][0], int) else len(case["positions"][0])
    recorded: dict[str, Any] = {"seq_len": int(np.max(case["positions"])) + 1}
    measured = measure(recorder, index, indexer)
    if measured is None or not recorder.frequencies():
        buffer = next(iter(recorder.frequencies()), None)
    else:
        buffer, _ = frequencies_of(recorder, measured)
    head_counts = {name: case.get(name, heads) for name, heads in HEADS.items()}
    labelled = recorder.run(index, 2, labels, indexer=indexer)
    query, key = sources(labelled.query[:, :, 0]), labelled.key[:, :, 0]
    key = sources(
        key[..., -case["k_shape"][-1] :]
    )  # the channels before these come from the latent and are not rotated
    if key.shape[0] == query.shape[0] != case["k_shape"][1]:  # keys are repeated for every query head of a group
        key = torch.stack([head for i, head in enumerate(key) if i == 0 or (head != key[i - 1]).any()])
    inputs_by_projection: dict[int, dict[int, Tensor]] = {}
    for name, source in (("q", query), ("k", key)):
        inputs = golden(name, case[f"{name}_shape"])
        if inputs.shape[-1] != source.shape[-1]:
            raise CannotRecordError(f"a head of {name} has {source.shape[-1]} channels")
        for head, head_labels in zip(inputs[0, : len(source)], source, strict=False):
            for channel, label in enumerate(sorted(head_labels.tolist())):
                inputs_by_projection.setdefault(label // LABEL_STEP, {})[label % LABEL_STEP] = head[:, channel]

    def inputs_of(number: int, channels: int) -> Tensor:
        values = torch.zeros(1, length, channels)
        for channel, token_values in inputs_by_projection.get(number, {}).items():
            values[0, chosen, channel] = token_values
        return values

    positions = torch.tensor(case["positions"])
    length, chosen = recorder.tokens(positions)
    captured = recorder.run(index, 1, inputs_of, positions, indexer)
    q, k = captured.query[0], captured.key[0]
    if len(q[0]) != tokens:
        raise CannotRecordError(f"{len(q[0])} tokens came out")
    stored = case.get("tokens", list(range(tokens)))
    recorded |= {
        "q_rot": shortest(q[: head_counts["q_heads"], stored]),
        "k_rot": shortest(k[: head_counts["k_heads"], stored, -case["k_shape"][-1] :]),
        "head_dim": case["k_shape"][-1],
        "softmax_scale": captured.scale,
        "inv_freq": shortest(buffer.inv_freq) if buffer else None,
        "attention_scaling": buffer.attention_factor if buffer else 1.0,
        **layout(measured),
    }
    return {name: recorded.get(name, value) for name, value in case.items()}


def layout(measured: Pairs | None) -> dict[str, Any]:
    """Return the pairing of the channels, in the format of the golden file."""
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
    """Record a row of text_models.json again."""
    recorder = recorder_of(text_config(row["config"]))
    return {**row, "cases": [record_case(recorder, case) for case in row["cases"]]}


def record_model(row: dict[str, Any]) -> dict[str, Any]:
    """Record a file of models/ again."""
    return {**row, "case": record_case(recorder_of(text_config(row["config"])), row["case"])}


def name(row: dict[str, Any]) -> str:
    """Return the name of a row."""
    return str(row["name"])


TEXT_MODELS = files.Golden("text_models.json", name, record_row)
MODELS = files.Golden("models", name, record_model)
