"""Who is measured on a GPU, of other libraries, each imported when its turn comes; none of them comes with ropewalk.

Liger needs its wheel `liger-kernel` and nothing more for the one file that is used; flash-attention's Triton rotary
`flash_attn` with einops; FlashInfer `flashinfer-python` and its own requirements.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from ropewalk.programs.bench.case import HEAD_DIM, KV_HEADS, LONGEST, Q_HEADS, Case, tables
from ropewalk.programs.bench.contenders import Contender, Pairing, eager, full_width
from ropewalk.programs.bench.usual import Turn


def _liger(case: Case) -> Turn:
    """It wants heads before tokens and gives back what it was given, turned."""
    function = import_module("liger_kernel.ops.rope").LigerRopeFunction
    cos, sin = full_width(case)

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned_q, turned_k = function.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)[:2]
        return turned_q.transpose(1, 2), turned_k.transpose(1, 2)

    return turn


def _flash_attention(pairing: Pairing, in_place: bool, case: Case) -> Turn:
    """Its tables begin at the first token; decoding, each row says where in them it stands."""
    function = import_module("flash_attn.layers.rotary").apply_rotary_emb
    cos, sin = _all_tables(case) if case.decode else case.tables
    how = (cos.to(case.dtype), sin.to(case.dtype), pairing == "interleaved", in_place)
    first = case.positions[:, 0].to(torch.int32) if case.decode else 0
    return lambda q, k: (function(q, *how, seqlen_offsets=first), function(k, *how, seqlen_offsets=first))


def _flashinfer(pairing: Pairing, case: Case) -> Turn:
    function = import_module("flashinfer").apply_rope_with_cos_sin_cache_inplace
    if case.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError("it has 16 bits only")
    cache = torch.cat(_all_tables(case), dim=-1)
    positions = case.positions.expand(case.batch, case.tokens).reshape(-1).contiguous()

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        flat_q, flat_k = q.view(-1, Q_HEADS * HEAD_DIM), k.view(-1, KV_HEADS * HEAD_DIM)
        function(positions, flat_q, flat_k, HEAD_DIM, cache, pairing == "half")
        return q, k

    return turn


def _all_tables(case: Case) -> tuple[Tensor, Tensor]:
    """A row for every position."""
    return tables(torch.arange(LONGEST, device=case.device))


def _both(pairing: Pairing, suffix: str) -> tuple[Contender, ...]:
    """Those who know both pairings."""
    new, over = (eager(partial(_flash_attention, pairing, x), in_place=x) for x in (False, True))
    flashinfer = eager(partial(_flashinfer, pairing), in_place=True)
    return (
        Contender(f"flash-attention{suffix}", pairing, new),
        Contender(f"flash-attention, in place{suffix}", pairing, over, in_place=True),
        Contender(f"FlashInfer{suffix}", pairing, flashinfer, backward=False, in_place=True),
    )


PEERS_ON_GPU = (
    Contender("Liger", "half", eager(_liger, in_place=True), in_place=True),
    *_both("half", ""),
    *_both("interleaved", ", interleaved"),
)
