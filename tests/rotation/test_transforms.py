"""torch.func, torch.compile and torch.export give the results and gradients of eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jacrev, jvp, vmap

from ropewalk import Rope, RotaryEmbedding, YaRN

ROPE = Rope(8, 1e4, "half", scaling=YaRN(4, 64))
POSITIONS = torch.tensor([0, 7, 131_071])
TABLE = ROPE.at(POSITIONS)
SHAPE = (3, 2, 8)  # thd


def ours(x: Tensor) -> Tensor:
    return TABLE(x, layout="thd")


def loss(x: Tensor) -> Tensor:
    return (ours(x) * torch.arange(8.0)).pow(3).sum()


X = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
MANY = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(1))


def backward(x: Tensor) -> Tensor:
    """Compute gradients in ordinary eager mode, which gradcheck has verified."""
    x = x.clone().requires_grad_()
    loss(x).backward()
    assert x.grad is not None
    return x.grad


class TestFunctorch:
    def test_grad_of_vmap(self) -> None:
        expected = torch.stack([backward(x) for x in MANY])
        torch.testing.assert_close(grad(lambda xs: vmap(loss)(xs).sum())(MANY), expected)

    def test_vmap_of_grad(self) -> None:
        expected = torch.stack([backward(x) for x in MANY])
        torch.testing.assert_close(vmap(grad(loss))(MANY), expected)

    def test_vmap_over_positions(self) -> None:
        positions = torch.arange(12).reshape(4, 3)
        mapped = vmap(lambda x, p: ROPE.at(p)(x, layout="thd"))(MANY, positions)
        rows = [ROPE.at(p)(x, layout="thd") for x, p in zip(MANY, positions, strict=True)]
        torch.testing.assert_close(mapped, torch.stack(rows))

    def test_jvp(self) -> None:
        tangent = torch.randn(SHAPE)
        torch.testing.assert_close(jvp(ours, (X,), (tangent,))[1], ours(tangent))  # a rotation is linear

    def test_forward_mode(self) -> None:
        tangent = torch.randn(SHAPE)
        for x in (X, X.clone().requires_grad_()):
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, tangent)
                pushed = torch.autograd.forward_ad.unpack_dual(ours(dual)).tangent
            torch.testing.assert_close(pushed, ours(tangent))

    def test_jacobian(self) -> None:
        jacobian = jacrev(ours)(X).reshape(48, 48)
        torch.testing.assert_close((jacobian @ X.reshape(-1)).reshape(SHAPE), ours(X))


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        torch._dynamo.reset()

    def test_of_grad(self) -> None:
        compiled = torch.compile(grad(loss), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(X), backward(X))

    @pytest.mark.usefixtures("compiler")
    def test_forward_and_backward_by_inductor(self) -> None:
        """Both pairings in one graph, because it takes a minute to compile."""
        half, interleaved = (Rope(16, 5e5, p, rotary_dim=8, rotary_offset=4) for p in ("half", "interleaved"))

        def step(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            return half.at(positions)(q, layout="bshd"), interleaved.at(positions)(k, layout="bshd")

        compiled = torch.compile(step, fullgraph=True, dynamic=True)
        for seq in (4, 9):
            positions = torch.arange(seq) + 1_000_000
            q, k = (torch.randn(2, seq, h, 16, dtype=torch.bfloat16, requires_grad=True) for h in (4, 1))
            results = []
            for function in (compiled, step):
                q.grad = k.grad = None
                rotated = function(q, k, positions)
                (rotated[0].float().pow(3).sum() + rotated[1].float().pow(3).sum()).backward()
                results.append((*rotated, q.grad, k.grad))
            for a, b in zip(*results, strict=True):
                # One ulp of bfloat16, and float32 products of up to about 50 that cancel. Measured: no difference.
                torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-5)

    def test_in_place(self) -> None:
        def step(q: Tensor) -> Tensor:
            q = q * 1
            TABLE.apply_(q, layout="thd")
            return q

        torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(X), ours(X))

    def test_rows_of_a_table(self) -> None:
        table = ROPE.at(torch.arange(50))
        step = torch.compile(lambda x, p: table[p](x, layout="thd"), fullgraph=True, backend="aot_eager")
        for p in (torch.tensor([3, 1, 49]), torch.tensor([0, 0, 0])):
            torch.testing.assert_close(step(X, p), ROPE.at(p)(X, layout="thd"))

    def test_rotation_as_an_argument(self) -> None:
        step = torch.compile(lambda rotation, x: rotation(x, layout="thd"), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(step(TABLE, X), ours(X))
        torch.testing.assert_close(step(TABLE.inverse(), ours(X)), X)

    def test_rotation_as_a_result(self) -> None:
        at = torch.compile(lambda p: ROPE.at(p), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(at(POSITIONS)(X, layout="thd"), ours(X))
        shifted = torch.compile(lambda d: ROPE.shift(d).inverse(), fullgraph=True, backend="aot_eager")(POSITIONS)
        torch.testing.assert_close(shifted.cos, ROPE.shift(-POSITIONS).cos)

    def test_no_new_graph_as_the_length_changes(self) -> None:
        counter = CompileCounterWithBackend("aot_eager")
        embed = RotaryEmbedding(ROPE, layout="bshd")
        compiled = torch.compile(embed, fullgraph=True, dynamic=True, backend=counter)
        for batch, seq in ((3, 5), (6, 9), (7, 17), (8, 100)):  # sizes all different, and none 1
            q, k, positions = torch.randn(batch, seq, 4, 8), torch.randn(batch, seq, 2, 8), torch.arange(seq)
            for mine, plain in zip(compiled(q, k, positions), embed(q, k, positions), strict=True):
                torch.testing.assert_close(mine, plain)
        assert counter.frame_count == 1

    def test_at_most_one_recompilation_without_mark_dynamic(self) -> None:
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(RotaryEmbedding(ROPE, layout="bshd"), fullgraph=True, backend=counter)
        for seq in (5, 9, 17, 100):
            compiled(torch.randn(2, seq, 4, 8), torch.randn(2, seq, 2, 8), torch.arange(seq))
        assert counter.frame_count == 2


class Block(torch.nn.Module):
    """A projection and a rotation, to be exported and fine-tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 8, bias=False)
        self.embed = RotaryEmbedding(ROPE, layout="bshd")

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.embed(self.project(x), None, positions)


class TestExport:
    @pytest.mark.parametrize("strict", [False, True])
    def test_exported_module_can_be_fine_tuned(self, strict: bool) -> None:
        torch.manual_seed(0)
        block, seq = Block(), torch.export.Dim("seq", max=4096)
        example = (torch.randn(1, 3, 2, 8), torch.arange(3))
        exported = torch.export.export(block, example, dynamic_shapes=({1: seq}, {0: seq}), strict=strict).module()
        x, positions = torch.randn(1, 11, 2, 8), torch.arange(11)
        gradients = []
        for module in (exported, block):
            module.zero_grad()
            out = module(x, positions)
            out.pow(3).sum().backward()
            gradients.append((out, module.project.weight.grad))
        for mine, plain in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, plain)
