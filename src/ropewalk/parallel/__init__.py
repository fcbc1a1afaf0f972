"""Distributed attention: tensor parallelism over heads, and context parallelism over the sequence."""

from __future__ import annotations

from ropewalk.parallel.context import ContextParallel as ContextParallel
from ropewalk.parallel.heads import HeadwiseParallel as HeadwiseParallel
from ropewalk.parallel.heads import attention_plan as attention_plan
