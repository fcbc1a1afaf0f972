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
from unittest.mock import ANY

import torch
from torch import nn

from .commands import functions
from .engines import replaced
from .measure import pairs_of
from .mlx_models import rope_of
from .model import CannotRecordError
from .model_files import TEXT, TOKENS, AbsentError, Engine, Rope, filled
from .stubbed import FEED_FORWARD, TOWERS, Nothing, Plain, Stub, make_layers, package_folder, stub_parts, stubs
from .transformers_models import class_of, classes

MIMO = {
    "hybrid_layer_pattern": [0, 1] * 24,
    "layernorm_epsilon": 1e-6,
    "moe_layer_freq": [0] * 48,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_v_head_dim": 128,
}
"""Keys of published configs of MiMo V2, which the class of transformers does not have."""
_QWEN = {"text_config.full_attention_interval": 4}
FILLED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"moe_layer_freq": 1},
    "deepseek_v3": {"moe_layer_freq": 1},
    "deepseek_v32": {"moe_layer_freq": 1},
    "ernie4_5_vl_moe": {"moe_layer_start_index": [1], "moe_layer_end_index": [27], "moe_layer_interval": 1},
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "exaone_moe": {"is_moe_layer": [False] * 64},
    "falcon_h1": {"head_dim": 64},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm_moe_dsa": {"moe_layer_freq": 1},
    "hy_v3": {"route_norm": True},
    "diffusion_gemma": {"vision_config": {}},
    "mimo_v2_flash": MIMO,
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid"},
    "minimax_m3_vl": {"vision_config": {}},
    "step3p7": {"text_config.moe_layers_enum": "4,5"},
    "minicpmv4_6": _QWEN,
    "minicpmv4_7": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
    "qwen4_exp": _QWEN,
}
"""Values of keys that a file of SGLang reads and that the class of transformers does not have."""

_ROTARY = "srt.layers.rotary_embedding"
_COMMON = "utils/hf_transformers/common.py"
_GEMMA4 = ("_GEMMA4_MODEL_TYPES", "_GEMMA4_FLATTENED_PER_LAYER_ATTRS", "_gemma4_attention_shapes")
_GEMMA4 += ("_apply_gemma4_attention_overrides",)


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

    def enabled(self) -> bool:
        """Say that no kernel is used."""
        return False

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
            "get_device_capability": lambda *_: (9, 0),
            "get_pp_indices": lambda count, *_: (0, count),
            "get_rope_config": function(self.folder / _COMMON, "get_rope_config"),
            "init_expert_location": "trivial",
            "is_first_rank": True,
            "is_last_rank": True,
            "make_layers": make_layers,
            "make_pp_layers": functools.partial(make_layers, pp_rank=0),
            "moe_dense_tp_size": None,
            "output_size_per_partition": ANY,
            "rl_on_policy_target": None,
            "resolve_linear_parallel_group": lambda *_: (0, 1),
            "tie_weights": lambda *_: Stub(),
        }
        stack.enter_context(stubs("sglang", "srt.models", "srt.configs", _ROTARY, values=values))
        rotary = importlib.import_module(f"sglang.{_ROTARY}")
        self.get_rope = rotary.get_rope
        for module in (rotary, importlib.import_module(f"sglang.{_ROTARY}.factory")):
            for name in {"get_rope", "get_rope_wrapper", "get_rope_cpu"} & {*vars(module)}:
                stack.enter_context(replaced(module, name, Recorded))
        stack.enter_context(replaced(torch.cuda, "Stream", Stub))
        own = importlib.import_module("sglang.srt.configs.model_config")
        stack.enter_context(replaced(own, "load_joint_head_config", lambda *_: None))
        self.classes: dict[str, Any] = {}
        models = importlib.import_module("sglang.srt.models")
        for _, name, _ in pkgutil.iter_modules(models.__path__, "sglang.srt.models."):
            module = importlib.import_module(name)
            stub_parts(module, TOWERS, FEED_FORWARD)
            entries = getattr(module, "EntryClass", [])
            self.classes |= {each.__name__: each for each in (entries if isinstance(entries, list) else [entries])}
        registry = re.search(r"_CONFIG_REGISTRY.*?in \[(.*?)\]", (self.folder / _COMMON).read_text(), re.DOTALL)
        configs = importlib.import_module("sglang.srt.configs")
        known = [getattr(configs, name, None) for name in re.findall(r"\w+", registry[1] if registry else "")]
        self.configs = {each.model_type: each for each in known if each is not None}
        library = importlib.import_module("transformers")
        names = {"torch": torch, "PretrainedConfig": library.PretrainedConfig}
        folder = self.folder / "utils"
        names = functions(f"{folder}/hf_transformers_patches.py", ("normalize_rope_scaling_compat",), **names)
        names = functions(f"{self.folder}/{_COMMON}", ("_patch_text_config", "get_hf_text_config"), **names)
        self.readers = functions(f"{folder}/hf_transformers/config.py", _GEMMA4, **names)

    def complete(self, config: Any) -> Any:
        """Return a config with the values that SGLang adds after it was read."""
        text = self.readers["get_hf_text_config"](config)
        if config.model_type not in self.configs:
            for key, value in vars(text).items():
                if value is not None and not hasattr(config, key):
                    setattr(config, key, value)
        if config.model_type in self.readers["_GEMMA4_MODEL_TYPES"]:
            self.readers["_apply_gemma4_attention_overrides"](config)
        config.encoder_only = config.language_only = config.language_model_only = False
        return open_towers(config, text)


