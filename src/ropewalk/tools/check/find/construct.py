"""Construct a class, or call a function that computes all tables, with a value for each of its parameters."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ropewalk import _checks
from ropewalk.tools.check.expected import Expected
from ropewalk.tools.check.find import grid, memory, uses
from ropewalk.tools.check.find.target import Method, function_of, name_of
from ropewalk.tools.check.find.words import (
    GRID,
    GRID_AXIS,
    NOT_ROTATED,
    SPELLINGS,
    filled,
    match,
    no_known_names,
    parameters,
    read_call,
)

# What a constructor takes → the names that public classes and functions have for it.
_NAMES = {
    "dim": "head_dim d head_size d_head d_k size dim_head n_elem dims kv_channels input_size",
    "rotary_dim": "rot_dim rotary_ndims rope_dim qk_rope_head_dim",
    "rotary_share": SPELLINGS["rotary_share"],
    "base": "theta rope_theta rope_base rotary_emb_base rotary_base max_period",
    "length": "end max_positions max_position_embeddings max_seq_len max_len seq_len max_seq_length context_length "
    "context_len seqlen max_length block_size n_positions",
    "config": "args cfg conf params model_args model_config hps hparams",
    "sections": SPELLINGS["sections"],
    "mixed": "mrope_interleaved",  # whether the sections are interleaved
    "interleaved": SPELLINGS["interleaved"],
    "is_neox": SPELLINGS["is_neox"],
    "dtype": "",
    "axes_dim": "axes_dims rope_dim_list rope_axes_dim",
    "embed_dim": "n_embd hidden_size d_model embedding_size",
    "heads": "n_head n_heads num_heads num_attention_heads nhead",
    "layer_type": "",
    "layer_index": "layer_idx layer_id i_layer",  # from 0, unlike Megatron's layer_number
    "scaling": "rope_scaling rope_parameters freq_config scaling_config extra_config",
    "scaled": "use_scaled use_scaled_rope",
}
_DIM = r"^(?!n_|num_|position_dim|(seq|unsqueeze)_dim).*(dim|width|feature)|^d_"
_PARTS = {
    "base": r"(^|_)(base|theta)(_|$)(?!fps|size|height|width|resolution|len|seq)",
    "rotary_share": "fraction|percent|proportion|partial",
}
_ORIGINAL = "original_max_position_embeddings"
_OF_ORIGINAL = "orig|train"
# Attribute of a scheme → the other names that parameters of a constructor have for it.
_SCALING = {
    "factor": "scaling_factor scale_factor rope_factor rope_scale linear_scale scale",
    _ORIGINAL: "initial_context_length original_context_length original_max_seq_len "
    "old_context_len orig_max_position original_seq_len orig_ctx seq_len_train original_max_len",
    "rope_type": "",
    "beta_fast": "ntk_beta",
    "beta_slow": "ntk_alpha",
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"), ""),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "truncate"), ""),
}

_SIDE = 256  # of a grid
_SQUARE = "pt_seq_len"  # in EVA and its copies, the side of a square
_CONFIGS = {"config", *_NAMES["config"].split()}
_OF_A_HEAD = {"head_dim", "head_size", "d_head", "dim_head", "d_k", "kv_channels"}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a constructor was passed, as far as it matters later. None means that it has no parameter for it."""

    base: float | None
    length: int | None  # of positions
    sizes: frozenset[str] = frozenset()  # the roles of those for sizes: "dim" and "rotary_dim", also "layer_index"
    adapter: str = ""  # the function to write that passes options, if nothing says what they are
    unknown: tuple[str, ...] = ()  # the parameters that got None
    defaults: str = ""  # the dtype that it has by default, instead of which that of x was passed

    def takes(self, channels: int, rotary_dim: int) -> bool:
        """Whether the constructor takes a number of channels of a head, and of rotated channels."""
        return "dim" in self.sizes and (rotary_dim == channels or "rotary_dim" in self.sizes)


