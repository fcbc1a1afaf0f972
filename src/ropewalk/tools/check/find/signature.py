"""Find the role of each parameter of a function or class (q, k, cos, positions and so on), and construct a class.

The role follows from the parameter's name, or the user states it as `call`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ropewalk import _checks
from ropewalk.tools.check.expected import Expected
from ropewalk.tools.check.find.target import Method, name_of

# Role of a parameter of a function that rotates → the common names of such a parameter.
CALL_NAMES = {
    "q": "q xq query queries query_states query_layer",
    "k": "k xk key keys key_states key_layer",
    "x": "x t input inputs tensor hidden_states x_in states qk tokens",
    "cos": "cos cos_emb cosine cosines cos_cached freqs_cos rotary_cos cos_table",
    "sin": "sin sin_emb sine sines sin_cached freqs_sin rotary_sin sin_table",
    "table": "freqs_cis freqs_complex freqs cis rope_cache emb pos_emb rope cos_sin angles sinusoidal_pos rotary_emb "
    "image_rotary_emb position_embeddings",
    "positions": "positions position_ids pos input_pos position pos_ids indices token_positions ids coords",
    "offset": "offset start_pos seqlen_offset seqlen_offsets start past_length cache_position_start",
    "seq_len": "seq_len seqlen max_seq length",
    "axis": "unsqueeze_dim",
    "layer_type": "layer_type",
    "frames": "frames frame time temporal t n_frames num_frames t_pos pos_t t_ids grid_t",
    "height": "height rows row h y ys n_rows num_rows h_pos pos_h y_pos pos_y h_ids row_ids grid_h",
    "width": "width columns cols column col w xs n_cols num_cols w_pos pos_w x_pos pos_x w_ids col_ids grid_w",
    "grid": "grid grid_size grid_shape grid_hw grid_thw hw thw feat_shape",
    "sections": "mrope_section mrope_sections sections section rope_section",
}
# The same for parameters of a constructor, or of a function that computes cos and sin.
MAKE_NAMES = {
    "dim": "dim head_dim d head_size d_head d_k size dim_head embedding_size n_elem features",
    "rotary_dim": "rotary_dim rot_dim rotary_ndims rope_dim",
    "base": "base theta rope_theta rope_base freq_base rotary_emb_base rotary_base",
    "length": "end max_positions max_position_embeddings max_seq_len max_len max_position seq_len max_seq_length "
    "context_length max_length block_size max_position_embedding num_positions",
    "config": "config args cfg params model_args",
    "sections": CALL_NAMES["sections"],
    "axes_dim": "axes_dim axes_dims axis_dims axes_channels",
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
    roles = match(known, CALL_NAMES)
    if roles.get("x") == "t" and {"height", "width"} <= {*roles}:
        roles["frames"] = roles.pop("x")
    if "q" in roles and "k" not in roles and "x" not in roles:
        roles["x"] = roles.pop("q")
    return roles


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
    allowed = {*CALL_NAMES, "_"}
    spelled = {word: role for role, spellings in CALL_NAMES.items() for word in (*spellings.split(), role)}
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


_OF_A_HEAD = {"head_dim", "head_size", "d_head", "dim_head", "d_k"}


@dataclass(frozen=True)
class Arguments:
    """What a constructor was passed, as far as it matters later.

    Args:
        base: the base that is passed, or None if the constructor has no parameter for it.
        length: the number of tokens that is passed, or None if the constructor has no parameter for it.
        layer_type: the kind of the expected layer in the config that is passed, such as "full_attention", or None.
    """

    base: float | None
    length: int | None
    layer_type: str | None


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
        elif role == "base":
            base = values[name] = expected.base or default or 10_000.0
        elif role == "length":
            length = values[name] = expected.table_length or default or 4096
        elif role in ("sections", "axes_dim") and (default is None or "dim" in parameter_of or expected.axes):
            values[name] = expected.sizes_of_axes(1 if role == "sections" else 2)
        elif role == "config" and expected.config is not None:
            values[name] = _config_object(owner, known[name].annotation, expected.config)
    values.update(expected.arguments)
    missing = [name for name, p in known.items() if p.default is inspect.Parameter.empty and name not in values]
    if missing:
        must = "every parameter of the class must have a default or a name whose meaning is known"
        fix = f"Pass a value: --arg {missing[0]}=VALUE (in Python, arguments={{{missing[0]!r}: VALUE}})."
        if missing[0] == parameter_of.get("config"):
            fix = f"Pass the config that it reads: {_checks.argument('config')}."
        raise _checks.error("check", must, ", ".join(missing), fix)
    kinds = getattr(values.get(parameter_of.get("config", "")), "layer_types", None)
    try:
        built = constructor(**values)
    except Exception as e:  # a constructor may raise anything
        named = ", ".join(f"{name}={_checks.shown(value)}" for name, value in values.items() if name != "config")
        fix = "Pass other arguments (--arg), or a config with the keys that it reads."
        raise _checks.error_from(f"check: {name_of(constructor)}({named}) cannot be constructed", e, fix) from e
    return built, Arguments(base, length, kinds[expected.layer] if kinds else None)


def is_constructor(target: Any) -> bool:
    """Return whether this object must be constructed before it can rotate: a class, or a method of a class."""
    return inspect.isclass(target) or isinstance(target, Method)


class _Config(SimpleNamespace):
    """A config whose keys are attributes, like the config objects of transformers."""

    def __getattr__(self, name: str) -> Any:
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
