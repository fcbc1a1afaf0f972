"""How the tensors of a call are passed to a target, and where its results are read: one `Form` for each way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.signature import FUSED, Call, accept_keywords
from ropewalk.tools.check.find.subject import CallError, Results, Stored, from_layout, to_layout

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
        rotary_dim: the number of rotated channels.
        interleaved: whether the pairing is interleaved, for a parameter that chooses it. None keeps its default.
        inv_freq: the radians per token of each pair, for a parameter that takes them.
        base: the base, for a parameter without default that takes it.
    """

    function: Callable[..., Any]
    call: Call
    layout: str
    packing: str = "each"
    in_place: bool = False
    cache: str = ""
    slots_of_rows: bool = False
    keys_from_cache: bool = False
    rotary_dim: int = 64
    interleaved: bool | None = None
    inv_freq: Tensor | None = None
    base: float = 10_000.0

    @property
    def has_k(self) -> bool:
        """Whether q and k are rotated together."""
        return bool({"k", "qkv"} & {*self.call.parameter_of})

    @property
    def is_fused(self) -> bool:
        """Whether the call does more than to take q and k, or x, and to return them."""
        call = self.call
        return bool(FUSED & {*call.parameter_of}) or bool(call.results) or self.packing == "flat" or self._has_outs

    @property
    def _has_outs(self) -> bool:
        return "q_out" in self.call.parameter_of and "q_out" not in self.call.optional

    @property
    def takes(self) -> frozenset[str]:
        """What can be passed besides q, k and positions: "v", "slots", "weights", and "stack" of q, k and v."""
        roles = {*self.call.parameter_of}
        named = {"v": {"v", "qkv", "kv"}, "slots": {"key_cache"}, "weights": {"q_weight"}}
        stack = {"stack"} if self.packing == "stacked" else set()
        return frozenset({name for name, of in named.items() if of & roles} | stack)

    @property
    def packed(self) -> str:
        """What to add to the layout in the report."""
        told = {"flat": "heads and channels in one axis", "heads": "", "stacked": "stacked before the heads"}
        return ", ".join(text for text in (told.get(self.packing, ""), self.cache and f"cache [{self.cache}]") if text)

    def keywords(self, q: Tensor, k: Tensor | None) -> dict[str, Any]:
        """Return the arguments for q and k of a call that is not fused."""
        roles = self.call.parameter_of
        return ({roles["q"]: q, roles["k"]: k} if "k" in roles else {roles["x"]: q}) | self._options(q, k)

    def _options(self, q: Tensor, k: Tensor | None) -> dict[str, Any]:
        """Return the sizes and switches that the function has parameters for, and the values that the user stated."""
        call, heads = self.call, -3 if self.layout in ("bhsd", "hsd") else -2
        k_heads = (q if k is None else k).shape[heads]
        values: dict[str, Any] = {
            "head_size": q.shape[-1],
            "rotary_dim": self.rotary_dim,
            "num_heads": q.shape[heads],
            "num_kv_heads": k_heads,
            "num_v_heads": k_heads,
            "eps": EPS,
            "tensor_layout": self.layout,
        }
        values |= {} if self.interleaved is None else {"interleaved": self.interleaved, "is_neox": not self.interleaved}
        required: dict[str, Any] = {"interleaved": False, "is_neox": True, "inplace": self.in_place, "conjugate": False}
        required |= {"inv_freq": self.inv_freq, "base": self.base, "scale": 1.0}
        values |= {role: value for role, value in required.items() if role not in values | dict.fromkeys(call.optional)}
        return {call.parameter_of[role]: value for role, value in values.items() if role in call.parameter_of} | dict(
            call.literals
        )

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
        tensors = self._tensors(q, k, v)
        values = {**tensors} | dict(zip(("q_weight", "k_weight"), weights or (), strict=False))
        tokens = from_layout(self.layout, key, rows)
        slots = 2 * torch.arange(tokens[..., 0, 0].numel()).flip(0).view(rows, -1) + 1 if slots is None else slots
        caches: list[Tensor] = []
        if self.cache:
            n = _PAGE * (1 + max(int(slots.max()), slots.numel()) // _PAGE + 1)
            cache = _CACHES[self.cache][0](torch.full((n, *tokens.shape[2:]), _EMPTY).to(q.dtype)).contiguous()
            in_one = halves and "blocks" in self.cache
            caches = [*torch.stack((cache, cache), dim=1).unbind(1)] if in_one else [cache, cache.clone()]
            values |= dict(zip(("key_cache", "value_cache"), caches, strict=True))
            values["slots"] = slots if self.slots_of_rows else slots.flatten()
        passed = {roles[role]: value for role, value in values.items() if role in roles}
        returned = memory.call(self.function, passed | self._options(q, k) | angles)
        found = self._read(returned, tensors, q, k, v)
        stored = self._stored(caches, tokens, slots) if self.cache else None
        if stored is not None and self.keys_from_cache:
            found["k"] = to_layout(self.layout, stored.keys[slots])
        results = [found["q"], found["k"] if k is not None else None]
        for i, size in enumerate(sizes):
            if (result := results[i]) is not None:
                results[i] = (result * size).to(result.dtype)
        return Results(found["q"] if results[0] is None else results[0], results[1], found.get("v"), stored)

    def _tensors(self, q: Tensor, k: Tensor | None, v: Tensor) -> dict[str, Tensor]:
        """Return the tensors to pass for q, k and v, and those for their results, by role."""
        roles = self.call.parameter_of
        if "qkv" in roles:
            return {"qkv": self._join([q, q if k is None else k, v])}
        if "kv" in roles:
            return {"kv": self._join([q, v])}
        named = {"q": q, "k": k} if "k" in roles else {"x": q}
        if "x1" in roles:
            half = q.shape[-1] // 2
            named = {"x1": q[..., :half], "x2": q[..., half:]}
        outs = dict(zip(("q_out", "k_out"), named.values(), strict=False))
        tensors = {role: self._flat(x) for role, x in (named | {"v": v}).items() if x is not None and role in roles}
        return tensors | {
            role: torch.full_like(self._flat(x), torch.nan)
            for role, x in outs.items()
            if x is not None and role in roles and role not in self.call.optional
        }

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

    def _read(
        self, returned: Any, tensors: dict[str, Tensor], q: Tensor, k: Tensor | None, v: Tensor
    ) -> dict[str, Any]:
        """Return the results for q, k and v by role, from what is returned or from the tensors that were passed."""
        values = [*returned] if isinstance(returned, (list, tuple)) else [returned]
        found: dict[str, Any] = {**tensors}
        joined = {"qkv", "kv"} & {*tensors}
        if self.call.results is not None:
            found |= zip(self.call.results, [] if returned is None else values, strict=False)
        elif not self.in_place and "q_out" not in tensors:
            if not isinstance(values[0], Tensor):
                raise CallError("wrong-shape", f"it returns {_checks.shown(returned)}")
            if joined and values[0].shape == tensors[next(iter(joined))].shape:
                found |= zip(joined, values, strict=False)
            else:
                names = ("q", "k", "v") if self.has_k else ("x1", "x2") if "x1" in tensors else ("x",)
                if self.has_k and len(values) < 2 and not self.keys_from_cache:
                    raise CallError("wrong-shape", "it returns one tensor for q and k")
                found |= zip(names, values, strict=False)
        found |= {role: found[out] for role, out in self._outs(tensors).items()}
        if "qkv" in found and "q" not in found:
            found |= zip("qkv", self._split(found["qkv"], [q, q if k is None else k, v]), strict=True)
        if "kv" in found and "x" not in found:
            found |= zip("xv", self._split(found["kv"], [q, v]), strict=True)
        if "x1" in found and "x" not in found:
            found["x"] = torch.cat((found["x1"], found["x2"]), dim=-1)
        if not self.has_k:
            found["q"] = found["x"]
        shapes = {"q": q, "k": k, "v": v}
        return {
            role: found[role].reshape(like.shape) if self.packing == "flat" else found[role]
            for role, like in shapes.items()
            if like is not None and role in found
        }

    def _outs(self, tensors: dict[str, Tensor]) -> dict[str, str]:
        """Map each role of a result to the role of the tensor that it is written to."""
        names = ("x1", "x2") if "x1" in tensors else ("q", "k") if self.has_k else ("x",)
        return {role: out for role, out in zip(names, ("q_out", "k_out"), strict=False) if out in tensors}

    def _stored(self, caches: list[Tensor], tokens: Tensor, slots: Tensor) -> Stored:
        read = _CACHES[self.cache][1]
        like = torch.full((caches[0].numel() // tokens.shape[2:].numel(), *tokens.shape[2:]), _EMPTY).to(tokens.dtype)
        keys, values = (read(cache, like) for cache in caches)
        has_values = "value_cache" in self.call.parameter_of
        return Stored(slots, like, keys, like if has_values else None, values if has_values else None)


def _sizes(x: Tensor) -> Tensor:
    """Return the size of each head, with which a norm divides it. Return 1 for a head of zeros."""
    size = x.detach().float().square().mean(-1, keepdim=True).sqrt()
    return torch.where(size == 0, 1.0, size)


def forms(call: Call, layout: str, function: Callable[..., Any], **fixed: Any) -> Iterator[Form]:
    """Yield the ways to pass tensors to a function, and to read its results, the most likely first."""
    roles = {*call.parameter_of}
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
        for by_row, from_cache, in_place in product(rows, (False, True) if stored else (False,), written):
            yield Form(by_name, call, layout, packing, in_place, cache, by_row, from_cache, **fixed)


def _writes(function: Callable[..., Any], call: Call) -> tuple[bool, bool]:
    """Return whether a function writes its results into what it is passed: first what its name says, then the other."""
    name = getattr(function, "__name__", type(function).__name__).lower()
    says = name.endswith("_") or "inplace" in name or "in_place" in name
    stated = call.literals.get(call.parameter_of.get("inplace", "inplace"))
    first = says if stated is None else bool(stated)
    return first, not first
