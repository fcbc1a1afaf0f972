"""Attention of new tokens over the keys and values in a cache, which is ropewalk's or anybody's pool of pages.

For a few tokens of each row, one kernel reads each key and value once, where it is. `_define` is what it computes.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import get_library_allowing_overwrite

from ropewalk import _checks
from ropewalk.attention.attend import attend
from ropewalk.attention.pairs import Pairs, order_in_ring
from ropewalk.kernels import backend, cpu, observed
from ropewalk.kernels.visible import VisibleKeys
from ropewalk.positions.sizes import can_read
from ropewalk.rotation.writable import check_memory

_WHO = "paged_attention"

MOST_TOKENS = 32
"""New tokens of a row, such as a token and the drafts after it, up to which this kernel is used."""
_MOST_ON_GPU = 8  # for more, the blocked products of PyTorch's attention are faster

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend_cached(
    q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, *, scale: float
) -> Tensor | None:
    """Attend over the visible keys in one kernel, if a kernel supports the call.

    The scores, the online softmax and the weighted sum are computed in float32, and the result is rounded once. No
    gradient is recorded.

    Args:
        q: rotated queries, `[batch, seq, heads, head_dim]`; float32, bfloat16 or float16.
        far_q: the queries for the sinks, of the same shape. None if all keys belong to q.
        keys, values: `[blocks, block_size, kv_heads, head_dim]` in the dtype of q, or int8 or float8_e4m3fn with
            scales, with any strides except along the channels, which are adjacent. Values may have another number of
            channels.
        visible: the keys, and the scales.
        scale: factor of the scores.

    Returns:
        A new tensor `[batch, seq, heads, channels of values]`, with 0 for a token that attends to no key. None if the
        caller must use PyTorch's attention: there are too many tokens, or a dynamic number of them; there is no kernel
        for these tensors, a gradient is recorded, a transform or a mode is active, or the program is exported or
        compiled for a GPU.
    """
    most = MOST_TOKENS if q.is_cpu else _MOST_ON_GPU
    if not isinstance(q.shape[1], int) or q.shape[1] > most:  # a graph for any number must not depend on it
        return None
    if not torch.compiler.is_compiling():
        return _run(q, far_q, keys, values, visible, scale)
    supported = backend.FAST_PATH and q.is_cpu and _fits(q, far_q, keys, values, visible)
    if not supported or torch.compiler.is_exporting():
        return None
    attended: Tensor = torch.ops.ropewalk.attend_cached.default(q, far_q, keys, values, *visible, scale)
    return attended


def _run(
    q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, scale: float
) -> Tensor | None:
    profiled = observed.is_profiled()
    with torch.profiler.record_function("ropewalk::attend_cached") if profiled else nullcontext():
        if not (backend.FAST_PATH and q.is_cpu):
            return _run_kernel(q, far_q, keys, values, visible, scale)
        order, count, blocks, counts, window, sinks, k_scales, v_scales, ring = visible
        at = blocks, count, order, counts, window or 0, sinks, k_scales, v_scales, ring
        attended: Tensor | None = cpu.attend_plain(q, far_q, keys, values, *at, scale, profiled)
        return attended


def _run_kernel(
    q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, scale: float
) -> Tensor | None:
    """Do the work of `attend_cached` with a backend. Return None if PyTorch's attention must be used."""
    kernels = backend.KERNELS.get(q.device.type)
    if kernels is None or kernels.attend is None or observed.has_mode():
        return None
    if not _fits(q, far_q, keys, values, visible):
        return None
    inputs = [x for x in (q, far_q, keys, values, *visible) if isinstance(x, Tensor)]
    if backend.kernel_for(*inputs) is not kernels:
        return None
    return kernels.attend(q, far_q, keys, values, visible, scale)


