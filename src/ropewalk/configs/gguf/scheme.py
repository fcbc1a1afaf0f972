"""`SchemeReader`: read the scaling of a GGUF file from its type, its parameters and its factor tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from ropewalk._checks import RopeError, choice, integer, with_context
from ropewalk.configs.fields import Assumed
from ropewalk.configs.gguf.header import FREQS, LONG, SHORT
from ropewalk.configs.gguf.keys import REMOVE, Keys
from ropewalk.configs.gguf.row import ORIGINAL
from ropewalk.schemes import NTK, SCHEMES, Linear, LongRoPE, PerPair, Scaling, YaRN, build

_FACTOR = Linear.gguf["factor"]
_OLD_FACTOR = "rope.scale_linear"  # the former name of this key
_ATTENTION = PerPair.gguf["attention_factor"]


class SchemeReader:
    """The keys and factor tensors of one file, and the methods that compute its scheme.

    Attributes:
        kind: the scaling type that llama.cpp applies. It is set by `read`.
        yarn_factor: the factor by which llama.cpp's YaRN multiplies cos and sin, dimensionless; 1 for other types. It
            is set by `read`.
    """

    def __init__(self, keys: Keys, tensors: Mapping[str, tuple[float, ...]]) -> None:
        self.keys = keys
        self.tensors = tensors
        self.kind = "none"
        self.yarn_factor = 1.0

    def read(self) -> Scaling | None:
        """Return the scheme that llama.cpp applies to the file, or None if there is none.

        Raises:
            RopeError: a parameter is missing or invalid, or llama.cpp does not read a key or tensor about rotation.
        """
        kind = self.kind = self._kind()
        self._check_tensors(kind)
        readers: dict[str, Callable[[], Scaling | None]] = {
            "none": self._no_scaling,
            "linear": self._linear,
            "yarn": self._yarn,
            "longrope": self._longrope,
        }
        scheme = readers[kind]() if kind in readers else self._from_gguf_keys(SCHEMES[kind])
        self.keys.refuse_unused(kind)
        if scheme is not None:
            self.keys.warnings += scheme.warnings(self.keys.longest, named="context_length", trained=self.keys.original)
        if kind == "yarn" and self.keys.row.yarn_warning:
            self.keys.warnings.append(self.keys.row.yarn_warning)
        return scheme

    def _kind(self) -> str:
        """Return the scaling type that llama.cpp applies, and record its origin."""
        key = self.keys.key("rope.scaling.type")
        scaling_type = self.keys.fields.get(key)
        if scaling_type is not None:
            types = ("none", *(name for name, scheme in SCHEMES.items() if scheme.gguf))
            choice(self.keys.fields.source, key, scaling_type, types)
        by_tensors = self.keys.row.longrope == "by tensors" and not self.tensors.keys().isdisjoint({SHORT, LONG})
        if by_tensors and scaling_type != "yarn":
            self.keys.origins["scaling"] = f"{LONG}, which overrides rope.scaling.type in {self.keys.architecture}"
            return "longrope"
        if scaling_type is not None:
            self.keys.origins["scaling"] = key
            return str(scaling_type)
        if self._factor() not in (None, 0.0, 1.0):
            self.keys.origins["scaling"] = f"no {key} is given, for which llama.cpp uses linear"
            return "linear"
        self.keys.origins["scaling"] = f"no {key} is given"
        return "none"

    def _check_tensors(self, kind: str) -> None:
        """Raise a RopeError if llama.cpp does not read a factor tensor of the file, or if a required one is missing."""
        longrope, row = kind == "longrope", self.keys.row
        expected = {SHORT, LONG} if longrope else {FREQS}
        reads = row.longrope if longrope else row.freqs
        for name in self.tensors:
            if name not in expected or not reads:
                raise self.keys.fields.error(
                    name,
                    f"must be a tensor that llama.cpp reads for {self.keys.architecture} with scaling {kind!r}",
                    "one that it does not read",
                    "Convert the model again.",
                )
        if (reads or row.longrope == "by tensors") and not self.tensors:
            self._refuse_split_file()
        if longrope and (missing := sorted(expected - self.tensors.keys())):
            must = "must be given with scaling 'longrope'"
            raise self.keys.fields.error(missing[0], must, "none", "Convert the model again.")
        if FREQS not in self.tensors and row.freqs == "needed":
            raise self.keys.fields.error(
                FREQS, f"must be given for {self.keys.architecture}", "none", "Convert the model again."
            )
        if kind not in ("none", "longrope") and self.tensors:
            raise self.keys.fields.error(
                FREQS, f"must not be combined with scaling {kind!r}", "both", "This is not supported yet."
            )

    def _refuse_split_file(self) -> None:
        """Raise a RopeError if the model has several files, since another one may contain the factor tensors."""
        if not self.keys.fields.has("split.count"):
            return
        if integer(self.keys.fields.source, "split.count", self.keys.fields.get("split.count"), at_least=0) > 1:
            raise self.keys.fields.error(
                "split.count",
                "must be at most 1, since another file may contain factor tensors",
                str(self.keys.fields.get("split.count")),
                "Merge the files with llama-gguf-split --merge.",
            )

    def _factor(self) -> float | None:
        """Return the factor of the scaling from its key or that key's former name, or None if both are missing."""
        new, old = (
            self.keys.number(_FACTOR, at_least=0.0),
            self.keys.number(_OLD_FACTOR, at_least=0.0),
        )
        if new is not None and old is not None and new != old:
            raise self.keys.fields.error(
                self.keys.key(_OLD_FACTOR),
                f"must agree with rope.scaling.factor={new:g}",
                f"{old:g}",
                f"llama.cpp uses rope.scaling.factor: {REMOVE}.",
            )
        return new if new is not None else old

    def _no_scaling(self) -> Scaling | None:
        self.keys.used -= {self.keys.key(_FACTOR), self.keys.key(_OLD_FACTOR)}
        if FREQS in self.tensors:
            self.keys.origins["factors"] = FREQS
            self.keys.origins["scaling"] = FREQS
            return PerPair(factors=self.tensors[FREQS], attention_factor=self._attention_factor())
        alpha = self.keys.number(NTK.gguf["alpha"]) if self.keys.row.alpha else None
        if alpha in (None, 0.0, 1.0):
            return None
        self.keys.origins["alpha"] = self.keys.origins["scaling"] = self.keys.key(NTK.gguf["alpha"])
        return NTK(alpha=alpha)

    def _linear(self) -> Scaling | None:
        factor = self._factor()
        if factor in (None, 0.0, 1.0):
            return self._no_scaling()
        self.keys.origins["factor"] = self._factor_key()
        return Linear(factor=factor)

    def _factor_key(self) -> str:
        return self.keys.fields.first_present((self.keys.key(_FACTOR), self.keys.key(_OLD_FACTOR)))

    def _attention_factor(self) -> float:
        """Return rope.scaling.attn_factor, which multiplies cos and sin, or 1 if it is missing."""
        factor = self.keys.number(_ATTENTION, above=0.0)
        if factor is not None:
            self.keys.origins["attention_factor"] = self.keys.key(_ATTENTION)
        return 1.0 if factor is None else factor

    def _yarn(self) -> YaRN:
        factor = self.keys.require(
            _FACTOR, self._factor(), "Without it llama.cpp does not scale. Convert the model again."
        )
        original = self.keys.require(
            ORIGINAL, self.keys.original, "Without it llama.cpp uses context_length. Convert the model again."
        )
        values: dict[str, Any] = {}
        if self.keys.row.yarn_betas:
            for name in ("beta_fast", "beta_slow"):
                if (value := self.keys.number(YaRN.gguf[name], above=0.0)) is not None:
                    values[name] = value
                    self.keys.origins[name] = self.keys.key(YaRN.gguf[name])
        if self.keys.row.yarn_log:
            values |= self._mscale()
        scheme = YaRN(factor=factor, original_max_position_embeddings=original, **values)
        self._check_yarn_attn_factor(scheme)
        extra = self._attention_factor()
        if extra != 1.0:
            scheme = dataclasses.replace(scheme, attention_factor=scheme.compute_attention_factor() * extra)
        self.yarn_factor = scheme.compute_attention_factor()
        return scheme

    def _mscale(self) -> dict[str, float]:
        """Return mscale and mscale_all_dim of DeepSeek's YaRN, computed from yarn_log_multiplier.

        The dict is empty if this key is missing or 0.
        """
        key = YaRN.gguf["mscale_all_dim"]
        weight = self.keys.number(key, at_least=0.0)
        if not weight:
            return {}
        self.keys.origins["mscale_all_dim"] = self.keys.key(key)
        if self.keys.row.yarn_log == "tenth":
            weight = float(f"{10 * weight:.6g}")  # the file has a tenth of the weight in float32
            self.keys.origins["mscale_all_dim"] += " · 10"
        return {"mscale": weight if self.keys.row.yarn_log_is_mscale else 1.0, "mscale_all_dim": weight}

    def _from_gguf_keys(self, scheme: type[Scaling]) -> Scaling:
        """Build a scheme from the keys in its `gguf`, which maps the fields of the scheme to keys of a GGUF file."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cast(Any, scheme)):
            name = scheme.gguf.get(field.name)
            value = None if name is None else self.keys.fields.get(self.keys.key(name))
            optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
            if name is not None and (value is not None or not optional):
                values[field.name] = self.keys.require(name, value, f"{scheme.__name__} needs it.")
                self.keys.origins[field.name] = self.keys.key(name)
                self.keys.used.add(self.keys.key(name))
        try:
            return build(scheme, values)
        except RopeError as e:
            raise with_context(self.keys.fields.source, e) from None

    def _check_yarn_attn_factor(self, scheme: YaRN) -> None:
        """Raise a RopeError if yarn_attn_factor is not the attention factor that llama.cpp computes instead of it."""
        stated = self.keys.number("rope.scaling.yarn_attn_factor", above=0.0)
        if stated is not None and not math.isclose(stated, scheme.compute_attention_factor(), rel_tol=1e-5):
            raise self.keys.fields.error(
                self.keys.key("rope.scaling.yarn_attn_factor"),
                f"must be {scheme.compute_attention_factor():.7g}, which llama.cpp uses instead of the key",
                f"{stated:g}",
                "The model and llama.cpp differ. Read the model's config.json instead.",
            )

    def _longrope(self) -> LongRoPE:
        original = self.keys.require(
            ORIGINAL, self.keys.original, "The long factors apply beyond it. Convert the model again."
        )
        self.keys.origins["short_factor"], self.keys.origins["long_factor"] = SHORT, LONG
        if not self.keys.fields.has(self.keys.key(_ATTENTION)):
            self.keys.warnings.append(
                Assumed("the file has no rope.scaling.attn_factor: llama.cpp uses 1, and other engines compute it.")
            )
        return LongRoPE(
            short_factor=self.tensors[SHORT],
            long_factor=self.tensors[LONG],
            original_max_position_embeddings=original,
            attention_factor=self._attention_factor(),
        )
