"""A training on disk: weights, optimizer, losses, and which training it is. One safetensors file, replaced whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ropewalk
from ropewalk import _checks
from ropewalk.lab.model import LanguageModel, Size

_MOMENTS = ("exp_avg", "exp_avg_sq")


def identity(
    model: LanguageModel, rope: ropewalk.Rope | None, recipe: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that decides how a training ends, as plain JSON; two trainings with the same are the same."""
    start = hashlib.sha256()
    for parameter in model.parameters():
        start.update(parameter.detach().numpy().tobytes())
    said = {
        "size": asdict(model.size),
        "rope": None if rope is None else _rope_to_json(rope),
        "recipe": recipe,
        "about": about,
        "initial weights": start.hexdigest(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(said))
    return plain


def save(
    file: Path,
    identity: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    seconds: float,
) -> None:
    """Write the state after a step; a process killed meanwhile leaves the file of the step before.

    os.replace is atomic, and what was written survives the process that wrote it. It need not survive a power cut:
    that would take an fsync for each step.
    """
    tensors = {f"weights.{name}": value.detach() for name, value in parameters.items()}
    for name, parameter in parameters.items():
        tensors |= {f"{moment}.{name}": optimizer.state[parameter][moment] for moment in _MOMENTS}
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    metadata = {"identity": json.dumps(identity), "seconds": repr(seconds)}
    write(file, tensors, metadata)


def write(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file, complete or not there at all; its folder is made."""
    _, save_file, _ = _safetensors()
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.unfinished")
    save_file(tensors, unfinished, metadata)
    os.replace(unfinished, file)


def resume(
    file: Path,
    identity: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> tuple[list[float], float]:
    """Load what `save` wrote, if there is such a file: losses of the steps done, and the seconds they took.

    Raises:
        RopeError: the file is of another training (the message says what differs), or no checkpoint.
    """
    if not file.exists():
        return [], 0.0
    tensors, found, seconds = read(file)
    different = [key for key in identity if found.get(key) != identity[key]]
    if different or len(found) != len(identity):
        raise _checks.error(
            "lab",
            f"{file} must be a checkpoint of this training",
            f"one that differs in {', '.join(different)}",
            "Name another folder, or delete the file to start anew.",
        )
    losses = tensors["losses"].tolist()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"weights.{name}"])
            state = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(len(losses))), **state}
    return losses, seconds


def read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any], float]:
    """Tensors, identity and seconds of a checkpoint.

    Raises:
        RopeError: the file is none.
    """
    tensors, metadata = read_tensors(file)
    try:
        return tensors, json.loads(metadata["identity"]), float(metadata["seconds"])
    except KeyError as e:
        raise _checks.error(
            "lab", f"{file} must be a checkpoint of the lab", f"one without {e}", "Name another file."
        ) from e


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises:
        RopeError: the file is none.
    """
    safe_open, _, unreadable = _safetensors()
    try:
        with safe_open(file, "pt") as opened:
            # Copies: what safetensors gives is the file itself, mapped; Windows replaces no file that is.
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except unreadable as e:
        must, came = f"{file} must be a safetensors file", f"one that is broken, or none ({e})"
        raise _checks.error("lab", must, came, "Name another; one that a training has left may be deleted.") from e


def load(file: Path) -> tuple[LanguageModel, ropewalk.Rope | None, dict[str, Any]]:
    """The model of a checkpoint, its rope, and what `about` said of it.

    Raises:
        RopeError: the file is no checkpoint.
    """
    tensors, found, _ = read(file)
    model = LanguageModel(Size(**found["size"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"weights.{name}"])
    rope = None if found["rope"] is None else _rope_from_json(found["rope"])
    return model.eval(), rope, found["about"]


def _rope_to_json(rope: ropewalk.Rope) -> dict[str, Any]:
    fields = {name: getattr(rope, name) for name in ("head_dim", "base", "pairing", "rotary_dim", "rotary_offset")}
    if rope.scaling is None:
        return {**fields, "scaling": None}
    return {**fields, "scaling": {"scheme": type(rope.scaling).__name__, **asdict(rope.scaling)}}  # type: ignore[call-overload]


def _rope_from_json(said: dict[str, Any]) -> ropewalk.Rope:
    scaling = said["scaling"]
    if scaling is not None:
        scaling = dict(scaling)
        scaling = getattr(ropewalk.schemes, scaling.pop("scheme"))(**scaling)
    return ropewalk.Rope(**{**said, "scaling": scaling})


def _safetensors() -> tuple[Any, Any, Any]:
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save_file
    except ImportError as e:
        raise _checks.error(
            "lab", "safetensors must be installed", "no such package", 'Run: pip install "ropewalk[lab]"'
        ) from e
    return safe_open, save_file, SafetensorError
