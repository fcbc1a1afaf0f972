"""Which layer of a GGUF file is of which kind."""

from __future__ import annotations

import dataclasses

from ropewalk._checks import shown
from ropewalk.configs.architecture import ALL, NO_ROPE, Every
from ropewalk.configs.gguf.architectures import DIFFERING, FINETUNED_IS_SWITCH, KV_HEADS, Layers
from ropewalk.configs.gguf.keys import Keys
from ropewalk.configs.layers import every

_WINDOW = "attention.sliding_window"


def kinds_of_layers(keys: Keys) -> list[str]:
    """The kind of each layer: a name of the row's kinds, `ALL` or `NO_ROPE`."""
    fields = keys.fields
    blocks = fields.layers((keys.key("block_count"),))
    count = blocks - _drafting(keys, blocks)
    switch = keys.key("rope.scaling.finetuned")
    if not fields.boolean(switch, True) and keys.architecture in FINETUNED_IS_SWITCH:
        keys.origins["layer_types"] = f"{switch} is false, so nothing rotates"
        return [NO_ROPE] * count
    row = DIFFERING.get(keys.architecture)
    if row is None or _are_alike(keys, row, count):
        return [ALL] * count
    stated = _listed(keys, row, count, blocks) or _otherwise(keys, row, count)
    if row.fixed and isinstance(row.otherwise, Every):
        origins: dict[str, str] = {}
        kinds = every(fields, dataclasses.replace(row.otherwise, key=""), count, origins)
        if stated != kinds:
            must = f"it must say the same as what is {origins['layer_types']}"
            cure = f"llama.cpp rotates by that, whatever the key says ({row.source})."
            raise fields.error(keys.key(row.key), must, "something else", cure)
    return stated


def _drafting(keys: Keys, blocks: int) -> int:
    """Blocks at the end that are no layers of the model: they predict further tokens."""
    key = keys.key("nextn_predict_layers")
    keys.origins["layers"] = keys.key("block_count")
    if keys.fields.get(key) in (None, 0):
        return 0
    drafting = keys.fields.size(key, at_most=blocks - 1)
    keys.origins["layers"] += f" - {key}"
    return drafting


def _are_alike(keys: Keys, row: Layers, count: int) -> bool:
    """Whether the file has the layers of its architecture all alike."""
    fields, key = keys.fields, keys.key(_WINDOW)
    slides = fields.get(key) not in (None, 0) and fields.size(key) > 0
    if row.no_window and fields.has(key) and not slides:
        raise fields.error(key, "it must not be 0", shown(fields.get(key)), row.no_window)
    if row.window and not slides:
        keys.origins["layer_types"] = f"no {key} is given, so all layers are alike"
        return True
    if row.count in (None, count):
        return False
    if slides:
        must = f"it must be 0 or absent, since {keys.architecture} has {count} layers and not {row.count}"
        cure = f"llama.cpp then rotates all layers ({row.source}). Read the model's config.json instead."
        raise fields.error(key, must, shown(fields.get(key)), cure)
    keys.origins["layer_types"] = f"{count} layers, and not {row.count}: all are alike ({row.source})"
    return True


def _listed(keys: Keys, row: Layers, count: int, blocks: int) -> list[str] | None:
    """The kinds by the list of the file, which may go on over blocks that only draft; None if there is no list."""
    key, fields = keys.key(row.key), keys.fields
    value = fields.get(key)
    if isinstance(value, int) and row.key == KV_HEADS:
        value = (value,) * count
    if not row.key or value is None or (isinstance(value, int) and row.key == _interval_key(row)):
        return None
    keys.taken.add(key)
    keys.origins["layer_types"] = key
    if not isinstance(value, tuple) or len(value) not in (count, blocks):
        got = f"{len(value)} entries" if isinstance(value, tuple) else shown(value)
        raise fields.error(key, f"it must be a list with an entry for each of the {count} layers", got, "Mend it.")
    for flag in value:
        if not isinstance(flag, int) or flag < 0:
            raise fields.error(key, "each must be true, false or a count", shown(flag), "Mend it.")
    return [row.flagged if flag else row.unflagged for flag in value[:count]]


def _interval_key(row: Layers) -> str:
    return row.otherwise.key if isinstance(row.otherwise, Every) else ""


def _otherwise(keys: Keys, row: Layers, count: int) -> list[str]:
    """The kinds where the file has no list."""
    if isinstance(row.otherwise, Every):
        key = keys.key(row.otherwise.key) if row.otherwise.key else ""
        return every(keys.fields, dataclasses.replace(row.otherwise, key=key), count, keys.origins)
    if row.otherwise is None:
        key = keys.key(row.key)
        raise keys.fields.error(key, "it must be given, since the layers differ", "none", "Convert the model anew.")
    return [row.otherwise] * count
