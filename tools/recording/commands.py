"""engine_commands.json: the arguments that engines have about ropes, and what they do to the parameters of a config.

A row "arguments" lists the options of the engine's command that concern ropes or lengths, or override a config. The
other rows apply an override, or the flags of llama.cpp, or say whether the engine then accepts a length. Only the lines
that do this are run: those of vLLM and SGLang on a config object of transformers, and those of llama.cpp as in
`engine_rules/`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from . import files
from .llama_cpp import build
from .model import CannotRecordError
from .rotated import shortest
from .stubbed import package_folder

_ARGUMENTS = {
    "vLLM": ("vllm", "engine/arg_utils.py", r'add_argument\(\s*"(--[a-z-]+)"'),
    "SGLang": ("sglang", "srt/arg_groups/fields/*.py", r"(?m)^    ([a-z_]+): A\["),
    "llama.cpp": ("", "common/arg.cpp", r'[{ ]"(--?[a-z-]+)"[},]'),
}
"""For each engine, its package, the files that define its options, and an expression for their names."""


def commands(row: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a row again."""
    result = {name: value for name, value in row.items() if name not in _RECORDED}
    engine, case = row["engine"], row["case"]
    if case == "arguments":
        return {**result, "arguments": _arguments(engine, source)}
    if engine == "llama.cpp":
        return {**result, **_rope(row, _folder(engine, source))}
    config = _overridden(engine, row["config"], row["override"]).get_text_config()
    if "length" in row:
        return {**result, "accepted": {"vLLM": _vllm_accepts, "SGLang": _sglang_accepts}[engine](config, row)}
    return {**result, "rope_parameters": dict(config.rope_parameters)}


_RECORDED = ("arguments", "inv_freq", "attention_factor", "rope_parameters", "accepted")


def _folder(engine: str, source: Path | None) -> Path:
    package = _ARGUMENTS[engine][0]
    if package:
        return Path(package_folder(package))
    if source is None or not (source / "common").is_dir():
        raise CannotRecordError("pass a clone of llama.cpp, or the copy in llama-cpp-python's source, as --source")
    return source


def _arguments(engine: str, source: Path | None) -> list[str]:
    _, pattern, expression = _ARGUMENTS[engine]
    texts = [file.read_text() for file in sorted(_folder(engine, source).glob(pattern))]
    found = {name for text in texts for name in re.findall(expression, text)}
    names = {name if name.startswith("-") else f"--{name.replace('_', '-')}" for name in found}
    return sorted(
        name for name in names if re.search("rope|yarn|override|^(--max-model-len|--context-length|-c)$", name)
    )


def _overridden(engine: str, values: dict[str, Any], override: dict[str, Any]) -> Any:
    """Return the config after an override."""
    from transformers import AutoConfig

    if "dim" in values:
        config = _mistral(values)
        apply_in_vllm(config, override)
        return config
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        if engine == "transformers":
            config = AutoConfig.from_pretrained(folder, **override)
        else:
            config = AutoConfig.from_pretrained(folder)
    if engine != "transformers":
        {"vLLM": apply_in_vllm, "SGLang": _sglang}[engine](config, override)
    return config


def _mistral(values: dict[str, Any]) -> Any:
    """Return the config that vLLM makes from a params.json of Mistral."""
    from unittest.mock import MagicMock

    from transformers import PreTrainedConfig

    file = Path(package_folder("vllm")) / "transformers_utils/configs/mistral.py"
    wanted = tuple(node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
    names = functions(str(file), wanted, PreTrainedConfig=PreTrainedConfig, logger=MagicMock())
    return names["adapt_config_dict"](json.loads(json.dumps(values)), {})


def apply_in_vllm(config: Any, override: dict[str, Any], folder: Path | None = None) -> None:
    """Run the two methods of vLLM's `ModelConfig` that apply objects of --hf-overrides."""
    tree = ast.parse(((folder or Path(package_folder("vllm"))) / "config/model.py").read_text())
    [model_config] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ModelConfig"]
    wanted = ("_update_nested", "_apply_dict_overrides")
    methods = [node for node in model_config.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    holder = ast.ClassDef("Holder", [], [], list(methods), [], type_params=[])
    names: dict[str, Any] = {"Any": Any, "PreTrainedConfig": type(config).__mro__[1]}
    exec(compile(ast.fix_missing_locations(ast.Module([holder], [])), "vllm", "exec"), names)
    names["Holder"]()._apply_dict_overrides(config, override)


def _sglang(config: Any, override: dict[str, Any]) -> None:
    """Run the loop of SGLang that applies --json-model-override-args."""
    from transformers import PretrainedConfig

    tree = ast.parse((Path(package_folder("sglang")) / "srt/utils/hf_transformers/config.py").read_text())
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and ast.unparse(node.iter) == "model_override_args.items()"
    ]
    if len(loops) != 1:
        raise CannotRecordError(f"{len(loops)} loops over model_override_args")
    names = {"config": config, "model_override_args": override, "PretrainedConfig": PretrainedConfig}
    exec(compile(ast.fix_missing_locations(ast.Module([loops[0]], [])), "sglang", "exec"), names)


def functions(file: str, wanted: tuple[str, ...], **names: Any) -> dict[str, Any]:
    """Return the first functions, methods or constants of a file with these names; `names` is what else they use."""
    nodes = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.stmt)]
    by_name = {getattr(node, "name", None) or _assigned(node): node for node in reversed(nodes)}
    found = [node for name, node in by_name.items() if name in wanted]
    exec(
        compile(ast.Module([ast.parse("from __future__ import annotations").body[0], *found], []), file, "exec"), names
    )
    return names


