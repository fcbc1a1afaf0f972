"""Tensors and tables that must not reach a kernel: each raises or uses the reference, without partial effects.

Each case once read or wrote memory outside of a tensor, or gave wrong numbers without an error.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import oracle
from kernel_cases import unchanged
from ropewalk import Rope, RopeError, Rotation
from ropewalk.rotation.api import restore

SEQ, HEAD_DIM = 4, 8
POSITIONS = torch.arange(SEQ) + 1
ROTATION = Rope(HEAD_DIM, 1e4, "half").at(POSITIONS)
COS, SIN = ROTATION.cos, ROTATION.sin


def queries(heads: int = 2) -> Tensor:
    return torch.randn(1, SEQ, heads, HEAD_DIM)


def exact(x: Tensor) -> np.ndarray:
    """Return x `[1, seq, heads, head_dim]`, rotated in float64."""
    angles = oracle.reduced(POSITIONS.tolist(), Rope(HEAD_DIM, 1e4, "half").inv_freq)[None, :, None]
    array = x.detach().double().numpy()
    return oracle.rotate(array, np.broadcast_to(angles, (*array.shape[:-1], HEAD_DIM // 2)), "half", 0, 1.0)


def check(x: Tensor, wanted: np.ndarray) -> None:
    """Compare up to the roundings of the table, two products and a sum, for numbers up to 6."""
    np.testing.assert_allclose(x.detach().double(), wanted, rtol=0, atol=3e-6)


FREED = """
import torch
from ropewalk import *
torch.set_grad_enabled(False)
def freed(*shape, dtype=torch.float32):
    x = torch.ones(shape, dtype=dtype)
    x.untyped_storage().resize_(0)
    return x
q, k, z, one = torch.ones(1, 3, 4, 8), torch.ones(1, 3, 2, 8), freed(1, 3, 2, 8), torch.ones(8)
rope, at, pool = Rope(8, 1e4, 'half'), torch.arange(3), torch.zeros(1, 9, 2, 8)
rotation, norm = rope.at(at), QKNorm(one, one, eps=1e-6)
seen = freed(1, 1, 3, 9, dtype=torch.bool)
to = dict(rotation=rotation, k_cache=pool, v_cache=pool.clone(), slot_mapping=at[None])
def layer(**size):
    step = KVCache(1, 1, 2, 8, **(size or {'capacity': 9})).step(3)
    return step.layer(0), {'rotation': step.rotation(rope)}
def attend(*given, **size):
    cache, options = layer(**size)
    cache.attend(*given, **options)
for call in (
    lambda: norm(z, k), lambda: norm(k, z), lambda: norm.rotate(rotation, z, k, layout='bshd'),
    lambda: QKNorm(one, freed(8), eps=1e-6)(q, k),
    lambda: QKNorm(freed(8), one, eps=1e-6).rotate(rotation, q, k, layout='bshd'),
    lambda: attend(q, k, z), lambda: attend(q, z, k), lambda: attend(freed(1, 3, 4, 8), k, k),
    lambda: attend(q, k, z, window=2), lambda: attend(q, k, z, capacity=9, store='int8'),
    lambda: layer()[0].append(k, z), lambda: layer()[0].append(z, k),
    lambda: layer()[0].attend(q, k, k, mask=seen),
    lambda: masks.padding(freed(1, 3, dtype=torch.int64)),
    lambda: KVCache(1, 1, 2, 8, capacity=9).step(3, attention_mask=freed(1, 3, dtype=torch.bool)),
    lambda: rotate_and_store(q, k, z, **to),
    lambda: rotate_and_store(q, k, k, **to | {'v_cache': freed(1, 9, 2, 8)}),
    lambda: paged_attention(q, freed(1, 9, 2, 8), pool, block_table=at[None, :1].int(), lengths=at[1:2]),
    lambda: move_keys(freed(4, 2, 8), at, at, rope, at, at + 1),
    lambda: move_keys(pool[0], at, at, rope, at, at + 1, values=freed(9, 2)),
):
    try:
        call()
    except RopeError as e:
        assert 'must have memory, got one whose storage was resized to 0' in str(e), e
    else:
        raise AssertionError(call.__code__.co_firstlineno)
