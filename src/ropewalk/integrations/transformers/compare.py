"""Compare a model's own rotary module with what ropewalk reads from its config."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ropewalk._checks import error, shown
from ropewalk.integrations.transformers.probe import Width, cos_and_sin, drop_repeated_columns, width_of
from ropewalk.rope.rope import Rope

WHO = "accelerate"
# The relative tolerance of float32 powers: rounding the exponent costs ln(base) · 2⁻²⁵, and scaling rounds again.
_FLOAT32 = 2e-6
_FACTOR = 1e-6  # the relative tolerance of an attention factor
# Small and large positions, because a custom module may compute something else beyond some length.
_POSITIONS = (0, 1, 2, 9, 100, 3_000, 40_000)
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
    return now, getattr(module, f"{prefix}original_inv_freq", now)


def factor_of(module: nn.Module, kind: str | None) -> float:
    """Return the attention factor of a layer type."""
    name = "attention_scaling" if kind is None else f"{kind}_attention_scaling"
    return float(getattr(module, name, 1.0))


def width(name: str, module: nn.Module, kinds: Iterable[str | None]) -> Width:
    """Find out the format of the module's tables, by calling it with a few positions.

    Raises:
        RopeError: the tables are not cos and sin of position · frequency, layer types have tables of different
            formats, or the module is on the meta device.
    """
    found = {_width(name, module, kind) for kind in kinds}
    if None in found or len(found) != 1:
        raise error(
            WHO,
            f"{name} must return cos and sin of position · inv_freq",
            "other numbers",
            "This model computes its angles in a way that is not supported.",
        )
    return found.pop()  # type: ignore[return-value]


def _width(name: str, module: nn.Module, kind: str | None) -> Width | None:
    now, _ = frequencies(module, kind)
    if now.is_meta:
        raise error(WHO, f"{name} must have values", "a model on the meta device", "Load the weights first.")
    module = copy.deepcopy(module)  # a call of LongRoPE or dynamic NTK overwrites their buffers
    positions = torch.tensor([_POSITIONS], device=now.device)
    keywords = {} if kind is None else {"layer_type": kind}
    with torch.no_grad():
        tokens = len(_POSITIONS)
        x = torch.zeros(1, tokens, 1, device=now.device, dtype=torch.float32)  # tables are cast to the dtype of x
        returned = module(x, positions, **keywords)
        now = _table_frequencies(module, kind)
        found = width_of(returned if isinstance(returned, Tensor) else returned[0], now.numel())
        angles, factor = positions[..., None].double() * now, factor_of(module, kind)
        near = found is not None and _are_near(cos_and_sin(returned), angles, factor, found)
    return found if near else None


def _table_frequencies(module: nn.Module, kind: str | None) -> Tensor:
    """Return the module's current frequencies, float64, in the order of the pairs in its tables."""
    now, _ = frequencies(module, kind)
    # With axes, a module may store the frequencies in another order than in its tables (Ernie 4.5 VL).
    return now.double().sort(descending=True).values if hasattr(module, "recomposition_frequencies") else now.double()


def _are_near(tables: Iterable[Tensor], angles: Tensor, factor: float, found: Width) -> bool:
    """Return whether the tables are factor · cos and factor · sin of the angles, within the error of float32 angles."""
    cos, sin = tables
    drift = (1e-5 + angles.abs() * 2.0**-22) * max(1.0, factor)
    return all(
        bool(((drop_repeated_columns(actual, found).double() - factor * expected).abs() <= drift).all())
        for actual, expected in ((cos, angles.cos()), (sin, angles.sin()))
    )


def check_axes(name: str, module: nn.Module, kind: str | None, rope: Rope, width: Width) -> None:
    """Check that each pair is rotated by the position on the axis that the rope assigns to it.

    Raises:
        RopeError: a pair uses the position on another axis, or the module has axes that its config does not state.
    """
    sections = getattr(module, "mrope_section", None)
    if rope.axes is None:
        if sections:
            must, got = (
                f"the config must state the axes of {name}",
                f"mrope_section {shown(sections)} only in the module",
            )
            raise error(WHO, must, got, "Use angles='theirs'.")
        return
    module = copy.deepcopy(module)
    device, axes = frequencies(module, kind)[0].device, rope.axes
    positions = distinct_positions(axes.count, device)[:, None]  # [axes, 1, tokens]
    pair_positions = positions[list(axes.axis)].movedim(0, -1).double()  # [1, tokens, pairs]
    keywords = {} if kind is None else {"layer_type": kind}
    with torch.no_grad():
        x = torch.zeros(1, len(_POSITIONS), 1, device=device, dtype=torch.float32)
        returned = module(x, positions, **keywords)
    if not _are_near(
        cos_and_sin(returned), pair_positions * _table_frequencies(module, kind), factor_of(module, kind), width
    ):
        must = f"the pairs of {name} must rotate by the axes of its config ({axes})"
        raise error(WHO, must, "other axes", "Use angles='theirs'.")


