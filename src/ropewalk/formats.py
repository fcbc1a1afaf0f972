"""Convert tables of cos and sin between a `Rotation` and the formats of other libraries.

| format | used by | shape |
|---|---|---|
| full width | transformers: the result of `rotary_emb` | cos and sin, each `[…, rotary_dim]` |
| complex | Meta's `freqs_cis` | `[…, pairs]`, cos + i sin |
| cache | vLLM's `cos_sin_cache`, FlashInfer | `[rows, rotary_dim]`: all cos, then all sin |

`permute` reorders a weight for the other pairing. `width_of`, `widen` and `narrow` recognize and convert the columns of
a table, and `difference` compares the frequencies of other code with a rope.

Tables include the attention factor. They do not determine which channels form a pair. The argument `pairing` states
this, and its value follows from the code that uses the table. To convert the result of `to_full_width` or `to_complex`
back, also pass the rotation's `head_dim`, `rotary_offset`, `attention_factor` and `per_head`, which tables do not tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ropewalk._checks import choice, describe, error, integer
from ropewalk._layout import Pairing, channels
from ropewalk._rounding import FLOAT32, explained_error
from ropewalk.rotation.api import Rotation

if TYPE_CHECKING:
    from ropewalk.rope.rope import Rope

__all__ = [
    "FLOAT32", "Repeated", "Width", "difference", "from_cache", "from_complex", "from_full_width", "narrow",
    "permute", "stored_dtype", "to_cache", "to_complex", "to_full_width", "widen", "width_of",
]  # fmt: skip
__dir__ = __all__.copy

Repeated = Literal["halves", "each"]
"""How a row repeats its values: both halves of the row are equal, or each value is repeated next to itself."""

Width = Literal["halves", "each", "half", "complex"]
"""The columns of a table: repeated as in `Repeated`, one for each pair, or one complex number for each pair."""

_FLOATS = (torch.float32, torch.float64)


def widen(table: Tensor, width: Width) -> Tensor:
    """Repeat the columns of a table `[…, pairs]`: `[…, 2 · pairs]` for "halves" and "each", otherwise the table."""
    if width == "halves":
        return torch.cat((table, table), dim=-1)
    return table.repeat_interleave(2, dim=-1) if width == "each" else table


def narrow(table: Tensor, width: Width) -> Tensor:
    """Return a view `[…, pairs]` of a table of this width, with the first of the columns that are repeated."""
    if width == "halves":
        return table[..., : table.shape[-1] // 2]
    return table[..., ::2] if width == "each" else table


def width_of(table: Tensor, pairs: int) -> Width | None:
    """Return the width of a table of cos or sin, or of both as complex numbers. None means any other table."""
    columns = table.shape[-1]
    if columns == pairs:
        return "complex" if table.is_complex() else "half"
    widths: tuple[Width, ...] = ("halves", "each") if columns == 2 * pairs and not table.is_complex() else ()
    return next((width for width in widths if torch.equal(table, widen(narrow(table, width), width))), None)


def difference(rope: Rope, inv_freq: Tensor, attention_factor: float) -> str:
    """Describe how the frequencies and the attention factor of other code differ from those of a static rope.

    Args:
        rope: the rope.
        inv_freq: the frequencies of the other code, `[pairs]`, in radians per position. Those of several axes may be
            stored once, and in any order. If they are numbers of a 16-bit dtype, they may have been rounded to it.
        attention_factor: the factor of its cos and sin, dimensionless.

    Returns:
        What differs by more than float32 explains, or "" if nothing does.
    """
    factor = rope.attention_factor
    if not abs(attention_factor - factor) <= FLOAT32 * factor:
        return f"attention factor {attention_factor:.9g} instead of {factor:.9g}"
    found, expected = inv_freq.detach().to("cpu", torch.float64), torch.from_numpy(rope.inv_freq)
    # On a ramp from the unscaled frequencies to those divided by the factor, the weight of the former is rounded too.
    plain = torch.from_numpy(replace(rope, scaling=None).inv_freq)
    slowest = plain / getattr(rope.scaling, "factor", 1.0)
    ramp = (slowest * (1 + FLOAT32) < expected) & (expected < plain * (1 - FLOAT32))
    error = _explained(expected) + torch.where(ramp, _explained(plain), 0.0)
    if rope.axes is not None:
        expected, order = expected.sort(descending=True)
        error = error[order]
        if found.shape != expected.shape:
            first = torch.cat((expected.new_ones(1, dtype=torch.bool), expected.diff() != 0))
            expected, error = expected[first], error[first]
        found = found.sort(descending=True).values
    if found.shape != expected.shape:
        return f"{found.numel()} frequencies instead of {expected.numel()}"
    dtype = torch.finfo(stored_dtype(found))
    if dtype.bits == 16:
        error = error + expected.abs() * dtype.eps / 2 + dtype.smallest_normal * dtype.eps / 2
    wrong = ~((found - expected).abs() <= error)
    if bool(wrong.any()):
        pair = int(wrong.nonzero()[0])
        return f"inv_freq[{pair}] {float(found[pair]):.9g} instead of {float(expected[pair]):.9g}"
    return ""


def _explained(inv_freq: Tensor) -> Tensor:
    return torch.from_numpy(explained_error(inv_freq.numpy()))


def stored_dtype(table: Tensor) -> torch.dtype:
    """Return the narrowest float dtype that stores these numbers exactly, also after they were cast back."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(table.to(dtype).to(table.dtype), table):
            return dtype
    return table.dtype


