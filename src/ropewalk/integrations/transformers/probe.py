"""Find out how a function of a model rotates q and k by cos and sin, by calling it on a few numbers."""

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
from ropewalk.rotation.api import Rotation, create_unchecked

Place = tuple[str, str]
"""The names of a function's module and of the function."""

Width = Literal["halves", "twice", "half", "complex"]
"""The format of a model's tables.

"halves" repeats all columns, "twice" repeats each column, "half" has one column for each pair, and "complex" one
complex number for each pair.
"""


@dataclass(frozen=True)
class Form:
    """How a function rotates. It contains only plain data, because it is pickled with the model.

    Args:
        names: the names of the parameters, in order.
        at: the index of the parameter for the first table. The tensors to rotate precede it.
        layouts: pairs of a value of `unsqueeze_dim` (None if there is no such parameter) and the layout of the tensors
            for this value. Tensors without a batch axis have the same layout without b.
        unsqueeze_dim: the default value of the parameter `unsqueeze_dim`, or None.
        pairing: the pairing of the channels.
        order: "same" if each channel is written where it was read, or "half" if pairs are read interleaved and written
            in halves.
        whole: which channels are rotated if a head is wider than the tables: "first" or "last". None if the function
            raises for such a head.
        alone: what the function returns if k is None: "q", or "pair" for (q, None). None if it raises.
        prefix: whether the function leaves tokens before those of the tables unrotated (class and register tokens).
        parts: the number of equal parts of a head that are rotated separately, each by its own part of the tables.
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


# All sizes are different, so that no axis can be mistaken for another.
_BATCH, _TOKENS, _HEADS, _PAIRS, _REST, _PREFIX = 2, 5, 3, 4, 6, 2
_TOLERANCE = 1e-5  # float32 numbers of size 1; another pairing, order or direction is off by about 1


COMPLEX = ("freqs_cis", "freqs_ci")  # parameter names of a complex table
# Parameters after the tables that `probe` passes, or that no function reads.
_ALLOWED = {"position_ids", "unsqueeze_dim", "kwargs"}


def signature_of(function: Any) -> tuple[tuple[str, ...], int] | None:
    """Return the names of the parameters and the index of the first table, or None if the function does not rotate."""
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        names = tuple(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return None
    tables = [names.index(name) for name in ("cos", "sin", *COMPLEX) if name in names]
    expected = 1 if _is_complex(names) else 2
    at = min(tables, default=0)
    if len(tables) != expected or not 1 <= at <= 2 or max(tables) != at + expected - 1:
        return None
    return names, at


_Rotates = tuple[Layout, Pairing, str, str | None]
"""Layout, pairing, order, and which channels of a wider head are rotated; see `Form`."""


@dataclass(frozen=True)
class _Call:
    """One way to call a function.

    Args:
        function: the function.
        names, at: as in `Form`.
        width: the format of the tables.
        axis: the `unsqueeze_dim` to pass, or None if the function has no such parameter.
        shared: whether all rows of the batch share tables `[tokens, columns]`, as in vision towers.
        parts: as in `Form`.
        outcomes: gets, for each call, what the function raised, or None.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    at: int
    width: Width
    axis: int | None
    shared: bool
    parts: int
    outcomes: list[Exception | None]


def probe(
    function: Callable[..., Any],
    width: Width,
    *,
    shared: bool = False,
    parts: int = 1,
    outcomes: list[Exception | None] | None = None,
) -> Form | None:
    """Find out how a function rotates by tables of the format `width`.

    Args:
        function: the function.
        width: the format of its tables.
        shared: whether its tables have no batch axis, as in vision towers.
        parts: the number of parts of a head that it rotates separately.
        outcomes: gets, for each call of the function, what it raised, or None.

    Returns:
        The form, or None if no form describes the function, such as one that rotates in the negative direction.
    """
    signature = signature_of(function)
    if signature is None or (width == "complex") != _is_complex(signature[0]):
        return None
    names, at = signature
    tables = 1 if width == "complex" else 2
    if shared and set(names[at + tables :]) - _ALLOWED:
        return None  # another parameter may change the rotation (the memory attention of SAM 2 and 3)
    has_axis = "unsqueeze_dim" in names
    outcomes = [] if outcomes is None else outcomes
    axes = (None,) if not has_axis else (0, 1) if shared else (1, 2)
    with torch.no_grad():
        found = [
            (call, how)
            for call in (_Call(function, names, at, width, axis, shared, parts, outcomes) for axis in axes)
            if (how := _identify(call)) is not None
        ]
        if not found or len({how[1:] for _, how in found}) != 1:
            return None
        layouts = tuple((call.axis, layout) for call, (layout, *_) in found)
        call, (_, pairing, order, whole, prefix) = found[0]
        alone = _probe_without_k(call, layouts[0][1]) if at == 2 else None
    default = _default_axis(function) if has_axis else None
    return Form(names, at, layouts, default, pairing, order, whole, alone, prefix, parts)


