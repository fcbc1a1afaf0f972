"""Find out which channels form pairs, and how each pair is changed, from the linear map of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Structure:
    """The pairs of a rotation, which are the same at every token.

    Args:
        ins, outs: the channels from which each pair is read and to which it is written, int64 `[pairs, 2]`.
        pairing: "half", "interleaved", or None for neither.
        rotary_dim, rotary_offset: the number of rotated channels, and the first of them.
        order: "same" if each pair is written where it was read, "half" if pairs are written in halves, "swapped" if the
            second channel of each pair is written where the first was read, or "other".
        lost: the channels outside the pairs that are changed, although they should be copied.
        flaw: the code of a bug in the pairs, or None if each pair is rotated by one angle.
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
        """The number of rotated pairs."""
        return int(self.ins.shape[0])

    @property
    def blocks(self) -> int:
        """The number of blocks of channels of which each has half pairing, or 0."""
        first, second = self.ins.unbind(1)
        run = (first.diff(prepend=first[:1]) != 1).cumsum(0)
        return int(run[-1]) if torch.equal(second - first, run.bincount()[run]) else 0

    def multipliers(self, out: Tensor) -> Tensor:
        """Return cos + i·sin of each pair, complex128 `[..., pairs]`, from the output for `unit_input`."""
        out = out.to(torch.float64)
        return torch.complex(out[..., self.outs[:, 0]], out[..., self.outs[:, 1]])

    def unit_input(self, channels: int) -> Tensor:
        """Return a head `[channels]` with 1 in the first channel of each pair and 0 elsewhere."""
        x = torch.zeros(channels, dtype=torch.float32)
        x[self.ins[:, 0]] = 1.0
        return x

    def predict(self, x: Tensor, multipliers: Tensor) -> Tensor:
        """Return the expected float64 output for x `[batch, seq, heads, dim]` and multipliers `[..., seq, pairs]`."""
        x = x.to(torch.float64)
        pair = torch.complex(x[..., self.ins[:, 0]], x[..., self.ins[:, 1]]) * multipliers[..., :, None, :]
        out = x.clone()
        out[..., self.outs[:, 0]], out[..., self.outs[:, 1]] = pair.real, pair.imag
        return out


def infer(matrices: Tensor, close: float = 1e-5) -> Structure | None:
    """Infer the pairs from the linear maps of a head, `[tokens, out channels, in channels]`, or None if there are none.

    The maps are float32 or float64, on the CPU. Their elements may be wrong by `close`.
    """
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    depends = (matrices.abs() > 0).any(0)
    is_copy = (matrices == matrices[:1]).all(0).all(1) & ((matrices[0] == 1).sum(1) == 1) & (depends.sum(1) == 1)
    depends &= ~(is_copy & (eye.diagonal() != matrices[0].diagonal()))[:, None]  # of a channel in another place
    groups = _groups(depends)
    pairs = [(i, o) for i, o in groups if len(i) == 2 and len(o) == 2]
    irregular = [(i, o) for i, o in groups if not len(i) == len(o) == 2 and len(i) + len(o) > 2]
    if not pairs:
        return None
    ins, outs = torch.tensor([i for i, _ in pairs]), torch.tensor([o for _, o in pairs])
    paired = {*ins.flatten().tolist()}
    lost = tuple(
        c
        for c in range(matrices.shape[-1])
        if c not in paired and not torch.allclose(matrices[:, :, c], eye[c], atol=close)  # a norm before it rounds
    )
    pairing, rotary_dim, offset = _pairing(ins)
    offset = min(offset, matrices.shape[-1] - rotary_dim)  # of half pairing, whose first pairs may have frequency 0
    order = "same" if torch.equal(ins, outs) else ("half" if _pairing(outs)[0] == "half" else "other")
    blocks = matrices[:, outs[:, :, None], ins[:, None, :]].to(torch.float64)  # [tokens, pairs, 2, 2]
    flaw = "mixed-pairings" if irregular else None
    if flaw is None and order == "same" and torch.allclose(*_complex_rows(blocks.flip(2)), atol=close):
        order, outs = "swapped", outs.flip(1)
    elif flaw is None:
        flaw = _flaw(blocks, close)
    return Structure(ins, outs, pairing, rotary_dim, offset, order, lost, flaw)


