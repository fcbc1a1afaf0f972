"""Export: transformers and a float64 reading of llama2.c's file give our logits."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from ropewalk import NTK, DynamicNTK, Llama3, LongRoPE, Rope, RopeError, YaRN
from ropewalk.lab import export
from ropewalk.lab.model import LanguageModel, Size
from ropewalk.schemes import Linear

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
}  # fmt: skip


def random_model(size: Size = SIZE, seed: int = 0) -> LanguageModel:
    """Weights large enough that the logits depend on where a token is: see test_the_rope_matters."""
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
    export.to_hugging_face(model, rope, tmp_path, max_positions=length)
    for seq in (24, SEQ):  # within the trained length and beyond it
        torch.testing.assert_close(theirs(tmp_path, seq), ours(model, rope, seq), rtol=0, atol=1e-4)
    written = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert {key: written[key] for key in said} == said


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ROPES)
def test_ours_reads_transformers(name: str, tied: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope, length, said = ROPES[name]
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length, rms_norm_eps=1e-6, tie_word_embeddings=tied,
        rope_parameters=dict(said), initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, read = export.from_hugging_face(tmp_path)
    assert read == rope
    assert model.size == replace(SIZE, norm_eps=1e-6, tied=tied)
    torch.testing.assert_close(ours(model, read), theirs(tmp_path), rtol=0, atol=1e-4)


def test_ntk_is_written_as_a_base(tmp_path: Path) -> None:
    model, rope = random_model(), replace(PLAIN, scaling=NTK(4.0))
    export.to_hugging_face(model, rope, tmp_path, max_positions=128)
    torch.testing.assert_close(theirs(tmp_path), ours(model, rope), rtol=0, atol=1e-4)


def test_the_rope_matters() -> None:
    """The logits of any two of the ropes differ by far more than the tolerance, so the tests above see the rope."""
    model = random_model()
    all_logits = [ours(model, rope) for rope, _, _ in ROPES.values()]
    for i, one in enumerate(all_logits):
        for other in all_logits[:i]:
            assert (one - other).abs().max() > 0.1


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_there_and_back_is_bitwise(pairing: str, tmp_path: Path) -> None:
    model, rope = random_model(), replace(PLAIN, pairing=pairing)
    export.to_hugging_face(model, rope, tmp_path, max_positions=128)
    again, read = export.from_hugging_face(tmp_path)
    assert read == PLAIN
    torch.testing.assert_close(ours(again, read), ours(model, rope), rtol=0, atol=1e-4)
    if pairing == "half":
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value)


def run_c(file: Path, rows: np.ndarray) -> np.ndarray:
    """What run.c computes, in float64 NumPy, from its description of the file; tokens [seq] → logits [seq, vocab]."""
    data = file.read_bytes()
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
def test_llama2c(tied: bool, pairing: str, tmp_path: Path) -> None:
    rope = replace(PLAIN, pairing=pairing)
    model = random_model(replace(SIZE, tied=tied))
    file = tmp_path / "folder" / "model.bin"
    export.to_llama2c(model, rope, file, max_positions=100)
    wanted = ours(model, rope)
    for row, logits in zip(tokens(), wanted, strict=True):
        np.testing.assert_allclose(logits.numpy(), run_c(file, row.numpy()), rtol=0, atol=1e-4)


def test_llama2c_refuses_what_run_c_cannot_run(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    for rope in (
        replace(PLAIN, base=5e5),
        replace(PLAIN, scaling=Linear(2.0)),
        replace(PLAIN, scaling=DynamicNTK(2.0, 32)),
        replace(PLAIN, rotary_dim=4),
    ):
        with pytest.raises(RopeError, match="to_llama2c: the rope must have base 10000, no scaling"):
            export.to_llama2c(random_model(), rope, file, max_positions=8)
    with pytest.raises(RopeError, match=r"norm_eps must be 1e-05, which run\.c has built in, got 1e-06"):
        export.to_llama2c(random_model(replace(SIZE, norm_eps=1e-6)), PLAIN, file, max_positions=8)
    with pytest.raises(RopeError, match="max_positions must be an integer from 1 to 16777216, got 0"):
        export.to_llama2c(random_model(), PLAIN, file, max_positions=0)
    assert not file.exists()


def test_refusals_of_both(tmp_path: Path) -> None:
    absolute = LanguageModel(replace(SIZE, absolute="sinusoidal"))
    for to in (export.to_hugging_face, export.to_llama2c):
        with pytest.raises(RopeError, match=f"{to.__name__}: absolute must be None, got 'sinusoidal'"):
            to(absolute, PLAIN, tmp_path / "x", max_positions=8)
        with pytest.raises(RopeError, match="rope must be a Rope of head_dim=8, got None"):
            to(random_model(), None, tmp_path / "x", max_positions=8)  # type: ignore[arg-type]
        with pytest.raises(RopeError, match="rope must be a Rope of head_dim=8, got Rope"):
            to(random_model(), Rope(16, 1e4, "half"), tmp_path / "x", max_positions=8)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (replace(PLAIN, rotary_dim=4), 128),
        (replace(PLAIN, scaling=DynamicNTK(4.0, 32)), 128),
    ],
    ids=["partial", "dynamic with another length"],
)
def test_hugging_face_refuses_what_its_config_cannot_say(rope: Rope, length: int, tmp_path: Path) -> None:
    with pytest.raises(RopeError, match="to_hugging_face: a config of Llama must be able to say the rope, got Rope"):
        export.to_hugging_face(random_model(), rope, tmp_path, max_positions=length)
    assert not list(tmp_path.iterdir())


def change(folder: Path, **keys: Any) -> Path:
    export.to_hugging_face(random_model(), PLAIN, folder, max_positions=8)
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_bias": True}, "from_hugging_face: attention_bias must be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"vocab_size": None}, "config.json must state 'vocab_size'"),
        ({"head_dim": 16}, "head_dim must be hidden_size / num_attention_heads = 8, got 16"),
        ({"num_hidden_layers": 1}, "missing or unknown: layers.1.input_layernorm.weight, "),
        ({"vocab_size": 60}, r"embed_tokens.weight must have the shape \(60, 32\), got \(61, 32\)"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RopeError, match=message):
        export.from_hugging_face(change(tmp_path, **keys))