assert not pool.any() and not to['v_cache'].any()
"""


class TestTensorsWithoutMemory:
    def test_zero_tensor(self) -> None:
        zero = torch._efficientzerotensor((1, SEQ, 2, HEAD_DIM))
        assert torch.equal(ROTATION(zero, layout="bshd"), torch.zeros(1, SEQ, 2, HEAD_DIM))
        q = queries()
        before = q.clone()
        for pair in ((zero,), (q, zero), (zero, q)):
            with pytest.raises(RopeError, match=r"Rotation\.apply_: each element must have memory, got a zero tensor"):
                ROTATION.apply_(*pair, layout="bshd")
        assert torch.equal(q, before)

    def test_gradient_that_is_a_zero_tensor(self) -> None:
        x = queries().requires_grad_()
        torch.sgn(ROTATION(x, layout="bshd")).sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x))

    def test_tables_that_are_zero_tensors(self) -> None:
        zero = torch._efficientzerotensor((SEQ, HEAD_DIM // 2))
        assert not Rotation(zero, zero, pairing="half")(queries(), layout="bshd").any()

    @pytest.mark.parametrize("what", ["q", "k", "cos"])
    def test_storage_that_was_resized_to_0(self, what: str, used: None) -> None:
        """FSDP does this with parameters that are currently not needed."""
        rotation, tensors = pytree.tree_map(torch.clone, ROTATION), {"q": queries(), "k": queries()}
        {**tensors, "cos": rotation.cos}[what].untyped_storage().resize_(0)
        for call in (rotation, rotation.apply_):
            with pytest.raises(RopeError, match="must have memory, got one whose storage was resized to 0"):
                call(**tensors, layout="bshd")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_q_is_unchanged_if_k_has_no_storage(self, dtype: torch.dtype, used: None) -> None:
        """q must not change if k has no memory, even if q and k need separate calls because their dtypes differ."""
        q, k = queries(), queries().to(dtype)
        before = q.clone()
        k.untyped_storage().resize_(0)
        with pytest.raises(RopeError, match="must have memory, got one whose storage was resized to 0"):
            ROTATION.apply_(q, k, layout="bshd")
        assert torch.equal(q, before)

    def test_no_call_takes_a_tensor_whose_storage_was_resized_to_0(self) -> None:
        """PyTorch's own operators would end the process, so these calls run in a process of their own."""
        ran = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stderr

    def test_positions_whose_storage_was_resized_to_0(self, used: None) -> None:
        positions = POSITIONS.clone()
        positions.untyped_storage().resize_(0)
        with pytest.raises(RopeError, match="must have memory"):
            Rope(HEAD_DIM, 1e4, "half").at(positions)


