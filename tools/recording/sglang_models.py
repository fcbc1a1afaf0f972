"""The ropes of SGLang's models: the class of a model is built with stubs for everything that needs a GPU.

Its calls of `get_rope` are recorded. Then SGLang's own `get_rope` builds the rotary modules, which rotate in PyTorch.
A model whose file has a rotary class of its own need not rotate with them, so its forward pass is run.
The config is read by SGLang's own classes or by those of transformers, in the version that SGLang requires.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import json
import pkgutil
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .engines import replaced
from .measure import pairs_of
from .mlx_models import rope_of
from .model import CannotRecordError
from .model_files import TOKENS, AbsentError, BorrowedError, Engine, Rope
from .stubbed import Plain, make_layers, package_folder, stubs

FILLED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"moe_layer_freq": 1},
    "deepseek_v3": {"moe_layer_freq": 1},
    "deepseek_v32": {"moe_layer_freq": 1},
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "exaone_moe": {"is_moe_layer": [False] * 64},
    "falcon_h1": {"head_dim": 64},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm_moe_dsa": {"moe_layer_freq": 1},
    "hy_v3": {"route_norm": True},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
}
"""Values of keys that a file of SGLang reads and that the class of transformers does not have."""

_ROTARY = "srt.layers.rotary_embedding"
_COMMON = "utils/hf_transformers/common.py"


class Recorded(nn.Module):
    """Stands for a rotary module. It holds the arguments of the call that builds the module."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__()
        self.arguments, self.named = copy.deepcopy(arguments), copy.deepcopy(named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return None

    @property
    def later(self) -> dict[str, Any]:
        """The attributes that a model sets after the call, such as `is_neox_style`."""
        return {k: v for k, v in vars(self).items() if k not in {*vars(nn.Module()), "arguments", "named"}}


def function(path: Path, name: str, names: dict[str, Any] | None = None) -> Any:
    """Run one function of a file without the rest of the file. `names` are the names that it needs."""
    [found] = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name]
    names = {} if names is None else names
    exec(compile(ast.Module([found], []), str(path), "exec"), names)
    return names[name]


class _Device(str):
    """The CPU, for code that passes a device to PyTorch, and for code that asks for its kind."""

    def __new__(cls, *_: Any) -> _Device:
        return super().__new__(cls, "cpu")

    device = "cpu"


class SGLang:
    """SGLang's models and rotary modules, imported with stubs for the rest of the package until the process ends."""

    def __init__(self) -> None:
        self.folder = Path(package_folder("sglang")) / "srt"
        self.stack = stack = ExitStack()  # never closed: the stubs stay until the process ends
        stack.enter_context(replaced(torch, "compile", lambda *_, **__: lambda decorated: decorated))
        values = {
            "BaseFusedOp": Plain,  # chooses a kernel
            "append_stages": lambda *stages: [None] * len(stages),
            "declare_ffn": lambda **facts: SimpleNamespace(**facts),
            "get_device": _Device,
            "get_pp_indices": lambda count, *_: (0, count),
            "get_rope_config": function(self.folder / _COMMON, "get_rope_config"),
            "init_expert_location": "trivial",
            "is_first_rank": True,
            "is_last_rank": True,
            "make_layers": make_layers,
            "make_pp_layers": functools.partial(make_layers, pp_rank=0),
            "rl_on_policy_target": None,
            "resolve_linear_parallel_group": lambda *_: (0, 1),
        }
        stack.enter_context(stubs("sglang", "srt.models", "srt.configs", _ROTARY, values=values))
        rotary = importlib.import_module(f"sglang.{_ROTARY}")
        self.get_rope = rotary.get_rope
        for module in (rotary, importlib.import_module(f"sglang.{_ROTARY}.factory")):
            for name in {"get_rope", "get_rope_wrapper", "get_rope_cpu"} & {*vars(module)}:
                stack.enter_context(replaced(module, name, Recorded))
        self.classes: dict[str, Any] = {}
        models = importlib.import_module("sglang.srt.models")
        for _, name, _ in pkgutil.iter_modules(models.__path__, "sglang.srt.models."):
            entries = getattr(importlib.import_module(name), "EntryClass", [])
            self.classes |= {each.__name__: each for each in (entries if isinstance(entries, list) else [entries])}
        registry = re.search(r"_CONFIG_REGISTRY.*?in \[(.*?)\]", (self.folder / _COMMON).read_text(), re.DOTALL)
        configs = importlib.import_module("sglang.srt.configs")
        known = [getattr(configs, name, None) for name in re.findall(r"\w+", registry[1] if registry else "")]
        self.configs = {each.model_type: each for each in known if each is not None}