def _identify(call: _Call) -> tuple[Layout, Pairing, Any, Any, bool] | None:
    """Return layout, pairing, order, whole and prefix of the rotation (see `Form`), or None if no combination fits."""
    slice_only = [how for how in _combinations(0) if _matches(call, how)]
    if len(slice_only) != 1:
        return None
    layout, pairing, order, _ = slice_only[0]
    wider = [how for how in _combinations(_REST) if _matches(call, how, rest=_REST)]
    whole = next((how[3] for how in wider if how[:3] == (layout, pairing, order)), None)
    return layout, pairing, order, whole, call.shared and _matches(call, slice_only[0], prefix=_PREFIX)


def _combinations(rest: int) -> Iterator[_Rotates]:
    """Yield every combination of layout, pairing, order and, for heads wider than the tables, rotated channels."""
    for layout, (pairing, order) in product(
        ("bhsd", "bshd"), (("half", "same"), ("interleaved", "same"), ("interleaved", "half"))
    ):
        for whole in ("first", "last") if rest else (None,):
            yield layout, pairing, order, whole  # type: ignore[misc]


def _matches(call: _Call, how: _Rotates, *, rest: int = 0, prefix: int = 0) -> bool:
    """Return whether the function rotates as `how` states.

    Args:
        call: how to call the function.
        how: layout, pairing, order and rotated channels.
        rest: the number of channels that a head has in addition to those of the tables.
        prefix: the number of tokens before those of the tables.
    """
    layout, pairing, order, whole = how
    shapes = [_shape(layout, heads, rest, prefix) for heads in (_HEADS, _HEADS - 1)[: call.at]]
    tensors = [_numbers(shape, n) for n, shape in enumerate(shapes)]
    cos, sin = _angles(call)
    arguments: dict[str, Any] = dict(zip(call.names, tensors, strict=False)) | _tables(call, cos, sin)
    try:
        returned = call.function(**arguments)
    except Exception as e:  # the function may raise anything if the shapes do not fit
        call.outcomes.append(e)
        return False
    call.outcomes.append(None)
    results = [returned] if isinstance(returned, Tensor) else returned
    if not isinstance(results, (list, tuple)) or len(results) != call.at:
        return False
    rotations = []
    for part, tables in enumerate(zip(cos.chunk(call.parts, -1), sin.chunk(call.parts, -1), strict=True)):
        offset = part * 2 * tables[0].shape[-1] + (rest if whole == "last" else 0)
        rotation = Rotation(*tables, pairing=pairing, head_dim=2 * _PAIRS + rest, rotary_offset=offset)
        rotations.append(with_unrotated_prefix(rotation, _TOKENS + prefix) if prefix else rotation)
    for x, result in zip(tensors, results, strict=True):
        if not isinstance(result, Tensor) or result.shape != x.shape:
            return False
        for rotation in rotations:
            x = reorder_channels(rotation(x, layout=layout), order, rotation)
        if not torch.allclose(result, x, atol=_TOLERANCE):
            return False
    return True


