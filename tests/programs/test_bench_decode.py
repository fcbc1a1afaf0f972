"""Test `ropewalk bench --decode` with a tiny model: all contenders compute the same, and a wrong one is not timed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ropewalk
from ropewalk.cache import step
from ropewalk.tools import bench, cli
from ropewalk.tools.bench import decode_model, machine
from ropewalk.tools.bench.decode import DecodeSettings
from ropewalk.tools.bench.decode_caches import Fill, Geometry

TINY = Geometry(32, heads=4, kv_heads=2, head_dim=16, mlp=48, layers=2, vocabulary=50, row=28, latent=20)
OURS = ["ropewalk, KVCache", "ropewalk, int8", "ropewalk, fp8"]
LATENT = "ropewalk, latent rows"
NAMES = [*OURS, "transformers, DynamicCache", "transformers, StaticCache"]


def run(
    say: Callable[[str], Any] = lambda line: None, json_file: Path | None = None, **settings: Any
) -> dict[str, Any]:
    small = {"rows": (2,), "held": (20,), "dtypes": ("float32",), "rounds": 2, "geometry": TINY}
    return bench.run_decode(DecodeSettings(**(small | settings)), say, json_file=json_file)


def test_all_are_right_and_timed(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "decode.json"
    dtypes = ("float32", "bfloat16")
    found = run(said.append, file, rows=(1, 3), held=(20, 33), dtypes=dtypes, rounds=3)
    cells = [(dtype, batch, held) for dtype in dtypes for held in (20, 33) for batch in (1, 3)]
    with_rows = ["read keys and values", *OURS, LATENT, *NAMES[3:]]
    for part, names in (("attention", with_rows), ("model", NAMES)):
        keys = [(row["dtype"], row["batch"], row["held"], row["contender"]) for row in found[part]]
        assert keys == [(*cell, name) for cell in cells for name in names]
        for row in found[part]:
            assert (row["state"], row["rounds"]) == ("timed", 3), row
            assert 0 < row["p10"] <= row["median"] <= row["p90"]
    for read, *others in zip(*(found["attention"][i::7] for i in range(7)), strict=True):
        tokens = read["batch"] * read["held"]
        for row in (read, *others):
            assert row["times_read"] == row["median"] / read["median"]
            assert row["per_token"] == pytest.approx(row["median"] / tokens)
        assert [row["planning"] is None for row in (read, *others)] == [True, *[False] * 4, True, True]
    for kv, *others in zip(*(found["model"][i::5] for i in range(5)), strict=True):
        for row in (kv, *others):
            assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["median"])
            assert row["ahead"] == row["median"] / kv["median"]
    assert json.loads(file.read_text()) == json.loads(json.dumps(found))
    text = "\n".join(said)
    assert "4 query heads, 2 key heads of 16; the model has 2 layers of hidden 32, MLP 48; latent rows have" in text
    assert "attention of one layer, 3 rows x 33 held tokens, bfloat16: 0.0 MB of keys and values" in text
    assert "model of 2 layers, 1 row x 20 held tokens, float32: 0.0 MB of keys and values" in text


@pytest.mark.parametrize("part", ["attention", "model"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_contender_is_not_timed(part: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step rotates by an earlier position, like a cache that counts wrongly."""
    at = ropewalk.Rope.at
    monkeypatch.setattr(step.CacheStep, "rotation", lambda self, rope: rope.at(self.positions - 1))
    monkeypatch.setattr(ropewalk.Rope, "at", lambda self, positions, **options: at(self, positions - 1, **options))
    said: list[str] = []
    *rows, dynamic, static = run(said.append, dtypes=(dtype,))[part]
    assert [row["state"] for row in (dynamic, static)] == ["timed", "timed"]
    ours = rows[1:] if part == "attention" else rows
    assert [row["contender"] for row in ours] == [*OURS, *([LATENT] if part == "attention" else [])]
    for row in ours:
        assert row["state"] == "wrong"
        assert row["error"] > row["allowed"]
    assert "wrong: error" in "\n".join(said)


