"""`HeadwiseParallel`: outputs and all gradients equal those of the whole layer, written out in float64."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attention_oracle as written_out
import oracle
from attention_oracle import Rotary
from ropewalk import KVCache, LearnedRope, Rope, RopeError, RotaryAttention, Rotation, SelfExtend
from ropewalk.kernels import backend
from ropewalk.parallel import ContextParallel, HeadwiseParallel

CHECKS: dict[str, Callable[[int], None]] = {}
HIDDEN, HEADS, HEAD_DIM, SEQ, EPS = 12, 4, 6, 8, 1e-6
ROPE, TURN = Rope(HEAD_DIM, 1e4, "half"), Rotary(oracle.inv_freq(1e4, HEAD_DIM), "half")
CAUSAL, PLACES = written_out.causal(SEQ), written_out.pairs(torch.arange(SEQ))
# Measured: 2e-15 in values of size 5, and 4.3e-14 in gradients of size 9.
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-13}


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


def layer(kv_heads: int = 2, **options: Any) -> RotaryAttention:
    made = RotaryAttention(HIDDEN, HEADS, num_kv_heads=kv_heads, head_dim=HEAD_DIM, **options).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=0.3, std=0.3)
    return made


def line(world: int) -> Any:
    return init_device_mesh("cpu", (world,))


def sharded(attention: RotaryAttention, mesh: Any, **options: Any) -> RotaryAttention:
    parallelize_module(attention, mesh, HeadwiseParallel(**options))
    return attention


def weights_of(attention: RotaryAttention) -> dict[str, Tensor]:
    return {name: p.detach().clone().requires_grad_() for name, p in attention.named_parameters()}


def wanted(x: Tensor, weights: dict[str, Tensor], kv_heads: int, at: Any = None) -> Tensor:
    """Compute the layer by formulas, without ropewalk."""
    eps = EPS if "q_norm.weight" in weights else None
    at = PLACES if at is None else at
    return written_out.attention(x, weights, heads=HEADS, kv_heads=kv_heads, rotary=TURN, at=at, seen=CAUSAL, eps=eps)


def inputs(batch: int = 2) -> tuple[Tensor, Tensor]:
    """Return hidden states, and the weights with which the outputs are summed to the loss."""
    x, factor = torch.randn(2, batch, SEQ, HIDDEN, dtype=torch.float64)
    return x.requires_grad_(), factor


def rotation() -> Any:
    return ROPE.at(torch.arange(SEQ), dtype=torch.float64)


def same_gradients(attention: RotaryAttention, weights: dict[str, Tensor]) -> None:
    for name, parameter in attention.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements, name  # no reduction is pending
        torch.testing.assert_close(parameter.grad.full_tensor(), weights[name].grad, **EXACT)


def collectives(comm: CommDebugMode) -> dict[str, int]:
    return {str(name).split(".")[-1]: count for name, count in comm.get_comm_counts().items() if count}


@check
def outputs_and_every_gradient(world: int) -> None:
    for kv_heads, options in itertools.product((1, 2, 4), ({}, {"qk_norm": EPS, "bias": True, "o_bias": True})):
        attention = layer(kv_heads, **options)
        weights, (x, factor) = weights_of(attention), inputs()
        sharded(attention, line(world))
        right = wanted(x, weights, kv_heads)
        (right * factor).sum().backward()
        summed = (2 if "qk_norm" in options else 0) + (2 if kv_heads < world else 0)  # norms; keys and values
        for watching in (True, False):  # if observed, the norms are called as modules
            of_x = x.detach().clone().requires_grad_()
            with CommDebugMode() if watching else contextlib.nullcontext() as forward:
                out = attention(of_x, rotation())
            torch.testing.assert_close(out, right, **EXACT)
            attention.zero_grad()
            with CommDebugMode() if watching else contextlib.nullcontext() as backward:
                (out * factor).sum().backward()
            if watching:
                assert collectives(forward) == {"all_reduce": 1}
                assert collectives(backward) == {"all_reduce": 1 + summed}
            torch.testing.assert_close(of_x.grad, x.grad, **EXACT)
            same_gradients(attention, weights)


@check
def the_sequence_sharded_too(world: int) -> None:
    rank = dist.get_rank()
    for kv_heads in (1, 4):
        attention = layer(kv_heads, qk_norm=EPS, o_bias=True)
        weights, (x, factor) = weights_of(attention), inputs()
        sharded(attention, line(world), sequence_parallel=True)
        part = x.detach().chunk(world, 1)[rank].clone().requires_grad_()
        with CommDebugMode() as forward:
            out = attention(x=part, rotation=rotation())
        assert collectives(forward) == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
        right = wanted(x, weights, kv_heads)
        torch.testing.assert_close(out, right.chunk(world, 1)[rank], **EXACT)
        (right * factor).sum().backward()
        with CommDebugMode() as backward:
            (out * factor.chunk(world, 1)[rank]).sum().backward()
        summed = 2 if kv_heads == 4 else 4  # norms; keys and values
        expected = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": summed}
        assert collectives(backward) == expected, collectives(backward)
        torch.testing.assert_close(part.grad, x.grad.chunk(world, 1)[rank], **EXACT)
        same_gradients(attention, weights)


@check
def a_plan_that_splits_a_head(world: int) -> None:
    attention = layer(1)
    plan = {f"{name}_proj": ColwiseParallel() for name in "qkv"} | {"o_proj": RowwiseParallel()}
    parallelize_module(attention, line(world), plan)
    with pytest.raises(RopeError, match="k_proj must return whole heads, a multiple of head_dim=6 channels, got "):
        attention(torch.ones(1, SEQ, HIDDEN).double(), rotation())
    attention = layer(2)
    parallelize_module(attention, line(world), {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()})
    message = f"matching heads, 2 query heads for each key head, got {HEADS // world} query heads and 2 key"
    with pytest.raises(RopeError, match=message):
        attention(torch.ones(1, SEQ, HIDDEN).double(), rotation())


@check
def caches(world: int) -> None:
    """Decode token by token. One kernel call does norm, rotation and writes, with this rank's weights and heads."""
    with torch.no_grad():
        for kv_heads in (1, 4):
            attention = layer(kv_heads, qk_norm=EPS)
            weights, x = weights_of(attention), inputs()[0].detach()
            sharded(attention, line(world))
            right, local = wanted(x, weights, kv_heads), max(1, kv_heads // world)
            cache = KVCache(1, 2, local, HEAD_DIM, capacity=SEQ, dtype=torch.float64)
            for i in range(SEQ):
                step = cache.step(1)
                rotated = step.rotation(ROPE, dtype=torch.float64)
                with torch.profiler.profile() if i == SEQ - 1 else contextlib.nullcontext() as seen:
                    out = attention(x[:, i : i + 1], rotated, cache=step.layer(0))
                torch.testing.assert_close(out, right[:, i : i + 1], **EXACT)
            assert ("ropewalk::step" in {event.key for event in seen.key_averages()}) == backend.FAST_PATH
        step = KVCache(1, 2, 4, HEAD_DIM, capacity=1, dtype=torch.float64).step(1)  # the key heads of the whole model
        message = (
            rf"q must have shape \(2, 1, heads, 6\), with a multiple of 4 heads, got \(2, 1, {HEADS // world}, 6\)"
            r".*num_kv_heads of the cache is the number of key heads of this rank\."
        )
        with pytest.raises(RopeError, match=message):
            attention(x[:, :1], step.rotation(ROPE, dtype=torch.float64), cache=step.layer(0))


@check
def self_extend(world: int) -> None:
    attention = layer(2, qk_norm=EPS)
    weights, (x, factor) = weights_of(attention), inputs()
    sharded(attention, line(world))
    right = wanted(x, weights, 2, written_out.self_extend(range(SEQ), 2, 4))
    (right * factor).sum().backward()
    out = attention(x.detach(), SelfExtend(ROPE, 2, 4).at(torch.arange(SEQ), dtype=torch.float64))
    torch.testing.assert_close(out, right, **EXACT)
    (out * factor).sum().backward()
    same_gradients(attention, weights)


class LearnedRotary:
    """Like `Rotary`, for trained speeds: `[1, pairs]`, or `[heads, pairs]` if each head has its own."""

    def __init__(self, speeds: Tensor) -> None:
        self.speeds = speeds

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions.double()[..., None, None] * self.speeds
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )


