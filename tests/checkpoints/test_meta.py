"""Meta's format: models that it cannot express, files that are not in this format, and pieces that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_files import CONFIG, meta_weights, refused, run, write_meta, write_model
from ropewalk import from_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


class TestMeta:
    def test_within_the_format(self, model: Path, tmp_path: Path) -> None:
        match = "Meta's format must be interleaved, got --to half"
        refused(match, model, tmp_path / "b", "--to", "half", "--format", "meta", target=model)

    def test_marked_in_hugging_faces_format(self, model: Path, tmp_path: Path) -> None:
        """Converting only the format moves no row."""
        run(model, tmp_path / "b", "--to", "interleaved")
        output = run(tmp_path / "b", tmp_path / "c", "--to", "interleaved", "--format", "meta", "--verify")
        assert "pairing: interleaved, unchanged; no rows move" in output
        run(model, tmp_path / "d", "--to", "interleaved", "--format", "meta")
        file = "consolidated.00.pth"
        assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "d" / file).read_bytes()
        run(tmp_path / "d", tmp_path / "e", "--to", "interleaved", "--max-positions", 64)
        assert from_config(tmp_path / "e").rope.pairing == "interleaved"
        moved, expected = (load_file(tmp_path / name / "model.safetensors") for name in "eb")
        assert all(torch.equal(moved[name], tensor) for name, tensor in expected.items())

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"model_type": "mistral"}, "the model must be a Llama for Meta's format, got 'mistral'"),
            ({"attention_bias": True}, "attention_bias must be False, got True"),
            (
                {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
                "the scaling must be Llama 3.1's for Meta's format",
            ),
        ],
    )
    def test_models_that_meta_does_not_support(self, changes: dict[str, Any], match: str, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", config=CONFIG | changes)
        refused(match, source, tmp_path / "b", "--to", "interleaved", "--format", "meta", target=source)

    def test_the_length_is_required(self, tmp_path: Path) -> None:
        source = write_meta(tmp_path / "a", meta_weights())
        refused("max_positions must be passed", source, tmp_path / "b", "--to", "half", target=source)
        output = run(source, tmp_path / "b", "--to", "half", "--max-positions", 64)
        assert "note: The tokenizer is not converted" in output

    def test_the_last_lines_say_what_is_missing_and_what_is_written_twice(self, tmp_path: Path) -> None:
        """In both directions, with and without tied weights, and in a dry run."""
        tied = write_model(tmp_path / "tied", config=CONFIG | {"tie_word_embeddings": True}, lm_head__weight=None)
        apart = write_model(tmp_path / "apart")
        for source in (tied, apart):
            for name in ("tokenizer.json", "generation_config.json"):
                (source / name).write_text("{}")
            (source / "original").mkdir()
        of_meta = write_meta(tmp_path / "meta", meta_weights())
        older = {name: tensor for name, tensor in meta_weights().items() if name != "output.weight"}
        to_meta = ("--to", "interleaved", "--format", "meta")
        back = ("--to", "half", "--max-positions", 64)
        folders = "omitted, because they are other weights or folders: original/"
        files = "omitted, because they belong to the other format: generation_config.json, tokenizer.json"
        theirs = "note: The tokenizer is not converted. Meta's code needs Meta's tokenizer.model."
        twice = "note: The embedding is written twice, as tok_embeddings.weight and output.weight, because Meta's code "
        twice += "does not tie the two."
        ours = "note: The tokenizer is not converted, and there is no generation_config.json. Add them, and the ids of "
        ours += "the special tokens to config.json."
        untied = "note: lm_head.weight is written beside the embedding, and config.json states tie_word_embeddings: "
        untied += "false, also if the two are equal, because Meta's format does not say whether they are tied."
        for number, (source, options, lines) in enumerate(
            [
                (tied, to_meta, [folders, files, theirs, twice]),
                (apart, to_meta, [folders, files, theirs]),
                (of_meta, back, [ours, untied]),
                (write_meta(tmp_path / "older", older), back, [ours]),
            ]
        ):
            target = tmp_path / str(number)
            for extra in ("--dry-run", "--verify"):
                *said, last = run(source, target, *options, extra).splitlines()
                assert said[-len(lines) :] == lines
                assert not [line for line in said[: -len(lines)] if line.startswith(("note", "omitted"))]
                assert last.startswith("nothing was written" if extra == "--dry-run" else f"wrote {target}")
        written, stored = (torch.load(tmp_path / n / "consolidated.00.pth", weights_only=True) for n in "01")
        assert sum(t.nbytes for t in written.values()) == sum(t.nbytes for t in stored.values())
        assert torch.equal(written["output.weight"], written["tok_embeddings.weight"])

    def test_without_an_embedding(self, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", model__embed_tokens__weight=None)
        match = "the checkpoint must hold model.embed_tokens.weight, got none. Pass a complete Llama."
        refused(match, source, tmp_path / "b", "--to", "interleaved", "--format", "meta", target=source)

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
