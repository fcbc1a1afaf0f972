"""Where new tensors get their memory from: memory that the process already has, or new memory from the system."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

try:
    import resource
except ImportError:  # as on Windows
    resource = None  # type: ignore[assignment]

Memory = Literal["new", "kept", "unknown"]
"""Memory of new tensors: mapped anew for each, kept by the process, or whatever the C library does."""
NEW_FROM = 2**20  # bytes: blocks of at least this size are mapped anew
DESCRIBED = {
    "new": "new tensors in new memory from the system",
    "kept": "new tensors in memory that the process has",
    "unknown": "new tensors in memory of unknown origin",
}
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of glibc's mallopt
_OPTIONS = {
    "new": ((_MMAP_THRESHOLD, NEW_FROM),),
    "kept": ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)),
    "usual": ((_MMAP_MAX, 65_536), (_MMAP_THRESHOLD, 32 * 2**20), (_TRIM_THRESHOLD, 64 * 2**20)),
}


def memories() -> tuple[Memory, ...]:
    """Return the kinds of memory that this system can be told to use, in the order in which they must be measured."""
    return ("new", "kept") if platform.libc_ver()[0] == "glibc" else ("unknown",)


@contextmanager
def using(memory: Memory) -> Iterator[None]:
    """Make new tensors use this kind of memory, then return to values that glibc's own rule reaches.

    Memory that the process has kept would also serve new tensors. So "new" must come before "kept".
    """
    if memory == "unknown":
        yield
        return
    library = ctypes.CDLL(None)
    try:
        for option in _OPTIONS[memory]:
            library.mallopt(*option)
        yield
    finally:
        for option in _OPTIONS["usual"]:
            library.mallopt(*option)
        library.malloc_trim(0)


def page_faults() -> int:
    """Return the number of pages that this process has been given so far without reading a file, 0 if unknown."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt
