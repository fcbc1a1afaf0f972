"""Test text generation: it equals a full recomputation for each token. Test the commands on a checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ropewalk
from ropewalk import DynamicNTK, Rope
from ropewalk.tools.cli import main
from ropewalk.tools.lab import checkpoint
from ropewalk.tools.lab import generate as generating
from ropewalk.tools.lab.generate import generate, run
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.train import Batch, Recipe, train

SIZE = Size(256, 16, 24, 2, 2, num_kv_heads=1)
ROPE = Rope(8, 1e4, "half")
PROMPT = [7, 200, 31, 7]


def random_model(size: Size = SIZE) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


@torch.no_grad()
def recomputed(model: LanguageModel, rope: Rope | None, tokens: int) -> list[int]:
    """Return the most likely next tokens, running the whole sequence again for each, without a cache."""
    row = list(PROMPT)
    for _ in range(tokens):
        positions = torch.arange(len(row))
        placed = positions if model.size.absolute else None
        logits = model(torch.tensor([row]), None if rope is None else rope.at(positions), positions=placed)
        row.append(int(logits[0, -1].argmax()))
    return row[len(PROMPT) :]


@pytest.mark.parametrize("absolute", [None, "sinusoidal", "learned"])
@pytest.mark.parametrize("rope", [ROPE, None])
def test_as_without_a_cache(rope: Rope | None, absolute: Any) -> None:
    model = random_model(replace(SIZE, absolute=absolute, max_positions=64 if absolute == "learned" else None))
    made = list(generate(model, rope, PROMPT, tokens=30, temperature=0, seed=0))
    assert made == recomputed(model, rope, 30)
    assert len(set(made)) > 3


@pytest.mark.parametrize("absolute", [None, "learned"])
def test_a_long_prompt_runs_in_parts(absolute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is as large as the square of its length, and the text is the same."""
    model = random_model(replace(SIZE, absolute=absolute, max_positions=64 if absolute == "learned" else None))
    prompt, parts = [7, 200, 31, 7, 90, 14, 3], []
    wanted = list(generate(model, ROPE, prompt, tokens=20, temperature=0, seed=0))

    class Watched(ropewalk.KVCache):
        def step(self, seq: int) -> Any:
            parts.append(seq)
            return super().step(seq)

    monkeypatch.setattr(ropewalk, "KVCache", Watched)
    monkeypatch.setattr(generating, "AT_ONCE", 3)
    assert list(generate(model, ROPE, prompt, tokens=20, temperature=0, seed=0)) == wanted
    assert parts == [3, 3, 1, *[1] * 19]
    assert len(set(wanted)) > 3


def test_a_rope_that_depends_on_the_length() -> None:
    """It is resolved once, for prompt and tokens together, because cached keys keep their rotation."""
    rope = replace(ROPE, scaling=DynamicNTK(2.0, 8))
    made = list(generate(random_model(), rope, PROMPT, tokens=30, temperature=0, seed=0))
    assert made == recomputed(random_model(), rope.at_length(34), 30)
    assert made != recomputed(random_model(), rope.at_length(8), 30)


def test_sampling_follows_the_temperature() -> None:
    model = random_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # the likeliest token: 0.17 at this temperature, 0.47 at 1
        logits = model(torch.tensor([PROMPT]), ROPE.at(torch.arange(4)))[0, -1].double().numpy()
    wanted = np.exp(logits / 2.0 - (logits / 2.0).max())
    wanted /= wanted.sum()
    likeliest = int(wanted.argmax())
    draws = 400
    drawn = [next(generate(model, ROPE, PROMPT, tokens=1, temperature=2.0, seed=seed)) for seed in range(draws)]
    p = wanted[likeliest]
    assert 0.1 < p < 0.3
    # Four standard deviations of a share of 400.
    assert abs(drawn.count(likeliest) / draws - p) < 4 * np.sqrt(p * (1 - p) / draws)
    again = [next(generate(model, ROPE, PROMPT, tokens=1, temperature=2.0, seed=seed)) for seed in range(20)]
    assert again == drawn[:20]


def counting(step: int) -> Batch:
    """Return bytes that count up through the alphabet."""
    rows = (torch.arange(25) + torch.tensor([[0], [5], [11], [20]])) % 26 + ord("a")
    return Batch(rows[:, :-1], rows[:, 1:])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("lab") / "text.safetensors"
    train(LanguageModel(SIZE), ROPE, counting, Recipe(60, 2e-2, warmup=5), file=file, about={"task": "text"})
    return file


