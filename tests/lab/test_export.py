"""Test exports: transformers, and a float64 reading of llama2.c's file, give our logits."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import oracle
from ropewalk import NTK, DynamicNTK, Llama3, LongRoPE, Rope, RopeError, YaRN
from ropewalk.schemes import Linear
from ropewalk.tools import cli
from ropewalk.tools.lab import export
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.train import Batch, Recipe, train

SIZE = Size(61, 32, 48, 2, 4, num_kv_heads=2)
SEQ = 96  # three times the trained length
PLAIN = Rope(8, 10_000.0, "half")
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 1.7, 2.9, 4.0]}

# name → the rope of ours, max_position_embeddings, and the same in the words of transformers
ROPES: dict[str, tuple[Rope, int, dict[str, Any]]] = {
    "default": (replace(PLAIN, base=5e5), 128, {"rope_type": "default", "rope_theta": 5e5}),
    "linear": (
        replace(PLAIN, scaling=Linear(4.0)), 128, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "dynamic": (
        replace(PLAIN, scaling=DynamicNTK(4.0, 32)), 32, {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    ),
    "yarn": (
        replace(PLAIN, scaling=YaRN(4.0, 32)),
        128,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4},
    ),
    "llama3": (
        replace(PLAIN, scaling=Llama3(8.0, 1.0, 4.0, 32)),
        256,
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 1e4,
        },
    ),
    "longrope": (
        replace(PLAIN, scaling=LongRoPE(**FACTORS, original_max_position_embeddings=32, factor=4.0)),
        128,
        {
            "rope_type": "longrope", **FACTORS, "factor": 4.0, "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
        },
    ),
    # NTK is written as a base, and interleaved pairs are reordered.
    "ntk": (replace(PLAIN, scaling=NTK(4.0)), 128, {"rope_type": "default"}),
    "interleaved": (replace(PLAIN, pairing="interleaved"), 128, {"rope_type": "default", "rope_theta": 1e4}),
}  # fmt: skip


def random_model(size: Size = SIZE, seed: int = 0) -> LanguageModel:
    """Build a model whose weights are so large that the logits depend on positions; see test_the_rope_matters."""
    torch.manual_seed(seed)
    model = LanguageModel(size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
            if parameter.ndim == 1:
                parameter += 1.0
    return model


def tokens(seq: int = SEQ, seed: int = 1) -> Tensor:
    return torch.randint(61, (2, seq), generator=torch.Generator().manual_seed(seed))


def ours(model: LanguageModel, rope: Rope, seq: int = SEQ) -> Tensor:
    with torch.no_grad():
        return model(tokens(seq), rope.at_length(seq).at(torch.arange(seq)))


def to_folder(model: LanguageModel, rope: Rope, folder: Path, max_positions: int) -> None:
    for name, content in export.hugging_face(model, rope, max_positions).items():
        (folder / name).write_bytes(content)


def theirs(folder: Path, seq: int = SEQ) -> Tensor:
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return llama(tokens(seq)).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ROPES)
def test_transformers_reads_ours(name: str, tied: bool, tmp_path: Path) -> None:
    rope, length, said = ROPES[name]
    model = random_model(replace(SIZE, tied=tied))
    to_folder(model, rope, tmp_path, length)
    for seq in (24, SEQ):  # within the trained length and beyond it
        torch.testing.assert_close(theirs(tmp_path, seq), ours(model, rope, seq), rtol=0, atol=1e-4)
    written = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert {key: written[key] for key in said} == said


def test_the_rope_matters() -> None:
    """The logits of any two ropes differ by far more than the tolerance of the tests above."""
    model = random_model()
    all_logits = [ours(model, rope) for rope, _, _ in ROPES.values()]
    for i, one in enumerate(all_logits):
        for other in all_logits[:i]:
            assert (one - other).abs().max() > 0.1


def run_c(data: bytes, rows: np.ndarray) -> np.ndarray:
    """Compute the logits [seq, vocab] of run.c for tokens [seq], in float64 NumPy, from the description of the file."""
    dim, hidden, layers, heads, kv_heads, vocab, longest = struct.unpack("<7i", data[:28])
    shared, vocab, head = vocab > 0, abs(vocab), dim // heads
    flat = np.frombuffer(data[28:], dtype="<f4").astype(np.float64)
    at = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += int(np.prod(shape))
        return flat[at - int(np.prod(shape)) : at].reshape(shape)

    embedding, att_norm = take(vocab, dim), take(layers, dim)
    wq, wk, wv = take(layers, heads * head, dim), take(layers, kv_heads * head, dim), take(layers, kv_heads * head, dim)
    wo, ffn_norm = take(layers, dim, heads * head), take(layers, dim)
    w1, w2, w3 = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    last_norm = take(dim)
    cos, sin = take(longest, head // 2), take(longest, head // 2)
    classifier = embedding if shared else take(vocab, dim)
    assert at == len(flat)

    seq = len(rows)
    angles = np.arange(longest)[:, None] / 10_000.0 ** (np.arange(0, head, 2) / head)
    # The tables that old versions read: float32, so half a unit in the last place of 1, and as much for the angle.
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=2**-24)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=2**-24)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def turn(x: np.ndarray) -> np.ndarray:
        return oracle.rotate(x, angles[:seq, None, :], "interleaved")

    x = embedding[rows]
    causal = np.where(np.tri(seq, dtype=bool), 0.0, -np.inf)
    for i in range(layers):
        y = norm(x, att_norm[i])
        q = turn((y @ wq[i].T).reshape(seq, heads, head))
        k = turn((y @ wk[i].T).reshape(seq, kv_heads, head)).repeat(heads // kv_heads, axis=1)
        v = (y @ wv[i].T).reshape(seq, kv_heads, head).repeat(heads // kv_heads, axis=1)
        scores = np.einsum("qhc,khc->hqk", q, k) / np.sqrt(head) + causal
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khc->qhc", weights, v).reshape(seq, dim) @ wo[i].T
        y = norm(x, ffn_norm[i])
        gate = y @ w1[i].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w3[i].T)) @ w2[i].T
    return norm(x, last_norm) @ classifier.T


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_llama2c(tied: bool, pairing: str) -> None:
    rope = replace(PLAIN, pairing=pairing)
    model = random_model(replace(SIZE, tied=tied))
    data, wanted = export.llama2c(model, rope, 100), ours(model, rope)
    for row, logits in zip(tokens(), wanted, strict=True):
        np.testing.assert_allclose(logits.numpy(), run_c(data, row.numpy()), rtol=0, atol=1e-4)


def test_llama2c_refuses_what_run_c_cannot_run() -> None:
    for rope in (
        replace(PLAIN, base=5e5),
        replace(PLAIN, scaling=Linear(2.0)),
        replace(PLAIN, scaling=DynamicNTK(2.0, 32)),
        replace(PLAIN, rotary_dim=4),
    ):
        with pytest.raises(RopeError, match="export: the rope must have base 10000, no scaling"):
            export.llama2c(random_model(), rope, 8)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (replace(PLAIN, rotary_dim=4), 128),
        (replace(PLAIN, scaling=DynamicNTK(4.0, 32)), 128),
    ],
    ids=["partial", "dynamic with another length"],
)
def test_hugging_face_refuses_what_its_config_cannot_say(rope: Rope, length: int) -> None:
    with pytest.raises(RopeError, match="export: a Llama config must be able to represent the rope, got Rope"):
        export.hugging_face(random_model(), rope, length)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a byte model for transformers."""
    folder = tmp_path_factory.mktemp("bytes")
    to_folder(LanguageModel(Size(256, 16, 24, 1, 2, tied=True)), PLAIN, folder, 64)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x",
        "  two  spaces \t\r\n",
        "é☃😀",
        "e\u0301 Å ﬁ",  # not normalised
        "\x00\x01\x7f",
        "<s></s><unk><0x41> don't 1234",
        "",
    ],
)
def test_the_tokenizer_of_transformers(text: str, byte_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(byte_model)
    tokens = tokenizer(text)["input_ids"]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert (len(tokenizer), tokenizer.model_max_length, tokenizer.all_special_tokens) == (256, 64, [])


def test_the_tokenizer_of_transformers_has_every_byte(byte_model: Path) -> None:
    """Each byte is one token. Bytes that are not UTF-8 decode to the replacement character."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(byte_model)
    assert len(set(tokenizer.convert_ids_to_tokens(list(range(256))))) == 256
    for byte in range(256):
        assert tokenizer.decode([byte]) == bytes([byte]).decode(errors="replace")


def test_the_tokenizer_of_llama2c() -> None:
    """run.c reads the longest length, then score, length and bytes of each piece. Pieces must differ, none empty."""
    data = export.llama2c_tokenizer()
    (longest,), at, pieces = struct.unpack_from("<i", data), 4, []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        assert score == 0.0
        pieces.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    assert pieces == [b"<0x00>", *(bytes([byte]) for byte in range(1, 256))]
    assert longest == 6


def test_only_models_of_bytes_have_a_tokenizer() -> None:
    assert set(export.hugging_face(random_model(), PLAIN, 64)) == {"config.json", "model.safetensors"}


def checkpoint_of_bytes(file: Path, seed: int = 0) -> Path:
    """Return the checkpoint of a training with one step."""
    torch.manual_seed(seed)
    model, rows = LanguageModel(Size(256, 16, 24, 1, 2)), torch.randint(256, (2, 9))
    batch = Batch(rows[:, :-1], rows[:, 1:])
    train(model, PLAIN, lambda step: batch, Recipe(1, 1e-2), file=file, about={})
    return file


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(source: Path, target: Path, form: str, *more: str) -> Any:
    arguments = ["export", str(source), str(target), "--format", form, "--max-positions", "64", *more]
    return CliRunner().invoke(cli.main, arguments)


@pytest.mark.parametrize("form", ["hf", "llama2.c"])
def test_an_export_replaces_another_only_with_force(form: str, tmp_path: Path) -> None:
    one, other = (checkpoint_of_bytes(tmp_path / str(seed), seed) for seed in (0, 1))
    target = tmp_path / "out" / {"hf": "model", "llama2.c": "model.bin"}[form]
    assert command(one, target, form).exit_code == 0
    before = contents(tmp_path)
    ran = command(other, target, form)
    assert (ran.exit_code, ran.stdout) == (1, "")
    there = {"hf": target / "model.safetensors", "llama2.c": target}[form]
    assert f"export: {there} must not exist yet, got a file or folder with other content. Pass another" in ran.stderr
    assert contents(tmp_path) == before
    assert command(other, target, form, "--force").exit_code == 0
    assert contents(tmp_path).keys() == before.keys()
    assert contents(tmp_path) != before
    assert command(other, tmp_path / "new" / target.name, form).exit_code == 0
    assert contents(tmp_path / "new") == contents(tmp_path / "out")
    assert command(other, target, form).exit_code == 0  # the same content


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_an_export_never_replaces_its_checkpoint(force: list[str], tmp_path: Path) -> None:
    source = checkpoint_of_bytes(tmp_path / "folder" / "model.safetensors")
    shutil.copy(source, tmp_path / "folder" / "tokenizer.bin")
    shutil.copy(source.with_suffix(".json"), tmp_path / "folder" / "tokenizer.json")
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "hard")
    before = contents(tmp_path)
    for target, form in (
        (source, "llama2.c"),
        (tmp_path / "folder" / ".." / "folder" / "model.safetensors", "llama2.c"),
        (source.with_suffix(".json"), "llama2.c"),
        (tmp_path / "link", "llama2.c"),
        (tmp_path / "hard", "llama2.c"),
        (source.parent, "hf"),
    ):
        ran = command(source, target, form, *force)
        assert "export: the export must not replace its own checkpoint, got " in ran.stderr, target
        assert (ran.exit_code, ran.stderr.count("\n")) == (1, 1)
    ran = command(tmp_path / "folder" / "tokenizer.bin", tmp_path / "folder" / "model.bin", "llama2.c", *force)
    assert "export: the export must not replace its own checkpoint, got " in ran.stderr
    assert contents(tmp_path) == before


def test_what_force_does_not_replace(tmp_path: Path) -> None:
    source = checkpoint_of_bytes(tmp_path / "source")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    before = contents(tmp_path)
    for target, form, message in (
        ("file", "hf", "File exists"),
        ("folder", "llama2.c", "Is a directory"),
        ("tokenizer.bin", "llama2.c", "the model file must not have the name of the tokenizer file in the same folder"),
    ):
        ran = command(source, tmp_path / target, form, "--force")
        assert message in ran.stderr
        assert (ran.exit_code, ran.stderr.count("\n")) == (1, 1)
    assert command(source, tmp_path / "folder", "hf", "--force").exit_code == 0
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize(("form", "size"), [("hf", 1000), ("hf", 20_000), ("llama2.c", 1000), ("llama2.c", 20_000)])
def test_a_full_disk(form: str, size: int, tmp_path: Path) -> None:
    """The file that does not fit is named, and is not changed."""
    resource = pytest.importorskip("resource")  # not on Windows
    source, target = checkpoint_of_bytes(tmp_path / "source"), tmp_path / "out" / "model.bin"
    named = target if form == "llama2.c" else target / "model.safetensors"
    named.parent.mkdir(parents=True)
    named.write_bytes(b"precious")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        ran = command(source, target, form, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (ran.exit_code, ran.stderr.count("\n")) == (1, 1)
    assert str(named) in ran.stderr
    assert contents(tmp_path / "out") == {str(named.relative_to(tmp_path / "out")): b"precious"}


def test_a_disk_that_is_full_for_the_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = checkpoint_of_bytes(tmp_path / "source"), tmp_path / "out"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"precious")
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name.startswith("config.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    ran = command(source, target, "hf", "--force")
    assert (ran.exit_code, ran.stderr.count("\n")) == (1, 1)
    assert contents(target) == {"model.safetensors": b"precious"}


def test_a_tokenizer_that_is_there(tmp_path: Path) -> None:
    """Two models share one tokenizer file. Another file with that name is replaced only with --force."""
    source = checkpoint_of_bytes(tmp_path / "source")
    for name in ("a.bin", "b.bin"):
        assert command(source, tmp_path / "out" / name, "llama2.c").exit_code == 0
    wanted = (tmp_path / "out" / "tokenizer.bin").read_bytes()
    (tmp_path / "out" / "tokenizer.bin").write_bytes(wanted[:-1] + b"x")
    ran = command(source, tmp_path / "out" / "c.bin", "llama2.c")
    assert "tokenizer.bin must not exist yet, got a file or folder with other content" in ran.stderr
    assert not (tmp_path / "out" / "c.bin").exists()
    assert command(source, tmp_path / "out" / "c.bin", "llama2.c", "--force").exit_code == 0
    assert (tmp_path / "out" / "tokenizer.bin").read_bytes() == wanted


def test_an_export_through_links(tmp_path: Path) -> None:
    """The target of a link is replaced, and the link stays."""
    source = checkpoint_of_bytes(tmp_path / "source")
    assert command(source, tmp_path / "real" / "model", "hf").exit_code == 0
    (tmp_path / "link").symlink_to(tmp_path / "real" / "model")
    assert command(source, tmp_path / "link", "hf", "--force").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "real" / "model").keys() == contents(tmp_path / "link").keys()
