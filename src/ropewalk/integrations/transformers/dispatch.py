"""Replace the rotating functions of a modeling file by dispatchers, which rotate by the Rotations attached to tables.

If nothing is attached to the tables, or the Rotations do not fit, a dispatcher calls the original function. So models
that are not accelerated do not change, and code that slices or combines tables works as before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ropewalk._layout import AXES, Layout
from ropewalk.integrations.transformers.attached import attached_to
from ropewalk.integrations.transformers.probe import Form, Place, reorder_channels, signature_of, with_unrotated_prefix
from ropewalk.rotation.api import Rotation, create_unchecked

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
    for name in sorted(_names(method.__code__)):
        function = method.__globals__.get(name)
        if (
            function is not None
            and _ROTARY_NAME.search(name)
            and callable(function)
            and signature_of(original(function))
        ):
            yield (str(method.__globals__["__name__"]), name), function


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that this code and its inner functions use."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


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
    """Create a function that rotates by the Rotations attached to its tables, and otherwise calls `function`."""
    names, _ = signature_of(function) or ((), 0)

    def rotate(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        attached = attached_to(arguments)
        if attached is not None and place in attached.forms:
            rotated = _rotate(arguments, attached.rotations, attached.forms[place])
            if rotated is not None:
                return rotated
        return function(*args, **kwargs)

    functools.update_wrapper(rotate, function, updated=())
    rotate.__name__ = rotate.__qualname__ = getattr(function, "__name__", type(function).__name__)
    rotate.ropewalk_original = function  # type: ignore[attr-defined]
    return rotate


def _rotate(arguments: Mapping[str, Any], rotations: tuple[Rotation, ...], form: Form) -> Any:
    """Rotate as a function of this form does. Return None if the Rotations do not fit the tensors."""
    layout = dict(form.layouts).get(arguments.get("unsqueeze_dim", form.unsqueeze_dim))
    q, k = arguments[form.names[0]], arguments.get(form.names[1]) if form.at == 2 else None
    if layout is None or (form.at == 2 and k is None and form.alone is None):
        return None
    layout = "thd" if q.ndim == 3 and layout == "bshd" else layout
    tensors, rotation = [q] if k is None else [q, k], rotations[0]
    if form.prefix and q.ndim == AXES[layout][3]:
        rotation = with_unrotated_prefix(rotation, q.shape[AXES[layout][1]])
    if not all(_fits(rotation, x, layout, form) for x in tensors):
        return None
    if form.parts > 1:
        return functools.reduce(lambda x, part: part(x, layout=layout), rotations, q)
    q_rotation = _adapt_to_heads(rotation, q, form)
    if k is None:
        q = reorder_channels(q_rotation(q, layout=layout), form.order, q_rotation)
        return (q, None) if form.alone == "pair" else q
    if k.shape[-1] == q.shape[-1]:
        k_rotation = q_rotation
        q, k = q_rotation(q, k, layout=layout)
    else:
        k_rotation = _adapt_to_heads(rotation, k, form)
        q, k = q_rotation(q, layout=layout), k_rotation(k, layout=layout)
    return reorder_channels(q, form.order, q_rotation), reorder_channels(k, form.order, k_rotation)


def _fits(rotation: Rotation, x: Tensor, layout: Layout, form: Form) -> bool:
    """Return whether a Rotation has the tokens of x, and the function rotates heads of this size."""
    batch, tokens, _, axes = AXES[layout]
    *rows, seq = rotation.tokens
    return (
        x.ndim == axes
        and x.shape[tokens] == seq
        and (not rows or (batch is not None and x.shape[batch] == rows[0]))
        and (form.parts > 1 or form.whole is not None or x.shape[-1] == rotation.rotary_dim)
    )


def _adapt_to_heads(rotation: Rotation, x: Tensor, form: Form) -> Rotation:
    """Return a Rotation with the tables of `rotation`, the head_dim of x, and the pairing of the model's function."""
    head_dim, rotary_dim = x.shape[-1], rotation.rotary_dim
    if head_dim == rotation.head_dim == rotary_dim and rotation.pairing == form.pairing:
        return rotation
    offset = head_dim - rotary_dim if form.whole == "last" else 0
    return create_unchecked(
        rotation.cos, rotation.sin, form.pairing, head_dim, rotary_dim, offset, rotation.attention_factor
    )
