"""The contenders written in PyTorch: memory copies, ropewalk, and the RoPE code of most projects.

Contenders from other libraries are in `peers` and `peers_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import ropewalk
from ropewalk.tools.bench.baselines import Rotate, hugging_face, hugging_face_tables, meta
from ropewalk.tools.bench.case import BASE, HEAD_DIM, Case, Effect, Inputs, Passes

Pairing = Literal["half", "interleaved"]
FLOOR = "copy_"  # the contender with which all others are compared


@dataclass(frozen=True)
class Call:
    """A call to time.

    Args:
        run: the call.
        tensors: converts the result of `run` to tensors for the check: q and k (and their gradients), or cos and sin.
    """

    run: Callable[[], Any]
    tensors: Callable[[Any], tuple[Tensor, ...]] = tuple


Bind = Callable[[Inputs], Call]
"""A function that prepares the call of a contender for given inputs.

The inputs are never modified, because in-place contenders work on a copy.
"""


@dataclass(frozen=True)
class Contender:
    """An implementation to measure: one line in the table of the benchmark.

    Args:
        name: a name, unique on a device.
        does: the effect that a correct result has on q and k.
        make: does all preparation for a case, which is not timed, and returns a function that prepares the call.
        own_angles: whether it computes angles itself, in float32, instead of receiving tables.
        backward: whether it supports a backward pass.
        in_place: whether it overwrites q and k.
    """

    name: str
    does: Effect
    make: Callable[[Case], Bind]
    own_angles: bool = False
    backward: bool = True
    in_place: bool = False

    @property
    def compiled(self) -> bool:
        return "compiled" in self.name


def rope(pairing: Pairing) -> ropewalk.Rope:
    """Return the rope of all cases, with this pairing."""
    return ropewalk.Rope(head_dim=HEAD_DIM, base=BASE, pairing=pairing)


def _copy(case: Case, inputs: Inputs) -> Call:
    """Copy q and k, and in a backward pass their gradients, into memory that is allocated beforehand."""
    pairs = [(torch.empty_like(x), x) for x in inputs]
    return Call(lambda: [to.copy_(x) for to, x in pairs])


def _copy_at_once(case: Case, inputs: Inputs) -> Call:
    """Copy q and k, or in a backward pass their gradients, as one tensor: a single launch on a GPU."""
    unchanged, (a, b) = inputs[:-2], inputs[-2:]
    source = torch.cat((a.flatten(), b.flatten()))
    target = torch.empty_like(source)
    result = (*unchanged, target[: a.numel()].view_as(a), target[a.numel() :].view_as(b))
    return Call(lambda: target.copy_(source), lambda _: result)


def _clone(case: Case) -> Rotate:
    return lambda q, k: (q.clone(), k.clone())


def _multiply(case: Case) -> Rotate:
    return lambda q, k: (q.mul_(-1.0), k.mul_(-1.0))


def _ropewalk(pairing: Pairing, case: Case) -> Rotate:
    rotation = rope(pairing).at(case.positions)
    return lambda q, k: rotation(q, k, layout="bshd")


def _ropewalk_in_place(pairing: Pairing, case: Case, inputs: Inputs) -> Call:
    rotation = rope(pairing).at(case.positions)
    q, k = (x.clone() for x in inputs)
    return Call(lambda: rotation.apply_(q, k, layout="bshd"), lambda _: (q, k))


def _ropewalk_with_angles(pairing: Pairing, case: Case) -> Rotate:
    ropewalk_rope, positions = rope(pairing), case.positions
    return lambda q, k: ropewalk_rope.at(positions)(q, k, layout="bshd")


def _ropewalk_table(case: Case, inputs: Inputs) -> Call:
    ropewalk_rope, positions = rope("half"), case.positions
    return Call(lambda: ropewalk_rope.at(positions), lambda rotation: (rotation.cos, rotation.sin))


def _hugging_face(case: Case) -> Rotate:
    """Prepare Hugging Face's formula with tables in the dtype of q and k."""
    return hugging_face(*(case.add_head_axis(t) for t in full_width(case)))