def chosen(constructor: Any, expected: Expected) -> dict[str, Any]:
    """Return the values, by name, of those parameters of a constructor whose names say what they are."""
    owner = getattr(constructor, "owner", constructor)
    known = parameters(owner) or {}
    values = _by_name(known, expected, uses.roles(owner))
    values |= config_objects(owner, expected)
    if sides := sides_of(constructor):
        rows_and_columns = iter(sides)
        for name, is_side in _sides(owner).items():
            frames = (1,) * (str(known[name].annotation).count("int") - 2)
            values[name] = next(rows_and_columns, None) if is_side else (*frames, *sides)
        values = {name: value for name, value in values.items() if not re.search(NOT_ROTATED, name)}
        if _SQUARE in values and "dim" in values:  # of one axis
            values["dim"] = expected.rotary_dim // 2
    elif is_constructor(constructor):  # the largest positions
        values |= {name: _SIDE if side else (_SIDE, _SIDE) for name, side in _sides(owner).items()}
        values |= {name: _SIDE for name in known if re.search("^max_(h|w|height|width)$", name)}
    return values | filled(owner, values)


def sides_of(constructor: Any) -> tuple[int, int] | None:
    """Return the rows and columns with which a class is constructed whose objects take no positions, or None."""
    owner = getattr(constructor, "owner", constructor)
    if not is_constructor(constructor) or not (sides := _sides(owner)):
        return None
    called = function_of(constructor)
    if "positions" in read_call(called).parameter_of or grid.sizes_of(called):
        return None
    return grid.SIDES[1:] * 2 if _SQUARE in sides else grid.SIDES


def tokens_before(constructor: Any) -> int:
    """Return the number of tokens, such as a class token, that come before those of a grid by default."""
    known = parameters(getattr(constructor, "owner", constructor)) or {}
    counts = (p.default for name, p in known.items() if re.search(NOT_ROTATED, name))
    return next((int(count) for count in counts if isinstance(count, int)), 0)


def _sides(owner: Any) -> dict[str, bool]:
    """Return the parameters for the size of a grid, and whether each is for one of its sides."""
    known, used = parameters(owner) or {}, uses.roles(owner)
    whole = [n for n in known if re.search(GRID, n) or used.get(n) == "sides"]
    names = [n for n in known if n in whole or re.search(GRID_AXIS, n)]
    names = [n for n in names if used.get(n) not in ("dim", "half", "head_size")]
    names = [n for n in names if n != "input_size" or known[n].annotation not in (int, "int")]
    required = [n for n in names if known[n].default is inspect.Parameter.empty]
    fixed = [n for n in names if used.get(n) == "sides" or re.search("^((grid|feat)_.*|h|w|height|width)$", n)]
    fixed = [n for n in fixed if known[n].default]
    if not required and (len(fixed) > 1 or {*fixed} & {*whole}):  # a default is the only size, too
        required = fixed
    return {n: n not in whole for n in [*required, *({_SQUARE} & {*known})]}


def config_objects(owner: Any, expected: Expected) -> dict[str, Any]:
    """Return an object for each parameter that is for a config."""
    known = parameters(owner) or {}
    kinds = {name: _annotation(owner, known[name]) for name in configs(owner)}
    caches = {n for n, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, dict)} - _CONFIGS
    return {n: kind() if n in caches else _config_object(owner, kind, expected) for n, kind in kinds.items()}


def configs(owner: Any) -> set[str]:
    """Return the parameters that are for a config."""
    known = parameters(owner) or {}
    read = {n for n, role in uses.roles(owner).items() if role == "config" and n not in _NAMES["scaling"].split()}
    return {name for name, p in known.items() if name in _CONFIGS or (name in read and p.default is p.empty)}


