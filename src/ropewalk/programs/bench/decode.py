"""Tokens per second of a whole small model while it decodes: ropewalk's cache against those of transformers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ropewalk
from ropewalk._checks import error
from ropewalk.programs.bench.report import Report, Say, check_files


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model: those of Qwen 3 with 0.6 billion parameters, with fewer layers and a small vocabulary."""

    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 3072
    layers: int = 4
    vocabulary: int = 1000
    context: int = 1024


@dataclass(frozen=True)
class DecodeSettings:
    """What to measure.

    batches: rows that are decoded together. dtypes: of model and caches. rounds: decode steps of each contender that
    are timed. threads: PyTorch's; None leaves them. geometry: of the model.
    """

    batches: Sequence[int] = (1, 8)
    dtypes: Sequence[str] = ("float32", "bfloat16")
    rounds: int = 30
    threads: int | None = None
    geometry: Geometry = Geometry()


class Layer(torch.nn.Module):
    """A layer of Qwen 3, with the names of its parameters."""

    def __init__(self, size: Geometry) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(size.hidden, eps=1e-6)
        self.self_attn = ropewalk.RotaryAttention(
            size.hidden, size.heads, num_kv_heads=size.kv_heads, head_dim=size.head_dim, qk_norm=1e-6
        )
        self.post_attention_layernorm = torch.nn.RMSNorm(size.hidden, eps=1e-6)
        self.mlp = torch.nn.ModuleDict(
            {
                "gate_proj": torch.nn.Linear(size.hidden, size.mlp, bias=False),
                "up_proj": torch.nn.Linear(size.hidden, size.mlp, bias=False),
                "down_proj": torch.nn.Linear(size.mlp, size.hidden, bias=False),
            }
        )

    def forward(self, x: Tensor, rotation: Any, cache: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, cache=cache)
        h, mlp = self.post_attention_layernorm(x), self.mlp
        done: Tensor = x + mlp["down_proj"](torch.nn.functional.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))
        return done


class Model(torch.nn.Module):
    """Qwen 3 on ropewalk's attention."""

    def __init__(self, size: Geometry) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(size.vocabulary, size.hidden)
        self.layers = torch.nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = torch.nn.RMSNorm(size.hidden, eps=1e-6)

    def forward(self, tokens: Tensor, rotation: Any, step: Any) -> Tensor:
        """Logits of the last token, `[batch, vocabulary]`; the embedding is the output too."""
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotation, step.layer(i))
        return torch.nn.functional.linear(self.norm(x[:, -1]), self.embed_tokens.weight)


Step = Callable[[Tensor], Tensor]
"""One decode step: tokens `[batch, 1]` to logits `[batch, vocabulary]`."""


def run_decode(settings: DecodeSettings, say: Say, *, json_file: Path | None = None) -> dict[str, Any]:
    """Measure and report.

    The caches are filled with the same random keys and values for `context` tokens. Then each contender decodes one
    token in turn, and the medians of many such steps are compared. Only who gives the same logits is timed.

    Args:
        settings: what to measure.
        say: takes the lines of the report.
        json_file: gets everything as JSON.

    Returns:
        What JSON gets: date, machine, versions, settings, and rows with contender, dtype, batch and state. Those that
        are timed have seconds (median of a step), tokens_per_second, and ahead: their seconds over those of ropewalk.

    Raises:
        RopeError: transformers is missing, or the file cannot be written.
    """
    try:
        import transformers
    except ImportError as e:
        must, cure = "--decode compares with transformers", "pip install transformers, or leave --decode out."
        raise error("bench", must, f"no transformers ({e})", cure) from e
    check_files(json_file)
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads or threads)
    size = settings.geometry
    out = Report(asdict(settings), {"threads": torch.get_num_threads(), "rows": []}, say, json_file)
    out.introduce(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads",
        f"{size.layers} layers of hidden {size.hidden}, {size.heads} query heads, {size.kv_heads} key heads of "
        f"{size.head_dim}, MLP {size.mlp}; {size.context} tokens held",
    )
    try:
        with torch.no_grad():
            for dtype in settings.dtypes:
                model, theirs = models(size, getattr(torch, dtype))
                for batch in settings.batches:
                    steps = contenders(size, model, theirs, batch, getattr(torch, dtype))
                    rows = [
                        {"dtype": dtype, "batch": batch, **row} for row in measured(steps, size, batch, settings.rounds)
                    ]
                    out.found["rows"] += rows
                    _show(rows, say)
                    out.write()
    finally:
        torch.set_num_threads(threads)
    return out.found


