"""Change configs at random, and check that reading them gives `ModelRopes` or a `RopeError`.

python tests/support/config_mutations.py 200000 [FOLDER ...]     a longer run, by hand, also of the configs in folders
"""

from __future__ import annotations

import copy
import json
import random
import sys
import tempfile
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ropewalk import RopeError, from_config

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = [
    "text_models", "class_defaults", "released", "vision_towers", "diffusers", "deployed", "remote_towers",
    *(f"engine_models/remote_of_{engine}" for engine in ("mlx_lm", "sglang", "vllm")),
]  # fmt: skip
CONFIGS = [row["config"] for name in NAMES
           for row in json.loads((GOLDEN / f"{name}.json").read_text())["rows"] if "config" in row]  # fmt: skip
CONFIGS += [
    {"dim": 4096, "n_layers": 32, "n_heads": 32, "rope_theta": 500000.0, "use_scaled_rope": True, "head_dim": 128},
    {"model_type": "llava", "text_config": CONFIGS[0]},
]
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 8192, 10**9, 10**400, 0.0, -0.5, 0.5, 1.5, 1e300, float("nan"), float("inf"),
    "", "yarn", "default", "8", "null", "x" * 5000, [], [1, 2], [None], [[]], ["full_attention"], [1.0] * 64, {},
    {"a": {}}, {"factor": 2}, {"rope_type": "linear", "factor": 2.0}, {"full_attention": {"rope_theta": 1e4}},
    b"bytes", (1, 2), {1: 2}, 10**5000, -(10**5000), 1e-320, 5e-324, 1e308, 1.0000000000000002, 2**53, 2**64,
    "\ud800", "\x1b[31m", "a" * 300_000, "rope_thetaa" * 20, [1e-320] * 64, [10**5000] * 64, {"\ud800": "\udfff"},
    {10**5000: 1}, {None: 1}, {(1, 2): 3}, {"rope_type": "longrope", "factor": 1e308}, {"type": ["yarn"]},
    {"rope_type": "dynamic", "alpha": 1e308}, {"rope_type": "yarn", "mscale": 1e308, "mscale_all_dim": 1e308},
    np.zeros(4), np.zeros((2, 2)), np.ones(64), np.array(1e4), np.float64(1e4), np.float32(2.0), np.int64(8),
    np.bool_(True), np.array("yarn"), np.array([None]), np.array(10**5000, dtype=object), np.float64("nan"), 1j,
    {1, 2}, range(4), Fraction(1, 3), Fraction(10**5000), Decimal("1e5000"), object(), len,
]  # fmt: skip


ABOUT_ROPE = ("rope", "rotary", "layer", "head", "model")


