"""Benchmark decoding with the caches of ropewalk and of transformers: the attention of one layer, and a small model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk._checks import error
from ropewalk.tools.bench import machine
from ropewalk.tools.bench.decode_attention import READ, build_attention
from ropewalk.tools.bench.decode_caches import CACHES, KV, LATENT, STORES, Fill, Geometry
from ropewalk.tools.bench.decode_model import Step, build_models, build_steps
from ropewalk.tools.bench.measure import sample_alternately, summary, to_json_number
from ropewalk.tools.bench.report import Report, Say, describe_time, select

_MOST = 0.9  # share of the free memory that the caches may take
# Rounding to 8 bits gave errors up to 0.11 and 0.33, and a rotation for the previous position at least 0.54.
_ALLOWED_8_BITS = dict(zip(STORES, (0.2, 0.45), strict=True))


@dataclass(frozen=True)
class DecodeSettings:
    """Settings of the decoding benchmark.

    Args:
        rows: the numbers of rows that are decoded together.
        held: the numbers of tokens that each row of the caches holds at first.
        dtypes: the dtypes of model and caches.
        only: parts of the names of caches to measure. Empty means all.
        rounds, seconds: as in `measure.rows`.
        threads: the number of PyTorch's threads. None leaves it unchanged.
        room: the least number of tokens that a KVCache and a StaticCache can hold beyond `held`.
        geometry: the sizes of the model.
    """

    rows: Sequence[int] = (1, 8)
    held: Sequence[int] = (1024,)
    dtypes: Sequence[str] = ("float32", "bfloat16")
    only: Sequence[str] = ()
    rounds: int = 30
    seconds: float = 30.0
    threads: int | None = None
    room: int = 128
    geometry: Geometry = field(default_factory=Geometry)


def run_decode(settings: DecodeSettings, say: Say, *, json_file: Path | None = None) -> dict[str, Any]:
    """Run the benchmark and report the results.

    For each dtype and number of rows and of held tokens, all caches are filled with the same random keys and values.
    Then the caches alternate in the attention of one layer, and in decoding single tokens with a small model. A cache
    is not timed if its first result is wrong: if its attention differs from one that is computed here in float64, or
    the logits of the model from those of transformers with a DynamicCache. Stores of 8 bits may differ more. Latent
    rows, which the model does not have, are in the attention only.

    Args:
        settings: what to measure.
        say: called with each line of the report.
        json_file: file for the results as JSON.

    Returns:
        The content of the JSON file: date, machine, versions, settings, threads, attention and model. The last two are
        lists of rows. Every row has dtype, batch, held, contender, state ("timed", "wrong" or "too large") and, unless
        it is too large, error. A timed row also has the entries of `measure.summary`, in seconds of one call; in
        attention also times_read (the median divided by that of reading all keys and values once), per_token (the
        median divided by the number of held tokens of all rows) and planning (the median seconds of planning a step,
        or None); in model also tokens_per_second, and ahead (the median divided by that of ropewalk's KVCache, or
        None). A wrong row has allowed. A row that is too large has needed and free, in bytes.

    Raises:
        RopeError: transformers is missing, or `only` names no cache.
        OSError: the file cannot be written.
    """
    try:
        import transformers
    except ImportError as e:
        must, fix = "--decode needs transformers", "Run pip install transformers, or omit --decode."
        raise error("bench", must, f"no transformers ({e})", fix) from e
    names = select(CACHES, settings.only, "a cache")
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads or threads)
    size = settings.geometry
    parts = {"threads": torch.get_num_threads(), "attention": [], "model": []}
    out = Report(asdict(settings), parts, say, json_file)
    out.introduce(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads",
        f"{size.heads} query heads, {size.kv_heads} key heads of {size.head_dim}; the model has {size.layers} layers "
        f"of hidden {size.hidden}, MLP {size.mlp}; latent rows have {size.row} channels",
    )
    try:
        with torch.no_grad():
            for dtype in settings.dtypes:
                models = build_models(size, getattr(torch, dtype))
                for batch, held in ((batch, held) for held in settings.held for batch in settings.rows):
                    fill = Fill(size, batch, held, max(settings.room, settings.rounds + 1), getattr(torch, dtype))
                    of_model = [name for name in names if name != LATENT]
                    kinds = (("attention", _attention, names), ("model", partial(_model, models=models), of_model))
                    for part, measure, named in kinds:
                        if not named:
                            continue
                        one = replace(fill, size=replace(size, layers=1)) if part == "attention" else fill
                        rows = _too_large(one, named) or measure(one, named, settings)
                        rows = [{"dtype": dtype, "batch": batch, "held": held, **row} for row in rows]
                        out.found[part] += rows
                        _show(part, one, rows, say)
                        out.write()
    finally:
        torch.set_num_threads(threads)
    return out.found


def _too_large(fill: Fill, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows without times if the caches need more memory than the machine has, else an empty list."""
    needed, free = fill.needed_bytes(names), machine.free_memory()
    if free is None or needed <= _MOST * free:
        return []
    return [{"contender": name, "state": "too large", "needed": needed, "free": free} for name in names]


