"""Rotation: cos and sin for a given set of tokens, and the methods that rotate q and k by them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

from ropewalk._checks import MAX_HEAD_DIM, boolean, check_pairing, describe, error, integer, shown
from ropewalk._checks import attention_factor as check_factor
from ropewalk._layout import Layout, Options, Pairing
from ropewalk.kernels import backend, cpu
from ropewalk.kernels.backend import PLAIN
from ropewalk.rotation import checks, ops
from ropewalk.rotation.placements import is_dtensor

_WHO = "Rotation"
FIELDS = ("cos", "sin", "pairing", "head_dim", "rotary_dim", "rotary_offset", "attention_factor", "per_head")
"""All fields, in the order of a pickle: the two tables, then the context of the pytree."""


class _Fields:
    """The fields of a Rotation while they are set. `create_unchecked` then changes the class."""

    __slots__ = ("_dtensor_cache", *FIELDS)

    cos: Tensor
    sin: Tensor
    pairing: Pairing
    head_dim: int
    rotary_dim: int
    rotary_offset: int
    attention_factor: float
    per_head: bool


class Rotation(_Fields):
    """The rotation of a given set of tokens: cos and sin, shared by all heads and layers, or one table per head.

    `Rope.at` returns one. You can also build one from your own tables, including learned ones: gradients reach cos and
    sin. A Rotation is immutable, picklable, and a pytree of cos and sin. It is a plain class because FSDP2 silently
    casts tensors in dataclasses and tuples to bfloat16.

    Args:
        cos, sin: `[seq, pairs]`, `[batch, seq, pairs]`, or `[pairs]` for one angle at all tokens; float32 or float64,
            dimensionless, including the attention factor. With `per_head`: `[heads, seq, pairs]` or `[batch, heads,
            seq, pairs]`.
        pairing: "half" or "interleaved", as in `Rope`.
        head_dim: number of channels of the tensors to rotate. None means rotary_offset + 2 · pairs.
        rotary_offset: the first rotated channel.
        attention_factor: the factor that cos and sin include; `inverse` divides by it.
        per_head: whether each head has its own table, as when each head learns its frequencies (RoPE-Mixed). It is not
            inferred from the shapes. q and k must have as many heads as the tables. If q and k have different numbers
            of heads (GQA), rotate each with its own Rotation.

    Attributes:
        rotary_dim: number of rotated channels, 2 · pairs. Calls raise if `tree_map` changed the number of pairs.

    Raises:
        RopeError: a shape, dtype or number does not fit.

    Examples:
        >>> angle = torch.tensor([[0.0], [torch.pi / 2]])  # two tokens, one pair
        >>> rotation = Rotation(angle.cos(), angle.sin(), pairing="half")
        >>> rotation(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]), layout="thd").round()
        tensor([[[1., 0.]],
        <BLANKLINE>
                [[-0., 1.]]])
    """

    __slots__ = ()

    passes: ClassVar[Literal[1]] = 1  # how often attention scores a pair of query and key; 2 for a TwoPass

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
        per_head = _check_per_head(per_head)
        checks.check_tables(cos, sin, per_head=per_head)
        context = _validate(pairing, head_dim, 2 * cos.shape[-1], rotary_offset, attention_factor, per_head)
        _set_fields(self, cos, sin, *context)

    @overload
    def __call__(self, q: Tensor, k: None = None, *, layout: Layout) -> Tensor: ...
    @overload
    def __call__(self, q: Tensor, k: Tensor, *, layout: Layout) -> tuple[Tensor, Tensor]: ...
    def __call__(self, q: Tensor, k: Tensor | None = None, *, layout: Layout) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate q, or q and k, into new tensors.

        Args:
            q: `[batch, seq, heads, head_dim]` in the order given by `layout`; float16, bfloat16, float32 or float64;
                any strides. Not changed.
            k: as q, but its number of heads may differ (GQA). None rotates only q.
                If q and k are DTensors, each rank rotates its own shard, and the results have the same placements.
                Plain cos and sin then have rows for the tokens of all ranks.
            layout: "bshd", "bhsd", "sbhd", or "thd" for tokens without a batch axis.

        Returns:
            A tensor with the shape and dtype of q, or a tuple of two if k is passed. Unrotated channels are copied.

        Raises:
            RopeError: layout is unknown; a shape, dtype or device does not fit the tables; or one of q and k is a
                DTensor and the other is not.

        Precision:
            Arithmetic in float32 (float64 for float64 tensors), then one rounding to the dtype of the tensor.
        """
        rotated: Tensor | tuple[Tensor, Tensor] | None = self._fast_path(q, k, layout, False)
        if rotated is not None:
            return rotated
        tensors = [q] if k is None else [q, k]
        options = Options(layout, self.pairing == "interleaved", self.rotary_offset)
        plain = type(q) in PLAIN and type(self.cos) in PLAIN and (k is None or type(k) in PLAIN)
        if not plain and any(map(is_dtensor, (*tensors, self.cos, self.sin))):
            from ropewalk.rotation import dtensor

            results = dtensor.rotate(self, tensors, options)
        else:
            numbers = (self.head_dim, self.rotary_dim, self.per_head)
            cos, sin = checks.check_call(tensors, self.cos, self.sin, layout, *numbers)
            results = ops.rotate(tensors, cos, sin, options)
        return results[0] if k is None else (results[0], results[1])

    def apply_(self, q: Tensor, k: Tensor | None = None, *, layout: Layout) -> None:
        """Rotate q, or q and k, in place. Arguments and errors are as for a call, which returns new tensors.

        q and k may be slices of a fused QKV tensor, and gradients may be recorded. Both tensors are checked before
        either is changed. Under `torch.compile`, shared elements of q and k are not detected. Both tensors are then
        rotated from their values before the call.

        Raises:
            RopeError: as for a call; or q and k share elements; or one of the two cannot be changed in place.
        """
        if self._fast_path(q, k, layout, True) is not None:
            return
        tensors = [q] if k is None else [q, k]
        options = Options(layout, self.pairing == "interleaved", self.rotary_offset)
        if any(map(is_dtensor, (*tensors, self.cos, self.sin))):
            from ropewalk.rotation import dtensor

            dtensor.rotate_(self, tensors, options)
        else:
            numbers = (self.head_dim, self.rotary_dim, self.per_head)
            ops.rotate_(tensors, *checks.check_call(tensors, self.cos, self.sin, layout, *numbers), options)

    def _fast_path(self, q: Tensor, k: Tensor | None, layout: Layout, in_place: bool) -> Any:
        """Run a common call on the CPU entirely in C++. For any other call, do nothing and return None."""
        if not backend.FAST_PATH or is_dynamo_compiling():
            return None
        # Each argument is written out, because a tuple of some of them would take a twentieth of the time of one token.
        return cpu.rotate_plain(
            q,
            k,
            self.cos,
            self.sin,
            layout,
            self.head_dim,
            self.rotary_dim,
            self.pairing == "interleaved",
            self.rotary_offset,
            self.per_head,
            in_place,
        )

    def inverse(self) -> Rotation:
        """Return the rotation that undoes this one, including the attention factor, up to rounding."""
        square = self.attention_factor * self.attention_factor
        return self._replace_tables(self.cos / square, -self.sin / square, attention_factor=1.0 / self.attention_factor)

    def __getitem__(self, rows: Tensor | slice) -> Rotation:
        """Select rows of this rotation, a table that is built once for CUDA graphs or decoding: `table[positions]`.

        Args:
            rows: int32 or int64 tensor `[seq]` or `[batch, seq]` of row numbers, 0 ≤ row < rows of the table; or a
                slice.

        Returns:
            A `Rotation` for one token per entry of rows. Gradients reach the table. If rows or the table are a DTensor,
            cos and sin are DTensors with the placements of rows. A sharded table is gathered. If the table is a DTensor
            and rows are a plain tensor, rows must contain all tokens on every rank.

        Raises:
            RopeError: the tables are not `[rows, pairs]` (per head `[heads, rows, pairs]`); rows has an unsupported
                type or shape, or another mesh than the table; or, on the CPU, a row is outside the table. On other
                devices, a row outside the table triggers the device's own assertion, because checking it here would
                require reading values back.
        """
        if len(self.tokens) != 1:
            raise error(
                "Rotation[rows]",
                "the table must be one for positions [seq]",
                f"tables of shape {tuple(self.cos.shape)}",
                "Build it with rope.at(torch.arange(n)).",
            )
        if isinstance(rows, slice):
            return self._replace_tables(self.cos[..., rows, :], self.sin[..., rows, :])
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64) or rows.ndim not in (1, 2):
            raise error(
                "Rotation[rows]",
                "rows must be an int32 or int64 tensor [seq] or [batch, seq], or a slice",
                describe(rows),
                "Pass the positions of the tokens.",
            )
        cos, sin = self.cos, self.sin
        if is_dtensor(rows) or is_dtensor(cos):
            from ropewalk.rotation import dtensor

            rows, cos, sin = dtensor.convert_for_lookup(rows, cos, sin)
        try:
            if self.per_head:
                return self._replace_tables(_rows_per_head(rows, cos), _rows_per_head(rows, sin))
            # embedding, because cos[rows] would accept row -1 as the last one.
            lookup = torch.nn.functional.embedding
            return self._replace_tables(lookup(rows, cos), lookup(rows, sin))
        except IndexError as e:
            raise error(
                "Rotation[rows]",
                f"every row must be from 0 to {self.tokens[0] - 1}",
                "a row outside this range",
                "Build a longer table, or use rope.at(positions), which takes any position.",
            ) from e

    def to(self, device: torch.device | str) -> Rotation:
        """Copy the tables to another device. The dtype is chosen in `Rope.at` and cannot be changed afterwards.

        Raises:
            RopeError: a dtype was passed.
        """
        if isinstance(device, torch.dtype):
            raise error(
                "Rotation.to",
                "only the device can be changed",
                str(device),
                "q and k keep their own dtype; for float64 tables use rope.at(..., dtype=torch.float64).",
            )
        return self._replace_tables(self.cos.to(device), self.sin.to(device))

    def _replace_tables(self, cos: Tensor, sin: Tensor, *, attention_factor: float | None = None) -> Rotation:
        factor = self.attention_factor if attention_factor is None else attention_factor
        return create_unchecked(
            cos, sin, self.pairing, self.head_dim, self.rotary_dim, self.rotary_offset, factor, self.per_head
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Shape of the tokens: `(seq,)`, `(batch, seq)`, or `()` for one angle at all tokens."""
        shape = self.cos.shape
        return (*shape[:-3], shape[-2]) if self.per_head else tuple(shape[:-1])

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Rotation is immutable: {name} cannot be set. Create a new one with Rope.at.")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, tuple(getattr(self, name) for name in FIELDS)

    def __repr__(self) -> str:
        if not isinstance(self.cos, Tensor) or not isinstance(self.sin, Tensor):  # a pytree may hold other leaves
            return f"Rotation(cos={shown(self.cos)}, sin={shown(self.sin)})"
        parts = [f"tokens={self.tokens}", f"pairs={self.cos.shape[-1]}", f"pairing={self.pairing!r}"]
        parts += [f"heads={self.cos.shape[-3]}"] if self.per_head else []
        parts += [f"head_dim={self.head_dim}"] if self.head_dim != 2 * self.cos.shape[-1] else []
        parts += [f"rotary_offset={self.rotary_offset}"] if self.rotary_offset else []
        parts += [f"attention_factor={self.attention_factor!r}"] if self.attention_factor != 1.0 else []
        return f"Rotation({', '.join(parts)}, dtype={self.cos.dtype}, device={str(self.cos.device)!r})"


def _set_fields(rotation: Rotation, *values: object) -> None:
    for name, value in zip(FIELDS, values, strict=True):
        object.__setattr__(rotation, name, value)


def _rows_per_head(rows: Tensor, table: Tensor) -> Tensor:
    """Select the given rows of each head from a table `[heads, rows, pairs]`."""
    return torch.stack([torch.nn.functional.embedding(rows, head) for head in table], dim=-3)


def create_unchecked(*values: Any) -> Rotation:
    """Create a Rotation from its fields, without checks.

    `Rope` uses this because its numbers are already checked. Pytrees use it because their leaves need not be tensors.
    Each call of the Rotation compares the sizes of its tables with the other fields, so wrong tables raise there.
    """
    rotation: Rotation
    if is_dynamo_compiling():  # it does not support the assignment of a class
        rotation = object.__new__(Rotation)
        _set_fields(rotation, *values)
        return rotation
    fields: Any = object.__new__(_Fields)
    (
        fields.cos,
        fields.sin,
        fields.pairing,
        fields.head_dim,
        fields.rotary_dim,
        fields.rotary_offset,
        fields.attention_factor,
        fields.per_head,
    ) = values
    fields.__class__ = Rotation  # `Rope.at` would take a sixth longer if object.__setattr__ set each field
    rotation = fields
    return rotation


def restore(*values: Any) -> Rotation:
    """Create a Rotation from a pickle, whose contents are checked like the arguments of the constructor."""
    context = _validate(*values[2:])
    checks.check_tables(values[0], values[1], rotary_dim=context[2], per_head=context[5])
    return create_unchecked(*values[:2], *context)


def _validate(*context: Any) -> tuple[Pairing, int, int, int, float, bool]:
    """Check and return the fields after the tables, which come from a caller, a pickle or an exported program."""
    if len(context) != len(FIELDS) - 2:
        must = f"a saved rotation must have the fields {', '.join(FIELDS)}"
        raise error(_WHO, must, shown(context), "Save it again with this version.")
    pairing, head_dim, rotary_dim, rotary_offset, factor, per_head = context
    check_pairing(_WHO, pairing)
    rotary_dim = integer(_WHO, "rotary_dim", rotary_dim, at_least=2, at_most=MAX_HEAD_DIM)
    if rotary_dim % 2:
        raise error(_WHO, "rotary_dim must be even", str(rotary_dim), "Pass two channels for each pair.")
    rotary_offset = integer(_WHO, "rotary_offset", rotary_offset, at_least=0, at_most=MAX_HEAD_DIM)
    end = rotary_offset + rotary_dim
    head_dim = end if head_dim is None else integer(_WHO, "head_dim", head_dim, at_least=end, at_most=MAX_HEAD_DIM)
    return pairing, head_dim, rotary_dim, rotary_offset, check_factor(_WHO, factor), _check_per_head(per_head)


def _check_per_head(per_head: Any) -> bool:
    return boolean(_WHO, "per_head", per_head, "Pass a flag, not the number of heads, which is read from cos and sin.")


def _flatten(rotation: Rotation) -> tuple[list[Any], tuple[Any, ...]]:
    return [rotation.cos, rotation.sin], tuple(getattr(rotation, name) for name in FIELDS[2:])


def _flatten_with_keys(rotation: Rotation) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    (cos, sin), context = _flatten(rotation)
    return [(pytree.GetAttrKey("cos"), cos), (pytree.GetAttrKey("sin"), sin)], context


def _unflatten(tables: Any, context: tuple[Any, ...]) -> Rotation:
    return create_unchecked(*tables, *context)


pytree.register_pytree_node(
    Rotation,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name=f"{__name__.partition('.')[0]}.Rotation",
    to_dumpable_context=list,
    from_dumpable_context=lambda context: _validate(*context),
)

torch.serialization.add_safe_globals([restore])  # for torch.load(weights_only=True), also of exported programs