def _fits(q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys) -> bool:
    """Return whether a kernel supports dtypes and strides, and no gradient is recorded. C++ checks it as well."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, far_q, keys, values)):
        return False
    kept = (q.dtype,) if visible.key_scales is None else (torch.int8, torch.float8_e4m3fn)
    if q.dtype not in _DTYPES or keys.dtype not in kept or values.dtype != keys.dtype:
        return False
    return bool(keys.stride(-1) == values.stride(-1) == 1) and keys.shape[:3] == values.shape[:3]


# Under torch.compile the kernel is an operator. Exported programs use PyTorch's attention, which needs no ropewalk.
_library: Any = get_library_allowing_overwrite("ropewalk", "attend_cached")  # as in rotation/ops.py
_library.define(
    "attend_cached(Tensor q, Tensor? far_q, Tensor keys, Tensor values, Tensor order, SymInt count, Tensor? blocks, "
    "Tensor? counts, SymInt? window, SymInt sinks, Tensor? key_scales, Tensor? value_scales, "
    "SymInt ring, float scale) -> Tensor"
)


def _operator(q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, *of_visible: Any) -> Tensor:
    visible, scale = VisibleKeys(*of_visible[:-1]), of_visible[-1]
    with torch.no_grad():
        attended = _run(q, far_q, keys, values, visible, scale)
        return _define(q, far_q, keys, values, visible, scale) if attended is None else attended.contiguous()


def _define(
    q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, scale: float
) -> Tensor:
    """Do the same in plain PyTorch, where no kernel may run. It keeps all scores in memory."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group, seen = q.shape[2] // keys.shape[2], _seen(visible, q.device)
    k, v = (x.repeat_interleave(group, 2) for x in _gather(keys, values, visible, seen, wide))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), k)
    if far_q is not None:
        is_sink = torch.arange(visible.keys, device=q.device) < visible.sinks  # they are in the first slots of a ring
        scores = torch.where(is_sink, torch.einsum("bqhd,bkhd->bhqk", far_q.to(wide), k), scores)
    scores = (scale * scores).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1)[:, None, :, None], 0)
    attended = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return q.new_empty(attended.shape).copy_(attended)


def _seen(visible: VisibleKeys, device: torch.device) -> Tensor:
    """Return which keys each new token attends to, bool `[batch, seq, keys]`."""
    index = torch.arange(visible.keys, device=device)[None]
    if visible.ring:
        index = order_in_ring(visible.order.amax(1), visible.keys, visible.ring)
    seen = Pairs(visible.order, index, window=visible.window, sinks=visible.sinks).mask()[:, 0]
    return seen if visible.counts is None else seen & (index < visible.counts[:, None])[:, None]