def _attention(fill: Fill, names: Sequence[str], settings: DecodeSettings) -> list[dict[str, Any]]:
    calls, read, expected = build_attention(fill, names)
    planning: dict[str, list[float]] = {name: [] for name in calls}
    first = {name: call(planning[name])[1] for name, call in calls.items()}
    rows = _check(first, expected)
    samplers = {
        row["contender"]: _first_of(calls[row["contender"]], planning[row["contender"]]) for row in _timed(rows)
    }
    samples = sample_alternately({READ: read, **samplers}, settings.rounds, settings.seconds)
    rows.insert(0, {"contender": READ, "state": "timed", "error": 0.0})
    floor = summary(samples[READ])["median"]
    for row in _timed(rows):
        found = summary(samples[row["contender"]])
        times = planning.get(row["contender"])
        ratios = {"times_read": found["median"] / floor, "per_token": found["median"] / (fill.batch * fill.held)}
        row.update(found | ratios | {"planning": summary(times)["median"] if times else None})
    return rows


def _first_of(call: Callable[[list[float]], tuple[float, Tensor]], planning: list[float]) -> Callable[[], float]:
    return lambda: call(planning)[0]


def _model(fill: Fill, names: Sequence[str], settings: DecodeSettings, *, models: Any) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(fill.size.vocabulary, (settings.rounds + 1, fill.batch, 1), generator=draw)
    steps, expected = build_steps(fill, names, models, tokens[0])
    rows = _check({name: step(tokens[0]) for name, step in steps.items()}, dict.fromkeys(steps, expected))
    samplers = {row["contender"]: _time(steps[row["contender"]], iter(tokens[1:])) for row in _timed(rows)}
    samples = sample_alternately(samplers, settings.rounds, settings.seconds)
    found = {name: summary(taken) for name, taken in samples.items()}
    ours = found[KV]["median"] if KV in found else None
    for row in _timed(rows):
        median = found[row["contender"]]["median"]
        ratios = {"tokens_per_second": fill.batch / median, "ahead": None if ours is None else median / ours}
        row.update(found[row["contender"]] | ratios)
    return rows


def _time(step: Step, tokens: Iterator[Tensor]) -> Callable[[], float]:
    """Return a function that makes the step with the next tokens, and returns its seconds."""

    def sample() -> float:
        now = next(tokens)
        start = time.perf_counter()
        step(now)
        return time.perf_counter() - start

    return sample


def _check(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return a row for each result, with its largest error relative to the standard deviation of what is expected."""
    rows = []
    for name, result in results.items():
        allowed = _ALLOWED_8_BITS.get(name, 1e-4 if result.dtype == torch.float32 else 0.2)
        right = expected[name].double()
        gap = float((result.double() - right).abs().max() / right.std())
        state = {"state": "timed"} if gap <= allowed else {"state": "wrong", "allowed": allowed}
        rows.append({"contender": name, "error": to_json_number(gap), **state})
    return rows


def _timed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["state"] == "timed"]


def _show(part: str, fill: Fill, rows: Sequence[dict[str, Any]], say: Say) -> None:
    first = rows[0]
    rows_held = f"{first['batch']} row{'s' if first['batch'] > 1 else ''} x {first['held']:,} held tokens"
    what = f"{rows_held}, {first['dtype']}: {fill.size.layers * fill.read_bytes / 1e6:,.1f} MB of keys and values"
    say("")
    if part == "attention":
        say(f"attention of one layer, {what}")
        say(f"  {'':<28} {'median':>10}  {'x reading':>9}  {'per held token':>14}  {'planning':>10}")
    else:
        say(f"model of {fill.size.layers} layers, {what}")
        say(f"  {'':<28} {'median':>10}  {'x ropewalk':>10}  {'tokens/s':>9}")
    for row in rows:
        say(f"  {row['contender']:<28} {_line(part, row)}")


def _line(part: str, row: dict[str, Any]) -> str:
    if row["state"] == "too large":
        needed, free = math.ceil(row["needed"] / 2**30), row["free"] // 2**30
        return f"not timed: the caches need {needed} GiB, {free} GiB are free. Name fewer caches with --only."
    if row["state"] == "wrong":
        return f"wrong: error {float(row['error']):.1e}, allowed {row['allowed']:.1e}; not timed"
    median = f"{describe_time(row['median']):>10}"
    if part == "model":
        ahead = "" if row["ahead"] is None else f"{row['ahead']:.2f}"
        return f"{median}  {ahead:>10}  {row['tokens_per_second']:>9.1f}"
    planning = "" if row["planning"] is None else describe_time(row["planning"])
    return f"{median}  {row['times_read']:>9.2f}  {1e9 * row['per_token']:>11.1f} ns  {planning:>10}"
