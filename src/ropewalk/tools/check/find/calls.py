"""Find out how to call a target: try each call that its parameters allow, and choose the one that rotates best.

A target is passed cos and sin, computes its own angles, or consists of two functions, of which the first computes cos
and sin for the second.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, product
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ropewalk import Axes, Rope, _checks, formats
from ropewalk.tools.check.expected import Expected
from ropewalk.tools.check.find import memory, several, signature
from ropewalk.tools.check.find.form import Form, forms
from ropewalk.tools.check.find.signature import Arguments, Call, Roles
from ropewalk.tools.check.find.subject import (
    LAYOUTS,
    CallError,
    Positions,
    Results,
    Subject,
    from_layout,
    run_starts,
    to_layout,
)
from ropewalk.tools.check.find.target import Target
from ropewalk.tools.check.measure import structure

GIVEN = Rope(16, 100.0, "half")  # of the tables that `check` passes to a function, if no sizes are expected

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
    of_rope = expected.rope
    sizes = GIVEN if of_rope is None else replace(GIVEN, head_dim=of_rope.head_dim, rotary_dim=expected.rotary_dim)

    def candidates(
        expected: Expected,
        count: int | None,
        layout: str | None = layout,
        given: Rope = sizes,
        mode: str | None = None,
        key_head: str = "",
    ) -> Iterator[Subject]:
        if key_head:
            for subject in candidates(expected, count, layout, given, mode):
                yield from [_with_one_key_head(subject, keep=key_head == "an axis")] if subject.has_k else []
            return
        second = target.objects[1] if len(target.objects) == 2 else None
        first, arguments = _construct(target.objects[0], expected, rotates=second is None and call is not None)
        if count is None:
            yield from _candidates(first, second, arguments, call, layout, expected, given, mode)
            return
        stated = expected.arguments if arguments is None else {}
        for adapted in several.adapted(first, second, call, form, count, expected.sizes_of_axes(count), stated):
            if adapted.sizes is not None:
                pairs, layouts = sum(adapted.sizes), expected.axes or Axes.sections(adapted.sizes)
                channels = max(expected.channels, 2 * pairs)
                given = Rope(channels, GIVEN.base, GIVEN.pairing, rotary_dim=2 * pairs, axes=layouts)
            if layout is None or adapted.layout in (None, layout):
                of = (adapted.first, adapted.second, arguments, adapted.call, adapted.layout or layout)
                for subject in _candidates(*of, expected, given, mode):
                    yield replace(subject, axes=count, side=adapted.side)

    def search(count: int | None, layout: str | None, key_head: str = "") -> tuple[int, Subject] | None:
        """Return the call that scores best among those with `count` axes of positions, and its score."""

        def of(expected: Expected, given: Rope = sizes) -> Iterator[Subject]:
            return candidates(expected, count, layout, given, key_head=key_head)

        best = _best(of(expected, GIVEN), errors)  # small tables first: they take less time
        if best is None and sizes != GIVEN:
            best = _best(of(expected), errors)
        if best is None:
            return None
        score, index, chosen = best
        if count is None and chosen.given not in (None, sizes):
            chosen = next(islice(of(expected), index, None))
            if _score(chosen, errors) is None:
                return None

        def again(expected: Expected, given: Rope = sizes) -> Subject:
            found = next(islice(of(expected, given), index, None))
            return replace(found, rebuild=chosen.rebuild)

        def resize(channels: int, rotary_dim: int) -> Subject | None:
            given = Rope(channels, GIVEN.base, GIVEN.pairing, rotary_dim=rotary_dim)
            if chosen.given is not None:
                return again(expected, given)
            if chosen.arguments is not None and not chosen.arguments.takes(channels, rotary_dim):
                return None
            rope = expected.rope or Rope(channels, expected.base or 10_000.0, given.pairing, rotary_dim=rotary_dim)
            try:
                rope = replace(rope, head_dim=channels, rotary_dim=rotary_dim, rotary_offset=0)
                return again(replace(expected, rope=rope, head_dim=channels))
            except _checks.RopeError:  # a scheme, or the class, accepts no such size
                return None

        def rebuild(base: float | None = None) -> Subject:
            changed = expected if base is None else replace(expected, base=base)
            return next(islice(of(changed), index, None))

        found = chosen if chosen.arguments is None else replace(chosen, rebuild=rebuild)
        return score, found if count is not None else replace(found, resize=resize)

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
    of_axes = [other for other in axes if other is not None and (best is None or other[0] >= best[0])]
    if of_axes and (best is None or any(several.all_matter(subject) for _, subject in of_axes)):
        best = max(of_axes, key=lambda one: (several.all_matter(one[1]), one[0]))
    if failure is None and form is None and (best is None or best[0] < _ROTATES):
        found = [search(None, layout, key_head) for key_head in ("an axis", "no axis")]
        best = max((each for each in (best, *found) if each), key=lambda each: each[0], default=None)
    if best is None and failure is not None:
        raise failure
    if best is None:
        layout = _checks.argument("layout")
        fix = f"{signature.describe(target.objects[-1])} Or pass {layout}, or arguments (--arg)."
        if errors and errors[0].startswith("SystemExit"):
            fix = "Let it return, and not end the process."
        raise _checks.error(
            "check",
            f"{target.name} must be callable in a known way, and rotate tensors",
            errors[0] if errors else "no known parameters",
            " ".join((fix, *expected.notes)),
        )
    chosen = best[1]
    others = [_like(chosen, candidates(expected, chosen.axes, mode=mode)) for mode in ("offsets", "packed")]
    in_place = chosen.in_place or _returns_its_input(chosen, is_told=call is not None and "->" in call)
    takes = chosen.takes - ({"stack"} if _takes_fewer_key_heads(chosen) else set())
    chosen = replace(chosen, in_place=in_place, takes=takes)
    return replace(chosen, others=tuple(other for other in others if other is not None))


def _best(candidates: Iterable[Subject], errors: list[str]) -> tuple[int, int, Subject] | None:
    """Return the largest score of the candidates, with the index and the candidate, or None if none works."""
    best: tuple[int, int, Subject] | None = None
    for index, subject in enumerate(candidates):
        score = _score(subject, errors)
        if score is not None and (best is None or score > best[0]):
            best = score, index, subject
        if score == _PERFECT:
            break
    return best


def _with_one_key_head(subject: Subject, *, keep: bool) -> Subject:
    """Return a subject for any number of key heads of a target that takes one, with an axis of its own or without.

    The target is called once for each head of k, and with q the first time and one head of it from then on.
    """
    axis = -3 if subject.layout in ("bhsd", "hsd") else -2

    def prepare(q: Tensor, k: Tensor | None, positions: Tensor) -> Any:
        def run(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            results = []
            for i, head in enumerate(torch.split(k, 1, dim=axis)):
                key = head if keep else head.squeeze(axis)
                q_out, k_out = subject.call_native(q.narrow(axis, 0, 1).clone() if i else q, key, positions)
                results.append((q_out, k_out if keep or k_out is None else k_out.unsqueeze(axis)))
            return results[0][0], torch.cat([cast(Tensor, k_out) for _, k_out in results], dim=axis)

        return run, {"q": q, "k": k}

    one = replace(subject, prepare=prepare, takes=frozenset(), signature=f"{subject.signature}, one head of k")
    return replace(one, fused=lambda q, k, positions, **_: Results(*one(q, k, positions)))


class _TableSet(tuple[Tensor, ...]):
    """Tables for all positions, which a function such as `precompute_freqs_cis` returned.

    If they are those of the cells of a grid, in the order of rows, `grid` is its size.
    """

    grid: tuple[int, ...] = ()


def _construct(target: Any, expected: Expected, *, rotates: bool) -> tuple[Any, Arguments | None]:
    """Construct the object, or compute its tables, and return the result with the arguments that were used.

    A function that rotates, as `rotates` or the names of its parameters say, is returned with None as arguments.
    """
    if signature.is_constructor(target):
        return signature.construct(target, expected)
    known = signature.parameters(target) or {}
    called = signature.match(known, signature.CALL_NAMES)
    makes_tables = not rotates and "dim" in signature.match(known, signature.MAKE_NAMES) and len(known) > 1
    if makes_tables and not {"q", "x", "qkv", "kv", "x1"} & {*called}:
        if "positions" in called:  # all other arguments are fixed

            def with_positions(**values: Any) -> Any:
                return partial(target, **values)

            kept = [p.replace(kind=p.KEYWORD_ONLY) for name, p in known.items() if name != called["positions"]]
            with_positions.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
            return signature.construct(with_positions, expected)
        sides = several.sides(called)
        values = {**sides, **expected.arguments}
        returned, arguments = signature.construct(target, replace(expected, arguments=values))
        tables = _TableSet(_tensors(returned))
        tables.grid = tuple(values[side] for side in sides)
        return tables, arguments
    return memory.on_device(target), None


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
                f"Check a function that converts them: def rotate(x, positions): return "
                f"torch.from_numpy(np.array(f({array}(x.detach().float().numpy()), {array}(positions.numpy()))))"
                f".type_as(x)."
            )
    return None


_TOKENS, _HEADS, _MANY = 5, 4, 129
_PERFECT = 30  # the largest score
_ROTATES = 12  # the smallest score of a call whose result depends on the token, and not on the head


def _score(subject: Subject, errors: list[str]) -> int | None:
    """Score how much a candidate call behaves like a rotation. Return None, and append to `errors`, if it fails."""
    positions = torch.arange(_TOKENS)[None]
    x = torch.sin(1 + torch.arange(subject.channels, dtype=torch.float32)).expand(3, _TOKENS, _HEADS, -1)
    try:
        out, _ = subject(x[:1], x[:1], positions)
        maps = subject.linear_maps(positions)
        if subject.in_place and subject.fused is None and torch.equal(out, x[:1]):
            raise CallError("wrong-shape", "it returns no tensor, and changes none")
        fused = _score_of_fused(subject, positions)
        if subject.key_first:
            fused -= not bool(subject(x[:1], torch.zeros_like(x[:1]), positions)[0].any())
    except CallError as e:
        errors.append(str(e))
        return None
    differs_by_head = bool((out - out[:, :, :1]).abs().max() > 1e-5)
    differs_by_token = bool((out - out[:, :1]).abs().max() > 1e-5)
    score = fused + _ROTATES * (differs_by_token and not differs_by_head)
    many = torch.arange(_MANY)[None]
    if subject.given is not None and subject.accepts(many):
        try:  # tables of fewer tokens than channels also fit other axes
            subject(*2 * (x[:1, :1].expand(-1, _MANY, -1, -1),), many)
        except CallError:
            score -= _PERFECT - _ROTATES + 1
    if (found := structure.infer(maps)) is not None:
        at_0 = found.multipliers(maps[0, :, found.ins[:, 0]].T).diagonal()
        score += (
            {None: 10, "attention-factor": 8, "not-a-rotation": 6}.get(found.flaw, 2)
            + 4 * (found.order == "same")
            + 2 * (found.pairing is not None)
            + 1 * bool((at_0.angle().abs() < 1e-5).all())
            - 1 * (subject.given is not None and not _has_frequencies(subject.given, found, maps[1]))
        )
    if subject.layout == "thd":
        return score + 1
    if subject.accepts(positions.expand(3, -1)):
        with contextlib.suppress(CallError):
            every, _ = subject(x, x, positions.expand(3, -1))
            score += subject.given is None or torch.allclose(every, every[:1])
    return score


def _has_frequencies(rope: Rope, found: structure.Structure, at_1: Tensor) -> bool:
    """Return whether the pairs turn by the frequencies of a rope, of which a table of another width has others."""
    angles = found.multipliers(at_1[:, found.ins[:, 0]].T).diagonal().angle().abs().sort().values
    expected = torch.from_numpy(rope.inv_freq).abs().sort().values
    return angles.shape == expected.shape and torch.allclose(angles, expected, atol=1e-4)


def _score_of_fused(subject: Subject, positions: Tensor) -> int:
    """Return 0 if a fused call leaves v unchanged and stores k at its slots, or else a negative number."""
    if subject.fused is None or not subject.takes & {"v", "slots"}:
        return 0
    x = _tokens(subject)
    slots = torch.tensor([[9, 3, 4, 11, 6]])
    results = subject.fused(x, x, positions, v=-x, slots=slots)
    score = 0 if results.v is None or torch.equal(results.v, -x) else -4
    if results.stored is None or results.k is None:
        return score
    rotated = torch.allclose(results.k, results.q, atol=1e-5)
    kept = torch.equal(results.stored.keys[slots], results.k)
    written = not torch.equal(results.stored.keys, results.stored.keys_before)
    return score + 2 * rotated + kept + written - 4


def _tokens(subject: Subject) -> Tensor:
    """Return a test tensor `[1, tokens, heads, channels]`, of which no two elements are equal."""
    return torch.sin(1 + torch.arange(_TOKENS * _HEADS * subject.channels)).view(1, _TOKENS, _HEADS, -1)


def _returns_its_input(subject: Subject, *, is_told: bool) -> bool:
    """Return whether the result for q is what the target has written into q, as the user or it tells autograd."""
    x = _tokens(subject)
    q = subject.to_native(x).clone(memory_format=torch.contiguous_format)
    with mock.patch.object(FunctionCtx, "mark_dirty", autospec=True, side_effect=FunctionCtx.mark_dirty) as tells:
        out, _ = subject.call_native(q, q.clone(), torch.arange(_TOKENS)[None])
    return (is_told or tells.called) and torch.equal(q, out) and not torch.equal(q, subject.to_native(x))


def _takes_fewer_key_heads(subject: Subject) -> bool:
    """Return whether a call with fewer heads of k than of q does not raise."""
    x = _tokens(subject)
    try:
        subject(x, x[:, :, :1], torch.arange(_TOKENS)[None])
    except CallError as e:
        return e.code != "raises"
    return True


def _like(chosen: Subject, others: Iterable[Subject]) -> Subject | None:
    """Return the one of other calls that computes the same at positions 0 to 4, or else any that works."""
    x, positions = _tokens(chosen), torch.arange(_TOKENS)[None]
    right, _ = chosen(x, x, positions)
    working = None
    for other in others:
        if other.layout in (chosen.layout, "thd") and other.tables == chosen.tables:
            with contextlib.suppress(CallError):
                out, _ = other(x, x, positions)
                if torch.allclose(out, right, atol=1e-5):
                    return other
                working = working or other
    return working


def _candidates(
    first: Any,
    second: Any,
    arguments: Arguments | None,
    call: str | None,
    layout: str | None,
    expected: Expected,
    given: Rope,
    mode: str | None,
) -> Iterator[Subject]:
    """Yield every call that the names of the target's parameters allow.

    `first` is the function, object or `_TableSet` of the target. `second` is the function that rotates by its tables,
    or None. `mode` is how positions are passed. None means in the way that the function requires.

    Raises:
        RopeError: the parameters allow no known call. The message says how to describe them.
    """
    layer_type = None if arguments is None else arguments.layer_type
    fixed: dict[str, Any] = {"interleaved": None if expected.pairing is None else expected.pairing == "interleaved"}
    base = expected.base or 10_000.0
    rope = expected.rope or Rope(expected.channels, base, "half", rotary_dim=expected.rotary_dim)
    fixed |= {"base": base, "inv_freq": torch.from_numpy(rope.inv_freq).float()}
    rotates = first if second is None else second
    stated = expected.arguments if arguments is None else {}
    described = Call({}) if isinstance(rotates, _TableSet) else signature.read_call(rotates, call, stated)
    roles = {*described.parameter_of}
    tokens = bool({"x", "qkv", "kv", "x1"} & roles or {"q", "k"} <= roles)
    channels = expected.channels
    calls = [replace(described, results=("k", "q")), described] if described.key_first else [described]
    if second is not None:
        fixed["rotary_dim"] = expected.rotary_dim
        of_class = _table_sources(first, layer_type)
        found = [_with_tables(second, each, layout, of_class, None, mode, fixed) for each in calls]
    elif tokens and ({"cos", "sin"} <= roles or {"table", "cos_sin_cache"} & roles):
        names = _WIDTHS if "cos" in roles else ("cos, sin half",) if "cos_sin_cache" in roles else _IN_ONE
        sources = [_exact_tables(name, given) for name in names]
        fixed["rotary_dim"], channels = given.rotary_dim, given.head_dim
        found = [_with_tables(first, each, layout, sources, given, mode, fixed) for each in calls]
    elif tokens:
        fixed["rotary_dim"] = expected.rotary_dim
        of_layer = _fixed(described.parameter_of, layer_type)
        found = [_with_own_angles(first, each, layout, of_layer, mode, fixed) for each in calls]
    else:
        must = "TARGET must have parameters for q and k, or for x or qkv"
        pair = "If TARGET computes cos and sin for a function, pass both: file.py:make,apply."
        raise _checks.error("check", must, _parameters(first), f"{signature.describe(rotates)} {pair}")
    module = next((m for m in (first, getattr(first, "__self__", None)) if isinstance(m, torch.nn.Module)), None)
    for subject in chain(*found):
        yield replace(subject, module=module, arguments=arguments, channels=channels, key_first=described.key_first)


def _parameters(function: Any) -> str:
    known = None if isinstance(function, _TableSet) else signature.parameters(function)
    return f"parameters {', '.join(known or {}) or 'none'}"


def _fixed(parameter_of: Roles, layer_type: str | None) -> dict[str, Any]:
    """Return the argument that states the kind of the expected layer, if the function has a parameter for it."""
    known = layer_type is not None and "layer_type" in parameter_of
    return {parameter_of["layer_type"]: layer_type} if known else {}


def _signature(function: Any, form: Form, way: str) -> str:
    """Return a call as text, with the names of the parameters that are passed."""
    call = form.call
    switches = {"interleaved", "is_neox"} if form.interleaved is None else set()
    omitted = call.optional & {"q_out", "k_out", "inplace", "conjugate", *switches}
    omitted |= {role for roles in _POSITIONS.values() for role in roles} - {*_POSITIONS.get(way, ())}
    passed = {name for role, name in call.parameter_of.items() if role not in omitted}
    words = [name for name in (signature.parameters(function) or sorted(passed)) if name in passed]
    words += [f"{name}={_checks.shown(value)}" for name, value in call.literals.items()]
    return f"f({', '.join(words)}){f', {form.packed}' if form.packed else ''}"


# How positions are passed → the roles of the parameters that state them.
_POSITIONS = {
    "rows": ("positions",),
    "shared": ("positions",),
    "offset": ("offset", "offsets"),
    "offsets": ("offsets",),
    "packed": ("cu_seqlens", "max_seqlen"),
    "runs": ("cu_seqlens", "max_seqlen", "offset", "offsets"),
}


def _modes(call: Call, *, tables: bool) -> tuple[str, ...]:
    """Return how positions are passed: "given" means that the tables have a row for each token."""
    roles = {*call.parameter_of}
    required = roles - call.optional
    if "cu_seqlens" in required:
        return ("runs",) if {"offset", "offsets"} & required else ("packed",)
    if "positions" in (required if tables and "cos_sin_cache" not in roles else roles):
        return "rows", "shared"
    if {"offset", "offsets"} & (required if tables else roles):
        return ("offsets", "offset") if "offsets" in roles else ("offset",)
    return ("given" if tables else "none", *(["packed"] if "cu_seqlens" in roles else []))


def _pass_positions(call: Call, mode: str, positions: Tensor) -> dict[str, Any]:
    """Return the arguments that state the positions `[batch, seq]`."""
    row = positions.flatten(0, -2)[0]
    starts = run_starts(row)
    ends = torch.cat((starts, torch.tensor([len(row)])))
    first = {"offset": int(row[0]), "offsets": positions[..., 0].int(), "runs": row[starts].int()}
    values = {
        "positions": positions[..., 0, :] if mode == "shared" else positions,
        "cu_seqlens": ends.int(),
        "max_seqlen": int(ends.diff().max()),
    } | dict.fromkeys(("offset", "offsets"), first.get(mode))
    return {call.parameter_of[role]: values[role] for role in _POSITIONS.get(mode, ()) if role in call.parameter_of}


def _fits(mode: str, layout: str) -> bool:
    """Return whether positions can be passed in this way to a target with this layout."""
    if mode in ("packed", "runs"):
        return layout == "thd"
    return layout != "thd" if mode in ("offsets", "rows") else True


def _subject(form: Form, positions: str, angles: Callable[[Tensor, Tensor], dict[str, Any]], **about: Any) -> Subject:
    """Return the subject that calls a form with the arguments for angles, which depend on q and positions."""

    def run(q: Tensor, k: Tensor | None, at: Tensor, **more: Any) -> Results:
        rows = at.shape[-2]
        if q.dtype in (torch.float16, torch.bfloat16) and "cos_sin_cache" in form.call.parameter_of:
            with contextlib.suppress(Exception):  # the cache has the dtype of q in some engines, float32 in others
                return form.run(q, k, angles(q, at), rows, **more)
            return form.run(q, k, angles(q.float(), at), rows, **more)
        return form.run(q, k, angles(q, at), rows, **more)

    def prepare(q: Tensor, k: Tensor | None, at: Tensor) -> Any:
        if not form.is_fused:
            return form.function, form.keywords(q, k) | angles(q, at)

        def fused(q: Tensor, k: Tensor | None = None) -> Any:
            results = run(q, k, at)
            return (results.q, results.k) if form.has_k else results.q

        return fused, {"q": q, "k": k} if form.has_k else {"q": q}

    def call(q: Tensor, k: Tensor, at: Tensor, *, v: Tensor | None = None, **more: Any) -> Results:
        def to_native(x: Tensor) -> Tensor:
            return to_layout(form.layout, x).clone(memory_format=torch.contiguous_format)

        def back(x: Tensor | None) -> Tensor | None:
            return None if x is None else from_layout(form.layout, x, at.shape[-2])

        key, value = to_native(k) if form.has_k else None, None if v is None else to_native(v)
        try:
            results = run(to_native(q), key, at.clone(), v=value, **more)
        except (KeyboardInterrupt, CallError):
            raise
        except BaseException as e:  # the target may raise anything
            raise CallError("raises", f"{type(e).__name__}: {_checks.message_of(e)[:200]}") from e
        q_out = from_layout(form.layout, results.q, at.shape[-2])
        return Results(q_out, back(results.k), back(results.v), results.stored)

    return Subject(
        layout=form.layout,
        has_k=form.has_k,
        positions=cast(Positions, positions),
        prepare=prepare,
        in_place=form.in_place,
        takes=form.takes,
        fused=call if form.is_fused else None,
        **about,
    )


def _with_own_angles(
    function: Any, call: Call, layout: str | None, fixed: dict[str, Any], mode: str | None, form_fixed: dict[str, Any]
) -> Iterator[Subject]:
    """Yield the calls of a target that computes its own angles. All of them pass the arguments in `fixed`."""
    for way in _modes(call, tables=False) if mode is None else _other_mode(call, mode):

        def angles(q: Tensor, positions: Tensor, way: str = way) -> dict[str, Any]:
            return fixed | _pass_positions(call, way, positions)

        for name in _layouts(call, layout):
            for form in forms(call, name, function, **form_fixed) if _fits(way, name) else ():
                yield _subject(form, way, angles, signature=_signature(function, form, way), given_tables=False)


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
    "s11": lambda table: table[0, :, None, None],
}


def _layouts(call: Call, layout: str | None) -> Sequence[str]:
    """Return the layouts to try, the most likely first.

    Functions with a parameter unsqueeze_dim, as in Hugging Face, mostly expect heads before tokens, and kernels of
    engines expect the tokens of all sequences in one axis.
    """
    if layout is not None:
        return (layout,)
    likely = {"axis": ("bhsd",)} | dict.fromkeys(("cos_sin_cache", "q_weight", "head_size"), ("bshd", "thd"))
    first = next((likely[role] for role in likely if role in call.parameter_of), ())
    return (*first, *(name for name in LAYOUTS if name not in first))


def _other_mode(call: Call, mode: str) -> tuple[str, ...]:
    """Return the mode if the function has a parameter for it that is optional, and so is not passed otherwise."""
    role = {"offsets": "offsets", "packed": "cu_seqlens"}[mode]
    return (mode,) if role in call.optional else ()


def _with_tables(
    function: Any,
    call: Call,
    layout: str | None,
    sources: list[_Source],
    given: Rope | None,
    mode: str | None,
    form_fixed: dict[str, Any],
) -> Iterator[Subject]:
    """Yield the calls of a function to which tables of cos and sin are passed.

    In all layouts, tables with a batch axis are tried before tables without one, because tables `[seq, channels]` could
    fit a layout with tokens before heads merely by broadcasting.
    """
    roles = call.parameter_of
    one = [roles[role] for role in ("table", "cos_sin_cache") if role in roles]
    orders = [one] if one else [[roles["cos"], roles["sin"]]]
    if not one and given is None and [*roles].index("sin") < [*roles].index("cos"):  # GPT-J's class returns sin first
        orders.append([roles["sin"], roles["cos"]])

    def subject(form: Form, way: str, axes: str, axis: int | None, source: _Source, names: list[str]) -> Subject:
        def angles(q: Tensor, positions: Tensor) -> dict[str, Any]:
            rows = torch.arange(max(int(positions.max()) + 1, positions.shape[-1]))[None]
            rows = positions if way == "given" else rows
            values: list[Any] = [_TABLE_AXES[axes](t) for t in source.make(q, rows)]
            if len(names) == 1 < len(values):
                values = [tuple(values)]
            if len(names) != len(values):
                raise ValueError(f"{len(values)} tensor(s) are computed for the parameters {', '.join(names)}")
            keywords = dict(zip(names, values, strict=True)) | _pass_positions(call, way, positions)
            return keywords if axis is None else keywords | {roles["axis"]: axis}

        accepted = ("rows" if axes not in ("s", "s11") else "shared") if way == "given" else way
        return _subject(
            form,
            accepted if source.positions == "rows" else source.positions,
            angles,
            signature=f"{'' if given else 'tables, then '}{_signature(function, form, way)}",
            given_tables=given is not None,
            given=given,
            tables=source.name if given else f"{source.name}, {axes}, {axis}",
        )

    layouts = _layouts(call, layout)
    by_row = [(name, axes) for name in layouts if "b" in name for axes in ("bs", "b1s", "bs1", "sb1")]
    shared = [(name, axes) for axes in ("s", "s11") for name in layouts]
    for way in _modes(call, tables=True) if mode is None else _other_mode(call, mode):
        for name, axes in [*(by_row if way == "given" and "tensor_layout" not in roles else []), *shared]:
            for axis in (1, 2) if "axis" in roles else (None,):
                for source, names in product(sources, orders):
                    for form in forms(call, name, function, **form_fixed) if _fits(way, name) else ():
                        yield subject(form, way, axes, axis, source, names)


_WIDTHS: tuple[formats.Width, ...] = ("halves", "each", "half")  # the formats of two arguments, cos and sin
# The formats of one argument: complex numbers, matrices of 2 × 2, angles, cos and sin stacked, concatenated or in a
# tuple.
_IN_ONE = (
    "complex",
    "matrices",
    "cos, sin stacked",
    *(f"{kind} {width}" for kind in ("angles", "cos, sin", "sin, cos") for width in reversed(_WIDTHS)),
    *(f"({kind}) {width}" for kind in ("cos, sin", "sin, cos") for width in reversed(_WIDTHS)),
)


def _exact_tables(name: str, given: Rope) -> _Source:
    """Return a source of exact tables. As in models, cos and sin have the dtype of q, and angles are float32."""

    def make(q: Tensor, positions: Tensor) -> Tables:
        rotation = replace(given, axes=None).at(positions.flatten(), dtype=torch.float64)
        exact = [table.reshape(*positions.shape, -1) for table in (rotation.cos, rotation.sin)]
        cos, sin = (table.to(q.dtype) for table in exact)
        if name == "complex":
            return (torch.complex(exact[0].float(), exact[1].float()),)
        if name == "matrices":
            return (torch.stack((torch.stack((cos, -sin), dim=-1), torch.stack((sin, cos), dim=-1)), dim=-2),)
        if name == "cos, sin stacked":
            return (torch.stack((cos, sin), dim=-1),)
        kind, _, width = name.rpartition(" ")
        angles = (positions[..., None] * torch.from_numpy(given.inv_freq)).float()
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
    parameter_of = signature.read_call(first, None).parameter_of
    fixed = _fixed(parameter_of, layer_type)

    def make(q: Tensor, **values: Any) -> Any:
        named = {parameter_of[role]: value for role, value in values.items()}
        return memory.call(first, ({parameter_of["x"]: q} if "x" in parameter_of else {}) | fixed | named)

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
