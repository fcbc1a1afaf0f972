"""Rotate q and k inside the GEMM that computes them: prefill on a GPU with quack.

    ropewalk convert Llama-3.1-8B Llama-3.1-8B-interleaved --to interleaved --verify

    rope = ropewalk.from_config("Llama-3.1-8B-interleaved").rope
    weight, freq = fuse(rope, q_proj.weight, k_proj.weight, v_proj.weight)  # once for each layer
    qkv = project(x, weight, freq, positions)  # q and k are rotated, v is not

The epilogue `rope_posfreq_epi` of quack (https://github.com/Dao-AILab/quack) rotates neighbouring
columns of the product before they are written. So the rotation is no kernel of its own, and reads
and writes no memory. It needs weights in the interleaved pairing, which `ropewalk convert` writes,
and frequencies in float64, which `rope.inv_freq` has and the buffers of transformers have not.

This example was not run on a GPU. The tests run it on a CPU, with a stand-in for quack that
computes what quack documents (quack/epilogue/rotary.py, August 2026).
"""

from __future__ import annotations

import torch
from quack.epilogue.rotary import make_interleaved_inv_freq, rope_posfreq_epi
from torch import Tensor

import ropewalk


def fuse(rope: ropewalk.Rope, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Join the weights [out, hidden] of q, k and v. The second result has a number per column."""
    if rope.pairing != "interleaved" or rope.rotary_offset or rope.axes is not None:
        raise ValueError(f"neighbouring channels must rotate, from 0 on, by one axis: {rope}")
    if rope.attention_factor != 1.0:
        raise ValueError("YaRN needs a GEMM for q and k alone, with rope_posfreq_scaled_epi")
    inv_freq = torch.from_numpy(rope.inv_freq)  # float64
    freq = make_interleaved_inv_freq(inv_freq, len(q) + len(k), len(v), head_dim=rope.head_dim)
    return torch.cat((q, k, v)), freq.to(q.device)


def project(x: Tensor, weight: Tensor, freq: Tensor, positions: Tensor) -> Tensor:
    """Return q, k and v of x [batch, seq, hidden] in one tensor, [batch, seq, out].

    The positions are [batch, seq], integers of at most 2²⁴.
    """
    rows = x.flatten(0, 1)[None]
    qkv = rows.new_empty(1, rows.shape[1], len(weight))
    angles = {"pos": positions.flatten()[None].float(), "freq": freq[None]}
    rope_posfreq_epi.gemm(rows, weight[None], qkv, epi_args=angles)
    return qkv.unflatten(1, x.shape[:2])[0]
