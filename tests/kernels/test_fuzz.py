"""Random valid and invalid calls of the rotation: an exact result or a RopeError, and no write outside the tensors.

    python tests/kernels/test_fuzz.py 20000 [first seed]

runs this number of cases. `csrc/tests/sanitize --python` runs them under AddressSanitizer, which also detects reads.
"""

from __future__ import annotations

import io
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import oracle
from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, as_bshd, check, expected, shape, unchanged
from ropewalk import Rope, RopeError, Rotation
from ropewalk.kernels import cpu
from ropewalk.rotation.api import restore

MARGIN = 64


class Guarded:
    """A tensor with any strides inside a buffer whose other elements must not change."""

    def __init__(self, random: random.Random, size: tuple[int, ...], dtype: torch.dtype) -> None:
        order = random.sample(range(len(size)), len(size)) if random.random() < 0.3 else list(range(len(size)))
        steps = [random.choice((1, 1, 1, 2, 3)) for _ in size]
        padded = [size[axis] * steps[axis] for axis in order]
        self.whole = torch.randn(2 * MARGIN + int(np.prod(padded))).to(dtype)
        self.before = self.whole.clone()
        inner = self.whole[MARGIN : -MARGIN or None].view(padded)
        self.x = inner.permute([order.index(axis) for axis in range(len(size))])
        for axis, step in enumerate(steps):
            self.x = self.x.narrow(axis, 0, max(0, step * (size[axis] - 1) + 1) if size[axis] else 0)
            self.x = self.x[(slice(None),) * axis + (slice(None, None, step),)]

    def only_x_changed(self) -> bool:
        now, x = self.whole.clone(), self.x
        now.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(
            self.before.as_strided(x.shape, x.stride(), x.storage_offset())
        )
        return unchanged(now, self.before)


def tables(
    random: random.Random, batch: int, seq: int, pairs: int, layout: str, heads: int | None = None
) -> tuple[Tensor, Tensor]:
    axes: list[tuple[int, ...]] = [(pairs,), (seq, pairs), (1, seq, pairs), (batch, seq, pairs)]
    if heads is not None:
        axes = [(heads, seq, pairs), (heads, seq, pairs), (1, heads, seq, pairs), (batch, heads, seq, pairs)]
    size = random.choice(axes[:2] if layout == "thd" else axes)
    dtype = random.choice((torch.float32, torch.float64))
    cos, sin = (torch.randn((*size[:-1], 2 * size[-1]), dtype=dtype)[..., :: random.choice((1, 2))] for _ in range(2))
    return cos[..., :pairs], sin[..., :pairs]


def fit(random: random.Random) -> tuple[Rotation, list[Guarded], str]:
    """Return a rotation, one or two tensors that match it, and their layout. Some have as many rows as heads."""
    layout, pairing = random.choice(LAYOUTS), random.choice(PAIRINGS)
    batch, seq, pairs = random.choice((1, 2, 3)), random.choice((0, 1, 1, 2, 7)), random.choice((1, 2, 3, 4, 8, 17, 32))
    offset, rest = random.choice((0, 0, 1, 5)), random.choice((0, 0, 1, 6))
    heads = random.choice((1, 2, 3, 5)) if random.random() < 0.3 else None  # each with its own table
    cos, sin = tables(random, batch, seq, pairs, layout, heads)
    head_dim = offset + 2 * pairs + rest
    rotation = Rotation(cos, sin, pairing=pairing, head_dim=head_dim, rotary_offset=offset, per_head=heads is not None)
    dtypes = [random.choice(DTYPES)] * 2 if random.random() < 0.8 else random.sample(DTYPES, 2)
    guarded = [
        Guarded(random, shape(layout, batch, seq, heads or random.choice((0, 1, 2, 5)), head_dim), dtype)
        for dtype in dtypes[: random.choice((1, 2))]
    ]
    return rotation, guarded, layout


