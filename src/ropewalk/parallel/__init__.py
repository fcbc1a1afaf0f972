"""Attention where a sequence is cut over the ranks of a process group of torch.distributed."""

from __future__ import annotations

from ropewalk.parallel.context import ContextParallel as ContextParallel