def distinct_positions(axes: int, device: torch.device) -> Tensor:
    """Return small and large positions `[axes, tokens]`. Those of one token differ from axis to axis."""
    rows = torch.tensor(_POSITIONS, device=device)
    return torch.stack([rows.roll(axis + 1) for axis in range(axes)])


def check_tower(
    name: str, module: nn.Module, rope: Rope, tables: Iterable[Tensor], positions: Tensor, width: Width
) -> None:
    """Check that a tower's tables `[..., tokens, columns]` use the rope's axes and the module's frequencies.

    Args:
        name, module: the name of the tower's rotary module, and the module itself.
        rope: the rope of the tower's config.
        tables: cos and sin that the module returned for `positions`.
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
    angles = positions[axis].T.cpu().double() * torch.from_numpy(values[index])
    tables = [table.cpu().flatten(0, -2) for table in tables]
    fit = all(drop_repeated_columns(table, width).shape == angles.shape for table in tables)
    if not (fit and _are_near(tables, angles, factor_of(module, None), width)):
        must = f"the pairs of {name} must rotate by the axes of its config ({rope.axes})"
        raise error(WHO, must, "other axes", "Use angles='theirs'.")


def find_rope(name: str, module: nn.Module, kind: str | None, ropes: Iterable[Rope]) -> Rope:
    """Find the rope of the config that has the module's frequencies and attention factor.

    Raises:
        RopeError: no rope has them, several ropes have them after rounding to the dtype to which the model was cast, or
            the module's current frequencies are not those with which it was built.
    """
    now, built = frequencies(module, kind)
    factor = factor_of(module, kind)
    ropes = list(dict.fromkeys(ropes))
    found = [rope for rope in ropes if not difference(rope, built, factor)]
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
            f"several, in {rounded_to(built)}: {'; '.join(map(str, found))}",
            "Call accelerate before the model is cast.",
        )
    how = "; ".join(f"{difference(rope, built, factor)} ({rope})" for rope in ropes) or "a config without ropes"
    raise error(
        WHO,
        f"{name} must have the frequencies and the attention factor of its config",
        how,
        "If the config was changed on purpose, use angles='theirs', which uses the model's own numbers.",
    )


def _are_frequencies_of(now: Tensor, rope: Rope, module: nn.Module, kind: str | None) -> bool:
    """Return whether the module's current frequencies are the rope's at a length that the module may have used."""
    if rope.is_static:
        return not _describe_difference(now, rope)
    cached_length = getattr(module, "max_seq_len_cached" if kind is None else f"{kind}_max_seq_len_cached", 1)
    longest = getattr(rope.scaling, "original_max_position_embeddings", 0)
    return any(not _describe_difference(now, rope.at_length(max(1, n))) for n in (1, int(cached_length), longest + 1))


def difference(rope: Rope, built: Tensor, factor: float) -> str:
    """Describe how a module's initial frequencies or attention factor differ from a rope. Return "" if they agree."""
    rope = rope.at_length(1)  # the buffers start with the frequencies of a short sequence
    if off := _describe_difference(built, rope):
        return off
    if abs(factor - rope.attention_factor) > _FACTOR * rope.attention_factor:
        return f"attention factor {factor:.9g}, and {rope.attention_factor:.9g} in the config"
    return ""


def _describe_difference(built: Tensor, rope: Rope) -> str:
    """Describe how frequencies differ from those of a static rope. Return "" if they agree."""
    expected = torch.from_numpy(rope.inv_freq)
    if rope.axes is not None and built.shape != expected.shape:
        expected = torch.from_numpy(np.unique(rope.inv_freq))  # stored once for all axes
    if built.shape != expected.shape:
        return f"{built.numel()} frequencies, and {expected.numel()} in the config"
    actual = built.detach().to("cpu", torch.float64)
    if rope.axes is not None:  # stored in another order than in the tables (Ernie 4.5 VL), which `check_axes` checks
        actual, expected = actual.sort(descending=True).values, expected.sort(descending=True).values
    info = torch.finfo(rounded_to(built))
    relative = max(_FLOAT32, info.eps)
    errors = (actual - expected).abs()
    if not bool((errors <= relative * expected.abs() + info.smallest_normal * info.eps).all()):
        worst = int(torch.argmax(errors / expected.abs().clamp_min(1e-30)))
        return f"inv_freq[{worst}] {float(actual[worst]):.9g}, and {float(expected[worst]):.9g} in the config"
    return ""


def rounded_to(inv_freq: Tensor) -> torch.dtype:
    """Return the narrowest dtype that stores these numbers exactly: that of a cast, even if the model was cast back."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(inv_freq.to(dtype).to(inv_freq.dtype), inv_freq):
            return dtype
    return inv_freq.dtype


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
