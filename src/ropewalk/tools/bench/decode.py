"""Benchmark the decoding of a small model with the caches of ropewalk and of transformers, in tokens per second."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ropewalk
from ropewalk._checks import error
from ropewalk.tools.bench.measure import sample_alternately
from ropewalk.tools.bench.report import Report, Say
from ropewalk.tools.lab.model import Block, LanguageModel, Size


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model, Qwen 3 0.6B with fewer layers and a small vocabulary, and the number of cached tokens."""

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
    """Settings of the decoding benchmark.

    Args:
        batches: the numbers of rows that are decoded together.
        dtypes: the dtypes of model and caches.
        rounds: the number of timed decode steps of each contender.
        threads: the number of PyTorch's threads. None leaves it unchanged.
        geometry: the sizes of the model.
    """

    batches: Sequence[int] = (1, 8)
    dtypes: Sequence[str] = ("float32", "bfloat16")
    rounds: int = 30
    threads: int | None = None
    geometry: Geometry = Geometry()


Step = Callable[[Tensor], Tensor]
"""One decode step, from tokens `[batch, 1]` to logits `[batch, vocabulary]`."""


def run_decode(settings: DecodeSettings, say: Say, *, json_file: Path | None = None) -> dict[str, Any]:
    """Run the benchmark and report the results.

    The contenders are ropewalk with its `KVCache`, and transformers with its DynamicCache and its StaticCache. All
    caches are filled with the same random keys and values for `geometry.context` tokens. Then the contenders alternate
    in decoding single tokens, and the median times of their steps are compared. A contender is not timed if its logits
    differ from those with the DynamicCache.

    Args:
        settings: what to measure.
        say: called with each line of the report.
        json_file: file for the results as JSON.

    Returns:
        The content of the JSON file: date, machine, versions, settings, and rows. Every row has contender, dtype,
        batch, state ("timed" or "wrong") and error. A timed row also has seconds (the median of a step),
        tokens_per_second, and ahead (its seconds divided by those of ropewalk). A wrong row has allowed.

    Raises:
        RopeError: transformers is missing.
        OSError: the file cannot be written.
    """
    try:
        import transformers
    except ImportError as e:
        must, fix = "--decode needs transformers", "Run pip install transformers, or omit --decode."
        raise error("bench", must, f"no transformers ({e})", fix) from e
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads or threads)
    size = settings.geometry
    out = Report(asdict(settings), {"threads": torch.get_num_threads(), "rows": []}, say, json_file)
    out.introduce(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads",
        f"{size.layers} layers of hidden {size.hidden}, {size.heads} query heads, {size.kv_heads} key heads of "
        f"{size.head_dim}, MLP {size.mlp}; {size.context} cached tokens",
    )
    try:
        with torch.no_grad():
            for dtype in settings.dtypes:
                model, reference = build_models(size, getattr(torch, dtype))
                for batch in settings.batches:
                    steps = build_steps(size, model, reference, batch, getattr(torch, dtype))
                    rows = [
                        {"dtype": dtype, "batch": batch, **row}
                        for row in time_steps(steps, size, batch, settings.rounds)
                    ]
                    out.found["rows"] += rows
                    _show(rows, say)
                    out.write()
    finally:
        torch.set_num_threads(threads)
    return out.found


def build_models(size: Geometry, dtype: torch.dtype) -> tuple[LanguageModel, Any]:
    """Build ropewalk's model and transformers' Qwen 3 with the same seeded weights."""
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
        # Not .to(dtype), which would also cast the inverse frequencies of transformers.
        auto: Any = transformers.AutoModelForCausalLM
        reference = auto.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        ours = LanguageModel(
            Size(size.vocabulary, size.hidden, size.mlp, size.layers, size.heads, size.kv_heads, tied=True)
        )
    for module in ours.modules():
        if isinstance(module, Block):  # heads of another size, with norms
            module.self_attn = ropewalk.RotaryAttention(
                size.hidden, size.heads, num_kv_heads=size.kv_heads, head_dim=size.head_dim, qk_norm=config.rms_norm_eps
            )
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = config.rms_norm_eps
    head = {"lm_head.weight": reference.lm_head.weight}
    ours.to(dtype).load_state_dict({**reference.model.state_dict(), **head}, assign=True)
    ours.lm_head.weight = ours.embed_tokens.weight
    return ours.eval(), reference


