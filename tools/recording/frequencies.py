"""schemes.json and lengths.json: the frequencies of a model's rotary class after a run at some length.

The configs are those of text_models.json.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import files
from .configs import text_config
from .measure import frequencies_of, labels, measure
from .model import CannotRecordError
from .rotated import recorder_of, shortest


@functools.cache
def models() -> dict[str, dict[str, Any]]:
    """Return the rows of text_models.json by name."""
    return {row["name"]: row for row in files.load(files.FOLDER / "text_models.json")["rows"]}


def record(row: dict[str, Any], case: dict[str, Any], length: int) -> dict[str, Any]:
    """Record a row again, for one layer, after a run whose last position is `length` - 1.

    Raises:
        CannotRecordError: see `recorder_of` and `measure`.
    """
    recorder = recorder_of(text_config(models()[row["model"]]["config"]))
    index = case.get("layer_idx", 0)
    measured = measure(recorder, index)
    if measured is None:
        raise CannotRecordError("the layer rotates nothing")
    buffer, _ = frequencies_of(recorder, measured)
    recorder.run(index, 2, labels, torch.tensor([0, length - 1]))
    parameters = recorder.config.rope_parameters
    if all(isinstance(value, dict) for value in parameters.values()):  # separate parameters for each kind of layer
        parameters = parameters[case["id"]]
    again = {
        "rope_parameters": parameters,
        "rotary_dim": 2 * len(measured.pairs),
        "attention_scaling": buffer.attention_factor,
        "inv_freq": shortest(buffer.inv_freq),
    }
    return {**row, **again}


def record_scheme(row: dict[str, Any]) -> dict[str, Any]:
    case = next(case for case in models()[row["model"]]["cases"] if case["id"] == row["case"])
    return record(row, case, case["seq_len"])


def record_length(row: dict[str, Any]) -> dict[str, Any]:
    """Record a row again. Numbers that the formula reads outside of its parameters are added to them."""
    case = models()[row["model"]]["cases"][0]
    again, longest = (
        record(row, case, row["length"]),
        text_config(models()[row["model"]]["config"]).max_position_embeddings,
    )
    left_out = ("type", "partial_rotary_factor")
    parameters = {name: value for name, value in again["rope_parameters"].items() if name not in left_out}
    if parameters["rope_type"] == "longrope":
        parameters["factor"] = longest / parameters["original_max_position_embeddings"]
    else:
        parameters["max_position_embeddings"] = longest
    return {**again, "rope_parameters": parameters}


SCHEMES = files.Golden("schemes.json", lambda row: f"{row['model']} {row['case']}", record_scheme)
LENGTHS = files.Golden("lengths.json", lambda row: f"{row['model']} {row['length']}", record_length)
