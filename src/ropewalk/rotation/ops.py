"""Dispatch rotations to a kernel or the reference, and differentiate them.

Plain tensors and shards of DTensors on the CPU or a GPU are rotated by the compiled kernels, which are registered as
private operators of `torch.library`. When no dispatch mode or profiler is active, the kernel is called directly:
skipping the dispatcher saves a third of the time for one token on the CPU.

All other tensors are rotated by the reference in plain PyTorch. The reference is also used under torch.func transforms,
forward-mode AD, torch.compile and export. There, an operator or an autograd.Function would silently give no gradient or
a wrong one (tests/rotation/test_transforms.py shows each case).

The backward pass rotates the gradients by minus the angle, so it needs only the tables. Only the gradients of learned
tables also need the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk._dtensor import is_dtensor
from ropewalk._layout import Layout, Pairing
from ropewalk.kernels import backend
from ropewalk.kernels.backend import PLAIN, Kernels
from ropewalk.rotation import checks, sharded, writable
from ropewalk.rotation.reference import rotate_in_layout
from ropewalk.rotation.reference import table_gradient as _table_gradient_by_reference

_library: Any = torch.library.Library("ropewalk", "DEF")  # type: ignore[no-untyped-call]
_OPTIONS = "bool interleaved, int rotary_offset, bool inverse"
_library.define(f"rotate(Tensor[] tensors, Tensor cos, Tensor sin, str layout, {_OPTIONS}) -> Tensor[]")
_library.define(f"rotate_(Tensor(a!)[] tensors, Tensor cos, Tensor sin, str layout, {_OPTIONS}) -> ()")


# Variants for one tensor or two, because a sharding rule cannot describe a list of tensors. They take the layout as a
# number; `sharded.NUMBERS` explains why.
_TABLES = "Tensor cos, Tensor sin, int layout"
_library.define(f"rotate_one(Tensor x, {_TABLES}, {_OPTIONS}) -> Tensor")
_library.define(f"rotate_pair(Tensor q, Tensor k, {_TABLES}, {_OPTIONS}) -> (Tensor, Tensor)")
_library.define(f"rotate_one_(Tensor(a!) x, {_TABLES}, {_OPTIONS}) -> Tensor(a!)")


def _is_observed() -> bool:
    """Return whether a dispatch mode or a profiler must see each operator."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
    )


def _rotate_to_new(kernel: Kernels, tensors: list[Tensor], cos: Tensor, sin: Tensor, *options: Any) -> list[Tensor]:
    outputs = [torch.empty_like(x) for x in tensors]
    kernel.rotate(tensors, outputs, cos, sin, *options)
    return outputs


def _rotate_in_place(kernel: Kernels, tensors: list[Tensor], cos: Tensor, sin: Tensor, *options: Any) -> None:
    kernel.rotate(tensors, tensors, cos, sin, *options)


def _rotate_meta(tensors: list[Tensor], cos: Tensor, sin: Tensor, *_: Any) -> list[Tensor]:
    checks.check_all_meta([*tensors, cos, sin])
    return [torch.empty_like(x) for x in tensors]


def _rotate_meta_(tensors: list[Tensor], cos: Tensor, sin: Tensor, *_: Any) -> None:
    checks.check_all_meta([*tensors, cos, sin])


def _checked_rotate(
    kernel: Kernels, tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout, *options: Any
) -> list[Tensor]:
    checks.check_operator_arguments(tensors, cos, sin, layout, options[1], in_place=False)
    return _rotate_to_new(kernel, tensors, cos, sin, layout, *options)


def _checked_rotate_(
    kernel: Kernels, tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout, *options: Any
) -> None:
    checks.check_operator_arguments(tensors, cos, sin, layout, options[1], in_place=True)
    _rotate_in_place(kernel, tensors, cos, sin, layout, *options)