def from_full_width(
    cos: Tensor,
    sin: Tensor,
    *,
    repeated: Repeated,
    pairing: Pairing,
    head_dim: int | None = None,
    rotary_offset: int = 0,
    attention_factor: float = 1.0,
    per_head: bool = False,
) -> Rotation:
    """Create a `Rotation` from tables with one value per channel, as returned by transformers' `rotary_emb`.

    Args:
        cos, sin: `[seq, rotary_dim]` or `[batch, seq, rotary_dim]`, float32 or float64, with each value twice. With
            `per_head`: `[heads, seq, rotary_dim]` or `[batch, heads, seq, rotary_dim]`.
        repeated: how each row of cos and sin repeats its values. "halves" (nearly every model): both halves of the row
            are equal. "each" (Cohere's models): each value is repeated next to itself. This does not determine the
            pairing: ERNIE 4.5 repeats halves but rotates neighbouring channels.
        pairing, head_dim, rotary_offset, attention_factor, per_head: as in `Rotation`.

    Raises:
        RopeError: a row does not repeat its values as `repeated` states; or as raised by `Rotation`.

    Examples:
        >>> from ropewalk import Rope
        >>> rotation = Rope(head_dim=4, base=10_000.0, pairing="half").at(torch.arange(3))
        >>> cos, sin = to_full_width(rotation, repeated="halves")
        >>> cos.shape
        torch.Size([3, 4])
        >>> torch.equal(from_full_width(cos, sin, repeated="halves", pairing="half").cos, rotation.cos)
        True
    """
    who = "formats.from_full_width"
    choice(who, "repeated", repeated, ("halves", "each"))
    halves = []
    for name, table in (("cos", cos), ("sin", sin)):
        _check_table(who, name, table)
        if table.ndim < 1 or table.shape[-1] % 2:
            must = f"{name} must have one column per rotated channel, an even number"
            raise error(who, must, describe(table), "For tables of half width, use Rotation(cos, sin, pairing=...).")
        half = narrow(table, repeated)
        if not torch.equal(table, widen(half, repeated)):
            other = "each" if repeated == "halves" else "halves"
            must = f"{name} must contain every value twice, {_PLACES[repeated]}"
            fix = f"Pass repeated={other!r}; for tables of half width, use Rotation(cos, sin, pairing=...)."
            raise error(who, must, "different values", fix)
        halves.append(half)
    return Rotation(
        *halves,
        pairing=pairing,
        head_dim=head_dim,
        rotary_offset=rotary_offset,
        attention_factor=attention_factor,
        per_head=per_head,
    )


