"""Many configs of these tests leave out values that are then assumed. `test_assumed.py` tests the warnings."""

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def assumed_values_are_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