def _assigned(node: ast.stmt) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else ""


def _vllm_accepts(config: Any, row: dict[str, Any]) -> bool:
    """Whether vLLM accepts the length, for a tokenizer_config.json with the model_max_length of the row, if any."""
    from types import SimpleNamespace
    from unittest.mock import MagicMock

    folder = package_folder("vllm")
    wanted = ("iter_rope_parameters", "is_rope_parameters_nested", "ALLOWED_ATTENTION_LAYER_TYPES")
    names = functions(f"{folder}/transformers_utils/config.py", wanted, **_layer_types())
    used = {"logger": MagicMock(), "envs": SimpleNamespace(VLLM_ALLOW_LONG_MAX_MODEL_LEN=False), **names}
    check = functions(f"{folder}/config/model.py", ("_get_and_verify_max_len",), **used)["_get_and_verify_max_len"]
    file, name = f"{folder}/transformers_utils/model_arch_config_convertor.py", "derive_max_model_len_and_key"
    derived = functions(file, (name,))[name](SimpleNamespace(hf_text_config=config))
    arch = SimpleNamespace(derived_max_model_len_and_key=derived)
    tokenizer = {"model_max_length": row["tokenizer"]} if "tokenizer" in row else None
    try:
        return bool(check(config, arch, tokenizer, row["length"], False, None) == row["length"])
    except ValueError:
        return False


def _layer_types() -> dict[str, Any]:
    from transformers import configuration_utils

    return {name: value for name, value in vars(configuration_utils).items() if name.startswith("ALLOWED_")}


def _sglang_accepts(config: Any, row: dict[str, Any]) -> bool:
    """Whether SGLang accepts the length."""
    file = f"{package_folder('sglang')}/srt/utils/hf_transformers/common.py"
    derived = functions(file, ("CONTEXT_LENGTH_KEYS", "get_context_length"))["get_context_length"](config)
    return bool(row["length"] <= derived)


def _rope(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the frequencies and the attention factor of a Llama without scaling, with the flags of a row.

    The row may have a `log_multiplier`, which makes it a DeepSeek V2, or the `scale_of_layer` that
    `llama_model::get_rope_freq_scale` returns for a layer with a window.
    """
    given = dict(zip(row["flags"][::2], row["flags"][1::2], strict=True))
    kinds = ("none", "linear", "yarn", "longrope")
    numbers = [
        int("log_multiplier" in row),
        kinds.index(given.get("--rope-scaling", "none")),
        1.0 / float(given.get("--rope-scale", 1.0)),
        float(given.get("--yarn-ext-factor", -1.0)),
        float(given.get("--yarn-attn-factor", 1.0)),
        row.get("log_multiplier", 0.0),
        1.0,
        row["rotary_dim"],
        int(given.get("--yarn-orig-ctx", 4096)),
        float(given.get("--rope-freq-base", 10_000.0)),
        float(given.get("--yarn-beta-fast", 32.0)),
        float(given.get("--yarn-beta-slow", 1.0)),
        row.get("scale_of_layer", 0.0),
    ]
    command = [str(build(source)), *(repr(number) for number in numbers)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table = torch.tensor([[float(x) for x in line.split()] for line in output.splitlines()], dtype=torch.float32)
    cos, sin = table[:, ::2], table[:, 1::2]
    angles = torch.atan2(sin[1].double(), cos[1].double()).float()
    return {"inv_freq": shortest(angles), "attention_factor": shortest(cos[0].max().reshape(1))[0]}


GOLDEN = files.Golden(
    "engine_commands.json", lambda row: f"{row['engine']} {row['case']}", commands, "torch", source=True
)
