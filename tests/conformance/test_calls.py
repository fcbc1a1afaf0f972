"""`check` finds the call of functions with the signatures of other libraries, or shows an adapter that can be called.

The functions here have the signatures of other people's kernels, whose files are named, and compute the formula in
plain PyTorch. Beside each right one is a wrong one, in which the way of calling it could hide the bug.
"""

from __future__ import annotations

import functools
import inspect
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk import Axes, Rope, RopeError, conformance
from ropewalk.schemes import Linear, Proportional, YaRN
from ropewalk.tools.check.expected import Expected
from ropewalk.tools.check.find import adapter, calls
from ropewalk.tools.check.find import target as targets
from ropewalk.tools.check.find.form import EPS
from ropewalk.tools.check.find.subject import Subject

HALF = Rope(64, 10_000.0, "half")


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate x `[…, heads, channels]` by tables `[…, pairs]`, which may be of fewer pairs than half the channels."""
    rotated = 2 * cos.shape[-1]
    head, rest = x[..., :rotated].double(), x[..., rotated:]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    cos, sin = cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
    pair = a * cos - b * sin, b * cos + a * sin
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((out.type_as(x), rest), dim=-1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight).type_as(x)


def cos_sin_cache(rotary_dim: int, length: int, base: float = 100.0) -> Tensor:
    angles = torch.arange(length)[:, None] * base ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def at_positions(cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    return cos, sin


class Flash:
    """flash-attention, flash_attn/layers/rotary.py at 09d422b."""

    @staticmethod
    def positions(x: Tensor, offsets: Any, cu_seqlens: Any) -> Tensor:
        if cu_seqlens is None:
            first = torch.as_tensor(offsets).reshape(-1, 1)
            return (first + torch.arange(x.shape[1])).expand(x.shape[0], -1)
        starts = torch.as_tensor(offsets).expand(len(cu_seqlens) - 1).tolist()
        lengths = cu_seqlens.diff().tolist()
        return torch.cat([torch.arange(f, f + n) for f, n in zip(starts, lengths, strict=True)])

    @staticmethod
    def apply_rotary_emb(
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        inplace: bool = False,
        seqlen_offsets: Any = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        at = Flash.positions(x, seqlen_offsets, cu_seqlens)
        out = turn(x, cos[at], sin[at], interleaved)
        return x.copy_(out) if inplace else out

    @staticmethod
    def apply_rotary_emb_qkv_(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cos_k: Tensor | None = None,
        sin_k: Tensor | None = None,
        interleaved: bool = False,
        seqlen_offsets: Any = 0,
        num_heads_q: int | None = None,
    ) -> Tensor:
        at = Flash.positions(qkv, seqlen_offsets, None)
        if qkv.dim() == 5:
            for part in qkv.unbind(2)[:2]:
                part.copy_(turn(part, cos[at], sin[at], interleaved))
        else:
            assert num_heads_q is not None
            heads = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
            qkv[:, :, :heads] = turn(qkv[:, :, :heads], cos[at], sin[at], interleaved)
        return qkv

    @staticmethod
    def apply_rotary_emb_kv_(
        kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Any = 0
    ) -> Tensor:
        at = Flash.positions(kv, seqlen_offsets, None)
        kv[:, :, 0] = turn(kv[:, :, 0], cos[at], sin[at], interleaved)
        return kv


class FlashInfer:
    """FlashInfer, flashinfer/rope.py at ca14df1."""

    @staticmethod
    def apply_rope_with_cos_sin_cache(
        positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
    ) -> tuple[Tensor, Tensor]:
        if cos_sin_cache.dtype != torch.float32:
            raise ValueError("cos_sin_cache should be float32")
        tables = at_positions(cos_sin_cache, positions)
        q, k = (turn(x.view(len(x), -1, head_size), *tables, not is_neox).view_as(x) for x in (query, key))
        return q, k

    @staticmethod
    def apply_rope_with_cos_sin_cache_inplace(
        positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
    ) -> None:
        results = FlashInfer.apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox)
        query.copy_(results[0])
        key.copy_(results[1])

    @staticmethod
    def apply_rope_pos_ids(
        q: Tensor,
        k: Tensor,
        pos_ids: Tensor,
        rotary_dim: int | None = None,
        interleave: bool = False,
        rope_scale: float = 1,
        rope_theta: float = 1e4,
    ) -> tuple[Tensor, Tensor]:
        size = rotary_dim or q.shape[-1]
        angles = pos_ids[:, None] * rope_theta ** (-torch.arange(0, size, 2).double() / size)
        return turn(q, angles.cos(), angles.sin(), interleave), turn(k, angles.cos(), angles.sin(), interleave)


class VLLM:
    """vLLM, vllm/_custom_ops.py at 7bcae67."""

    @staticmethod
    def rotary_embedding(
        positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
    ) -> None:
        if cos_sin_cache.dtype != query.dtype:
            raise TypeError("cos_sin_cache must have the dtype of query")
        for x in (query, key):
            if x is not None:
                tables = at_positions(cos_sin_cache, positions)
                x.copy_(turn(x.view(len(x), -1, head_size), *tables, not is_neox).view_as(x))

    @staticmethod
    @torch.no_grad()
    def fused_qk_norm_rope(
        qkv: Tensor,
        num_heads_q: int,
        num_heads_k: int,
        num_heads_v: int,
        head_dim: int,
        eps: float,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
        position_ids: Tensor,
    ) -> None:
        assert qkv.shape[1] == (num_heads_q + num_heads_k + num_heads_v) * head_dim
        tables = at_positions(cos_sin_cache, position_ids)
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k = heads[:, :num_heads_q], heads[:, num_heads_q : num_heads_q + num_heads_k]
        q.copy_(turn(normed(q, q_weight, eps), *tables, not is_neox))
        k.copy_(turn(normed(k, k_weight, eps), *tables, not is_neox))


class SGLang:
    """SGLang, python/sglang/jit_kernel/rope.py."""

    @staticmethod
    def apply_rope_inplace_with_kvcache(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cos_sin_cache: Tensor,
        positions: Tensor,
        out_loc: Tensor,
        *,
        is_neox: bool,
        rope_dim: int = 0,
    ) -> None:
        assert cos_sin_cache.shape[1] == (rope_dim or cos_sin_cache.shape[1])
        for x in (q, k):
            x.copy_(turn(x, *at_positions(cos_sin_cache, positions), not is_neox))
        stored = out_loc >= 0
        k_cache[out_loc[stored]] = k[stored].flatten(1)
        v_cache[out_loc[stored]] = v[stored].flatten(1)


class Aiter:
    """AITER, aiter/ops/triton/fusions/fused_kv_cache.py: k is returned, and stored in blocks."""

    @staticmethod
    def fused_qk_rope_reshape_and_cache(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        pos: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
        q_out: Tensor | None = None,
        k_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tables = at_positions(cos_sin_cache, pos)
        q, k = (turn(x, *tables, not is_neox) for x in (q, k))
        block = slot_mapping // key_cache.shape[1], slot_mapping % key_cache.shape[1]
        stored = slot_mapping >= 0
        key_cache[block[0][stored], block[1][stored]] = k[stored]
        value_cache[block[0][stored], block[1][stored]] = v[stored]
        return q, k, key_cache, value_cache


class LigerRopeFunction(torch.autograd.Function):
    """Liger-Kernel, src/liger_kernel/ops/rope.py at 00fb8bf. q and k are `[batch, heads, seq, channels]`."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        half = cos[..., : cos.shape[-1] // 2], sin[..., : cos.shape[-1] // 2]
        q, k = (turn(x.transpose(1, 2), *half).transpose(1, 2) for x in (q, k))
        return q, k, cos.view_as(cos), sin.view_as(sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[2], output[3])

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, *_: Any) -> Any:
        cos, sin = ctx.saved_tensors
        half = cos[..., : cos.shape[-1] // 2], -sin[..., : cos.shape[-1] // 2]
        dq, dk = (turn(x.transpose(1, 2), *half).transpose(1, 2) for x in (dq, dk))
        return dq, dk, None, None, None, None


class LigerWithoutTranspose(LigerRopeFunction):
    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, *_: Any) -> Any:
        cos, sin = ctx.saved_tensors
        half = cos[..., : cos.shape[-1] // 2], sin[..., : cos.shape[-1] // 2]
        dq, dk = (turn(x.transpose(1, 2), *half).transpose(1, 2) for x in (dq, dk))
        return dq, dk, None, None, None, None


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Liger-Kernel, src/liger_kernel/transformers/rope.py."""
    results = LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim)  # type: ignore[no-untyped-call]
    return results[0], results[1]


def fused_apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None = None,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Transformer Engine, transformer_engine/pytorch/attention/rope.py at 0dc141c. freqs are `[seq, 1, 1, d]`."""
    assert freqs.shape[1] == freqs.shape[2] == 1
    assert freqs.dtype == torch.float32
    angles = freqs[:, 0, 0, 0::2] if interleaved else freqs[:, 0, 0, : freqs.shape[-1] // 2]
    if tensor_format == "thd":
        assert cu_seqlens is not None
        at = Flash.positions(t, 0 if start_positions is None else start_positions, cu_seqlens)
    else:
        rows = t.transpose(0, 1) if tensor_format == "sbhd" else t
        at = Flash.positions(rows, 0 if start_positions is None else start_positions, None)
        at = at.T if tensor_format == "sbhd" else at
    return turn(t, angles[at].cos(), angles[at].sin(), interleaved)


class Hub:
    """kernels-community, rotary/torch-ext/rotary/__init__.py at 03e6aff."""

    @staticmethod
    def apply_rotary(x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor, out1: Tensor, out2: Tensor, conj: bool) -> None:
        sin = -sin if conj else sin
        a, b = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        out1.copy_(a)
        out2.copy_(b)

    @staticmethod
    def apply_rotary_transformers(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cos, sin = (t.unsqueeze(unsqueeze_dim)[..., : q.shape[-1] // 2] for t in (cos, sin))
        results = []
        for x in (q, k):
            out = x.clone()
            half = out.shape[-1] // 2
            halves = out[..., :half], out[..., half:]
            Hub.apply_rotary(*halves, cos, sin, *halves, False)
            results.append(out)
        return results[0], results[1]


def flash_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return Flash.apply_rotary_emb(x, cos, sin, inplace=True)


NO_GRADIENT = {"no-gradient"}  # of kernels for inference
RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "flash-attention": (Flash.apply_rotary_emb, {}),
    "flash-attention, interleaved": (Flash.apply_rotary_emb, {"pairing": "interleaved"}),
    "flash-attention in place": (flash_in_place, {}),
    "flash-attention, qkv": (Flash.apply_rotary_emb_qkv_, {}),
    "flash-attention, kv": (Flash.apply_rotary_emb_kv_, {}),
    "FlashInfer": (FlashInfer.apply_rope_with_cos_sin_cache, {}),
    "FlashInfer in place": (FlashInfer.apply_rope_with_cos_sin_cache_inplace, {}),
    "FlashInfer, interleaved": (FlashInfer.apply_rope_with_cos_sin_cache_inplace, {"pairing": "interleaved"}),
    "FlashInfer, own angles": (FlashInfer.apply_rope_pos_ids, {"rope": Rope(64, 1e4, "half", rotary_dim=32)}),
    "vLLM": (VLLM.rotary_embedding, {}),
    "vLLM, interleaved": (VLLM.rotary_embedding, {"pairing": "interleaved"}),
    "vLLM, norm": (VLLM.fused_qk_norm_rope, {}),
    "SGLang, cache": (SGLang.apply_rope_inplace_with_kvcache, {}),
    "AITER, cache": (Aiter.fused_qk_rope_reshape_and_cache, {}),
    "Liger": (LigerRopeFunction, {}),
    "Liger, function": (liger_rotary_pos_emb, {}),
    "Transformer Engine": (fused_apply_rotary_pos_emb, {}),
    "hub": (Hub.apply_rotary, {}),
    "hub, transformers": (Hub.apply_rotary_transformers, {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_common_signatures_need_no_description(name: str) -> None:
    function, given = RIGHT[name]
    report = conformance.check(function, **given)
    in_place = "place" in name or name in ("vLLM", "vLLM, interleaved", "vLLM, norm", "SGLang, cache", "hub")
    assert {*report.codes} <= (NO_GRADIENT if in_place else set()), str(report)
    assert all(grade.right is not False or grade.name == "gradients" for grade in report.grades), str(report)


def test_few_calls_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[Any] = []
    score = calls._score
    monkeypatch.setattr(calls, "_score", lambda *args: scored.append(args) or score(*args))  # type: ignore[func-returns-value]
    counts = []
    for function, _ in RIGHT.values():
        scored.clear()
        found(function)
        counts.append(len(scored))
    assert sorted(counts)[len(counts) // 2] <= 10

    def raises(q, k, v, q_weight, k_weight, head_size, freqs_cis, positions, slots, key_cache, value_cache) -> None:  # type: ignore[no-untyped-def]
        raise RuntimeError("never")

    scored.clear()
    with pytest.raises(RopeError, match="never"):
        found(raises)
    assert max(*counts, len(scored)) <= 150


def ignores(function: Any, **values: Any) -> Any:
    """Return a function with the same signature that replaces some of its arguments."""

    @functools.wraps(function)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.arguments |= values
        return function(*bound.args, **bound.kwargs)

    return wrong


def only_the_query(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads_q: int) -> Tensor:
    out = qkv.clone()
    out[:, :, :num_heads_q] = turn(qkv[:, :, :num_heads_q], cos, sin)
    return out


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "flash-attention, cu_seqlens": (
        lambda x, cos, sin, interleaved=False, cu_seqlens=None: (
            turn(x, cos, sin, interleaved) if cu_seqlens is None else turn(x, cos[: len(x)], sin[: len(x)], interleaved)
        ),
        {},
        "segments-ignored",
    ),
    "flash-attention, offsets": (ignores(Flash.apply_rotary_emb, seqlen_offsets=0), {}, "offset-ignored"),
    "flash-attention, qkv": (only_the_query, {}, "key-not-rotated"),
    "FlashInfer": (
        ignores(FlashInfer.apply_rope_with_cos_sin_cache_inplace, is_neox=True),
        {"pairing": "interleaved"},
        "wrong-pairing",
    ),
    "FlashInfer, own angles": (
        ignores(FlashInfer.apply_rope_pos_ids, rotary_dim=None),
        {"rope": Rope(64, 1e4, "half", rotary_dim=32)},
        "wrong-slice",
    ),
    "Liger": (LigerWithoutTranspose, {}, "wrong-gradient"),
    "Transformer Engine": (
        ignores(fused_apply_rotary_pos_emb, start_positions=None),
        {},
        "offset-ignored",
    ),
    "hub": (ignores(Hub.apply_rotary, conj=True), {}, "rotates-backwards"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_call_hides_no_bug(name: str) -> None:
    function, given, bug = WRONG[name]
    assert bug in conformance.check(function, **given).codes


def test_operators_of_torch() -> None:
    @torch.library.custom_op("ropewalk_test_calls::rotate_", mutates_args=("query", "key"))
    def rotate_(
        positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
    ) -> None:
        FlashInfer.apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox)

    for operator in (rotate_, torch.ops.ropewalk_test_calls.rotate_):
        report = conformance.check(operator, ignore=["no-gradient"])
        assert report.verdict == "right", str(report)
        assert report.found["layout"] == "thd"


def test_the_reason_that_torchscript_gives_is_shown() -> None:
    @torch.jit.script
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.ones(7)

    with pytest.raises(RopeError, match=r"got RuntimeError: The size of tensor a .* must match the size of tensor b"):
        conformance.check(rotate)


def pasted(target: Any, expected: Expected | None = None) -> dict[str, Any]:
    """Run the adapter that `check` shows for a target, and return its names."""
    names: dict[str, Any] = {}
    exec(adapter.write(targets.load(target), expected or Expected()), names)
    return names


class OneHeadTables:
    """Tables `[seq, 1, channels]` of x `[seq, heads, channels]`."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin_cache(self.dim, len(x)).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((sin, sin), dim=-1)[:, None]

    __call__ = forward


class OneMethod:
    """Of which the only public method computes tables."""

    def __init__(self, embed_dim: int, verbose: bool, context_len: int) -> None:
        assert verbose is False
        self.tables = cos_sin_cache(embed_dim, context_len)

    def cos_sin(self, seq_len: int, device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self.tables[:seq_len].to(device, dtype).chunk(2, dim=-1)


def as_passed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    return rotate(q), rotate(k)


class Relative:
    """Tables of positions from −1 to 1, whatever the size of the grid."""

    def __init__(self, dim: int) -> None:
        self.inv_freq = 10_000.0 ** (-torch.arange(0, dim, 2).double() / dim)

    def forward(self, seq_len: int) -> tuple[Tensor, Tensor]:
        angles = 100 * torch.linspace(-1, 1, seq_len)[:, None] * self.inv_freq
        return angles.cos(), angles.sin()

    __call__ = forward


def with_xpos(x: Tensor, positions: Tensor) -> Tensor:
    sizes = ((torch.arange(32) + 12.8) / 44.8) ** (positions[..., None] / 512)
    angles = positions[..., None] * 10_000.0 ** (-torch.arange(32) / 32).double()
    return turn(x, sizes * angles.cos(), sizes * angles.sin())


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (lambda x: turn(x, *Relative(64)(x.shape[1])), "must not depend on the number of tokens, got angles that do"),
        (with_xpos, "must keep their size, got powers of the position, as in xPos"),
    ],
)
def test_what_is_not_judged(target: Any, says: str) -> None:
    with pytest.raises(RopeError, match=says):
        conformance.check(target)


def of_one_frequency(x: Tensor, positions: Tensor) -> Tensor:
    """`i / dim // 2` is 0 for each pair, as in ReaLLM-Forge 35."""
    angles = positions[..., None] * 10_000.0 ** -(torch.arange(32) / 64 // 2).double()
    return turn(x, angles.cos(), angles.sin())


def of_halved_indices(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[..., None] * 10_000.0 ** (-(torch.arange(32) // 2) / 16).double()
    return turn(x, angles.cos(), angles.sin())


def on_a_short_axis(x: Tensor, position_ids: Annotated[Tensor, "2bs"]) -> Tensor:
    """The rows of the second axis end where those of the first go on."""
    tables = [cos_sin_cache(32, length)[p] for length, p in zip((2048, 64), position_ids, strict=True)]
    (cos, sin), (cos2, sin2) = (table.chunk(2, dim=-1) for table in tables)
    return turn(x, torch.cat((cos, cos2), dim=-1), torch.cat((sin, sin2), dim=-1))


def test_measures_of_rare_code() -> None:
    for code, says in {
        of_halved_indices: "Pairs 0 and 1, 2 and 3 and so on rotate at the same speed, as if their index was halved.",
        of_one_frequency: "All pairs rotate at the same speed.",
    }.items():
        assert [finding.says for finding in conformance.check(code).findings] == [says]
    assert "pairs 0 to 15 height, 16 to 31 width" in conformance.check(on_a_short_axis).found["axes"]


def tables_at(positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None] * 100.0 ** (-torch.arange(32) / 32).double()
    return angles.cos().float(), angles.sin().float()


def from_an_offset(q: Tensor, k: Tensor, pos: Any, attention_mask: Any) -> tuple[Tensor, Tensor]:
    assert attention_mask is None
    tables = tables_at(torch.arange(pos, pos + q.shape[1]))
    return turn(q, *tables), turn(k, *tables)


def of_sines_first(q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    sin, cos = rope
    return turn(q, cos, sin), turn(k, cos, sin)


def of_a_period(x: Tensor, offset: int, max_period: float) -> Tensor:
    """As in Moshi."""
    assert max_period == 10_000.0
    return along_an_axis(x, 1, offset)


class OnlyForward:
    """A class without __call__."""

    def forward(self, value: Tensor, position_ids: Tensor) -> Tensor:
        angles = position_ids[..., None] * 10_000.0 ** (-torch.arange(0, 1, 2 / value.shape[-1]).double())
        return turn(value, angles.cos(), angles.sin())


def along_an_axis(x: Tensor, seq_dim: int, offset: int = 0, position_ids: Tensor | None = None) -> Tensor:
    positions = torch.arange(offset, offset + x.shape[seq_dim])
    return turn(x.movedim(seq_dim, -3), *tables_at(positions)).movedim(-3, seq_dim)


def of_one_head(x: Tensor, seq_len: int) -> Tensor:
    assert x.ndim == 2
    return turn(x[:, None], *at_positions(cos_sin_cache(64, seq_len), torch.arange(seq_len)))[:, 0]


def at_positions_of_each(q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
    cache = cos_sin_cache(64, 1 << 13)
    return turn(q, *at_positions(cache, q_positions)), turn(k, *at_positions(cache, k_positions))


def at_ids_of_each(q: Tensor, k: Tensor, query_pos_ids: Tensor, key_pos_ids: Tensor) -> tuple[Tensor, Tensor]:
    return at_positions_of_each(q, k, query_pos_ids, key_pos_ids)


def on_four_axes(x: Tensor, position_ids: Tensor) -> Tensor:
    angles = position_ids.repeat_interleave(8, dim=0).movedim(0, -1) * 10_000.0 ** (-torch.arange(32) / 32).double()
    return turn(x, angles.cos(), angles.sin())


def of_lengths(query_rows: Tensor, key_rows: Tensor, cu_lens: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
    assert int(cu_lens.diff().max()) == max_len
    positions = torch.cat([torch.arange(n) for n in cu_lens.diff().tolist()])
    tables = at_positions(cos_sin_cache(64, max_len), positions)
    return turn(query_rows, *tables), turn(key_rows, *tables)


def of_its_length(x: Tensor, seq_len: int) -> Tensor:
    return turn(x, *at_positions(cos_sin_cache(64, seq_len), torch.arange(seq_len)))


def from_a_shift(x: Tensor, position_offset: int = 0) -> Tensor:
    return along_an_axis(x, 1, position_offset)


class OfPoints:
    def __init__(self, freq_base: float, grid_size: tuple[int, int]) -> None:
        self.rows = cos_sin_cache(32, grid_size[0], freq_base)

    def turned(self, x: Tensor, xy: Tensor) -> Tensor:
        return torch.cat(
            [turn(part, *at_positions(self.rows, xy[..., axis])) for axis, part in enumerate(x.chunk(2, dim=-1))],
            dim=-1,
        )


class AllRows:
    def __init__(self, cfg: Any) -> None:
        self.tables = cos_sin_cache(cfg.head_dim, cfg.max_position_embeddings).chunk(2, dim=-1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat((t, t), dim=-1)[None] for t in self.tables)

    __call__ = forward


class OfTwoAxes(torch.nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids.repeat_interleave(16, dim=-1) * 10_000.0 ** (-torch.arange(32) / 32).double()
        return angles.cos(), angles.sin()


def with_known_positions(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
    assert position_ids.shape[-1] == 2
    return turn(x, cos, sin)


class OfStackedTables:
    """As in MDLM and SEDD: tables with an axis for q, k and v, of which v is not turned."""

    def __call__(self, x: Tensor, seq_dim: int = 1) -> tuple[Tensor, ...]:
        tables = cos_sin_cache(64, x.shape[seq_dim]).chunk(2, dim=-1)
        return tuple(t.repeat(1, 2)[None, :, None, None].repeat(1, 1, 3, 1, 1) for t in tables)


def of_stacked_tables(qkv: Tensor, rotary_cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    q, k, v = (x.squeeze(2) for x in qkv.chunk(3, dim=2))
    cos, sin = (t[0, :, 0, 0, : t.shape[-1] // 2] for t in rotary_cos_sin)
    return turn(q, cos, sin), turn(k, cos, sin), v


def made_from_pairs(head_dim: int, rope_scaling: tuple[tuple[str, Any], ...] = ()) -> Any:
    """As in a small SGLang: options that can be hashed, and an object that is no module."""
    assert hash(rope_scaling)
    assert dict(rope_scaling)["factor"] == 4.0
    return SimpleNamespace(forward=lambda x, positions: OnlyForward().forward(x, positions / 4))


def of_middle_axes(x: Tensor, coordinates: Tensor) -> Tensor:
    return on_four_axes(x, coordinates.transpose(0, 1))


def beside_hidden_states(hidden_states: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Heads before tokens, for one row, whose axis is dropped."""
    cos, sin = tables_at(torch.arange(hidden_states.shape[1]))
    rotated = (torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in (x.chunk(2, -1) for x in (query, key)))
    q, k = (x.squeeze(0) for x in rotated)
    return q, k


def by_name(q: Tensor, k: Tensor, positions: Tensor) -> dict[str, Tensor]:
    return dict(zip("qk", (turn(x, *at_positions(cos_sin_cache(64, 1 << 13), positions)) for x in (q, k)), strict=True))


class Attention(torch.nn.Module):
    """As in courses: one method computes the tables, another applies them."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()

    def tables(self, seq_len: int, head_dim: int) -> tuple[Tensor, ...]:
        assert (head_dim, seq_len <= 1 << 13) == (64, True)
        return cos_sin_cache(head_dim, seq_len).chunk(2, dim=-1)

    def apply_tables(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turn(x, cos, sin)


class OfALength(torch.nn.Module):
    """Both are optional, and the length is needed, as in Unsloth."""

    def __init__(self, theta: float = 100.0, config: Any = None) -> None:
        super().__init__()
        self.theta = theta if config is None else config.rope_theta

    def forward(self, x: Tensor, position_ids: Any = None, seq_len: int | None = None) -> tuple[Tensor, ...]:
        assert seq_len == position_ids.max() + 1
        angles = position_ids[..., None] * self.theta ** (-torch.arange(32) / 32).double()
        return angles.cos().float(), angles.sin().float()


class Angles(torch.nn.Module):
    """As in vision towers: the caller takes the cosines of each angle twice."""

    def forward(self, seqlen: int) -> Tensor:
        return torch.arange(seqlen)[:, None] * 100.0 ** (-torch.arange(32) / 32)


def turn_by_wide(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    assert cos.shape[-1] == 64
    return turn(q, cos[..., :32], sin[..., :32]), turn(k, cos[..., :32], sin[..., :32])


class Random(torch.nn.Module):
    """Positions that are scaled at random in training, as in DINOv3."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * (10_000.0 ** (-torch.arange(32) / 32).double() * (2 if self.training else 1))
        return turn(x, angles.cos(), angles.sin())


class Rotary:
    def __init__(self, dim: int, base: float = 10_000.0) -> None:
        self.inv_freq = base ** (-torch.arange(0, dim, 2).double() / dim)

    def __call__(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.inv_freq
        return angles.cos(), angles.sin()


def with_tables_of(x: Tensor, rope: Rotary) -> Tensor:
    return turn(x, *rope(torch.arange(x.shape[1])[None]))


def on_axes_of_a_table(x: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Tensor:
    """positions: `[2, batch, seq]`, of which each turns half of the pairs."""
    rows = cos_sin_cache[positions].unflatten(-1, (2, 2, 16))  # type: ignore[no-untyped-call]
    return turn(x, *torch.stack((rows[0, ..., 0, :], rows[1, ..., 1, :]), dim=-2).flatten(-2).unbind(2))


def from_places_of_both(q: Tensor, k: Tensor, q_pos_start: int, k_pos_start: int) -> tuple[Tensor, Tensor]:
    return from_a_shift(q, q_pos_start), from_a_shift(k, k_pos_start)


def up_to_a_length(x: Tensor, positions: Tensor, max_seq_len: int) -> Tensor:
    return turn(x, *at_positions(cos_sin_cache(64, max_seq_len), positions))


class OfFramesOfAModel(torch.nn.Module):
    """As in motion models: of what is passed through the layers, which has no axis for the heads."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        _, frames, _ = hidden_states.shape
        return torch.polar(torch.ones(1), torch.arange(frames)[:, None] * 100.0 ** (-torch.arange(32) / 32))[None, None]


def in_a_table(hidden_states: Tensor, freqs: Tensor) -> Tensor:
    turned = torch.complex(*hidden_states.float().chunk(2, dim=-1)) * freqs
    return torch.cat((turned.real, turned.imag), dim=-1).type_as(hidden_states)


class OfFrames:
    def __init__(self, dim: int) -> None:
        self.dim = dim

    def tables(self, frames: int, device: str) -> tuple[Tensor, Tensor]:
        return at_positions(cos_sin_cache(self.dim, frames), torch.arange(frames))


class OfAnEngine(torch.nn.Module):
    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return turn(query, *tables_at(positions)), turn(key, *tables_at(positions))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)


def a_column(seq_len: int) -> tuple[Tensor, Tensor]:
    """Of a grid: half of the pairs turn by the row, and the others by the column, which is 0."""
    angles = torch.arange(seq_len)[:, None] * 100.0 ** (-torch.arange(16) / 16)
    angles = torch.cat((angles, torch.zeros_like(angles)), dim=-1)
    return angles.cos(), angles.sin()


def packed_or_not(x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Without cu_seqlens, all tokens of x [batch, seq, heads, dim] have position 0, which is wrong."""
    at = torch.zeros(1, dtype=torch.int64)
    if cu_seqlens is not None:
        at = torch.cat([torch.arange(int(n)) for n in cu_seqlens.diff()])
    return turn(x, *tables_at(at))


@pytest.mark.parametrize(
    ("target", "row", "value"),
    [
        (of_lengths, "call", "f(query_rows, key_rows, cu_lens, max_len)"),
        (of_its_length, "call", "f(x, seq_len)"),
        (from_a_shift, "call", "f(x, position_offset)"),
        (targets.Method(OfPoints, "turned"), "axes", "pairs 0 to 15 height, 16 to 31 width"),
        ((AllRows, as_passed), "rotated channels", "0 to 63 of 64"),
        ((OfTwoAxes, with_known_positions), "axes", "pairs 0 to 15 height, 16 to 31 width"),
        (Random, "frequencies", "base 10000"),
        ((OneHeadTables, as_passed), "layout", "thd"),
        ((OneMethod, turn), "frequencies", "base 100"),
        (lambda x, theta: turn(x, theta.cos(), theta.sin()), "call", "f(x, theta), tables: angles half"),
        (of_sines_first, "call", "f(q, k, rope), tables: (sin, cos) half"),
        (of_a_period, "call", "f(x, offset, max_period)"),
        (from_an_offset, "call", "f(q, k, pos, attention_mask=None)"),
        (OnlyForward, "rotated channels", "0 to 63 of 64"),
        (along_an_axis, "never read", "position_ids"),
        (of_one_head, "layout", "td"),
        (at_positions_of_each, "positions", "separate for each row of the batch"),
        (at_ids_of_each, "positions", "separate for each row of the batch"),
        (lambda k, key_pos: turn(k, *tables_at(key_pos)), "call", "f(k, key_pos)"),
        ((OfFramesOfAModel, in_a_table), "layout", "bhsd"),
        (on_four_axes, "axes", "pairs 0 to 7 axis 0, 8 to 15 axis 1, 16 to 23 axis 2, 24 to 31 axis 3"),
        (of_middle_axes, "axes", "pairs 0 to 7 axis 0, 8 to 15 axis 1, 16 to 23 axis 2, 24 to 31 axis 3"),
        ((OfStackedTables, of_stacked_tables), "call", "tables, then f(qkv, rotary_cos_sin), stacked before the heads"),
        (beside_hidden_states, "layout", "bhsd"),
        (by_name, "call", "f(q, k, positions)"),
        (tuple(targets.Method(Attention, name) for name in ("tables", "apply_tables")), "frequencies", "base 100"),
        ((OfALength, turn), "positions", "separate for each row of the batch"),
        ((Angles, turn_by_wide), "frequencies", "base 100"),
        ((Rotary, with_tables_of), "call", "f(x)"),
        ((cos_sin_cache, on_axes_of_a_table), "axes", "pairs 0 to 15 height, 16 to 31 width"),
        (from_places_of_both, "positions", "counted from an offset"),
        (up_to_a_length, "call", "f(x, positions, max_seq_len)"),
        (OfAnEngine, "call", "f(positions, query, key)"),
        (packed_or_not, "other calls", "not tried: those without cu_seqlens, of another layout"),
        ((targets.Method(OfFrames, "tables"), turn), "frequencies", "base 100"),
    ],
)
def test_rare_signatures_are_called(target: Any, row: str, value: str) -> None:
    report = conformance.check(target, pairing="half")
    assert report.verdict == "right", str(report)
    assert report.found[row] == value


class OfNorms(torch.nn.Module):
    def __init__(self, head_dim: int, order: str = "first", shared: bool = False) -> None:
        super().__init__()
        self.q_norm = torch.nn.RMSNorm(head_dim, eps=1e-5)
        self.k_norm = self.q_norm if shared else torch.nn.RMSNorm(head_dim, eps=1e-5)
        self.order = order

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = at_positions(cos_sin_cache(64, 1 << 13), positions)
        pairs = (q, self.q_norm), (k, self.k_norm)
        if self.order == "last":
            return tuple(norm(turn(x, cos, sin)) for x, norm in pairs)  # type: ignore[return-value]
        if self.order == "of q":
            return turn(self.q_norm(q), cos, sin), turn(self.q_norm(k), cos, sin)
        if self.order == "no weight":
            return turn(self.q_norm(q), cos, sin), turn(torch.nn.functional.rms_norm(k, k.shape[-1:]), cos, sin)
        if self.order == "of all":
            return tuple(turn(all_heads(x) * norm.weight, cos, sin) for x, norm in pairs)  # type: ignore[return-value]
        return tuple(turn(norm(x), cos, sin) for x, norm in pairs)  # type: ignore[return-value]


def all_heads(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x.flatten(-2), (x.shape[-2] * x.shape[-1],), eps=1e-5).view(x.shape)


@pytest.mark.parametrize(
    ("order", "shared", "says"),
    [
        ("first", False, ""),
        ("first", True, ""),
        ("last", False, "The norm of q is taken after the rotation."),
        ("of q", False, "The norm of k is multiplied by the weight of the other."),
        ("no weight", False, "The norm of k is not multiplied by its weight."),
        ("of all", False, "The norm of q is that of all heads together, and not of each head."),
    ],
)
def test_norms_that_a_module_has(order: str, shared: bool, says: str) -> None:
    def make(head_dim: int) -> OfNorms:
        return OfNorms(head_dim, order, shared)

    report = conformance.check(make, base=100.0)
    assert report.codes == ["wrong-norm"] * bool(says), str(report)
    assert says in str(report)
    assert (report.found["call"], report.found["norm"]) == ("f(q, k, positions)", "of each head, times weight")


@pytest.mark.parametrize(
    ("read", "codes"),
    [
        ("ModelArgs(**{k: v for k, v in params.items() if k in ('dim', 'rope_theta')}).rope_theta", []),
        ("dict(**params)['rope_theta']", []),
        ("params.get('theta', 10_000.0)", ["wrong-base"]),
    ],
)
def test_the_keys_of_a_params_json_and_no_others(tmp_path: Path, read: str, codes: list[str]) -> None:
    keys = {"dim": 256, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5, "vocab_size": 8, "rope_theta": 100.0}
    (path := tmp_path / "params.json").write_text(json.dumps(keys))
    scope = {"ModelArgs": SimpleNamespace, "torch": torch}
    exec(
        "def tables(params, end):\n"
        f"    base = {read}\n"
        "    angles = torch.arange(end)[:, None] * base ** (-torch.arange(0, 64, 2).double() / 64)\n"
        "    return angles.cos(), angles.sin()",
        scope,
    )
    for config in (path, keys):
        report = conformance.check((scope["tables"], functools.partial(turn, interleaved=True)), config=config)
        assert report.codes == codes, str(report)


def test_weights_in_the_order_of_the_other_pairing() -> None:
    """As torchtune converts those of Llama."""
    config = {"model_type": "llama", "head_dim": 64, "hidden_size": 64, "num_attention_heads": 1, "rope_theta": 100.0}
    config |= {"num_hidden_layers": 1}

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        return turn(x, *tables_at(positions), interleaved=True)

    assert conformance.check(rotate, config=config).codes == ["wrong-pairing"]
    report = conformance.check(rotate, config=config, pairing="interleaved")
    assert (report.codes, report.found["pairing"]) == ([], "interleaved")


class OfFlux:
    def __init__(self, axes_dim: tuple[int, ...] = (32, 32, 32, 32)) -> None:
        self.axes_dim = axes_dim

    def __call__(self, ids: Tensor) -> Tensor:
        each = (ids[:, i, None] * 100.0 ** (-torch.arange(0, n, 2).double() / n) for i, n in enumerate(self.axes_dim))
        return torch.cat([*each], dim=-1)


def test_the_widths_of_axes_say_how_many_there_are() -> None:
    report = conformance.check((OfFlux, lambda x, angles: turn(x, angles.cos(), angles.sin())), base=100.0)
    assert report.codes == [], str(report)
    assert report.found["axes"] == "pairs 0 to 7 axis 0, 8 to 15 axis 1, 16 to 23 axis 2, 24 to 31 axis 3"


def test_starts_of_rows_in_whole_tables() -> None:
    """As in Transformer Engine, but all rows get the start of the first."""

    def rotate(t: Tensor, freqs: Tensor, start_positions: Tensor | None = None) -> Tensor:
        start = 0 if start_positions is None else int(start_positions[0])
        angles = freqs[start : start + len(t)]
        a, b = t.double().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(t)

    class Rotary:
        def __call__(self, seq_len: int) -> Tensor:
            return (torch.arange(seq_len)[:, None] * 100.0 ** (-torch.arange(32) / 32).double())[:, None, None]

    report = conformance.check((Rotary, rotate))
    assert (report.codes, report.found["layout"]) == (["first-row-positions"], "sbhd")


@pytest.mark.parametrize(("write", "codes"), [("{}", []), ("{}.neg_()", ["arguments-changed"])])
def test_tables_are_not_written_into(write: str, codes: list[str]) -> None:
    """As for an NPU whose kernel is passed the sign of rotate_half in sin, of which every layer gets the same one."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        signed = torch.cat((-sin, sin), dim=-1).unsqueeze(-2)
        eval(write.format("sin"), {"sin": sin})
        cos = torch.cat((cos, cos), dim=-1).unsqueeze(-2)
        return tuple(x * cos + x.roll(x.shape[-1] // 2, -1) * signed for x in (q, k))  # type: ignore[return-value]

    assert conformance.check(rotate).codes == codes


def test_offsets_of_rows_are_added_to_that_of_all() -> None:
    """As in ExLlama's rope_."""

    def rotate(x: Tensor, past_len: int, offsets: Tensor) -> Tensor:
        return turn(x, *at_positions(cos_sin_cache(64, 600), past_len + offsets[:, None] + torch.arange(x.shape[1])))

    report = conformance.check(rotate, layout="bshd")
    assert (report.verdict, report.found["positions"]) == ("right", "counted from an offset for each row")
    assert all(grade.right is not False for grade in report.grades), str(report)


@pytest.mark.parametrize(("rows", "codes"), [(slice(None), []), (slice(1), ["first-row-positions"])])
def test_positions_that_may_index_tables_of_each_row(rows: slice, codes: list[str]) -> None:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is not None:
            cos, sin = cos[position_ids[rows]], sin[position_ids[rows]]
        return turn(x, cos, sin)

    assert conformance.check(rotate, layout="bshd").codes == codes


def test_a_share_of_the_head_beside_tables() -> None:
    """As in LightLLM, whose tables have half as many columns as channels rotate."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, partial_rotary_factor: float = 1.0) -> None:
        rotated = int(q.shape[-1] * partial_rotary_factor)
        assert (len(cos), cos.shape[1]) == (len(q), rotated // 2)
        for x in (q, k):
            x.copy_(turn(x, cos, sin))

    report = conformance.check(rotate)
    assert (report.verdict, report.found["layout"]) == ("right", "thd")


class OfResidues:
    def __init__(self, dim: int) -> None:
        self.inv_freq = 100.0 ** (-torch.arange(0, dim, 2).double() / dim)

    def angles(self, residx: Tensor) -> Tensor:
        return torch.einsum("bs,f->bsf", residx.double(), self.inv_freq)

    def rotate(self, t: Tensor, residx: Tensor) -> Tensor:
        angles = self.angles(residx)
        return turn(t, angles.cos(), angles.sin())


def of_latent_attention(
    q: Tensor, k_pe: Tensor, cos_sin_cache: Tensor, positions: Tensor, qk_nope_head_dim: int = 128
) -> tuple[Tensor, Tensor]:
    tables = at_positions(cos_sin_cache, positions)
    nope, rope = q[..., :qk_nope_head_dim], q[..., qk_nope_head_dim:]
    return torch.cat((nope, turn(rope, *tables)), dim=-1), turn(k_pe[:, None], *tables)[:, 0]


def angles_of(pos: Tensor) -> Tensor:
    return pos[..., None] * 100.0 ** (-torch.arange(0, 64, 2).double() / 64)


def by_theta(x: Tensor, theta: Tensor) -> Tensor:
    return turn(x, theta.cos(), theta.sin())


def with_heads_first(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    angles = angles_of(positions)
    q, k = (turn(x, angles.cos(), angles.sin()) for x in (q, k))
    slots = slot_mapping[slot_mapping >= 0]
    k_cache[slots // 16, :, slots % 16] = k[slot_mapping >= 0]
    v_cache[slots // 16, :, slots % 16] = v[slot_mapping >= 0]
    return q, k


def mixed_at_the_end(x: Tensor, positions: Tensor) -> Tensor:
    angles = angles_of(positions)
    return turn(x, angles.cos(), angles.sin()).transpose(1, 2).reshape(x.shape)


def mixed_at_the_beginning(x: Tensor, positions: Tensor) -> Tensor:
    angles, (batch, seq, heads, dim) = angles_of(positions), x.shape
    return turn(x.reshape(batch, heads, seq, dim).transpose(1, 2), angles.cos(), angles.sin())


class OfAPrecedence:
    """The exponents are not divided, but what they are exponents of."""

    def __init__(self, dim: int, theta: float = 100.0) -> None:
        self.inv_freq = 1.0 / (theta ** torch.arange(0, dim, 2).double() / dim)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * self.inv_freq
        return turn(x, angles.cos(), angles.sin())


class OfWholeExponents(OfAPrecedence):
    """Of which all pairs but the first are so slow that no base matters."""

    def __init__(self, dim: int, theta: float = 10_000.0) -> None:
        self.inv_freq = theta ** -torch.arange(0, dim, 2).double()


def in_16_bits(x: Tensor, position_ids: Tensor) -> Tensor:
    angles = angles_of(position_ids.to(torch.int16))
    return turn(x, angles.cos(), angles.sin())


def but_the_last(x: Tensor) -> Tensor:
    cos, sin = cos_sin_cache(x.shape[-1], x.shape[1]).chunk(2, dim=-1)
    return torch.cat((turn(x[:, :-1], cos[:-1], sin[:-1]), x[:, -1:]), dim=1)


@pytest.mark.parametrize(
    ("target", "codes"),
    [
        ("OfResidues.rotate", []),
        ("of_latent_attention", []),
        ("angles_of,by_theta", []),
        ("with_heads_first", []),
        ("mixed_at_the_end", ["heads-differ"]),
        ("mixed_at_the_beginning", ["heads-differ"]),
        ("OfAPrecedence", ["wrong-exponent"]),
        ("OfWholeExponents", ["wrong-exponent"]),
        ("in_16_bits", ["positions-overflow"]),
        ("but_the_last", ["last-token-wrong"]),
    ],
)
def test_names_and_bugs_of_several_projects(target: str, codes: list[str]) -> None:
    layout = "bshd" if "mixed" in target else None
    report = conformance.check(f"{__file__}:{target}", pairing="half", layout=layout)
    assert report.codes == codes, str(report)
    assert ("are mixed" in str(report)) == ("mixed" in target)


@pytest.mark.parametrize(("comes_first", "codes"), [(True, []), (False, ["tokens-before-rotated"])])
def test_tokens_of_text_that_do_not_rotate(comes_first: bool, codes: list[str]) -> None:
    """As in CogVideoX, where heads come before tokens, as only the number of those of text shows."""

    def rotate(q: Tensor, k: Tensor, image_rotary_emb: tuple[Tensor, Tensor], text_seq_length: int) -> list[Tensor]:
        cos, sin = image_rotary_emb
        sizes = [text_seq_length, q.shape[2] - text_seq_length]
        out = []
        for x in (q, k):
            parts = [*x.split(sizes if comes_first else sizes[::-1], dim=2)]
            a, b = parts[comes_first].double().chunk(2, dim=-1)
            parts[comes_first] = (parts[comes_first] * cos + torch.cat((-b, a), dim=-1) * sin).type_as(x)
            out.append(torch.cat(parts, dim=2))
        return out

    assert conformance.check(rotate, pairing="half").codes == codes


@pytest.mark.parametrize(("layout", "wrong"), [(None, []), (None, ["unstated-layout"]), ("hd", ["heads-differ"])])
def test_all_heads_of_a_token_in_one_vector(layout: str | None, wrong: list[str]) -> None:
    """As in llama2.c. Code that takes the channels of all heads for those of one is right for one head."""

    def rotate(q: Tensor, k: Tensor, pos: int, head_size: int) -> list[Tensor]:
        out = []
        for x in (q, k):
            (size,) = x.shape
            pair = torch.arange(0, size, 2) if wrong else torch.arange(0, size, 2) % head_size
            angles = pos * 10_000.0 ** (-pair / head_size)
            out.append(turn(x[None, None], angles.cos()[None], angles.sin()[None], interleaved=True).flatten())
        return out

    report = conformance.check(rotate, layout=layout)
    assert report.codes == wrong, str(report)
    assert report.found["layout"] == ("d" if wrong == ["unstated-layout"] else "hd")


class OfClasses(torch.nn.Module):
    def __init__(self, head_dim: int, num_cls_tokens: int = 1) -> None:
        super().__init__()
        self.head_dim, self.first = head_dim, num_cls_tokens

    def forward(self, x: Tensor) -> Tensor:
        tables = cos_sin_cache(self.head_dim, x.shape[1] - self.first).chunk(2, dim=-1)
        return torch.cat((x[:, : self.first], turn(x[:, self.first :], *tables)), dim=1)


class OfTokensOfAnImage(OfClasses):
    def __init__(self, head_dim: int, img_size: int = 224, h: int = 8) -> None:
        super().__init__(head_dim, 0)


@pytest.mark.parametrize("target", [OfClasses, OfTokensOfAnImage])
def test_what_a_constructor_has_by_default(target: Any) -> None:
    """Tokens that do not rotate are none, and the size of an image of which tokens are counted does not matter."""
    assert conformance.check(target, base=100.0).codes == []


class OfPairs:
    """ChatGLM's, whose tables are `[tokens, 1, pairs, 2]`."""

    def __init__(self, dim: int, theta: float = 100.0) -> None:
        self.inv_freq = theta ** (-torch.arange(0, dim, 2).double() / dim)

    def __call__(self, max_seq_len: int) -> Tensor:
        angles = torch.outer(torch.arange(max_seq_len).double(), self.inv_freq)
        return torch.stack((angles.cos(), angles.sin()), dim=-1)[:, None]


@pytest.mark.parametrize(("order", "codes"), [("turned, rest", []), ("rest, turned", ["rest-not-passed"])])
def test_tables_of_pairs_with_an_axis_for_the_batch(order: str, codes: list[str]) -> None:
    """As in ChatGLM. That the rest comes first shows only at a head of which a part rotates."""

    def apply(x: Tensor, rope_cache: Tensor) -> Tensor:
        rotated, (cos, sin) = 2 * rope_cache.shape[-2], rope_cache[: len(x)].unbind(-1)
        turned, rest = turn(x[..., :rotated], cos, sin, interleaved=True), x[..., rotated:]
        return torch.cat(eval(order, {"turned": turned, "rest": rest}), dim=-1)

    report = conformance.check((OfPairs, apply))
    assert (report.codes, report.found["layout"]) == (codes, "sbhd"), str(report)
    assert report.found["frequencies"] == "base 100"


def test_tables_that_grow_beyond_the_length_of_the_constructor() -> None:
    """Dynamic NTK: as many rows as there are tokens are asked for, which changes those before."""

    class Grows:
        def __init__(self, dim: int, max_position_embeddings: int = 2048) -> None:
            self.dim, self.length = dim, max_position_embeddings

        def __call__(self, seq_len: int) -> tuple[Tensor, Tensor]:
            base = 100.0 * max(1.0, seq_len / self.length) ** (self.dim / (self.dim - 2))
            angles = torch.arange(seq_len)[:, None] * base ** (-torch.arange(0, self.dim, 2).double() / self.dim)
            return angles.cos(), angles.sin()

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return turn(q, cos[position_ids], sin[position_ids]), turn(k, cos[position_ids], sin[position_ids])

    assert conformance.check((Grows, apply)).codes == []


@pytest.mark.parametrize(("sign", "codes"), [("1", []), ("(-1) ** torch.arange(32)", ["rotates-backwards"])])
def test_some_pairs_go_backwards(sign: str, codes: list[str]) -> None:
    def rotate(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None] * 100.0 ** (-torch.arange(32) / 32).double() * eval(sign)
        return turn(q, angles.cos(), angles.sin()), turn(k, angles.cos(), angles.sin())

    report = conformance.check(rotate)
    assert report.codes == codes
    assert ("Of the pairs, 1, 3, 5, 7, … rotate" in str(report)) == bool(codes)


@pytest.mark.parametrize(("begin", "code"), [(torch.empty_like, "output-not-written"), (torch.clone, "size-dependent")])
def test_a_block_that_is_left_out_is_no_effect_of_earlier_calls(begin: Any, code: str) -> None:
    """The memory that is never written may hold the results of an earlier call."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        whole = max(8, len(q) // 8 * 8)
        results = begin(q), begin(k)
        for x, out in zip((q, k), results, strict=True):
            out[:whole] = turn(x[:whole], cos[:whole], sin[:whole])
        return results

    assert conformance.check(rotate, layout="thd").codes == [code]


class OfThePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        part = turn(grad[..., : 2 * cos.shape[-1]], cos, -sin)
        return torch.cat((part, torch.zeros_like(grad[..., part.shape[-1] :])), dim=-1), None, None


def test_a_gradient_that_is_wrong_only_where_a_part_rotates() -> None:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        result: Tensor = OfThePart.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return result

    (finding,) = conformance.check(rotate, layout="bshd").findings
    assert (finding.code, finding.case) == ("wrong-gradient", "1 head of 64 channels, 1 token, of which 22 are rotated")


def test_attention_is_no_rotation() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (turn(x, *tables_at(torch.arange(x.shape[1])[None])) for x in (q, k))
        return torch.einsum("bshd,bthd,bthe->bshe", q, k, v), k, v

    with pytest.raises(RopeError, match="must only rotate, got code whose first result depends on v"):
        conformance.check(attend)


def test_a_mask_of_padding_is_of_ones() -> None:
    def from_mask(x: Tensor, attention_mask: Tensor) -> Tensor:
        positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 0)
        angles = positions[..., None].float() * 100.0 ** (-torch.arange(32) / 32)
        return turn(x, angles.cos(), angles.sin())

    report = conformance.check(from_mask)
    assert (report.codes, report.found["padding"]) == ([], "not tried: attention_mask is all ones")


@pytest.mark.parametrize(
    ("axes", "layout", "of_a_length"),
    [((0, 0), "bhsd", False), ((0, 2), "bshd", True), ((1, 1), "sbhd", False)],
)
def test_tables_that_broadcast_state_the_layout(axes: tuple[int, int], layout: str, of_a_length: bool) -> None:
    def whole(dim: int, max_positions: int) -> list[Tensor]:
        return [t.unsqueeze(axes[0]).unsqueeze(axes[1]) for t in cos_sin_cache(dim, max_positions, 100.0).chunk(2, -1)]

    class Rotary:
        def __init__(self, dim: int) -> None:
            self.dim = dim

        def __call__(self, seq_len: int) -> list[Tensor]:
            return whole(self.dim, seq_len)

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.double().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

    tables = Rotary if of_a_length else whole
    report = conformance.check((tables, turn))
    assert (report.codes, report.found["layout"]) == ([], layout)
    with pytest.raises(RopeError, match="must be callable"):
        conformance.check((tables, turn), layout="bshd" if layout != "bshd" else "bhsd")


def test_code_that_applies_tables_that_are_not_judged() -> None:
    report = conformance.check((Relative, turn))
    assert (report.codes, report.found["tables"][:10]) == ([], "not judged")
    assert str(report).startswith("Relative and turn: right, but its tables were not judged\n")
    assert conformance.check((Relative, lambda x, cos, sin: turn(x, cos, -sin))).codes == ["rotates-backwards"]


def test_a_base_beside_a_config_that_states_it() -> None:
    config = {"model_type": "llama", "head_dim": 64, "hidden_size": 64, "num_attention_heads": 1, "rope_theta": 500.0}
    report = conformance.check((OfALength, turn), config=config | {"num_hidden_layers": 1})
    assert report.codes == [], str(report)


def test_one_column_of_a_grid_in_half_pairing() -> None:
    assert conformance.check((a_column, turn), base=100.0).codes == []


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_one_column_of_a_grid_whose_axes_take_turns(pairing: str, first: int) -> None:
    """One progression runs over all pairs, of which every second rests."""

    def rotate(x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * 100.0 ** (-torch.arange(32) / 32).double()
        angles[:, 1 - first :: 2] = 0
        x = x if pairing == "half" else x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # type: ignore[no-untyped-call]
        out = turn(x, angles.cos(), angles.sin())
        return out if pairing == "half" else out.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # type: ignore[no-untyped-call]

    report = conformance.check(rotate, base=100.0)
    assert (report.codes, report.found["pairing"]) == ([], pairing)
    assert first == 0 or report.found["frequencies"] == "base 100"
    assert conformance.check(rotate, base=200.0).verdict == "wrong"


def test_code_for_text_with_a_config_of_several_axes() -> None:
    rope = Rope(64, 100.0, "half", axes=Axes.sections((8, 12, 12)))

    def tables(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of `[batch, seq]`, of which `[axes, seq]` looks like three rows."""
        return at_positions(cos_sin_cache(64, 1 << 13), position_ids)

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (turn(x.transpose(1, 2), cos, sin)[: len(x)].transpose(1, 2) for x in (q, k))
        return q, k

    report = conformance.check((tables, apply), rope=rope)
    assert (report.codes, report.found["axes"][:10]) == ([], "not judged"), str(report)


class OfAHead(torch.nn.Module):
    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        self.inv_freq = base ** (-torch.arange(0, head_dim, 2).double() / head_dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * self.inv_freq
        return turn(x, angles.cos(), angles.sin())


def test_tables_get_the_dtype_of_a_call() -> None:
    def make(seq_len: int, dim: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, dim, 2, device=device, dtype=dtype) / dim
        angles = torch.arange(seq_len, device=device, dtype=dtype)[:, None] * 100.0**-exponents
        return angles.cos(), angles.sin()

    assert conformance.check((make, turn), base=100.0).codes == ["low-precision-angles"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_that_are_rounded_to_16_bits(dtype: torch.dtype) -> None:
    def rounded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turn(x, cos, sin).to(dtype).type_as(x)

    report = conformance.check(rounded)
    name = f"{dtype}".removeprefix("torch.")
    says = f"The input is float32, and all numbers of the output are rounded to {name}. No more was judged."
    assert [(found.code, found.says) for found in report.findings] == [("wrong-output-dtype", says)]


class OfTimes(OfAHead):
    def forward(self, t: Tensor) -> tuple[Tensor, Tensor]:
        angles = t.flatten()[:, None] * self.inv_freq
        return angles.cos()[:, None, None], angles.sin()[:, None, None]


def test_one_time_for_each_row() -> None:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return turn(q, cos[..., 0, :], sin[..., 0, :]), turn(k, cos[..., 0, :], sin[..., 0, :])

    assert conformance.check((OfTimes, apply), base=100.0).codes == []


@dataclass(frozen=True)
class Options:
    rope_theta: float
    num_query_heads: int

    def __post_init__(self) -> None:
        if self.num_query_heads < 1:
            raise ValueError("num_query_heads")


def of_options(x: Tensor, positions: Tensor, options: Options) -> Tensor:
    angles = positions[..., None] * options.rope_theta ** (-torch.arange(32) / 32).double()
    return turn(x, angles.cos(), angles.sin())


def test_a_stated_base_is_passed_also_if_it_is_optional() -> None:
    def rope(x: Tensor, positions: Tensor, rope_theta: float = 10_000.0) -> Tensor:
        angles = positions[..., None] * rope_theta ** (-torch.arange(32) / 32).double()
        return turn(x, angles.cos(), angles.sin())

    assert conformance.check(rope, base=500_000.0).codes == []
    assert (
        conformance.check(
            lambda x, positions, *, base_frequency=1e4: rope(x, positions, base_frequency), base=5e5
        ).codes
        == []
    )
    assert conformance.check(rope, rope=replace(HALF, base=500_000.0)).codes == []
    assert conformance.check(rope).found["frequencies"] == "base 10000"


class OfAPercentage(torch.nn.Module):
    """Transformer Engine's, to which the size of the whole head is passed."""

    def __init__(self, dim: int, rotary_percent: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        dim, self.dtype = int(dim * rotary_percent), dtype
        self.inv_freq = 10_000.0 ** (-torch.arange(0, dim, 2).double() / dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * self.inv_freq
        return turn(x, angles.cos().to(self.dtype), angles.sin().to(self.dtype))


def test_a_percentage_of_the_whole_head() -> None:
    report = conformance.check(OfAPercentage, rope=Rope(64, 10_000.0, "half", rotary_dim=32))
    assert report.verdict == "right", str(report)
    assert report.found["dtype of tables"] == "that of x is passed, and not the default dtype=torch.bfloat16"


def test_a_function_that_takes_a_config() -> None:
    report = conformance.check(of_options, base=100.0)
    assert (report.codes, report.found["frequencies"]) == ([], "base 100"), str(report)


def test_a_share_of_the_pairs_that_turn() -> None:
    class OfAShare(torch.nn.Module):
        def __init__(self, head_dim: int, rope_proportion: float, base: float) -> None:
            super().__init__()
            turns = torch.arange(head_dim // 2) < rope_proportion * head_dim / 2
            self.inv_freq = turns * base ** (-torch.arange(0, head_dim, 2).double() / head_dim)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            angles = positions[..., None] * self.inv_freq
            return turn(x, angles.cos(), angles.sin())

    rope = Rope(64, 100.0, "half", scaling=Proportional(0.25))
    assert conformance.check(OfAShare, rope=rope).codes == []


def test_the_head_of_mla_is_its_slice() -> None:
    report = conformance.check(OfAHead, rope=Rope(192, 100.0, "half", rotary_dim=64, rotary_offset=128))
    assert report.found["head"] == "only the rotated channels, which the caller slices out", str(report)
    report = conformance.check(OfAHead, rope=Rope(192, 100.0, "half", rotary_dim=64))
    assert report.codes == ["wrong-slice"], str(report)


def test_a_slice_comes_before_16_bits() -> None:
    def of_slice(x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[-1] != 64 and x.dtype == torch.float32:
            raise TypeError("a float of another size")
        return OfAHead(x.shape[-1], 100.0)(x, positions)

    report = conformance.check(of_slice, rope=Rope(192, 100.0, "half", rotary_dim=64, rotary_offset=128))
    assert ("dtype" in report.found, report.codes) == (False, []), str(report)


def test_a_length_beside_a_factor_is_the_original_one() -> None:
    scaling = YaRN(4.0, original_max_position_embeddings=1024)

    class Scaled(OfAHead):
        def __init__(self, head_dim: int, base: float, max_position_embeddings: int, scaling_factor: float) -> None:
            assert (max_position_embeddings, scaling_factor) == (1024, 4.0)
            super().__init__(head_dim, base)

    class Stated(Scaled):
        def __init__(self, original_context: int, max_len: int, scale: float, head_dim: int, base: float) -> None:
            assert (original_context, max_len) == (1024, 4096)
            super().__init__(head_dim, base, original_context, scale)

    for target in (Scaled, Stated):
        report = conformance.check(target, rope=Rope(64, 100.0, "half", scaling=scaling))
        assert report.codes == ["attention-factor", "scaling-ignored"], str(report)


def test_a_key_of_a_config_that_says_nothing_is_none() -> None:
    class OfAKind(OfAHead):
        def __init__(self, config: Any) -> None:
            super().__init__(config.hidden_size // config.num_attention_heads, config.rope_theta)
            self.kind, self.other = config.kind, getattr(config, "other", 1)
            assert (self.kind, self.other) == (None, 1)

    report = conformance.check(OfAKind, base=100.0)
    assert (report.codes, report.found["call"]) == ([], "f(x, positions) of an object with kind=None")

    class OfAKindOfLength(OfAKind):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inv_freq /= config.kind

    with pytest.raises(RopeError, match="a name whose meaning is known, got kind"):
        conformance.check(OfAKindOfLength)


def test_a_scaling_is_no_config() -> None:
    class Scaled(OfAHead):
        def __init__(self, head_dim: int, base: float, rope_scaling: Any) -> None:
            super().__init__(head_dim, base)
            self.inv_freq /= rope_scaling["factor"] * rope_scaling.get("unknown", 1.0)

    config = {"model_type": "llama", "head_dim": 64, "hidden_size": 64, "num_attention_heads": 1, "rope_theta": 500.0}
    config |= {"num_hidden_layers": 1, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert conformance.check(Scaled, config=config).codes == []


def test_code_that_does_more_than_to_rotate_is_refused() -> None:
    class Attend(torch.nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(dim, 3 * dim)

        def forward(self, x: Tensor) -> Tensor:
            return turn(self.qkv(x)[..., :64], *at_positions(cos_sin_cache(64, 128), torch.arange(x.shape[1])))

    with pytest.raises(RopeError, match=r"Attend must only rotate, got code with layers qkv"):
        conformance.check(Attend)

    def made(x: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
        return x, functools.partial(turn, x)

    with pytest.raises(RopeError, match="it returns x unchanged, and functools"):
        conformance.check(made)


def test_a_layout_of_another_kind_must_be_stated() -> None:
    def of_rows(x: Tensor, pos: Tensor) -> Tensor:
        """x `[tokens, channels]`, of which axis 1 is split, which is that of the heads in bhsd."""
        angles = pos[..., None] * 100.0 ** (-torch.arange(x.shape[-1] // 2) / (x.shape[-1] // 2)).double()
        a, b = x.chunk(2, dim=1)
        wide = torch.cat((angles, angles), dim=-1)
        return x * wide.cos() + torch.cat((-b, a), dim=1) * wide.sin()

    with pytest.raises(RopeError, match="got code that rotates in td, and mixes heads or tokens in bhsd"):
        conformance.check(of_rows)
    assert conformance.check(of_rows, layout="td").verdict == "right"


def test_a_factory_may_take_pairs_and_return_any_object() -> None:
    report = conformance.check(made_from_pairs, rope=Rope(64, 10_000.0, "half", scaling=Linear(4.0)))
    assert report.verdict == "right", str(report)


def test_a_table_of_one_row_for_each_token_is_not_taken_for_that_of_all_positions() -> None:
    def gathered(x: Tensor, rotary_cos_sin: Tensor, position_ids: Tensor) -> Tensor:
        rows = torch.gather(rotary_cos_sin, 1, position_ids[..., None].expand(*x.shape[:2], x.shape[-1]))
        return turn(x, *rows.chunk(2, dim=-1))

    with pytest.raises(RopeError, match=r"gathered must be callable"):
        conformance.check(gathered)


def test_the_rotated_channels_are_tried_before_several_axes() -> None:
    """Of 3 axes, tables of 64 channels have as many elements as those of 192 channels of one."""

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        tables = at_positions(cos_sin_cache(64, 1 << 13), positions)
        return turn(x, *(t.reshape(-1, x.shape[1], x.shape[-1] // 2) for t in tables))

    rope = Rope(192, 100.0, "half", rotary_dim=64, rotary_offset=128)
    report = conformance.check(rotate, rope=rope, layout="bshd")
    assert report.found["head"] == "only the rotated channels, which the caller slices out", str(report)


@pytest.mark.parametrize("name", RIGHT)
def test_the_adapter_of_a_common_signature_runs_unedited(name: str) -> None:
    function, given = RIGHT[name]
    expected = Expected(**{**given, **({"head_dim": 64} if "rope" in given else {})})
    report = conformance.check(pasted(function, expected)["rotate"], **given)
    assert report.verdict == "right", str(report)
    assert {*report.codes} <= NO_GRADIENT, str(report)


class TestAdapter:
    """The adapter that is shown if a target cannot be called."""

    def test_has_dots_for_what_is_unknown(self) -> None:
        def f(query: Tensor, key: Tensor, spin: Tensor, position_ids: Tensor) -> None: ...

        with pytest.raises(RopeError) as e:
            conformance.check(f)
        assert "Replace each `...`." in str(e.value)
        assert str(e.value).endswith("query=q, key=k, spin=..., position_ids=positions)\n")
        assert "def rotate(q, k, positions):\n" in str(e.value)

    @pytest.mark.parametrize("name", ["Listed.forward", "Fixed,apply_tables"])
    def test_runs_with_only_the_dots_replaced(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "theirs.py").write_text(UNKNOWN)
        with pytest.raises(RopeError) as e:
            conformance.check(f"{tmp_path / 'theirs.py'}:{name}")
        code = str(e.value).partition("\n\n")[2]
        for argument, text in (("spin", "1.0"), ("both", "[q, k]"), ("setup", "64")):
            code = code.replace(f"{argument}=...", f"{argument}={text}")
        (tmp_path / "mine.py").write_text(code)
        names = "tables,apply_tables" if "def tables(" in code else "rotate"
        report = conformance.check(f"{tmp_path / 'mine.py'}:{names}")
        assert (report.codes, report.found["pairing"]) == ([], "half")

    def test_of_a_constructor_with_unknown_options(self) -> None:
        theirs: dict[str, Any] = {}
        exec(UNKNOWN, theirs)
        rope = Rope(64, 10_000.0, "half", scaling=Linear(4.0))
        with pytest.raises(RopeError, match=r"states ramp: def make\(head_dim, base, is_neox\)"):
            conformance.check(theirs["Optional"], rope=rope)

        def make(head_dim: int, base: float, is_neox: bool) -> Any:
            return theirs["Optional"](head_dim, base, is_neox, ramp=4.0)

        assert conformance.check(make, rope=rope).codes == []

    def test_of_mla_splits_the_rest_off(self) -> None:
        class Rotary:
            def __init__(self, qk_nope_head_dim: int, qk_rope_head_dim: int) -> None:
                self.sizes = qk_nope_head_dim, qk_rope_head_dim

            def __call__(self, positions: Tensor, q: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
                tables = at_positions(cos_sin_cache(self.sizes[1], 128), positions)
                rest, rotated = q.split(self.sizes, dim=-1)
                return torch.cat((rest, turn(rotated, *tables)), dim=-1), turn(k_pe, *tables)

        rope = Rope(96, 100.0, "half", rotary_dim=32, rotary_offset=64)
        assert conformance.check(Rotary, rope=rope).codes == []

    def test_of_meta_has_a_switch_for_the_scaling(self) -> None:
        def tables(dim: int, end: int, theta: float = 10_000.0, use_scaled: bool = False) -> tuple[Tensor, Tensor]:
            positions = torch.arange(end) / (4 if use_scaled else 1)
            angles = positions[:, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)
            return angles.cos(), angles.sin()

        scaled = Rope(64, 10_000.0, "half", scaling=Linear(4.0))
        assert conformance.check((tables, turn), rope=scaled).codes == []
        assert conformance.check((tables, turn), rope=replace(scaled, scaling=None)).codes == []

    def test_makes_an_object_once(self) -> None:
        class OfTokens:
            def __init__(self, max_tokens: int) -> None: ...
            def __call__(self, x: Tensor) -> Tensor: ...

        code = adapter.write(targets.load(OfTokens), Expected())
        assert "OfTokens(max_tokens=4096)\n\ndef rotate(x):" in code, code

    def test_passes_a_part_that_the_config_states(self) -> None:
        def rotate(x: Tensor, positions: Tensor, rotary_pct: float = 1.0) -> Tensor:
            return x * positions * rotary_pct

        code = adapter.write(
            targets.load(rotate), Expected(rope=Rope(64, 10_000.0, "half", rotary_dim=16), head_dim=64)
        )
        assert "rotary_pct=0.25)" in code, code

    def test_of_a_class_and_a_function(self) -> None:
        names = pasted((Rotary, apply_tables))
        assert conformance.check(names["rotate"]).codes == []

    def test_indexes_tables_with_the_positions_that_it_takes(self) -> None:
        class OfALength(OneHeadTables):
            def __call__(self, x: Tensor, seq_len: int = 0) -> tuple[Tensor, Tensor]:
                return super().__call__(x)

        def shifted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, offset: int = 0) -> None: ...

        code = adapter.write(targets.load((OfALength, shifted)), Expected())
        assert "def rotate(q, k, positions: 's'):\n    cos, sin = (table[positions] for table in " in code, code

    def test_passes_no_tables_that_the_target_computes(self) -> None:
        def fails(q: Tensor, freqs_cis: Tensor) -> Tensor:
            raise RuntimeError("never")

        with pytest.raises(RopeError, match=r"def rotate\(x, positions\):"):
            conformance.check((Rotary, fails))

    @pytest.mark.parametrize(
        ("function", "positions"),
        [
            ("of_numpy", "separate for each row of the batch"),
            ("from_an_offset", "counted from an offset"),
            ("of_numpy_for_q_and_k", "separate for each row of the batch"),
            ("numpy_tables,numpy_apply", "one row for the whole batch"),
            ("in_place", "counted from an offset"),
        ],
    )
    def test_converts_arrays(self, tmp_path: Path, function: str, positions: str) -> None:
        (tmp_path / "arrays.py").write_text(NUMPY)
        report = conformance.check(f"{tmp_path / 'arrays.py'}:{function}", layout="bshd", base=10_000.0)
        assert (report.codes, report.found["pairing"], report.found["positions"]) == ([], "half", positions)
        assert report.found["call"].endswith("), arrays of numpy")
        assert "gradients            -      not judged: arrays of numpy have no gradient of torch" in str(report)

    def test_converts_arrays_for_code_that_imports_inside(self, tmp_path: Path) -> None:
        imports, code = "import numpy as np", NUMPY.replace("import numpy as np", "")
        (tmp_path / "inside.py").write_text(code.replace("positions):", f"positions):\n    {imports}", 1))
        assert conformance.check(f"{tmp_path / 'inside.py'}:of_numpy").codes == []

    def test_passes_tensors_to_code_that_takes_no_arrays(self) -> None:
        scope: dict[str, Any] = {"np": np}
        exec("def f(x, positions):\n    return x if x.is_cuda else apply(x, positions)", scope)
        tables = cos_sin_cache(64, 8192)
        scope["apply"] = lambda x, positions: turn(x, *at_positions(tables, positions))
        report = conformance.check(scope["f"], layout="bshd")
        assert (report.codes, report.found["call"]) == ([], "f(x, positions)")

    @pytest.mark.parametrize(("annotation", "shape"), [("s", "shared"), ("bs", "rows")])
    def test_an_annotation_states_the_axes_of_positions(self, annotation: str, shape: str) -> None:
        def rotate(x: Tensor, positions: Tensor) -> Tensor:
            return turn(x, *at_positions(cos_sin_cache(64, 128), positions.reshape(-1, x.shape[1])))

        rotate.__annotations__["positions"] = annotation
        assert found(rotate).way.positions == shape
        rotate.__annotations__["positions"] = Annotated[Tensor, annotation]
        assert found(rotate).way.positions == shape

    def test_other_results_than_described(self) -> None:
        with pytest.raises(RopeError, match="got it returns True"):
            conformance.check(lambda x, positions: True)


def apply_tables(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    return turn(query, cosines, sines), turn(key, cosines, sines)


UNKNOWN = """
import torch

def turn(x, positions, scale=1.0, head_dim=64, base=10_000.0):
    inv_freq = base ** (-torch.arange(0, head_dim, 2).double() / head_dim) / scale
    angles = (positions[..., None] * inv_freq)[..., None, :]
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).type_as(x)

class Scaled:
    def __init__(self, head_dim, base, is_neox, spin):
        self.given = spin, head_dim, base

    def __call__(self, q, k, positions):
        return turn(q, positions, *self.given), turn(k, positions, *self.given)

class Optional(Scaled):
    def __init__(self, head_dim, base, is_neox, ramp=None):
        self.given = ramp or 1.0, head_dim, base

class Listed(Scaled):
    def forward(self, positions, both):
        return [turn(x, positions, *self.given) for x in both]

def fixed_tables(dim):
    angles = torch.arange(512)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    return angles.cos(), angles.sin()

class Fixed:
    def __init__(self, head_dim):
        self.head_dim = head_dim

    def __call__(self, setup):
        return fixed_tables(self.head_dim)

def apply_tables(x, cos, sin):
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)
"""


NUMPY = """
import numpy as np

def of_numpy(x, positions):
    angles = positions[..., None, None] * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    (a, b), cos, sin = np.split(x, 2, axis=-1), np.cos(angles), np.sin(angles)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

def from_an_offset(x, offset=0):
    return of_numpy(x, np.arange(offset, offset + x.shape[1])[None])

def of_numpy_for_q_and_k(q, k, position_ids):
    return of_numpy(q, position_ids), of_numpy(k, position_ids)

def in_place(q, offset):
    q[:] = from_an_offset(q, offset)

def numpy_tables(head_dim, max_seq_len):
    angles = np.arange(max_seq_len)[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.cos(angles), np.sin(angles)

def numpy_apply(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    halves = [np.split(x, 2, axis=-1) for x in (q, k)]
    return [np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1) for a, b in halves]
"""


def test_a_length_of_past_keys_is_enough() -> None:
    def rotate(q: Tensor, k: Tensor, past_k: Tensor | None = None) -> tuple[Tensor, Tensor]:
        first = 0 if past_k is None else past_k.shape[1]
        tables = at_positions(cos_sin_cache(64, 128), first + torch.arange(q.shape[1]))
        return turn(q, *tables), turn(k, *tables)

    report = conformance.check(rotate, layout="bshd")
    assert report.verdict == "right", str(report)
    assert {grade.name: grade.right for grade in report.grades}["decoding"] is True


def found(target: Any, expected: Expected | None = None) -> Subject:
    loaded = targets.load(target)
    return calls.find(loaded, expected or Expected(), None)


class TestSubject:
    """What is known of a fused call beyond q and k."""

    @torch.no_grad()
    def test_caches(self) -> None:
        subject = found(SGLang.apply_rope_inplace_with_kvcache)
        assert subject.form.takes == frozenset({"v", "slots"})
        assert subject.form.in_place
        q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 2, 16)
        slots, positions = torch.tensor([[7, -1, 0, 40]]), torch.arange(4)[None]
        stored = subject.fused(q, k, positions, v=2 * k, slots=slots).stored
        assert stored is not None
        assert stored.values is not None
        right = turn(k, *at_positions(cos_sin_cache(16, 4), positions))
        kept = slots[0] >= 0
        torch.testing.assert_close(stored.keys[slots[0, kept]], right[0, kept])
        assert torch.equal(stored.values[slots[0, kept]], 2 * k[0, kept])
        assert int((stored.keys != stored.keys_before).any(-1).any(-1).sum()) == 3

    @torch.no_grad()
    def test_norms(self) -> None:
        subject = found(VLLM.fused_qk_norm_rope)
        assert subject.form.takes == {"v", "weights"}
        q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 2, 16), torch.randn(1, 4, 2, 16)
        weights, positions = (torch.randn(16), torch.randn(16)), torch.arange(4)[None]
        tables = at_positions(cos_sin_cache(16, 4), positions)
        results = subject.fused(q, k, positions, v=v, weights=weights)
        torch.testing.assert_close(results.q, turn(normed(q, weights[0], EPS), *tables))
        torch.testing.assert_close(results.k, turn(normed(k, weights[1], EPS), *tables))
        assert results.v is not None
        assert torch.equal(results.v, v)
        plain, _ = subject(q, k, positions)
        torch.testing.assert_close(plain, turn(q, *tables), rtol=1e-5, atol=1e-5)

    @torch.no_grad()
    def test_other_sizes(self) -> None:
        for subject in (found(VLLM.rotary_embedding), found(FlashInfer.apply_rope_pos_ids)):
            assert subject.resize is not None
            other = subject.resize(48, 20)
            assert other is not None
            x, positions = torch.randn(1, 4, 3, 48), torch.arange(4)[None]
            out, _ = other(x, x, positions)
            base = 100.0 if other.way.given else 10_000.0
            torch.testing.assert_close(out, turn(x, *at_positions(cos_sin_cache(20, 4, base), positions)))

    def test_fixed_sizes(self) -> None:
        class Rotary:
            def __init__(self, base: float = 10_000.0) -> None:
                self.base = base

            def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
                return turn(x, *at_positions(cos_sin_cache(64, 128), positions))

        subject = found(Rotary)
        assert subject.resize is not None
        assert subject.resize(48, 48) is None


def test_a_single_token_keeps_its_channels() -> None:
    """Of one head of one token, a result with half the channels and twice the heads has as many numbers."""

    def joined_as_heads(x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None, None] * 100.0 ** (-torch.arange(32) / 32)
        a, b = x.chunk(2, dim=-1)
        pair = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        return torch.cat(pair, dim=-2).type_as(x)

    with pytest.raises(RopeError, match=r"returned with shape \(1, 5, 8, 32\)"):
        conformance.check(joined_as_heads, rope=Rope(64, 100.0, "half"))
