"""Random requests to a PagedKVCache, and its expected content: a plain list of tokens for each row."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_model import ROPES, ROUNDING, StoppedError, Token, attend_in_layer, draw_moves
from ropewalk import PagedKVCache, PagedStep, RopeError

LAYERS, HEADS, WIDTH = 2, 2, 6


def blocks_of(cache: PagedKVCache) -> dict[int, tuple[list[int], int]]:
    """Return the blocks of each row, and the number of its skipped blocks, by row number."""
    table = cache._rows.table
    counts = zip(table.blocks.tolist(), table.counts.tolist(), table.skipped.tolist(), strict=True)
    rows = [(blocks[:count], skipped) for blocks, count, skipped in counts]
    return {number: rows[i] for number, i in cache._rows.index.items()}


class Requests:
    """A cache, the expected tokens of each row, and random requests that change both.

    Keys and values are random, in float64. A shift rotates the keys of the list by the formula.
    """

    def __init__(
        self, seed: int, *, blocks: int, block_size: int, window: int | None = None, sinks: int = 0, **options: Any
    ) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.total, self.size, self.window, self.sinks = blocks, block_size, window, sinks
        options = {"window": window, "sinks": sinks, "dtype": torch.float64, **options}
        self.cache = PagedKVCache(LAYERS, HEADS, WIDTH, blocks=blocks, block_size=block_size, **options)
        self.rounding = ROUNDING[options.get("store")]
        for store in self.cache._stores:  # slots that were never written must not be read
            for pool in vars(store).values():
                if isinstance(pool, Tensor) and pool.is_floating_point():
                    pool.fill_(torch.nan)
        self.tokens: dict[int, list[Token]] = {}
        self.following: dict[int, int] = {}
        self.asked = self.refused = self.served = 0

    def count_unheld(self) -> int:
        """Return the number of blocks that no row holds, including those allocated for an open step."""
        return self.total - len({block for blocks, _ in blocks_of(self.cache).values() for block in blocks})

    def is_refused(self, request: Callable[..., object], *given: Any, **options: Any) -> bool:
        """Send a request. Return whether it was refused because there were not enough blocks."""
        try:
            request(*given, **options)
        except RopeError as e:
            if "number of free blocks must be" not in str(e):
                raise
            self.refused += 1
            return True
        return False

    def choose_rows(self, rows: list[int]) -> list[int]:
        """Select some of the rows, in random order."""
        return self.draw.sample(rows, self.draw.randint(1, len(rows)))

    def request(self) -> None:
        """Send one random request of a server, and check the whole cache."""
        rows, draw = list(self.tokens), self.draw
        self.asked += 1
        ways = ["admit"] * 2 if len(rows) < 6 else ["free"]
        if rows:
            ways += ["step"] * 8 + [
                "fork",
                "reorder",
                "shift",
                "move",
                "free",
                "reset",
                "stopped",
                "dropped",
                "poisoned",
            ]
            ways += [] if self.window else ["truncate"]
            ways = [way for way in ways if not (self.sinks and way == "move")]
        getattr(self, draw.choice(ways))(rows)
        self.check_everything()

    def admit(self, rows: list[int]) -> None:
        row = self.cache.admit()
        assert row not in rows
        self.tokens[row], self.following[row] = [], 0

    def free(self, rows: list[int]) -> None:
        ended = self.choose_rows(rows) if self.draw.random() < 0.3 else [self.draw.choice(rows)]
        self.cache.free(ended if len(ended) > 1 else ended[0])
        for row in ended:
            del self.tokens[row], self.following[row]

    def reset(self, rows: list[int]) -> None:
        chosen = self.choose_rows(rows)
        self.cache.reset(None if len(chosen) == len(rows) else chosen)
        for row in chosen:
            self.tokens[row], self.following[row] = [], 0

    def fork(self, rows: list[int]) -> None:
        other = self.draw.choice(rows)
        tokens, following, options = list(self.tokens[other]), self.following[other], {}
        if self.window is None and self.draw.random() < 0.5:
            options["length"] = self.draw.randint(0, len(tokens))
            tokens = tokens[: options["length"]]
            following = max((token.position for token in tokens), default=-1) + 1
        unheld = self.count_unheld()
        row = self.cache.fork(other, **options)
        assert self.cache.free_blocks == unheld
        self.tokens[row], self.following[row] = tokens, following

    def reorder(self, rows: list[int]) -> None:
        chosen = self.choose_rows(rows)
        parents = [self.draw.choice(rows) for _ in chosen]
        self.cache.reorder(parents, rows=None if chosen == rows else torch.tensor(chosen))
        self.tokens |= {row: list(self.tokens[parent]) for row, parent in zip(chosen, parents, strict=True)}
        self.following |= dict(zip(chosen, [self.following[parent] for parent in parents], strict=True))

    def shift(self, rows: list[int]) -> None:
        (rope, rotary), chosen = ROPES["YaRN, partial"], self.choose_rows(rows)
        each = self.draw.random() < 0.5
        deltas = [self.draw.choice([0, 5, -300]) if each else 7 for _ in chosen]
        unheld = self.count_unheld()
        if self.is_refused(self.cache.shift, rope, torch.tensor(deltas) if each else deltas[0], rows=chosen):
            assert unheld < sum(-(-len(self.tokens[row]) // self.size) for row in chosen)  # copies of all would not fit
            return
        for row, delta in zip(chosen, deltas, strict=True):
            self.following[row] += delta
            self.tokens[row] = [token.moved(rotary, delta, self.rounding) for token in self.tokens[row]]

    def move(self, rows: list[int]) -> None:
        """Move some of the cached tokens of a row. Tokens at one position move together."""
        (rope, rotary), row = ROPES["YaRN, partial"], self.draw.choice(rows)
        blocks, skipped = blocks_of(self.cache)[row]
        evicted, held = self.tokens[row][: skipped * self.size], self.tokens[row][skipped * self.size :]
        if not held:
            return
        places = draw_moves(self.draw, held)
        unheld, pair = self.count_unheld(), (torch.tensor(list(places)), torch.tensor(list(places.values())))
        if self.is_refused(self.cache.move, rope, row, *pair):
            assert unheld < len(blocks)  # copies of all would not fit
            return
        held = [token.moved_to(places, rotary, self.rounding) for token in held]
        self.tokens[row], self.following[row] = evicted + held, max(token.position for token in held) + 1

    def step(self, rows: list[int], *, layers: int = LAYERS, at: bool = False) -> None:
        """Append new tokens to some rows, with padding anywhere, at consecutive or explicit positions.

        If not all layers store them, they are NaN, of which nothing may remain.
        """
        chosen, seq = self.choose_rows(rows), self.draw.choice([1, 1, 1, 2, 3, 7])
        options: dict[str, Any] = {} if chosen == rows else {"rows": chosen}
        real = torch.ones(len(chosen), seq, dtype=torch.bool)
        if self.draw.random() < 0.4:
            options["attention_mask"] = real = torch.rand(len(chosen), seq) < 0.6
        kept, starts = {row: self.tokens[row] for row in chosen}, dict(self.following)
        if at:
            for row in chosen:
                starts[row] = self.following[row] + self.draw.randint(-8, 2)
                later = [i for i, token in enumerate(kept[row]) if token.position >= starts[row]]
                kept[row] = kept[row][: min(later, default=len(kept[row]))]
            options["at"] = torch.tensor([starts[row] for row in chosen])
        places = torch.tensor([[starts[row]] for row in chosen]) + (real.cumsum(1) - 1).clamp(min=0)
        if not self.sinks and self.draw.random() < 0.2:
            options["positions"] = places = torch.randint(-9, 9, (len(chosen), seq))
        ends = {row: -(-len(kept[row]) // self.size) for row in chosen} if at else {}
        held = {row: blocks for row, (blocks, _) in blocks_of(self.cache).items()}
        dropped = set().union(*held.values()).difference(*(held[row][: ends.get(row)] for row in held))
        new = (-(-(len(kept[row]) + int(real[i].sum())) // self.size) for i, row in enumerate(chosen))
        least = sum(new) - sum(-(-len(kept[row]) // self.size) for row in chosen) - len(dropped)
        free, unheld = self.cache.free_blocks, self.count_unheld()
        steps: list[PagedStep] = []
        if self.is_refused(lambda: steps.append(self.cache.step(seq, **options))):
            assert unheld < least + len(chosen)  # each row may need a copy of its last block
            assert self.cache.free_blocks == free
            return
        assert unheld >= least
        step = steps[0]
        k, v = torch.randn(2, LAYERS, len(chosen), seq, HEADS, WIDTH, dtype=torch.float64)
        if layers < LAYERS:
            k, v = k.fill_(torch.nan), v.fill_(torch.nan)
        if at:  # dropped at once
            for row in chosen:
                self.tokens[row], self.following[row] = kept[row], starts[row]
        self.check_everything()
        assert torch.equal(step.positions, places)
        rotation = step.rotation(ROPES["YaRN, partial"][0], dtype=torch.float64)
        attends, keys, values = self.draw.random() < 0.5, k[-1], v[-1]
        for i in range(layers):
            if attends:
                attend_in_layer(step, i, k[i], v[i], rotation)
            else:
                keys, values = step.layer(i).append(k[i], v[i])
        if layers < LAYERS:
            raise StoppedError
        turn = ROPES["YaRN, partial"][1] if attends else None
        for i, row in enumerate(chosen):
            kept_tokens = real[i].nonzero()[:, 0].tolist()
            new = [Token.of(k[:, i, j], v[:, i, j], int(places[i, j]), self.rounding, turn) for j in kept_tokens]
            self.tokens[row] = self.tokens[row] + new
            if new:
                self.following[row] = int(places[i, real[i]].max()) + 1
            # The first new token does not attend to these tokens.
            unseen = max(0, len(kept[row]) - self.window + 1) if self.window else 0
            if attends:
                continue
            self.seen(row, unseen, keys[i], values[i], step.key_order[i], step.key_positions[i])
            if new:  # otherwise, a block that another row shares may hold NaN after the last token
                assert keys[i].isfinite().all()
                assert values[i].isfinite().all()
        self.served += 1

    def seen(self, row: int, unseen: int, keys: Tensor, values: Tensor, order: Tensor, places: Tensor) -> None:
        """Check that the last layer got the tokens of the row. It may omit the first tokens outside of the window."""
        tokens, there = self.tokens[row], order < 2**62
        front = min(len(tokens), -(-self.sinks // self.size) * self.size)  # tokens in the blocks of the sinks
        first = len(tokens) - int(there.sum()) + front
        assert front <= first <= max(front, unseen)
        assert order[there].tolist() == [*range(front), *range(first, len(tokens))]
        for n, k, v, place in zip(order[there], keys[there], values[there], places[there], strict=True):
            assert ((k - tokens[n].k[-1]).abs() <= tokens[n].k_error[-1]).all()
            assert ((v - tokens[n].v[-1]).abs() <= tokens[n].v_error[-1]).all()
            assert place == tokens[n].position
        assert (places[~there] == 2**62).all()

    def truncate(self, rows: list[int]) -> None:
        self.step(rows, at=True)

    def poisoned(self, rows: list[int]) -> None:
        """Store tokens of NaN in a row. Drop them by `at`, by a fork of the tokens before them, or with the row."""
        row, seq, steps = self.draw.choice(rows), self.draw.randint(1, 5), []
        if self.is_refused(lambda: steps.append(self.cache.step(seq, rows=[row]))):
            return
        nan = torch.full((1, seq, HEADS, WIDTH), torch.nan, dtype=torch.float64)
        for i in range(LAYERS):
            steps[0].layer(i).append(nan, nan)
        tokens, at = self.tokens[row], self.following[row]
        way = "reset" if self.window else self.draw.choice(["at", "fork", "reset"])
        if way == "at":
            nothing = torch.zeros(1, 1, dtype=torch.bool)
            step = self.cache.step(1, rows=[row], at=torch.tensor([at]), attention_mask=nothing)
            for i in range(LAYERS):
                step.layer(i).append(nan[:, :1], nan[:, :1])
            later = [i for i, token in enumerate(tokens) if token.position >= at]
            self.tokens[row] = tokens[: min(later, default=len(tokens))]
        elif way == "fork":
            other = self.cache.fork(row, len(tokens))
            self.cache.free(row)
            del self.tokens[row], self.following[row]
            self.tokens[other], self.following[other] = tokens, max((t.position for t in tokens), default=-1) + 1
        else:
            self.cache.reset([row])
            self.tokens[row], self.following[row] = [], 0

    def stopped(self, rows: list[int]) -> None:
        """Run a forward pass that raises between its layers, and roll it back."""
        refused = self.refused
        try:
            self.step(rows, layers=1)
        except StoppedError:
            with pytest.raises(RopeError, match="every layer must have appended in the previous step, got 1 of 2"):
                self.cache.free(rows[0])
        else:
            assert self.refused > refused
        self.cache.rollback()

    def dropped(self, rows: list[int]) -> None:
        """Run a forward pass that raises before its first layer, without a rollback."""
        with contextlib.suppress(StoppedError):
            self.step(rows, layers=0)

    def check_everything(self) -> None:
        """Check that every row has its tokens, that no block is lost, and that none is in two places."""
        cache = self.cache
        assert cache.rows == list(self.tokens)
        assert cache.length.tolist() == [len(tokens) for tokens in self.tokens.values()]
        assert cache.position.tolist() == list(self.following.values())
        held, within = set(), self.window or 10**9
        for row, tokens in self.tokens.items():
            blocks, skipped = blocks_of(cache)[row]
            assert len(set(blocks)) == len(blocks)
            front = -(-self.sinks // self.size)  # blocks of the sinks, and behind them those that no token attends to
            assert skipped == max(0, max(0, len(tokens) - within + 1) // self.size - front)
            assert len(blocks) == -(-len(tokens) // self.size) - skipped
            held |= set(blocks)
            wanted = tokens[: front * self.size] + tokens[(front + skipped) * self.size :]
            for i in range(LAYERS if wanted else 0):
                k, v = (x[0] for x in cache._stores[i].read(torch.tensor([blocks]), len(wanted)))
                errors = torch.stack([k, v]) - torch.stack([torch.stack([t.k[i], t.v[i]]) for t in wanted], 1)
                assert (
                    errors.abs() <= torch.stack([torch.stack([t.k_error[i], t.v_error[i]]) for t in wanted], 1)
                ).all()
        open_plan = cache._rows.open_plan
        taken = set(open_plan.allocated.tolist()) if open_plan is not None else set()
        assert not held & taken
        free = cache._rows.blocks._free
        assert len(set(free)) == len(free) == cache.free_blocks
        assert not set(free) & (held | taken)
        assert len(held) + len(taken) + len(free) == self.total

    def end(self) -> None:
        """Free all rows, and check that every block is free."""
        self.cache.rollback()
        self.cache.free(self.cache.rows)
        assert self.cache.free_blocks == self.total
