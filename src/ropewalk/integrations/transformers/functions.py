"""Functions of modeling files that rotate: find them, find out how they rotate, and rotate by Rotations instead.

Tables of cos and sin carry the Rotation from which they were made. They are ordinary tensors with the shape, width and
dtype that the model expects. Code that slices, casts or computes with them gets new tensors, which carry nothing.

A dispatcher replaces a function of a modeling file and rotates by the Rotation that its tables carry. If they carry
nothing, or the Rotation does not fit, it calls the original function. So models that are not accelerated do not change,
and code that slices or combines tables works as before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ropewalk import conformance, formats
from ropewalk._layout import AXES, Layout, Pairing
from ropewalk.attention.self_extend import SelfExtend
from ropewalk.formats import Width
from ropewalk.integrations.tables import Order, rotate
from ropewalk.integrations.transformers import self_extend
from ropewalk.rotation.api import Rotation, create_unchecked

Place = tuple[str, str]
"""The names of a function's module and of the function."""


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
        prefix: whether the function leaves tokens before those of the tables unrotated (class and register tokens).
    """

    names: tuple[str, ...]
    at: int
    layouts: tuple[tuple[int | None, Layout], ...]
    unsqueeze_dim: int | None
    pairing: Pairing
    order: Order
    whole: Literal["first", "last"] | None
    prefix: bool


@dataclass(frozen=True, eq=False)
class Attached:
    """What tables carry: a Rotation, and how each function of the model's code rotates by them."""

    rotation: Rotation
    forms: Mapping[Place, Form]
    extended: tuple[SelfExtend, Tensor] | None = None
    """Self-Extend, and the positions of the tokens."""


_COS, _SIN, _TURNS = "ropewalk_cos", "ropewalk_sin", "ropewalk_complex"  # attributes of the tensors
COMPLEX = ("freqs_cis", "freqs_ci")  # parameter names of a complex table


def attach(
    tables: Any,
    rotation: Rotation,
    forms: Mapping[Place, Form],
    extended: tuple[SelfExtend, Tensor] | None = None,
) -> Any:
    """Attach a Rotation to cos and sin, or to one complex tensor, and return these tables."""
    attached = Attached(rotation, forms, extended)
    if isinstance(tables, Tensor):
        setattr(tables, _TURNS, attached)
    else:
        setattr(tables[0], _COS, attached)
        setattr(tables[1], _SIN, attached)
    return tables


def attached_to(arguments: Mapping[str, Any]) -> Attached | None:
    """Return what the tables among the arguments of a rotating function carry, or None.

    The result is None unless cos and sin are those of the same Rotation, each in its place.
    """
    if "cos" in arguments:
        found: Attached | None = getattr(arguments["cos"], _COS, None)
        return found if getattr(arguments.get("sin"), _SIN, None) is found else None
    return next((getattr(arguments[name], _TURNS, None) for name in COMPLEX if name in arguments), None)


def cos_and_sin(returned: Any) -> tuple[Tensor, Tensor]:
    """Return the tables that a rotary module returned as cos and sin. They may be complex numbers."""
    cos, sin = (returned.real, returned.imag) if isinstance(returned, Tensor) else returned
    return cos, sin


# Finding functions

_ROTARY_NAME = re.compile(r"rot(ary|ate)|rope", re.IGNORECASE)


def functions_of(model: nn.Module) -> dict[Place, Any]:
    """Find the functions with parameters cos and sin, or freqs_cis, that the methods of the model's modules call."""
    functions: dict[Place, Any] = {}
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        for owner in kind.__mro__:
            if owner.__module__.partition(".")[0] not in ("torch", "builtins", "ropewalk"):
                for method in vars(owner).values():
                    functions.update(_rotating_functions(method))
    return functions


