"""The ropes of the models that mlx-lm builds. mlx evaluates lazily, so weights of any size are never computed."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import math
import re
from typing import Any

from .engines import replaced as _replaced
from .model import CannotRecordError
from .model_files import TOKENS, YARN_BY_ONE, AbsentError, Engine, Rope
from .peers import package

FILLED: dict[str, Any] = {
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_method": "MLA",
    "block_dim": 64,
    "first_k_dense_replace": 1,
    "group_norm_size": 1,
    "head_dim": 64,
    "intermediate_size": 64,
    "is_moe_layer": [False] * 64,
    "layernorm_epsilon": 1e-6,
    "max_position_embeddings": 256,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "mlp_bias": False,
    "model_max_length": 256,
    "moe_layer_freq": 1,
    "n_group": 1,
    "num_attention_groups": 8,
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "post_norm": False,
    "qk_norm": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 64,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "zero_expert_type": "identity",
}
"""Values of keys that a class of mlx-lm requires and that the class of transformers does not write."""


INSIDE = {"qwen3_vl_moe": {"text_config.tie_word_embeddings": False}}
"""Such values of keys of a text model."""


def _is_rope(module: Any) -> bool:
    name = type(module).__name__
    return bool(re.search("rope|rotary", name, re.I)) and not re.search("Attention|Vision|NoPE", name)


def classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the model class of a config and the class of its arguments."""
    core = package("mlx.core")
    utils = importlib.import_module("mlx_lm.utils")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), _replaced(core.fast, "metal_kernel", _no_kernel):
            return utils._get_classes(config)  # type: ignore[no-any-return]
    except ValueError as error:
        raise AbsentError(str(error)) from error
    except SystemExit as error:  # the file exits if a package that it needs is missing
        raise CannotRecordError(printed.getvalue().strip()) from error


def file(config: dict[str, Any]) -> str:
    """Return the file of the model."""
    return f"models/{classes(config)[0].__module__.rpartition('.')[2]}.py"


def fill(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Add the keys that the class of arguments requires. Return the config and these keys without those of rotation."""
    parameters = inspect.signature(classes(config)[1]).parameters.values()
    missing = [one.name for one in parameters if one.default is one.empty and one.name not in config]
    values = {name: FILLED[name] for name in missing if name in FILLED}
    filled = {**config, **values}
    added = INSIDE.get(config["model_type"], {})
    for path, value in added.items():
        inside, key = path.split(".")
        if key in filled[inside]:
            continue
        filled[inside] = {**filled[inside], key: value}
        values[path] = value
    return filled, list(values)


def layers(config: dict[str, Any], tokens: int = TOKENS) -> list[Rope | None]:
    """Build the model of a config, and return the rope that each layer applies in a forward pass."""
    core = package("mlx.core")
    core.set_default_device(core.cpu)
    model_class, arguments = classes(config)
    with contextlib.redirect_stdout(io.StringIO()):  # some files print that they ignore a scaling
        model = model_class(arguments.from_dict(json.loads(json.dumps(config))))
        called = _called(model)
    modules = dict(model.named_modules())
    ropes: list[Rope | None] = [None] * len(model.layers)
    known: dict[str, Rope] = {}
    for name, channels in called:
        place = re.search(r"(?:layers|blocks|h)\.(\d+)\.(?!indexer|.*\.indexer)", name)
        if place is None:
            continue
        module = modules[name]
        state = repr((type(module), channels, sorted((k, _plain(v)) for k, v in {**vars(module), **module}.items())))
        if state not in known:
            known[state] = _measure(module, channels, tokens)
        if ropes[int(place[1])] not in (None, known[state]):
            raise CannotRecordError(f"layer {place[1]} has several ropes")
        ropes[int(place[1])] = known[state]
    return ropes


def _plain(value: Any) -> str:
    return repr(value.tolist()) if hasattr(value, "tolist") else str(value) if not callable(value) else ""


def _no_kernel(**_: Any) -> Any:
    core = package("mlx.core")
    return lambda *, output_shapes, **_: [core.zeros(shape) for shape in output_shapes]


def _called(model: Any) -> list[tuple[str, int]]:
    """Return the names of the rotary modules that a forward pass calls, and the channels of their inputs."""
    core = package("mlx.core")
    modules = {name: module for name, module in model.named_modules() if _is_rope(module)}
    names = {id(module): name for name, module in modules.items()}
    found: dict[str, int] = {}
    inside: list[bool] = []
    before = core.fast.rope

    def rotate(*arguments: Any, **named: Any) -> Any:
        if not inside:
            raise CannotRecordError("a layer rotates outside of a rotary module")
        return before(*arguments, **named)

    with contextlib.ExitStack() as stack:
        for cls in {type(module) for module in modules.values()}:
            stack.enter_context(_observed(cls, names, found, inside))
        stack.enter_context(_replaced(core.fast, "rope", rotate))
        model(core.array([[1, 2, 3]]))
    return list(found.items())


def _observed(cls: Any, names: dict[int, str], found: dict[str, int], inside: list[bool]) -> Any:
    """Replace `__call__` of a class by one that notes the module and the channels of its input."""
    before = cls.__call__

    def call(self: Any, x: Any, *arguments: Any, **named: Any) -> Any:
        found[names.get(id(self), "")] = x.shape[-1]
        inside.append(True)
        try:
            return before(self, x, *arguments, **named)
        finally:
            inside.pop()

    return _replaced(cls, "__call__", call)


def _measure(module: Any, channels: int, tokens: int) -> Rope:
    """Rotate each channel alone at positions 0 and 1, in a sequence of `tokens` tokens."""
    core = package("mlx.core")
    if "Dynamic" not in type(module).__name__:
        tokens = 2  # only this class depends on the length
    one_hot = core.broadcast_to(core.eye(channels).reshape(channels, 1, 1, channels), (channels, 1, tokens, channels))
    rotated = module(one_hot).astype(core.float32)[:, 0, :2, :].tolist()
    pairs = []
    for i, (start, turned) in enumerate(rotated):
        partners = [j for j, value in enumerate(turned) if value and j != i]
        if not partners and turned[i] == start[i] and start[i] == 1.0:
            continue  # not rotated
        if len(partners) > 1:
            raise CannotRecordError("a channel rotates with several others")
        if partners and partners[0] > i:
            pairs.append((i, partners[0], math.atan2(turned[partners[0]], turned[i]), start[i]))
    return rope_of(pairs, channels)


def rope_of(pairs: list[tuple[int, int, float, float]], head_dim: int) -> Rope:
    """Return the rope of pairs, each of which has two channels, an angle at position 1, and a length at position 0."""
    first = pairs[0][0]
    steps = {j - i for i, j, _, _ in pairs}
    if len(steps) > 1:
        raise CannotRecordError("the pairs have several distances")
    return {
        "head_dim": head_dim,
        "rotary_dim": 2 * len(pairs),
        "pairing": "interleaved" if steps == {1} else "half",
        "offset": first,
        "inv_freq": [pair[2] for pair in pairs],
        "attention_factor": pairs[0][3],
    }


ENGINE = Engine(
    "mlx_lm",
    "mlx-lm",
    file,
    layers,
    fill,
    {
        "deepseek_v2": {"rope_scaling": YARN_BY_ONE},
        "hunyuan": {"rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0}},
        "exaone4": {"rope_scaling": None},
        "glm4_moe": {"rope_scaling": None},
        "llama4": {"rope_scaling": None},
        "minicpm3": {"rope_scaling": {"type": "longrope"}},
        "minimax": {"rotary_dim": 64},
        "solar_open": {"partial_rotary_factor": 1.0},
    },
    runs=True,
)
