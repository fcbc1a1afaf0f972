"""Determine the kind of each layer of a GGUF file. All layers of a kind, such as "sliding_attention", share a rope."""

from __future__ import annotations

from ropewalk._checks import shown
from ropewalk.configs.gguf.keys import Keys
from ropewalk.configs.gguf.row import ALL, KV_HEADS, NO_ROPE, Every, Layers

_WINDOW = "attention.sliding_window"


def kinds_of_layers(keys: Keys) -> list[str]:
    """Return the kind of each layer, one of the names in `GgufRow.kinds`.

    Raises:
        RopeError: a key has an invalid value, or the kinds cannot be determined.
    """
    fields = keys.fields
    blocks = fields.layers((keys.key("block_count"),))
    count = blocks - _draft_blocks(keys, blocks)
    switch = keys.key("rope.scaling.finetuned")
    if not fields.boolean(switch, True) and keys.row.finetuned_is_switch:
        keys.origins["layer_types"] = f"{switch} is false, so nothing rotates"
        return [NO_ROPE] * count
    layers = keys.row.layers
    if layers is None or _are_alike(keys, layers, count):
        return [ALL] * count
    kinds = _kinds_by_list(keys, layers, count, blocks) or _kinds_by_pattern(keys, layers, count)
    if layers.ignores_list and isinstance(layers.default, Every):
        pattern_kinds, implied = _repeat(layers.default, layers.default.n, count)
        if kinds != pattern_kinds:
            must = f"must agree with the implied kinds ({implied})"
            fix = f"llama.cpp ignores the key ({keys.row.source}). Convert the model again."
            raise fields.error(keys.key(layers.key), must, "another list", fix)
    return kinds


def _draft_blocks(keys: Keys, blocks: int) -> int:
    """Return the number of blocks at the end that only predict further tokens and are not layers of the model."""
    key = keys.key("nextn_predict_layers")
    keys.origins["layers"] = keys.key("block_count")
    if keys.fields.get(key) in (None, 0):
        return 0
    draft_blocks = keys.fields.size(key, at_most=blocks - 1)
    keys.origins["layers"] += f" - {key}"
    return draft_blocks


def _are_alike(keys: Keys, layers: Layers, count: int) -> bool:
    """Whether all layers of this file are alike, although the layers of its architecture usually differ."""
    fields, key = keys.fields, keys.key(_WINDOW)
    slides = fields.get(key) not in (None, 0) and fields.size(key) > 0
    if layers.zero_window_refusal and fields.has(key) and not slides:
        raise fields.error(key, "must not be 0", shown(fields.get(key)), layers.zero_window_refusal)
    if layers.alike_without_window and not slides:
        keys.origins["layer_types"] = f"no {key} is given, so all layers are alike"
        return True
    if layers.count in (None, count):
        return False
    if slides:
        must = f"must be 0 or missing, since {keys.architecture} has {count} layers instead of {layers.count}"
        fix = f"llama.cpp then rotates all layers ({keys.row.source}). Read the model's config.json instead."
        raise fields.error(key, must, shown(fields.get(key)), fix)
    keys.origins["layer_types"] = f"{count} layers instead of {layers.count}, so all are alike ({keys.row.source})"
    return True


def _kinds_by_list(keys: Keys, layers: Layers, count: int, blocks: int) -> list[str] | None:
    """Return the kind of each layer from a list in the file, or None if the file has no such list.

    Args:
        keys: the keys of the file.
        layers: the `Layers` of its architecture.
        count: the number of layers.
        blocks: the number of layers plus that of the blocks that predict further tokens. The list may have an entry
            for each of these blocks as well.
    """
    key, fields = keys.key(layers.key), keys.fields
    value = fields.get(key)
    if isinstance(value, int) and layers.key == KV_HEADS:
        value = (value,) * count
    interval_key = layers.default.key if isinstance(layers.default, Every) else ""
    if not layers.key or value is None or (isinstance(value, int) and layers.key == interval_key):
        return None
    keys.used.add(key)
    keys.origins["layer_types"] = key
    if not isinstance(value, tuple) or len(value) not in (count, blocks):
        got = f"{len(value)} entries" if isinstance(value, tuple) else shown(value)
        must = f"must be a list with an entry for each of the {count} layers"
        raise fields.error(key, must, got, "Convert the model again.")
    for flag in value:
        if not isinstance(flag, int) or flag < 0:
            raise fields.error(key, "must contain only booleans or counts", shown(flag), "Convert the model again.")
    return [layers.true_kind if flag else layers.false_kind for flag in value[:count]]


def _kinds_by_pattern(keys: Keys, layers: Layers, count: int) -> list[str]:
    """Return the kind of each layer of a file that has no list of kinds."""
    pattern = layers.default
    if isinstance(pattern, Every):
        key = keys.key(pattern.key)
        has_key = bool(pattern.key) and keys.fields.has(key)
        kinds, which = _repeat(pattern, keys.fields.size(key) if has_key else pattern.n, count)
        keys.origins["layer_types"] = f"{key if has_key else 'implied'}: {which}"
        return kinds
    if pattern is None:
        key = keys.key(layers.key)
        raise keys.fields.error(key, "must be given, since the layers differ", "none", "Convert the model again.")
    return [pattern] * count


def _repeat(pattern: Every, n: int, count: int) -> tuple[list[str], str]:
    """Return the kind of each of `count` layers, and a description of the pattern, which repeats every n layers."""
    at = 0 if pattern.first else n - 1
    kinds = [pattern.kind if i % n == at else pattern.rest for i in range(count)]
    return kinds, f"the {'first' if pattern.first else 'last'} of every {n} is {pattern.kind}"
