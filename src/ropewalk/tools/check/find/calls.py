"""Find out how to call a target: try each call that its parameters allow, and choose the one that rotates best.

A target is passed cos and sin, computes its own angles, or consists of two functions, of which the first computes cos
and sin for the second.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ropewalk import Rope, _checks, formats
from ropewalk.tools.check.expected import Expected
from ropewalk.tools.check.find import several, signature
from ropewalk.tools.check.find.signature import Arguments, Roles
from ropewalk.tools.check.find.subject import LAYOUTS, CallError, Positions, Subject
from ropewalk.tools.check.find.target import Target
from ropewalk.tools.check.measure import structure

GIVEN = Rope(16, 100.0, "half")  # of the tables that `check` passes to a function

Tables = tuple[Tensor, ...]


def find(target: Target, expected: Expected, call: str | None, layout: str | None) -> Subject:
    """Return the target as a `Subject`, which calls it in the way that rotates best.

    Raises:
        RopeError: no candidate call works. The message says why, or what the target raised.
    """
    try:
        return _find(target, expected, call, layout)
    except _checks.RopeError as e:
        if (wrap := _how_to_wrap(target)) is not None:
            raise _checks.error("check", f"{target.name} must take tensors of torch", *wrap) from e
        raise


def _find(target: Target, expected: Expected, call: str | None, layout: str | None) -> Subject:
    call, form = several.read_form(call)
    errors: list[str] = []

    def candidates(expected: Expected, count: int | None) -> Iterator[Subject]:
        first, arguments = _construct(target.objects[0], expected)
        second = target.objects[1] if len(target.objects) == 2 else None
        if count is None:
            yield from _candidates(first, second, arguments, call, expected.channels)
            return
        for adapted in several.adapted(first, second, call, form, count, expected.sizes_of_axes()):
            for subject in _candidates(adapted.first, adapted.second, arguments, adapted.call, expected.channels):
                if adapted.layout in (None, subject.layout):
                    yield replace(subject, axes=count, side=adapted.side)

    def search(count: int | None, layout: str | None) -> tuple[int, Subject] | None:
        """Return the call that scores best among those with `count` axes of positions, and its score."""
        best: tuple[int, int, Subject] | None = None
        for index, subject in enumerate(candidates(expected, count)):
            if layout is not None and subject.layout != layout:
                continue
            score = _score(subject, errors)
            if score is not None and (best is None or score > best[0]):
                best = score, index, subject
            if score == _PERFECT:
                break
        if best is None:
            return None
        score, index, chosen = best

        def rebuild(base: float | None = None) -> Subject:
            changed = expected if base is None else replace(expected, base=base)
            return next(islice(candidates(changed, count), index, None))

        return score, chosen if chosen.arguments is None else replace(chosen, rebuild=rebuild)

    stated = several.count_of(form) if form else None if expected.axes is None else expected.axes.count
    best = None if stated is None else search(stated, layout)
    failure = None
    if form is None and (best is None or best[0] < _PERFECT):
        try:
            plain = search(None, layout)
        except _checks.RopeError as e:
            plain, failure = None, e
        best = max((found for found in (best, plain) if found), key=lambda found: found[0], default=None)
    certain = best is not None and best[0] == _PERFECT
    axes = [] if stated else [search(n, best[1].layout if certain and best else layout) for n in several.COUNTS]
    found = [other for other in axes if other is not None and (best is None or other[0] >= best[0])]
    if found and (best is None or any(several.all_matter(subject) for _, subject in found)):
        best = max(found, key=lambda one: (several.all_matter(one[1]), one[0]))
    if best is None and failure is not None:
        raise failure
    if best is None:
        how, layout = _checks.argument("call", "q,k,cos,sin"), _checks.argument("layout")
        raise _checks.error(
            "check",
            f"{target.name} must be callable in a known way, and rotate tensors",
            errors[0] if errors else "no known parameters",
            " ".join((f"Describe its parameters: pass {how}, {layout} or arguments (--arg).", *expected.notes)),
        )
    return best[1]


class _TableSet(tuple[Tensor, ...]):
    """Tables for all positions, which a function such as `precompute_freqs_cis` returned.

    If they are those of the cells of a grid, in the order of rows, `grid` is its size.
    """

    grid: tuple[int, ...] = ()


def _construct(target: Any, expected: Expected) -> tuple[Any, Arguments | None]:
    """Construct the object, or compute its tables, and return the result with the arguments that were used.

    A function that rotates is returned unchanged, with None instead of arguments.
    """
    if signature.is_constructor(target):
        return signature.construct(target, expected)
    known = signature.parameters(target) or {}
    makes_tables = "dim" in signature.match(known, signature.MAKE_NAMES) and len(known) > 1
    if makes_tables and not {"q", "x"} & {*signature.match(known, signature.CALL_NAMES)}:
        sides = several.sides(signature.match(known, signature.CALL_NAMES))
        values = {**sides, **expected.arguments}
        returned, arguments = signature.construct(target, replace(expected, arguments=values))
        tables = _TableSet(_tensors(returned))
        tables.grid = tuple(values[side] for side in sides)
        return tables, arguments
    if expected.arguments:
        must = "arguments (--arg) require a class, or a function that computes all tables"
        names = ", ".join(expected.arguments)
        raise _checks.error("check", must, f"{names} for a function that is called with tokens", "Drop them.")
    return target, None


_WRAPPERS = {"numpy": "np.asarray", "jax": "jnp.asarray", "mlx": "mx.array"}


def _how_to_wrap(target: Target) -> tuple[str, str] | None:
    """Return what a target is, and how to wrap it, if it uses another library of arrays and not torch."""
    for obj in target.objects:
        owner = getattr(obj, "owner", obj)
        code = [owner, *vars(owner if inspect.isclass(owner) else type(owner)).values()]
        scope = next((function.__globals__ for function in code if inspect.isfunction(function)), {})
        used = {value.__name__.partition(".")[0] for value in scope.values() if inspect.ismodule(value)}
        for library in _WRAPPERS.keys() & used if "torch" not in used else ():
            array = _WRAPPERS[library]
            return f"code that uses {library}", (
                f"Check a function that converts them, with --ignore no-gradient: def rotate(x, positions): return "
                f"torch.from_numpy(np.array(f({array}(x.detach().float().numpy()), {array}(positions.numpy()))))"
                f".type_as(x)."
            )
    return None


_TOKENS, _HEADS = 5, 3
_PERFECT = 30  # the largest score


def _score(subject: Subject, errors: list[str]) -> int | None:
    """Score how much a candidate call behaves like a rotation. Return None, and append to `errors`, if it fails."""
    positions = torch.arange(_TOKENS)[None]
    x = torch.sin(1 + torch.arange(subject.channels, dtype=torch.float32)).expand(3, _TOKENS, _HEADS, -1)
    try:
        out, _ = subject(x[:1], x[:1], positions)
        maps = subject.linear_maps(positions)
    except CallError as e:
        errors.append(str(e))
        return None
    differs_by_head = bool((out - out[:, :, :1]).abs().max() > 1e-5)
    differs_by_token = bool((out - out[:, :1]).abs().max() > 1e-5)
    score = 12 * (differs_by_token and not differs_by_head)
    if (found := structure.infer(maps)) is not None:
        at_0 = found.multipliers(maps[0, :, found.ins[:, 0]].T).diagonal()
        score += (
            {None: 10, "attention-factor": 8, "not-a-rotation": 6}.get(found.flaw, 2)
            + 4 * (found.order == "same")
            + 2 * (found.pairing is not None)
            + 1 * bool((at_0.angle().abs() < 1e-5).all())
        )
    if subject.accepts(positions.expand(3, -1)):
        with contextlib.suppress(CallError):
            subject(x, x, positions.expand(3, -1))
            score += 1
    return score


def _candidates(
    first: Any, second: Any, arguments: Arguments | None, call: str | None, channels: int
) -> Iterator[Subject]:
    """Yield every call that the names of the target's parameters allow.

    `first` is the function, object or `_TableSet` of the target. `second` is the function that rotates by its tables,
    or None.

    Raises:
        RopeError: the parameters allow no known call. The message says how to describe them.
    """
    layer_type = None if arguments is None else arguments.layer_type
    if second is not None:
        subjects = _with_tables(second, signature.call_roles(second, call), _table_sources(first, layer_type), False)
    else:
        parameter_of = {} if isinstance(first, _TableSet) else signature.call_roles(first, call)
        if {"cos", "sin"} <= {*parameter_of} or "table" in parameter_of:
            names = _IN_ONE if "table" in parameter_of else _WIDTHS
            subjects = _with_tables(first, parameter_of, [_exact_tables(name) for name in names], True)
            channels = GIVEN.head_dim
        elif {"q", "k"} <= {*parameter_of} or "x" in parameter_of:
            subjects = _with_own_angles(first, parameter_of, _fixed(parameter_of, layer_type))
        else:
            how = _checks.argument("call", "x,positions")
            fix = f"Pass {how}. If TARGET computes cos and sin for a function, pass both: "
            must = "TARGET must have parameters for q and k, or for x"
            raise _checks.error("check", must, _parameters(first), f"{fix}file.py:make,apply.")
    module = next((m for m in (first, getattr(first, "__self__", None)) if isinstance(m, torch.nn.Module)), None)
    for subject in subjects:
        yield replace(subject, module=module, arguments=arguments, channels=channels)


def _parameters(function: Any) -> str:
    known = None if isinstance(function, _TableSet) else signature.parameters(function)
    return f"parameters {', '.join(known or {}) or 'none'}"


def _fixed(parameter_of: Roles, layer_type: str | None) -> dict[str, Any]:
    """Return the argument that states the kind of the expected layer, if the function has a parameter for it."""
    known = layer_type is not None and "layer_type" in parameter_of
    return {parameter_of["layer_type"]: layer_type} if known else {}


def _arguments(parameter_of: Roles, q: Tensor, k: Tensor | None) -> dict[str, Any]:
    return {parameter_of["q"]: q, parameter_of["k"]: k} if "k" in parameter_of else {parameter_of["x"]: q}


def _signature(function: Any, parameter_of: Roles) -> str:
    named = [*(signature.parameters(function) or sorted(parameter_of.values()))]
    return f"f({', '.join(name for name in named if name in parameter_of.values())})"


def _with_own_angles(function: Any, parameter_of: Roles, fixed: dict[str, Any]) -> Iterator[Subject]:
    """Yield the calls of a target that computes its own angles. All of them pass the arguments in `fixed`."""
    modes: tuple[Positions, ...] = ("none",)
    if "positions" in parameter_of:
        modes = ("rows", "shared")
    elif "offset" in parameter_of:
        modes = ("offset",)
    by_name = signature.accept_keywords(function)
    for mode in modes:

        def prepare(q: Tensor, k: Tensor | None, positions: Tensor, mode: Positions = mode) -> Any:
            keywords = _arguments(parameter_of, q, k) | fixed
            if mode == "offset":
                keywords[parameter_of["offset"]] = int(positions[0, 0])
            elif mode != "none":
                keywords[parameter_of["positions"]] = positions if mode == "rows" else positions[..., 0, :]
            return by_name, keywords

        for layout in LAYOUTS:
            if mode != "rows" or "b" in layout:
                yield Subject(_signature(function, parameter_of), layout, "k" in parameter_of, mode, False, prepare)


@dataclass(frozen=True)
class _Source:
    """A source of tables: `make` returns them, with axes batch and seq, for q and positions `[batch, seq]`."""

    name: str
    make: Callable[[Tensor, Tensor], Tables]
    positions: Positions = "rows"


# The axes of tables before the columns (b is batch, s is seq, 1 is for the heads) → how they are made from [b, s, …].
_TABLE_AXES: dict[str, Callable[[Tensor], Tensor]] = {
    "bs": lambda table: table,
    "b1s": lambda table: table.unsqueeze(1),
    "bs1": lambda table: table.unsqueeze(2),
    "sb1": lambda table: table.transpose(0, 1).unsqueeze(2),
    "s": lambda table: table[0],
}


def _with_tables(function: Any, parameter_of: Roles, sources: list[_Source], given_tables: bool) -> Iterator[Subject]:
    """Yield the calls of a function to which tables of cos and sin are passed.

    In all layouts, tables with a batch axis are tried before tables without one, because tables `[seq, channels]` could
    fit a layout with tokens before heads merely by broadcasting. For functions with a parameter
    unsqueeze_dim, as in Hugging Face, the layout bhsd is tried first, since most of them expect heads before tokens.
    """
    names = [parameter_of[role] for role in (("table",) if "table" in parameter_of else ("cos", "sin"))]
    by_name = signature.accept_keywords(function)
    index = (signature.parameters(function) or {}).get(parameter_of.get("positions", ""))
    indexes_tables = index is not None and index.default is index.empty

    def subject(layout: str, axes: str, axis: int | None, source: _Source) -> Subject:
        def prepare(q: Tensor, k: Tensor | None, positions: Tensor) -> Any:
            rows = torch.arange(int(positions.max()) + 1)[None] if indexes_tables else positions
            values: list[Any] = [_TABLE_AXES[axes](t) for t in source.make(q, rows)]
            if len(names) == 1 < len(values):
                values = [tuple(values)]
            if len(names) != len(values):
                raise ValueError(f"{len(values)} tensor(s) are computed for the parameters {', '.join(names)}")
            keywords = _arguments(parameter_of, q, k) | dict(zip(names, values, strict=True))
            if indexes_tables:
                keywords[parameter_of["positions"]] = positions
            if axis is not None:
                keywords[parameter_of["axis"]] = axis
            return by_name, keywords

        by_row = indexes_tables or axes != "s"
        return Subject(
            f"{'' if given_tables else 'tables, then '}{_signature(function, parameter_of)}",
            layout,
            "k" in parameter_of,
            "shared" if source.positions == "rows" and not by_row else source.positions,
            given_tables,
            prepare,
            tables=source.name if given_tables else f"{source.name}, {axes}, {axis}",
        )

    has_axis = "axis" in parameter_of
    layouts = ("bhsd", *(n for n in LAYOUTS if n != "bhsd")) if has_axis else LAYOUTS
    by_row = [] if indexes_tables else [(n, axes) for n in layouts if "b" in n for axes in _TABLE_AXES if axes != "s"]
    for layout, axes in [*by_row, *((layout, "s") for layout in layouts)]:
        for axis in (1, 2) if has_axis else (None,):
            yield from (subject(layout, axes, axis, source) for source in sources)


_WIDTHS: tuple[formats.Width, ...] = ("halves", "each", "half")  # the formats of two arguments, cos and sin
# The formats of one argument: complex numbers, angles, cos and sin stacked or concatenated, or a tuple of both.
_IN_ONE = (
    "complex",
    "cos, sin stacked",
    *(f"{kind} {width}" for kind in ("angles", "cos, sin", "sin, cos") for width in reversed(_WIDTHS)),
    *(f"({kind}) {width}" for kind in ("cos, sin", "sin, cos") for width in reversed(_WIDTHS)),
)


def _exact_tables(name: str) -> _Source:
    """Return a source of exact tables. As in models, cos and sin have the dtype of q, and angles are float32."""

    def make(q: Tensor, positions: Tensor) -> Tables:
        rotation = GIVEN.at(positions.flatten(), dtype=torch.float64)
        exact = [table.reshape(*positions.shape, -1) for table in (rotation.cos, rotation.sin)]
        cos, sin = (table.to(q.dtype) for table in exact)
        if name == "complex":
            return (torch.complex(exact[0].float(), exact[1].float()),)
        if name == "cos, sin stacked":
            return (torch.stack((cos, sin), dim=-1),)
        kind, _, width = name.rpartition(" ")
        angles = (positions[..., None] * torch.from_numpy(GIVEN.inv_freq)).float()
        tables = {"angles": (angles,), "sin, cos": (sin, cos)}.get(kind.strip("()"), (cos, sin))
        wide = tuple(formats.widen(table, width) for table in tables)  # type: ignore[arg-type]
        return wide if not kind or kind.startswith("(") else (torch.cat(wide, dim=-1),)

    return _Source(name, make)


def _table_sources(first: Any, layer_type: str | None) -> list[_Source]:
    """Return the sources of tables that a class or function offers.

    The parameters of the class or function may be positions (and x), a length (and x), or only x. In the last case, the
    positions may also be passed as x.
    """
    if isinstance(first, _TableSet):
        return [_Source("rows of a table", lambda q, positions: tuple(t[positions] for t in first))]
    parameter_of = signature.call_roles(first, None)
    fixed = _fixed(parameter_of, layer_type)

    def make(q: Tensor, **values: Any) -> Any:
        named = {parameter_of[role]: value for role, value in values.items()}
        return first(**({parameter_of["x"]: q} if "x" in parameter_of else {}) | fixed | named)

    def flat(returned: Any) -> Tables:
        return tuple(t.reshape(-1, t.shape[-1]) for t in _tensors(returned))

    if "positions" in parameter_of:
        return [
            _Source("at positions", lambda q, p: _rows(make(q, positions=p), p)),
            _Source("at shared positions", lambda q, p: _rows(flat(make(q, positions=p[..., 0, :])), p), "shared"),
        ]
    if "seq_len" in parameter_of:
        return [_Source("of a length", lambda q, p: tuple(t[p] for t in flat(make(q, seq_len=int(p.max()) + 1))))]
    if "x" in parameter_of:
        for_positions = _Source("for positions", lambda q, p: _rows(make(q, x=p), p))
        return [_Source("for x", lambda q, p: _rows(make(q), p), "none"), for_positions]
    raise _checks.error(
        "check",
        "the function that computes the tables must have a parameter for positions, a length or x",
        _parameters(first),
        "If the second function computes its own angles, pass it alone.",
    )


def _tensors(returned: Any) -> Tables:
    return (returned,) if isinstance(returned, Tensor) else tuple(t for t in returned if isinstance(t, Tensor))


def _rows(returned: Any, positions: Tensor) -> Tables:
    """Add a batch axis to tables without one, and expand it to the number of sequences, which then share the tables."""
    rows = positions.shape[-2]
    formatted = tuple(t[None] if t.ndim == 2 else t for t in _tensors(returned))
    return tuple(t.expand(rows, *t.shape[1:]) if t.shape[0] == 1 else t for t in formatted)