def build_steps(
    size: Geometry, model: LanguageModel, reference: Any, batch: int, dtype: torch.dtype
) -> dict[str, Step]:
    """Build a decode step for each cache. All caches hold the same keys and values of `context` tokens."""
    import transformers

    draw = torch.Generator().manual_seed(batch)
    shape = (batch, size.context, size.kv_heads, size.head_dim)
    cached = [[torch.randn(shape, generator=draw).to(dtype) for _ in range(2)] for _ in range(size.layers)]
    rope = ropewalk.from_config(reference.config.to_dict()).rope
    cache = ropewalk.KVCache(size.layers, batch, size.kv_heads, size.head_dim, capacity=2 * size.context, dtype=dtype)
    first = cache.step(size.context)
    for i, (k, v) in enumerate(cached):
        first.layer(i).append(k, v)

    def ours(tokens: Tensor) -> Tensor:
        step = cache.step(1)
        logits: Tensor = model(tokens, step.rotation(rope), cache=step)
        return logits[:, -1]

    def transformers_step(cache: Any) -> Step:
        for i, (k, v) in enumerate(cached):
            cache.update(k.transpose(1, 2), v.transpose(1, 2), i)

        def step(tokens: Tensor) -> Tensor:
            logits: Tensor = reference(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
            return logits

        return step

    return {
        "ropewalk, KVCache": ours,
        "transformers, DynamicCache": transformers_step(transformers.DynamicCache(config=reference.config)),
        "transformers, StaticCache": transformers_step(
            transformers.StaticCache(config=reference.config, max_cache_len=2 * size.context)
        ),
    }


def time_steps(steps: dict[str, Step], size: Geometry, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Time the steps alternately and return a row for each contender. The first step is checked, not timed."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(size.vocabulary, (rounds + 1, batch, 1), generator=draw)
    first = {name: step(tokens[0]) for name, step in steps.items()}
    allowed = 1e-4 if first["transformers, DynamicCache"].dtype == torch.float32 else 0.2
    logits = {name: result.double() for name, result in first.items()}
    expected = logits["transformers, DynamicCache"]
    spread = float(expected.std())
    errors = {name: float((result - expected).abs().max()) / spread for name, result in logits.items()}
    correct = [name for name in steps if errors[name] <= allowed]
    samples = sample_alternately({name: _timed(steps[name], iter(tokens[1:])) for name in correct}, rounds, math.inf)
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    ours = medians.get("ropewalk, KVCache")
    rows: list[dict[str, Any]] = []
    for name, gap in errors.items():
        if name not in correct:
            rows.append({"contender": name, "state": "wrong", "error": gap, "allowed": allowed})
            continue
        ahead = None if ours is None else medians[name] / ours
        rows.append(
            {"contender": name, "state": "timed", "error": gap, "seconds": medians[name]}
            | {"tokens_per_second": batch / medians[name], "ahead": ahead}
        )
    return rows


def _timed(step: Step, tokens: Iterator[Tensor]) -> Callable[[], float]:
    """Return a function that makes the step with the next tokens, and returns its seconds."""

    def sample() -> float:
        now = next(tokens)
        start = time.perf_counter()
        step(now)
        return time.perf_counter() - start

    return sample


def _show(rows: Sequence[dict[str, Any]], say: Say) -> None:
    say("")
    say(f"{rows[0]['dtype']}, {rows[0]['batch']} rows")
    for row in rows:
        if row["state"] == "wrong":
            say(f"  {row['contender']:<28} wrong: error {row['error']:.1e}, allowed {row['allowed']:.1e}; not timed")
            continue
        line = f"  {row['contender']:<28} {row['tokens_per_second']:>8.1f} tokens/s  {1e3 * row['seconds']:>8.2f} ms"
        say(line if row["ahead"] is None else f"{line}  {row['ahead']:.2f} x ropewalk's time")
