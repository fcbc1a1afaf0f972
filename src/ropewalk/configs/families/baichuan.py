"""Baichuan: the 7B rotates, the 13B has ALiBi, and its config does not say which it is but by its width.

Source: modeling_baichuan.py of Baichuan-7B and Baichuan-13B-Base; vLLM model_executor/models/baichuan.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk._checks import shown
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.layers import ALL
from ropewalk.configs.reader import Reader


@dataclass(frozen=True)
class Baichuan(Architecture):
    """A hidden size of 4096 is the 7B."""

    def check(self, c: Reader) -> None:
        """Refuse the 13B."""
        super().check(c)
        if c.fields.get("hidden_size") != 4096:
            must = "it must be 4096: only Baichuan 7B has a rope, and the 13B ALiBi"
            cure = "There is no rope to describe."
            raise c.fields.error("hidden_size", must, shown(c.fields.get("hidden_size")), cure)


MODELS = {
    "baichuan": Baichuan(
        source="modeling_baichuan.py of Baichuan-7B; vLLM model_executor/models/baichuan.py",
        in_transformers=False,
        head_dim_keys=(),
        kinds={ALL: Kind(implied_base=10_000.0)},
    )
}