def _by_name(
    known: dict[str, inspect.Parameter], expected: Expected, used: Mapping[str, str] | None = None
) -> dict[str, Any]:
    parameter_of = match(known, _NAMES, _PARTS, used)
    values: dict[str, Any] = {}
    scaling = getattr(expected.unresolved or expected.rope, "scaling", None)
    for role, name in parameter_of.items():
        default = None if known[name].default is inspect.Parameter.empty else known[name].default
        if role == "dim":
            is_of_head = _is_of_head(name, used) or "rotary_share" in parameter_of  # of which it is the share
            values[name] = expected.head_dim if is_of_head else expected.rotary_dim
        elif role == "rotary_dim":
            widths = [2 * size for size in expected.sizes_of_axes()]
            values[name] = widths if "list[" in str(known[name].annotation).lower() else expected.rotary_dim
        elif role == "rotary_share":
            pairs = expected.rotary_dim // 2 if expected.rope is None else int((expected.rope.inv_freq != 0).sum())
            values[name] = 2 * pairs / expected.head_dim
        elif role == "base":
            values[name] = expected.base or default or 10_000.0
        elif role == "length":
            values[name] = _original_length(scaling, known) or expected.table_length or default or 4096
        elif role == "axes_dim" and default and sum(default) != expected.head_dim:
            values[name] = [2 * size for size in expected.sizes_of_axes(len(default))]
        elif role in ("sections", "axes_dim") and (default is None or "dim" in parameter_of or expected.axes):
            values[name] = [(1 if role == "sections" else 2) * size for size in expected.sizes_of_axes()]
        elif role == "mixed" and expected.axes is not None:
            values[name] = [*expected.axes.axis] != sorted(expected.axes.axis)
        elif role in ("interleaved", "is_neox") and (expected.pairing is not None or default is None):
            values[name] = (expected.pairing == "interleaved") == (role == "interleaved")
        elif role == "scaling" and scaling is not None and scaling.in_configs:
            stated = expected.config if isinstance(expected.config, Mapping) else {}
            own_names = {} if name.startswith("rope_") else of_scaling(scaling)
            values[name] = stated.get(name) or scaling.to_hf() | own_names
            if known[name].annotation in (float, "float"):
                values[name] = getattr(scaling, "factor", 1.0)
            elif "tuple[tuple" in str(known[name].annotation).lower().replace("typing.", ""):
                values[name] = tuple(values[name].items())
        elif role == "layer_type" and expected.layer_type is not None:
            values[name] = expected.layer_type
        elif role == "layer_index":
            values[name] = expected.layer
        elif role == "scaled":
            values[name] = scaling is not None
        elif role == "dtype" and (default is None or (isinstance(default, torch.dtype) and default != torch.float32)):
            values[name] = expected.dtype or torch.float32
        elif role in ("embed_dim", "heads") and {"embed_dim", "heads"} <= {*parameter_of} and "dim" not in parameter_of:
            values[name] = 4 * expected.head_dim if role == "embed_dim" else 4
        elif role == "embed_dim" and "dim" not in parameter_of:
            values[name] = expected.head_dim
    values = {name: value for name, value in of_scaling(scaling).items() if name in known} | values
    parts = {
        "attn_scal|attention_scal": 1.0 if expected.rope is None else expected.rope.attention_factor,
        "^patch_size": 1,
        NOT_ROTATED: 0,
        "nope": 0 if expected.rope is None else expected.rope.rotary_offset,  # the channels before those that rotate
        _OF_ORIGINAL: getattr(scaling, _ORIGINAL, None),
        "scal": getattr(scaling, "factor", 1.0),
        _DIM: expected.head_dim,
        "heads|_head$": 4,
        "len|ctx|context|(max|num|n)_(pos|seq|tok)": expected.table_length or 4096,
        "offset|start": 0,
    }
    for part, size in parts.items():
        for name, p in known.items():
            if (p.default is p.empty or part in (NOT_ROTATED, "nope")) and size is not None and re.search(part, name):
                annotation = str(p.annotation).lower()
                is_of_axes = part == "^patch_size" and re.search("tuple|list|sequence", annotation)
                values.setdefault(name, (1,) * (2 if annotation.count("int") == 2 else 3) if is_of_axes else size)
    return values


def _is_of_head(name: str, used: Mapping[str, str] | None) -> bool:
    """Return whether a number of channels is that of a head, and not of its rotated part."""
    return name in _OF_A_HEAD or (used or {}).get(name) == "head_size"


