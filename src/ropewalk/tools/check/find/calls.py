"""Find out how to call a target: try each call that its parameters allow, and choose the one that rotates best.

Calls are ranked by the names of the parameters, so that the usual ones are tried first. What is tried, which public
signatures need it, and where it is, with its lines (about):

kind of call                           public signatures                                    where
class, or function of positions        transformers, torchtune, gpt-oss, vLLM               construct 190
a config that nobody states            Meta's Llama, nanoGPT, courses                       construct 40
make,apply (tables of the target)      transformers, Meta's Llama, GPT-J, Megatron          tables.of_target 50
cos and sin                            flash-attention, Liger, kernels-community, Unsloth   tables 100
one table (complex, angles, tuple)     Transformer Engine, Flux, lit-gpt, RoFormer, timm    tables 40
cos_sin_cache                          vLLM, FlashInfer, SGLang, AITER                      tables 3
layouts bshd, bhsd, sbhd, thd          all of them                                          form 20
layouts bsd, td, bds (one head each)   courses and tutorials, Falcon, time series           form 30
layouts hd, d, 1111d (one token each)  llama2.c, tutorials of one vector; grids, videos     form 15, ways 5
q and k flat, or qkv                   vLLM, FlashInfer, TensorRT-LLM, flash-attention      form 30
norm of each head or of all            vLLM, TensorRT-LLM, OLMo 2                           form 15
norms that a module has                attention of Qwen 3 and others                       norms 55
slots of a cache                       SGLang, vLLM, AITER, FlashInfer                      form 25
cu_seqlens, offsets                    flash-attention, Transformer Engine, FlashInfer      ways 60
several axes of positions              transformers, vLLM, Flux; one parameter for each     ways 25, words 10
the size of a grid, also with a table  Wan, DINOv3's and others' vision towers              grid 210
tokens before those that rotate        CogVideoX, timm and others (text, class tokens)      words 3, subject 5
one head of k (MLA), and all of q      vLLM, SGLang, DeepSeek's reference                   form 15, calls 20
outputs and halves as arguments        kernels-community, lmdeploy                          form 6, adapter 6
a device, a dtype, an option           Neuron, courses; what is unknown gets None           words.filled 8, calls 5
16 bits alone                          FlashInfer, SGLang (kernels that refuse float32)     subject 35, calls 6
names with a known part                position_offset, freq_base, cu_lens, xyz             words 20
any name, known by its use             code of one's own in Python                          uses 320
an object that a function takes        encoders (rope: RotaryEmbedding)                     words 12
a method, if calling the class fails   timm's get_embed, Keras' call                        calls 20
arrays of NumPy, JAX or MLX            MaxText, Gemma's and ONNX's references, ports        arrays 75
a GPU by name, on a machine without    nanotron, Picotron                                   memory 20, calls 3
a table that another method computes   Perception LM                                        construct 3

For any other call, `adapter` writes a function to complete. A call of a new kind belongs there, and not here.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterable, Iterator
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
from ropewalk.tools.check.find import adapter, arrays, grid, memory, norms, tables, words
from ropewalk.tools.check.find.construct import (
    Arguments,
    config_objects,
    construct,
    is_constructor,
    of_scaling,
    sides_of,
    takes_sizes,
    tokens_before,
)
from ropewalk.tools.check.find.form import LAYOUTS, ONE_KEY_HEAD, forms
from ropewalk.tools.check.find.subject import ROUNDING, CallError, Subject
from ropewalk.tools.check.find.tables import INDEXED, Source, TableSet
from ropewalk.tools.check.find.target import Method, Target, function_of
from ropewalk.tools.check.find.ways import COUNTS, LAST, OF_POSITIONS, ONE_ROW, ONE_TOKEN, Way, count_of, ways
from ropewalk.tools.check.find.words import FUSED, Call
from ropewalk.tools.check.measure import case, structure

GIVEN = Rope(16, 100.0, "half")  # of the tables that `check` passes to a function, if no sizes are expected
_OF_DTYPE = r"(?i)^\w+: .*(dtype|float|half|bf16|fp16)|^AssertionError"  # errors of code that takes no float32
_OF_WIDTH = r"size of tensor \w \((\d+)\)"
_TABLES = {"cos", "sin", "freqs_cis", "cos_sin_cache"}

Found = tuple[int, Subject]  # a call, and its score


def find(target: Target, expected: Expected, layout: str | None) -> Subject:
    """Return the target as a `Subject`, which calls it in the way that rotates best, in 16 bits if float32 fails.

    If no call takes whole heads, the target is expected to take their rotated channels, which its caller slices out.

    Raises:
        RopeError: no candidate call works. The message says why, or what the target raised, and shows an adapter.
    """
    errors: list[str] = []
    target = replace(target, library=arrays.library_of(target))
    try:
        return _find(target, expected, layout, torch.float32, errors)
    except _checks.RopeError as e:
        used, said = memory.current(), " ".join((str(e), *errors))
        if used.device == memory.CPU and not used.without_gpu and re.search("CUDA|NVIDIA", said):  # and there is none
            used.without_gpu = True
            return find(target, expected, layout)
        is_free = expected.rope is None and not expected.states_head_dim
        # Three axes of 64 channels cannot be constructed, and some code has tables of one width.
        widths = {int(n) * half for each in errors for n in re.findall(_OF_WIDTH, each) for half in (1, 2)}
        fitting = sorted({96} if "cannot be constructed" in str(e) else {n for n in widths if 64 < n <= 256})
        for head_dim in fitting if is_free else ():
            with contextlib.suppress(_checks.RopeError):
                return _find(target, replace(expected, head_dim=head_dim), layout, torch.float32, errors)
        for dtype in reversed(ROUNDING) if any(re.search(_OF_DTYPE, e) for e in errors) else ():  # float16 is finer
            with contextlib.suppress(_checks.RopeError):
                return _find(target, expected, layout, dtype, [])
        for method in _methods(target):
            with contextlib.suppress(_checks.RopeError):
                of_method = replace(target, objects=(method, *target.objects[1:]))
                found = _find(of_method, expected, layout, torch.float32, [])
                return replace(found, signature=f"{found.signature}, by the method {method.name}")
        if target.library is not None:  # and what it calls may take tensors even so
            with contextlib.suppress(_checks.RopeError):
                return _find(replace(target, library=None), expected, layout, torch.float32, [])
        raise


def _methods(target: Target) -> Iterator[Method]:
    """Yield the methods of a class that may rotate, or compute tables for another function, if its call does not."""
    owner, makes_tables = target.objects[0], len(target.objects) == 2
    for name, function in vars(owner).items() if inspect.isclass(owner) else ():
        if not name.startswith("_") and name != "forward" and inspect.isfunction(function):
            call = words.read_call(called := function_of(method := Method(owner, name)))
            required = {*call.parameter_of} - call.optional
            takes_tokens = bool({"q", "x", "qkv"} & required)
            if takes_tokens != makes_tables and (takes_tokens or "positions" in required or grid.sizes_of(called)):
                yield method


def _find(target: Target, expected: Expected, layout: str | None, dtype: torch.dtype, errors: list[str]) -> Subject:
    """Find the call in one dtype. Why calls fail is appended to `errors`."""
    sliced, finder = for_slice(expected), _Finder(target, expected, dtype)
    if sliced is not None and words.read_call(function_of(target.objects[-1])).parameter_of.get("k") in ONE_KEY_HEAD:
        try:
            return _find(target, sliced, layout, dtype, errors)
        except _checks.RopeError:
            with contextlib.suppress(_checks.RopeError):
                of_q = replace(sliced, front=expected.channels - sliced.channels)
                return _find(target, of_q, layout, dtype, [])
            raise
    try:
        found = finder.find(layout)
        if sliced is not None and sliced.head_dim < expected.head_dim and _rotates_all(found):
            with contextlib.suppress(_checks.RopeError):  # as in MLA, whose callers pass a slice
                return _find(target, sliced, layout, dtype, errors)
        return found
    except _checks.RopeError as e:
        errors += finder.errors
        if sliced is None:
            if isinstance(e, words.NoCallError):
                adapter.show(e, target, expected)
            raise
    return _find(target, sliced, layout, dtype, errors)


class _Finder:
    """Tries the calls of one target. Why calls fail is collected in `errors`."""

    def __init__(self, target: Target, expected: Expected, dtype: torch.dtype) -> None:
        self.target, self.expected = target, expected
        of_grid = [function_of(obj) for obj in target.objects if grid.sizes_of(function_of(obj)) or sides_of(obj)]
        self.is_grid = bool(of_grid)
        self.axes = words.read_call(function_of(target.objects[-1])).axes
        self.counts = grid.counts_of(of_grid[0]) if of_grid else ()
        if of_grid:
            self.axes = f"{self.counts[-1]}s"
        first = words.parameters(getattr(target.objects[0], "owner", target.objects[0])) or {}
        self.is_of_engine = "is_neox_style" in first  # and takes the tokens of all sequences in one axis
        widths = next((first[name].default for name in ("axes_dim", "axes_dims") if name in first), None)
        if not self.axes and isinstance(widths, list | tuple):  # of each axis
            self.axes = str(len(widths))
        self.given = GIVEN
        if (rope := expected.rope) is not None:
            self.given = replace(GIVEN, head_dim=rope.head_dim, rotary_dim=rope.rotary_dim)
        elif expected.states_head_dim:
            self.given = replace(GIVEN, head_dim=expected.head_dim, rotary_dim=expected.head_dim)
        # Attributes of the form of every further call.
        self.found: dict[str, Any] = {"dtype": dtype, "library": target.library}
        self.errors: list[str] = []
        self.unknown: dict[str, None] = {}  # the required parameters whose names are unknown
        self.scored = 0  # calls

    def find(self, layout: str | None) -> Subject:
        """Return the best of all calls, with one position for each token or several."""
        stated = count_of(self.axes) or (None if self.expected.axes is None else self.expected.axes.count)
        best = None
        for count in self.counts or ([stated] if stated else []):
            if (best := self.search(count, layout)) is not None and _all_axes_matter(best[1]):
                break
        failure = None
        if count_of(self.axes) is None and (best is None or best[0] < _PERFECT or not _all_axes_matter(best[1])):
            try:
                of_text = self.search(None, layout)
                is_of_rows = of_text is not None and _takes_rows(of_text[1])  # which look like axes without rows
                is_of_rows &= best is None or not _takes_rows(best[1])
                best = _better(of_text, best) if is_of_rows else _better(best, of_text)
            except _checks.RopeError as e:
                failure = e
        if not stated and self.expected.rope is None and (best is not None or for_slice(self.expected) is None):
            best = self._find_axes(best, layout)
        if layout is None and failure is None and (best is None or best[0] < _IN_PAIRS):
            mixes = best is not None and best[0] >= _ROTATES
            hides = mixes or (best is not None and best[1].gives_tokens_one_position())  # what a single token hides
            tried = [each for each in LAST if not (hides and each in ONE_TOKEN)]
            if is_constructor(self.target.objects[0]) and not mixes:  # of objects that no other call has changed
                tried += LAYOUTS
            last = _better(*(self.search(stated or None, each) for each in tried))
            if mixes and best is not None and last is not None and last[0] >= _IN_PAIRS:
                must, fix = "the layout must be stated", f"Pass {_checks.argument('layout')}."
                got = f"code that rotates in {last[1].layout}, and mixes heads or tokens in {best[1].layout}"
                raise _checks.error("check", must, got, fix)
            best = _better(best, last)
        if best is None or (self.unknown and best[0] < _ROTATES):
            raise failure or self._no_call()
        chosen = best[1]
        parts = () if chosen.module is None else chosen.module.named_modules()
        layers = [name for name, part in parts if getattr(part, "weight", torch.empty(0)).ndim == 2]
        if layers and best[0] < _IN_PAIRS:
            raise words.no_call(f"{self.target.name} must only rotate", f"code with layers {', '.join(layers)}")
        if "v" in chosen.form.takes and _mixes_v(chosen):
            got = "code whose first result depends on v, as attention"
            raise words.no_call(f"{self.target.name} must only rotate", got)
        if "weights" in chosen.form.takes:
            self.found["added"] = _added_to_weights(chosen)
        if _writes_into_its_input(chosen):
            self.found["in_place"] = True
        chosen = replace(chosen, form=replace(chosen.form, **self.found))
        others = []
        modes = ["offsets", "offset", "packed", "rows", *["grids"] * self.is_grid]
        for mode in [*modes, *["tables"] * (len(self.target.objects) == 2)]:
            of_mode = self.candidates(self.expected, self.given, chosen.axes, layout, mode)
            others += [other] if (other := _like(chosen, of_mode)) is not None else []
        is_usual = not (chosen.form.is_fused or self.is_of_engine) and chosen.layout in (*LAYOUTS, "d")
        if layout is None and is_usual:
            likelier = "hd" if chosen.layout == "d" else None
            every = self.candidates(self.expected, chosen.way.given or self.given, chosen.axes, likelier)
            chosen = replace(chosen, other_layout=_wrong_only_in_several(chosen, every))
        passed = chosen.passed.union(*(other.passed for other in others))
        rest = [name for name in chosen.parameters if name not in passed]
        unread = tuple(name for name in rest if not words.reads(chosen.form.function, name))
        return replace(
            chosen,
            needs_equal_heads=chosen.form.packing == "stacked",
            others=tuple(others),
            not_passed=tuple(name for name in rest if name not in unread),
            unread=unread,
        )

    def _find_axes(self, best: Found | None, layout: str | None) -> Found | None:
        """Return the best call with positions on several axes if all of them matter, or if no other call works."""
        works = best is not None and best[0] >= _ROTATES  # then positions on several axes have the same form
        found = [self.search(count, best[1].layout if works and best else layout, first=works) for count in COUNTS]
        rated = [(_all_axes_matter(each[1]), *each) for each in found if each and (best is None or each[0] >= best[0])]
        if rated and (not works or any(matter for matter, *_ in rated)):
            return max(rated, key=lambda each: each[:2])[1:]
        return best

    def _no_call(self) -> _checks.RopeError:
        if self.unknown:
            return words.no_known_names(self.target.objects[-1], self.unknown)
        must = f"{self.target.name} must be callable in a known way, and rotate tensors"
        if self.errors and self.errors[0].startswith("SystemExit"):
            return _checks.error("check", must, self.errors[0], "Let it return, and not end the process.")
        return words.no_call(must, self.errors[0] if self.errors else "no known parameters", *self.expected.notes)

    def search(self, count: int | None, layout: str | None, *, first: bool = False) -> Found | None:
        """Return the first call with the best score among those with `count` axes of positions, or None.

        With `first`, only the first call is tried.
        """

        def candidates(expected: Expected, given: Rope) -> Iterator[Subject]:
            return islice(self.candidates(expected, given, count, layout), 1 if first else None)

        best = self._best(candidates(self.expected, GIVEN))  # small tables first: all channels are rotated
        if best is None and self.given != GIVEN and len(self.target.objects) == 1:
            best = self._best(candidates(self.expected, self.given))
        if best is None:
            return None
        score, index, chosen = best
        if count is None and chosen.way.given not in (None, self.given):
            chosen = next(islice(candidates(self.expected, self.given), index, None))
            if _score(chosen, self.errors) is None:
                return None

        def same(expected: Expected, given: Rope = self.given) -> Subject:
            return next(islice(candidates(expected, given), index, None))

        def rebuild(**other: Any) -> Subject:
            return same(replace(self.expected, **other))

        def resize(channels: int, rotary_dim: int) -> Subject | None:
            expected = self.expected
            if chosen.way.given is not None:
                return same(expected, replace(GIVEN, head_dim=channels, rotary_dim=rotary_dim))
            is_told = rotary_dim == channels or "rotary_dim" in chosen.form.call.parameter_of  # what rotates of a head
            if not (is_told if chosen.arguments is None else chosen.arguments.takes(channels, rotary_dim)):
                return None
            rope = expected.rope or Rope(channels, expected.base or 10_000.0, "half", rotary_dim=rotary_dim)
            try:
                rope = replace(rope, head_dim=channels, rotary_dim=rotary_dim, rotary_offset=0)
                return same(replace(expected, rope=rope, head_dim=channels))
            except _checks.RopeError:  # a scheme, or the class, accepts no such size
                return None

        chosen = replace(chosen, rebuild=None if chosen.arguments is None else rebuild)
        return score, replace(chosen, resize=resize if count is None else None)

    def _best(self, candidates: Iterable[Subject]) -> tuple[int, int, Subject] | None:
        """Return the largest score of the candidates, with the index and the candidate, or None if none works."""
        best: tuple[int, int, Subject] | None = None
        for index, subject in enumerate(islice(candidates, _MOST - self.scored)):
            self.scored += 1
            score = _score(subject, self.errors)
            if score is not None and (best is None or score > best[0]):
                best = score, index, subject
            if score == _PERFECT:
                break
        return best

    def candidates(
        self, expected: Expected, given: Rope, count: int | None, layout: str | None, mode: str | None = None
    ) -> Iterator[Subject]:
        """Yield every call that the names of the target's parameters allow.

        Args:
            expected: what the target should compute, for its constructor and its parameters.
            given: the rope of the tables that are passed, if positions have one axis.
            count: the number of axes of the positions, or None if a token has one position.
            layout: the only layout that is tried, or None.
            mode: a way to pass positions that is optional, as for `ways`. None is the plain call.

        Raises:
            RopeError: the parameters allow no known call. The message shows an adapter.
        """
        second = self.target.objects[1] if len(self.target.objects) == 2 else None
        target = self.target.objects[0]
        if second is None and is_constructor(target) and words.parameters(function_of(target)):
            _require_tensors(function_of(target))  # before the arguments of its constructor
        first, arguments = _construct(target, expected, self.target.library)
        if isinstance(second, Method):
            same = isinstance(target, Method) and target.owner is second.owner
            second = getattr(first.__self__, second.name) if same else construct(second, expected)[0]
        second = arrays.converted(second, self.target.library)
        if second is not None and (taking := words.with_object(second, target, first)) is not None:
            first, second = taking, None
        of_first = {} if second is None or not takes_sizes(first) else words.read_call(first).parameter_of
        if tokens := of_first.get("positions") or of_first.get("seq_len"):  # and sizes, as of a method
            first, _ = construct(first, expected, (tokens,))
        sides = sides_of(target)
        of_grid = [*grid.sizes_of(first if second is None else second).values()]
        columns_first = expected.axis_names[-2:-1] in (("column",), ("width",))
        spread = partial(grid.spread, count=count, columns_first=columns_first, in_one=mode == "grids")
        block = 1 if sides else max(grid.block_of(each) for each in (first, second) if each is not None)
        if sides or grid.sizes_of(first):
            before = (tokens_before(target) or grid.more_rows(first, sides)) if sides else 0
            first = spread(first, sides, makes_tables=second is not None, before=before)
        if second is not None and of_grid:
            second = spread(second)
        function = first if second is None else second
        if expected.front:
            function = _behind(function, expected.front)
        inner = norms.of_module(first, expected.channels) if isinstance(first, torch.nn.Module) else {}
        if second is None and inner:
            function = norms.passed(first, inner)
            self.found["eps"] = norms.eps_of(inner["q_weight"])
        nones = () if arguments is None else arguments.unknown
        self.unknown |= dict.fromkeys(nones)
        call = Call({}) if isinstance(function, TableSet) else words.read_call(function)
        layer_type = None if arguments is None else expected.layer_type
        if second is not None:
            call = words.take_tables(second, call)
        else:
            _require_tensors(first)
        self.unknown |= dict.fromkeys(call.guessed)
        roles = {*call.parameter_of}
        objects = (first, getattr(first, "__self__", None))
        module = next((obj for obj in objects if isinstance(obj, torch.nn.Module)), None)
        calls: list[tuple[Call, list[Source]]] = []
        if second is not None:
            has_positions = "positions" in roles
            options = {"is_passed_positions": has_positions, "from_offset": mode == "tables"}
            sources = tables.of_target(first, layer_type, count, **options)
            calls = [(call, sources)] if sources else []
        elif {"cos", "sin"} <= roles or {"freqs_cis", "cos_sin_cache"} & roles:
            if roles & _TABLES <= call.optional and ("positions" in roles or arguments is not None):
                calls = [(call.without(_TABLES), [])]  # their default may be right
            of_cache = "cos_sin_cache" in roles and expected.axes is not None
            if count is not None and ("sections" in roles or self.is_grid or of_cache):
                sizes = expected.sizes_of_axes(count)
                if "sections" not in roles and expected.axes is None:  # as Wan's code divides the columns
                    share = sum(sizes) // count
                    sizes = [sum(sizes) - (count - 1) * share, *[share] * (count - 1)]
                axes, dim = expected.axes or Axes.sections(sizes), 2 * sum(sizes)
                given = replace(GIVEN, head_dim=max(expected.channels, dim), rotary_dim=dim, axes=axes)
            if count is None or given.axes is not None:
                sources = tables.exact(call.parameter_of, given, words.names_sin_first(function))
                if "positions" in roles - call.optional and "cos_sin_cache" not in roles:
                    sources += [replace(source, is_final=True) for source in sources]
                calls.append((call, sources))
        else:
            calls = [(call, [])]
            states_positions = bool((OF_POSITIONS | FUSED) & roles)
            if mode is None and "base" in roles - call.optional and not states_positions:  # a theta may be the angles
                of_tables = call.renamed("base", "freqs_cis")
                calls.append((of_tables, tables.exact(of_tables.parameter_of, given)))
            if mode is None and "positions" in roles and not {"offset", "offsets"} & roles and not call.axes:
                calls.append((call.renamed("positions", "offset"), []))  # as in arange(pos, pos + n)
        if call.key_first:
            calls[:0] = [(replace(each, results=("k", "q")), sources) for each, sources in calls]
        for each, sources in calls:
            of_rope: Expected | Rope = given if sources and second is None else expected
            sizes_of_head = of_rope.head_dim, of_rope.rotary_dim
            written = adapter.written(each, expected, sizes_of_head, count, layer_type)
            fixed = words.filled(function, each.parameter_of.values())
            of_configs = {n: config for n, config in config_objects(function, expected).items() if n in fixed}
            fixed |= of_configs
            if second is None and arguments is None and sources == []:  # and not those of tables that are passed
                own = of_scaling(getattr(expected.unresolved or expected.rope, "scaling", None))
                fixed |= {name: value for name, value in own.items() if name in (words.parameters(function) or {})}
            self.unknown |= dict.fromkeys(name for name, value in fixed.items() if value is None)
            for way, name in _places(each, sources, count, layout, mode, is_of_engine=self.is_of_engine):
                for form in forms(each, name, function, written=written, fixed=fixed, **self.found):
                    used = {*words.WORDS} - OF_POSITIONS | {"eps", "unsqueeze_dim", *written, *way.roles}
                    passed = {parameter for role, parameter in each.parameter_of.items() if role in used}
                    pairing = {each.parameter_of.get(role): written.get(role) for role in ("interleaved", "is_neox")}
                    names = (n for n in words.parameters(function) or () if n in passed)
                    named = [f"{n}={pairing[n]}" if pairing.get(n) else n for n in names]
                    named = [n for n in named if n not in inner]
                    if self.is_grid:
                        named = [n for n in named if n not in ("positions", "tensor_layout")] + of_grid
                    named += [f"{n}={value}" for n, value in fixed.items() if n not in of_configs]
                    text = f"f({', '.join(named)}){form.packed}"
                    text += f", tokens in blocks of {block} × {block}" if self.is_grid and block > 1 else ""
                    text += f" of an object with {', '.join(f'{name}=None' for name in nones)}" if nones else ""
                    if second is not None:
                        widened = (way.tables or "").split(", ")[1:2] not in (["bs"], ["s"])
                        text = f"tables, then {text}" + ", tables with an axis for the heads" * widened
                    yield Subject(
                        form=form,
                        way=way,
                        signature=text,
                        parameters=tuple(words.parameters(function) or ()),
                        passed=frozenset(passed),
                        expected=expected,
                        module=module,
                        channels=expected.channels if way.given is None else given.head_dim,
                        arguments=arguments,
                        axes=count,
                        of_grid=block * self.is_grid,
                    )


def _behind(function: Any, count: int) -> Any:
    """Return a function of the last channels of q, for one of all, the first of which must be passed on."""
    name = words.read_call(function).parameter_of.get("q", "")

    def called(**passed: Any) -> Any:
        front = torch.ones(*passed[name].shape[:-1], count, dtype=passed[name].dtype)
        q, *others = function(**passed | {name: torch.cat((front, passed[name]), dim=-1)})
        if not torch.equal(q[..., :count], front):
            raise ValueError(f"the first {count} channels of q must be passed on, and they are changed")
        return q[..., count:], *others

    return words.stands_for(called, function, [*(words.parameters(function) or {}).values()])


def _require_tensors(function: Any) -> None:
    if not ({"x", "qkv", "kv", "x1"} & (roles := {*words.read_call(function).parameter_of}) or {"q", "k"} <= roles):
        raise words.no_call("TARGET must have parameters for q and k, or for x or qkv", words.named(function))


def _places(
    call: Call,
    sources: list[Source],
    count: int | None,
    layout: str | None,
    mode: str | None,
    *,
    is_of_engine: bool,
) -> Iterator[tuple[Way, str]]:
    """Yield each way to pass positions and tables, with a layout of q and k, the most likely first.

    Functions with a parameter unsqueeze_dim, as in Hugging Face, mostly expect heads before tokens, and kernels of
    engines expect the tokens of all sequences in one axis.
    """
    roles = {*call.parameter_of, *["head_size"] * is_of_engine}
    likely: dict[str, tuple[str, ...]] = {"unsqueeze_dim": ("bhsd",), "slots": ("thd",)}
    likely |= dict.fromkeys(("cos_sin_cache", "q_weight", "head_size"), ("bshd", "thd"))
    first = next((likely[role] for role in likely if role in roles), ())
    layouts = [*first, *(name for name in LAYOUTS if name not in first)] if layout is None else [layout]
    groups = [layouts[:1], layouts[1:]] if layouts[0] == "thd" else [layouts]
    for group in groups:
        for way in ways(call, count, tables=bool(sources), mode=mode):
            for name, passed in tables.passed(sources, call, way, way.fitting(group), is_stated=layout is not None):
                yield passed, name


_TOKENS, _HEADS, _MANY = 5, 4, 129
_ROWS = 6  # more than tokens or heads, which a slice of tables with rows by their number would cut
_MOST = 150  # calls that are scored
_PERFECT = 30  # the largest score
_IN_PAIRS = 20  # the smallest score of one that rotates pairs
_RATED = {None: 10, "attention-factor": 8, "cos-and-sin-swapped": 8, "not-a-rotation": 6, "stretched": 6}  # by flaw
_ROTATES = 12  # the smallest score of a call whose result depends on the token, and not on the head


def _score(subject: Subject, errors: list[str]) -> int | None:
    """Score how much a candidate call behaves like a rotation. Return None, and append to `errors`, if it fails."""
    positions, x = torch.arange(_TOKENS)[None], subject.equal_heads(_TOKENS, _HEADS, _ROWS)
    given = subject.way.given
    try:
        out, _ = subject(x[:1], x[:1], positions)
        maps = subject.linear_maps(positions)
        if torch.equal(out, x[:1]) and subject.returns_nothing(x[:1], positions):
            raise CallError("wrong-shape", "it returns no tensor, and changes none")
        score = _score_of_fused(subject, positions)
        if subject.form.packing == "heads":  # of one size, they may be those of q, k and v, along an axis of their own
            score -= not _runs(subject, x[:1], x[:1, :, :2], positions, errors)
        if (after := subject.after(2)) is not None:
            score -= not _runs(after, *2 * (subject.equal_heads(_TOKENS + 2, _HEADS),), positions, errors)
        if subject.form.call.key_first:
            score -= not bool(subject(x[:1], torch.zeros_like(x[:1]), positions)[0].any())
    except CallError as e:
        errors.append(str(e))
        return None
    differs_by_head = bool((out - out[:, :, :1]).abs().max() > subject.close)
    differs_by_token = bool((out - out[:, :1]).abs().max() > subject.close)
    score += _ROTATES * (differs_by_token and not differs_by_head) - _ROTATES * (not differs_by_token)
    many = torch.arange(_MANY)[None]
    many = many + 7 * subject.accepts(many + 7)  # beyond the rows of tables that have one for each token
    is_given = given is not None and not subject.of_grid and subject.accepts(many)
    if is_given and not _runs(subject, *2 * (subject.equal_heads(_MANY, _HEADS),), many, errors):
        if "positions" in subject.way.roles:  # which must index all of them
            return None
        score -= _PERFECT - _ROTATES + 1  # tables of fewer tokens than channels also fit other axes
    if (found := structure.infer(maps, subject.close)) is not None:
        at_0 = found.multipliers(maps[0, :, found.ins[:, 0]].T).diagonal()
        score += (
            _RATED.get(found.flaw, 2)
            + 4 * (found.order == "same")
            + 2 * (found.pairing is not None)
            + 1 * bool(((at_0.angle().abs() < subject.close) & (at_0 != 0)).all())
            - 1 * (given is not None and not _has_frequencies(given, found, maps[1], max(1e-4, subject.close)))
        )
    if subject.layout in ONE_ROW:
        return score + 1
    if subject.accepts(positions.expand(_ROWS, -1)):
        with contextlib.suppress(CallError):
            every, _ = subject(x, x, positions.expand(_ROWS, -1))
            right = torch.allclose(every[:1] if given is None else every, out)
            if (subject.way.tables or "").startswith(INDEXED) and subject.accepts(rows := torch.arange(3)[:, None]):
                right = right and torch.allclose(subject(x[:3, :1], x[:3, :1], rows)[0][:, 0], out[0, :3])
            score += right
    return score


def _runs(subject: Subject, q: Tensor, k: Tensor, positions: Tensor, errors: list[str]) -> bool:
    """Return whether a call returns results. If not, its error is appended to `errors`."""
    try:
        subject(q, k, positions)
    except CallError as e:
        errors.append(str(e))
        return False
    return True


def _has_frequencies(rope: Rope, found: structure.Structure, at_1: Tensor, close: float) -> bool:
    """Return whether the pairs turn by the frequencies of a rope, of which a table of another width has others."""
    angles = found.multipliers(at_1[:, found.ins[:, 0]].T).diagonal().angle().abs().sort().values
    expected = torch.from_numpy(rope.inv_freq).abs().sort().values
    return angles.shape == expected.shape and torch.allclose(angles, expected, atol=close)


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
    return case.waves(1, _TOKENS, _HEADS, subject.channels, 1)


def _mixes_v(subject: Subject) -> bool:
    """Return whether another v changes the result for q."""
    x, positions = _tokens(subject), torch.arange(_TOKENS)[None]
    first, second = (subject.fused(x, x, positions, v=v).q for v in (x, -x))
    return bool((first - second).abs().max() > subject.close)


def _writes_into_its_input(subject: Subject) -> bool:
    """Return whether the result for q is what the target has written into q.

    A target that returns nothing or marks q says so. Another returns what it has written into a view with gaps as well,
    which an accident would copy.
    """
    x, positions = _tokens(subject), torch.arange(_TOKENS)[None]
    whole = subject.to_native(x).to(subject.form.dtype).clone(memory_format=torch.contiguous_format)

    def overwrites(q: Tensor) -> bool:
        out, _ = subject.call_native(q, whole.clone(), positions)
        return torch.equal(q, out) and not torch.equal(q, whole)

    with mock.patch.object(FunctionCtx, "mark_dirty", autospec=True, side_effect=FunctionCtx.mark_dirty) as tells:
        found = overwrites(whole.clone())
    if (found or subject.form.is_fused) and subject.returns_nothing(x, positions):  # which may be written into a copy
        return True
    if not found or tells.called:
        return found
    try:
        return overwrites(torch.cat((whole, whole), dim=-1)[..., : subject.channels])
    except CallError as e:  # it takes no views: it demands none if it works in place, and otherwise cannot reshape them
        return "view size" not in str(e)


def _added_to_weights(subject: Subject) -> tuple[float, float]:
    """Return 1 if the norm of q adds 1 to its weights, so that weights of 0 give no 0, and the same for k."""
    x, w = _tokens(subject), torch.ones(subject.channels)
    none, one = (subject.fused(x, x, torch.arange(_TOKENS)[None], weights=(n * w, n * w)) for n in (0, 1))

    def adds(out: Tensor | None, of_one: Tensor | None) -> float:
        if out is None or of_one is None or torch.equal(out, of_one):  # it has no weight
            return 0.0
        return float(out.abs().max() > 1e-3)

    q, k = adds(none.q, one.q), adds(none.k, one.k)
    return q, q if none.k is None else k


def _like(chosen: Subject, others: Iterable[Subject]) -> Subject | None:
    """Return the one of other calls that computes the same at 5 positions, or else any that works."""
    x, positions = _tokens(chosen), torch.arange(_TOKENS)[None]
    right, _ = chosen(x, x, positions)
    working = None
    for other in others:
        if other.layout in (chosen.layout, "thd") and other.way.tables == chosen.way.tables:
            with contextlib.suppress(CallError):
                out, _ = other(x, x, positions)
                if torch.allclose(out, right, atol=other.close):
                    return other
                working = working or other
    return working


def _wrong_only_in_several(chosen: Subject, others: Iterable[Subject]) -> str:
    """Return a likelier layout in which one row or head has the result of the chosen call, and several not, or ""."""
    x, positions = _tokens(chosen), torch.arange(_TOKENS)[None]
    right, _ = chosen(x, x, positions)
    of_heads = chosen.layout == "d"
    one, several, kind = (x[:, :, :1], x, "heads") if of_heads else (x, torch.cat((x, 2 * x, -x)), "rows")
    rows, expected = positions.expand(len(several), -1), right if of_heads else torch.cat((right, 2 * right, -right))
    for other in others:
        packing = "flat" if of_heads else chosen.form.packing
        is_same = (other.way.tables, other.form.packing) == (chosen.way.tables, packing)
        is_likelier = of_heads or LAYOUTS.index(other.layout) < LAYOUTS.index(chosen.layout)
        if is_same and is_likelier and other.accepts(rows):
            with contextlib.suppress(CallError):
                of_one, of_several = other(one, one, positions)[0], other(several, several, rows)[0]
                is_right = bool((of_one - right[:, :, : one.shape[2]]).abs().max() < other.close)
                if is_right and bool((of_several - expected).abs().max() > 10 * other.close):
                    return f"{other.layout}, several {kind}"
    return ""


def _rotates_all(subject: Subject) -> bool:
    """Return whether each channel of a head is rotated."""
    try:
        found = structure.infer(subject.linear_maps(torch.arange(_TOKENS)[None]), subject.close)
    except CallError:
        return False
    return found is not None and 2 * found.pairs == subject.channels


def _all_axes_matter(subject: Subject) -> bool:
    """Return whether a position on every axis changes the result."""
    x, at_0 = subject.equal_heads(2, 1), torch.zeros(subject.axes or 0, 1, 2, dtype=torch.int64)
    try:
        right, _ = subject(x, x, at_0)
        moved = [at_0.index_fill(0, torch.tensor(axis), 1) for axis in range(len(at_0))]
        return not any(torch.equal(subject(x, x, positions)[0], right) for positions in moved)
    except CallError:
        return False


def _takes_rows(subject: Subject) -> bool:
    """Return whether each row of the batch is turned by its own positions."""
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    x = subject.equal_heads(3, 1, 2)
    try:
        return subject.accepts(positions) and torch.allclose(
            subject(x, x, positions)[0][1:], subject(x[1:], x[1:], positions[1:])[0], atol=subject.close
        )
    except CallError:
        return False


def _better(*found: Found | None) -> Found | None:
    """Return the first call with the largest score, or None if there is none."""
    return max((each for each in found if each is not None), key=lambda each: each[0], default=None)


def _construct(target: Any, expected: Expected, library: str | None) -> tuple[Any, Arguments | None]:
    """Construct the object, or compute its tables, and return the result with the arguments that were used.

    A function that rotates, as the names of its parameters say, is returned with None as arguments.
    """
    if is_constructor(target):
        built, arguments = construct(target, expected)
        return arrays.converted(built, library), arguments
    called = words.read_call(target).parameter_of
    if takes_sizes(target) and not {"q", "x", "qkv", "kv", "x1"} & {*called}:
        is_of_dtype = "dtype" in words.filled(target, ())  # which q states in each call
        free = called.get("positions") or (called.get("seq_len", "") if is_of_dtype else "")
        sizes = grid.sizes_of(target).values()
        returned, arguments = construct(target, expected, [free] if free else sizes)
        returned = getattr(returned, "forward", returned) if not callable(returned) else returned
        returned = arrays.converted(returned, library)
        return (returned if callable(returned) else TableSet(tables.tensors_of(returned))), arguments
    return arrays.converted(memory.on_device(target), library), None
