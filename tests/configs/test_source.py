"""Load configs from dicts, objects, files and folders, and the errors of each."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import limited
from ropewalk import Rope, RopeError, from_config
from ropewalk.configs import QueryScale, source

CONFIG = {
    "model_type": "llama",
    "head_dim": 16,
    "num_hidden_layers": 2,
    "rope_theta": 1e6,
}
ROPE = Rope(16, 1e6, "half")


class HasToDict:
    def __init__(self, values: Any) -> None:
        self.values = values

    def to_dict(self) -> Any:
        return self.values


def test_dicts_and_objects() -> None:
    assert from_config(CONFIG).rope == ROPE
    assert from_config(MappingProxyType(CONFIG)).rope == ROPE
    ropes = from_config(HasToDict(CONFIG))
    assert ropes.rope == ROPE
    assert ropes.source == "HasToDict"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_files_and_folders(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding=encoding)
    for given in (path, str(path), tmp_path, str(tmp_path)):
        ropes = from_config(given)
        assert ropes.rope == ROPE
        assert ropes.source == str(path)


def test_infinity_elsewhere_in_a_file_is_accepted(tmp_path: Path) -> None:
    """json.dump writes infinity, and configs of state-space models contain it (time_step_limit)."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "time_step_limit": [0.0, float("inf")]}))
    assert from_config(path).rope == ROPE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file must contain JSON in UTF-8"),
        (json.dumps(CONFIG).encode()[:40], "Check that it is complete."),
        (b"\xff\xfe\x00", "the file must contain JSON in UTF-8"),
        (b"[1, 2]", "a config must be a JSON object, got [1, 2]"),
        (b"null", "a config must be a JSON object, got None"),
        (b'{"rope_theta": 1, "rope_theta": 2}', "the keys of an object must be unique, got 'rope_theta' twice"),
        (b'{"a": {"b": 1, "b": 1}}', "got 'b' twice"),
        (b"[" * 100_000, "the file must contain JSON in UTF-8"),
        (b'{"rope_theta": ' + b"9" * 5000 + b"}", "the file must contain JSON in UTF-8"),
        (b" " * (2 * 2**20 + 1), "the file must have at most 2,097,152 bytes"),
    ],
    ids=["empty", "truncated", "binary", "list", "null", "twice", "twice inside", "deep", "long number", "too long"],
)
def test_files_that_hold_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(RopeError) as raised:
        from_config(path)
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(path))
    assert len(str(raised.value)) < 1000


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(RopeError, match="the config must be an existing file, got no such file"):
        from_config(tmp_path / "nowhere.json")
    found = (
        r"config\.json: the config must be an existing file, got no such file. A model has config.json, params.json "
    )
    with pytest.raises(RopeError, match=found):
        from_config(tmp_path)
    (tmp_path / "empty.json").write_text("\n")
    with pytest.raises(RopeError, match="the file must contain JSON in UTF-8, got an empty file"):
        from_config(tmp_path / "empty.json")
    with pytest.raises(RopeError, match=r"cannot be read|must be an existing file"):
        from_config("a\0b")


def test_a_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RopeError, match="the config must be an existing file"):
        from_config(tmp_path / "pipe")


def test_files_that_the_system_refuses_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")

    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RopeError, match="cannot be read: not yours"):
        source.load(path)


@pytest.mark.parametrize("given", [None, 3, [CONFIG], HasToDict])
def test_values_of_other_types(given: Any) -> None:
    with pytest.raises(RopeError, match="from_config: source must be a dict, a config object with"):
        from_config(given)


def test_objects_whose_to_dict_returns_no_dict() -> None:
    with pytest.raises(RopeError, match=r"HasToDict: a config must be a JSON object, got \[1\]"):
        from_config(HasToDict([1]))


# ---- files that are costly to read ----------------------------------------------------------------------------------

SIZE = 2 * 2**20 - 1000  # just below the limit for a config
LLAMA = '"model_type": "llama", "head_dim": 8, "num_hidden_layers": 1, "rope_theta": 1e4'


def keys(count: int) -> str:
    return ", ".join(f'"k{i}": 1' for i in range(count))


