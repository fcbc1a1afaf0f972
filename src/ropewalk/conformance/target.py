"""Load the target of a check from `module:name`, `file.py:name`, `transformers:model`, or the object itself."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ropewalk import _checks

_WHO = "check"
_FORMS = "Pass module:name, file.py:name, or transformers:MODEL; two names for tables and the function that takes them."


@dataclass(frozen=True)
class Target:
    """The loaded target.

    Args:
        name: the name that the user passed, or the name of the object.
        objects: one callable, or two: the first computes cos and sin, the second applies them.
        runs: the file that was executed, or None.
        config: the default config of a model of transformers, or None.
    """

    name: str
    objects: tuple[Any, ...]
    runs: str | None = None
    config: dict[str, Any] | None = None


def says_what_runs(target: str) -> str:
    """One line that warns which code is about to be executed."""
    where, _, _ = target.rpartition(":")
    if where == "transformers":
        return f"This imports transformers and runs its code for {target.rpartition(':')[2]}."
    return f"This runs the code of {where or target} with your permissions. Check only code that you would run."


def load(target: Any) -> Target:
    """Load the objects that a target names.

    Raises:
        RopeError: the file, module or name does not exist, or importing it raises.
    """
    if not isinstance(target, str):
        objects = tuple(target) if isinstance(target, (list, tuple)) else (target,)
        if not 1 <= len(objects) <= 2 or not all(callable(one) for one in objects):
            raise _checks.error(_WHO, "target must be one or two callables", _checks.shown(target), _FORMS)
        return Target(" and ".join(name_of(one) for one in objects), objects)
    where, colon, names = target.rpartition(":")
    if not colon or not where or not names:
        raise _checks.error(_WHO, "TARGET must name a module and something in it", _checks.shown(target), _FORMS)
    if where == "transformers":
        return _from_transformers(target, names)
    module, runs = _load_module(where)
    wanted = [name.strip() for name in names.split(",")]
    if len(wanted) > 2:
        raise _checks.error(_WHO, "TARGET must have one or two names", _checks.shown(names), _FORMS)
    return Target(target, tuple(_find_attribute(module, where, name) for name in wanted), runs)


def name_of(one: Any) -> str:
    """The qualified name of an object, or of its type."""
    if isinstance(one, Method):
        return f"{name_of(one.owner)}.{one.name}"
    return str(getattr(one, "__qualname__", None) or type(one).__qualname__)


def _load_module(where: str) -> tuple[ModuleType, str | None]:
    if not where.endswith(".py"):
        try:
            module = importlib.import_module(where)
        except Exception as e:  # a module may raise anything
            fix = "Run this in the folder that contains the module."
            raise _checks.failed(f"{_WHO}: {where} cannot be imported", e, fix) from e
        return module, getattr(module, "__file__", None)
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
        failure = e if isinstance(e, Exception) else RuntimeError("it exits")
        fix = "Pass a file that can be imported."
        raise _checks.failed(f"{_WHO}: {where} cannot be run", failure, fix) from e
    finally:
        sys.path[:] = paths
        sys.modules.pop(name, None)
    return module, str(path)


def _find_attribute(module: ModuleType, where: str, dotted: str) -> Any:
    """The object of this name. `Class.method` becomes a `Method`, because the class must be constructed first."""
    head, _, method = dotted.partition(".")
    found = getattr(module, head, None)
    if found is None or not callable(found) or (method and not callable(getattr(found, method, None))):
        known = ", ".join(sorted(n for n in vars(module) if callable(vars(module)[n]) and not n.startswith("_"))[:12])
        raise _checks.error(
            _WHO, f"{where} must have a callable of that name", _checks.shown(dotted), f"It has {known or 'none'}."
        )
    if not method:
        return found
    alone = isinstance(inspect.getattr_static(found, method), (staticmethod, classmethod))
    return getattr(found, method) if alone else Method(found, method)


@dataclass(frozen=True)
class Method:
    """A method of a class that must be constructed first."""

    owner: Any
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Construct the object, and return its method."""
        return getattr(self.owner(*args, **kwargs), self.name)


def _from_transformers(target: str, model: str) -> Target:
    """The rotary class and the function of a model of transformers, with the model's default config."""
    try:
        default = importlib.import_module("transformers").AutoConfig.for_model(model)
        modeling = importlib.import_module(type(default).__module__.replace(".configuration_", ".modeling_"))
        config = default.to_dict()
    except Exception as e:
        raise _checks.failed(
            f"{_WHO}: {target} cannot be loaded",
            e,
            "Install transformers (pip install transformers) and pass one of its model types.",
        ) from e
    makers = [n for n, v in vars(modeling).items() if n.endswith("RotaryEmbedding") and isinstance(v, type)]
    own = [n for n in makers if "Vision" not in n and "2D" not in n and "Audio" not in n]
    known = ("apply_rotary_pos_emb_interleave",) * bool(config.get("rope_interleave"))
    takers = [n for n in (*known, "apply_rotary_pos_emb", "apply_rotary_emb") if n in vars(modeling)]
    if not own or not takers:
        raise _checks.error(
            _WHO, "the model must have a rotary class and a function", target, "Pass both: module:Class,function."
        )
    return Target(
        target, (getattr(modeling, own[0]), getattr(modeling, takers[0])), getattr(modeling, "__file__", None), config
    )
