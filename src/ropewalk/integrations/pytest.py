"""The pytest fixture `assert_rope`: `pytest_plugins = ["ropewalk.integrations.pytest"]` in conftest.py.

No entry point, which would have pytest import ropewalk in every project where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def assert_rope() -> Callable[..., Any]:
    """`ropewalk.conformance.assert_right`: fails with the whole report where an implementation is wrong."""
    from ropewalk import conformance

    return conformance.assert_right
