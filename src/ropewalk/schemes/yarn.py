"""YaRN: keep fast frequencies and divide slow ones, as Llama 3 does, and sharpen attention by a factor.

Between fast and slow pairs, a ramp blends kept and divided frequencies. The ramp is linear in the *pair index*. It runs
from the pair that completes `beta_fast` turns within the trained length to the pair that completes `beta_slow` turns.
The authors' code and every runtime define the ramp in this way. The paper's text defines it over the number of turns
instead, which changes single frequencies by a factor of up to 3.3.

Source: Peng et al. 2023, "YaRN", arXiv:2309.00071, sections 3.2 to 3.4; jquesnelle/yarn at 995db5b
(LlamaYaRNScaledRotaryEmbedding). Deployed as `_compute_yarn_parameters` in transformers. mscale and
mscale_all_dim: DeepSeek-V2, arXiv:2405.04434, section 3.1.4, and its released code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import GgufFile, Scheme, reversed_ramp


@dataclass(frozen=True)
class YaRN(Scheme):
    """YaRN: divides the frequencies of slow pairs by `factor`, and multiplies cos and sin by an attention factor.

    With m(c) = 0.1 · c · ln(factor) + 1, the attention factor is the first that applies: `attention_factor` if given;
    m(mscale) / m(mscale_all_dim) if both are given and not 0; else m(1). As in the deployed code, mscale or
    mscale_all_dim alone has no effect on it.

    Args:
        factor: target length / trained length, dimensionless, at least 1.
        original_max_position_embeddings: trained length, in tokens.
        beta_fast: number of turns, at most 1e6. A pair that completes at least this number within the trained length
            keeps its frequency.
        beta_slow: number of turns, at least 1e-6 and at most beta_fast. A pair that completes at most this number is
            slowed by the whole factor. If it equals beta_fast, the ramp is a step (Kimi K2).
        truncate: whether the ends of the ramp are rounded outwards to whole pairs. False in gpt-oss.
        attention_factor: multiplier of cos and sin, dimensionless, greater than 0. None computes it as above.
        mscale, mscale_all_dim: DeepSeek's weights of the attention factor, dimensionless, at least 0. None means that
            the config does not state them.

    Raises:
        RopeError: a value is outside its range, or beta_slow is greater than beta_fast.

    Examples:
        >>> round(YaRN(factor=16.0, original_max_position_embeddings=4096).compute_attention_factor(), 6)
        1.277259
    """

    rope_type: ClassVar[str] = "yarn"
    keys_without_effect: ClassVar[Mapping[str, str]] = {
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
        self._set_number("factor", at_least=1.0)
        self._set_length("original_max_position_embeddings")
        self._set_number("beta_slow", at_least=1e-6)
        fix = "It must not be less than beta_slow. Check that the two are not swapped."
        self._set_number("beta_fast", at_least=self.beta_slow, at_most=1e6, fix=fix)
        _checks.boolean("YaRN", "truncate", self.truncate)
        self._set_number("attention_factor", optional=True, above=0.0)
        self._set_number("mscale", optional=True, at_least=0.0)
        self._set_number("mscale_all_dim", optional=True, at_least=0.0)
        if not math.isfinite(self.compute_attention_factor()) or self.compute_attention_factor() <= 0.0:
            got = f"mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim}"
            must, fix = "the attention factor must be finite and greater than 0", "Released models have 0.1 to 1."
            raise _checks.error("YaRN", must, got, fix)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> YaRN:
        """Return the scheme as llama.cpp computes it.

        For most architectures it reads only the factor and the trained length. It multiplies the attention factor that
        it computes by rope.scaling.attn_factor.
        """
        keys, again = cls.gguf, "Convert the model again."
        why = f"Without it llama.cpp does not scale. {again}"
        factor = file.require(keys["factor"], file.number(keys["factor"], at_least=0.0), why)
        original = keys["original_max_position_embeddings"]
        trained = file.require(original, file.original, f"Without it llama.cpp uses context_length. {again}")
        more: dict[str, float] = {}
        for name, implied in zip(("beta_fast", "beta_slow"), file.row.yarn_betas or (), strict=False):
            more[name], beta = implied, file.number(keys[name], above=0.0)
            if beta is not None:
                more[name], file.origins[name] = beta, file.full(keys[name])
        weight = file.number(keys["mscale_all_dim"], at_least=0.0) if file.row.yarn_log else None
        if weight:
            tenth = file.row.yarn_log == "tenth"
            file.origins["mscale_all_dim"] = f"{file.full(keys['mscale_all_dim'])}{' · 10' if tenth else ''}"
            weight = float(f"{10 * weight:.6g}") if tenth else weight  # the file has a tenth of the weight in float32
            more |= {"mscale": weight if file.row.yarn_log_is_mscale else 1.0, "mscale_all_dim": weight}
        scheme = cls(factor, trained, **more)  # type: ignore[arg-type]
        if file.row.yarn_attention == "one":
            return replace(scheme, attention_factor=1.0)
        computed, key = scheme.compute_attention_factor(), "rope.scaling.yarn_attn_factor"
        stated, used = file.number(key, above=0.0), 1.0 if file.row.yarn_attention == "extra" else computed
        if stated is not None and not math.isclose(stated, used, rel_tol=1e-5):
            must = f"must be {used:.7g}, as without the key"
            fix = "llama.cpp does not use the key, so it and the model differ. Read the model's config.json instead."
            raise file.error(key, must, f"{stated:g}", file.fix(fix))
        extra = file.attention_factor()
        return scheme if extra == 1.0 else replace(scheme, attention_factor=computed * extra)

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return a blend of the default frequencies and those divided by factor, in radians per position."""
        low, high = self.ramp(base, rotary_dim)
        slowed = (min(max((i - low) / (high - low), 0.0), 1.0) for i in range(rotary_dim // 2))
        return tuple(
            w / self.factor * s + w * (1 - s) for w, s in zip(default.inv_freq(base, rotary_dim), slowed, strict=True)
        )

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the frequencies that transformers and the authors' code compute.

        The ends of the ramp are computed in float64, everything else in float32.
        """
        import torch

        first, last = self.ramp(base, rotary_dim)
        powers = default.powers_float32(base, rotary_dim)
        index = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - ((index - first) / (last - first)).clamp(0, 1)
        # The deployed code uses 1 - kept as the slowed share. In float32 that is not the ramp, since 1 - (1 - x) != x.
        return default.to_floats(1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept)

    def ramp(self, base: float, rotary_dim: int) -> tuple[float, float]:
        """Return the pair index up to which frequencies are kept, and the one from which they are divided by factor."""
        low = self._index_of_turns(self.beta_fast, base, rotary_dim)
        high = self._index_of_turns(self.beta_slow, base, rotary_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The deployed code clamps to rotary_dim - 1, not to the index of the last pair.
        low, high = max(low, 0), min(high, rotary_dim - 1)
        return (low, high + 0.001) if low == high else (low, high)

    def _index_of_turns(self, turns: float, base: float, rotary_dim: int) -> float:
        """Return the (fractional) index of the pair that completes `turns` turns within the trained length."""
        length = self.original_max_position_embeddings
        return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    def compute_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        """Return m(weight) as defined in the docstring of the class."""
        return 0.1 * weight * math.log(self.factor) + 1.0

    @property
    def softmax_factor(self) -> float:
        """m(mscale_all_dim)², with m as in the class docstring, dimensionless; 1 if mscale_all_dim is None or 0."""
        if not self.mscale_all_dim:
            return 1.0
        m = self._mscale(self.mscale_all_dim)
        return m * m

    def known_bugs(self, base: float, rotary_dim: int) -> Iterator[tuple[str, str, Sequence[float]]]:
        """Yield the frequencies of the other `truncate`, of the scaled length, of the usual base, and reversed ones."""
        other = replace(self, truncate=not self.truncate)
        says = f"The frequencies are those of truncate: {str(other.truncate).lower()}."
        yield "yarn-truncate", says, other.inv_freq(base, rotary_dim)
        scaled = round(self.original_max_position_embeddings * self.factor)
        longer = replace(self, original_max_position_embeddings=scaled)
        says = f"The ramp is that of {scaled:,} trained tokens instead of {self.original_max_position_embeddings:,}."
        yield "yarn-original-length", says, longer.inv_freq(base, rotary_dim)
        plain, usual = default.inv_freq(base, rotary_dim), default.inv_freq(10_000.0, rotary_dim)
        of_usual = zip(plain, usual, self.inv_freq(10_000.0, rotary_dim), strict=True)
        says = f"The ends of the ramp are those of base 10000 instead of {base:.10g}."
        yield "wrong-frequencies", says, [w * scaled / unscaled for w, unscaled, scaled in of_usual]
        yield from reversed_ramp("yarn-ramp-swapped", plain, self.factor)

    def trained_length(self, longest: int | None) -> int:
        return self.original_max_position_embeddings

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        """Warn of lengths that contradict the factor, and of mscales that engines interpret differently."""
        warnings = []
        trained, scaled = self.original_max_position_embeddings, self.original_max_position_embeddings * self.factor
        if longest not in (None, trained, scaled):
            warnings.append(
                f"{named} is {longest}, which is neither original_max_position_embeddings ({trained}) nor that times "
                f"factor ({scaled:.0f}). The factor determines the angles."
            )
        if self.mscale is None and self.mscale_all_dim is None:
            return warnings
        if self.attention_factor is not None:
            warnings.append("attention_factor is given, so mscale and mscale_all_dim do not affect cos and sin.")
        elif not (self.mscale and self.mscale_all_dim):
            warnings.append(
                "mscale and mscale_all_dim have an effect only together, but mlx-lm uses one alone and SGLang a 0."
            )
        elif self.mscale == self.mscale_all_dim and self.compute_attention_factor() == 1.0:
            warnings.append(
                "mscale and mscale_all_dim are equal, so the attention factor is 1. "
                "Not every engine computes this for every model."
            )
        return warnings
