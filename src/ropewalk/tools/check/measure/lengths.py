"""Test whether the angles of a token depend on how many others there are, or on the sides of a grid."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.tools.check.find import grid
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.find.tables import INDEXED
from ropewalk.tools.check.report import Report

_SIDES = (9, 11), (17, 19)  # of two grids, in blocks


class SizeError(_checks.RopeError):
    """The angles of a token depend on the number of tokens."""


def judge(subject: Subject, report: Report) -> bool:
    """Return whether tokens are rotated alike if others follow them. If those of a grid are not, report why.

    Raises:
        SizeError: other tokens change the angles, and not only the places that a token of a grid is taken for.
    """
    new = subject if subject.rebuild is None else subject.rebuild()
    if subject.of_grid:
        frames = (3,) * (subject.axes == 3)
        sizes = [(*frames, *(subject.of_grid * side for side in sides)) for sides in _SIDES]
    elif subject.way.positions == "none" or (subject.way.tables or "").startswith(INDEXED[1]):
        sizes = [(8,), (16,)]
    elif subject.expected.unresolved is not None:
        sizes = [(16,), (min(1024, subject.expected.length or 1024),)]
    else:
        return True
    try:
        few, many = (_turned(new, size) for size in sizes)
    except CallError:
        return True
    if _is_part(few, many):
        return True
    if subject.expected.unresolved is not None:
        says = f"Sequences of {sizes[0][0]} and {sizes[1][0]:,} tokens have different ones, and only longer ones may."
        report.add("wrong-frequencies", f"{says} No more was judged.")
        return False
    among = torch.cdist(few.flatten(0, -2), many.flatten(0, -2)).amin(1) < 1e-2
    if not subject.of_grid or float(among.float().mean()) <= 0.5:
        must, got = "the angle of a token must not depend on the number of tokens", "angles that do, as on a grid"
        fix = "Check the function that takes the tables alone, or count positions from 0 without a length."
        raise SizeError(*_checks.error("check", must, got, fix).args)
    few, many = (_in_calls(x, subject.of_grid) for x in (few, many))
    by_columns = [x.reshape(*x.shape[:-3], *x.shape[-2:-4:-1], -1).transpose(-3, -2) for x in (few, many)]
    says = f"The angles of a token differ between grids of {' and '.join(' × '.join(map(str, s[-2:])) for s in sizes)}"
    code, order = "order-of-tokens", ""
    if subject.of_grid > 1 and _is_part(few, many):
        order = ": it counts them row by row, and not block by block"
    elif _is_part(*by_columns) and _moves_rows_first(by_columns[0], subject):
        order = ": it counts them column by column"
    else:  # such as i // rows, which is taken for the row
        code = "wrong-side"
        if len(sizes[0]) == 3 and _is_part(*(_turned(new, (1, *sides)) for _, *sides in sizes)):
            order = ", and those of one frame do not: the frame of a token is wrong"
    report.add(code, f"{says}{order}. No more was judged.")
    return False


def _turned(subject: Subject, size: tuple[int, ...]) -> Tensor:
    """Return the results for equal tokens at all positions below a size, `[*size, channels]`."""
    positions = torch.cartesian_prod(*map(torch.arange, size)).view(-1, len(size)).mT
    x = subject.equal_heads(positions.shape[-1], 1)
    out, _ = subject(x, x, positions[:, None] if subject.of_grid else positions)
    return out[0, :, 0].view(*size, -1)


def _in_calls(x: Tensor, block: int) -> Tensor:
    """Return the tokens `[…, rows, columns, channels]` of a grid in the order in which they were passed."""
    *size, _ = x.shape
    places = grid.places_of(torch.cartesian_prod(*map(torch.arange, size)).mT, size[-2:], block)
    return x.flatten(0, -2)[places.argsort()].view(x.shape)


def _is_part(few: Tensor, many: Tensor) -> bool:
    return torch.allclose(few, many[tuple(map(slice, few.shape[:-1]))], atol=1e-3, equal_nan=True)


def _moves_rows_first(x: Tensor, subject: Subject) -> bool:
    """Return whether the row of a grid `[…, rows, columns, channels]` turns the pairs that it should, or the first."""
    axes, one = subject.expected.axes, x.flatten(0, -4)[0] if x.ndim > 3 else x
    of_row, of_column = ((one[at] != one[0, 0]).nonzero().double().mean() for at in ((1, 0), (0, 1)))
    is_expected = axes is None or axes.axis.index(axes.count - 2) < axes.axis.index(axes.count - 1)
    return bool(of_row < of_column) == is_expected
