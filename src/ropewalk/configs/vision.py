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


def inside(fields: Fields, warnings: list[str] | None = None) -> VisionRopes | None:
    """The ropes of the tower in a config of several models; None where it has none that is known.

    Args:
        fields: the config.
        warnings: what to add to where a tower that is not known has keys about rotation.

    Raises:
        RopeError: the config of a known tower says something else than it can; or that of a tower is no object.
    """
    outer = fields.get("model_type")
    for key in _INSIDE:
        part = fields.get(key)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise fields.error(key, "it must be an object or null", shown(part), "text_only=True leaves the tower out.")
        inner = Fields(part, f"{fields.source}: {key}", f"{fields.path}{key}.")
        stated = inner.get("model_type")
        # Files of Qwen-VL call the tower as they call the whole, or leave its name out.
        model_type = OF_WHOLE.get(outer, f"{outer}_vision") if stated in (None, "", outer) else stated
        row = TOWERS.get(model_type) if isinstance(model_type, str) else None
        found = inside(inner, warnings) if row is None else _read(inner, row, model_type, inside=True)
        if found is not None:
            return found
        about = sorted(str(name) for name, value in part.items() if value is not None and strays.says_rope(str(name)))
        if about and warnings is not None:
            warnings.append(f"{key}: {shown(stated)} is no tower that ropewalk knows; its {about[0]} was not read.")
    return None


def _read(fields: Fields, row: Tower, model_type: str, *, inside: bool) -> VisionRopes:
    origins = {"pairing, axes": f"implied by model_type {model_type} ({row.source})"}
    head_dim, origins["head_dim"] = _head(fields, row, model_type, inside=inside)
    base, origins["base"] = _base(fields, row, model_type)
    for section in _SECTIONS:
        _check_section(fields, section, model_type)
    strays.refuse(fields, {}, (*row.known, *_LEARNED))
    with fields.named():
        ropes = row.ropes(head_dim, base)
    return VisionRopes(ropes, row.axis_names, row.positions, model_type, fields.source, origins)


def _head(fields: Fields, row: Tower, model_type: str, *, inside: bool) -> tuple[int, str]:
    """Channels of a head, and where they came from: what is stated, or what the class has."""
    width, heads, own = row.sizes
    if fields.has("head_dim"):
        return fields.size("head_dim"), "head_dim"
    if own is not None:
        return own, f"{own}, that of the class of {model_type}"
    of_class = {row.width[0]: width, row.heads[0]: heads}
    keys = (row.width, row.heads)
    # Inside another, transformers leaves out what a class has by default.
    filled = {key[0]: of_class[key[0]] for key in keys if inside and not any(map(fields.has, key))}
    fields = _with(fields, filled)
    head_dim = fields.head_width(*keys, "head_dim")
    where = [fields.first(key) for key in keys]
    if row.divided_by:
        divisor = fields.size(row.divided_by) if fields.has(row.divided_by) else 1
        head_dim, where = head_dim // divisor, [*where, *([row.divided_by] if divisor > 1 else [])]
    said = " / ".join(f"{key} ({filled[key]}, that of the class)" if key in filled else key for key in where)
    return head_dim, said


def _with(fields: Fields, more: Mapping[str, object]) -> Fields:
    filled = Fields({**fields.config, **more}, fields.source, fields.path)
    filled.read = fields.read
    return filled


def _base(fields: Fields, row: Tower, model_type: str) -> tuple[float, str]:
    """The base that is stated, or that of the class: most towers have no key for it. And where it came from."""
    found = None
    for where in _BASES:
        if not fields.has(where):
            continue
        base = fields.base(where, fields.get(where), None)
        found = (base, where) if found is None else found
        if base != found[0]:
            raise fields.error(where, f"it must agree with {found[0]:g}", shown(fields.get(where)), "Which is right?")
    return (row.base, f"implied by model_type {model_type}") if found is None else found


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
