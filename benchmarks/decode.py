"""Time decoding with the caches of ropewalk and of transformers: the attention of one layer, and a small model.

    python benchmarks/decode.py --rows 8 --held 8192 --dtypes bfloat16 --json benchmarks/results/NAME-decode.json

For each dtype and number of rows and of held tokens, all caches are filled with the same random keys and values. Then
the caches alternate in the attention of one layer, and in decoding single tokens with a small Qwen 3. A cache is not
timed if its first result is wrong: if its attention differs from one that is computed here in float64, or the logits of
the model from those of transformers with a DynamicCache. Stores of 8 bits may differ more. Latent rows, which the model
does not have, are in the attention only.

The results have the parts attention and model. A row's state is "timed", "wrong" or "too large". A timed row has times
of one call in seconds; in attention also times_read (the median divided by that of reading all keys and values once),
per_token (the median divided by the number of held tokens of all rows) and planning (the median seconds of planning a
step, or None); in model also tokens_per_second, and ahead (the median divided by that of ropewalk's KVCache, or None).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import torch
import transformers
from torch import Tensor

import ropewalk
from ropewalk.tools.bench import DTYPES, describe_time, sample_alternately, summary

KV, DYNAMIC, STATIC = "ropewalk, KVCache", "transformers, DynamicCache", "transformers, StaticCache"
STORES = {f"ropewalk, {store}": store for store in ("int8", "fp8")}
"""The store of each KVCache that keeps 8 bits for a number."""
LATENT = "ropewalk, latent rows"
"""A KVCache with the rows of multi-head latent attention, which the model does not have."""
OURS = (KV, *STORES, LATENT)
CACHES = (*OURS, DYNAMIC, STATIC)
READ = "read keys and values"  # the contender with which all others are compared: the fastest of READERS
READERS: tuple[Callable[[Tensor], object], ...] = (
    lambda x: x.view(torch.int64).sum(),
    lambda x: x.view(torch.float64).sum(),
    lambda x: x.view(torch.float32).dot(x.view(torch.float32)),
)
_MOST = 0.9  # share of the free memory that the caches may take
# Rounding to 8 bits gave errors up to 0.11 and 0.33, and a rotation for the previous position at least 0.54.
_ALLOWED_8_BITS = dict(zip(STORES, (0.2, 0.45), strict=True))

Attend = Callable[[list[float]], tuple[float, Tensor]]
"""One call of attention, which appends the seconds of planning the step to a list.

It returns the seconds of the call and the output `[batch, 1, heads, head_dim]`, or `[batch, 1, heads, latent]`.
"""
Step = Callable[[Tensor], Tensor]
"""One decode step, from tokens `[batch, 1]` to logits `[batch, vocabulary]`."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model, Qwen 3 0.6B with fewer layers and a small vocabulary, and of latent rows of DeepSeek V2 Lite.

    A row has at most as many channels as all key heads, and its last ones, which are not latent, are rotated.
    """

    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 3072
    layers: int = 4
    vocabulary: int = 1000
    row: int = 576
    latent: int = 512

    def config(self) -> Any:
        """Return the config of transformers for this model."""
        return transformers.Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=True,
        )


@dataclass(frozen=True)
class Fill:
    """The content of the caches.

    Args:
        size: the sizes of the model.
        batch: the number of rows, which hold equal keys and values.
        held: the number of tokens in each row.
        room: the number of tokens that can be added to each row.
        dtype: the dtype of keys and values.
    """

    size: Geometry
    batch: int
    held: int
    room: int
    dtype: torch.dtype

    @property
    def read_bytes(self) -> int:
        """The number of bytes of the held keys and values of one layer."""
        return 2 * self.batch * self.held * self.size.kv_heads * self.size.head_dim * self.dtype.itemsize

    def needed_bytes(self, names: Sequence[str]) -> int:
        """Return the number of bytes of these caches and of the copies that attention over them makes."""
        kept, copied = self.size.layers * self.read_bytes, self.read_bytes  # one layer at a time is copied
        small = kept * (self.size.head_dim + 4) // (self.size.head_dim * self.dtype.itemsize)  # with scales
        rows = kept * self.size.row // (2 * self.size.kv_heads * self.size.head_dim)
        sizes = {DYNAMIC: kept + copied, LATENT: rows, **dict.fromkeys(STORES, small + copied)}
        return sum(sizes.get(name, kept) for name in names) * (self.held + self.room) // self.held

    def draw(self) -> list[tuple[Tensor, Tensor]]:
        """Draw normally distributed keys and values of one row, `[1, held, kv_heads, head_dim]`, for each layer."""
        draw = torch.Generator().manual_seed(self.batch)
        shape = (1, self.held, self.size.kv_heads, self.size.head_dim)
        k, v = ([torch.randn(shape, generator=draw).to(self.dtype) for _ in range(self.size.layers)] for _ in range(2))
        return list(zip(k, v, strict=True))

    def latent_row(self, k: Tensor) -> Tensor:
        """Return keys `[..., kv_heads, head_dim]` as latent rows `[..., 1, row]`: the first channels of all heads."""
        return k.flatten(-2)[..., None, : self.size.row]

    def build(self, name: str, content: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Build the cache of this name, one of `CACHES`, in which each row holds `content`, the result of `draw`."""
        cache = self._makers()[name]()
        rows = [tuple(x.expand(self.batch, -1, -1, -1) for x in layer) for layer in content]
        if name in OURS:
            step = cache.step(self.held)
            for i, (k, v) in enumerate(rows):
                step.layer(i).append(*(self.latent_row(k),) if name == LATENT else (k, v))
        else:
            for i, (k, v) in enumerate(rows):
                cache.update(k.transpose(1, 2), v.transpose(1, 2), i)
        return cache

    def _makers(self) -> dict[str, Callable[[], Any]]:
        size, capacity = self.size, self.held + self.room
        heads = (size.kv_heads, size.head_dim)

        def whole(heads: tuple[int, int] = heads, **options: Any) -> ropewalk.KVCache:
            return ropewalk.KVCache(size.layers, self.batch, *heads, capacity=capacity, dtype=self.dtype, **options)

        return {
            KV: whole,
            **{name: partial(whole, store=store) for name, store in STORES.items()},
            LATENT: partial(whole, (1, size.row), latent=size.latent),
            DYNAMIC: lambda: transformers.DynamicCache(config=size.config()),
            STATIC: lambda: transformers.StaticCache(config=size.config(), max_cache_len=capacity),
        }


