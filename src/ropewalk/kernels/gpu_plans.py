"""The launches of the kernels of `triton_kernels.py`: tiles, numbers of programs, strides and constants.

A launch follows from the dtypes, shapes and strides of its tensors, so it is planned once and then found in a cache.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ropewalk._layout import AXES, Layout, Options

if TYPE_CHECKING:
    from ropewalk.kernels.visible import StoreArguments, VisibleKeys


class Tile(NamedTuple):
    """How many bytes of rotated channels each thread holds, in loads of 16 bytes, and the warps of a program.

    More bytes make address arithmetic cheaper; fewer leave registers for more concurrent programs.
    """

    bytes: int
    warps: int


tile = Tile(64, 4)
"""The tile of `rotate` and `table_gradient`. benchmarks/gpu_tiles.py measures others, and clears the plans."""

# Half as many bytes in the fused step, because its squares are float64.
_BYTES_PER_THREAD_OF_STEP = 32
_VECTOR = 16


class Division(NamedTuple):
    """Into how many parts the keys of a row are divided.

    There are so many programs for each processor, unless each would have too few keys. The result of a program must be
    small in comparison with its keys.
    """

    programs: int
    least_keys: int


division = Division(4, 256)
"""How `attend` divides keys."""

# Products are rounded before they are added, as in the reference. Triton's default would fuse them.
_OPTIONS = {"enable_fp_fusion": False}


class Plan(NamedTuple):
    """A launch without its tensors.

    It follows from the dtypes, shapes and strides of the tensors, and is the same at every layer and decoded token.

    Attributes:
        kernel: the name of the kernel.
        programs: how many programs are launched.
        numbers: the kernel's arguments after the tensors, by name.
        warps: number of warps for each program.
        options: Triton's options.
    """

    kernel: str
    programs: int
    numbers: dict[str, Any]
    warps: int
    options: dict[str, Any] = _OPTIONS


Launch = tuple[Plan, tuple[Tensor, ...]]
"""A plan and the tensors, which are the kernel's first arguments."""

_Forms = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def _forms(tensors: tuple[Tensor, ...]) -> _Forms:
    """Return the dtype and the strides of each tensor."""
    return tuple([(x.dtype, x.stride()) for x in tensors])


def rotation_launch(tensors: list[Tensor], outputs: list[Tensor], cos: Tensor, sin: Tensor, options: Options) -> Launch:
    """Return the launch of `rotate`."""
    # Without k, q is passed twice.
    q, p, k, r = tensors[0], outputs[0], tensors[-1], outputs[-1]
    arguments, shapes = (q, p, k, r, cos, sin), (q.shape, k.shape, cos.shape)
    return _rotation_plan(shapes, _forms(arguments), options, len(tensors), p is q), arguments


