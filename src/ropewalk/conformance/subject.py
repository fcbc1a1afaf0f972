"""`Subject`: call any target with q and k `[batch, seq, heads, head_dim]` and one position for each token."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk._layout import AXES, Layout
from ropewalk.conformance.construct import Arguments

Positions = Literal["rows", "shared", "offset", "none"]
"""Which positions a target accepts.

"rows" is a separate list for each row of the batch, and "shared" one list for the whole batch. With "offset", the
target accepts the position of the first token and counts from there. With "none", it counts from 0.
"""

Prepare = Callable[[Tensor, Tensor | None, Tensor], tuple[Callable[..., Any], dict[str, Any]]]
"""A function of q, k (or None) and positions `[batch, seq]`, with q and k in the target's layout.

It returns the function to call, and the arguments by name.
"""


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
    """

    signature: str
    layout: Layout
    has_k: bool
    positions: Positions
    given_tables: bool
    prepare: Prepare
    rebuild: Callable[..., Subject] | None = None
    module: torch.nn.Module | None = None
    tables: str | None = None
    channels: int = 64
    arguments: Arguments | None = field(default=None, repr=False)

    def to_native(self, x: Tensor) -> Tensor:
        """Return a view of x `[batch, seq, heads, head_dim]` in the target's layout."""
        if "b" not in self.layout:
            return x[0]
        batch, tokens, heads, _ = AXES[self.layout]
        order = {batch: 0, tokens: 1, heads: 2, 3: 3}
        return x.permute([order[axis] for axis in range(4)])

    def from_native(self, x: Tensor) -> Tensor:
        """Return a view `[batch, seq, heads, head_dim]` of x, which has the target's layout."""
        if "b" not in self.layout:
            return x[None]
        batch, tokens, heads, _ = AXES[self.layout]
        return x.permute(batch or 0, tokens, heads, 3)

    def call_native(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the target with tensors in its own layout, without copying them, so that their strides are kept.

        Raises:
            CallError: the target raises, or returns fewer tensors than expected.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function, arguments = self.prepare(q, k if self.has_k else None, positions)
                returned = function(**arguments)
        except (Exception, SystemExit) as e:  # the target may raise anything
            raise CallError(f"{type(e).__name__}: {_checks.printable(str(e))[:200]}") from e
        results = [returned] if isinstance(returned, Tensor) else returned
        if not isinstance(results, (list, tuple)) or len(results) < 1 + self.has_k:
            raise CallError(f"it returns {_checks.describe(returned)}")
        if not all(isinstance(result, Tensor) for result in results[: 1 + self.has_k]):
            raise CallError("it does not return tensors")
        return results[0], results[1] if self.has_k else None

    def __call__(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the target with copies of q and k, and return its results, all `[batch, seq, heads, head_dim]`.

        Raises:
            CallError: the target raises, returns fewer tensors than expected, or returns a tensor whose shape differs
                from that of its input.
        """
        inputs = [self.to_native(x).clone(memory_format=torch.contiguous_format) for x in (q, q if k is None else k)]
        q_out, k_out = self.call_native(inputs[0], inputs[1], positions)
        if q_out.shape != inputs[0].shape:
            raise CallError(f"q of shape {tuple(self.to_native(q).shape)} is returned with shape {tuple(q_out.shape)}")
        if k_out is not None and k_out.shape != inputs[1].shape:
            raise CallError(f"k of shape {tuple(inputs[1].shape)} is returned with shape {tuple(k_out.shape)}")
        return self.from_native(q_out), None if k_out is None else self.from_native(k_out)

    def accepts(self, positions: Tensor) -> bool:
        """Whether the target accepts these positions `[batch, seq]`."""
        consecutive = bool((positions == positions[:, :1] + torch.arange(positions.shape[1])).all())
        rows_are_equal = bool((positions == positions[:1]).all())
        if "b" not in self.layout and positions.shape[0] != 1:
            return False
        if self.positions == "rows":
            return True
        if self.positions == "shared":
            return rows_are_equal
        return rows_are_equal and consecutive and (self.positions == "offset" or not bool(positions[0, 0]))


class CallError(Exception):
    """The target cannot be called in the way that a `Subject` describes."""
