"""How fast does each pair turn? One scheme, one file; each a frozen dataclass of plain numbers."""

from __future__ import annotations

from ropewalk.schemes._scheme import Scheme
from ropewalk.schemes.linear import Linear
from ropewalk.schemes.llama3 import Llama3
from ropewalk.schemes.yarn import YaRN

__all__ = ["Linear", "Llama3", "Scheme", "YaRN"]
