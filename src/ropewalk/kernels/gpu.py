"""Probe and launch the kernels of `triton_kernels.py`, and choose their tiles. Implements `backend.Kernels`.

Triton is imported, and kernels are compiled, only when a GPU is used.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ropewalk._layout import AXES, Layout, Options

device_name = "GPU"

_T = TypeVar("_T")

# Four warps per program. Each thread holds this many bytes of rotated channels, in loads of 16 bytes. More bytes make
# address arithmetic cheaper; fewer leave registers for more concurrent programs.
_WARPS = 4
_BYTES_PER_THREAD = 64
_VECTOR = 16
# Half as many in the fused step, because its squares are float64.
_BYTES_PER_THREAD_OF_STEP = 32

# Products are rounded before they are added, as in the reference. Triton's default would fuse them.
_OPTIONS = {"enable_fp_fusion": False}

# The keys of a cache are divided until there are so many programs for each processor. Each has at least so many keys
# that its result is small in comparison.
_PROGRAMS_PER_PROCESSOR = 4
_LEAST_KEYS = 256


def unavailable(device: torch.device | None = None) -> str | None:
    """Return why the GPU kernels cannot be used on a device, or None if they can.

    The first call for each GPU compiles and launches the smallest kernel as a probe.
    """
    if device in _reasons:  # every call passes here
        return _reasons[device]
    if device is not None and device.type != "cuda":
        return f"these kernels are for GPUs, not for {device}"
    if not torch.cuda.is_available():
        return "no GPU found"
    index = None if device is None else device.index
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if device not in _reasons:
        if torch.cuda.is_current_stream_capturing():
            return None  # a probe cannot run during capture; an unusable kernel raises when it is launched
        _reasons[device] = _probe(device)
    return _reasons[device]


_reasons: dict[torch.device | None, str | None] = {}


def _probe(device: torch.device) -> str | None:
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16 (compute capability 8.0 or higher is needed)"
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        angles(zero, zero, 1.0, torch.float32)
    except ImportError as e:
        return f"Triton is not installed ({e})"
    except Exception as e:  # Triton has no common error for missing parts, such as a C compiler
        return f"Triton cannot compile or launch a kernel here ({type(e).__name__}: {e})"
    return None


def version() -> str:
    """Return the version of Triton and the name of the GPU."""
    import triton

    return f"Triton {triton.__version__} on {torch.cuda.get_device_name()}"


def rotate(
    tensors: list[Tensor],
    outputs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    options: Options,
) -> None:
    """Rotate tensors into outputs, as `Kernels.rotate` specifies."""
    _launch("rotate", *rotation_launch(tensors, outputs, cos, sin, options))


def table_gradient(
    tensors: list[Tensor],
    grads: list[Tensor],
    pairs: int,
    options: Options,
    per_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to cos and sin, as `Kernels.table_gradient` specifies."""
    x = tensors[0]
    batch, tokens, heads = _counts(x.shape, options.layout)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = (batch, *((heads,) if per_head else ()), tokens, pairs)
    d_cos, d_sin = (torch.empty(shape, dtype=dtype, device=x.device) for _ in range(2))
    _launch("table_gradient", *gradient_launch(tensors, grads, d_cos, d_sin, options))
    return d_cos, d_sin


