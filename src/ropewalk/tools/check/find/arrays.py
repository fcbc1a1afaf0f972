"""Call code of NumPy, JAX or MLX with arrays made of tensors, and make tensors of the arrays that it returns."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.tools.check.find import memory, words
from ropewalk.tools.check.find.target import Target

# Library of arrays → the module and the function that make its arrays.
LIBRARIES = {"jax": ("jax.numpy", "asarray"), "mlx": ("mlx.core", "array"), "numpy": ("numpy", "asarray")}


def library_of(target: Target) -> str | None:
    """Return the library of arrays that a target uses, if it uses no torch."""
    for obj in target.objects:
        scope = scope_of(obj).values()
        names = (value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "") for value in scope)
        used = {str(name).partition(".")[0] for name in names}
        used |= {*getattr(getattr(obj, "__code__", None), "co_names", ())}  # also what it imports itself
        for library in LIBRARIES if "torch" not in used else ():
            if library in used:
                return library
    return None


def scope_of(obj: Any) -> dict[str, Any]:
    """Return the names of the file that defines an object."""
    owner = getattr(obj, "owner", obj)
    code = [owner, *vars(owner if inspect.isclass(owner) else type(owner)).values()]
    return next((function.__globals__ for function in code if inspect.isfunction(function)), {})


def converted(value: Any, library: str | None) -> Any:
    """Return a function that calls another with arrays of a library and returns tensors, or tensors of arrays.

    Without a library, return the value itself. Arrays are float32 for 16 bits, which NumPy has not all of.
    """
    if library is None:
        return value
    if not callable(value):
        return _tensors(value, None)
    wrapper: Any = partial(_call, words.accept_keywords(value), library)
    wrapper.__self__ = getattr(value, "__self__", value)
    return words.stands_for(wrapper, value, (words.parameters(value) or {}).values())


def _call(function: Any, library: str, /, **passed: Any) -> Any:
    where, name = LIBRARIES[library]
    make, tensors = getattr(importlib.import_module(where), name), list[tuple[Tensor, Any]]()

    def array(x: Tensor) -> Any:
        shared = x.detach()
        tensors.append((x, made := make((shared.float() if x.is_floating_point() else shared).numpy())))
        return made

    returned = function(**memory.map_tensors(passed, array))
    for x, made in tensors if returned is None else ():  # what it has written
        x.detach().copy_(torch.from_numpy(np.array(made)))
    return _tensors(returned, next((x.dtype for x, _ in tensors if x.is_floating_point()), None))


def _tensors(value: Any, dtype: torch.dtype | None) -> Any:
    """Return tensors of the arrays in lists, tuples and dicts, which have a dtype if they are of real numbers."""
    if isinstance(value, list | tuple):
        return tuple(_tensors(each, dtype) for each in value)
    if isinstance(value, dict):
        return {key: _tensors(each, dtype) for key, each in value.items()}
    if not hasattr(value, "__array__") and not hasattr(value, "__dlpack__"):
        return value
    x = torch.from_numpy(np.array(value))
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x
