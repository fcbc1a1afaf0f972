"""Compare a model's own rotary module with what ropewalk reads from its config."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ropewalk import formats
from ropewalk._checks import error, error_from, shown
from ropewalk.formats import Width
from ropewalk.integrations.transformers.functions import cos_and_sin
from ropewalk.rope.rope import Rope

WHO = "accelerate"
# Small and large positions, because a custom module may compute something else beyond some length.
_POSITIONS = (0, 1, 2, 9, 100, 3_000, 40_000)
_AXES = (3, 4)  # numbers of axes of models
_ARGUMENTS = {"self", "x", "position_ids", "layer_type"}  # of the forward method of a rotary module


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module of any name has frequencies and is called with x and position_ids."""
    return (
        bool(kinds_of(module))
        and {"x", "position_ids"} <= set(inspect.signature(type(module).forward).parameters) <= _ARGUMENTS
    )


def kinds_of(module: nn.Module) -> list[str | None]:
    """Return the layer types for which the module has frequencies: [None] for one set that all layers share."""
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
    kinds = [name.removesuffix("inv_freq").removesuffix("_") or None for name in names if "original_" not in name]
    return sorted(kinds, key=str)


def frequencies(module: nn.Module, kind: str | None) -> tuple[Tensor, Tensor]:
    """Return the current frequencies of a layer type, which dynamic NTK and LongRoPE change, and the initial ones."""
    prefix = "" if kind is None else f"{kind}_"
    now = getattr(module, f"{prefix}inv_freq")
    initial, alpha = getattr(module, f"{prefix}original_inv_freq", now), getattr(module, "alpha", None)
    if isinstance(alpha, Tensor) and alpha.shape == now.shape:  # LeRoPE, with a learned factor for each pair
        now, initial = (inv_freq.float() * alpha.float().exp() for inv_freq in (now, initial))
    return now, initial


def factor_of(module: nn.Module, kind: str | None) -> float:
    """Return the attention factor of a layer type."""
    name = "attention_scaling" if kind is None else f"{kind}_attention_scaling"
    return float(getattr(module, name, 1.0))


def check_values(name: str, tensor: Tensor) -> None:
    """Raise a RopeError if the tensor of a rotary module is on the meta device."""
    if tensor.is_meta:
        raise error(WHO, f"{name} must have values", "a model on the meta device", "Load the weights first.")


def width(name: str, module: nn.Module, kinds: Iterable[str | None]) -> Width:
    """Find out the format of the module's tables, by calling it with a few positions.

    Raises:
        RopeError: the tables are not cos and sin of position · frequency, layer types have tables of different
            formats, or the module is on the meta device.
    """
    found = set()
    for kind in kinds:
        check_values(name, frequencies(module, kind)[0])
        positions = torch.tensor([_POSITIONS])
        returned, now = _call(name, module, kind, positions)
        table = tables_of(name, returned)[0]
        if table.ndim == 4 and len(table) in _AXES:
            got = f"tables with a row for each axis, {list(table.shape)}, as before transformers 5.18"
            fix = "The modules of transformers 5.18 and newer combine these rows."
            raise error(WHO, f"{name} must return tables [batch, seq, channels]", got, fix)
        form = formats.width_of(returned if isinstance(returned, Tensor) else table, now.numel())
        fits = form is not None and _are_near(returned, positions[..., None] * now, factor_of(module, kind), form)
        found.add(form if fits else None)
    if None in found or len(found) != 1:
        raise _other_numbers(name)
    return found.pop()  # type: ignore[return-value]


def tables_of(name: str, returned: Any) -> tuple[Tensor, Tensor]:
    """Return the tables that a rotary module returned as cos and sin, or raise a RopeError if it returned others."""
    pair = isinstance(returned, (tuple, list)) and [isinstance(table, Tensor) for table in returned] == [True, True]
    if not pair and not (isinstance(returned, Tensor) and returned.is_complex()):
        raise _other_numbers(name)
    return cos_and_sin(returned)


