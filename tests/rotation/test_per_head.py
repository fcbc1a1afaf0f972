"""Rotations with one table per head: every use gives the same result as rotating head by head."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap
from torch.utils import _pytree as pytree

import oracle
from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, as_bshd, check, expected, shape
from ropewalk import KVCache, Rope, RopeError, RotaryAttention, Rotation, formats

BATCH, SEQ, HEADS, DIM, PAIRS, OFFSET = 2, 5, 3, 20, 6, 4
RANKS = {"shared by the batch": (HEADS, SEQ, PAIRS), "each row": (BATCH, HEADS, SEQ, PAIRS)}
CASES = [(layout, rank) for layout in LAYOUTS for rank in RANKS if layout != "thd" or rank != "each row"]


def made(layout: str, dtype: torch.dtype = torch.float32, heads: int = HEADS) -> Tensor:
    return torch.randn(shape(layout, BATCH, SEQ, heads, DIM)).to(dtype)


def make_rotation(rank: str, pairing: str = "half", dtype: torch.dtype = torch.float32, **more: Any) -> Rotation:
    cos, sin = (torch.randn(RANKS[rank], dtype=dtype) for _ in range(2))
    return Rotation(cos, sin, pairing=pairing, head_dim=DIM, rotary_offset=OFFSET, per_head=True, **more)


def with_batch_axis(table: Tensor) -> Tensor:
    return table if table.ndim == 4 else table.unsqueeze(0)


def check_rotated(rotation: Rotation, x: Tensor, y: Tensor, layout: str) -> None:
    exact = expected(
        x, with_batch_axis(rotation.cos), with_batch_axis(rotation.sin), layout, rotation.pairing, OFFSET, inverse=False
    )
    check(y, *exact, layout, layout)


@pytest.mark.parametrize(("layout", "rank"), CASES)
@pytest.mark.parametrize("pairing", PAIRINGS)
class TestEveryVariant:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_new_and_in_place(self, layout: str, rank: str, pairing: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        rotation, q, k = make_rotation(rank, pairing), made(layout, dtype), made(layout, dtype)
        before = q.clone()
        rotated = rotation(q, k, layout=layout)
        for x, y in zip((q, k), rotated, strict=True):
            assert y.dtype == dtype
            check_rotated(rotation, x, y, layout)
        assert torch.equal(rotation(q, layout=layout), rotated[0])
        assert torch.equal(q, before)
        rotation.apply_(q, k, layout=layout)
        assert torch.equal(q, rotated[0])
        assert torch.equal(k, rotated[1])

    def test_inverse(self, layout: str, rank: str, pairing: str) -> None:
        torch.manual_seed(2)
        angle, q = torch.randn(RANKS[rank], dtype=torch.float64), made(layout, torch.float64)
        tables = 1.25 * angle.cos(), 1.25 * angle.sin()
        rotation = Rotation(
            *tables, pairing=pairing, head_dim=DIM, rotary_offset=OFFSET, attention_factor=1.25, per_head=True
        )
        undone = rotation.inverse()
        assert undone.per_head
        torch.testing.assert_close(undone(rotation(q, layout=layout), layout=layout), q)

    def test_gradients(self, layout: str, rank: str, pairing: str) -> None:
        torch.manual_seed(3)
        q, k = (made(layout, torch.float64).requires_grad_() for _ in range(2))
        cos, sin = (torch.randn(RANKS[rank], dtype=torch.float64, requires_grad=True) for _ in range(2))
        rotation = Rotation(cos, sin, pairing=pairing, head_dim=DIM, rotary_offset=OFFSET, per_head=True)
        incoming = [torch.randn_like(q), torch.randn_like(k)]
        torch.autograd.backward(rotation(q, k, layout=layout), incoming)
        parts = []
        for x, grad in zip((q, k), incoming, strict=True):
            assert x.grad is not None
            back = expected(grad, with_batch_axis(cos), with_batch_axis(sin), layout, pairing, OFFSET, inverse=True)
            check(x.grad, *back, layout, "gradient")
            of_heads = (
                as_bshd(y, layout)[..., None, :] for y in (x, grad)
            )  # one head, because the oracle sums over heads
            parts.append(oracle.table_gradient(*of_heads, PAIRS, pairing, OFFSET))
        for table, which in ((cos, 0), (sin, 1)):
            exact = sum(part[which] for part in parts).transpose(0, 2, 1, 3)
            exact = exact if table.ndim == 4 else exact.sum(0)
            assert table.grad is not None
            np.testing.assert_allclose(table.grad, exact, rtol=0, atol=1e-13)  # sums of 16 numbers of size 10

    def test_by_finite_differences(self, layout: str, rank: str, pairing: str) -> None:
        torch.manual_seed(4)
        q = torch.randn(shape(layout, BATCH, 2, 2, 6), dtype=torch.float64, requires_grad=True)
        size = (2, 2, 2) if rank == "shared by the batch" else (BATCH, 2, 2, 2)
        cos, sin = (torch.randn(size, dtype=torch.float64, requires_grad=True) for _ in range(2))

        def rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            rotation = Rotation(cos, sin, pairing=pairing, head_dim=6, rotary_offset=1, per_head=True)
            return rotation(q, layout=layout)

        def in_place(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            q = q * 1
            Rotation(cos, sin, pairing=pairing, head_dim=6, rotary_offset=1, per_head=True).apply_(q, layout=layout)
            return q

        assert gradcheck(rotated, (q, cos, sin), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(rotated, (q, cos, sin))
        assert gradcheck(in_place, (q, cos, sin))


class TestOtherUses:
    def test_rows_of_a_table(self) -> None:
        torch.manual_seed(5)
        cos, sin = (torch.randn(HEADS, 9, PAIRS, requires_grad=True) for _ in range(2))
        table = Rotation(cos, sin, pairing="half", per_head=True)
        assert table.tokens == (9,)
        for rows in (torch.tensor([8, 0, 8, 3, 1]), torch.randint(9, (BATCH, SEQ), dtype=torch.int32)):
            taken = table[rows]
            assert taken.tokens == tuple(rows.shape)
            wanted = torch.stack([cos[h][rows.long()] for h in range(HEADS)], dim=-3)
            assert torch.equal(taken.cos, wanted)
        q = torch.randn(BATCH, SEQ, HEADS, 2 * PAIRS)
        taken(q, layout="bshd").sum().backward()
        assert cos.grad is not None
        assert cos.grad.shape == cos.shape
        assert torch.equal(table[2:7].sin, sin[:, 2:7])
        assert table[2:7].per_head
        with pytest.raises(RopeError, match=r"one for positions \[seq\], got tables of shape \(2, 3, 5, 6\)"):
            make_rotation("each row")[torch.tensor([0])]

    def test_files_moves_and_pytrees(self, tmp_path: Path) -> None:
        rotation, q = make_rotation("each row", attention_factor=1.25), made("bshd")
        wanted = rotation(q, layout="bshd")
        torch.save(rotation, tmp_path / "rotation.pt")
        for other in (
            pickle.loads(pickle.dumps(rotation)),
            torch.load(tmp_path / "rotation.pt", weights_only=True),
            rotation.to("cpu"),
            pytree.tree_map(torch.clone, rotation),
        ):
            assert other.per_head
            assert other.attention_factor == 1.25
            assert torch.equal(other(q, layout="bshd"), wanted)
        assert "tokens=(2, 5), pairs=6, pairing='half', heads=3" in repr(rotation)

    def test_vmap(self) -> None:
        """Without the batch axis, tables [heads, seq, pairs] must not be mistaken for [batch, seq, pairs]."""
        torch.manual_seed(6)
        rotation = make_rotation("each row")
        q = torch.randn(BATCH, HEADS, SEQ, HEADS, DIM)  # mapped, batch, seq, heads: as many rows as heads
        rotated = vmap(lambda rotation, q: rotation(q, layout="bshd"))(rotation, q)
        for n in range(BATCH):
            check(
                rotated[n],
                *expected(q[n], rotation.cos[n, None], rotation.sin[n, None], "bshd", "half", OFFSET, inverse=False),
                "bshd",
                n,
            )

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_compiled_and_exported(self, layout: str) -> None:
        torch.manual_seed(7)
        rotation, q, k = make_rotation("shared by the batch"), made(layout), made(layout)
        wanted = rotation(q, k, layout=layout)

        class Rotate(torch.nn.Module):
            def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
                rotation = Rotation(cos, sin, pairing="half", head_dim=DIM, rotary_offset=OFFSET, per_head=True)
                return rotation(q, k, layout=layout)

        torch._dynamo.reset()
        given = (q, k, rotation.cos, rotation.sin)
        compiled = torch.compile(Rotate(), fullgraph=True, backend="aot_eager")
        exported = torch.export.export(Rotate(), given).module()
        for rotated in (compiled(*given), exported(*given)):
            for y, z in zip(rotated, wanted, strict=True):
                torch.testing.assert_close(y, z)

    def test_exported_as_an_argument(self) -> None:
        rotation, q = make_rotation("shared by the batch"), made("bshd")

        class Rotate(torch.nn.Module):
            def forward(self, rotation: Rotation, q: Tensor) -> Tensor:
                return rotation(q, layout="bshd")

        exported = torch.export.export(Rotate(), (rotation, q)).module()
        torch.testing.assert_close(exported(rotation, q), rotation(q, layout="bshd"))

    @pytest.mark.usefixtures("built")
    @pytest.mark.parametrize(("layout", "rank"), CASES)
    def test_operators(self, layout: str, rank: str) -> None:
        """Operators always expect a batch axis, because four axes indicate tables per head."""
        rotation, q, k = make_rotation(rank), made(layout), made(layout)
        cos, sin = with_batch_axis(rotation.cos), with_batch_axis(rotation.sin)
        wanted = rotation(q, k, layout=layout)
        rotated = torch.ops.ropewalk.rotate([q, k], cos, sin, layout, False, OFFSET, False)
        for y, z in zip(rotated, wanted, strict=True):
            assert torch.equal(y, z)
        with pytest.raises(RopeError, match="must have 3 heads"):
            torch.ops.ropewalk.rotate([made(layout, heads=2)], cos, sin, layout, False, OFFSET, False)

    @pytest.mark.parametrize("rank", RANKS)
    def test_formats_keep_the_heads(self, rank: str) -> None:
        """Also for as many heads as rows, where tables per head have the shape of shared ones."""
        torch.manual_seed(9)
        rotation, q = (
            make_rotation(rank),
            torch.randn(HEADS if rank == "shared by the batch" else BATCH, SEQ, HEADS, DIM),
        )
        how: dict[str, Any] = {"head_dim": DIM, "rotary_offset": OFFSET, "per_head": True}
        wide = formats.to_full_width(rotation, repeated="each")
        assert wide[0].shape == (*RANKS[rank][:-1], 2 * PAIRS)
        for back in (
            formats.from_full_width(*wide, repeated="each", pairing="half", **how),
            formats.from_complex(formats.to_complex(rotation), pairing="half", **how),
        ):
            assert torch.equal(back.cos, rotation.cos)
            check_rotated(rotation, q, back(q, layout="bshd"), "bshd")
        with pytest.raises(RopeError, match=r"a table for positions \[rows\], which all heads share, got tables of"):
            formats.to_cache(rotation)

    @torch.no_grad()
    def test_in_attention_with_a_cache(self) -> None:
        """Decoding token by token equals one pass. Tables of another shape are refused, even if sizes agree."""
        torch.manual_seed(8)
        angle, rows = torch.randn(2, 7, 4), torch.arange(7)
        table = Rotation(angle.cos(), angle.sin(), pairing="half", per_head=True)
        attention, x = RotaryAttention(16, 2), torch.randn(2, 7, 16)
        whole = attention(x, table[rows])
        cache = KVCache(num_layers=1, batch=2, capacity=7, num_kv_heads=2, head_dim=8)
        parts = []
        for n in range(7):
            step = cache.step(1)
            parts.append(attention(x[:, n : n + 1], table[step.positions], cache=step.layer(0)))
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)
        cache.reset()
        step = cache.step(7)
        with pytest.raises(RopeError, match=r"got one for tokens of shape \(7,\)"):
            attention(x, table, cache=step.layer(0))  # [heads, seq] has the size of [batch, seq] here


class TestRefused:
    def test_tables_per_head_without_the_flag(self) -> None:
        table = torch.ones(RANKS["each row"])
        with pytest.raises(
            RopeError, match=r"\[heads, seq, pairs\] or \[batch, heads, seq, pairs\], pass per_head=True"
        ):
            Rotation(table, table, pairing="half")

    @pytest.mark.parametrize("size", [(SEQ, PAIRS), (PAIRS,), (1, 1, 1, 1, 1), (HEADS, SEQ, 0)])
    def test_other_shapes(self, size: tuple[int, ...]) -> None:
        table = torch.ones(size)
        must = (
            "with per_head=True, cos and sin must have the same shape [heads, seq, pairs] or [batch, heads, seq, pairs]"
        )
        with pytest.raises(RopeError, match=re.escape(must)):
            Rotation(table, table, pairing="half", per_head=True)

    @pytest.mark.parametrize("flag", [3, None, "heads", torch.ones(())])
    def test_other_flags(self, flag: Any) -> None:
        table = torch.ones(RANKS["each row"])
        with pytest.raises(RopeError, match="per_head must be True or False"):
            Rotation(table, table, pairing="half", per_head=flag)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_other_numbers_of_heads(self, layout: str) -> None:
        """Tables are never repeated over heads, even for a single head."""
        rotation, q = make_rotation("shared by the batch"), made(layout)
        for heads in (1, 2, 6):
            k = made(layout, heads=heads)
            with pytest.raises(RopeError, match=rf"k in layout '{layout}' must have 3 heads.*GQA.*its own Rotation"):
                rotation(q, k, layout=layout)
            with pytest.raises(RopeError, match="q in layout"):
                rotation.apply_(k, layout=layout)
            own = Rotation(*(torch.ones(heads, SEQ, PAIRS),) * 2, pairing="half", head_dim=DIM, per_head=True)
            assert own(k, layout=layout).shape == k.shape

    def test_tokens_batch_and_layout(self) -> None:
        rotation = make_rotation("each row")
        with pytest.raises(RopeError, match="must have 5 tokens"):
            rotation(torch.randn(BATCH, SEQ + 1, HEADS, DIM), layout="bshd")
        with pytest.raises(RopeError, match="must have batch size 2"):
            rotation(torch.randn(BATCH + 1, SEQ, HEADS, DIM), layout="bshd")
        with pytest.raises(RopeError, match="layout 'thd' has no batch axis"):
            rotation(torch.randn(SEQ, HEADS, DIM), layout="thd")

    def test_tables_that_something_changed(self) -> None:
        """The flag is part of the Rotation, so tables of another kind that `tree_map` inserts are detected."""
        shared = Rope(DIM, 1e4, "half").at(torch.arange(SEQ).expand(BATCH, SEQ))
        wider = pytree.tree_map(lambda table: torch.stack([table] * HEADS, dim=1), shared)
        with pytest.raises(RopeError, match="cos and sin must have the same shape"):
            wider(made("bshd"), layout="bshd")
        narrower = pytree.tree_map(lambda table: table[0, 0], make_rotation("each row"))
        with pytest.raises(RopeError, match="with per_head=True"):
            narrower(made("bshd"), layout="bshd")
