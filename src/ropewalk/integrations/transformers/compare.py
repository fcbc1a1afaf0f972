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
from ropewalk.integrations.transformers.probe import Width, narrowed, width_of
from ropewalk.rope import Rope

WHO = "accelerate"
# The tolerance of float32 powers: rounding the exponent costs ln(base) · 2⁻²⁵, and scaling adds a few roundings.
_FLOAT32 = 2e-6
_FACTOR = 1e-6
# Near and far positions: a custom module may compute something else beyond a length.
_POSITIONS = (0, 1, 2, 9, 100, 3_000, 40_000)
_ARGUMENTS = {"self", "x", "position_ids", "layer_type"}


def is_rotary(module: nn.Module) -> bool:
    """Whether this is a rotary module of any name that is called with tokens and their positions."""
    return (
        bool(kinds_of(module))
        and {"x", "position_ids"} <= set(inspect.signature(type(module).forward).parameters) <= _ARGUMENTS
    )


def kinds_of(module: nn.Module) -> list[str | None]:
    """The layer types for which the module has frequencies. [None] if it has one set for all layers."""
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
    kinds = [name.removesuffix("inv_freq").removesuffix("_") or None for name in names if "original_" not in name]
    return sorted(kinds, key=str)


def frequencies(module: nn.Module, kind: str | None) -> tuple[Tensor, Tensor]:
    """The current frequencies of a layer type, which LongRoPE and dynamic NTK overwrite, and the initial ones."""
    prefix = "" if kind is None else f"{kind}_"
    now = getattr(module, f"{prefix}inv_freq")
    return now, getattr(module, f"{prefix}original_inv_freq", now)


def factor_of(module: nn.Module, kind: str | None) -> float:
    """The attention factor of a layer type."""
    name = "attention_scaling" if kind is None else f"{kind}_attention_scaling"
    return float(getattr(module, name, 1.0))


def width(name: str, module: nn.Module, kinds: Iterable[str | None]) -> Width:
    """Find out how the module writes its tables, by calling it with a few positions.

    Raises:
        RopeError: it does not return tables of its frequencies.
    """
    found = {_width(name, module, kind) for kind in kinds}
    if None in found or len(found) != 1:
        raise error(
            WHO,
            f"{name} must return cos and sin of position · inv_freq",
            "other numbers",
            "This model computes its angles in another way, which is not supported.",
        )
    return found.pop()  # type: ignore[return-value]


def _width(name: str, module: nn.Module, kind: str | None) -> Width | None:
    now, _ = frequencies(module, kind)
    if now.is_meta:
        raise error(WHO, f"{name} must have its numbers", "a model on the meta device", "Load the weights first.")
    module = copy.deepcopy(module)  # LongRoPE and dynamic NTK write into their buffers when they are called
    positions = torch.tensor([_POSITIONS], device=now.device)
    of_type = {} if kind is None else {"layer_type": kind}
    with torch.no_grad():
        tokens = len(_POSITIONS)
        x = torch.zeros(1, tokens, 1, device=now.device, dtype=torch.float32)  # tables are cast to the dtype of x
        returned = module(x, positions, **of_type)
        now = _as_written(module, kind)
        found = width_of(returned if isinstance(returned, Tensor) else returned[0], now.numel())
        angles, factor = positions[..., None].double() * now, factor_of(module, kind)
        near = found is not None and _are_near(returned, angles, factor, found)
    return found if near else None


def _as_written(module: nn.Module, kind: str | None) -> Tensor:
    """The frequencies in use, float64, in the order of the pairs in the tables."""
    now, _ = frequencies(module, kind)
    # With axes, a module may store the frequencies in another order than in its tables (Ernie 4.5 VL).
    return now.double().sort(descending=True).values if hasattr(module, "recomposition_frequencies") else now.double()


def _are_near(returned: Any, angles: Tensor, factor: float, found: Width) -> bool:
    """Whether the tables are cos and sin of these float64 angles, up to the drift of float32 products."""
    cos, sin = (returned.real, returned.imag) if isinstance(returned, Tensor) else returned
    drift = (1e-5 + angles.abs() * 2.0**-22) * max(1.0, factor)
    return all(
        bool(((narrowed(got, found).double() - factor * wanted).abs() <= drift).all())
        for got, wanted in ((cos, angles.cos()), (sin, angles.sin()))
    )


