"""rotate_and_store, paged_attention and move_keys on the pool of a server, against lists of tokens in float64.

With TRITON_INTERPRET=1, as tests/gpu/test_interpreter.py sets it, the GPU kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import interpret_bfloat16
from cache_model import ROPES, ROUNDING, Token
from kernel_cases import same_in_8_bits
from ropewalk import QKNorm, RopeError, move_keys, paged_attention, rotate_and_store
from ropewalk.attention import few_tokens
from ropewalk.kernels import backend, gpu

HEADS, KV_HEADS, WIDTH, BLOCKS = 4, 2, 6, 24
ROPE, ROTARY = ROPES["YaRN, partial"]
assert ROPE is not None
assert ROTARY is not None
KEPT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
WAYS = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["kernel", "plain"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Use the kernel of this machine, plain PyTorch, or the kernels for GPUs in Triton's interpreter."""
    if request.param == "kernel" and not backend.FAST_PATH:
        pytest.skip("no compiled kernel")
    if request.param == "triton":
        interpret_bfloat16(monkeypatch)
        monkeypatch.setattr(gpu, "unavailable", lambda device=None: None)
        monkeypatch.setitem(backend.KERNELS, "cpu", gpu)
    if request.param != "kernel":
        monkeypatch.setattr(backend, "FAST_PATH", False)
    if request.param == "plain":
        monkeypatch.setattr(backend, "BACKEND", "reference")
    with torch.no_grad():
        yield request.param


@dataclass
class Row:
    blocks: list[int] = field(default_factory=list)  # -1 for blocks that are free again
    tokens: list[Token] = field(default_factory=list)