def _gather(
    keys: Tensor, values: Tensor, visible: VisibleKeys, seen: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of each row in this dtype, `[batch, keys, kv_heads, head_dim]`, and 0 if unseen."""
    blocks, batch, unseen = visible.blocks, len(seen), ~seen.any(1)[:, :, None, None]  # unseen slots may hold NaN

    def rows_of(x: Tensor) -> Tensor:
        x = x[:batch] if blocks is None else x[blocks.long()].flatten(1, 2)
        return x[:, : visible.keys]

    def read(x: Tensor, scales: Tensor | None) -> Tensor:
        x = rows_of(x) if scales is None else rows_of(x).float() * rows_of(scales)[..., None]
        return x.to(dtype).masked_fill(unseen, 0)

    return read(keys, visible.key_scales), read(values, visible.value_scales)


_library.impl("attend_cached", _operator, "CPU")
_library.impl("attend_cached", lambda q, far_q, k, v, *_: q.new_empty((*q.shape[:3], v.shape[3])), "Meta")


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    sink_q: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Attend with the new tokens of each row (request) over its keys and values, which are in pages of your own pool.

    Store the new tokens first, e.g. with `rotate_and_store`. A token attends to itself and to the tokens before it in
    its row.

    For up to 32 new tokens of each row on the CPU, and 8 on a GPU, one kernel reads keys and values in place: for
    float32, bfloat16 and float16, and on a GPU for heads of up to 1 KiB in the dtype of q and values as wide as keys.
    Other calls copy the keys and values of the rows, for PyTorch's attention. So split long prompts into pieces of some
    hundred tokens.

    Args:
        q: rotated queries, `[batch, new, heads, head_dim]`; kv_heads divides heads. The last token of row i is token
            `lengths[i]` - 1. If rows have different numbers of new tokens, pad them in front. What is returned for
            padding has no meaning, but the tokens that it attends to must be in the pool as well.
        k_cache, v_cache: rotated keys, and values, `[blocks, block_size, kv_heads, head_dim]` with any strides, in the
            dtype of q; or int8 or float8_e4m3fn with `k_scales` and `v_scales`. For blocks with heads before tokens,
            pass `transpose(1, 2)`. Values may have another number of channels, as in `k_cache[..., :512]` of DeepSeek.
        block_table: token t of row i is in block `block_table[i, t // block_size]`, int32 `[batch, most blocks]`.
            Entries of blocks that no new token attends to, such as those behind `lengths`, may be any number.
        lengths: number of tokens of each row, the new ones included, int32 or int64 `[batch]`.
        scale: factor of the scores. None means head_dim^(-1/2).
        window: number of tokens that each token attends to, itself included. None means no limit.
        sinks: with window, number of first tokens of a row to which each later token attends as well (StreamingLLM).
            These are tokens with keys and values. The learned logits that gpt-oss calls sinks are something else, and
            not supported.
        sink_q: queries for the sinks, of the shape of q, if they have another rotation: StreamingLLM rotates them to
            position min(t, sinks + window - 1) for token t. None means q.
        k_scales, v_scales: factor of each token and head of keys and of values in 8 bits, float32 `[blocks, block_size,
            kv_heads]`, as `rotate_and_store` writes them. For one factor, pass `factor.expand(k_cache.shape[:3])`.

    Returns:
        `[batch, new, heads, channels of v_cache]` in the dtype of q. It is 0 for a token that attends to nothing.

    Raises:
        RopeError: a shape, dtype or device does not match, an input requires gradients, or, on the CPU outside of
            torch.compile, a row is longer than its blocks, or a block that it needs is not in the pool. On other
            devices, the table is not read back, and another block of the pool is read instead.
    """
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "lengths": lengths}
    optional = {"sink_q": sink_q, "k_scales": k_scales, "v_scales": v_scales}
    _check(tensors, {name: x for name, x in optional.items() if x is not None}, window, sinks)
    scale = q.shape[3] ** -0.5 if scale is None else _checks.number(_WHO, "scale", scale)
    new, (blocks, block_size) = q.shape[1], k_cache.shape[:2]
    counts = lengths.long().contiguous()
    visible = VisibleKeys(
        counts[:, None] - new + torch.arange(new, device=q.device),
        block_table.shape[1] * block_size,
        blocks=block_table.clamp(0, blocks - 1).contiguous(),
        counts=counts,
        window=window,
        sinks=sinks,
        key_scales=k_scales,
        value_scales=v_scales,
    )
    attended = attend_cached(q, sink_q, k_cache, v_cache, visible, scale=scale)
    if attended is None and sink_q is not None:
        attended = _define(q, sink_q, k_cache, v_cache, visible, scale)
    if attended is None:
        seen = _seen(visible, q.device)
        k, v = _gather(k_cache, v_cache, visible, seen, q.dtype)
        attended = attend(q, k, v, mask=seen[:, None], scale=scale)
        attended = attended.masked_fill(~seen.any(-1)[:, :, None, None], 0)
    return attended