def _original_length(scaling: Any, known: Mapping[str, Any]) -> int | None:
    """Return the original length of a scheme if parameters state its factor and not that length, as in vLLM."""
    stated = {key for key in ("factor", _ORIGINAL) if {key, *_SCALING[key].split()} & {*known}}
    is_stated = stated != {"factor"} or any(re.search(_OF_ORIGINAL, name) for name in known)
    return None if is_stated else getattr(scaling, _ORIGINAL, None)


def of_scaling(scaling: Any) -> dict[str, Any]:
    """Return the attributes of a scheme by every name that they have, or nothing for None."""
    stated = {key: getattr(scaling, key, None) for key in _SCALING}
    return {n: stated[key] for key, names in _SCALING.items() for n in (key, *names.split()) if stated[key] is not None}


def construct(constructor: Any, expected: Expected, free: Collection[str] = ()) -> tuple[Any, Arguments]:
    """Call a constructor with a value for each of its parameters, and return the object and what was passed.

    If `free` names any of them, nothing is called, and all others are fixed. Those whose names are unknown get None.

    Raises:
        RopeError: the constructor raises.
    """
    owner, values = getattr(constructor, "owner", constructor), chosen(constructor, expected)
    for name in (*free, "dtype") if free else ():  # which the tensors of a call have
        values.pop(name, None)
    known = {name: p for name, p in (parameters(owner) or {}).items() if name not in free}
    parameter_of = match(known, _NAMES, _PARTS, uses.roles(owner))
    missing = tuple(name for name in known if name in values and values[name] is None)
    others = (name for name in known if name not in (*values, "device", "dtype"))
    options = [name for name in others if isinstance(known[name].default, int | float | str | None)]
    stated = f" and states {', '.join(options)}" if options else ""
    fix = f"Check a function that constructs it{stated}: def make({', '.join(values)})."
    while True:
        try:
            built = partial(constructor, **values) if free else memory.construct(constructor, values)
            break
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # a constructor may raise anything
            if isinstance(config := getattr(e, "obj", None), _NamedConfig):  # a key whose name says nothing
                setattr(config, key := getattr(e, "name", ""), None)
                missing += (key,)
                continue
            if missing:
                raise no_known_names(constructor, missing) from e
            named = ", ".join(f"{name}={_checks.shown(value)}" for name, value in values.items() if name != "config")
            fix = f"{fix} Or pass a config with the keys that it reads."
            action = f"check: {name_of(constructor)}({named}) cannot be constructed"
            raise _checks.error_from(action, e, fix, memory.place_of(e)) from e
    if isinstance(module := getattr(built, "__self__", built), torch.nn.Module):
        module.eval()  # without random positions
        delayed: Any = vars(type(module)).get("reset_parameters", lambda _: None)
        with contextlib.suppress(Exception):
            delayed(module)  # which computes the table, as in Perception LM
    sizes = frozenset(role for role, name in parameter_of.items() if name in values)
    base, length = (values.get(parameter_of.get(role, "")) for role in ("base", "length"))
    is_grid = any(v in (_SIDE, (_SIDE, _SIDE)) and re.search(f"{GRID}|{GRID_AXIS}", n) for n, v in values.items())
    length = _SIDE if is_grid else length
    base = None if configs(owner) and expected.config is not None else base  # the config states it, too
    sizes = sizes & {"layer_index"} if "config" in sizes and "dim" not in sizes else sizes
    if not _is_of_head(parameter_of.get("dim", "head_dim"), uses.roles(owner)):  # it may be of the rotated channels
        sizes |= {"rotary_dim"}
    adapter = fix if options and "config" not in parameter_of else ""
    passed = {name: known[name].default for name, value in values.items() if isinstance(value, torch.dtype)}
    defaults = ", ".join(f"{n}={d}" for n, d in passed.items() if isinstance(d, torch.dtype) and d != values[n])
    return built, Arguments(base, length, sizes, adapter, missing, defaults)


def is_constructor(target: Any) -> bool:
    """Return whether this object must be constructed before it can rotate: a class, or a method of a class."""
    return inspect.isclass(target) or isinstance(target, Method)


