"""`Engine`: an inference engine or a trainer at one version, with a `Rule` for each scheme that computes its rope.

What an engine computes depends on two parts of its code: the file of the model decides which keys are read
(`_model_files`), and a function for rotary embeddings computes frequencies from them. A rule reproduces this function.
It gets a `ConfigRope`, one rope of a config as the file reads it. It returns an `Answer`: a `Rope` with the numbers of
the engine, or the reason why the engine cannot run the config. Rules read no files and import no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from ropewalk._checks import RopeError, without_fix
from ropewalk.engines import _built_in, _model_files
from ropewalk.engines._config import ConfigRope, to_finite
from ropewalk.engines._model_files import Evidence
from ropewalk.engines._override import Flags, Override
from ropewalk.rope.rope import Rope
from ropewalk.schemes import NTK, DynamicNTK, Llama3, LongRoPE, PerPair, YaRN

ENGINE_KEYS = frozenset({"attn_factor", "extrapolation_factor", "max_trained_positions"})
"""Keys of a scaling that some engine reads, but that no scheme of ropewalk has."""

LENGTH = "original_max_position_embeddings"
_KEYS = ENGINE_KEYS.union(*({f.name for f in fields(s)} for s in (Llama3, LongRoPE, NTK, YaRN))) - {LENGTH}
"""Keys of a scaling that change a number in some engine. For each one that a rule does not read, a note is added."""

DEEPSEEK = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "longcat_flash"}
)
"""The model_types that vLLM and SGLang run with their DeepSeek code, which has its own version of YaRN."""

DEEPSEEK_YARN = "deepseek_yarn"
"""The rope_type by which some engines know this YaRN. transformers does not have it."""

MSCALE_KEYS = frozenset({"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
"""The keys of YaRN that code like DeepSeek's reads."""

