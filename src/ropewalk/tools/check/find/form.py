"""How the tensors of a call are passed to a target, and where its results are read: one `Form` for each way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache as compute_once
from itertools import product
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.tools.check.find import memory, words
from ropewalk.tools.check.find.memory import CallError
from ropewalk.tools.check.find.ways import ONE_HEAD, ONE_ROW, ONE_TOKEN, ONE_VECTOR
from ropewalk.tools.check.find.words import FUSED, Call, Roles, accept_keywords

LAYOUTS = ("bshd", "bhsd", "sbhd", "thd")
"""The layouts that are tried."""

ONE_KEY_HEAD = ("k_pe", "k_rope")
"""The names of k in latent attention, which has one head of it, of the rotated channels alone."""

EPS = 1e-6
"""The eps that is passed to a norm."""

_PAGE = 16  # slots of one block of a paged cache
_EMPTY = 99.0  # what is in every slot before the call

_HEADS_FIRST = "blocks, heads, slots, channels"
# Axes of a cache → how it is made from [slots, heads, channels].
_CACHES: dict[str, Callable[[Tensor], Tensor]] = {
    "slots, heads, channels": lambda t: t,
    "blocks, slots, heads, channels": lambda t: t.view(-1, _PAGE, *t.shape[1:]),
    "slots, heads · channels": lambda t: t.flatten(1),
    _HEADS_FIRST: lambda t: t.view(-1, _PAGE, *t.shape[1:]).transpose(1, 2).contiguous(),
}


@dataclass(frozen=True)
class Stored:
    """The caches of a call that stores k and v of each token in a slot."""

    slots: Tensor  # of each token, int64 `[batch, seq]`. A token with slot -1 must not be stored
    keys_before: Tensor  # in all slots, `[slots, heads, head_dim]`; so are the values before the call
    keys: Tensor
    values: Tensor | None = None  # None if the target stores none


@dataclass(frozen=True)
class Results:
    """What a fused call computes: q, k and v `[batch, seq, heads, head_dim]`, or None for each that it lacks."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None = None
    stored: Stored | None = None
    in_place: bool = False  # whether it returned nothing, so that these are what it has written into its arguments


