"""Who is measured, in PyTorch: the floors, ropewalk, and the code most projects use. Other libraries are in `peers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import ropewalk
from ropewalk.programs.bench.case import BASE, HEAD_DIM, Case, Does, Inputs, Passes
from ropewalk.programs.bench.usual import Turn, hugging_face, hugging_face_tables, meta

Pairing = Literal["half", "interleaved"]
FLOOR = "copy_"


@dataclass(frozen=True)
class Call:
    """What is timed, and how its result becomes tensors for the check: q, k (and their gradients), or cos and sin."""

    run: Callable[[], Any]
    tensors: Callable[[Any], tuple[Tensor, ...]] = tuple


Bind = Callable[[Inputs], Call]
"""Inputs to a call that takes them. Inputs are never changed: who works in place does so in a copy."""


@dataclass(frozen=True)
class Contender:
    """One line of the table.

    name: unique on a device. does: what must come out. make: everything that is not timed, given a case.
    own_angles: it computes angles itself in float32, instead of taking tables. backward: it can be measured with a
    backward pass. in_place: results stand where q and k stood.
    """

    name: str
    does: Does
    make: Callable[[Case], Bind]
    own_angles: bool = False
    backward: bool = True
    in_place: bool = False

    @property
    def compiled(self) -> bool:
        return "compiled" in self.name


def rope(pairing: Pairing) -> ropewalk.Rope:
    """The rope of every case."""
    return ropewalk.Rope(head_dim=HEAD_DIM, base=BASE, pairing=pairing)


def _copy(case: Case, inputs: Inputs) -> Call:
    """Into memory that is there already; with a backward pass, the gradients too."""
    pairs = [(torch.empty_like(x), x) for x in inputs]
    return Call(lambda: [to.copy_(x) for to, x in pairs])


def _copy_at_once(case: Case, inputs: Inputs) -> Call:
    """q and k, in a backward pass their gradients, as the two parts of one tensor: one launch on a GPU."""
    kept, (a, b) = inputs[:-2], inputs[-2:]
    source = torch.cat((a.flatten(), b.flatten()))
    target = torch.empty_like(source)
    found = (*kept, target[: a.numel()].view_as(a), target[a.numel() :].view_as(b))
    return Call(lambda: target.copy_(source), lambda _: found)


def _clone(case: Case) -> Turn:
    return lambda q, k: (q.clone(), k.clone())


def _multiply(case: Case) -> Turn:
    return lambda q, k: (q.mul_(-1.0), k.mul_(-1.0))


def _ours(pairing: Pairing, case: Case) -> Turn:
    rotation, layout = rope(pairing).at(case.positions), case.layout
    return lambda q, k: rotation(q, k, layout=layout)


def _ours_in_place(pairing: Pairing, case: Case, inputs: Inputs) -> Call:
    rotation, layout = rope(pairing).at(case.positions), case.layout
    q, k = (x.clone() for x in inputs)
    return Call(lambda: rotation.apply_(q, k, layout=layout), lambda _: (q, k))


def _ours_with_angles(pairing: Pairing, case: Case) -> Turn:
    ours, positions, layout = rope(pairing), case.positions, case.layout
    return lambda q, k: ours.at(positions)(q, k, layout=layout)


def _ours_table(case: Case, inputs: Inputs) -> Call:
    ours, positions = rope("half"), case.positions
    return Call(lambda: ours.at(positions), lambda rotation: (rotation.cos, rotation.sin))


def _hugging_face(case: Case) -> Turn:
    """With tables in the dtype of q and k."""
    return hugging_face(*(case.beside_heads(t) for t in full_width(case)))


def full_width(case: Case) -> tuple[Tensor, Tensor]:
    """cos and sin of every channel in the dtype of q and k: `[1, tokens, 128]`, decoding `[batch, tokens, 128]`."""
    cos, sin = (torch.cat((t, t), dim=-1).to(case.dtype) for t in case.tables)
    return (cos, sin) if case.decode else (cos[None], sin[None])


def _hugging_face_table(case: Case, inputs: Inputs) -> Call:
    inv_freq = (1.0 / (BASE ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))).to(case.device)
    positions = case.positions if case.decode else case.positions[None]

    def tensors(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(t[..., : HEAD_DIM // 2].reshape(case.tables[0].shape) for t in tables)

    return Call(lambda: hugging_face_tables(inv_freq, positions), tensors)


def _meta(case: Case) -> Turn:
    return meta(case.beside_heads(torch.complex(*case.tables)))


def each(make: Callable[[Case, Inputs], Call]) -> Callable[[Case], Bind]:
    """For those who prepare nothing that all inputs of a case could share."""
    return partial(partial, make)


def eager(turn: Callable[[Case], Turn], *, in_place: bool = False) -> Callable[[Case], Bind]:
    """A call, with its backward pass where the case has one."""
    return lambda case: partial(_call, turn(case), case.passes, in_place)


def _compiled(turn: Callable[[Case], Turn]) -> Callable[[Case], Bind]:
    return eager(lambda case: torch.compile(turn(case), fullgraph=True, dynamic=False))


def _call(turn: Turn, passes: Passes, in_place: bool, inputs: Inputs) -> Call:
    q, k, *grads = (x.clone() for x in inputs) if in_place else inputs
    if passes == "forward":
        return Call(lambda: turn(q, k))
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    if passes == "backward":
        # Some write over what they are given, so it is no leaf. The way back through clone launches nothing.
        turned = turn(q.clone(), k.clone())
        back = partial(torch.autograd.grad, turned, (q, k), grads, retain_graph=True)
        return Call(back, lambda found: (*turned, *found))

    def forward_and_backward() -> tuple[Tensor, ...]:
        turned = turn(q, k)
        return *turned, *torch.autograd.grad(turned, (q, k), grads)

    return Call(forward_and_backward)


_USUAL = (
    Contender("Hugging Face", "half", eager(_hugging_face)),
    Contender("Hugging Face, compiled", "half", _compiled(_hugging_face)),
    Contender("Meta", "interleaved", eager(_meta)),
    Contender("Meta, compiled", "interleaved", _compiled(_meta)),
    Contender("ropewalk, table", "tables", each(_ours_table), backward=False),
    Contender("Hugging Face, table", "tables", each(_hugging_face_table), own_angles=True, backward=False),
)


def _all_of_ours(pairing: Pairing, suffix: str) -> tuple[Contender, ...]:
    turn, in_place = partial(_ours, pairing), each(partial(_ours_in_place, pairing))
    angles_too = eager(partial(_ours_with_angles, pairing))
    return (
        Contender(f"ropewalk{suffix}", pairing, eager(turn)),
        Contender(f"ropewalk, in place{suffix}", pairing, in_place, backward=False, in_place=True),
        Contender(f"ropewalk, compiled{suffix}", pairing, _compiled(turn)),
        Contender(f"ropewalk, angles too{suffix}", pairing, angles_too, backward=False),
    )


_HALF, _INTERLEAVED = _all_of_ours("half", ""), _all_of_ours("interleaved", ", interleaved")

CONTENDERS = (
    Contender(FLOOR, "copy", each(_copy)),
    Contender("clone", "copy", eager(_clone), backward=False),
    Contender("mul_", "negate", eager(_multiply, in_place=True), backward=False, in_place=True),
    *_HALF[:2],
    _INTERLEAVED[0],
    _HALF[2],
    *_USUAL,
)
CONTENDERS_ON_GPU = (Contender(FLOOR, "copy", each(_copy_at_once)), *_HALF, *_INTERLEAVED, *_USUAL)
