"""Run the scripts in examples/ with few steps. Logits are compared with the oracle's, which has no cache."""

from __future__ import annotations

import copy
import importlib
import math
import random
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import attention_oracle
import checkpoint_files
import oracle
import ropewalk

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("small_gpt", "vit_two_sizes", "chat", "server")
DOUBLE = torch.float64


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """Import the scripts as Python does when it runs one of them: `small_gpt` is a module beside the others."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture
def printed(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs a script and returns what it prints."""

    def run(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
        scripts[name].main()
        return capsys.readouterr().out

    return run


def expected_logits(
    model: Any, tokens: list[int], at: tuple[Tensor, Tensor] | None = None, seen: Tensor | None = None
) -> Tensor:
    """Return the logits of a GPT after each token, [seq, vocabulary], from one pass without a cache, in float64.

    `at` and `seen` are as in `attention_oracle.attention`. None means consecutive positions and causality.
    """
    model = copy.deepcopy(model).double()
    rotary = attention_oracle.Rotary([float(w) for w in oracle.inv_freq(10_000.0, model.sizes["head_dim"])], "half")
    at = attention_oracle.pairs(torch.arange(len(tokens))) if at is None else at
    seen = attention_oracle.causal(len(tokens)) if seen is None else seen
    with torch.no_grad():
        x = model.embed(torch.tensor([tokens]))
        for block in model.blocks:
            weights, normed = dict(block.attention.named_parameters()), block.attention_norm(x)
            x = x + attention_oracle.attention(normed, weights, heads=4, kv_heads=2, rotary=rotary, at=at, seen=seen)
            x = x + block.down(nn.functional.gelu(block.up(block.mlp_norm(x))))
        return model.head(model.norm(x))[0]


def test_lengths() -> None:
    for name in (*NAMES, "gemm_fused"):
        lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
        assert len(lines) < (151 if name == "server" else 120)
        assert max(map(len, lines)) <= 100


def test_the_list_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert set(re.findall(r"^\| \[`(.+?)`\]\(\1\)", text, re.MULTILINE)) == files


class TestGPT:
    def test_trained(self, printed: Callable[..., str]) -> None:
        out = printed("small_gpt", "--steps", "100", "--count", "40", "--prompt", "A list ")
        (loss,) = re.findall(r"last ten steps: ([\d.]+) nats", out)
        assert float(loss) < 2.6  # without knowledge of the characters before, 3.0
        assert len(out.splitlines()[-1]) == len("A list ") + 40

    def test_samples_from_the_logits_of_the_whole_text(self, scripts: dict[str, ModuleType]) -> None:
        gpt = scripts["small_gpt"]
        model, prompt = gpt.GPT(30), torch.randint(30, (7,))
        torch.manual_seed(1)
        text = gpt.sample(model, prompt, 20)
        tokens = torch.cat((prompt, text))
        logits = expected_logits(model, tokens.tolist())
        torch.testing.assert_close(model(tokens[None])[0].double(), logits, rtol=0.0, atol=1e-5)  # measured: 2e-6
        torch.manual_seed(1)
        of_text = (logits[len(prompt) - 1 : -1] / 0.7).softmax(-1).float()
        assert text.tolist() == [int(each.multinomial(1)) for each in of_text]


def test_trained_vit(printed: Callable[..., str]) -> None:
    out = printed("vit_two_sizes", "--steps", "150", "--trained", "6", "--larger", "9")
    (small, right), (large, right_on_large) = re.findall(r"^(\d+ × \d+) pixels: (\d+)% right", out, re.MULTILINE)
    assert (small, large) == ("24 × 24", "36 × 36")
    assert int(right) >= 90
    assert int(right_on_large) >= 90


class TestChat:
    def test_trained(self, printed: Callable[..., str]) -> None:
        out = printed("chat", "--turns", "50")
        (with_sinks, name), (without, other) = re.findall(
            r"^\d sinks, (\d+) of 50 sums right, name: (.*)$", out, re.MULTILINE
        )
        assert int(with_sinks) >= 48
        assert int(without) >= 48
        assert name == "g"
        assert other != "g"
        assert re.findall(r"memory: ([\d,]+) bytes at first, ([\d,]+) now", out) == [("37,888",) * 2, ("36,864",) * 2]
        assert all(float(difference) < 1e-4 for difference in re.findall(r"difference .*: (\S+)$", out, re.MULTILINE))

    @pytest.mark.parametrize("sinks", [2, 0])
    def test_sees_the_sinks_and_the_window(self, scripts: dict[str, ModuleType], sinks: int) -> None:
        chat = scripts["chat"]
        talk = chat.Chat(chat.GPT(len(chat.CHARACTERS), hidden=64), "c\n", sinks)
        memory = talk.memory()
        for _ in range(12):
            talk.say(f"{random.randrange(5)}{random.randrange(5)}=")
        (tokens,) = chat.encode([talk.text]).tolist()
        assert len(tokens) > 2 * (chat.WINDOW + sinks)
        assert talk.memory() == memory
        assert talk.cache.keys[0].shape == (1, chat.WINDOW + sinks + 32, 2, 16)  # 31 for several new tokens
        at, seen = attention_oracle.streaming(len(tokens), chat.WINDOW, sinks)
        torch.testing.assert_close(
            talk.logits.double(), expected_logits(talk.model, tokens, at, seen)[-1], rtol=0.0, atol=1e-5
        )  # measured: 1e-6


class TestServer:
    def test_prints(self, printed: Callable[..., str]) -> None:
        assert "30 of 30 texts are those of the request alone" in printed("server")

    def test_equals_each_alone(self, scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
        server = scripts["server"]
        monkeypatch.setattr(server, "BLOCKS", 11)
        model, system = scripts["small_gpt"].GPT(50), list(range(20))  # a full block and four tokens
        serving = server.Server(model, system)
        requests = [server.Request(random.choices(range(50), k=30), count) for count in (30, 1, 17, 60, 25)]
        for request in requests:
            serving.submit(request)
        serving.step()
        assert serving.running == requests[:2]  # which may need 4 and 3 of 10 blocks, the third one 4
        assert all(request.blocks[0] == serving.system.blocks[0] for request in requests)  # the full block
        assert len(serving.free) == 8  # each of the two has read 8 tokens
        while serving.running:
            serving.step()
        assert len(set(serving.free)) == serving.unpromised == 10
        for request in requests:
            tokens = system + request.prompt + request.text
            likeliest = expected_logits(model, tokens)[-request.count - 1 : -1].argmax(-1)
            assert request.text == likeliest.tolist()
        serving.step()  # nothing to do

    def test_refuses_what_never_fits(self, scripts: dict[str, ModuleType]) -> None:
        serving = scripts["server"].Server(scripts["small_gpt"].GPT(50), list(range(20)))
        serving.submit(scripts["server"].Request([1], 16 * 39 - 5))  # 39 blocks, beside the one that it shares
        with pytest.raises(ValueError, match="may need 40 of 39 blocks"):
            serving.submit(scripts["server"].Request([1], 16 * 39 - 4))


class TestGemmFused:
    """quack needs a GPU. In its place stands what its documentation says (quack/epilogue/rotary.py, August 2026)."""

    @pytest.fixture
    def example(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        def interleaved_inv_freq(
            inv_freq: Tensor, rotary_n: int, nonrotary_n: int = 0, head_dim: int | None = None
        ) -> Tensor:
            """Columns 2j and 2j + 1 of each head: the frequency of pair j in turns, as a sum of two float32 numbers.

            The rest of a head, and the last nonrotary_n columns, have frequency 0.
            """
            turns = inv_freq.double() / (2 * math.pi)
            head = torch.zeros(head_dim or 2 * len(inv_freq))
            head[: 2 * len(inv_freq) : 2] = turns.float()
            head[1 : 2 * len(inv_freq) : 2] = (turns - turns.float()).float()
            return torch.cat((head.repeat(rotary_n // len(head)), torch.zeros(nonrotary_n)))

        def gemm(a: Tensor, b: Tensor, out: Tensor, *, epi_args: dict[str, Tensor]) -> None:
            """A [l, m, k] times the transposed B [l, n, k], rotated: (x1 cos θ − x2 sin θ, x1 sin θ + x2 cos θ).

            x1 and x2 are columns 2j and 2j + 1, and θ is the position of the row times the frequency of the pair.
            """
            pos, freq = epi_args["pos"], epi_args["freq"]
            assert pos.dtype == freq.dtype == torch.float32
            assert pos.shape == a.shape[:2]
            assert freq.shape == b.shape[:2]
            x1, x2 = (a @ b.mT).unflatten(-1, (-1, 2)).unbind(-1)
            theta = 2 * math.pi * pos.double()[:, :, None] * freq.double().unflatten(-1, (-1, 2)).sum(-1)[:, None]
            rotated = (x1 * theta.cos() - x2 * theta.sin(), x1 * theta.sin() + x2 * theta.cos())
            out.copy_(torch.stack(rotated, -1).flatten(-2))

        for name in ("quack", "quack.epilogue"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        rotary = ModuleType("quack.epilogue.rotary")
        vars(rotary).update(make_interleaved_inv_freq=interleaved_inv_freq, rope_posfreq_epi=SimpleNamespace(gemm=gemm))
        monkeypatch.setitem(sys.modules, "quack.epilogue.rotary", rotary)
        return runpy.run_path(str(EXAMPLES / "gemm_fused.py"))

    def test_scores_are_those_of_the_original_weights(self, example: dict[str, Any], tmp_path: Path) -> None:
        llama3 = {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = checkpoint_files.CONFIG | {
            "rope_theta": 500_000.0,
            "rope_scaling": {"rope_type": "llama3", **llama3},
            "max_position_embeddings": 131_072,
        }
        checkpoint_files.write_model(tmp_path / "half", config=config)
        checkpoint_files.run(tmp_path / "half", tmp_path / "interleaved", "--to", "interleaved")
        x = torch.randn(2, 3, 32, dtype=DOUBLE)
        positions = torch.tensor([[0, 1, 131_071], [7, 65_536, 100_000]])

        names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
        converted = load_file(tmp_path / "interleaved" / "model.safetensors")
        rope = ropewalk.from_config(tmp_path / "interleaved").rope
        operands = example["fuse"](rope, *(converted[name].double() for name in names))
        q, k, v = example["project"](x, *operands, positions).split((32, 16, 16), dim=-1)

        original = load_file(tmp_path / "half" / "model.safetensors")
        rotary = attention_oracle.Rotary([float(w) for w in oracle.by_parts(5e5, 8, 8.0, 1.0, 4.0, 8192)], "half")
        expected = [(x @ original[name].double().mT).unflatten(-1, (-1, 8)) for name in names]
        torch.testing.assert_close(v.unflatten(-1, (-1, 8)), expected[2])

        def scores(q: Tensor, k: Tensor) -> Tensor:
            return torch.einsum("bqhc,bkgc->bhgqk", q, k)

        # Two float32 numbers hold a frequency up to 2⁻⁴⁹ of it, so angles at 2¹⁷ up to 2⁻³² of a turn. Scores are at
        # most 223. One float32 number would be wrong by up to 2⁻⁸ of a turn.
        torch.testing.assert_close(
            scores(q.unflatten(-1, (-1, 8)), k.unflatten(-1, (-1, 8))),
            scores(*(rotary(part, positions) for part in expected[:2])),
            rtol=0.0,
            atol=1e-6,
        )

    @pytest.mark.parametrize(
        "rope",
        [
            ropewalk.Rope(8, 1e4, "half"),
            ropewalk.Rope(8, 1e4, "interleaved", rotary_dim=4, rotary_offset=4),
            ropewalk.Rope(8, 1e4, "interleaved", axes=ropewalk.Axes.axial((4, 4))),
            ropewalk.Rope(
                8, 1e4, "interleaved", scaling=ropewalk.YaRN(factor=4.0, original_max_position_embeddings=64)
            ),
        ],
        ids=("half", "offset", "axes", "yarn"),
    )
    def test_refuses_what_the_epilogue_cannot_do(self, example: dict[str, Any], rope: ropewalk.Rope) -> None:
        with pytest.raises(ValueError, match=r"neighbouring channels|YaRN"):
            example["fuse"](rope, *torch.zeros(3, 8, 8))
