"""One way to call whatever is checked: q and k as `[batch, seq, heads, head_dim]` and a position for each token."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk._layout import AXES, Layout
from ropewalk.conformance.construct import Made

Positions = Literal["rows", "shared", "offset", "none"]
"""Each row of the batch may have its own; one row for all; a first one, from which on they count; always from 0 on."""

Prepared = Callable[[Tensor, Tensor | None, Tensor], tuple[Callable[..., Any], dict[str, Any]]]
"""Tensors in the layout of the function, positions `[batch, seq]` → the function and its arguments by name."""


@dataclass(frozen=True)
class Subject:
    """What is checked, as one function.

    Args:
        shape: how it is called, in words.
        layout: of the tensors that it takes.
        has_k: whether it takes q and k.
        positions: which positions it can be given.
        ours: whether cos and sin are given to it, so that the angles are not its own.
        prepared: the function and what it is to be called with.
        fresh: makes another one that has not been called yet, of another base where one is given; or None.
        module: the torch.nn.Module that holds the angles, or None.
        tables: what kind of tables it takes or makes, or None.
        channels: of the heads that it is given.
        made: what its constructor was given, or None.
    """

    shape: str
    layout: Layout
    has_k: bool
    positions: Positions
    ours: bool
    prepared: Prepared
    fresh: Callable[..., Subject] | None = None
    module: torch.nn.Module | None = None
    tables: str | None = None
    channels: int = 64
    made: Made | None = field(default=None, repr=False)

    def native(self, x: Tensor) -> Tensor:
        """`[batch, seq, heads, head_dim]` → a view in the layout of the function."""
        if "b" not in self.layout:
            return x[0]
        batch, tokens, heads, _ = AXES[self.layout]
        order = {batch: 0, tokens: 1, heads: 2, 3: 3}
        return x.permute([order[axis] for axis in range(4)])

    def back(self, x: Tensor) -> Tensor:
        """And back."""
        if "b" not in self.layout:
            return x[None]
        batch, tokens, heads, _ = AXES[self.layout]
        return x.permute(batch or 0, tokens, heads, 3)

    def called(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rotated tensors in the layout of the function, as they come.

        Raises:
            Refused: it raises, or returns something else than as many tensors.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function, given = self.prepared(q, k if self.has_k else None, positions)
                returned = function(**given)
        except (Exception, SystemExit) as e:  # whatever their function raises
            raise Refused(f"{type(e).__name__}: {_checks.printable(str(e))[:200]}") from e
        results = [returned] if isinstance(returned, Tensor) else returned
        if not isinstance(results, (list, tuple)) or len(results) < 1 + self.has_k:
            raise Refused(f"it returns {_checks.described(returned)}")
        if not all(isinstance(one, Tensor) for one in results[: 1 + self.has_k]):
            raise Refused("it returns something else than tensors")
        return results[0], results[1] if self.has_k else None

    def __call__(self, q: Tensor, k: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rotated q and k, `[batch, seq, heads, head_dim]`.

        Raises:
            Refused: it raises, or returns another shape.
        """
        given = [self.native(x).clone(memory_format=torch.contiguous_format) for x in (q, q if k is None else k)]
        q_out, k_out = self.called(given[0], given[1], positions)
        if q_out.shape != given[0].shape:
            raise Refused(f"q of shape {tuple(self.native(q).shape)} comes back as {tuple(q_out.shape)}")
        if k_out is not None and k_out.shape != given[1].shape:
            raise Refused(f"k of shape {tuple(given[1].shape)} comes back as {tuple(k_out.shape)}")
        return self.back(q_out), None if k_out is None else self.back(k_out)

    def takes(self, positions: Tensor) -> bool:
        """Whether it can be asked for these positions, `[batch, seq]`."""
        counted = bool((positions == positions[:, :1] + torch.arange(positions.shape[1])).all())
        alike = bool((positions == positions[:1]).all())
        if "b" not in self.layout and positions.shape[0] != 1:
            return False
        if self.positions == "rows":
            return True
        if self.positions == "shared":
            return alike
        return alike and counted and (self.positions == "offset" or not bool(positions[0, 0]))


class Refused(Exception):  # noqa: N818
    """What is checked cannot be called in this way."""
