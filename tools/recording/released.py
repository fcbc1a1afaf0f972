"""released.json: compare the rows of published configs with the models of transformers.

A row contains reprs of ropewalk's ropes. They are therefore not recorded again, but compared with the models: pairing,
channels, frequencies, axes, attention factor, and number of layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import files
from .class_defaults import record_text, summary
from .configs import text_config
from .model import CannotRecordError

OF_TRANSFORMERS = (
    "transformers 5.24",
    "by hand, after transformers 5.24",
    "no rope in the model of transformers 5.24",
    "sines of position 1 as create_sinusoidal_positions of transformers 5.24",
)
FLOAT32_POWER = 1e-6  # transformers raises the base to a power in float32


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row if the model agrees with it. Otherwise return it with a description of the model as its ropes.

    Raises:
        CannotRecordError: the row is about code other than transformers, or has no rope; see also `record_text`.
    """
    if not row.get("recorded", "").startswith(OF_TRANSFORMERS):
        raise CannotRecordError(row.get("recorded", "refused: no rope to compare"))
    try:
        config = text_config(row["config"])
    except Exception as error:
        raise CannotRecordError(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
    recorded = record_text(config)
    remaining = [[text, count] for text, count in row["ropes"]]
    for kind in recorded["layer_kinds"]:
        layer = None if kind is None else recorded["layers"][str(kind)]
        match = next((rope for rope in remaining if agrees(rope[0], layer)), None)
        if match is None:
            return {**row, "ropes": summary(recorded)}
        match[1] -= 1
    return row if not any(count for _, count in remaining) else {**row, "ropes": summary(recorded)}


def agrees(text: str, layer: dict[str, Any] | None) -> bool:
    """Return whether a recorded layer agrees with a rope, which is passed as its repr, or "None" for no rope."""
    import ropewalk

    if layer is None or text == "None":
        return layer is None and text == "None"
    names = {name: getattr(part, name) for part in (ropewalk, ropewalk.schemes) for name in part.__all__}
    rope = eval(text, names).at_length(2)  # the model was run with two tokens
    whole = (rope.pairing, rope.rotary_dim, rope.rotary_offset)
    return (
        whole == (layer["pairing"], layer["rotary_dim"], layer["rotary_offset"])
        and np.allclose(rope.inv_freq, layer["inv_freq"], rtol=FLOAT32_POWER, atol=0)
        and (None if rope.axes is None else list(rope.axes.axis)) == layer.get("axis")
        and np.isclose(rope.attention_factor, layer["attention_factor"], rtol=FLOAT32_POWER)
    )


GOLDEN = files.Golden("released.json", lambda row: f"{row['file']} {row['model_type']}", record, replaceable=False)
