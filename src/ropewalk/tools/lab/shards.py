"""Shard a model over processes with FSDP2, and save checkpoints that any number of processes can load.

While several processes train, there is a folder `x.safetensors.shards` next to `x.safetensors`. Each checkpoint is a
folder in it, where `torch.distributed.checkpoint` writes one safetensors file for each process. `last.json` names the
last complete checkpoint, and is replaced after all files of a checkpoint are written.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.tools.lab import files, ranks
from ropewalk.tools.lab.model import LanguageModel

VERSION = "1"
"""Version of `last.json`."""


@dataclass(frozen=True)
class Manifest:
    """The manifest: the content of `last.json`.

    Args:
        version: VERSION.
        identity: identity of the training, as returned by `checkpoint.identity`.
        losses: loss of each completed step in nats, at least one.
        seconds: duration of these steps.
        folder: name of the folder with the tensors.
        sha256: a dict from the name of each file in that folder to its digest.
    """

    version: str
    identity: dict[str, Any]
    losses: list[float]
    seconds: float
    folder: str
    sha256: dict[str, str]


def shard(model: LanguageModel) -> LanguageModel:
    """Return a copy of the model on `ranks.device()`, with its parameters sharded over all processes by FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = ranks.device()
    mesh = init_device_mesh(device.type, (ranks.count(),))
    shards = copy.deepcopy(model).to(device)
    for layer in shards.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(shards, mesh=mesh)
    return shards


def gather(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather every DTensor. Return all tensors, by name, on the CPU of every process."""
    from torch.distributed.tensor import DTensor

    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu() for name, value in tensors.items()
    }


def save(
    file: Path, identity: Mapping[str, Any], tensors: Mapping[str, Tensor], losses: list[float], seconds: float
) -> None:
    """Write the state after a step. All processes must call this, and each writes its own shards.

    If a process is killed while writing, the previous checkpoint remains. It is deleted once the new one is complete.

    Args:
        file: the file of the training. Checkpoints are in the folder next to it.
        identity: identity of the training.
        tensors: the result of `checkpoint.state` for DTensors.
        losses: loss of each completed step in nats.
        seconds: duration of these steps.

    Raises:
        RopeError: a loss, weight or moment is not finite, or a process cannot write. The last checkpoint remains.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards
    from torch.distributed.tensor import DTensor

    local = [value.to_local() for value in tensors.values() if isinstance(value, DTensor)]
    finite = math.isfinite(losses[-1]) and bool(torch.nn.utils.get_total_norm(local).isfinite())
    folder = folder_of(file) / f"step-{len(losses):08d}"
    if not all(ranks.gather_objects(finite)):
        must, got = "loss and weights must be finite", f"inf or nan after step {len(losses)}"
        ranks.fail(
            _checks.error("lab", must, got, f"Choose a lower learning rate. {folder.parent} contains earlier steps.")
        )
    try:
        # This format contains no pickles, so reading it executes no code.
        save_shards(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as e:  # raised in every process
        ranks.fail(_unwritable(folder, e.failures))
    # Each process lists only its own file: files of other machines may not be visible yet.
    digests = ranks.gather_objects(_digests(folder, f"shard-{ranks.rank() + 1:05d}-*"))
    sha256 = {name: digest for rank_digests in digests for name, digest in rank_digests.items()}
    if len(sha256) != ranks.count():
        raise RuntimeError(f"{ranks.count()} processes wrote {sorted(sha256)}: this PyTorch names shards differently")
    last = Manifest(VERSION, dict(identity), losses, seconds, folder.name, sha256)
    ranks.on_first(lambda: _publish(file, last))


def read(file: Path) -> Manifest | None:
    """Read and check the manifest of the last complete checkpoint of `file`, or return None if there is none.

    The digests of its files are checked, but the tensors are not read.

    Raises:
        RopeError: the checkpoint is broken.
    """
    manifest = folder_of(file) / "last.json"
    if not manifest.exists():
        return None
    must = f"it must be a manifest of version {VERSION}"
    try:
        found = Manifest(**json.loads(manifest.read_text(encoding="utf-8")))
        valid = (
            found.version == VERSION
            and isinstance(found.identity, dict)
            and isinstance(found.sha256, dict)
            and len(found.losses) > 0
            and all(isinstance(number, float) and math.isfinite(number) for number in [*found.losses, found.seconds])
            and found.folder == f"step-{len(found.losses):08d}"
        )
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise _broken(manifest, must, f"{type(e).__name__}: {e!s:.80}") from e
    if not valid:
        raise _broken(manifest, must, "one with other values")
    actual = _digests(manifest.parent / found.folder, "*")
    if actual != found.sha256:
        different = sorted(name for name in actual.keys() | found.sha256 if actual.get(name) != found.sha256.get(name))
        got = f"missing, added or changed: {', '.join(different[:4])}"
        raise _broken(manifest, f"{found.folder} must hold the files that it lists", got)
    return found


def load(file: Path, last: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors, plain or DTensors, from the checkpoint. Each process reads its own part.

    Raises:
        RopeError: a tensor is missing from the checkpoint, or has another shape there.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_shards

    folder = folder_of(file) / last.folder
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected for a single process
        try:
            load_shards(
                dict(tensors),
                storage_reader=HuggingFaceStorageReader(str(folder)),
                no_dist=ranks.count() == 1,
            )
        except CheckpointException as e:
            ranks.fail(_broken(folder, "it must hold the tensors of this training", _describe_failure(e.failures)))


def delete_checkpoints(file: Path, keep: str | None) -> None:
    """Delete the checkpoints that several processes saved, including incomplete ones of killed processes.

    Args:
        file: the file of the training.
        keep: name of the checkpoint's folder to keep. None deletes all of them, beginning with the manifest.
    """
    parent = folder_of(file)
    if keep is None:
        (parent / "last.json").unlink(missing_ok=True)
        shutil.rmtree(parent, ignore_errors=True)
        return
    for folder in parent.glob("step-*"):
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)


def folder_of(file: Path) -> Path:
    """Return the folder in which several processes save their checkpoints while they train `file`."""
    return file.with_name(f"{file.name}.shards")


def _publish(file: Path, last: Manifest) -> None:
    """Replace the manifest, and delete older checkpoints."""
    manifest = folder_of(file) / "last.json"
    with files.atomic_write(manifest) as unfinished:
        unfinished.write_text(json.dumps(asdict(last)), encoding="utf-8")
    delete_checkpoints(file, keep=last.folder)


def _digests(folder: Path, pattern: str) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder that matches the pattern, by file name."""
    digests = {}
    for path in sorted(folder.glob(pattern)):
        with path.open("rb") as opened:
            digests[path.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return digests


def _unwritable(folder: Path, failures: Mapping[int, Any]) -> _checks.RopeError:
    got = _describe_failure(failures)
    shutil.rmtree(folder, ignore_errors=True)
    must = f"{folder.parent} must be a folder that every process can write to"
    return _checks.error("lab", must, got, "Free disk space, or pass another folder. The last checkpoint is unchanged.")


def _describe_failure(failures: Mapping[int, Any]) -> str:
    """Describe the failure of the lowest rank in the report of torch.distributed.checkpoint.

    `failures` maps a rank to its exception and traceback.
    """
    rank, (error, _) = min(failures.items())
    if isinstance(error, KeyboardInterrupt):  # Ctrl-C
        raise error
    return f"{type(error).__name__} in process {rank}: {error!s:.200}"


def _broken(path: Path, must: str, got: str) -> _checks.RopeError:
    return _checks.error("lab", f"{path}: {must}", got, f"Delete {path.parent} to continue without it.")
