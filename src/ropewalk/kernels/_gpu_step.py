"""The fused step in Triton: normalize and rotate q and k, and store k and v in a cache. `gpu_step.py` launches it.

Programs, tiles, strides and units are those of `_gpu.py`. The squares are summed in float64 by repeatedly adding the
second half to the first, which is the order of the plain PyTorch code. A single `tl.sum` would add them in another
order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.kernels._gpu import _channels, _copy, _load_pairs, _rows, _store_pairs, _tile

_NOT_SPECIALIZED = [
    *("tokens", "q_heads", "k_heads", "q_programs", "k_programs", "block_size", "slot_count", "slots_b", "slots_t"),
    *(f"{table}_{axis}" for table in ("cos", "sin") for axis in "btp"),
    *(f"{x}_{axis}" for x in ("q", "k", "p", "r", "v", "w") for axis in "bthd"),
]


@triton.jit
def _scale(
    x_rows, x_stride, here, EPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HALVINGS: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """Return 1/√(mean of x² + ε) of each head, in float64."""
    inside = here & (tl.arange(0, BLOCK_D)[None, None, :] < HEAD_DIM)
    x = tl.load(x_rows + _channels(0, BLOCK_D, x_stride, DENSE), mask=inside, other=0.0).to(tl.float64)
    x = x * x
    for i in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], 2, BLOCK_D >> (i + 1))), axis=2)  # two terms: any order
    return 1.0 / tl.sqrt(x * (1.0 / HEAD_DIM) + EPS)


@triton.jit
def _gain(weight, ADD_ONE: tl.constexpr, compute: tl.constexpr):
    gain = weight.to(compute)
    return gain + 1.0 if ADD_ONE else gain


@triton.jit
def _to_rows(
    y, batch, token, head, tokens, here, y_b, y_t, y_h, slots, slots_b, slots_t, block_size, slot_count,
    ALIGN: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """Return the address to which each token and head is written, in y or in a slot of a cache, and a mask.

    The mask is False for tokens that are not written.
    """
    if STORES:
        slot = tl.load(slots + batch * slots_b + token.to(tl.int64) * slots_t, mask=token < tokens, other=-1)
        rows = y + (slot // block_size * y_b + slot % block_size * y_t + head.to(tl.int64) * y_h) * ALIGN
        here = here & (slot >= 0) & (slot < slot_count)
    else:  # Triton also compiles what follows a return
        rows = _rows(y, batch, token, head, y_b, y_t, y_h, ALIGN)
    return rows, here


@triton.jit
def _step(
    program, x, y, weight, cos, sin, slots, tokens, heads, block_size, slot_count, slots_b, slots_t,
    x_b, x_t, x_h, x_d, y_b, y_t, y_h, y_d, cos_b, cos_t, cos_p, sin_b, sin_t, sin_p,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, HALVINGS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    DENSE: tl.constexpr, ALIGN: tl.constexpr, TABLE_DENSE: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    NORM: tl.constexpr, ADD_ONE: tl.constexpr, EPS: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    compute: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    batch, token, head = _tile(program, heads, tokens, BLOCK_T, BLOCK_H)
    here = (token < tokens) & (head < heads)
    x_rows = _rows(x, batch, token, head, x_b, x_t, x_h, ALIGN)
    y_rows, there = _to_rows(
        y, batch, token, head, tokens, here, y_b, y_t, y_h, slots, slots_b, slots_t, block_size, slot_count,
        ALIGN, STORES,
    )  # fmt: skip
    a, b = _load_pairs(x_rows, x_d, here, OFFSET, PAIRS, BLOCK_P, INTERLEAVED, DENSE)
    a, b = a.to(compute), b.to(compute)
    if NORM:
        scale = _scale(x_rows, x_d, here, EPS, HEAD_DIM, BLOCK_D, HALVINGS, DENSE).to(compute)
        weights = weight + (token + head) * 0
        first, second = _load_pairs(weights, 1, here, OFFSET, PAIRS, BLOCK_P, INTERLEAVED, True)
        a = (a * scale * _gain(first, ADD_ONE, compute)).to(y.dtype.element_ty).to(compute)
        b = (b * scale * _gain(second, ADD_ONE, compute)).to(y.dtype.element_ty).to(compute)

    known = here & (tl.arange(0, BLOCK_P)[None, None, :] < PAIRS)
    cos_rows = _rows(cos, batch, token, head, cos_b, cos_t, 0, TABLE_ALIGN)
    sin_rows = _rows(sin, batch, token, head, sin_b, sin_t, 0, TABLE_ALIGN)
    c = tl.load(cos_rows + _channels(0, BLOCK_P, cos_p, TABLE_DENSE), mask=known).to(compute)
    s = tl.load(sin_rows + _channels(0, BLOCK_P, sin_p, TABLE_DENSE), mask=known).to(compute)
    rotated_a = (a * c - b * s).to(y.dtype.element_ty)
    rotated_b = (a * s + b * c).to(y.dtype.element_ty)
    _store_pairs(y_rows, y_d, there, rotated_a, rotated_b, OFFSET, PAIRS, BLOCK_P, INTERLEAVED, DENSE)

    if not NORM:
        _copy(x_rows, y_rows, x_d, y_d, there, 0, OFFSET, BLOCK_P, DENSE)
        _copy(x_rows, y_rows, x_d, y_d, there, OFFSET + 2 * PAIRS, HEAD_DIM, BLOCK_P, DENSE)
    else:
        for start in tl.static_range(0, HEAD_DIM, BLOCK_P):
            if start < OFFSET or start + BLOCK_P > OFFSET + 2 * PAIRS:
                channel = start + tl.arange(0, BLOCK_P)[None, None, :]
                rest = (channel < OFFSET) | ((channel >= OFFSET + 2 * PAIRS) & (channel < HEAD_DIM))  # not rotated
                z = tl.load(x_rows + _channels(start, BLOCK_P, x_d, DENSE), mask=here & rest, other=0.0).to(compute)
                g = tl.load(weights + _channels(start, BLOCK_P, 1, True), mask=here & rest, other=0.0)
                z = (z * scale * _gain(g, ADD_ONE, compute)).to(y.dtype.element_ty)
                tl.store(y_rows + _channels(start, BLOCK_P, y_d, DENSE), z, mask=there & rest)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def step(
    q, p, k, r, v, w, cos, sin, q_weight, k_weight, slots,  # p, r and w are the outputs of q, k and v
    tokens, q_heads, k_heads, q_programs, k_programs, block_size, slot_count, slots_b, slots_t,
    q_b, q_t, q_h, q_d, p_b, p_t, p_h, p_d, k_b, k_t, k_h, k_d, r_b, r_t, r_h, r_d,
    v_b, v_t, v_h, v_d, w_b, w_t, w_h, w_d, cos_b, cos_t, cos_p, sin_b, sin_t, sin_p,
    Q_BLOCK_T: tl.constexpr, Q_BLOCK_H: tl.constexpr, K_BLOCK_T: tl.constexpr, K_BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, HALVINGS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    DENSE: tl.constexpr, ALIGN: tl.constexpr, TABLE_DENSE: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    NORM: tl.constexpr, ADD_ONE: tl.constexpr, EPS: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate q and k, and store k and v.

    The first `q_programs` programs process q, the next `k_programs` programs process k, and the others v.
    """
    program = tl.program_id(0)
    if program < q_programs:
        _step(
            program, q, p, q_weight, cos, sin, slots, tokens, q_heads, block_size, slot_count, slots_b, slots_t,
            q_b, q_t, q_h, q_d, p_b, p_t, p_h, p_d, cos_b, cos_t, cos_p, sin_b, sin_t, sin_p,
            Q_BLOCK_T, Q_BLOCK_H, BLOCK_P, BLOCK_D, HALVINGS, HEAD_DIM, PAIRS, OFFSET, INTERLEAVED,
            DENSE, ALIGN, TABLE_DENSE, TABLE_ALIGN, NORM, ADD_ONE, EPS, False,
        )  # fmt: skip
    elif program < q_programs + k_programs:
        _step(
            program - q_programs, k, r, k_weight, cos, sin, slots, tokens, k_heads, block_size, slot_count,
            slots_b, slots_t,
            k_b, k_t, k_h, k_d, r_b, r_t, r_h, r_d, cos_b, cos_t, cos_p, sin_b, sin_t, sin_p,
            K_BLOCK_T, K_BLOCK_H, BLOCK_P, BLOCK_D, HALVINGS, HEAD_DIM, PAIRS, OFFSET, INTERLEAVED,
            DENSE, ALIGN, TABLE_DENSE, TABLE_ALIGN, NORM, ADD_ONE, EPS, STORES,
        )  # fmt: skip
    else:
        batch, token, head = _tile(program - q_programs - k_programs, k_heads, tokens, K_BLOCK_T, K_BLOCK_H)
        here = (token < tokens) & (head < k_heads)
        rows, there = _to_rows(
            w, batch, token, head, tokens, here, w_b, w_t, w_h, slots, slots_b, slots_t, block_size, slot_count,
            ALIGN, STORES,
        )  # fmt: skip
        _copy(_rows(v, batch, token, head, v_b, v_t, v_h, ALIGN), rows, v_d, w_d, there, 0, V_DIM, BLOCK_P, DENSE)
