"""Run each script in benchmarks/ that needs no other engine with small cases: what it times is right."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ropewalk
import tiny_models
from each import each
from ropewalk.cache import step

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("harness", "peers", "gpu", "sweep", "decode", "fused_step", "real_models")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    before = {name: sys.modules.pop(name, None) for name in NAMES}
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def run(script: Any, file: Path, *options: str, **more: Any) -> dict[str, Any]:
    """Run a script with two rounds. Its result is what it writes."""
    found = script.main(["--rounds", "2", "--json", str(file), *options], **more)
    assert json.loads(file.read_text()) == json.loads(json.dumps(found))
    return found


def test_rotation(scripts: dict[str, Any], tmp_path: Path) -> None:
    for name, options in (("peers", ["--tokens", "5"]), ("gpu", ["--rehearse"])):
        found = run(scripts[name], tmp_path / "a.json", "--no-compile", *options)
        usual = ("copy_", "clone", "mul_", "ropewalk", "Hugging Face", "Meta")
        states = {row["contender"]: row["state"] for row in found["rows"] if row["contender"].startswith(usual)}
        assert set(states.values()) == {"timed"}, states
        assert {row["backward"] for row in found["rows"]} == {False, True}
    far = [row for row in found["rows"] if row["far"]]
    assert [row["contender"] for row in far] == ["ropewalk, table", "Hugging Face, table"]


def test_sweep_and_fused_step(scripts: dict[str, Any], tmp_path: Path) -> None:
    found = run(scripts["sweep"], tmp_path / "a.json", "--tokens", "5", "--dtypes", "float32")
    assert len(found["rows"]) == 2 * len(scripts["sweep"].FORMS)
    assert {row["state"] for row in found["rows"]} == {"timed"}
    found = run(scripts["fused_step"], tmp_path / "b.json", "--rows", "2")
    assert [row["state"] for row in found["rows"]] == ["timed"] * 8


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotate a decode step by an earlier position, like a cache that counts wrongly."""
    at = ropewalk.Rope.at
    monkeypatch.setattr(step.CacheStep, "rotation", lambda self, rope: rope.at(self.positions - 1))
    monkeypatch.setattr(ropewalk.Rope, "at", lambda self, positions, **options: at(self, positions - 1, **options))


def test_decode(scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = scripts["decode"]
    tiny = decode.Geometry(32, heads=4, kv_heads=2, head_dim=16, mlp=48, layers=2, vocabulary=50, row=28, latent=20)
    options = ("--rows", "2", "--held", "20")
    monkeypatch.setattr(decode, "READERS", (lambda x: time.sleep(0.05), *decode.READERS))
    found = run(decode, tmp_path / "a.json", *options, size=tiny)
    assert all(row["median"] < 0.05 for row in found["attention"] if row["contender"] == decode.READ)
    assert [row["contender"] for row in found["attention"]] == [decode.READ, *decode.CACHES] * 2
    assert [row["contender"] for row in found["model"]] == [one for one in decode.CACHES if one != decode.LATENT] * 2
    assert {row["state"] for part in ("attention", "model") for row in found[part]} == {"timed"}
    late(monkeypatch)
    found = run(decode, tmp_path / "a.json", *options, "--dtypes", "float32", size=tiny)
    for part in ("attention", "model"):
        wrong = {row["contender"] for row in found[part] if row["state"] == "wrong"}
        assert wrong == {row["contender"] for row in found[part] if row["contender"].startswith("ropewalk")}


def test_a_wrong_contender_is_not_timed(scripts: dict[str, Any]) -> None:
    harness = scripts["harness"]
    options = harness.parser("").parse_args(["--rounds", "1"])

    def ours(case: Any, pairing: Any = "half") -> Callable[..., Any]:
        rotation = ropewalk.Rope(128, 5e5, pairing).at(case.positions)
        return lambda q, k: rotation(q, k, layout="bshd")

    makes: dict[str, Callable[[Any], Any]] = {
        "other pairing": lambda case: ours(case, "interleaved"),
        "only q": lambda case: lambda q, k: (ours(case)(q, k)[0], k * 1),
        "no way back": lambda case: (
            lambda q, k: [x + (y - x).detach() for x, y in zip((q, k), ours(case)(q, k), strict=True)]
        ),
    }
    cases = {
        "forward": harness.Case(5, torch.float32, batch=2),
        "backward": harness.Case(5, torch.float32, batch=2, passes="backward"),
        "forward + backward": harness.Case(5, torch.float32, passes="forward + backward"),
        "decode": harness.Case(1, torch.float32, batch=3, decode=True),
    }

    def check(row: tuple[str, str]) -> None:
        case, wrong = row
        right = harness.Contender("ours", "half", harness.eager(ours))
        bad = harness.Contender(wrong, "half", harness.eager(makes[wrong]))
        rows = harness.measure(cases[case], [bad, right], scripts["gpu"].bench.OnCpu(), options)
        expected = "timed" if wrong == "no way back" and "backward" not in case else "wrong"
        assert [row["state"] for row in rows] == [expected, "timed"]

    each(((f"{case}, {wrong}", (case, wrong)) for case in cases for wrong in makes), check)


def test_memory(scripts: dict[str, Any]) -> None:
    """1,024 tokens are 16 MiB of q in float32: they are measured in new memory as well, but not in place."""
    if scripts["harness"].memories() == ("unknown",):
        pytest.skip("only glibc can be told")
    found = scripts["peers"].main(
        [
            "--rounds",
            "1",
            "--tokens",
            "8",
            "1024",
            "--dtypes",
            "float32",
            "--no-backward",
            "--only",
            "clone",
            "--only",
            "mul_",
        ]
    )
    assert [(row["memory"], row["tokens"], row["contender"]) for row in found["rows"]] == [
        *(("new", 1024, name) for name in ("copy_", "clone")),
        *(("kept", n, name) for n in (8, 1024) for name in ("copy_", "clone", "mul_")),
    ]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text"])
def test_real_models_on_small_ones(scripts: dict[str, Any], tmp_path: Path, name: str) -> None:
    script, tokens = scripts["real_models"], torch.arange(1, 400).remainder(119).add(1).tolist()
    model = tiny_models.build(name, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "a")
    lines = [
        *script.convert(tmp_path / "a"),
        *script.accelerated(model, tokens, 8, compiled=False),
        *script.caches(model, tokens, 300, 20),
    ]
    assert [passed for _, passed, _ in lines] == [True] * 7, lines
    assert lines[0][2]["changed_there"] > 0


def test_real_models_find_a_wrong_rotation(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotate single tokens one position too early."""
    rotation = step.CacheStep.rotation

    def late(self: Any, rope: Any) -> Any:
        return rope.at(self.positions - 1) if self.order.shape[1] == 1 else rotation(self, rope)

    monkeypatch.setattr(step.CacheStep, "rotation", late)
    tokens = torch.randint(3, 128, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    name, passed, _ = next(scripts["real_models"].caches(tiny_models.build("llama"), tokens, 120, 20))
    assert (name, passed) == ("KVCache, plain", False)