@functools.cache
def sglang() -> SGLang:
    """Return SGLang's modules."""
    return SGLang()


@functools.cache
def architectures() -> dict[str, str]:
    """Return the class of transformers for each model_type: the one for images and text, else the one for text."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return {name: each if isinstance(each, str) else each[0] for name, each in found.items()}


def architecture(config: dict[str, Any], known: Any) -> str:
    """Return the class that a config names, if an engine has it, else the class of transformers for its model_type.

    Raises:
        BorrowedError: only transformers has the class, and other programs can use its attention.
        AbsentError: there is no such class.
        CannotRecordError: the config names no class, and transformers has none for its model_type.
    """
    named = [*(config.get("architectures") or []), architectures().get(config["model_type"])]
    names = [name for name in named if name]
    found = next((name for name in names if name in known), None)
    if found is not None:
        return found
    if not names:
        raise CannotRecordError("no class is known for this model_type")
    transformers = importlib.import_module("transformers")
    cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if cls is not None and cls.is_backend_compatible():
        raise BorrowedError(names[0])
    raise AbsentError(f"there is no class {names[0]}")


def file(config: dict[str, Any]) -> str:
    """Return the file of the model."""
    name = architecture(config, sglang().classes)
    return f"srt/models/{sglang().classes[name].__module__.rpartition('.')[2]}.py"


def config_object(config: dict[str, Any], own: dict[str, Any]) -> Any:
    """Return the object that an engine reads from a config: one of its own classes, or that of transformers."""
    values = json.loads(json.dumps(config))
    if config["model_type"] in own:
        return own[config["model_type"]].from_dict({"architectures": [], **values})
    return importlib.import_module("transformers").AutoConfig.for_model(**values)


def layers(config: dict[str, Any], tokens: int = TOKENS) -> list[Rope | None]:
    """Build the model of a config, and return the rope that each layer builds."""
    engine = sglang()
    values = config_object(config, engine.configs)
    dtype = replaced(torch, "get_default_dtype", lambda: getattr(torch, config.get("torch_dtype", "float32")))
    with torch.device("meta"), dtype:
        model = engine.classes[architecture(config, engine.classes)](config=values)
    if text := _with_own_rotary(model):
        rotated = [_rotated_in_forward(text, layer, tokens) for layer in list(text.layers)]
        distinct = {q.numpy().tobytes(): q for q in rotated}
        ropes = {key: rope_of(pairs_of(q), q.shape[-1]) for key, q in distinct.items()}
        return [ropes[q.numpy().tobytes()] for q in rotated]
    named = {name: module for name, module in model.named_modules() if isinstance(module, Recorded)}
    return per_layer(named, lambda module: _measure(engine, module, tokens))


def _with_own_rotary(model: nn.Module) -> Any:
    """Return the part of a model whose layers rotate with a rotary class of the model's file, or None.

    Raises:
        CannotRecordError: another part has such a class.
    """
    for name, module in model.named_modules():
        classes = [type(child) for child in module.children()]
        own = any("Rotary" in cls.__name__ and cls.__module__.startswith("sglang.srt.models") for cls in classes)
        if own and not re.search("vision|visual|audio", name):
            if not hasattr(module, "layers"):
                raise CannotRecordError("its forward pass was not run")
            return module
    return None


class _Projected(nn.Module):
    """Stands for the projection to q, k and v. It returns one tensor for every input."""

    def __init__(self, qkv: torch.Tensor) -> None:
        super().__init__()
        self.qkv = qkv

    def forward(self, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.qkv, None


class _RotatedError(Exception):
    """Ends a forward pass when q is rotated."""

    def __init__(self, q: torch.Tensor) -> None:
        super().__init__()
        self.q = q


class _Attended(nn.Module):
    """Stands for the product of rotated q and k."""

    def forward(self, q: torch.Tensor, *_: Any, **__: Any) -> None:
        raise _RotatedError(q)


def _rotated_in_forward(text: Any, layer: Any, tokens: int) -> torch.Tensor:
    """Rotate each channel alone, in a head of its own, with the forward pass of a text model that has only this layer.

    Returns:
        float32 `[positions, channels, channels]`, at the positions 0, 1 and the last one of a sequence of `tokens`.
    """
    attention = layer.self_attn
    channels = attention.head_dim
    positions = torch.tensor([0, 1, tokens - 1])
    q = torch.eye(channels).flatten().repeat(len(positions), 1)
    for name, child in text.named_children():
        if "Rotary" in type(child).__name__:
            setattr(text, name, type(child)(config=child.config))  # the model was built on the meta device
    text.layers = nn.ModuleList([layer])
    layer.input_layernorm = attention.q_norm = attention.k_norm = nn.Identity()
    attention.num_heads, attention.q_size = channels, channels * channels
    attention.qkv_proj = _Projected(torch.cat([q, torch.zeros(len(positions), 2 * attention.kv_size)], -1))
    attention.attn = _Attended()
    try:
        text(None, positions[None], None, input_embeds=q)
    except _RotatedError as found:
        return found.q
    except Exception as error:
        raise CannotRecordError(f"its forward pass fails: {error}") from error
    raise CannotRecordError("its forward pass ends before its attention")


def per_layer(named: dict[str, Recorded], measure: Any) -> list[Rope | None]:
    """Return the rope of each layer from the recorded modules and their names."""
    known: dict[str, Rope] = {}
    found: dict[int, Rope] = {}
    for name, module in named.items():
        place = re.search(r"(?:layers|blocks|h)\.(\d+)\.", name)
        if place is None or re.search("indexer|vision|visual", name):
            continue
        state = repr((module.arguments, sorted({**module.named, **module.later}.items(), key=lambda item: item[0])))
        if state not in known:
            known[state] = measure(module)
        if found.setdefault(int(place[1]), known[state]) != known[state]:
            raise CannotRecordError(f"layer {place[1]} has several ropes")
    return [found.get(index) for index in range(max(found, default=-1) + 1)]


def _measure(engine: SGLang, module: Recorded, tokens: int) -> Rope:
    arguments = {**module.named, "dtype": torch.float32}
    arguments.pop("device", None)
    rotary = engine.get_rope(*module.arguments, **arguments)
    rows = rotary.max_position_embeddings  # the table does not grow
    return measure(rotary, module, torch.tensor([0, 1, min(tokens, rows) - 1]))


def measure(rotary: Any, module: Recorded, positions: torch.Tensor) -> Rope:
    """Rotate each channel alone, in a head of its own, with the PyTorch code of a module of vLLM or SGLang."""
    rotary = copy.copy(rotary)  # the engine caches its modules
    for name, value in module.later.items():
        setattr(rotary, name, value)
    channels = rotary.head_size
    one_hot = torch.eye(channels).repeat(len(positions), 1, 1)
    flat = "Deepseek" not in type(rotary).__name__  # that class has an axis for heads
    x = one_hot.flatten(1) if flat else one_hot
    rotate = getattr(rotary, "forward_native", rotary.forward)
    rotated = rotate(positions, x.clone(), x.clone())[0].reshape(len(positions), channels, channels)
    pairs = pairs_of(rotated)
    rope = rope_of(pairs, channels)
    if getattr(rotary, "mrope_section", None):
        turned = [rotate(places, x.clone(), x.clone())[0].reshape(3, channels, channels)[1] for places in _one_axis()]
        rope["axis"] = [next(axis for axis in range(3) if turned[axis][i, j]) for i, j, _, _ in pairs]
    return rope


def _one_axis() -> list[torch.Tensor]:
    """Return the positions of three tokens, of which the second is at 1 on one of three axes and the others at 0."""
    return [torch.eye(3, dtype=torch.long)[axis, :, None] * torch.tensor([0, 1, 0]) for axis in range(3)]


def fill(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Add the keys in `FILLED`."""
    values = FILLED.get(config["model_type"], {})
    return {**config, **values}, [key for key in values if key not in config]


ENGINE = Engine(
    "sglang",
    "sglang",
    file,
    layers,
    fill,
    by_transformers=frozenset({"gemma3", "gemma3_text"}),  # Gemma3RotaryEmbedding
    permutes=frozenset({"llama4", "llama4_text"}),  # permute_qk_weight_for_rotary
)
