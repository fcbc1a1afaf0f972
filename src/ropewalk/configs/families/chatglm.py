"""ChatGLM 2 and 3, GLM-4 and CodeGeeX 2 with their own code (model_type "chatglm", not "glm" of transformers).

Source: modeling_chatglm.py of chatglm3-6b-32k, glm-4-9b-chat and codegeex2-6b; vLLM model_executor/models/chatglm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk._checks import number, shown
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.fields import ConfigValue
from ropewalk.configs.layers import ALL
from ropewalk.configs.reader import Reader

_BASE = 10_000.0


@dataclass(frozen=True)
class ChatGLM(Architecture):
    """The `Architecture` of "chatglm": `rope_ratio` multiplies the base, and `original_rope` selects the pairing."""

    def pairing_of(self, c: Reader) -> str:
        """Return "half" if original_rope is false, else the field `pairing`."""
        return self.pairing if c.fields.boolean("original_rope", True) else "half"

    def base(self, c: Reader, name: str, kind: Kind, rope_keys: dict[str, ConfigValue]) -> float:
        """Return 10000 · rope_ratio, unless the config or the caller states the base itself."""
        key = "rope_ratio"
        if "rope_theta" in rope_keys or c.passed_base is not None or not c.fields.has(key):
            return super().base(c, name, kind, rope_keys)
        factor = number(c.fields.source, key, c.fields.get(key), above=0.0)
        if factor != 1.0:
            self._check_meaning(c, key)
        c.origins["base"] = f"{_BASE:g} · {key} ({self.source})"
        return c.fields.base(key, _BASE * factor, c.passed_base)

    def _check_meaning(self, c: Reader, key: str) -> None:
        """Raise a RopeError if the config names ChatGLM2, whose 32K version divides positions by rope_ratio.

        Otherwise add a warning.
        """
        name = c.fields.get("_name_or_path")
        if isinstance(name, str) and "chatglm2" in name.lower():
            must = "must multiply the base, as in ChatGLM3 and GLM-4"
            fix = f"ChatGLM2-32K divides positions by it: build the Rope by hand with Linear({key})."
            raise c.fields.error(key, must, f"a file of {shown(name)}", fix)
        c.warnings.append(f"{key} multiplies the base, as in ChatGLM3 and GLM-4. ChatGLM2-32K divides positions by it.")

    def why_unwritable(self, version: int) -> str:
        """Return why `to_hf_config` cannot write this model_type: only the model's own code reads it."""
        return "Keep its own config.json: only its own code reads this model_type."


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
        fixed={"position_encoding_2d": (False, "the two positions for each token of ChatGLM-6B (version 1)")},
        keys_without_effect={"rotary_percent": "the code of CodeGeeX 2 always rotates half of the head"},
    )
}
