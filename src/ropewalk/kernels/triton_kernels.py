"""The GPU kernels in Triton: rotation, gradients with respect to cos and sin, angles, the fused step, and attention.

`gpu.py` launches them, and is the only module that imports this one.

All kernels are memory-bound. Each program processes a tile of tokens × heads × pairs. The three sizes of a tile are
powers of two, chosen so that each thread processes a fixed number of bytes, in several 16-byte accesses. No element
belongs to two threads, so in-place rotation is safe.

Strides count units of ALIGN elements (TABLE_ALIGN in tables). This tells the compiler that rows are aligned, without a
compilation for each stride. Addresses are converted to 64 bits before the first product. Triton specializes no argument
on its value, so no new length, batch size or stride triggers a compilation.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NOT_SPECIALIZED = [
    *("tokens", "q_heads", "k_heads", "q_programs", "rows"),
    *(f"{table}_{axis}" for table in ("cos", "sin") for axis in "bthp"),
    *(f"{x}_{axis}" for x in ("q", "k", "p", "r") for axis in "bthd"),
]


@triton.jit
def _tile(program, x_heads, tokens, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return the batch row, the tokens and the heads of a program.

    Heads vary fastest, so that consecutive programs share tables.
    """
    head_blocks = tl.cdiv(x_heads, BLOCK_H)
    token_blocks = tl.cdiv(tokens, BLOCK_T)
    head = (program % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    rest = program // head_blocks
    token = (rest % token_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    return (rest // token_blocks).to(tl.int64), token[:, None, None], head[None, :, None]


@triton.jit
def _rows(x, b, token, head, x_b, x_t, x_h, ALIGN: tl.constexpr):
    """Return the address of the first channel of each token and head."""
    return x + (b * x_b + token.to(tl.int64) * x_t + head.to(tl.int64) * x_h) * ALIGN


@triton.jit
def _channels(first, COUNT: tl.constexpr, stride, DENSE: tl.constexpr):
    """Return the offsets of COUNT channels from `first` on. DENSE tells the compiler that the stride is 1."""
    channel = first + tl.arange(0, COUNT)[None, None, :]
    return channel if DENSE else channel.to(tl.int64) * stride


@triton.jit
def _load_pairs(
    rows, stride, here, OFFSET: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Load the two channels of each pair, as two blocks."""
    if INTERLEAVED:
        inside = here & (tl.arange(0, 2 * BLOCK_P)[None, None, :] < 2 * PAIRS)
        x = tl.load(rows + _channels(OFFSET, 2 * BLOCK_P, stride, DENSE), mask=inside, other=0.0)
        return tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_P, 2)))
    inside = here & (tl.arange(0, BLOCK_P)[None, None, :] < PAIRS)
    a = tl.load(rows + _channels(OFFSET, BLOCK_P, stride, DENSE), mask=inside, other=0.0)
    b = tl.load(rows + _channels(OFFSET + PAIRS, BLOCK_P, stride, DENSE), mask=inside, other=0.0)
    return a, b


@triton.jit
def _store_pairs(
    rows, stride, here, a, b, OFFSET: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        inside = here & (tl.arange(0, 2 * BLOCK_P)[None, None, :] < 2 * PAIRS)
        x = tl.reshape(tl.join(a, b), (a.shape[0], a.shape[1], 2 * BLOCK_P))
        tl.store(rows + _channels(OFFSET, 2 * BLOCK_P, stride, DENSE), x, mask=inside)
    else:
        inside = here & (tl.arange(0, BLOCK_P)[None, None, :] < PAIRS)
        tl.store(rows + _channels(OFFSET, BLOCK_P, stride, DENSE), a, mask=inside)
        tl.store(rows + _channels(OFFSET + PAIRS, BLOCK_P, stride, DENSE), b, mask=inside)


@triton.jit
def _copy(x_rows, y_rows, x_stride, y_stride, here, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr,
          DENSE: tl.constexpr):  # fmt: skip
    """Copy channels that are not rotated."""
    for start in tl.static_range(FIRST, END, BLOCK):
        inside = here & (start + tl.arange(0, BLOCK)[None, None, :] < END)
        x = tl.load(x_rows + _channels(start, BLOCK, x_stride, DENSE), mask=inside)
        tl.store(y_rows + _channels(start, BLOCK, y_stride, DENSE), x, mask=inside)


@triton.jit
def _rotated(
    a, b, batch, token, head, here, cos, sin, cos_b, cos_t, cos_h, cos_p, sin_b, sin_t, sin_h, sin_p,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INVERSE: tl.constexpr,
    TABLE_DENSE: tl.constexpr, TABLE_ALIGN: tl.constexpr,
):  # fmt: skip
    """Rotate pairs, in their dtype.

    Tables are loaded again for every head, from the cache, in the layout of a and b, so threads need not exchange data.
    """
    known = here & (tl.arange(0, BLOCK_P)[None, None, :] < PAIRS)
    cos_rows = _rows(cos, batch, token, head, cos_b, cos_t, cos_h, TABLE_ALIGN)
    sin_rows = _rows(sin, batch, token, head, sin_b, sin_t, sin_h, TABLE_ALIGN)
    c = tl.load(cos_rows + _channels(0, BLOCK_P, cos_p, TABLE_DENSE), mask=known).to(a.dtype)
    s = tl.load(sin_rows + _channels(0, BLOCK_P, sin_p, TABLE_DENSE), mask=known).to(a.dtype)
    if INVERSE:
        s = s * -1.0  # not -s: before Triton 3.8 that is 0 - s, so the sign of +0 would not change
    return a * c - b * s, a * s + b * c


@triton.jit
def _rotate_tile(
    program, x, y, cos, sin, tokens, heads,
    x_b, x_t, x_h, x_d, y_b, y_t, y_h, y_d, cos_b, cos_t, cos_h, cos_p, sin_b, sin_t, sin_h, sin_p,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    COPY: tl.constexpr, DENSE: tl.constexpr, ALIGN: tl.constexpr,
    TABLE_DENSE: tl.constexpr, TABLE_ALIGN: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    compute: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    batch, token, head = _tile(program, heads, tokens, BLOCK_T, BLOCK_H)
    here = (token < tokens) & (head < heads)
    x_rows = _rows(x, batch, token, head, x_b, x_t, x_h, ALIGN)
    y_rows = _rows(y, batch, token, head, y_b, y_t, y_h, ALIGN)
    a, b = _load_pairs(x_rows, x_d, here, OFFSET, PAIRS, BLOCK_P, INTERLEAVED, DENSE)
    # Only code that is compiled for tables per head uses the head strides of the tables.
    a, b = _rotated(
        a.to(compute), b.to(compute), batch, token, head, here,
        cos, sin, cos_b, cos_t, cos_h if PER_HEAD else 0, cos_p, sin_b, sin_t, sin_h if PER_HEAD else 0, sin_p,
        PAIRS, BLOCK_P, INVERSE, TABLE_DENSE, TABLE_ALIGN,
    )  # fmt: skip
    a, b = a.to(y.dtype.element_ty), b.to(y.dtype.element_ty)
    _store_pairs(y_rows, y_d, here, a, b, OFFSET, PAIRS, BLOCK_P, INTERLEAVED, DENSE)
    if COPY:
        _copy(x_rows, y_rows, x_d, y_d, here, 0, OFFSET, BLOCK_P, DENSE)
        _copy(x_rows, y_rows, x_d, y_d, here, OFFSET + 2 * PAIRS, HEAD_DIM, BLOCK_P, DENSE)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def rotate(
    q, p, k, r, cos, sin,  # p is the output of q, r that of k
    tokens, q_heads, k_heads, q_programs,
    q_b, q_t, q_h, q_d, p_b, p_t, p_h, p_d, k_b, k_t, k_h, k_d, r_b, r_t, r_h, r_d,
    cos_b, cos_t, cos_h, cos_p, sin_b, sin_t, sin_h, sin_p,
    Q_BLOCK_T: tl.constexpr, Q_BLOCK_H: tl.constexpr, K_BLOCK_T: tl.constexpr, K_BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    COPY: tl.constexpr, DENSE: tl.constexpr, ALIGN: tl.constexpr,
    TABLE_DENSE: tl.constexpr, TABLE_ALIGN: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Rotate each pair (a, b) to (a·cos − b·sin, a·sin + b·cos).

    The first `q_programs` programs process q, the others k.
    """
    program = tl.program_id(0)
    if program < q_programs:
        _rotate_tile(
            program, q, p, cos, sin, tokens, q_heads,
            q_b, q_t, q_h, q_d, p_b, p_t, p_h, p_d,
            cos_b, cos_t, cos_h, cos_p, sin_b, sin_t, sin_h, sin_p,
            Q_BLOCK_T, Q_BLOCK_H, BLOCK_P, HEAD_DIM, PAIRS, OFFSET, INTERLEAVED, INVERSE,
            COPY, DENSE, ALIGN, TABLE_DENSE, TABLE_ALIGN, PER_HEAD,
        )  # fmt: skip
    else:
        _rotate_tile(
            program - q_programs, k, r, cos, sin, tokens, k_heads,
            k_b, k_t, k_h, k_d, r_b, r_t, r_h, r_d,
            cos_b, cos_t, cos_h, cos_p, sin_b, sin_t, sin_h, sin_p,
            K_BLOCK_T, K_BLOCK_H, BLOCK_P, HEAD_DIM, PAIRS, OFFSET, INTERLEAVED, INVERSE,
            COPY, DENSE, ALIGN, TABLE_DENSE, TABLE_ALIGN, PER_HEAD,
        )  # fmt: skip


@triton.jit
def _products(
    sum_cos, sum_sin, batch, token, first, x, grad, tokens, heads, x_b, x_t, x_h, x_d, g_b, g_t, g_h, g_d,
    BLOCKS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, DENSE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Add the products of one tensor to `sum_cos` and `sum_sin`, for each block of heads from the block `first` on."""
    for block in range(BLOCKS):
        head = first + block * BLOCK_H
        here = (token < tokens) & (head < heads)
        x_rows = _rows(x, batch, token, head, x_b, x_t, x_h, ALIGN)
        g_rows = _rows(grad, batch, token, head, g_b, g_t, g_h, ALIGN)
        a, b = _load_pairs(x_rows, x_d, here, OFFSET, PAIRS, BLOCK_P, INTERLEAVED, DENSE)
        g, h = _load_pairs(g_rows, g_d, here, OFFSET, PAIRS, BLOCK_P, INTERLEAVED, DENSE)
        a, b, g, h = a.to(sum_cos.dtype), b.to(sum_cos.dtype), g.to(sum_cos.dtype), h.to(sum_cos.dtype)
        sum_cos += g * a + h * b
        sum_sin += h * a - g * b
    return sum_cos, sum_sin


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def table_gradient(
    q, p, k, r, d_cos, d_sin,  # p and r are the gradients to rotated q and k
    tokens, q_heads, k_heads,
    q_b, q_t, q_h, q_d, p_b, p_t, p_h, p_d, k_b, k_t, k_h, k_d, r_b, r_t, r_h, r_d,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr,
    PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, DENSE: tl.constexpr, ALIGN: tl.constexpr,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients with respect to cos, g·a + h·b, and sin, h·a − g·b.

    (g, h) is the gradient with respect to the rotated pair (a, b).

    Each program sums over all heads for a block of tokens. With PER_HEAD, each program processes a block of tokens and
    heads, and sums over q and k.
    """
    batch, token, head = _tile(tl.program_id(0), q_heads if PER_HEAD else 1, tokens, BLOCK_T, BLOCK_H)
    zero = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_P), d_cos.dtype.element_ty)
    sum_cos, sum_sin = _products(
        zero, zero, batch, token, head, q, p, tokens, q_heads, q_b, q_t, q_h, q_d, p_b, p_t, p_h, p_d,
        Q_BLOCKS, BLOCK_H, BLOCK_P, PAIRS, OFFSET, INTERLEAVED, DENSE, ALIGN,
    )  # fmt: skip
    sum_cos, sum_sin = _products(
        sum_cos, sum_sin, batch, token, head, k, r, tokens, k_heads, k_b, k_t, k_h, k_d, r_b, r_t, r_h, r_d,
        K_BLOCKS, BLOCK_H, BLOCK_P, PAIRS, OFFSET, INTERLEAVED, DENSE, ALIGN,
    )  # fmt: skip
    pair = tl.arange(0, BLOCK_P)[None, None, :]
    inside = (token < tokens) & (pair < PAIRS)
    if PER_HEAD:
        inside = inside & (head < q_heads)
        place = ((batch * q_heads + head) * tokens + token) * PAIRS + pair
        tl.store(d_cos + place, sum_cos, mask=inside)
        tl.store(d_sin + place, sum_sin, mask=inside)
    else:
        place = (batch * tokens + token) * PAIRS + pair
        tl.store(d_cos + place, tl.sum(sum_cos, axis=1, keep_dims=True), mask=inside)
        tl.store(d_sin + place, tl.sum(sum_sin, axis=1, keep_dims=True), mask=inside)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def angles(
    positions, axis, phase_steps, cos, sin, rows,
    FACTOR: tl.constexpr, PAIRS: tl.constexpr, AXES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Compute cos and sin of position · phase step (in 2⁻⁶⁴ turns) from quadrant, residual and polynomial.

    The method is that of csrc/kernels.cpp.

    The upper two bits of a phase, rounded to nearest, are its quadrant. The residual t counts eighths of a turn, and
    lies between −1 and 1. All arithmetic is in float64, without fast sines. The kernel spills no registers.

    With AXES, positions consist of one row for each axis, and each pair reads the row of its axis.
    """
    row = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    if AXES:
        first = tl.load(axis + pair, mask=pair < PAIRS, other=0) * rows
        position = tl.load(positions + first + row, mask=(row < rows) & (pair < PAIRS), other=0).to(tl.int64)
    else:
        position = tl.load(positions + row, mask=row < rows, other=0).to(tl.int64)
    phase_step = tl.load(phase_steps + pair, mask=pair < PAIRS, other=0)
    phase = position * phase_step  # wraps around
    quadrant = (phase + (1 << 61)) >> 62
    t = (phase - (quadrant << 62)).to(tl.float64) * 2.0**-61
    u = t * t
    c = u * -3.858189007341667731e-13 + 1.1500512028217341338e-10
    c = c * u + -2.4611364033652596137e-8
    c = c * u + 3.5908604460279520345e-6
    c = c * u + -0.00032599188692673764224
    c = c * u + 0.015854344243815419319
    c = c * u + -0.30842513753404245296
    c = c * u + 1.0
    s = u * 6.8874821400921976273e-12 + -1.7571791752800344071e-9
    s = s * u + 3.1336165354315280849e-7
    s = s * u + -0.00003657620417386099773
    s = s * u + 0.0024903945701920074546
    s = s * u + -0.080745512188280771809
    s = t * (u * s + 0.78539816339744830962)
    odd = (quadrant & 1) != 0
    of_cos, of_sin = tl.where(odd, s, c), tl.where(odd, c, s)
    # cos is negative in quadrants 1 and 2, sin in 2 and 3.
    of_cos = tl.where(((quadrant + 1) & 2) != 0, of_cos * -1.0, of_cos) * FACTOR
    of_sin = tl.where((quadrant & 2) != 0, of_sin * -1.0, of_sin) * FACTOR
    inside = (row < rows) & (pair < PAIRS)
    tl.store(cos + row * PAIRS + pair, of_cos.to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + row * PAIRS + pair, of_sin.to(sin.dtype.element_ty), mask=inside)


@triton.jit
def _scale(x, EPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HALVINGS: tl.constexpr):
    """Return 1/√(mean of x² + ε) of each head, in float64. Channels beyond HEAD_DIM are 0."""
    x = x.to(tl.float64)
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
def _largest(x, inside):
    """Return the bits of the largest |x| of each head. As integers, they have the order of |x|, with NaN above all."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.where(inside, bits, 0), axis=2, keep_dims=True)


@triton.jit
def _quotient(x, y):
    """Return x / y, rounded to nearest, as Triton's own division of float32 is not."""
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def _store_scales(
    scales, largest, batch, token, head, tokens, here, s_b, s_t, s_h, slots, slots_b, slots_t, block_size, slot_count,
    kept: tl.constexpr,
):  # fmt: skip
    """Store and return the scale of each head, whose `largest` |x| becomes 127 in int8 and 448 in float8_e4m3fn."""
    most = largest.to(tl.float64 if largest.dtype == tl.int64 else tl.float32, bitcast=True)
    scale = _quotient(most, tl.full((), 127.0 if kept == tl.int8 else 448.0, most.dtype))
    scale = tl.where(scale < 2.0**-100, 2.0**-100, scale).to(tl.float32)
    rows, there = _to_rows(
        scales, batch, token, head, tokens, here, s_b, s_t, s_h, slots, slots_b, slots_t, block_size, slot_count,
        1, True,
    )  # fmt: skip
    tl.store(rows, scale, mask=there)
    return scale


@triton.jit
def _in_8_bits(x, scale, kept: tl.constexpr):
    """Return x / scale, rounded to nearest, as int8, or as float8_e4m3fn in unsigned bytes, without that dtype."""
    x = _quotient(x, scale.to(x.dtype))
    if kept == tl.int8:
        if x.dtype == tl.float64:
            code = (x + 1.5 * 2.0**52).to(tl.int64, bitcast=True)  # the last bit of the sum is 1
        else:
            code = (x + 1.5 * 2.0**23).to(tl.int32, bitcast=True)
        code = tl.where(x == x, code, 0)
    else:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - 960  # 960: the difference of the exponents
        # Below 2**-6, the addition of 2**14, whose last bit is 2**-9, rounds.
        subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(size < 0x3C800000, subnormal, normal), 0x7F) | (bits >> 24 & 0x80)
    return code.to(kept)


@triton.jit
def _step(
    program, x, y, scales, weight, cos, sin, slots, tokens, heads, block_size, slot_count, slots_b, slots_t,
    x_b, x_t, x_h, x_d, y_b, y_t, y_h, y_d, ys_b, ys_t, ys_h, cos_b, cos_t, cos_p, sin_b, sin_t, sin_p,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, HALVINGS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    DENSE: tl.constexpr, ALIGN: tl.constexpr, TABLE_DENSE: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    NORM: tl.constexpr, ADD_ONE: tl.constexpr, EPS: tl.constexpr, STORES: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    given: tl.constexpr = x.dtype.element_ty
    kept: tl.constexpr = y.dtype.element_ty
    compute: tl.constexpr = tl.float64 if given == tl.float64 else tl.float32
    whole: tl.constexpr = HEAD_DIM == 2 * PAIRS
    batch, token, head = _tile(program, heads, tokens, BLOCK_T, BLOCK_H)
    here = (token < tokens) & (head < heads)
    x_rows = _rows(x, batch, token, head, x_b, x_t, x_h, ALIGN)
    y_rows, there = _to_rows(
        y, batch, token, head, tokens, here, y_b, y_t, y_h, slots, slots_b, slots_t, block_size, slot_count,
        ALIGN, STORES,
    )  # fmt: skip
    a, b = _load_pairs(x_rows, x_d, here, OFFSET, PAIRS, BLOCK_P, INTERLEAVED, DENSE)
    a, b = a.to(compute), b.to(compute)
    channel = tl.arange(0, BLOCK_D)[None, None, :]
    rest = (channel < OFFSET) | ((channel >= OFFSET + 2 * PAIRS) & (channel < HEAD_DIM))  # not rotated
    if NORM or (SCALED and not whole):
        z = tl.load(x_rows + _channels(0, BLOCK_D, x_d, DENSE), mask=here & (channel < HEAD_DIM), other=0.0)
    if NORM:
        scale = _scale(z, EPS, HEAD_DIM, BLOCK_D, HALVINGS).to(compute)
        weights = weight + (token + head) * 0
        first, second = _load_pairs(weights, 1, here, OFFSET, PAIRS, BLOCK_P, INTERLEAVED, True)
        a = (a * scale * _gain(first, ADD_ONE, compute)).to(given).to(compute)
        b = (b * scale * _gain(second, ADD_ONE, compute)).to(given).to(compute)
        if not whole:
            g = tl.load(weights + channel, mask=here & rest, other=0.0)
            z = (z.to(compute) * scale * _gain(g, ADD_ONE, compute)).to(given)
    a, b = _rotated(
        a, b, batch, token, head, here, cos, sin, cos_b, cos_t, 0, cos_p, sin_b, sin_t, 0, sin_p,
        PAIRS, BLOCK_P, False, TABLE_DENSE, TABLE_ALIGN,
    )  # fmt: skip
    a, b = a.to(given), b.to(given)
    if SCALED:
        a, b = a.to(compute), b.to(compute)
        inside = tl.arange(0, BLOCK_P)[None, None, :] < PAIRS
        largest = tl.maximum(_largest(a, inside), _largest(b, inside))
        if not whole:
            z = z.to(compute)
            largest = tl.maximum(largest, _largest(z, rest))
        of_head = _store_scales(
            scales, largest, batch, token, head, tokens, here, ys_b, ys_t, ys_h, slots, slots_b, slots_t,
            block_size, slot_count, kept,
        )  # fmt: skip
        a, b = _in_8_bits(a, of_head, kept), _in_8_bits(b, of_head, kept)
        if not whole:
            z = _in_8_bits(z, of_head, kept)
    _store_pairs(y_rows, y_d, there, a, b, OFFSET, PAIRS, BLOCK_P, INTERLEAVED, DENSE)
    if not whole:
        if NORM or SCALED:
            tl.store(y_rows + _channels(0, BLOCK_D, y_d, DENSE), z, mask=there & rest)
        else:
            _copy(x_rows, y_rows, x_d, y_d, there, 0, OFFSET, BLOCK_P, DENSE)
            _copy(x_rows, y_rows, x_d, y_d, there, OFFSET + 2 * PAIRS, HEAD_DIM, BLOCK_P, DENSE)


_NOT_SPECIALIZED_OF_STEP = [
    *("tokens", "q_heads", "k_heads", "q_programs", "k_programs", "block_size", "slot_count", "slots_b", "slots_t"),
    *(f"{table}_{axis}" for table in ("cos", "sin") for axis in "btp"),
    *(f"{x}_{axis}" for x in ("q", "k", "p", "r", "v", "w") for axis in "bthd"),
    *(f"{x}_{axis}" for x in ("rs", "ws") for axis in "bth"),
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED_OF_STEP)
def step(
    # p, r and w are the outputs of q, k and v
    q, p, k, r, v, w, r_scales, w_scales, cos, sin, q_weight, k_weight, slots,
    tokens, q_heads, k_heads, q_programs, k_programs, block_size, slot_count, slots_b, slots_t,
    q_b, q_t, q_h, q_d, p_b, p_t, p_h, p_d, k_b, k_t, k_h, k_d, r_b, r_t, r_h, r_d,
    v_b, v_t, v_h, v_d, w_b, w_t, w_h, w_d, rs_b, rs_t, rs_h, ws_b, ws_t, ws_h,
    cos_b, cos_t, cos_p, sin_b, sin_t, sin_p,
    Q_BLOCK_T: tl.constexpr, Q_BLOCK_H: tl.constexpr, K_BLOCK_T: tl.constexpr, K_BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, HALVINGS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    DENSE: tl.constexpr, ALIGN: tl.constexpr, TABLE_DENSE: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    NORM: tl.constexpr, ADD_ONE: tl.constexpr, EPS: tl.constexpr, STORES: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate q and k, and store k and v in a cache, with SCALED in 8 bits.

    The squares are summed in float64 by repeatedly adding the second half to the first, which is the order of the plain
    PyTorch code. A single `tl.sum` would add them in another order.

    The first `q_programs` programs process q, the next `k_programs` programs process k, and the others v.
    """
    program = tl.program_id(0)
    if program < q_programs:
        _step(
            program, q, p, r_scales, q_weight, cos, sin, slots, tokens, q_heads, block_size, slot_count,
            slots_b, slots_t,
            q_b, q_t, q_h, q_d, p_b, p_t, p_h, p_d, rs_b, rs_t, rs_h, cos_b, cos_t, cos_p, sin_b, sin_t, sin_p,
            Q_BLOCK_T, Q_BLOCK_H, BLOCK_P, BLOCK_D, HALVINGS, HEAD_DIM, PAIRS, OFFSET, INTERLEAVED,
            DENSE, ALIGN, TABLE_DENSE, TABLE_ALIGN, NORM, ADD_ONE, EPS, False, False,
        )  # fmt: skip
    elif program < q_programs + k_programs:
        _step(
            program - q_programs, k, r, r_scales, k_weight, cos, sin, slots, tokens, k_heads, block_size, slot_count,
            slots_b, slots_t,
            k_b, k_t, k_h, k_d, r_b, r_t, r_h, r_d, rs_b, rs_t, rs_h, cos_b, cos_t, cos_p, sin_b, sin_t, sin_p,
            K_BLOCK_T, K_BLOCK_H, BLOCK_P, BLOCK_D, HALVINGS, HEAD_DIM, PAIRS, OFFSET, INTERLEAVED,
            DENSE, ALIGN, TABLE_DENSE, TABLE_ALIGN, NORM, ADD_ONE, EPS, STORES, SCALED,
        )  # fmt: skip
    else:
        batch, token, head = _tile(program - q_programs - k_programs, k_heads, tokens, K_BLOCK_T, K_BLOCK_H)
        here = (token < tokens) & (head < k_heads)
        v_rows = _rows(v, batch, token, head, v_b, v_t, v_h, ALIGN)
        rows, there = _to_rows(
            w, batch, token, head, tokens, here, w_b, w_t, w_h, slots, slots_b, slots_t, block_size, slot_count,
            ALIGN, STORES,
        )  # fmt: skip
        if SCALED:
            kept: tl.constexpr = w.dtype.element_ty
            inside = tl.arange(0, BLOCK_V)[None, None, :] < V_DIM
            z = tl.load(v_rows + _channels(0, BLOCK_V, v_d, DENSE), mask=here & inside, other=0.0)
            z = z.to(tl.float64 if v.dtype.element_ty == tl.float64 else tl.float32)
            scale = _store_scales(
                w_scales, _largest(z, inside), batch, token, head, tokens, here, ws_b, ws_t, ws_h,
                slots, slots_b, slots_t, block_size, slot_count, kept,
            )  # fmt: skip
            tl.store(rows + _channels(0, BLOCK_V, w_d, DENSE), _in_8_bits(z, scale, kept), mask=there & inside)
        else:
            _copy(v_rows, rows, v_d, w_d, there, 0, V_DIM, BLOCK_P, DENSE)


_NOT_SPECIALIZED_OF_ATTENTION = [
    *("kv_heads", "group", "tokens", "count", "window", "sinks", "splits", "queries"),
    *(f"{x}_{axis}" for x in ("q", "f", "k", "v", "ks", "vs") for axis in "bth"),
    *("blocks_b", "order_b", "order_t", "counts_b"),
]


@triton.jit
def _base(most):
    """Return the exponent that is subtracted from scores: 0 as long as no key was seen, so that all weights are 0."""
    return tl.where(most == -float("inf"), 0.0, most)


@triton.jit
def _widened(x, dtype: tl.constexpr):
    """Return int8 numbers, or those of float8_e4m3fn in unsigned bytes, in another dtype, exactly.

    The second is computed, because not all GPUs have the dtype. The float16 number with the same bits is the number
    divided by 256. Its bit 14 must be 0, and 1 for NaN, the only number from which the addition carries. It is a copy
    of the sign, which xor with itself, and with the carry, corrects.
    """
    if x.dtype == tl.uint8:
        bits = x.to(tl.int8, bitcast=True).to(tl.int16) << 7
        bits ^= (bits + 0x80) & 0x4000
        x = bits.to(tl.float16, bitcast=True) * 256.0
    return x.to(tl.float16).to(dtype)


@triton.jit
def _attend_keys(
    begin, end, most, weights, sums, q, keys, values, blocks, row, first_key, last_key, k_b, k_t, v_b, v_t,
    key_scales, value_scales, ks_b, ks_t, vs_b, vs_t,
    SCALE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PAGE: tl.constexpr, FRONT: tl.constexpr, RING: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Add the keys [begin, end) of a row to the maximum score, the sum of weights and the weighted values.

    No query sees a key behind them: last_key < end.

    With DOT, these have one row for each query. Otherwise there is one query, and each of BLOCK_N lanes has its own, so
    that lanes exchange nothing in the loop.
    """
    inside = tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM
    channel = tl.arange(0, BLOCK_D)[None, :]
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)
        here = key < end
        if PAGE:
            block = tl.load(blocks + key // PAGE, mask=here, other=0).to(tl.int64)
            slot = (key % PAGE).to(tl.int64)
        else:
            block, slot = row, (tl.where(key < FRONT, key, FRONT + (key - FRONT) % RING) if RING else key).to(tl.int64)
        k_rows = keys + (block * k_b + slot * k_t) * ALIGN
        v_rows = values + (block * v_b + slot * v_t) * ALIGN
        k = tl.load(k_rows[:, None] + channel, mask=here[:, None] & inside, other=0)
        v = tl.load(v_rows[:, None] + channel, mask=here[:, None] & inside, other=0)
        if SCALED:
            k = _widened(k, q.dtype if DOT else tl.float32)
            v = _widened(v, tl.bfloat16 if DOT else tl.float32)
            k_scale = tl.load(key_scales + block * ks_b + slot * ks_t, mask=here, other=0.0)
            v_scale = tl.load(value_scales + block * vs_b + slot * vs_t, mask=here, other=0.0)
        if DOT:
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
            if SCALED:
                score *= k_scale[None, :]
            seen = (key[None, :] >= first_key[:, None]) & (key[None, :] <= last_key[:, None])
            score = tl.where(seen, score, -float("inf"))
            now = tl.maximum(most, tl.max(score, axis=1))
            weight = tl.exp2(score - _base(now)[:, None])
            factor = tl.exp2(most - _base(now))
            weights = weights * factor + tl.sum(weight, axis=1)
            sums *= factor[:, None]
            if SCALED:
                weight *= v_scale[None, :]
            # The weights are float32. As a sum of 16-bit numbers, they can be multiplied by values of 16 bits.
            for _ in tl.static_range(PARTS):
                part = weight.to(v.dtype)
                sums = tl.dot(part, v, sums, input_precision=PRECISION)
                weight -= part.to(tl.float32)
        else:
            score = tl.sum(k.to(tl.float32) * q.to(tl.float32), axis=1) * SCALE
            if SCALED:
                score *= k_scale
            score = tl.where((key >= first_key) & (key <= last_key), score, -float("inf"))
            now = tl.maximum(most, score)
            weight = tl.exp2(score - _base(now))
            factor = tl.exp2(most - _base(now))
            weights = weights * factor + weight
            if SCALED:
                weight *= v_scale
            sums = sums * factor[:, None] + weight[:, None] * v.to(tl.float32)
        most = now
    return most, weights, sums


@triton.jit
def _join(most, weights, sums):
    """Add up independent parts of the keys. Return a block with one row."""
    total = tl.max(most, axis=0, keep_dims=True)
    factor = tl.exp2(most - _base(total))
    return (
        total,
        tl.sum(weights * factor, axis=0, keep_dims=True),
        tl.sum(sums * factor[:, None], axis=0, keep_dims=True),
    )


@triton.jit
def _store_attended(out, place, here, weights, sums, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    channel = tl.arange(0, BLOCK_D)[None, :]
    attended = tl.where((weights == 0.0)[:, None], 0.0, sums) / tl.where(weights == 0.0, 1.0, weights)[:, None]
    tl.store(out + place[:, None] * HEAD_DIM + channel, attended.to(out.dtype.element_ty),
             mask=here[:, None] & (channel < HEAD_DIM))  # fmt: skip


@triton.jit(do_not_specialize=_NOT_SPECIALIZED_OF_ATTENTION)
def attend(
    q, far_q, keys, values, key_scales, value_scales, blocks, order, counts, out, work,
    kv_heads, group, tokens, count, window, sinks, splits, queries,
    q_b, q_t, q_h, f_b, f_t, f_h, k_b, k_t, k_h, v_b, v_t, v_h, ks_b, ks_t, ks_h, vs_b, vs_t, vs_h,
    blocks_b, order_b, order_t, counts_b,
    SCALE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PAGE: tl.constexpr, FRONT: tl.constexpr, RING: tl.constexpr, COUNTS: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Attend with up to BLOCK_R queries of a key head over a part of the keys that they see, in the online softmax.

    The queries are those of the tokens of a row, for the `group` of heads that share the key head. The weights are
    powers of 2, and SCALE contains the factor. Only the keys that these queries see, the sinks and those of the window,
    are divided into parts, so windows and short rows occupy all programs, and the host knows no length. With SPLIT,
    `combine` adds up the parts.
    """
    dot: tl.constexpr = BLOCK_R > 1
    lanes: tl.constexpr = BLOCK_R if dot else BLOCK_N
    program = tl.program_id(0)
    head, rest = (program % kv_heads).to(tl.int64), program // kv_heads
    r_blocks = tl.cdiv(group * tokens, BLOCK_R)
    query, rest = rest % r_blocks * BLOCK_R + tl.arange(0, BLOCK_R), rest // r_blocks
    split, row = rest % splits, (rest // splits).to(tl.int64)
    here = query < group * tokens
    token, of_head = (query // group).to(tl.int64), head * group + query % group

    # The last and the first key that each query sees.
    of_token = tl.load(order + row * order_b + token * order_t, mask=here, other=-1)
    first_key = tl.minimum(tl.maximum(of_token - window + 1, 0), count).to(tl.int32)
    last = tl.where(here, tl.minimum(tl.maximum(of_token, -1), count - 1), -1).to(tl.int32)
    end = tl.max(last, axis=0) + 1
    if COUNTS:
        count = tl.minimum(count, tl.load(counts + row * counts_b)).to(tl.int32)
        end = tl.minimum(end, count)
    begin = tl.min(tl.where(here, first_key, end), axis=0)
    front = 0  # the sinks that these queries see
    if SINKS:
        last_sink = tl.minimum(of_token, tl.minimum(sinks, count) - 1).to(tl.int32)
        front = tl.maximum(tl.max(last_sink, axis=0) + 1, 0)
        begin = tl.maximum(begin, front)
    # A part of the sinks and of [begin, end), one behind the other.
    total = front + tl.maximum(end - begin, 0)
    share = tl.cdiv(tl.cdiv(total, splits), BLOCK_N) * BLOCK_N
    part, part_end = split * share, tl.minimum(total, (split + 1) * share)
    end = begin + part_end - front
    begin += tl.maximum(part - front, 0)
    last_key = tl.minimum(last, end - 1)

    most = tl.full((lanes,), -float("inf"), tl.float32)
    weights = tl.zeros((lanes,), tl.float32)
    sums = tl.zeros((lanes, BLOCK_D), tl.float32)
    channel = tl.arange(0, BLOCK_D)[None, :]
    known = here[:, None] & (channel < HEAD_DIM)
    of_keys, of_values = keys + head * k_h * ALIGN, values + head * v_h * ALIGN
    key_scales, value_scales = key_scales + head * ks_h, value_scales + head * vs_h
    table = blocks + row * blocks_b
    if SINKS:
        front = tl.minimum(part_end, front)
        last_sink = tl.minimum(last_sink, front - 1)
        f_rows = far_q + (row * f_b + token * f_t + of_head * f_h) * ALIGN
        most, weights, sums = _attend_keys(
            part, front, most, weights, sums, tl.load(f_rows[:, None] + channel, mask=known, other=0.0),
            of_keys, of_values, table, row, tl.zeros_like(last_sink), last_sink, k_b, k_t, v_b, v_t,
            key_scales, value_scales, ks_b, ks_t, vs_b, vs_t,
            SCALE, HEAD_DIM, BLOCK_D, BLOCK_N, STAGES, PAGE, FRONT, RING, dot, PARTS, PRECISION, ALIGN, SCALED,
        )  # fmt: skip
    q_rows = q + (row * q_b + token * q_t + of_head * q_h) * ALIGN
    most, weights, sums = _attend_keys(
        begin, end, most, weights, sums, tl.load(q_rows[:, None] + channel, mask=known, other=0.0),
        of_keys, of_values, table, row, first_key, last_key, k_b, k_t, v_b, v_t,
        key_scales, value_scales, ks_b, ks_t, vs_b, vs_t,
        SCALE, HEAD_DIM, BLOCK_D, BLOCK_N, STAGES, PAGE, FRONT, RING, dot, PARTS, PRECISION, ALIGN, SCALED,
    )  # fmt: skip
    if not dot:
        most, weights, sums = _join(most, weights, sums)

    place = (row * tokens + token) * (kv_heads * group) + of_head
    if SPLIT:
        place = place * splits + split
        tl.store(work + place[:, None] * HEAD_DIM + channel, sums, mask=known & (weights[:, None] != 0.0))
        others = work + queries.to(tl.int64) * splits * HEAD_DIM + place * 2
        tl.store(others, most, mask=here)
        tl.store(others + 1, weights, mask=here)
    else:
        _store_attended(out, place, here, weights, sums, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["splits", "queries"])
def combine(
    work, out, splits, queries, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Add up what `attend` has stored for the parts of the keys of one query: values, maximum score and weights."""
    query = tl.program_id(0).to(tl.int64)
    others = work + queries.to(tl.int64) * splits * HEAD_DIM
    channel = tl.arange(0, BLOCK_D)[None, :]
    most = tl.full((BLOCK_S,), -float("inf"), tl.float32)
    weights = tl.zeros((BLOCK_S,), tl.float32)
    sums = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        place = query * splits + split
        new_most = tl.load(others + place * 2, mask=split < splits, other=-float("inf"))
        new_weights = tl.load(others + place * 2 + 1, mask=split < splits, other=0.0)
        known = (new_weights != 0.0)[:, None] & (channel < HEAD_DIM)  # otherwise, nothing was stored
        new_sums = tl.load(work + place[:, None] * HEAD_DIM + channel, mask=known, other=0.0)
        now = tl.maximum(most, new_most)
        factor, new_factor = tl.exp2(most - _base(now)), tl.exp2(new_most - _base(now))
        weights = weights * factor + new_weights * new_factor
        sums = sums * factor[:, None] + new_sums * new_factor[:, None]
        most = now
    most, weights, sums = _join(most, weights, sums)
    place, here = query + tl.zeros((1,), tl.int64), tl.full((1,), 1, tl.int1)
    _store_attended(out, place, here, weights, sums, HEAD_DIM, BLOCK_D)