def nested(times: int, around: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(times):
        value = around(value)
    return value


# Built for each use, because copy.deepcopy fails for values that are nested so deep.
DEEP: list[Callable[[], Any]] = [
    lambda: nested(600, lambda value: [value]),
    lambda: nested(600, lambda value: {"a": value}),
    lambda: nested(600, lambda value: OrderedDict(rope_theta=value)),
    lambda: nested(600, lambda value: MappingProxyType({"rope_type": value})),
    lambda: nested(2000, lambda value: {"model_type": "llava", "text_config": value}),
    lambda: nested(90, lambda value: (value,)),
]
ARGUMENTS = [None, "half", "interleaved", 1e4, 500000.0, 8.0, *VALUES]
KEYS = [
    "rope_theta", "rope_scaling", "rope_parameters", "rope_type", "type", "factor", "head_dim", "partial_rotary_factor",
    "layer_types", "num_hidden_layers", "max_position_embeddings", "original_max_position_embeddings", "model_type",
    "text_config", "no_rope_layers", "per_layer_config", "attention_factor", "short_factor", "mscale", "rotary_dim",
    "rope_tehta", "beta_fast", "qk_rope_head_dim", "index_head_dim", "llama_4_scaling_beta", "full_attention",
]  # fmt: skip


def places(config: dict[Any, Any]) -> list[dict[Any, Any]]:
    """Return the config and the objects in it, up to a limited depth."""
    found = [config]
    for place in found:
        found += [value for value in place.values() if isinstance(value, dict) and not any(value is f for f in found)]
        if len(found) > 50:
            break
    return found


def some_value(draw: random.Random) -> Any:
    return draw.choice(DEEP)() if draw.random() < 0.05 else copy.deepcopy(draw.choice(VALUES))


def mutate(config: dict[Any, Any], draw: random.Random) -> None:
    place, elsewhere = draw.choice(places(config)), draw.choice(places(config))
    keys = list(place)
    # Half of the changes are made where rotation is defined, so that not all of them hit unread keys.
    about_rope = [key for key in keys if isinstance(key, str) and any(word in key for word in ABOUT_ROPE)]
    key = draw.choice(about_rope if about_rope and draw.random() < 0.5 else keys or ["rope_theta"])
    other_key = draw.choice(keys or ["rope_theta"])
    lists = [value for value in place.values() if isinstance(value, list) and value]
    match draw.randrange(11):
        case 0:
            place.pop(key, None)
        case 1:
            place[draw.choice(KEYS)] = place.pop(key, None)
        case 2:
            place[key] = some_value(draw)
        case 3:
            place[key], place[other_key] = place.get(other_key), place.get(key)
        case 4:
            place[key] = {draw.choice([*KEYS, key]): place.get(key)}
        case 5:
            elsewhere[key] = place.pop(key, None)
        case 6:
            elsewhere[draw.choice([*KEYS, key])] = place.get(key)  # this may create a cycle
        case 7:
            place[key] = [place.get(key)] * draw.choice([1, 2, 8])
        case 8 if lists:
            chosen = draw.choice(lists)
            match draw.randrange(3):
                case 0:
                    chosen.pop()
                case 1:
                    chosen.append(draw.choice(chosen))
                case _:
                    chosen[draw.randrange(len(chosen))] = some_value(draw)
        case 9:
            place[draw.choice([10**5000, 3, None, (1, 2), "\ud800", "rope_\x1b[31m", 1.5, b"rope"])] = some_value(draw)
        case _:
            place[draw.choice(KEYS)] = some_value(draw)


def outcome(draw: random.Random, configs: list[Any], folder: Path) -> str:
    config: Any = copy.deepcopy(draw.choice(configs))
    for _ in range(draw.choice([1, 1, 2, 4])):
        mutate(config, draw)
    kwargs: dict[str, Any] = {"text_only": True} if draw.random() < 0.7 else {}
    if draw.random() < 0.2:
        kwargs |= {"pairing": draw.choice(["half", "interleaved"]), "base": draw.choice([None, 1e4, 500000.0])}
    if draw.random() < 0.1:
        kwargs[draw.choice(["pairing", "base", "factor", "text_only"])] = draw.choice(ARGUMENTS)
    source = written(config, folder) if draw.random() < 0.2 else config
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # a base that was deleted
            ropes = from_config(source, **kwargs)
    except RopeError as refusal:
        return refused(refusal)
    try:
        json.dumps(ropes.facts(5000), allow_nan=False)
        assert ropes.explain(5000).replace("\n", "").isprintable()
    except RopeError as refusal:
        return f"read, explain {refused(refusal)}"
    try:
        ropes.to_hf_config(version=draw.choice([4, 5]))
    except RopeError as refusal:
        return f"read, rewriting {refused(refusal)}"
    return "read and rewritten"


def written(config: Any, folder: Path) -> Any:
    """Write the config to a file and return its path, or return the config if JSON cannot express it."""
    try:
        text = json.dumps(config)
    except (TypeError, ValueError, RecursionError):
        return config
    (folder / "config.json").write_text(text)
    return folder


def refused(refusal: RopeError) -> str:
    message = str(refusal)
    assert len(message) < 2500, message[:500]  # the name contains those of 100 nested models
    assert message.isprintable(), repr(message)
    return "refused"


def by_hand(total: int, folders: list[str]) -> None:
    configs = CONFIGS + [
        value.get("config", value)
        for name in folders
        for path in sorted(Path(name).rglob("*.json"))
        if isinstance(value := json.loads(path.read_text()), dict)
    ]
    started, slowest = time.perf_counter(), (0.0, 0)
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(total):
            before = time.perf_counter()
            try:
                counted[outcome(random.Random(seed), configs, Path(folder))] += 1
            except Exception as e:
                counted[f"{type(e).__name__}"] += 1
                if counted[f"{type(e).__name__}"] < 20:
                    frame = e.__traceback__
                    while frame is not None and frame.tb_next is not None:
                        frame = frame.tb_next
                    where = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame is not None else ""
                    sys.stdout.write(f"seed {seed}: {type(e).__name__} at {where}: {str(e)[:200]!a}\n")
            slowest = max(slowest, (time.perf_counter() - before, seed))
    sys.stdout.write(
        f"{len(configs)} configs, {time.perf_counter() - started:.0f} s, slowest (s, seed) {slowest}\n{counted}\n"
    )


if __name__ == "__main__":
    by_hand(int(sys.argv[1]), sys.argv[2:])
