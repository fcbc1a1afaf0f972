"""LeRoPE: a learned factor for each pair, e^alpha, on top of another scheme.

The factors are not in the config but in the checkpoint. `from_config` reads them from there.

Source: arXiv:2607.10134. Deployed in transformers models/mistral_large4 (Mistral Large 4, on top of YaRN).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import OnTop, Scheme
from ropewalk.schemes.per_pair import check_one_per_pair

_LARGEST = 100.0  # far beyond what training learns; the bound keeps frequencies finite


@dataclass(frozen=True)
class LeRoPE(OnTop):
    """Learned frequencies: multiplies the frequency of pair i by e^alpha[i].

    Args:
        alpha: rotary_dim // 2 finite numbers, dimensionless. 0 leaves a frequency unchanged.
        scaling: the scheme that gives the frequencies before this factor. None means the default frequencies.

    Raises:
        RopeError: a number is not finite or too large, the number of values is not the number of pairs, or `scaling`
            depends on the length.

    Examples:
        >>> LeRoPE(alpha=[0.0, math.log(2)]).inv_freq(10_000.0, 4)
        (1.0, 0.02)
    """

    rope_type: ClassVar[str] = "lerope"
    in_configs: ClassVar[bool] = False
    alpha: tuple[float, ...]
    scaling: Scheme | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, (list, tuple)) or not 1 <= len(self.alpha) <= _checks.MAX_HEAD_DIM // 2:
            must = "alpha must be a list of numbers, one for each pair"
            raise _checks.error("LeRoPE", must, _checks.shown(self.alpha), "Pass such a list.")
        alpha = tuple(
            _checks.number("LeRoPE", f"alpha[{i}]", value, at_least=-_LARGEST, at_most=_LARGEST)
            for i, value in enumerate(self.alpha)
        )
        object.__setattr__(self, "alpha", alpha)
        super().__post_init__()

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the frequencies of `scaling`, each multiplied by e^alpha, in radians per position."""
        check_one_per_pair("LeRoPE", "alpha", self.alpha, rotary_dim)
        return tuple(w * math.exp(a) for w, a in zip(self.before.inv_freq(base, rotary_dim), self.alpha, strict=True))

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return inv_freq · exp(alpha) in float32, as transformers computes it."""
        import torch

        check_one_per_pair("LeRoPE", "alpha", self.alpha, rotary_dim)
        inv_freq, alpha = (
            torch.tensor(x, dtype=torch.float32, device="cpu")
            for x in (self.before.inv_freq_float32(base, rotary_dim), self.alpha)
        )
        return default.to_floats(inv_freq * alpha.exp())
