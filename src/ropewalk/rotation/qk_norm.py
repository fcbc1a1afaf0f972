"""QKNorm: RMSNorm of each head of q and k followed by the rotation, in one differentiable call.

`run_fused` runs both in one kernel if possible. Otherwise, and if PyTorch must trace the operators inside, the norm and
the rotation run as two calls with bit-identical results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ropewalk import _checks
from ropewalk._layout import Layout, Options
from ropewalk.kernels import backend, cpu, observed
from ropewalk.kernels.visible import StoreArguments
from ropewalk.rotation import checks, ops, writable
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.reference import rms_norm

_WHO = "QKNorm"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class QKNorm:
    """RMSNorm of each head of q and k before the rotation, as in Qwen 3 and Gemma 3.

        x / √(mean of x² over the head + ε) · weight

    The mean is computed in float64 and the products in float32 (float64 for float64 tensors). The normalized tensor is
    rounded to the dtype of x once, before the rotation. torch.nn.RMSNorm adds the squares in float32 and in a different
    order, so its result may differ by one unit in the last place.

    Args:
        q_weight, k_weight: `[head_dim]`, in any dtype that q and k may have; gradients reach them.
        eps: ε, dimensionless, greater than 0.
        add_one: whether to multiply by 1 + weight instead, as Gemma does.

    Raises:
        RopeError: a weight is not a tensor `[head_dim]` in one of these dtypes; the weights differ in shape, dtype or
            device; or ε is not greater than 0.

    Examples:
        >>> norm = QKNorm(torch.ones(4), torch.ones(4), eps=1e-6)
        >>> q, k = norm(torch.full((1, 2, 3, 4), 5.0), torch.full((1, 2, 1, 4), -0.1))
        >>> q[0, 0, 0], k.shape
        (tensor([1., 1., 1., 1.]), torch.Size([1, 2, 1, 4]))
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    add_one: bool = False

    def __post_init__(self) -> None:
        q, k = self.q_weight, self.k_weight
        if not isinstance(q, Tensor) or not isinstance(k, Tensor) or q.ndim != 1 or q.dtype not in _DTYPES:
            must = "q_weight and k_weight must be tensors [head_dim], float16, bfloat16, float32 or float64"
            got = f"{_checks.describe(q)} and {_checks.describe(k)}"
            raise _checks.error(_WHO, must, got, "Pass the weights of the two norms.")
        if q.shape != k.shape or q.dtype != k.dtype or q.device != k.device:
            must = "q_weight and k_weight must have the same shape, dtype and device"
            got = f"{_checks.describe(q)} and {_checks.describe(k)}"
            raise _checks.error(_WHO, must, got, "Pass the weights of the norms of one layer.")
        _checks.number(_WHO, "eps", self.eps, above=0.0, fix="Pass the ε of the norm, e.g. 1e-6.")
        _checks.boolean(_WHO, "add_one", self.add_one, "Pass True to multiply by 1 + weight, as Gemma does.")

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize q and k without rotating them.

        Args:
            q, k: `[..., head_dim]`, float16, bfloat16, float32 or float64; any strides. Not changed.

        Returns:
            New tensors with the shapes and dtypes of q and k.

        Raises:
            RopeError: the last axis of q or k differs from that of the weights, or a device or dtype does not fit.
        """
        for name, x in (("q", q), ("k", k)):
            self._check(name, x)
        normed_q = rms_norm(q, self.q_weight, eps=self.eps, add_one=self.add_one)
        return normed_q, rms_norm(k, self.k_weight, eps=self.eps, add_one=self.add_one)

    def rotate(self, rotation: Rotation, q: Tensor, k: Tensor, *, layout: Layout) -> tuple[Tensor, Tensor]:
        """Normalize and rotate q and k in one call, by one kernel where possible; differentiable.

        The result is bit for bit that of `rotation(*norm(q, k), layout=layout)`.

        Args:
            rotation: the rotation of the tokens of q and k.
            q, k: as for `Rotation.__call__`. Not changed.
            layout: "bshd", "bhsd", "sbhd" or "thd".

        Returns:
            New tensors with the shapes and dtypes of q and k.

        Raises:
            RopeError: rotation is not a Rotation; or an error that calling the norm or the rotation would raise.
        """
        if not isinstance(rotation, Rotation):
            got = _checks.shown(rotation)
            raise _checks.error(_WHO, "rotation must be a Rotation", got, "Create it with rope.at(positions).")
        inputs = (q, k, self.q_weight, self.k_weight)
        recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        if not recorded:
            fused: tuple[Tensor, Tensor] | None = run_fused(rotation, q, k, layout=layout, norm=self)
            return rotation(*self(q, k), layout=layout) if fused is None else fused
        if _can_use_function(rotation, inputs):
            for name, x in (("q", q), ("k", k)):
                self._check(name, x)
            tables = _check_call(rotation, q, k, layout)
            rotated: tuple[Tensor, Tensor] = _NormAndRotate.apply(  # type: ignore[no-untyped-call]
                rotation, tables, layout, self.eps, self.add_one, *inputs
            )
            return rotated
        return rotation(*self(q, k), layout=layout)

    def _check(self, name: str, x: Tensor) -> None:
        head_dim, device = self.q_weight.shape[0], self.q_weight.device
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.shape[-1:] != (head_dim,) or x.device != device:
            must = f"{name} must be a tensor [..., head_dim={head_dim}] on {device}, where the weights are"
            raise _checks.error(_WHO, must, _checks.describe(x), "Pass heads of the layer that has these weights.")
        writable.check_memory(_WHO, x, self.q_weight, self.k_weight)


_NO_NORM: tuple[Any, ...] = (None, None, 0.0, False)
_NO_STORE: tuple[Any, ...] = (None,) * 6


def run_fused(
    rotation: Rotation,
    q: Tensor,
    k: Tensor,
    *,
    layout: Layout,
    norm: QKNorm | None = None,
    store: StoreArguments | None = None,
) -> Any:
    """Normalize, rotate and, with `store`, write to the caches in one kernel, if a kernel supports the call.

    Returns:
        The new q and k, or only the new q with `store`. None if the caller must normalize, rotate and store in separate
        calls, in which case nothing was changed. The reason is one of these: no kernel can be used; a tensor is not
        plain; a gradient is recorded; a transform, mode or compilation is active; on a GPU, each head has its own
        table; or, on the CPU, the arguments do not match (the separate calls then raise the error).
    """
    # On a GPU, the caller has checked `store`.
    if torch.compiler.is_compiling() or not isinstance(rotation, Rotation):
        return None
    if not backend.FAST_PATH or (isinstance(q, Tensor) and not q.is_cpu):
        return None if rotation.per_head else _run_kernel(rotation, q, k, layout, norm, store)
    profiled = observed.is_profiled()
    arguments: tuple[Any, ...] = (
        *(q, k, rotation.cos, rotation.sin, layout, rotation.head_dim, rotation.rotary_dim),
        *(rotation.pairing == "interleaved", rotation.rotary_offset, rotation.per_head),
        *(_NO_NORM if norm is None else (norm.q_weight, norm.k_weight, norm.eps, norm.add_one)),
        *(_NO_STORE if store is None else store),
        profiled,
    )
    if not profiled:
        return cpu.step_plain(*arguments)
    with torch.profiler.record_function("ropewalk::step"):
        return cpu.step_plain(*arguments)


def _run_kernel(
    rotation: Rotation, q: Tensor, k: Tensor, layout: Layout, norm: QKNorm | None, store: StoreArguments | None
) -> Any:
    """Do the work of `run_fused` with the fused step of a backend. Return None if separate calls must be used."""
    weights = () if norm is None else (norm.q_weight, norm.k_weight)
    inputs = (q, k, rotation.cos, rotation.sin, *weights, *(x for x in store or () if x is not None))
    if observed.has_mode() or not set(map(type, inputs)).issubset(backend.PLAIN):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return None
    kernels = backend.KERNELS.get(q.device.type)
    if kernels is None or kernels.step is None:
        return None
    cos, sin = _check_call(rotation, q, k, layout)
    if norm is not None:
        norm._check("q", q)
        norm._check("k", k)
    if not checks.can_share_call([q, k], layout) or backend.kernel_for(*inputs) is not kernels or not q.numel():
        return None
    outputs = torch.empty_like(q), torch.empty_like(k) if store is None else store.k_cache
    kernels.step(
        (q, k),
        outputs,
        cos,
        sin,
        Options(layout, rotation.pairing == "interleaved", rotation.rotary_offset),
        None if norm is None else (norm.q_weight.contiguous(), norm.k_weight.contiguous(), norm.eps, norm.add_one),
        store,
    )
    if store is None:
        return outputs
    written = (store.k_cache, store.v_cache, store.k_scales, store.v_scales)
    torch.autograd.graph.increment_version([x for x in written if x is not None and not x.is_inference()])
    return outputs[0]


def _check_call(rotation: Rotation, q: Tensor, k: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    numbers = (rotation.head_dim, rotation.rotary_dim, rotation.per_head)
    return checks.check_call([q, k], rotation.cos, rotation.sin, layout, *numbers)


def _can_use_function(rotation: Rotation, tensors: tuple[Tensor, ...]) -> bool:
    """Return whether `_NormAndRotate` supports the call: plain tensors, no tracing, and tables without gradient.

    Fake tensors count as plain, so that a simulation keeps for the backward pass what a run keeps.
    """
    cos, sin = rotation.cos, rotation.sin
    return (
        not observed.must_trace()
        and not (cos.requires_grad or sin.requires_grad)
        and not cos.is_inference()
        and all(type(x) in (*backend.PLAIN, FakeTensor) for x in (*tensors, cos, sin))
    )


class _NormAndRotate(torch.autograd.Function):
    """The norm and the rotation as one differentiable function.

    The backward pass rotates the gradients by minus the angle, and then computes the gradients of RMSNorm. It uses
    PyTorch's own operators for RMSNorm, which can be differentiated again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rotation: Rotation,
        tables: tuple[Tensor, Tensor],
        layout: Layout,
        eps: float,
        add_one: bool,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tables, q, k, q_weight, k_weight)
        ctx.norm = (eps, add_one)
        ctx.options = Options(layout, rotation.pairing == "interleaved", rotation.rotary_offset)
        norm = QKNorm(q_weight, k_weight, eps, add_one)
        fused: tuple[Tensor, Tensor] | None = run_fused(rotation, q, k, layout=layout, norm=norm)
        return rotation(*norm(q, k), layout=layout) if fused is None else fused

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin, *tensors = ctx.saved_tensors
        to_tensors: list[Tensor | None] = [None, None]
        to_weights: list[Tensor | None] = [None, None]
        for i, grad in enumerate(ops.rotate_gradients(grads, cos, sin, ctx.options)):
            if grad is not None:
                to_tensors[i], to_weights[i] = _norm_gradient(tensors[i], tensors[2 + i], grad, *ctx.norm)
        return (None, None, None, None, None, *to_tensors, *to_weights)


def _norm_gradient(x: Tensor, weight: Tensor, grad: Tensor, eps: float, add_one: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight, given the gradient of the result of `rms_norm`.

    With r = 1/√(mean of x² + ε), y = x·r and g = grad · weight (or grad · (1 + weight)), the gradient of x is
    r·(g − y · mean of g·y), and the gradient of the weight is Σ grad·y.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide, grad, gain = x.to(compute), grad.to(compute), weight.to(compute)
    r = (wide.double().square().mean(-1, keepdim=True) + eps).rsqrt().to(compute)  # as in the forward pass
    y, g = wide * r, grad * (1 + gain if add_one else gain)
    to_x = r * (g - y * (g * y).mean(-1, keepdim=True))
    return to_x.to(x.dtype), (grad * y).sum(tuple(range(x.ndim - 1))).to(weight.dtype)
