"""Dispatch rotations of plain tensors to a kernel or the reference, and differentiate them.

Plain tensors are rotated by the compiled kernels of their device, which are registered as private operators of
`torch.library`. When no mode or profiler is active, the kernel is called directly: skipping the dispatcher saves a
third of the time for one token on the CPU.

All other tensors are rotated by the reference in plain PyTorch. The reference is also used under torch.func transforms,
forward-mode AD, torch.compile and export. There, an operator or an autograd.Function would silently give no gradient or
a wrong one (tests/rotation/test_transforms.py shows each case).

The backward pass rotates the gradients by minus the angle, so it needs only the tables. Only the gradients of learned
tables also need the tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import get_library_allowing_overwrite

from ropewalk._layout import Layout, Options
from ropewalk.kernels import backend
from ropewalk.kernels.backend import Kernels
from ropewalk.kernels.observed import is_observed, must_trace
from ropewalk.rotation import checks, reference, writable

# The name of the package, so a copy of it (tools/hub_kernel.py) has its own operators.
_NAMESPACE = __name__.partition(".")[0]
# What an interrupted import of this module (Ctrl-C) has registered is removed first.
_library: Any = get_library_allowing_overwrite(_NAMESPACE, "rotate")
_ARGUMENTS = "Tensor cos, Tensor sin, str layout, bool interleaved, int rotary_offset, bool inverse"
_library.define(f"rotate(Tensor[] tensors, {_ARGUMENTS}) -> Tensor[]")
_library.define(f"rotate_(Tensor(a!)[] tensors, {_ARGUMENTS}) -> ()")


# Any code may call an operator, so operators check their arguments. `rotate` and `rotate_` below receive checked
# tensors.
def _rotate_checked(tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout, *options: Any) -> list[Tensor]:
    how = Options(layout, *options)
    checks.check_operator_arguments(tensors, cos, sin, how, in_place=False)
    outputs = list(map(torch.empty_like, tensors))
    _kernels_of(tensors[0]).rotate(tensors, outputs, cos, sin, how)
    return outputs


def _rotate_checked_(tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout, *options: Any) -> None:
    how = Options(layout, *options)
    checks.check_operator_arguments(tensors, cos, sin, how, in_place=True)
    _kernels_of(tensors[0]).rotate(tensors, tensors, cos, sin, how)


def _kernels_of(x: Tensor) -> Kernels:
    kernels = backend.KERNELS.get(x.device.type)
    if kernels is None or kernels.unavailable(x.device) is not None:
        raise backend.no_kernel_error(x)
    return kernels


def _rotate_meta(tensors: list[Tensor], cos: Tensor, sin: Tensor, *_: Any) -> list[Tensor]:
    checks.check_all_meta([*tensors, cos, sin])
    return [torch.empty_like(x) for x in tensors]


def _rotate_meta_(tensors: list[Tensor], cos: Tensor, sin: Tensor, *_: Any) -> None:
    checks.check_all_meta([*tensors, cos, sin])


for _name, _checked, _meta in (("rotate", _rotate_checked, _rotate_meta), ("rotate_", _rotate_checked_, _rotate_meta_)):
    _library.impl(_name, _checked, "CompositeExplicitAutograd")  # on every device of the table
    _library.impl(_name, _meta, "Meta")
_operators = getattr(torch.ops, _NAMESPACE)
_rotate, _rotate_ = _operators.rotate.default, _operators.rotate_.default


def _by_reference(tensors: list[Tensor], cos: Tensor, sin: Tensor, options: Options) -> list[Tensor]:
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which raises for meta tensors
        return reference.rotate_in_layout(tensors, cos, sin, options)
    with torch.autocast(device, enabled=False):  # under autocast, torch.cat refuses to mix float16 and bfloat16
        return reference.rotate_in_layout(tensors, cos, sin, options)


def rotate(tensors: list[Tensor], cos: Tensor, sin: Tensor, options: Options) -> list[Tensor]:
    """Rotate q, or q and k, into new tensors, differentiably.

    Args:
        tensors: one or two tensors in the layout of `options`, already checked against the tables.
        cos, sin: `[pairs]`, `[seq, pairs]`, `[batch, seq, pairs]`, or per head `[batch, heads, seq, pairs]`.
    """
    kernel = backend.kernel_for(*tensors, cos, sin)
    if kernel is None and must_trace():
        return _by_reference(tensors, cos, sin, options)
    if not checks.can_share_call(tensors, options.layout):
        return [rotate([x], cos, sin, options)[0] for x in tensors]
    if torch.is_grad_enabled() and (tensors[0].requires_grad or cos.requires_grad or sin.requires_grad):
        if cos.is_inference():
            raise checks.not_saveable_error()
        rotated: tuple[Tensor, ...] = _Rotate.apply(kernel, cos, sin, options, *tensors)  # type: ignore[no-untyped-call]
        return list(rotated)
    return _run(kernel, tensors, cos, sin, options)


def _run(kernel: Kernels | None, tensors: list[Tensor], cos: Tensor, sin: Tensor, options: Options) -> list[Tensor]:
    if kernel is None:
        return _by_reference(tensors, cos, sin, options)
    if is_observed():
        rotated: list[Tensor] = _rotate(tensors, cos, sin, *options)
        return rotated
    outputs = list(map(torch.empty_like, tensors))
    kernel.rotate(tensors, outputs, cos, sin, options)
    return outputs


def rotate_(tensors: list[Tensor], cos: Tensor, sin: Tensor, options: Options) -> None:
    """Rotate q, or q and k, in place, with the arguments of `rotate`. Both are checked before either is changed."""
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, cos, sin))
    if not torch.compiler.is_compiling():
        writable.check_writable(tensors, recorded=recorded)
    kernel = None if recorded else backend.kernel_for(*tensors, cos, sin)
    if kernel is None:
        copy_rotated(tensors, cos, sin, options)
        return
    for group in [tensors] if checks.can_share_call(tensors, options.layout) else [[x] for x in tensors]:
        if is_observed():
            _rotate_(group, cos, sin, *options)
        else:
            kernel.rotate(group, group, cos, sin, options)
    # Tell autograd, so that a backward pass that saved them raises.
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def copy_rotated(tensors: list[Tensor], cos: Tensor, sin: Tensor, options: Options) -> None:
    """Rotate into new tensors, and copy them into the old ones."""
    # The gradient of learned tables needs the tensors before the rotation.
    inputs = [x.clone() for x in tensors] if cos.requires_grad or sin.requires_grad else tensors
    for x, y in zip(tensors, rotate(inputs, cos, sin, options), strict=True):
        x.copy_(y)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernels | None, cos: Tensor, sin: Tensor, options: Options, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.learned = cos.requires_grad or sin.requires_grad
        ctx.save_for_backward(cos, sin, *(tensors if ctx.learned else ()))
        ctx.options = options
        return tuple(_run(kernel, list(tensors), cos, sin, options))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin, *tensors = ctx.saved_tensors
        to_tensors = rotate_gradients(grads, cos, sin, ctx.options)
        to_tables: tuple[Tensor | None, ...] = (None, None)
        defined = [grad for grad in grads if grad is not None]
        if ctx.learned and defined:
            with_grad = [x for x, grad in zip(tensors, grads, strict=True) if grad is not None]
            # PyTorch's own operators can be differentiated again, and take batched gradients.
            plain = torch.is_grad_enabled() or _any_batched(defined)
            kernel = None if plain else backend.kernel_for(*with_grad, *defined)
            to_tables = table_gradient(kernel, with_grad, defined, cos, ctx.options)
        return (None, *to_tables, None, *to_tensors)


def _any_batched(grads: list[Tensor]) -> bool:
    """Return whether a gradient is batched (`is_grads_batched`), which the operators here do not support."""
    return any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)


def rotate_gradients(
    grads: tuple[Tensor | None, ...], cos: Tensor, sin: Tensor, options: Options
) -> list[Tensor | None]:
    """Return the gradients of the inputs of `rotate`, given those of its results. A missing gradient stays missing."""
    defined = [grad for grad in grads if grad is not None]
    if not defined:
        return list(grads)
    run = _by_reference if _any_batched(defined) else rotate
    layout, interleaved, offset, inverse = options
    rotated = iter(run(defined, cos, sin, Options(layout, interleaved, offset, not inverse)))
    return [None if grad is None else next(rotated) for grad in grads]


def table_gradient(
    kernel: Kernels | None, tensors: list[Tensor], grads: list[Tensor], cos: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Return the gradients of cos and sin. Autograd sums them over the axes along which the tables are broadcast.

    Args:
        kernel: the kernels for these tensors. None means PyTorch's own operators.
        tensors: the tensors before the rotation.
        grads: the gradients of the rotated tensors.
        cos: the table, which only tells the number of pairs and whether each head has its own.
        options: those of the rotation.
    """
    compute = reference.table_gradient if kernel is None else kernel.table_gradient
    forwards = options._replace(inverse=False)
    d_cos, d_sin = compute(tensors, grads, cos.shape[-1], forwards, cos.ndim == 4)
    return d_cos, -d_sin if options.inverse else d_sin
