"""A device that looks like "cuda" to Python code, and computes on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda:0")


class OnCuda(Tensor):
    """A tensor on the fake device. Its numbers are in `in_memory`. Compiled code takes it for a meta tensor."""

    in_memory: Tensor
    device = property(lambda self: CUDA)

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCuda:
        made: OnCuda = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=torch.device("meta")
        )
        made.in_memory = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        to_cpu = "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cpu"
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        if not copies and any(x.ndim and not isinstance(x, OnCuda) for x in tensors):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0!"
            )
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        inner_args, inner_kwargs = tree_map(lambda x: x.in_memory if isinstance(x, OnCuda) else x, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        out = tree_map(lambda x: x.resolve_conj().resolve_neg() if isinstance(x, Tensor) else x, out)
        if to_cpu:
            return out
        of_inner = {id(x.in_memory): x for x in tensors if isinstance(x, OnCuda)}
        on_cpu = {id(x): x for x in tensors if not isinstance(x, OnCuda)}
        return tree_map(
            lambda x: (
                on_cpu.get(id(x))
                if id(x) in on_cpu
                else of_inner[id(x)]
                if id(x) in of_inner
                else OnCuda(x)
                if isinstance(x, Tensor)
                else x
            ),
            out,
        )


class FakeCuda(TorchFunctionMode):
    """While active, tensors can be created on the fake device, moved there, and moved back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            given: list[Any] = [*args, *kwargs.values()]
            x, rest = given[0], given[1:]
            devices = [torch.device(y) for y in rest if isinstance(y, (str, torch.device))]
            devices += [torch.device({Tensor.cpu: "cpu", Tensor.cuda: "cuda"}[func])] if func is not Tensor.to else []
            dtypes = [y for y in rest if isinstance(y, torch.dtype)]
            x = x.to(dtypes[0]) if dtypes and x.dtype != dtypes[0] else x
            if devices and devices[0].type != x.device.type:
                move: Any = _ToCpu if isinstance(x, OnCuda) else _ToCuda
                return move.apply(x)
            if devices:
                return x
        if torch.device(kwargs.get("device") or "cpu").type == "cuda" and not any(isinstance(x, OnCuda) for x in args):
            return OnCuda(func(*args, **kwargs | {"device": "cpu"}))
        return func(*args, **kwargs)


class _ToCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return OnCuda(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.in_memory if isinstance(grad, OnCuda) else grad


class _ToCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: OnCuda) -> Tensor:
        return x.in_memory.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return OnCuda(grad)