def _rotating_functions(method: Any) -> Iterator[tuple[Place, Any]]:
    """Yield the rotating functions among the globals that a method refers to."""
    method = inspect.unwrap(method) if callable(method) else None
    if not isinstance(method, types.FunctionType):
        return
    for name in sorted(filter(_ROTARY_NAME.search, _names(method.__code__))):
        function = method.__globals__.get(name)
        if callable(function) and signature_of(original(function)):
            yield (str(method.__globals__["__name__"]), name), function


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that this code and its inner functions use."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def signature_of(function: Any) -> tuple[tuple[str, ...], int] | None:
    """Return the names of the parameters and the index of the first table, or None if the function does not rotate."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        names = tuple(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return None
    tables = sorted(names.index(name) for name in ("cos", "sin", *COMPLEX) if name in names)
    expected = 1 if set(COMPLEX) & set(names) else 2
    if len(tables) != expected or tables[0] not in (1, 2) or tables[-1] != tables[0] + expected - 1:
        return None
    return names, tables[0]


# Finding out how a function rotates

# All sizes are different, so that no axis can be mistaken for another.
_BATCH, _TOKENS, _PAIRS, _REST, _PREFIX = 2, 5, 4, 6, 4
# Parameters after the tables that no function reads, or that `probe` passes.
_ALLOWED = {"position_ids", "unsqueeze_dim", "kwargs"}


def probe(function: Callable[..., Any], width: Width, *, shared: bool = False) -> Form | str:
    """Find out how a function rotates by tables of the format `width`, by calling it on a few numbers.

    Args:
        function: the function.
        width: the format of its tables.
        shared: whether its tables have no batch axis, as in vision towers.

    Returns:
        The form, or the reason why no form describes the function, as a phrase that follows its name.
    """
    unlike = "rotates in a way that no Rotation describes, or may do more"
    names, at = signature_of(function) or ((), 0)
    is_complex = bool(set(COMPLEX) & set(names))
    if not at or (width == "complex") != is_complex:
        return unlike
    if shared and set(names[at + 2 - is_complex :]) - _ALLOWED:
        return unlike  # another parameter may change the rotation (the memory attention of SAM 2 and 3)
    numbers = torch.arange(_BATCH * _TOKENS * _PAIRS, dtype=torch.float32, device="cpu")
    angles = 1.0 + torch.sin(0.7 * numbers).reshape(_BATCH, _TOKENS, _PAIRS)  # the two directions differ
    angles = angles[0] if shared else angles
    turns = torch.polar(torch.ones_like(angles), angles)
    cos, sin = formats.widen(turns.real, width), formats.widen(turns.imag, width)
    tables = {"cos": cos, "sin": sin} if width != "complex" else {names[at]: turns}
    raised: list[Exception | None] = []

    def how(layout: str, axis: int | None, *, rest: int = 0, prefix: int = 0) -> tuple[Any, ...] | None:
        """Return pairing, order and first rotated channel, with `rest` more channels and `prefix` more tokens."""
        channels = 2 * _PAIRS + rest
        eye = torch.eye(channels, dtype=torch.float32, device="cpu")[None, :, None]  # a head for each channel
        heads = eye.expand(_BATCH, channels, prefix + _TOKENS, channels)
        given = [x.transpose(1, 2) if layout == "bshd" else x for x in (heads, heads[:, 1:])[:at]]
        arguments = dict(zip(names, (x.contiguous() for x in given), strict=False)) | tables
        try:
            with torch.no_grad():
                returned = function(**arguments, **({} if axis is None else {"unsqueeze_dim": axis}))
        except Exception as e:  # the function may raise anything if the shapes do not fit
            raised.append(e)
            return None
        raised.append(None)
        results = [returned] if isinstance(returned, Tensor) else returned
        if not isinstance(results, (list, tuple)) or len(results) != at:
            return None
        if not all(isinstance(x, Tensor) and x.shape == y.shape for x, y in zip(results, given, strict=True)):
            return None
        q, *k = (x.transpose(1, 2) if layout == "bshd" else x for x in results)
        if any(not torch.equal(x, q[:, 1:]) for x in k):
            return None
        maps = q.permute(0, 2, 3, 1).flatten(0, 1)  # [tokens, out channels, in channels]
        found = conformance.infer(maps)
        if found is None or found.flaw or found.lost or found.pairing is None or found.order not in ("same", "half"):
            return None
        turned = found.multipliers(maps[..., found.ins[:, 0]].movedim(-1, -2)).diagonal(dim1=-2, dim2=-1)
        expected = torch.cat((turns.new_ones(_BATCH, prefix, _PAIRS), turns.expand(_BATCH, -1, -1)), 1).flatten(0, 1)
        if turned.shape != expected.shape or float((turned - expected).abs().max()) > formats.FLOAT32:
            return None
        return found.pairing, found.order, found.rotary_offset

    axes = (None,) if "unsqueeze_dim" not in names else (0, 1) if shared else (1, 2)
    layouts: list[tuple[int | None, Layout]] = []
    forms: set[tuple[Any, Any, Literal["first", "last"] | None, bool]] = set()
    for axis in axes:
        ways: list[tuple[Layout, Any]] = [(n, way) for n in ("bhsd", "bshd") if (way := how(n, axis)) is not None]
        if len(ways) == 1:
            [(layout, (pairing, order, _))] = ways
            wider = how(layout, axis, rest=_REST)
            ends: dict[Any, Literal["first", "last"]] = {0: "first", _REST: "last"}
            whole = ends.get(wider[2]) if wider is not None and wider[:2] == (pairing, order) else None
            layouts.append((axis, layout))
            forms.add((pairing, order, whole, shared and how(layout, axis, prefix=_PREFIX) is not None))
    if len(forms) != 1:
        return unlike if None in raised else f"raised {type(raised[0]).__name__}: {raised[0]}"
    default = None
    if "unsqueeze_dim" in names:
        called = function.forward if isinstance(function, nn.Module) else function
        default = inspect.signature(called).parameters["unsqueeze_dim"].default
    return Form(names, at, tuple(layouts), default, *forms.pop())


# Replacing functions


def original(function: Any) -> Any:
    """Return the original function of a dispatcher. Any other function is returned unchanged."""
    return getattr(function, "ropewalk_original", function)


def install(place: Place) -> None:
    """Replace a function by a dispatcher, unless it has been replaced already."""
    module = importlib.import_module(place[0])
    function = getattr(module, place[1])
    if original(function) is function:
        setattr(module, place[1], dispatcher(function, place))


def dispatcher(function: Callable[..., Any], place: Place) -> Callable[..., Any]:
    """Create a function that rotates by the Rotation attached to its tables, and otherwise calls `function`."""
    names, _ = signature_of(function) or ((), 0)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        attached = attached_to(arguments)
        if attached is not None and place in attached.forms:
            rotated = _rotate_as(arguments, attached, attached.forms[place])
            if rotated is not None:
                return rotated
        return function(*args, **kwargs)

    functools.update_wrapper(dispatch, function, updated=())
    dispatch.__name__ = dispatch.__qualname__ = getattr(function, "__name__", type(function).__name__)
    dispatch.ropewalk_original = function  # type: ignore[attr-defined]
    return dispatch


def _rotate_as(arguments: Mapping[str, Any], attached: Attached, form: Form) -> Any:
    """Rotate as a function of this form does. Return None if the Rotation does not fit the tensors."""
    rotation, layout = attached.rotation, dict(form.layouts).get(arguments.get("unsqueeze_dim", form.unsqueeze_dim))
    tensors = [arguments.get(name) for name in form.names[: form.at]]
    q, k = tensors[0], tensors[-1]
    if layout is None or q is None or k is None:
        return None
    layout = "thd" if q.ndim == 3 and layout == "bshd" else layout
    if form.prefix and q.ndim == AXES[layout][3]:
        rotation = _with_unrotated_prefix(rotation, q.shape[AXES[layout][1]])
    if not (_fits(rotation, q, layout, form) and _fits(rotation, k, layout, form)):
        return None
    if attached.extended is not None:
        return self_extend.rotate(*attached.extended, q, k, layout)
    rotated = rotate(rotation, [q, k][: form.at], layout, form.pairing, last=form.whole == "last", order=form.order)
    return rotated[0] if form.at == 1 else (rotated[0], rotated[1])


def _fits(rotation: Rotation, x: Tensor, layout: Layout, form: Form) -> bool:
    """Return whether a Rotation has the tokens of x, and the function rotates heads of this size."""
    batch, tokens, _, axes = AXES[layout]
    *rows, seq = rotation.tokens
    return (
        x.ndim == axes
        and x.shape[tokens] == seq
        and (not rows or (batch is not None and x.shape[batch] == rows[0]))
        and (form.whole is not None or x.shape[-1] == rotation.rotary_dim)
    )


def _with_unrotated_prefix(rotation: Rotation, tokens: int) -> Rotation:
    """Extend a Rotation with tables `[seq, pairs]` to `tokens` tokens by adding unrotated tokens at the beginning."""
    missing = tokens - rotation.cos.shape[0]
    if missing <= 0:
        return rotation
    tables = ((rotation.cos, 1.0), (rotation.sin, 0.0))
    cos, sin = (torch.cat((t.new_full((missing, t.shape[1]), at), t)) for t, at in tables)
    same = rotation.pairing, rotation.head_dim, rotation.rotary_dim, rotation.rotary_offset, rotation.attention_factor
    return create_unchecked(cos, sin, *same, False)
