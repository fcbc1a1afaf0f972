"""Convert checkpoints between pairings and formats, for the command `ropewalk convert`.

    folder ──► read ──► Checkpoint ──► plan ──► Plan ──► write ──► folder
               model.py                plan.py           write.py

`raw` reads tensors as rows of bytes. `shards` reads and writes safetensors, and `pth` reads Meta's files.
`layouts` finds the rows of q and k, `meta` converts the names and configs of Meta's format, and `verify` checks the
result. No tensor is loaded as a whole: rows are copied in chunks of about 16 MiB.
"""

from __future__ import annotations

from ropewalk.tools.convert.model import Checkpoint as Checkpoint
from ropewalk.tools.convert.model import read as read
from ropewalk.tools.convert.plan import Plan as Plan
from ropewalk.tools.convert.plan import plan as plan
from ropewalk.tools.convert.write import check_target as check_target
from ropewalk.tools.convert.write import write as write