def models(size: Geometry, dtype: torch.dtype) -> tuple[Model, Any]:
    """Ours, and transformers' Qwen 3 with the same weights, seeded."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2 * size.context,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Not .to(dtype), which would cast their inverse frequencies too.
        auto: Any = transformers.AutoModelForCausalLM
        theirs = auto.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    ours = Model(size).to(dtype).eval()
    ours.load_state_dict(theirs.model.state_dict(), assign=True)
    return ours, theirs


def contenders(size: Geometry, model: Model, theirs: Any, batch: int, dtype: torch.dtype) -> dict[str, Step]:
    """Each a decode step on a cache that holds `context` tokens: the same keys and values in all of them."""
    import transformers

    draw = torch.Generator().manual_seed(batch)
    shape = (batch, size.context, size.kv_heads, size.head_dim)
    held = [[torch.randn(shape, generator=draw).to(dtype) for _ in range(2)] for _ in range(size.layers)]
    rope = ropewalk.from_config(theirs.config.to_dict()).rope
    cache = ropewalk.KVCache(size.layers, batch, size.kv_heads, size.head_dim, capacity=2 * size.context, dtype=dtype)
    first = cache.step(size.context)
    for i, (k, v) in enumerate(held):
        first.layer(i).append(k, v)

    def ours(tokens: Tensor) -> Tensor:
        step = cache.step(1)
        logits: Tensor = model(tokens, step.rotation(rope), step)
        return logits

    def of_transformers(cache: Any) -> Step:
        for i, (k, v) in enumerate(held):
            cache.update(k.transpose(1, 2), v.transpose(1, 2), i)

        def step(tokens: Tensor) -> Tensor:
            logits: Tensor = theirs(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
            return logits

        return step

    return {
        "ropewalk, KVCache": ours,
        "transformers, DynamicCache": of_transformers(transformers.DynamicCache(config=theirs.config)),
        "transformers, StaticCache": of_transformers(
            transformers.StaticCache(config=theirs.config, max_cache_len=2 * size.context)
        ),
    }


def measured(steps: dict[str, Step], size: Geometry, batch: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each contender, in turn; the first step of each is compared and not timed."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(size.vocabulary, (rounds + 1, batch, 1), generator=draw)
    logits = {name: step(tokens[0]).double() for name, step in steps.items()}
    theirs = logits["transformers, DynamicCache"]
    spread = float(theirs.std())
    allowed = 1e-4 if next(iter(logits.values())).dtype == torch.float32 else 0.2
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    errors = {name: float((one - theirs).abs().max()) / spread for name, one in logits.items()}
    right = [name for name in steps if errors[name] <= allowed]
    for i in range(1, rounds + 1):
        for name in right:
            start = time.perf_counter()
            steps[name](tokens[i])
            seconds[name].append(time.perf_counter() - start)
    ours = statistics.median(seconds["ropewalk, KVCache"]) if seconds["ropewalk, KVCache"] else None
    rows: list[dict[str, Any]] = []
    for name in steps:
        if name not in right:
            rows.append({"contender": name, "state": "wrong", "error": errors[name], "allowed": allowed})
            continue
        median = statistics.median(seconds[name])
        ahead = None if ours is None else median / ours
        rows.append(
            {"contender": name, "state": "timed", "error": errors[name], "seconds": median}
            | {"tokens_per_second": batch / median, "ahead": ahead}
        )
    return rows


def _show(rows: Sequence[dict[str, Any]], say: Say) -> None:
    say("")
    say(f"{rows[0]['dtype']}, {rows[0]['batch']} rows")
    for row in rows:
        if row["state"] == "wrong":
            say(f"  {row['contender']:<28} wrong: error {row['error']:.1e}, allowed {row['allowed']:.1e}; not timed")
            continue
        line = f"  {row['contender']:<28} {row['tokens_per_second']:>8.1f} tokens/s  {1e3 * row['seconds']:>8.2f} ms"
        say(line if row["ahead"] is None else f"{line}  {row['ahead']:.2f} of ropewalk's time")
