"""Read and write the checkpoints of a training, each of which is one safetensors file that is replaced atomically.

A checkpoint contains the weights, the state of the optimizer, the losses, and everything that identifies the training.

All reading goes through `read`, which checks the whole content before use, because a file may be broken or untrusted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ropewalk
from ropewalk import _checks
from ropewalk.tools.lab import files, ranks
from ropewalk.tools.lab.files import Kind
from ropewalk.tools.lab.model import LanguageModel, Size, shapes

VERSION = "2"
"""Version of the format. Version 1 had neither a version number nor a checksum."""

LARGEST_IDENTITY = 2**20
"""Maximum number of characters of the identity's JSON."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCHEMES = ropewalk.schemes.BY_NAME  # every scheme that a file may name
_ROPE = ("head_dim", "base", "pairing", "rotary_dim", "rotary_offset", "scaling")
_IDENTITY = ("size", "rope", "recipe", "about", "initial weights")
_METADATA = ("identity", "seconds", "version", "sha256")


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file.

    Args:
        identity: identity of the training, as returned by `identity`.
        size, rope, about: parts of the identity as objects.
        tensors: float32 `weights.*`, `exp_avg.*` and `exp_avg_sq.*` with the shapes of `shapes(size)`, all finite.
        losses: loss of each completed step in nats, at least one.
        seconds: duration of these steps.
    """

    identity: dict[str, Any]
    size: Size
    rope: ropewalk.Rope | None
    about: dict[str, Any]
    tensors: dict[str, Tensor]
    losses: list[float]
    seconds: float


def identity(
    model: LanguageModel, rope: ropewalk.Rope | None, recipe: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that determines the result of a training, as plain JSON."""
    start = hashlib.sha256()
    for parameter in model.parameters():
        start.update(parameter.detach().numpy().tobytes())
    values = {
        "size": asdict(model.size),
        "rope": None if rope is None else _rope_to_json(rope),
        "recipe": recipe,
        "about": about,
        "initial weights": start.hexdigest(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def state(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the weights and moments by the names that they have in a file. Moments are zero before the first step."""
    tensors = {f"weights.{name}": value.detach() for name, value in parameters.items()}
    for name, parameter in parameters.items():
        moments_of = optimizer.state[parameter]
        tensors |= {
            f"{moment}.{name}": moments_of[moment] if moment in moments_of else torch.zeros_like(parameter.detach())
            for moment in _MOMENTS
        }
    return tensors


def save(
    file: Path, identity: Mapping[str, Any], state: Mapping[str, Tensor], losses: list[float], seconds: float
) -> None:
    """Write the state after a step. If the process is killed while writing, the previous file remains.

    The file may be lost in a power failure. Preventing that would require an fsync for each step.

    Raises:
        RopeError: a loss, weight or moment is not finite, or the file cannot be written. The previous file remains.
    """
    tensors = {**state, "losses": torch.tensor(losses, dtype=torch.float64)}
    if not torch.nn.utils.get_total_norm(tensors.values()).isfinite():  # one pass over each tensor, unlike isfinite
        must, got = "loss and weights must be finite", f"inf or nan after step {len(losses)}"
        raise _checks.error("lab", must, got, f"Choose a lower learning rate. {file} contains the previous steps.")
    metadata = {"identity": json.dumps(identity), "seconds": repr(seconds), "version": VERSION}
    with files.atomic_write(file) as unfinished:
        files.write_tensors(unfinished, tensors, {**metadata, "sha256": _digest(tensors, metadata)})


def restore(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], steps: int
) -> None:
    """Set parameters and optimizer to a saved state.

    Args:
        parameters: plain tensors, or DTensors, of which each process sets its shards.
        optimizer: the optimizer of the parameters.
        tensors: as returned by `state`; plain tensors, or DTensors with the placements of the parameters.
        steps: number of completed steps.
    """
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_shard_like(tensors[f"weights.{name}"], parameter))
            moments = {moment: _shard_like(tensors[f"{moment}.{name}"], parameter) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(steps), device=parameter.device), **moments}


def _shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Shard a value over the processes in the same way as the parameter."""
    if ranks.count() == 1:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    return distribute_tensor(value.to(parameter.device), mesh, parameter.placements, src_data_rank=None)


def check_same(place: Path, found: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Check that a checkpoint belongs to this training.

    Raises:
        RopeError: it belongs to another training. The message names the differences.
    """
    different = [key for key in identity if found.get(key) != identity[key]]
    if different:
        raise _checks.error(
            "lab",
            f"{place} must be a checkpoint of this training",
            f"one that differs in {', '.join(different)}",
            "Pass another folder, or delete the file to start again.",
        )


def load(file: Path) -> tuple[LanguageModel, ropewalk.Rope | None, dict[str, Any]]:
    """Load the model of a checkpoint, its rope, and the `about` of its training.

    Raises:
        RopeError: the file is not a valid checkpoint.
    """
    content = read(file)
    model = LanguageModel(content.size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(content.tensors[f"weights.{name}"])
    return model.eval(), content.rope, content.about


def read(file: Path) -> Checkpoint:
    """Read a checkpoint, and check its whole content.

    The header is checked first, so a broken header cannot cause a large allocation.

    Raises:
        RopeError: the file is not a checkpoint, or is broken. The message names the defect.
        OSError: the file cannot be opened.
    """
    with files.open_safetensors(file) as (opened, metadata, kinds):
        for key in _METADATA[:2]:
            if key not in metadata:
                raise _checks.error(
                    "lab", f"{file} must be a checkpoint of the lab", f"a file without {key!r}", "Pass another file."
                )
        if metadata.get("version") != VERSION or metadata.keys() != set(_METADATA):
            must = f"{file} must be a checkpoint of version {VERSION}"
            got = f"version {metadata.get('version', '1')!r:.20}, or other metadata"
            raise _checks.error("lab", must, got, "Train again, or read it with the release of ropewalk that wrote it.")
        stated = _identity_from(file, metadata["identity"])
        size = _size_from(file, stated["size"])
        rope = None if stated["rope"] is None else _rope_from(file, stated["rope"], size)
        steps = _object(file, "recipe", stated["recipe"]).get("steps")
        if not isinstance(steps, int) or isinstance(steps, bool):
            raise _broken(file, "steps of its recipe must be an integer", _checks.shown(steps))
        seconds = _seconds(file, metadata["seconds"])
        _check_kinds(file, kinds, size, steps)
        tensors = {name: files.read_tensor(opened, name) for name in kinds}
    _check_values(file, tensors)
    digest = metadata.pop("sha256")
    if _digest(tensors, metadata) != digest:
        raise _broken(file, "its content must have the SHA-256 that it states", "another SHA-256")
    losses: list[float] = tensors.pop("losses").tolist()
    return Checkpoint(stated, size, rope, _object(file, "about", stated["about"]), tensors, losses, seconds)


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of the metadata, followed by name, dtype, shape and bytes of each tensor, sorted by name."""
    whole = hashlib.sha256(json.dumps([metadata[key] for key in _METADATA[:3]]).encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous().numpy()
        whole.update(f"\n{name} {value.dtype} {value.shape}\n".encode())
        whole.update(value.data)
    return whole.hexdigest()


def _identity_from(file: Path, text: str) -> dict[str, Any]:
    if len(text) > LARGEST_IDENTITY:
        raise _broken(file, f"its identity must have at most {LARGEST_IDENTITY:,} characters", f"{len(text):,}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise _broken(file, "its identity must be JSON", f"{type(e).__name__}: {e!s:.80}") from e
    stated = _object(file, "identity", value, _IDENTITY)
    if not isinstance(stated["initial weights"], str):
        raise _broken(file, "its initial weights must be a digest", _checks.shown(stated["initial weights"]))
    return stated


def _object(file: Path, what: str, value: Any, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return `value` if it is a JSON object with exactly these keys. Any keys are allowed if `keys` is None."""
    if not isinstance(value, dict):
        raise _broken(file, f"its {what} must be a JSON object", _checks.shown(value))
    if keys is not None and value.keys() != set(keys):
        raise _broken(file, f"its {what} must have the keys {', '.join(keys)}", _checks.shown(sorted(value)))
    return value


def _size_from(file: Path, value: Any) -> Size:
    names = tuple(field.name for field in dataclasses.fields(Size))
    fields = _object(file, "size", value, names)
    try:
        return Size(**fields)
    except ropewalk.RopeError as e:
        raise _broken(file, "its size must be that of a model", str(e)) from e


def _rope_from(file: Path, value: Any, size: Size) -> ropewalk.Rope:
    fields = dict(_object(file, "rope", value, _ROPE))
    if fields["head_dim"] != size.head_dim:
        must = f"head_dim of its rope must be that of its size, {size.head_dim}"
        raise _broken(file, must, _checks.shown(fields["head_dim"]))
    scaling = fields["scaling"] if fields["scaling"] is None else dict(_object(file, "scaling", fields["scaling"]))
    name = None if scaling is None else scaling.pop("scheme", None)
    if scaling is not None and (not isinstance(name, str) or name not in _SCHEMES):
        raise _broken(file, f"the scheme of its scaling must be one of {', '.join(_SCHEMES)}", _checks.shown(name))
    try:
        fields["scaling"] = None if scaling is None else _SCHEMES[str(name)](**scaling)
        return ropewalk.Rope(**fields)
    except (ValueError, TypeError, OverflowError) as e:
        raise _broken(file, "its rope must be valid", f"{e!s:.300}") from e


def _seconds(file: Path, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise _broken(file, "its seconds must be a finite number of at least 0", _checks.shown(text))
    return seconds


def _check_kinds(file: Path, kinds: Mapping[str, Kind], size: Size, steps: int) -> None:
    """Check that the file has exactly the tensors of a model of this size, and from 1 to `steps` losses."""
    expected = {
        f"{kind}.{name}": Kind("F32", shape) for name, shape in shapes(size).items() for kind in ("weights", *_MOMENTS)
    }
    losses = kinds.get("losses")
    if losses is None or losses.dtype != "F64" or len(losses.shape) != 1 or not 1 <= losses.shape[0] <= steps:
        got = "none" if losses is None else f"{losses.dtype} {list(losses.shape)}"
        raise _broken(file, f"its losses must be F64 [from 1 to {_checks.shown(steps)}]", got)
    if different := sorted(kinds.keys() - {"losses"} ^ expected.keys()):
        got = f"missing or unknown: {', '.join(different[:4])}"
        raise _broken(file, "it must hold exactly the tensors of a model of its size", got)
    for name, kind in expected.items():
        if kinds[name] != kind:
            got = f"{kinds[name].dtype} {list(kinds[name].shape)}"
            raise _broken(file, f"{name} must be {kind.dtype} {list(kind.shape)}", got)


def _check_values(file: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        if not value.isfinite().all():
            raise _broken(file, f"{name} must be finite", "inf or nan")
        if name.startswith("exp_avg_sq.") and bool((value < 0).any()):
            raise _broken(file, f"{name} must be at least 0", "a negative number")


def _broken(file: Path, must: str, got: str) -> ropewalk.RopeError:
    """Build the error for a file that looks like a checkpoint but cannot be used."""
    fix = "The file is damaged, or was not written by the lab. Delete it to start again."
    return _checks.error("lab", f"{file}: {must}", got, fix)


def _rope_to_json(rope: ropewalk.Rope) -> dict[str, Any]:
    fields = {name: getattr(rope, name) for name in _ROPE[:-1]}
    if rope.scaling is None:
        return {**fields, "scaling": None}
    return {**fields, "scaling": {"scheme": type(rope.scaling).__name__, **asdict(rope.scaling)}}  # type: ignore[call-overload]
