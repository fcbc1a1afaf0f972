"""The tables of cos and sin that a function is passed: exact ones, or those that other code of the target computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ropewalk import Rope, _checks, formats
from ropewalk.tools.check.find import memory, uses, words
from ropewalk.tools.check.find.target import code_of
from ropewalk.tools.check.find.ways import Way, ways
from ropewalk.tools.check.find.words import Call

Tables = tuple[Tensor, ...]
INDEXED = ("rows of a table", "of a length")
"""The names of sources whose tables have no axis for the rows of a batch until they are indexed with one."""


class TableSet(tuple[Tensor, ...]):
    """Tables for all positions, which a function such as `precompute_freqs_cis` returned."""


@dataclass(frozen=True)
class Source:
    """A source of tables."""

    name: str  # of the source, or the format of the tables, in words
    make: Callable[[Tensor, Tensor], Tables]  # for q and positions; the tables have axes batch and seq
    positions: str = "rows"  # for which they can be computed, as in `Way`
    given: Rope | None = None  # that of exact tables
    is_final: bool = False  # with a row for each token, although the function is passed positions, too
    is_whole: bool = False  # with the axes of size 1 that they are computed with, as for broadcasting


# The axes of tables before the columns (b is batch, s is seq, 1 is for the heads) → how they are made from [b, s, …].
_AXES: dict[str, Callable[[Tensor], Tensor]] = {
    "bs": lambda table: table,
    "b1s": lambda table: table.unsqueeze(1),
    "bs1": lambda table: table.unsqueeze(2),
    "sb1": lambda table: table.transpose(0, 1).unsqueeze(2),
    "s": lambda table: table[0],
    "s11": lambda table: table[0, :, None, None],
    "own": lambda table: table,
}
# Layout of q and k → the axes of tables with rows that a function of it takes: without those of the heads, and with.
_WITH_ROWS = {"bshd": ("bs", "bs1"), "bhsd": ("bs", "b1s"), "sbhd": ("bs", "sb1"), "bsd": ("bs",)}
_UNSQUEEZED = {"bhsd": 1, "bshd": 2}  # layout → the value of unsqueeze_dim for tables with rows


def passed(
    sources: Sequence[Source], call: Call, way: Way, layouts: Sequence[str], *, is_stated: bool
) -> Iterator[tuple[str, Way]]:
    """Yield each way to pass tables with each layout of q and k, the most likely first.

    In all layouts, tables with a batch axis are tried before tables without one, because tables `[seq, channels]` could
    fit a layout with tokens before heads merely by broadcasting.

    Args:
        sources: of the tables. If there are none, the function computes its own angles.
        call: the roles of the function's parameters.
        way: how positions are passed.
        layouts: those of q and k.
        is_stated: whether the user states the layout, which tables with axes for it must then fit as they are.
    """
    roles = call.parameter_of
    if not sources:
        yield from ((layout, way) for layout in layouts)
        return
    names = [roles[role] for role in ("freqs_cis", "cos_sin_cache") if role in roles]
    orders = [names] if names else [[roles["cos"], roles["sin"]]]
    if not names and sources[0].given is None and [*roles].index("sin") < [*roles].index("cos"):
        orders.append(orders[0][::-1])  # GPT-J's class returns sin first
    is_given = way.positions == "given"
    has_rows = is_given or any(source.is_final for source in sources)
    has_rows &= not {"tensor_layout", "offset", "offsets"} & {*roles}  # of which a slice is read
    if "unsqueeze_dim" in roles:
        places = [(name, "bs" if has_rows else "s", axis) for name, axis in _UNSQUEEZED.items() if name in layouts]
        places += [(name, "s", 1) for name in layouts if name in (("thd", "bshd") if has_rows else ("thd",))]
    else:
        far = layouts if "tensor_layout" in roles else ("sbhd", "thd")
        places = [(name, axes, 0) for name in layouts for axes in _WITH_ROWS.get(name, ()) if has_rows]
        places += [("thd", "bs", 0)] if "thd" in layouts and sources[0].given is None else []  # as it computes them
        places += [(name, "s", 0) for name in layouts] + [(name, "s11", 0) for name in layouts if name in far]
    if whole := [source for source in sources if source.is_whole]:
        places[:0] = [(name, "own", 0) for name in layouts]
        sources = whole if is_stated else sources
    if sources[0].given is None:  # as they are before they get an axis for the heads
        places.sort(key=lambda place: place[1] not in ("bs", "s", "own"))
    groups = [[source] for source in sources] if sources[0].given is None else [sources]  # of formats, in each layout
    for group in groups:
        for (layout, axes, axis), source, order in product(places, group, orders):
            if not is_given and source.is_final != ("b" in axes) and not (source.is_final and layout == "thd"):
                continue
            if source.is_whole != (axes == "own"):
                continue
            fixed = {roles["unsqueeze_dim"]: axis} if "unsqueeze_dim" in roles else {}
            yield layout, _passed(source, way, order, axes, fixed, is_longer="slots" in roles)


def _passed(source: Source, way: Way, names: list[str], axes: str, fixed: dict[str, Any], *, is_longer: bool) -> Way:
    """Return the way to pass tables with these axes in the parameters `names`, and the arguments `fixed`.

    If tables that are indexed are longer, slots that are taken for positions are found in them, too.
    """

    def arguments(positions: Tensor, q: Tensor) -> dict[str, Any]:
        rows = positions
        if way.positions != "given" and not source.is_final:  # the target indexes tables of all positions
            count = max(int(positions.max()) + 1, positions.shape[-1])
            reads_more = way.positions in ("packed", "runs") or (way.positions == "offset" and count < 64)  # if wrong
            of_grid = positions.ndim == 3  # whose sides may be longer by 1
            rows = torch.arange(count + 16 * reads_more + of_grid + is_longer * (count + 64))[None]
        values: list[Any] = [*source.make(q, rows)]
        if axes in ("s", "s11") and source.given is None and any(len(t) not in (1, rows.shape[-2]) for t in values):
            raise ValueError("the first axis of the tables is not that of the batch")
        is_of_each_axis = rows.ndim == 3 and source.given is not None
        values = [torch.stack([*map(_AXES[axes], t)]) if is_of_each_axis else _AXES[axes](t) for t in values]
        if len(names) == 1 < len(values):
            values = [tuple(values)]
        if len(names) == 2 > len(values) and values[0].is_floating_point():  # angles, as of vision towers
            angles = torch.cat(values * 2, dim=-1)
            values = [angles.cos(), angles.sin()]
        if len(names) != len(values):
            raise ValueError(f"{len(values)} tensor(s) are computed for the parameters {', '.join(names)}")
        return dict(zip(names, values, strict=True)) | way.arguments(positions, q) | fixed

    accepted = way.positions if source.positions == "rows" else source.positions
    if accepted == "given":
        accepted = "rows" if "b" in axes else "shared"
    text = source.name if source.given is not None else f"{source.name}, {axes}, {fixed}"
    return Way(accepted, way.roles, arguments, source.given, text)


_WIDTHS: tuple[formats.Width, ...] = ("halves", "each", "half")  # the formats of two arguments, cos and sin
# The formats of one argument: complex numbers, matrices of 2 × 2, angles, cos and sin stacked, concatenated or in a
# tuple.
_IN_ONE = (
    *("complex", "matrices", "cos, sin stacked", "cos, sin half", "sin, cos half"),
    *(f"{kind}{width}" for kind in ("angles ", "(cos, sin) ") for width in reversed(_WIDTHS)),
    *("cos, sin each", "cos, sin halves"),
)
# Names of a parameter → the formats that are tried first.
_LIKELY = {
    "freqs angles theta": "angles",
    "emb pos_emb rope rotary_emb image_rotary_emb position_embeddings": "(cos, sin)",
}


def exact(roles: Mapping[str, str], given: Rope, sin_first: bool = False) -> list[Source]:
    """Return a source of exact tables in each format, of which one with sin first may be a tuple, as in DINOv3."""
    if "cos" in roles:
        return [_exact(name, given) for name in _WIDTHS]
    if "cos_sin_cache" in roles:
        return [_exact("cos, sin half", given)]
    likely = [kind for names, kind in _LIKELY.items() if roles["freqs_cis"] in names.split()]
    names = [*_IN_ONE, *(f"(sin, cos) {width}" for width in _WIDTHS if sin_first)]
    names += ["sin, cos each"] * (roles["freqs_cis"] == "emb")  # as in timm
    return [_exact(name, given) for name in sorted(names, key=lambda name: not name.startswith((*likely, "(none)")))]


def _exact(name: str, given: Rope) -> Source:
    """Return a source of exact tables. As in models, cos and sin have the dtype of q, and angles are float32."""

    def make(q: Tensor, positions: Tensor) -> Tables:
        angles = positions[..., None] * torch.from_numpy(given.inv_freq)
        exact = angles.cos(), angles.sin()
        cos, sin = (table.to(q.dtype) for table in exact)
        if name == "complex":
            return (torch.complex(exact[0].float(), exact[1].float()),)
        if name == "matrices":
            return (torch.stack((torch.stack((cos, -sin), dim=-1), torch.stack((sin, cos), dim=-1)), dim=-2),)
        if name == "cos, sin stacked":
            return (torch.stack((cos, sin), dim=-1),)
        kind, _, width = name.rpartition(" ")
        tables = {"angles": (angles.float(),), "sin, cos": (sin, cos)}.get(kind.strip("()"), (cos, sin))
        wide = tuple(formats.widen(table, width) for table in tables)  # type: ignore[arg-type]
        return wide if not kind or kind.startswith("(") else (torch.cat(wide, dim=-1),)

    return Source(name, make, given=given)


def of_target(
    first: Any, layer_type: str | None, count: int | None, *, is_passed_positions: bool, from_offset: bool = False
) -> list[Source]:
    """Return the sources of tables that a class or function offers.

    The parameters of the class or function may be positions (and x), a length (and x), or only x. In the last case, the
    positions may also be passed as x.

    Args:
        first: the object, the function, or all tables that it has computed.
        layer_type: the kind of the expected layer, or None.
        count: as for `ways`.
        is_passed_positions: whether the function that takes the tables takes positions, too.
        from_offset: return only those whose first row is that of an offset, which is passed as well as a length.
    """

    def start(positions: Tensor) -> int:
        return int(positions.min()) * from_offset

    def flat(tables: Tables, rows: int = 2, more: int = 0) -> Tables:
        if any(t.numel() <= more * t.shape[-1] for t in tables):
            raise IndexError("the tables have no more rows than there are tokens")
        return tuple(t.reshape([1] * (rows == 1) + [size for size in t.shape if size > 1]) for t in tables)

    def own(find: Callable[[Tensor, Tensor], Tables], name: str, shown: Tables) -> list[Source]:
        """Return the source of rows of tables with axes of size 1, if they have any."""
        if not any(1 in t.shape[:-1] for t in shown):
            return []

        def rows(q: Tensor, positions: Tensor) -> Tables:
            found = find(q, positions)
            counts = [max(t.shape[: -2 if t.shape[-1] == 2 else -1]) for t in found]  # without pairs of cos and sin
            at = positions[0] - start(positions)
            return tuple(t.index_select(t.shape.index(n), at) for t, n in zip(found, counts, strict=True))

        return [Source(f"{name}, as they are", rows, is_whole=True)]

    if isinstance(first, TableSet):
        rows = Source(INDEXED[0], lambda q, positions: tuple(t[positions] for t in flat(first)))
        whole = Source("all rows", lambda *_: tuple(t[None] for t in flat(first)), "none")
        kept = own(lambda *_: first, INDEXED[0], first)
        return [*kept, rows, whole] if not from_offset and (count is None or is_passed_positions) else []
    call = words.read_call(first)
    parameter_of = call.parameter_of
    if from_offset and ("positions" in parameter_of or not {"seq_len", "offset"} <= {*parameter_of}):
        return []

    def make(q: Tensor, named: dict[str, Any], first: Any = first) -> Tables:
        lengths = [value for value in named.values() if isinstance(value, int)] * ("seq_dim" in parameter_of)
        x = q.flatten()[:1].expand(lengths * 3) if lengths else q  # of which one axis is read
        known = {"x": x} if layer_type is None else {"x": x, "layer_type": layer_type}
        fixed = {parameter_of[role]: value for role, value in known.items() if role in parameter_of}
        filled = words.filled(first, parameter_of.values())
        fixed |= filled | ({"dtype": q.dtype} if "dtype" in filled else {})
        return tensors_of(memory.call(first, fixed | named))

    def at(way: Way) -> Source:
        def tables(q: Tensor, positions: Tensor) -> Tables:
            is_of_rows = {"seq_len", "offset"} <= call.optional  # that are kept, whatever the positions are
            is_passed = "seq_len" in parameter_of and not is_of_rows
            length = {parameter_of["seq_len"]: int(positions.max()) + 1} if is_passed else {}
            found = make(q, length | way.arguments(positions, q))
            return _rows(flat(found, positions.shape[-1]) if way.positions == "shared" else found, positions)

        return Source(f"at {way.positions} positions", tables, way.positions)

    if "positions" in parameter_of or count is not None:
        sources = [at(way) for way in ways(call, count)]
        return sources + [replace(source, is_final=True) for source in sources if is_passed_positions]
    if "seq_len" in parameter_of:
        name = parameter_of["seq_len"]  # of at least 2 rows, since axes of size 1 are taken off

        def up_to(q: Tensor, p: Tensor) -> Tables:
            offset = {parameter_of["offset"]: start(p)} if from_offset else {}
            return make(q, {name: max(int(p.max()) + 1 - start(p), 2)} | offset)

        try:
            shown = make(torch.zeros(1, 1, 1, 64), {name: 8}, copy.deepcopy(first))  # which may keep the first length
            kept = own(up_to, INDEXED[1], shown)
        except Exception:  # it cannot be copied, or any call of it raises
            kept = []
        sources = [*kept, Source(INDEXED[1], lambda q, p: tuple(t[p - start(p)] for t in flat(up_to(q, p))))]
        return [replace(each, positions="offset", is_final=True) for each in sources] if from_offset else sources
    if x := parameter_of.get("x"):
        for_positions = Source("for positions", lambda q, p: _rows(make(q, {x: p}), p))
        shared = Source("for shared positions", lambda q, p: _rows(make(q, {x: p[0]}), p[:1]), "shared")
        all_rows = Source(INDEXED[0], lambda q, p: tuple(t[p] for t in flat(make(q, {}), more=p.shape[-1])))

        def wide(q: Tensor, p: Tensor) -> Tables:
            sizes = p.mT.shape if q.shape[:2] == p.mT.shape else p.shape  # q, too, may have the tokens first
            return _rows(make(q, {x: q.new_zeros(*sizes, 512)}), p)

        of_p = [] if uses.roles(code_of(first)).get(x) == "like" else [for_positions, shared]
        of_model = Source("for x of a model", wide, "none")
        return [Source("for x", lambda q, p: _rows(make(q, {}), p), "none"), *of_p, all_rows, of_model]
    must = "the function that computes the tables must have a parameter for positions, a length or x"
    raise words.no_call(must, words.named(first))


def tensors_of(returned: Any) -> Tables:
    """Return the tensors among what a function returned. Raise RopeError if there are none."""
    values = (returned,) if isinstance(returned, Tensor) or not isinstance(returned, Iterable) else returned
    if not (found := tuple(t for t in values if isinstance(t, Tensor))):
        fix = "Return cos and sin, or one table."
        raise _checks.error("check", "code that computes tables must return tensors", _checks.shown(returned), fix)
    return found


def _rows(tables: Tables, positions: Tensor) -> Tables:
    """Add a batch axis to tables without one, and expand it to the number of sequences, which then share the tables."""
    rows = positions.shape[-2]
    formatted = tuple(t[None] if t.ndim == 2 else t for t in tables)
    is_one = [len(t) == 1 and t.shape[1:-1] != (1, 1) for t in formatted]  # and not `[1, 1, 1, channels]`, of one token
    return tuple(t.expand(rows, *t.shape[1:]) if one else t for one, t in zip(is_one, formatted, strict=True))