MIXED_WINDOWS = frozenset({"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "gemma2", "gemma3_text"})
MIXED_WINDOWS |= {"gemma3n_text", "gemma4_text", "gpt_oss", "laguna", "llama4_text", "mellum", "mimo_v2_flash"}
MIXED_WINDOWS |= {"mimo_v2", "muse_glimmer_text", "olmo3", "step3p5"}
"""The model_types with a window in some layers, which SGLang (srt/models) and llama.cpp (src/models) apply."""

HUNYUAN = ("hunyuan",)
"""The prefixes of the model_types whose `dynamic` scaling has an alpha."""

AS_TRANSFORMERS: Mapping[str, int | None] = {"yarn": None, "llama3": None}
"""The `Engine.without_length` of engines that read a config with the class of transformers."""
_OWN_CODE = "the scaling is in the model's own code instead of the config, which is not described here"

DecidingLength = Literal["nothing", "the call", "the setting"]
Dtype = Literal["float64", "float32", "bfloat16", "the model's"]
"""A dtype, or that of the model, in which q and k are."""


@dataclass(frozen=True)
class Rounding:
    """What an engine rounds on the way from the base to a rotated channel. Equal fields mean equal operations.

    Args:
        inv_freq: the dtype of the frequencies when they are multiplied by positions.
        computed: how the frequencies are computed, in a few words. "float32 powers" are the operations of transformers,
            which `numerics="float32"` of `Rope.at` repeats.
        where: where they are computed if the model is on a GPU, whose powers have other last bits.
        angle: the dtype of position × inv_freq.
        table: the dtype of cos and sin when channels are multiplied by them.
        rotation: the dtype in which channels are multiplied and added. "the model's" rounds each product and the sum,
            and any other dtype rounds once at the end, to the dtype of the model.
        is_complex: whether a table of complex numbers is multiplied by complex channels, which has other last bits.
        factor: what the attention factor multiplies, and in which dtype.
        notes: what else is rounded, in whole sentences.
        source: the files from which this was taken.
        evidence: "run" if tests compute the bits of the engine's own code on a CPU by this profile, else "read".
    """

    inv_freq: Dtype = "float32"
    computed: str = "float32 powers"
    where: Literal["CPU", "GPU"] = "GPU"
    angle: Dtype = "float32"
    table: Dtype = "the model's"
    rotation: Dtype = "the model's"
    is_complex: bool = False
    factor: str = "cos and sin in float32"
    notes: str = ""
    source: str = ""
    evidence: Literal["run", "read"] = "read"


@dataclass(frozen=True)
class Answer:
    """The rope that an engine uses in place of one rope of a config.

    Args:
        rope: the rope with the numbers of the engine. None if there is a `refusal`.
        decided_by: the length on which the frequencies depend: "the call" for the length of the sequences in each call,
            "the setting" for the length that the engine is configured for, or "nothing".
        notes: what the user should know, in whole sentences.
        refusal: why the engine has no rope for the config. "" if it has one.
        why: the kind of refusal: "refused" if the engine rejects the config, "absent" if it has no such model, and
            "unknown" if ropewalk cannot judge what it does.
        source: the files of the engine from which this answer was taken.
        evidence: "run" if it was recorded from the running engine, and tests compare both. "read" if a part was only
            taken from the engine's code. "not recorded" if only the rule is known, and not what the model's file reads.
        rounding: how the engine rounds for this config; None in a rule's answer for that of the rule or the engine.
        reads: in a rule's answer, the keys that it reads for this model; None for those of the rule.
    """

    rope: Rope | None
    decided_by: DecidingLength = "nothing"
    notes: tuple[str, ...] = ()
    refusal: str = ""
    why: Literal["", "refused", "absent", "unknown"] = ""
    source: str = ""
    evidence: Evidence = "read"
    rounding: Rounding | None = None
    reads: frozenset[str] | None = None

    @property
    def is_judged(self) -> bool:
        """Whether this answer says what the engine does with the config: a rope that was recorded, or a rejection."""
        return self.why == "refused" or (self.rope is not None and self.evidence != "not recorded")

    def at(self, sequence: int, setting: int) -> Rope | None:
        """Return the static rope that the engine uses at one length, or None if it cannot run the config.

        Args:
            sequence: the length of the longest sequence in the call, in tokens.
            setting: the length that the engine is configured for, in tokens.
        """
        if self.rope is None or self.rope.is_static:
            return self.rope
        return self.rope.at_length(setting if self.decided_by == "the setting" else sequence)


@dataclass(frozen=True)
class Rule:
    """The rule by which an engine computes the rope for one scheme.

    Args:
        source: the file of the engine from which the rule was taken.
        answer: the function that computes the rope, from a `ConfigRope` and its scheme. By default, the engine computes
            the same numbers as ropewalk.
        reads: the keys of the scaling that the engine reads; None for the fields of the scheme. A note lists the keys
            that the engine ignores. An answer for some models may have keys of its own.
        evidence: as in `Answer`.
        rounding: how the engine rounds for this scheme; None if as for others.
    """

    source: str
    answer: Callable[[ConfigRope, Any], Answer] = lambda config, scaling: Answer(config.rope)
    reads: frozenset[str] | None = None
    evidence: Literal["run", "read"] = "run"
    rounding: Rounding | None = None


@dataclass(frozen=True)
class Engine:
    """An inference engine or a trainer at one version.

    Args:
        name: the usual name of the engine.
        version: the version from which the rules were taken.
        rounding: how it rounds, unless a rule or `models` says otherwise. A function if this depends on the config.
        rules: maps the `rope_type` of a scheme, or "default" for no scheme, to its rule.
        unknown: why the engine cannot run a scheme that `rules` does not contain.
        files: the name of the table of model files.
        query_scale: why the engine does not apply the query scale of a config (`llama_4_scaling_beta`). "" if it does.
        no_rope_every: maps each model_type in which every n-th layer is not rotated, whatever the config states, to n.
        null_base: the model_types whose layers with full attention it rotates by base 10000 if the base is null.
        other_class: the key of a config with which it rotates in a way that is not described here, or "".
        windows: the model_types whose windows it applies; None for all.
        override: how a user gives it other rope parameters; None if that was not looked up.
        serve: as `Override.write`, for an engine with an argument for the length and none for keys; None if unknown.
        lender: the engine whose code this engine uses for models without a file of their own, and for frequencies in
            some files.
        models: maps each model_type of which the file rounds otherwise, for every scheme, to how it rounds.
        built_in: whether the numbers are in its own models, so that it reads no config. `files` is the table of these.
        own_format: the `ModelRopes.file_format` that it reads itself and not through a config.json, and the file that
            does; None if there is none.
        without_length: maps "yarn" and "llama3" to the length that it takes, in tokens, if a config has no
            original_max_position_embeddings, or to None for max_position_embeddings. For a type without an entry that
            was not looked up.
        reads_by_transformers: the file that loads a config with AutoConfig of transformers, whose choice it takes if
            the config states a value twice; "" if it reads the file itself.
        precedence: whether it reads the file itself, and which value it takes if the config states two was recorded.
        two_types: what it does with rope parameters in which `rope_type` and `type` differ, as `refusal` and `why` of
            an `Answer`; None if `rope_type` counts.
        own_length: whether `original_max_position_embeddings` inside of the rope parameters counts for a model_type,
            although that at the top counts in transformers.
        own_classes: the model_types whose config it reads in another way than with the class of transformers, so that
            what it takes of two values is not known.
    """

    name: str
    version: str
    rounding: Rounding | Callable[[ConfigRope], Rounding]
    rules: Mapping[str, Rule]
    unknown: str
    files: str
    query_scale: str = ""
    no_rope_every: Mapping[str, int] = field(default_factory=dict)
    null_base: Collection[str] = ()
    other_class: str = ""
    windows: frozenset[str] | None = None
    override: Override | Flags | None = None
    serve: Callable[[str, Mapping[str, Any], int], str] | None = None
    lender: Engine | None = None
    models: Mapping[str, Rounding] = field(default_factory=dict)
    built_in: bool = False
    own_format: tuple[str, str] | None = None
    without_length: Mapping[str, int | None] = field(default_factory=dict)
    reads_by_transformers: str = ""
    precedence: bool = False
    two_types: tuple[str, Literal["refused", "unknown"]] | None = None
    own_length: Callable[[str], bool] = lambda model_type: False
    own_classes: frozenset[str] = frozenset()

    def for_length(self, model: str, tokens: int) -> str:
        """Return the command that configures it for a length, or "" if that was not looked up."""
        serve = self.override.write if isinstance(self.override, Override) else self.serve
        return "" if serve is None else serve(model, {}, tokens)

    def reads(self, file_format: str) -> bool:
        """Whether the engine reads files of this `ModelRopes.file_format` itself."""
        return self.own_format is not None and self.own_format[0] == file_format

    def kind_of_layer(self, config: ConfigRope, layer: int) -> str:
        """Return the kind that this engine assigns to a layer, which may differ from that of the config."""
        return config.kind if self.built_in else _model_files.kind_of_layer(self.files, config, layer)

    def answer(self, config: ConfigRope) -> Answer:
        """Return the rope that this engine uses in place of one rope of a config, with notes and the source."""
        if self.reads(config.file_format):
            rounding = self.rounding if isinstance(self.rounding, Rounding) else self.rounding(config)
            source = self.own_format[1] if self.own_format else ""
            decides: DecidingLength = "nothing" if config.rope.is_static else "the setting"
            return Answer(config.rope, decides, ("It reads this file itself.",), source=source, rounding=rounding)
        if self.other_class and config.values.get(self.other_class):
            why = f"how it rotates with {self.other_class} is not described here"
            return Answer(None, refusal=why, why="unknown")
        own_class = config.model_type in self.own_classes
        empty = config.values.get("rope_scaling") == {}
        if self.reads_by_transformers and empty and not own_class:  # transformers leaves it out
            config = replace(config, values={k: v for k, v in config.values.items() if k != "rope_scaling"})
        if self.two_types is not None and self.reads_by_transformers and _differ(config.read_section()):
            return Answer(None, refusal=self.two_types[0], why=self.two_types[1], source=self.reads_by_transformers)
        if self.reads_by_transformers and config.by_transformers is not None and not own_class:
            by = config.with_own_length() if self.own_length(config.model_type) else config.by_transformers
            both = {"type"} if "rope_type" in config.read_section() else set()  # of which rope_type counts
            answer = self.answer(replace(by, stated_twice=by.stated_twice - both))
            said = f"It reads the config with the class of transformers ({self.reads_by_transformers})."
            return replace(answer, notes=(said, *answer.notes))
        twice = sorted(config.stated_twice if own_class else config.stated_twice - {"rope_theta"})
        twice += ["the scaling"] * (own_class and empty and bool(config.values.get("rope_parameters")))
        found = (_built_in.read if self.built_in else _model_files.read)(self.files, config)
        is_open = own_class or not (self.reads_by_transformers or self.built_in or self.precedence)
        if twice and is_open and found.why != "absent":
            said = f"which value it reads of {', '.join(twice)}, which the file states twice, was not recorded"
            return Answer(None, refusal=said, why="unknown", evidence="not recorded")
        source, evidence = (found.file.file, found.file.evidence) if found.file else ("", "not recorded")
        if found.config is None:
            return Answer(None, refusal=found.stop, why=found.why, source=source, evidence=evidence)
        if self.two_types is not None and _differ(found.config.section):
            return Answer(None, refusal=self.two_types[0], why=self.two_types[1], source=source, evidence=evidence)
        file = found.file or _model_files.ModelFile("")
        lent = file.as_transformers or file.by_transformers
        ruled = (self.lender if self.lender is not None and lent else self).apply_rule(found.config)
        factor = file.attention_factor
        scaling: Any = None if ruled.rope is None else ruled.rope.scaling
        if factor is not None and hasattr(scaling, "attention_factor"):
            ruled = replace(ruled, rope=found.config.with_scaling(with_attention_factor(scaling, factor)))
        weakest = max((evidence, ruled.evidence), key=("run", "read", "not recorded").index)
        files = "" if file.as_transformers else f"{source}, "
        sources = ", ".join(dict.fromkeys(filter(None, f"{files}{ruled.source}".split(", "))))
        return replace(ruled, notes=(*found.notes, *ruled.notes), source=sources, evidence=weakest)

    def apply_rule(self, config: ConfigRope) -> Answer:
        """Return the rope that the function of this engine computes for a rope of a config, for any model."""
        scaling = config.rope.scaling
        if scaling is not None and not config.section.keys() & {"rope_type", "type"}:
            return Answer(None, refusal=_OWN_CODE, why="unknown")
        implied: tuple[str, ...] = ()
        if isinstance(scaling, YaRN | Llama3) and not any(keys.get(LENGTH) for keys in (config.section, config.values)):
            if scaling.rope_type not in self.without_length:
                return Answer(None, refusal=f"what it takes without {LENGTH} was not looked up", why="unknown")
            fixed = self.without_length[scaling.rope_type]
            length = fixed or scaling.original_max_position_embeddings
            implied = (f"Without {LENGTH} it takes {'' if fixed else 'max_position_embeddings, '}{length:,} tokens.",)
            scaling = replace(scaling, original_max_position_embeddings=length)
            config = replace(config, rope=config.with_scaling(scaling))
        name = "default" if scaling is None else scaling.rope_type
        rule = self.rules.get(DEEPSEEK_YARN if DEEPSEEK_YARN in config.section.values() else name)
        if rule is None:
            return Answer(None, refusal=self.unknown, why="refused", evidence="run")
        try:
            found = rule.answer(config, scaling)
        except RopeError as e:
            found = Answer(None, refusal=f"its numbers are not a valid rope ({without_fix(e)})", why="unknown")
        if found.refusal and not found.why:
            found = replace(found, why="refused")
        fields = frozenset({} if scaling is None else vars(scaling))
        reads = next(keys for keys in (found.reads, rule.reads, fields) if keys is not None)
        ignored = sorted(key for key in _KEYS.difference(reads) if config.section.get(key) is not None)
        said = (f"It ignores {', '.join(ignored)}.",) * (bool(ignored) and found.rope is not None)
        rounding = found.rounding or self.models.get(config.model_type) or rule.rounding or self.rounding
        rounding = rounding if isinstance(rounding, Rounding) else rounding(config)
        evidence: Evidence = "read" if implied else rule.evidence
        notes = implied + found.notes + said
        return replace(found, notes=notes, source=rule.source, evidence=evidence, rounding=rounding)


def _differ(section: Mapping[str, Any]) -> bool:
    """Whether two keys for the type of a scaling differ. "su" and "mrope" are older words."""
    types = {section.get(key) for key in ("rope_type", "type")} - {None}
    return len(types) == 2 and types not in ({"su", "longrope"}, {"mrope", "default"})


# Helpers that several engines share.


def dynamic_by_factor(config: ConfigRope) -> Answer:
    """Return the rope of an engine that computes dynamic NTK from `factor` and does not read `alpha`."""
    factor = to_finite(config.section.get("factor"))
    if factor is None or factor < 1.0:
        return Answer(None, refusal="it needs factor even if alpha is given (KeyError: 'factor')")
    if config.longest is None:
        return Answer(None, refusal=NO_LENGTH)
    return Answer(config.with_scaling(DynamicNTK(factor, config.longest)), "the call", reads=frozenset({"factor"}))


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's magnitude 0.1 · weight · ln factor + 1, dimensionless, or 1 for a factor of at most 1."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def with_attention_factor(scaling: YaRN, factor: float) -> YaRN:
    """Return the scheme with `factor` as its attention factor, or the scheme itself if it already has this factor."""
    return scaling if scaling.compute_attention_factor() == factor else replace(scaling, attention_factor=factor)


def with_mscales(scaling: YaRN) -> YaRN:
    """Return the scheme as in the code of DeepSeek: rounded ends of the ramp, and a quotient as attention factor.

    This is the magnitude for mscale (by default 1), divided by that for mscale_all_dim (by default 0).
    """
    top = 1.0 if scaling.mscale is None else scaling.mscale
    factor = yarn_magnitude(scaling.factor, top) / yarn_magnitude(scaling.factor, scaling.mscale_all_dim or 0.0)
    return with_attention_factor(replace(scaling, truncate=True), factor)


def yarn_inside_of_pairs(config: ConfigRope, scaling: YaRN, attention: float, notes: tuple[str, ...]) -> Answer:
    """Return the rope of YaRN as gpt-oss computes it: the ramp is not rounded, and must lie inside of the pairs."""
    rope, half = config.rope, config.rope.rotary_dim / 2
    turns = scaling.original_max_position_embeddings / (2 * math.pi)
    low, high = (half * math.log(turns / b) / math.log(rope.base) for b in (scaling.beta_fast, scaling.beta_slow))
    if not 0 < low < high < half - 1:
        return Answer(None, refusal="the ramp of YaRN must lie inside of the pairs (AssertionError)")
    scheme = replace(scaling, truncate=False, mscale=None, mscale_all_dim=None)
    return Answer(config.with_scaling(with_attention_factor(scheme, attention)), notes=notes)


def yarn_with_extrapolation(config: ConfigRope, scaling: YaRN, extrapolation: float, attention: float) -> Rope:
    """Return the rope of YaRN with an `extrapolation_factor`, as a `PerPair` scheme because no other scheme fits.

    Args:
        config: the rope of the config.
        scaling: its scheme.
        extrapolation: the extrapolation_factor, which multiplies the weight of the unscaled frequency in YaRN's mean of
            the scaled and the unscaled frequency of a pair.
        attention: the attention factor of the result, dimensionless.
    """
    rope = config.rope
    low, high = scaling.ramp(rope.base, rope.rotary_dim)
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(rope.rotary_dim // 2)]
    weights = [(1 - position) * extrapolation for position in ramp]
    factors = tuple(1 / ((1 - weight) / scaling.factor + weight) for weight in weights)
    return replace(rope, scaling=PerPair(factors=factors, attention_factor=attention))


def longrope_magnitude(longest: int | None, trained: int) -> float | None:
    """Return LongRoPE's magnitude √(1 + ln(longest / trained) / ln trained), dimensionless.

    Return 1 if `longest` is at most `trained`, and None if `longest` is None.
    """
    if longest is None:
        return None
    return 1.0 if longest <= trained else math.sqrt(1 + math.log(longest / trained) / math.log(trained))


NO_LENGTH = "it needs max_position_embeddings, which the config does not state"


def longrope(
    decided_by: DecidingLength, *notes: str, mscales: bool = False, only_half: bool = False
) -> Callable[[ConfigRope, LongRoPE], Answer]:
    """Return the rule of an engine with the two lists of LongRoPE and an attention factor computed from lengths.

    It divides max_position_embeddings by the trained length, and ignores an attention factor that the config states.

    Args:
        decided_by: as in `Answer`.
        notes: when the engine chooses the long list; "{length}" stands for the trained length.
        mscales: whether the engine uses short_mscale and long_mscale of the config, if it states them, in place of the
            computed attention factor.
        only_half: whether it rejects the pairing "interleaved".
    """

    def answer(config: ConfigRope, scaling: LongRoPE) -> Answer:
        trained = scaling.original_max_position_embeddings
        factor = longrope_magnitude(config.longest, trained)
        if only_half and config.rope.pairing != "half":
            return Answer(None, refusal="its class accepts only the pairing half (ValueError)")
        stated = mscales and scaling.short_mscale is not None
        if factor is None and not stated:
            return Answer(None, refusal=NO_LENGTH)
        scheme = scaling
        if not stated and {scaling.at_length(length).attention_factor for length in (1, 2**31)} != {factor}:
            scheme = replace(scaling, attention_factor=factor, short_mscale=None, long_mscale=None)
        return Answer(
            config.with_scaling(scheme), decided_by, tuple(note.format(length=f"{trained:,}") for note in notes)
        )

    return answer
