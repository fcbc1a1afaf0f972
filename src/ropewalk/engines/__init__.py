"""What engines make of one config: each engine a file, each of its rules a function there, with version and source.

The rules are those of the functions that make the frequencies. Whether an engine has a model at all, and which of its
layers rotate, is not asked here: the ropes come from `from_config`, layer by layer.
"""

from __future__ import annotations

from ropewalk import _checks
from ropewalk.engines._engine import ENGINE_KEYS as ENGINE_KEYS
from ropewalk.engines._engine import Answer as Answer
from ropewalk.engines._engine import Asked as Asked
from ropewalk.engines._engine import Engine as Engine
from ropewalk.engines.exllamav3 import EXLLAMAV3
from ropewalk.engines.llama_cpp import LLAMA_CPP
from ropewalk.engines.mlx_lm import MLX_LM
from ropewalk.engines.sglang import SGLANG
from ropewalk.engines.transformers import TRANSFORMERS
from ropewalk.engines.vllm import VLLM

ENGINES = {engine.name.lower(): engine for engine in (TRANSFORMERS, VLLM, SGLANG, LLAMA_CPP, MLX_LM, EXLLAMAV3)}


def engine(who: str, name: object) -> Engine:
    """The engine of that name, in any case.

    Raises:
        RopeError: there is none.
    """
    key = name.lower() if isinstance(name, str) else name
    _checks.choice(who, "engine", key, tuple(ENGINES))
    return ENGINES[str(key)]