def test_only_the_named_caches_are_timed() -> None:
    found = run(only=["Static"])
    assert [row["contender"] for row in found["attention"]] == ["read keys and values", "transformers, StaticCache"]
    assert [(row["contender"], row["ahead"]) for row in found["model"]] == [("transformers, StaticCache", None)]
    found = run(only=["latent"])
    assert [row["contender"] for row in found["attention"]] == ["read keys and values", LATENT]
    assert found["model"] == []  # the model has no latent rows
    with pytest.raises(ropewalk.RopeError, match=r"bench: only must name a cache, got 'nobody'\. The cont"):
        run(only=["nobody"])


def test_caches_that_do_not_fit_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cache keeps 2 layers of keys and values of 2 heads of 16 channels in float32, for at most 148 tokens."""
    needed = 2 * 2 * 2 * 2 * 2 * 16 * 4 * (20 + 128)
    said: list[str] = []
    only = ["ropewalk, KVCache", "StaticCache"]
    for free, state in ((int(needed / 0.89), "timed"), (int(needed / 0.91), "too large")):
        monkeypatch.setattr(machine, "free_memory", lambda free=free: free)
        found = run(said.append, only=only)
        assert {row["state"] for row in found["attention"]} == {"timed"}  # one layer
        assert [row["state"] for row in found["model"]] == [state] * 2
    assert found["model"][0]["needed"] == needed
    # With int8, 16 channels and a scale take 20 bytes, and attention makes a float32 copy of one layer.
    fill = Fill(TINY, batch=2, held=20, room=128, dtype=torch.float32)
    assert fill.needed_bytes(["ropewalk, int8"]) == (2 * 20 + 16 * 4) * 2 * 2 * 2 * (20 + 128)
    assert fill.needed_bytes([LATENT]) == 2 * 2 * 28 * 4 * (20 + 128)
    assert "not timed: the caches need 1 GiB, 0 GiB are free. Name fewer caches with --only." in "\n".join(said)


def test_threads_are_as_before() -> None:
    threads = torch.get_num_threads()
    other = 1 if threads > 1 else 2
    assert run(rounds=1, threads=other)["threads"] == other
    assert torch.get_num_threads() == threads


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ropewalk.RopeError, match=r"bench: --decode needs transformers, got no transformers .*"):
        bench.run_decode(DecodeSettings(), print)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(bench, "run_decode", lambda settings, say, json_file: asked.append((settings, json_file)))
    options = ["--decode", "--dtype", "bfloat16", "--rounds", "7", "--seconds", "9", "--threads", "2", "--only", "KV"]
    options += ["--rows", "8", "--rows", "64", "--held", "8k", "--json", str(tmp_path / "a.json")]
    assert CliRunner().invoke(cli.main, ["bench", *options]).exit_code == 0
    limits = {"rounds": 7, "seconds": 9.0, "threads": 2}
    asked_for = DecodeSettings(rows=(8, 64), held=(8192,), dtypes=("bfloat16",), only=("KV",), **limits)
    assert asked == [(asked_for, tmp_path / "a.json")]


@pytest.mark.parametrize(
    "option",
    [
        *(["--tokens", "1"], ["--no-backward"], ["--no-compile"]),
        *(["--sweep"], ["--quick"], ["--plot", "a.png"], ["--device", "cpu"], ["--rehearse"]),
    ],
    ids=lambda option: option[0],
)
def test_options_without_effect_are_refused(option: list[str]) -> None:
    ran = CliRunner().invoke(cli.main, ["bench", "--decode", *option])
    assert ran.exit_code == 1
    first = {"--no-backward": "--backward", "--no-compile": "--compile"}.get(option[0], option[0])
    assert f"bench: {first} must be omitted with --decode, got {first}. It has no effect" in ran.output


def test_our_model_equals_that_of_transformers() -> None:
    """A whole prompt without a cache gives the logits of transformers."""
    with torch.no_grad():
        ours, theirs = decode_model.build_models(TINY, torch.float32)
        tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
        rope = ropewalk.from_config(theirs.config.to_dict()).rope
        assert rope is not None
        logits = ours(tokens, rope.at(torch.arange(9)[None].expand(2, -1)))
        torch.testing.assert_close(logits, theirs(tokens).logits, rtol=0, atol=2e-6)
