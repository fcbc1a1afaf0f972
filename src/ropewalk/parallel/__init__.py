"""Attention on many machines: sharded by its heads, or over a sequence that the ranks of a process group share."""

from __future__ import annotations

from ropewalk.parallel.context import ContextParallel as ContextParallel
from ropewalk.parallel.heads import HeadwiseParallel as HeadwiseParallel
from ropewalk.parallel.heads import attention_plan as attention_plan