@check
def learned_frequencies(world: int) -> None:
    """Every rank gets the gradient of all heads, whether heads share the frequencies or have their own."""
    rank = dist.get_rank()
    for heads, kv_heads, sequence_parallel in ((None, 4, False), (None, 1, True), (4, 4, False), (4, 4, True)):
        attention = layer(kv_heads, qk_norm=EPS)
        weights, (x, factor) = weights_of(attention), inputs()
        sharded(attention, line(world), sequence_parallel=sequence_parallel)
        learned = LearnedRope.from_rope(ROPE, heads=heads, dtype=torch.float64)
        with torch.no_grad():
            learned.inv_freq.mul_(1 + torch.rand_like(learned.inv_freq))
        speeds = learned.inv_freq.detach()[0].clone().requires_grad_()
        rotary: Any = LearnedRotary(speeds if heads else speeds[None])
        right = written_out.attention(
            x, weights, heads=HEADS, kv_heads=kv_heads, rotary=rotary, at=PLACES, seen=CAUSAL, eps=EPS
        )
        (right * factor).sum().backward()

        def own(whole: Tensor, cut: bool = sequence_parallel) -> Tensor:
            return whole.chunk(world, 1)[rank] if cut else whole

        of_x = own(x.detach()).clone().requires_grad_()
        rotation = learned(torch.arange(SEQ), dtype=torch.float64)
        out = attention(of_x, rotation) if heads else attention(of_x, rotation=rotation)
        torch.testing.assert_close(out, own(right), **EXACT)
        with CommDebugMode() as backward:
            (out * own(factor)).sum().backward()
        summed = 2 + (2 if kv_heads < world else 0) + 1  # norms; keys and values; cos and sin together
        assert collectives(backward)["all_reduce"] == summed + (0 if sequence_parallel else 1)
        torch.testing.assert_close(of_x.grad, own(x.grad), **EXACT)
        torch.testing.assert_close(learned.inv_freq.grad[0], speeds.grad, rtol=0, atol=1e-12)
        same_gradients(attention, weights)


