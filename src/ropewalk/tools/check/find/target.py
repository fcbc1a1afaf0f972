"""Load the target of a check from `module:name`, `file.py:name`, or the object itself."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ropewalk import _checks
from ropewalk.tools.check.find import memory

_WHO = "check"
_FORMS = "Pass module:name or file.py:name. If one function computes cos and sin for another, pass file.py:make,apply."


@dataclass(frozen=True)
class Target:
    """The loaded target."""

    name: str  # that the user passed, or the qualified name of the object
    objects: tuple[Any, ...]  # one callable, or two: the first computes cos and sin, the second applies them
    library: str | None = None  # of the arrays that they take in place of tensors


def says_what_runs(target: str) -> str:
    """Return one line that warns which code `check` is about to execute."""
    where, _, _ = target.rpartition(":")
    return f"This runs the code of {where or target} with your permissions. Check only code that you would run."


def load(target: Any) -> Target:
    """Load the objects of a target, which is a string such as "module:name" or the objects themselves.

    Raises:
        RopeError: the target is not of a known form, its file, module or name does not exist, or the import raises.
    """
    if not isinstance(target, str):
        objects = tuple(target) if isinstance(target, (list, tuple)) else (target,)
        if not 1 <= len(objects) <= 2 or not all(callable(obj) for obj in objects):
            raise _checks.error(_WHO, "target must be one or two callables", _checks.shown(target), _FORMS)
        return Target(" and ".join(name_of(obj) for obj in objects), tuple(map(_callable, objects)))
    where, colon, names = target.rpartition(":")
    if not colon or not where or not names:
        raise _checks.error(_WHO, "TARGET must name a module and something in it", _checks.shown(target), _FORMS)
    module = _load_module(where)
    attributes = [name.strip() for name in names.split(",")]
    if len(attributes) > 2:
        raise _checks.error(_WHO, "TARGET must have one or two names", _checks.shown(names), _FORMS)
    return Target(target, tuple(_callable(_find_attribute(module, where, name)) for name in attributes))


def _callable(obj: Any) -> Any:
    """Return the function that calls a `torch.autograd.Function`, with the parameters of its forward, or the object.

    A class that cannot be called, and has one method for others, is that method.
    """
    if not inspect.isclass(obj):
        return obj
    if not issubclass(obj, torch.autograd.Function):
        named = {name for cls in obj.__mro__ if cls is not torch.nn.Module for name in vars(cls)}
        public = [name for name, value in vars(obj).items() if inspect.isfunction(value) and not name.startswith("_")]
        public = ["forward"] if "forward" in public else public
        is_called = "__call__" in named or (issubclass(obj, torch.nn.Module) and "forward" in named)
        return obj if is_called or len(public) != 1 else Method(obj, public[0])

    def apply(*args: Any) -> Any:
        return obj.apply(*args)  # type: ignore[no-untyped-call]

    own_context = obj.setup_context is torch.autograd.Function.setup_context  # forward is passed ctx
    known = [*inspect.signature(obj.forward).parameters.values()][int(own_context) :]
    apply.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=p.POSITIONAL_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in known]
    )
    apply.__qualname__, apply.__module__ = f"{obj.__qualname__}.apply", obj.__module__
    return apply


def name_of(obj: Any) -> str:
    """Return the qualified name of an object, or of its type if it has none."""
    if isinstance(obj, Method):
        return f"{name_of(obj.owner)}.{obj.name}"
    if isinstance(obj, torch.jit.ScriptFunction):
        return str(obj.name)
    return str(getattr(obj, "__qualname__", None) or type(obj).__qualname__)


def _load_module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except Exception as e:  # a module may raise anything
            fix = "Run this in the folder that contains the module."
            raise _checks.error_from(f"{_WHO}: {where} cannot be imported", e, fix) from e
    path = Path(where)
    if not path.is_file():
        raise _checks.error(_WHO, "TARGET must name an existing file", _checks.shown(where), _FORMS)
    name = f"ropewalk_checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _checks.error(_WHO, "TARGET must name a Python file", _checks.shown(where), _FORMS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module by name
    paths = [*sys.path]
    sys.path.insert(0, str(path.parent.resolve()))  # as `python file.py` does
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # a file may raise anything, or be a script that exits
        fix = "Pass a file that can be imported."
        raise _checks.error_from(f"{_WHO}: {where} cannot be run", e, fix, memory.place_of(e)) from e
    finally:
        sys.path[:] = paths
        sys.modules.pop(name, None)
    return module


def _find_attribute(module: ModuleType, where: str, dotted: str) -> Any:
    """Look up a name in a module. An instance method becomes a `Method`, since its class must be constructed first."""
    head, _, method = dotted.partition(".")
    found = getattr(module, head, None)
    if found is None or not callable(found) or (method and not callable(getattr(found, method, None))):
        known = ", ".join(sorted(n for n in vars(module) if callable(vars(module)[n]) and not n.startswith("_"))[:12])
        must, fix = f"{where} must have a callable of that name", f"Its callables are: {known or 'none'}."
        raise _checks.error(_WHO, must, _checks.shown(dotted), fix)
    if not method:
        return found
    is_static = isinstance(inspect.getattr_static(found, method), (staticmethod, classmethod))
    return getattr(found, method) if is_static else Method(found, method)


@dataclass(frozen=True)
class Method:
    """A method of a class that must be constructed first."""

    owner: Any
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Construct an object of the class with these arguments, and return its method."""
        return getattr(self.owner(*args, **kwargs), self.name)


def function_of(obj: Any) -> Any:
    """Return what is called of an object: the method of a class, bound to nothing."""
    if isinstance(obj, Method):
        return partial(getattr(obj.owner, obj.name), None)
    if inspect.isclass(obj):
        return partial(getattr(obj, _called(obj)), None)
    return obj


def code_of(obj: Any) -> Any:
    """Return the code that runs if an object is called: mostly that of `forward`, if it is a module."""
    return getattr(obj, _called(type(obj))) if isinstance(obj, torch.nn.Module) else obj


def _called(cls: type) -> str:
    calls = next((each for each in cls.__mro__ if "__call__" in vars(each)), None)
    if not hasattr(cls, "forward") or calls not in (None, torch.nn.Module):
        return "__call__"
    passes_on = {p.kind for p in [*inspect.signature(cls.forward).parameters.values()][1:]} == {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    return "forward_native" if passes_on and hasattr(cls, "forward_native") else "forward"  # as in vLLM
