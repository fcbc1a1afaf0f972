"""Checks of DTensor q and k. Every rank creates the same whole tensors, and the oracle computes each rotation."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import kernel_cases
from kernel_cases import LAYOUTS, PAIRINGS
from ropewalk import LearnedRope, Rope, RopeError, RotaryEmbedding, Rotation

CHECKS: dict[str, Callable[[int], None]] = {}
HEAD_DIM, OFFSET = 12, 2
ROPES = {pairing: Rope(HEAD_DIM, 1e4, pairing, rotary_dim=8, rotary_offset=OFFSET) for pairing in PAIRINGS}
ROPE = ROPES["half"]
SEQ = 8


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


# Every check runs twice, because an observed rotation uses other code: operators instead of compiled calls.
WATCHING = [True]


@contextlib.contextmanager
def sent(collectives: int) -> Iterator[None]:
    """Check that exactly this number of collectives is started inside."""
    if not WATCHING[0]:
        yield
        return
    with CommDebugMode() as comm:
        yield
    assert comm.get_total_counts() == collectives, dict(comm.get_comm_counts())


def quiet() -> Any:
    return sent(0)


def spread(x: Tensor, mesh: Any, *placements: Any) -> DTensor:
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def line(world: int) -> Any:
    return init_device_mesh("cpu", (world,))


def plane(world: int) -> Any:
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))


def made(layout: str, heads: int = 4, batch: int = 4, seq: int = SEQ) -> Tensor:
    return torch.randn(kernel_cases.shape(layout, batch, seq, heads, HEAD_DIM))


def compare(y: DTensor, x: Tensor, rotation: Rotation, layout: str, says: object = "", inverse: bool = False) -> None:
    """Check that the gathered y is the rotation of x."""
    exact, size = kernel_cases.expected(x, rotation.cos, rotation.sin, layout, rotation.pairing, OFFSET, inverse)
    kernel_cases.check(y.full_tensor(), exact, size, layout, says)


def sharded(layout: str) -> dict[str, Any]:
    axes = {letter: Shard(layout.index(letter)) for letter in layout.replace("d", "")}
    return {**axes, "replicated": Replicate()}


@check
def every_layout_and_placement(world: int) -> None:
    mesh = line(world)
    for layout, pairing in itertools.product(LAYOUTS, PAIRINGS):
        rotation, q, k = ROPES[pairing].at(torch.arange(SEQ)), made(layout), made(layout, heads=world)
        for name, placement in sharded(layout).items():
            of_q, of_k = spread(q, mesh, placement), spread(k, mesh, placement)
            with quiet():
                rotated = rotation(of_q, of_k, layout=layout)
                again = rotation(of_q, of_k, layout=layout)  # with the cache of the first call
                alone = rotation(of_q, layout=layout)
            for x, y in zip((q, k, q, k, q), (*rotated, *again, alone), strict=True):
                assert y.placements == (placement,), (layout, name, y.placements)
                compare(y, x, rotation, layout, (layout, pairing, name))


@check
def two_axes_of_a_mesh(world: int) -> None:
    mesh = plane(world)
    for layout in LAYOUTS[:3]:
        rows = torch.arange(4)[:, None] * 3 + torch.arange(SEQ)
        for positions in (torch.arange(SEQ), rows):
            rotation, q, k = ROPE.at(positions), made(layout), made(layout, heads=2)
            for first, second in itertools.permutations(sharded(layout).values(), 2):
                of_q, of_k = spread(q, mesh, first, second), spread(k, mesh, first, second)
                with quiet():
                    rotated = rotation(of_q, of_k, layout=layout)
                for x, y in zip((q, k), rotated, strict=True):
                    assert y.placements == (first, second)
                    compare(y, x, rotation, layout, (layout, first, second))
    both = made("bshd", seq=4 * world)
    of_both = spread(both, mesh, Shard(1), Shard(1))  # the sequence over both axes of the mesh
    rotation = ROPE.at(torch.arange(4 * world))
    with quiet():
        rotated = rotation(of_both, layout="bshd")
    compare(rotated, both, rotation, "bshd")


@check
def a_pending_sum_stays_pending(world: int) -> None:
    """A rotation is linear, so a pending sum over ranks may follow it."""
    mesh, rotation = line(world), ROPE.at(torch.arange(SEQ))
    parts = torch.randn(world, 4, SEQ, 4, HEAD_DIM).double()
    for placement in (Partial("sum"), Partial("avg")):
        of_x = DTensor.from_local(parts[dist.get_rank()], mesh, [placement])
        with quiet():
            rotated = rotation(of_x, layout="bshd")
        assert rotated.placements == (placement,)
        whole = parts.sum(0) if placement == Partial("sum") else parts.mean(0)
        wanted, _ = kernel_cases.expected(whole, rotation.cos, rotation.sin, "bshd", "half", OFFSET, inverse=False)
        torch.testing.assert_close(rotated.full_tensor(), torch.from_numpy(wanted).contiguous())
    largest = DTensor.from_local(parts[dist.get_rank()], mesh, [Partial("max")])  # not linear: reduced before
    compare(rotation(largest, layout="bshd"), parts.amax(0), rotation, "bshd")
    pending = r"Rotation.apply_: a pending reduction must be a sum or a mean, .*, got Partial\(max\)"
    raises(pending, lambda: rotation.apply_(largest, layout="bshd"))
    raises(pending, lambda: rotation.apply_(largest * 1, largest, layout="bshd"))


@check
def sharded_channels_are_gathered_once(world: int) -> None:
    mesh, rotation, q, k = line(world), ROPE.at(torch.arange(SEQ)), made("bshd"), made("bshd", heads=3)
    of_q, of_k = spread(q, mesh, Shard(3)), spread(k, mesh, Shard(3))
    with sent(2):
        rotated = rotation(of_q, of_k, layout="bshd")
    for x, y in zip((q, k), rotated, strict=True):
        compare(y, x, rotation, "bshd")
    rotation.apply_(of_q, layout="bshd")
    assert of_q.placements == (Shard(3),)
    compare(of_q, q, rotation, "bshd")


@check
def sharded_tables(world: int) -> None:
    mesh, q, k = line(world), made("bshd"), made("bshd", heads=world)
    plain = ROPE.at(torch.arange(SEQ))
    for at_tables, at_q, count in (
        (Replicate(), Replicate(), 0),
        (Replicate(), Shard(0), 0),
        (Replicate(), Shard(1), 0),
        (Shard(0), Shard(1), 0),
        (Shard(0), Shard(0), 2),  # cos and sin
        (Shard(0), Shard(2), 2),
    ):
        cos, sin = (spread(table, mesh, at_tables) for table in (plain.cos, plain.sin))
        rotation = Rotation(cos, sin, pairing="half", head_dim=HEAD_DIM, rotary_offset=OFFSET)
        of_q, of_k = spread(q, mesh, at_q), spread(k, mesh, at_q)
        with sent(count):
            rotated = rotation(of_q, of_k, layout="bshd")
        with quiet():  # the gathered tables are cached for later layers
            again = rotation(of_q, of_k, layout="bshd")
        for x, y, z in zip((q, k), rotated, again, strict=True):
            compare(y, x, plain, "bshd", (at_tables, at_q))
            assert torch.equal(y.to_local(), z.to_local())
            assert y.placements == (at_q,)


@check
def tables_per_head(world: int) -> None:
    mesh = line(world)
    for layout, batch in itertools.product(LAYOUTS, (None, 4)):
        if batch is not None and layout == "thd":
            continue
        shape = (*(() if batch is None else (batch,)), 4, SEQ, 4)
        rotation = Rotation(
            *torch.randn(2, *shape), pairing="half", head_dim=HEAD_DIM, rotary_offset=OFFSET, per_head=True
        )
        q = made(layout)
        for name, placement in sharded(layout).items():
            with quiet():
                rotated = rotation(spread(q, mesh, placement), layout=layout)
            cos, sin = (t if batch is not None else t[None] for t in (rotation.cos, rotation.sin))
            exact, size = kernel_cases.expected(q, cos, sin, layout, "half", OFFSET, inverse=False)
            kernel_cases.check(rotated.full_tensor(), exact, size, layout, (layout, name))


@check
def one_angle_for_all(world: int) -> None:
    mesh, q = line(world), made("bshd")
    for placement in (Shard(0), Shard(1), Shard(2)):
        rotation = ROPE.shift(-3)
        with quiet():
            rotated = rotation(spread(q, mesh, placement), layout="bshd")
        compare(rotated, q, rotation, "bshd")


@check
def uneven_shards(world: int) -> None:
    mesh = line(world)
    for placement, sizes in (
        (Shard(1), {"seq": 5}),
        (Shard(2), {"heads": 3}),
        (Shard(0), {"batch": 3}),
        (Shard(2), {"heads": 1}),  # the other ranks have no elements
        (Shard(1), {"seq": 1}),
        (Shard(0), {"batch": 1}),
    ):
        q = made("bshd", **sizes)
        rotation = ROPE.at(torch.arange(q.shape[1]))
        of_q = spread(q, mesh, placement)
        with quiet():
            rotated = rotation(of_q, layout="bshd")
            rotation.apply_(of_q, layout="bshd")
            wants = spread(q, mesh, placement).requires_grad_()
            (rotation(wants, layout="bshd") * of_q.detach()).to_local().sum().backward()
        assert rotated.placements == of_q.placements == wants.grad.placements == (placement,)
        compare(rotated, q, rotation, "bshd", (placement, sizes))
        compare(of_q, q, rotation, "bshd", (placement, sizes))
        torch.testing.assert_close(wants.grad.full_tensor(), q)


@check
def keys_with_other_placements(world: int) -> None:
    """Fewer key heads than ranks: they are replicated."""
    mesh, q, k = line(world), made("bshd"), made("bshd", heads=1)
    rotation = ROPE.at(torch.arange(SEQ))
    for at_q, at_k in ((Shard(2), Replicate()), (Shard(1), Replicate()), (Shard(1), Shard(0))):
        of_q, of_k = spread(q, mesh, at_q), spread(k, mesh, at_k).clone()
        with quiet():
            rotated = rotation(of_q, of_k, layout="bshd")
            rotation.apply_(of_q, of_k, layout="bshd")
        for x, y, z, placement in zip((q, k), rotated, (of_q, of_k), (at_q, at_k), strict=True):
            assert y.placements == z.placements == (placement,)
            compare(y, x, rotation, "bshd", (at_q, at_k))
            compare(z, x, rotation, "bshd", (at_q, at_k))


@check
def gradients(world: int) -> None:
    mesh = line(world)
    for layout in LAYOUTS:
        rotation, q, k = ROPE.at(torch.arange(SEQ)), made(layout), made(layout, heads=world)
        up = made(layout), made(layout, heads=world)
        for name, placement in sharded(layout).items():
            of_q, of_k = (spread(x, mesh, placement).requires_grad_() for x in (q, k))
            with quiet():
                rotation(of_q.detach(), of_k.detach(), layout=layout)
                rotated = rotation(of_q, of_k, layout=layout)  # which differs only in that it is recorded
                torch.autograd.backward(rotated, [spread(x, mesh, placement) for x in up])
            for x, grad in zip((of_q, of_k), up, strict=True):
                assert x.grad.placements == (placement,)
                compare(x.grad, grad, rotation, layout, (layout, name), inverse=True)
            of_q.grad = None
            with quiet():  # a replicated gradient, of which each rank takes its part
                rotation(of_q, layout=layout).backward(spread(up[0], mesh, Replicate()))
            assert of_q.grad.placements == (placement,)
            compare(of_q.grad, up[0], rotation, layout, (layout, name), inverse=True)


@check
def gradients_of_other_placements(world: int) -> None:
    """The gradient is right for every placement of the incoming gradient."""
    mesh, rotation, q, up = line(world), ROPE.at(torch.arange(SEQ)), made("bshd"), made("bshd")
    for at_q, at_grad in itertools.product((Shard(0), Shard(1), Replicate()), (Shard(0), Shard(1), Shard(2), Shard(3))):
        of_q = spread(q, mesh, at_q).requires_grad_()
        rotation(of_q, layout="bshd").backward(spread(up, mesh, at_grad))
        compare(of_q.grad, up, rotation, "bshd", (at_q, at_grad), inverse=True)
    pending = DTensor.from_local(up / world, mesh, [Partial()])
    of_q = spread(q, mesh, Shard(1)).requires_grad_()
    rotation(of_q, layout="bshd").backward(pending)
    torch.testing.assert_close(of_q.grad.full_tensor(), rotation.inverse()(up, layout="bshd"), rtol=1e-5, atol=1e-6)


@check
def learned_tables(world: int) -> None:
    mesh, q, up = line(world), made("bshd").double(), made("bshd").double()
    angle = torch.randn(SEQ, 4, dtype=torch.float64)
    exact_cos, exact_sin = oracle_gradient(q, up)

    def rotation_of(cos: Tensor, sin: Tensor) -> Rotation:
        return Rotation(cos, sin, pairing="half", head_dim=HEAD_DIM, rotary_offset=OFFSET)

    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        of_q, of_up = spread(q, mesh, placement), spread(up, mesh, placement)
        cos, sin = angle.cos().requires_grad_(), angle.sin().requires_grad_()
        rotation_of(cos, sin)(of_q, layout="bshd").backward(of_up)
        torch.testing.assert_close(cos.grad, exact_cos)
        torch.testing.assert_close(sin.grad, exact_sin)
        cos, sin = (spread(t, mesh, Replicate()).requires_grad_() for t in (angle.cos(), angle.sin()))
        rotation_of(cos, sin)(of_q, layout="bshd").backward(of_up)
        torch.testing.assert_close(cos.grad.full_tensor(), exact_cos)
        torch.testing.assert_close(sin.grad.full_tensor(), exact_sin)
    rank = dist.get_rank()  # the rows of its own tokens, as DTensors
    mine = [t.chunk(world)[rank].clone().requires_grad_() for t in (angle.cos(), angle.sin())]
    cos, sin = (DTensor.from_local(t, mesh, [Shard(0)]) for t in mine)
    rotation_of(cos, sin)(spread(q, mesh, Shard(1)), layout="bshd").backward(spread(up, mesh, Shard(1)))
    torch.testing.assert_close(mine[0].grad, exact_cos.chunk(world)[rank])
    in_place = spread(q, mesh, Shard(1)) * 1
    cos = angle.cos().requires_grad_()
    rotation_of(cos, angle.sin()).apply_(in_place, layout="bshd")
    in_place.backward(spread(up, mesh, Shard(1)))
    torch.testing.assert_close(cos.grad, exact_cos)


def oracle_gradient(q: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients to cos and sin `[seq, pairs]` of half pairs: d(a cos − b sin, a sin + b cos)."""
    a, b = q[..., OFFSET : OFFSET + 4], q[..., OFFSET + 4 : OFFSET + 8]
    g, h = up[..., OFFSET : OFFSET + 4], up[..., OFFSET + 4 : OFFSET + 8]
    return (g * a + h * b).sum((0, 2)), (h * a - g * b).sum((0, 2))


