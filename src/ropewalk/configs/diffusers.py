"""Read configs of diffusers' transformers, which denoise images and video. The key `_class_name` names the class.

Most heads have one block of channels for each axis of the positions. Each block has its own progression of frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropewalk._checks import MAX_HEAD_DIM, integer, shown
from ropewalk.configs import unread_keys
from ropewalk.configs.denoiser import Denoiser
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.reader import Fields
from ropewalk.configs.tables.denoisers import CLASSES, REFUSED
from ropewalk.rope.rope import Rope


def read(values: Mapping[str, Any], source: str) -> ModelRopes:
    """Read the ropes of a diffusers transformer. See `from_config` for errors."""
    fields = Fields(values, source)
    name = fields.get("_class_name")
    row = CLASSES.get(name)
    if row is None:
        must = "must be a transformer that ropewalk knows"
        raise fields.error("_class_name", must, shown(name), REFUSED.get(name) or _hint(name, values))
    origins = {"pairing": f"_class_name {name} (diffusers 0.42.1)", "positions": row.positions}
    layers = sum(fields.layers((key,)) if fields.has(key) else default for key, default in row.layers.items())
    origins["layers"] = " + ".join(row.layers)
    key, default_value = row.switch
    if key and not fields.boolean(key, default_value):
        origins["rope"] = f"{key} is not true, so nothing rotates"
        return ModelRopes((None,) * layers, name, source, origins=origins)
    head_dim, of_head = _head(fields, row)
    channels = _channels(fields, row, head_dim)
    if not row.head:
        head_dim, of_head = sum(channels), row.key
    total = sum(channels)
    if total > head_dim or (row.whole and total != head_dim):
        must = f"must add up to {'' if row.whole else 'at most '}the {head_dim} channels of a head ({of_head})"
        default = "" if fields.has(row.key) else " (the default of the class)"
        got = f"{list(channels)}{default}, which adds up to {total}"
        raise fields.error(row.key or of_head, must, got, "Check that both belong to the same model.")
    origins["head_dim"] = of_head
    origins["axes"] = row.key or of_head
    base, key = row.base
    origins["base"] = f"implied by {name}"
    if key and fields.has(key):
        base, origins["base"] = fields.check_base(key, fields.get(key)), key
    with fields.prefix_errors():
        axes = None if len(channels) == 1 else row.axes(channels, head_dim)
        rotary_dim = total if axes is None else 2 * axes.pairs
        rope = Rope(head_dim, base, row.pairing, rotary_dim=rotary_dim, axes=axes)
        rope, further = (rope, {}) if row.more is None else row.more(fields, rope)
    origins.update(fields.origins)
    warnings = (*fields.warnings, *unread_keys.refuse(fields, {}, (*row.position_keys, row.key)))
    names = () if rope.axes is None else row.axis_names
    return ModelRopes((rope,) * layers, name, source, axis_names=names, origins=origins, warnings=warnings, **further)


def _hint(name: str, values: Mapping[str, Any]) -> str:
    """Return a fix for the error about an unknown class. It names what to pass instead of a pipeline."""
    if name.endswith("Pipeline") or "transformer" in values:
        return "It is a pipeline: pass the folder of its transformer, transformer/ next to model_index.json."
    return "Build a Rope by hand: the model's own code defines how it rotates."


def _head(fields: Fields, row: Denoiser) -> tuple[int, str]:
    """Return head_dim, and a text that names the keys that it came from; (0, "") if the channels determine it."""
    sizes = {key: fields.size(key) if fields.has(key) else default for key, default in row.head.items()}
    if not sizes:
        return 0, ""
    if len(sizes) == 1:
        ((key, size),) = sizes.items()
        return integer(fields.source, key, size, at_least=2, at_most=MAX_HEAD_DIM), key
    width, heads = sizes
    if sizes[width] % sizes[heads]:
        must, fix = f"must be a multiple of {heads}={sizes[heads]}", "Check that both belong to the same model."
        raise fields.error(width, must, str(sizes[width]), fix)
    return sizes[width] // sizes[heads], f"{width} / {heads}"


def _channels(fields: Fields, row: Denoiser, head_dim: int) -> tuple[int, ...]:
    """Return the number of channels of each axis."""
    if callable(row.channels):
        return row.channels(head_dim)
    numbers = fields.get(row.key)
    if numbers is None and row.channels:
        return row.channels
    if row.unit:
        number = integer(fields.source, row.key, numbers, at_least=1, at_most=MAX_HEAD_DIM)
        return (row.unit * number,) * len(row.channels)
    if not isinstance(numbers, list | tuple) or len(numbers) != len(row.axis_names):
        must = f"must be a list of {len(row.axis_names)} numbers of channels: {', '.join(row.axis_names)}"
        raise fields.error(row.key, must, shown(numbers), "Check that it is the list of this model.")
    return tuple(
        integer(fields.source, f"{row.key}[{i}]", value, at_least=2, at_most=MAX_HEAD_DIM)
        for i, value in enumerate(numbers)
    )
