"""Which code turns, and gradients: the gradient of a rotation is the rotation back, so only the tables are saved.

Plain tensors on the CPU or a GPU go to the compiled kernels, through operators of `torch.library` that are private to
ropewalk, and straight to the kernels where nobody watches operators, which saves a third of the time of one token on
the CPU. All else is the reference in plain PyTorch, and so is every case in which PyTorch must look inside: torch.func
transforms, forward-mode AD, torch.compile and export. An operator or an autograd.Function gives no gradient, or a wrong
one, in silence there (tests/rotation/test_transforms.py shows each).
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
from ropewalk.rotation import checks, sharded
from ropewalk.rotation.reference import rotate_in_layout
from ropewalk.rotation.reference import table_gradient as _table_gradient_by_reference

_library: Any = torch.library.Library("ropewalk", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "rotate(Tensor[] tensors, Tensor cos, Tensor sin, str layout, bool interleaved, int rotary_offset, bool back) "
    "-> Tensor[]"
)
_library.define(
    "rotate_(Tensor(a!)[] tensors, Tensor cos, Tensor sin, str layout, bool interleaved, int rotary_offset, bool back) "
    "-> ()"
)


# The same for one tensor or two: of a list of tensors, no sharding rule can be said. The layout is a number, and
# `sharded.NUMBERS` says why.
_HOW = "Tensor cos, Tensor sin, int layout, bool interleaved, int rotary_offset, bool back"
_library.define(f"rotate_one(Tensor x, {_HOW}) -> Tensor")
_library.define(f"rotate_pair(Tensor q, Tensor k, {_HOW}) -> (Tensor, Tensor)")
_library.define(f"rotate_one_(Tensor(a!) x, {_HOW}) -> Tensor(a!)")


def _watched() -> bool:
    """Whether somebody wants to see each operator: a mode or a profiler."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
    )


def _new(kernel: Kernels, tensors: list[Tensor], cos: Tensor, sin: Tensor, *how: Any) -> list[Tensor]:
    outputs = [torch.empty_like(x) for x in tensors]
    kernel.rotate(tensors, outputs, cos, sin, *how)
    return outputs


def _in_place(kernel: Kernels, tensors: list[Tensor], cos: Tensor, sin: Tensor, *how: Any) -> None:
    kernel.rotate(tensors, tensors, cos, sin, *how)


def _rotate_meta(tensors: list[Tensor], cos: Tensor, sin: Tensor, *_: Any) -> list[Tensor]:
    checks.all_meta([*tensors, cos, sin])
    return [torch.empty_like(x) for x in tensors]


def _rotate_meta_(tensors: list[Tensor], cos: Tensor, sin: Tensor, *_: Any) -> None:
    checks.all_meta([*tensors, cos, sin])


def _operator(
    kernel: Kernels, tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout, *how: Any
) -> list[Tensor]:
    checks.operator_fits(tensors, cos, sin, layout, how[1], in_place=False)
    return _new(kernel, tensors, cos, sin, layout, *how)


def _operator_(kernel: Kernels, tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout, *how: Any) -> None:
    checks.operator_fits(tensors, cos, sin, layout, how[1], in_place=True)
    _in_place(kernel, tensors, cos, sin, layout, *how)


def _one(many: Callable[..., list[Tensor]], x: Tensor, cos: Tensor, sin: Tensor, layout: int, *how: Any) -> Tensor:
    return many([x], cos, sin, sharded.name_of(layout), *how)[0]


