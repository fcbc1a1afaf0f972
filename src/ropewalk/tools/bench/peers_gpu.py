"""The rotations of other libraries with which the benchmark on a GPU compares ropewalk.

A library is imported only when its rotation is prepared. No extra of ropewalk installs these libraries. For Liger, the
wheel `liger-kernel` is enough, without its requirements. The Triton rotary of flash-attention needs `flash_attn` and
einops, and FlashInfer needs `flashinfer-python` with its requirements.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from ropewalk.tools.bench.baselines import Rotate
from ropewalk.tools.bench.case import HEAD_DIM, KV_HEADS, LONGEST, Q_HEADS, Case, tables
from ropewalk.tools.bench.contenders import Contender, Pairing, eager, full_width


def _liger(case: Case) -> Rotate:
    """Prepare Liger, which needs heads before tokens and rotates in place."""
    function = import_module("liger_kernel.ops.rope").LigerRopeFunction
    cos, sin = full_width(case)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rotated_q, rotated_k = function.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)[:2]
        return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)

    return rotate


def _flash_attention(pairing: Pairing, in_place: bool, case: Case) -> Rotate:
    """Prepare the Triton rotary of flash-attention.

    It rotates the first token by the first row of the tables, so the tables begin at the first position. For decoding,
    the tables have all positions, and each sequence of the batch has an offset in them.
    """
    function = import_module("flash_attn.layers.rotary").apply_rotary_emb
    cos, sin = _all_tables(case) if case.decode else case.tables
    options = (cos.to(case.dtype), sin.to(case.dtype), pairing == "interleaved", in_place)
    first = case.positions[:, 0].to(torch.int32) if case.decode else 0
    return lambda q, k: (function(q, *options, seqlen_offsets=first), function(k, *options, seqlen_offsets=first))


def _flashinfer(pairing: Pairing, case: Case) -> Rotate:
    function = import_module("flashinfer").apply_rope_with_cos_sin_cache_inplace
    if case.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError("it supports only float16 and bfloat16")
    cache = torch.cat(_all_tables(case), dim=-1)
    positions = case.positions.expand(case.batch, case.tokens).reshape(-1).contiguous()

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        flat_q, flat_k = q.view(-1, Q_HEADS * HEAD_DIM), k.view(-1, KV_HEADS * HEAD_DIM)
        function(positions, flat_q, flat_k, HEAD_DIM, cache, pairing == "half")
        return q, k

    return rotate


def _all_tables(case: Case) -> tuple[Tensor, Tensor]:
    """Compute cos and sin for every position below LONGEST."""
    return tables(torch.arange(LONGEST, device=case.device))


def _both(pairing: Pairing, suffix: str) -> tuple[Contender, ...]:
    """Return the contenders of the libraries that support both pairings, set up for this pairing."""
    out_of_place, in_place = (eager(partial(_flash_attention, pairing, x), in_place=x) for x in (False, True))
    flashinfer = eager(partial(_flashinfer, pairing), in_place=True)
    return (
        Contender(f"flash-attention{suffix}", pairing, out_of_place),
        Contender(f"flash-attention, in place{suffix}", pairing, in_place, in_place=True),
        Contender(f"FlashInfer{suffix}", pairing, flashinfer, backward=False, in_place=True),
    )


PEERS_ON_GPU = (
    Contender("Liger", "half", eager(_liger, in_place=True), in_place=True),
    *_both("half", ""),
    *_both("interleaved", ", interleaved"),
)
