"""Random valid and invalid calls: an exact result or a RopeError, and no write outside the tensors.

    PYTHONPATH=tests/support python tests/kernels/test_fuzz.py 20000 [first seed]

runs this number of cases, and prints how many of each kind there were and a digest of all results. Two commits with the
same digest, of the same tests and seed, compute the same bits. `csrc/tests/sanitize --python` runs the cases under
AddressSanitizer, which also detects reads.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import oracle
from cache_model import RowRequests
from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, as_bshd, bits, check, expected, unchanged
from random_calls import EPS, Draw, Guarded, Heads, exact, fit, in_memory, pools
from ropewalk import Axes, QKNorm, Rope, RopeError, Rotation, rotate_and_store
from ropewalk.kernels import cpu
from ropewalk.rotation.api import restore

DIGEST = hashlib.sha256()


def note(*results: Tensor) -> None:
    """Add the bits of results to the digest."""
    for y in results:
        DIGEST.update(bits(y.detach()).numpy().tobytes())


def is_right(rotation: Rotation, results: Any, wanted: list[tuple[np.ndarray, np.ndarray]], layout: str) -> None:
    results = [results] if isinstance(results, Tensor) else list(results)
    note(*results)
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


def fitting(draw: Draw) -> str:
    """Check valid calls: into new tensors, in place, and the gradients of both, also those of trained tables."""
    rotation, guarded, layout = fit(draw)
    tensors = [g.x for g in guarded]
    wanted = [exact(rotation, x, layout) for x in tensors]
    way = draw.choice(("new", "in place", "backward", "recorded in place"))
    if way == "new":
        is_right(rotation, rotation(*tensors, layout=layout), wanted, layout)
        assert all(unchanged(g.whole, g.before) for g in guarded)
    elif way == "in place":
        rotation.apply_(*tensors, layout=layout)
        is_right(rotation, tensors, wanted, layout)
    else:
        trained = draw.random() < 0.5
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


def attempt(rotation: Rotation, guarded: list[Guarded], layout: str, draw: Draw) -> str:
    """Make a call that may raise a RopeError. Its result must be right otherwise."""
    tensors, way = [g.x for g in guarded], draw.choice(("new", "in place"))
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


def pytrees(draw: Draw) -> str:
    """Tables changed by `tree_map`."""
    rotation, guarded, layout = fit(draw)
    try:
        rotation = pytree.tree_map(draw.choice(CHANGES), rotation)
    except (RuntimeError, IndexError):  # PyTorch's own error: no such axis
        return "none"
    return attempt(rotation, guarded, layout, draw)


NUMBERS = (0, 1, -1, 2, 3, 7, 8, 64, 4096, -4096, 2**31, 2**40, -(2**62), 2**63, 10**30, 0.5, -1.0, float("inf"))
OBJECTS = (None, "half", "HALF", "interleaved", "", True, [], {}, (1, 2), float("nan"), *NUMBERS)


def pickles(draw: Draw) -> str:
    """Pickles that `torch.load(weights_only=True)` accepts, with invalid fields of a Rotation."""
    rotation, guarded, layout = fit(draw)
    _, fields = rotation.__reduce__()
    fields = list(fields)
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(fields))
        if isinstance(fields[at], Tensor):
            try:
                fields[at] = draw.choice(CHANGES)(fields[at])
            except (RuntimeError, IndexError):
                return "none"
        elif isinstance(fields[at], int) and draw.random() < 0.5:
            fields[at] += draw.choice((-2, -1, 1, 2, 64, 2**40))
        else:
            fields[at] = draw.choice(OBJECTS)
    if draw.random() < 0.1:
        fields = fields[: draw.randrange(2, 8)]

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
    return attempt(loaded, guarded, layout, draw)


def operators(draw: Draw) -> str:
    """The private operators, with one or two arguments replaced."""
    rotation, guarded, layout = fit(draw)
    tensors = [g.x for g in guarded]
    inverse, in_place = draw.random() < 0.5, draw.random() < 0.5
    arguments: list[Any] = [
        tensors, rotation.cos, rotation.sin, layout, rotation.pairing == "interleaved", rotation.rotary_offset, inverse
    ]  # fmt: skip
    for _ in range(draw.choice((0, 1, 1, 2))):
        at = draw.choice((0, 1, 2, 3, 5))
        if at == 0:
            other = fit(draw)[1]
            arguments[0] = draw.choice(([], [*tensors, *(g.x for g in other)], [g.x for g in other], [*tensors] * 2))
        elif at < 3:
            try:
                changed = draw.choice(CHANGES)(arguments[at])
            except (RuntimeError, IndexError, AttributeError):
                return "none"
            arguments[at] = changed if isinstance(changed, Tensor) else arguments[at]
        else:
            arguments[at] = draw.choice((*LAYOUTS, "", "xyz")) if at == 3 else draw.choice(NUMBERS[:13])
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


def circles(draw: Draw) -> str:
    """Call `Rope.at` with positions of any kind."""
    rope = Rope(2 * draw.choice((1, 2, 5, 16, 33)), 1e4, "half")
    size = draw.choice(((0,), (1,), (5,), (2, 3), (0, 4), (), (2, 2, 2)))
    dtype = draw.choice((torch.int32, torch.int64, torch.int64, torch.int16, torch.float32, torch.bool))
    positions = torch.randint(-(2**31), 2**31 - 1, size).to(dtype)
    if positions.ndim == 2 and draw.random() < 0.5:
        positions = positions.t()
    try:
        rotation = rope.at(positions, dtype=draw.choice((None, torch.float32, torch.float64, torch.half)))
    except RopeError:
        return "refused"
    note(rotation.cos, rotation.sin)
    circle = rotation.cos.double() ** 2 + rotation.sin.double() ** 2
    assert ((circle - 1).abs() < 2e-7).all()
    assert rotation.cos.shape == (*positions.shape, rope.rotary_dim // 2)
    return "right"


def inverse(draw: Draw) -> str:
    """Rotate by the inverse, which divides by the attention factor, and back to the start."""
    made, guarded, layout = fit(draw)
    factor, x = draw.choice((1.0, 1.25, 0.5)), guarded[0].x
    angle = made.cos.double()
    tables = [(factor * table).to(made.cos.dtype) for table in (angle.cos(), angle.sin())]
    how = {"pairing": made.pairing, "head_dim": made.head_dim, "rotary_offset": made.rotary_offset}
    turn = Rotation(*tables, attention_factor=factor, per_head=made.per_head, **how)
    back = Rotation(tables[0] / factor**2, -tables[1] / factor**2, per_head=made.per_head, **how)
    is_right(turn, turn.inverse()(x, layout=layout), [exact(back, x, layout)], layout)
    twice = turn.inverse()(turn(x, layout=layout), layout=layout)
    eps = max(torch.finfo(x.dtype).eps, torch.finfo(made.cos.dtype).eps)  # tables are rounded too
    bound = 8 * eps * (1 + abs(as_bshd(x, layout)).max(initial=0.0))
    assert (abs(as_bshd(twice, layout) - as_bshd(x, layout)) <= bound).all()
    return "back and forth"


def angles(draw: Draw) -> str:
    """Compute the tables of a rope at positions in ±2²⁴, and on several axes, from the exact frequencies."""
    pairs, base = draw.choice((1, 2, 4, 6)), draw.choice((1e2, 1e4, 5e5))
    axes = Axes.sections((pairs, pairs)) if draw.random() < 0.3 else None
    rope = Rope(2 * pairs * (1 if axes is None else 2), base, draw.choice(PAIRINGS), axes=axes)
    places = [[draw.randint(-(2**24), 2**24) for _ in range(3)] for _ in range(1 if axes is None else 2)]
    positions = torch.tensor(places, dtype=draw.choice((torch.int32, torch.int64)))
    made = rope.at(positions[0] if axes is None else positions, dtype=draw.choice((torch.float32, torch.float64)))
    note(made.cos, made.sin)
    speeds = [float(w) for w in oracle.inv_freq(base, rope.rotary_dim)]
    count = len(speeds)
    by_row = [oracle.cos_sin(row, speeds) for row in places]
    of_pair = [0] * count if axes is None else [0] * pairs + [1] * pairs
    # The float64 frequency may be off by a unit in the last place, and the table is rounded once.
    allowed = 2**-25 + 2**24 * 2**-51
    for table, which in ((made.cos, 0), (made.sin, 1)):
        wanted = np.stack([by_row[of_pair[pair]][which][:, pair] for pair in range(count)], axis=1)
        assert (abs(table.double().numpy() - wanted) <= allowed).all(), f"{rope} at {places}"
    return "one axis" if axes is None else "two axes"


def step(draw: Draw) -> str:
    """Normalize, rotate and store in one call. Slots without a token, and the inputs, keep their bits."""
    normed = draw.random() < 0.6
    heads = Heads.drawn(draw, DTYPES, normed=normed)
    q, k, layout = heads.q, heads.k, heads.layout
    blocks, size = draw.choice((1, 3, 20)), draw.choice((1, 4))
    tokens = heads.batch * heads.seq
    blocks += -(-tokens // size)
    v = Guarded(draw, tuple(k.shape), k.dtype).x
    caches = pools(draw, blocks, size, k.shape[layout.index("h")], k.shape[-1], k.dtype)
    before, inputs = [cache.clone() for cache in caches], [x.clone() for x in (q, k, v)]
    slots = draw.sample([*range(blocks * size), *[-1] * tokens], tokens)
    mapping = torch.tensor(slots).view((heads.seq,) if layout == "thd" else (heads.batch, heads.seq))
    made = rotate_and_store(
        *(q, k, v),
        rotation=heads.turn,
        k_cache=caches[0],
        v_cache=caches[1],
        slot_mapping=mapping,
        norm=heads.norm,
        layout=layout,
    )
    heads.check(made, q, 0)
    stored = torch.zeros_like(k)  # the keys that the cache has, in the layout of k
    views = [
        x.unsqueeze(0) if layout == "thd" else x.permute([layout.index(axis) for axis in "bshd"]) for x in (stored, v)
    ]
    rows, values = (view.movedim(2, 0) for view in views)  # heads first
    kept = torch.zeros(heads.batch, heads.seq, dtype=torch.bool)
    for token, slot in enumerate(slots):
        at, place = divmod(token, heads.seq), divmod(slot, size)
        if slot >= 0:
            kept[at] = True
            rows[(slice(None), *at)] = caches[0][place]
            assert unchanged(caches[1][place], values[(slice(None), *at)]), "a value"
            for cache, old in zip(caches, before, strict=True):
                cache[place] = old[place]
    _, want, _ = heads.exact(k, 1)
    views[0].copy_(torch.where(kept[:, :, None, None], views[0], torch.tensor(want).to(k.dtype)))
    heads.check(stored, k, 1)
    note(made, stored)
    assert all(unchanged(x, old) for x, old in zip((*caches, q, k, v), (*before, *inputs), strict=True))
    return f"{'norm' if normed else 'no norm'}, tables {'per head' if heads.turn.per_head else 'shared'}"


def norm_gradient(draw: Draw) -> str:
    """Differentiate norm and rotation in one call, with frozen or trained tables, also for as many rows as heads."""
    heads = Heads.drawn(draw, [torch.float64, torch.float32], normed=True)
    trained, norm = draw.random() < 0.4, heads.norm
    assert norm is not None
    tables = [t.clone().requires_grad_(trained) for t in (heads.turn.cos, heads.turn.sin)]
    heads.turn = heads.turn._replace_tables(*tables)
    leaves = [x.clone().requires_grad_() for x in (heads.q, heads.k, norm.q_weight, norm.k_weight)]
    heads.norm = QKNorm(*leaves[2:], EPS, norm.add_one)
    made = heads.norm.rotate(heads.turn, *leaves[:2], layout=heads.layout)
    grads = [torch.randn(y.shape).to(y.dtype) for y in made]
    found = torch.autograd.grad(made, [*leaves, *(tables if trained else ())], grads)
    note(*found)
    eps = torch.finfo(heads.q.dtype).eps
    to_tables: list[np.ndarray] = []
    for i in range(2):
        x, grad = (as_bshd(t, heads.layout) for t in (leaves[i], grads[i]))
        weight = leaves[2 + i].detach().double().numpy()
        how = heads.turn.pairing, heads.turn.rotary_offset
        back, _ = oracle.rotate_by_tables(grad, *heads.tables(), *how, inverse=True)
        wanted = oracle.rms_norm_gradient(x, weight, back, EPS, norm.add_one)
        for got, want in ((as_bshd(found[i], heads.layout), wanted[0]), (found[2 + i].double().numpy(), wanted[1])):
            # Sums of at most a few hundred terms. 1/√(mean of x²) is large only if the head has one or two channels.
            assert (abs(got - want) <= 3e3 * eps * max(1.0, abs(want).max())).all(), (
                f"{heads.turn}, batch {heads.batch}"
            )
        normed = oracle.rms_norm(x, weight, EPS, norm.add_one).astype(np.float64)
        of_heads = (y[..., None, :] for y in (normed, grad))
        to_tables.append(np.stack(oracle.table_gradient(*of_heads, heads.turn.cos.shape[-1], *how)[:2]))
    for n, got in enumerate(found[4:]):
        parts = [part[n].transpose(0, 2, 1, 3) for part in to_tables]  # [batch, heads, seq, pairs]
        want = sum(parts) if heads.turn.per_head else sum(part.sum(1) for part in parts)
        want = want if want.ndim == got.ndim else want.sum(0)
        assert (abs(got.double().numpy() - want) <= 3e3 * eps * max(1.0, abs(want).max())).all(), f"table {heads.turn}"
    kind = f"tables {'per head' if heads.turn.per_head else 'shared'}, {'trained' if trained else 'frozen'}"
    return kind + (", as many rows as heads" if heads.turn.per_head and heads.batch == heads.turn.cos.shape[-3] else "")


def kv_cache(draw: Draw) -> str:
    """Use a KVCache: padding, positions, at, shift, move, rollback, reset, reorder, window and sinks."""
    sizes: list[dict[str, int]] = [{"capacity": 24}, {"window": draw.randint(1, 8)}]
    size = draw.choice([*sizes, {"window": draw.randint(1, 6), "sinks": draw.randint(1, 3)}])
    requests = RowRequests(draw.randrange(2**32), batch=draw.randint(1, 3), **size)
    for _ in range(8):
        requests.request()
    note(*requests.cache.keys, *requests.cache.values)
    return " and ".join(size)


KINDS: dict[Callable[[Draw], str], int] = {
    fitting: 35,
    inverse: 5,
    pytrees: 10,
    pickles: 10,
    operators: 10,
    circles: 10,
    angles: 5,
    step: 10,
    norm_gradient: 10,
    kv_cache: 3,
}
"""The kinds of cases, and their weights."""


def case(seed: int) -> tuple[str, str]:
    """Run one random case. Return its outcome."""
    torch.manual_seed(seed)
    draw = Draw(seed)
    (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
    return kind.__name__, kind(draw)


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
        for kind in ("pytrees", "pickles", "operators", "circles"):
            assert counted[kind, "refused"] > 5, counted
            assert counted[kind, "right"] > 2, counted
        assert {kind for kind, _ in counted} == {kind.__name__ for kind in KINDS}


if __name__ == "__main__":
    total, begin = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.set_num_threads(1)
    counted = cases(begin, total)
    lines = [f"{count:6}  {kind:14} {drawn}" for (kind, drawn), count in sorted(counted.items())]
    sys.stdout.write("\n".join([cpu.unavailable() or cpu.version(), *lines, f"digest {DIGEST.hexdigest()}", ""]))
