"""Test `ropewalk bench --decode` with a tiny model: all contenders compute the same, and a wrong one is not timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ropewalk
from ropewalk.tools import bench, cli
from ropewalk.tools.bench import decode
from ropewalk.tools.bench.decode import DecodeSettings, Geometry

TINY = Geometry(hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=48, layers=2, vocabulary=50, context=20)
NAMES = ["ropewalk, KVCache", "transformers, DynamicCache", "transformers, StaticCache"]


def test_all_are_right_and_timed(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "decode.json"
    found = bench.run_decode(DecodeSettings(batches=(1, 3), rounds=3, geometry=TINY), said.append, json_file=file)
    rows = found["rows"]
    assert [row["contender"] for row in rows] == NAMES * 4
    assert {row["state"] for row in rows} == {"timed"}, rows
    assert [(row["dtype"], row["batch"]) for row in rows[::3]] == [
        ("float32", 1),
        ("float32", 3),
        ("bfloat16", 1),
        ("bfloat16", 3),
    ]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["seconds"])
    assert [row["ahead"] for row in rows[::3]] == [1.0] * 4
    assert rows[1]["ahead"] == pytest.approx(rows[1]["seconds"] / rows[0]["seconds"])
    assert json.loads(file.read_text()) == json.loads(json.dumps(found))
    text = "\n".join(said)
    assert "2 layers of hidden 32, 4 query heads, 2 key heads of 16, MLP 48; 20 cached tokens" in text
    assert "bfloat16, 3 rows" in text
    assert text.count("tokens/s") == 12


def test_a_wrong_contender_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step rotates by the previous position, like a cache that counts wrongly."""
    right = decode.build_steps

    def with_a_wrong_one(*arguments: Any) -> dict[str, decode.Step]:
        monkeypatch.setattr(ropewalk.CacheStep, "rotation", shifted)
        return right(*arguments)

    def shifted(self: ropewalk.CacheStep, rope: ropewalk.Rope) -> Any:
        return rope.at(self.positions - 1)

    monkeypatch.setattr(decode, "build_steps", with_a_wrong_one)
    said: list[str] = []
    settings = DecodeSettings(batches=(2,), dtypes=("float32",), rounds=2, geometry=TINY)
    mine, *others = bench.run_decode(settings, said.append)["rows"]
    assert mine["state"] == "wrong"
    assert mine["error"] > mine["allowed"]
    assert [row["state"] for row in others] == ["timed", "timed"]
    assert "wrong: error" in "\n".join(said)


def test_threads_are_as_before() -> None:
    threads = torch.get_num_threads()
    other = 1 if threads > 1 else 2
    settings = DecodeSettings(batches=(1,), dtypes=("float32",), rounds=1, threads=other, geometry=TINY)
    assert bench.run_decode(settings, lambda line: None)["threads"] == other
    assert torch.get_num_threads() == threads


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ropewalk.RopeError, match=r"bench: --decode needs transformers, got no transformers .*"):
        bench.run_decode(DecodeSettings(), print)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(bench, "run_decode", lambda settings, say, json_file: asked.append((settings, json_file)))
    options = ["--decode", "--dtype", "bfloat16", "--rounds", "7", "--threads", "2", "--json", str(tmp_path / "a.json")]
    assert CliRunner().invoke(cli.main, ["bench", *options]).exit_code == 0
    assert asked == [(DecodeSettings(dtypes=("bfloat16",), rounds=7, threads=2), tmp_path / "a.json")]


@pytest.mark.parametrize(
    "option",
    [
        *(["--tokens", "1"], ["--layout", "bhsd"], ["--no-backward"], ["--no-compile"], ["--only", "x"]),
        *(["--seconds", "1"], ["--stream", "0"], ["--quick"], ["--plot", "a.png"], ["--device", "cpu"], ["--rehearse"]),
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
        ours, theirs = decode.build_models(TINY, torch.float32)
        tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
        rope = ropewalk.from_config(theirs.config.to_dict()).rope
        assert rope is not None
        logits = ours(tokens, rope.at(torch.arange(9)[None].expand(2, -1)))
        torch.testing.assert_close(logits, theirs(tokens).logits, rtol=0, atol=2e-6)


def test_the_table_in_the_docs() -> None:
    """docs/speed.md shows the numbers of the file in benchmarks/results."""
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks" / "results" / "decode-2-cores-avx512.json").read_text())["rows"]
    text = (root / "docs" / "speed.md").read_text()
    assert [row["contender"] for row in rows] == NAMES * 4
    for mine, dynamic, static in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        speeds = " | ".join(f"{row['tokens_per_second']:.1f}" for row in (mine, dynamic, static))
        line = f"| {mine['dtype']}, {mine['batch']} | {speeds} | {dynamic['ahead']:.2f} | {static['ahead']:.2f} |"
        assert line in text
