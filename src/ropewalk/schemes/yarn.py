"""YaRN: like Llama 3, fast pairs keep their speed and slow ones are slowed; and attention is sharpened by a factor.

The ramp between the two runs linearly over the *pair index*, between the indices of the pairs that turn `beta_fast` and
`beta_slow` times within the trained length. That is the authors' code, which every runtime follows; the paper's text
ramps over the number of turns instead, and differs by up to 3.3 times in a single frequency.

Source: Peng et al. 2023, "YaRN", arXiv:2309.00071, sections 3.2 to 3.4; jquesnelle/yarn at 995db5b
(LlamaYaRNScaledRotaryEmbedding). Deployed as `_compute_yarn_parameters` in transformers 5.23. mscale and
mscale_all_dim: DeepSeek-V2, arXiv:2405.04434, section 3.1.4, and its released code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import Scheme


@dataclass(frozen=True)
class YaRN(Scheme):
    """Slow the slow pairs by `factor`, and multiply cos and sin by an attention factor.

    The attention factor is, in this order: `attention_factor` if given; m(mscale) / m(mscale_all_dim) if both are
    given and not 0; else m(1), where m(c) = 0.1 · c · ln(factor) + 1. One of mscale and mscale_all_dim without the
    other has no effect, as in the deployed code.

    Args:
        factor: wanted length / trained length, dimensionless, at least 1.
        original_max_position_embeddings: trained length, in tokens.
        beta_fast: turns within the trained length from which a pair keeps its speed; at most 1e6.
        beta_slow: turns up to which a pair is slowed by the whole factor; at least 1e-6, at most beta_fast. Equal
            makes the ramp a step (Kimi K2).
        truncate: round the ends of the ramp outwards to whole pairs. False in gpt-oss.
        attention_factor: multiplier of cos and sin, dimensionless, greater than 0; None computes it.
        mscale, mscale_all_dim: DeepSeek's weights of the attention factor, dimensionless, at least 0; None is not
            given.

    Raises:
        RopeError: a value is outside its range, or beta_slow is greater than beta_fast.

    Example:
        >>> round(YaRN(factor=16.0, original_max_position_embeddings=4096).table_factor(), 6)
        1.277259
    """

    rope_type: ClassVar[str] = "yarn"
    idle: ClassVar[Mapping[str, str]] = {
        "finetuned": "records that the weights were fine-tuned",
        "max_position_embeddings": "repeats the length of the model",
    }
    gguf: ClassVar[Mapping[str, str]] = {
        "factor": "rope.scaling.factor",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
        "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    }
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("factor", _checks.number("YaRN", "factor", self.factor, at_least=1.0))
        put(
            "original_max_position_embeddings",
            _checks.length("YaRN", "original_max_position_embeddings", self.original_max_position_embeddings),
        )
        put("beta_slow", _checks.number("YaRN", "beta_slow", self.beta_slow, at_least=1e-6))
        put(
            "beta_fast",
            _checks.number(
                "YaRN",
                "beta_fast",
                self.beta_fast,
                at_least=self.beta_slow,
                at_most=1e6,
                cure="It must not be less than beta_slow; were the two swapped?",
            ),
        )
        if not isinstance(self.truncate, bool):
            raise _checks.error(
                "YaRN", "truncate must be True or False", _checks.shown(self.truncate), "Pass a boolean."
            )
        if self.attention_factor is not None:
            put(
                "attention_factor",
                _checks.number("YaRN", "attention_factor", self.attention_factor, above=0.0),
            )
        for name in ("mscale", "mscale_all_dim"):
            if (value := getattr(self, name)) is not None:
                put(name, _checks.number("YaRN", name, value, at_least=0.0))
        if not math.isfinite(self.table_factor()) or self.table_factor() <= 0.0:
            got = f"mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim}"
            raise _checks.error(
                "YaRN", "the attention factor must be finite and greater than 0", got, "Models have 0.1 to 1."
            )

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Radians per position of each pair: a blend of the default ones and those divided by factor."""
        low, high = self.ramp(base, rotary_dim)
        slowed = (min(max((i - low) / (high - low), 0.0), 1.0) for i in range(rotary_dim // 2))
        return tuple(
            w / self.factor * s + w * (1 - s) for w, s in zip(default.inv_freq(base, rotary_dim), slowed, strict=True)
        )

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """As transformers 5.23 and the authors' code: the ends of the ramp in float64, the rest in float32."""
        import torch

        first, last = self.ramp(base, rotary_dim)
        powers = default.powers_float32(base, rotary_dim)
        index = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - ((index - first) / (last - first)).clamp(0, 1)
        # The share that is slowed is 1 - kept there, and not the ramp: 1 - (1 - x) is not x in float32.
        return default.listed(1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept)

    def ramp(self, base: float, rotary_dim: int) -> tuple[float, float]:
        """The pair indices between which the slowing grows from nothing to the whole factor."""
        low = self._index_of_turns(self.beta_fast, base, rotary_dim)
        high = self._index_of_turns(self.beta_slow, base, rotary_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The upper clamp is rotary_dim - 1 and not the last pair: so the deployed code has it.
        low, high = max(low, 0), min(high, rotary_dim - 1)
        return (low, high + 0.001) if low == high else (low, high)

    def _index_of_turns(self, turns: float, base: float, rotary_dim: int) -> float:
        """The (fractional) index of the pair that turns so many times within the trained length."""
        length = self.original_max_position_embeddings
        return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    def table_factor(self) -> float:
        """What multiplies cos and sin, dimensionless."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    @property
    def softmax_factor(self) -> float:
        """m(mscale_all_dim)², dimensionless; 1 where mscale_all_dim is not given or 0."""
        if not self.mscale_all_dim:
            return 1.0
        m = self._magnitude(self.mscale_all_dim)
        return m * m

    def trained_length(self, longest: int | None) -> int:
        """original_max_position_embeddings."""
        return self.original_max_position_embeddings

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        """Lengths that contradict the factor, and mscales that engines read in different ways."""
        warnings = []
        trained, scaled = self.original_max_position_embeddings, self.original_max_position_embeddings * self.factor
        if longest not in (None, trained, scaled):
            warnings.append(
                f"{named} is {longest}, neither original_max_position_embeddings {trained} nor that times factor, "
                f"{scaled:.0f}; the factor decides the angles."
            )
        if self.mscale is None and self.mscale_all_dim is None:
            return warnings
        if self.attention_factor is not None:
            warnings.append("attention_factor is given, so mscale and mscale_all_dim do not change cos and sin.")
        elif not (self.mscale and self.mscale_all_dim):
            warnings.append("mscale and mscale_all_dim count only together; mlx-lm uses one alone, SGLang a 0.")
        elif self.mscale == self.mscale_all_dim:
            warnings.append("mscale and mscale_all_dim are equal, so the attention factor is 1; engines differ.")
        return warnings
