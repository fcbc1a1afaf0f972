"""`Engine`: a name, a version, and for each scheme one rule that computes the engine's rope.

A rule is a pure function. It returns a `Rope` with the engine's own numbers, or the reason why the engine does not run
the config. The rules read no files and import no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ropewalk._checks import RopeError
from ropewalk.rope import Rope
from ropewalk.schemes import DynamicNTK, LongRoPE, PerPair, Scaling, YaRN

ENGINE_KEYS = frozenset({"attn_factor", "extrapolation_factor", "max_trained_positions"})
"""Keys of a scaling that some engine reads, but no scheme of ropewalk."""

_KEYS = ENGINE_KEYS | {
    "alpha",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "long_mscale",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "short_mscale",
    "truncate",
}
"""Keys of a scaling that change a number in some engine. A rule that does not read one of them notes that."""

DEEPSEEK = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "longcat_flash"}
)
"""Model types that vLLM and SGLang run with their DeepSeek code, which has its own version of YaRN."""

HUNYUAN = ("hunyuan",)
"""The prefixes of the model types whose `dynamic` scaling has an alpha."""

_OWN_CODE = "the scaling is in the model's own code instead of the config, which is not described here"

Decided = Literal["nothing", "the call", "the setting"]


@dataclass(frozen=True)
class ConfigRope:
    """One rope of a config, with the keys of the config that rules read.

    Args:
        rope: the rope as ropewalk reads it.
        model_type: the model_type of the config.
        longest: the max_position_embeddings of the config, in tokens, or None.
        stated: the keys and values in the config's section for this rope.
        nested: whether the config has a separate section for each kind of layer.
    """

    rope: Rope
    model_type: str = ""
    longest: int | None = None
    stated: Mapping[str, Any] = field(default_factory=dict)
    nested: bool = False

    @property
    def several_axes(self) -> bool:
        """Whether tokens have several positions (M-RoPE)."""
        return self.rope.axes is not None or "mrope_section" in self.stated

    def scaled(self, scaling: Scaling | None) -> Rope:
        """The rope with this scaling. The same object if it has this scaling already."""
        return self.rope if scaling == self.rope.scaling else replace(self.rope, scaling=scaling)


@dataclass(frozen=True)
class Answer:
    """How an engine rotates for one rope of a config.

    Args:
        rope: the rope with the engine's numbers. None if the engine does not run the config.
        decided_by: which length the frequencies depend on: "the call" for the sequences of the call, "the setting" for
            the length that the engine was configured for, or "nothing".
        notes: what a reader should know, in whole sentences.
        refused: why the engine does not run the config. "" if it does.
        source: the file of the engine from which the rule was taken.
        seen: "run" if golden values recorded from the running engine test the rule, "read" if its code was only read.
    """

    rope: Rope | None
    decided_by: Decided = "nothing"
    notes: tuple[str, ...] = ()
    refused: str = ""
    source: str = ""
    seen: Literal["run", "read"] = "read"

    def at(self, sequence: int, setting: int) -> Rope | None:
        """The static rope for sequences of `sequence` tokens in an engine that is configured for `setting` tokens."""
        if self.rope is None or self.rope.is_static:
            return self.rope
        return self.rope.at_length(setting if self.decided_by == "the setting" else sequence)


@dataclass(frozen=True)
class Rule:
    """How an engine rotates for one scheme.

    Args:
        source: the file of the engine from which the rule was taken.
        reads: the keys of the scaling that the engine reads. Other keys that the config states are noted as ignored.
        answer: the rule itself, a function of a rope and its scheme.
        seen: as in `Answer`.
    """

    source: str
    reads: frozenset[str]
    answer: Callable[[ConfigRope, Any], Answer]
    seen: Literal["run", "read"] = "run"


@dataclass(frozen=True)
class Engine:
    """An inference engine at one version.

    Args:
        name: its usual name.
        version: the version that was run or read.
        table: how it computes cos and sin, in whole sentences.
        rules: the `rope_type` of a scheme, or "default" for no scheme → its rule.
        unknown: why a scheme without a rule does not run.
        query_scale: why it does not apply the query scale of a config (`llama_4_scaling_beta`). "" if it does.
    """

    name: str
    version: str
    table: str
    rules: Mapping[str, Rule]
    unknown: str
    query_scale: str = ""

    def answer(self, config: ConfigRope) -> Answer:
        """How this engine rotates for one rope of a config."""
        scaling = config.rope.scaling
        if scaling is not None and not config.stated.keys() & {"rope_type", "type"}:
            return Answer(None, refused=_OWN_CODE)
        rule = self.rules.get("default" if scaling is None else scaling.rope_type)
        if rule is None:
            return Answer(None, refused=self.unknown)
        try:
            found = rule.answer(config, scaling)
        except RopeError as e:
            found = Answer(None, refused=f"its numbers are not a valid rope ({e})")
        ignored = sorted(key for key in config.stated if key in _KEYS - rule.reads and config.stated[key] is not None)
        notes = (
            (*found.notes, f"It ignores {', '.join(ignored)}.") if ignored and found.rope is not None else found.notes
        )
        return replace(found, notes=notes, source=rule.source, seen=rule.seen)


# Helpers that several engines share.


def unchanged(config: ConfigRope, scaling: object) -> Answer:
    """The rule of engines that rotate as ropewalk reads the config."""
    return Answer(config.rope)


def finite(value: object, otherwise: float | None = None) -> float | None:
    """An unchecked value of a config as a finite float. None if it is not one, `otherwise` if the value is None."""
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def dynamic_by_factor(config: ConfigRope) -> Answer:
    """Dynamic NTK computed from its factor, for an engine that does not read the alpha of the config."""
    factor = finite(config.stated.get("factor"))
    if factor is None or factor < 1.0:
        return Answer(None, refused="it needs factor even if alpha is given (KeyError: 'factor')")
    if config.longest is None:
        return Answer(None, refused=NO_LENGTH)
    return Answer(config.scaled(DynamicNTK(factor, config.longest)), "the call")


def magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's magnitude 0.1 · weight · ln factor + 1, dimensionless. 1 for a factor of at most 1."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def with_attention(scaling: YaRN, factor: float) -> YaRN:
    """The scheme with this attention factor. The same object if it has this factor already."""
    return scaling if scaling.compute_attention_factor() == factor else replace(scaling, attention_factor=factor)


def partly_kept(config: ConfigRope, scaling: YaRN, share: float, attention: float) -> Rope:
    """YaRN with an `extrapolation_factor`: each pair keeps only `share` of the part that YaRN leaves unscaled.

    No scheme describes this, so the result has a separate factor for each pair.
    """
    rope = config.rope
    low, high = scaling.ramp(rope.base, rope.rotary_dim)
    kept = [(1 - min(max((i - low) / (high - low), 0.0), 1.0)) * share for i in range(rope.rotary_dim // 2)]
    factors = tuple(1 / ((1 - keep) / scaling.factor + keep) for keep in kept)
    return replace(rope, scaling=PerPair(factors=factors, attention_factor=attention))


def longrope_magnitude(longest: int | None, trained: int) -> float | None:
    """LongRoPE's magnitude √(1 + ln(longest / trained) / ln trained). None if `longest` is None."""
    if longest is None:
        return None
    return 1.0 if longest <= trained else math.sqrt(1 + math.log(longest / trained) / math.log(trained))


def longrope_by_lengths(config: ConfigRope, scaling: LongRoPE, *, mscales: bool) -> LongRoPE | None:
    """LongRoPE with the attention factor computed from the two lengths of the config, ignoring a stated factor.

    Args:
        config: the rope of the config.
        scaling: its scheme.
        mscales: whether short_mscale and long_mscale take precedence.

    Returns:
        The scheme. None if the config has no max_position_embeddings to compute the factor from.
    """
    if mscales and scaling.short_mscale is not None:
        return scaling
    factor = longrope_magnitude(config.longest, scaling.original_max_position_embeddings)
    if factor is None:
        return None
    if factor == scaling.at_length(1).attention_factor == scaling.at_length(2**31).attention_factor:
        return scaling
    return replace(scaling, attention_factor=factor, short_mscale=None, long_mscale=None)


def ignoring(config: ConfigRope, *keys: str) -> tuple[str, ...]:
    """Notes that the engine ignores these keys for this model, although it reads them for others."""
    stated = [key for key in keys if config.stated.get(key) is not None]
    return (f"For {config.model_type} it ignores {', '.join(stated)}.",) if stated else ()


NO_LENGTH = "it needs max_position_embeddings, which the config does not state"