class TestTablesChangedBehindTheRotation:
    """Values that `tree_map`, a pickle or an exported program may put in place of the tables."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda t: torch.cat([t, t], -1),
                r"must have 4 columns, one for each pair of rotary_dim=8, got shape \(4, 8",
            ),
            (lambda t: t[..., :2], r"must have 4 columns, .*, got shape \(4, 2\)"),
            (lambda t: t[0, 0], r"must have the same shape .*, got shapes \(\) and \(\)"),
            (lambda t: t.half(), r"must both be float32 or float64, got torch.float16"),
            (lambda t: t.to_sparse(), r"must be dense tensors, got torch.sparse_coo"),
            (lambda t: t.to_mkldnn(), r"must be dense tensors, got torch._mkldnn"),
            (lambda t: t.to("meta"), r"q must be on meta, where cos and sin are, got cpu"),
            (lambda t: None, r"cos and sin must be tensors, got None"),
        ],
    )
    def test_call(self, change: Callable[[Tensor], Any], message: str) -> None:
        changed, q = pytree.tree_map(change, ROTATION), queries()
        before = q.clone()
        for call in (changed, changed.apply_):
            with pytest.raises(RopeError, match=message):
                call(q, layout="bshd")
        assert torch.equal(q, before)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ((COS, SIN, "HALF", 8, 8, 0, 1.0, False), "pairing must be one of 'half', 'interleaved', got 'HALF'"),
            ((torch.ones(4, 4096), torch.ones(4, 4096), "half", 8, 8, 0, 1.0, False), "must have 4 columns"),
            ((COS, SIN, "half", 8, 7, 0, 1.0, False), "rotary_dim must be even, got 7"),
            ((COS, SIN, "half", 8, 8, 0, 1.0, True), "with per_head=True, cos and sin must have the same shape"),
            ((COS, SIN, "half"), "a saved rotation must have the fields cos, sin, pairing"),
            ((), "a saved rotation must have the fields cos, sin, pairing"),
        ],
    )
    def test_pickle(self, fields: tuple[Any, ...], message: str, tmp_path: Path) -> None:
        """Pickles that `torch.load(weights_only=True)` accepts, because they only build a Rotation."""

        class Crafted:
            def __reduce__(self) -> tuple[Any, ...]:
                return restore, fields

        torch.save(Crafted(), tmp_path / "crafted.pt")
        with pytest.raises(RopeError, match=message):
            torch.load(tmp_path / "crafted.pt", weights_only=True)
        with pytest.raises(RopeError, match=message):
            pickle.loads(pickle.dumps(Crafted()))

    def test_pytree_from_a_file(self) -> None:
        """In an exported program, the fields other than the tables are JSON."""
        written = pytree.treespec_dumps(pytree.tree_structure(ROTATION))
        assert '"half", 8, 8, 0, 1.0' in written.replace("\\", "")
        for old, new in (("8, 8, 0", "8, 8, -64"), ("8, 8, 0", "8, 4096, 0"), ("half", "HALF"), ("8, 8, 0", "8")):
            assert written.count(old) == 1
            with pytest.raises(RopeError):
                pytree.treespec_loads(written.replace(old, new))


ROTATE, ROTATE_ = torch.ops.ropewalk.rotate.default, torch.ops.ropewalk.rotate_.default


class TestPrivateOperators:
    """Any code can call torch.ops.ropewalk."""

    @pytest.mark.parametrize("operator", [ROTATE, ROTATE_], ids=str)
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"cos": torch.ones(4, 10**6), "sin": torch.ones(4, 10**6)}, "rotated channels must lie inside head_dim=8"),
            (
                {"rotary_offset": 10**9},
                "rotated channels must lie inside head_dim=8, got 8 channels from rotary_offset=1000000000",
            ),
            ({"rotary_offset": -(10**9)}, "rotated channels must lie inside head_dim=8"),
            ({"tensors": [torch.ones(1, 10**5, 2, 8)]}, "q in layout 'bshd' must have 4 tokens"),
            ({"sin": torch.ones(1)}, "cos and sin must have the same shape"),
            ({"cos": COS[0, 0], "sin": COS[0, 0]}, "cos and sin must have the same shape"),
            ({"tensors": [queries()] * 50}, "tensors must be q, or q and k, got 50 tensors"),
            ({"tensors": []}, "tensors must be q, or q and k, got 0 tensors"),
            ({"tensors": [torch.ones(())]}, r"q in layout 'bshd' must have 4 axes, got shape \(\)"),
            ({"tensors": [queries(), torch.ones(3, 4, 2, 8)]}, "q and k must have the same dtype, batch, tokens"),
            ({"tensors": [queries().bfloat16(), queries().double()]}, "q and k must have the same dtype"),
        ],
    )
    def test_rotate(self, operator: Any, changes: dict[str, Any], message: str) -> None:
        plain = {"tensors": [queries()], "cos": COS, "sin": SIN, "layout": "bshd", "interleaved": False}
        with pytest.raises(RopeError, match=message):
            operator(**{**plain, "rotary_offset": 0, "inverse": False, **changes})

    def test_rotate_in_place_refuses_shared_elements(self) -> None:
        q = queries()
        for tensors, message in (([q, q], "must not share"), ([q[:, :, :1].expand(1, 4, 3, 8)], "memory of its own")):
            with pytest.raises(RopeError, match=message):
                ROTATE_(tensors, COS, SIN, "bshd", False, 0, False)

    @pytest.mark.parametrize("operator", [ROTATE, ROTATE_], ids=str)
    def test_meta_tensors_with_others(self, operator: Any) -> None:
        for tensors, cos in (([queries()], COS.to("meta")), ([queries().to("meta")], COS)):
            with pytest.raises(RopeError, match="all tensors must be on the same device, got cpu, meta"):
                operator(tensors, cos, cos, "bshd", False, 0, False)

    def test_zero_and_negative_tensors(self, built: None) -> None:
        """PyTorch copies such tensors into memory before it calls an operator."""
        (zeros,) = ROTATE([torch._efficientzerotensor((1, SEQ, 2, 8))], COS, SIN, "bshd", False, 0, False)
        assert torch.equal(zeros, torch.zeros(1, SEQ, 2, 8))
        x = torch.randn(1, SEQ, 2, 8, dtype=torch.complex64).conj().imag
        assert x.is_neg()
        check(ROTATE([x], COS, SIN, "bshd", False, 0, False)[0], exact(x))

    @pytest.mark.parametrize(
        "arguments",
        [
            (POSITIONS, [], 1.0, torch.float32),
            (POSITIONS, [1], 1.0, torch.bfloat16),
            (POSITIONS.float(), [1], 1.0, torch.float32),
        ],
    )
    def test_angles(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(RopeError, match="positions must be int32 or int64, dtype float32 or float64"):
            torch.ops.ropewalk.angles(*arguments)


@pytest.mark.usefixtures("used")
def test_sizes_that_reach_the_compiled_code() -> None:
    """A size that passed the checks would access memory outside of a tensor."""
    from ropewalk.kernels import _cpu

    x, table, steps = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 4), torch.zeros(4, dtype=torch.int64)
    rows = torch.zeros(2, 4, dtype=torch.int64)
    freed = torch.zeros(2, 4, 3, 8)
    freed.untyped_storage().resize_(0)
    rotate = {"tensors": [x], "outputs": [x], "cos": table, "sin": table}
    rotate |= {"layout": (0, 1, 2, 4), "interleaved": False, "offset": 0}
    angles = {"positions": rows, "axis": None, "steps": steps, "factor": 1.0, "cos": table, "sin": table}
    match, output = "the tensors must match in sizes and dtypes", "an output must have the size and dtype"
    row, sizes = "gradients of tables must have a row for each token", "positions, steps, axes and tables must match"
    axes = "the axes of a layout must be those of _layout.py"

    def with_k(k: Tensor) -> dict[str, Any]:
        return {"tensors": [x, k], "outputs": [x, k]}

    def with_tables(t: Tensor) -> dict[str, Any]:
        return {"cos": t, "sin": t}

    for function, arguments, changes, message in (
        ("rotate", rotate, {"layout": (0, 1, 2)}, axes),
        ("rotate", rotate, {"layout": (0, 1, 2, 3)}, axes),
        ("rotate", rotate, {"layout": (0, 1, 3, 4)}, axes),
        ("rotate", rotate, {"layout": (-1, 0, 1, 4)}, axes),
        ("rotate", rotate, {"layout": (0, 1, 1, 4)}, axes),
        ("rotate", rotate, {"layout": (0, 1, 2**62, 4)}, axes),
        ("rotate", rotate, {"layout": (None, 1, 2, 4)}, axes),
        ("rotate", rotate, {"layout": (None, 0, 1, 3)}, match),
        ("rotate", rotate, {"outputs": []}, "there must be one or two tensors"),
        ("rotate", rotate, {"tensors": [x] * 3, "outputs": [x] * 3}, "there must be one or two tensors"),
        ("rotate", rotate, {"tensors": [freed]}, "a tensor must have memory"),
        ("rotate", rotate, {"outputs": [freed]}, "a tensor must have memory"),
        ("rotate", rotate, {"sin": torch.zeros(0)}, "a tensor must have memory"),
        ("rotate", rotate, {"tensors": [rows], "outputs": [rows]}, match),
        ("rotate", rotate, {"tensors": [torch.tensor(1.0)], "outputs": [torch.tensor(1.0)]}, match),
        ("rotate", rotate, with_k(x.double()), match),
        ("rotate", rotate, with_k(x[:1]), match),
        ("rotate", rotate, with_k(x[:, :3]), match),
        ("rotate", rotate, with_k(x[..., :6]), match),
        ("rotate", rotate, {"cos": table[..., :3]}, match),
        ("rotate", rotate, {"cos": table.double()}, match),
        ("rotate", rotate, with_tables(table.bfloat16()), match),
        ("rotate", rotate, with_tables(table[:, :3]), match),
        ("rotate", rotate, with_tables(torch.zeros(3, 4, 4)), match),
        ("rotate", rotate, with_tables(torch.zeros(2, 2, 4, 4)), match),
        ("rotate", rotate, with_tables(torch.zeros(1, 1, 1, 4, 4)), match),
        ("rotate", rotate, with_tables(torch.zeros(4, 5)), match),
        ("rotate", rotate, with_tables(torch.zeros(4)[0]), match),
        ("rotate", rotate, {"offset": 1}, match),
        ("rotate", rotate, {"offset": -1}, match),
        ("rotate", rotate, {"outputs": [x[:1]]}, output),
        ("rotate", rotate, {"outputs": [x.double()]}, output),
        ("table_gradient", rotate, {"outputs": [x[..., :7]]}, output),
        ("table_gradient", rotate, with_tables(table[:1]), row),
        ("table_gradient", rotate, with_tables(table[0]), row),
        ("table_gradient", rotate, with_tables(table[0, 0]), row),
        ("table_gradient", rotate, with_tables(table.double()), row),
        ("table_gradient", rotate, {"cos": table.mT.contiguous().mT}, row),
        ("table_gradient", rotate, {"sin": table.mT.contiguous().mT}, row),
        ("angles", angles, {"positions": rows.int()}, sizes),
        ("angles", angles, {"positions": rows[:1]}, sizes),
        ("angles", angles, {"positions": rows.mT.contiguous().mT}, sizes),
        ("angles", angles, {"steps": steps[:3]}, sizes),
        ("angles", angles, {"cos": table.double()}, sizes),
        ("angles", angles, {"sin": table[:1]}, sizes),
        ("angles", angles, {"axis": steps[:3], "cos": table[0], "sin": table[0]}, sizes),
        ("angles", angles, {"axis": steps}, sizes),
    ):
        given = {**arguments, **changes}
        more = [False] if function == "rotate" else []
        with pytest.raises(RopeError, match=message):
            getattr(_cpu, function)(*given.values(), *more)
    assert not any(t.any() for t in (x, table))


class TestInPlace:
    def overlapping(self) -> dict[str, tuple[Tensor, Tensor]]:
        x, parameter, fused = queries(), torch.nn.Parameter(queries()), torch.randn(1, SEQ, 6, HEAD_DIM)
        transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
        return {
            "the same": (x, x),
            "a parameter and its slice": (parameter, parameter[:, :, :1]),
            "a parameter and its data": (parameter, parameter.data),
            "another stride of an axis of size 1": (x, x.as_strided((1, SEQ, 1, 8), (1, 16, 8, 1))),
            "heads that overlap": (fused[:, :, :3], fused[:, :, 2:]),
            "tokens and heads in another order": (transposed, transposed.as_strided((1, SEQ, 2, 8), (64, 8, 32, 1))),
            "other strides": (fused[:, :, :2], fused.as_strided((1, SEQ, 1, 8), (1, 40, 8, 1), 8)),
            "another dtype": (x, x.view(torch.bfloat16)[..., :8]),
        }

    def test_shared_elements_are_refused(self) -> None:
        for name, (q, k) in self.overlapping().items():
            before = q.detach().clone(), k.detach().clone()
            with torch.no_grad(), pytest.raises(RopeError, match="q and k must not share elements"):
                ROTATION.apply_(q, k, layout="bshd")
            assert unchanged(q.detach(), before[0]), name
            assert unchanged(k.detach(), before[1]), name

    def test_adjacent_slices_share_no_element(self) -> None:
        fused, channels = torch.randn(2, SEQ, 6, HEAD_DIM), torch.randn(2, SEQ, 2, 2 * HEAD_DIM)
        flat = torch.randn(SEQ * 40)
        for q, k in (
            (fused[:, :, :4], fused[:, :, 4:]),
            (fused[:, :, ::2], fused[:, :, 1::2]),
            (fused[:1], fused[1:]),
            (fused[:, :, :5], fused[:, :, 5:]),
            (channels[..., ::2], channels[..., 1::2]),
            (channels[..., :8], channels[..., 8:]),
            (flat.as_strided((1, SEQ, 2, 8), (0, 40, 8, 1)), flat.as_strided((1, SEQ, 1, 8), (0, 40, 7, 1), 16)),
            (fused[:, :, :0], fused[:, :, :3]),
        ):
            wanted = exact(q), exact(k)
            ROTATION.apply_(q, k, layout="bshd")
            check(q, wanted[0])
            check(k, wanted[1])

    def test_compiled_code_rotates_shared_elements_once(self) -> None:
        """Compiled code cannot compare addresses. It computes both results before it writes either."""
        x = queries()
        torch._dynamo.reset()
        for slices in (lambda y: (y, y), lambda y: (y, y[:, :, :1])):
            q = x.clone()
            torch.compile(lambda y, f=slices: ROTATION.apply_(*f(y), layout="bshd"), backend="aot_eager")(q)
            check(q, exact(x))

    def unrecordable(self) -> dict[str, Tensor]:
        fused = torch.randn(1, SEQ, 3, 2, HEAD_DIM, requires_grad=True) * 1
        leaf = queries().requires_grad_()
        with torch.no_grad():
            without_gradients = fused[:, :, 1]
        with torch.inference_mode():
            inference, of_inference = queries(), fused[:, :, 2]
        return {
            "a leaf": leaf,
            "a view of a leaf": leaf[:, :, :1],
            "one of several views": fused.unbind(2)[0],
            "a view made without gradients": without_gradients,
            "an inference tensor": inference,
            "a view made in inference mode": of_inference,
        }

    @pytest.mark.parametrize("first", ["plain", "recorded"])
    def test_changes_both_or_neither(self, first: str) -> None:
        for name, k in self.unrecordable().items():
            q = queries() if first == "plain" else queries().requires_grad_() * 1
            before = q.detach().clone(), k.detach().clone()
            for pair in ((q, k), (k, q)):
                with pytest.raises(
                    RopeError, match=r"Rotation\.apply_: .*(leaf|PyTorch must be able|outside inference)"
                ):
                    ROTATION.apply_(*pair, layout="bshd")
                assert torch.equal(q, before[0]), name
                assert torch.equal(k, before[1]), name

    def test_refuses_the_same_tensors_as_autograd(self) -> None:
        for x in self.unrecordable().values():
            if not x.is_inference():
                zeros = torch.zeros_like(x).requires_grad_()
                with pytest.raises(RuntimeError, match=r"in-place|inplace"):
                    x.copy_(zeros)

    def test_without_gradients_they_are_rotated(self) -> None:
        for x in self.unrecordable().values():
            if not x.is_inference():
                wanted = exact(x)
                with torch.no_grad():
                    ROTATION.apply_(x, layout="bshd")
                check(x, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_autocast_to_another_dtype_under_tracing(dtype: torch.dtype, pairing: str) -> None:
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    rotation, q = Rope(HEAD_DIM, 1e4, pairing).at(POSITIONS), queries().to(dtype)
    wanted = rotation(q, layout="bshd")
    with torch.autocast("cpu", dtype=other):
        seen, _ = torch.func.vjp(lambda x: rotation(x, layout="bshd"), q)
    assert seen.dtype == dtype
    assert torch.equal(seen, wanted)