def check_axes(name: str, module: nn.Module, kind: str | None, rope: Rope, width: Width) -> None:
    """Check that each pair is rotated by the position on the axis that the rope assigns to it.

    Raises:
        RopeError: the module uses another axis, or has axes that its config does not state.
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
    positions = places(axes.count, device)[:, None]  # [axes, 1, tokens]
    of_pair = positions[list(axes.axis)].movedim(0, -1).double()  # [1, tokens, pairs]
    of_type = {} if kind is None else {"layer_type": kind}
    with torch.no_grad():
        x = torch.zeros(1, len(_POSITIONS), 1, device=device, dtype=torch.float32)
        returned = module(x, positions, **of_type)
    if not _are_near(returned, of_pair * _as_written(module, kind), factor_of(module, kind), width):
        must = f"the pairs of {name} must rotate by the axes of its config ({axes})"
        raise error(WHO, must, "other axes", "Use angles='theirs'.")


def places(axes: int, device: torch.device) -> Tensor:
    """Near and far positions `[axes, tokens]`, different on each axis."""
    rows = torch.tensor(_POSITIONS, device=device)
    return torch.stack([rows.roll(axis + 1) for axis in range(axes)])


def check_tower(name: str, module: nn.Module, rope: Rope, returned: Any, positions: Tensor, width: Width) -> None:
    """Check that a tower's tables `[..., tokens, columns]` use the rope's axes and the module's own frequencies.

    Args:
        returned: the tables that the module returned for the positions `[axes, tokens]`.

    Raises:
        RopeError: the tables have other angles, or the module has other frequencies than the rope.
    """
    values, index = np.unique(rope.inv_freq, return_inverse=True)
    if module._buffers.get("inv_freq") is not None:  # rounded, if the tower was cast
        matching(name, module, None, [rope])
        values = frequencies(module, None)[0].detach().to("cpu", torch.float64).sort().values.numpy()
    axis = [0] * len(index) if rope.axes is None else list(rope.axes.axis)
    angles = positions[axis].T.cpu().double() * torch.from_numpy(values[index])
    tables = [each.cpu().flatten(0, -2) for each in ((returned,) if width == "complex" else returned)]
    fit = all(narrowed(table, width).shape == angles.shape for table in tables)
    given = tables[0] if width == "complex" else tables
    if not (fit and _are_near(given, angles, factor_of(module, None), width)):
        must = f"the pairs of {name} must rotate by the axes of its config ({rope.axes})"
        raise error(WHO, must, "other axes", "Use angles='theirs'.")


def matching(name: str, module: nn.Module, kind: str | None, ropes: Iterable[Rope]) -> Rope:
    """Find the rope of the config that has the module's frequencies and attention factor.

    Raises:
        RopeError: no rope has them, or several have in the dtype of the module's buffer.
    """
    now, built = frequencies(module, kind)
    factor = factor_of(module, kind)
    ropes = list(dict.fromkeys(ropes))
    found = [rope for rope in ropes if not difference(rope, built, factor)]
    if found and not any(_are_of(now, rope, module, kind) for rope in found):
        raise error(
            WHO,
            f"{name} must have the frequencies with which it was built",
            f"inv_freq {shown([float(each) for each in now[:3]])} ..., which differs from {found[0]}",
            "If you changed inv_freq on purpose, use angles='theirs', which takes the model's own numbers.",
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
        f"{name} must have the numbers of its config",
        how,
        "If the config was changed on purpose, use angles='theirs', which takes the model's own numbers.",
    )


def _are_of(now: Tensor, rope: Rope, module: nn.Module, kind: str | None) -> bool:
    """Whether the current frequencies are those of a rope, at the length for which the module computed them last."""
    if rope.is_static:
        return not _off(now, rope)
    seen = getattr(module, "max_seq_len_cached" if kind is None else f"{kind}_max_seq_len_cached", 1)
    longest = getattr(rope.scaling, "original_max_position_embeddings", 0)
    return any(not _off(now, rope.at_length(max(1, n))) for n in (1, int(seen), longest + 1))


def difference(rope: Rope, built: Tensor, factor: float) -> str:
    """The difference of a module's initial frequencies from a rope, in words. "" if they agree."""
    rope = rope.at_length(1)  # the buffers start with the frequencies of a short sequence
    if off := _off(built, rope):
        return off
    if abs(factor - rope.attention_factor) > _FACTOR * rope.attention_factor:
        return f"attention factor {factor:.9g}, and {rope.attention_factor:.9g} in the config"
    return ""


def _off(built: Tensor, rope: Rope) -> str:
    """The difference of frequencies from those of a static rope, in words. "" if they agree."""
    wanted = torch.from_numpy(rope.inv_freq)
    if rope.axes is not None and built.shape != wanted.shape:
        wanted = torch.from_numpy(np.unique(rope.inv_freq))  # stored once for all axes
    if built.shape != wanted.shape:
        return f"{built.numel()} frequencies, and {wanted.numel()} in the config"
    theirs = built.detach().to("cpu", torch.float64)
    if rope.axes is not None:  # stored in another order than in the tables (Ernie 4.5 VL), which `check_axes` checks
        theirs, wanted = theirs.sort(descending=True).values, wanted.sort(descending=True).values
    info = torch.finfo(rounded_to(built))
    relative = max(_FLOAT32, info.eps)
    off = (theirs - wanted).abs()
    if not bool((off <= relative * wanted.abs() + info.smallest_normal * info.eps).all()):
        worst = int(torch.argmax(off / wanted.abs().clamp_min(1e-30)))
        return f"inv_freq[{worst}] {float(theirs[worst]):.9g}, and {float(wanted[worst]):.9g} in the config"
    return ""


def rounded_to(built: Tensor) -> torch.dtype:
    """The narrowest dtype that holds these numbers exactly. A model cast to bfloat16 and back stays rounded."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(built.to(dtype).to(built.dtype), built):
            return dtype
    return built.dtype


def own_config(module: nn.Module, model_config: Any) -> Any:
    """The config that a rotary module was built from."""
    return module.__dict__.get("config", model_config)


def check_length(length: object, ropes: Iterable[Rope]) -> None:
    """Raise RopeError if a rope depends on the length and none is passed, or if none does and a length is passed."""
    dynamic = [rope for rope in ropes if not rope.is_static]
    if dynamic and length is None:
        raise error(
            WHO,
            "length must be passed, because the frequencies depend on it",
            f"no length for {dynamic[0]}",
            "Pass length=n, the longest sequence that you will run, or angles='theirs' for the model's own switching.",
        )
    if not dynamic and length is not None:
        must = "length is for frequencies that depend on it (dynamic NTK, LongRoPE)"
        raise error(WHO, must, shown(length), "Do not pass it.")
