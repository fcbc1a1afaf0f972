"""Read a checkpoint: its config, its ropes, and the names, shapes and locations of its tensors. No tensor is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk import _checks
from ropewalk._layout import Pairing
from ropewalk.configs import source, weights
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.read import from_config, read_config
from ropewalk.configs.reader import PAIRING_KEY
from ropewalk.tools.convert import meta, pth, shards
from ropewalk.tools.convert.raw import Tensor

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".ckpt", ".onnx", ".index.json")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder.

    Args:
        folder: the folder.
        form: the format of the files: "hf", "meta" (which is converted to "hf") or "adapter" (a LoRA adapter of PEFT).
        config: the config of the model in Hugging Face's schema. For an adapter, the config of its base model.
        own_config: the content of adapter_config.json for an adapter; the same as `config` for other checkpoints.
        ropes: the ropes of the config.
        pairing: the pairing of these weights.
        native_pairing: the pairing with which the code of this model_type rotates.
        files: maps each file to its tensors by Hugging Face's names, in the order of their bytes. The files of Meta's
            format are joined, so that the first one has all tensors.
        metadata: maps each file to its safetensors metadata.
        companion_files: the names of other files in the folder that belong to the model, such as its tokenizer.
        unread_weights: the names of other files with weights and of folders in the folder, which were not read.
    """

    folder: Path
    form: str
    config: dict[str, Any]
    own_config: dict[str, Any]
    ropes: ModelRopes
    pairing: Pairing
    native_pairing: Pairing
    files: Mapping[str, Mapping[str, Tensor]]
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    companion_files: tuple[str, ...] = ()
    unread_weights: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by Hugging Face's names."""
        return {name: tensor for tensors in self.files.values() for name, tensor in tensors.items()}

    @property
    def model_type(self) -> str:
        """The model_type of the config."""
        return str(self.config.get("model_type"))

    def first(self, keys: Collection[str]) -> int | None:
        """Return the value of the first of these config keys whose value is an integer, or None if there is none."""
        found = (self.config.get(key) for key in keys)
        return next((value for value in found if type(value) is int), None)


def read(
    folder: Path,
    *,
    base_config: Path | None = None,
    pairing: str | None = None,
    factor: float | None = None,
    max_positions: int | None = None,
    ignore: Collection[str] = (),
) -> Checkpoint:
    """Read the headers and configs of a checkpoint.

    Args:
        folder: the folder of a Hugging Face model, of a LoRA adapter, or of Meta's Llama.
        base_config: for an adapter, the config.json of the model that it belongs to, or the folder of that file.
        pairing: the pairing, for a model_type that ropewalk does not know.
        factor: the scaling factor, for Meta's params.json with `use_scaled_rope`.
        max_positions: for Meta's params.json, the `max_position_embeddings` of the model in tokens, which this format
            does not contain.
        ignore: keys of the config to ignore.

    Raises:
        RopeError: the folder holds no such checkpoint or an incomplete one, or an argument is for another kind of
            checkpoint.
    """
    if not folder.is_dir():
        came = "a file" if folder.exists() else "a path that does not exist"
        raise _no_checkpoint(folder, f"{folder} must be a folder", came)
    meta_form = (folder / "params.json").exists() and bool(list(folder.glob("consolidated.*.pth")))
    adapter_form = (folder / ADAPTER_CONFIG).exists()
    hf_form = (folder / weights.SINGLE).exists() or (folder / weights.INDEX).exists()
    if sum((meta_form, adapter_form, hf_form)) > 1:
        must, fix = f"{folder} must hold one checkpoint", "Move the others to another folder."
        raise _checks.error("convert", must, "checkpoints of several formats", fix)
    _refuse(not meta_form, "factor", factor, "Meta's params.json")
    _refuse(not meta_form, "max_positions", max_positions, "Meta's params.json")
    _refuse(not adapter_form, "base_config", base_config, "a LoRA adapter")
    if meta_form:
        _refuse(True, "pairing", pairing, "a model_type that ropewalk does not know")
        _refuse(True, "ignore", ignore or None, "a config of Hugging Face")
        return _meta(folder, factor, max_positions)
    if adapter_form:
        return _adapter(folder, base_config, pairing, ignore)
    if not (folder / "config.json").exists():
        must = (
            f"{folder} must hold config.json and safetensors, params.json and consolidated.*.pth, or {ADAPTER_CONFIG}"
        )
        raise _no_checkpoint(folder, must, "none of these")
    config, ropes, own, native_pairing = _config(folder / "config.json", pairing, ignore)
    files, metadata = shards.tensors_of(folder)
    companion_files, unread_weights = _other_files(folder, {*files, "config.json"})
    return Checkpoint(
        folder, "hf", config, config, ropes, own, native_pairing, files, metadata, companion_files, unread_weights
    )


def _no_checkpoint(folder: Path, must: str, came: str) -> _checks.RopeError:
    """Create the error for a path that is not a folder of a supported format."""
    fix = "Pass the folder of a downloaded model."
    if source.gguf_path(folder) is not None or any(folder.glob("*.gguf")):
        fix = "GGUF files cannot be converted. Pass the folder of the model that the file was made from."
    return _checks.error("convert", must, came, fix)


def _refuse(is_refused: bool, name: str, value: object, kind: str) -> None:
    if is_refused and value is not None:
        raise _checks.error("convert", f"{name} is for {kind} only", _checks.shown(value), "Do not pass it.")


