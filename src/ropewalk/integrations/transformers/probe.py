"""What a model's own function does with q, k, cos and sin: found by calling it once on a few numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from ropewalk._layout import AXES, Layout, Pairing
from ropewalk.rotation.api import Rotation

Width = Literal["halves", "twice", "half", "complex"]
"""How a model writes its tables: each half of the columns the same, each column twice, one column for each pair, or one
complex number for each pair."""


@dataclass(frozen=True)
class Form:
    """How a function turns what it is given. Plain data: it travels in pickles.

    Args:
        names: the parameters, in order.
        at: which parameter is the first table; those before it are the tensors.
        layouts: the value of `unsqueeze_dim` (None where there is no such parameter) → the layout of the tensors.
        unsqueeze_dim: the value when the caller leaves it out.
        pairing: which channels it pairs.
        order: "same" writes each channel where it was read; "half" reads pairs interleaved and writes them in halves.
        whole: which channels of a head wider than the tables turn: "first", "last", or None where that is an error.
        alone: what it returns for q without k: "q", "pair" (q and None), or None where that is an error.
    """

    names: tuple[str, ...]
    at: int
    layouts: tuple[tuple[int | None, Layout], ...]
    unsqueeze_dim: int | None
    pairing: Pairing
    order: Literal["same", "half"]
    whole: Literal["first", "last"] | None
    alone: Literal["q", "pair"] | None


# Every size another, so that no axis is taken for its neighbour.
_BATCH, _TOKENS, _HEADS, _PAIRS, _REST = 2, 5, 3, 4, 6
_TOLERANCE = 1e-5  # float32 numbers of size 1; another pairing, order or direction is off by about 1


def signature_of(function: Any) -> tuple[tuple[str, ...], int] | None:
    """The parameters and which is the first table; None for what is no such function."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        names = tuple(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return None
    tables = [names.index(name) for name in ("cos", "sin", "freqs_cis") if name in names]
    expected = 1 if "freqs_cis" in names else 2
    at = min(tables, default=0)
    if len(tables) != expected or not 1 <= at <= 2 or max(tables) != at + expected - 1:
        return None
    return names, at


def probe(function: Callable[..., Any], width: Width) -> Form | None:
    """How `function` turns, given tables of this width; None if it does not rotate pairs by plus the angle."""
    known = signature_of(function)
    if known is None or (width == "complex") != ("freqs_cis" in known[0]):
        return None
    names, at = known
    has_axis = "unsqueeze_dim" in names
    with torch.no_grad():
        found = [
            (axis, *how)
            for axis in ((1, 2) if has_axis else (None,))
            if (how := _turned_as(function, names, at, width, axis)) is not None
        ]
        if not found or len({how[2:] for how in found}) != 1:
            return None
        layouts = tuple((axis, layout) for axis, layout, *_ in found)
        _, _, pairing, order, whole = found[0]
        alone = _alone(function, names, width, layouts[0]) if at == 2 else None
    default = _default_axis(function) if has_axis else None
    return Form(names, at, layouts, default, pairing, order, whole, alone)


def _turned_as(
    function: Callable[..., Any], names: tuple[str, ...], at: int, width: Width, axis: int | None
) -> tuple[Layout, Pairing, Any, Any] | None:
    """Layout, pairing, order and channels of a wider head, with this unsqueeze_dim."""
    slice_only = [how for how in _ways(0) if _does(function, names, at, width, axis, how, 0)]
    if len(slice_only) != 1:
        return None
    layout, pairing, order, _ = slice_only[0]
    wider = [how for how in _ways(_REST) if _does(function, names, at, width, axis, how, _REST)]
    whole = next((w for this, turns, writes, w in wider if (this, turns, writes) == (layout, pairing, order)), None)
    return layout, pairing, order, whole


def _ways(rest: int) -> Iterator[tuple[Layout, Pairing, str, str | None]]:
    for layout, (pairing, order) in product(
        ("bhsd", "bshd"), (("half", "same"), ("interleaved", "same"), ("interleaved", "half"))
    ):
        for whole in ("first", "last") if rest else (None,):
            yield layout, pairing, order, whole  # type: ignore[misc]


