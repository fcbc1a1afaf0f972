"""Find out how to call a target: try each call that its parameters allow, and choose the one that rotates best.

A target is passed cos and sin, computes its own angles, or consists of two functions, of which the first computes cos
and sin for the second.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ropewalk import Axes, Rope, _checks
from ropewalk.tools.check.expected import Expected, for_slice
from ropewalk.tools.check.find import memory, signature, tables
from ropewalk.tools.check.find.form import LAYOUTS, ONE_HEAD, ONE_ROW, Form, forms
from ropewalk.tools.check.find.signature import Arguments, Call
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.find.tables import Source, TableSet
from ropewalk.tools.check.find.target import Target, name_of
from ropewalk.tools.check.find.ways import COUNTS, OF_POSITIONS, Way, count_of, on_grid, read_form, sides, ways
from ropewalk.tools.check.measure import structure

_SECTIONS = signature.CALL_NAMES["sections"].split()
GIVEN = Rope(16, 100.0, "half")  # of the tables that `check` passes to a function, if no sizes are expected
_TABLES = {"cos", "sin", "table", "cos_sin_cache"}
_PLACES = {"positions", "grid", "frames", "height"}
_PAIRING = {"interleaved", "is_neox"}
VARIED = {"switched": _PAIRING, "switched with its tables": _PAIRING, "conjugate": {"conjugate"}}
"""Variants of a call → the options that get another value. The other pairing may need other tables."""

Found = tuple[int, Subject]  # a call, and its score


def find(target: Target, expected: Expected, call: str | None, layout: str | None) -> Subject:
    """Return the target as a `Subject`, which calls it in the way that rotates best.

    If no call takes whole heads, the target is expected to take their rotated channels, which its caller slices out.

    Raises:
        RopeError: no candidate call works. The message says why, or what the target raised.
    """
    try:
        return _Finder(target, expected, call).find(layout)
    except _checks.RopeError as e:
        if (wrap := _how_to_wrap(target)) is not None:
            raise _checks.error("check", f"{target.name} must take tensors of torch", *wrap) from e
        if (sliced := for_slice(expected)) is None:
            raise
    return find(target, sliced, call, layout)


class _Finder:
    """Tries the calls of one target. Why calls fail is collected in `errors`."""

    def __init__(self, target: Target, expected: Expected, call: str | None) -> None:
        self.target, self.expected = target, expected
        self.call, self.form = read_form(call)
        self.given = GIVEN
        if (rope := expected.rope) is not None:
            self.given = replace(GIVEN, head_dim=rope.head_dim, rotary_dim=rope.rotary_dim)
        elif expected.states_head_dim:
            self.given = replace(GIVEN, head_dim=expected.head_dim, rotary_dim=expected.head_dim)
        self.found: dict[str, Any] = {}  # attributes of the form of every further call
        self.errors: list[str] = []

    def find(self, layout: str | None) -> Subject:
        """Return the best of all calls, with one position for each token or several."""
        stated = count_of(self.form) if self.form else self.expected.axes and self.expected.axes.count
        best = self.search(stated, layout) if stated else None
        failure = None
        if self.form is None and (best is None or best[0] < _PERFECT):
            try:
                best = _better(best, self.search(None, layout))
            except _checks.RopeError as e:
                failure = e
        if not stated:
            best = self._find_axes(best, layout)
        if failure is None and self.form is None and (best is None or best[0] < _ROTATES or _is_of_latents(best[1])):
            best = _better(*(self.search(None, layout, key_head) for key_head in ("kept", "dropped")), best)
        if layout is None and self.form is None and (best is None or best[0] < _ROTATES):
            best = _better(best, self.search(stated or None, ONE_HEAD))
        if best is None and failure is None:
            best = self.search(stated or None, layout, mode="int32")
        if best is None:
            raise failure or self._no_call()
        chosen = best[1]
        if chosen.way.side is not None and _depends_on_the_grid(chosen):
            must = "a cell must have the same angles in a grid of any size"
            fix = "Wrap it in a function of positions, as its model computes them, or check the function of its tables."
            raise _checks.error("check", must, f"other angles in a larger grid, in {chosen.signature}", fix)
        if "weights" in chosen.form.takes:
            self.found["added"] = _added_to_weights(chosen)
        if _returns_its_input(chosen, is_told="->" in (self.call or "")):
            self.found["in_place"] = True
        chosen = replace(chosen, form=replace(chosen.form, **self.found))
        modes = [
            self.candidates(self.expected, self.given, chosen.axes, layout, mode) for mode in ("offsets", "packed")
        ]
        others = [other for of_mode in modes if (other := _like(chosen, of_mode)) is not None]
        if layout is None and self.form is None and not chosen.form.is_fused and chosen.layout != ONE_HEAD:
            every = self.candidates(self.expected, chosen.way.given or self.given, chosen.axes, None)
            chosen = replace(chosen, other_layout=_wrong_only_in_rows(chosen, every))
        needs_equal_heads = chosen.form.packing == "stacked" and not _takes_fewer_key_heads(chosen)
        options = {role for roles in VARIED.values() for role in roles}
        passed = {name for role, name in chosen.form.call.parameter_of.items() if role in options}
        passed = passed.union(chosen.passed, *(other.passed for other in others))
        not_passed = tuple(name for name in chosen.parameters if name not in passed)
        return replace(chosen, needs_equal_heads=needs_equal_heads, others=tuple(others), not_passed=not_passed)

    def _find_axes(self, best: Found | None, layout: str | None) -> Found | None:
        """Return the best call with positions on several axes if all of them matter, or if no other call works."""
        if best is not None and best[0] == _PERFECT:
            layout = best[1].layout
        found = [each for count in COUNTS if (each := self.search(count, layout)) is not None]
        rated = [(_all_axes_matter(each[1]), *each) for each in found if best is None or each[0] >= best[0]]
        if rated and (best is None or any(matter for matter, *_ in rated)):
            return max(rated, key=lambda each: each[:2])[1:]
        return best

    def _no_call(self) -> _checks.RopeError:
        layout = _checks.argument("layout")
        fix = f"{signature.describe(self.target.objects[-1])} Or pass {layout}, or arguments (--arg)."
        if self.errors and self.errors[0].startswith("SystemExit"):
            fix = "Let it return, and not end the process."
        must = f"{self.target.name} must be callable in a known way, and rotate tensors"
        got = self.errors[0] if self.errors else "no known parameters"
        return _checks.error("check", must, got, " ".join((fix, *self.expected.notes)))

    def search(
        self, count: int | None, layout: str | None, key_head: str = "", mode: str | None = None
    ) -> Found | None:
        """Return the first call with the best score among those with `count` axes of positions, or None."""

        def candidates(expected: Expected, given: Rope, mode: str | None = mode) -> Iterator[Subject]:
            return self.candidates(expected, given, count, layout, mode, key_head)

        best = self._best(candidates(self.expected, GIVEN))  # small tables first: all channels are rotated
        if best is None and self.given != GIVEN:
            best = self._best(candidates(self.expected, self.given))
        if best is None:
            return None
        score, index, chosen = best
        if count is None and chosen.way.given not in (None, self.given):
            chosen = next(islice(candidates(self.expected, self.given), index, None))
            if _score(chosen, self.errors) is None:
                return None

        def variant(expected: Expected, given: Rope, other: str) -> Subject | None:
            has_option = VARIED.get(other, {"positions"}) & {*chosen.form.call.parameter_of}
            if not has_option or (other in VARIED and len(self.target.objects) == 2):  # whose tables are of one pairing
                return None
            return next(islice(candidates(expected, given, other), index, None))

        def same(expected: Expected, given: Rope = self.given) -> Subject:
            found = next(islice(candidates(expected, given), index, None))
            return replace(found, variant=partial(variant, expected, given))

        def rebuild(base: float | None = None) -> Subject:
            return same(self.expected if base is None else replace(self.expected, base=base))

        def resize(channels: int, rotary_dim: int) -> Subject | None:
            expected = self.expected
            if chosen.way.given is not None:
                return same(expected, replace(GIVEN, head_dim=channels, rotary_dim=rotary_dim))
            if chosen.arguments is not None and not chosen.arguments.takes(channels, rotary_dim):
                return None
            rope = expected.rope or Rope(channels, expected.base or 10_000.0, "half", rotary_dim=rotary_dim)
            try:
                rope = replace(rope, head_dim=channels, rotary_dim=rotary_dim, rotary_offset=0)
                return same(replace(expected, rope=rope, head_dim=channels))
            except _checks.RopeError:  # a scheme, or the class, accepts no such size
                return None

        chosen = replace(chosen, variant=partial(variant, self.expected, self.given))
        chosen = replace(chosen, rebuild=None if chosen.arguments is None else rebuild)
        return score, replace(chosen, resize=resize if count is None else None)

    def _best(self, candidates: Iterable[Subject]) -> tuple[int, int, Subject] | None:
        """Return the largest score of the candidates, with the index and the candidate, or None if none works."""
        best: tuple[int, int, Subject] | None = None
        for index, subject in enumerate(candidates):
            score = _score(subject, self.errors)
            if score is not None and (best is None or score > best[0]):
                best = score, index, subject
            if score == _PERFECT:
                break
        return best

    def candidates(
        self,
        expected: Expected,
        given: Rope,
        count: int | None,
        layout: str | None,
        mode: str | None = None,
        key_head: str = "",
    ) -> Iterator[Subject]:
        """Yield every call that the names of the target's parameters allow.

        Args:
            expected: what the target should compute, for its constructor and its parameters.
            given: the rope of the tables that are passed, if positions have one axis.
            count: the number of axes of the positions, or None if a token has one position.
            layout: the only layout that is tried, or None.
            mode: "offsets" or "packed": the way to pass positions, if it is optional; "int32": their dtype; a key of
                `VARIED`: these options get another value than otherwise. None is the plain call.
            key_head: as in `Form`.

        Raises:
            RopeError: the parameters allow no known call. The message says how to describe them.
        """
        second = self.target.objects[1] if len(self.target.objects) == 2 else None
        first, arguments = _construct(
            self.target.objects[0], expected, rotates=second is None and self.call is not None
        )
        function = first if second is None else second
        stated = expected.arguments if arguments is None else {}
        call = Call({}) if isinstance(function, TableSet) else signature.read_call(function, self.call, stated)
        roles, layer_type = {*call.parameter_of}, None if arguments is None else expected.layer_type
        rope = expected.rope or Rope(expected.channels, expected.base or 10_000.0, "half")
        known: dict[str, Any] = {"rotary_dim": expected.rotary_dim}
        known |= {} if count is None else {"sections": expected.sizes_of_axes(count)}
        known |= {} if layer_type is None else {"layer_type": layer_type}
        required: dict[str, Any] = {"base": rope.base, "inv_freq": torch.from_numpy(rope.inv_freq).float()}
        required |= {"conjugate": False, "scale": 1.0, "interleaved": False, "is_neox": True}
        if expected.pairing is not None:
            known |= {"interleaved": expected.pairing == "interleaved", "is_neox": expected.pairing == "half"}
        if mode in VARIED:
            known |= _other_values(function, call, VARIED[mode], known, required)
        objects, channels = (first, getattr(first, "__self__", None)), expected.channels
        module = next((obj for obj in objects if isinstance(obj, torch.nn.Module)), None)
        calls: list[tuple[Call, list[Source]]] = []
        if second is not None:
            call = signature.take_tables(second, call)
            sources = tables.of_target(first, layer_type, count, self.form)
            calls = [(call, sources)] if sources else []
        elif not ({"x", "qkv", "kv", "x1"} & roles or {"q", "k"} <= roles):
            must = "TARGET must have parameters for q and k, or for x or qkv"
            pair = "If TARGET computes cos and sin for a function, pass both: file.py:make,apply."
            raise _checks.error("check", must, signature.named(first), f"{signature.describe(function)} {pair}")
        elif {"cos", "sin"} <= roles or {"table", "cos_sin_cache"} & roles:
            if roles & _TABLES <= call.optional and _PLACES & roles:
                calls = [(call.without(_TABLES), [])]  # their default may be right
            literals = [call.literals[name] for name in _SECTIONS if name in call.literals]
            if count is not None and (literals or "sections" in roles):
                sizes = literals[0] if literals else known["sections"]
                axes, dim = expected.axes or Axes.sections(sizes), 2 * sum(sizes)
                given = replace(GIVEN, head_dim=max(channels, dim), rotary_dim=dim, axes=axes)
            if count is None or given.axes is not None:
                known["rotary_dim"] = given.rotary_dim
                calls.append((call, tables.exact(roles, given, swapped=mode == "switched with its tables")))
        else:
            calls = [(call, [])]
        if call.key_first and call.results is None:
            calls[:0] = [(replace(each, results=("k", "q")), sources) for each, sources in calls]
        for each, sources in calls:
            layouts = _layouts(each) if layout is None else (layout,)
            for way in ways(each, count, self.form, tables=bool(sources), mode=mode):
                for name, passed in tables.passed(sources, each, way, way.fitting(layouts)):
                    rotate = function if way.side is None else on_grid(function, each, way, name)
                    for form in forms(each, name, rotate, known=known, required=required, key_head=key_head):
                        names = _passed(form, way)
                        text = _signature(function, each, names, form.packed)
                        yield Subject(
                            form=replace(form, **self.found),
                            way=passed,
                            signature=text if second is None else f"tables, then {text}",
                            parameters=tuple(signature.parameters(function) or ()),
                            passed=names,
                            expected=expected,
                            module=module,
                            channels=channels if passed.given is None else given.head_dim,
                            arguments=arguments,
                            axes=count,
                        )


_TOKENS, _HEADS, _MANY = 5, 4, 129
_PERFECT = 30  # the largest score
_ROTATES = 12  # the smallest score of a call whose result depends on the token, and not on the head


def _score(subject: Subject, errors: list[str]) -> int | None:
    """Score how much a candidate call behaves like a rotation. Return None, and append to `errors`, if it fails."""
    positions, x = torch.arange(_TOKENS)[None], subject.equal_heads(_TOKENS, _HEADS, 3)
    try:
        out, _ = subject(x[:1], x[:1], positions)
        maps = subject.linear_maps(positions)
        if subject.form.in_place and not subject.form.is_fused and torch.equal(out, x[:1]):
            raise CallError("wrong-shape", "it returns no tensor, and changes none")
        score = _score_of_fused(subject, positions)
        if subject.form.call.key_first or subject.form.call.results == ("k", "q"):
            score -= not bool(subject(x[:1], torch.zeros_like(x[:1]), positions)[0].any())
    except CallError as e:
        errors.append(str(e))
        return None
    differs_by_head = bool((out - out[:, :, :1]).abs().max() > 1e-5)
    differs_by_token = bool((out - out[:, :1]).abs().max() > 1e-5)
    score += _ROTATES * (differs_by_token and not differs_by_head)
    many = torch.arange(_MANY)[None]
    if subject.way.given is not None and subject.accepts(many):
        try:  # tables of fewer tokens than channels also fit other axes
            subject(*2 * (subject.equal_heads(_MANY, _HEADS),), many)
        except CallError:
            score -= _PERFECT - _ROTATES + 1
    if (found := structure.infer(maps)) is not None:
        at_0 = found.multipliers(maps[0, :, found.ins[:, 0]].T).diagonal()
        score += (
            {None: 10, "attention-factor": 8, "not-a-rotation": 6}.get(found.flaw, 2)
            + 4 * (found.order == "same")
            + 2 * (found.pairing is not None)
            + 1 * bool((at_0.angle().abs() < 1e-5).all())
            - 1 * (subject.way.given is not None and not _has_frequencies(subject.way.given, found, maps[1]))
        )
    if subject.layout in ONE_ROW:
        return score + 1
    if subject.accepts(positions.expand(3, -1)):
        with contextlib.suppress(CallError):
            every, _ = subject(x, x, positions.expand(3, -1))
            score += torch.allclose(every[:1] if subject.way.given is None else every, out)
    return score


def _has_frequencies(rope: Rope, found: structure.Structure, at_1: Tensor) -> bool:
    """Return whether the pairs turn by the frequencies of a rope, of which a table of another width has others."""
    angles = found.multipliers(at_1[:, found.ins[:, 0]].T).diagonal().angle().abs().sort().values
    expected = torch.from_numpy(rope.inv_freq).abs().sort().values
    return angles.shape == expected.shape and torch.allclose(angles, expected, atol=1e-4)


def _score_of_fused(subject: Subject, positions: Tensor) -> int:
    """Return 0 if a fused call leaves v unchanged and stores k at its slots, or else a negative number."""
    if not subject.form.takes & {"v", "slots"}:
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
    """Return whether the result for q is what the target has written into q.

    The user or the target says so, or it is so for a view with gaps as well, which an accident would copy.
    """
    x, positions = _tokens(subject), torch.arange(_TOKENS)[None]
    whole = subject.to_native(x).clone(memory_format=torch.contiguous_format)

    def overwrites(q: Tensor) -> bool:
        out, _ = subject.call_native(q, whole.clone(), positions)
        return torch.equal(q, out) and not torch.equal(q, subject.to_native(x))

    with mock.patch.object(FunctionCtx, "mark_dirty", autospec=True, side_effect=FunctionCtx.mark_dirty) as tells:
        found = overwrites(whole.clone())
    if not found or is_told or tells.called:
        return found
    try:
        return overwrites(torch.cat((whole, whole), dim=-1)[..., : subject.channels])
    except CallError:  # it takes no views
        return False


def _depends_on_the_grid(subject: Subject) -> bool:
    """Return whether a cell has other angles if another token makes the grid larger, as with relative coordinates."""
    x, positions = subject.equal_heads(2, 1), torch.ones(subject.axes or 0, 1, 2, dtype=torch.int64)
    small, large = (subject(x, x, positions * torch.tensor([1, last]))[0][:, :1] for last in (1, 7))
    return not torch.allclose(small, large, atol=1e-4)


def _added_to_weights(subject: Subject) -> tuple[float, float]:
    """Return 1 if the norm of q adds 1 to its weights, and the same for k: with weights of 0, the result is not 0."""
    x, zeros = _tokens(subject), torch.zeros(subject.channels)
    results = subject.fused(x, x, torch.arange(_TOKENS)[None], weights=(zeros, zeros))
    q, k = (float(out is not None and out.abs().max() > 1e-3) for out in (results.q, results.k))
    return q, q if results.k is None else k


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
        if other.layout in (chosen.layout, "thd") and other.way.tables == chosen.way.tables:
            with contextlib.suppress(CallError):
                out, _ = other(x, x, positions)
                if torch.allclose(out, right, atol=1e-5):
                    return other
                working = working or other
    return working


def _wrong_only_in_rows(chosen: Subject, others: Iterable[Subject]) -> str:
    """Return a likelier layout in which one row has the result of the chosen call, and several have not, or ""."""
    x, positions = _tokens(chosen), torch.arange(_TOKENS)[None]
    right, _ = chosen(x, x, positions)
    rows, three = positions.expand(3, -1), torch.cat((x, 2 * x, -x))
    for other in others:
        is_same = (other.way.tables, other.form.packing) == (chosen.way.tables, chosen.form.packing)
        is_likelier = LAYOUTS.index(other.layout) < LAYOUTS.index(chosen.layout)
        if is_same and is_likelier and other.accepts(rows):
            with contextlib.suppress(CallError):
                one, several = other(x, x, positions)[0], other(three, three, rows)[0]
                expected = torch.cat((right, 2 * right, -right))
                if bool((one - right).abs().max() < 1e-5) and bool((several - expected).abs().max() > 1e-4):
                    return other.layout
    return ""


def _all_axes_matter(subject: Subject) -> bool:
    """Return whether a position on every axis changes the result."""
    x, at_0 = subject.equal_heads(2, 1), torch.zeros(subject.axes or 0, 1, 2, dtype=torch.int64)
    try:
        right, _ = subject(x, x, at_0)
        moved = [at_0.index_fill(0, torch.tensor(axis), 1) for axis in range(len(at_0))]
        return not any(torch.equal(subject(x, x, positions)[0], right) for positions in moved)
    except CallError:
        return False


def _better(*found: Found | None) -> Found | None:
    """Return the first call with the largest score, or None if there is none."""
    return max((each for each in found if each is not None), key=lambda each: each[0], default=None)


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

            with_positions.__qualname__ = name_of(target)
            kept = [p.replace(kind=p.KEYWORD_ONLY) for name, p in known.items() if name != called["positions"]]
            with_positions.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
            return signature.construct(with_positions, expected)
        grid = sides(called)
        values = {**grid, **expected.arguments}
        returned, arguments = signature.construct(target, replace(expected, arguments=values))
        computed = TableSet(tables.tensors_of(returned))
        computed.grid = tuple(values[side] for side in grid)
        return computed, arguments
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


def _other_values(
    function: Any, call: Call, roles: set[str], known: dict[str, Any], required: dict[str, Any]
) -> dict[str, Any]:
    """Return the opposite of the value that each of these options has otherwise."""
    parameters, names = signature.parameters(function) or {}, call.parameter_of
    values = {role: parameters[names[role]].default for role in roles & call.optional} | known
    return {role: not values.get(role, required[role]) for role in roles if role in names}


def _is_of_latents(subject: Subject) -> bool:
    """Return whether k is the part of a latent row (MLA), of which there is one head, and is not rotated like q."""
    if subject.form.call.parameter_of.get("k") not in ("k_pe", "k_rope"):
        return False
    x = subject.equal_heads(_TOKENS, _HEADS)
    q_out, k_out = subject(x, x, torch.arange(_TOKENS)[None])
    return k_out is None or not torch.allclose(q_out, k_out, atol=1e-5)


def _passed(form: Form, way: Way) -> frozenset[str]:
    """Return the names of the parameters that a call passes."""
    call = form.call
    switches = {"interleaved", "is_neox", "conjugate"} - {*form.known}
    omitted = call.optional & {"q_out", "k_out", "inplace", *switches} | (OF_POSITIONS - {*way.roles})
    return frozenset({*call.literals} | {name for role, name in call.parameter_of.items() if role not in omitted})


def _signature(function: Any, call: Call, passed: frozenset[str], packed: str) -> str:
    """Return a call as text, with the names of the parameters that are passed."""
    words = [name for name in (signature.parameters(function) or sorted(passed)) if name in passed - {*call.literals}]
    words += [f"{name}={_checks.shown(value)}" for name, value in call.literals.items()]
    return f"f({', '.join(words)}){packed}"


def _layouts(call: Call) -> Sequence[str]:
    """Return the layouts to try, the most likely first.

    Functions with a parameter unsqueeze_dim, as in Hugging Face, mostly expect heads before tokens, and kernels of
    engines expect the tokens of all sequences in one axis.
    """
    likely = {"axis": ("bhsd",)} | dict.fromkeys(("cos_sin_cache", "q_weight", "head_size"), ("bshd", "thd"))
    first = next((likely[role] for role in likely if role in call.parameter_of), ())
    return (*first, *(name for name in LAYOUTS if name not in first))
