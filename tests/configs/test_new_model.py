"""An invented model whose row has functions and overrides a method of `Architecture`, registered from outside."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from config_mutations import outcome
from ropewalk import Rope, RopeError, from_config
from ropewalk.configs import models
from ropewalk.configs.architecture import Architecture
from ropewalk.configs.layers import ALL, NO_ROPE, Kind
from ropewalk.configs.reader import ConfigValue, Reader


def odd_layers(c: Reader, count: int) -> list[str]:
    c.origins["layer_types"] = "the odd layers"
    return [ALL if i % 2 else NO_ROPE for i in range(count)]


def add_thousands(c: Reader, rope_keys: dict[str, ConfigValue]) -> None:
    thousands = c.get("rope_thousands")
    c.add(rope_keys, "rope_theta", thousands and 1000.0 * c.size("rope_thousands"), "rope_thousands")


@dataclass(frozen=True)
class Heron(Architecture):
    """The row of an invented model, of which a step differs that no field covers: the last channels rotate."""

    def shape(self, *args: Any) -> tuple[int, int, int]:
        head_dim, rotary_dim, _ = super().shape(*args)
        return head_dim, rotary_dim, head_dim - rotary_dim


HERON = Heron(
    source="a pond",
    pairing="interleaved",
    partial=0.5,
    kinds={ALL: Kind(bases=())},
    pattern=odd_layers,
    more_keys=add_thousands,
    in_transformers=False,
)
CONFIG: dict[str, Any] = {
    "model_type": "heron",
    "head_dim": 16,
    "num_hidden_layers": 4,
    "rope_thousands": 20,
    "rope_scaling": {"type": "linear", "factor": 2.0},
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    models.register("heron", HERON)
    yield
    del models.ARCHITECTURES["heron"]
    models.vocabulary.cache_clear()


def test_the_model_is_read() -> None:
    ropes = from_config(CONFIG)
    scaling = from_config({**CONFIG, "model_type": "llama", "rope_theta": 2e4, "rope_thousands": None}).rope.scaling
    odd = Rope(16, 20_000.0, "interleaved", rotary_dim=8, rotary_offset=8, scaling=scaling)
    assert ropes.layers == (None, odd, None, odd)
    assert ropes.origins["base"] == "rope_thousands"
    assert "model_type heron (a pond)" in ropes.explain()


def test_unread_keys_are_errors() -> None:
    with pytest.raises(
        RopeError, match="'rope_millions' is about rotation and must be a key that this model_type reads"
    ):
        from_config({**CONFIG, "rope_millions": 1})
    with pytest.raises(RopeError, match="must be given, since it is the base"):
        from_config({**CONFIG, "rope_thousands": None})


def test_broken_configs(tmp_path: Path) -> None:
    counted = Counter(outcome(random.Random(seed), [CONFIG], tmp_path) for seed in range(200))
    assert counted["refused"] > 30, counted
    assert counted.total() - counted["refused"] > 5, counted
