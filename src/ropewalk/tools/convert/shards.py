"""Read and write safetensors: find the tensors of a folder, and write a file one tensor at a time.

The safetensors library checks the header. The bytes are read and written here, because the library maps whole files
into memory to read them, and can only write tensors that are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ropewalk import _checks
from ropewalk.configs.weights import INDEX, SINGLE, open_safetensors, read_index
from ropewalk.tools.convert import raw
from ropewalk.tools.convert.raw import StoredTensor, Tensor

ADAPTER = "adapter_model.safetensors"


def header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read the header of a file. Return its tensors by name, in the order of their bytes, and its metadata.

    Raises:
        RopeError: safetensors is not installed, the file is not a complete safetensors file, or a dtype is unknown.
    """
    with open_safetensors("convert", file, "np") as opened:
        metadata = opened.metadata() or {}
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        entries: dict[str, Any] = json.loads(content.read(size))
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        tensors[name] = raw.tensor_in_file(file, 8 + size + begin, end - begin, entry["dtype"], tuple(entry["shape"]))
    return tensors, metadata


def files_of(folder: Path) -> dict[str, set[str] | None]:
    """Find the files of the weights in a folder.

    Returns:
        A dict from each file to the names of the tensors that the index lists for it, or to None if there is no index.

    Raises:
        RopeError: the folder has neither model.safetensors nor an index, or has both, or the index is invalid or names
            anything other than safetensors files in the folder.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        came = f"{SINGLE} and {INDEX}"
        raise _checks.error("convert", f"{folder} must hold one set of weights", came, "Move one of them elsewhere.")
    if single.exists():
        return {SINGLE: None}
    if not index.is_file():
        others = sorted(
            path.name for path in folder.glob("*") if path.suffix in (".bin", ".pth", ".pt", ".safetensors")
        )
        came = f"{', '.join(others[:4])}" if others else "neither"
        fix = "Save the model with save_pretrained(folder), which writes safetensors."
        raise _checks.error("convert", f"{folder} must hold {SINGLE} or {INDEX}", came, fix)
    files: dict[str, set[str] | None] = {}
    for name, file in read_index("convert", index)["weight_map"].items():
        listed = files.setdefault(file, set())
        if listed is not None:
            listed.add(name)
    return files


def tensors_of(folder: Path) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, dict[str, str]]]:
    """Read the headers of all files of a folder. Return the tensors of each file, and the metadata of each file.

    Raises:
        RopeError: as in `files_of` and `header`, or a file does not hold the tensors that the index lists for it.
    """
    tensors, metadata = {}, {}
    for file, listed in files_of(folder).items():
        tensors[file], metadata[file] = header(folder / file)
        if listed is not None and listed != tensors[file].keys():
            name = min(listed ^ tensors[file].keys())
            where = "missing in the file" if name in listed else "missing in the index"
            must = f"{folder / file} must hold the tensors that {INDEX} lists for it"
            raise _checks.error(
                "convert", must, f"{_checks.short_key(name)} {where}", "Download or copy both files again."
            )
    return tensors, metadata


def write(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], done: Callable[[int], None]) -> None:
    """Write a safetensors file, with the tensors in their given order.

    Args:
        file: the file to create or overwrite.
        tensors: the tensors by name.
        metadata: the metadata of the file.
        done: a function that is called after each chunk, with its number of bytes.
    """
    header_entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header_entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    head = json.dumps(header_entries, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            for chunk in raw.chunks(tensor):
                out.write(chunk.data)
                done(chunk.nbytes)