def _other_numbers(name: str) -> Exception:
    must = f"{name} must return cos and sin of position · inv_freq"
    return error(WHO, must, "other numbers", "This model computes its angles in a way that is not supported.")


def _call(name: str, module: nn.Module, kind: str | None, positions: Tensor) -> tuple[Any, Tensor]:
    """Call the module as `_call_once`, with an equal row for each axis if it does not take positions `[batch, seq]`."""
    raised: list[Exception] = []
    for given in (positions, *(positions.expand(axes, -1, -1) for axes in _AXES if positions.ndim == 2)):
        try:
            return _call_once(module, kind, given)
        except Exception as e:  # the code of another version may raise anything
            raised.append(e)
    fix = "This model computes its angles in a way that is not supported."
    raise error_from(f"{WHO}: {name} cannot be called with positions", raised[0], fix) from raised[0]


def _call_once(module: nn.Module, kind: str | None, positions: Tensor) -> tuple[Any, Tensor]:
    """Call the module, and return its tables and its frequencies after the call, in the order of the pairs."""
    module = copy.deepcopy(module)  # a call of LongRoPE or dynamic NTK overwrites their buffers
    device = frequencies(module, kind)[0].device
    x = torch.zeros(1, len(_POSITIONS), 1, device=device, dtype=torch.float32)  # tables are cast to the dtype of x
    with torch.no_grad():
        returned = module(x, positions.to(device), **({} if kind is None else {"layer_type": kind}))
    now = frequencies(module, kind)[0].to("cpu", torch.float64)
    # With axes, a module may store the frequencies in another order than in its tables (Ernie 4.5 VL).
    reordered = any(hasattr(module, name) for name in ("recomposition_frequencies", "recomposition_to_3d"))
    return returned, now.sort(descending=True).values if reordered else now


def _are_near(returned: Any, angles: Tensor, factor: float, width: Width) -> bool:
    """Return whether tables are factor · cos and factor · sin of the angles, within the error of float32 angles."""
    drift = (1 + angles.abs()) * formats.FLOAT32 * max(1.0, factor)
    tables = [formats.narrow(table, width).to("cpu", torch.float64) for table in cos_and_sin(returned)]
    return all(
        table.shape == angles.shape and bool(((table - factor * exact).abs() <= drift).all())
        for table, exact in zip(tables, (angles.cos(), angles.sin()), strict=True)
    )


def check_axes(name: str, module: nn.Module, kind: str | None, rope: Rope, width: Width) -> None:
    """Check that each pair is rotated by the position on the axis that the rope assigns to it.

    Raises:
        RopeError: a pair uses the position on another axis, or the module has axes that its config does not state.
    """
    sections = getattr(module, "mrope_section", None)
    if rope.axes is not None:
        positions = distinct_positions(rope.axes.count)[:, None]  # [axes, 1, tokens]
        returned, now = _call(name, module, kind, positions)
        angles = positions[list(rope.axes.axis)].movedim(0, -1) * now  # [1, tokens, pairs]
        if not _are_near(returned, angles, factor_of(module, kind), width):
            raise _other_axes(name, rope)
    elif sections:
        got = f"mrope_section {shown(sections)} only in the module"
        raise error(WHO, f"the config must state the axes of {name}", got, "Use angles='theirs'.")


def _other_axes(name: str, rope: Rope) -> Exception:
    must = f"the pairs of {name} must rotate by the axes of its config ({rope.axes})"
    return error(WHO, must, "other axes", "Use angles='theirs'.")


def distinct_positions(axes: int) -> Tensor:
    """Return small and large positions `[axes, tokens]`. Those of one token differ from axis to axis."""
    rows = torch.tensor(_POSITIONS)
    return torch.stack([rows.roll(axis + 1) for axis in range(axes)])


