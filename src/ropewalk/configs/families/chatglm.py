"""ChatGLM 2 and 3, GLM-4 and CodeGeeX 2 by their own code, which is not that of transformers' "glm".

Source: modeling_chatglm.py of chatglm3-6b-32k, glm-4-9b-chat and codegeex2-6b; vLLM model_executor/models/chatglm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk._checks import number, shown
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import Given
from ropewalk.configs.layers import ALL
from ropewalk.configs.reader import Reader

_BASE = 10_000.0


@dataclass(frozen=True)
class ChatGLM(Architecture):
    """Half of the head rotates, and `rope_ratio` multiplies the base."""

    def pairing_of(self, c: Reader) -> str:
        """Half where original_rope is false."""
        return self.pairing if c.fields.boolean("original_rope", True) else "half"

    def base(self, c: Reader, name: str, kind: Kind, given: dict[str, Given]) -> float:
        """10000 times rope_ratio."""
        key = "rope_ratio"
        if "rope_theta" in given or c.passed_base is not None or not c.fields.has(key):
            return super().base(c, name, kind, given)
        factor = number(c.fields.source, key, c.fields.get(key), above=0.0)
        if factor != 1.0:
            self._mind_the_factor(c, key)
        c.origins["base"] = f"{_BASE:g} · {key} ({self.source})"
        return c.fields.base(key, _BASE * factor, c.passed_base)

    def _mind_the_factor(self, c: Reader, key: str) -> None:
        name = c.fields.get("_name_or_path")
        if isinstance(name, str) and "chatglm2" in name.lower():
            must = "it must multiply the base, as in ChatGLM3 and GLM-4"
            cure = f"ChatGLM2-32K divides its positions by it: build the Rope by hand, with Linear({key})."
            raise c.fields.error(key, must, f"a file of {shown(name)}", cure)
        c.warnings.append(f"{key} multiplies the base, as in ChatGLM3 and GLM-4; ChatGLM2-32K divides positions.")

    def unwritable(self, version: int) -> str:
        """transformers does not know the model_type, and no key says the base."""
        return "Only its own code reads its config."


MODELS = {
    "chatglm": ChatGLM(
        source="modeling_chatglm.py of chatglm3-6b-32k and glm-4-9b-chat; vLLM model_executor/models/chatglm.py",
        in_transformers=False,
        pairing="interleaved",
        head_dim_keys=("kv_channels",),
        layers=("num_layers", "num_hidden_layers"),
        partial_keys=(),
        partial=0.5,
        kinds={ALL: Kind(bases=(), implied_base=_BASE)},
        fixed={"position_encoding_2d": (False, "Tokens of ChatGLM-6B, the first, have two positions each")},
        idle={"rotary_percent": "the code of CodeGeeX 2 rotates half of the head, whatever it says"},
    )
}