def _adapt_one(
    many: Callable[..., list[Tensor]], x: Tensor, cos: Tensor, sin: Tensor, layout: int, *options: Any
) -> Tensor:
    return many([x], cos, sin, sharded.layout_of(layout), *options)[0]


def _adapt_pair(
    many: Callable[..., list[Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: int, *options: Any
) -> tuple[Tensor, Tensor]:
    rotated = many([q, k], cos, sin, sharded.layout_of(layout), *options)
    return rotated[0], rotated[1]


def _adapt_one_(many: Callable[..., None], x: Tensor, cos: Tensor, sin: Tensor, layout: int, *options: Any) -> Tensor:
    many([x], cos, sin, sharded.layout_of(layout), *options)
    return x


# Any code may call an operator, so operators check their arguments. `rotate` and `rotate_` below receive checked
# tensors. The dispatch key "CUDA" includes AMD GPUs.
for _kernel, _key in ((backend.CPU, "CPU"), (backend.GPU, "CUDA")):
    _library.impl("rotate", partial(_checked_rotate, _kernel), _key)
    _library.impl("rotate_", partial(_checked_rotate_, _kernel), _key)
    _library.impl("rotate_one", partial(_adapt_one, partial(_checked_rotate, _kernel)), _key)
    _library.impl("rotate_pair", partial(_adapt_pair, partial(_checked_rotate, _kernel)), _key)
    _library.impl("rotate_one_", partial(_adapt_one_, partial(_checked_rotate_, _kernel)), _key)
_library.impl("rotate", _rotate_meta, "Meta")
_library.impl("rotate_", _rotate_meta_, "Meta")
_library.impl("rotate_one", partial(_adapt_one, _rotate_meta), "Meta")
_library.impl("rotate_pair", partial(_adapt_pair, _rotate_meta), "Meta")
_library.impl("rotate_one_", partial(_adapt_one_, _rotate_meta_), "Meta")
_rotate = torch.ops.ropewalk.rotate.default
_rotate_ = torch.ops.ropewalk.rotate_.default
_rotate_one = torch.ops.ropewalk.rotate_one.default
_rotate_pair = torch.ops.ropewalk.rotate_pair.default
_rotate_one_ = torch.ops.ropewalk.rotate_one_.default


def _by_reference(tensors: list[Tensor], cos: Tensor, sin: Tensor, **options: Any) -> list[Tensor]:
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which raises for meta tensors
        return rotate_in_layout(tensors, cos, sin, **options)
    with torch.autocast(device, enabled=False):  # under autocast, torch.cat refuses to mix float16 and bfloat16
        return rotate_in_layout(tensors, cos, sin, **options)


def rotate(
    tensors: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    layout: Layout,
    pairing: Pairing,
    rotary_offset: int,
    inverse: bool = False,
) -> list[Tensor]:
    """Rotate q, or q and k, into new tensors, differentiably.

    Args:
        tensors: one or two tensors in `layout`, already checked against the tables.
        cos, sin: `[pairs]`, `[seq, pairs]`, `[batch, seq, pairs]`, or per head `[batch, heads, seq, pairs]`.
        pairing, rotary_offset: as in `Rotation`.
        layout: order of the axes of the tensors.
        inverse: whether to rotate by minus the angle. The result is still multiplied by the attention factor, because
            this is the transpose of the rotation and not its inverse.
    """
    one_call = True
    if type(tensors[0]) not in PLAIN and is_dtensor(tensors[0]):
        one_call = sharded.can_share_tables(tensors[0], tensors[-1])
        cos, sin = sharded.redistribute_tables(cos, sin, tensors[0], layout) if one_call else (cos, sin)
    kernel = backend.kernel_for(*tensors, cos, sin)
    if kernel is None and one_call and backend.needs_tracing():
        return _by_reference(
            tensors, cos, sin, layout=layout, pairing=pairing, rotary_offset=rotary_offset, inverse=inverse
        )
    if len(tensors) == 2 and not (one_call and checks.can_share_call(tensors[0], tensors[1], layout)):
        options: dict[str, Any] = {
            "layout": layout,
            "pairing": pairing,
            "rotary_offset": rotary_offset,
            "inverse": inverse,
        }
        return [rotate([x], cos, sin, **options)[0] for x in tensors]
    if torch.is_grad_enabled() and (tensors[0].requires_grad or cos.requires_grad or sin.requires_grad):
        checks.check_saveable(cos)
        rotated: tuple[Tensor, ...] = _Rotate.apply(  # type: ignore[no-untyped-call]
            kernel, cos, sin, layout, pairing, rotary_offset, inverse, *tensors
        )
        return list(rotated)
    return _run(kernel, tensors, cos, sin, layout, pairing, rotary_offset, inverse)


def _run(kernel: Kernels | None, tensors: list[Tensor], cos: Tensor, sin: Tensor, *options: Any) -> list[Tensor]:
    layout, pairing, rotary_offset, inverse = options
    if kernel is None:
        return _by_reference(
            tensors, cos, sin, layout=layout, pairing=pairing, rotary_offset=rotary_offset, inverse=inverse
        )
    arguments = (tensors, cos, sin, layout, pairing == "interleaved", rotary_offset, inverse)
    if type(tensors[0]) not in PLAIN:
        return _run_on_shards(kernel, *arguments)
    rotated: list[Tensor] = _rotate(*arguments) if _is_observed() else _rotate_to_new(kernel, *arguments)
    return rotated


def _run_on_shards(
    kernel: Kernels, tensors: list[Any], cos: Any, sin: Any, layout: Layout, *options: Any
) -> list[Tensor]:
    """Rotate DTensors, given tables with the placements that the first tensor needs."""
    is_local = all(sharded.rotates_locally(x, layout) for x in tensors)
    if is_local and not (_is_observed() and all(map(sharded.has_rule, tensors))):
        return sharded.map_shards(
            tensors, lambda parts: _rotate_to_new(kernel, parts, cos.to_local(), sin.to_local(), layout, *options)
        )
    sharded.register_rules()
    operator = _rotate_pair if len(tensors) == 2 else _rotate_one
    rotated = operator(*tensors, cos, sin, sharded.NUMBERS[layout], *options)
    return list(rotated) if len(tensors) == 2 else [rotated]


def rotate_(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, *, layout: Layout, pairing: Pairing, rotary_offset: int
) -> None:
    """Rotate q, or q and k, in place, with the arguments of `rotate`. Both are checked before either is changed."""
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, cos, sin))
    if not torch.compiler.is_compiling():
        writable.check_writable(tensors, recorded=recorded)
    kernel = None if recorded else backend.kernel_for(*tensors, cos, sin)
    on_shards = kernel is not None and type(tensors[0]) not in PLAIN
    if kernel is None or (on_shards and not all(sharded.rotates_locally(x, layout) for x in tensors)):
        # The gradient of learned tables needs the tensors before the rotation.
        learned = cos.requires_grad or sin.requires_grad
        inputs = [x.clone() for x in tensors] if learned else tensors
        rotated = rotate(inputs, cos, sin, layout=layout, pairing=pairing, rotary_offset=rotary_offset)
        for x, y in zip(tensors, rotated, strict=True):
            x.copy_(y)
        return
    if on_shards:
        for x in tensors:
            _rotate_shards_in_place(
                kernel,
                x,
                *sharded.redistribute_tables(cos, sin, x, layout),
                layout,
                pairing == "interleaved",
                rotary_offset,
            )
        return
    one_call = len(tensors) == 1 or checks.can_share_call(tensors[0], tensors[1], layout)
    if not one_call:
        writable.check_memory(tensors)  # before the first of two calls
    for group in [tensors] if one_call else [[x] for x in tensors]:
        arguments = (group, cos, sin, layout, pairing == "interleaved", rotary_offset, False)
        if _is_observed():
            _rotate_(*arguments)
        else:
            _rotate_in_place(kernel, *arguments)
    # Tell autograd, so that a backward pass that saved them raises.
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def _rotate_shards_in_place(kernel: Kernels, x: Any, cos: Any, sin: Any, layout: Layout, *options: Any) -> None:
    if _is_observed() and sharded.has_rule(x):
        sharded.register_rules()
        _rotate_one_(x, cos, sin, sharded.NUMBERS[layout], *options, False)
    else:
        _rotate_in_place(kernel, [x.to_local()], cos.to_local(), sin.to_local(), layout, *options, False)
    parts = (x, x.to_local())
    torch.autograd.graph.increment_version([part for part in parts if not part.is_inference()])


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernels | None,
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        pairing: Pairing,
        rotary_offset: int,
        inverse: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.learned = cos.requires_grad or sin.requires_grad
        ctx.save_for_backward(cos, sin, *(tensors if ctx.learned else ()))
        ctx.options = {"layout": layout, "pairing": pairing, "rotary_offset": rotary_offset}
        ctx.inverse = inverse
        ctx.placements = None if type(tensors[0]) in PLAIN else getattr(tensors[0], "placements", None)
        return tuple(_run(kernel, list(tensors), cos, sin, layout, pairing, rotary_offset, inverse))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin, *tensors = ctx.saved_tensors
        if ctx.placements is not None:
            grads = tuple(None if grad is None else sharded.reshard_gradient(grad, ctx.placements) for grad in grads)
        defined = [grad for grad in grads if grad is not None]
        if not defined:
            return (None,) * (7 + len(grads))
        batched = _any_batched(defined)
        rotated = iter(
            (_by_reference if batched else rotate)(defined, cos, sin, **ctx.options, inverse=not ctx.inverse)
        )
        to_tensors = [None if grad is None else next(rotated) for grad in grads]
        to_tables: tuple[Tensor | None, ...] = (None, None)
        if ctx.learned:
            with_grad = [x for x, grad in zip(tensors, grads, strict=True) if grad is not None]
            # PyTorch's own operators can be differentiated again, and can sum DTensors over ranks.
            plain = batched or torch.is_grad_enabled() or ctx.placements is not None
            to_tables = _table_gradient(with_grad, defined, cos, inverse=ctx.inverse, plain=plain, **ctx.options)
        return (None, *to_tables, None, None, None, None, *to_tensors)


