"""What each parameter of a function or class is for, read from its name or from `--call`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ropewalk import _checks

# The names under which the field knows them.
_CALL_NAMES = {
    "q": {"q", "xq", "query", "queries", "query_states", "query_layer"},
    "k": {"k", "xk", "key", "keys", "key_states", "key_layer"},
    "x": {"x", "t", "input", "inputs", "tensor", "hidden_states", "x_in", "states", "qk", "tokens"},
    "cos": {"cos", "cos_emb", "cosine", "cosines", "cos_cached", "freqs_cos", "rotary_cos", "cos_table"},
    "sin": {"sin", "sin_emb", "sine", "sines", "sin_cached", "freqs_sin", "rotary_sin", "sin_table"},
    "table": {
        "freqs_cis",
        "freqs_complex",
        "freqs",
        "cis",
        "rope_cache",
        "emb",
        "pos_emb",
        "rope",
        "cos_sin",
        "angles",
    },
    "positions": {"positions", "position_ids", "pos", "input_pos", "position", "pos_ids", "indices", "token_positions"},
    "offset": {
        "offset",
        "start_pos",
        "seqlen_offset",
        "seqlen_offsets",
        "start",
        "past_length",
        "cache_position_start",
    },
    "seq_len": {"seq_len", "seqlen", "max_seq", "length"},
    "axis": {"unsqueeze_dim"},
}
_MAKE_NAMES = {
    "dim": {
        "dim",
        "head_dim",
        "d",
        "head_size",
        "d_head",
        "d_k",
        "size",
        "dim_head",
        "embedding_size",
        "n_elem",
        "features",
    },
    "rotary_dim": {"rotary_dim", "rot_dim", "rotary_ndims", "rope_dim"},
    "base": {"base", "theta", "rope_theta", "rope_base", "freq_base", "rotary_emb_base", "rotary_base"},
    "length": {
        *{"end", "max_positions", "max_position_embeddings", "max_seq_len", "max_len", "max_position", "seq_len"},
        *{"max_seq_length", "context_length", "max_length", "block_size", "max_position_embedding", "num_positions"},
    },
    "config": {"config", "args", "cfg", "params", "model_args"},
}

_NAMELESS = "argument "

Roles = dict[str, str]
"""Role → name of the parameter."""


def parameters(called: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """The named parameters of what will be called, without self; None where Python cannot say."""
    function = called.forward if isinstance(called, torch.nn.Module) else called
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in found.items() if p.kind not in variadic}


def of_call(called: Callable[..., Any], call: str | None) -> Roles:
    """The roles of the parameters of a function that rotates or makes tables.

    Raises:
        RopeError: a parameter without default has no role; the message says how to give it one.
    """
    known = parameters(called)
    if call is not None:
        return _said([*known] if known else [f"{_NAMELESS}{i}" for i in range(call.count(",") + 1)], call)
    if known is None:
        raise _unknown("a signature that cannot be read")
    roles = _named(known, _CALL_NAMES)
    if "q" in roles and "k" not in roles and "x" not in roles:
        roles["x"] = roles.pop("q")
    return roles


def of_constructor(made: Callable[..., Any]) -> Roles:
    """The roles of the parameters that make an object or a table."""
    return _named(parameters(_maker(made)) or {}, _MAKE_NAMES)


def unfilled(made: Callable[..., Any], given: dict[str, Any]) -> list[str]:
    """The parameters that have no default and that nothing was found for."""
    known = parameters(_maker(made)) or {}
    return [n for n, p in known.items() if p.default is inspect.Parameter.empty and n not in given]


def required(function: Callable[..., Any], name: str) -> bool:
    """Whether a parameter has no default."""
    return (parameters(function) or {})[name].default is inspect.Parameter.empty


def default_of(made: Callable[..., Any], name: str) -> Any:
    """The default of a parameter; None where it has none."""
    default = (parameters(_maker(made)) or {})[name].default
    return None if default is inspect.Parameter.empty else default


def _maker(made: Any) -> Any:
    return getattr(made, "owner", made)


def _named(known: dict[str, inspect.Parameter], names: dict[str, set[str]]) -> Roles:
    roles: Roles = {}
    for name in known:
        plain = name.lower().lstrip("_")
        for role, spellings in names.items():
            if plain in spellings and role not in roles:
                roles[role] = name
                break
    return roles


def by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, such that each parameter can be passed by name, also where Python allows none, or knows none."""
    known = parameters(function) or {}
    alone = [name for name, p in known.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    if known and not alone:
        return function

    def called(**given: Any) -> Any:
        first = [name for name in (alone or sorted(given)) if name in given]
        values = [given.pop(name) for name in first]
        return function(*values, **given)

    return called


def _said(known: list[str], call: str) -> Roles:
    words = [word.strip() for word in call.split(",")]
    allowed = {*_CALL_NAMES, "_"}
    spelled = {word: role for role, spellings in _CALL_NAMES.items() for word in (*spellings, role)}
    if len(words) > len(known) or any(word not in allowed and word not in spelled for word in words):
        raise _unknown(_checks.shown(call))
    return {spelled.get(word, word): name for word, name in zip(words, known, strict=False) if word != "_"}


def _unknown(got: str) -> _checks.RopeError:
    return _checks.error(
        "check",
        "the parameters must be among q, k, x, cos, sin, freqs_cis, positions, offset, unsqueeze_dim",
        got,
        'Say what each is, in order, with _ for one to leave out: --call "q,k,cos,sin".',
    )