class Server:
    """A pool of blocks, and rows whose tokens it also has as a plain list.

    Slots without a token hold NaN. A block that no later token can attend to is free again.
    """

    def __init__(
        self, seed: int, dtype: torch.dtype, block_size: int, *, store: str | None = None, window: int | None = None,
        sinks: int = 0, heads_first: bool = False, v_width: int = WIDTH, most: int = 8,
    ) -> None:  # fmt: skip
        self.draw, self.dtype, self.size, self.most = random.Random(seed), dtype, block_size, most
        torch.manual_seed(seed)
        self.window, self.sinks, self.rounding = window, sinks, ROUNDING[store] + 2 * torch.finfo(dtype).eps
        shape = (BLOCKS, KV_HEADS, block_size) if heads_first else (BLOCKS, block_size, KV_HEADS)
        kept = dtype if store is None else KEPT[store]
        self.caches = [torch.zeros(*shape, width, dtype=kept) for width in (WIDTH, v_width)]
        self.scales = [] if store is None else [torch.zeros(shape) for _ in range(2)]
        if heads_first:
            self.caches, self.scales = ([x.transpose(1, 2) for x in some] for some in (self.caches, self.scales))
        self.free, self.rows = list(range(BLOCKS)), [Row() for _ in range(3)]
        self.clear(self.free)
        self.attended = 0

    @property
    def options(self) -> dict[str, Tensor]:
        return dict(zip(("k_scales", "v_scales"), self.scales, strict=False))

    def clear(self, blocks: list[int]) -> None:
        for x in self.scales or self.caches:
            x[blocks] = torch.nan

    def release(self, row: Row, columns: list[int]) -> None:
        self.clear([row.blocks[i] for i in columns])
        self.free += [row.blocks[i] for i in columns]
        for i in columns:
            row.blocks[i] = -1

    def slots(self, row: Row, first: int = 0) -> list[int]:
        return [
            row.blocks[t // self.size] * self.size + t % self.size if row.blocks[t // self.size] >= 0 else -1
            for t in range(first, len(row.tokens))
        ]

    def table(self, rows: list[Row]) -> Tensor:
        most = max(len(row.blocks) for row in rows) + self.draw.randint(0, 2)
        return torch.tensor([row.blocks + [-1] * (most - len(row.blocks)) for row in rows], dtype=torch.int32)

    def read(self, row: Row) -> tuple[Tensor, Tensor, list[int]]:
        """Return keys and values of a row in float64, and the tokens whose blocks are there."""
        slots = self.slots(row)
        there = [t for t, slot in enumerate(slots) if slot >= 0]
        at = torch.tensor([slots[t] for t in there], dtype=torch.int64)
        content = [x[at // self.size, at % self.size].double() for x in self.caches]
        factors = [x[at // self.size, at % self.size].double()[..., None] for x in self.scales] or [1, 1]
        k, v = (x * factor for x, factor in zip(content, factors, strict=True))
        return k, v, there

    def check(self, row: Row) -> None:
        """Check that the pool has the tokens of a row, within the roundings of its dtype."""
        k, v, there = self.read(row)
        for i, t in enumerate(there):
            token = row.tokens[t]
            assert ((k[i] - token.k[0]).abs() <= token.k_error[0]).all()
            assert ((v[i] - token.v[0]).abs() <= token.v_error[0]).all()

    def append(self, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Store some new tokens of some rows, fewer in some, and attend with them."""
        rows = self.draw.sample(self.rows, self.draw.randint(1, 3))
        longest = self.draw.choice([1, 1, 2, 5, 8, 8, 13][: 7 if self.most > 8 else 6])
        counts = [longest if self.window else self.draw.randint(0, longest) for _ in rows]
        counts = [n if len(row.tokens) + n <= 40 else 0 for n, row in zip(counts, rows, strict=True)]
        if self.window:  # padding would attend to tokens that the window has left
            rows, counts = [r for r, n in zip(rows, counts, strict=True) if n], [n for n in counts if n]
        needed = [-(-(len(r.tokens) + n) // self.size) - len(r.blocks) for r, n in zip(rows, counts, strict=True)]
        if not rows or sum(needed) > len(self.free):
            self.end()
            return
        q, k, v = (
            torch.randn(len(rows), longest, heads, width).to(self.dtype)
            for heads, width in ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, self.caches[1].shape[3]))
        )
        first = torch.tensor([len(row.tokens) + n - longest for row, n in zip(rows, counts, strict=True)])
        order = first[:, None] + torch.arange(longest)
        slots, rotary = torch.full((len(rows), longest), -1), ROTARY
        for i, (row, n, more) in enumerate(zip(rows, counts, needed, strict=True)):
            row.blocks += [self.free.pop(self.draw.randrange(len(self.free))) for _ in range(more)]
            for j in range(longest - n, longest):
                new = (x[i, j].double()[None] for x in (k, v))
                row.tokens.append(Token.of(*new, int(order[i, j]), self.rounding, rotary))
            slots[i, longest - n :] = torch.tensor(self.slots(row, len(row.tokens) - n), dtype=torch.int64)
        rotation = ROPE.at(order, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)
        to = dict(zip(("k_cache", "v_cache"), self.caches, strict=True))
        rotated = rotate_and_store(q, k, v, rotation=rotation, slot_mapping=slots, **to, **self.options)
        self.check_queries(rotated, q, order)
        limits: dict[str, Any] = {"window": self.window, "sinks": self.sinks, "scale": self.draw.choice([None, 0.3])}
        if self.sinks and self.draw.random() < 0.5:
            places = order.clamp(max=self.sinks + self.window - 1)  # type: ignore[operator]
            limits["sink_q"] = ROPE.at(places, dtype=rotation.cos.dtype)(q, layout="bshd")
            self.check_queries(limits["sink_q"], q, places)
        lengths = torch.tensor([len(row.tokens) for row in rows], dtype=self.draw.choice([torch.int32, torch.int64]))
        gathered: list[bool] = []
        with monkeypatch.context() as patched:
            read = few_tokens._gather
            patched.setattr(few_tokens, "_gather", lambda *given: (gathered.append(True), read(*given))[1])
            table = self.table(rows)
            out = paged_attention(rotated, *self.caches, block_table=table, lengths=lengths, **limits, **self.options)
        fits = way == "kernel" or self.caches[1].shape[3] == WIDTH
        for_kernel = self.dtype != torch.float64 and fits and longest <= 32 and table.numel()
        assert gathered == [True] * (way == "plain" or not for_kernel)
        assert (out.dtype, out.shape) == (self.dtype, (*rotated.shape[:3], self.caches[1].shape[3]))
        assert out.isfinite().all()
        for i, (row, n) in enumerate(zip(rows, counts, strict=True)):
            self.check(row)
            self.check_attention(row, out[i], rotated[i], limits, n, exact=not gathered, index=i)
            if self.window:  # the next new tokens may be `most`, of which the first sees window - 1 tokens before it
                unseen = max(0, len(row.tokens) - self.window + 1) // self.size
                kept = -(-self.sinks // self.size)
                self.release(row, [c for c in range(kept, unseen) if row.blocks[c] >= 0])
        self.attended += 1

    def check_queries(self, rotated: Tensor, q: Tensor, places: Tensor) -> None:
        expected = ROTARY(q.double(), places)  # type: ignore[misc]
        assert ((rotated.double() - expected).abs() <= 3 * torch.finfo(self.dtype).eps * expected.abs().max()).all()

    def check_attention(
        self, row: Row, out: Tensor, q: Tensor, limits: dict[str, Any], n: int, *, exact: bool, index: int
    ) -> None:
        """Compare the last n tokens with the definition over the content of the pool, in float64."""
        k, v, there = self.read(row)
        count, new, group = len(row.tokens), len(out), HEADS // KV_HEADS
        # The kernel computes in float32. PyTorch's attention may round keys and weights to the dtype.
        unit = 2.0**-24 if exact else torch.finfo(self.dtype).eps / 2
        scale = WIDTH**-0.5 if limits["scale"] is None else limits["scale"]
        for j in range(new - n, new):
            t = count - new + j
            seen = [i for i, s in enumerate(there) if s <= t and (s < self.sinks or t - s < (self.window or 99))]
            sees_all = min(t + 1, (self.window or 99) + min(self.sinks, max(0, t + 1 - (self.window or 99))))
            assert len(seen) == sees_all
            for head in range(HEADS):
                keys, values = k[seen, head // group], v[seen, head // group]
                of_sinks = limits["sink_q"][index] if "sink_q" in limits else q
                queries = torch.stack([(of_sinks if there[i] < self.sinks else q)[j, head].double() for i in seen])
                products = queries * keys
                expected = (scale * products.sum(1)).softmax(0) @ values
                of_scores = (WIDTH + 8) * unit * scale * products.abs().sum(1).max() + 4 * unit
                bound = (2 * of_scores + (len(seen) + 8) * unit) * values.abs().max()
                rounding = torch.finfo(self.dtype).eps * (1 if WAYS == ["triton"] else 0.5) * expected.abs()
                assert (
                    (out[j, head].double() - expected).abs() <= bound + rounding + 1e-7 * (self.dtype == torch.float16)
                ).all()

    def move(self) -> None:
        """Move the tokens of a row to other positions, and to other blocks if enough are free."""
        row = self.draw.choice([row for row in self.rows if row.tokens] or [Row()])
        old, slots = [token.position for token in row.tokens], self.slots(row)
        new = [p if self.sinks else p + self.draw.choice([0, -3, 17]) for p in old]
        before = list(row.blocks)
        held = [i for i, block in enumerate(row.blocks) if block >= 0]
        if len(self.free) >= len(held):
            for i in held:
                row.blocks[i] = self.free.pop(0)
        move_keys(
            self.caches[0], torch.tensor(slots, dtype=torch.int64), torch.tensor(self.slots(row), dtype=torch.int64),
            ROPE, torch.tensor(old, dtype=torch.int64), torch.tensor(new, dtype=torch.int64),
            scales=self.scales[0] if self.scales else None, values=[self.caches[1], *self.scales[1:]],
        )  # fmt: skip
        row.tokens = [
            token.moved(ROTARY, q - p, self.rounding) for token, p, q in zip(row.tokens, old, new, strict=True)
        ]
        if row.blocks != before:
            self.clear([before[i] for i in held])
            self.free += [before[i] for i in held]
        self.check(row)

    def end(self) -> None:
        """End the longest row."""
        row = max(self.rows, key=lambda row: len(row.tokens))
        self.release(row, [i for i, block in enumerate(row.blocks) if block >= 0])
        row.blocks, row.tokens = [], []


SERVERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32, "block_size": 4, "most": 13},
    "float64, window": {"dtype": torch.float64, "block_size": 3, "window": 5, "most": 13},
    "bfloat16, heads first": {"dtype": torch.bfloat16, "block_size": 16, "heads_first": True, "most": 13},
    "float16, blocks of 1": {"dtype": torch.float16, "block_size": 2, "window": 6, "sinks": 3},
    "sinks": {"dtype": torch.float32, "block_size": 4, "window": 3, "sinks": 5, "most": 13},
    "int8": {"dtype": torch.float32, "block_size": 4, "store": "int8", "most": 13},
    "int8, sinks": {"dtype": torch.bfloat16, "block_size": 3, "store": "int8", "window": 4, "sinks": 2},
    "fp8, window": {"dtype": torch.bfloat16, "block_size": 3, "store": "fp8", "window": 5, "heads_first": True},
    "wide values": {"dtype": torch.float32, "block_size": 4, "v_width": 10},
}


@pytest.mark.parametrize("seed", range(1 if WAYS == ["triton"] else 2))
@pytest.mark.parametrize("name", SERVERS)
def test_random_requests(name: str, seed: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(seed, **SERVERS[name])
    for _ in range(8 if way == "triton" else 20):
        server.draw.choice([*[lambda: server.append(way, monkeypatch)] * 5, server.move, server.end])()
    assert server.attended >= (3 if way == "triton" else 6)


@pytest.mark.parametrize("store", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_stored_numbers_and_scales_are_those_of_the_oracle(store: str, dtype: torch.dtype, way: str) -> None:
    """Bit for bit, after a norm, in layout "thd". Tokens without a slot are not stored."""
    if way == "triton" and dtype != torch.float32:
        dtype = torch.float16  # the interpreter truncates to bfloat16, and rotates float64 in another order
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, heads, WIDTH).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    norm, rotation = QKNorm(torch.randn(WIDTH), torch.randn(WIDTH), 1e-6), ROPE.at(torch.arange(3, 8))
    caches = {name: torch.zeros(4, 2, KV_HEADS, WIDTH, dtype=KEPT[store]) for name in ("k_cache", "v_cache")}
    scales = {name: torch.zeros(4, 2, KV_HEADS) for name in ("k_scales", "v_scales")}
    slots = torch.tensor([7, -1, 0, 3, -1])
    rotate_and_store(q, k, v, rotation=rotation, slot_mapping=slots, norm=norm, layout="thd", **caches, **scales)
    rotated = norm.rotate(rotation, q, k, layout="thd")[1]
    for x, cache, scale in zip((rotated, v), caches.values(), scales.values(), strict=True):
        expected = torch.zeros(8, KV_HEADS, WIDTH, dtype=dtype)
        expected[slots[slots >= 0]] = x[slots >= 0]
        written = expected.any(-1).any(-1)
        assert same_in_8_bits(cache.flatten(0, 1)[written], scale.flatten(0, 1)[written], expected[written])
        assert not scale.flatten(0, 1)[~written].any()


def pool(**changes: Any) -> dict[str, Any]:
    """Return arguments of paged_attention: two rows with 5 and 8 tokens in blocks of 4, of which 2 are new."""
    q, k, v = torch.randn(2, 2, 4, 8), torch.randn(9, 4, 2, 8), torch.randn(9, 4, 2, 8)
    table, lengths = torch.tensor([[3, 8, -1], [2, 0, 99]], dtype=torch.int32), torch.tensor([5, 8])
    return {"q": q, "k_cache": k, "v_cache": v, "block_table": table, "lengths": lengths, **changes}


def test_nothing_to_attend_to(way: str) -> None:
    torch.manual_seed(0)
    none = {"block_table": torch.zeros(2, 0, dtype=torch.int32), "lengths": torch.tensor([0, 0])}
    assert not paged_attention(**pool(**none)).any()
    assert not paged_attention(**pool(lengths=torch.tensor([0, 1])))[[0, 0, 1], [0, 1, 0]].any()
    assert paged_attention(**pool(q=torch.zeros(2, 0, 4, 8))).shape == (2, 0, 4, 8)
    no_rows = {"q": torch.zeros(0, 2, 4, 8), "block_table": torch.zeros(0, 3, dtype=torch.int32)}
    assert paged_attention(**pool(**no_rows, lengths=torch.zeros(0, dtype=torch.int32))).shape == (0, 2, 4, 8)


@pytest.mark.parametrize("new", [2, 12])
def test_compiled_and_one_factor_for_all(new: int, way: str) -> None:
    torch.manual_seed(0)
    numbers = [torch.randint(-127, 128, (9, 4, 2, 8), dtype=torch.int8) for _ in range(2)]
    factor = torch.tensor(0.01).expand(9, 4, 2)
    given = pool(q=torch.randn(2, new, 4, 8), k_cache=numbers[0], v_cache=numbers[1], window=3, sinks=1)
    attended = paged_attention(**given, k_scales=factor, v_scales=factor)
    floats = given | {"k_cache": 0.01 * numbers[0], "v_cache": 0.01 * numbers[1]}
    torch.testing.assert_close(attended, paged_attention(**floats))
    if way != "triton":
        compiled = torch.compile(paged_attention, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(**given, k_scales=factor, v_scales=factor), attended)


def test_refusals() -> None:
    pools = {name: torch.zeros(9, 4, 2, 8, dtype=torch.int8) for name in ("k_cache", "v_cache")}
    scales = {name: torch.ones(9, 4, 2) for name in ("k_scales", "v_scales")}
    heads_first = {name: x.transpose(1, 2) for name, x in pools.items()}
    table = torch.tensor([[3, -1, -1], [2, 0, 1]], dtype=torch.int32)
    front = torch.tensor([[3, 8, -1], [-1, 0, 1]], dtype=torch.int32)
    assert paged_attention(**pool(block_table=front, window=1)).isfinite().all()
    for changes, message in (
        ({"q": None}, "q must be a tensor, got None"),
        ({"q": torch.zeros(2, 4, 8)}, r"q must be \[batch, new, heads, head_dim\].* Pass q\[:, None\] if"),
        ({"q": torch.zeros(2, 2, 4, 8).int()}, "q must be"),
        ({"q": torch.zeros(2, 2, 3, 8)}, "kv_heads divides the 3 heads of q"),
        ({"q": torch.zeros(2, 2, 4, 6)}, r"k_cache must be \[blocks, block_size, kv_heads, 6\]"),
        ({"q": torch.zeros(2, 2, 4, 8).requires_grad_()}, "gradients cannot pass through a cache"),
        ({"q": torch.zeros(2, 2, 4, 8, device="meta")}, "all tensors must be on one device, got q on meta"),
        ({"v_cache": torch.zeros(9, 5, 2, 8)}, "v_cache must have the blocks, tokens and heads of k_cache"),
        ({"v_cache": torch.zeros(9, 4, 2, 8).half()}, "k_cache and v_cache must be torch.float32 as q is"),
        (pools, "with k_scales and v_scales, got torch.int8 and torch.int8 without scales. Pass k_scales and v_scales"),
        ({**pools, "v_scales": scales["v_scales"]}, "with k_scales and v_scales, got .* with v_scales"),
        (scales, "k_cache and v_cache must be torch.float32 as q is"),
        ({**pools, **scales, "k_scales": torch.ones(9, 4, 1)}, r"k_scales must be torch.float32 of shape \(9, 4, 2\)"),
        ({**heads_first, **scales}, r"k_scales must be .*\(9, 2, 4\).* Pass k_cache.transpose\(1, 2\)"),
        ({"block_table": table.long()}, "block_table must be torch.int32"),
        ({"block_table": table[:1]}, r"block_table must be torch.int32 of shape \(2, 3\)"),
        ({"block_table": table}, r"must be from 0 to 8, .* got -1 in block_table\[0, 1\]. .* token of a row\.$"),
        ({"block_table": table + 9, "window": 1}, r"must be from 0 to 8, .* got 12 in block_table\[0, 0\]"),
        ({"block_table": front, "window": 1, "sinks": 1}, r"got -1 in block_table\[1, 0\]. .* or of the sinks\.$"),
        ({"block_table": front, "window": 4}, "and free no block of the last 5 tokens of a row .*padding is new"),
        ({"lengths": torch.tensor([5.0, 8.0])}, "lengths must be torch.int32 or torch.int64"),
        ({"lengths": torch.tensor([5, 13])}, "lengths must be from 0 to 12, .* got 13"),
        ({"lengths": torch.tensor([-1, 8])}, "lengths must be from 0 to 12, .* got -1"),
        ({"window": 0}, "window must be an integer of at least 1"),
        ({"sinks": 2}, "sinks must come with window"),
        ({"window": 2, "sink_q": torch.zeros(2, 2, 4, 8)}, "and sink_q with sinks"),
        ({"window": 2, "sinks": 2, "sink_q": torch.zeros(2, 1, 4, 8)}, "sink_q must be torch.float32 of shape"),
        ({"scale": "1"}, "scale must be a finite number"),
    ):  # fmt: skip
        with pytest.raises(RopeError, match=f"paged_attention: .*{message}"):
            paged_attention(**pool(**changes))
