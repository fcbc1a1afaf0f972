"""Time whole models of transformers before and after `accelerate`. Run it on an idle machine.

    python benchmarks/whole_models.py                                         two models, about 20 minutes
    python benchmarks/whole_models.py --json benchmarks/results/whole-models-NAME.json
    python benchmarks/whole_models.py --models small --rounds 1 --tokens 64   a quick try

The models are two Llamas with random weights, in float32 and bfloat16. The tasks are a prefill, greedy decoding and a
training step. In each round, every task runs once with plain transformers and once after `accelerate`, and the order
alternates between rounds. The table shows medians, the 10th and 90th percentiles, and the ratio of the medians. The
last column is the share of time that transformers spends in its rotation: in its function and, in the forward pass, its
rotary module, as measured by torch.profiler. No more than this share can be gained.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ropewalk.integrations.transformers import accelerate

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
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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


def alternate(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Run both functions once without timing, then once in each round, in alternating order. Return all times."""
    first(), second()
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            times[which].append((first, second)[which]())
    return times


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


def summary(times: list[float]) -> dict[str, float]:
    """Return the median and the 10th and 90th percentiles, in seconds."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return {
        "median_s": statistics.median(ordered),
        "p10_s": ordered[tenth],
        "p90_s": ordered[len(ordered) - 1 - tenth],
    }


def measure(name: str, dtype: str, tokens: int, new: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all tasks of a model in a dtype, and print and return their rows."""
    before = model_of(name, DTYPES[dtype])
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
        first, second = alternate(without_dispatcher(prepare(before)), prepare(after), rounds)
        row = {"model": name, "dtype": dtype, "task": task, "rounds": rounds}
        row |= {"before": summary(first), "after": summary(second)}
        row["ratio"] = row["after"]["median_s"] / row["before"]["median_s"]
        row["share_of_rotation"] = share_of_rotation(before, prepare(before))
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    before, after = row["before"], row["after"]
    return (
        f"| {row['model']} | {row['dtype']} | {row['task']} "
        f"| {before['median_s']:.3f} ({before['p10_s']:.3f} to {before['p90_s']:.3f}) "
        f"| {after['median_s']:.3f} ({after['p10_s']:.3f} to {after['p90_s']:.3f}) "
        f"| {row['ratio']:.3f} | {100 * row['share_of_rotation']:.1f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    import transformers

    machine = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": platform.processor() or platform.machine(),
        "threads": options.threads,
        "load_at_start": os.getloadavg()[0],
    }
    print(machine)
    if machine["load_at_start"] > 0.5:
        print("Warning: the machine is busy, so these times are unreliable.")
    print("| model | dtype | task | transformers, s | ropewalk, s | ratio | rotation before |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for name in options.models:
        for dtype in options.dtypes:
            rows += measure(name, dtype, options.tokens, options.new, options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
