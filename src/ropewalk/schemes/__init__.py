"""How fast does each pair turn? One scheme, one file; each a frozen dataclass of plain numbers."""

from __future__ import annotations

from ropewalk.schemes._scheme import Scheme
from ropewalk.schemes.dynamic import DynamicNTK
from ropewalk.schemes.linear import Linear
from ropewalk.schemes.llama3 import Llama3
from ropewalk.schemes.longrope import LongRoPE
from ropewalk.schemes.ntk import NTK
from ropewalk.schemes.per_pair import PerPair
from ropewalk.schemes.proportional import Proportional
from ropewalk.schemes.yarn import YaRN

__all__ = [
    "NTK",
    "SCHEMES",
    "DynamicNTK",
    "Linear",
    "Llama3",
    "LongRoPE",
    "PerPair",
    "Proportional",
    "Scheme",
    "YaRN",
]

SCHEMES: dict[str, type[Scheme]] = {
    scheme.rope_type: scheme for scheme in (DynamicNTK, Linear, Llama3, LongRoPE, Proportional, YaRN)
}
"""rope_type of a config → scheme. "default" is no scheme; `NTK` is "dynamic" with alpha; no config names `PerPair`."""
