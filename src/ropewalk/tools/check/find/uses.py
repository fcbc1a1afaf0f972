"""What code does with its parameters, which says the role of one that has any name, such as `c` in `c ** (i / d)`."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

# Methods whose result stands for what they are called of, and functions whose result stands for what they are passed.
_SAME = {"float", "to", "type", "long", "double", "int", "astype", "unsqueeze", "contiguous"}
_SAME |= {"reshape", "view", "flatten", "transpose", "clone"}
_CONVERTS = {"float", "int", "tensor", "as_tensor", "asarray", "array"}
_OF_TOKENS = {"chunk", "unbind", "split", "tensor_split", "view_as_complex", "unflatten", "array_split"}
_WEAK = {"half", "like"}
_SIDES = ("frames", "height", "width")
# The roles by use, the surest first, each with its names in `words` and in `construct`.
ROLES = {
    "config": ("config",),
    "base": ("base",),
    **{side: (side,) for side in (*_SIDES, "latent")},
    "sides": ("grid",),
    "head_size": ("head_size", "dim"),
    "num_heads": ("num_heads", "heads"),
    "embed_dim": ("embed_dim",),
    "dim": ("dim", "rotary_dim", "channels"),
    "angles": ("freqs_cis",),
    "positions": ("positions",),
    "offset": ("offset",),
    "length": ("length", "seq_len"),
    "tokens": ("q", "k"),
    "table": (),  # one of cos and sin, or of both, which the other parameters say
    "cos": ("cos",),
    "sin": ("sin",),
    "half": ("dim", "rotary_dim", "channels", "head_size"),  # what a fraction is taken of
    "like": ("x",),  # of which only the shape, the dtype or the device is read
}


def roles(called: Any) -> Mapping[str, str]:
    """Return the roles, keys of `ROLES`, of those parameters of a function or class whose use in its code says it."""
    owner: Any = inspect.unwrap(called.func if isinstance(called, partial) else called)
    if not inspect.isclass(owner) and not inspect.isfunction(owner):
        owner = getattr(owner, "__func__", type(owner).__call__)
    is_python = inspect.isclass(owner) or inspect.isfunction(owner)
    return _read(owner) if is_python else {}


@cache
def _read(owner: Any) -> Mapping[str, str]:
    of_class = [getattr(f, "__func__", f) for f in vars(owner).values()] if inspect.isclass(owner) else [owner]
    functions = sorted(filter(inspect.isfunction, of_class), key=lambda f: f.__name__ != "__init__")
    try:
        known = [name for name in inspect.signature(owner).parameters if name not in ("self", "ctx")]
    except (TypeError, ValueError):
        return {}
    attributes: dict[str, tuple[str, ...]] = {f"self.{name}": (name,) for name in known if is_dataclass(owner)}
    use = _Uses(attributes, {})
    for function in functions:
        with contextlib.suppress(OSError, TypeError, ValueError, SyntaxError, RecursionError):  # it cannot be read
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            kind = ast.Lambda if function.__name__ == "<lambda>" else ast.FunctionDef
            node, *others = (part for part in ast.walk(tree) if isinstance(part, kind))
            is_init = function is owner or function.__name__ == "__init__"
            use.stands_for = {**attributes, **({name: (name,) for name in known} if is_init else {})}
            use.scope = function.__globals__
            use.owner = use.scope.get(function.__qualname__.rpartition(".")[0])
            if not others or kind is ast.FunctionDef:  # and not one of several in a line
                use.generic_visit(node)
            attributes |= {name: of for name, of in use.stands_for.items() if name.startswith("self.")}
    return use.said(known)


class _Uses(ast.NodeVisitor):
    """Collects uses of parameters in the code of functions, in the order in which it runs."""

    def __init__(self, stands_for: dict[str, tuple[str, ...]], scope: Mapping[str, Any]) -> None:
        self.stands_for = stands_for  # variable → the parameters that it stands for, followed by "/2" if it is a half
        self.scope = scope
        self.owner: Any = None  # the class of which it is a method
        self.inner: dict[str, tuple[list[str], Mapping[str, str]]] = {}  # function in it → parameters, and their roles
        self.found: dict[str, set[str]] = {}
        self.factors: list[tuple[str, set[str]]] = []  # parameter, and those of which its factor is made
        self.made_of: dict[str, set[str]] = {}
        self.part_of: dict[str, ast.expr] = {}  # variable → what was assigned to it and to others
        self.counted: set[str] = set()  # variables that are the result of `arange`
        self.calls: set[str] = set()

    def said(self, known: list[str]) -> dict[str, str]:
        """Return the roles of these parameters."""
        sizes = {name for name, of in self.found.items() if of - _WEAK - {"tokens"}}
        for name, others in self.factors:
            if self.found.get(name, set()) <= _WEAK:
                self.found[name] = {"table" if others - sizes - {name} else "positions"}
        roles = {name: min(self.found[name], key=[*ROLES].index) for name in known if name in self.found}
        if (lengths := [name for name, role in roles.items() if role == "length"])[1:] or "meshgrid" in self.calls:
            roles |= zip(lengths[-3:], _SIDES[-len(lengths) :], strict=False)
        tables = [name for name in known if roles.get(name) == "table"]
        if len(tables) == 2 and [name[0].lower() for name in tables] == ["c", "s"]:
            roles |= zip(tables, ("cos", "sin"), strict=True)
        return {name: role for name, role in roles.items() if self.found[name] != {"dim", "length"}}  # half of them

    def _of(self, node: ast.AST) -> tuple[str, ...]:
        """Return the parameters that an expression may stand for."""
        if isinstance(node, ast.Name | ast.Attribute) and (known := self.stands_for.get(ast.unparse(node))):
            return known
        if isinstance(node, ast.Call):
            of = self._of(node.func.value) if isinstance(node.func, ast.Attribute) and _name(node) in _SAME else ()
            return of or (self._of(node.args[0]) if node.args and _name(node) in _CONVERTS else ())
        if isinstance(node, ast.Subscript):
            is_part = any(isinstance(part, ast.Slice) and ast.unparse(part) != ":" for part in _parts(node))
            return () if is_part or isinstance(node.slice, ast.Constant) else self._of(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and ast.unparse(node.right) == "2":
            return tuple(f"{name}/2" for name in self._of(node.left) if "/" not in name)
        return ()

    def _whole(self, part: ast.expr) -> list[ast.expr]:
        """Return what was assigned to a variable and to others, as in `rows, columns = sides`."""
        return [self.part_of[name]] if (name := ast.unparse(part)) in self.part_of else []

    def _is(self, role: str, *nodes: ast.AST) -> None:
        for name in (name for node in nodes for name in self._of(node)):
            if "/" not in name:
                self.found.setdefault(name, set()).add(role)

    def _counts(self, node: ast.AST) -> bool:
        """Return whether an expression is the result of `arange`."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _name(node) in _SAME:
            return self._counts(node.func.value)
        if isinstance(node, ast.Subscript):
            return self._counts(node.value)
        return (isinstance(node, ast.Call) and _name(node) == "arange") or ast.unparse(node) in self.counted

    def _sources(self, node: ast.AST) -> set[str]:
        """Return the parameters of whose elements an expression is made."""
        of = node.attr if isinstance(node, ast.Attribute) else node.arg if isinstance(node, ast.keyword) else ""
        if of in ("shape", "device", "dtype"):
            return set()
        if isinstance(node, ast.Call) and _name(node) in ("to", "type", "type_as", "astype", "len", "size"):
            return set() if _name(node) in ("len", "size") else self._sources(node.func)
        name = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        found = {*self.stands_for.get(name, ()), *self.made_of.get(name, ())}
        return {of.removesuffix("/2") for of in found}.union(*map(self._sources, ast.iter_child_nodes(node)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        names = [argument.arg for argument in node.args.args]
        inner = _Uses({**self.stands_for, **{name: (name,) for name in names}}, self.scope)
        inner.inner = self.inner
        inner.generic_visit(node)
        self.inner[node.name] = names, inner.said(names)
        for name, of in inner.found.items():
            if name not in names:
                self.found.setdefault(name, set()).update(of)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is None:
            return
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self._assign(target, node.value)

    visit_AnnAssign = visit_Assign  # noqa: N815

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, of in zip(target.elts, value.elts, strict=True):
                self._assign(one, of)
            return
        made_of = self._sources(value)
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            self.made_of[ast.unparse(one)] = made_of
            self.part_of.pop(ast.unparse(one), None)
        if isinstance(target, ast.Tuple):
            self.part_of |= dict.fromkeys(map(ast.unparse, target.elts), value)
        self.stands_for[ast.unparse(target)] = self._of(value)
        (self.counted.add if self._counts(value) else self.counted.discard)(ast.unparse(target))
        if isinstance(value, ast.Name) and ast.unparse(target) in ("(cos, sin)", "(sin, cos)"):
            self._is("table", value)
        if isinstance(value, ast.Attribute) and value.attr == "shape" and len(getattr(target, "elts", ())) > 2:
            is_latent = re.search(r"h(eight)?, w(idth)?\)$|w(idth)?, h(eight)?\)$", ast.unparse(target).lower())
            self._is("latent" if is_latent else "tokens", value.value)

    def visit_comprehension(self, node: ast.comprehension | ast.For) -> None:
        if isinstance(node.iter, ast.Tuple | ast.List):  # such as (q, k)
            self.stands_for[ast.unparse(node.target)] = tuple(of for each in node.iter.elts for of in self._of(each))
        self.generic_visit(node)

    visit_For = visit_comprehension  # noqa: N815

    def _visit_generators_first(self, node: Any) -> None:
        for generator in node.generators:
            self.visit(generator)
        self.generic_visit(node)

    visit_ListComp = visit_GeneratorExp = visit_DictComp = _visit_generators_first  # noqa: N815

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        left, right = node.left, node.right
        if isinstance(node.op, ast.Pow) and not isinstance(right, ast.Constant):
            self._power(left, right)
        for one, other in ((left, right), (right, left)):
            if isinstance(node.op, ast.Add) and self._counts(one):
                self._is("offset", other)
            elif isinstance(node.op, ast.Mult) and self._whole(one) and self._whole(one) == self._whole(other):
                self._is("sides", *self._whole(one))
            elif isinstance(node.op, ast.Mult | ast.MatMult):
                sources = {*self._of(one)} or self._sources(one)
                others = self._sources(other)
                self.factors += [(name, others) for name in sources if len(sources) == 1 and others != sources]
            elif isinstance(node.op, ast.FloorDiv) and one is left and isinstance(right, ast.Constant):
                self._is("half", left)
            elif isinstance(node.op, ast.FloorDiv) and one is left and self._of(right):
                self._is("embed_dim", left)
                self._is("num_heads", right)
            elif isinstance(node.op, ast.Mod) and one is left:  # the column of a token
                self._is("width", right)

    def _power(self, base: ast.AST, exponent: ast.AST) -> None:
        if isinstance(base, ast.BinOp) and isinstance(base.op, ast.Div) and isinstance(base.left, ast.Constant):
            base = base.right
        self._is("base", base)
        for part in ast.walk(exponent):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div):
                self._is("dim", part.right)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if node.attr in ("device", "dtype", "shape"):
            self._is("like", node.value)
        elif not any(hasattr(array, node.attr) for array in (torch.Tensor, np.ndarray)):
            self._is("config", node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        first, *others = _parts(node)
        self._is("positions", first, *others)
        if isinstance(first, ast.Slice):
            self._is(*(("offset", first.lower) if first.lower else ("length", first.upper or first)))
        is_part = any(isinstance(part, ast.Slice) and ast.unparse(part) != ":" for part in others)
        is_of_channels = is_part and (ast.unparse(first) == "..." or len(others) > 2)
        if isinstance(node.ctx, ast.Store) or is_of_channels:
            self._is("tokens", node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name, arguments = _name(node), node.args
        self.calls.add(name)
        inner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        first = inner if inner and self._of(inner[0]) else arguments[:1]
        if name in ("arange", "range") and arguments:
            self._counted(arguments)
        elif name in ("pow", "power") and arguments:
            base, exponent = ([*inner, *arguments] if len(arguments) == 1 else arguments)[:2]
            if not isinstance(exponent, ast.Constant):
                self._power(base, exponent)
        elif name == "exp":
            logs = [part for part in ast.walk(node) if isinstance(part, ast.Call) and _name(part) == "log"]
            self._is("base", *(part.args[0] for part in logs if part.args))
        elif name in ("cos", "sin"):
            self._is("angles", *first)
        elif name in ("outer", "einsum", "index_select", "embedding", "gather", "take"):
            self._is("positions", *arguments)
        elif name in ("view", "reshape") and len(arguments) > 2:  # such as x.view(batch, -1, heads, channels)
            if ast.unparse(arguments[-2]) == "1":  # of tables
                return
            self._is("head_size", arguments[-1])
            self._is("num_heads", arguments[-2])
        elif name in _OF_TOKENS:
            self._is("tokens", *first)
        else:
            names, known = self.inner.get(name) or _of_function(self._called(node))
            passed = dict(zip(names, arguments, strict=False)) | {k.arg: k.value for k in node.keywords if k.arg}
            for parameter, role in known.items():
                if parameter in passed:
                    self._is(role, passed[parameter])
                    self._is("sides", *(self._whole(passed[parameter]) if role in (*_SIDES, "length") else ()))
            if "rotat" in name and known.get(names[0] if names else "", "like") in _WEAK:
                self._is("tokens", *first)

    def _called(self, node: ast.Call) -> Any:
        """Return the function of the same file that is called, if any: also the forward of one with a gradient."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "apply":
            return getattr(self.scope.get(ast.unparse(node.func.value)), "forward", None)
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self":
            return getattr(self.owner, node.func.attr, None)
        return self.scope.get(_name(node))

    def _counted(self, arguments: list[ast.expr]) -> None:
        """Note what numbers are counted to: a number of channels in steps of 2 or to its half, or of tokens."""
        end = arguments[min(1, len(arguments) - 1)]
        if len(arguments) == 3 and ast.unparse(arguments[2]) == "2":
            for name in self._of(end):
                self.found.setdefault(name.removesuffix("/2"), set()).add("head_size" if "/" in name else "dim")
        elif len(arguments) == 2 and isinstance(end, ast.BinOp) and isinstance(end.op, ast.Add):
            self._is("offset", arguments[0])
            self._is("length", end.right, end.left)
        elif isinstance(end, ast.BinOp) and isinstance(end.op, ast.Mult) and self._of(end.left) and self._of(end.right):
            self._is("height", end.left)
            self._is("width", end.right)
        else:
            for name in self._of(end):
                self.found.setdefault(name.removesuffix("/2"), set()).add("dim" if "/" in name else "length")
            self._is("sides", *self._whole(end))


def _of_function(function: Any) -> tuple[list[str], Mapping[str, str]]:
    """Return the parameters of a function, and their roles."""
    if not inspect.isfunction(function):
        return [], {}
    return [name for name in inspect.signature(function).parameters if name not in ("self", "ctx")], _read(function)


def _parts(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) and node.slice.elts else [node.slice]


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
