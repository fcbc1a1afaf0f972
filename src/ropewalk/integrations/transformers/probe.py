"""Find out how a model's own function rotates q and k by cos and sin, by calling it on a few numbers."""

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
from ropewalk.rotation.api import Rotation, unchecked

Width = Literal["halves", "twice", "half", "complex"]
"""How a model writes its tables: with two equal halves of columns, each column twice, one column for each pair, or one
complex number for each pair."""


@dataclass(frozen=True)
class Form:
    """How a function rotates. It is plain data, because it is pickled with the model.

    Args:
        names: the parameters, in order.
        at: the index of the parameter with the first table. The tensors precede it.
        layouts: the value of `unsqueeze_dim`, or None without such a parameter → the layout of the tensors. The layout
            of tensors without a batch axis has the same letters without b.
        unsqueeze_dim: the default value of that parameter.
        pairing: the pairing of the channels.
        order: "same" if each channel is written where it was read, "half" if pairs are read interleaved and written in
            halves.
        whole: which channels are rotated if a head is wider than the tables: "first", "last", or None if it raises.
        alone: what is returned for q without k: "q", "pair" (q and None), or None if it raises.
        prefix: whether tokens that precede those of the tables are not rotated (class and register tokens).
        parts: the number of equal parts of a head that are rotated separately, each by its part of the tables.
    """

    names: tuple[str, ...]
    at: int
    layouts: tuple[tuple[int | None, Layout], ...]
    unsqueeze_dim: int | None
    pairing: Pairing
    order: Literal["same", "half"]
    whole: Literal["first", "last"] | None
    alone: Literal["q", "pair"] | None
    prefix: bool = False
    parts: int = 1


# All sizes differ, so that no axis can be mistaken for another.
_BATCH, _TOKENS, _HEADS, _PAIRS, _REST, _PREFIX = 2, 5, 3, 4, 6, 2
_TOLERANCE = 1e-5  # float32 numbers of size 1; another pairing, order or direction is off by about 1


_COMPLEX = ("freqs_cis", "freqs_ci")  # names of a table of complex numbers
_NO_EFFECT = {"position_ids", "unsqueeze_dim", "kwargs"}  # parameters that are known, or that no function reads


def signature_of(function: Any) -> tuple[tuple[str, ...], int] | None:
    """The parameters, and the index of the first table. None if this is not a rotating function."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        names = tuple(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return None
    tables = [names.index(name) for name in ("cos", "sin", *_COMPLEX) if name in names]
    expected = 1 if _is_complex(names) else 2
    at = min(tables, default=0)
    if len(tables) != expected or not 1 <= at <= 2 or max(tables) != at + expected - 1:
        return None
    return names, at


@dataclass(frozen=True)
class _Call:
    """One way to call a function.

    Args:
        axis: the `unsqueeze_dim` to pass. None without such a parameter.
        shared: whether the tables are `[tokens, columns]`, the same for all rows of the batch, as in vision towers.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    at: int
    width: Width
    axis: int | None
    shared: bool
    parts: int


def probe(function: Callable[..., Any], width: Width, *, shared: bool = False, parts: int = 1) -> Form | None:
    """Find out how `function` rotates by tables of this width. None if it does not rotate pairs by plus the angle.

    Args:
        function: the function.
        width: how its tables are written.
        shared: whether its tables have no batch axis, as in vision towers.
        parts: the number of parts of a head that it rotates separately.
    """
    known = signature_of(function)
    if known is None or (width == "complex") != _is_complex(known[0]):
        return None
    names, at = known
    tables = 1 if width == "complex" else 2
    if shared and set(names[at + tables :]) - _NO_EFFECT:
        return None  # a parameter that may change what it does (the memory attention of SAM 2 and 3)
    has_axis = "unsqueeze_dim" in names
    axes = (None,) if not has_axis else (0, 1) if shared else (1, 2)
    with torch.no_grad():
        found = [
            (call, how)
            for call in (_Call(function, names, at, width, axis, shared, parts) for axis in axes)
            if (how := _turned_as(call)) is not None
        ]
        if not found or len({how[1:] for _, how in found}) != 1:
            return None
        layouts = tuple((call.axis, layout) for call, (layout, *_) in found)
        call, (_, pairing, order, whole, prefix) = found[0]
        alone = _alone(call, layouts[0][1]) if at == 2 else None
    default = _default_axis(function) if has_axis else None
    return Form(names, at, layouts, default, pairing, order, whole, alone, prefix, parts)


def _turned_as(call: _Call) -> tuple[Layout, Pairing, Any, Any, bool] | None:
    """Layout, pairing, order, rotated channels of a wider head, and whether the first tokens may have no table."""
    slice_only = [how for how in _ways(0) if _does(call, how)]
    if len(slice_only) != 1:
        return None
    layout, pairing, order, _ = slice_only[0]
    wider = [how for how in _ways(_REST) if _does(call, how, rest=_REST)]
    whole = next((w for this, turns, writes, w in wider if (this, turns, writes) == (layout, pairing, order)), None)
    return layout, pairing, order, whole, call.shared and _does(call, slice_only[0], prefix=_PREFIX)


def _ways(rest: int) -> Iterator[tuple[Layout, Pairing, str, str | None]]:
    for layout, (pairing, order) in product(
        ("bhsd", "bshd"), (("half", "same"), ("interleaved", "same"), ("interleaved", "half"))
    ):
        for whole in ("first", "last") if rest else (None,):
            yield layout, pairing, order, whole  # type: ignore[misc]


