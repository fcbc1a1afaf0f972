"""Modules that import torch, each imported when it is first used, because `rope` must not import torch.

From then on, `_torch.exact` is an attribute. An import statement in a function takes a quarter of a microsecond in each
call.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropewalk.angles import exact as exact
    from ropewalk.rotation import api as api

_PACKAGES = {"api": "rotation", "exact": "angles"}


def __getattr__(name: str) -> ModuleType:
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = globals()[name] = import_module(f"ropewalk.{_PACKAGES[name]}.{name}")
    return module
