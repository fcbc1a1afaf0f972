"""A model of two layers with a KVCache, and the same model written out in float64, for the tests of the cache."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import attention_oracle as written_out
import oracle
from attention_oracle import Rotary
from ropewalk import (
    CacheStep,
    KVCache,
    Rope,
    RotaryAttention,
    Rotation,
    SelfExtend,
    TwoPass,
    YaRN,
    attention,
    cache,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 12, 4, 2, 6, 2
YARN_FACTOR = 0.1 * 1.3862943611198906 + 1
ROPES: dict[str, tuple[Rope | None, Rotary | None]] = {
    "default": (Rope(HEAD_DIM, 1e4, "half"), Rotary(oracle.inv_freq(1e4, HEAD_DIM), "half")),
    "YaRN, partial": (
        Rope(HEAD_DIM, 1e2, "interleaved", rotary_dim=4, rotary_offset=2, scaling=YaRN(4, 32)),
        Rotary(oracle.yarn(1e2, 4, 4, 32), "interleaved", offset=2, factor=YARN_FACTOR),
    ),
    "none": (None, None),
}
# Measured: 2e-15 in values of size 5, and with five shifts 5e-15.
EXACT: dict[str, Any] = {"rtol": 0, "atol": 3e-14}


def model() -> list[RotaryAttention]:
    torch.manual_seed(0)
    layers = [RotaryAttention(HIDDEN, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM).double() for _ in range(LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return layers


MODEL = model()


def cache_of(batch: int, **size: Any) -> KVCache:
    return KVCache(LAYERS, batch, KV_HEADS, HEAD_DIM, dtype=torch.float64, **size)


@torch.no_grad()
def run(cache: KVCache, x: Tensor, rope: Rope | SelfExtend | None, **options: Any) -> Tensor:
    """Run one forward pass of the new tokens x. For an even number of them, two rotations become one attention.

    Up to 7 tokens attend in pieces of 3.
    """
    if torch.compiler.is_compiling():
        return _run(cache, x, rope, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ropewalk.attention.attend._FEW", 64 * (x.shape[1] % 2))
        patch.setattr("ropewalk.attention.pairs.PIECE", 3 if x.shape[1] < 8 else 256)
        return _run(cache, x, rope, **options)


def _run(cache: KVCache, x: Tensor, rope: Rope | SelfExtend | None, **options: Any) -> Tensor:
    step = cache.step(x.shape[1], **options)
    if rope is None:
        rotation = None
    elif isinstance(rope, SelfExtend):
        rotation = rope.at(step.positions, step.key_positions, dtype=torch.float64)
    else:
        rotation = step.rotation(rope, dtype=torch.float64)
    for i, layer in enumerate(MODEL):
        x = x + layer(x, rotation, cache=step.layer(i))
    return x


@torch.no_grad()
def run_whole_row(x: Tensor, rotary: Rotary | None, at: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
    """Compute the model for one whole row [seq, hidden], without ropewalk."""
    x = x[None]
    for layer in MODEL:
        x = x + written_out.of_layer(layer, x, rotary, at, seen=seen)
    return x[0]


def distances(seq: int, size: dict[str, int], positions: Tensor | None = None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return positions and mask of each pair in a cache of this size. Default positions are 0, 1, 2, …"""
    if "sinks" in size:
        assert positions is None
        return written_out.streaming(seq, size["window"], size["sinks"])
    window = size.get("window", seq)
    seen = [[0 <= i - j < window for j in range(seq)] for i in range(seq)]
    return written_out.pairs(torch.arange(seq) if positions is None else positions), torch.tensor(seen).view(seq, seq)


def check_rows(
    outputs: list[Tensor], inputs: list[Tensor], real: list[Tensor], rotary: Rotary | None, how: Any
) -> None:
    """Concatenate the outputs of all steps, and compare the real tokens of each row with one pass over the row.

    how(row, tokens) returns positions and mask of that pass.
    """
    out, x, kept = (torch.cat(pieces, dim=1) for pieces in (outputs, inputs, real))
    assert out.isfinite().all()  # including padding, because NaN would spread
    for row in range(x.shape[0]):
        tokens = x[row, kept[row]]
        if len(tokens):
            torch.testing.assert_close(
                out[row, kept[row]], run_whole_row(tokens, rotary, *how(row, len(tokens))), **EXACT
            )


def state(cache: KVCache) -> list[Tensor]:
    return [x.clone() for x in (*cache.keys, *cache.values, cache.length, cache.position, cache._key_positions)]


def unchanged(cache: KVCache, before: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(before, state(cache), strict=True))


class StoppedError(Exception):
    pass