def takes_sizes(function: Any) -> bool:
    """Return whether a function makes an object or tables: it takes the size of a head, or a config, or nothing."""
    known = parameters(function) or {}
    is_empty = inspect.isfunction(function) and not inspect.signature(function).parameters
    return (
        is_empty
        or any(re.search(_DIM, name) for name in known)
        or bool({"dim", "config"} & {*match(known, _NAMES, used=uses.roles(function))})
    )


class _Config(SimpleNamespace):
    """A config whose keys are attributes, like the config objects of transformers: that of the text model alone."""

    def __getattr__(self, name: str) -> Any:
        if name == "text_config":
            return self
        if name == "head_dim":  # as config classes derive it
            return getattr(self, "qk_rope_head_dim", None) or self.hidden_size // self.num_attention_heads
        raise AttributeError(f"the config has no {name}")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def keys(self) -> Iterable[str]:
        """Return the names of the attributes, with which `**` reads all of them."""
        return vars(self).keys()

    def items(self) -> Iterable[tuple[str, Any]]:
        """Return the names and the values of the attributes, like `dict.items`."""
        return vars(self).items()

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute or the default, like `dict.get`."""
        return getattr(self, key, default)


class _NamedConfig(_Config):
    """The config of code for which none is stated. Each key has the value that its name means when it is read."""

    def __getattr__(self, name: str) -> Any:
        expected = self.__dict__["expected"]
        return values[name] if name in (values := _of_keys([name], expected)) else super().__getattr__(name)


def _of_keys(keys: Iterable[str], expected: Expected) -> dict[str, Any]:
    """Return the values of those keys of a config whose names say what they are. A `dim` is that of the model."""
    fixed: dict[str, Any] = dict.fromkeys(
        ("dim", "emb_dim", "model_dim", "embed_dim", *_NAMES["embed_dim"].split()), 4 * expected.head_dim
    )
    fixed |= dict.fromkeys(_NAMES["heads"].split(), 4) | {"device": memory.current().device}
    if expected.config is None:
        base = expected.base or 10_000.0
        fixed |= {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    values: dict[str, Any] = {}
    for key in keys:
        known = {key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY)}
        of_model = {key: 4 * expected.head_dim} if re.search("hidden_(dim|size)$", key) else {}
        values |= {key: fixed[key]} if key in fixed else of_model or _by_name(known, expected)
    return values


def _annotation(owner: Any, parameter: inspect.Parameter) -> Any:
    """Return what a parameter is annotated with, also in a module with `from __future__ import annotations`."""
    if not isinstance(annotation := parameter.annotation, str):
        return annotation
    code = getattr(owner, "__init__", None) if inspect.isclass(owner) else owner
    return getattr(code, "__globals__", {}).get(annotation) or getattr(owner, annotation, None)


def _config_object(owner: Any, annotation: Any, expected: Expected) -> Any:
    """Build the object to pass for the user's config, with the same keys and no others.

    A class of transformers, or one that is annotated with a config class of transformers, gets an object of that
    class, which adds the defaults of that version. A dataclass gets the arguments that its fields name. If no config
    is stated, the keys have the values that their names mean.
    """
    config = expected.config
    if not isinstance(config, Mapping | None):
        config = copy.deepcopy(config)
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    classes = (*getattr(owner, "__mro__", ()), annotation)
    if any(str(getattr(cls, "__module__", "")).startswith("transformers.") for cls in classes):
        from transformers import AutoConfig

        return annotation(**_of_keys(_SIZES, expected)) if config is None else AutoConfig.for_model(**config)
    if inspect.isclass(annotation) and dataclasses.is_dataclass(annotation):
        known, keys = parameters(annotation) or {}, config or {}
        required = [name for name, p in known.items() if p.default is p.empty]
        of_head = {} if {*_NAMES["heads"].split()} & {*known} else dict.fromkeys({"dim"} & {*known}, expected.head_dim)
        with contextlib.suppress(TypeError, ValueError):
            return annotation(
                **dict.fromkeys(required)
                | _of_keys(known, expected)
                | of_head
                | {name: keys[name] for name in known if name in keys}
            )
    return _NamedConfig(expected=expected) if config is None else _Config(**config)


_SIZES = ("head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads")  # of a config of transformers
