"""How fast does each pair turn? One scheme, one file; each a frozen dataclass of plain numbers."""

from __future__ import annotations

from ropewalk.schemes._scheme import Scheme
from ropewalk.schemes.linear import Linear
from ropewalk.schemes.llama3 import Llama3
from ropewalk.schemes.yarn import YaRN

__all__ = ["SCHEMES", "Linear", "Llama3", "Scheme", "YaRN"]

SCHEMES: dict[str, type[Scheme]] = {scheme.rope_type: scheme for scheme in (Linear, Llama3, YaRN)}
"""rope_type of a config → scheme; "default" is no scheme."""