@check
def in_place(world: int) -> None:
    mesh = line(world)
    for layout in LAYOUTS:
        rotation, q, k = ROPE.at(torch.arange(SEQ)), made(layout), made(layout, heads=world)
        for name, placement in sharded(layout).items():
            of_q, of_k = spread(q, mesh, placement), spread(k, mesh, placement)
            if placement.is_replicate():  # which is the tensor itself
                of_q, of_k = of_q.clone(), of_k.clone()
            parts, version = (of_q.to_local(), of_k.to_local()), of_q._version
            with quiet():
                rotation.apply_(of_q, of_k, layout=layout)
            assert of_q._version > version
            for x, y, part in zip((q, k), (of_q, of_k), parts, strict=True):
                assert y.to_local().data_ptr() == part.data_ptr()
                compare(y, x, rotation, layout, (layout, name))


@check
def strides(world: int) -> None:
    """The results have the strides that PyTorch reports, for any strides of q."""
    mesh, rotation, whole = line(world), ROPE.at(torch.arange(SEQ)), made("bhsd")
    views = {
        "transposed": (whole, lambda x: x.transpose(1, 2), "bshd", Shard(1)),
        "part of a fused tensor": (made("bshd", heads=8), lambda x: x[:, :, 2:5], "bshd", Shard(1)),
        "every other channel": (torch.randn(4, SEQ, 4, 2 * HEAD_DIM), lambda x: x[..., ::2], "bshd", Shard(0)),
    }
    for name, (x, view, layout, placement) in views.items():
        of_x = view(spread(x, mesh, placement))
        for _ in range(2):
            with quiet():
                rotated = rotation(of_x, layout=layout)
            compare(rotated, view(x), rotation, layout, name)
            compare(rotated.transpose(1, 2), view(x).transpose(1, 2), rotation, "bhsd", name)
            part = rotated.to_local()
            longer = [axis for axis in range(4) if part.shape[axis] > 1]
            assert sorted(longer, key=rotated.stride) == sorted(longer, key=part.stride), name


