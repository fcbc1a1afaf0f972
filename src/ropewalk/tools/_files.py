"""Replace a file only when its new content is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and move what the body has written there to `file`, at once.

    If the body raises, `file` does not change, and the temporary file is removed. If the process is killed, `file` does
    not change, and the temporary file stays until the next call for this file.

    Raises:
        OSError: the file cannot be written, for example because the disk is full. The error names the file.
    """
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield partial
        os.replace(partial, file)
    except BaseException as e:
        with suppress(OSError):
            partial.unlink()
        if isinstance(e, OSError) and e.filename is None:  # a failed write does not say to which file
            e.filename = str(file)
        raise
