"""engine_commands.json: the arguments that engines have about ropes, and what they do to the parameters of a config.

A row "arguments" lists the options of the engine's command that concern ropes or override a config. The other rows
apply an override, or the flags of llama.cpp. Only the lines that do this are run: those of vLLM and SGLang on a config
object of transformers, and those of llama.cpp as in `engine_rules/`.
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
    "llama.cpp": ("", "common/arg.cpp", r'[{ ]"(--[a-z-]+)"[},]'),
}
"""For each engine, its package, the files that define its options, and an expression for their names."""


def commands(row: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a row again."""
    result = {name: value for name, value in row.items() if name not in _RECORDED}
    engine, case = row["engine"], row["case"]
    if case == "arguments":
        return {**result, "arguments": _arguments(engine, source)}
    if engine == "llama.cpp":
        return {**result, **_rope(row["flags"], row["rotary_dim"], _folder(engine, source))}
    return {**result, "rope_parameters": _overridden(engine, row["config"], row["override"])}


_RECORDED = ("arguments", "inv_freq", "attention_factor", "rope_parameters")


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
    names = {name if name.startswith("--") else f"--{name.replace('_', '-')}" for name in found}
    return sorted(name for name in names if re.search("rope|yarn|override", name))


def _overridden(engine: str, values: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Return the `rope_parameters` of the text model after an override of the config."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        if engine == "transformers":
            config = AutoConfig.from_pretrained(folder, **override)
        else:
            config = AutoConfig.from_pretrained(folder)
    if engine != "transformers":
        {"vLLM": _vllm, "SGLang": _sglang}[engine](config, override)
    return dict(config.get_text_config().rope_parameters)


def _vllm(config: Any, override: dict[str, Any]) -> None:
    """Run the two methods of vLLM's `ModelConfig` that apply objects of --hf-overrides."""
    tree = ast.parse((Path(package_folder("vllm")) / "config/model.py").read_text())
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


def _rope(flags: list[str], rotary_dim: int, source: Path) -> dict[str, Any]:
    """Return the frequencies and the attention factor of a Llama without scaling, with these flags."""
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    kinds = ("none", "linear", "yarn", "longrope")
    numbers = [
        0,
        kinds.index(given.get("--rope-scaling", "none")),
        1.0 / float(given.get("--rope-scale", 1.0)),
        float(given.get("--yarn-ext-factor", -1.0)),
        float(given.get("--yarn-attn-factor", 1.0)),
        0.0,
        1.0,
        rotary_dim,
        int(given.get("--yarn-orig-ctx", 4096)),
        float(given.get("--rope-freq-base", 10_000.0)),
        float(given.get("--yarn-beta-fast", 32.0)),
        float(given.get("--yarn-beta-slow", 1.0)),
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