def _config(
    file: Path, pairing: str | None, ignore: Collection[str]
) -> tuple[dict[str, Any], ModelRopes, Pairing, Pairing]:
    """Read a config. Return it with its ropes, the pairing of its weights, and the pairing that its model's code uses.

    Raises:
        RopeError: the config cannot be read, or is that of a model whose weights cannot be converted.
    """
    ropes = from_config(file, pairing=pairing, ignore=ignore)
    config, _ = source.load(file)
    if ropes.config is None or ropes.config.get("model_type") != config.get("model_type"):
        fix = "Convert a checkpoint that contains only its text model."
        raise _checks.error(
            "convert", f"{file} must describe one text model", _checks.shown(config.get("model_type")), fix
        )
    if ropes.vision is not None:
        fix = "Its vision tower has tensors of the same names with other ropes. Convert only the text model."
        raise _checks.error(
            "convert", f"{file} must describe only a text model", f"also {ropes.vision.model_type}", fix
        )
    if ropes.extra_ropes:
        fix = "What rotates with a rope of its own is not supported yet."
        must = f"{ropes.model_type} must have one rope in each layer and no other part that rotates"
        raise _checks.error("convert", must, f"also {', '.join(ropes.extra_ropes)}", fix)
    if ropes.rotates_values:
        must = f"{ropes.model_type} must rotate only q and k"
        raise _checks.error("convert", must, "values that are rotated as well", "This is not supported yet.")
    pairings: set[Pairing] = {rope.pairing for rope in ropes.layers if rope is not None}
    if len(pairings) != 1:
        came = "no layer that rotates" if not pairings else " and ".join(sorted(pairings))
        fix = "There is nothing to convert." if not pairings else "Models with two pairings are not supported."
        raise _checks.error("convert", f"all layers of {file} must rotate with one pairing", came, fix)
    own = pairings.pop()
    bare = {key: value for key, value in config.items() if key != PAIRING_KEY}
    native_pairing = next(r.pairing for r in read_config(bare, pairing=pairing, ignore=ignore).layers if r is not None)
    return config, ropes, own, native_pairing


def _adapter(folder: Path, base_config: Path | None, pairing: str | None, ignore: Collection[str]) -> Checkpoint:
    own_config, _ = source.load(folder / ADAPTER_CONFIG)
    if own_config.get("peft_type") != "LORA":
        must, fix = f"{folder} must hold a LoRA adapter", "Merge the adapter into its model, and convert the model."
        raise _checks.error("convert", must, f"peft_type {_checks.shown(own_config.get('peft_type'))}", fix)
    if base_config is None:
        name = own_config.get("base_model_name_or_path")
        if not isinstance(name, str) or not (Path(name) / "config.json").is_file():
            must = "base_model_name_or_path of the adapter must be a folder with the config of its model"
            raise _checks.error("convert", must, _checks.shown(name), f"Pass {_checks.argument('base_config')}.")
        base_config = Path(name)
    file = base_config / "config.json" if base_config.is_dir() else base_config
    config, ropes, own, _ = _config(file, pairing, ignore)
    tensors, metadata = shards.header(folder / shards.ADAPTER)
    marked_pairing = metadata.get(PAIRING_KEY)
    companion_files, unread_weights = _other_files(folder, {shards.ADAPTER, ADAPTER_CONFIG})
    return Checkpoint(
        folder=folder,
        form="adapter",
        config=config,
        own_config=own_config,
        ropes=ropes,
        pairing=own if marked_pairing is None else _checks.check_pairing(f"{folder / shards.ADAPTER}", marked_pairing),
        native_pairing=own,
        files={shards.ADAPTER: tensors},
        metadata={shards.ADAPTER: metadata},
        companion_files=companion_files,
        unread_weights=unread_weights,
    )


def _meta(folder: Path, factor: float | None, max_positions: int | None) -> Checkpoint:
    params, _ = source.load(folder / "params.json")
    ropes = from_config(folder / "params.json", factor=factor)
    pieces = pth.pieces(folder)
    width = params.get("dim")
    tensors = pth.join_pieces([pth.tensors_of(file) for file in pieces], width if type(width) is int else 0)
    config = meta.to_hugging_face(params, ropes, tensors, max_positions)
    named = {meta.hugging_face_name(name): tensor for name, tensor in tensors.items() if name != meta.FREQUENCIES}
    companion_files, unread_weights = _other_files(folder, {*(file.name for file in pieces), "params.json"})
    return Checkpoint(
        folder=folder,
        form="meta",
        config=config,
        own_config=config,
        ropes=from_config(config),
        pairing="interleaved",
        native_pairing="half",
        files={pieces[0].name: named},
        companion_files=companion_files,
        unread_weights=unread_weights,
    )


def _other_files(folder: Path, read: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names in a folder that are not in `read`: first files without weights, then those with, and folders.

    The index of the weights is in neither of the two tuples.
    """
    others = sorted(
        f"{p.name}/" if p.is_dir() else p.name for p in folder.iterdir() if p.name not in {*read, weights.INDEX}
    )
    unread_weights = [name for name in others if name.endswith((*_WEIGHTS, "/"))]
    return tuple(name for name in others if name not in unread_weights), tuple(unread_weights)


def row_keys(model_type: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the config keys of the number of heads, and those of the width of the model, for a model_type."""
    row = ARCHITECTURES.get(model_type)
    return (("num_attention_heads",), ("hidden_size",)) if row is None else (row.heads, row.hidden)