@dataclass(frozen=True)
class Form:
    """One way to pass tensors to a function and to read its results.

    A function that returns None writes its results into what it is passed. With the packing "each", q and k, or x, are
    passed as they are. "flat" joins the axes of heads and channels. For q, k and v in one tensor, "heads" joins them
    along the heads, and "stacked" along a new axis before the heads. A function that takes one head of k (key_head) is
    called once for each, and with q the first time and one head of it from then on.
    """

    function: Callable[..., Any]  # all of whose parameters can be passed by name
    call: Call
    layout: str  # of q and k
    packing: str = "each"
    written: Mapping[str, str] = field(default_factory=dict)  # the arguments by role, as expressions of Python
    in_place: bool = False  # whether the results are in the tensors that were passed, as found out by a call
    cache: str = ""  # the axes of the caches, a key of `_CACHES`
    key_head: str = ""  # "kept" or "dropped": one head of k with an axis of its own, or without
    of_all_heads: bool = False  # whether a norm is taken over all heads, and has a weight for each channel of each
    added: tuple[float, float] = (0.0, 0.0)  # what is added to the weights of the norms of q and k, such as 1 in Gemma
    eps: float = EPS
    fixed: Mapping[str, Any] = field(default_factory=dict)  # the arguments of parameters without a role, by name
    dtype: torch.dtype = torch.float32  # of q and k, or one of 16 bits if the function takes no float32
    library: str | None = None  # of the arrays that the function takes in place of tensors

    @property
    def has_k(self) -> bool:
        """Whether q and k are rotated together."""
        return bool({"k", "qkv"} & {*self.call.parameter_of})

    @property
    def is_fused(self) -> bool:
        """Whether the call does more than to take q and k, or x, and to return them."""
        return bool((FUSED | {"q_out"}) & {*self.call.parameter_of}) or self.packing == "flat"

    @property
    def shares_norm(self) -> bool:
        """Whether q and k have the same weights of a norm."""
        return self.has_k and "q_weight" in self.call.parameter_of and "k_weight" not in self.call.parameter_of

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
        return "".join(f", {text}" for text in (*texts, self.library and f"arrays of {self.library}") if text)

    @property
    def heads_axis(self) -> int:
        """The axis of the heads in q and k."""
        return -3 if self.layout.startswith("bh") else -2

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
        past: tuple[Tensor, Tensor] | None = None,
    ) -> Results:
        """Call the function with q, k and v in its layout, and return its results in that layout.

        Without `weights`, a norm is passed weights of 1, and without `slots` heads of size 1, which it does not change.
        Then the results are those of the rotation alone.

        Args:
            angles: the arguments for positions and tables.
            rows: the number of rows of the batch.
            slots: the slot of each token, `[batch, seq]`.
            halves: whether both caches are parts of one tensor, in which they follow each other in each block. This
                does not affect caches without blocks.
            past: the keys and values of earlier tokens.
        """
        if self.key_head and k is not None:
            return self._run_for_each_key_head(q, k, angles, rows)
        roles = self.call.parameter_of
        sizes: list[Tensor] = []
        if "q_weight" in roles and weights is None:
            weights = (torch.ones(q.shape[-1], dtype=q.dtype),) * 2
            if slots is None:
                sizes = [_sizes_of_heads(x) / math.sqrt(1 - self.eps) for x in (q, k) if x is not None]
                q = (q / sizes[0]).to(q.dtype)
                k = None if k is None else (k / sizes[1]).to(k.dtype)
        key = q if k is None else k
        v = torch.cos(torch.arange(key.numel())).view(key.shape).to(key.dtype) if v is None else v
        values = self._tensors(q, key, v)
        of_norms = zip(("q_weight", "k_weight"), weights or (), self.added, (q, key), strict=False)
        for role, weight, added, x in of_norms:
            heads = x.shape[self.heads_axis] if self.of_all_heads else 1
            values = values | {role: (weight - added).repeat(heads)}
        caches: list[Tensor] = []
        if self.cache:
            tokens = from_layout(self.layout, key)
            slots = 2 * torch.arange(tokens[..., 0, 0].numel()).flip(0).view(rows, -1) + 1 if slots is None else slots
            n = _PAGE * (1 + max(int(slots.max()), slots.numel()) // _PAGE + 1)
            empty = torch.full((n, *tokens.shape[2:]), _EMPTY).to(q.dtype)
            cache = _CACHES[self.cache](empty.clone())
            in_one = halves and "blocks" in self.cache
            caches = [*torch.stack((cache, cache), dim=1).unbind(1)] if in_one else [cache, cache.clone()]
            values = values | dict(zip(("key_cache", "value_cache"), caches, strict=True))
            values["slots"] = slots if "b" in self.layout else slots.flatten()
        values = values | self._sizes(q, key)
        if past is not None or "past_k" in {*roles} - self.call.optional:
            tokens_axis = self.layout.index("t" if self.layout in ONE_ROW else "s") - len(self.layout)
            none = key.narrow(tokens_axis, 0, 0)
            values |= zip(("past_k", "past_v"), past or (none, none), strict=True)
        for role, expression in self.written.items():
            values[role] = eval(_code(expression), {"torch": torch}, values)
        passed = {roles[role]: value for role, value in values.items() if role in roles}
        returned = memory.call(self.function, {**self.fixed, **passed, **angles})
        found, stored = self._read(returned, values, q, key, v), None
        if slots is not None and self.cache:
            is_swapped = self.cache == _HEADS_FIRST
            keys, vs = ((c.transpose(1, 2) if is_swapped else c).reshape(empty.shape) for c in caches)
            stored = Stored(slots, empty, keys, vs if "value_cache" in roles else None)
        for role, size in zip("qk", sizes, strict=False):
            found[role] = (found[role] * size).to(found[role].dtype)
        is_written = returned is None and "q_out" not in roles
        return Results(found["q"], None if k is None else found["k"], found.get("v"), stored, is_written)

    def _run_for_each_key_head(self, q: Tensor, k: Tensor, angles: dict[str, Any], rows: int) -> Results:
        one, axis, keeps = replace(self, key_head=""), self.heads_axis, self.key_head == "kept"
        results, keys = [], []
        for i in range(k.shape[axis]):
            head, key = q.narrow(axis, 0, 1).clone() if i else q, k.narrow(axis, i, 1)
            results.append(one.run(head, key if keeps else key.squeeze(axis), angles, rows))
            k_out = cast(Tensor, results[-1].k)
            keys.append(k_out if keeps else k_out.unsqueeze(axis))
        return Results(results[0].q, torch.cat(keys, dim=axis), in_place=results[0].in_place)

    def _tensors(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """Return what is passed for each word that is a tensor of tokens."""
        axis = self.layout.index("h") if "h" in self.layout else 0
        is_hidden = {"q", "x"} <= {*self.call.parameter_of}  # the states that q and k were projected from
        words = {"q": q, "k": k, "v": v, "x": from_layout(self.layout, q).flatten(2) if is_hidden else q}
        joined = {"qkv": (q, k, v), "kv": (q, v)} if {"qkv", "kv"} & {*self.call.parameter_of} else {}
        words |= {role: torch.cat(parts, dim=axis) for role, parts in joined.items()}
        if self.packing == "flat":
            return {role: x.flatten(-2) for role, x in words.items()}
        if self.packing == "stacked":
            return words | {role: torch.stack(parts, dim=axis) for role, parts in joined.items()}
        return words

    def _sizes(self, q: Tensor, k: Tensor) -> dict[str, Any]:
        heads, k_heads = (1 if self.layout in ONE_HEAD else x.shape[self.heads_axis] for x in (q, k))
        channels = q.shape[self.layout.index("d") - len(self.layout)]
        sizes = {"head_size": channels, "num_heads": heads, "num_kv_heads": k_heads}
        return {**sizes, "eps": self.eps, "layout": self.layout}

    def _read(self, returned: Any, passed: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """Return the results for q, k and v by role, from what is returned or from the tensors that were passed."""
        roles = {*self.call.parameter_of}
        names: tuple[str, ...] = self.call.results if self.has_k else ("x1", "x2") if "x1" in roles else ("x",)
        found = {role: passed[role] for role in (*names, "v", "qkv", "kv") if role in roles}
        if returned is None:
            outs = zip(names, ("q_out", "k_out"), strict=False)
            found |= {role: passed[out] for role, out in outs if out in roles}
        else:
            returned = tuple(returned.values()) if isinstance(returned, dict) else returned
            values = [*returned] if isinstance(returned, (list, tuple)) else [returned]
            if not values or not isinstance(values[0], Tensor):
                raise CallError("wrong-shape", f"it returns {_checks.shown(returned)}")
            objects = [each for each in values if not isinstance(each, Tensor | None)]
            if objects and "x" in roles and torch.equal(values[0], passed["x"]):
                raise CallError("wrong-shape", f"it returns x unchanged, and {_checks.shown(objects[0])}")
            joined = [role for role in ("qkv", "kv") if role in roles and found[role].shape == values[0].shape]
            if self.has_k and len(values) < 2 and not joined:
                raise CallError("wrong-shape", "it returns one tensor for q and k")
            found |= zip(joined or (*names, *self.takes & {"v"}), values, strict=False)
        if "x1" in roles:
            found["x"] = torch.cat((found["x1"], found["x2"]), dim=-1)
        for role, parts in (("qkv", {"q": q, "k": k, "v": v}), ("kv", {"x": q, "v": v})):
            if role in roles and not {"q", "x"} & {*found}:
                axis = self.layout.index("h")
                heads = [x.shape[axis] for x in parts.values()]
                whole = found[role].reshape(*q.shape[:axis], sum(heads), *q.shape[axis + 1 :])
                found |= zip(parts, torch.split(whole, heads, dim=axis), strict=True)
        if not self.has_k:
            found["q"] = found["x"]
        results = {role: (found[role], like) for role, like in (("q", q), ("k", k), ("v", v)) if role in found}
        for role, (x, like) in results.items():
            is_one_row = self.layout[0] == "b" and (self.layout[1] != "s" or like.shape[1] > 1)  # and not one token
            if self.packing == "flat" or (is_one_row and (1, *getattr(x, "shape", ())) == like.shape):
                results[role] = x.reshape(like.shape), like
        return {role: x for role, (x, _) in results.items()}


@compute_once
def _code(expression: str) -> CodeType:
    return compile(expression, "<argument>", "eval")


def to_layout(layout: str, x: Tensor) -> Tensor:
    """Return a view of x `[batch, seq, heads, head_dim]` in a layout, with the heads first if it is of one head."""
    if layout in ONE_VECTOR:
        return x[0].view(*x.shape[1:3], *[1] * (len(layout) - 1), -1)
    if layout in ONE_ROW:
        return x[0] if layout in ("thd", "hd") else x[0].transpose(0, 1)
    return x.permute(["bshd".index(axis) for axis in _axes(layout)])


def from_layout(layout: str, x: Tensor) -> Tensor:
    """Return a view `[batch, seq, heads, head_dim]` of x, which has a layout."""
    if layout in ONE_VECTOR:
        return x.reshape(1, *x.shape[:2], -1)
    if layout in ONE_ROW:
        return x[None] if layout in ("thd", "hd") else x.transpose(0, 1)[None]
    return x.permute([_axes(layout).index(axis) for axis in "bshd"])


def _axes(layout: str) -> str:
    return "h" + layout if layout in ONE_HEAD else layout


def _one_by_one(function: Callable[..., Any], parameter_of: Roles, layout: str) -> Callable[..., Any]:
    """Wrap a function of one head, or of one token of it or of all, so that it is called with each one of all."""
    tensors = [n for role, n in parameter_of.items() if role in ("q", "x", "k", "q_out", "k_out", "past_k", "past_v")]
    places = [name for role, name in parameter_of.items() if role.startswith("positions") and layout in ONE_TOKEN]
    axis = 1 if places else 0  # of the heads

    def run(**passed: Any) -> Any:
        heads = [1 if layout == "hd" else passed[name].shape[axis] for name in tensors]
        tokens = [range(len(passed[tensors[0]]))] if places else []
        results = []
        for *token, head in product(*tokens, range(max(heads))):
            one = dict(passed)
            place = (*token, slice(None)) if layout == "hd" else (*token, head)
            for name, count in zip(tensors, heads, strict=True):  # the last head may be repeated
                one[name] = passed[name][place] if head < count else passed[name][(*token, -1)].clone()
            for name in places:
                one[name] = passed[name][token[0]][None] if layout == "1111d" else passed[name][token[0]].tolist()
            results.append(function(**one))
        if results[0] is None:
            return None
        found = zip(*(each if isinstance(each, (list, tuple)) else [each] for each in results), strict=True)
        joined = [torch.stack(each) for each in found]
        if layout == "hd":
            return tuple(joined)
        if places:  # of which the axes of size 1 may differ
            if any(x.shape[-1] != passed[name].shape[-1] for x, name in zip(joined, tensors, strict=False)):
                raise ValueError("a head is returned with another number of channels")
            joined = [x.view(-1, max(heads), *passed[name].shape[2:]) for x, name in zip(joined, tensors, strict=False)]
        return tuple(x.narrow(axis, 0, count) for x, count in zip(joined, heads, strict=False))

    return words.stands_for(run, function, (words.parameters(function) or {}).values())


def _sizes_of_heads(x: Tensor) -> Tensor:
    """Return the size of each head, with which a norm divides it. Return 1 for a head of zeros."""
    size = x.detach().float().square().mean(-1, keepdim=True).sqrt()
    return torch.where(size == 0, 1.0, size)


def forms(call: Call, layout: str, function: Callable[..., Any], **fixed: Any) -> Iterator[Form]:
    """Yield the ways to pass tensors to a function, and to read its results, the most likely first."""
    roles = {*call.parameter_of}
    if (layout in ONE_HEAD and FUSED & roles) or (layout in ONE_TOKEN and "positions" not in roles):
        return
    packings: tuple[str, ...] = ("each",)
    if {"qkv", "kv"} & roles:
        packings = ("flat", "heads", "stacked") if "head_size" in roles else ("heads", "stacked", "flat")
    elif {"head_size", "num_heads"} & roles:
        packings = ("flat", "each")
    caches = [*_CACHES] if {"key_cache", "slots"} <= roles else [""]
    key_heads = ("kept", "dropped") if call.parameter_of.get("k") in ONE_KEY_HEAD else ("",)
    norms = (False, True) if "q_weight" in roles else (False,)
    by_name = accept_keywords(function)
    if layout in (*ONE_HEAD, *ONE_TOKEN):
        by_name = _one_by_one(by_name, call.parameter_of, layout)
    for packing, cache, key_head, joined in product(packings, caches, key_heads, norms):
        if packing in ("each", "heads") or layout.endswith("hd"):
            yield Form(by_name, call, layout, packing, cache=cache, key_head=key_head, of_all_heads=joined, **fixed)