def _check(tensors: dict[str, Tensor], optional: dict[str, Tensor], window: int | None, sinks: int) -> None:
    """Raise unless the arguments of `paged_attention` match."""
    given = {**tensors, **optional}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise _checks.error(_WHO, f"{name} must be a tensor", _checks.shown(x), f"Pass a torch.Tensor as {name}.")
    q, k_cache, v_cache, table, lengths = tensors.values()
    if q.ndim != 4 or q.dtype not in (*_DTYPES, torch.float64) or not q.shape[3]:
        must = "q must be [batch, new, heads, head_dim], in float16, bfloat16, float32 or float64"
        fix = "Pass q[:, None] if each row has one new token. Otherwise pad the rows in front."
        raise _checks.error(_WHO, must, _checks.describe(q), fix)
    (batch, _, heads, head_dim), shape = q.shape, k_cache.shape
    if len(shape) != 4 or 0 in shape or shape[3] != head_dim or heads % shape[2]:
        must = (
            f"k_cache must be [blocks, block_size, kv_heads, {head_dim}], where kv_heads divides the {heads} heads of q"
        )
        fix = "Pass k_cache.transpose(1, 2) of blocks with the heads before the tokens."
        raise _checks.error(_WHO, must, _checks.describe(k_cache), fix)
    if v_cache.ndim != 4 or v_cache.shape[:3] != shape[:3] or not v_cache.shape[3]:
        must = f"v_cache must have the blocks, tokens and heads of k_cache, {tuple(shape[:3])}"
        raise _checks.error(_WHO, must, _checks.describe(v_cache), "Only the last axis may have another size.")
    kept = (torch.int8, torch.float8_e4m3fn) if "k_scales" in optional else (q.dtype,)
    if (
        k_cache.dtype not in kept
        or v_cache.dtype != k_cache.dtype
        or ("k_scales" in optional) != ("v_scales" in optional)
    ):
        must = f"k_cache and v_cache must be {q.dtype} as q is, or int8 or float8_e4m3fn with k_scales and v_scales"
        scales = " and ".join(name for name in ("k_scales", "v_scales") if name in optional)
        got = f"{k_cache.dtype} and {v_cache.dtype} {f'with {scales}' if scales else 'without scales'}"
        fix = "Pass k_scales and v_scales for numbers in 8 bits, and for bytes of FP8 x.view(torch.float8_e4m3fn)."
        raise _checks.error(_WHO, must, got, fix)
    shapes = {
        "block_table": ((batch, table.shape[-1] if table.ndim else 0), (torch.int32,)),
        "lengths": ((batch,), (torch.int32, torch.int64)),
        "sink_q": (q.shape, (q.dtype,)),
        "k_scales": (shape[:3], (torch.float32,)),
        "v_scales": (shape[:3], (torch.float32,)),
    }
    for name, x in [(name, given[name]) for name in shapes if name in given]:
        expected, dtypes = shapes[name]
        if x.shape != expected or x.dtype not in dtypes:
            must = f"{name} must be {' or '.join(map(str, dtypes))} of shape {tuple(expected)}"
            fix = "Convert it once for all layers."
            if name in ("k_scales", "v_scales") and x.shape != expected:
                fix = "Pass k_cache.transpose(1, 2) of blocks with the heads before the tokens, and v_cache likewise."
            raise _checks.error(_WHO, must, _checks.describe(x), fix)
    if any(x.device != q.device for x in given.values()):
        got = ", ".join(f"{name} on {x.device}" for name, x in given.items())
        raise _checks.error(_WHO, "all tensors must be on one device", got, "Move them to the device of the pool.")
    if torch.is_grad_enabled() and any(x.requires_grad for x in given.values()):
        fix = "Run under torch.no_grad() or torch.inference_mode()."
        raise _checks.error(_WHO, "gradients cannot pass through a cache", "tensors that require one", fix)
    if window is not None:
        _checks.length(_WHO, "window", window)
    sinks = _checks.integer(_WHO, "sinks", sinks, at_least=0)
    if (sinks and window is None) or ("sink_q" in optional and not sinks):
        must, got = "sinks must come with window, and sink_q with sinks", f"window={window} and sinks={sinks}"
        raise _checks.error(_WHO, must, got, "Without a window, all tokens are seen anyway: omit sinks and sink_q.")
    check_memory(_WHO, *given.values())
    if can_read(table) and can_read(lengths) and batch:
        _check_blocks(table, lengths, shape[0], shape[1], q.shape[1], window, sinks)


def _check_blocks(
    table: Tensor, lengths: Tensor, blocks: int, block_size: int, new: int, window: int | None, sinks: int
) -> None:
    """Raise unless every row has the tokens that its last `new` tokens attend to in blocks of the pool."""
    of_rows = lengths.tolist()  # faster than two comparisons of tensors
    low, high = min(of_rows), max(of_rows)
    if low < 0 or high > table.shape[1] * block_size:
        must = f"lengths must be from 0 to {table.shape[1] * block_size}, the slots of a row of block_table"
        raise _checks.error(_WHO, must, str(low if low < 0 else high), "Add the new blocks to the table first.")
    outside = (table < 0) | (table >= blocks)
    if not outside.any():
        return
    start = torch.arange(table.shape[1]) * block_size
    needed, fix = start < lengths[:, None], "with a block for each token of a row"
    if window is not None:
        needed &= (start + block_size > lengths[:, None] - (window + new - 1)) | (start < sinks)
        fix = f"and free no block of the last {window + new - 1} tokens of a row (window + new - 1: padding is new)"
        fix += " or of the sinks" if sinks else ""
    if len(wrong := (outside & needed).nonzero()):
        row, column = wrong[0].tolist()
        must = f"each block that a new token attends to must be from 0 to {blocks - 1}, the blocks of k_cache"
        got = f"{int(table[row, column])} in block_table[{row}, {column}]"
        raise _checks.error(_WHO, must, got, f"Pass the table of this pool, {fix}.")
