"""Files that are no plain files, that are larger than such files are, or that state huge numbers: bounded cost."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

import limited
from checkpoint_files import CONFIG, meta_weights, run, weights, write_meta, write_model
from checkpoints.test_adapters import write_adapter

TO = ("--to", "interleaved")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def named_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # the name of a socket may have only about 100 bytes
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    """Write a file that is larger than any such file, and takes no space."""
    with path.open("wb") as file:
        file.truncate(2**30)


def folder(path: Path) -> None:
    path.mkdir()


def write(form: str, tmp_path: Path) -> Path:
    """Write a checkpoint of a format, with all files that such a checkpoint may have."""
    if form == "meta":
        return write_meta(tmp_path / "a", meta_weights())
    source = write_model(tmp_path / ("a" if form == "hf" else "model"), shards=2)
    if form == "adapter":
        source = tmp_path / "a"
        write_adapter(source, base_model_name_or_path=str(tmp_path / "model"))
    return source


KINDS = (pipe, named_socket, endless, large, folder)


@pytest.mark.parametrize(
    ("form", "name", "replace"),
    [
        # Each reader with each kind, and each other file with one kind.
        *(("hf", "config.json", kind) for kind in KINDS),
        *(("hf", "model-00001-of-00002.safetensors", kind) for kind in KINDS),
        *(("meta", "consolidated.00.pth", kind) for kind in KINDS),
        ("hf", "model.safetensors.index.json", pipe),
        ("meta", "params.json", pipe),
        ("adapter", "adapter_config.json", pipe),
        ("adapter", "adapter_model.safetensors", pipe),
    ],
)
def test_files_of_other_kinds(form: str, name: str, replace: Callable[[Path], None], tmp_path: Path) -> None:
    source = write(form, tmp_path)
    (source / name).unlink()
    replace(source / name)
    before = sorted(tmp_path.iterdir())
    mapped = 1024 if name.endswith(".safetensors") else 0  # by the safetensors library
    said, seconds = limited.run("convert", source, tmp_path / "b", *TO, mebibytes=170 + mapped)
    assert said.startswith("Error: "), said
    assert said.count("\n") == 1
    assert name in said
    assert seconds < 6
    assert sorted(tmp_path.iterdir()) == before


def write_header(source: Path, entries: dict[str, Any]) -> None:
    """Add tensors without bytes to the safetensors file of a model."""
    content = save(weights())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    end = len(content) - 8 - size
    header |= {name: {"data_offsets": [end, end], **entry} for name, entry in entries.items()}
    head = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + content[8 + size :])


@pytest.mark.parametrize("rows", [2**40, 2**62])
@pytest.mark.parametrize("name", ["model.extra", "model.layers.0.mlp.extra"])
def test_empty_tensors_with_many_rows_are_copied(rows: int, name: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "a")
    write_header(source, {name: {"dtype": "F32", "shape": [rows, 0]}})
    said, seconds = limited.run("convert", source, tmp_path / "b", *TO, mebibytes=400)
    assert said.endswith(f"wrote {tmp_path / 'b'}\n"), said
    assert seconds < 6
    assert f'"shape":[{rows},0]'.encode() in (tmp_path / "b" / "model.safetensors").read_bytes()
    run(tmp_path / "b", tmp_path / "c", "--to", "half", "--verify")


HEADERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a layer of 5,000 digits": (
        {},
        {f"model.layers.{'1' * 5000}.mlp.extra": {"dtype": "F32", "shape": [0]}},
        "the name of a tensor must have at most 1000 characters, got",
    ),
    "a long name of many layers": (
        {},
        {f"{'h.1.' * 100_000}\n": {"dtype": "F32", "shape": [0]}},
        "the name of a tensor must have at most 1000 characters, got",
    ),
    "many tensors": (
        {},
        {f"model.layers.0.mlp.extra.{i}": {"dtype": "F32", "shape": [0]} for i in range(250_000)},
        "bytes, which is more than 16,777,216",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_refused_at_bounded_cost(name: str, tmp_path: Path) -> None:
    changes, entries, match = HEADERS[name]
    source = write_model(tmp_path / "a", config=CONFIG | changes)
    write_header(source, entries)
    said, seconds = limited.run("convert", source, tmp_path / "b", *TO)
    assert said.startswith("Error: convert: "), said
    assert match in said
    assert len(said) < 3000
    assert seconds < 6
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_matrix_of_no_rank(tmp_path: Path) -> None:
    """Its 2**43 rows, of 2**40 heads, take no space."""
    config = CONFIG | {"num_attention_heads": 2**40, "num_key_value_heads": 2**40}
    write_adapter(tmp_path / "a", base_model_name_or_path=str(write_model(tmp_path / "model", config=config)))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    head = json.dumps({name: {"dtype": "F32", "shape": [2**43, 0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    said, seconds = limited.run("convert", tmp_path / "a", tmp_path / "b", *TO)
    assert "must have 8796093022208 rows by its config, got the shape (8796093022208, 0)" in said
    assert seconds < 6


def test_a_text_that_utf_8_cannot_express(tmp_path: Path) -> None:
    """JSON may contain half of a surrogate pair as an escape."""
    source = write_model(tmp_path / "a")
    text = json.dumps(CONFIG | {"_name_or_path": "\ud800", "author": "Zoë"}, ensure_ascii=False)
    (source / "config.json").write_text(text, encoding="utf-8", errors="backslashreplace")
    run(source, tmp_path / "b", *TO)
    written = (tmp_path / "b" / "config.json").read_text(encoding="utf-8")
    assert json.loads(written)["_name_or_path"] == "\ud800"
    assert "Zoë" in written