def _any_batched(grads: list[Tensor]) -> bool:
    """Return whether a gradient is batched (`is_grads_batched`), which the operators here do not support."""
    return any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)


def rotate_gradients(grads: list[Tensor], cos: Tensor, sin: Tensor, **options: Any) -> list[Tensor]:
    """Return the gradients of the inputs of `rotate`, given those of its results. The options are those of `rotate`."""
    return (_by_reference if _any_batched(grads) else rotate)(grads, cos, sin, **options, inverse=True)


def _table_gradient(
    tensors: list[Tensor],
    grads: list[Tensor],
    cos: Tensor,
    *,
    layout: Layout,
    pairing: Pairing,
    rotary_offset: int,
    inverse: bool,
    plain: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of cos and sin. Autograd sums them over the axes along which the tables are broadcast.

    Args:
        tensors: the tensors before the rotation.
        grads: the gradients of the rotated tensors.
        plain: whether to use PyTorch's own operators instead of a kernel.
    """
    pairs, per_head = cos.shape[-1], cos.ndim == 4
    kernel = None if plain else backend.kernel_for(*tensors, *grads)
    if kernel is None:
        d_cos, d_sin = _table_gradient_by_reference(tensors, grads, pairs, layout, pairing, rotary_offset, per_head)
    else:
        interleaved = pairing == "interleaved"
        d_cos, d_sin = kernel.table_gradient(tensors, grads, pairs, layout, interleaved, rotary_offset, per_head)
    return d_cos, -d_sin if inverse else d_sin