_PLACES = {"halves": "once in each half of a row", "each": "side by side"}


def to_full_width(rotation: Rotation, *, repeated: Repeated, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return cos and sin with one value per rotated channel, for code that multiplies all these channels by them.

    Args:
        repeated: "halves" or "each", see `from_full_width`.
        dtype: dtype of the result. None means the dtype of the rotation. bfloat16 rounds cos and sin by up to 2e-3.

    Returns:
        cos and sin `[…, rotary_dim]`, with the axes of the rotation's tables.

    Raises:
        RopeError: rotation is not a `Rotation`, or repeated is unknown.
    """
    who = "formats.to_full_width"
    _check_rotation(who, rotation)
    choice(who, "repeated", repeated, ("halves", "each"))
    cos, sin = (widen(t, repeated) for t in (rotation.cos, rotation.sin))
    return (cos, sin) if dtype is None else (cos.to(dtype), sin.to(dtype))


def from_complex(
    turns: Tensor,
    *,
    pairing: Pairing = "interleaved",
    head_dim: int | None = None,
    rotary_offset: int = 0,
    attention_factor: float = 1.0,
    per_head: bool = False,
) -> Rotation:
    """Create a `Rotation` from cos + i sin, as returned by Meta's `precompute_freqs_cis`.

    Args:
        turns: cos + i sin, complex64 or complex128, `[seq, pairs]` or `[batch, seq, pairs]`, without a head axis.
            With `per_head`: `[heads, seq, pairs]` or `[batch, heads, seq, pairs]`.
        pairing: "interleaved" in the code of Meta, DeepSeek and Llama 4.
        head_dim, rotary_offset, attention_factor, per_head: as in `Rotation`.

    Raises:
        RopeError: turns are not complex; or as raised by `Rotation`.
    """
    who = "formats.from_complex"
    if not isinstance(turns, Tensor) or turns.dtype not in (torch.complex64, torch.complex128):
        raise error(who, "turns must be a complex64 or complex128 tensor", describe(turns), "Pass cos + i sin.")
    return Rotation(
        turns.real.contiguous(),
        turns.imag.contiguous(),
        pairing=pairing,
        head_dim=head_dim,
        rotary_offset=rotary_offset,
        attention_factor=attention_factor,
        per_head=per_head,
    )


def to_complex(rotation: Rotation) -> Tensor:
    """Return cos + i sin: complex64 `[…, pairs]`, or complex128 if the tables are float64.

    Raises:
        RopeError: rotation is not a `Rotation`.
    """
    _check_rotation("formats.to_complex", rotation)
    return torch.complex(rotation.cos, rotation.sin)


def from_cache(
    cache: Tensor,
    *,
    pairing: Pairing,
    head_dim: int | None = None,
    rotary_offset: int = 0,
    attention_factor: float = 1.0,
) -> Rotation:
    """Create a table from vLLM's or FlashInfer's `cos_sin_cache`. Select tokens with `table[positions]`.

    Args:
        cache: `[rows, rotary_dim]`, float32 or float64, with one row per position: cos of all pairs, then their sin.
        pairing: "half" for vLLM's `is_neox_style=True`, otherwise "interleaved".
        head_dim, rotary_offset, attention_factor: as in `Rotation`.

    Raises:
        RopeError: cache does not have this shape and one of these dtypes; or as raised by `Rotation`. vLLM stores its
            cache in the dtype of the model, but 16 bits are too few for accurate angles.

    Examples:
        >>> from ropewalk import Rope
        >>> rope = Rope(head_dim=4, base=10_000.0, pairing="half")
        >>> cache = to_cache(rope.at(torch.arange(8)))
        >>> cache.shape
        torch.Size([8, 4])
        >>> torch.equal(from_cache(cache, pairing="half")[torch.tensor([5])].cos, rope.at(torch.tensor([5])).cos)
        True
    """
    who = "formats.from_cache"
    _check_table(who, "cache", cache)
    if cache.ndim != 2 or cache.shape[-1] % 2:
        must = "cache must have shape [rows, rotary_dim], with cos of all pairs, then their sin"
        raise error(who, must, describe(cache), "Pass the whole cos_sin_cache.")
    cos, sin = cache.chunk(2, dim=-1)
    return Rotation(
        cos, sin, pairing=pairing, head_dim=head_dim, rotary_offset=rotary_offset, attention_factor=attention_factor
    )


def to_cache(rotation: Rotation, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return vLLM's `cos_sin_cache`: `[rows, rotary_dim]`, with cos of all pairs, then their sin.

    Args:
        rotation: a rotation of positions 0, 1, 2 …, because vLLM looks up rows by position.
        dtype: dtype of the result. None means the dtype of the rotation. FlashInfer requires float32.

    Raises:
        RopeError: rotation is not a `Rotation`, or its tables are not `[rows, pairs]`.
    """
    _check_rotation("formats.to_cache", rotation)
    if rotation.cos.ndim != 2:
        must = "the rotation must be a table for positions [rows], which all heads share"
        got = f"tables of shape {tuple(rotation.cos.shape)}"
        raise error("formats.to_cache", must, got, "Create it with rope.at(torch.arange(rows)).")
    cache = torch.cat((rotation.cos, rotation.sin), dim=-1)
    return cache if dtype is None else cache.to(dtype)


def permute(
    weight: Tensor, head_dim: int, *, to: Pairing, rotary_dim: int | None = None, rotary_offset: int = 0
) -> Tensor:
    """Reorder the rows of a weight of q or k, which were trained with one pairing, for code that rotates by the other.

    Convert q and k, their biases, and the weights of a norm of their heads. v and the output projection stay as they
    are. `ropewalk convert` converts a whole checkpoint.

    Args:
        weight: `[heads · head_dim, …]`, of any dtype.
        head_dim: channels of a head, the same for q and k.
        to: the pairing of the code that will use the weight. The weight has the other one.
        rotary_dim, rotary_offset: the rotated channels of a head, as in `Rope`; the others stay in place.

    Returns:
        a new tensor of the same shape.

    Raises:
        RopeError: the rows are not whole heads, or the rotated channels are not an even number of those of a head.

    Examples:
        >>> from ropewalk.formats import permute
        >>> permute(torch.arange(8), 8, to="half")
        tensor([0, 2, 4, 6, 1, 3, 5, 7])
    """
    who = "formats.permute"
    choice(who, "to", to, ("half", "interleaved"))
    head_dim = integer(who, "head_dim", head_dim, at_least=2)
    if not isinstance(weight, Tensor) or weight.ndim < 1 or weight.shape[0] % head_dim:
        must = f"weight must have whole heads of {head_dim} rows along its first axis"
        raise error(who, must, describe(weight), "Pass the tensor `[heads · head_dim, …]` of q alone, or of k alone.")
    offset = integer(who, "rotary_offset", rotary_offset, at_least=0, at_most=head_dim - 2)
    most = head_dim - offset
    rotated = integer(who, "rotary_dim", most if rotary_dim is None else rotary_dim, at_least=2, at_most=most)
    if rotated % 2:
        must = "rotary_dim must be even, since channels rotate in pairs"
        raise error(who, must, str(rotated), "Pass that of the rope.")
    order = [*range(offset), *(offset + c for c in channels(rotated, to)), *range(offset + rotated, head_dim)]
    heads = weight.reshape(weight.shape[0] // head_dim, head_dim, *weight.shape[1:])
    return heads[:, order].reshape(weight.shape)


def _check_rotation(who: str, rotation: Rotation) -> None:
    if not isinstance(rotation, Rotation):
        raise error(who, "rotation must be a Rotation", describe(rotation), "Create it with rope.at(positions).")


def _check_table(who: str, name: str, table: Tensor) -> None:
    if not isinstance(table, Tensor) or table.dtype not in _FLOATS:
        fix = "Pass a float32 table. 16 bits have lost the angle; to use the rounded values anyway, call .float()."
        raise error(who, f"{name} must be a float32 or float64 tensor", describe(table), fix)