@check
def tables_for_each_head(world: int) -> None:
    """Tables of all heads are restricted to the heads of this rank; tables of this rank's heads are used directly."""
    attention = layer(4)
    weights, x = weights_of(attention), inputs()[0].detach()
    sharded(attention, line(world))
    speeds = torch.rand(HEADS, HEAD_DIM // 2, dtype=torch.float64)
    rotary: Any = LearnedRotary(speeds)
    right = written_out.attention(x, weights, heads=HEADS, kv_heads=4, rotary=rotary, at=PLACES, seen=CAUSAL)
    angle = torch.arange(SEQ).double()[:, None] * speeds[:, None]
    for part in (angle, angle.chunk(world)[dist.get_rank()]):
        of_part = Rotation(part.cos(), part.sin(), pairing="half", per_head=True)
        torch.testing.assert_close(attention(x, of_part), right, **EXACT)


@check
def dtensor_tables_beside_plain_heads(world: int) -> None:
    mesh, attention = line(world), sharded(layer(4), line(world))
    tables = ROPE.at(distribute_tensor(torch.arange(SEQ), mesh, [Replicate()]), dtype=torch.float64)
    message = "HeadwiseParallel: cos and sin must be plain tensors, as q and k are inside, got DTensors. Pass plain"
    with pytest.raises(RopeError, match=message):
        attention(inputs()[0], tables)


@check
def with_context_parallel(world: int) -> None:
    """A mesh of two axes: the sequence over one, the heads over the other."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("context", "heads"))
    attention = layer(2, qk_norm=EPS)
    weights, (x, factor) = weights_of(attention), inputs()
    sharded(attention, mesh["heads"])
    right = wanted(x, weights, 2)
    (right * factor).sum().backward()
    cache = ContextParallel(SEQ, mesh["context"].get_group())
    places = cache.places
    out = attention(x.detach()[:, places], ROPE.at(places, dtype=torch.float64), cache=cache)
    torch.testing.assert_close(out, right[:, places], **EXACT)
    (out * factor[:, places]).sum().backward()
    for parameter in attention.parameters():
        dist.all_reduce(parameter.grad.to_local(), group=mesh["context"].get_group())
    same_gradients(attention, weights)


@check
def compiled_over_heads(world: int) -> None:
    if world > 2:  # compilation is slow, and the graph does not depend on the number of ranks
        return
    attention = layer(4, qk_norm=EPS)
    weights, (x, factor) = weights_of(attention), inputs()
    sharded(attention, line(world))
    right = wanted(x, weights, 4)
    (right * factor).sum().backward()
    out = torch.compile(attention, backend="aot_eager", fullgraph=True)(x.detach(), rotation())
    torch.testing.assert_close(out, right, **EXACT)
    (out * factor).sum().backward()
    same_gradients(attention, weights)


@check
def from_meta(world: int) -> None:
    """The module is sharded on the meta device, as for large models."""
    for kv_heads in (1, 4):
        filled = layer(kv_heads, qk_norm=EPS)
        weights, (x, factor) = weights_of(filled), inputs()
        with torch.device("meta"):
            attention = layer(kv_heads, qk_norm=EPS)
        sharded(attention, line(world)).to_empty(device="cpu")
        for name, parameter in attention.named_parameters():
            whole = distribute_tensor(weights[name].detach(), parameter.device_mesh, parameter.placements)
            parameter.data.copy_(whole)
        right, out = wanted(x, weights, kv_heads), attention(x.detach(), rotation())
        torch.testing.assert_close(out, right, **EXACT)
        (right * factor).sum().backward()
        (out * factor).sum().backward()
        same_gradients(attention, weights)