def full_width(case: Case) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every channel in the dtype of q and k, `[1, tokens, 128]`.

    For decoding they are `[batch, tokens, 128]`.
    """
    cos, sin = (torch.cat((t, t), dim=-1).to(case.dtype) for t in case.tables)
    return (cos, sin) if case.decode else (cos[None], sin[None])


def _hugging_face_table(case: Case, inputs: Inputs) -> Call:
    inv_freq = (1.0 / (BASE ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))).to(case.device)
    positions = case.positions if case.decode else case.positions[None]

    def tensors(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(t[..., : HEAD_DIM // 2].reshape(case.tables[0].shape) for t in tables)

    return Call(lambda: hugging_face_tables(inv_freq, positions), tensors)


def _meta(case: Case) -> Rotate:
    return meta(case.add_head_axis(torch.complex(*case.tables)))


def with_inputs(make: Callable[[Case, Inputs], Call]) -> Callable[[Case], Bind]:
    """Return a `make` of a `Contender` for a function that prepares a call from a case and its inputs."""
    return partial(partial, make)


def eager(rotate: Callable[[Case], Rotate], *, in_place: bool = False) -> Callable[[Case], Bind]:
    """Return a `make` of a `Contender` for a rotation in PyTorch. Its calls run the passes of the case."""
    return lambda case: partial(_call, rotate(case), case.passes, in_place)


def _compile(rotate: Callable[[Case], Rotate]) -> Callable[[Case], Bind]:
    return eager(lambda case: torch.compile(rotate(case), fullgraph=True, dynamic=False))


def _call(rotate: Rotate, passes: Passes, in_place: bool, inputs: Inputs) -> Call:
    q, k, *grads = (x.clone() for x in inputs) if in_place else inputs
    if passes == "forward":
        return Call(lambda: rotate(q, k))
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    if passes == "backward":
        # In-place contenders must not overwrite leaves, hence the clones. Their backward pass launches no kernel.
        rotated = rotate(q.clone(), k.clone())
        backward = partial(torch.autograd.grad, rotated, (q, k), grads, retain_graph=True)
        return Call(backward, lambda gradients: (*rotated, *gradients))

    def forward_and_backward() -> tuple[Tensor, ...]:
        rotated = rotate(q, k)
        return *rotated, *torch.autograd.grad(rotated, (q, k), grads)

    return Call(forward_and_backward)


_USUAL = (
    Contender("Hugging Face", "half", eager(_hugging_face)),
    Contender("Hugging Face, compiled", "half", _compile(_hugging_face)),
    Contender("Meta", "interleaved", eager(_meta)),
    Contender("Meta, compiled", "interleaved", _compile(_meta)),
    Contender("ropewalk, table", "tables", with_inputs(_ropewalk_table), backward=False),
    Contender("Hugging Face, table", "tables", with_inputs(_hugging_face_table), own_angles=True, backward=False),
)


def _ropewalk_contenders(pairing: Pairing, suffix: str) -> tuple[Contender, ...]:
    rotate, in_place = partial(_ropewalk, pairing), with_inputs(partial(_ropewalk_in_place, pairing))
    angles_too = eager(partial(_ropewalk_with_angles, pairing))
    return (
        Contender(f"ropewalk{suffix}", pairing, eager(rotate)),
        Contender(f"ropewalk, in place{suffix}", pairing, in_place, backward=False, in_place=True),
        Contender(f"ropewalk, compiled{suffix}", pairing, _compile(rotate)),
        Contender(f"ropewalk, angles too{suffix}", pairing, angles_too, backward=False),
    )


_HALF, _INTERLEAVED = _ropewalk_contenders("half", ""), _ropewalk_contenders("interleaved", ", interleaved")

CONTENDERS = (
    Contender(FLOOR, "copy", with_inputs(_copy)),
    Contender("clone", "copy", eager(_clone), backward=False),
    Contender("mul_", "negate", eager(_multiply, in_place=True), backward=False, in_place=True),
    *_HALF[:3],
    *_USUAL,
)
CONTENDERS_ON_GPU = (Contender(FLOOR, "copy", with_inputs(_copy_at_once)), *_HALF, *_INTERLEAVED, *_USUAL)
