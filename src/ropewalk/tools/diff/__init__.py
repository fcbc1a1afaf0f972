"""Compare how engines rotate for one config, or the rotation of two configs. Find an engine's override for a config.

Only configs are read, and no model is loaded or run. `ropewalk.engines` describes how each engine reads a config.
"""

from __future__ import annotations

from ropewalk.engines import ENGINES as ENGINES
from ropewalk.engines import MORE_ENGINES as MORE_ENGINES
from ropewalk.engines import TRAINERS as TRAINERS
from ropewalk.tools.diff.between_configs import ConfigDiff as ConfigDiff
from ropewalk.tools.diff.between_configs import configs as configs
from ropewalk.tools.diff.between_engines import EngineDiff as EngineDiff
from ropewalk.tools.diff.between_engines import engines as engines
from ropewalk.tools.diff.for_engine import ForEngine as ForEngine
from ropewalk.tools.diff.for_engine import for_engine as for_engine
from ropewalk.tools.diff.with_draft import DraftDiff as DraftDiff
from ropewalk.tools.diff.with_draft import draft as draft
