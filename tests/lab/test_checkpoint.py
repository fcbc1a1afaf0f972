"""Test checkpoints: other programs can read them, every scheme survives, and a broken one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ropewalk import NTK, DynamicNTK, Llama3, LongRoPE, Proportional, Rope, RopeError, YaRN, schemes
from ropewalk.tools.lab import checkpoint
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.train import Batch, Recipe, train

SIZE = Size(16, 8, 12, 1, 2)
ROPE = Rope(4, 1e4, "half", scaling=YaRN(4.0, 64))
EMBEDDING = "weights.embed_tokens.weight"


def trained(file: Path, rope: Rope | None = ROPE, seed: int = 1) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(SIZE)
    rows = torch.randint(16, (2, 7), generator=torch.Generator().manual_seed(1))
    train(model, rope, lambda step: Batch(rows[:, :-1], rows[:, 1:]), Recipe(2, 1e-2), file=file, about={"seed": seed})
    return model


def test_its_files(tmp_path: Path) -> None:
    model = trained(tmp_path / "x.safetensors")
    said, tensors = json.loads((tmp_path / "x.json").read_text()), load_file(tmp_path / "x.safetensors")
    assert said["size"]["hidden_size"] == 8
    assert said["rope"]["base"] == 10_000.0
    assert said["rope"]["scaling"]["scheme"] == "YaRN"
    assert said["recipe"]["betas"] == [0.9, 0.95]
    assert said["about"] == {"seed": 1}
    assert tensors["losses"].shape == (2,)
    for name, value in model.named_parameters():
        assert torch.equal(tensors[f"weights.{name}"], value)
        assert tensors[f"exp_avg.{name}"].shape == tensors[f"exp_avg_sq.{name}"].shape == value.shape


@pytest.mark.parametrize(
    "scheme",
    [
        None,
        schemes.Linear(2.0),
        NTK(4.0),
        DynamicNTK(4.0, 32),
        YaRN(4.0, 32),
        Llama3(8.0, 1.0, 4.0, 32),
        LongRoPE([1.0, 1.5], [1.0, 3.0], 32, factor=4.0),
        Proportional(0.5),
        schemes.PerPair([1.0, 2.0]),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_every_scheme_can_be_named(scheme: Any, tmp_path: Path) -> None:
    rope = Rope(4, 1e4, "half", scaling=scheme)
    said = json.loads(json.dumps(checkpoint.describe(LanguageModel(SIZE), rope, {}, {})))
    assert checkpoint._rope_from_json(said["rope"]) == rope


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def in_json(**keys: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        said = json.loads(file.with_suffix(".json").read_text())
        file.with_suffix(".json").write_text(json.dumps({**said, **keys}))

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda file: save_file({key: value for key, value in load_file(file).items() if key != name}, file)


def one_row(file: Path) -> None:
    tensors = load_file(file)
    save_file({**tensors, EMBEDDING: tensors[EMBEDDING][:1].clone()}, file)


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        without(EMBEDDING),
        without("losses"),
        one_row,
        in_json(size={}),
        in_json(size="x"),
        in_json(size={**vars(SIZE), "num_heads": 3}),
        in_json(rope={"scaling": {"scheme": "Nope"}}),
        in_json(rope=[]),
        lambda file: file.with_suffix(".json").write_text("{oops"),
        lambda file: file.with_suffix(".json").write_text("[" * 100_000),
        lambda file: file.write_bytes(b"no safetensors"),
        lambda file: file.with_suffix(".json").unlink(),
    ],
)
def test_a_broken_one_is_refused(damage: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    trained(file)
    damage(file)
    with pytest.raises(RopeError, match=r"x\.safetensors must be a checkpoint of the lab, with x\.json beside it, got"):
        checkpoint.load(file)


def test_weights_of_another_training_are_refused(tmp_path: Path) -> None:
    mine, other = tmp_path / "x.safetensors", tmp_path / "other.safetensors"
    trained(mine)
    trained(other, seed=2)
    mine.write_bytes(other.read_bytes())
    with pytest.raises(RopeError, match=r"x\.safetensors must be a checkpoint .* of the training that x\.json"):
        trained(mine)
