"""Let the process keep the memory of freed tensors, so that new tensors need no new pages of the system."""

from __future__ import annotations

import ctypes
import platform
import sys

from ropewalk import _checks

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt


def keep_memory() -> None:
    """Make glibc keep the memory that this process frees, instead of returning it to the system. Linux only.

    A new tensor then gets pages that the process already has, so the system need not fill them with zeros first. Where
    tensors of many megabytes are made again and again on a CPU, as in each layer of a forward pass, that takes longer
    than a rotation. Call it once, before the first large tensors. It also applies to the tensors of other libraries,
    and lasts as long as the process.

    Costs: the process keeps as much memory as it has ever used at once, also while it is idle, and other programs
    cannot use it. Blocks of different sizes can leave gaps, which add to that. Threads other than the first allocate
    from areas of 64 MiB each, so their larger tensors still get new memory. Memory of GPUs and allocators that replace
    glibc's (jemalloc, tcmalloc) are not affected.

    Raises:
        RopeError: the system is not Linux with glibc, or glibc refuses.

    Examples:
        >>> ropewalk.keep_memory()  # doctest: +SKIP
    """
    name = f"{sys.platform} with {platform.libc_ver()[0] or 'another C library'}"
    must, fix = "the process must run on Linux with glibc", "Omit the call. Nothing else depends on it."
    if name != "linux with glibc":
        raise _checks.error("keep_memory", must, name, fix)
    library = ctypes.CDLL(None)
    if not (library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1)):
        raise _checks.error("keep_memory", "glibc must accept the options of mallopt", "a refusal", fix)
