"""Find the role of each parameter of a function or class (q, k, cos, positions and so on), and construct a class.

The role follows from the parameter's name, or the user states it as `call`.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from ropewalk import _checks
from ropewalk.tools.check.expected import Expected
from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.target import Method, name_of

# Role of a parameter of a function that rotates → the common names of such a parameter.
CALL_NAMES = {
    "q": "q xq query queries query_states query_layer q_pe q_rot",
    "k": "k xk key keys key_states key_layer k_pe k_rot",
    "v": "v xv value values value_states value_layer",
    "x": "x t input inputs tensor hidden_states x_in states qk tokens",
    "qkv": "qkv mixed_qkv packed_qkv qkv_states qkv_input",  # q, k and v in one tensor
    "kv": "kv",
    "x1": "x1",  # the first half of the channels, and the second
    "x2": "x2",
    "cos": "cos cos_emb cosine cosines cos_cached freqs_cos rotary_cos cos_table",
    "sin": "sin sin_emb sine sines sin_cached freqs_sin rotary_sin sin_table",
    "cos_sin_cache": "cos_sin_cache cos_sin_table",  # [length, rotary_dim]
    "table": "freqs_cis freqs_complex freqs cis rope_cache emb pos_emb rope cos_sin angles sinusoidal_pos rotary_emb "
    "image_rotary_emb position_embeddings sincos",
    "positions": "positions position_ids pos input_pos position pos_ids indices token_positions ids coords",
    "offset": "offset start_pos seqlen_offset start past_length cache_position_start",
    "offsets": "offsets seqlen_offsets start_positions",  # one for each sequence, or one number
    "cu_seqlens": "cu_seqlens cu_seqlens_q cu_seq_lens cu_seqlen indptr",
    "max_seqlen": "max_seqlen max_seqlen_q",
    "q_weight": "q_weight q_norm_weight qw weight norm_weight",
    "k_weight": "k_weight k_norm_weight kw",
    "eps": "eps epsilon norm_eps rms_norm_eps variance_epsilon",
    "key_cache": "key_cache k_cache cache_k k_buffer paged_k_cache kv_cache_k",
    "value_cache": "value_cache v_cache cache_v v_buffer paged_v_cache kv_cache_v",
    "slots": "slots slot_mapping out_loc cache_loc kv_cache_loc slot_ids",
    "head_size": "head_size head_dim",
    "rotary_dim": "rotary_dim rope_dim rot_dim dims",
    "num_heads": "num_heads num_heads_q num_q_heads num_qo_heads n_heads nheads",
    "num_kv_heads": "num_kv_heads num_heads_k num_k_heads num_heads_kv n_kv_heads num_key_value_heads",
    "num_v_heads": "num_v_heads num_heads_v",
    "interleaved": "interleaved interleave rotary_interleaved traditional rotate_style",
    "is_neox": "is_neox is_neox_style neox_style",
    "inplace": "inplace in_place",
    "conjugate": "conj conjugate inverse",
    "base": "base theta rope_theta base_frequency",
    "scale": "scale rope_scale scaling_factor scale_factor",  # that positions are divided or multiplied by
    "inv_freq": "inv_freq",
    "q_out": "q_out q_rope out_q query_out out out1 output",
    "k_out": "k_out k_rope out_k key_out out2",
    "tensor_layout": "tensor_format qkv_format",  # the name of the layout
    "seq_len": "seq_len seqlen max_seq max_seq_len length",
    "axis": "unsqueeze_dim",
    "layer_type": "layer_type",
    "frames": "frames frame time temporal t n_frames num_frames t_pos pos_t t_ids grid_t",
    "height": "height rows row h y ys n_rows num_rows h_pos pos_h y_pos pos_y h_ids row_ids grid_h",
    "width": "width columns cols column col w xs n_cols num_cols w_pos pos_w x_pos pos_x w_ids col_ids grid_w",
    "grid": "grid grid_size grid_sizes grid_shape grid_hw grid_thw hw thw feat_shape",
    "sections": "mrope_section mrope_sections sections section rope_section",
}
FUSED = {"qkv", "kv", "x1", "v", "cos_sin_cache", "q_weight", "key_cache"}
"""The roles of calls that do more than to take q and k, and tables or positions, and to return q and k."""
# The same for parameters of a constructor, or of a function that computes cos and sin.
MAKE_NAMES = {
    "dim": "dim head_dim d head_size d_head d_k size dim_head embedding_size n_elem features dims kv_channels "
    "embedding_dims",
    "rotary_dim": "rotary_dim rot_dim rotary_ndims rope_dim",
    "rotary_share": "rotary_percent rotary_pct partial_rotary_factor",
    "base": "base theta rope_theta rope_base freq_base rotary_emb_base rotary_base base_frequency max_timescale "
    "max_wavelength",
    "length": "end max_positions max_position_embeddings max_seq_len max_len max_position seq_len max_seq_length "
    "context_length max_length block_size max_position_embedding num_positions n_positions",
    "config": "config args cfg params model_args",
    "sections": CALL_NAMES["sections"],
    "interleaved": CALL_NAMES["interleaved"],
    "is_neox": CALL_NAMES["is_neox"],
    "dtype": "dtype",
    "axes_dim": "axes_dim axes_dims axis_dims axes_channels",
}

# Attribute of a scheme → the other names that parameters of a constructor have for it.
_SCALING = {
    "factor": "scaling_factor scale_factor rope_factor rope_scaling_factor",
    "original_max_position_embeddings": "initial_context_length original_context_length original_max_seq_len "
    "old_context_len original_max_position",
    "beta_fast": "ntk_beta",
    "beta_slow": "ntk_alpha",
    "low_freq_factor": "",
    "high_freq_factor": "",
    "short_factor": "",
    "long_factor": "",
    "attention_factor": "",
    "mscale": "",
    "mscale_all_dim": "",
}
_NAMELESS = "argument "  # followed by a number: the name that a parameter without a name gets here

Roles = dict[str, str]
"""Role → name of the parameter that has it."""


def parameters(called: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the named parameters of a callable, without self, or None if its signature cannot be read."""
    function = called.forward if isinstance(called, torch.nn.Module) else called
    if isinstance(called, CustomOpDef):
        function = _with_schema(called._opoverload)
    elif isinstance(called, torch._ops.OpOverloadPacket):
        overloads = called.overloads()  # type: ignore[no-untyped-call]
        function = _with_schema(getattr(called, overloads[0]))
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in found.items() if p.kind not in variadic}


