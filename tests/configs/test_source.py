"""Where a config may come from, and what happens when there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ropewalk import Rope, RopeError, from_config
from ropewalk.configs import source

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


def test_infinity_elsewhere_in_a_file_is_no_concern(tmp_path: Path) -> None:
    """json.dump writes it, and state-space models have it (time_step_limit)."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "time_step_limit": [0.0, float("inf")]}))
    assert from_config(path).rope == ROPE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be JSON in UTF-8"),
        (json.dumps(CONFIG).encode()[:40], "Is the file complete?"),
        (b"\xff\xfe\x00", "must be JSON in UTF-8"),
        (b"[1, 2]", "a config must be a JSON object, got [1, 2]"),
        (b"null", "a config must be a JSON object, got None"),
        (b'{"rope_theta": 1, "rope_theta": 2}', "every key must be given once, got 'rope_theta' twice"),
        (b'{"a": {"b": 1, "b": 1}}', "got 'b' twice"),
        (b"[" * 100_000, "must be JSON in UTF-8"),
        (b'{"rope_theta": ' + b"9" * 5000 + b"}", "must be JSON in UTF-8"),
        (b" " * (16 * 2**20 + 1), "a config must have at most 16777216 bytes"),
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


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(RopeError, match="the config must be a file, got none there"):
        from_config(tmp_path / "nowhere.json")
    with pytest.raises(RopeError, match=r"config\.json: the config must be a file"):
        from_config(tmp_path)
    with pytest.raises(RopeError, match=r"cannot be read|must be a file"):
        from_config("a\0b")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RopeError, match="the config must be a file"):
        from_config(tmp_path / "pipe")


def test_what_the_system_refuses_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")

    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RopeError, match="cannot be read: not yours"):
        source.load(path)


@pytest.mark.parametrize("given", [None, 3, [CONFIG], HasToDict])
def test_other_things(given: Any) -> None:
    with pytest.raises(RopeError, match="from_config: source must be a dict, a config object with"):
        from_config(given)


def test_objects_that_hold_something_else() -> None:
    with pytest.raises(RopeError, match=r"HasToDict: a config must be a JSON object, got \[1\]"):
        from_config(HasToDict([1]))
