"""Write an adapter for a target that cannot be called: a function of the words of the contract that calls it."""

from __future__ import annotations

import contextlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ropewalk import _checks
from ropewalk.tools.check.expected import Expected
from ropewalk.tools.check.find import arrays, words
from ropewalk.tools.check.find.construct import chosen, configs, is_constructor
from ropewalk.tools.check.find.target import Method, Target, function_of, name_of
from ropewalk.tools.check.find.words import Call


def written(
    call: Call, expected: Expected, sizes: tuple[int, int], count: int | None = None, layer_type: str | None = None
) -> dict[str, str]:
    """Return the arguments that follow from the words and from what is expected, by role, as expressions of Python.

    Args:
        call: the roles of the function's parameters.
        expected: what it should compute.
        sizes: the numbers of channels of a head, and of rotated ones.
        count: the number of axes of the positions, if there are several.
        layer_type: the kind of the layer, for code with a parameter for it.
    """
    (head_dim, rotary_dim), half = sizes, expected.pairing != "interleaved"
    base = 10_000.0 if expected.base is None else expected.base
    inv_freq = f"{base} ** (-torch.arange(0, {rotary_dim}, 2) / {rotary_dim})"
    if expected.rope is not None and expected.rope.scaling is not None:
        inv_freq = f"torch.tensor({expected.rope.inv_freq.tolist()})"
    halves = "x.chunk(2, dim=-1)[0]", "x.chunk(2, dim=-1)[1]"
    q, k = [*(role for role in ("q", "x", "k") if role in call.parameter_of), *halves][:2]
    tokens_axis = "layout.index('s' if 's' in layout else 't')"
    required = {
        "conjugate": "False",
        "inplace": "False",
        "interleaved": str(not half),
        "is_neox": str(half),
        "scale": "1.0",
        "base": str(base),
        "inv_freq": inv_freq,
        "attention_mask": f"torch.ones({q}.shape[layout.index('b')], {q}.shape[{tokens_axis}], dtype=torch.int64)",
        "q_out": f"torch.full_like({q}, torch.nan)",
        "k_out": f"torch.full_like({k}, torch.nan)",
        "seq_dim": tokens_axis,
        "seq_len": str(expected.table_length or 4096),
    }
    required |= {"seq_len": f"{q}.shape[{tokens_axis} - len(layout)]"} if _counts_tokens(call) else {}
    required |= {"channels": f"{q}.shape[-1]"} if {"q", "x"} & {*call.parameter_of} else {}
    always = {
        "before": "0",
        "nope": str(0 if expected.rope is None else expected.rope.rotary_offset),
        "x1": halves[0],
        "x2": halves[1],
        "num_v_heads": "num_kv_heads",
        "tensor_layout": "layout",
        "rotary_dim": str(rotary_dim),
    }
    if rotary_dim != head_dim:
        always["rotary_share"] = str(rotary_dim / head_dim)
    always |= {} if count is None else {"sections": str(expected.sizes_of_axes(count))}
    always |= {} if layer_type is None else {"layer_type": repr(layer_type)}
    always |= {} if expected.base is None else {"base": str(base)}
    if expected.pairing is not None:
        always |= {role: required[role] for role in ("interleaved", "is_neox")}
    known = {role: text for role, text in required.items() if role not in call.optional} | always
    return {role: text for role, text in known.items() if role in call.parameter_of}


def _counts_tokens(call: Call) -> bool:
    """Return whether a length that a function takes is the number of its tokens, and not one of all positions."""
    return bool({"q", "x"} & {*call.parameter_of}) and "positions" not in call.parameter_of


def show(error: _checks.RopeError, target: Target, expected: Expected) -> None:
    """Append to the message of an error the adapter to paste for a target that cannot be called."""
    code = write(target, expected, has_failed=True)
    missing = " Replace each `...`." if "=..." in code else " If that fails as well, change its arguments."
    says = "Check a function that calls it. The names of its parameters say what check passes."
    if "def tables(" in code:
        says = f"Check FILE:tables,{name_of(target.objects[-1])}, where FILE contains this."
    scope = arrays.scope_of(target.objects[-1])
    own = (name for name, value in scope.items() if getattr(value, "__module__", "") == scope.get("__name__"))
    rotate = [name for name in own if re.search("rope|rotary|freqs_cis", name.lower())]
    if rotate and name_of(target.objects[-1]).partition(".")[0] not in rotate:  # such as attention
        says = f"If it does more than to rotate, check the part that does: {', '.join(rotate)}. {says}"
    lines = (_checks.printable(line) for line in code.split("\n"))
    error.args = ("\n".join((f"{error} {says}{missing}", "", *lines)),)