def check_tower(name: str, module: nn.Module, rope: Rope, returned: Any, positions: Tensor, width: Width) -> None:
    """Check that a tower's tables `[..., tokens, columns]` use the rope's axes and the module's frequencies.

    Args:
        name, module: the name of the tower's rotary module, and the module itself.
        rope: the rope of the tower's config.
        returned: what the module returned for `positions`.
        positions: `[axes, tokens]`.
        width: the format of the tables.

    Raises:
        RopeError: the angles of the tables or the frequencies of the module differ from those of the rope.
    """
    values, index = np.unique(rope.inv_freq, return_inverse=True)
    if module._buffers.get("inv_freq") is not None:  # rounded, if the tower was cast
        find_rope(name, module, None, [rope])
        values = frequencies(module, None)[0].detach().to("cpu", torch.float64).sort().values.numpy()
    axis = [0] * len(index) if rope.axes is None else list(rope.axes.axis)
    angles = positions[axis].T.cpu() * torch.from_numpy(values[index])
    tables = [table.flatten(0, -2) for table in cos_and_sin(returned)]
    if not _are_near(tables, angles, factor_of(module, None), width):
        raise _other_axes(name, rope)


def find_rope(name: str, module: nn.Module, kind: str | None, ropes: Iterable[Rope]) -> Rope:
    """Find the rope of the config that has the module's frequencies and attention factor.

    Raises:
        RopeError: no rope has them, several ropes have them after rounding to the dtype to which the model was cast, or
            the module's current frequencies are not those with which it was built.
    """
    now, built = frequencies(module, kind)
    factor = factor_of(module, kind)
    # The buffers start with the frequencies of a short sequence.
    differences = {rope: formats.difference(rope.at_length(1), built, factor) for rope in ropes}
    found = [rope for rope, difference in differences.items() if not difference]
    if found and not any(_are_frequencies_of(now, rope, module, kind) for rope in found):
        raise error(
            WHO,
            f"{name} must have the frequencies with which it was built",
            f"inv_freq {shown([float(frequency) for frequency in now[:3]])} ..., which differs from {found[0]}",
            "If you changed inv_freq on purpose, use angles='theirs', which uses the model's own numbers.",
        )
    if len({(rope.base, rope.rotary_dim, rope.scaling) for rope in found}) == 1:  # an indexer may rotate another slice
        return found[0]
    if found:
        raise error(
            WHO,
            f"{name} must have the frequencies of one rope of its config",
            f"several, in {formats.stored_dtype(built)}: {'; '.join(map(str, found))}",
            "Call accelerate before the model is cast.",
        )
    raise error(
        WHO,
        f"{name} must have the frequencies and the attention factor of its config",
        "; ".join(f"{how} ({rope})" for rope, how in differences.items()) or "a config without ropes",
        "If the config was changed on purpose, use angles='theirs', which uses the model's own numbers.",
    )


def _are_frequencies_of(now: Tensor, rope: Rope, module: nn.Module, kind: str | None) -> bool:
    """Return whether the module's current frequencies are the rope's at a length that the module may have used."""
    cached_length = getattr(module, "max_seq_len_cached" if kind is None else f"{kind}_max_seq_len_cached", 1)
    longest = getattr(rope.scaling, "original_max_position_embeddings", 0)
    static = (rope.at_length(max(1, n)) for n in (1, int(cached_length), longest + 1))
    return any(not formats.difference(each, now, each.attention_factor) for each in static)


def own_config(module: nn.Module, model_config: Any) -> Any:
    """Return the config from which a rotary module was built, or `model_config` if it stores none."""
    return module.__dict__.get("config", model_config)


def check_length(length: object, ropes: Iterable[Rope]) -> None:
    """Raise a RopeError if a rope needs a length and none is passed, or if one is passed and no rope needs it."""
    dynamic = [rope for rope in ropes if not rope.is_static]
    if dynamic and length is None:
        raise error(
            WHO,
            "length must be passed, because the frequencies depend on it",
            f"no length for {dynamic[0]}",
            "Pass length=n, the longest sequence that you will run. With angles='theirs', the model itself chooses.",
        )
    if not dynamic and length is not None:
        must = "length must be None, because no frequencies depend on it"
        raise error(WHO, must, shown(length), "Do not pass it.")
