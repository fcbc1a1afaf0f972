"""released.json: whether the models of transformers rotate as the rows of published configs say.

A row says its ropes in the words of ropewalk. So they are not written again, but held against what the models do: the
pairing, the channels, the frequencies, the axes, the attention factor, and in how many layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import files
from .class_defaults import record_text, summary
from .configs import text_config
from .model import CannotRecordError

OF_TRANSFORMERS = (
    "transformers 5.23",
    "by hand, after transformers 5.23",
    "no rope in the model of transformers 5.23",
    "sines of position 1 as create_sinusoidal_positions of transformers 5.23",
)
FLOAT32_POWER = 1e-6  # transformers raises the base to a power in float32


def record(row: dict[str, Any]) -> dict[str, Any]:
    """The row where the model does what it says; else with what the model does in the place of the ropes.

    Raises:
        CannotRecordError: the row is of other code than transformers, or is refused; see `record_text`.
    """
    if not row.get("recorded", "").startswith(OF_TRANSFORMERS):
        raise CannotRecordError(row.get("recorded", "refused: no rope to compare"))
    try:
        config = text_config(row["config"])
    except Exception as error:
        raise CannotRecordError(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
    made = record_text(config)
    left = [[text, count] for text, count in row["ropes"]]
    for kind in made["layer_kinds"]:
        layer = None if kind is None else made["layers"][str(kind)]
        of_it = next((rope for rope in left if agrees(rope[0], layer)), None)
        if of_it is None:
            return {**row, "ropes": summary(made)}
        of_it[1] -= 1
    return row if not any(count for _, count in left) else {**row, "ropes": summary(made)}


def agrees(text: str, layer: dict[str, Any] | None) -> bool:
    """Whether a layer rotates as a rope of ropewalk does, given by its repr, or as no rope where that is None."""
    import ropewalk

    if layer is None or text == "None":
        return layer is None and text == "None"
    names = {name: getattr(part, name) for part in (ropewalk, ropewalk.schemes) for name in part.__all__}
    rope = eval(text, names).at_length(2)  # two tokens are run
    whole = (rope.pairing, rope.rotary_dim, rope.rotary_offset)
    return (
        whole == (layer["pairing"], layer["rotary_dim"], layer["rotary_offset"])
        and np.allclose(rope.inv_freq, layer["inv_freq"], rtol=FLOAT32_POWER, atol=0)
        and (None if rope.axes is None else list(rope.axes.axis)) == layer.get("axis")
        and np.isclose(rope.attention_factor, layer["attention_factor"], rtol=FLOAT32_POWER)
    )


GOLDEN = files.Golden("released.json", lambda row: f"{row['file']} {row['model_type']}", record, written=False)