@check
def tables_that_change(world: int) -> None:
    """Tables that are cached for the next layer follow a change of the tables."""
    mesh, q = line(world), made("bshd")
    for of_tables in (None, Replicate(), Shard(0)):
        for of_q in (spread(q, mesh, Shard(1)), spread(q, mesh, Shard(2))):
            rotation = ROPE.at(torch.arange(SEQ) if of_tables is None else spread(torch.arange(SEQ), mesh, of_tables))
            rotation(of_q, layout="bshd")
            later = ROPE.at(torch.arange(SEQ) + 5)
            for table, other in ((rotation.cos, later.cos), (rotation.sin, later.sin)):
                table.copy_(other if of_tables is None else spread(other, mesh, of_tables))
            compare(rotation(of_q, layout="bshd"), q, later, "bshd", of_tables)


@check
def inference_mode(world: int) -> None:
    mesh, q = line(world), made("bshd")
    ordinary = ROPE.at(torch.arange(SEQ))
    with torch.inference_mode():
        for rotation in (ordinary, ROPE.at(torch.arange(SEQ))):
            for placement in (Shard(1), Shard(2)):
                of_q = spread(q, mesh, placement)
                for _ in range(2):
                    compare(rotation(of_q, layout="bshd"), q, ordinary, "bshd", placement)
        inside = ROPE.at(torch.arange(SEQ))
        inside(spread(q, mesh, Shard(1)), layout="bshd")
        for table, other in (
            (inside.cos, ROPE.at(torch.arange(SEQ) + 5).cos),
            (inside.sin, ROPE.at(torch.arange(SEQ) + 5).sin),
        ):
            table.copy_(other)
        compare(inside(spread(q, mesh, Shard(1)), layout="bshd"), q, ROPE.at(torch.arange(SEQ) + 5), "bshd")
    wants = spread(q, mesh, Shard(2)).requires_grad_()
    ordinary(wants, layout="bshd").backward(spread(q, mesh, Shard(2)))  # nothing created in inference mode is cached
    compare(wants.grad, q, ordinary, "bshd", inverse=True)


