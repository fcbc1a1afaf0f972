"""Who is measured, in PyTorch: the floors, ropewalk, and the code most projects use. Other libraries are in `peers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import ropewalk
from ropewalk.programs.bench.case import BASE, HEAD_DIM, Case, Does
from ropewalk.programs.bench.usual import Turn, hugging_face, hugging_face_tables, meta


@dataclass(frozen=True)
class Call:
    """What is timed, and how its result becomes tensors for the check: q, k (and their gradients), or cos and sin."""

    run: Callable[[], Any]
    tensors: Callable[[Any], tuple[Tensor, ...]] = tuple


@dataclass(frozen=True)
class Contender:
    """One line of the table.

    name: unique. does: what must come out. make: everything that is not timed, given a case. own_angles: it computes
    angles itself in float32, instead of taking tables. backward: it can be measured with a backward pass.
    """

    name: str
    does: Does
    make: Callable[[Case], Call]
    own_angles: bool = False
    backward: bool = True


def rope(pairing: Literal["half", "interleaved"]) -> ropewalk.Rope:
    """The rope of every case."""
    return ropewalk.Rope(head_dim=HEAD_DIM, base=BASE, pairing=pairing)


def _copy(case: Case) -> Call:
    """Into memory that is there already; with a backward pass, the gradients too."""
    given = [x for x in (case.q, case.k, case.grad_q, case.grad_k) if x is not None]
    pairs = [(torch.empty_like(x), x) for x in given]
    return Call(lambda: [to.copy_(x) for to, x in pairs])


def _clone(case: Case) -> Call:
    return Call(lambda: (case.q.clone(), case.k.clone()))


def _multiply(case: Case) -> Call:
    q, k = case.q.clone(), case.k.clone()
    return Call(lambda: (q.mul_(-1.0), k.mul_(-1.0)))


def _ours_in_place(case: Case) -> Call:
    rotation = rope("half").at(case.positions)
    q, k = case.q.clone(), case.k.clone()
    return Call(lambda: rotation.apply_(q, k, layout=case.layout), lambda _: (q, k))


def _ours(case: Case, pairing: Literal["half", "interleaved"] = "half") -> Turn:
    rotation = rope(pairing).at(case.positions)
    layout = case.layout
    return lambda q, k: rotation(q, k, layout=layout)


def _ours_table(case: Case) -> Call:
    ours, positions = rope("half"), case.positions
    return Call(lambda: ours.at(positions), lambda rotation: (rotation.cos, rotation.sin))


def _hugging_face(case: Case) -> Turn:
    """With tables in the dtype of q and k."""
    return hugging_face(*full_width(case))


def full_width(case: Case) -> tuple[Tensor, Tensor]:
    """cos and sin of every channel in the dtype of q and k: `[1, tokens, 1, 128]`, or `[1, 1, tokens, 128]`."""
    cos, sin = (torch.cat((t, t), dim=-1).to(case.dtype)[None] for t in (case.cos, case.sin))
    heads = 2 if case.layout == "bshd" else 1
    return cos.unsqueeze(heads), sin.unsqueeze(heads)


def _hugging_face_table(case: Case) -> Call:
    inv_freq = 1.0 / (BASE ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    positions = case.positions[None]
    return Call(
        lambda: hugging_face_tables(inv_freq, positions),
        lambda tables: tuple(t[0, :, : HEAD_DIM // 2] for t in tables),
    )


def _meta(case: Case) -> Turn:
    turn = torch.complex(case.cos, case.sin)
    return meta(turn[None, :, None] if case.layout == "bshd" else turn[None, None])


def eager(turn: Callable[[Case], Turn]) -> Callable[[Case], Call]:
    """A call, with its backward pass where the case has gradients."""

    def make(case: Case) -> Call:
        return _call(turn(case), case)

    return make


def _compiled(turn: Callable[[Case], Turn]) -> Callable[[Case], Call]:
    def make(case: Case) -> Call:
        torch.compiler.reset()  # each case anew: sizes are constants, and none counts against the recompile limit
        return _call(torch.compile(turn(case), fullgraph=True, dynamic=False), case)

    return make


def _call(turn: Turn, case: Case) -> Call:
    if case.grad_q is None:
        return Call(lambda: turn(case.q, case.k))
    q, k = (x.detach().requires_grad_() for x in (case.q, case.k))

    def forward_and_backward() -> tuple[Tensor, ...]:
        turned = turn(q, k)
        return *turned, *torch.autograd.grad(turned, (q, k), (case.grad_q, case.grad_k))

    return Call(forward_and_backward)


CONTENDERS = (
    Contender("copy_", "copy", _copy),
    Contender("clone", "copy", _clone, backward=False),
    Contender("mul_", "negate", _multiply, backward=False),
    Contender("ropewalk", "half", eager(_ours)),
    Contender("ropewalk, in place", "half", _ours_in_place, backward=False),
    Contender("ropewalk, interleaved", "interleaved", eager(lambda case: _ours(case, "interleaved"))),
    Contender("ropewalk, compiled", "half", _compiled(_ours)),
    Contender("Hugging Face", "half", eager(_hugging_face)),
    Contender("Hugging Face, compiled", "half", _compiled(_hugging_face)),
    Contender("Meta", "interleaved", eager(_meta)),
    Contender("Meta, compiled", "interleaved", _compiled(_meta)),
    Contender("ropewalk, table", "tables", _ours_table, backward=False),
    Contender("Hugging Face, table", "tables", _hugging_face_table, own_angles=True, backward=False),
)
