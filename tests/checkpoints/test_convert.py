"""`ropewalk convert`: its files and output, the continuation of a killed run, and the errors that --verify finds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ropewalk
from checkpoint_files import CONFIG, refused, run, weights, write_model
from ropewalk import RopeError, from_config
from ropewalk.tools import convert as checkpoints
from ropewalk.tools.convert import layouts, raw
from ropewalk.tools.convert.files import hold
from ropewalk.tools.convert.verify import verify


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


class TestWhatItWrites:
    def test_a_sharded_model(self, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", shards=3)
        (source / "tokenizer.json").write_text("{}")
        (source / "pytorch_model.bin").write_text("other weights")
        output = run(source, tmp_path / "b", "--to", "interleaved", "--verify")
        assert "pairing: half -> interleaved; rows move in 4 tensors, 17 stay" in output
        assert "omitted, because they are other weights or folders: pytorch_model.bin" in output
        assert "layer 1: scores agree" in output
        names = {path.name for path in source.iterdir()} - {"pytorch_model.bin"}
        assert {path.name for path in (tmp_path / "b").iterdir()} == names
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]
        run(tmp_path / "b", tmp_path / "c", "--to", "half")
        for name in names:
            if name.endswith(".safetensors"):
                assert (tmp_path / "c" / name).read_bytes() == (source / name).read_bytes()
            else:
                assert json.loads((tmp_path / "c" / name).read_text()) == json.loads((source / name).read_text())

    def test_progress_ends_at_100_percent(self, model: Path, tmp_path: Path) -> None:
        lines = [line for line in run(model, tmp_path / "out", "--to", "interleaved").splitlines() if " % of " in line]
        assert [line for line in lines if line.startswith("100 % of ")] == lines[-1:]

    def test_a_note_about_other_programs(self, model: Path, tmp_path: Path) -> None:
        output = run(model, tmp_path / "b", "--to", "interleaved")
        assert (
            "note: Other programs give wrong results with these weights: code for llama (transformers, vLLM" in output
        )
        assert "always rotates with the pairing half" in output
        assert json.loads((tmp_path / "b" / "config.json").read_text())["ropewalk_pairing"] == "interleaved"
        ropes = from_config(tmp_path / "b")
        assert ropes.rope.pairing == "interleaved"
        assert "ropewalk_pairing" in ropes.origins["pairing"]
        assert "Other programs" not in run(tmp_path / "b", tmp_path / "c", "--to", "half")

    def test_dry_run(self, model: Path, tmp_path: Path) -> None:
        output = run(model, tmp_path / "b", "--to", "interleaved", "--dry-run")
        assert "  model.layers.1.self_attn.k_proj.weight [16, 32]  k: 2 x 8 rows\n" in output
        assert "v_proj" not in output
        assert f"nothing was written: without --dry-run, 33,088 bytes go to {tmp_path / 'b'}\n" in output
        assert sorted(os.listdir(tmp_path)) == ["model"]

    def test_tensors_of_every_dtype_that_stay_in_place(self, tmp_path: Path) -> None:
        """Tensors that do not move are copied for every dtype and shape, including empty tensors and scalars."""
        odd = {
            "model__count": torch.tensor(3),
            "model__none": torch.empty(0, 4),
            "model__eight": torch.ones(3, 3).to(torch.float8_e4m3fn),
            "model__mask": torch.tensor([True, False]),
        }
        source = write_model(tmp_path / "a", **odd)
        run(source, tmp_path / "b", "--to", "interleaved", "--verify")
        run(tmp_path / "b", tmp_path / "c", "--to", "half")
        name = "model.safetensors"
        assert (tmp_path / "c" / name).read_bytes() == (source / name).read_bytes()

    def test_a_target_that_is_empty(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        run(model, tmp_path / "b", "--to", "interleaved")
        assert (tmp_path / "b" / "config.json").exists()

    def test_metadata_is_kept(self, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a")
        save_file(weights(), source / "model.safetensors", {"format": "pt", "trained": "yes"})
        run(source, tmp_path / "b", "--to", "interleaved")
        with (tmp_path / "b" / "model.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert header["__metadata__"] == {"format": "pt", "trained": "yes"}

    def test_an_unknown_model_type(self, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", config={**CONFIG, "model_type": "mine"})
        refused("model_type", source, tmp_path / "b", "--to", "half", target=tmp_path / "b")
        run(source, tmp_path / "b", "--to", "interleaved", "--pairing", "half")
        q = "model.layers.0.self_attn.q_proj.weight"
        moved = load_file(tmp_path / "b" / "model.safetensors")[q]
        assert torch.equal(moved[1], weights()[q][4])

    def test_a_model_type_that_no_test_runs(self, model: Path, tmp_path: Path) -> None:
        note = "note: ropewalk's tests run no model of type yuan"
        source = write_model(tmp_path / "a", config={**CONFIG, "model_type": "yuan"})
        assert note in run(source, tmp_path / "b", "--to", "interleaved", "--dry-run", "--ignore", "rope_theta")
        assert "was run by" not in run(model, tmp_path / "b", "--to", "interleaved", "--dry-run")


ESCAPE = "\x1b[31mred\a\u202e"
SHOWN = "\\x1b[31mred\\x07\\u202e"


def test_names_in_files_are_printed_as_escapes(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": f"type{ESCAPE}"}
    source = write_model(tmp_path / f"folder{ESCAPE}", config=config)
    prefixed = {f"{ESCAPE}{name}": tensor for name, tensor in weights().items()}
    file = f"weights{ESCAPE}.safetensors"
    (source / "model.safetensors").unlink()
    save_file(prefixed, source / file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(prefixed, file)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / os.fsdecode(b"other\xff\x1b.bin")).write_text("")
    arguments = (source, tmp_path / f"b{ESCAPE}", "--to", "interleaved", "--pairing", "half")
    output = run(*arguments, "--dry-run") + run(*arguments, "--verify")
    assert all(line.isprintable() for line in output.splitlines())
    for name in (
        f"folder{SHOWN}: type{SHOWN}, 2 layers",
        f"  {SHOWN}model.layers.1.self_attn.k_proj.weight [16, 32]",
        "other weights or folders: other\\udcff\\x1b.bin\n",
        f"no model of type type{SHOWN}.",
        f"bytes go to {tmp_path}/b{SHOWN}\n",
        f" bytes, weights{SHOWN}.safetensors\n",
        f"wrote {tmp_path}/b{SHOWN}\n",
    ):
        assert name in output


class TestVerify:
    @pytest.mark.parametrize("wrong", ["direction", "still"])
    def test_a_wrong_order_is_found(
        self, wrong: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = layouts.channels

        def channels(rotary_dim: int, to: Any) -> Any:
            found = right(rotary_dim, to)
            return np.sort(found) if wrong == "still" else np.argsort(found)

        monkeypatch.setattr(layouts, "channels", channels)
        match = "layer 0 must give the same attention before and after, got scores that differ by"
        output = run(model, tmp_path / "b", "--to", "interleaved", "--verify", status=1)
        assert match in output
        assert "Nothing was written. Run the command again, and if it says the same, report it" in output
        assert "bug in ropewalk" not in output
        assert os.listdir(tmp_path) == ["model"]

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_numbers_that_cannot_be_compared(self, number: float, tmp_path: Path) -> None:
        """The source holds them, so the message blames nobody."""
        name = "model.layers.1.self_attn.q_proj.weight"
        weight = weights()[name]
        weight[3, 5] = number
        source = write_model(tmp_path / "a", **{name.replace(".", "__"): weight})
        output = run(source, tmp_path / "b", "--to", "interleaved", "--verify", status=1)
        assert "the scores of layer 1 in SRC must be finite to be compared, got nan. Nothing was written." in output
        assert os.listdir(tmp_path) == ["a"]
        run(source, tmp_path / "b", "--to", "interleaved")

    def test_bytes_that_change_elsewhere_are_found(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chunks = raw.chunks

        def damaged(tensor: raw.Tensor) -> Any:
            for chunk in chunks(tensor):
                damage = np.zeros_like(chunk)
                damage[-1, -1] = tensor.shape == (48, 32)
                yield chunk ^ damage

        monkeypatch.setattr(raw, "chunks", damaged)
        output = run(model, tmp_path / "b", "--to", "interleaved", "--verify", status=1)
        assert "got other bytes in rows that are not rotated" in output
        assert os.listdir(tmp_path) == ["model"]


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    """Only missing files are written again, and files of another conversion are not used."""
    source = write_model(tmp_path / "a", shards=3)

    class StoppedError(Exception):
        pass

    def stop(file: str, done: int, total: int) -> None:
        if file == "model-00002-of-00003.safetensors":
            raise StoppedError

    plan = checkpoints.plan(checkpoints.read(source), "interleaved")
    with pytest.raises(StoppedError):
        checkpoints.write(plan, tmp_path / "b", stop)
    assert not (tmp_path / "b").exists()
    unfinished = tmp_path / ".b.unfinished"
    first = unfinished / "model-00001-of-00003.safetensors"
    assert first.exists()
    stamp = first.stat().st_mtime_ns
    files = []
    checkpoints.write(plan, tmp_path / "b", lambda file, *_: files.append(file))
    assert (tmp_path / "b" / first.name).stat().st_mtime_ns == stamp
    with pytest.raises(StoppedError):
        checkpoints.write(plan, tmp_path / "c", stop)
    os.utime(source / first.name)  # the source may have changed since the first run
    again = checkpoints.plan(checkpoints.read(source), "interleaved")
    (tmp_path / ".c.unfinished" / first.name).write_bytes(b"of another run")
    checkpoints.write(again, tmp_path / "c", lambda *_: None)
    assert (tmp_path / "c" / first.name).read_bytes() == (tmp_path / "b" / first.name).read_bytes()


def test_the_pairing_in_a_config() -> None:
    ropes = ropewalk.from_config({**CONFIG, "ropewalk_pairing": "interleaved"})
    assert ropes.rope.pairing == "interleaved"
    with pytest.raises(RopeError, match="pairing must be one of 'half', 'interleaved', got 'other'"):
        ropewalk.from_config({**CONFIG, "ropewalk_pairing": "other"})


def test_verify_reads_what_was_written(model: Path, tmp_path: Path) -> None:
    """The files are changed after they were written, so that they differ from the plan."""
    plan = checkpoints.plan(checkpoints.read(model), "interleaved")
    checkpoints.write(plan, tmp_path / "b", lambda *_: None)
    verify(plan, tmp_path / "b", lambda _: None)
    file = tmp_path / "b" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file(tensors | {name: tensors[name].flip(0)}, file)
    with pytest.raises(RopeError, match=r"layer 1 must give the same attention"):
        verify(plan, tmp_path / "b", lambda _: None)


def test_a_full_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        output = run(model, tmp_path / "b", "--to", "interleaved", status=1)
    assert "must be writable, got No space left on device. Free some space" in output
    assert not (tmp_path / "b").exists()
    run(model, tmp_path / "b", "--to", "interleaved")
    assert sorted(os.listdir(tmp_path)) == ["b", "model"]


def test_one_writer_at_a_time(model: Path, tmp_path: Path) -> None:
    with hold(tmp_path / ".b.lock", "it"):
        output = run(model, tmp_path / "b", "--to", "interleaved", status=1)
    assert f"only one process may write {tmp_path / 'b'} at a time" in output
    assert sorted(os.listdir(tmp_path)) == ["model"]
