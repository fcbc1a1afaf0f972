"""Errors of `ropewalk convert` that are raised before anything is written."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import CONFIG, refused, run, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def damage(file: Path, change: Callable[[dict[str, Any]], None], *, cut: int = 0) -> None:
    """Change the header of a safetensors file, and remove `cut` bytes at its end."""
    raw_bytes = file.read_bytes()
    size = int.from_bytes(raw_bytes[:8], "little")
    header = json.loads(raw_bytes[8 : 8 + size])
    change(header)
    head = json.dumps(header).encode()
    content = struct.pack("<Q", len(head)) + head + raw_bytes[8 + size :]
    file.write_bytes(content[: len(content) - cut])


class TestRefusals:
    def test_twice(self, model: Path, tmp_path: Path) -> None:
        target = tmp_path / "b"
        refused("must have another pairing than 'half', got 'half'", model, target, "--to", "half", target=target)
        run(model, target, "--to", "interleaved")
        again = tmp_path / "c"
        refused("than 'interleaved', got 'interleaved'", target, again, "--to", "interleaved", target=again)

    @pytest.mark.parametrize("place", [".", "inside", "../model"])
    def test_a_target_inside_the_source(self, place: str, model: Path) -> None:
        refused("DST must be a folder outside of SRC", model, model / place, "--to", "interleaved", target=model)

    def test_a_folder_around_the_source(self, model: Path, tmp_path: Path) -> None:
        refused("DST must be a folder outside of SRC", model, tmp_path, "--to", "interleaved", target=model)

    def test_a_target_that_exists(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "b").write_text("")
        refused("must not exist yet", model, tmp_path / "b", "--to", "interleaved", target=model)

    @pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", 3, "x.bin"])
    def test_an_index_that_points_outside(self, file: object, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", shards=2)
        index = json.loads((source / "model.safetensors.index.json").read_text())
        index["weight_map"]["lm_head.weight"] = file
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(source / "model-00001-of-00002.safetensors", tmp_path / "outside.safetensors")
        match = "must name safetensors files of its own folder"
        refused(match, source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    @pytest.mark.parametrize("text", ["[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
    def test_an_invalid_index(self, text: str, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", shards=2)
        (source / "model.safetensors.index.json").write_text(text)
        match = "must have a weight_map with entries" if text[-1] in "}]" else "must contain JSON in UTF-8"
        refused(match, source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    def test_an_index_that_is_of_other_files(self, tmp_path: Path) -> None:
        source, target = write_model(tmp_path / "a", shards=2), tmp_path / "b"
        index = json.loads((source / "model.safetensors.index.json").read_text())
        name = "model.norm.weight"
        other = {1: 2, 2: 1}[int(index["weight_map"][name][10])]
        index["weight_map"][name] = f"model-0000{other}-of-00002.safetensors"
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        refused("model.norm.weight", source, target, "--to", "interleaved", target=target)
        part = write_model(tmp_path / "c", shards=2)
        (part / "model-00002-of-00002.safetensors").unlink()
        refused("must be a file, got none", part, target, "--to", "interleaved", target=target)

    def test_a_shard_that_is_cut_off(self, model: Path, tmp_path: Path) -> None:
        file = model / "model.safetensors"
        for cut in (1, 20_000, file.stat().st_size - 9, file.stat().st_size - 3):
            write_model(tmp_path / f"cut-{cut}")
            source = tmp_path / f"cut-{cut}"
            damage(source / "model.safetensors", lambda header: None, cut=cut)
            match = "must be a complete safetensors file, got a truncated or damaged one"
            refused(match, source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    def test_an_unknown_dtype(self, model: Path, tmp_path: Path) -> None:
        def change(header: dict[str, Any]) -> None:
            header["lm_head.weight"]["dtype"] = "F13"

        damage(model / "model.safetensors", change)
        refused("F13", model, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    @pytest.mark.parametrize(
        ("name", "shape", "match"),
        [
            ("q_proj", (24, 32), "q_proj.weight must have 32 rows by its config, got the shape (24, 32)"),
            ("k_proj", (32, 32), "k_proj.weight must have 16 rows by its config, got the shape (32, 32)"),
            ("k_proj", (16, 31), "k_proj.weight must have 32 columns by its config, got the shape (16, 31)"),
            ("q_proj", (32,), "q_proj.weight must have 32 rows by its config, got the shape (32,)"),
        ],
    )
    def test_a_shape_that_does_not_fit(self, name: str, shape: tuple[int, ...], match: str, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", **{f"model__layers__1__self_attn__{name}__weight": torch.ones(shape)})
        refused(match, source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize(
        ("heads", "keys", "match"),
        [
            (4, 0, "the config must state sizes of at least 1"),
            (4, -2, "the config must state sizes of at least 1"),
            (4, 3, "the number of heads of q must be a multiple of that of k"),
            (10**12, 2, "rows by its config, got the shape"),  # must not allocate a list of the heads
            (4, 4, "rows by its config, got the shape"),
        ],
    )
    def test_numbers_of_heads(self, heads: int, keys: int, match: str, fused: bool, tmp_path: Path) -> None:
        changes = {"num_attention_heads": heads, "num_key_value_heads": keys}
        tensors: dict[str, torch.Tensor | None] = {}
        if fused:
            changes |= {"model_type": "phi3", "rope_scaling": None}
            for layer in range(2):
                attention = f"model__layers__{layer}__self_attn"
                tensors |= {f"{attention}__{name}_proj__weight": None for name in "qkv"}
                tensors[f"{attention}__qkv_proj__weight"] = torch.ones(64, 32)
        source = write_model(tmp_path / "a", config=CONFIG | changes, **tensors)
        refused(match, source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    @pytest.mark.parametrize("missing", ["model__layers__1__self_attn__k_proj__weight", "all"])
    def test_missing_layers(self, missing: str, tmp_path: Path) -> None:
        if missing == "all":
            source = write_model(tmp_path / "a", config={**CONFIG, "num_hidden_layers": 3})
        else:
            source = write_model(tmp_path / "a", **{missing: None})
        match = "must hold the weights of all"
        refused(match, source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    def test_more_layers_than_in_the_config(self, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", config={**CONFIG, "num_hidden_layers": 1})
        match = "the weights must have as many layers as the config, 1"
        refused(match, source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    def test_layers_that_predict_further_tokens(self, tmp_path: Path) -> None:
        """DeepSeek-V3 and GLM have such layers after the last one, with the rope of the last one."""
        source = write_model(tmp_path / "a", config={**CONFIG, "num_hidden_layers": 1, "num_nextn_predict_layers": 1})
        output = run(source, tmp_path / "b", "--to", "interleaved", "--verify")
        assert "rows move in 4 tensors" in output

    def test_an_unknown_tensor(self, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", model__layers__0__self_attn__q_extra__weight=torch.ones(32, 32))
        match = "must be known, got model.layers.0.self_attn.q_extra.weight"
        refused(match, source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    def test_two_stacks(self, tmp_path: Path) -> None:
        """The tensors of a vision tower have the same names as those of the text model."""
        rows = {"q": 32, "k": 16}
        tower = {f"vision__layers__0__self_attn__{name}_proj__weight": torch.ones(rows[name], 32) for name in rows}
        source = write_model(tmp_path / "a", **tower)
        refused("must hold one text model", source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    def test_no_safetensors(self, model: Path, tmp_path: Path) -> None:
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
        refused("got pytorch_model.bin", model, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        refused(
            "must be a folder, got a path that does not exist",
            tmp_path / "a",
            tmp_path / "b",
            "--to",
            "half",
            target=tmp_path / "b",
        )
        (tmp_path / "a").mkdir()
        refused("got none of these", tmp_path / "a", tmp_path / "b", "--to", "half", target=tmp_path / "b")

    def test_gguf(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "llama.gguf").write_bytes(b"GGUF")
        match = "GGUF files cannot be converted. Pass the folder of the model that the file was made from."
        refused(match, tmp_path / "a", tmp_path / "b", "--to", "half", target=tmp_path / "b")
        file = tmp_path / "a" / "llama.gguf"
        refused(match, file, tmp_path / "b", "--to", "half", target=tmp_path / "b")

    @pytest.mark.parametrize("option", ["--factor=8", "--max-positions=8", "--base-config=x"])
    def test_options_for_other_kinds(self, option: str, model: Path, tmp_path: Path) -> None:
        refused("only, got", model, tmp_path / "b", "--to", "interleaved", option, target=tmp_path / "b")

    def test_too_little_space(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        refused(
            "must have 33,088 bytes of free space, got 1,000",
            model,
            tmp_path / "b",
            "--to",
            "interleaved",
            target=model,
        )

    def test_a_model_without_rope(self, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", config={**CONFIG, "model_type": "gpt2", "n_layer": 2})
        refused("gpt2 has no rotary positions", source, tmp_path / "b", "--to", "half", target=tmp_path / "b")
