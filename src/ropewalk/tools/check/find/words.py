"""The words of the contract: what `check` passes for each, and which names public signatures have for it.

An adapter is a function whose parameters have these names. For any other function, the names of its parameters say
which word, or which expression of words, it takes. To add a word, add it to `WORDS`, and its value to `Form.run` or
to `ways`. To add a spelling or an argument that follows from the words, add it to `SPELLINGS` or to
`adapter.written`.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from ropewalk import _checks
from ropewalk.tools.check.find import memory, uses
from ropewalk.tools.check.find.target import code_of, name_of

# Word → the other names that a parameter for it has in public code.
WORDS = {
    "q": "xq query queries query_states q_states query_layer q_pe q_rot",
    "k": "xk key keys key_states k_states key_layer k_pe k_rot",
    "v": "xv value values value_states value_layer",
    "x": "xs t input inputs tensor hidden_states states qk tokens",
    "qkv": "mixed_qkv packed_qkv",  # q, k and v in one tensor
    "kv": "",
    "cos": "cos_cached cached_cos cos_cache freqs_cos cos_table r1",
    "sin": "sin_cached cached_sin sin_cache freqs_sin sin_table r2",
    "freqs_cis": "freqs_complex freqs rope_cache emb pos_emb rope angles sinusoidal_pos rotary_emb image_rotary_emb "
    "position_embeddings",
    "cos_sin_cache": "",  # [length, rotary_dim]
    "positions": "position_ids pos input_pos position pos_ids indices token_positions ids cache_ids seq_id grid coords",
    "offset": "start_pos start_index seqlen_offset positional_offset past_kv_pos_offset start past_length",
    "offsets": "seqlen_offsets start_positions",  # one for each sequence, or one number
    "cu_seqlens": "cu_seqlens_q cu_seqlen indptr",
    "past_k": "past_key past_keys",
    "past_v": "past_value past_values",
    "slots": "slot_mapping out_loc cache_loc",
    "key_cache": "k_cache k_buffer paged_k_cache",
    "value_cache": "v_cache v_buffer paged_v_cache",
    "q_weight": "q_norm_weight weight norm_weight",
    "k_weight": "k_norm_weight",
    "head_size": "head_dim",
    "num_heads": "num_heads_q num_q_heads num_qo_heads n_heads head_count qh",
    "num_kv_heads": "num_heads_k num_k_heads n_kv_heads num_key_value_heads kvh",
}
# The same for arguments that follow from the words and from what is expected.
SPELLINGS = {
    "x1": "",  # the first half of the channels, and the second
    "x2": "",
    "q_out": "out_q out out1 output q_rope",
    "k_out": "out_k out2 k_rope",
    "num_v_heads": "num_heads_v",
    "max_seqlen": "max_seqlen_q",
    "eps": "epsilon norm_eps rms_norm_eps variance_epsilon",
    "interleaved": "interleave rotary_interleaved traditional",
    "is_neox": "is_neox_style neox_style half rotate_half",
    "inplace": "in_place",
    "conjugate": "conj inverse",
    "base": "theta rope_theta max_period",
    "scale": "rope_scale scaling_factor",  # that positions are divided or multiplied by
    "inv_freq": "",
    "rotary_dim": "rope_dim rot_dim dims",
    "tensor_layout": "tensor_format qkv_format",  # the name of the layout
    "seq_len": "seqlen max_seq_len length",
    "channels": "dim",  # of a head
    "seq_dim": "",  # the axis of the tokens
    "grid": "",  # the sizes of the axes of the positions, in one tuple or each alone
    "frames": "T num_frames temporal_size",
    "height": "h end_y",
    "width": "w end_x",
    "crops": "crops_coords",  # the first and the last corner of the grid
    "latent": "",  # [batch, channels, …, rows, columns], of which the shape alone is read
    "unsqueeze_dim": "",
    "rotary_share": "rotary_percent rotary_pct partial_rotary_factor",
    "layer_type": "",
    "nope": "",  # the number of channels of q before those that rotate
    "attention_mask": "",  # from which positions are counted
    "k_positions": "key_positions positions_k pos_k k_pos",
    "k_offset": "k_pos_start k_start k_start_pos offset_k key_offset start_k",
    "sections": "mrope_section mrope_sections section",
    "before": "",  # the number of tokens before those that rotate, such as text or a class token
}
_NAMES = WORDS | SPELLINGS
_AXIS = "(t|h|w|r|c|x|y|z|rows?|cols?|height|width|frames?|time)"  # that one of several parameters for positions is for
GRID = r"^((grid|input|img|image|feat|spatial|rope)_)?(size|shape|resolution|t?hw)s?$"
GRID_AXIS = r"^((grid|input|img|image|feat|patch|max|num|n)_)?(h|w|height|width|rows|cols)$"
# The number of tokens before those that rotate.
NOT_ROTATED = (
    r"^(text|txt)_(seq_?)?len(gth)?$|^(n|num)_(prefix|cls|class|reg|register|special|text|txt)(s|_tokens)?$"
    r"|^(use|with|has)_(cls|class)(_token)?$"
)
# Role → a part of a name by which it is known, if no parameter has a name of the role.
_PARTS = {
    "q": r"^(q|query|queries)_",
    "k": r"^(k|key|keys)_",
    "freqs_cis": r"cos_?sin|sin_?cos",
    "cos": r"(^|_)cos(ines?)?(_|$)",
    "sin": r"(^|_)sin(es?)?(_|$)",
    "offset": r"offset|(^|_)start(_|$)|past_(len|seq)",
    "k_positions": r"^(k|key|keys)_.*(pos|coord|ids)",
    "positions": r"^(?!n_|num_|max_|.*(emb|enc|bias|table|freq|len|scal|factor))"
    r".*((^|_)(pos|positions?|coord(inate)?s?|xyz|xy|yx)(_|$)|_(ids|idx|indices|order)$|^m$)",
    **{f"positions_{i}": rf"(^|_){_AXIS}(_|$)" for i in (1, 2, 3)},
    "before": NOT_ROTATED,
    "nope": r"nope_?(head_)?(dim|size)",
    "cu_seqlens": "^cu_",
    "max_seqlen": "^max_(seq|len)",
    "base": r"^(rope_|rotary_|rotary_emb_)?(base|theta)(_freq|_frequency)?$",
    "grid": GRID,
    "x": r"^(vec|vector|features?|feats?|tensor|x_.*|(?!num_|n_|max_|total_).*_tokens)$",
}
_OTHER = {"cos": "sin", "sin": "cos", "k": "q"}  # role → the role of the only other parameter
FUSED = {"qkv", "kv", "x1", "v", "cos_sin_cache", "q_weight", "key_cache"}
"""The roles of calls that do more than to take q and k, and tables or positions, and to return q and k."""
_PLACES = {"positions", "offset", "offsets", "cos", "freqs_cis", "cos_sin_cache"}
"""The roles that say where the tokens are."""

Roles = dict[str, str]
"""Role → name of the parameter that has it."""


def parameters(called: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the named parameters of a callable, without self, or None if its signature cannot be read."""
    function = code_of(called)
    if isinstance(called, torch.jit.ScriptFunction):
        return _of_schema(called.schema)
    if isinstance(called, CustomOpDef):
        return _of_schema(called._opoverload._schema)
    if isinstance(called, torch._ops.OpOverloadPacket):
        overloads = called.overloads()  # type: ignore[no-untyped-call]
        return _of_schema(getattr(called, overloads[0])._schema)
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in found.items() if p.kind not in variadic}