def _does(call: _Call, how: tuple[Layout, Pairing, str, str | None], *, rest: int = 0, prefix: int = 0) -> bool:
    """Whether the function rotates in this way, for heads with `rest` more channels than the tables, and with `prefix`
    tokens before those of the tables."""
    layout, pairing, order, whole = how
    shapes = [_shape(layout, heads, rest, prefix) for heads in (_HEADS, _HEADS - 1)[: call.at]]
    tensors = [_numbers(shape, n) for n, shape in enumerate(shapes)]
    cos, sin = _angles(call)
    given: dict[str, Any] = dict(zip(call.names, tensors, strict=False)) | _tables(call, cos, sin)
    try:
        returned = call.function(**given)
    except Exception:  # the function may raise anything if the shapes do not fit
        return False
    results = [returned] if isinstance(returned, Tensor) else returned
    if not isinstance(results, (list, tuple)) or len(results) != call.at:
        return False
    rotations = []
    for part, tables in enumerate(zip(cos.chunk(call.parts, -1), sin.chunk(call.parts, -1), strict=True)):
        offset = part * 2 * tables[0].shape[-1] + (rest if whole == "last" else 0)
        rotation = Rotation(*tables, pairing=pairing, head_dim=2 * _PAIRS + rest, rotary_offset=offset)
        rotations.append(behind_prefix(rotation, _TOKENS + prefix) if prefix else rotation)
    for x, result in zip(tensors, results, strict=True):
        if not isinstance(result, Tensor) or result.shape != x.shape:
            return False
        for rotation in rotations:
            x = in_order(rotation(x, layout=layout), order, rotation)
        if not torch.allclose(result, x, atol=_TOLERANCE):
            return False
    return True


def behind_prefix(rotation: Rotation, tokens: int) -> Rotation:
    """Extend a rotation with tables `[seq, pairs]` to `tokens` tokens. The added first tokens are not rotated."""
    cos, sin = rotation.cos, rotation.sin
    missing = tokens - cos.shape[0]
    if missing <= 0:
        return rotation
    cos, sin = (torch.cat((t.new_full((missing, t.shape[1]), at), t)) for t, at in ((cos, 1.0), (sin, 0.0)))
    same = rotation.pairing, rotation.head_dim, rotation.rotary_dim, rotation.rotary_offset, rotation.attention_factor
    return unchecked(cos, sin, *same, False)


def in_order(x: Tensor, order: str, rotation: Rotation) -> Tensor:
    """Reorder rotated channels as the function writes them: "half" writes all first channels before all second ones."""
    if order == "same":
        return x
    start, end = rotation.rotary_offset, rotation.rotary_offset + rotation.rotary_dim
    turned = torch.cat((x[..., start:end:2], x[..., start + 1 : end : 2]), dim=-1)
    return turned if rotation.rotary_dim == x.shape[-1] else torch.cat((x[..., :start], turned, x[..., end:]), dim=-1)


def _alone(call: _Call, layout: Layout) -> Literal["q", "pair"] | None:
    q = _numbers(_shape(layout, _HEADS), 0)
    given: dict[str, Any] = {call.names[0]: q, call.names[1]: None} | _tables(call, *_angles(call))
    try:
        returned = call.function(**given)
    except Exception:
        return None
    return "q" if isinstance(returned, Tensor) else "pair"


def _is_complex(names: tuple[str, ...]) -> bool:
    return any(name in names for name in _COMPLEX)


def _default_axis(function: Any) -> int | None:
    called = function.forward if isinstance(function, torch.nn.Module) else function
    default = inspect.signature(called).parameters["unsqueeze_dim"].default
    return None if default is inspect.Parameter.empty else default


def _shape(layout: Layout, heads: int, rest: int = 0, prefix: int = 0) -> list[int]:
    _, tokens, at_heads, _ = AXES[layout]
    shape = [_BATCH, 0, 0, 2 * _PAIRS + rest]
    shape[tokens], shape[at_heads] = _TOKENS + prefix, heads
    return shape


def _numbers(shape: list[int], seed: int) -> Tensor:
    """Numbers computed by a formula, without touching any random state."""
    n = torch.arange(math.prod(shape), dtype=torch.float32, device="cpu")
    return torch.sin(0.1 + 0.7 * n + seed).reshape(shape)


def _angles(call: _Call) -> tuple[Tensor, Tensor]:
    batch = [] if call.shared else [_BATCH]
    angles = 1.0 + _numbers([*batch, _TOKENS, _PAIRS], 2)  # between 0 and 2: plus and minus differ
    return angles.cos(), angles.sin()


def _tables(call: _Call, cos: Tensor, sin: Tensor) -> dict[str, Any]:
    """The arguments other than q and k."""
    given: dict[str, Any] = {} if call.axis is None else {"unsqueeze_dim": call.axis}
    if call.width == "complex":
        return given | {call.names[call.at]: torch.complex(cos, sin)}
    if call.parts > 1:  # it counts the axes of the positions
        given["position_ids"] = torch.zeros(_BATCH, _TOKENS, call.parts)
    columns = [torch.cat([widened(t, call.width) for t in table.chunk(call.parts, -1)], -1) for table in (cos, sin)]
    return given | {"cos": columns[0], "sin": columns[1]}


def widened(table: Tensor, width: Width) -> Tensor:
    """One column for each pair → the columns of this width."""
    if width == "halves":
        return torch.cat((table, table), dim=-1)
    return table.repeat_interleave(2, dim=-1) if width == "twice" else table


def width_of(cos: Tensor, pairs: int) -> Width | None:
    """Find out how the columns of a model's own table are written. None if this is not a known way."""
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