@functools.lru_cache(1024)
def _rotation_plan(shapes: tuple[torch.Size, ...], forms: _Forms, options: Options, count: int, in_place: bool) -> Plan:
    q_shape, k_shape, table = shapes
    (dtype, _), _, _, _, (of_table, cos_strides), (_, sin_strides) = forms
    layout, interleaved, offset, inverse = options
    pairs, (batch, tokens, q_heads) = table[-1], counts(q_shape, layout)
    k_heads = counts(k_shape, layout)[2] if count == 2 else 0
    block_p = power_of_two(pairs)
    warps, per_thread = _threads(dtype.itemsize, block_p)
    q_t, q_h = _tile(q_heads, block_p, warps, per_thread)
    k_t, k_h = _tile(k_heads, block_p, warps, per_thread)
    q_programs = batch * _blocks(tokens, q_t) * _blocks(q_heads, q_h)
    k_programs = batch * _blocks(tokens, k_t) * _blocks(k_heads, k_h)
    of_tensors, dense, unit = _strides(forms[:4], layout, _VECTOR // dtype.itemsize)
    of_tables, table_dense, table_unit = _table_strides(
        table, cos_strides, sin_strides, of_table.itemsize, dtype.itemsize, interleaved
    )
    numbers = {
        "tokens": tokens,
        "q_heads": q_heads,
        "k_heads": k_heads,
        "q_programs": q_programs,
        **of_tensors,
        **of_tables,
        "Q_BLOCK_T": q_t,
        "Q_BLOCK_H": q_h,
        "K_BLOCK_T": k_t,
        "K_BLOCK_H": k_h,
        "BLOCK_P": block_p,
        "HEAD_DIM": q_shape[-1],
        "PAIRS": pairs,
        "OFFSET": offset,
        "INTERLEAVED": interleaved,
        "INVERSE": inverse,
        "COPY": not in_place,
        "DENSE": dense,
        "ALIGN": unit,
        "TABLE_DENSE": table_dense,
        "TABLE_ALIGN": table_unit,
        "PER_HEAD": len(table) == 4,
    }
    return Plan("rotate", q_programs + k_programs, numbers, warps)


def gradient_launch(
    tensors: list[Tensor], grads: list[Tensor], d_cos: Tensor, d_sin: Tensor, options: Options
) -> Launch:
    """Return the launch of `table_gradient`."""
    q, p, k, r = tensors[0], grads[0], tensors[-1], grads[-1]
    arguments, shapes = (q, p, k, r, d_cos, d_sin), (q.shape, k.shape, d_cos.shape)
    return _gradient_plan(shapes, _forms(arguments), options, len(tensors)), arguments


@functools.lru_cache(1024)
def _gradient_plan(shapes: tuple[torch.Size, ...], forms: _Forms, options: Options, count: int) -> Plan:
    (q_shape, k_shape, table), dtype = shapes, forms[0][0]
    layout, interleaved, offset, _ = options
    pairs, per_head = table[-1], len(table) == 4
    batch, tokens, q_heads = counts(q_shape, layout)
    k_heads = counts(k_shape, layout)[2] if count == 2 else 0
    block_p = power_of_two(pairs)
    warps, per_thread = _threads(dtype.itemsize, block_p)
    block_t, block_h = _tile(max(q_heads, k_heads), block_p, warps, per_thread)
    of_tensors, dense, unit = _strides(forms[:4], layout, _VECTOR // dtype.itemsize)
    numbers = {
        "tokens": tokens,
        "q_heads": q_heads,
        "k_heads": k_heads,
        **of_tensors,
        "BLOCK_T": block_t,
        "BLOCK_H": block_h,
        "BLOCK_P": block_p,
        "Q_BLOCKS": 1 if per_head else _blocks(q_heads, block_h),
        "K_BLOCKS": min(1, k_heads) if per_head else _blocks(k_heads, block_h),
        "PAIRS": pairs,
        "OFFSET": offset,
        "INTERLEAVED": interleaved,
        "DENSE": dense,
        "ALIGN": unit,
        "PER_HEAD": per_head,
    }
    programs = batch * _blocks(tokens, block_t) * (_blocks(q_heads, block_h) if per_head else 1)
    return Plan("table_gradient", programs, numbers, warps)


def step_launch(
    tensors: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    options: Options,
    norm: tuple[Tensor, Tensor, float, bool] | None,
    store: StoreArguments | None,
) -> Launch:
    """Return the launch of `step`."""
    (q, k), (p, r) = tensors, outputs
    q_weight, k_weight, eps, add_one = (q, k, 0.0, False) if norm is None else norm
    r, store_or_none = _numbers(r), (None,) * 6 if store is None else store
    # In the place of a tensor that is None, another one is passed.
    v, _, w, slots, r_scales, w_scales = (k if x is None else _numbers(x) for x in store_or_none)
    arguments = q, p, k, r, v, w, r_scales, w_scales, cos, sin, q_weight, k_weight, slots
    stores = () if store is None else (store.v is not None, store.k_scales is not None)
    shapes = q.shape, k.shape, v.shape, r.shape, cos.shape
    return _step_plan(shapes, _forms(arguments), options, eps, norm is not None, add_one, stores), arguments


def _numbers(cache: Tensor) -> Tensor:
    """Return a cache, with the bits of float8_e4m3fn as bytes: Triton has no such dtype on some GPUs."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@functools.lru_cache(1024)
def _step_plan(
    shapes: tuple[torch.Size, ...],
    forms: _Forms,
    options: Options,
    eps: float,
    has_norm: bool,
    add_one: bool,
    of_store: tuple[bool, ...],
) -> Plan:
    """Return the plan. of_store: whether values are stored, and whether there are scales; empty without a store."""
    q_shape, k_shape, v_shape, cache, table = shapes
    dtypes, (q, p, k, r, v, w, rs, ws, cos, sin, _, _, slots) = zip(*forms, strict=True)
    dtype, of_table = dtypes[0], dtypes[8]
    stores, (has_values, has_scales) = bool(of_store), of_store or (False, False)
    layout, interleaved, offset, _ = options
    at_batch, at_tokens, at_heads, _ = AXES[layout]
    batch, tokens, q_heads = counts(q_shape, layout)
    k_heads, pairs = k_shape[at_heads], table[-1]
    block_p, block_d, block_v = (power_of_two(size) for size in (pairs, q_shape[-1], v_shape[-1]))
    per_thread = _BYTES_PER_THREAD_OF_STEP // 2 // dtype.itemsize
    # A norm and scales need whole heads, which are at least twice as wide as the pairs.
    wide = max(block_d, block_v) // 2 if has_scales else block_d // 2 if has_norm else block_p
    warps = min(32, max(4, wide // per_thread // 32))
    (q_t, q_h), (k_t, k_h) = (_tile(heads, wide, warps, per_thread) for heads in (q_heads, k_heads))
    q_programs, k_programs = (
        batch * _blocks(tokens, t) * _blocks(heads, h) for heads, t, h in ((q_heads, q_t, q_h), (k_heads, k_t, k_h))
    )
    in_layout: dict[str, int | None] = dict(zip("bth", (at_batch, at_tokens, at_heads), strict=True))
    in_cache: dict[str, int | None] = {"b": 0, "t": 1, "h": 2} if stores else in_layout
    axes = {"q": (q, in_layout), "p": (p, in_layout), "k": (k, in_layout), "v": (v, in_layout)}
    axes |= {"r": (r, in_cache), "w": (w, in_cache)}
    dense = all(strides[-1] == 1 for strides, _ in axes.values())
    of_tensors = {
        f"{name}_{axis}": 0 if at is None else strides[at]
        for name, (strides, where) in axes.items()
        for axis, at in where.items()
    }
    unit = _unit(list(of_tensors.values()), _VECTOR // dtype.itemsize) if dense else 1
    of_tables, table_dense, table_unit = _table_strides(table, cos, sin, of_table.itemsize, dtype.itemsize, interleaved)
    numbers = {
        "tokens": tokens,
        "q_heads": q_heads,
        "k_heads": k_heads,
        "q_programs": q_programs,
        "k_programs": k_programs,
        "block_size": cache[1] if stores else 1,
        "slot_count": cache[0] * cache[1] if stores else 0,
        "slots_b": slots[0] if stores and len(slots) == 2 else 0,
        "slots_t": slots[-1] if stores else 0,
        **{name: stride // unit for name, stride in of_tensors.items()},
        **{f"{name}_d": strides[-1] for name, (strides, _) in axes.items()},
        **{f"{name}_{axis}": x[i] for name, x in (("rs", rs), ("ws", ws)) for i, axis in enumerate("bth")},
        **{name: stride for name, stride in of_tables.items() if not name.endswith("_h")},
        "Q_BLOCK_T": q_t,
        "Q_BLOCK_H": q_h,
        "K_BLOCK_T": k_t,
        "K_BLOCK_H": k_h,
        "BLOCK_P": block_p,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "HALVINGS": block_d.bit_length() - 1,
        "HEAD_DIM": q_shape[-1],
        "V_DIM": v_shape[-1],
        "PAIRS": pairs,
        "OFFSET": offset,
        "INTERLEAVED": interleaved,
        "DENSE": dense,
        "ALIGN": unit,
        "TABLE_DENSE": table_dense,
        "TABLE_ALIGN": table_unit,
        "NORM": has_norm,
        "ADD_ONE": add_one,
        "EPS": eps,
        "STORES": stores,
        "SCALED": has_scales,
    }
    return Plan("step", q_programs + k_programs * (2 if has_values else 1), numbers, warps)


def angles_launch(
    positions: Tensor, phase_steps: Tensor, cos: Tensor, sin: Tensor, factor: float, axis: Tensor | None = None
) -> Launch:
    """Return the launch of `angles`."""
    arguments = positions, phase_steps if axis is None else axis, phase_steps, cos, sin
    return _angles_plan(cos.shape, _forms(arguments), factor, axis is not None), arguments


@functools.lru_cache(1024)
def _angles_plan(table: torch.Size, forms: _Forms, factor: float, several: bool) -> Plan:
    rows, pairs = math.prod(table[:-1]), table[-1]
    block_p = power_of_two(pairs)
    block_r = max(1, 512 // block_p)
    numbers = {
        "rows": rows,
        "FACTOR": factor,
        "PAIRS": pairs,
        "AXES": several,
        "BLOCK_R": block_r,
        "BLOCK_P": block_p,
    }
    return Plan("angles", _blocks(rows, block_r), numbers, 4)


def attention_launches(
    q: Tensor,
    far_q: Tensor | None,
    keys: Tensor,
    values: Tensor,
    visible: VisibleKeys,
    scale: float,
    out: Tensor,
) -> list[Launch]:
    """Return the launches of `attend` and, if keys are divided, of `combine`."""
    order, count, blocks, counts, window, sinks, key_scales, value_scales, ring = visible
    keys, values = _numbers(keys), _numbers(values)
    q = q if q.stride(-1) == 1 else q.contiguous()
    far_q = far_q if far_q is None or far_q.stride(-1) == 1 else far_q.contiguous()
    optional = key_scales, blocks, counts
    # In the place of a tensor that is None, another one is passed.
    arguments = (
        *(q, q if far_q is None else far_q, keys, values),
        *(q if key_scales is None else key_scales, q if value_scales is None else value_scales),
        order if blocks is None else blocks,
        *(order, order if counts is None else counts, out),
    )
    plan, of_combine = _attention_plans(
        (q.shape, keys.shape),
        _forms(arguments),
        tuple([x is not None for x in optional]),
        (count, window or 0, sinks, ring, scale),
        _processors(q.device),
        torch.version.hip is not None,
        division,
    )
    if of_combine is None:
        return [(plan, (*arguments, out))]
    floats = of_combine.numbers["queries"] * of_combine.numbers["splits"] * (q.shape[-1] + 2)
    work = torch.empty(floats, dtype=torch.float32, device=q.device)
    return [(plan, (*arguments, work)), (of_combine, (work, out))]


@functools.lru_cache(1024)
def _attention_plans(
    shapes: tuple[torch.Size, ...],
    forms: _Forms,
    given: tuple[bool, ...],
    numbers_of_keys: tuple[int, int, int, int, float],
    processors: int,
    is_amd: bool,
    division: Division,
) -> tuple[Plan, Plan | None]:
    (batch, tokens, heads, head_dim), (_, page, kv_heads, _) = shapes
    has_scales, has_blocks, has_counts = given
    count, window, sinks, ring, scale = numbers_of_keys
    dtypes, (q, f, k, v, ks, vs, blocks, order, counts, _) = zip(*forms, strict=True)
    dtype, group, queries = dtypes[0], heads // kv_heads, batch * tokens * heads
    block_d = max(16, power_of_two(head_dim))
    tile = _attention_tile(tokens * group, block_d, dtype.itemsize, dtypes[2].itemsize, is_amd)
    programs = batch * kv_heads * _blocks(tokens * group, tile.queries)
    # At most so many keys are seen: the tokens of a row follow each other.
    seen = min(count, sinks + window + tokens - 1) if window else count
    wanted = _blocks(division.programs * processors, max(1, programs))
    splits = max(1, min(wanted, _blocks(seen, division.least_keys)))
    strides = {
        f"{name}_{axis}": x[i] for name, x in zip("qfkv", (q, f, k, v), strict=True) for i, axis in enumerate("bth")
    }
    unit = _unit(list(strides.values()), _VECTOR // dtypes[2].itemsize)
    of_scales = {f"{name}_{axis}": x[i] for name, x in (("ks", ks), ("vs", vs)) for i, axis in enumerate("bth")}
    numbers = {
        "kv_heads": kv_heads,
        "group": group,
        "tokens": tokens,
        "count": 2**31 - 1 if ring else count,
        "window": window or 2**31 - 1,
        "sinks": sinks,
        "splits": splits,
        "queries": queries,
        **{name: stride // unit for name, stride in strides.items()},
        **of_scales,
        "blocks_b": blocks[0],
        "order_b": order[0],
        "order_t": order[1],
        "counts_b": counts[0],
        "SCALE": scale * math.log2(math.e),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_R": tile.queries,
        "BLOCK_N": tile.keys,
        "STAGES": tile.stages,
        "PAGE": page if has_blocks else 0,
        "FRONT": count - ring if ring else 0,
        "RING": ring,
        "COUNTS": has_counts,
        "SINKS": sinks > 0,
        "SPLIT": splits > 1,
        # How many numbers in the dtype of values, or bfloat16 if these have 8 bits, a weight is the sum of.
        "PARTS": {torch.float32: 1, torch.float16: 2}.get(dtypes[3], 3),
        "PRECISION": tile.precision,
        "ALIGN": unit,
        "SCALED": has_scales,
    }
    plan = Plan("attend", programs * splits, numbers, tile.warps, {})
    sizes = {"splits": splits, "queries": queries, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_S": 32}
    return plan, Plan("combine", queries, sizes, 4, {}) if splits > 1 else None


class _AttentionTile(NamedTuple):
    """The queries of a program, the keys that it reads at a time, and how."""

    queries: int
    keys: int
    warps: int
    stages: int
    precision: str = "ieee"


def _attention_tile(queries: int, block_d: int, size: int, kept: int, is_amd: bool) -> _AttentionTile:
    """Return the tile for the queries of a key head.

    In these, code for sm_90 spills no registers for heads of 128 channels. One query needs no matrix product, and its
    keys and values stay in registers, 8 KiB of each. Otherwise 16 KiB of each pass through shared memory, which
    suffices for two programs; or half as many keys if they have 8 bits, because registers hold their wider forms. A
    matrix product has at least 16 queries and keys.

    Args:
        size, kept: bytes of an element of the queries, and of the keys and values.
    """
    if queries == 1:
        return _AttentionTile(1, max(1, min(128, 8192 // (block_d * kept))), 4, 1)
    keys = max(16, min(128, 8192 // block_d) // (1 if kept == 2 else 2))
    if size == 2:
        wide = queries > 16 and (kept == 2 or block_d <= 256)
        return _AttentionTile(32 if wide else 16, keys, 8 if wide and kept == 2 else 4, 2)
    # Three products in TF32 are as exact as one in float32. AMD GPUs have the latter.
    fits = block_d <= 128 and not is_amd
    return _AttentionTile(16, keys, 4, 2, "tf32x3") if fits else _AttentionTile(16, keys, 8, 2)


@functools.cache
def _processors(device: torch.device) -> int:
    """Return the number of processors of a GPU. In Triton's interpreter, there are as many as in an H100."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def counts(shape: torch.Size, layout: Layout) -> tuple[int, int, int]:
    """Return the sizes of the axes batch, tokens and heads."""
    batch, tokens, heads, _ = AXES[layout]
    return 1 if batch is None else shape[batch], shape[tokens], shape[heads]


def _strides(forms: _Forms, layout: Layout, limit: int) -> tuple[dict[str, int], bool, int]:
    """Return the strides of q, k and their outputs, whether their channels are contiguous, and the unit of the strides.

    The unit is a power of two, up to `limit`, in elements. The strides of batch, tokens and heads count units. The
    strides of channels count elements.
    """
    named = {name: strides for name, (_, strides) in zip("qpkr", forms, strict=True)}
    dense = all(strides[-1] == 1 for strides in named.values())
    rows = {
        f"{name}_{axis}": 0 if at is None else strides[at]
        for name, strides in named.items()
        for axis, at in zip("bth", AXES[layout][:3], strict=True)
    }
    unit = _unit(list(rows.values()), limit) if dense else 1
    channels = {f"{name}_d": strides[-1] for name, strides in named.items()}
    return {name: stride // unit for name, stride in rows.items()} | channels, dense, unit


def _table_strides(
    shape: torch.Size,
    cos: tuple[int, ...],
    sin: tuple[int, ...],
    element_size: int,
    x_element_size: int,
    interleaved: bool,
) -> tuple[dict[str, int], bool, int]:
    """Return the strides of cos and sin, whether their pairs are contiguous, and the unit of the strides.

    Units are as in `_strides`. The stride is 0 along an axis that the tables lack or that has size 1.
    """
    axes = "bht" if len(shape) == 4 else "bt"[3 - len(shape) :]
    dense = cos[-1] == sin[-1] == 1 or shape[-1] == 1
    # With interleaved pairs, a thread holds both channels of half as many pairs, so its table loads are half as wide.
    limit = min(_VECTOR // x_element_size // (2 if interleaved else 1), _VECTOR // element_size)
    # The unit divides all strides, even that of a single row, so that one token and two tokens share a compilation.
    unit = _unit([*cos[:-1], *sin[:-1]], limit) if dense else 1
    strides = {"cos_p": cos[-1], "sin_p": sin[-1]}
    for name, table_strides in (("cos", cos), ("sin", sin)):
        for axis in "bth":
            at = axes.find(axis)
            strides[f"{name}_{axis}"] = 0 if at < 0 or shape[at] == 1 else table_strides[at] // unit
    return strides, dense, unit


def _unit(strides: list[int], limit: int) -> int:
    """Return the largest power of two, up to `limit`, that divides all strides."""
    while any(stride % limit for stride in strides):
        limit //= 2
    return limit


def _threads(element_size: int, block_p: int) -> tuple[int, int]:
    """Return the number of warps per program and the number of pairs per thread."""
    per_thread = max(1, tile.bytes // 2 // element_size)
    return min(32, max(tile.warps, block_p // per_thread // 32)), per_thread


def _tile(heads: int, block_p: int, warps: int, per_thread: int) -> tuple[int, int]:
    """Return the numbers of tokens and heads in a tile, such that each thread holds `per_thread` pairs."""
    rows = max(1, 32 * warps * per_thread // block_p)
    block_h = min(rows, power_of_two(max(1, heads)))
    return rows // block_h, block_h


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
