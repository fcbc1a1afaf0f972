"""How the tensors of a call are passed to a target, and where its results are read: one `Form` for each way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.memory import CallError
from ropewalk.tools.check.find.signature import FUSED, Call, accept_keywords

LAYOUTS = ("bshd", "bhsd", "sbhd", "thd", "hsd")
"""The layouts that are tried: those of ropewalk, and "hsd", in which all heads of the batch share one axis."""

ONE_HEAD = "td"
"""The layout that is tried if no other can be called: the tokens of one head, so that each head needs a call."""

ONE_ROW = ("thd", ONE_HEAD)
"""The layouts without an axis for the rows of a batch."""

EPS = 1e-6
"""The eps that is passed to a norm."""

_PAGE = 16  # slots of one block of a paged cache
_EMPTY = 99.0  # what is in every slot before the call

# Axes of a cache → how it is made from [slots, heads, channels], and how that is read from it.
_CACHES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "slots, heads, channels": (lambda t: t, lambda t, like: t),
    "slots, heads · channels": (lambda t: t.flatten(1), lambda t, like: t.view_as(like)),
    "blocks, slots, heads, channels": (lambda t: t.view(-1, _PAGE, *t.shape[1:]), lambda t, like: t.flatten(0, 1)),
    "blocks, heads, slots, channels": (
        lambda t: t.view(-1, _PAGE, *t.shape[1:]).transpose(1, 2),
        lambda t, like: t.transpose(1, 2).flatten(0, 1),
    ),
}


@dataclass(frozen=True)
class Stored:
    """The caches of a call that stores k and v of each token in a slot.

    Args:
        slots: the slot of each token, int64 `[batch, seq]`. A token with slot -1 must not be stored.
        keys_before, keys: the keys in all slots before and after the call, `[slots, heads, head_dim]`.
        values_before, values: the same for the values, or None if the target stores none.
    """

    slots: Tensor
    keys_before: Tensor
    keys: Tensor
    values_before: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class Results:
    """What a fused call computes: q, k and v `[batch, seq, heads, head_dim]`, or None for each that it lacks."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None = None
    stored: Stored | None = None