class InterruptionError(BaseException):
    """Ctrl-C."""


def is_interrupted(action: Callable[[], object], after: int) -> InterruptionError | None:
    """Run an action, with an exception at an instruction of attention or cache. Return the exception."""
    left = after

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith((attention.__path__[0], cache.__path__[0])):
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if not left:
            raise InterruptionError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except InterruptionError as e:
        return e
    finally:
        sys.settrace(before)
    return None


class NoMemory(TorchFunctionMode):
    """Attention raises an error, as if there were no memory. The modes of PyTorch also disable the kernels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.scaled_dot_product_attention, Tensor.softmax):
            raise StoppedError
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def forward_until(cache: KVCache, x: Tensor, after: int, **options: Any) -> None:
    """Run a forward pass that raises once `after` layers have stored their keys; the last layer, in its attention."""
    rope, _ = ROPES["default"]
    assert rope is not None
    step = cache.step(x.shape[1], **options)
    rotation = step.rotation(rope, dtype=torch.float64)
    for i in range(after):
        with NoMemory() if i == LAYERS - 1 else nullcontext():
            x = x + MODEL[i](x, rotation, cache=step.layer(i))
    raise StoppedError


def stopped(cache: KVCache, x: Tensor, after: int, **options: Any) -> None:
    with pytest.raises(StoppedError):
        forward_until(cache, x, after, **options)


@dataclass
class Token:
    """Keys and values [layers, heads, width] of one token, its position, and bounds of their errors in the cache."""

    k: Tensor
    v: Tensor
    position: int
    k_error: Tensor  # [layers, heads, 1]
    v_error: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor, position: int, rounding: float, rotary: Rotary | None = None) -> Token:
        """Return a token whose keys are given as they are cached, or before their rotation."""
        if rotary is None:
            return cls(k, v, position, rounding * _largest(k), rounding * _largest(v))
        k = rotary(k, torch.tensor(position).expand(len(k)))
        return cls(k, v, position, rounding * _largest(k) + 1e-13, rounding * _largest(v))

    def moved(self, rotary: Rotary | None, delta: int, rounding: float) -> Token:
        """Return the token with rotated keys. The error of a pair rotates with them, and they are rounded again."""
        if rotary is None or not delta:
            return replace(self, position=self.position + delta)
        around = Rotary(rotary.speeds, rotary.pairing, rotary.offset)  # the attention factor is not applied again
        k, error = around(self.k, torch.tensor(delta).expand(len(self.k))), 2**0.5 * self.k_error
        return Token(k, self.v, self.position + delta, error + rounding * (_largest(k) + error) + 1e-14, self.v_error)

    def moved_to(self, places: dict[int, int], rotary: Rotary | None, rounding: float) -> Token:
        """Return the token at the new position that `places` has for its position, if any."""
        return self.moved(rotary, places.get(self.position, self.position) - self.position, rounding)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


ROUNDING = {None: 0.0, "int8": (1 + 1e-6) / 254, "fp8": (1 + 1e-6) / 16}
"""The largest error of a store in a number, as a part of the largest number of its head."""


@torch.no_grad()
def attend_in_layer(
    step: CacheStep, layer: int, k: Tensor, v: Tensor | None, rotation: Rotation | TwoPass
) -> tuple[Tensor, Tensor]:
    """Let random queries attend in a layer, which rotates and stores k and v in one call if it can.

    For an even number of tokens, two rotations become one attention. Up to 7 tokens attend in pieces of 3.
    """
    q = torch.randn(*k.shape[:2], HEADS, k.shape[-1], dtype=k.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ropewalk.attention.attend._FEW", 64 * (q.shape[1] % 2))
        patch.setattr("ropewalk.attention.pairs.PIECE", 3 if q.shape[1] < 8 else 256)
        return q, step.layer(layer).attend(q, k, v, rotation=rotation, scale=0.5)


def draw_moves(draw: random.Random, tokens: list[Token]) -> dict[int, int]:
    """Select some positions of tokens, and a new position for each, which other tokens may have."""
    places = sorted({token.position for token in tokens})
    return {place: draw.randint(-40, 40) for place in draw.sample(places, draw.randint(1, len(places)))}


ROWS: list[Callable[[list[int], int], Any]] = [
    lambda rows, batch: rows,
    lambda rows, batch: tuple(rows),
    lambda rows, batch: torch.tensor(rows, dtype=torch.int64),
    lambda rows, batch: torch.tensor(rows, dtype=torch.int32),
    lambda rows, batch: torch.tensor([row in rows for row in range(batch)]),
]
"""The ways to name some rows of a batch."""


class RowRequests:
    """A `KVCache`, the expected tokens of each row, and random requests that change both.

    Keys and values are random, in float64. A row of the list also has the tokens that the cache has evicted. Queries
    attend to the tokens, and the outputs are compared with attention that is written out.
    """

    def __init__(
        self,
        seed: int,
        *,
        batch: int = 3,
        store: str | None = None,
        latent: int | None = None,
        **size: int,
    ) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.size, self.rounding, self.latent = size, ROUNDING[store], latent
        self.cache = cache_of(batch, store=store, latent=latent, **size)
        self.tokens: list[list[Token]] = [[] for _ in range(batch)]
        self.following = [0] * batch
        self.served = dict.fromkeys(["step", "reorder", "shift", "reset", "stopped", "move", "truncate"], 0)

    def request(self) -> None:
        ways = ["step"] * 8 + ["reorder", "shift", "reset", "stopped"]
        ways += [] if "sinks" in self.size else ["move"] * 2
        ways += ["truncate"] if "capacity" in self.size else []
        way = self.draw.choice(ways)
        getattr(self, way)()
        self.served[way] += 1
        self.check_everything()
        if "capacity" in self.size:  # the last column is for padding
            for places, tokens in zip(self.cache._key_positions[:, :-1].tolist(), self.tokens, strict=True):
                assert places == [token.position for token in tokens] + [2**62] * (len(places) - len(tokens))

    def visible(self, row: int) -> set[int]:
        """Return the orders of the cached tokens to which the next token attends."""
        length = len(self.tokens[row])
        first = max(0, length - self.size.get("window", length + 1) + 1)
        return {*range(min(length, self.size.get("sinks", 0))), *range(first, length)}

    def step(self, *, at: list[int] | None = None, layers: int = LAYERS) -> None:
        """Append tokens, with padding anywhere. If not all layers store them, they are NaN, and nothing may remain."""
        batch, seq = len(self.tokens), self.draw.choice([1, 1, 1, 2, 3, 9] if layers == LAYERS else [1])
        real, options = torch.ones(batch, seq, dtype=torch.bool), dict[str, Any]()
        if at is not None:
            options["at"] = torch.tensor(at)
            for row, place in enumerate(at):
                later = [i for i, token in enumerate(self.tokens[row]) if token.position >= place]
                self.tokens[row] = self.tokens[row][: min(later, default=len(self.tokens[row]))]
            self.following = list(at)
        if self.draw.random() < 0.4:
            options["attention_mask"] = real = torch.rand(batch, seq) < 0.6
        if max(map(len, self.tokens)) + seq > self.size.get("capacity", 10**9):
            full = [row for row, tokens in enumerate(self.tokens) if len(tokens) + seq > self.size["capacity"]]
            self.reset(full)
            if at is not None:
                options["at"] = torch.tensor(self.following)
        places = torch.tensor(self.following)[:, None] + (real.cumsum(1) - 1).clamp(min=0)
        if "sinks" not in self.size and self.draw.random() < 0.2:
            options["positions"] = torch.randint(-9, 9, self.draw.choice(((batch, seq), (seq,))))
            places = options["positions"].expand(batch, seq)
        step = self.cache.step(seq, **options)
        assert torch.equal(step.positions, places)
        k, v = torch.randn(2, LAYERS, batch, seq, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        if layers < LAYERS:
            k, v = k.fill_(torch.nan), v.fill_(torch.nan)
        if self.draw.random() < 0.5:  # which a mask would not hide, as 0 · NaN is NaN
            k[:, ~real], v[:, ~real] = torch.nan, torch.nan
        given: Any = v if self.latent is None else [None] * LAYERS
        v = v if self.latent is None else k[..., : self.latent]
        order = [x.tolist() for x in step.key_order]
        rotation = step.rotation(ROPES["YaRN, partial"][0], dtype=torch.float64)
        attends, keys, values, attended = self.draw.random() < 0.5, k[-1], v[-1], list[tuple[Tensor, Tensor]]()
        for i in range(layers):
            if attends:
                attended.append(attend_in_layer(step, i, k[i], given[i], rotation))
            else:
                keys, values = step.layer(i).append(k[i], given[i])
        if layers < LAYERS:
            return
        turn = ROPES["YaRN, partial"][1] if attends else None
        for row, kept in enumerate(real):
            seen, count = self.visible(row), len(self.tokens[row])
            chosen = kept.nonzero()[:, 0].tolist()
            new = [Token.of(k[:, row, j], v[:, row, j], int(places[row, j]), self.rounding, turn) for j in chosen]
            self.tokens[row] = self.tokens[row] + new
            if new:
                self.following[row] = int(places[row, kept].max()) + 1
            for layer, (q, out) in enumerate(attended if not self.rounding else []):
                for n, j in enumerate(chosen, count):
                    wanted = self.attention(row, layer, n, q[row, j])
                    torch.testing.assert_close(out[row, j], wanted, rtol=0, atol=1e-12)
            seen |= set(range(count, count + len(new)))
            if not attends:
                self.check_row(row, LAYERS - 1, order[row], keys[row], values[row], seen)

    def attention(self, row: int, layer: int, n: int, q: Tensor) -> Tensor:
        """Return the attention of q [heads, width], the query of token n of a row, to the tokens up to it."""
        tokens, window, sinks = self.tokens[row], self.size.get("window", n + 1), self.size.get("sinks", 0)
        seen = [j for j in range(n + 1) if not sinks <= j <= n - window]
        # A sink is as far away as its place in the cache is.
        far = {j: min(n, sinks + window - 1) - j for j in range(sinks)}
        places = [tokens[j].position + far[j] if j in far else tokens[n].position for j in seen]
        q = ROPES["YaRN, partial"][1](q.expand(len(seen), -1, -1), torch.tensor(places))
        k, v = (torch.stack([getattr(tokens[j], x)[layer] for j in seen]) for x in "kv")
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        return ((0.5 * (q * k).sum(-1)).softmax(0)[..., None] * v).sum(0)

    def truncate(self, **options: int) -> None:
        self.step(at=[following + self.draw.randint(-8, 2) for following in self.following], **options)

    def stopped(self) -> None:
        """Run a forward pass that stops before or after its first layer, and roll it back."""
        self.step(layers=self.draw.choice([0, 1]))
        self.cache.rollback()

    def reset(self, rows: list[int] | None = None) -> None:
        rows = [self.draw.randrange(len(self.tokens))] if rows is None else rows
        self.cache.reset(self.draw.choice(ROWS)(rows, len(self.tokens)))
        for row in rows:
            self.tokens[row], self.following[row] = [], 0

    def reorder(self) -> None:
        parents = [self.draw.randrange(len(self.tokens)) for _ in self.tokens]
        self.cache.reorder(torch.tensor(parents))
        self.tokens = [self.tokens[parent] for parent in parents]
        self.following = [self.following[parent] for parent in parents]

    def shift(self) -> None:
        rope, rotary = ROPES["YaRN, partial"]
        deltas = [self.draw.choice([0, 5, -300]) for _ in self.tokens]
        alike = self.draw.random() < 0.5
        deltas = deltas[:1] * len(deltas) if alike else deltas
        self.cache.shift(rope, deltas[0] if alike else torch.tensor(deltas))
        for row, delta in enumerate(deltas):
            self.following[row] += delta
            self.tokens[row] = [token.moved(rotary, delta, self.rounding) for token in self.tokens[row]]

    def move(self) -> None:
        (rope, rotary), row = ROPES["YaRN, partial"], self.draw.randrange(len(self.tokens))
        first = max(0, len(self.tokens[row]) - self.size.get("window", 10**9))
        evicted, held = self.tokens[row][:first], self.tokens[row][first:]
        if held:
            places = draw_moves(self.draw, held)
            self.cache.move(rope, row, torch.tensor(list(places)), torch.tensor(list(places.values())))
            held = [token.moved_to(places, rotary, self.rounding) for token in held]
            self.tokens[row], self.following[row] = evicted + held, max(token.position for token in held) + 1

    def check_row(self, row: int, layer: int, order: list[int], keys: Tensor, values: Tensor, seen: set[int]) -> None:
        """Check keys and values of a row whose tokens have these orders. It must have the tokens `seen`."""
        tokens, index = self.tokens[row], {n: i for i, n in enumerate(order) if n in seen}
        assert set(index) == seen
        for n, i in index.items():
            assert ((keys[i] - tokens[n].k[layer]).abs() <= tokens[n].k_error[layer]).all()
            v = tokens[n].v[layer]
            assert ((values[i, :, : v.shape[-1]] - v).abs() <= tokens[n].v_error[layer]).all()

    def check_everything(self) -> None:
        """Check that every row has the tokens to which its next token attends."""
        cache = self.cache
        assert cache.length.tolist() == [len(tokens) for tokens in self.tokens]
        assert cache.position.tolist() == self.following
        order = cache._ring.order(cache.length).tolist()
        for i, store in enumerate(cache._stores):
            keys, values = store.read(cache._ring.count)
            assert keys.isfinite().all()
            assert values.isfinite().all()
            for row in range(len(self.tokens)):
                self.check_row(row, i, order[row], keys[row], values[row], self.visible(row))