def in_memory(t: Tensor) -> Tensor:
    """Return a copy in memory: NumPy supports neither zero tensors nor the negative bit of PyTorch."""
    return torch.zeros(t.shape, dtype=t.dtype) if t._is_zerotensor() else t.resolve_neg()


def exact(rotation: Rotation, x: Tensor, layout: str, inverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = in_memory(rotation.cos.detach()), in_memory(rotation.sin.detach())
    if rotation.per_head and cos.ndim == 3:
        cos, sin = cos[None], sin[None]
    return expected(x, cos, sin, layout, rotation.pairing, rotation.rotary_offset, inverse)


def is_right(rotation: Rotation, results: Any, wanted: list[tuple[np.ndarray, np.ndarray]], layout: str) -> None:
    results = [results] if isinstance(results, Tensor) else list(results)
    for y, (value, size) in zip(results, wanted, strict=True):
        check(y, value, size, layout, rotation, flushed=y.dtype == torch.bfloat16)


def check_table_gradients(
    rotation: Rotation, tensors: list[Tensor], grads: list[Tensor], found: tuple[Tensor, ...], layout: str
) -> None:
    """Compare the gradients of cos and sin with the oracle, up to the rounding of each term and of their sum."""
    rows = [[as_bshd(y, layout)[..., None, :] for y in (x, grad)] for x, grad in zip(tensors, grads, strict=True)]
    pairs, unit = rotation.cos.shape[-1], torch.finfo(torch.float32).eps
    parts = [oracle.table_gradient(*one, pairs, rotation.pairing, rotation.rotary_offset) for one in rows]
    for table, got, which in zip((rotation.cos, rotation.sin), found, (0, 1), strict=True):
        wanted, size, count = np.zeros(table.shape), np.zeros(table.shape), 1
        for *of_tables, terms in parts:
            for total, part in ((wanted, of_tables[which]), (size, terms)):  # [batch, seq, heads, pairs]
                if rotation.per_head:
                    part = part.transpose(0, 2, 1, 3)
                    part = part if table.ndim == 4 else part.sum(0)
                else:
                    part = part.sum(2)
                    part = part.sum((0, 1)) if table.ndim == 1 else part.sum(0) if table.ndim == 2 else part
                total += part.sum(0, keepdims=True) if part.ndim == table.ndim and table.shape[0] == 1 else part
            count += terms.size // pairs
        assert got.dtype == table.dtype
        error = abs(got.double().numpy() - wanted)
        assert (error <= count * unit * size + 1e-30).all(), f"{rotation}: gradient off by {error.max()}"


def fitting(random: random.Random) -> str:
    """Check valid calls: into new tensors, in place, and the gradients of both, also those of trained tables."""
    rotation, guarded, layout = fit(random)
    tensors = [g.x for g in guarded]
    wanted = [exact(rotation, x, layout) for x in tensors]
    way = random.choice(("new", "in place", "backward", "recorded in place"))
    if way == "new":
        is_right(rotation, rotation(*tensors, layout=layout), wanted, layout)
        assert all(unchanged(g.whole, g.before) for g in guarded)
    elif way == "in place":
        rotation.apply_(*tensors, layout=layout)
        is_right(rotation, tensors, wanted, layout)
    else:
        trained = random.random() < 0.5
        if trained:
            rotation = pytree.tree_map(lambda table: table.clone().requires_grad_(), rotation)
        leaves = [x.clone().requires_grad_() for x in tensors]
        results = [x * 1 for x in leaves]
        if way == "backward":
            rotated = rotation(*results, layout=layout)
            results = [rotated] if isinstance(rotated, Tensor) else list(rotated)
        else:
            rotation.apply_(*results, layout=layout)
        is_right(rotation, [y.detach() for y in results], wanted, layout)
        grads = [torch.randn(y.shape).to(y.dtype) for y in results]
        of_grads = [exact(rotation, g, layout, inverse=True) for g in grads]
        found = torch.autograd.grad(results, [*leaves, *((rotation.cos, rotation.sin) if trained else ())], grads)
        is_right(rotation, found[: len(leaves)], of_grads, layout)
        if trained:
            check_table_gradients(rotation, tensors, grads, found[len(leaves) :], layout)
            way += ", trained"
    assert all(g.only_x_changed() for g in guarded)
    return way


CHANGES: list[Callable[[Tensor], Any]] = [
    lambda t: torch.cat([t, t], -1),
    lambda t: t[..., : t.shape[-1] // 2],
    lambda t: t[..., :0],
    lambda t: t[None],
    lambda t: t[None, None],
    lambda t: t[0],
    lambda t: t[:1],
    lambda t: t.flatten(),
    lambda t: t.repeat(2, 1),
    lambda t: t.half(),
    lambda t: t.bfloat16(),
    lambda t: t.to("meta"),
    lambda t: t.to_sparse(),
    lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    lambda t: t.to(torch.complex64).conj().imag,
    lambda t: t.double(),
    lambda t: t.float(),
    lambda t: t.flip(0),
    lambda t: t.expand(3, *t.shape),
    lambda t: None,
    lambda t: 1.0,
    lambda t: t.clone(),
]


def attempt(rotation: Rotation, guarded: list[Guarded], layout: str, random: random.Random) -> str:
    """Make a call that may raise a RopeError. Its result must be right otherwise."""
    tensors, way = [g.x for g in guarded], random.choice(("new", "in place"))
    try:
        # The values of the tables before the call, if they have values.
        wanted = [exact(rotation, x, layout) for x in tensors]
    except Exception:
        wanted = []
    try:
        results = rotation(*tensors, layout=layout) if way == "new" else rotation.apply_(*tensors, layout=layout)
    except RopeError:
        assert all(unchanged(g.whole, g.before) for g in guarded), "refused, and yet changed"
        return "refused"
    is_right(rotation, tensors if results is None else results, wanted, layout)
    assert all(g.only_x_changed() for g in guarded)
    return "right"


def pytrees(random: random.Random) -> str:
    """Tables changed by `tree_map`."""
    rotation, guarded, layout = fit(random)
    try:
        rotation = pytree.tree_map(random.choice(CHANGES), rotation)
    except (RuntimeError, IndexError):  # PyTorch's own error: no such axis
        return "none"
    return attempt(rotation, guarded, layout, random)


NUMBERS = (0, 1, -1, 2, 3, 7, 8, 64, 4096, -4096, 2**31, 2**40, -(2**62), 2**63, 10**30, 0.5, -1.0, float("inf"))
OBJECTS = (None, "half", "HALF", "interleaved", "", True, [], {}, (1, 2), float("nan"), *NUMBERS)


def pickles(random: random.Random) -> str:
    """Pickles that `torch.load(weights_only=True)` accepts, with invalid fields of a Rotation."""
    rotation, guarded, layout = fit(random)
    _, fields = rotation.__reduce__()
    fields = list(fields)
    for _ in range(random.choice((1, 1, 2))):
        at = random.randrange(len(fields))
        if isinstance(fields[at], Tensor):
            try:
                fields[at] = random.choice(CHANGES)(fields[at])
            except (RuntimeError, IndexError):
                return "none"
        elif isinstance(fields[at], int) and random.random() < 0.5:
            fields[at] += random.choice((-2, -1, 1, 2, 64, 2**40))
        else:
            fields[at] = random.choice(OBJECTS)
    if random.random() < 0.1:
        fields = fields[: random.randrange(2, 8)]

    class Crafted:
        def __reduce__(self) -> tuple[Any, ...]:
            return restore, tuple(fields)

    file = io.BytesIO()
    try:
        torch.save(Crafted(), file)
    except Exception:  # PyTorch cannot save such a tensor
        return "none"
    file.seek(0)
    try:
        loaded = torch.load(file, weights_only=True)
    except RopeError:
        return "refused"
    return attempt(loaded, guarded, layout, random)


def operators(random: random.Random) -> str:
    """The private operators, with one or two arguments replaced."""
    rotation, guarded, layout = fit(random)
    tensors = [g.x for g in guarded]
    inverse, in_place = random.random() < 0.5, random.random() < 0.5
    arguments: list[Any] = [
        tensors, rotation.cos, rotation.sin, layout, rotation.pairing == "interleaved", rotation.rotary_offset, inverse
    ]  # fmt: skip
    for _ in range(random.choice((0, 1, 1, 2))):
        at = random.choice((0, 1, 2, 3, 5))
        if at == 0:
            other = fit(random)[1]
            arguments[0] = random.choice(([], [*tensors, *(g.x for g in other)], [g.x for g in other], [*tensors] * 2))
        elif at < 3:
            try:
                changed = random.choice(CHANGES)(arguments[at])
            except (RuntimeError, IndexError, AttributeError):
                return "none"
            arguments[at] = changed if isinstance(changed, Tensor) else arguments[at]
        else:
            arguments[at] = random.choice((*LAYOUTS, "", "xyz")) if at == 3 else random.choice(NUMBERS[:13])
    operator = torch.ops.ropewalk.rotate_ if in_place else torch.ops.ropewalk.rotate
    how = (arguments[3], PAIRINGS[arguments[4]], arguments[5], inverse)
    try:
        wanted = [expected(x, in_memory(arguments[1]), in_memory(arguments[2]), *how) for x in arguments[0]]
    except Exception:
        wanted = []
    try:
        results = operator(*arguments)
    except RopeError:
        return "refused"
    except NotImplementedError:  # PyTorch's own error: the operator is not defined for sparse tensors
        return "refused by PyTorch"
    if all(x.is_meta for x in (*arguments[0], *arguments[1:3])):
        return "meta"
    is_right(rotation, arguments[0] if results is None else results, wanted, arguments[3])
    return "right"


def angles(random: random.Random) -> str:
    """Call `Rope.at` with positions of any kind."""
    rope = Rope(2 * random.choice((1, 2, 5, 16, 33)), 1e4, "half")
    size = random.choice(((0,), (1,), (5,), (2, 3), (0, 4), (), (2, 2, 2)))
    dtype = random.choice((torch.int32, torch.int64, torch.int64, torch.int16, torch.float32, torch.bool))
    positions = torch.randint(-(2**31), 2**31 - 1, size).to(dtype)
    if positions.ndim == 2 and random.random() < 0.5:
        positions = positions.t()
    try:
        rotation = rope.at(positions, dtype=random.choice((None, torch.float32, torch.float64, torch.half)))
    except RopeError:
        return "refused"
    circle = rotation.cos.double() ** 2 + rotation.sin.double() ** 2
    assert ((circle - 1).abs() < 2e-7).all()
    assert rotation.cos.shape == (*positions.shape, rope.rotary_dim // 2)
    return "right"


KINDS = (fitting, fitting, pytrees, pickles, operators, angles)


def case(seed: int) -> tuple[str, str]:
    """Run one random case. Return its outcome."""
    torch.manual_seed(seed)
    chosen = random.Random(seed)
    kind = chosen.choice(KINDS)
    return kind.__name__, kind(chosen)


def cases(first: int, count: int) -> Counter[tuple[str, str]]:
    counted: Counter[tuple[str, str]] = Counter()
    for seed in range(first, first + count):
        try:
            counted[case(seed)] += 1
        except Exception as e:
            raise AssertionError(f"seed {seed}") from e
    return counted


def test_every_outcome_is_right_or_a_rope_error() -> None:
    levels = [] if cpu.unavailable() else cpu._cpu.levels()
    for n, level in enumerate(levels or ["none"]):
        if levels:
            cpu._cpu.use_level(level)
        counted = cases(1000 * n, 400)
        for kind in ("pytrees", "pickles", "operators", "angles"):
            assert counted[kind, "refused"] > 5, counted
            assert counted[kind, "right"] > 2, counted


if __name__ == "__main__":
    total, begin = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.set_num_threads(1)
    sys.stdout.write(f"{cpu.unavailable() or cpu.version()}: {sorted(cases(begin, total).items())}\n")
