"""Baichuan: the 7B has a rope and the 13B uses ALiBi. Only the hidden size in the config distinguishes them.

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
    """The `Architecture` of Baichuan, which refuses the configs of the 13B."""

    def check(self, c: Reader) -> None:
        """Raise a RopeError if the hidden size is not that of the 7B, 4096."""
        super().check(c)
        if c.fields.get("hidden_size") != 4096:
            must = "must be 4096, since only Baichuan 7B has a rope"
            fix = "The 13B uses ALiBi, so there is no rope to describe."
            raise c.fields.error("hidden_size", must, shown(c.fields.get("hidden_size")), fix)


MODELS = {
    "baichuan": Baichuan(
        source="modeling_baichuan.py of Baichuan-7B; vLLM model_executor/models/baichuan.py",
        in_transformers=False,
        head_dim_keys=(),
        kinds={ALL: Kind(implied_base=10_000.0)},
    )
}
