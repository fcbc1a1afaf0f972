"""`Subject`, one signature for every target: q and k `[batch, seq, heads, head_dim]`, and a position for each token."""

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
"""Which positions can be passed: separate ones for each row of the batch, one row for the whole batch, a first position
from which the tokens are counted, or none (counted from 0)."""

Prepare = Callable[[Tensor, Tensor | None, Tensor], tuple[Callable[..., Any], dict[str, Any]]]
"""q and k in the layout of the function, and positions `[batch, seq]` → the function and its arguments by name."""


@dataclass(frozen=True)
class Subject:
    """The target as one function of q, k and positions.

    Args:
        signature: the call, for the report.
        layout: the layout of the tensors that the target takes.
        has_k: whether the target takes q and k.
        positions: which positions can be passed.
        ours: whether `check` passes cos and sin, so that the angles are not the target's own.
        prepared: returns the function and its arguments.
        fresh: constructs a subject that has not been called yet, with another base if one is passed. None if there is
            nothing to construct.
        module: the torch.nn.Module that holds the angles, or None.
        tables: the kind of tables that the target takes or makes, or None.
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
        """`[batch, seq, heads, head_dim]` → a view in the layout of the function."""
        if "b" not in self.layout:
            return x[0]
        batch, tokens, heads, _ = AXES[self.layout]
        order = {batch: 0, tokens: 1, heads: 2, 3: 3}
        return x.permute([order[axis] for axis in range(4)])

    def from_native(self, x: Tensor) -> Tensor:
        """The layout of the function → a view `[batch, seq, heads, head_dim]`."""
        if "b" not in self.layout:
            return x[None]
        batch, tokens, heads, _ = AXES[self.layout]
        return x.permute(batch or 0, tokens, heads, 3)

    def call_native(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the target with tensors in its own layout and with their own strides.

        Raises:
            Refused: the target raises, or does not return as many tensors as it should.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function, given = self.prepare(q, k if self.has_k else None, positions)
                returned = function(**given)
        except (Exception, SystemExit) as e:  # the target may raise anything
            raise CallError(f"{type(e).__name__}: {_checks.printable(str(e))[:200]}") from e
        results = [returned] if isinstance(returned, Tensor) else returned
        if not isinstance(results, (list, tuple)) or len(results) < 1 + self.has_k:
            raise CallError(f"it returns {_checks.described(returned)}")
        if not all(isinstance(one, Tensor) for one in results[: 1 + self.has_k]):
            raise CallError("it does not return tensors")
        return results[0], results[1] if self.has_k else None

    def __call__(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rotate q and k, `[batch, seq, heads, head_dim]`.

        Raises:
            Refused: the target raises, or returns tensors of another shape.
        """
        given = [self.to_native(x).clone(memory_format=torch.contiguous_format) for x in (q, q if k is None else k)]
        q_out, k_out = self.call_native(given[0], given[1], positions)
        if q_out.shape != given[0].shape:
            raise CallError(f"q of shape {tuple(self.to_native(q).shape)} is returned with shape {tuple(q_out.shape)}")
        if k_out is not None and k_out.shape != given[1].shape:
            raise CallError(f"k of shape {tuple(given[1].shape)} is returned with shape {tuple(k_out.shape)}")
        return self.from_native(q_out), None if k_out is None else self.from_native(k_out)

    def accepts(self, positions: Tensor) -> bool:
        """Whether these positions `[batch, seq]` can be passed."""
        counted = bool((positions == positions[:, :1] + torch.arange(positions.shape[1])).all())
        alike = bool((positions == positions[:1]).all())
        if "b" not in self.layout and positions.shape[0] != 1:
            return False
        if self.positions == "rows":
            return True
        if self.positions == "shared":
            return alike
        return alike and counted and (self.positions == "offset" or not bool(positions[0, 0]))


class CallError(Exception):
    """The target cannot be called in this way."""
