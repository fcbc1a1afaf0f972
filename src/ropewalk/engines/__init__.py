"""Compute the ropes that inference engines and trainers use for a config. Each has a file, with a rule for each scheme.

A rule reproduces the function of the engine that computes frequencies, and names its source file. A table says which
models the engine has, and which keys of a config the file of each model reads. Which layers rotate comes from
`from_config`.

To add an engine, write its file with the rules and with how it rounds, add it to `ENGINES`, `MORE_ENGINES` or
`TRAINERS`, and record which keys its models read: `tools/recording/tables.py` writes the JSON file beside it.
"""

from __future__ import annotations

from ropewalk import _checks
from ropewalk.engines._config import ConfigRope as ConfigRope
from ropewalk.engines._engine import ENGINE_KEYS as ENGINE_KEYS
from ropewalk.engines._engine import Answer as Answer
from ropewalk.engines._engine import Engine as Engine
from ropewalk.engines._engine import Rounding as Rounding
from ropewalk.engines._override import Flags as Flags
from ropewalk.engines._override import Override as Override
from ropewalk.engines._override import put as put
from ropewalk.engines._override import spellings as spellings
from ropewalk.engines.automodel import AUTOMODEL
from ropewalk.engines.exllamav3 import EXLLAMAV3
from ropewalk.engines.llama_cpp import LLAMA_CPP
from ropewalk.engines.lmdeploy import LMDEPLOY
from ropewalk.engines.maxtext import MAXTEXT
from ropewalk.engines.megatron import MEGATRON
from ropewalk.engines.mistral_rs import MISTRAL_RS
from ropewalk.engines.mlx_lm import MLX_LM
from ropewalk.engines.onnxruntime_genai import ONNXRUNTIME_GENAI
from ropewalk.engines.sglang import SGLANG
from ropewalk.engines.tensorrt_llm import TENSORRT_LLM
from ropewalk.engines.torchtitan import TORCHTITAN
from ropewalk.engines.torchtune import TORCHTUNE
from ropewalk.engines.transformers import TRANSFORMERS
from ropewalk.engines.transformers import TRANSFORMERS_4 as TRANSFORMERS_4
from ropewalk.engines.transformers import lost_in_4 as lost_in_4
from ropewalk.engines.vllm import VLLM

ENGINES = {engine.name.lower(): engine for engine in (TRANSFORMERS, VLLM, SGLANG, LLAMA_CPP, MLX_LM, EXLLAMAV3)}
"""The inference engines, by their names in lower case."""

MORE_ENGINES = {
    engine.name.lower(): engine for engine in (TRANSFORMERS_4, ONNXRUNTIME_GENAI, LMDEPLOY, TENSORRT_LLM, MISTRAL_RS)
}
"""Inference engines that are compared only if they are named. Of most, fewer models were looked up.

Transformers 4 is also compared if the config states its rope only in `rope_parameters`, which it does not read.
"""

TRAINERS = {e.name.lower().partition("-")[0]: e for e in (MEGATRON, AUTOMODEL, TORCHTITAN, TORCHTUNE, MAXTEXT)}
"""The trainers, by the first words of their names in lower case. They are compared only if they are named."""


def engine(who: str, name: object, known: dict[str, Engine] | None = None) -> Engine:
    """Look up one of the `known` engines and trainers, by default of all, by its name in upper or lower case.

    Args:
        who: the function that the user called, for the error message.
        name: the name, such as "vllm".

    Raises:
        RopeError: no engine has this name.
    """
    key = name.lower().removesuffix("-bridge") if isinstance(name, str) else name
    known = {**ENGINES, **MORE_ENGINES, **TRAINERS} if known is None else known
    _checks.choice(who, _checks.option("engine"), key, tuple(known))
    return known[str(key)]
