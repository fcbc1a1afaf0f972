"""`ARCHITECTURES` maps the name of each architecture of llama.cpp to its row, a `GgufRow`, from `tables/gguf.py`."""

from __future__ import annotations

from ropewalk._checks import error, shown
from ropewalk.configs.gguf.row import GgufRow
from ropewalk.configs.tables.gguf import ROWS

ARCHITECTURES: dict[str, GgufRow] = {name: row for names, row in ROWS.items() for name in names.split()}
# The row of an unknown architecture, for which the caller passes the pairing. All factor tensors are read.
UNKNOWN = GgufRow(None, freqs="read", longrope="by type")


def register(architecture: str, row: GgufRow) -> None:
    """Register the `GgufRow` of an architecture in this process, replacing any existing one.

    Args:
        architecture: the value of general.architecture in its files.
        row: what the architecture implies about rotation.

    Raises:
        RopeError: architecture is not a non-empty string, or row is not a `GgufRow`.
    """
    who = "architectures.register"
    if not isinstance(architecture, str) or not architecture:
        fix = "Pass the value of general.architecture."
        raise error(who, "architecture must be a non-empty string", shown(architecture), fix)
    if not isinstance(row, GgufRow):
        raise error(who, "row must be a GgufRow", shown(row), 'Pass one, e.g. GgufRow("half").')
    ARCHITECTURES[architecture] = row
