"""The rope of a vision tower: found in a config, and read from it by the row of its model_type."""

from __future__ import annotations

from collections.abc import Mapping

from ropewalk._checks import shown
from ropewalk.configs import strays
from ropewalk.configs.fields import Fields
from ropewalk.configs.layer_ropes import VisionRopes
from ropewalk.configs.vision_towers import OF_WHOLE, TOWERS, Tower

_INSIDE = ("vision_config", "thinker_config", "backbone_config")  # keys of parts that are a tower, or that hold one
_AROUND = ("sam3", "sam3_vision_model")  # models of which the tower alone rotates
_BASES = ("rope_theta", "rope_scaling.rope_theta", "rope_parameters.rope_theta")
_SECTIONS = ("rope_scaling", "rope_parameters")
_LEARNED = ("num_position_embeddings", "position_embedding_size")  # of positions that are added to the patches
_TYPES = ("axial", "default", None)


def alone(fields: Fields) -> VisionRopes | None:
    """The ropes of a config that is a tower by its own model_type, or around one; None where it is none."""
    model_type = fields.get("model_type")
    if model_type in _AROUND:
        return inside(fields)
    row = TOWERS.get(model_type) if isinstance(model_type, str) else None
    return None if row is None else _read(fields, row, str(model_type), inside=False)


def inside(fields: Fields) -> VisionRopes | None:
    """The ropes of the tower in a config of several models; None where it has none that is known.

    Raises:
        RopeError: the config of a known tower says something else than it can.
    """
    outer = fields.get("model_type")
    for key in _INSIDE:
        part = fields.get(key)
        if not isinstance(part, Mapping):
            continue
        inner = Fields(part, f"{fields.source}: {key}", f"{fields.path}{key}.")
        stated = inner.get("model_type")
        # Files of Qwen-VL call the tower as they call the whole, or leave its name out.
        model_type = OF_WHOLE.get(outer, f"{outer}_vision") if stated in (None, "", outer) else stated
        row = TOWERS.get(model_type) if isinstance(model_type, str) else None
        found = inside(inner) if row is None else _read(inner, row, model_type, inside=True)
        if found is not None:
            return found
    return None


def _read(fields: Fields, row: Tower, model_type: str, *, inside: bool) -> VisionRopes:
    width, heads, own = row.sizes
    head_dim = _size(fields, ("head_dim",), own)
    if head_dim is None:
        keys = (row.width, row.heads)
        if inside:  # transformers leaves out what a class has by default
            filled = {key[0]: value for key, value in zip(keys, (width, heads), strict=True) if not _given(fields, key)}
            fields = _with(fields, filled)
        divisor = 1 if not row.divided_by else _size(fields, (row.divided_by,), 1) or 1
        head_dim = fields.head_width(*keys, "head_dim") // divisor
    base = _base(fields, row)
    for section in _SECTIONS:
        _check_section(fields, section, model_type)
    strays.refuse(fields, {}, (*row.known, *_LEARNED))
    with fields.named():
        ropes = row.ropes(head_dim, base)
    return VisionRopes(ropes, row.axis_names, row.positions, model_type, fields.source)


def _given(fields: Fields, keys: tuple[str, ...]) -> bool:
    return any(fields.has(key) for key in keys)


def _with(fields: Fields, more: Mapping[str, object]) -> Fields:
    filled = Fields({**fields.config, **more}, fields.source, fields.path)
    filled.read |= fields.read
    return filled


def _size(fields: Fields, keys: tuple[str, ...], default: int | None) -> int | None:
    return fields.size(keys) if _given(fields, keys) else default


def _base(fields: Fields, row: Tower) -> float:
    """The base that is stated, or that of the class: most towers have no key for it."""
    base = None
    for where in _BASES:
        if fields.has(where):
            base = fields.base(where, fields.get(where), None) if base is None else base
            if fields.base(where, fields.get(where), None) != base:
                raise fields.error(where, f"it must agree with {base:g}", shown(fields.get(where)), "Which is right?")
    return row.base if base is None else base


def _check_section(fields: Fields, name: str, model_type: str) -> None:
    """A tower reads the base of its section, and nothing else."""
    section = fields.get(name)
    if section is None:
        return
    if not isinstance(section, Mapping):
        raise fields.error(name, "it must be an object or null", shown(section), "Write null for no scaling.")
    for key, value in section.items():
        if key in ("rope_type", "type") and value not in _TYPES:
            must = f"{model_type} must have rope_type 'axial'"
            raise fields.error(f"{name}.{key}", must, shown(value), "Its own code has no other.")
        if key not in ("rope_type", "type", "rope_theta") and value is not None:
            raise fields.error(
                f"{name}.{shown(key)}",
                f"{model_type} must not have keys that it does not read",
                shown(value),
                "Its own code reads rope_theta. text_only=True leaves the tower out.",
            )
