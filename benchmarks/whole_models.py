"""Time whole models of transformers before and after `accelerate`. Run it on an idle machine.

    python benchmarks/whole_models.py                                         two models, about 20 minutes
    python benchmarks/whole_models.py --json benchmarks/results/whole-models-NAME.json
    python benchmarks/whole_models.py --models small --rounds 1 --tokens 64   a quick try

The models are two Llamas with random weights, in float32 and bfloat16. The tasks are a prefill, greedy decoding and a
training step. In each round, every task runs once with plain transformers and once after `accelerate`. The table shows
medians, the 10th and 90th percentiles, and the ratio of the medians. The last column is the share of time that
transformers spends in its rotation: in its function and, in the forward pass, its rotary module, as measured by
torch.profiler. No more than this share can be gained.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ropewalk.integrations.transformers import accelerate
from ropewalk.tools import bench
from ropewalk.tools.bench import DTYPES

MODELS = {
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
    "large": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
}


def model_of(name: str, dtype: torch.dtype) -> Any:
    """Build a model of MODELS with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **MODELS[name],
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        use_cache=True,
    )
    torch.manual_seed(0)
    config.dtype = dtype
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as from_pretrained does, so that inv_freq stays float32
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(previous)


def prefill(model: Any, ids: torch.Tensor) -> Callable[[], float]:
    """Return a function that processes a prompt and returns the seconds."""

    def run() -> float:
        with torch.no_grad():
            begin = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - begin

    return run


def decode(model: Any, ids: torch.Tensor, count: int) -> Callable[[], float]:
    """Return a function that decodes `count` tokens after a prompt, which is not timed, and returns the seconds."""
    import transformers

    def run() -> float:
        with torch.no_grad():
            cache = transformers.DynamicCache(config=model.config)
            step = model(ids, None, None, cache, use_cache=True, logits_to_keep=1)
            begin = time.perf_counter()
            for _ in range(count):
                token = step.logits[:, -1:].argmax(-1)
                step = model(token, None, None, cache, use_cache=True)  # by position: 5.24 renamed it
            return time.perf_counter() - begin

    return run


def training_step(model: Any, ids: torch.Tensor) -> Callable[[], float]:
    """Return a function that computes loss and gradients, and returns the seconds."""

    def run() -> float:
        model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return time.perf_counter() - begin

    return run


def without_dispatcher(run: Callable[[], float]) -> Callable[[], float]:
    """Wrap a run so that the modeling file has its original function, without the dispatcher of the other model."""
    import transformers.models.llama.modeling_llama as file

    def plain() -> float:
        dispatcher = file.apply_rotary_pos_emb
        file.apply_rotary_pos_emb = getattr(dispatcher, "ropewalk_original", dispatcher)
        try:
            return run()
        finally:
            file.apply_rotary_pos_emb = dispatcher

    return plain


def compare(before: Callable[[], float], after: Callable[[], float], options: argparse.Namespace) -> dict[str, Any]:
    """Run both once without timing, then alternately. Return their summaries, and the ratio of the medians."""
    before(), after()
    samples = bench.sample_alternately({"before": before, "after": after}, options.rounds, options.seconds)
    found: dict[str, Any] = {name: bench.summary(taken) for name, taken in samples.items()}
    return {**found, "ratio": found["after"]["median"] / found["before"]["median"]}


def cells(row: dict[str, Any]) -> str:
    """Format the beginning of a row of the table."""
    times = (f"{x['median']:.3f} ({x['p10']:.3f} to {x['p90']:.3f})" for x in (row["before"], row["after"]))
    return f"| {row['model']} | {row['dtype']} | {row['task']} | {' | '.join(times)} | {row['ratio']:.3f} |"


def share_of_rotation(model: Any, run: Callable[[], float]) -> float:
    """Measure the share of a run's time that transformers spends in its function and its rotary module."""
    import transformers.models.llama.modeling_llama as file

    dispatcher, rotary = file.apply_rotary_pos_emb, model.model.rotary_emb
    function, forward = getattr(dispatcher, "ropewalk_original", dispatcher), rotary.forward

    def annotate(call: Callable[..., Any]) -> Callable[..., Any]:
        def annotated(*args: Any, **kwargs: Any) -> Any:
            with record_function("rotation"):
                return call(*args, **kwargs)

        return annotated

    file.apply_rotary_pos_emb, rotary.forward = annotate(function), annotate(forward)
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function("whole"):
            run()
    finally:
        file.apply_rotary_pos_emb = dispatcher
        del rotary.forward
    spent = {event.key: event.cpu_time_total for event in profiled.key_averages()}
    return float(spent["rotation"] / spent["whole"])


def measure(name: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all tasks of a model in a dtype, and print and return their rows."""
    before, tokens, new = model_of(name, DTYPES[dtype]), options.tokens, options.new
    after = copy.deepcopy(before)
    accelerate(after)
    ids = torch.randint(0, 8192, (1, tokens), generator=torch.Generator().manual_seed(1))
    tasks: dict[str, Callable[[Any], Callable[[], float]]] = {
        f"prefill of {tokens}": lambda model: prefill(model, ids),
        f"{new} tokens after {tokens // 8}": lambda model: decode(model, ids[:, : tokens // 8], new),
        f"training step of {tokens // 2}": lambda model: training_step(model, ids[:, : tokens // 2]),
    }
    rows = []
    for task, prepare in tasks.items():
        row = {"model": name, "dtype": dtype, "task": task}
        row |= compare(without_dispatcher(prepare(before)), prepare(after), options)
        row["share_of_rotation"] = share_of_rotation(before, prepare(before))
        rows.append(row)
        print(f"{cells(row)} {100 * row['share_of_rotation']:.1f} % |", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.set_defaults(rounds=9, seconds=600.0)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args(arguments)
    out = harness.Results(options, rows=[])
    print("| model | dtype | task | transformers, s | ropewalk, s | ratio | rotation before |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        for dtype in options.dtypes:
            out.found["rows"] += measure(name, dtype, options)
            out.write()


if __name__ == "__main__":
    main()