def _does(
    function: Callable[..., Any],
    names: tuple[str, ...],
    at: int,
    width: Width,
    axis: int | None,
    how: tuple[Layout, Pairing, str, str | None],
    rest: int,
) -> bool:
    """Whether the function turns a head with `rest` more channels than the tables have in this way."""
    layout, pairing, order, whole = how
    tensors = [_numbers(_shape(layout, heads, rest), n) for n, heads in enumerate((_HEADS, _HEADS - 1)[:at])]
    cos, sin = _angles()
    given: dict[str, Any] = dict(zip(names, tensors, strict=False)) | _tables(names, cos, sin, width)
    if axis is not None:
        given["unsqueeze_dim"] = axis
    try:
        returned = function(**given)
    except Exception:  # whatever their function raises where the shapes do not fit
        return False
    results = [returned] if isinstance(returned, Tensor) else returned
    offset = rest if whole == "last" else 0
    rotation = Rotation(cos, sin, pairing=pairing, head_dim=2 * _PAIRS + rest, rotary_offset=offset)
    if not isinstance(results, (list, tuple)) or len(results) != at:
        return False
    return all(
        isinstance(result, Tensor)
        and result.shape == x.shape
        and torch.allclose(result, in_order(rotation(x, layout=layout), order, rotation), atol=_TOLERANCE)
        for x, result in zip(tensors, results, strict=True)
    )


def in_order(x: Tensor, order: str, rotation: Rotation) -> Tensor:
    """Rotated channels as the function writes them: "half" puts the first of each pair before the second of each."""
    if order == "same":
        return x
    start, end = rotation.rotary_offset, rotation.rotary_offset + rotation.rotary_dim
    turned = torch.cat((x[..., start:end:2], x[..., start + 1 : end : 2]), dim=-1)
    return turned if rotation.rotary_dim == x.shape[-1] else torch.cat((x[..., :start], turned, x[..., end:]), dim=-1)


def _alone(
    function: Callable[..., Any], names: tuple[str, ...], width: Width, known: tuple[int | None, Layout]
) -> Literal["q", "pair"] | None:
    cos, sin = _angles()
    axis, layout = known
    given: dict[str, Any] = {names[0]: _numbers(_shape(layout, _HEADS, 0), 0), names[1]: None}
    given |= _tables(names, cos, sin, width) | ({} if axis is None else {"unsqueeze_dim": axis})
    try:
        returned = function(**given)
    except Exception:
        return None
    return "q" if isinstance(returned, Tensor) else "pair"


def _default_axis(function: Any) -> int | None:
    called = function.forward if isinstance(function, torch.nn.Module) else function
    default = inspect.signature(called).parameters["unsqueeze_dim"].default
    return None if default is inspect.Parameter.empty else default


def _shape(layout: Layout, heads: int, rest: int) -> list[int]:
    _, tokens, at_heads, _ = AXES[layout]
    shape = [_BATCH, 0, 0, 2 * _PAIRS + rest]
    shape[tokens], shape[at_heads] = _TOKENS, heads
    return shape


def _numbers(shape: list[int], seed: int) -> Tensor:
    """A formula: no random state is read or changed."""
    n = torch.arange(math.prod(shape), dtype=torch.float32, device="cpu")
    return torch.sin(0.1 + 0.7 * n + seed).reshape(shape)


def _angles() -> tuple[Tensor, Tensor]:
    angles = 1.0 + _numbers([_BATCH, _TOKENS, _PAIRS], 2)  # between 0 and 2: plus and minus differ
    return angles.cos(), angles.sin()


def _tables(names: tuple[str, ...], cos: Tensor, sin: Tensor, width: Width) -> dict[str, Tensor]:
    if width == "complex":
        return {"freqs_cis": torch.complex(cos, sin)}
    return {"cos": widened(cos, width), "sin": widened(sin, width)}


def widened(table: Tensor, width: Width) -> Tensor:
    """One column for each pair → the columns of this width."""
    if width == "halves":
        return torch.cat((table, table), dim=-1)
    return table.repeat_interleave(2, dim=-1) if width == "twice" else table


def width_of(cos: Tensor, pairs: int) -> Width | None:
    """How the columns of a model's own table repeat; None for no known way."""
    if cos.is_complex():
        return "complex" if cos.shape[-1] == pairs else None
    if cos.shape[-1] == pairs:
        return "half"
    if cos.shape[-1] != 2 * pairs:
        return None
    for width in ("halves", "twice"):
        if torch.equal(cos, widened(narrowed(cos, width), width)):
            return width
    return None


def narrowed(table: Tensor, width: Width) -> Tensor:
    """Columns of this width → one for each pair."""
    if width == "halves":
        return table[..., : table.shape[-1] // 2]
    return table[..., ::2] if width == "twice" else table
