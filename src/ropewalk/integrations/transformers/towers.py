"""Find the rotary modules of vision towers, compare them with the towers' configs, and build their replacements."""

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
from ropewalk.integrations.transformers.probe import Form, Width, probe, width_of
from ropewalk.integrations.transformers.tower_angles import (
    PERMUTE,
    BatchAngles,
    CentreAngles,
    FixedAngles,
    GridAngles,
    TowerAngles,
    split_parts,
)
from ropewalk.integrations.transformers.unsupported import check_tower_supported
from ropewalk.rope import Rope


def kind_of(module: nn.Module) -> type[TowerAngles] | None:
    """Return the class that replaces this module, or None if it is not the rotary module of a known tower."""
    if _model_type(module) not in TOWERS:
        return None
    for kind in (GridAngles, CentreAngles, FixedAngles):
        if kind.replaces(module):
            return BatchAngles if _parts(module) > 1 else kind
    return None


def build_replacement(
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
        ropes: the ropes of the tower's config. None uses the angles that the tower computes itself.
        installed: a dict from each function that the plan already replaces to its form.

    Raises:
        RopeError: the tower is not supported, or its rotation differs from its config.
    """
    module = model.get_submodule(name)
    check_tower_supported(_model_type(module))
    owner = model.get_submodule(name.rpartition(".")[0])
    parts, (returned, positions) = _parts(module), _call_module(name, module, kind)
    width = _width(name, returned, parts)
    forms = _forms(name, functions_of(owner), width, parts, installed)
    if ropes is not None:
        for rope, tables in zip(ropes, split_parts(returned, parts), strict=True):
            compare.check_tower(name, module, rope, tables, positions, width)
            _check_channels(name, forms, rope)
    in_windows = hasattr(type(owner), PERMUTE)
    return kind(module, width, ropes, forms, next(iter(forms.values())).pairing, in_windows=in_windows)


def _parts(module: nn.Module) -> int:
    """Return the number of parts of a head that are rotated separately."""
    row = TOWERS[_model_type(module)]
    return len(row.ropes(96, row.base))


def _model_type(module: nn.Module) -> str:
    return getattr(compare.own_config(module, None), "model_type", None) or ""


def _call_module(name: str, module: nn.Module, kind: type[TowerAngles]) -> tuple[Any, Tensor]:
    """Call a copy of the module, and return its tables and the test positions `[axes, tokens]`."""
    buffer = next(iter(module.buffers()))
    if buffer.is_meta:
        raise error(WHO, f"{name} must have values", "a model on the meta device", "Load the weights first.")
    axes = len(TOWERS[_model_type(module)].axis_names)
    arguments, positions = kind.sample(module, compare.distinct_positions(axes, buffer.device))
    try:
        with torch.no_grad():
            return copy.deepcopy(module).eval()(*arguments), positions
    except Exception as e:  # the code of another version may raise anything
        must = f"{name} must take the same arguments as in transformers 5.23"
        raise error(WHO, must, f"{type(e).__name__}: {e}", "This tower is not supported.") from e


def _width(name: str, returned: Any, parts: int) -> Width:
    """Return the format of a tower's tables.

    Raises:
        RopeError: the format is not supported.
    """
    if isinstance(returned, Tensor) and returned.is_complex():
        return "complex"
    if not isinstance(returned, Tensor):
        found = {width_of(cos, cos.shape[-1] // 2) for cos, _ in split_parts(returned, parts)}
        width = found.pop()
        if width is not None and not found:
            return width
    must = f"{name} must return cos and sin with two columns for each pair, or complex numbers"
    raise error(WHO, must, "other tables", "This tower computes its angles in a way that is not supported.")


def _forms(
    name: str, places: Mapping[Place, Any], width: Width, parts: int, installed: Mapping[Place, Form]
) -> dict[Place, Form]:
    """Return the functions of the tower's code that rotate by tables of the format `width`, and their forms.

    Raises:
        RopeError: there is no such function, or a function has no form or is already replaced with another form.
    """
    forms = {
        place: probe(original(function), width, shared=parts == 1, parts=parts) for place, function in places.items()
    }
    usable = {place: form for place, form in forms.items() if form and not _has_other_form(place, form, installed)}
    if usable and len(usable) == len(forms):
        return usable
    raise error(
        WHO,
        f"the tower's code must call functions that rotate q and k by the cos and sin of {name}",
        ", ".join(".".join(place) for place in places) or "code without such a function",
        "This tower is not supported, because it rotates in another way or rotates other tokens.",
    )


def _has_other_form(place: Place, form: Form, installed: Mapping[Place, Form]) -> bool:
    """Return whether a function has been replaced, or is going to be, by a dispatcher of another form than `form`."""
    current = getattr(importlib.import_module(place[0]), place[1])
    return installed.get(place, form) != form or getattr(current, "ropewalk_form", form) != form


def _check_channels(name: str, forms: Mapping[Place, Form], rope: Rope) -> None:
    """Raise a RopeError if a function rotates other channels than the rope."""
    for place, form in forms.items():
        sliced = form.parts == 1 and rope.rotary_dim < rope.head_dim
        if form.pairing != rope.pairing or form.order != "same" or (sliced and form.whole != "first"):
            how = f"{'.'.join(place)}: {form.pairing}, order {form.order}, in wider heads {form.whole}"
            must = f"{name} must rotate the channels of its config ({rope})"
            raise error(WHO, must, how, "Use angles='theirs'.")