@dataclass(frozen=True)
class Call:
    """What the parameters of a function are for.

    Args:
        parameter_of: maps roles to names of parameters.
        literals: maps names of parameters to the values that the user states.
        results: the roles of the tensors that the function returns, or None if they are found by trying.
        optional: the roles of parameters with a default, unless the user states them.
    """

    parameter_of: Roles
    literals: dict[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] | None = None
    optional: frozenset[str] = frozenset()

    def without(self, roles: set[str]) -> Call:
        """Return the call that omits the parameters with these roles."""
        return replace(self, parameter_of={role: n for role, n in self.parameter_of.items() if role not in roles})

    @property
    def key_first(self) -> bool:
        """Whether k comes before q, so that the results may be in this order, too."""
        names = [*self.parameter_of]
        return {"q", "k"} <= {*names} and names.index("k") < names.index("q")


def _with_schema(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return a function whose signature is that of an operator of PyTorch."""

    def function() -> None: ...

    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in operator._schema.arguments
        ]
    )
    return function


def read_call(called: Callable[..., Any], call: str | None, literals: Mapping[str, Any] | None = None) -> Call:
    """Return the roles of the parameters of a function that rotates or computes tables.

    Raises:
        RopeError: the signature cannot be read, or `call` is not a list of roles, or a literal has no parameter.
    """
    known = parameters(called)
    stated = dict(literals or {})
    if known is not None and (unknown := [name for name in stated if name not in known]):
        must, fix = "arguments (--arg) must be parameters of the target", f"Its parameters are: {', '.join(known)}."
        raise _checks.error("check", must, ", ".join(unknown), fix)
    if call is not None:
        return _parse_call(known, call, stated)
    if known is None:
        raise _unknown_roles("a signature that cannot be read")
    roles = match({name: p for name, p in known.items() if name not in stated}, CALL_NAMES)
    if roles.get("x") == "t" and {"height", "width"} <= {*roles}:
        roles["frames"] = roles.pop("x")
    roles = _without_k(roles)
    if "k" not in roles and roles.get("x") == "x" and roles.get("height") == "y" and "width" not in roles:
        roles["q"], roles["k"] = roles.pop("x"), roles.pop("height")  # as in AITER
    optional = {role for role, name in roles.items() if known[name].default is not inspect.Parameter.empty}
    if "v" in optional:  # a function that rotates what is passed, as in RoFormer
        roles.pop("v")
    return Call(roles, stated, optional=frozenset(optional))


def _without_k(roles: Roles) -> Roles:
    """Return the roles of a function in which q without k, as a function for one tensor may call it, is x."""
    is_alone = "q" in roles and not {"k", "x"} & {*roles}
    return {"x" if is_alone and role == "q" else role: name for role, name in roles.items()}


def match(known: dict[str, inspect.Parameter], names: dict[str, str]) -> Roles:
    """Return the roles of parameters whose names are among those of `CALL_NAMES` or `MAKE_NAMES`."""
    roles: Roles = {}
    for name in known:
        plain = name.lower().lstrip("_")
        for role, spellings in names.items():
            if plain in spellings.split() and role not in roles:
                roles[role] = name
                break
    return roles


def take_tables(function: Any, call: Call) -> Call:
    """Return the call of a function that is passed tables, also if the names of their parameters are unknown.

    They are then the required parameters without a role: one for a table, or two for cos and sin.

    Raises:
        RopeError: no parameters can be those of the tables.
    """
    roles, known = call.parameter_of, parameters(function) or {}
    if {"cos", "sin"} <= {*roles} or {"table", "cos_sin_cache"} & {*roles}:
        return call
    taken = {*roles.values(), *call.literals}
    free = [name for name, p in known.items() if name not in taken and p.default is inspect.Parameter.empty]
    missing = [role for role in ("cos", "sin") if role not in roles] if len(free) != 1 or "cos" in roles else ["table"]
    if not free or len(free) != len(missing):
        must = f"{name_of(function)} must have parameters for the tables: cos and sin, or one for both"
        raise _checks.error("check", must, named(function), describe(function))
    return replace(call, parameter_of=roles | dict(zip(missing, free, strict=True)))


def accept_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that every parameter can be passed by name, even if it is positional-only or has no name."""
    known = parameters(function) or {}
    positional_only = {name: p for name, p in known.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY}
    if known and not positional_only:
        return function

    def call_by_name(**keywords: Any) -> Any:
        names = [*positional_only] or sorted(keywords)
        last = max((i for i, name in enumerate(names) if name in keywords), default=-1)
        values = [keywords.pop(n) if n in keywords else positional_only[n].default for n in names[: last + 1]]
        return function(*values, **keywords)

    return call_by_name


def _parse_call(known: dict[str, inspect.Parameter] | None, call: str, stated: dict[str, Any]) -> Call:
    """Parse roles in the order of the parameters, NAME=LITERAL, and after -> the roles of what is returned."""
    spelled = {word: role for role, spellings in CALL_NAMES.items() for word in (*spellings.split(), role)}
    text, arrow, returned = call.partition("->")
    words = [word.strip() for word in re.split(r",(?![^(\[{]*[)\]}])", text)]
    for word in (word for word in words if "=" in word):
        name, _, literal = (part.strip() for part in word.partition("="))
        try:
            stated[name] = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            stated[name] = literal
    roles = [word for word in words if "=" not in word]
    names = [*known] if known else [f"{_NAMELESS}{i}" for i in range(len(roles))]
    names = [name for name in names if name not in stated]
    if len(roles) > len(names) or any(word != "_" and word not in spelled for word in roles):
        raise _unknown_roles(_checks.shown(call))
    if known and not {*stated} <= {*known}:
        raise _unknown_roles(_checks.shown(call))
    parameter_of: Roles = {}
    for word, name in zip(roles, names, strict=False):
        role = spelled.get(word, word)
        role = "num_v_heads" if role == "num_kv_heads" in parameter_of else role
        if role in parameter_of:
            raise _unknown_roles(f"{_checks.shown(call)}, which names {role} twice")
        if role != "_":
            parameter_of[role] = name
    results = [word.strip() for word in returned.split(",")]
    if arrow and results != ["none"] and any(word != "_" and word not in spelled for word in results):
        raise _unknown_roles(_checks.shown(call))
    named = tuple(spelled.get(word, word) for word in results if word != "none")
    if "x" in (of_one := _without_k(parameter_of)):
        named = tuple("x" if role == "q" else role for role in named)
    return Call(of_one, stated, named if arrow else None)


_PLAIN = ("q", "k", "x", "cos", "sin", "freqs_cis", "positions", "offset", "unsqueeze_dim")
_ROLES = [*_PLAIN, *(name for name in CALL_NAMES if name not in (*_PLAIN, "table", "axis", "seq_len", "layer_type"))]


def _unknown_roles(got: str) -> _checks.RopeError:
    must = f"each parameter must be one of {', '.join(_ROLES)}"
    return _checks.error("check", must, got, describe(None))


def describe(function: Any) -> str:
    """Return how to describe a call that was not found, with the roles that the names of its parameters suggest."""
    if inspect.isclass(function) and (method := getattr(function, "forward", None)) is not None:
        function = partial(method, None)  # of the object, and not its constructor
    known = None if function is None else parameters(function)
    roles = {name: role for role, name in (read_call(function, None).parameter_of if known else {}).items()}
    spelled = {"table": "freqs_cis", "axis": "unsqueeze_dim"}
    words = ",".join(spelled.get(roles[name], roles[name]) if name in roles else "_" for name in known or {})
    example = words if {*roles} and "_" in words else "q,k,cos,sin"
    return (
        f"Describe its parameters in order, with _ for one to omit and NAME=VALUE for a fixed value, and what it "
        f"returns: {_checks.argument('call', example)}, or "
        f"{_checks.argument('call', 'qkv,cos_sin_cache,positions -> none')}."
    )


def named(function: Any) -> str:
    """Return the parameters of a function in words."""
    return f"parameters {', '.join(parameters(function) or {}) or 'none'}"


_OF_A_HEAD = {"head_dim", "head_size", "d_head", "dim_head", "d_k", "kv_channels"}


@dataclass(frozen=True)
class Arguments:
    """What a constructor was passed, as far as it matters later.

    Args:
        base: the base that is passed, or None if the constructor has no parameter for it.
        length: the number of tokens that is passed, or None if the constructor has no parameter for it.
        sizes: the roles of the parameters for sizes that are passed: "dim" and "rotary_dim".
    """

    base: float | None
    length: int | None
    sizes: frozenset[str] = frozenset()

    def takes(self, channels: int, rotary_dim: int) -> bool:
        """Whether the constructor takes a number of channels of a head, and of rotated channels."""
        return "dim" in self.sizes and (rotary_dim == channels or "rotary_dim" in self.sizes)


def construct(constructor: Any, expected: Expected) -> tuple[Any, Arguments]:
    """Call a constructor with a value for each of its parameters, and return the object and what was passed.

    Raises:
        RopeError: a parameter without default has no known role, or the constructor raises.
    """
    owner = getattr(constructor, "owner", constructor)
    known = parameters(owner) or {}
    parameter_of = match(known, MAKE_NAMES)
    values: dict[str, Any] = {}
    base = length = None
    for role, name in parameter_of.items():
        if name in expected.arguments:
            continue
        default = None if known[name].default is inspect.Parameter.empty else known[name].default
        if role == "dim":
            values[name] = expected.head_dim if name in _OF_A_HEAD else expected.rotary_dim
        elif role == "rotary_dim":
            values[name] = expected.rotary_dim
        elif role == "rotary_share":
            values[name] = expected.rotary_dim / expected.head_dim
        elif role == "base":
            base = values[name] = expected.base or default or 10_000.0
        elif role == "length":
            length = values[name] = expected.table_length or default or 4096
        elif role in ("sections", "axes_dim") and (default is None or "dim" in parameter_of or expected.axes):
            values[name] = [(1 if role == "sections" else 2) * size for size in expected.sizes_of_axes()]
        elif role == "config" and expected.config is not None:
            values[name] = _config_object(owner, known[name].annotation, expected.config)
        elif role in ("interleaved", "is_neox") and (expected.pairing is not None or default is None):
            values[name] = (expected.pairing == "interleaved") == (role == "interleaved")
        elif role == "dtype" and default is None:
            values[name] = torch.float32
    scaling = getattr(expected.unresolved or expected.rope, "scaling", None)
    for key, names in _SCALING.items():
        if (value := getattr(scaling, key, None)) is not None:
            values |= {name: value for name in (key, *names.split()) if name in known and name not in values}
    values.update(expected.arguments)
    missing = [name for name, p in known.items() if p.default is inspect.Parameter.empty and name not in values]
    if missing:
        must = f"every parameter of {name_of(constructor)} must have a default or a name whose meaning is known"
        fix = f"Pass a value: --arg {missing[0]}=VALUE (in Python, arguments={{{missing[0]!r}: VALUE}})."
        if missing[0] == parameter_of.get("config"):
            fix = f"Pass the config that it reads: {_checks.argument('config')}."
        raise _checks.error("check", must, ", ".join(missing), fix)
    try:
        built = memory.construct(constructor, values)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a constructor may raise anything
        named = ", ".join(f"{name}={_checks.shown(value)}" for name, value in values.items() if name != "config")
        fix = "Pass other arguments (--arg), or a config with the keys that it reads."
        raise _checks.error_from(f"check: {name_of(constructor)}({named}) cannot be constructed", e, fix) from e
    sizes = frozenset(role for role, name in parameter_of.items() if name in values and name not in expected.arguments)
    fixed = "config" in sizes and "dim" not in sizes
    return built, Arguments(base, length, frozenset() if fixed else sizes)


def is_constructor(target: Any) -> bool:
    """Return whether this object must be constructed before it can rotate: a class, or a method of a class."""
    return inspect.isclass(target) or isinstance(target, Method)


class _Config(SimpleNamespace):
    """A config whose keys are attributes, like the config objects of transformers: that of the text model alone."""

    def __getattr__(self, name: str) -> Any:
        if name == "text_config":
            return self
        raise AttributeError(f"the config has no {name}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute or the default, like `dict.get`."""
        return getattr(self, key, default)


def _config_object(owner: Any, annotation: Any, config: Any) -> Any:
    """Build the object to pass for the user's config, with the same keys and no others.

    A class of transformers, or one that is annotated with a config class of transformers, gets an object of that
    class, which adds the defaults of that version.
    """
    if not isinstance(config, Mapping):
        config = copy.deepcopy(config)
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    if isinstance(annotation, str):  # of a module with `from __future__ import annotations`
        annotation = getattr(getattr(owner, "__init__", None), "__globals__", {}).get(annotation)
    classes = (*getattr(owner, "__mro__", ()), annotation)
    if any(str(getattr(cls, "__module__", "")).startswith("transformers.") for cls in classes):
        from transformers import AutoConfig

        return AutoConfig.for_model(**config)
    return _Config(**config)
