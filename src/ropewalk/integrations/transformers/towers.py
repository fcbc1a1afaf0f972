"""Find the rotary modules of vision towers, compare them with the tower's config, and build their replacements."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk._checks import error
from ropewalk.configs.vision_towers import TOWERS
from ropewalk.integrations.transformers import compare
from ropewalk.integrations.transformers.compare import WHO
from ropewalk.integrations.transformers.dispatch import Place, functions_of, original
from ropewalk.integrations.transformers.not_served import check_tower_served
from ropewalk.integrations.transformers.probe import Form, Width, probe, width_of
from ropewalk.integrations.transformers.tower_angles import (
    PERMUTE,
    BatchAngles,
    CentreAngles,
    FixedAngles,
    GridAngles,
    TowerAngles,
    in_parts,
)
from ropewalk.rope import Rope


def kind_of(module: nn.Module) -> type[TowerAngles] | None:
    """The class that replaces this module. None if it is not the rotary module of a known tower."""
    if _model_type(module) not in TOWERS:
        return None
    for kind in (GridAngles, CentreAngles, FixedAngles):
        if kind.replaces(module):
            return BatchAngles if _parts(module) > 1 else kind
    return None


def stand_in(
    model: nn.Module,
    name: str,
    kind: type[TowerAngles],
    ropes: tuple[Rope, ...] | None,
    installed: Mapping[Place, Form],
) -> TowerAngles:
    """Build the replacement of a tower's rotary module.

    Args:
        model: the model.
        name: the name of the rotary module.
        kind: the class of the replacement.
        ropes: the ropes of the tower's config. None uses the tower's own angles.
        installed: the functions that the plan replaces already.

    Raises:
        RopeError: the tower is not supported, or its rotation differs from its config.
    """
    module = model.get_submodule(name)
    check_tower_served(_model_type(module))
    owner = model.get_submodule(name.rpartition(".")[0])
    parts, (returned, positions) = _parts(module), _called(name, module, kind)
    width = _width(name, returned, parts)
    forms = _forms(name, functions_of(owner), width, parts, installed)
    if ropes is not None:
        for rope, each in zip(ropes, in_parts(returned, parts), strict=True):
            compare.check_tower(name, module, rope, each, positions, width)
            _check_channels(name, forms, rope)
    in_windows = hasattr(type(owner), PERMUTE)
    return kind(module, width, ropes, forms, next(iter(forms.values())).pairing, in_windows=in_windows)


def _parts(module: nn.Module) -> int:
    """The number of parts of a head that are rotated separately."""
    row = TOWERS[_model_type(module)]
    return len(row.ropes(96, row.base))


def _model_type(module: nn.Module) -> str:
    return getattr(compare.own_config(module, None), "model_type", None) or ""


def _called(name: str, module: nn.Module, kind: type[TowerAngles]) -> tuple[Any, Tensor]:
    """Call the module. Return its tables and the positions `[axes, tokens]`, which differ on each axis."""
    buffer = next(iter(module.buffers()))
    if buffer.is_meta:
        raise error(WHO, f"{name} must have its numbers", "a model on the meta device", "Load the weights first.")
    axes = len(TOWERS[_model_type(module)].axis_names)
    given, positions = kind.sample(module, compare.places(axes, buffer.device))
    try:
        with torch.no_grad():
            return copy.deepcopy(module).eval()(*given), positions
    except Exception as e:  # the code of another version may raise anything
        must = f"{name} must take the same arguments as in transformers 5.23"
        raise error(WHO, must, f"{type(e).__name__}: {e}", "This tower is not supported.") from e


def _width(name: str, returned: Any, parts: int) -> Width:
    if isinstance(returned, Tensor) and returned.is_complex():
        return "complex"
    if not isinstance(returned, Tensor):
        found = {width_of(cos, cos.shape[-1] // 2) for cos, _ in in_parts(returned, parts)}
        width = found.pop()
        if width is not None and not found:
            return width
    must = f"{name} must return cos and sin with two columns for each pair, or complex numbers"
    raise error(WHO, must, "other tables", "This tower computes its angles in another way, which is not supported.")


def _forms(
    name: str, places: Mapping[Place, Any], width: Width, parts: int, installed: Mapping[Place, Form]
) -> dict[Place, Form]:
    """The functions of the tower's code, which must all rotate by tables of this width."""
    forms = {
        place: probe(original(function), width, shared=parts == 1, parts=parts) for place, function in places.items()
    }
    known = {place: form for place, form in forms.items() if form and not _other(place, form, installed)}
    if known and len(known) == len(forms):
        return known
    raise error(
        WHO,
        f"the tower's code must call functions that rotate q and k by the cos and sin of {name}",
        ", ".join(".".join(place) for place in places) or "code without such a function",
        "This tower is not supported, because it rotates in another way, or rotates other tokens.",
    )


def _other(place: Place, form: Form, installed: Mapping[Place, Form]) -> bool:
    """Whether the function was replaced with another form, or is going to be for the text model."""
    now = getattr(importlib.import_module(place[0]), place[1])
    return installed.get(place, form) != form or getattr(now, "ropewalk_form", form) != form


def _check_channels(name: str, forms: Mapping[Place, Form], rope: Rope) -> None:
    for place, form in forms.items():
        sliced = form.parts == 1 and rope.rotary_dim < rope.head_dim
        if form.pairing != rope.pairing or form.order != "same" or (sliced and form.whole != "first"):
            how = f"{'.'.join(place)}: {form.pairing}, order {form.order}, of wider heads {form.whole}"
            must = f"{name} must rotate the channels of its config ({rope})"
            raise error(WHO, must, how, "Use angles='theirs'.")
