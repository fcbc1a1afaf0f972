"""Compare random cases of rotations, fused steps, gradients and caches with the oracles of the tests.

    python tools/random_cases.py                    20,000 cases; several minutes on one core
    python tools/random_cases.py --cases 2000       fewer
    python tools/random_cases.py --seed 7 --cases 1 repeat one case

A case is right if it agrees with tests/oracle.py or tests/attention_oracle.py, which import nothing of ropewalk. The
program prints the number of cases of each kind, and for each wrong case the seed that repeats it. Its status is 1 if a
case is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "kernels"), str(TESTS / "attention")]

import test_paged_cache  # noqa: E402
from test_fuzz import Guarded, exact, fit, fitting  # noqa: E402

import oracle  # noqa: E402
from cache_model import (  # noqa: E402
    EXACT,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    ROPES,
    cache_of,
    distances,
    run,
    run_whole_row,
    stopped,
)
from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, as_bshd, broadcast, check, shape, unchanged  # noqa: E402
from ropewalk import Axes, PagedKVCache, QKNorm, Rope, Rotation, rotate_and_store  # noqa: E402

Draw = random.Random
EPS = 1e-5
BLOCKS = 144  # 5 rows of up to 24 tokens, one token in a block, and copies of shared blocks


# ---- rotations


def rotation(draw: Draw) -> str:
    """Rotate by tables of any kind: into new tensors, in place, and backward. Gradients reach trained tables."""
    return fitting(draw)


def inverse(draw: Draw) -> str:
    """Rotate by the inverse, which divides by the attention factor, and back to the start."""
    made, guarded, layout = fit(draw)
    factor, x = draw.choice((1.0, 1.25, 0.5)), guarded[0].x
    angle = made.cos.double()
    tables = [(factor * table).to(made.cos.dtype) for table in (angle.cos(), angle.sin())]
    how = {"pairing": made.pairing, "head_dim": made.head_dim, "rotary_offset": made.rotary_offset}
    turn = Rotation(*tables, attention_factor=factor, per_head=made.per_head, **how)
    back = Rotation(tables[0] / factor**2, -tables[1] / factor**2, per_head=made.per_head, **how)
    check(turn.inverse()(x, layout=layout), *exact(back, x, layout), layout, turn, flushed=x.dtype == torch.bfloat16)
    twice = turn.inverse()(turn(x, layout=layout), layout=layout)
    eps = max(torch.finfo(x.dtype).eps, torch.finfo(made.cos.dtype).eps)  # tables are rounded too
    bound = 8 * eps * (1 + abs(as_bshd(x, layout)).max(initial=0.0))
    assert (abs(as_bshd(twice, layout) - as_bshd(x, layout)) <= bound).all()
    return "back and forth"


def angles(draw: Draw) -> str:
    """Compute the tables of a rope at positions in ±2²⁴, and on several axes, from the exact frequencies."""
    pairs, base = draw.choice((1, 2, 4, 6)), draw.choice((1e2, 1e4, 5e5))
    axes = Axes.sections((pairs, pairs)) if draw.random() < 0.3 else None
    rope = Rope(2 * pairs * (1 if axes is None else 2), base, draw.choice(PAIRINGS), axes=axes)
    places = [[draw.randint(-(2**24), 2**24) for _ in range(3)] for _ in range(1 if axes is None else 2)]
    positions = torch.tensor(places, dtype=draw.choice((torch.int32, torch.int64)))
    made = rope.at(positions[0] if axes is None else positions, dtype=draw.choice((torch.float32, torch.float64)))
    speeds = [float(w) for w in oracle.inv_freq(base, rope.rotary_dim)]
    count = len(speeds)
    by_row = [oracle.cos_sin(row, speeds) for row in places]
    of_pair = [0] * count if axes is None else [0] * pairs + [1] * pairs
    # The float64 frequency may be off by a unit in the last place, and the table is rounded once.
    allowed = 2**-25 + 2**24 * 2**-51
    for table, which in ((made.cos, 0), (made.sin, 1)):
        wanted = np.stack([by_row[of_pair[pair]][which][:, pair] for pair in range(count)], axis=1)
        assert (abs(table.double().numpy() - wanted) <= allowed).all(), f"{rope} at {places}"
    return "one axis" if axes is None else "two axes"


# ---- norm, rotation and cache in one call


@dataclass
class Heads:
    """Queries and keys, a rotation, a norm, and the sizes from which they were drawn."""

    layout: Any
    batch: int
    seq: int
    q: Tensor
    k: Tensor
    turn: Rotation
    norm: QKNorm | None

    @classmethod
    def drawn(cls, draw: Draw, dtypes: list[torch.dtype], *, normed: bool) -> Heads:
        layout, dtype = draw.choice(LAYOUTS), draw.choice(dtypes)
        kv_heads, seq, pairs = draw.choice((1, 2, 3)), draw.choice((1, 1, 2, 5)), draw.choice((1, 2, 4, 8, 16))
        per_head = draw.random() < 0.4
        batch = 1 if layout == "thd" else draw.choice((1, 2, 3, kv_heads))
        heads = kv_heads if per_head else kv_heads * draw.choice((1, 2, 4))
        offset = draw.choice((0, 0, 3))
        head_dim = 2 * pairs + offset + draw.choice((0, 0, 2))
        size: tuple[int, ...] = (seq, pairs)
        size = (kv_heads, *size) if per_head else size
        size = (batch, *size) if layout != "thd" and draw.random() < 0.4 else size
        angle = torch.randn(size, dtype=torch.float64)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        turn = Rotation(
            *(t.to(wide) for t in (angle.cos(), angle.sin())),
            pairing=draw.choice(PAIRINGS),
            head_dim=head_dim,
            rotary_offset=offset,
            per_head=per_head,
        )
        q, k = (Guarded(draw, shape(layout, batch, seq, n, head_dim), dtype).x for n in (heads, kv_heads))
        weights = [torch.randn(head_dim).to(draw.choice((dtype, wide))) for _ in range(2)]
        weights = weights if weights[0].dtype == weights[1].dtype else [w.to(wide) for w in weights]
        norm = QKNorm(*weights, EPS, draw.random() < 0.3) if normed else None
        return cls(layout, batch, seq, q, k, turn, norm)

    def exact(self, x: Tensor, which: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return x normalized and rounded as the norm rounds it, then rotated, and Σ|terms|: [batch, seq, heads, …]."""
        normed = self.normed(x, which)
        return normed, *oracle.rotate_by_tables(normed, *self.tables(), self.turn.pairing, self.turn.rotary_offset)

    def tables(self, inverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
        tables = [t.detach() for t in (self.turn.cos, self.turn.sin)]
        tables = [t[None] if self.turn.per_head and t.ndim == 3 else t for t in tables]
        cos, sin = (broadcast(t) for t in tables)
        return cos, -sin if inverse else sin

    def normed(self, x: Tensor, which: int) -> np.ndarray:
        rows = as_bshd(x, self.layout)
        if self.norm is None:
            return rows
        weight = (self.norm.q_weight, self.norm.k_weight)[which].detach().double().numpy()
        wide = oracle.rms_norm(rows, weight, EPS, self.norm.add_one).astype(np.float64)
        return torch.tensor(wide).to(x.dtype).double().numpy()

    def check(self, y: Tensor, x: Tensor, which: int) -> None:
        """Check that y is x, normalized and rotated."""
        _, want, size = self.exact(x, which)
        if self.norm is None:
            check(y, want, size, self.layout, self.turn, flushed=y.dtype == torch.bfloat16)
            return
        # The norm may round the other way, which affects both products. The roundings of the rotation are added.
        out = torch.finfo(y.dtype)
        allowed = 4 * out.eps * size + 2 * out.eps * abs(want) + out.smallest_normal
        allowed = np.where(size == 0, 4 * out.eps * abs(want) + out.smallest_normal, allowed)
        assert (abs(as_bshd(y, self.layout) - want) <= allowed).all(), self.turn


def pools(draw: Draw, blocks: int, size: int, heads: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return caches for keys and values [blocks, size, heads, channels]: two tensors, or parts of one."""
    way = draw.randrange(6)
    if way == 0:
        k, v = torch.randn(2, blocks, size, heads, channels).to(dtype)
    elif way == 1:
        k, v = torch.randn(blocks, 2, size, heads, channels).to(dtype).unbind(1)
    elif way == 2:
        k, v = torch.randn(blocks, size, heads, 2 * channels).to(dtype).split(channels, -1)
    elif way == 3:
        k, v = (x.transpose(1, 2) for x in torch.randn(blocks, heads, size, 2 * channels).to(dtype).split(channels, -1))
    elif way == 4:
        k, v = torch.randn(blocks, size, heads, channels, 2).to(dtype).unbind(-1)
    else:
        k, v = (torch.randn(blocks, size, heads, channels).to(dtype) for _ in range(2))
    return k, v


def step(draw: Draw) -> str:
    """Normalize, rotate and store in one call. Slots without a token, and the inputs, keep their bits."""
    normed = draw.random() < 0.6
    heads = Heads.drawn(draw, DTYPES, normed=normed)
    q, k, layout = heads.q, heads.k, heads.layout
    blocks, size = draw.choice((1, 3, 20)), draw.choice((1, 4))
    tokens = heads.batch * heads.seq
    blocks += -(-tokens // size)
    v = Guarded(draw, tuple(k.shape), k.dtype).x
    caches = pools(draw, blocks, size, k.shape[layout.index("h")], k.shape[-1], k.dtype)
    before, inputs = [cache.clone() for cache in caches], [x.clone() for x in (q, k, v)]
    slots = draw.sample([*range(blocks * size), *[-1] * tokens], tokens)
    mapping = torch.tensor(slots).view((heads.seq,) if layout == "thd" else (heads.batch, heads.seq))
    made = rotate_and_store(
        *(q, k, v),
        rotation=heads.turn,
        k_cache=caches[0],
        v_cache=caches[1],
        slot_mapping=mapping,
        norm=heads.norm,
        layout=layout,
    )
    heads.check(made, q, 0)
    stored = torch.zeros_like(k)  # the keys that the cache has, in the layout of k
    views = [
        x.unsqueeze(0) if layout == "thd" else x.permute([layout.index(axis) for axis in "bshd"]) for x in (stored, v)
    ]
    rows, values = (view.movedim(2, 0) for view in views)  # heads first
    kept = torch.zeros(heads.batch, heads.seq, dtype=torch.bool)
    for token, slot in enumerate(slots):
        at, place = divmod(token, heads.seq), divmod(slot, size)
        if slot >= 0:
            kept[at] = True
            rows[(slice(None), *at)] = caches[0][place]
            assert unchanged(caches[1][place], values[(slice(None), *at)]), "a value"
            for cache, old in zip(caches, before, strict=True):
                cache[place] = old[place]
    _, want, _ = heads.exact(k, 1)
    views[0].copy_(torch.where(kept[:, :, None, None], views[0], torch.tensor(want).to(k.dtype)))
    heads.check(stored, k, 1)
    assert all(unchanged(x, old) for x, old in zip((*caches, q, k, v), (*before, *inputs), strict=True))
    return f"{'norm' if normed else 'no norm'}, tables {'per head' if heads.turn.per_head else 'shared'}"


def norm_gradient(draw: Draw) -> str:
    """Differentiate norm and rotation in one call, with frozen or trained tables, also for as many rows as heads."""
    heads = Heads.drawn(draw, [torch.float64, torch.float32], normed=True)
    trained, norm = draw.random() < 0.4, heads.norm
    assert norm is not None
    tables = [t.clone().requires_grad_(trained) for t in (heads.turn.cos, heads.turn.sin)]
    heads.turn = heads.turn._replace_tables(*tables)
    leaves = [x.clone().requires_grad_() for x in (heads.q, heads.k, norm.q_weight, norm.k_weight)]
    heads.norm = QKNorm(*leaves[2:], EPS, norm.add_one)
    made = heads.norm.rotate(heads.turn, *leaves[:2], layout=heads.layout)
    grads = [torch.randn(y.shape).to(y.dtype) for y in made]
    found = torch.autograd.grad(made, [*leaves, *(tables if trained else ())], grads)
    eps = torch.finfo(heads.q.dtype).eps
    to_tables: list[np.ndarray] = []
    for i in range(2):
        x, grad = (as_bshd(t, heads.layout) for t in (leaves[i], grads[i]))
        weight = leaves[2 + i].detach().double().numpy()
        how = heads.turn.pairing, heads.turn.rotary_offset
        back, _ = oracle.rotate_by_tables(grad, *heads.tables(), *how, inverse=True)
        wanted = oracle.rms_norm_gradient(x, weight, back, EPS, norm.add_one)
        for got, want in ((as_bshd(found[i], heads.layout), wanted[0]), (found[2 + i].double().numpy(), wanted[1])):
            # Sums of at most a few hundred terms. 1/√(mean of x²) is large only if the head has one or two channels.
            assert (abs(got - want) <= 3e3 * eps * max(1.0, abs(want).max())).all(), (
                f"{heads.turn}, batch {heads.batch}"
            )
        normed = oracle.rms_norm(x, weight, EPS, norm.add_one).astype(np.float64)
        of_heads = (y[..., None, :] for y in (normed, grad))
        to_tables.append(np.stack(oracle.table_gradient(*of_heads, heads.turn.cos.shape[-1], *how)[:2]))
    for n, got in enumerate(found[4:]):
        parts = [part[n].transpose(0, 2, 1, 3) for part in to_tables]  # [batch, heads, seq, pairs]
        want = sum(parts) if heads.turn.per_head else sum(part.sum(1) for part in parts)
        want = want if want.ndim == got.ndim else want.sum(0)
        assert (abs(got.double().numpy() - want) <= 3e3 * eps * max(1.0, abs(want).max())).all(), f"table {heads.turn}"
    kind = f"tables {'per head' if heads.turn.per_head else 'shared'}, {'trained' if trained else 'frozen'}"
    return kind + (", as many rows as heads" if heads.turn.per_head and heads.batch == heads.turn.cos.shape[-3] else "")


# ---- caches


@dataclass
class Text:
    """The tokens of one row so far: inputs, outputs when they were computed, and positions after all shifts."""

    x: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    next: int = 0

    def first(self, count: int) -> Text:
        return Text(self.x[:count], self.out[:count], self.positions[:count], self.next)

    def check(self, rotary: Any, size: dict[str, int]) -> None:
        """Compare all outputs with one pass over the row."""
        if self.x:
            places = None if "sinks" in size else torch.tensor(self.positions)
            wanted = run_whole_row(torch.stack(self.x), rotary, *distances(len(self.x), size, places))
            torch.testing.assert_close(torch.stack(self.out), wanted, **EXACT)


class Episode:
    """A cache and the texts of its rows, changed by random requests. The outputs are compared with one pass."""

    def __init__(self, draw: Draw, size: dict[str, int], *, paged: bool) -> None:
        self.draw, self.size, self.paged = draw, size, paged
        self.rope, self.rotary = ROPES[draw.choice(sorted(ROPES))]
        self.texts: dict[int, Text] = {}
        if paged:
            options: Any = {name: n for name, n in size.items() if name == "window"}
            shape = {"blocks": BLOCKS, "block_size": draw.choice((1, 3, 4, 16)), "layout": draw.choice(("NHD", "HND"))}
            self.cache: Any = PagedKVCache(LAYERS, KV_HEADS, HEAD_DIM, dtype=torch.float64, **shape, **options)
            for pool in (*self.cache.keys, *self.cache.values):
                pool.fill_(torch.nan)  # slots that were never written must not be read
            for _ in range(draw.randint(1, 3)):
                self.texts[self.cache.admit()] = Text()
        else:
            batch = draw.randint(1, 3)
            self.cache = cache_of(batch, **size)
            self.texts = {row: Text() for row in range(batch)}

    def run(self, count: int) -> None:
        ways: list[Callable[[], None]] = [self.step] * 5 + [self.stop, self.reset]
        ways += [self.shift] if self.rope is not None else []
        ways += [self.admit, self.fork, self.free] if self.paged else [self.reorder]
        for _ in range(count):
            self.draw.choice(ways)()
            rows = self.texts if self.paged else range(len(self.texts))
            assert self.cache.length.tolist() == [len(self.texts[row].x) for row in rows]
            assert self.cache.position.tolist() == [self.texts[row].next for row in rows]
        for text in self.texts.values():
            text.check(self.rotary, self.size)
        if self.paged:
            self.cache.free(self.cache.rows)
            assert self.cache.free_blocks == BLOCKS

    def chosen(self) -> dict[str, Any]:
        """Return the rows of the next step: of a paged cache, some of them in any order."""
        if not self.paged or not self.texts:
            return {}
        return {"rows": self.draw.sample(list(self.texts), self.draw.randint(1, len(self.texts)))}

    def step(self) -> None:
        """Run some tokens: with padding, at explicit positions, or after dropping the last ones."""
        options, seq = self.chosen(), self.draw.choice((1, 1, 1, 2, 3, 7))
        rows = options.get("rows", list(self.texts))
        if not rows or max(len(self.texts[row].x) for row in rows) + seq > 24:
            return
        if not self.size.get("window") and self.draw.random() < 0.2:
            self.drop(rows, options)
        real = torch.ones(len(rows), seq, dtype=torch.bool)
        if self.draw.random() < 0.4:
            options["attention_mask"] = real = torch.rand(len(rows), seq) < 0.6
        starts = torch.tensor([[self.texts[row].next] for row in rows])
        places = starts + (real.cumsum(1) - 1).clamp(min=0)
        if "sinks" not in self.size and self.draw.random() < 0.2:
            options["positions"] = places = torch.randint(-9, 9, (len(rows), seq))
        x = torch.randn(len(rows), seq, HIDDEN, dtype=torch.float64)
        out = run(self.cache, x, self.rope, **options)
        for i, row in enumerate(rows):
            text, new = self.texts[row], [j for j in range(seq) if real[i, j]]
            text.x += [x[i, j] for j in new]
            text.out += [out[i, j] for j in new]
            text.positions += [int(places[i, j]) for j in new]
            text.next = int(places[i, new].max()) + 1 if new else text.next

    def drop(self, rows: list[int], options: dict[str, Any]) -> None:
        for row in rows:
            text = self.texts[row]
            text.check(self.rotary, self.size)
            at = text.next - self.draw.randint(-1, 4)
            later = [i for i, position in enumerate(text.positions) if position >= at]
            self.texts[row] = text.first(min(later, default=len(text.x)))
            self.texts[row].next = at
        options["at"] = torch.tensor([self.texts[row].next for row in rows])

    def stop(self) -> None:
        """Run tokens of NaN that only the first layer stores, and roll back. Nothing of them may remain."""
        options, seq = self.chosen(), 1 if "window" in self.size and not self.paged else self.draw.choice((1, 4))
        rows = options.get("rows", list(self.texts))
        if self.rope is None or not rows or max(len(self.texts[row].x) for row in rows) + seq > 24:
            return
        nan = torch.full((len(rows), seq, HIDDEN), torch.nan, dtype=torch.float64)
        stopped(self.cache, nan, self.draw.choice((0, 1)), **options)
        self.cache.rollback()

    def shift(self) -> None:
        options = self.chosen()
        for row in options.get("rows", self.texts):
            text = self.texts[row]
            text.check(self.rotary, self.size)
            text.positions, text.next = [p + 5 for p in text.positions], text.next + 5
        if self.texts:
            self.cache.shift(self.rope, 5, **options)

    def reset(self) -> None:
        rows = self.draw.sample(list(self.texts), self.draw.randint(0, len(self.texts)))
        for row in rows:
            self.texts[row].check(self.rotary, self.size)
            self.texts[row] = Text()
        self.cache.reset(rows)

    def reorder(self) -> None:
        rows = [self.draw.randrange(len(self.texts)) for _ in self.texts]
        for text in self.texts.values():
            text.check(self.rotary, self.size)
        self.cache.reorder(torch.tensor(rows))
        before = self.texts
        self.texts = {row: before[other].first(len(before[other].x)) for row, other in enumerate(rows)}

    def admit(self) -> None:
        if len(self.texts) < 4:
            self.texts[self.cache.admit()] = Text()

    def fork(self) -> None:
        if not self.texts or len(self.texts) > 4:
            return
        row = self.draw.choice(list(self.texts))
        text = self.texts[row]
        if "window" in self.size or self.draw.random() < 0.4:
            self.texts[self.cache.fork(row)] = text.first(len(text.x))
            return
        count = self.draw.randint(0, len(text.x))
        part = text.first(count)
        part.next = max(part.positions, default=-1) + 1
        self.texts[self.cache.fork(row, count)] = part

    def free(self) -> None:
        if self.texts:
            row = self.draw.choice(list(self.texts))
            self.texts.pop(row).check(self.rotary, self.size)
            self.cache.free(row)


def kv_cache(draw: Draw) -> str:
    """Run a model with a KVCache: padding, positions, at, shift, rollback, reset, reorder, window and sinks."""
    sizes: list[dict[str, int]] = [{"capacity": 24}, {"window": draw.randint(1, 8)}]
    size = draw.choice([*sizes, {"window": draw.randint(1, 6), "sinks": draw.randint(1, 3)}])
    Episode(draw, size, paged=False).run(8)
    return " and ".join(size)


def paged_cache(draw: Draw) -> str:
    """Run a model with a PagedKVCache: also fork, free, shared prefixes, and blocks of any size."""
    size: dict[str, int] = {} if draw.random() < 0.7 else {"window": draw.randint(1, 8)}
    Episode(draw, size, paged=True).run(10)
    return "window" if size else "all tokens"


def requests(draw: Draw) -> str:
    """Send the random requests of the tests to a PagedKVCache, which check every block."""
    size = draw.choice(test_paged_cache.SIZES)
    test_paged_cache.run(draw.randrange(2**31), size, 12)
    return "window" if "window" in size else "all tokens"


KINDS: dict[Callable[[Draw], str], int] = {
    rotation: 45,
    inverse: 5,
    angles: 5,
    step: 20,
    norm_gradient: 13,
    kv_cache: 5,
    paged_cache: 5,
    requests: 2,
}
"""The kinds of cases, and how many of 100 cases are of each kind."""


def case(seed: int) -> tuple[str, str]:
    """Run one case. Return its kind, and what was drawn."""
    draw = Draw(seed)
    torch.manual_seed(seed)
    (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
    return kind.__name__, kind(draw)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000, help="number of cases")
    parser.add_argument("--seed", type=int, help="seed of the first case; the next cases have the next seeds")
    given = parser.parse_args(words)
    first = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    torch.set_num_threads(1)
    print(f"seed {first}", flush=True)
    counted: Counter[tuple[str, str]] = Counter()
    wrong, began = 0, time.monotonic()
    for n, seed in enumerate(range(first, first + given.cases)):
        try:
            counted[case(seed)] += 1
        except Exception as e:
            wrong += 1
            place = traceback.extract_tb(e.__traceback__)[-1]
            print(f"WRONG: --seed {seed} --cases 1: {type(e).__name__} at {Path(place.filename).name}:{place.lineno}")
            print("    " + " ".join(str(e).split())[:300], flush=True)
        if (n + 1) % 1000 == 0:
            print(f"{n + 1} cases, {wrong} wrong, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    for (kind, drawn), count in sorted(counted.items()):
        print(f"{count:6}  {kind:14} {drawn}")
    print(f"{given.cases - wrong} of {given.cases} cases are right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