@check
def in_place_in_a_fused_projection(world: int) -> None:
    mesh, rotation = line(world), ROPE.at(torch.arange(SEQ))
    whole = torch.randn(4, SEQ, 6, HEAD_DIM)
    for placement in (Shard(0), Shard(1)):
        fused = spread(whole, mesh, placement)
        with quiet():
            rotation.apply_(fused[:, :, :3], fused[:, :, 3:5], layout="bshd")
        compare(fused[:, :, :5], whole[:, :, :5], rotation, "bshd", placement)
        assert torch.equal(fused.full_tensor()[:, :, 5:], whole[:, :, 5:])
    fused = spread(whole, mesh, Shard(1))
    raises(r"q and k must not share elements", lambda: rotation.apply_(fused, fused, layout="bshd"))
    raises(r"q and k must not share", lambda: rotation.apply_(fused[:, :, :3], fused[:, :, 2:], layout="bshd"))
    weight = spread(whole, mesh, Shard(1)).requires_grad_()
    recorded = weight * 1
    with quiet():
        rotation.apply_(recorded[:, :, :3], layout="bshd")
        recorded.backward(spread(whole, mesh, Shard(1)))
    compare(weight.grad[:, :, :3], whole[:, :, :3], rotation, "bshd", inverse=True)


@check
def changing_a_saved_tensor_raises(world: int) -> None:
    mesh, rotation = line(world), ROPE.at(torch.arange(SEQ))
    weight, q = (spread(made("bshd"), mesh, Shard(2)) for _ in range(2))
    loss = (weight.requires_grad_() * q).sum()
    with torch.no_grad():
        rotation.apply_(q.clone(), layout="bshd")
        rotation.apply_(q, layout="bshd")
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


