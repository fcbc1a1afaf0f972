"""The pytest fixture `assert_rope`. Enable it in conftest.py: `pytest_plugins = ["ropewalk.integrations.pytest"]`.

The fixture is not registered as an entry point, because pytest would then import ropewalk in every project where
ropewalk is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["assert_rope"]
__dir__ = __all__.copy


@pytest.fixture
def assert_rope() -> Callable[..., Any]:
    """Return `ropewalk.conformance.assert_right`, which fails with the whole report if an implementation is wrong."""
    from ropewalk import conformance

    return conformance.assert_right
