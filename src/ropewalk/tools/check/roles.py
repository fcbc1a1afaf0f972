"""Find the role of each parameter of a function or class: q, k, cos, positions and so on.

The role follows from the parameter's name, or the user states it as `call`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ropewalk import _checks

# Role of a parameter of a function that rotates → the common names of such a parameter.
_CALL_NAMES = {
    "q": "q xq query queries query_states query_layer",
    "k": "k xk key keys key_states key_layer",
    "x": "x t input inputs tensor hidden_states x_in states qk tokens",
    "cos": "cos cos_emb cosine cosines cos_cached freqs_cos rotary_cos cos_table",
    "sin": "sin sin_emb sine sines sin_cached freqs_sin rotary_sin sin_table",
    "table": "freqs_cis freqs_complex freqs cis rope_cache emb pos_emb rope cos_sin angles sinusoidal_pos rotary_emb "
    "image_rotary_emb position_embeddings",
    "positions": "positions position_ids pos input_pos position pos_ids indices token_positions",
    "offset": "offset start_pos seqlen_offset seqlen_offsets start past_length cache_position_start",
    "seq_len": "seq_len seqlen max_seq length",
    "axis": "unsqueeze_dim",
    "layer_type": "layer_type",
}
# The same for parameters of a constructor, or of a function that computes cos and sin.
_MAKE_NAMES = {
    "dim": "dim head_dim d head_size d_head d_k size dim_head embedding_size n_elem features",
    "rotary_dim": "rotary_dim rot_dim rotary_ndims rope_dim",
    "base": "base theta rope_theta rope_base freq_base rotary_emb_base rotary_base",
    "length": "end max_positions max_position_embeddings max_seq_len max_len max_position seq_len max_seq_length "
    "context_length max_length block_size max_position_embedding num_positions",
    "config": "config args cfg params model_args",
}

_NAMELESS = "argument "  # followed by a number: the name that a parameter without a name gets here

Roles = dict[str, str]
"""Role → name of the parameter that has it."""


def parameters(called: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the named parameters of a callable, without self, or None if its signature cannot be read."""
    function = called.forward if isinstance(called, torch.nn.Module) else called
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in found.items() if p.kind not in variadic}


def call_roles(called: Callable[..., Any], call: str | None) -> Roles:
    """Return the roles of the parameters of a function that rotates or computes tables.

    Raises:
        RopeError: the signature cannot be read, or `call` is not a list of roles.
    """
    known = parameters(called)
    if call is not None:
        return _parse_call([*known] if known else [f"{_NAMELESS}{i}" for i in range(call.count(",") + 1)], call)
    if known is None:
        raise _unknown_roles("a signature that cannot be read")
    roles = _match(known, _CALL_NAMES)
    if "q" in roles and "k" not in roles and "x" not in roles:
        roles["x"] = roles.pop("q")
    return roles


def constructor_roles(known: dict[str, inspect.Parameter]) -> Roles:
    """Return the roles of the parameters of a constructor, or of a function that computes tables."""
    return _match(known, _MAKE_NAMES)


def _match(known: dict[str, inspect.Parameter], names: dict[str, str]) -> Roles:
    roles: Roles = {}
    for name in known:
        plain = name.lower().lstrip("_")
        for role, spellings in names.items():
            if plain in spellings.split() and role not in roles:
                roles[role] = name
                break
    return roles


def accept_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that every parameter can be passed by name, even if it is positional-only or has no name."""
    known = parameters(function) or {}
    positional_only = [name for name, p in known.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    if known and not positional_only:
        return function

    def call_by_name(**keywords: Any) -> Any:
        first = [name for name in (positional_only or sorted(keywords)) if name in keywords]
        values = [keywords.pop(name) for name in first]
        return function(*values, **keywords)

    return call_by_name


def _parse_call(known: list[str], call: str) -> Roles:
    words = [word.strip() for word in call.split(",")]
    allowed = {*_CALL_NAMES, "_"}
    spelled = {word: role for role, spellings in _CALL_NAMES.items() for word in (*spellings.split(), role)}
    if len(words) > len(known) or any(word not in allowed and word not in spelled for word in words):
        raise _unknown_roles(_checks.shown(call))
    return {spelled.get(word, word): name for word, name in zip(words, known, strict=False) if word != "_"}


def _unknown_roles(got: str) -> _checks.RopeError:
    return _checks.error(
        "check",
        "each parameter must be one of q, k, x, cos, sin, freqs_cis, positions, offset, unsqueeze_dim",
        got,
        f"Pass their roles in order, with _ for a parameter to omit: {_checks.argument('call', 'q,k,cos,sin')}.",
    )
