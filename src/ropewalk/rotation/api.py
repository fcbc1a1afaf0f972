"""Rotation: cos and sin of exactly these tokens, and the turning of q and k by them. Check, choose, call."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ropewalk._checks import described, error, shown
from ropewalk._dtensor import is_dtensor
from ropewalk._layout import Layout, Pairing
from ropewalk.kernels import backend, cpu
from ropewalk.kernels.backend import PLAIN
from ropewalk.rotation import checks, fields, ops, sharded

_WHO = "Rotation"


class Rotation:
    """The rotation of a given set of tokens: cos and sin, shared by all heads and all layers, or a table for each head.

    Made by `Rope.at`; or by hand from tables of your own, also learned ones: gradients reach cos and sin. Immutable,
    picklable, a pytree of cos and sin. A plain class on purpose: FSDP2 silently turns tensors in dataclasses and tuples
    to bfloat16.

    Args:
        cos, sin: `[seq, pairs]`, `[batch, seq, pairs]`, or `[pairs]` for one angle at all tokens; float32 or float64,
            dimensionless, the attention factor included. With `per_head`: `[heads, seq, pairs]` or `[batch, heads, seq,
            pairs]`.
        pairing: "half" or "interleaved", as in `Rope`.
        head_dim: channels of the tensors to turn; rotary_offset + 2 · pairs when None.
        rotary_offset: the first rotated channel.
        attention_factor: what cos and sin were multiplied by; `inverse` divides by it.
        per_head: whether each head has a table of its own, as where frequencies are learned for each (RoPE-Mixed). It
            is said, and never guessed from sizes. q and k must have as many heads as the tables: where they differ
            (GQA), each is rotated by a Rotation of its own.

    Attributes:
        rotary_dim: rotated channels, 2 · pairs. Tables of another width, put in by `tree_map`, are refused.

    Raises:
        RopeError: a shape, dtype or number does not fit.

    Example:
        >>> angle = torch.tensor([[0.0], [torch.pi / 2]])  # two tokens, one pair
        >>> rotation = Rotation(angle.cos(), angle.sin(), pairing="half")
        >>> rotation(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]), layout="thd").round()
        tensor([[[1., 0.]],
        <BLANKLINE>
                [[-0., 1.]]])
    """

    __slots__ = (
        "_kept",
        "attention_factor",
        "cos",
        "head_dim",
        "pairing",
        "per_head",
        "rotary_dim",
        "rotary_offset",
        "sin",
    )

    cos: Tensor
    sin: Tensor
    pairing: Pairing
    head_dim: int
    rotary_dim: int
    rotary_offset: int
    attention_factor: float
    per_head: bool

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        *,
        pairing: Pairing,
        head_dim: int | None = None,
        rotary_offset: int = 0,
        attention_factor: float = 1.0,
        per_head: bool = False,
    ) -> None:
        per_head = fields.flag(per_head)
        checks.tables(cos, sin, per_head=per_head)
        context = fields.checked(pairing, head_dim, 2 * cos.shape[-1], rotary_offset, attention_factor, per_head)
        _set(self, cos, sin, *context)

    @overload
    def __call__(self, q: Tensor, k: None = None, *, layout: Layout) -> Tensor: ...
    @overload
    def __call__(self, q: Tensor, k: Tensor, *, layout: Layout) -> tuple[Tensor, Tensor]: ...
    def __call__(self, q: Tensor, k: Tensor | None = None, *, layout: Layout) -> Tensor | tuple[Tensor, Tensor]:
        """Turn q, or q and k, into new tensors.

        Args:
            q: `[batch, seq, heads, head_dim]` in the order that `layout` says; float16, bfloat16, float32 or float64;
                any strides. Not changed.
            k: the same with its own number of heads (GQA), or None.
                Both may be DTensors. Each rank then rotates its own part, and the result has their placements; plain
                cos and sin beside them have rows for all tokens, or for those of this rank, which their sizes tell.
            layout: "bshd", "bhsd", "sbhd", or "thd" for tokens without a batch axis.

        Returns:
            Shape and dtype of q (and of k, in a tuple). Channels outside the rotated ones are copied.

        Raises:
            RopeError: layout is unknown, or a shape, dtype or device does not fit the tables; DTensors beside plain
                tensors in q and k.

        Precision:
            arithmetic in float32 (float64 for float64 tensors), one rounding to the dtype of the tensor.
        """
        done: Tensor | tuple[Tensor, Tensor] | None = self._at_once(q, k, layout, in_place=False)
        if done is not None:
            return done
        tensors = [q] if k is None else [q, k]
        cos, sin = self._fitting(tensors, layout)
        turned = ops.rotate(tensors, cos, sin, layout=layout, pairing=self.pairing, rotary_offset=self.rotary_offset)
        return turned[0] if k is None else (turned[0], turned[1])

    def apply_(self, q: Tensor, k: Tensor | None = None, *, layout: Layout) -> None:
        """Rotate q, or q and k, in place; arguments and errors as for a call.

        Works on slices of a fused QKV tensor, and where gradients are recorded. Both tensors are checked before
        either is changed. q and k must not share elements: that is an error, but not under `torch.compile`, where
        memory cannot be looked at; there both are rotated from what they held before the call.

        Raises:
            RopeError: also if q and k share elements, or if one of them cannot be changed in place.
        """
        if self._at_once(q, k, layout, in_place=True) is not None:
            return
        tensors = [q] if k is None else [q, k]
        cos, sin = self._fitting(tensors, layout)
        ops.rotate_(tensors, cos, sin, layout=layout, pairing=self.pairing, rotary_offset=self.rotary_offset)

    def _fitting(self, tensors: list[Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
        """cos and sin as `ops` takes them, if they fit: per head with four axes, batch among them."""
        cos, sin = self.cos, self.sin
        plain = type(tensors[0]) in PLAIN and type(tensors[-1]) in PLAIN and type(cos) in PLAIN
        if plain or not any(map(is_dtensor, (*tensors, cos, sin))):
            return self._checked(tensors, layout, cos, sin)
        before: Any = getattr(self, "_kept", None)
        check = partial(self._checked, tensors, layout)
        kept, made = sharded.beside(tensors, cos, sin, layout, self.per_head, before, check)
        if kept is not before:
            object.__setattr__(self, "_kept", kept)  # for the layers that follow
        return made

    def _checked(self, tensors: list[Tensor], layout: Layout, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        per_head = self.per_head
        checks.tensors_fit(tensors, layout, cos, sin, self.head_dim, self.rotary_dim, per_head=per_head)
        return (cos.unsqueeze(0), sin.unsqueeze(0)) if per_head and cos.ndim == 3 else (cos, sin)

    def _at_once(self, q: Tensor, k: Tensor | None, layout: Layout, *, in_place: bool) -> Any:
        """The usual call on the CPU, done as a whole in compiled code; None where it was not."""
        if not backend.AT_ONCE or torch.compiler.is_compiling():
            return None
        if self.per_head:  # [heads, seq, pairs] would be read as [batch, seq, pairs]
            return None
        how = (self.head_dim, self.rotary_dim, self.pairing == "interleaved", self.rotary_offset, in_place)
        done = cpu.rotate_plain(q, k, self.cos, self.sin, layout, *how)
        if done is None and type(q) not in PLAIN and (kept := getattr(self, "_kept", None)) is not None:
            return sharded.at_once(kept, q, k, self.cos, self.sin, layout, *how)
        return done

    def inverse(self) -> Rotation:
        """The rotation that undoes this one, attention factor included, up to rounding."""
        square = self.attention_factor * self.attention_factor
        return self._with(self.cos / square, -self.sin / square, attention_factor=1.0 / self.attention_factor)

    def __getitem__(self, rows: Tensor | slice) -> Rotation:
        """Rows of a table built once: `table[positions]` (CUDA graphs, decoding).

        Args:
            rows: int32 or int64 tensor `[seq]` or `[batch, seq]` of row numbers, 0 ≤ row < rows of the table; or a
                slice.

        Returns:
            A `Rotation` for tokens of shape rows. Gradients reach the table.

        Raises:
            RopeError: this is no table `[rows, pairs]` (per head `[heads, rows, pairs]`); rows is something else; on
                the CPU, a row outside the table. On other devices such a row is the device's own assertion: nothing is
                read back to check.
        """
        if len(self.tokens) != 1:
            raise error(
                "Rotation[rows]",
                "rows are taken from a table made for positions [seq]",
                f"tables of shape {tuple(self.cos.shape)}",
                "Build it with rope.at(torch.arange(n)).",
            )
        if isinstance(rows, slice):
            return self._with(self.cos[..., rows, :], self.sin[..., rows, :])
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64) or rows.ndim not in (1, 2):
            raise error(
                "Rotation[rows]",
                "rows must be an int32 or int64 tensor [seq] or [batch, seq], or a slice",
                described(rows),
                "Pass the positions of the tokens.",
            )
        try:
            if self.per_head:
                return self._with(_rows_per_head(rows, self.cos), _rows_per_head(rows, self.sin))
            # embedding and not cos[rows], which would take row -1 for the last one.
            return self._with(
                torch.nn.functional.embedding(rows, self.cos), torch.nn.functional.embedding(rows, self.sin)
            )
        except IndexError as e:
            raise error(
                "Rotation[rows]",
                f"every row must be from 0 to {self.tokens[0] - 1}",
                "one outside",
                "Build a longer table, or use rope.at(positions), which takes any position.",
            ) from e

    def to(self, device: torch.device | str) -> Rotation:
        """The same tables on another device. The dtype is decided once, in `Rope.at`, and cannot be changed.

        Raises:
            RopeError: device is a dtype.
        """
        if isinstance(device, torch.dtype):
            raise error(
                "Rotation.to",
                "only the device can be changed",
                str(device),
                "q and k keep their own dtype; for float64 tables use rope.at(..., dtype=torch.float64).",
            )
        return self._with(self.cos.to(device), self.sin.to(device))

    def _with(self, cos: Tensor, sin: Tensor, *, attention_factor: float | None = None) -> Rotation:
        factor = self.attention_factor if attention_factor is None else attention_factor
        return unchecked(
            cos, sin, self.pairing, self.head_dim, self.rotary_dim, self.rotary_offset, factor, self.per_head
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Shape of the tokens that it is for: `(seq,)`, `(batch, seq)`, or `()` for one angle at all of them."""
        shape = self.cos.shape
        return (*shape[:-3], shape[-2]) if self.per_head else tuple(shape[:-1])

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Rotation is immutable: {name} cannot be set. Make a new one with Rope.at.")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, tuple(getattr(self, name) for name in fields.NAMES)

    def __repr__(self) -> str:
        if not isinstance(self.cos, Tensor) or not isinstance(self.sin, Tensor):  # a pytree holds something else there
            return f"Rotation(cos={shown(self.cos)}, sin={shown(self.sin)})"
        parts = [f"tokens={self.tokens}", f"pairs={self.cos.shape[-1]}", f"pairing={self.pairing!r}"]
        parts += [f"heads={self.cos.shape[-3]}"] if self.per_head else []
        parts += [f"head_dim={self.head_dim}"] if self.head_dim != 2 * self.cos.shape[-1] else []
        parts += [f"rotary_offset={self.rotary_offset}"] if self.rotary_offset else []
        parts += [f"attention_factor={self.attention_factor!r}"] if self.attention_factor != 1.0 else []
        return f"Rotation({', '.join(parts)}, dtype={self.cos.dtype}, device={str(self.cos.device)!r})"


