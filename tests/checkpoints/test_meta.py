"""Meta's format: what it does not say, files that are not in this format, and pieces that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_files import meta_weights, refused, run, weights, write_meta
from ropewalk import from_config


class TestMeta:
    def test_converting_only_the_format_moves_no_row(self, tmp_path: Path) -> None:
        source = write_meta(tmp_path / "a", meta_weights())
        output = run(source, tmp_path / "b", "--to", "interleaved", "--max-positions", 64, "--verify")
        assert "format: Meta -> Hugging Face\npairing: interleaved, unchanged; no rows move" in output
        assert from_config(tmp_path / "b").rope.pairing == "interleaved"
        moved = load_file(tmp_path / "b" / "model.safetensors")
        assert all(torch.equal(moved[name], tensor) for name, tensor in weights().items())

    def test_the_length_is_required(self, tmp_path: Path) -> None:
        source = write_meta(tmp_path / "a", meta_weights())
        refused("max_positions must be passed", source, tmp_path / "b", "--to", "half", target=source)
        output = run(source, tmp_path / "b", "--to", "half", "--max-positions", 64)
        assert "note: The tokenizer is not converted" in output

    def test_the_last_lines_say_what_is_missing(self, tmp_path: Path) -> None:
        """With and without tied weights, and in a dry run."""
        whole = write_meta(tmp_path / "whole", meta_weights())
        older = write_meta(tmp_path / "older", {n: t for n, t in meta_weights().items() if n != "output.weight"})
        for source in (whole, older):
            (source / "tokenizer.model").write_text("{}")
            (source / "original").mkdir()
        folders = "omitted, because they are other weights or folders: original/"
        files = "omitted, because they belong to the other format: tokenizer.model"
        ours = "note: The tokenizer is not converted, and there is no generation_config.json. Add them, and the ids of "
        ours += "the special tokens to config.json."
        untied = "note: lm_head.weight is written beside the embedding, and config.json states tie_word_embeddings: "
        untied += "false, also if the two are equal, because Meta's format does not say whether they are tied."
        for source, lines in ((whole, [folders, files, ours, untied]), (older, [folders, files, ours])):
            target = tmp_path / f"from {source.name}"
            for extra in ("--dry-run", "--verify"):
                *said, last = run(source, target, "--to", "half", "--max-positions", 64, extra).splitlines()
                assert said[-len(lines) :] == lines
                assert not [line for line in said[: -len(lines)] if line.startswith(("note", "omitted"))]
                assert last.startswith("nothing was written" if extra == "--dry-run" else f"wrote {target}")

    def test_a_pickle_that_runs_code(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (tmp_path / "owned",)

        source = write_meta(tmp_path / "a", {"tok_embeddings.weight": Evil()})
        match = "tok_embeddings.weight of consolidated.00.pth must be a contiguous vector or matrix"
        refused(match, source, tmp_path / "b", "--to", "half", "--max-positions", 64, target=source)
        assert not (tmp_path / "owned").exists()

    @pytest.mark.parametrize("left", [10, 5000, -1])
    def test_a_file_that_is_cut_off(self, left: int, tmp_path: Path) -> None:
        source = write_meta(tmp_path / "a", meta_weights())
        file = source / "consolidated.00.pth"
        file.write_bytes(file.read_bytes()[:left])
        match = "got one that cannot be read"
        refused(match, source, tmp_path / "b", "--to", "half", "--max-positions", 64, target=source)

    def test_tensors_that_are_not_metas(self, tmp_path: Path) -> None:
        tensors = meta_weights()
        for i, (name, tensor, match) in enumerate(
            (
                ("layers.0.extra.weight", torch.ones(3), "must belong to Meta's Llama, got layers.0.extra.weight"),
                ("norm.weight", torch.ones(32, dtype=torch.int32), "norm.weight of consolidated.00.pth must be"),
                ("layers.0.attention.wo.weight", torch.ones(32, 32).t(), "must be a contiguous vector"),
                ("tok_embeddings.weight", torch.ones(16), "must hold tok_embeddings.weight, got none"),
                ("layers.1.attention.wq.weight", torch.ones(16, 32), "must have 32 rows by its config"),
            )
        ):
            if name == "layers.0.attention.wo.weight":
                tensor = torch.randn(32, 48)[:, :32]
            source = write_meta(tmp_path / f"a{i}", tensors | {name: tensor})
            refused(match, source, tmp_path / "b", "--to", "half", "--max-positions", 64, target=source)

    def test_pieces(self, tmp_path: Path) -> None:
        source = write_meta(tmp_path / "a", meta_weights())
        target = tmp_path / "b"
        about = (source, target, "--to", "half", "--max-positions", 64)
        (source / "consolidated.00.pth").rename(source / "consolidated.01.pth")
        refused("without a gap, got consolidated.01.pth", *about, target=source)
        piece = torch.load(source / "consolidated.01.pth", weights_only=True)
        del piece["norm.weight"]
        torch.save(piece, source / "consolidated.00.pth")
        refused("must hold pieces of the same tensors, got norm.weight in only some of them", *about, target=source)
        piece["norm.weight"] = torch.ones(16, dtype=torch.bfloat16)
        torch.save(piece, source / "consolidated.00.pth")
        refused("the pieces of norm.weight must have one shape and dtype", *about, target=source)
