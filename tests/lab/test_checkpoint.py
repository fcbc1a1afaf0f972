"""Test that nothing in a checkpoint is trusted: each possible defect is refused, by load and by resume."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ropewalk import NTK, DynamicNTK, Llama3, LongRoPE, Proportional, Rope, RopeError, YaRN, schemes
from ropewalk.tools.lab import checkpoint
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.train import Batch, Recipe, train

SIZE = Size(16, 8, 12, 1, 2)
ROPE = Rope(4, 1e4, "half", scaling=YaRN(4.0, 64))
RECIPE = Recipe(4, 1e-2, warmup=2)
EMBEDDING = "weights.embed_tokens.weight"

Tensors = dict[str, torch.Tensor]


def fresh() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(SIZE)


def batch(step: int) -> Batch:
    rows = torch.randint(16, (2, 7), generator=torch.Generator().manual_seed(step))
    return Batch(rows[:, :-1], rows[:, 1:])


def resumed(file: Path) -> tuple[float, ...]:
    return train(fresh(), ROPE, batch, RECIPE, file=file, about={"seed": 1}).losses


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("checkpoint") / "good.safetensors"
    resumed(file)
    return file


def taken_apart(file: Path) -> tuple[Tensors, dict[str, str], dict[str, Any]]:
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        metadata = dict(opened.metadata())
    return tensors, metadata, json.loads(metadata["identity"])


def sealed(file: Path, tensors: Tensors, metadata: dict[str, str]) -> Path:
    """Write a file with a correct checksum, so that only its other defects can be detected."""
    if "sha256" in metadata:
        text = json.dumps([metadata.get(key, "") for key in ("identity", "seconds", "version")])
        whole = hashlib.sha256(text.encode())
        for name, value in sorted(tensors.items()):
            whole.update(f"\n{name} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}\n".encode())
            whole.update(value.contiguous().view(torch.uint8).numpy().tobytes())
        metadata = {**metadata, "sha256": whole.hexdigest()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata)
    return file


def refused(file: Path, message: str) -> None:
    for use in (checkpoint.load, resumed):
        with pytest.raises(RopeError, match=message):
            use(file)


def test_a_good_one_is_read(good: Path, tmp_path: Path) -> None:
    tensors, metadata, _ = taken_apart(good)
    file = sealed(tmp_path / "x", tensors, metadata)
    model, rope, about = checkpoint.load(file)
    assert (rope, about, model.size) == (ROPE, {"seed": 1}, SIZE)
    assert torch.equal(model.embed_tokens.weight, tensors[EMBEDDING])
    assert list(resumed(file)) == tensors["losses"].tolist()


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


MOMENT, SQUARE = "exp_avg.embed_tokens.weight", "exp_avg_sq.embed_tokens.weight"
TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "weight missing": (without(EMBEDDING), f"missing or unknown: {EMBEDDING}"),
    "moment missing": (without(MOMENT), f"missing or unknown: {MOMENT}"),
    "one too many": (lambda t: {**t, "weights.more": torch.ones(2)}, "missing or unknown: weights.more"),
    "weight [1, 1]": (changed(EMBEDDING, lambda t: t[:1, :1]), r"must be F32 \[16, 8\], got F32 \[1, 1\]"),
    "weight [1, 8]": (changed(EMBEDDING, lambda t: t[:1]), r"must be F32 \[16, 8\], got F32 \[1, 8\]"),
    "weight int64": (changed(EMBEDDING, lambda t: t.long()), r"must be F32 \[16, 8\], got I64 \[16, 8\]"),
    "weight float64": (changed(EMBEDDING, lambda t: t.double()), r"must be F32 \[16, 8\], got F64 \[16, 8\]"),
    "weight nan": (changed(EMBEDDING, set_first(float("nan"))), f"{EMBEDDING} must be finite"),
    "moment inf": (changed(MOMENT, set_first(float("inf"))), f"{MOMENT} must be finite"),
    "square below 0": (changed(SQUARE, set_first(-1e-9)), f"{SQUARE} must be at least 0"),
    "moment [1, 8]": (changed(MOMENT, lambda t: t[:1]), rf"{MOMENT} must be F32 \[16, 8\], got F32 \[1, 8\]"),
    "no losses": (without("losses"), r"its losses must be F64 \[from 1 to 4\], got none"),
    "losses of no step": (changed("losses", lambda t: t[:0]), r"losses must be .*, got F64 \[0\]"),
    "more losses than steps": (changed("losses", lambda t: torch.cat([t, t])), r"losses must be .*, got F64 \[8\]"),
    "losses 2-d": (changed("losses", lambda t: t[None]), r"losses must be .*, got F64 \[1, 4\]"),
    "losses float32": (changed("losses", lambda t: t.float()), r"losses must be .*, got F32 \[4\]"),
    "losses nan": (changed("losses", set_first(float("nan"))), "losses must be finite"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, good: Path, tmp_path: Path) -> None:
    change, message = TENSORS[name]
    tensors, metadata, _ = taken_apart(good)
    refused(sealed(tmp_path / "x", change(tensors), metadata), message)


def test_a_moment_of_another_shape_or_dtype_before_the_last_step(good: Path, tmp_path: Path) -> None:
    """The optimizer must not run with it, because it would write outside of the tensor."""
    for change in (lambda t: t[:1], lambda t: t.bfloat16(), lambda t: t.double()):
        tensors, metadata, _ = taken_apart(good)
        tensors = {**tensors, "losses": tensors["losses"][:2], MOMENT: change(tensors[MOMENT])}
        save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "x", metadata)
        refused(tmp_path / "x", rf"{MOMENT} must be F32 \[16, 8\]")


def in_size(**keys: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda said: {**said, "size": {**said["size"], **keys}}


def in_rope(**keys: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda said: {**said, "rope": {**said["rope"], **keys}}


def in_scaling(**keys: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda said: in_rope(scaling={**said["rope"]["scaling"], **keys})(said)


IDENTITIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda said: [], r"its identity must be a JSON object, got \[\]"),
    "null": (lambda said: None, "its identity must be a JSON object, got None"),
    "empty": (lambda said: {}, "its identity must have the keys size, rope, recipe"),
    "without about": (lambda said: {k: said[k] for k in said if k != "about"}, "its identity must have the keys size,"),
    "about a list": (lambda said: {**said, "about": []}, r"its about must be a JSON object, got \[\]"),
    "no digest": (lambda said: {**said, "initial weights": 1}, "its initial weights must be a digest, got 1"),
    "recipe a string": (lambda said: {**said, "recipe": "x"}, "its recipe must be a JSON object, got 'x'"),
    "recipe empty": (lambda said: {**said, "recipe": {}}, "steps of its recipe must be an integer, got None"),
    "steps true": (
        lambda said: {**said, "recipe": {"steps": True}},
        "steps of its recipe must be an integer, got True",
    ),
    "size a string": (lambda said: {**said, "size": "x"}, "its size must be a JSON object, got 'x'"),
    "size empty": (lambda said: {**said, "size": {}}, "its size must have the keys vocab_size, hidden_size"),
    "size with another key": (in_size(bogus=1), "its size must have the keys vocab_size, hidden_size"),
    "hidden_size 10**12": (in_size(hidden_size=10**12), r"hidden_size must be an integer from 0 to 1048576"),
    "intermediate_size 2**40": (in_size(intermediate_size=2**40), "intermediate_size must be an integer from 0 to"),
    "num_layers 10**4": (in_size(num_layers=10**4), "num_layers must be an integer from 0 to 1024, got 10000"),
    "num_layers 1000": (in_size(num_layers=1000), "it must hold exactly the tensors of a model of its size"),
    "intermediate_size 2**20": (in_size(intermediate_size=2**20), r"must be F32 \[1048576, 8\], got F32 \[12, 8\]"),
    "max_positions 10**15": (in_size(absolute="learned", max_positions=10**15), "max_positions must be an integer fr"),
    "tied 2": (in_size(tied=2), "tied must be True or False, got 2"),
    "norm_eps a string": (in_size(norm_eps="x"), "norm_eps must be a finite number"),
    "absolute a list": (in_size(absolute=[]), "absolute must be one of"),
    "rope a list": (lambda said: {**said, "rope": []}, r"its rope must be a JSON object, got \[\]"),
    "rope with another key": (in_rope(x=1), "its rope must have the keys head_dim, base, pairing"),
    "head_dim of other heads": (in_rope(head_dim=8, rotary_dim=8), "head_dim of its rope must be that of its size, 4"),
    "base 10**400": (in_rope(base=10**400), "its rope must be valid, got Rope: base must be a finite number"),
    "scaling a list": (in_rope(scaling=[]), r"its scaling must be a JSON object, got \[\]"),
    "scaling empty": (in_rope(scaling={}), "the scheme of its scaling must be one of .*YaRN.*, got None"),
    "unknown scheme": (in_scaling(scheme="Nope"), "the scheme of its scaling must be one of .*, got 'Nope'"),
    "scheme a base class": (in_scaling(scheme="Scheme"), "the scheme of its scaling must be one of .*, got 'Scheme'"),
    "scheme a name of the module": (in_scaling(scheme="SCHEMES"), "the scheme of its scaling must be one of"),
    "scheme a list": (in_scaling(scheme=["YaRN"]), "the scheme of its scaling must be one of"),
    "factor a string": (in_scaling(factor="x"), "its rope must be valid, got YaRN: factor must be"),
    "another key of the scheme": (in_scaling(more=1), "its rope must be valid, got .*more"),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity(name: str, good: Path, tmp_path: Path) -> None:
    change, message = IDENTITIES[name]
    tensors, metadata, said = taken_apart(good)
    refused(sealed(tmp_path / "x", tensors, {**metadata, "identity": json.dumps(change(said))}), message)


METADATA: dict[str, tuple[dict[str, str | None], str]] = {
    "no identity": ({"identity": None}, "must be a checkpoint of the lab, got a file without 'identity'"),
    "no seconds": ({"seconds": None}, "must be a checkpoint of the lab, got a file without 'seconds'"),
    "seconds a word": ({"seconds": "soon"}, "its seconds must be a finite number of at least 0, got 'soon'"),
    "seconds nan": ({"seconds": "nan"}, "its seconds must be a finite number of at least 0, got 'nan'"),
    "seconds below 0": ({"seconds": "-1"}, "its seconds must be a finite number of at least 0, got '-1'"),
    "of the first version": ({"version": None, "sha256": None}, "a checkpoint of version 2, got version '1'"),
    "of another version": ({"version": "3"}, "a checkpoint of version 2, got version '3'"),
    "without a checksum": ({"sha256": None}, "or other metadata"),
    "with more": ({"more": "x"}, "or other metadata"),
    "not JSON": ({"identity": "{oops"}, "its identity must be JSON, got JSONDecodeError"),
    "deep": ({"identity": "[" * 100_000}, "its identity must be JSON, got RecursionError"),
    "an integer of 5,000 digits": ({"identity": "1" * 5000}, "its identity must be JSON, got ValueError"),
    "long": ({"identity": " " * 2**20 + "{}"}, "its identity must have at most 1,048,576 characters"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata(name: str, good: Path, tmp_path: Path) -> None:
    changes, message = METADATA[name]
    tensors, metadata, _ = taken_apart(good)
    metadata = {key: value for key, value in {**metadata, **changes}.items() if value is not None}
    refused(sealed(tmp_path / "x", tensors, metadata), message)


def test_what_is_no_safetensors_file(good: Path, tmp_path: Path) -> None:
    content = good.read_bytes()
    for raw, message in (
        (b"", "must be a safetensors file, got a broken file"),
        (content[: len(content) // 2], "must be a safetensors file, got a broken file"),
        (struct.pack("<Q", 8) + b"garbage!", "must be a safetensors file, got a broken file"),
        (struct.pack("<Q", 2**63) + b"{}", "a header of at most 4,194,304 bytes"),
        (
            struct.pack("<Q", 10**7) + b"[" * 10**7,
            r"a header of at most 4,194,304 bytes, got .* claims 10,000,000 bytes\)",
        ),
    ):
        (tmp_path / "x").write_bytes(raw)
        refused(tmp_path / "x", message)
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "must be a safetensors file, got something that is not a file")


def test_a_flipped_bit_is_noticed(good: Path, tmp_path: Path) -> None:
    """This holds anywhere in the file: reading returns what was written, or raises."""
    content, chance, file = good.read_bytes(), random.Random(0), tmp_path / "x"
    header = int.from_bytes(content[:8], "little")
    places = [chance.randrange(8 + header) for _ in range(50)] + [chance.randrange(len(content)) for _ in range(50)]
    wanted = taken_apart(good)[0]
    noticed = 0
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        try:
            found = checkpoint.read(file)
        except RopeError:
            noticed += 1
        else:
            assert place < 8 + header, "a tensor was changed"
            assert (found.rope, found.size, found.about) == (ROPE, SIZE, {"seed": 1})
            assert all(torch.equal(wanted[name], value) for name, value in found.tensors.items())
            assert found.losses == wanted["losses"].tolist()
    assert noticed > 95


@pytest.mark.parametrize(
    "scheme",
    [
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
def test_every_scheme_can_be_named(scheme: schemes.Scheme, tmp_path: Path) -> None:
    rope = Rope(4, 1e4, "half", scaling=scheme)
    save_one(tmp_path / "x", rope)
    assert checkpoint.load(tmp_path / "x")[1] == rope


def save_one(file: Path, rope: Rope | None) -> None:
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2]]), None).sum().backward()
    optimizer.step()
    identity = checkpoint.identity(model, rope, {"steps": 1}, {})
    checkpoint.save(file, identity, checkpoint.state(dict(model.named_parameters()), optimizer), [1.0], 0.5)


def test_a_training_that_diverges_keeps_the_steps_before(tmp_path: Path) -> None:
    model = fresh()

    def breaks(step: int) -> Batch:
        if step == 2:
            model.lm_head.weight.data[0] = float("nan")
        return batch(step)

    with pytest.raises(RopeError, match="lab: loss and weights must be finite, got inf or nan after step 3"):
        train(model, ROPE, breaks, RECIPE, file=tmp_path / "x", about={})
    assert len(checkpoint.read(tmp_path / "x").losses) == 2
