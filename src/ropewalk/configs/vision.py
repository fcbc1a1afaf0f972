"""Find the vision tower in a config, and read its ropes by the facts that `tables/towers.py` states about it."""

from __future__ import annotations

from collections.abc import Mapping

from ropewalk._checks import argument, possible, short_key, shown
from ropewalk.configs import unread_keys
from ropewalk.configs.model_ropes import VisionRopes
from ropewalk.configs.reader import SECTIONS, Fields
from ropewalk.configs.tables.towers import TOWER_OF_MODEL, TOWER_ONLY, TOWERS
from ropewalk.configs.tower import Tower

_PART_KEYS = ("vision_config", "thinker_config", "backbone_config")  # keys of a tower, or of a part that contains one
_BASES = ("rope_theta", "rope_scaling.rope_theta", "rope_parameters.rope_theta")
# Sizes of learned positions, which are added to the patches.
_LEARNED = ("num_position_embeddings", "position_embedding_size")
_TYPES = ("axial", "default", None)


def standalone_tower(fields: Fields, model_type: str) -> VisionRopes | None:
    """Read the ropes of a config that describes only a vision tower. Return None if it is not that of a known tower."""
    if model_type in TOWER_ONLY:
        return nested_tower(fields)
    row = TOWERS.get(model_type)
    return None if row is None else _read(fields, row, model_type, inside=False)


def nested_tower(fields: Fields, warnings: list[str] | None = None) -> VisionRopes | None:
    """Read the ropes of the vision tower inside the config of a multimodal model. Return None if it has no known tower.

    Args:
        fields: the config of the whole model.
        warnings: a list, to which a warning is added for each unknown tower with keys about rotation. None for no
            warnings.

    Raises:
        RopeError: the config of a tower is not an object, or a known tower has keys that it does not support.
    """
    outer = fields.get("model_type")
    for key in _PART_KEYS:
        part = fields.get(key)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise fields.error(key, "must be an object or null", shown(part), f"Check the file.{_without_tower()}")
        inner = Fields(part, f"{fields.source}: {key}", f"{fields.path}{key}.")
        inner_type = inner.get("model_type")
        # In files of Qwen-VL, the config of the tower has no model_type, or that of the whole model.
        model_type = TOWER_OF_MODEL.get(outer, f"{outer}_vision") if inner_type in (None, "", outer) else inner_type
        row = TOWERS.get(model_type) if isinstance(model_type, str) else None
        vision_ropes = nested_tower(inner, warnings) if row is None else _read(inner, row, model_type, inside=True)
        if vision_ropes is not None:
            return vision_ropes
        rope_keys = sorted(
            str(name) for name, value in part.items() if value is not None and unread_keys.mentions_rope(str(name))
        )
        if rope_keys and warnings is not None:
            warnings.append(
                f"{key}: ropewalk does not know the tower {shown(inner_type)}, so its {rope_keys[0]} was not read."
            )
    return None


def _read(fields: Fields, row: Tower, model_type: str, *, inside: bool) -> VisionRopes:
    origins = {"pairing, axes": f"implied by model_type {model_type} ({row.source})"}
    head_dim, origins["head_dim"] = _head(fields, row, model_type, inside=inside)
    base, origins["base"] = _base(fields, row, model_type)
    for section in SECTIONS:
        _check_section(fields, section, model_type)
    unread_keys.refuse(fields, {}, (*row.position_keys, *_LEARNED))
    with fields.prefix_errors():
        ropes = row.ropes(head_dim, base)
    return VisionRopes(ropes, row.axis_names, row.positions, model_type, fields.source, origins, fields.config)


def _head(fields: Fields, row: Tower, model_type: str, *, inside: bool) -> tuple[int, str]:
    """Return head_dim from the config or from the defaults of the tower's class, and where it came from."""
    width, heads, own = row.sizes
    if fields.has("head_dim"):
        return fields.channels("head_dim"), "head_dim"
    if own is not None:
        return own, f"{own}, the default of the class of {model_type}"
    of_class = {row.width[0]: width, row.heads[0]: heads}
    keys = (row.width, row.heads)
    # transformers omits values that equal the defaults of a class from nested configs.
    filled = {key[0]: of_class[key[0]] for key in keys if inside and not any(map(fields.has, key))}
    fields = _with_defaults(fields, filled)
    head_dim = fields.head_width(*keys, "head_dim")
    where = [fields.first_present(key) for key in keys]
    if row.divided_by:
        divisor = fields.size(row.divided_by) if fields.has(row.divided_by) else 1
        head_dim, where = head_dim // divisor, [*where, *([row.divided_by] if divisor > 1 else [])]
    origin = " / ".join(f"{key} ({filled[key]}, the default of the class)" if key in filled else key for key in where)
    return head_dim, origin


def _with_defaults(fields: Fields, more: Mapping[str, object]) -> Fields:
    filled = Fields({**fields.config, **more}, fields.source, fields.path)
    filled.read_keys = fields.read_keys
    return filled


def _base(fields: Fields, row: Tower, model_type: str) -> tuple[float, str]:
    """Return the base, and where it came from.

    It is the base of the table of towers if the config states none, since most towers have no key for it.
    """
    found = None
    for where in _BASES:
        if not fields.has(where):
            continue
        base = fields.check_base(where, fields.get(where))
        found = (base, where) if found is None else found
        if base != found[0]:
            fix = "Remove the wrong one."
            raise fields.error(where, f"must agree with {found[1]}={found[0]:g}", shown(fields.get(where)), fix)
    return (row.base, f"implied by model_type {model_type}") if found is None else found


def _check_section(fields: Fields, name: str, model_type: str) -> None:
    """Raise a RopeError if `rope_scaling` or `rope_parameters` has a key that the code of towers does not read.

    That code reads only the base.
    """
    section = fields.get(name)
    if section is None:
        return
    if not isinstance(section, Mapping):
        raise fields.error(name, "must be an object or null", shown(section), "Write null for no scaling.")
    for key, value in section.items():
        if key in ("rope_type", "type") and value not in _TYPES:
            must = f"must be 'axial' for {model_type}"
            raise fields.error(f"{name}.{key}", must, shown(value), "The model's own code has no other rope_type.")
        if key not in ("rope_type", "type", "rope_theta") and value is not None:
            raise fields.error(
                f"{name}.{short_key(key)}",
                f"must be a key that {model_type} reads",
                shown(value),
                f"The model's own code reads only rope_theta.{_without_tower()}",
            )


def _without_tower() -> str:
    return possible(f" Pass {argument('text_only', True)} to omit the tower.", "text_only")