def build_attention(
    fill: Fill, names: Sequence[str]
) -> tuple[dict[str, Attend], list[Callable[[], float]], dict[str, Tensor]]:
    """Build a call of attention over each of the named caches, of a size with one layer.

    A call adds one token to the cache. For ropewalk, it includes the rotation of this token, for transformers it does
    not. What a model does once for all layers is not part of it: the plan of the step, cos and sin, and the mask of the
    StaticCache.

    Returns:
        The calls, functions that each return the seconds of reading the held keys and values once, and the outputs
        that the calls must give at first, float64.
    """
    size, draw = fill.size, torch.Generator().manual_seed(0)
    rope = ropewalk.Rope(head_dim=size.head_dim, base=10_000.0, pairing="half")
    q, k, v = (
        torch.randn(fill.batch, 1, heads, size.head_dim, generator=draw).to(fill.dtype)
        for heads in (size.heads, size.kv_heads, size.kv_heads)
    )
    row, row_q = fill.latent_row(k), torch.randn(fill.batch, 1, size.heads, size.row, generator=draw).to(fill.dtype)
    rotated_part: Any = {"rotary_dim": size.row - size.latent, "rotary_offset": size.latent}
    row_rope = ropewalk.Rope(size.row, 10_000.0, "interleaved", **rotated_part)

    def with_ropewalk(cache: Any, rope: ropewalk.Rope, *inputs: Tensor, scale: float | None = None) -> Attend:
        def attend(planning: list[float]) -> tuple[float, Tensor]:
            begun = time.perf_counter()
            step = cache.step(1)
            planning.append(time.perf_counter() - begun)
            rotation, layer = step.rotation(rope), step.layer(0)
            start = time.perf_counter()
            output = layer.attend(*inputs, rotation=rotation, scale=scale)
            return time.perf_counter() - start, output

        return attend

    def with_transformers(cache: Any, capacity: int | None) -> Attend:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attention: Any = sdpa_attention_forward
        groups = SimpleNamespace(num_key_value_groups=size.heads // size.kv_heads, is_causal=True)

        def attend(planning: list[float]) -> tuple[float, Tensor]:
            position = int(cache.get_seq_length())
            q1, k1 = (x.transpose(1, 2) for x in rope.at(torch.tensor([position]))(q, k, layout="bshd"))
            mask = None if capacity is None else (torch.arange(capacity) <= position)[None, None, None]
            start = time.perf_counter()
            keys, values = cache.update(k1, v.transpose(1, 2), 0)
            output: Tensor = attention(groups, q1, keys, values, mask, scaling=size.head_dim**-0.5)[0]
            return time.perf_counter() - start, output

        return attend

    content = fill.draw()
    ((keys, values),) = content
    position = torch.tensor([fill.held])
    rotated = rope.at(position)(q, k, layout="bshd")
    expected = dict.fromkeys(names, _attend(*rotated, v, keys, values))
    rotated, rows = row_rope.at(position)(row_q, row, layout="bshd"), fill.latent_row(keys)
    expected[LATENT] = _attend(*rotated, row[..., : size.latent], rows, rows[..., : size.latent])
    calls: dict[str, Attend] = {}
    memory: list[Tensor] = []
    for name in names:
        cache = fill.build(name, content)
        if name == LATENT:
            calls[name] = with_ropewalk(cache, row_rope, row_q, row, scale=size.row**-0.5)
        elif name in OURS:
            if name == KV:
                memory = memory or [cache.keys[0], cache.values[0]]
            calls[name] = with_ropewalk(cache, rope, q, k, v)
        else:
            memory = memory or [cache.layers[0].keys, cache.layers[0].values]
            calls[name] = with_transformers(cache, fill.held + fill.room if name == STATIC else None)
    memory = memory or [x.repeat(fill.batch, 1, 1, 1) for x in (keys, values)]
    numbers = [x.flatten()[: keys.numel() * fill.batch] for x in memory]

    def read(reader: Callable[[Tensor], object]) -> float:
        start = time.perf_counter()
        for x in numbers:
            reader(x)
        return time.perf_counter() - start

    return calls, [partial(read, reader) for reader in READERS], expected


def _attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention of one token of each row over the held keys and values and its own, in float64.

    q is `[batch, 1, heads, head_dim]`, k and v are `[batch, 1, kv_heads, ...]`, and keys and values, which are the same
    in every row, `[1, held, kv_heads, ...]`. The result is `[batch, 1, heads, channels of v]`.
    """
    rows = []
    for q1, k1, v1 in zip(q, k, v, strict=True):
        all_keys, all_values = (torch.cat(pair).double() for pair in ((keys[0], k1), (values[0], v1)))
        grouped = q1.double().view(k.shape[2], -1, q.shape[-1])
        weights = (torch.einsum("hgd,khd->hgk", grouped, all_keys) * q.shape[-1] ** -0.5).softmax(-1)
        rows.append(torch.einsum("hgk,khd->hgd", weights, all_values).reshape(1, q.shape[2], -1))
    return torch.stack(rows)


class Model(torch.nn.Module):
    """The Qwen 3 of transformers with ropewalk's attention instead of its own, and the same weights."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.reference, config = reference, reference.config
        heads, kv_heads, norm = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
        options = {"num_kv_heads": kv_heads, "head_dim": config.head_dim, "qk_norm": norm}
        own = [ropewalk.RotaryAttention(config.hidden_size, heads, **options) for _ in reference.model.layers]
        for attention, layer in zip(own, reference.model.layers, strict=True):
            attention.load_state_dict(layer.self_attn.state_dict(), assign=True)
        self.attentions = torch.nn.ModuleList(own)

    def forward(self, tokens: Tensor, rotation: ropewalk.Rotation, *, cache: Any = None) -> Tensor:
        """Compute the logits after each token, `[batch, seq, vocabulary]`. `cache` is a step of a cache of ropewalk."""
        model = self.reference.model
        x = model.embed_tokens(tokens)
        for i, (layer, attention) in enumerate(zip(model.layers, self.attentions, strict=True)):
            x = x + attention(layer.input_layernorm(x), rotation, cache=None if cache is None else cache.layer(i))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.reference.lm_head(model.norm(x))


def build_models(size: Geometry, dtype: torch.dtype) -> tuple[Model, Any]:
    """Build transformers' Qwen 3 with seeded weights, and the same model with ropewalk's attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Not .to(dtype), which would also cast the inverse frequencies of transformers.
        auto: Any = transformers.AutoModelForCausalLM
        reference = auto.from_config(size.config(), dtype=dtype, attn_implementation="sdpa").eval()
    return Model(reference), reference


def build_steps(
    fill: Fill, names: Sequence[str], models: tuple[Model, Any], tokens: Tensor
) -> tuple[dict[str, Step], Tensor]:
    """Build a decode step for each of the named caches.

    Returns:
        The steps, and the logits that each must give for `tokens` `[batch, 1]` at first: those of transformers with a
        DynamicCache, computed row by row.
    """
    model, reference = models
    rope = ropewalk.from_config(reference.config.to_dict()).rope
    content = fill.draw()

    def with_ropewalk(cache: Any) -> Step:
        is_first = True

        def step(tokens: Tensor) -> Tensor:
            nonlocal is_first
            planned = cache.step(1)
            # The first step is checked and not timed. It has the angles of transformers, which are less exact than
            # ropewalk's at far positions: the difference would show in the logits.
            rotation = rope.at(planned.positions, numerics="float32") if is_first else planned.rotation(rope)
            is_first = False
            return model(tokens, rotation, cache=planned)[:, -1]

        return step

    def with_transformers(cache: Any) -> Step:
        def step(tokens: Tensor) -> Tensor:
            # By position: transformers 5.24 renamed this argument.
            return reference(tokens, None, None, cache, use_cache=True).logits[:, -1]

        return step

    one_row = Fill(fill.size, 1, fill.held, fill.room, fill.dtype).build(DYNAMIC, content)
    expected = []
    for row in tokens[:, None]:
        expected.append(with_transformers(one_row)(row))
        one_row.crop(-1)
    caches = {name: fill.build(name, content) for name in names}
    steps = {name: (with_ropewalk if name in OURS else with_transformers)(cache) for name, cache in caches.items()}
    return steps, torch.cat(expected)


def measure_attention(fill: Fill, names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    calls, reads, expected = build_attention(fill, names)
    planning: dict[str, list[float]] = {name: [] for name in calls}
    first = {name: call(planning[name])[1] for name, call in calls.items()}
    rows = _check(first, expected)
    samplers = {
        row["contender"]: _first_of(calls[row["contender"]], planning[row["contender"]]) for row in _timed(rows)
    }
    samplers |= {f"{READ} {i}": read for i, read in enumerate(reads)}
    samples = sample_alternately(samplers, options.rounds, options.seconds)
    samples[READ] = min((samples[f"{READ} {i}"] for i in range(len(reads))), key=lambda x: summary(x)["median"])
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


def measure_model(
    fill: Fill, names: Sequence[str], options: argparse.Namespace, *, models: Any
) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(fill.size.vocabulary, (options.rounds + 1, fill.batch, 1), generator=draw)
    steps, expected = build_steps(fill, names, models, tokens[0])
    rows = _check({name: step(tokens[0]) for name, step in steps.items()}, dict.fromkeys(steps, expected))
    samplers = {row["contender"]: _time(steps[row["contender"]], iter(tokens[1:])) for row in _timed(rows)}
    samples = sample_alternately(samplers, options.rounds, options.seconds)
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
        rows.append({"contender": name, "error": gap if math.isfinite(gap) else str(gap), **state})
    return rows


def _timed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["state"] == "timed"]


def show(part: str, fill: Fill, rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    rows_held = f"{first['batch']} row{'s' if first['batch'] > 1 else ''} x {first['held']:,} held tokens"
    what = f"{rows_held}, {first['dtype']}: {fill.size.layers * fill.read_bytes / 1e6:,.1f} MB of keys and values"
    print()
    if part == "attention":
        print(f"attention of one layer, {what}")
        print(f"  {'':<28} {'median':>10}  {'x reading':>9}  {'per held token':>14}  {'planning':>10}")
    else:
        print(f"model of {fill.size.layers} layers, {what}")
        print(f"  {'':<28} {'median':>10}  {'x ropewalk':>10}  {'tokens/s':>9}")
    for row in rows:
        print(f"  {row['contender']:<28} {_line(part, row)}")


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


def too_large(fill: Fill, names: Sequence[str], free: int | None) -> list[dict[str, Any]]:
    """Return rows without times if the caches need more memory than the machine has, else an empty list."""
    needed = fill.needed_bytes(names)
    if free is None or needed <= _MOST * free:
        return []
    return [{"contender": name, "state": "too large", "needed": needed, "free": free} for name in names]


def free_memory() -> int | None:
    """Return the bytes of memory that programs can still get, or None if the system does not say it as Linux does."""
    file = Path("/proc/meminfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def main(arguments: list[str] | None = None, size: Geometry = Geometry()) -> dict[str, Any]:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="rows that are decoded together (1 8)")
    parser.add_argument("--held", type=int, nargs="+", default=[1024], help="tokens that each row holds (1024)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args(arguments)
    names = harness.select(CACHES, options.only)
    out = harness.Results(options, threads=options.threads, attention=[], model=[])
    with torch.no_grad():
        for dtype in options.dtypes:
            models = build_models(size, DTYPES[dtype])
            for batch, held in ((batch, held) for held in options.held for batch in options.rows):
                fill = Fill(size, batch, held, max(128, options.rounds + 1), DTYPES[dtype])
                of_model = [name for name in names if name != LATENT]
                kinds = (
                    ("attention", measure_attention, names),
                    ("model", partial(measure_model, models=models), of_model),
                )
                for part, measure, named in kinds:
                    if named:
                        one = replace(fill, size=replace(size, layers=1)) if part == "attention" else fill
                        rows = too_large(one, named, free_memory()) or measure(one, named, options)
                        rows = [{"dtype": dtype, "batch": batch, "held": held, **row} for row in rows]
                        out.found[part] += rows
                        show(part, one, rows)
                        out.write()
    return out.found


if __name__ == "__main__":
    main()