def write(target: Target, expected: Expected, *, has_failed: bool = False) -> str:
    """Return the code of an adapter, with `...` for what is not known: also the tables, if the call has failed."""
    last = target.objects[-1]
    library = arrays.library_of(target) or "torch"
    imports = [f"import {library}", *dict.fromkeys(_import(target, obj) for obj in target.objects)]
    call = words.read_call(function_of(last))
    if len(target.objects) == 2:
        with contextlib.suppress(words.NoCallError):
            call = words.take_tables(last, call)
    arguments = _arguments(last, call, expected)
    # In the order of the parameters, in which the function that computes them mostly returns them.
    tables = [word for word in arguments.values() if word in ("cos", "sin", "freqs_cis")]
    is_open = has_failed and tables == ["freqs_cis"] and "..." not in arguments.values()
    is_open = is_open and len(target.objects) == 1
    arguments |= {call.parameter_of["freqs_cis"]: "..."} if is_open else {}
    outs = {role: text for role, text in _written(call, expected).items() if role in ("q_out", "k_out")}
    arguments |= {call.parameter_of[out]: out for out in outs}
    objects = [f"{_object(obj)} = {_constructed(obj, expected)}" for obj in target.objects if is_constructor(obj)]
    objects = [*dict.fromkeys(objects)]
    lines: list[str] = []
    if any("tokens" in text for text in arguments.values()):
        tensor = next((role for role in ("q", "x") if role in call.parameter_of), "q")
        is_of_tables = len(target.objects) == 2 and has_failed and not _computes_rows(target.objects[0])
        count = "seq_len" if is_of_tables else f"{tensor}[0].numel() // (num_heads * head_size)"
        lines.insert(0, f"tokens = {count}")
    lines += [f"{out} = {text.replace('full', 'zeros').replace(', torch.nan', '')}" for out, text in outs.items()]
    texts = [*arguments.values(), *lines, *(["cos", "sin"] if is_open else [])]
    is_indexed = False
    for make in target.objects[:-1]:
        of_make = words.read_call(function_of(make))
        made = _arguments(make, of_make, expected)
        if has_failed and not _computes_rows(make):
            made = {name: "..." if text in words.WORDS else text for name, text in made.items()}
            body = "".join(f"\n    {line}" for line in (*lines, f"return {_called(make, made)}"))
            return "\n".join((*imports, *objects, "", f"def tables(seq_len):{body}", ""))
        of_x = next((role for role in ("qkv", "q") if role in call.parameter_of), "x")
        made = {name: of_x if text == "x" else text for name, text in made.items()}
        computed = _called(make, made)
        is_indexed = "seq_len" in of_make.parameter_of and "positions" not in call.parameter_of
        if is_indexed:
            computed = f"(table[positions] for table in {computed})" if len(tables) > 1 else f"{computed}[positions]"
        lines.append(f"{', '.join(tables) or 'freqs_cis'} = {computed}")
        texts += [*made.values(), "positions" * is_indexed]
    takes = [word for word in words.WORDS if any(re.search(rf"\b{word}\b", text) for text in texts)]
    takes = takes if {"q", "x", "qkv", "kv", "x1"} & {*call.parameter_of} else ["q", "k", *takes]
    takes = [word for word in takes if len(target.objects) < 2 or word not in tables]
    takes = [f"{word}: 's'" if word == "positions" and is_indexed else word for word in takes]
    called = _called(last, arguments)
    if outs:
        both = ", ".join(outs)
        lines += [called, f"return torch.cat(({both}), dim=-1)" if "x1" in call.parameter_of else f"return {both}"]
    else:
        lines.append(f"return {called}")
    body = "".join(f"\n    {line}" for line in lines)
    name = "adapter" if any(_object(obj) == "rotate" for obj in target.objects) else "rotate"
    return "\n".join((*filter(None, (*imports, *objects)), "", f"def {name}({', '.join(takes)}):{body}", ""))


