"""Broken configs: whatever happens to a real one, only `ModelRopes` or a `RopeError` comes out.

python tests/configs/test_mutations.py 100000      a longer run, by hand
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk import RopeError, from_config

GOLDEN = Path(__file__).parent.parent / "golden"
CONFIGS = [row["config"] for name in ("text_models", "class_defaults")
           for row in json.loads((GOLDEN / f"{name}.json").read_text())["rows"]]  # fmt: skip
CONFIGS += [
    {"dim": 4096, "n_layers": 32, "n_heads": 32, "rope_theta": 500000.0, "use_scaled_rope": True, "head_dim": 128},
    {"model_type": "llava", "text_config": CONFIGS[0]},
]
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 8192, 10**9, 10**400, 0.0, -0.5, 0.5, 1.5, 1e300, float("nan"), float("inf"),
    "", "yarn", "default", "8", "null", "x" * 5000, [], [1, 2], [None], [[]], ["full_attention"], [1.0] * 64, {},
    {"a": {}}, {"factor": 2}, {"rope_type": "linear", "factor": 2.0}, {"full_attention": {"rope_theta": 1e4}},
    b"bytes", (1, 2), {1: 2},
]  # fmt: skip
KEYS = [
    "rope_theta", "rope_scaling", "rope_parameters", "rope_type", "type", "factor", "head_dim", "partial_rotary_factor",
    "layer_types", "num_hidden_layers", "max_position_embeddings", "original_max_position_embeddings", "model_type",
    "text_config", "no_rope_layers", "per_layer_config", "attention_factor", "short_factor", "mscale", "rotary_dim",
    "rope_tehta", "beta_fast", "qk_rope_head_dim", "index_head_dim", "llama_4_scaling_beta", "full_attention",
]  # fmt: skip


def places(config: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The config and every object in it."""
    found = [config]
    for value in config.values():
        if isinstance(value, dict):
            found += places(value)
    return found


def mutate(config: dict[Any, Any], draw: random.Random) -> None:
    place = draw.choice(places(config))
    keys = list(place)
    # Half of the time where rotation is decided, so that not all mutations hit keys that nothing reads.
    about_rope = [key for key in keys if any(word in str(key) for word in ("rope", "rotary", "layer", "head", "model"))]
    key = draw.choice(about_rope if about_rope and draw.random() < 0.5 else keys or ["rope_theta"])
    match draw.randrange(6):
        case 0:
            place.pop(key, None)
        case 1:
            place[draw.choice(KEYS)] = place.pop(key, None)
        case 2:
            place[key] = copy.deepcopy(draw.choice(VALUES))
        case 3:
            other = draw.choice(keys or ["rope_theta"])
            place[key], place[other] = place.get(other), place.get(key)
        case 4:
            place[key] = {draw.choice([*KEYS, str(key)]): place.get(key)}
        case _:
            place[draw.choice(KEYS)] = copy.deepcopy(draw.choice(VALUES))


def outcome(draw: random.Random) -> str:
    config = copy.deepcopy(draw.choice(CONFIGS))
    for _ in range(draw.randint(1, 4)):
        mutate(config, draw)
    kwargs: dict[str, Any] = {"text_only": True} if draw.random() < 0.7 else {}
    if draw.random() < 0.2:
        kwargs |= {"pairing": draw.choice(["half", "interleaved"]), "base": draw.choice([None, 1e4, 500000.0])}
    try:
        ropes = from_config(config, **kwargs)
    except RopeError as refusal:
        if len(str(refusal)) > 2000:
            raise AssertionError(f"a message of {len(str(refusal))} characters") from refusal
        return "refused"
    json.dumps(ropes.facts(5000), allow_nan=False)
    ropes.explain(5000)
    return "read"


@settings(max_examples=3000)
@given(st.integers(0, 2**32))
def test_nothing_else_comes_out(seed: int) -> None:
    outcome(random.Random(seed))


def test_both_happen() -> None:
    counted = Counter(outcome(random.Random(seed)) for seed in range(300))
    assert counted["read"] > 30
    assert counted["refused"] > 30


if __name__ == "__main__":
    total = int(sys.argv[1])
    sys.stdout.write(f"{Counter(outcome(random.Random(seed)) for seed in range(total))}\n")
