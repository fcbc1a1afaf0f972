"""Describe how inference engines rotate for a config: one file for each engine, one function for each of its rules.

The rules describe the functions that compute frequencies, each with its source file and the version of the engine. They
do not tell whether an engine supports a model, or which of its layers rotate: the ropes come from `from_config`.
"""

from __future__ import annotations

from ropewalk import _checks
from ropewalk.engines._engine import ENGINE_KEYS as ENGINE_KEYS
from ropewalk.engines._engine import Answer as Answer
from ropewalk.engines._engine import ConfigRope as ConfigRope
from ropewalk.engines._engine import Engine as Engine
from ropewalk.engines.exllamav3 import EXLLAMAV3
from ropewalk.engines.llama_cpp import LLAMA_CPP
from ropewalk.engines.mlx_lm import MLX_LM
from ropewalk.engines.sglang import SGLANG
from ropewalk.engines.transformers import TRANSFORMERS
from ropewalk.engines.vllm import VLLM

ENGINES = {engine.name.lower(): engine for engine in (TRANSFORMERS, VLLM, SGLANG, LLAMA_CPP, MLX_LM, EXLLAMAV3)}


def engine(who: str, name: object) -> Engine:
    """The engine of this name, in upper or lower case.

    Args:
        who: the caller, for the error message.
        name: the name, such as "vllm".

    Raises:
        RopeError: no engine has this name.
    """
    key = name.lower() if isinstance(name, str) else name
    _checks.choice(who, "engine", key, tuple(ENGINES))
    return ENGINES[str(key)]
