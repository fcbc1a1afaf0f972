"""`Subject`: call any target with q and k `[batch, seq, heads, head_dim]` and one position for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ropewalk import Rope, _checks
from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.memory import CallError as CallError
from ropewalk.tools.check.find.signature import Arguments

LAYOUTS = ("bshd", "bhsd", "sbhd", "thd", "hsd")
"""The layouts that are tried: those of ropewalk, and "hsd", in which all heads of the batch share one axis."""

Positions = Literal["rows", "shared", "offsets", "offset", "runs", "packed", "none"]
"""Which positions a target accepts.

"rows" is a separate list for each row of the batch, and "shared" one list for the whole batch. With "offset", the
target accepts the position of the first token and counts from there, with "offsets" from one position for each row.
With "none", it counts from 0. With "packed", one row contains several documents, and the target counts from 0 in each,
with "runs" from one position for each document.
"""

Prepare = Callable[[Tensor, Tensor | None, Tensor], tuple[Callable[..., Any], dict[str, Any]]]
"""A function of q, k (or None) and positions `[batch, seq]`, with q and k in the target's layout.

It returns the function to call, and the arguments by name.
"""

_CELLS = 1 << 15  # of the largest grid that is tried after the plain call

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # that a result may have


@dataclass(frozen=True)
class Stored:
    """The caches of a call that stores k and v of each token in a slot.

    Args:
        slots: the slot of each token, int64 `[batch, seq]`. A token with slot -1 must not be stored.
        keys_before, keys: the keys in all slots before and after the call, `[slots, heads, head_dim]`.
        values_before, values: the same for the values, or None if the target stores none.
    """

    slots: Tensor
    keys_before: Tensor
    keys: Tensor
    values_before: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class Results:
    """What a fused call computes: q, k and v `[batch, seq, heads, head_dim]`, or None for each that it lacks."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None = None
    stored: Stored | None = None


