"""class_defaults.json: the pairs and frequencies that each kind of layer rotates, in models of their class defaults.

ropewalk is imported only for the model types that it knows, to find new ones.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from . import files
from .configs import COPIED, config_from, config_of, model_types, plain, rotates
from .left_out import LEFT_OUT
from .measure import frequencies_of, measure
from .model import NO_LAYERS, CannotRecordError, Recorder
from .parts import model_classes


def known_types() -> set[str]:
    """Return the model types that ropewalk reads, whose text model it reads, or that it refuses with a reason."""
    from ropewalk.configs.models import ARCHITECTURES
    from ropewalk.configs.tables.towers import TOWER_ONLY, TOWERS
    from ropewalk.configs.tables.wrappers import WRAPPERS

    return set(ARCHITECTURES) | set(TOWERS) | set(WRAPPERS) | TOWER_ONLY


def unknown(installed: list[str], known: set[str]) -> list[str]:
    """Return the installed model types that ropewalk does not know."""
    return [name for name in installed if name not in known]


def key(row: dict[str, Any]) -> str:
    """Return the name of a row: its model_type and its variant, if any."""
    return " ".join((row["model_type"], row.get("variant", ""))).strip()


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record a row again: from the class defaults, or for a variant from the config of the row.

    Raises:
        CannotRecordError: see `record_model`.
    """
    if "variant" in row:
        recorded = record_model(row["model_type"], config_from(row["model_type"], row["config"]))
        return {**recorded, "config": row["config"], "variant": row["variant"]}
    if row["model_type"] == "deepseek_v4" and row["config"]["num_hidden_layers"] == 4:
        recorded = record_model(row["model_type"], config_from(row["model_type"], row["config"]))
        return {**recorded, "config": row["config"]}
    return record_model(row["model_type"])


def summary(row: dict[str, Any]) -> str:
    """Describe one layer of each kind, as a hint for a new row."""
    kinds = []
    for index, layer in row["layers"].items():
        if layer is None:
            kinds.append(f"layer {index}: no rope")
        else:
            kinds.append(
                f"layer {index}: {layer['pairing']}, {layer['rotary_dim']} from channel {layer['rotary_offset']}"
                + (f", axes {layer['axis']}" if "axis" in layer else "")
            )
    return "; ".join(kinds) or "no layer with attention"


def record_layer(recorder: Recorder, index: int) -> dict[str, Any] | None:
    """Record a layer in the format of class_defaults.json. Return None if it does not rotate."""
    measured = measure(recorder, index)
    if measured is None:
        return None
    if recorder.frequencies():
        buffer, inv_freq = frequencies_of(recorder, measured)
        factor = buffer.attention_factor
    else:  # the model has tables of sines instead, so use the angles at position 1
        inv_freq, factor = torch.tensor(measured.angles, dtype=torch.float32), 1.0
    rotary_dim = 2 * len(inv_freq)
    if measured.distances == {1}:
        pairing = "interleaved"
    elif measured.distances == {rotary_dim // 2}:
        pairing = "half"
    else:
        raise CannotRecordError(f"pairs at distances {sorted(measured.distances)} have no name")
    return {
        "inv_freq": [float(f) for f in inv_freq],
        "attention_factor": factor,
        "pairing": pairing,
        "rotary_dim": rotary_dim,
        "rotary_offset": min(a for a, _ in measured.pairs),
        **({} if measured.axes is None else {"axis": measured.axes}),
    }


def record_model(model_type: str, config: Any = None) -> dict[str, Any]:
    """Record a row of class_defaults.json.

    Raises:
        CannotRecordError: the model cannot be recorded. The message says why.
        KeyError: the installed transformers does not have the model_type.
    """
    config = config_of(model_type) if config is None else config
    try:
        values = plain(config)
    except Exception as error:
        raise CannotRecordError(f"{type(error).__name__}: {str(error)[:160]}") from error
    for name, value in COPIED.get(model_type, {}).items():
        setattr(config, name, value)
    return {"model_type": model_type, "config": values, **record_text(config)}


def record_text(config: Any) -> dict[str, Any]:
    """Record one layer of each kind, and the kind of each layer.

    Raises:
        CannotRecordError: no class of the model can be recorded. The message says why.
    """
    try:
        classes = model_classes(config)
    except Exception as error:
        raise CannotRecordError(f"{type(error).__name__}: {str(error)[:160]}") from error
    reasons = []
    for cls in classes:
        try:
            layers, kinds = _record_layers(Recorder(copy.deepcopy(config), cls))
        except Exception as error:
            name = "" if isinstance(error, CannotRecordError) else f"{type(error).__name__}: "
            reasons.append(f"{cls.__name__}: {name}{' '.join(str(error).split())[:120]}")
            continue
        return {"layers": layers, "layer_kinds": kinds}
    reasons.sort(key=lambda reason: NO_LAYERS in reason)
    raise CannotRecordError(reasons[0] if reasons else "no class of its file is built from this config alone")


def _record_layers(recorder: Recorder) -> tuple[dict[str, Any], list[int | None]]:
    by_signature: dict[str, int] = {}
    layers: dict[int, dict[str, Any] | None] = {}
    kinds: list[int | None] = []
    for index in range(len(recorder.layers)):
        if not recorder.has_attention(index):
            kinds.append(None)
            continue
        signature = recorder.signature(index)
        if signature not in by_signature:
            row = record_layer(recorder, index)
            by_signature[signature] = next((i for i, known in layers.items() if known == row), index)
            layers.setdefault(by_signature[signature], row)
        kinds += [by_signature[signature]] * recorder.attentions(index)
    return {str(index): row for index, row in layers.items()}, kinds


def new(names: list[str], seconds: int) -> dict[str, str]:
    """Return name → description of new model types: they mention rotary positions, and ropewalk does not know them.

    Types of transformers 5.24.0 are not new.
    """
    installed = [name for name in model_types() if (not names or name in names) and name not in LEFT_OUT]
    found = {}
    for name in unknown(installed, known_types()):
        if not rotates(name):
            continue
        try:
            with files.seconds(seconds, CannotRecordError):
                found[name] = summary(record_model(name))
        except CannotRecordError as error:
            found[name] = f"not recorded: {error}"
    return found


GOLDEN = files.Golden("class_defaults.json", key, record, new=new)
