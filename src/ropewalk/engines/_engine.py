"""What an engine is here: for each scheme one rule, which says what it makes of a rope that a config describes.

A rule is a plain function of numbers. It gives back a `Rope` with the engine's own numbers, or says why the engine does
not run the config. Nothing here reads files, and no engine is imported.
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
"""Keys of a scaling that no scheme of ropewalk has, and that an engine reads."""

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
"""Keys of a scaling that change a number in some engine, so that a rule which does not read one says so."""

DEEPSEEK = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "longcat_flash"}
)
"""Models that vLLM and SGLang run by their code for DeepSeek, which treats YaRN in a way of its own."""

HUNYUAN = ("hunyuan",)
"""How the model types begin whose `dynamic` scaling has an alpha."""

_OWN_CODE = "no rope section of the config states the scaling, but the model's own code: not described"

Decided = Literal["nothing", "the call", "the setting"]


@dataclass(frozen=True)
class Asked:
    """One rope of a config.

    Args:
        rope: as ropewalk reads it.
        model_type: the architecture, as the config names it.
        longest: max_position_embeddings of the config, in tokens, or None.
        stated: what the config says in the section of this rope, key by key.
        nested: whether that section is one of several, by the kind of layer.
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
        """The rope with another scaling; itself where that is the same."""
        return self.rope if scaling == self.rope.scaling else replace(self.rope, scaling=scaling)


@dataclass(frozen=True)
class Answer:
    """What an engine makes of one rope.

    Args:
        rope: with the engine's numbers; None where it does not run the config.
        decided_by: what decides the frequencies where they depend on a length: the sequences of the call, or the
            length that the engine was set to when it started.
        notes: what a reader should know, in whole sentences.
        refused: why the engine does not run the config; "" where it does.
        source: the file of the engine that says so.
        seen: "run" where golden values of the running code hold the rule, "read" where the code was only read.
    """

    rope: Rope | None
    decided_by: Decided = "nothing"
    notes: tuple[str, ...] = ()
    refused: str = ""
    source: str = ""
    seen: Literal["run", "read"] = "read"

    def at(self, sequence: int, setting: int) -> Rope | None:
        """The static rope of a call with sequences of so many tokens, of an engine set to `setting` tokens."""
        if self.rope is None or self.rope.is_static:
            return self.rope
        return self.rope.at_length(setting if self.decided_by == "the setting" else sequence)


@dataclass(frozen=True)
class Rule:
    """What an engine does with one scheme.

    Args:
        source: the file of the engine that says so.
        reads: the keys of the scaling that count there; any other that is stated is named as ignored.
        answer: the rule itself: of a rope and of its scheme, which is of the class with that rope_type.
        seen: as in `Answer`.
    """

    source: str
    reads: frozenset[str]
    answer: Callable[[Asked, Any], Answer]
    seen: Literal["run", "read"] = "run"


@dataclass(frozen=True)
class Engine:
    """An engine at a version.

    Args:
        name: as people write it.
        version: the one that was run or read.
        table: how it makes cos and sin, in whole sentences.
        rules: `rope_type` of a scheme → rule; "default" where there is none.
        unknown: why a scheme without a rule does not run.
        query_scale: why the query scale of a config (`llama_4_scaling_beta`) is not applied; "" where it is.
    """

    name: str
    version: str
    table: str
    rules: Mapping[str, Rule]
    unknown: str
    query_scale: str = ""

    def answer(self, asked: Asked) -> Answer:
        """What it makes of one rope."""
        scaling = asked.rope.scaling
        if scaling is not None and not asked.stated.keys() & {"rope_type", "type"}:
            return Answer(None, refused=_OWN_CODE)
        rule = self.rules.get("default" if scaling is None else scaling.rope_type)
        if rule is None:
            return Answer(None, refused=self.unknown)
        try:
            found = rule.answer(asked, scaling)
        except RopeError as e:
            found = Answer(None, refused=f"what it makes of it is no rope ({e})")
        ignored = sorted(key for key in asked.stated if key in _KEYS - rule.reads and asked.stated[key] is not None)
        notes = (
            (*found.notes, f"It ignores {', '.join(ignored)}.") if ignored and found.rope is not None else found.notes
        )
        return replace(found, notes=notes, source=rule.source, seen=rule.seen)


# What several engines have in common.


def as_read(asked: Asked, scaling: object) -> Answer:
    """The rope as ropewalk reads it."""
    return Answer(asked.rope)


def finite(value: object, otherwise: float | None = None) -> float | None:
    """A number of a config that no scheme has checked: None where it is not one; `otherwise` where it is not given."""
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def dynamic_by_factor(asked: Asked) -> Answer:
    """Dynamic NTK by its factor, where the config gives alpha too and the engine does not read that."""
    factor = finite(asked.stated.get("factor"))
    if factor is None or factor < 1.0:
        return Answer(None, refused="it needs factor, where alpha is given too (KeyError: 'factor')")
    if asked.longest is None:
        return Answer(None, refused=NO_LENGTH)
    return Answer(asked.scaled(DynamicNTK(factor, asked.longest)), "the call")


def magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's 0.1 · weight · ln factor + 1, dimensionless; 1 where nothing is stretched."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def with_attention(scaling: YaRN, factor: float) -> YaRN:
    """The scheme with this attention factor; itself where it has that already."""
    return scaling if scaling.compute_attention_factor() == factor else replace(scaling, attention_factor=factor)


def partly_kept(asked: Asked, scaling: YaRN, share: float, attention: float) -> Rope:
    """YaRN where a pair keeps only `share` of what it would keep of its speed (`extrapolation_factor`).

    No scheme says this, so each pair is given a factor of its own.
    """
    rope = asked.rope
    low, high = scaling.ramp(rope.base, rope.rotary_dim)
    kept = [(1 - min(max((i - low) / (high - low), 0.0), 1.0)) * share for i in range(rope.rotary_dim // 2)]
    factors = tuple(1 / ((1 - keep) / scaling.factor + keep) for keep in kept)
    return replace(rope, scaling=PerPair(factors=factors, attention_factor=attention))


def longrope_magnitude(longest: int | None, trained: int) -> float | None:
    """LongRoPE's √(1 + ln(longest / trained) / ln trained); None where the config does not say `longest`."""
    if longest is None:
        return None
    return 1.0 if longest <= trained else math.sqrt(1 + math.log(longest / trained) / math.log(trained))


def longrope_by_lengths(asked: Asked, scaling: LongRoPE, *, mscales: bool) -> LongRoPE | None:
    """LongRoPE whose attention factor comes from the two lengths of the config, whatever else it states.

    Args:
        asked: the rope.
        scaling: its scheme.
        mscales: whether short_mscale and long_mscale count before that.

    Returns:
        The scheme; None where the config does not say max_position_embeddings, and nothing else counts.
    """
    if mscales and scaling.short_mscale is not None:
        return scaling
    factor = longrope_magnitude(asked.longest, scaling.original_max_position_embeddings)
    if factor is None:
        return None
    if factor == scaling.at_length(1).attention_factor == scaling.at_length(2**31).attention_factor:
        return scaling
    return replace(scaling, attention_factor=factor, short_mscale=None, long_mscale=None)


def ignoring(asked: Asked, *keys: str) -> tuple[str, ...]:
    """That keys which other models of the same engine read have no effect for this one."""
    stated = [key for key in keys if asked.stated.get(key) is not None]
    return (f"For {asked.model_type} it ignores {', '.join(stated)}.",) if stated else ()


NO_LENGTH = "it needs max_position_embeddings, which the config does not say"