@pytest.mark.parametrize("size", [20_000, 140_000])
def test_duplicate_keys_are_found_in_linear_time(tmp_path: Path, size: int) -> None:
    """A quadratic search took 10 seconds for 20,000 keys, and over ten minutes for the largest file."""
    path = tmp_path / "config.json"
    path.write_text(f'{{{keys(size)}, "k{size - 1}": 2}}')
    said, seconds = limited.read(path)
    assert f"the keys of an object must be unique, got 'k{size - 1}' twice" in said
    assert seconds < 5


COSTLY: dict[str, Callable[[int], str]] = {
    "empty lists": lambda size: '{"a": [' + ",".join(["[]"] * (size // 3)) + "]}",
    "small objects": lambda size: '{"a": [' + ",".join(['{"a":1}'] * (size // 8)) + "]}",
    "numbers": lambda size: '{"a": [' + ",".join(["1"] * (size // 2)) + "]}",
    "one key": lambda size: f'{{{LLAMA}, "{"a" * size}": 1}}',
    "one key of many words": lambda size: f'{{{LLAMA}, "{"_" * size}": 1}}',
    "one model_type": lambda size: f'{{"model_type": "{"a" * size}"}}',
    "many keys": lambda size: f"{{{LLAMA}, {keys(size // 15)}}}",
    "many parameters": lambda size: f'{{{LLAMA}, "rope_scaling": {{"type": "linear", {keys(size // 15)}}}}}',
}


@pytest.mark.parametrize("name", COSTLY)
def test_files_are_read_or_refused_at_bounded_cost(tmp_path: Path, name: str) -> None:
    """It takes under 200 MiB, of which Python and NumPy use 30, and under a second. The limit is for slow machines."""
    path = tmp_path / "config.json"
    for size in (SIZE, 15 * 2**20):
        path.write_text(COSTLY[name](size))
        said, seconds = limited.read(path)
        assert said.startswith("refused") or name.startswith("one key"), said[:200]
        assert seconds < 6, size


def test_a_long_list_of_labels_is_read(tmp_path: Path) -> None:
    """The configs of models trained on ImageNet-21k have the longest lists of labels."""
    labels = {str(i): f"label number {i} of them" for i in range(21_841)}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "id2label": labels, "label2id": {v: int(k) for k, v in labels.items()}}))
    assert path.stat().st_size > 1.5e6
    assert from_config(path).rope == ROPE


# ---- values that JSON does not have, or Python cannot show ----------------------------------------------------------

HUGE = 10**5000


def nested(times: int, around: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(times):
        value = around(value)
    return value


UNSPEAKABLE: list[Any] = [
    HUGE,
    -HUGE,
    [HUGE],
    {"a": HUGE},
    {HUGE: 1},
    {(1, 2): 3},
    np.arange(3),
    np.zeros((2, 2)),
    np.array([HUGE, None]),
    torch.zeros(3),
    "\ud800",
    "\x1b[31m",
    {"factor": {"a": 1}},
    nested(90, lambda value: {"a": value}),
    nested(90, lambda value: [value]),
    nested(90, lambda value: (value,)),
    nested(600, lambda value: {"a": value}),
    nested(600, lambda value: [value]),
    nested(600, lambda value: OrderedDict(rope_theta=value)),
    nested(100_000, lambda value: {"model_type": "llava", "text_config": value}),
]
READ_KEYS = [
    "model_type", "num_hidden_layers", "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "layer_types",
    "partial_rotary_factor", "max_position_embeddings", "per_layer_config", "rope_unknown", "rope_interleaved",
    "rope_scaling.rope_type", "rope_scaling.type", "rope_scaling.factor", "rope_scaling.unknown",
    "rope_parameters.rope_theta", "rope_parameters.rope_type", "no_rope_layers", "text_config",
]  # fmt: skip


@pytest.mark.parametrize("value", UNSPEAKABLE, ids=range(len(UNSPEAKABLE)))
def test_values_that_json_cannot_express(value: Any) -> None:
    for model_type in ("llama", "gemma3_text", "smollm3", "llava", "phi3", "exaone4", "glm4", "unknown"):
        for name in READ_KEYS:
            section, _, key = name.rpartition(".")
            config = {**CONFIG, "model_type": model_type}
            config |= {section: {"rope_type": "linear", "factor": 2.0, key: value}} if section else {key: value}
            message = read(config, pairing="half" if model_type == "unknown" else None)
            assert len(message) < 2500
            assert message.isprintable()


def read(config: Any, **arguments: Any) -> str:
    """Return the message of the error for a config, or "" if it is read."""
    try:
        ropes = from_config(config, **arguments)
        ropes.explain()
        ropes.to_hf_config(version=5)
    except RopeError as refusal:
        return str(refusal)
    return ""


def test_a_value_that_holds_itself_many_times() -> None:
    """Each of 60 nested lists contains the next one twice, so there are 2**60 values in all."""
    with pytest.raises(RopeError, match="a config must have at most 262144 values, got more"):
        from_config({**CONFIG, "note": nested(60, lambda value: [value, value])})


def test_arrays_and_tensors_are_lists() -> None:
    config = {**CONFIG, "model_type": "smollm3", "no_rope_layers": [1, 0], "max_position_embeddings": 64}
    expected = from_config(config).layers
    assert expected == (ROPE, None)
    for listed in (np.array([1, 0]), torch.tensor([1, 0]), (1, 0)):
        assert from_config({**config, "no_rope_layers": listed}).layers == expected
    assert from_config({**CONFIG, "head_dim": np.int64(16), "rope_theta": np.float64(1e6)}).rope == ROPE
    both = {"rope_type": ["default", "default"], "type": np.float64(1.0)}  # == would compare arrays entry by entry
    with pytest.raises(RopeError, match=r"rope_parameters\.rope_type must be one of .* got \['default', 'default'\]"):
        from_config({**CONFIG, "rope_parameters": {**both, "rope_theta": 1e6}})


@pytest.mark.parametrize("argument", ["pairing", "base", "factor", "text_only"])
@pytest.mark.parametrize("value", [HUGE, np.zeros(2), "\ud800", nested(5000, lambda value: {"a": value})], ids=range(4))
def test_arguments_that_cannot_be_shown(argument: str, value: Any) -> None:
    params = {"dim": 64, "n_layers": 1, "n_heads": 2, "rope_theta": 1e4, "use_scaled_rope": True}
    for config in (CONFIG, params, {**params, "rope_scaling_factor": 8.0}):
        with pytest.raises(RopeError) as raised:
            from_config(config, **{"factor": 8.0, argument: value} if config is params else {argument: value})
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 1000


def test_nested_values_are_written_back(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    note = nested(95, lambda value: {"a": value})
    path.write_text(json.dumps({**CONFIG, "note": note}))
    written = from_config(path).to_hf_config(version=5)
    assert written["note"] == note
    path.write_text(json.dumps({**CONFIG, "note": nested(600, lambda value: {"a": value})}))
    with pytest.raises(RopeError, match="a config must be nested at most 100 deep, got more"):
        from_config(path)


def test_written_values_are_copies() -> None:
    config = {**CONFIG, "labels": {"0": ["a"]}}
    ropes = from_config(config)
    config["labels"]["0"].append("changed")  # type: ignore[index]
    ropes.to_hf_config(version=5)["labels"]["0"].append("changed")
    assert ropes.to_hf_config(version=5)["labels"] == {"0": ["a"]}


class Bytes:
    def __init__(self, path: bytes) -> None:
        self.path = path

    def __fspath__(self) -> bytes:
        return self.path


def test_paths_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert from_config(Bytes(os.fsencode(tmp_path))).rope == ROPE
    with pytest.raises(RopeError, match="source must be a dict, a config object with"):
        from_config(os.fsencode(tmp_path))


def test_escapes_in_a_file_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "model_type": "x\x1b[31mRED\x07\ud800"}))
    explained = from_config(path, pairing="half").explain()
    assert r"x\x1b[31mRED\x07\ud800" in explained
    assert explained.replace("\n", "").isprintable()
    with pytest.raises(RopeError) as raised:
        from_config(path)
    assert str(raised.value).isprintable()


def test_a_query_far_beyond_any_length() -> None:
    scale = QueryScale(beta=0.5, original_max_position_embeddings=4)
    assert scale.at(10**400 - 1) == pytest.approx(1 + 0.5 * (400 * math.log(10) - math.log(4)))
    assert scale.at(7) == 1 + 0.5 * math.log(2)
    assert QueryScale(power=0.1).at(10**400 - 1) == pytest.approx(1e40)