def _written(call: Call, expected: Expected) -> dict[str, str]:
    """Return `written` with values in place of what is no word."""
    fixed = {
        "tensor_layout": "'bshd'",
        "attention_mask": "torch.ones(q.shape[:2], dtype=torch.int64)",
        "eps": "1e-6",
        "max_seqlen": "int(cu_seqlens.diff().max())",
        "unsqueeze_dim": "1",
        "k_positions": "positions",
        "seq_dim": "1",
        "seq_len": "tokens" if _counts_tokens(call) else "int(positions.max()) + 1",
    }
    fixed |= {"offsets": "offset", "layer_type": repr(expected.layer_type)}
    fixed = {role: text for role, text in fixed.items() if role in {*call.parameter_of} - call.optional}
    return written(call, expected, (expected.head_dim, expected.rotary_dim)) | fixed


def _arguments(obj: Any, call: Call, expected: Expected) -> dict[str, str]:
    """Return the arguments of a call by name, as expressions of words, and `...` for those that are not known."""
    role_of = {name: role for role, name in call.parameter_of.items()}
    known, roles = _written(call, expected), {*call.parameter_of}
    sizes = words.filled(function_of(obj), role_of)
    if not is_constructor(obj) and not {"q", "x", "qkv", "kv", "x1"} & roles:  # a function that computes tables
        sizes |= chosen(obj, expected)
    omitted = call.optional & {"offsets", "cu_seqlens", "tensor_layout", *({"offset"} if "positions" in roles else ())}
    if {"cos", "freqs_cis", "cos_sin_cache"} & roles - call.optional:  # of which the rotated channels follow
        omitted |= call.optional & {"rotary_dim", "offset"}
        if "cos_sin_cache" not in roles:
            omitted |= call.optional & {"positions"}
    arguments = {}
    for name, parameter in (words.parameters(function_of(obj)) or {}).items():
        role = role_of.get(name, "")
        if role in known and role not in omitted:
            arguments[name] = known[role]
        elif role in words.WORDS and role not in omitted and (name not in sizes or role != "head_size"):
            arguments[name] = role
        elif parameter.default is inspect.Parameter.empty:
            arguments[name] = "..." if isinstance(sizes.get(name), SimpleNamespace | None) else repr(sizes[name])
    return arguments


def _computes_rows(make: Any) -> bool:
    """Return whether code that computes tables is told for which positions."""
    return bool({"positions", "seq_len", "x"} & {*words.read_call(function_of(make)).parameter_of})


def _called(obj: Any, arguments: dict[str, str]) -> str:
    known = words.parameters(function_of(obj)) or {}
    by_place = [name for name in arguments if known[name].kind is inspect.Parameter.POSITIONAL_ONLY]
    texts = [arguments[name] if name in by_place else f"{name}={text}" for name, text in arguments.items()]
    method = f".{obj.name}" if isinstance(obj, Method) else ""
    return f"{_object(obj)}{method}({', '.join(texts)})"


def _object(obj: Any) -> str:
    """Return the name of what an adapter calls: the function, or the object of a class."""
    return name_of(getattr(obj, "owner", obj)).rpartition(".")[2].lower() if is_constructor(obj) else name_of(obj)


def _constructed(obj: Any, expected: Expected) -> str:
    owner = getattr(obj, "owner", obj)
    unstated = configs(owner)
    values = {n: "..." if value is None or n in unstated else repr(value) for n, value in chosen(obj, expected).items()}
    is_module = inspect.isclass(owner) and issubclass(owner, torch.nn.Module)
    return f"{name_of(owner)}({', '.join(f'{n}={text}' for n, text in values.items())}){'.eval()' * is_module}"


def _import(target: Target, obj: Any) -> str:
    """Return the line that imports an object, in the folder of its file."""
    where, _, _ = target.name.rpartition(":")
    module = Path(where).stem if where.endswith(".py") else getattr(obj, "__module__", None)
    name = name_of(getattr(obj, "owner", obj)).partition(".")[0]
    if module and not module.replace(".", "_").isidentifier():
        return f"{name} = __import__({module!r}).{name}"
    return f"from {module} import {name}" if module else ""