def _groups(depends: Tensor) -> list[tuple[list[int], list[int]]]:
    """Group channels of which an output depends on an input, bool `[out, in]`: those read, and those written."""
    n = depends.shape[0]
    remaining, groups = set(range(n)), []
    while remaining:
        ins, outs = {min(remaining)}, set[int]()
        while True:
            more_outs = {o for i in ins for o in depends[:, i].nonzero().flatten().tolist()}
            more_ins = {i for o in more_outs for i in depends[o].nonzero().flatten().tolist()} | ins
            if more_ins == ins and more_outs == outs:
                break
            ins, outs = more_ins, more_outs
        remaining -= ins
        groups.append((sorted(ins), sorted(outs)))
    return groups


def _pairing(channels: Tensor) -> tuple[str | None, int, int]:
    """Return the pairing (None if it has no name), rotary_dim and rotary_offset of pairs of channels `[pairs, 2]`."""
    first, second = channels[:, 0], channels[:, 1]
    distance, span = int(second[0] - first[0]), int(first[-1] - first[0])  # between which pairs may rest
    offset = int(channels.min())
    if bool((second - first == distance).all()):
        if distance == 1 and bool((first.diff() % 2 == 0).all()):
            return "interleaved", span + 2, offset
        if span < distance:
            return "half", 2 * distance, offset
    return None, int(channels.max()) + 1 - offset, offset


def _complex_rows(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos + i·sin of each 2×2 block twice: read from its first row, and read from its second row."""
    first = torch.complex(blocks[..., 0, 0], -blocks[..., 0, 1])
    return first, torch.complex(blocks[..., 1, 1], blocks[..., 1, 0])


def _flaw(blocks: Tensor, close: float) -> str | None:
    """Return the code of the bug in 2×2 blocks `[tokens, pairs, 2, 2]`, or None if they are rotations.

    "xpos" is no bug: the size of each pair is a power of its position.
    """
    first_row, second_row = _complex_rows(blocks)
    if torch.allclose(first_row, second_row, atol=close):
        sizes = first_row.abs()
        if float((sizes - sizes[:1]).abs().max()) <= (0.02 + close) * float(sizes.max()):
            return None
        steps = sizes.log().diff(dim=0)
        if bool((steps - steps[:1]).abs().max() < max(1e-4, close)):
            return "xpos"
        # The pairs are stretched, unless cos and sin have different factors, so that their squares are on an ellipse.
        cos, sin = first_row.real / first_row.real[:1], first_row.imag
        squares = (sin**2 / (1 - cos**2))[cos**2 < 0.9]
        is_ellipse = len(squares) > 0 and float(squares.max() - squares.min()) < 0.01 * float(squares.max())
        return "attention-factor" if is_ellipse else "stretched"
    for a, b in ((first_row, second_row), (second_row, first_row)):  # b is computed from the result a
        if torch.allclose(b, torch.complex(a.real - a.imag**2, a.real * a.imag), atol=close):
            return "channel-overwritten"
    if torch.allclose(first_row, second_row.conj(), atol=close):
        return "not-a-rotation"
    if torch.allclose(first_row.real, second_row.real, atol=close):
        of_pairs = (1 - first_row.real**2).clamp(min=0).sqrt().T.contiguous()
        distances = [torch.cdist(row.imag.abs().T.contiguous(), of_pairs).amin(1) for row in (first_row, second_row)]
        has_sines = all(float(row.imag.abs().max()) > 0.1 for row in (first_row, second_row))
        if float(torch.stack(distances).max()) < 0.01 and has_sines:
            return "mixed-pairings"  # the sines are those of other pairs
    if not torch.allclose(first_row.abs(), second_row.abs(), atol=max(1e-4, close)):
        return "not-a-rotation"
    if torch.allclose(first_row, 1j * second_row.conj(), atol=close):
        return "cos-and-sin-swapped"
    turns = [
        bool((row - row[:1]).abs().max() > close) and bool((row[0] - row[0].abs()).abs().max() < close)
        for row in (first_row, second_row)
    ]
    return "mixed-pairings" if all(turns) else "not-a-rotation"  # each row turns, from angle 0 on
