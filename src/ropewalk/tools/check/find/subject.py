"""`Subject`: call any target with q and k `[batch, seq, heads, head_dim]` and one position for each token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.tools.check.expected import Expected
from ropewalk.tools.check.find.construct import Arguments
from ropewalk.tools.check.find.form import Form, Results, from_layout, to_layout
from ropewalk.tools.check.find.memory import CallError as CallError
from ropewalk.tools.check.find.ways import ONE_ROW, Way, run_starts

CLOSE = 1e-5  # tolerance of float32 results of size 1
# The error that rounding explains: cos and sin, the product and the sum lose half a unit each, of numbers up to √2.
ROUNDING = {torch.bfloat16: 2 * 2.0**-8, torch.float16: 2 * 2.0**-11}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # that a result may have


@dataclass(frozen=True)
class Subject:
    """The target as one function of q, k and positions.

    Positions may be `[axes, batch, seq]` if there are axes. Then `[batch, seq]` stands for the same position on each.
    """

    form: Form
    way: Way
    signature: str  # the call as text, for the report
    expected: Expected
    rebuild: Callable[..., Subject] | None = None  # makes a new one, not called yet, also with another base or dtype
    module: torch.nn.Module | None = None  # that stores the angles
    channels: int = 64  # of a head
    arguments: Arguments | None = field(default=None, repr=False)  # of its constructor
    axes: int | None = None  # the number of those of positions. None means that a token has one position.
    of_grid: int = 0  # if the target counts rows and columns itself, the side of the blocks that it merges, or 1
    needs_equal_heads: bool = False  # whether q, k and v must have as many heads
    resize: Callable[[int, int], Subject | None] | None = None  # for channels of a head, and of those that rotate
    others: tuple[Subject, ...] = ()  # other calls, such as with cu_seqlens, which should compute the same
    parameters: tuple[str, ...] = ()
    passed: frozenset[str] = frozenset()  # those that this call passes
    not_passed: tuple[str, ...] = ()  # those that neither this call nor the others pass
    unread: tuple[str, ...] = ()  # those that the code does not mention
    other_layout: str = ""  # one in which the same call is right for one row or head and wrong for several, in words

    @property
    def layout(self) -> str:
        """The layout of the tensors that the target accepts."""
        return self.form.layout

    @property
    def noise(self) -> float:
        """The error of results of size 1 by 16 bits, of a norm and a rotation, or 0 if the target takes others."""
        return ROUNDING.get(self.form.dtype, 0.0) * (1 + ("weights" in self.form.takes))

    @property
    def close(self) -> float:
        """The tolerance of results of size 1."""
        return CLOSE + 2 * self.noise

    def rounding(self, right: Tensor) -> float:
        """Return the error that 16 bits cause in results of any size."""
        return 2 * self.noise * float(right.abs().max())

    @property
    def is_told_its_layer(self) -> bool:
        """Whether the constructor is passed the index of a layer."""
        return self.arguments is not None and "layer_index" in self.arguments.sizes

    @property
    def has_k(self) -> bool:
        """Whether the target rotates q and k together. Otherwise it rotates one tensor."""
        return self.form.has_k

    def to_native(self, x: Tensor) -> Tensor:
        """Return a view of x `[batch, seq, heads, head_dim]` in the target's layout."""
        return to_layout(self.layout, x)

    def from_native(self, x: Tensor) -> Tensor:
        """Return a view `[batch, seq, heads, head_dim]` of x, which has the target's layout."""
        return from_layout(self.layout, x)

    def equal_heads(self, tokens: int, heads: int, rows: int = 1) -> Tensor:
        """Return a test tensor `[rows, tokens, heads, channels]` with the same numbers in all heads of all tokens."""
        return torch.sin(1 + torch.arange(self.channels, dtype=torch.float32)).expand(rows, tokens, heads, -1)

    def _run(self, q: Tensor, k: Tensor | None, positions: Tensor, **passed: Any) -> Results:
        """Call the target with these tensors, in its own layout. Raise CallError if it fails in any way."""
        if q.dtype == torch.float32 != self.form.dtype:
            q_in, k_in, *others = _cast((q, k, *passed.values()), self.form.dtype)
            results = self._run(q_in, k_in, positions, **dict(zip(passed, others, strict=True)))
            return cast(Results, _cast(results, q.dtype))
        if self.axes is not None and positions.ndim == 2:
            positions = positions.expand(self.axes, -1, -1)
        k = k if self.has_k else None
        try:
            if q.dtype in (torch.float16, torch.bfloat16) and "cos_sin_cache" in self.form.call.parameter_of:
                with contextlib.suppress(Exception):  # the cache has the dtype of q in some engines, float32 in others
                    return self.form.run(q, k, self.way.arguments(positions, q), positions.shape[-2], **passed)
                return self.form.run(q, k, self.way.arguments(positions, q.float()), positions.shape[-2], **passed)
            return self.form.run(q, k, self.way.arguments(positions, q), positions.shape[-2], **passed)
        except (CallError, KeyboardInterrupt):
            raise
        except BaseException as e:  # a function that computes tables may raise anything
            raise CallError("raises", f"{type(e).__name__}: {_checks.message_of(e)[:200]}") from e

    def call_native(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the target with these tensors, in its own layout, and not with copies.

        Raise CallError if it raises, or does not return tensors of the shapes of q and k.
        """
        results = self._run(q, k, positions)
        found: list[Tensor] = []
        for name, x, out in zip("qk", (q, k) if self.has_k else (q,), (results.q, results.k), strict=False):
            try:
                found.append(_plain(out))
            except Exception as e:  # the methods of what is returned may raise anything
                raise CallError("wrong-shape", f"it returns {_checks.message_of(e)[:200]}") from e
            if x.shape != found[-1].shape:
                says = f"{name} of shape {tuple(x.shape)} is returned with shape {tuple(found[-1].shape)}"
                raise CallError("wrong-shape", says)
        return found[0], found[1] if self.has_k else None

    def fused(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        *,
        v: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
        **passed: Any,
    ) -> Results:
        """Call a fused target with copies of tensors `[batch, seq, heads, head_dim]`, and return such results.

        `passed` has slots, weights and halves, as for `Form.run`. What is not passed has values that change no result.
        """
        v = None if v is None else self._copy(v)
        if past is not None:
            passed["past"] = tuple(self._copy(x) for x in past)
        results = self._run(self._copy(q), self._copy(k), positions.clone(), v=v, **passed)
        try:
            q_out, k_out, v_out = (x if x is None else self.from_native(x) for x in (results.q, results.k, results.v))
        except RuntimeError as e:  # it has other axes
            raise CallError("wrong-shape", f"a result cannot be read: {_checks.message_of(e)[:200]}") from e
        return Results(cast(Tensor, q_out), k_out, v_out, results.stored)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the target with copies, and return its results, all `[batch, seq, heads, head_dim]`."""
        q_out, k_out = self.call_native(self._copy(q), self._copy(k), positions.clone())
        return self.from_native(q_out.detach()), None if k_out is None else self.from_native(k_out.detach())

    def _copy(self, x: Tensor) -> Tensor:
        return self.to_native(x).clone(memory_format=torch.contiguous_format)

    def after(self, count: int) -> Subject | None:
        """Return the same call with more tokens than positions, of which the first do not rotate, if it has one."""
        if "before" not in self.form.written:
            return None
        return replace(self, form=replace(self.form, written={**self.form.written, "before": str(count)}))

    def returns_nothing(self, x: Tensor, positions: Tensor) -> bool:
        """Return whether a call returns None, so that the results are what it has written into its arguments."""
        return self._run(self._copy(x), self._copy(x), positions).in_place

    def linear_maps(self, positions: Tensor, of: str = "q") -> Tensor:
        """Measure the linear map that the target applies to q or k, `[seq, out channels, in channels]`.

        The target is called with one head for each channel, which is 1 in that channel and 0 elsewhere.
        """
        eye = torch.eye(self.channels).expand(1, positions.shape[-1], -1, -1).contiguous()
        q_out, k_out = self(eye, eye, positions)
        return (q_out if k_out is None or of == "q" else k_out)[0].mT

    def gives_tokens_one_position(self) -> bool:
        """Whether all tokens of a call are changed alike, and otherwise if they are farther on."""
        x, first = self.equal_heads(5, 4), torch.arange(5)[None]
        with contextlib.suppress(CallError):
            if self.accepts(first + 7):
                here, there = (self(x, x, positions)[0] for positions in (first, first + 7))
                alike = all(torch.equal(out, out[:, :1].expand_as(out)) for out in (here, there))
                return alike and not torch.equal(here, there)
        return False

    def accepts(self, positions: Tensor) -> bool:
        """Whether the target accepts these positions `[batch, seq]` or `[axes, batch, seq]`."""
        rows_are_equal = bool((positions == positions[..., :1, :]).all())
        if self.layout in ONE_ROW and positions.shape[-2] != 1:
            return False
        if self.way.positions == "rows":
            return True
        if self.way.positions == "shared":
            return rows_are_equal
        consecutive = bool((positions == positions[..., :1] + torch.arange(positions.shape[-1])).all())
        if self.way.positions == "offsets":
            return consecutive
        if self.way.positions in ("runs", "packed"):
            starts = positions[0][run_starts(positions[0])]
            return len(positions) == 1 and (self.way.positions == "runs" or not bool(starts.any()))
        return rows_are_equal and consecutive and (self.way.positions == "offset" or not bool(positions[0, 0]))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the numbers of 16 or 32 bits in a tensor, a tuple or a dataclass."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in (torch.float32, *ROUNDING) else value
    if isinstance(value, tuple):
        return tuple(_cast(each, dtype) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: _cast(each, dtype) for name, each in vars(value).items()})
    return value


def _plain(x: Any) -> Tensor:
    """Return a result as a plain tensor. Raise TypeError unless it is a dense tensor of real numbers on the CPU."""
    if not isinstance(x, Tensor):
        raise TypeError(_checks.shown(x))
    with torch._C.DisableTorchFunctionSubclass():
        if x.device.type != "cpu" or x.layout != torch.strided or x.dtype not in DTYPES:
            raise TypeError(f"a tensor of {x.dtype}, {x.layout} on device {x.device}")
        return x.as_subclass(Tensor)