def test_command(trained: Path) -> None:
    arguments = ["generate", str(trained), "--prompt", "fgh", "--tokens", "9", "--temperature", "0"]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 0, ran.output
    assert ran.stdout == "fghijklmnopq\n"
    assert re.fullmatch(r"first token after \d+\.\d\d s, then \d+ tokens per second\n", ran.stderr)
    drawn = [CliRunner().invoke(main, [*arguments[:-1], "3", "--seed", seed]).stdout for seed in "001"]
    assert drawn[0] == drawn[1] != drawn[2]


def test_prompts_that_are_not_text_and_any_temperature(trained: Path) -> None:
    written: list[str] = []
    for prompt in ("\udcff", "é", "\udcc3"):  # as the shell hands on a byte that is no UTF-8
        run(trained, prompt, tokens=1, temperature=0.0, seed=0, write=written.append)
    assert written[0] == written[-3] == "\ufffd"
    model, rope, _ = checkpoint.load(trained)
    likeliest = list(generate(model, rope, [97, 98], tokens=5, temperature=0.0, seed=0))
    for temperature in (1e-3, 1e-45, 5e-324):
        assert list(generate(model, rope, [97, 98], tokens=5, temperature=temperature, seed=0)) == likeliest
    assert len(list(generate(model, rope, [97], tokens=9, temperature=1e300, seed=0))) == 9


def test_command_refuses(trained: Path, tmp_path: Path) -> None:
    for model, file, message in (
        (LanguageModel(replace(SIZE, vocab_size=300)), tmp_path / "x", "a byte model with 256 tokens, got 300 tokens"),
        (None, trained, "prompt must have at least one character"),
    ):
        if model is not None:
            train(model, ROPE, counting, Recipe(1, 1e-3), file=file, about={})
        ran = CliRunner().invoke(main, ["generate", str(file), "--prompt", "", "--tokens", "1"])
        assert ran.exit_code == 1
        assert message in ran.stderr
        assert ran.stdout == ""


@pytest.mark.parametrize("temperature", ["nan", "-1"])
def test_command_refuses_temperatures(temperature: str, trained: Path) -> None:
    ran = CliRunner().invoke(main, ["generate", str(trained), "--temperature", temperature])
    assert ran.exit_code == 1
    assert f"temperature must be at least 0, got {float(temperature)}" in ran.stderr
    assert ran.stdout == ""


def test_more_tokens_than_there_is_memory_for(trained: Path) -> None:
    for tokens in ("513k", str(10**30)):
        ran = CliRunner().invoke(main, ["generate", str(trained), "--tokens", tokens])
        assert (ran.exit_code, ran.stdout) == (2, "")
        assert "1<=x<=524288" in ran.stderr


def test_the_cache_is_as_large_as_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a slot for every token but the last, which no token follows."""
    made = []

    class Watched(ropewalk.KVCache):
        def __init__(self, *sizes: int, capacity: int) -> None:
            made.append(self)
            super().__init__(*sizes, capacity=capacity)

    monkeypatch.setattr(ropewalk, "KVCache", Watched)
    list(generate(random_model(), ROPE, PROMPT, tokens=5, temperature=0.0, seed=0))
    ((cache,),) = [made]
    assert cache.capacity == int(cache.length) == len(PROMPT) + 4


def test_export_commands(trained: Path, tmp_path: Path) -> None:
    written = {
        "hf": ("folder", {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}),
        "llama2.c": ("model.bin", {"model.bin", "tokenizer.bin"}),
    }
    for form, (target, files) in written.items():
        path = tmp_path / form / target
        ran = CliRunner().invoke(main, ["export", str(trained), str(path), "--format", form, "--max-positions", "64"])
        assert (ran.exit_code, ran.stdout) == (0, f"wrote {path}\n"), ran.output
        assert {file.name for file in (tmp_path / form).rglob("*") if file.is_file()} == files
    train(LanguageModel(SIZE), None, counting, Recipe(1, 1e-3), file=tmp_path / "x", about={})
    ran = CliRunner().invoke(main, ["export", str(tmp_path / "x"), "y", "--format", "hf", "--max-positions", "64"])
    assert ran.exit_code == 1
    assert "export: the model must have a rope, got a model without one in" in ran.stderr