@dataclass(frozen=True)
class Call:
    """What the parameters of a function are for."""

    parameter_of: Roles
    optional: frozenset[str] = frozenset()  # the roles of parameters with a default
    axes: str = ""  # those of the positions that their annotation states, such as "s", "bs", "3bs", "s3" and "b3s"
    results: tuple[str, str] = ("q", "k")  # the roles of the first two, if it takes q and k
    guessed: frozenset[str] = frozenset()  # the parameters whose roles only their use says

    def without(self, roles: set[str]) -> Call:
        """Return the call that omits the parameters with these roles."""
        return replace(self, parameter_of={role: n for role, n in self.parameter_of.items() if role not in roles})

    def renamed(self, role: str, other: str) -> Call:
        """Return the call in which the parameter of a role has another."""
        return replace(self, parameter_of={other if r == role else r: name for r, name in self.parameter_of.items()})

    @property
    def key_first(self) -> bool:
        """Whether k comes before q, so that the results may be in this order, too."""
        names = [*self.parameter_of]
        return {"q", "k"} <= {*names} and names.index("k") < names.index("q")


def _of_schema(schema: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of an operator or of a script of PyTorch."""
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    return {
        a.name: inspect.Parameter(a.name, kind, default=a.default_value if a.has_default_value() else empty)
        for a in schema.arguments
    }


def read_call(called: Callable[..., Any]) -> Call:
    """Return the roles of the parameters of a function that rotates or computes tables."""
    known = parameters(called) or {}
    used = uses.roles(code_of(called))
    roles = match(known, _NAMES, _PARTS, used)
    guessed = {*roles.values()} - {*match(known, _NAMES, _PARTS).values()}
    if "frames" in roles and not {"height", "width", "grid", "seq_len"} & {*roles}:  # then it is not of a grid
        roles = {"seq_len" if role == "frames" else role: name for role, name in roles.items()}
    if used.get("t") == "positions" and roles.get("x") == "t":  # as in lucidrains' code
        roles["positions"] = roles.pop("x")
    place = roles.get("positions", "")
    is_size = used.get(place) == "sides"
    if used.get(place) == "angles" and "freqs_cis" not in roles:
        roles["freqs_cis"] = roles.pop("positions")
    elif place and (isinstance(known[place].default, str) or re.search(f"{GRID}|dim|factor", place) or is_size):
        roles |= {"grid": place} if is_size or re.search(GRID, place) else {}
        roles.pop("positions")
    if "positions" not in roles:
        roles = {"positions" if role == "k_positions" else role: name for role, name in roles.items()}
    alone = next((role for role in "qkv" if role in roles), "")
    if not {"x", "qkv", "kv"} & {*roles} and not {"q", "k"} <= {*roles}:  # as a function for one tensor may call it
        roles = {"x" if role == alone else role: name for role, name in roles.items()}
    if {"x", "k"} <= {*roles} and "q" not in roles and known[roles["k"]].default is None:  # of JAX's random numbers
        roles.pop("k")
    if roles.get("x") == "x" and "y" in known and "k" not in roles:  # as in AITER
        roles["q"], roles["k"] = roles.pop("x"), "y"
    if {"qk_head_dim", "emb_dim"} <= {*known}:  # as in Megatron, of MLA
        roles["nope"], roles["rotary_dim"] = "qk_head_dim", "emb_dim"
    axes = {role: roles[role] for role in roles if role.startswith("positions")}
    is_alike = len({known[name].default is inspect.Parameter.empty for name in axes.values()}) == 1
    first = axes.get("positions", "")  # without it, or with another kind of name, the others are not of axes
    if not is_alike or not all(re.search(_PARTS["positions_1"], name) for name in (first, *axes.values())):
        roles = {role: name for role, name in roles.items() if role == "positions" or role not in axes}
    optional = {role for role, name in roles.items() if known[name].default is not inspect.Parameter.empty}
    unread = {role for role in optional if not reads(called, roles[role])}
    if not _PLACES & ({*roles} - unread):  # then its result cannot depend on where the tokens are
        unread -= _PLACES
    roles = {role: name for role, name in roles.items() if role not in unread}
    optional &= {*roles}
    if _PLACES & {*roles}:
        roles.pop("attention_mask", "")
    if "k" not in roles:  # of which past keys would be the first
        roles = {role: name for role, name in roles.items() if role not in ("past_k", "past_v")}
    if "v" in optional:  # a function that rotates what is passed, as in RoFormer
        roles.pop("v")
    count = sum(role in axes for role in roles)
    stated = str(count) if count > 1 else _axes_of(known[roles["positions"]]) if "positions" in roles else ""
    return Call(roles, frozenset(optional), stated, guessed=frozenset(guessed))


def reads(called: Callable[..., Any], name: str) -> bool:
    """Return whether a function reads one of its parameters. Some have parameters that they ignore."""
    function = code_of(called)
    if (code := getattr(inspect.unwrap(function), "__code__", None)) is None:
        return True
    loaded = [i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD")]
    return name in code.co_cellvars or any(name in (v if isinstance(v, tuple) else (v,)) for v in loaded)


def is_offset(name: str) -> bool:
    """Return whether a parameter of this name is for the position of the first token."""
    return name in WORDS["offset"].split() or re.search(_PARTS["offset"], name) is not None


def names_sin_first(function: Callable[..., Any]) -> bool:
    """Return whether a function assigns sin before cos, or the name of a parameter begins with it."""
    code = getattr(inspect.unwrap(code_of(function)), "__code__", None)
    return [name[:3] for name in getattr(code, "co_varnames", ()) if name in ("sin", "cos", "sin_cos")][:1] == ["sin"]


def _axes_of(parameter: inspect.Parameter) -> str:
    """Return the axes that an annotation such as "3bs" or Annotated[Tensor, "3bs"] states, or ""."""
    annotation = parameter.annotation
    text = f"'{annotation}'" if isinstance(annotation, str) else str(annotation)
    found = re.search(r"""["']([2-9]?b?s|b?s[2-9]|b[2-9]s)["']""", text)
    return found[1] if found else ""


def filled(called: Callable[..., Any], taken: Collection[str]) -> dict[str, Any]:
    """Return values for required parameters that have no role: a device, a dtype, an option, or None if unknown."""
    values = {"device": str(memory.current().device), "dtype": torch.float32, "dropout": 0.0}
    free = {n: p for n, p in (parameters(called) or {}).items() if n not in taken and p.default is p.empty}
    known = {n: values.get(n, False) for n, p in free.items() if n in values or p.annotation in (bool, "bool")}
    return dict.fromkeys(free) | known


def match(
    known: dict[str, inspect.Parameter],
    names: Mapping[str, str],
    parts: Mapping[str, str] | None = None,
    used: Mapping[str, str] | None = None,
) -> Roles:
    """Return the roles of parameters whose names are keys of `names`, or among the names of a key, or have its part.

    Required parameters with other names have the roles that `used` says, as `uses.roles` finds them, and so have those
    for an offset that is 0 by default.
    """
    # Without axes, as in x_BTHD.
    plain = {name: re.sub("_[A-Z]+$", "", name).lower().lstrip("_") if name != "T" else name for name in known}
    latent = next((name for name in known if "latent" in names and re.search("_T_H_W(_C)?$", name)), "")
    found: Roles = {"latent": latent} if latent else {}
    for name in known:
        for role, spellings in names.items():
            if plain[name] in (role, *spellings.split()) and role not in found and name not in found.values():
                found[role] = name
                break
    required = [name for name, p in known.items() if p.default is inspect.Parameter.empty]
    for name, use in (used or {}).items():
        if use == "latent" and use in names and name in known:
            found = {role: n for role, n in found.items() if n != name} | {use: name}
        if "mask" in name or (name.startswith("grid") and re.search(GRID, name)):
            continue
        if use == "tokens" and {"x", "qkv", "kv", "x1"} & {*found}:
            use = "table" if not _PLACES & {*found} else "like"
        if use == "table" and "positions" in names and re.search(_PARTS["positions"], plain[name]):
            use = "positions"
        free = (role for role in uses.ROLES[use] if role in names and role not in found)
        needs_role = name in required or (use == "offset" and known[name].default in (0, None))
        if needs_role and name not in found.values() and (role := next(free, "")):
            found[role] = name
    last = next((role for other, role in _OTHER.items() if other in found and role not in found and role in names), "")
    rest = [name for name in required if name not in found.values() and not re.search(GRID, name)]
    if len(rest) == 1 and used is not None:
        role = last or ("freqs_cis" if used.get(rest[0]) in ("table", "tokens") and not _PLACES & {*found} else "")
        found |= {role: rest[0]} if role in names else {}
    for role, part in (parts or {}).items():
        free = (name for name in known if name not in found.values() and re.search(part, plain[name]))
        if role not in found and (first := next(free, None)) is not None:
            found[role] = first
    order = [*known]
    return dict(sorted(found.items(), key=lambda each: order.index(each[1])))


def take_tables(function: Any, call: Call) -> Call:
    """Return the call of a function that is passed tables, also if the names of their parameters are unknown.

    They are then the required parameters without a role: one for a table, or two for cos and sin.

    Raises:
        RopeError: no parameters can be those of the tables.
    """
    roles, known = call.parameter_of, parameters(function) or {}
    if {"cos", "sin"} <= {*roles} or {"freqs_cis", "cos_sin_cache"} & {*roles}:
        return call
    if "base" in roles and "base" not in call.optional:  # a theta is the angles
        return call.renamed("base", "freqs_cis")
    taken = {*roles.values()}
    free = [name for name, p in known.items() if name not in taken and p.default is inspect.Parameter.empty]
    missing = [r for r in ("cos", "sin") if r not in roles] if len(free) != 1 or "cos" in roles else ["freqs_cis"]
    if not free or len(free) != len(missing):
        must = f"{name_of(function)} must have parameters for the tables: cos and sin, or one for both"
        raise no_call(must, named(function))
    return replace(call, parameter_of=roles | dict(zip(missing, free, strict=True)))


def with_object(function: Any, target: Any, built: Any) -> Any:
    """Return a function with the object that it takes of a class, as an annotation says, or None if it takes none."""
    owner, known = getattr(target, "owner", target), parameters(function) or {}
    names = [n for n, p in known.items() if p.annotation in (owner, getattr(owner, "__name__", owner))]
    if not names:
        return None
    taking: Any = partial(function, **{names[0]: getattr(built, "__self__", built)})
    taking.__signature__ = inspect.Signature([p for n, p in known.items() if n != names[0]])
    return taking


def stands_for(wrapper: Any, function: Any, known: Iterable[inspect.Parameter]) -> Callable[..., Any]:
    """Return a wrapper of a function with these parameters, by name, whose use the code of the function says."""
    named = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in known]
    wrapper.__signature__, wrapper.__wrapped__ = inspect.Signature(named), code_of(function)
    known_as: Callable[..., Any] = wrapper
    return known_as


def accept_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that every parameter can be passed by name, even if it is positional-only."""
    known = parameters(function) or {}
    positional_only = {name: p for name, p in known.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY}
    if not positional_only:
        return function

    def call_by_name(**keywords: Any) -> Any:
        last = max((i for i, name in enumerate(positional_only) if name in keywords), default=-1)
        names = [*positional_only][: last + 1]
        values = [keywords.pop(n) if n in keywords else positional_only[n].default for n in names]
        return function(*values, **keywords)

    return stands_for(call_by_name, function, known.values())


class NoCallError(_checks.RopeError):
    """The target cannot be called."""


def no_call(must: str, got: str, *says: str) -> NoCallError:
    """Return the error for a target that cannot be called, to which an adapter is added."""
    return NoCallError(" ".join((f"check: {must}, got {got}.", *says)))


def no_known_names(function: Any, names: Collection[str]) -> NoCallError:
    """Return the error for a target of which these parameters get None, with which it does not work."""
    must = f"every parameter of {name_of(function)} must have a default or a name whose meaning is known"
    return no_call(must, ", ".join(names))


def named(function: Any) -> str:
    """Return the parameters of a function in words."""
    return f"parameters {', '.join(parameters(function) or {}) or 'none'}"