def _pair(
    many: Callable[..., list[Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: int, *how: Any
) -> tuple[Tensor, Tensor]:
    turned = many([q, k], cos, sin, sharded.name_of(layout), *how)
    return turned[0], turned[1]


def _one_(many: Callable[..., None], x: Tensor, cos: Tensor, sin: Tensor, layout: int, *how: Any) -> Tensor:
    many([x], cos, sin, sharded.name_of(layout), *how)
    return x


# Anybody may call an operator, so it checks what it is given; `rotate` and `rotate_` below were given checked tensors.
# "CUDA" is AMD's GPUs too.
for _kernel, _key in ((backend.CPU, "CPU"), (backend.GPU, "CUDA")):
    _library.impl("rotate", partial(_operator, _kernel), _key)
    _library.impl("rotate_", partial(_operator_, _kernel), _key)
    _library.impl("rotate_one", partial(_one, partial(_operator, _kernel)), _key)
    _library.impl("rotate_pair", partial(_pair, partial(_operator, _kernel)), _key)
    _library.impl("rotate_one_", partial(_one_, partial(_operator_, _kernel)), _key)
_library.impl("rotate", _rotate_meta, "Meta")
_library.impl("rotate_", _rotate_meta_, "Meta")
_library.impl("rotate_one", partial(_one, _rotate_meta), "Meta")
_library.impl("rotate_pair", partial(_pair, _rotate_meta), "Meta")
_library.impl("rotate_one_", partial(_one_, _rotate_meta_), "Meta")
_rotate = torch.ops.ropewalk.rotate.default
_rotate_ = torch.ops.ropewalk.rotate_.default
_rotate_one = torch.ops.ropewalk.rotate_one.default
_rotate_pair = torch.ops.ropewalk.rotate_pair.default
_rotate_one_ = torch.ops.ropewalk.rotate_one_.default


def _by_reference(tensors: list[Tensor], cos: Tensor, sin: Tensor, **how: Any) -> list[Tensor]:
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return rotate_in_layout(tensors, cos, sin, **how)
    with torch.autocast(device, enabled=False):  # its torch.cat takes no float16 beside bfloat16
        return rotate_in_layout(tensors, cos, sin, **how)


def rotate(
    tensors: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    layout: Layout,
    pairing: Pairing,
    rotary_offset: int,
    back: bool = False,
) -> list[Tensor]:
    """Turn q, or q and k, into new tensors, differentiably.

    Args:
        tensors: one or two in `layout`; checked against the tables.
        cos, sin: `[pairs]`, `[seq, pairs]`, `[batch, seq, pairs]`, or per head `[batch, heads, seq, pairs]`.
        pairing, rotary_offset: as in `Rotation`.
        back: turn by minus the angle, factor included: the transposed rotation.
    """
    together = True
    if type(tensors[0]) not in PLAIN and is_dtensor(tensors[0]):
        together = sharded.alike(tensors[0], tensors[-1])
        cos, sin = sharded.along(cos, sin, tensors[0], layout) if together else (cos, sin)
    kernel = backend.kernel_for(*tensors, cos, sin)
    if kernel is None and together and backend.must_be_seen():
        return _by_reference(tensors, cos, sin, layout=layout, pairing=pairing, rotary_offset=rotary_offset, back=back)
    if len(tensors) == 2 and not (together and checks.can_share_a_call(tensors[0], tensors[1], layout)):
        how: dict[str, Any] = {"layout": layout, "pairing": pairing, "rotary_offset": rotary_offset, "back": back}
        return [rotate([x], cos, sin, **how)[0] for x in tensors]
    if torch.is_grad_enabled() and (tensors[0].requires_grad or cos.requires_grad or sin.requires_grad):
        checks.can_be_saved(cos)
        turned: tuple[Tensor, ...] = _Rotate.apply(  # type: ignore[no-untyped-call]
            kernel, cos, sin, layout, pairing, rotary_offset, back, *tensors
        )
        return list(turned)
    return _run(kernel, tensors, cos, sin, layout, pairing, rotary_offset, back)


def _run(kernel: Kernels | None, tensors: list[Tensor], cos: Tensor, sin: Tensor, *how: Any) -> list[Tensor]:
    layout, pairing, rotary_offset, back = how
    if kernel is None:
        return _by_reference(tensors, cos, sin, layout=layout, pairing=pairing, rotary_offset=rotary_offset, back=back)
    arguments = (tensors, cos, sin, layout, pairing == "interleaved", rotary_offset, back)
    if type(tensors[0]) not in PLAIN:
        return _of_shards(kernel, *arguments)
    turned: list[Tensor] = _rotate(*arguments) if _watched() else _new(kernel, *arguments)
    return turned


def _of_shards(kernel: Kernels, tensors: list[Any], cos: Any, sin: Any, layout: Layout, *how: Any) -> list[Tensor]:
    """DTensors, the tables `along` the first of them."""
    alone = all(sharded.stays(x, layout) for x in tensors)
    if alone and not (_watched() and all(map(sharded.has_rule, tensors))):
        return sharded.of_each(tensors, lambda parts: _new(kernel, parts, cos.to_local(), sin.to_local(), layout, *how))
    sharded.register()
    operator = _rotate_pair if len(tensors) == 2 else _rotate_one
    turned = operator(*tensors, cos, sin, sharded.NUMBERS[layout], *how)
    return list(turned) if len(tensors) == 2 else [turned]


def rotate_(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, *, layout: Layout, pairing: Pairing, rotary_offset: int
) -> None:
    """The same in place. Both tensors are checked, and both rotated, before either is written."""
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, cos, sin))
    if not torch.compiler.is_compiling():
        checks.can_be_written(tensors, recorded=recorded)
    kernel = None if recorded else backend.kernel_for(*tensors, cos, sin)
    spread = kernel is not None and type(tensors[0]) not in PLAIN
    if kernel is None or (spread and not all(sharded.stays(x, layout) for x in tensors)):
        # Learned tables need the tensors as they were for their own gradient.
        learned = cos.requires_grad or sin.requires_grad
        given = [x.clone() for x in tensors] if learned else tensors
        rotated = rotate(given, cos, sin, layout=layout, pairing=pairing, rotary_offset=rotary_offset)
        for x, y in zip(tensors, rotated, strict=True):
            x.copy_(y)
        return
    if spread:
        for x in tensors:
            _shards_in_place(
                kernel, x, *sharded.along(cos, sin, x, layout), layout, pairing == "interleaved", rotary_offset
            )
        return
    together = len(tensors) == 1 or checks.can_share_a_call(tensors[0], tensors[1], layout)
    if not together:
        checks.have_memory(tensors)  # before the first of two calls
    for group in [tensors] if together else [[x] for x in tensors]:
        arguments = (group, cos, sin, layout, pairing == "interleaved", rotary_offset, False)
        if _watched():
            _rotate_(*arguments)
        else:
            _in_place(kernel, *arguments)
    # Who saved them for a backward pass must hear of it.
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def _shards_in_place(kernel: Kernels, x: Any, cos: Any, sin: Any, layout: Layout, *how: Any) -> None:
    if _watched() and sharded.has_rule(x):
        sharded.register()
        _rotate_one_(x, cos, sin, sharded.NUMBERS[layout], *how, False)
    else:
        _in_place(kernel, [x.to_local()], cos.to_local(), sin.to_local(), layout, *how, False)
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
        back: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.learned = cos.requires_grad or sin.requires_grad
        ctx.save_for_backward(cos, sin, *(tensors if ctx.learned else ()))
        ctx.how = {"layout": layout, "pairing": pairing, "rotary_offset": rotary_offset}
        ctx.back = back
        ctx.placements = None if type(tensors[0]) in PLAIN else getattr(tensors[0], "placements", None)
        return tuple(_run(kernel, list(tensors), cos, sin, layout, pairing, rotary_offset, back))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin, *tensors = ctx.saved_tensors
        if ctx.placements is not None:
            grads = tuple(None if grad is None else sharded.back_to(grad, ctx.placements) for grad in grads)
        given = [grad for grad in grads if grad is not None]
        if not given:
            return (None,) * (7 + len(grads))
        batched = _batched(given)
        turned = iter((_by_reference if batched else rotate)(given, cos, sin, **ctx.how, back=not ctx.back))
        of_tensors = [None if grad is None else next(turned) for grad in grads]
        of_tables: tuple[Tensor | None, ...] = (None, None)
        if ctx.learned:
            with_grad = [x for x, grad in zip(tensors, grads, strict=True) if grad is not None]
            # Where it is itself differentiated, and of DTensors, whose sums over ranks PyTorch knows how to make.
            plain = batched or torch.is_grad_enabled() or ctx.placements is not None
            of_tables = _table_gradient(with_grad, given, cos, back=ctx.back, plain=plain, **ctx.how)
        return (None, *of_tables, None, None, None, None, *of_tensors)