@dataclass(frozen=True)
class Form:
    """One way to pass tensors to a function and to read its results.

    Args:
        function: the function, all of whose parameters can be passed by name.
        call: the roles of its parameters.
        layout: the layout of q and k.
        packing: "each" passes q and k, or x, as they are. "flat" joins the axes of heads and channels. For q, k and v
            in one tensor, "heads" joins them along the heads, and "stacked" along a new axis before the heads.
        in_place: whether the results are read from the tensors that were passed.
        cache: the axes of the caches, a key of `_CACHES`, or "".
        slots_of_rows: whether slots are passed as `[batch, seq]` instead of `[tokens]`.
        keys_from_cache: whether the result for k is read from the cache.
        known, required: by role, what is passed to parameters with that role, and what only if they have no default.
        key_head: "kept" or "dropped" if the function takes one head of k, with an axis of its own or without. It is
            then called once for each head of k, and with q the first time and one head of it from then on.
        of_all_heads: whether a norm is taken over all heads together, and has a weight for each channel of each.
        added: what the function adds to the weights of its norms of q and of k, such as 1 in Gemma.
        eps: what is passed to a norm.
    """

    function: Callable[..., Any]
    call: Call
    layout: str
    packing: str = "each"
    in_place: bool = False
    cache: str = ""
    slots_of_rows: bool = False
    keys_from_cache: bool = False
    known: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    key_head: str = ""
    of_all_heads: bool = False
    added: tuple[float, float] = (0.0, 0.0)
    eps: float = EPS

    @property
    def has_k(self) -> bool:
        """Whether q and k are rotated together."""
        return bool({"k", "qkv"} & {*self.call.parameter_of})

    @property
    def is_fused(self) -> bool:
        """Whether the call does more than to take q and k, or x, and to return them."""
        roles, call = {*self.call.parameter_of}, self.call
        return bool((FUSED | {"q_out"} - call.optional) & roles or call.results) or self.packing == "flat"

    @property
    def _outs(self) -> dict[str, str]:
        """The role of each result that is written to a tensor that the function requires, and the role of that."""
        required = {*self.call.parameter_of} - self.call.optional
        return {role: out for role, out in zip(self._names, ("q_out", "k_out"), strict=False) if out in required}

    @property
    def takes(self) -> frozenset[str]:
        """What a fused call takes besides q, k and positions: "v", "slots", "weights" (of its norm)."""
        roles = {*self.call.parameter_of}
        named = {"v": {"v", "qkv", "kv"}, "slots": {"key_cache"}, "weights": {"q_weight"}}
        return frozenset(name for name, of in named.items() if of & roles and not self.key_head)

    @property
    def packed(self) -> str:
        """What to add to the call in the report."""
        told = {"flat": "heads and channels in one axis", "stacked": "stacked before the heads"}
        texts = told.get(self.packing), self.cache and f"cache [{self.cache}]", self.key_head and "one head of k"
        return "".join(f", {text}" for text in texts if text)

    @property
    def heads_axis(self) -> int:
        """The axis of the heads in q and k."""
        return -3 if self.layout in ("bhsd", "hsd") else -2

    @property
    def _names(self) -> tuple[str, ...]:
        """The roles of the tensors that are rotated, and of their results, unless they are joined."""
        return ("q", "k") if self.has_k else ("x1", "x2") if "x1" in self.call.parameter_of else ("x",)

    def _options(self, q: Tensor, k: Tensor) -> dict[str, Any]:
        """Return the sizes and switches that the function has parameters for, and the values that the user stated."""
        call, k_heads = self.call, k.shape[self.heads_axis]
        values: dict[str, Any] = {
            "head_size": q.shape[-1],
            "num_heads": q.shape[self.heads_axis],
            "num_kv_heads": k_heads,
            "num_v_heads": k_heads,
            "eps": self.eps,
            "tensor_layout": self.layout,
        }
        required = {"inplace": self.in_place, **self.required}
        values |= {role: value for role, value in required.items() if role not in call.optional} | {**self.known}
        return {name: values[role] for role, name in call.parameter_of.items() if role in values} | call.literals

    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        angles: dict[str, Any],
        rows: int,
        *,
        v: Tensor | None = None,
        slots: Tensor | None = None,
        weights: tuple[Tensor, Tensor] | None = None,
        halves: bool = False,
    ) -> Results:
        """Call the function with q, k and v in its layout, and return its results in that layout.

        Without `weights`, a norm is passed weights of 1, and without `slots` heads of size 1, which it does not change.
        Then the results are those of the rotation alone.

        Args:
            q, k, v: the tensors, in the target's layout.
            angles: the arguments for positions and tables.
            rows: the number of rows of the batch.
            slots: the slot of each token, `[batch, seq]`.
            weights: the weights of the norms of q and k.
            halves: whether both caches are parts of one tensor, in which they follow each other in each block. This
                does not affect caches without blocks.

        Raises:
            CallError: the function returns something else than its form says.
        """
        if self.key_head and k is not None:
            return self._run_for_each_key_head(q, k, angles, rows)
        if self.layout == ONE_HEAD and q.ndim == 3:
            return self._run_for_each_head(q, k, angles)
        roles = self.call.parameter_of
        sizes: list[Tensor] = []
        if "q_weight" in roles and weights is None:
            weights = (torch.ones(q.shape[-1], dtype=q.dtype),) * 2
            if slots is None:
                sizes = [_sizes(x) for x in (q, k) if x is not None]
                q = (q / sizes[0]).to(q.dtype)
                k = None if k is None else (k / sizes[1]).to(k.dtype)
        key = q if k is None else k
        v = torch.cos(torch.arange(key.numel())).view(key.shape).to(key.dtype) if v is None else v
        tensors = self._tensors(q, key, v)
        values = {**tensors}
        of_norms = zip(("q_weight", "k_weight"), weights or (), self.added, (q, key), strict=False)
        for role, weight, added, x in of_norms:
            heads = x.shape[self.heads_axis] if self.of_all_heads else 1
            values[role] = (weight - added).repeat(heads)
        caches: list[Tensor] = []
        if self.cache:
            tokens = from_layout(self.layout, key, rows)
            slots = 2 * torch.arange(tokens[..., 0, 0].numel()).flip(0).view(rows, -1) + 1 if slots is None else slots
            n = _PAGE * (1 + max(int(slots.max()), slots.numel()) // _PAGE + 1)
            cache = _CACHES[self.cache][0](torch.full((n, *tokens.shape[2:]), _EMPTY).to(q.dtype)).contiguous()
            in_one = halves and "blocks" in self.cache
            caches = [*torch.stack((cache, cache), dim=1).unbind(1)] if in_one else [cache, cache.clone()]
            values |= dict(zip(("key_cache", "value_cache"), caches, strict=True))
            values["slots"] = slots if self.slots_of_rows else slots.flatten()
        passed = {roles[role]: value for role, value in values.items() if role in roles}
        returned = memory.call(self.function, passed | self._options(q, key) | angles)
        found, stored = self._read(returned, tensors, q, key, v), None
        if slots is not None and self.cache:
            stored = self._stored(caches, tokens, slots)
            found["k"] = to_layout(self.layout, stored.keys[slots]) if self.keys_from_cache else found["k"]
        for role, size in zip("qk", sizes, strict=False):
            found[role] = (found[role] * size).to(found[role].dtype)
        return Results(found["q"], None if k is None else found["k"], found.get("v"), stored)

    def _run_for_each_key_head(self, q: Tensor, k: Tensor, angles: dict[str, Any], rows: int) -> Results:
        one, axis, keeps = replace(self, key_head=""), self.heads_axis, self.key_head == "kept"
        results, keys = [], []
        for i in range(k.shape[axis]):
            head, key = q.narrow(axis, 0, 1).clone() if i else q, k.narrow(axis, i, 1)
            results.append(one.run(head, key if keeps else key.squeeze(axis), angles, rows))
            k_out = cast(Tensor, results[-1].k)
            keys.append(k_out if keeps else k_out.unsqueeze(axis))
        return Results(results[0].q, torch.cat(keys, dim=axis))

    def _run_for_each_head(self, q: Tensor, k: Tensor | None, angles: dict[str, Any]) -> Results:
        """Call the function with each head of q and k, `[heads, tokens, channels]`. A head of k may be repeated."""
        n = max(len(x) for x in (q, k) if x is not None)
        queries, keys = (
            [None if x is None else x[i] if i < len(x) else x[-1].clone() for i in range(n)] for x in (q, k)
        )
        results = [self.run(cast(Tensor, one), key, angles, 1) for one, key in zip(queries, keys, strict=True)]
        k_out = None if k is None else torch.stack([cast(Tensor, each.k) for each in results[: len(k)]])
        return Results(torch.stack([each.q for each in results[: len(q)]]), k_out)

    def _tensors(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Return the tensors to pass for q, k and v, and those for their results, by role."""
        roles, half = self.call.parameter_of, q.shape[-1] // 2
        joined = {"qkv": [q, k, v], "kv": [q, v]}
        named = {"q": q, "k": k, "v": v, "x": q, "x1": q[..., :half], "x2": q[..., half:]}
        tensors = {role: self._join(parts) for role, parts in joined.items() if role in roles}
        tensors |= {role: self._flat(named[role]) for role in (*self._names, "v") if role in roles}
        outs = {out: torch.full_like(self._flat(named[role]), torch.nan) for role, out in self._outs.items()}
        return tensors | outs

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(-2) if self.packing == "flat" else x

    def _join(self, parts: list[Tensor]) -> Tensor:
        axis = self.layout.index("h")
        if self.packing == "stacked" and all(x.shape == parts[0].shape for x in parts):
            return torch.stack(parts, dim=axis)
        return self._flat(torch.cat(parts, dim=axis))

    def _split(self, joined: Tensor, parts: list[Tensor]) -> list[Tensor]:
        axis = self.layout.index("h")
        if joined.ndim > parts[0].ndim:
            return list(joined.unbind(axis))
        heads = joined.reshape(*joined.shape[:-1], -1, parts[0].shape[-1]) if self.packing == "flat" else joined
        return list(torch.split(heads, [x.shape[axis] for x in parts], dim=axis))

    def _read(self, returned: Any, tensors: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """Return the results for q, k and v by role, from what is returned or from the tensors that were passed."""
        values = [*returned] if isinstance(returned, (list, tuple)) else [returned]
        found: dict[str, Any] = {**tensors}
        if self.call.results is not None:
            found |= zip(self.call.results, [] if returned is None else values, strict=False)
        elif not self.in_place and not self._outs:
            if not values or not isinstance(values[0], Tensor):
                raise CallError("wrong-shape", f"it returns {_checks.shown(returned)}")
            joined = [role for role in ("qkv", "kv") if role in tensors and tensors[role].shape == values[0].shape]
            if self.has_k and len(values) < 2 and not joined and not self.keys_from_cache:
                raise CallError("wrong-shape", "it returns one tensor for q and k")
            found |= zip(joined or (*self._names, *self.takes & {"v"}), values, strict=False)
        found |= {role: found[out] for role, out in self._outs.items()}
        if "qkv" in found and "q" not in found:
            found |= zip("qkv", self._split(found["qkv"], [q, k, v]), strict=True)
        if "kv" in found and "x" not in found:
            found |= zip("xv", self._split(found["kv"], [q, v]), strict=True)
        if "x1" in found and "x" not in found:
            found["x"] = torch.cat((found["x1"], found["x2"]), dim=-1)
        if not self.has_k:
            found["q"] = found["x"]
        results = {role: (found[role], like) for role, like in (("q", q), ("k", k), ("v", v)) if role in found}
        return {role: x.reshape(like.shape) if self.packing == "flat" else x for role, (x, like) in results.items()}

    def _stored(self, caches: list[Tensor], tokens: Tensor, slots: Tensor) -> Stored:
        read = _CACHES[self.cache][1]
        like = torch.full((caches[0].numel() // tokens.shape[2:].numel(), *tokens.shape[2:]), _EMPTY).to(tokens.dtype)
        keys, values = (read(cache, like) for cache in caches)
        has_values = "value_cache" in self.call.parameter_of
        return Stored(slots, like, keys, like if has_values else None, values if has_values else None)


def to_layout(layout: str, x: Tensor) -> Tensor:
    """Return a view of x `[batch, seq, heads, head_dim]` in a layout."""
    if layout in ONE_ROW:
        return x[0] if layout == "thd" else x[0].transpose(0, 1)
    native = x.permute(["bshd".index(axis) for axis in _axes(layout)])
    return native.flatten(0, 1) if layout == "hsd" else native


def from_layout(layout: str, x: Tensor, rows: int = 1) -> Tensor:
    """Return a view `[batch, seq, heads, head_dim]` of x, which has a layout."""
    if layout in ONE_ROW:
        return (x if layout == "thd" else x.transpose(0, 1))[None]
    split = x.reshape(rows, -1, *x.shape[1:]) if layout == "hsd" else x
    return split.permute([_axes(layout).index(axis) for axis in "bshd"])


def _axes(layout: str) -> str:
    return "bhsd" if layout == "hsd" else layout


def _sizes(x: Tensor) -> Tensor:
    """Return the size of each head, with which a norm divides it. Return 1 for a head of zeros."""
    size = x.detach().float().square().mean(-1, keepdim=True).sqrt()
    return torch.where(size == 0, 1.0, size)


def forms(call: Call, layout: str, function: Callable[..., Any], **fixed: Any) -> Iterator[Form]:
    """Yield the ways to pass tensors to a function, and to read its results, the most likely first."""
    roles = {*call.parameter_of}
    if layout == ONE_HEAD and FUSED & roles:
        return
    packings: tuple[str, ...] = ("each",)
    if {"qkv", "kv"} & roles:
        packings = ("flat", "heads", "stacked")
    elif {"head_size", "num_heads", "cos_sin_cache"} & roles:
        packings = ("each", "flat")
    caches = [*_CACHES] if {"key_cache", "slots"} <= roles else [""]
    stored = caches != [""] and {"k", "qkv"} & roles and "k" not in (call.results or ()) and call.results != ()
    written = (call.results == (),) if call.results is not None else _writes(function, call)
    by_name = accept_keywords(function)
    for packing, cache in product(packings, caches):
        if (packing in ("flat", "stacked") and not layout.endswith("hd")) or (packing != "each" and layout == "hsd"):
            continue
        rows = (False, True) if cache and "b" in layout else (False,)
        norms = (False, True) if "q_weight" in roles else (False,)
        for by_row, from_cache, in_place, joined in product(
            rows, (False, True) if stored else (False,), written, norms
        ):
            yield Form(
                by_name, call, layout, packing, in_place, cache, by_row, from_cache, of_all_heads=joined, **fixed
            )


def _writes(function: Callable[..., Any], call: Call) -> tuple[bool, bool]:
    """Return whether a function writes its results into what it is passed: first what its name says, then the other."""
    name = getattr(function, "__name__", type(function).__name__).lower()
    says = name.endswith("_") or "inplace" in name or "in_place" in name
    stated = call.literals.get(call.parameter_of.get("inplace", "inplace"))
    first = says if stated is None else bool(stated)
    return first, not first
