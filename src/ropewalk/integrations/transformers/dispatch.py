"""Replace the rotating functions of a modeling file by dispatchers that accept a Rotation in place of cos and sin.

If it gets no Rotation, a dispatcher calls the original function, so models that are not accelerated do not change. A
Rotation supports no arithmetic. Code that computes with cos and sin itself therefore raises an error, instead of giving
wrong results.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ropewalk._checks import error, shown
from ropewalk._layout import AXES
from ropewalk.integrations.transformers.probe import Form, reorder_channels, signature_of, with_unrotated_prefix
from ropewalk.rotation.api import Rotation, create_unchecked

Place = tuple[str, str]
"""The names of a function's module and of the function."""

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


def install(place: Place, form: Form) -> None:
    """Replace a function by a dispatcher of this form, unless it has been replaced already.

    Raises:
        RopeError: the function has been replaced by a dispatcher of another form.
    """
    module = importlib.import_module(place[0])
    function = getattr(module, place[1])
    installed = getattr(function, "ropewalk_form", None)
    if installed is None:
        setattr(module, place[1], dispatcher(function, form))
    elif installed != form:
        raise error(
            "accelerate",
            f"{'.'.join(place)} must rotate in the same way as when it was replaced",
            shown(form),
            "Two models of this file write their tables in different ways. Accelerate only one of them in a process.",
        )


def dispatcher(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """Create a function that rotates if it is passed a Rotation as its tables, and calls `function` otherwise."""
    names, at, layouts = form.names, form.at, dict(form.layouts)
    kind: Any = Rotation if form.parts == 1 else tuple  # of Rotations, one for each part of a head

    def rotate(*args: Any, **kwargs: Any) -> Any:
        rotation: Any = args[at] if len(args) > at else kwargs.get(names[at])
        if type(rotation) is not kind:
            return function(*args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        axis = arguments.get("unsqueeze_dim", form.unsqueeze_dim)
        if axis not in layouts:
            raise error(
                rotate.__name__,
                f"unsqueeze_dim must be one of {', '.join(map(str, layouts))}",
                shown(axis),
                "Call restore(model) to use the model's own rotation.",
            )
        q = arguments[names[0]]
        layout = "thd" if q.ndim == 3 and layouts[axis] == "bshd" else layouts[axis]
        if form.parts > 1:
            for part in rotation:
                q = part(q, layout=layout)
            return q
        if form.prefix:
            rotation = with_unrotated_prefix(rotation, q.shape[AXES[layout][1]])
        q_rotation = _adapt_to_heads(rotation, q, form)
        if at == 1:
            return reorder_channels(q_rotation(q, layout=layout), form.order, q_rotation)
        k: Any = arguments.get(names[1])
        if k is None and form.alone is not None:
            q = reorder_channels(q_rotation(q, layout=layout), form.order, q_rotation)
            return q if form.alone == "q" else (q, None)
        if q.shape[-1] == k.shape[-1]:
            q, k = q_rotation(q, k, layout=layout)
            return reorder_channels(q, form.order, q_rotation), reorder_channels(k, form.order, q_rotation)
        k_rotation = _adapt_to_heads(rotation, k, form)
        q, k = q_rotation(q, layout=layout), k_rotation(k, layout=layout)
        return reorder_channels(q, form.order, q_rotation), reorder_channels(k, form.order, k_rotation)

    functools.update_wrapper(rotate, function, updated=())
    rotate.__name__ = rotate.__qualname__ = getattr(function, "__name__", type(function).__name__)
    rotate.ropewalk_original, rotate.ropewalk_form = function, form  # type: ignore[attr-defined]
    return rotate


def _adapt_to_heads(rotation: Rotation, x: Tensor, form: Form) -> Rotation:
    """Return a Rotation with the tables of `rotation`, the head_dim of x, and the pairing of the model's function."""
    head_dim, rotary_dim = x.shape[-1], rotation.rotary_dim
    if head_dim == rotation.head_dim == rotary_dim and rotation.pairing == form.pairing:
        return rotation
    if head_dim != rotary_dim and form.whole is None:
        raise error(
            "accelerate",
            f"the model's function rotates {rotary_dim} channels",
            f"heads of {head_dim}",
            "Call restore(model) to use the model's own rotation.",
        )
    offset = head_dim - rotary_dim if form.whole == "last" else 0
    factor = rotation.attention_factor
    return create_unchecked(
        rotation.cos, rotation.sin, form.pairing, head_dim, rotary_dim, offset, factor, rotation.per_head
    )
