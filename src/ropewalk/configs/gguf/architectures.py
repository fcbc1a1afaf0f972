"""`ARCHITECTURES` maps the name of each architecture of llama.cpp to its row, a `GgufRow`, from `tables/gguf.py`."""

from __future__ import annotations

from ropewalk.configs.gguf.row import GgufRow
from ropewalk.configs.tables.gguf import ROWS

ARCHITECTURES: dict[str, GgufRow] = {name: row for names, row in ROWS.items() for name in names.split()}
# The row of an unknown architecture, for which the caller passes the pairing. All factor tensors are read.
UNKNOWN = GgufRow(None, freqs="read", longrope="by type")