@check
def compiled(world: int) -> None:
    if not WATCHING[0]:  # an observer changes nothing here; the second run would only compile the same graphs again
        return
    mesh, q, k, nodes = line(world), made("bshd"), made("bshd", heads=world), []

    def graph(module: torch.fx.GraphModule, _: object) -> Any:
        nodes.extend(str(node.target) for node in module.graph.nodes)
        return make_boxed_func(module.forward)

    graphs = aot_autograd(fw_compiler=graph)

    def step(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotation = Rotation(cos, sin, pairing="half", head_dim=HEAD_DIM, rotary_offset=OFFSET)
        rotated = rotation(q, k, layout="bshd")
        rotation.apply_(q, layout="bshd")
        return rotated

    plain = ROPE.at(torch.arange(SEQ))
    for placement in (Shard(0), Shard(1), Shard(2)):
        torch._dynamo.reset()
        run = torch.compile(step, fullgraph=True, backend=graphs)
        for tables in ((plain.cos, plain.sin), tuple(spread(t, mesh, Replicate()) for t in (plain.cos, plain.sin))):
            of_q, of_k = spread(q, mesh, placement), spread(k, mesh, placement)
            rotated = run(of_q, of_k, *tables)
            for x, y in ((q, rotated[0]), (k, rotated[1]), (q, of_q)):
                assert y.placements == (placement,)
                compare(y, x, plain, "bshd", placement)
        wants = spread(q, mesh, placement).requires_grad_()
        up = spread(q, mesh, placement)
        rotate = torch.compile(lambda x: plain(x, layout="bshd"), fullgraph=True, backend=graphs)
        rotate(wants).backward(up)
        compare(wants.grad, q, plain, "bshd", placement, inverse=True)
    assert any("mul" in node for node in nodes)
    assert not [node for node in nodes if "c10d" in node]


@check
def positions(world: int) -> None:
    mesh = line(world)
    rows = torch.arange(4)[:, None] * 7 + torch.arange(SEQ)
    for whole, placement in (
        (torch.arange(SEQ), Shard(0)),
        (torch.arange(SEQ), Replicate()),
        (torch.arange(5), Shard(0)),
        (rows, Shard(0)),
        (rows, Shard(1)),
        (rows.float() / 2, Shard(1)),
    ):
        for numerics in ("exact", "float32"):
            with quiet():
                rotation = ROPE.at(spread(whole, mesh, placement), numerics=numerics)
            alone = ROPE.at(whole, numerics=numerics)
            for table, wanted in ((rotation.cos, alone.cos), (rotation.sin, alone.sin)):
                assert table.placements == (placement,)
                assert table.shape == wanted.shape
                assert torch.equal(table.full_tensor(), wanted)
    q = made("bshd")
    with quiet():
        rotated = ROPE.at(spread(rows, mesh, Shard(1)))(spread(q, mesh, Shard(1)), layout="bshd")
        embedded = RotaryEmbedding(ROPE, layout="bshd")(spread(q, mesh, Shard(1)), None, spread(rows, mesh, Shard(1)))
        plain = RotaryEmbedding(ROPE, layout="bshd")(spread(q, mesh, Shard(1)), None, rows)
    for y in (rotated, embedded, plain):
        compare(y, q, ROPE.at(rows), "bshd")
    raises(r"must be on the device of the mesh", lambda: ROPE.at(spread(rows, mesh, Shard(1)), device="meta"))


@check
def rows_of_a_table(world: int) -> None:
    """One of the table and the rows may be a plain tensor. The result is sharded like the rows."""
    mesh, q, up = line(world), made("bshd"), made("bshd")
    rows = torch.arange(4)[:, None] * 7 + torch.arange(SEQ)
    table, heads = ROPE.at(torch.arange(32)), torch.randn(4, 32, 4)
    of_heads = {"pairing": "half", "head_dim": HEAD_DIM, "rotary_offset": OFFSET, "per_head": True}
    for placement in (Shard(0), Shard(1), Replicate()):
        of_rows = spread(rows, mesh, placement)
        with quiet():
            taken = table[of_rows]
        assert taken.cos.placements == (placement,)
        compare(taken(spread(q, mesh, placement), layout="bshd"), q, ROPE.at(rows), "bshd", placement)
        learned = heads.clone().requires_grad_()
        each_head = Rotation(learned, learned * 2, **of_heads)
        each_head[of_rows](spread(q, mesh, placement), layout="bshd").backward(spread(up, mesh, placement))
        alone = heads.clone().requires_grad_()
        Rotation(alone, alone * 2, **of_heads)[rows](q, layout="bshd").backward(up)
        torch.testing.assert_close(learned.grad, alone.grad, rtol=1e-4, atol=1e-5)
    for placement in (Replicate(), Shard(0)):
        tables = ROPE.at(spread(torch.arange(32), mesh, placement))
        for of_rows in (rows, spread(rows, mesh, Shard(0))):
            compare(tables[of_rows](spread(q, mesh, Shard(0)), layout="bshd"), q, ROPE.at(rows), "bshd", placement)
        raises(r"every row must be from 0 to 31", lambda tables=tables: tables[torch.tensor([32])])
    other = spread(rows, plane(world), Replicate(), Replicate())
    raises(r"rows must be on the mesh of the table", lambda: tables[other])


@check
def positions_with_axes(world: int) -> None:
    from ropewalk import Axes

    rope = Rope(12, 1e4, "half", axes=Axes.sections((2, 2, 2)))
    mesh = line(world)
    whole = torch.stack([torch.arange(4)[:, None] * i + torch.arange(SEQ) for i in (1, 2, 3)])
    for placement, of_tables in ((Shard(2), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Replicate())):
        with quiet():
            rotation = rope.at(spread(whole, mesh, placement))
        assert rotation.cos.placements == (of_tables,)
        assert torch.equal(rotation.cos.full_tensor(), rope.at(whole).cos)
    assert torch.equal(rope.at(spread(whole, mesh, Shard(0))).sin.full_tensor(), rope.at(whole).sin)


@check
def refusals(world: int) -> None:
    mesh, rotation, q = line(world), ROPE.at(torch.arange(SEQ)), made("bshd")
    of_q = spread(q, mesh, Shard(1))
    mixed = r"q and k must both be DTensors of the same mesh, got "
    raises(mixed + "a DTensor, a plain tensor", lambda: rotation(of_q, q, layout="bshd"))
    raises(mixed + "a plain tensor, a DTensor", lambda: rotation(q, of_q, layout="bshd"))
    tables = ROPE.at(spread(torch.arange(SEQ), mesh, Replicate()))
    raises(mixed + "a plain tensor with cos and sin: a DTensor", lambda: tables(q, layout="bshd"))
    raises(mixed, lambda: tables.apply_(q, layout="bshd"))
    other = spread(q, plane(world), Shard(1), Replicate())
    raises(mixed + "a DTensor, a DTensor", lambda: rotation(of_q, other, layout="bshd"))
    mine = torch.arange(SEQ // world)  # plain, of this rank's tokens only
    of_all = f"must have {SEQ // world} tokens, .* got {SEQ} .*positions are those of all ranks, or a DTensor"
    raises(of_all, lambda: ROPE.at(mine)(of_q, layout="bshd"))
    raises(of_all, lambda: ROPE.at(mine).apply_(of_q, layout="bshd"))
    rows = torch.arange(SEQ).expand(2, -1)
    raises(r"must have batch size 2, .* those of all ranks", lambda: ROPE.at(rows)(of_q, layout="bshd"))
    whole = spread(q, mesh, Replicate())
    raises(r"q in layout 'bshd' must have 3 tokens", lambda: ROPE.at(torch.arange(3))(whole, layout="bshd"))
    raises(r"layout must be one of", lambda: rotation(of_q, layout="bsdh"))
    raises(r"must have 4 axes", lambda: rotation(of_q[:, :, 0], layout="bshd"))


def raises(pattern: str, call: Callable[[], object]) -> None:
    with pytest.raises(RopeError, match=pattern):
        call()


@check
def learned_rope_of_dtensors(world: int) -> None:
    """Plain or DTensor positions and frequencies: results are sharded like q, with the gradient of the whole."""
    mesh, q, up = line(world), made("bshd"), made("bshd")
    positions = torch.arange(4)[:, None] * 7 + torch.arange(SEQ)
    for heads in (None, 4):
        alone, ours, spread_out = (LearnedRope.from_rope(Rope(HEAD_DIM, 1e4, "half"), heads=heads) for _ in range(3))
        alone(positions)(q, layout="bshd").backward(up)
        spread_out.inv_freq = torch.nn.Parameter(spread(spread_out.inv_freq.detach(), mesh, Replicate()))
        for placement in (Shard(0), Shard(1), Replicate()):
            for rope, of_positions in itertools.product(
                (ours, spread_out), (positions, spread(positions, mesh, placement))
            ):
                rope.zero_grad()
                rotated = rope(of_positions)(spread(q, mesh, placement), layout="bshd")
                torch.testing.assert_close(rotated.full_tensor(), alone(positions)(q, layout="bshd"))
                rotated.backward(spread(up, mesh, placement))
                grad = rope.inv_freq.grad
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                torch.testing.assert_close(whole, alone.inv_freq.grad, rtol=1e-4, atol=1e-5)
    other = spread(positions, plane(world), Replicate(), Replicate())
    raises(r"LearnedRope: positions must be on the mesh of the frequencies", lambda: spread_out(other))
