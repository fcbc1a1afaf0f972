"""Positions of text in ragged, packed and padded rows. No tensor is read back from another device."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.positions.sizes import can_read, check_mask, check_size

_INTEGERS = (torch.int32, torch.int64)


def ragged(offsets: Tensor, seq: int) -> Tensor:
    """Return positions of rows that start at different positions, for decoding a batch with caches of unequal length.

    Args:
        offsets: position of the first token of each row, in tokens; int32 or int64, `[batch]`.
        seq: number of tokens in each row, at least 0.

    Returns:
        int64 `[batch, seq]`, on the device of offsets.

    Raises:
        RopeError: offsets is not such a tensor, or seq is not an integer of at least 0.

    Examples:
        >>> ragged(torch.tensor([0, 7]), 3)
        tensor([[0, 1, 2],
                [7, 8, 9]])
    """
    fix = "Pass the integer position of each row's first token, e.g. torch.tensor([0, 7])."
    _check_vector("positions.ragged", "offsets", offsets, fix)
    check_size("positions.ragged", "seq", seq)
    return offsets.to(torch.int64).unsqueeze(1) + torch.arange(seq, device=offsets.device)


def packed(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return positions of documents that are packed into one row. Positions restart at 0 in each document.

    Args:
        cu_seqlens: the start of each document and the end of the last one, in tokens, as for flash attention: int32 or
            int64, `[documents + 1]`, starting with 0 and not decreasing. The values are checked only on the CPU outside
            of torch.compile, because reading them would synchronize with a GPU.
        total: number of tokens in the row. It is an argument because reading it from cu_seqlens would synchronize with
            the GPU. Tokens after the last document (padding) restart at 0 as well.

    Returns:
        int64 `[total]`, on the device of cu_seqlens.

    Raises:
        RopeError: cu_seqlens is not such a tensor or exceeds total, or total is not an integer of at least 0.

    Examples:
        >>> packed(torch.tensor([0, 3, 5]), 6)
        tensor([0, 1, 2, 0, 1, 0])
    """
    _check_documents("positions.packed", cu_seqlens)
    check_size("positions.packed", "total", total)
    if can_read(cu_seqlens) and isinstance(total, int):
        boundaries("positions.packed", cu_seqlens, total)
    token = torch.arange(total, device=cu_seqlens.device)
    starts = cu_seqlens.to(torch.int64)
    return token - starts[torch.searchsorted(starts, token, right=True) - 1]


def from_mask(attention_mask: Tensor) -> Tensor:
    """Return positions of padded rows: the real tokens of each row, or document, count from 0, and padding is at 0.

    Padding may be anywhere and is not counted. Trainers that pack documents (axolotl; LlamaFactory with `neat_packing`)
    may number them in the mask, [1, 1, 2, 2, 2, 0]: each document then counts from 0. The attention mask that fits such
    numbers m is `m[:, None, :, None] == m[:, None, None, :]`, to which `RotaryAttention` adds causality.

    Args:
        attention_mask: bool or integer, `[batch, seq]`: 0 or False for padding, and for real tokens 1, True or the
            number of their document. The tokens of a document follow each other. Values are checked only on the CPU
            outside of torch.compile, because reading them would synchronize with a GPU.

    Returns:
        int64 `[batch, seq]`, on the device of attention_mask.

    Raises:
        RopeError: attention_mask has another shape, or is a floating-point (additive) mask; a number is negative, or
            comes back after that of another document.

    Examples:
        >>> from_mask(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 2, 2]]))
        tensor([[0, 0, 0, 1],
                [0, 1, 2, 0],
                [0, 1, 0, 1]])
    """
    begins, real = document_starts("positions.from_mask", attention_mask), attention_mask != 0
    count = real.cumsum(dim=1)
    return (count - torch.where(begins, count, 0).cummax(dim=1).values).masked_fill(~real, 0)


def document_starts(who: str, mask: Tensor) -> Tensor:
    """Return which tokens begin a document. Raise if a number of one is negative, or begins two of a row."""
    check_mask(who, mask)
    numbers, real = mask.to(torch.int64), mask != 0
    newest = torch.where(real, torch.arange(real.shape[1], device=real.device), 0).cummax(dim=1).values
    before = torch.nn.functional.pad(numbers.gather(1, newest)[:, :-1], (1, 0))  # number of the real token before
    begins = real & (numbers != before)
    if can_read(mask):
        of_documents = torch.where(begins, numbers, 0).sort(dim=1).values
        again = of_documents[:, 1:][(of_documents.diff(dim=1) == 0) & (of_documents[:, 1:] > 0)].tolist()
        if wrong := of_documents[of_documents < 0].tolist() + again:
            must = "attention_mask must have 0 for padding, and for real tokens 1 or the number of their document"
            got = f"{wrong[0]}{' again after another number' * (wrong[0] > 0)}"
            fix = "Number the documents of a row 1, 2, 3, ..., or pass attention_mask != 0 if the row is one text."
            raise _checks.error(who, must, got, fix)
    return begins


def boundaries(who: str, cu_seqlens: Tensor | None, total: int) -> list[int]:
    """Check and read cu_seqlens. Return the first token of each document that has tokens, padding included, and total.

    Raises:
        RopeError: as raised by `packed`, for values on every device.
    """
    _check_documents(who, cu_seqlens)
    ends = cu_seqlens.tolist()  # type: ignore[union-attr]
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > total:
        must = f"cu_seqlens must start with 0, must not decrease and must not exceed total={total}"
        fix = "For documents of these lengths, pass torch.nn.functional.pad(lengths.cumsum(0), (1, 0))."
        raise _checks.error(who, must, _checks.shown(ends), fix)
    return sorted({*ends, total})


def _check_documents(who: str, cu_seqlens: object) -> None:
    fix = "Pass cumulative lengths, e.g. torch.tensor([0, 3, 5]) for documents of 3 and 2 tokens."
    _check_vector(who, "cu_seqlens", cu_seqlens, fix)


def _check_vector(who: str, name: str, value: object, fix: str) -> None:
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS or value.ndim != 1 or value.shape[0] == 0:
        must = f"{name} must be a non-empty int32 or int64 tensor with one axis"
        raise _checks.error(who, must, _checks.describe(value), fix)
