"""Distributed attention: tensor parallelism over heads, and context parallelism over the sequence."""

from __future__ import annotations

from ropewalk.parallel.context import ContextParallel
from ropewalk.parallel.heads import HeadwiseParallel, attention_plan

__all__ = ["ContextParallel", "HeadwiseParallel", "attention_plan"]
__dir__ = __all__.copy
