"""Hugging Face's config.json, in the schemas of transformers 4 (`rope_theta`, `rope_scaling`) and 5
(`rope_parameters`).

Every value keeps the place it came from, so that messages and `explain` can name it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ropewalk._checks import RopeError, choice, error, integer, nearest, number, shown
from ropewalk.configs.architectures import ARCHITECTURES, Architecture
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.rope import PAIRINGS, Pairing, Rope
from ropewalk.schemes import Linear, Llama3, Scheme, YaRN

SCHEMES: dict[str, type[Scheme]] = {scheme.rope_type: scheme for scheme in (Linear, Llama3, YaRN)}
_SECTIONS = ("rope_scaling", "rope_parameters")
_ALIASES = {"type": "rope_type"}
# Keys at the top of a config that decide rotation; they may also stand in a section.
_TOP_KEYS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
# Keys that are no parameter of a scheme.
_SHARED_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")
# Written by some files, with no effect on the angles: (rope_type, key) → what it records.
_IDLE_KEYS = {("yarn", "finetuned"): "records that the weights were fine-tuned"}
# A key with one of these words is about rotation: reading past one is how a model breaks.
_ROPE_WORDS = frozenset({"rope", "rotary", "theta", "yarn", "ntk"})

# The deepest model has some hundred layers; this keeps a corrupt file from filling the memory.
_MAX_LAYERS = 10_000


def read(config: Mapping[str, Any], source: str, *, pairing: str | None, base: float | None) -> ModelRopes:
    """The ropes of a Hugging Face config; see `from_config` for arguments and errors."""
    return _Reader(config, source, pairing, base).read()


@dataclass(frozen=True)
class _Given:
    """A value and the key it stands under."""

    value: Any
    where: str


class _Reader:
    """One config being read: what it says, where each value came from, and what to warn about."""

    def __init__(self, config: Mapping[str, Any], source: str, pairing: str | None, base: float | None) -> None:
        self.config = config
        self.source = source
        self.pairing = pairing
        self.base = base
        self.given: dict[str, _Given] = {}
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []

    def read(self) -> ModelRopes:
        self.model_type, self.architecture = self._architecture()
        self._collect_rope_keys()
        self._refuse_stray_keys()
        self._check_rope_interleaved()
        head_dim = self._head_dim()
        base = self._base()
        rotary_dim = self._rotary_dim(head_dim)
        scaling = self._scheme()
        try:
            rope = Rope(
                head_dim, base, cast(Pairing, self.architecture.pairing), rotary_dim=rotary_dim, scaling=scaling
            )
        except RopeError as e:
            raise RopeError(f"{self.source}: {e}") from None
        layers = self._size("num_hidden_layers", at_most=_MAX_LAYERS)
        self.origins["layers"] = "num_hidden_layers"
        longest = self._size("max_position_embeddings") if self._has("max_position_embeddings") else None
        self.warnings += _yarn_warnings(scaling, longest)
        return ModelRopes(
            layers=(rope,) * layers,
            model_type=self.model_type,
            source=self.source,
            trained_length=getattr(scaling, "original_max_position_embeddings", None) or longest,
            max_position_embeddings=longest,
            origins=self.origins,
            warnings=tuple(self.warnings),
        )

    def _error(self, key: str, must: str, got: str, cure: str) -> RopeError:
        return error(f"{self.source}: {key}", must, got, cure)

    def _has(self, key: str) -> bool:
        return self.config.get(key) is not None

    def _size(self, key: str, *, at_most: int | None = None, cure: str = "") -> int:
        return integer(self.source, key, self.config.get(key), at_least=1, at_most=at_most, cure=cure)

    def _architecture(self) -> tuple[str, Architecture]:
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str):
            raise self._error("model_type", "it must be a string", shown(model_type), "Is this a model's config.json?")
        if self.pairing is not None:
            choice("from_config", "pairing", self.pairing, PAIRINGS)
        known = ARCHITECTURES.get(model_type)
        if known is None and self.pairing is None:
            raise self._error(
                "model_type",
                f"it must be one of {', '.join(ARCHITECTURES)}",
                shown(model_type),
                f"The config alone does not say how it rotates.{nearest(model_type, ARCHITECTURES)} If it rotates all "
                'layers alike, as Llama does, pass pairing="half" or pairing="interleaved" to from_config.',
            )
        if known is None:
            self.origins["pairing"] = "passed by the caller"
            return model_type, Architecture(pairing=str(self.pairing), source="passed by the caller", partial=True)
        if self.pairing not in (None, known.pairing):
            raise self._error(
                "model_type",
                f"{model_type} has pairing {known.pairing!r} ({known.source})",
                f"pairing={self.pairing!r}",
                "For weights permuted to another pairing, use dataclasses.replace(rope, pairing=...).",
            )
        self.origins["pairing"] = f"model_type {model_type} ({known.source})"
        return model_type, known

    def _collect_rope_keys(self) -> None:
        """All keys that decide rotation, wherever they stand."""
        for key in _TOP_KEYS:
            self._collect(key, self.config.get(key), key)
        for section in _SECTIONS:
            values = self.config.get(section)
            if values is None:
                continue
            if not isinstance(values, Mapping):
                raise self._error(section, "it must be an object or null", shown(values), "Remove or mend it.")
            for key, value in values.items():
                self._collect(_ALIASES.get(key, str(key)), value, f"{section}.{key}")

    def _collect(self, key: str, value: Any, where: str) -> None:
        if value is None:
            return
        if isinstance(value, Mapping):
            raise self._error(
                where,
                f"the parameters must be flat for model_type {self.model_type}",
                "an object for each layer type",
                "Ropes that differ between layer types are not supported yet.",
            )
        before = self.given.get(key)
        if before is None:
            self.given[key] = _Given(value, where)
        elif before.value != value:
            raise self._error(
                where,
                f"it must agree with {before.where}, which is {shown(before.value)}",
                shown(value),
                "Remove the wrong one.",
            )

    def _refuse_stray_keys(self) -> None:
        known = (*_TOP_KEYS, *_SECTIONS, "rope_interleaved", "head_dim", "max_position_embeddings")
        for key, value in self.config.items():
            if key in known or value is None:
                continue
            words = str(key).lower().split("_")
            if _ROPE_WORDS.intersection(words) or words[0].startswith("rope") or nearest(str(key), known, likeness=0.8):
                raise self._error(
                    shown(key),
                    f"a key about rotation must be one that model_type {self.model_type} reads",
                    shown(value),
                    f"It would have no effect.{nearest(str(key), known)} Mend or remove it.",
                )

    def _check_rope_interleaved(self) -> None:
        """SmolLM2's files say `rope_interleaved`, which no engine reads; it must at least be true."""
        said = self.config.get("rope_interleaved")
        if said is not None and said is not (self.architecture.pairing == "interleaved"):
            raise self._error(
                "rope_interleaved",
                f"it must agree with the pairing {self.architecture.pairing!r} ({self.architecture.source})",
                shown(said),
                "Remove it: transformers does not read it.",
            )

    def _head_dim(self) -> int:
        if self._has("head_dim"):
            self.origins["head_dim"] = "head_dim"
            return self._size("head_dim")
        cure = "It is needed where head_dim is not given."
        hidden = self._size("hidden_size", cure=cure)
        heads = self._size("num_attention_heads", cure=cure)
        if hidden % heads:
            raise self._error(
                "hidden_size",
                f"it must be a multiple of num_attention_heads={heads} where head_dim is not given",
                str(hidden),
                "Add head_dim.",
            )
        self.origins["head_dim"] = "hidden_size / num_attention_heads"
        return hidden // heads

    def _base(self) -> float:
        passed = None if self.base is None else number("from_config", "base", self.base, above=1.0)
        stated = self.given.get("rope_theta")
        if stated is not None:
            base = number(self.source, stated.where, stated.value, above=1.0)
            if passed not in (None, base):
                raise self._error(
                    stated.where,
                    f"it is {base:g}, and base must agree with it",
                    f"base={passed:g}",
                    "Leave base out, or use dataclasses.replace(rope, base=...).",
                )
            self.origins["base"] = stated.where
            return base
        if passed is not None:
            self.origins["base"] = "passed by the caller"
            return passed
        return self._implied_base()

    def _implied_base(self) -> float:
        implied = self.architecture.implied_base
        # transformers 5 always writes rope_theta into rope_parameters: where there are some without it, it was lost.
        if implied is None or self._has("rope_parameters"):
            raise self._error(
                "rope_theta", "the base must be given", "none", "Add rope_theta, or pass base=... to from_config."
            )
        self.origins["base"] = f"implied by model_type {self.model_type} ({self.architecture.source})"
        self.warnings.append(
            f"the file states no rope_theta; {implied:g} is what model_type {self.model_type} meant before that key "
            "existed. If the model is newer, the key was lost."
        )
        return implied

    def _rotary_dim(self, head_dim: int) -> int:
        partial = self.given.get("partial_rotary_factor")
        if partial is None:
            self.origins["rotary_dim"] = "the whole head"
            return head_dim
        share = number(self.source, partial.where, partial.value, above=0.0)
        if share > 1.0 or (share < 1.0 and not self.architecture.partial):
            must = "it must be at most 1" if self.architecture.partial else f"{self.model_type} rotates the whole head"
            raise self._error(partial.where, must, shown(partial.value), "Remove it.")
        self.origins["rotary_dim"] = f"{partial.where} · head_dim"
        return int(head_dim * share)

    def _scheme(self) -> Scheme | None:
        rope_type = self.given.get("rope_type", _Given("default", "rope_type"))
        name = rope_type.value
        if name != "default" and (not isinstance(name, str) or name not in SCHEMES):
            raise self._error(
                rope_type.where,
                f"it must be one of default, {', '.join(SCHEMES)}",
                shown(name),
                f"Other schemes are not supported yet.{nearest(str(name), SCHEMES)}",
            )
        self.origins["scaling"] = rope_type.where if "rope_type" in self.given else "no rope_type is given"
        scheme = None if name == "default" else SCHEMES[name]
        parameters = self._parameters(name, scheme)
        if scheme is None:
            return None
        self.origins.update({key: given.where for key, given in parameters.items()})
        try:
            return scheme(**{key: given.value for key, given in parameters.items()})
        except RopeError as e:
            sections = sorted({given.where.split(".")[0] for given in parameters.values()})
            raise RopeError(f"{self.source}: {' and '.join(sections)}: {e}") from None

    def _parameters(self, name: str, scheme: type[Scheme] | None) -> dict[str, _Given]:
        """The keys that the scheme reads; any other is an error, and so is one that it needs and that is missing."""
        fields = {} if scheme is None else {f.name: f for f in dataclasses.fields(cast(Any, scheme))}
        parameters = {}
        for key, given in self.given.items():
            if key in fields:
                parameters[key] = given
            elif (name, key) in _IDLE_KEYS:
                self.warnings.append(f"{given.where} has no effect: it {_IDLE_KEYS[name, key]}.")
            elif key not in _SHARED_KEYS and given.where not in _TOP_KEYS:
                missing = "" if "rope_type" in self.given else " Is rope_type missing?"
                raise self._error(
                    given.where,
                    f"rope_type {name!r} must not have keys that it does not read",
                    shown(given.value),
                    f"It would have no effect.{missing}{nearest(key, [*fields, *_SHARED_KEYS])} Mend or remove it.",
                )
        for key, field in fields.items():
            if key not in parameters and field.default is dataclasses.MISSING:
                raise self._error(
                    f"rope_type {name!r}",
                    f"{key} must be given",
                    "none",
                    "Add it: engines differ in what they would put there.",
                )
        return parameters


def _yarn_warnings(scheme: Scheme | None, longest: int | None) -> list[str]:
    if not isinstance(scheme, YaRN):
        return []
    warnings = []
    trained, scaled = scheme.original_max_position_embeddings, scheme.original_max_position_embeddings * scheme.factor
    if longest not in (None, trained, scaled):
        warnings.append(
            f"max_position_embeddings is {longest}, neither original_max_position_embeddings {trained} nor that times "
            f"factor, {scaled:.0f}; the factor decides the angles."
        )
    if scheme.mscale is None and scheme.mscale_all_dim is None:
        return warnings
    if scheme.attention_factor is not None:
        warnings.append("attention_factor is given, so mscale and mscale_all_dim have no effect.")
    elif not (scheme.mscale and scheme.mscale_all_dim):
        warnings.append("mscale and mscale_all_dim count only together; SGLang and mlx-lm use one alone.")
    elif scheme.mscale == scheme.mscale_all_dim:
        warnings.append("mscale and mscale_all_dim are equal, so the attention factor is 1; llama.cpp may differ.")
    return warnings