def with_unrotated_prefix(rotation: Rotation, tokens: int) -> Rotation:
    """Extend a Rotation with tables `[seq, pairs]` to `tokens` tokens by adding unrotated tokens at the beginning."""
    cos, sin = rotation.cos, rotation.sin
    missing = tokens - cos.shape[0]
    if missing <= 0:
        return rotation
    cos, sin = (torch.cat((t.new_full((missing, t.shape[1]), at), t)) for t, at in ((cos, 1.0), (sin, 0.0)))
    same = rotation.pairing, rotation.head_dim, rotation.rotary_dim, rotation.rotary_offset, rotation.attention_factor
    return create_unchecked(cos, sin, *same, False)


def reorder_channels(x: Tensor, order: str, rotation: Rotation) -> Tensor:
    """Return x, with the first channels of all rotated pairs before the second ones if `order` is "half"."""
    if order == "same":
        return x
    start, end = rotation.rotary_offset, rotation.rotary_offset + rotation.rotary_dim
    reordered = torch.cat((x[..., start:end:2], x[..., start + 1 : end : 2]), dim=-1)
    return (
        reordered
        if rotation.rotary_dim == x.shape[-1]
        else torch.cat((x[..., :start], reordered, x[..., end:]), dim=-1)
    )


def _probe_without_k(call: _Call, layout: Layout) -> Literal["q", "pair"] | None:
    """Call the function with k=None, and return the value of `Form.alone`."""
    q = _numbers(_shape(layout, _HEADS), 0)
    arguments: dict[str, Any] = {call.names[0]: q, call.names[1]: None} | _tables(call, *_angles(call))
    try:
        returned = call.function(**arguments)
    except Exception:
        return None
    return "q" if isinstance(returned, Tensor) else "pair"


def _is_complex(names: tuple[str, ...]) -> bool:
    return any(name in names for name in COMPLEX)


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
    """Compute numbers by a formula, without using any random state."""
    n = torch.arange(math.prod(shape), dtype=torch.float32, device="cpu")
    return torch.sin(0.1 + 0.7 * n + seed).reshape(shape)


def _angles(call: _Call) -> tuple[Tensor, Tensor]:
    batch = [] if call.shared else [_BATCH]
    angles = 1.0 + _numbers([*batch, _TOKENS, _PAIRS], 2)  # between 0 and 2, so that the two directions differ
    return angles.cos(), angles.sin()


def _tables(call: _Call, cos: Tensor, sin: Tensor) -> dict[str, Any]:
    """Return the arguments of the call, by name, except q and k."""
    arguments: dict[str, Any] = {} if call.axis is None else {"unsqueeze_dim": call.axis}
    if call.width == "complex":
        return arguments | {call.names[call.at]: torch.complex(cos, sin)}
    if call.parts > 1:  # the function reads the number of parts from the shape of the positions
        arguments["position_ids"] = torch.zeros(_BATCH, _TOKENS, call.parts)
    columns = [
        torch.cat([repeat_columns(t, call.width) for t in table.chunk(call.parts, -1)], -1) for table in (cos, sin)
    ]
    return arguments | {"cos": columns[0], "sin": columns[1]}


def repeat_columns(table: Tensor, width: Width) -> Tensor:
    """Convert a table with one column for each pair to the format `width`."""
    if width == "halves":
        return torch.cat((table, table), dim=-1)
    return table.repeat_interleave(2, dim=-1) if width == "twice" else table


def cos_and_sin(returned: Any) -> tuple[Tensor, Tensor]:
    """Return the tables that a rotary module returned as cos and sin. They may be complex numbers."""
    cos, sin = (returned.real, returned.imag) if isinstance(returned, Tensor) else returned
    return cos, sin


def width_of(cos: Tensor, pairs: int) -> Width | None:
    """Return the format of a model's table, or None if it is unknown."""
    if cos.is_complex():
        return "complex" if cos.shape[-1] == pairs else None
    if cos.shape[-1] == pairs:
        return "half"
    if cos.shape[-1] != 2 * pairs:
        return None
    for width in ("halves", "twice"):
        if torch.equal(cos, repeat_columns(drop_repeated_columns(cos, width), width)):
            return width
    return None


def drop_repeated_columns(table: Tensor, width: Width) -> Tensor:
    """Convert a table of the format `width` to a table with one column for each pair."""
    if width == "halves":
        return table[..., : table.shape[-1] // 2]
    return table[..., ::2] if width == "twice" else table