def _batched(grads: list[Tensor]) -> bool:
    """Whether they are several gradients at once (is_grads_batched), which no operator of ours takes."""
    return any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)


def rotated_back(grads: list[Tensor], cos: Tensor, sin: Tensor, **how: Any) -> list[Tensor]:
    """The gradients of rotated tensors, to those before; as `rotate` with back."""
    return (_by_reference if _batched(grads) else rotate)(grads, cos, sin, **how, back=True)


def _table_gradient(
    tensors: list[Tensor],
    grads: list[Tensor],
    cos: Tensor,
    *,
    layout: Layout,
    pairing: Pairing,
    rotary_offset: int,
    back: bool,
    plain: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient to cos and sin, which autograd sums to their shape; `plain`: in PyTorch's own operators."""
    pairs, per_head = cos.shape[-1], cos.ndim == 4
    kernel = None if plain else backend.kernel_for(*tensors, *grads)
    if kernel is None:
        d_cos, d_sin = _table_gradient_by_reference(tensors, grads, pairs, layout, pairing, rotary_offset, per_head)
    else:
        interleaved = pairing == "interleaved"
        d_cos, d_sin = kernel.table_gradient(tensors, grads, pairs, layout, interleaved, rotary_offset, per_head)
    return d_cos, -d_sin if back else d_sin