def angles(
    positions: Tensor, phase_steps: Tensor, factor: float, dtype: torch.dtype, axis: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions, as `Kernels.angles` specifies."""
    positions = positions.contiguous()
    shape = positions.shape if axis is None else positions.shape[1:]
    cos, sin = (torch.empty((*shape, len(phase_steps)), dtype=dtype, device=positions.device) for _ in range(2))
    _launch("angles", *angles_launch(positions, phase_steps, cos, sin, factor, axis))
    return cos, sin


def step(
    tensors: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    options: Options,
    norm: tuple[Tensor, Tensor, float, bool] | None,
    store: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """Normalize, rotate and store, as `backend.FusedStep` specifies."""
    _launch("step", *step_launch(tensors, outputs, cos, sin, options, norm, store))


def attend(
    q: Tensor,
    far_q: Tensor | None,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor | None,
    count: int,
    order: Tensor,
    first: Tensor | None,
    counts: Tensor | None,
    window: int,
    sinks: int,
    scale: float,
) -> Tensor | None:
    """Attend over the keys of a cache, as `backend.CachedAttention` specifies, with heads of up to 1 KiB."""
    if _power_of_two(q.shape[-1]) * q.element_size() > 1024:
        return None  # some GPUs have too little shared memory
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launches = attention_launches(
        q, far_q, keys, values, blocks, count, order, first, counts, out, window, sinks, scale
    )
    for kernel, programs, arguments, warps in launches:
        _launch(kernel, programs, arguments, warps, options={})
    return out


def kernels() -> ModuleType:
    """Import the module of the kernels, and with it Triton. Return the module."""
    from ropewalk.kernels import triton_kernels

    return triton_kernels


def _launch(
    kernel: str, programs: int, arguments: dict[str, Any], warps: int, options: dict[str, Any] = _OPTIONS
) -> None:
    if programs:
        device = next(iter(arguments.values())).device
        # Triton launches kernels on the current device, even if the tensors are on another one.
        elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
        with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
            getattr(kernels(), kernel)[(programs,)](**arguments, num_warps=warps, **options)


def rotation_launch(
    tensors: list[Tensor], outputs: list[Tensor], cos: Tensor, sin: Tensor, options: Options
) -> tuple[int, dict[str, Any], int]:
    """Return the number of programs, the arguments and the warps for a launch of `rotate`."""
    x = tensors[0]
    programs, numbers, warps = _rotation_plan(
        tuple(z.shape for z in tensors),
        tuple(z.stride() for z in tensors),
        tuple(z.stride() for z in outputs),
        (cos.shape, cos.stride(), sin.stride(), cos.element_size()),
        x.element_size(),
        options,
        (outputs[0] is x, _WARPS, _BYTES_PER_THREAD),
    )
    return programs, {**_name_arguments("qpkr", tensors, outputs), "cos": cos, "sin": sin, **numbers}, warps


@functools.lru_cache(1024)  # the plan is the same at every layer and at every decoded token
def _rotation_plan(
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    out_strides: tuple[tuple[int, ...], ...],
    tables: tuple[torch.Size, tuple[int, ...], tuple[int, ...], int],
    element_size: int,
    options: Options,
    others: tuple[bool, int, int],
) -> tuple[int, dict[str, int], int]:
    layout, interleaved, offset, inverse = options
    in_place, *_ = others
    pairs, (batch, tokens, q_heads) = tables[0][-1], _counts(shapes[0], layout)
    k_heads = _counts(shapes[1], layout)[2] if len(shapes) == 2 else 0
    block_p = _power_of_two(pairs)
    warps, per_thread = _threads(element_size, block_p)
    q_t, q_h = _tile(q_heads, block_p, warps, per_thread)
    k_t, k_h = _tile(k_heads, block_p, warps, per_thread)
    q_programs = batch * _blocks(tokens, q_t) * _blocks(q_heads, q_h)
    k_programs = batch * _blocks(tokens, k_t) * _blocks(k_heads, k_h)
    of_tensors, dense, unit = _strides(strides, out_strides, layout, _VECTOR // element_size)
    of_tables, table_dense, table_unit = _table_strides(*tables, element_size, interleaved)
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
        "HEAD_DIM": shapes[0][-1],
        "PAIRS": pairs,
        "OFFSET": offset,
        "INTERLEAVED": interleaved,
        "INVERSE": inverse,
        "COPY": not in_place,
        "DENSE": dense,
        "ALIGN": unit,
        "TABLE_DENSE": table_dense,
        "TABLE_ALIGN": table_unit,
        "PER_HEAD": len(tables[0]) == 4,
    }
    return q_programs + k_programs, numbers, warps


def gradient_launch(
    tensors: list[Tensor], grads: list[Tensor], d_cos: Tensor, d_sin: Tensor, options: Options
) -> tuple[int, dict[str, Any], int]:
    """Return the number of programs, the arguments and the warps for a launch of `table_gradient`."""
    layout, interleaved, offset, _ = options
    pairs, size, per_head = d_cos.shape[-1], tensors[0].element_size(), d_cos.ndim == 4
    batch, tokens, q_heads = _counts(tensors[0].shape, layout)
    k_heads = _counts(tensors[1].shape, layout)[2] if len(tensors) == 2 else 0
    block_p = _power_of_two(pairs)
    warps, per_thread = _threads(size, block_p)
    block_t, block_h = _tile(max(q_heads, k_heads), block_p, warps, per_thread)
    strides, grad_strides = tuple(x.stride() for x in tensors), tuple(x.stride() for x in grads)
    of_tensors, dense, unit = _strides(strides, grad_strides, layout, _VECTOR // size)
    arguments = {
        **_name_arguments("qpkr", tensors, grads),
        "d_cos": d_cos,
        "d_sin": d_sin,
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
    return programs, arguments, warps


def step_launch(
    tensors: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    options: Options,
    norm: tuple[Tensor, Tensor, float, bool] | None,
    store: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[int, dict[str, Any], int]:
    """Return the number of programs, the arguments and the warps for a launch of `step`."""
    layout, interleaved, offset, _ = options
    (q, k), (p, r), (at_batch, at_tokens, at_heads, _) = tensors, outputs, AXES[layout]
    q_weight, k_weight, eps, add_one = (q, k, 0.0, False) if norm is None else norm
    v, w, slots = (k, r, k) if store is None else store
    batch, tokens, q_heads = 1 if at_batch is None else q.shape[at_batch], q.shape[at_tokens], q.shape[at_heads]
    k_heads, pairs, size = k.shape[at_heads], cos.shape[-1], q.element_size()
    block_p, block_d = _power_of_two(pairs), _power_of_two(q.shape[-1])
    per_thread = _BYTES_PER_THREAD_OF_STEP // 2 // size
    warps = min(32, max(4, block_p // per_thread // 32))
    (q_t, q_h), (k_t, k_h) = (_tile(heads, block_p, warps, per_thread) for heads in (q_heads, k_heads))
    q_programs, k_programs = (
        batch * _blocks(tokens, t) * _blocks(heads, h) for heads, t, h in ((q_heads, q_t, q_h), (k_heads, k_t, k_h))
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
    unit = _unit(list(strides.values()), _VECTOR // size) if dense else 1
    of_tables, table_dense, table_unit = _table_strides(
        cos.shape, cos.stride(), sin.stride(), cos.element_size(), size, interleaved
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
        "OFFSET": offset,
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


def angles_launch(
    positions: Tensor, phase_steps: Tensor, cos: Tensor, sin: Tensor, factor: float, axis: Tensor | None = None
) -> tuple[int, dict[str, Any], int]:
    """Return the number of programs, the arguments and the warps for a launch of `angles`."""
    rows, pairs = positions.numel() // (1 if axis is None else positions.shape[0]), len(phase_steps)
    block_p = _power_of_two(pairs)
    block_r = max(1, 512 // block_p)
    several = axis is not None
    tensors = {
        "positions": positions,
        "axis": axis if several else phase_steps,
        "phase_steps": phase_steps,
        "cos": cos,
        "sin": sin,
    }
    sizes = {"rows": rows, "FACTOR": factor, "PAIRS": pairs, "AXES": several, "BLOCK_R": block_r, "BLOCK_P": block_p}
    return _blocks(rows, block_r), {**tensors, **sizes}, _WARPS


def attention_launches(
    q: Tensor,
    far_q: Tensor | None,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor | None,
    count: int,
    order: Tensor,
    first: Tensor | None,
    counts: Tensor | None,
    out: Tensor,
    window: int,
    sinks: int,
    scale: float,
) -> list[tuple[str, int, dict[str, Any], int]]:
    """Return the launches of `attend` and, if keys are divided, of `combine`: name, programs, arguments and warps."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    far_q = far_q if far_q is None or far_q.stride(-1) == 1 else far_q.contiguous()
    (batch, tokens, heads, head_dim), kv_heads, size = q.shape, keys.shape[2], q.element_size()
    group, queries, block_d = heads // kv_heads, batch * tokens * heads, max(16, _power_of_two(head_dim))
    tile = _attention_tile(tokens * group, block_d, size)
    programs = batch * kv_heads * _blocks(tokens * group, tile.queries)
    # At most so many keys are seen: the tokens of a row follow each other.
    seen = min(count, window + tokens - 1) if window else count
    wanted = _blocks(_PROGRAMS_PER_PROCESSOR * _processors(q.device), max(1, programs))
    splits = max(1, min(wanted, _blocks(seen, _LEAST_KEYS)))
    work = out
    if splits > 1:
        work = torch.empty(queries * splits * (head_dim + 2), dtype=torch.float32, device=q.device)
    strides = {
        f"{name}_{axis}": stride
        for name, x in (("q", q), ("f", far_q), ("k", keys), ("v", values))
        for axis, stride in zip("bth", (0, 0, 0) if x is None else x.stride(), strict=False)
    }
    unit = _unit(list(strides.values()), _VECTOR // size)
    arguments = {
        "q": q,
        "far_q": q if far_q is None else far_q,
        "keys": keys,
        "values": values,
        "blocks": order if blocks is None else blocks,
        "order": order,
        "first": order if first is None else first,
        "counts": order if counts is None else counts,
        "out": out,
        "work": work,
        "kv_heads": kv_heads,
        "group": group,
        "tokens": tokens,
        "count": count,
        "window": window or 2**31 - 1,
        "sinks": sinks,
        "splits": splits,
        "queries": queries,
        **{name: stride // unit for name, stride in strides.items()},
        "blocks_b": 0 if blocks is None else blocks.stride(0),
        "order_b": order.stride(0),
        "order_t": order.stride(1),
        "first_b": 0 if first is None else first.stride(0),
        "counts_b": 0 if counts is None else counts.stride(0),
        "SCALE": scale * math.log2(math.e),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_R": tile.queries,
        "BLOCK_N": tile.keys,
        "STAGES": tile.stages,
        "PAGE": 0 if blocks is None else keys.shape[1],
        "FIRST": first is not None,
        "COUNTS": counts is not None,
        "FAR": far_q is not None,
        "SPLIT": splits > 1,
        # How many 16-bit numbers a weight is the sum of.
        "PARTS": {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}[q.dtype],
        "PRECISION": tile.precision,
        "ALIGN": unit,
    }
    launches = [("attend", programs * splits, arguments, tile.warps)]
    if splits > 1:
        sizes = {"splits": splits, "queries": queries, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_S": 32}
        launches.append(("combine", queries, {"work": work, "out": out, **sizes}, 4))
    return launches


class _AttentionTile(NamedTuple):
    """The queries of a program, the keys that it reads at a time, and how."""

    queries: int
    keys: int
    warps: int
    stages: int
    precision: str = "ieee"


def _attention_tile(queries: int, block_d: int, size: int) -> _AttentionTile:
    """Return the tile for the queries of a key head. In these, code for sm_90 spills no registers.

    One query needs no matrix product, and its keys and values stay in registers, 8 KiB of each. Otherwise 16 KiB of
    each pass through shared memory, which suffices for two programs. A matrix product has at least 16 queries and keys.
    """
    row = block_d * size
    if queries == 1:
        return _AttentionTile(1, max(1, min(128, 8192 // row)), 4, 1)
    keys = max(16, min(128, 16384 // row))
    if size == 2:
        return _AttentionTile(16, keys, 4, 2) if queries <= 16 else _AttentionTile(32, keys, 8, 2)
    # Three products in TF32 are as exact as one in float32. AMD GPUs have the latter.
    fits = block_d <= 128 and not torch.version.hip
    return _AttentionTile(16, keys, 4, 2, "tf32x3") if fits else _AttentionTile(16, keys, 8, 2)


@functools.cache
def _processors(device: torch.device) -> int:
    """Return the number of processors of a GPU. In Triton's interpreter, there are as many as in an H100."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _counts(shape: torch.Size, layout: Layout) -> tuple[int, int, int]:
    """Return the sizes of the axes batch, tokens and heads."""
    batch, tokens, heads, _ = AXES[layout]
    return 1 if batch is None else shape[batch], shape[tokens], shape[heads]


def _name_arguments(names: str, inputs: Sequence[_T], outputs: Sequence[_T]) -> dict[str, _T]:
    """Map the names of the kernel's arguments to q, its output, k and its output. Without k, q is passed twice."""
    return dict(zip(names, (inputs[0], outputs[0], inputs[-1], outputs[-1]), strict=True))


def _strides(
    in_strides: tuple[tuple[int, ...], ...], out_strides: tuple[tuple[int, ...], ...], layout: Layout, limit: int
) -> tuple[dict[str, int], bool, int]:
    """Return the strides of q, k and their outputs, whether their channels are contiguous, and the unit of the strides.

    The unit is a power of two, up to `limit`, in elements. The strides of batch, tokens and heads count units. The
    strides of channels count elements.
    """
    named = _name_arguments("qpkr", in_strides, out_strides)
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
    per_thread = _BYTES_PER_THREAD // 2 // element_size
    return min(32, max(_WARPS, block_p // per_thread // 32)), per_thread


def _tile(heads: int, block_p: int, warps: int, per_thread: int) -> tuple[int, int]:
    """Return the numbers of tokens and heads in a tile, such that each thread holds `per_thread` pairs."""
    rows = max(1, 32 * warps * per_thread // block_p)
    block_h = min(rows, _power_of_two(max(1, heads)))
    return rows // block_h, block_h


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
