"""What is different: between engines that run one config, and between two configs.

Nothing is loaded or run: both read configs alone. What engines do are the rules of `ropewalk.engines`.
"""

from __future__ import annotations

from ropewalk.diff.between_configs import ConfigDiff as ConfigDiff
from ropewalk.diff.between_configs import configs as configs
from ropewalk.diff.between_engines import EngineDiff as EngineDiff
from ropewalk.diff.between_engines import engines as engines