@dataclass(frozen=True)
class Subject:
    """The target as one function of q, k and positions.

    Args:
        signature: the call as text, for the report.
        layout: the layout of the tensors that the target accepts.
        has_k: whether the target rotates q and k together. Otherwise it rotates one tensor.
        positions: which positions the target accepts.
        given_tables: whether `check` passes cos and sin to the target. The target then computes no angles.
        prepare: returns the function to call and its arguments.
        rebuild: constructs a new subject that has not been called yet. A base can be passed. None if the target is a
            function, which needs no construction.
        module: the torch.nn.Module that stores the angles, or None.
        tables: the format of cos and sin that the target accepts or computes, or None.
        channels: the number of channels of a head.
        arguments: the arguments of the target's constructor, or None.
        in_place: whether the target writes its results into q and k, or into the qkv that it is passed.
        axes: the number of axes of positions, which may then be `[axes, batch, seq]`. Positions `[batch, seq]` stand
            for the same position on each axis. None means that a token has one position.
        side: the rows and columns of the largest square grid that is passed instead of positions, or None.
        resize: returns the same call for another number of channels of a head, and of rotated channels, or None if it
            does not take these. None if the sizes of the target are fixed.
        given: the rope of the tables that `check` passes. None if it passes none.
        others: other calls of the same target, such as with cu_seqlens, which should compute the same.
        takes: what a fused target takes besides q, k and positions: "v", "slots", "weights" (of its norm). With
            "stack", q, k and v are stacked in one tensor, so that all have as many heads.
        key_first: whether k comes before q in the call, so that the results may be in either order.
        fused: calls a fused target with copies of q, k, positions and, by name, of what it takes: v `[batch, seq,
            heads, head_dim]`, slots int64 `[batch, seq]`, weights, which are two tensors `[head_dim]` for q and k, and
            halves, whether both caches are parts of one tensor. What is not passed has values that change no result.
            None if the target is not fused.
    """

    signature: str
    layout: str
    has_k: bool
    positions: Positions
    given_tables: bool
    prepare: Prepare
    rebuild: Callable[..., Subject] | None = None
    module: torch.nn.Module | None = None
    tables: str | None = None
    channels: int = 64
    arguments: Arguments | None = field(default=None, repr=False)
    in_place: bool = False
    axes: int | None = None
    side: int | None = None
    resize: Callable[[int, int], Subject | None] | None = None
    given: Rope | None = None
    others: tuple[Subject, ...] = ()
    takes: frozenset[str] = frozenset()
    key_first: bool = False
    fused: Callable[..., Results] | None = None

    def to_native(self, x: Tensor) -> Tensor:
        """Return a view of x `[batch, seq, heads, head_dim]` in the target's layout."""
        return to_layout(self.layout, x)

    def from_native(self, x: Tensor, rows: int = 1) -> Tensor:
        """Return a view `[batch, seq, heads, head_dim]` of x, which has the target's layout."""
        return from_layout(self.layout, x, rows)

    def call_native(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the target with these tensors, in its own layout, and not with copies.

        Raises:
            CallError: the target raises, or does not return tensors of the shapes of q and k.
        """
        inputs = [x for x in (q, k if self.has_k else None) if x is not None]
        try:
            function, arguments = self.prepare(q, k if self.has_k else None, positions)
            returned = memory.call(function, arguments) if self.fused is None else function(**arguments)
        except (CallError, KeyboardInterrupt):
            raise
        except BaseException as e:  # a function that computes tables may raise anything
            raise CallError("raises", f"{type(e).__name__}: {_checks.message_of(e)[:200]}") from e
        if self.in_place and self.fused is None:
            returned = inputs
        results = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        try:
            results = [_plain(x) for x in results[: len(inputs)]]
        except Exception as e:  # the methods of what is returned may raise anything
            raise CallError("wrong-shape", f"it returns {_checks.message_of(e)[:200]}") from e
        if len(results) < len(inputs):
            raise CallError("wrong-shape", "it returns one tensor for q and k")
        for name, x, out in zip("qk", inputs, results, strict=False):
            if x.shape != out.shape:
                says = f"{name} of shape {tuple(x.shape)} is returned with shape {tuple(out.shape)}"
                raise CallError("wrong-shape", says)
        return results[0], results[1] if self.has_k else None

    def __call__(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the target with copies, and return its results, all `[batch, seq, heads, head_dim]`.

        Raises:
            CallError: as for `call_native`.
        """
        inputs = [self.to_native(x).clone(memory_format=torch.contiguous_format) for x in (q, q if k is None else k)]
        q_out, k_out = self.call_native(inputs[0], inputs[1], positions.clone())
        rows = positions.shape[-2]
        return self.from_native(q_out.detach(), rows), None if k_out is None else self.from_native(k_out.detach(), rows)

    def linear_maps(self, positions: Tensor, of: str = "q") -> Tensor:
        """Measure the linear map that the target applies to q or k at positions `[1, seq]` or `[axes, 1, seq]`.

        The target is called with one head for each channel, which is 1 in that channel and 0 elsewhere.

        Returns:
            `[seq, out channels, in channels]`.

        Raises:
            CallError: as for `call_native`.
        """
        eye = torch.eye(self.channels).expand(1, positions.shape[-1], -1, -1).contiguous()
        q_out, k_out = self(eye, eye.clone(), positions)
        return (q_out if k_out is None or of == "q" else k_out)[0].mT

    def accepts(self, positions: Tensor) -> bool:
        """Whether the target accepts these positions `[batch, seq]` or `[axes, batch, seq]`."""
        if self.side is not None:  # all cells of a grid are rotated, even for one token
            sizes = positions.amax((-2, -1)) + 1
            if int(sizes.expand(self.axes or 1).prod()) > _CELLS:
                return False
        rows_are_equal = bool((positions == positions[..., :1, :]).all())
        if self.layout == "thd" and positions.shape[-2] != 1:
            return False
        if self.positions == "rows":
            return True
        if self.positions == "shared":
            return rows_are_equal
        consecutive = bool((positions == positions[..., :1] + torch.arange(positions.shape[-1])).all())
        if self.positions == "offsets":
            return consecutive
        if self.positions in ("runs", "packed"):
            starts = positions[0][run_starts(positions[0])]
            return len(positions) == 1 and (self.positions == "runs" or not bool(starts.any()))
        return rows_are_equal and consecutive and (self.positions == "offset" or not bool(positions[0, 0]))


def to_layout(layout: str, x: Tensor) -> Tensor:
    """Return a view of x `[batch, seq, heads, head_dim]` in a layout."""
    if layout == "thd":
        return x[0]
    native = x.permute(["bshd".index(axis) for axis in _axes(layout)])
    return native.flatten(0, 1) if layout == "hsd" else native


def from_layout(layout: str, x: Tensor, rows: int = 1) -> Tensor:
    """Return a view `[batch, seq, heads, head_dim]` of x, which has a layout."""
    if layout == "thd":
        return x[None]
    split = x.reshape(rows, -1, *x.shape[1:]) if layout == "hsd" else x
    return split.permute([_axes(layout).index(axis) for axis in "bshd"])


def _axes(layout: str) -> str:
    return "bhsd" if layout == "hsd" else layout


def run_starts(positions: Tensor) -> Tensor:
    """Return the indices in positions `[seq]` at which they do not continue from the token before, int64 `[runs]`."""
    return torch.cat((torch.ones(1, dtype=torch.bool), positions.diff() != 1)).nonzero().flatten()


def _plain(x: Any) -> Tensor:
    """Return a result as a plain tensor. Raise TypeError unless it is a dense tensor of real numbers on the CPU."""
    if not isinstance(x, Tensor):
        raise TypeError(_checks.shown(x))
    with torch._C.DisableTorchFunctionSubclass():
        if x.device.type != "cpu" or x.layout != torch.strided or x.dtype not in DTYPES:
            raise TypeError(f"a tensor of {x.dtype}, {x.layout} on device {x.device}")
        return x.as_subclass(Tensor)
