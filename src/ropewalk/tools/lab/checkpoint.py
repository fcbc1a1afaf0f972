"""The checkpoint of a training: its state after the last step in `x.safetensors`, and what it trains in `x.json`.

The JSON file is written before the first step. The safetensors file is replaced after every step. It contains the
weights, the moments of AdamW, the losses of all steps, whose number is the number of the next step, and a digest of the
training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

import ropewalk
from ropewalk import _checks
from ropewalk.tools import _files
from ropewalk.tools.lab.model import LanguageModel, Size

_MOMENTS = ("exp_avg", "exp_avg_sq")


class State(NamedTuple):
    """A training after a step.

    Args:
        tensors: float32 `weights.*`, `exp_avg.*` and `exp_avg_sq.*` with the names and shapes of the parameters.
        losses: the loss of each completed step in nats.
    """

    tensors: dict[str, Tensor]
    losses: list[float]


def describe(
    model: LanguageModel, rope: ropewalk.Rope | None, recipe: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that determines the result of a training, as plain JSON: the content of `x.json`."""
    start = hashlib.sha256()
    for parameter in model.parameters():
        start.update(parameter.detach().numpy().tobytes())
    values = {
        "size": dataclasses.asdict(model.size),
        "rope": None if rope is None else _rope_to_json(rope),
        "recipe": recipe,
        "about": about,
        "initial weights": start.hexdigest(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def begin(file: Path, training: Mapping[str, Any]) -> State | None:
    """Return the last state of a training, or write its JSON file and return None if it has none.

    Raises:
        RopeError: the checkpoint belongs to another training, or is broken. The message names the differences.
    """
    if file.exists():
        found, state = read(file)
        if different := [key for key in training if found.get(key) != training[key]]:
            must, got = f"{file} must be a checkpoint of this training", f"one that differs in {', '.join(different)}"
            raise _checks.error("lab", must, got, "Pass another folder, or delete the file to start again.")
        return state
    file.parent.mkdir(parents=True, exist_ok=True)
    with _files.replaced(file.with_suffix(".json")) as new:
        new.write_text(json.dumps(training, indent=1) + "\n")
    return None


def read(file: Path) -> tuple[dict[str, Any], State]:
    """Read a checkpoint: the description of its training, and its state.

    Raises:
        RopeError: the JSON file is missing, or a file is broken or of another format.
        OSError: a file cannot be read.
    """
    try:
        training = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        with safetensors.safe_open(file, "pt") as opened:
            if (opened.metadata() or {}).get("training") != _digest(training):
                raise ValueError(f"it is not of the training that {file.stem}.json describes")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
        losses = tensors.pop("losses").tolist()
    except (FileNotFoundError, safetensors.SafetensorError, ValueError, KeyError, RecursionError) as e:
        raise _broken(file, e) from e
    return training, State(tensors, losses)


def load(file: Path) -> tuple[LanguageModel, ropewalk.Rope | None, dict[str, Any]]:
    """Load the model of a checkpoint, its rope, and the `about` of its training.

    Raises:
        RopeError: the file is not a checkpoint.
        OSError: a file cannot be read.
    """
    training, state = read(file)
    try:
        model = LanguageModel(Size(**training["size"]))
        load_weights(model, state.tensors)
        return model.eval(), _rope_from_json(training["rope"]), training["about"]
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise _broken(file, e) from e


def save(file: Path, state: State, training: Mapping[str, Any]) -> None:
    """Write the state of a training after a step. If the process is killed while writing, the previous state remains.

    It may be lost in a power failure: that the disk has the file is not awaited.

    Raises:
        RopeError: a loss, weight or moment is not finite. The previous state remains.
        OSError: the file cannot be written. The previous state remains.
    """
    tensors = {**state.tensors, "losses": torch.tensor(state.losses, dtype=torch.float64)}
    if not torch.nn.utils.get_total_norm(tensors.values()).isfinite():  # one pass over each tensor, unlike isfinite
        must, got = "loss and weights must be finite", f"inf or nan after step {len(state.losses)}"
        raise _checks.error("lab", must, got, f"Choose a lower learning rate. {file} contains the previous steps.")
    with _files.replaced(file) as new:
        new.write_bytes(safetensors.torch.save(tensors, {"training": _digest(training)}))


def _digest(training: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(training, sort_keys=True).encode()).hexdigest()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the weights and moments by the names that they have in a file, after at least one step.

    If the parameters are sharded, all processes must call this. Each gets the whole tensors, on the CPU.
    """
    tensors = {f"weights.{name}": _whole(value) for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = _whole(optimizer.state[parameter][moment])
    return tensors


def load_weights(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Set the parameters of a model that is not sharded.

    Raises:
        KeyError, RuntimeError: a weight is missing, or has another shape.
    """
    weights = {name.removeprefix("weights."): value for name, value in tensors.items() if name.startswith("weights.")}
    if model.size.tied:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model.load_state_dict(weights)


def load_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Set the state of the optimizer, of which each process takes its shards if the parameters are sharded."""
    steps = torch.tensor(float(len(state.losses)))
    for name, parameter in model.named_parameters():
        moments = {moment: _shard_like(state.tensors[f"{moment}.{name}"], parameter) for moment in _MOMENTS}
        optimizer.state[parameter] = {"step": steps.to(parameter.device, copy=True), **moments}


def _whole(value: Tensor) -> Tensor:
    """Gather the shards of a value, if it has any."""
    from torch.distributed.tensor import DTensor

    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()


def _shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of a value with the shape of the parameter, sharded in the same way."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.expand(parameter.shape).to(parameter.device, parameter.dtype, copy=True)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def _broken(file: Path, e: Exception) -> ropewalk.RopeError:
    must = f"{file} must be a checkpoint of the lab, with {file.with_suffix('.json').name} beside it"
    got = f"a broken one, or another file ({type(e).__name__}: {e!s:.200})"
    return _checks.error("lab", must, got, "Pass another file. If it is a checkpoint, delete it to train again.")


def _rope_to_json(rope: ropewalk.Rope) -> dict[str, Any]:
    fields = {name: getattr(rope, name) for name in ("head_dim", "base", "pairing", "rotary_dim", "rotary_offset")}
    scaling: Any = rope.scaling
    named = None if scaling is None else {"scheme": type(scaling).__name__, **dataclasses.asdict(scaling)}
    return {**fields, "scaling": named}


def _rope_from_json(fields: dict[str, Any] | None) -> ropewalk.Rope | None:
    if fields is None or fields["scaling"] is None:
        return None if fields is None else ropewalk.Rope(**fields)
    scaling = dict(fields["scaling"])
    return ropewalk.Rope(**{**fields, "scaling": ropewalk.schemes.BY_NAME[scaling.pop("scheme")](**scaling)})
