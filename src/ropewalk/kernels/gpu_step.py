"""Launch the fused step of `_gpu_step.py`: choose tiles, strides and arguments."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from ropewalk._layout import AXES, Layout
from ropewalk.kernels import gpu

# Half of the bytes that a rotation alone uses, because the squares are float64.
_BYTES_PER_THREAD = 32


def step(
    tensors: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    interleaved: bool,
    rotary_offset: int,
    norm: tuple[Tensor, Tensor, float, bool] | None,
    store: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """Normalize and rotate q and k, and write k and v to a cache. The caller must have checked all arguments.

    Args:
        tensors: q and k, in `layout`.
        outputs: the output for q and the output for k. With `store`, the latter is the cache of keys,
            `[blocks, block_size, kv_heads, head_dim]`.
        cos, sin: `[pairs]`, `[seq, pairs]` or `[batch, seq, pairs]`.
        norm: the contiguous weights of q and k, ε, and whether 1 is added to the weights. None skips the norm.
        store: v, the cache of values, and one int64 slot for each token. None writes to no cache.
    """
    launch = step_launch(tensors, outputs, cos, sin, layout, interleaved, rotary_offset, norm, store)
    gpu._launch("step", *launch, module=kernels())


def kernels() -> ModuleType:
    """Import the module of the kernel, and with it Triton. Return the module."""
    from ropewalk.kernels import _gpu_step

    return _gpu_step


def step_launch(
    tensors: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    interleaved: bool,
    rotary_offset: int,
    norm: tuple[Tensor, Tensor, float, bool] | None,
    store: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[int, dict[str, Any], int]:
    """Return the number of programs, the arguments and the warps for a launch of `step`."""
    (q, k), (p, r), (at_batch, at_tokens, at_heads, _) = tensors, outputs, AXES[layout]
    q_weight, k_weight, eps, add_one = (q, k, 0.0, False) if norm is None else norm
    v, w, slots = (k, r, k) if store is None else store
    batch, tokens, q_heads = 1 if at_batch is None else q.shape[at_batch], q.shape[at_tokens], q.shape[at_heads]
    k_heads, pairs, size = k.shape[at_heads], cos.shape[-1], q.element_size()
    block_p, block_d = gpu._power_of_two(pairs), gpu._power_of_two(q.shape[-1])
    per_thread = _BYTES_PER_THREAD // 2 // size
    warps = min(32, max(4, block_p // per_thread // 32))
    (q_t, q_h), (k_t, k_h) = (gpu._tile(heads, block_p, warps, per_thread) for heads in (q_heads, k_heads))
    q_programs, k_programs = (
        batch * gpu._blocks(tokens, t) * gpu._blocks(heads, h)
        for heads, t, h in ((q_heads, q_t, q_h), (k_heads, k_t, k_h))
    )
    in_layout: dict[str, int | None] = dict(zip("bth", (at_batch, at_tokens, at_heads), strict=True))
    in_cache: dict[str, int | None] = {"b": 0, "t": 1, "h": 2}
    axes = {"q": (q, in_layout), "p": (p, in_layout), "k": (k, in_layout), "v": (v, in_layout)}
    axes |= {name: (x, in_layout if store is None else in_cache) for name, x in (("r", r), ("w", w))}
    dense = all(x.stride(-1) == 1 for x, _ in axes.values())
    strides = {
        f"{name}_{axis}": 0 if at is None else x.stride(at)
        for name, (x, where) in axes.items()
        for axis, at in where.items()
    }
    unit = gpu._unit(list(strides.values()), 16 // size) if dense else 1
    widest = 16 // size // (2 if interleaved else 1)
    of_tables, table_dense, table_unit = gpu._table_strides(
        cos.shape, cos.stride(), sin.stride(), cos.element_size(), widest
    )
    named = {"q": q, "p": p, "k": k, "r": r, "v": v, "w": w, "cos": cos, "sin": sin}
    named |= {"q_weight": q_weight, "k_weight": k_weight, "slots": slots}
    arguments = {
        **named,
        "tokens": tokens,
        "q_heads": q_heads,
        "k_heads": k_heads,
        "q_programs": q_programs,
        "k_programs": k_programs,
        "block_size": r.shape[1] if store else 1,
        "slot_count": r.shape[0] * r.shape[1] if store else 0,
        "slots_b": slots.stride(0) if store and slots.ndim == 2 else 0,
        "slots_t": slots.stride(-1) if store else 0,
        **{name: stride // unit for name, stride in strides.items()},
        **{f"{name}_d": x.stride(-1) for name, (x, _) in axes.items()},
        **{name: stride for name, stride in of_tables.items() if not name.endswith("_h")},
        "Q_BLOCK_T": q_t,
        "Q_BLOCK_H": q_h,
        "K_BLOCK_T": k_t,
        "K_BLOCK_H": k_h,
        "BLOCK_P": block_p,
        "BLOCK_D": block_d,
        "HALVINGS": block_d.bit_length() - 1,
        "HEAD_DIM": q.shape[-1],
        "V_DIM": v.shape[-1],
        "PAIRS": pairs,
        "OFFSET": rotary_offset,
        "INTERLEAVED": interleaved,
        "DENSE": dense,
        "ALIGN": unit,
        "TABLE_DENSE": table_dense,
        "TABLE_ALIGN": table_unit,
        "NORM": norm is not None,
        "ADD_ONE": add_one,
        "EPS": eps,
        "STORES": store is not None,
    }
    return q_programs + k_programs * (1 if store is None else 2), arguments, warps
