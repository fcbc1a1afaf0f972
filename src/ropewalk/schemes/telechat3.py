"""TeleChat 3's YaRN, whose attention factor grows by 0.07 instead of 0.1 with the logarithm of the factor.

Source: vLLM transformers_utils/config.py, and before at d5a17e0 layers/rotary_embedding/telechat3_scaling_rope.py.
mlx-lm treats the scheme as YaRN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ropewalk.schemes.yarn import YaRN


@dataclass(frozen=True)
class TeleChat3(YaRN):
    """YaRN with the attention factor 0.07 · ln(factor) + 1, unless `attention_factor` is given. mscales have no effect.

    Args:
        factor, original_max_position_embeddings, beta_fast, beta_slow, truncate, attention_factor: as in `YaRN`.
        mscale, mscale_all_dim: as in `YaRN`.

    Examples:
        >>> round(TeleChat3(factor=32.0, original_max_position_embeddings=4096).compute_attention_factor(), 6)
        1.242602
    """

    rope_type: ClassVar[str] = "telechat3-yarn"
    gguf: ClassVar[Mapping[str, str]] = {}

    def compute_attention_factor(self) -> float:
        return 0.07 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor
