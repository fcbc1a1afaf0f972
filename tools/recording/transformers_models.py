"""The model_types that transformers has. The ropes of its models are recorded in `class_defaults.json` and others."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Container, Iterable
from typing import Any

from . import files
from .model import CannotRecordError
from .model_files import AbsentError, BorrowedError, configs

_TASKS = ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")
_TASKS += ("MASKED_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION")
_OTHERS = ("SPEECH_SEQ_2_SEQ", "CTC", "RETRIEVAL", "TEXT_TO_WAVEFORM")
_PUBLISHED = {
    "qwen2_5_omni": "Qwen2_5OmniModel",
    "step3p5": "Step3p5ForCausalLM",
}
"""The classes that published configs name and transformers does not have, beside those of the golden configs."""


def record(row: dict[str, Any]) -> dict[str, Any]:
    """Record whether transformers has a model_type, and its classes that a checkpoint may name."""
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    name = row["model_type"]
    if name not in known:
        return {"model_type": name, "absent": "not in CONFIG_MAPPING_NAMES"}
    auto = vars(importlib.import_module("transformers.models.auto.modeling_auto"))

    def named(tasks: Iterable[str]) -> list[str]:
        found = [auto[f"MODEL_FOR_{task}_MAPPING_NAMES".replace("MODEL_FOR__", "MODEL_")].get(name) for task in tasks]
        return list(dict.fromkeys(each if isinstance(each, str) else each[0] for each in found if each))

    return {"model_type": name, "classes": named(_TASKS), "others": named((*_OTHERS, ""))}


@functools.cache
def classes(kind: str = "classes") -> dict[str, list[str]]:
    """Return the recorded classes of each model_type that transformers has, whatever its installed version is.

    Args:
        kind: "classes" for those that write text or classify it, "others" for the rest and for the bare model.
    """
    rows = files.load(files.FOLDER / GOLDEN.path)["rows"]
    return {row["model_type"]: row[kind] for row in rows if kind in row}


def class_of(config: dict[str, Any], known: Container[str], lent: Callable[[str], bool] = lambda name: False) -> str:
    """Return the first class that an engine knows.

    The config may name it. Otherwise it is that of transformers for the model_type, or one of a published config.

    Args:
        config: the config.
        known: the classes of the engine.
        lent: whether the engine runs a class with the code of transformers.

    Raises:
        BorrowedError: only transformers has the class, and the engine runs it.
        AbsentError: the engine has no such class, or a checkpoint cannot name one.
        CannotRecordError: transformers does not have the model_type, and the config names no class.
    """
    name = config["model_type"]
    published = [one for each in configs().get(name, ()) for one in each.get("architectures") or ()]
    published += [_PUBLISHED[name]] if name in _PUBLISHED else []
    text, others = classes().get(name, []), classes("others").get(name, [])
    names = [*(config.get("architectures") or ()), *text, *published, *others]
    if not names and name not in classes():
        raise CannotRecordError("no class is known for this model_type")
    found = next((each for each in names if each in known), None)
    if found is not None:
        return found
    if any(map(lent, text)):
        raise BorrowedError(text[0])
    raise AbsentError(f"there is no class {names[0]}" if names else "it is only a part of other models")


GOLDEN = files.Golden("engine_models/models_of_transformers.json", lambda row: str(row["model_type"]), record)
