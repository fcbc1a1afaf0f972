"""A text corpus from files that every Python ships: the sources of the standard library and pydoc's help topics."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from training import Batch

# Packages in every CPython since 3.11 that no distribution ships separately. Other packages are omitted: tkinter,
# idlelib, venv, lib2to3 and test are often missing, and encodings consists of tables of numbers.
PACKAGES = (
    "asyncio", "collections", "concurrent", "ctypes", "email", "html", "http", "importlib", "json", "logging",
    "multiprocessing", "pydoc_data", "re", "sqlite3", "tomllib", "unittest", "urllib", "wsgiref", "xml", "xmlrpc",
    "zoneinfo",
)  # fmt: skip
SMALLEST = 8192
"""Minimum size of a file in bytes. Smaller held-out files would have hardly any long windows."""
TENTH = 10
"""One in this many files is held out."""


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and, from other files, bytes to measure on.

    Args:
        train: all training files, concatenated, uint8 `[bytes]`.
        held_out: uint8 `[bytes]` for each held-out file.
        digest: SHA-256 of names and bytes in hexadecimal digits. It differs between Python versions.
    """

    train: Tensor
    held_out: tuple[Tensor, ...]
    digest: str


def corpus() -> Corpus:
    """Read the corpus of about 8 MB, which takes about a second. Nothing is downloaded.

    The digest of a file's name decides whether the file is held out, so the split does not change when files are added
    or removed. The help topics (`pydoc_data/topics.py`), the only long English text, are in the training set.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    names = sorted(_names(folder))
    texts = {name: (folder / name).read_bytes() for name in names}
    texts = {name: text for name, text in texts.items() if len(text) >= SMALLEST}
    held_out = tuple(name for name in texts if _is_held_out(name))
    train = tuple(name for name in texts if not _is_held_out(name))
    if not held_out or not train:
        raise SystemExit(f"{folder} has no sources of the standard library. Use a Python that has them.")
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return Corpus(
        train=_tensor(b"".join(texts[name] for name in train)),
        held_out=tuple(_tensor(texts[name]) for name in held_out),
        digest=digest.hexdigest(),
    )


def batches(text: Tensor, *, batch: int, seq: int, seed: int) -> Callable[[int], Batch]:
    """Return a function that draws random windows, which depend only on the seed and the step.

    Args:
        text: uint8 `[bytes]`, with more than seq bytes.
        batch: number of windows in a step.
        seq: number of tokens in a window.
        seed: an integer of at least 0.

    Returns:
        A function from a step to a `Batch` of tokens and targets, int64 `[batch, seq]`. Each target is the byte after
        its token.
    """
    inside = torch.arange(seq + 1)

    def at(step: int) -> Batch:
        starts = np.random.default_rng((seed, step)).integers(0, len(text) - seq, size=batch)
        rows = text[torch.from_numpy(starts).unsqueeze(1) + inside].long()
        return Batch(rows[:, :-1], rows[:, 1:])

    return at


def windows(texts: tuple[Tensor, ...], *, count: int, seq: int) -> Batch:
    """Return test windows, spread evenly over the held-out files. No window spans two files.

    Returns:
        A `Batch` of tokens and targets, int64 `[count, seq]`. Windows overlap if the files are too short.
    """
    long_enough = [text for text in texts if len(text) > seq]
    places = [len(text) - seq for text in long_enough]
    ends = np.cumsum(places)
    chosen = (np.arange(count) + 0.5) * ends[-1] / count
    rows = []
    for place in chosen.astype(int):
        file = int(np.searchsorted(ends, place, side="right"))
        start = int(place - (ends[file] - places[file]))
        rows.append(long_enough[file][start : start + seq + 1].long())
    windows = torch.stack(rows)
    return Batch(windows[:, :-1], windows[:, 1:])


def _names(folder: Path) -> set[str]:
    modules = {path.name for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names}
    for package in PACKAGES:
        modules |= {path.relative_to(folder).as_posix() for path in (folder / package).rglob("*.py")}
    return {name for name in modules if not {"test", "tests"} & set(name.split("/"))}


def _is_held_out(name: str) -> bool:
    return name != "pydoc_data/topics.py" and hashlib.sha256(name.encode()).digest()[0] % TENTH == 0


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
