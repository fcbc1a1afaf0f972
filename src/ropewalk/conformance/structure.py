"""Which channels a function pairs and what it does to each pair: read off its matrices, one for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Structure:
    """What holds at every token.

    Args:
        ins, outs: the two channels of each pair, `[pairs, 2]`, where they are read and where they are written.
        pairing: "half", "interleaved", or None for neither.
        rotary_dim, rotary_offset: the rotated channels.
        order: "same" writes a pair where it was read; "half": pairs are read interleaved and written in halves;
            "swapped": the second of each pair is written where the first was read; "other".
        lost: channels outside of the pairs that do not come back as they were.
        flaw: the code of what is wrong with each pair, or None where each is rotated by one angle.
    """

    ins: Tensor
    outs: Tensor
    pairing: str | None
    rotary_dim: int
    rotary_offset: int
    order: str
    lost: tuple[int, ...]
    flaw: str | None

    @property
    def pairs(self) -> int:
        """How many pairs are rotated."""
        return int(self.ins.shape[0])

    def numbers(self, out: Tensor) -> Tensor:
        """What each pair was multiplied by, complex128: from the rotation of `firsts`."""
        out = out.to(torch.float64)
        return torch.complex(out[..., self.outs[:, 0]], out[..., self.outs[:, 1]])

    def firsts(self, channels: int) -> Tensor:
        """One head with 1 in the first channel of each pair and 0 elsewhere."""
        x = torch.zeros(channels)
        x[self.ins[:, 0]] = 1.0
        return x

    def predicted(self, x: Tensor, numbers: Tensor) -> Tensor:
        """What comes out for x, `[batch, seq, heads, dim]`, with pairs multiplied by `[..., seq, pairs]` numbers."""
        x = x.to(torch.float64)
        pair = torch.complex(x[..., self.ins[:, 0]], x[..., self.ins[:, 1]]) * numbers[..., :, None, :]
        out = x.clone()
        out[..., self.outs[:, 0]], out[..., self.outs[:, 1]] = pair.real, pair.imag
        return out

    def adjoint(self, grad: Tensor, numbers: Tensor) -> Tensor:
        """The gradient of x for this gradient of the output."""
        grad = grad.to(torch.float64)
        pair = torch.complex(grad[..., self.outs[:, 0]], grad[..., self.outs[:, 1]]) * numbers.conj()[..., :, None, :]
        out = grad.clone()
        out[..., self.ins[:, 0]], out[..., self.ins[:, 1]] = pair.real, pair.imag
        return out


def of(matrices: Tensor) -> Structure | None:
    """The structure of matrices `[tokens, out channels, in channels]`; None where no channel meets another."""
    seen = (matrices.abs() > 0).any(0) | matrices.isnan().any(0)
    groups = _groups(seen)
    pairs = [(i, o) for i, o in groups if len(i) == 2 and len(o) == 2]
    strange = [(i, o) for i, o in groups if not len(i) == len(o) == 2 and len(i) + len(o) > 2]
    if not pairs:
        return None
    ins, outs = torch.tensor([i for i, _ in pairs]), torch.tensor([o for _, o in pairs])
    paired = {*ins.flatten().tolist()}
    eye = torch.eye(matrices.shape[-1])
    lost = tuple(
        c
        for c in range(matrices.shape[-1])
        if c not in paired and not torch.equal(matrices[:, :, c], eye[c].expand_as(matrices[:, :, c]))
    )
    pairing, rotary_dim, offset = _pairing(ins)
    order = "same" if torch.equal(ins, outs) else ("half" if _pairing(outs)[0] == "half" else "other")
    blocks = matrices[:, outs[:, :, None], ins[:, None, :]].to(torch.float64)  # [tokens, pairs, 2, 2]
    flaw = "mixed-pairings" if strange else None
    if flaw is None and order == "same" and _is_rotation(blocks.flip(2)):
        order, outs = "swapped", outs.flip(1)
    elif flaw is None:
        flaw = _flaw(blocks)
    return Structure(ins, outs, pairing, rotary_dim, offset, order, lost, flaw)


def _groups(seen: Tensor) -> list[tuple[list[int], list[int]]]:
    """Channels read and channels written that hang together, in the order of those read."""
    n = seen.shape[0]
    left, found = set(range(n)), []
    while left:
        ins, outs = {min(left)}, set[int]()
        while True:
            more_outs = {o for i in ins for o in seen[:, i].nonzero().flatten().tolist()}
            more_ins = {i for o in more_outs for i in seen[o].nonzero().flatten().tolist()} | ins
            if more_ins == ins and more_outs == outs:
                break
            ins, outs = more_ins, more_outs
        left -= ins
        found.append((sorted(ins), sorted(outs)))
    return found


def _pairing(channels: Tensor) -> tuple[str | None, int, int]:
    """The name, number and offset of channels that stand in pairs."""
    first, second = channels[:, 0], channels[:, 1]
    apart = int(second[0] - first[0])
    offset = int(channels.min())
    steps = first.diff()
    if bool((second - first == apart).all()):
        if apart == 1 and bool((steps == 2).all()):
            return "interleaved", 2 * len(channels), offset
        if bool((steps == 1).all()) and len(channels) <= apart:
            return "half", 2 * apart, offset
    return None, int(channels.max()) + 1 - offset, offset


def _rows(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """cos + i·sin as each of the two rows of a block has it."""
    return (
        torch.complex(blocks[..., 0, 0], -blocks[..., 0, 1]),
        torch.complex(blocks[..., 1, 1], blocks[..., 1, 0]),
    )


def _is_rotation(blocks: Tensor) -> bool:
    one, other = _rows(blocks)
    return bool(torch.allclose(one, other, atol=1e-5))


def _flaw(blocks: Tensor) -> str | None:
    if bool(blocks.isnan().any()) or _is_rotation(blocks):
        return None
    one, other = _rows(blocks)
    if torch.allclose(one, other.conj(), atol=1e-5) or not torch.allclose(one.abs(), other.abs(), atol=1e-4):
        return "not-a-rotation"
    moves = [bool((row - row[:1]).abs().max() > 1e-5) for row in (one, other)]
    return "mixed-pairings" if all(moves) else "not-a-rotation"
