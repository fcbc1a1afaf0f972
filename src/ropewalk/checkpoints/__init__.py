"""Checkpoints between pairings and formats: `ropewalk convert`.

    folder ──► read ──► Checkpoint ──► plan ──► Plan ──► write ──► folder
               model.py                plan.py           write.py

`raw` has tensors as rows of bytes, `shards` safetensors, `pth` Meta's files, `layouts` which rows are q and k, `meta`
the names and the config of Meta's format, `verify` the proof. Nothing is loaded but the rows that are just being moved.
"""

from __future__ import annotations

from ropewalk.checkpoints.model import Checkpoint as Checkpoint
from ropewalk.checkpoints.model import read as read
from ropewalk.checkpoints.plan import Plan as Plan
from ropewalk.checkpoints.plan import plan as plan
from ropewalk.checkpoints.write import check_target as check_target
from ropewalk.checkpoints.write import write as write