@functools.cache
def sglang() -> SGLang:
    """Return SGLang's modules."""
    return SGLang()


def architecture(config: dict[str, Any], known: Any, own: dict[str, Any]) -> str:
    """Return the class of an engine that runs a config, as `class_of` with what the engine borrows from transformers.

    Args:
        config: the config.
        known: the classes of the engine.
        own: maps model_types to the classes of configs that the engine has itself.
    """
    transformers = importlib.import_module("transformers")

    def lent(name: str) -> bool:
        cls = getattr(transformers, name, None)
        return cls is not None and not cls.config_class.is_encoder_decoder and bool(cls.is_backend_compatible())

    found = class_of(config, known, lent)
    name = config["model_type"]
    if name in classes() and name not in {**transformers.CONFIG_MAPPING, **own}:
        raise AbsentError(f"its transformers {transformers.__version__} has no config of this model_type")
    return found


def file(config: dict[str, Any]) -> str:
    """Return the file of the model."""
    name = architecture(config, sglang().classes, sglang().configs)
    return f"srt/models/{sglang().classes[name].__module__.rpartition('.')[2]}.py"


def config_object(config: dict[str, Any], own: dict[str, Any], name: str) -> Any:
    """Return the object that an engine reads from a config: one of its own classes, or that of transformers.

    Args:
        config: the config.
        own: as in `architecture`.
        name: the class of the model, which the object names.
    """
    values = {**json.loads(json.dumps(config)), "architectures": [name]}
    if config["model_type"] in own:
        return own[config["model_type"]].from_dict(values)
    return importlib.import_module("transformers").AutoConfig.for_model(**values)


def open_towers(config: Any, text: Any) -> Any:
    """Let the parts of a config for images and sound have every attribute, because their layers are not recorded."""
    for key, part in vars(config).items():
        if hasattr(part, "to_dict") and text in vars(part).values():
            open_towers(part, text)
        elif hasattr(part, "to_dict") and re.search("vision|visual|vit|image|audio", key):
            cls = type(part)
            part.__class__ = type(cls.__name__, (cls,), {"__getattr__": _any_attribute})
    return config


def _any_attribute(_: Any, name: str) -> Any:
    if name.startswith("_") or name in (*TEXT, "text_encoder", "decoder", "generator"):  # transformers looks for these
        raise AttributeError(name)
    return Nothing()


def layers(config: dict[str, Any], tokens: int = TOKENS) -> list[Rope | None]:
    """Build the model of a config, and return the rope that each layer builds."""
    engine = sglang()
    name = architecture(config, engine.classes, engine.configs)
    values = engine.complete(config_object(config, engine.configs, name))
    dtype = replaced(torch, "get_default_dtype", lambda: getattr(torch, config.get("torch_dtype", "float32")))
    with torch.device("meta"), dtype:
        model = engine.classes[name](config=values)
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
    """Add the keys in `FILLED`. Return the config and these keys, without those that every published config has."""
    whole, added = filled(config, FILLED.get(config["model_type"], {}))
    return whole, [key for key in added if key not in ("moe_layer_freq", "scoring_func")]


ENGINE = Engine(
    "sglang",
    "sglang",
    file,
    layers,
    fill,
    by_transformers=frozenset({"gemma3", "gemma3_text"}),  # Gemma3RotaryEmbedding
    permutes=frozenset({"llama4", "llama4_text"}),  # permute_qk_weight_for_rotary
)