def _set(
    rotation: Rotation,
    cos: object,
    sin: object,
    pairing: object,
    head_dim: object,
    rotary_dim: object,
    rotary_offset: object,
    attention_factor: object,
    per_head: object = False,
) -> None:
    # Line by line, since a loop would cost a tenth of the rotation of one token.
    put = object.__setattr__
    put(rotation, "cos", cos)
    put(rotation, "sin", sin)
    put(rotation, "pairing", pairing)
    put(rotation, "head_dim", head_dim)
    put(rotation, "rotary_dim", rotary_dim)
    put(rotation, "rotary_offset", rotary_offset)
    put(rotation, "attention_factor", attention_factor)
    put(rotation, "per_head", per_head)


def _rows_per_head(rows: Tensor, table: Tensor) -> Tensor:
    """Rows of a table `[heads, rows, pairs]`, as `embedding` takes those of a table `[rows, pairs]`."""
    return torch.stack([torch.nn.functional.embedding(rows, of_head) for of_head in table], dim=-3)


def unchecked(*values: Any) -> Rotation:
    """A Rotation from its fields, without checks.

    For Rope, whose numbers are checked, and for pytrees, which put other things than tensors in the place of cos and
    sin. A call compares the tables with the other fields, so that tables of another size are never used.
    """
    rotation = object.__new__(Rotation)
    _set(rotation, *values)
    return rotation


def restore(*values: Any) -> Rotation:
    """A Rotation from a pickle, which may hold anything: checked like one that is made by hand."""
    context = fields.checked(*values[2:])
    checks.tables(values[0], values[1], rotary_dim=context[2], per_head=context[5])
    return unchecked(*values[:2], *context)


def _flatten(rotation: Rotation) -> tuple[list[Any], tuple[Any, ...]]:
    return [rotation.cos, rotation.sin], tuple(getattr(rotation, name) for name in fields.NAMES[2:])


def _flatten_with_keys(rotation: Rotation) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    (cos, sin), context = _flatten(rotation)
    return [(pytree.GetAttrKey("cos"), cos), (pytree.GetAttrKey("sin"), sin)], context


def _unflatten(tables: Any, context: tuple[Any, ...]) -> Rotation:
    return unchecked(*tables, *context)


pytree.register_pytree_node(
    Rotation,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="ropewalk.Rotation",
    to_dumpable_context=list,
    from_dumpable_context=lambda context: fields.checked(*context),
)

torch.serialization.add_safe_globals([restore])  # torch.load(weights_only=True), also of exported programs
