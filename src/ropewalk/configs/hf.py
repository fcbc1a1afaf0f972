"""Hugging Face's config.json, in the schemas of transformers 4 (`rope_scaling`) and 5 (`rope_parameters`).

Every value keeps the place it came from, so that messages and `explain` can name it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

from ropewalk._checks import RopeError, check_pairing, nearest, number, shown
from ropewalk._checks import length as checked_length
from ropewalk.configs.architecture import NO_ROPE, Architecture, Kind
from ropewalk.configs.architectures import ARCHITECTURES
from ropewalk.configs.fields import Fields
from ropewalk.configs.hf_scheme import read_scheme
from ropewalk.configs.layers import kinds_of_layers
from ropewalk.configs.model_ropes import ModelRopes, QueryScale
from ropewalk.configs.rope_keys import Given, RopeKeys
from ropewalk.configs.wrappers import WRAPPERS, with_class_defaults
from ropewalk.rope import Pairing, Rope
from ropewalk.schemes import Scaling


def read(
    config: Mapping[str, Any], source: str, *, pairing: str | None, base: float | None, text_only: bool
) -> ModelRopes:
    """The ropes of a Hugging Face config; see `from_config` for arguments and errors."""
    model_type = config.get("model_type")
    key = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    if key is not None:
        inner = config.get(key)
        if not isinstance(inner, Mapping):
            raise Fields(config, source).error(key, "it must be an object", shown(inner), "The text model is there.")
        whole, left_out = with_class_defaults(inner)
        ropes = read(whole, f"{source}: {key}", pairing=pairing, base=base, text_only=text_only)
        return _marked(ropes, left_out)
    return _Reader(Fields(config, source), pairing, base, text_only).read()


def _marked(ropes: ModelRopes, left_out: list[str]) -> ModelRopes:
    """The ropes of a text model inside another, saying what came from its class and not from the file."""
    if not left_out:
        return ropes
    warning = (
        f"{', '.join(left_out)}: not stated, as transformers leaves out what a class has by default; taken from it."
    )
    return dataclasses.replace(ropes, warnings=(*ropes.warnings, warning))


def _trained_length(schemes: list[Scaling], longest: int | None) -> int | None:
    """Tokens before any scaling; None where a scheme leaves it open."""
    lengths = [scheme.trained_length(longest) for scheme in schemes]
    stated = [length for length in lengths if length is not None]
    return longest if not lengths else min(stated) if len(stated) == len(lengths) else None


class _Reader:
    """One config being read: its row of the table, where each value came from, and what to warn about."""

    def __init__(self, fields: Fields, pairing: str | None, base: float | None, text_only: bool) -> None:
        self.fields = fields
        self.passed_pairing = pairing
        self.passed_base = None if base is None else number("from_config", "base", base, above=1.0)
        self.text_only = text_only
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []

    def read(self) -> ModelRopes:
        self.model_type, self.row = self._architecture()
        self.keys = RopeKeys(self.fields, self.row)
        self.pairing = self._pairing()
        self.layers = layers = kinds_of_layers(self.fields, self.row, self.origins)
        longest = self._longest()
        schemes: list[Scaling] = []
        ropes: dict[str, Rope | None] = {NO_ROPE: None}
        others: dict[str, Rope] = {}
        for name in dict.fromkeys(layers):
            kind = self.row.kinds.get(name)
            if kind is not None and not self.keys.is_without(name):
                given = self.keys.of_kind(name, kind, layers)
                scheme, rope = self._rope(name, kind, given, longest)
                ropes[name] = rope
                schemes += [] if scheme is None else [scheme]
                others.update(self._indexer(kind, rope))
            else:
                ropes[name] = None
        self.warnings += [w for s in dict.fromkeys(schemes) for w in s.warnings(longest)]
        return ModelRopes(
            layers=tuple(ropes[name] for name in layers),
            model_type=self.model_type,
            source=self.fields.source,
            trained_length=_trained_length(schemes, longest),
            max_position_embeddings=longest,
            layer_kinds=tuple(layers),
            config=dict(self.fields.config),
            others=others,
            softmax_factor=self._softmax_factor(schemes),
            query_scale=self._query_scale(),
            rotates_values=self.row.rotates_values,
            output_order=self.row.output_order if self.pairing == "interleaved" else None,
            origins=self.origins,
            warnings=tuple(self.warnings),
        )

    def _architecture(self) -> tuple[str, Architecture]:
        model_type = self.fields.get("model_type")
        if not isinstance(model_type, str):
            raise self.fields.error(
                "model_type", "it must be a string", shown(model_type), "Is this a model's config.json?"
            )
        row = ARCHITECTURES.get(model_type)
        if self.passed_pairing is not None:
            check_pairing("from_config", self.passed_pairing)
        if row is None:
            return model_type, self._unknown(model_type)
        if row.refusal is not None:
            raise self.fields.error(
                "model_type", "it must be one that turns as a Rope does", repr(model_type), row.refusal
            )
        if row.axes > 1 and not self.text_only:
            raise self.fields.error(
                "model_type",
                "its tokens must have one position each",
                f"{model_type}, with {row.axes}",
                "Several axes: not supported yet. text_only=True gives the rope that its text tokens use.",
            )
        if row.axes > 1:
            self.warnings.append("text only: positions of images and video have several axes and are not described.")
        return model_type, row

    def _unknown(self, model_type: str) -> Architecture:
        if self.passed_pairing is None:
            inside = [
                key for key, value in self.fields.config.items() if isinstance(value, Mapping) and "model_type" in value
            ]
            hint = f" It holds other models: pass config[{inside[0]!r}]." if inside else ""
            raise self.fields.error(
                "model_type",
                "it must be one that ropewalk knows",
                shown(model_type),
                f"Its config does not say how it rotates.{nearest(model_type, ARCHITECTURES)}{hint} If it rotates all "
                'layers alike, as Llama does, pass pairing="half" or pairing="interleaved" to from_config.',
            )
        for key in ("layer_types", "no_rope_layers"):
            listed = self.fields.get(key)
            if isinstance(listed, list) and any(entry != listed[0] for entry in listed):
                raise self.fields.error(
                    key,
                    "all layers must be alike where ropewalk does not know the model_type",
                    "layers of several kinds",
                    "Build the Rope of each kind by hand.",
                )
        return Architecture(source="passed by the caller", pairing=str(self.passed_pairing), partial=1.0)

    def _pairing(self) -> Pairing:
        pairing = self.row.pairing
        if self.row.interleave_key and not self.fields.boolean(self.row.interleave_key, True):
            pairing = "half"
        said = self.fields.get("rope_interleaved")  # SmolLM2's files say so; no engine reads it
        if said is not None and said is not (pairing == "interleaved"):
            raise self.fields.error(
                "rope_interleaved",
                f"it must agree with the pairing {pairing!r} ({self.row.source})",
                shown(said),
                "Remove it: transformers does not read it.",
            )
        if self.passed_pairing not in (None, pairing):
            raise self.fields.error(
                "model_type",
                f"{self.model_type} has pairing {pairing!r} ({self.row.source})",
                f"pairing={self.passed_pairing!r}",
                "For weights permuted to another pairing, use dataclasses.replace(rope, pairing=...).",
            )
        known = self.model_type in ARCHITECTURES
        self.origins["pairing"] = (
            f"model_type {self.model_type} ({self.row.source})" if known else "passed by the caller"
        )
        return cast(Pairing, pairing)

    def _longest(self) -> int | None:
        key = self.fields.first(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"))
        return checked_length(self.fields.source, key, self.fields.get(key)) if self.fields.has(key) else None

    def _rope(self, name: str, kind: Kind, given: dict[str, Given], longest: int | None) -> tuple[Scaling | None, Rope]:
        base = self._base(kind, given)
        scheme = read_scheme(self.fields, given, longest, self.origins, self.warnings, self.row.axes > 1)
        offset = 0
        if self.row.latent:
            offset, rotary_dim = self._latent_sizes(name, kind)
            head_dim = offset + rotary_dim
        else:
            head_dim = self._own_size(name, "head_dim") or self._head_dim(kind)
            whole = scheme is not None and scheme.whole_head
            rotary_dim = head_dim if whole else self._rotary_dim(kind, given, head_dim)
            if self.row.trailing:
                offset = head_dim - min(rotary_dim, head_dim)
                self.origins["rotary_dim"] += ", the last of the head"
        with self.fields.named():
            rope = Rope(head_dim, base, self.pairing, rotary_dim=rotary_dim, rotary_offset=offset, scaling=scheme)
        return scheme, rope

    def _own_size(self, name: str, size: str) -> int | None:
        """`per_layer_config` (written by transformers 5): sizes that single layers have of their own."""
        entries = self.fields.get("per_layer_config")
        if entries is None:
            return None
        if not isinstance(entries, Mapping):
            raise self.fields.error("per_layer_config", "it must be an object", shown(entries), "Mend it.")
        sizes = {}
        for key, entry in entries.items():
            index = int(key) if str(key).isdecimal() and len(str(key)) < 8 else len(self.layers)
            if not isinstance(entry, Mapping) or index >= len(self.layers):
                raise self.fields.error(
                    f"per_layer_config.{shown(key)}",
                    "it must be an object under a layer's number",
                    shown(entry),
                    "Mend it.",
                )
            if self.layers[index] == name and entry.get(size) is not None:
                inner = Fields(entry, f"{self.fields.source}: per_layer_config.{key}")
                sizes[inner.size(size)] = key
        if len(sizes) > 1:
            raise self.fields.error(
                "per_layer_config", f"layers of kind {name} must have the same {size}", str(sorted(sizes)), "Mend it."
            )
        if sizes:
            self.origins["head_dim"] = self._and("head_dim", "per_layer_config")
        return next(iter(sizes), None)

    def _latent_sizes(self, name: str, kind: Kind) -> tuple[int, int]:
        """Channels of a head before the rotated ones, and the rotated ones."""
        self.origins["head_dim"] = "qk_nope_head_dim + qk_rope_head_dim"
        self.origins["rotary_dim"] = "qk_rope_head_dim, the last of the head"
        prefix = "" if self.fields.has("per_layer_config") else kind.prefix
        before, rotated = f"{prefix}qk_nope_head_dim", f"{prefix}qk_rope_head_dim"
        still = self._own_size(name, "qk_nope_head_dim") or self.fields.size(before)
        if prefix and not self.fields.has(rotated):
            whole = self.fields.size(f"{prefix}head_dim")
            if whole <= still:
                raise self.fields.error(
                    f"{prefix}head_dim", f"it must be more than {before}={still}", str(whole), "Mend it."
                )
            return still, whole - still
        return still, self._own_size(name, "qk_rope_head_dim") or self.fields.size(rotated)

    def _head_dim(self, kind: Kind) -> int:
        keys = tuple(key for key in (kind.head_dim_key, *self.row.head_dim_keys) if key)
        key = self.fields.first(keys) if keys else ""
        if key and self.fields.has(key):
            self.origins["head_dim"] = self._and("head_dim", key)
            return self.fields.size(key)
        if not self.row.head_dim_divides:
            raise self.fields.error(
                key, "it must be given", "none", f"In {self.model_type} it is not hidden_size / num_attention_heads."
            )
        cure = f"It is needed where {key} is not given." if key else ""
        self.origins["head_dim"] = f"{self.fields.first(self.row.hidden)} / {self.fields.first(self.row.heads)}"
        return self.fields.head_width(self.row.hidden, self.row.heads, "head_dim", cure=cure)

    def _base(self, kind: Kind, given: dict[str, Given]) -> float:
        stated = given.get("rope_theta")
        if stated is not None:
            base = self.fields.base(stated.where, stated.value, self.passed_base)
            self.origins["base"] = self._and("base", stated.where)
            return base
        if self.passed_base is not None:
            self.origins["base"] = "passed by the caller"
            return self.passed_base
        # transformers 5 always writes rope_theta into rope_parameters: where there are some without it, it was lost.
        if kind.implied_base is None or self.fields.has("rope_parameters"):
            raise self.fields.error(
                kind.bases[0] if kind.bases else "rope_theta",
                "the base must be given",
                "none",
                "Add rope_theta, or pass base=... to from_config.",
            )
        self.origins["base"] = self._and("base", f"implied by model_type {self.model_type} ({self.row.source})")
        factor_key = self.row.base_factor_key
        if factor_key and self.fields.has(factor_key):
            factor = number(self.fields.source, factor_key, self.fields.get(factor_key), above=0.0)
            if factor != 1.0:
                self._mind_the_factor(factor_key)
            self.origins["base"] = f"{kind.implied_base:g} · {factor_key} ({self.row.source})"
            return self.fields.base(factor_key, kind.implied_base * factor, self.passed_base)
        if "rope_theta" in kind.bases:
            self.warnings.append(
                f"the file states no rope_theta; {kind.implied_base:g} is what model_type {self.model_type} meant "
                "before that key existed. If the model is newer, the key was lost."
            )
        return kind.implied_base

    def _mind_the_factor(self, key: str) -> None:
        name = self.fields.get("_name_or_path")
        if isinstance(name, str) and "chatglm2" in name.lower():
            must = "it must multiply the base, as in ChatGLM3 and GLM-4"
            cure = f"ChatGLM2-32K divides its positions by it: build the Rope by hand, with Linear({key})."
            raise self.fields.error(key, must, f"a file of {shown(name)}", cure)
        self.warnings.append(f"{key} multiplies the base, as in ChatGLM3 and GLM-4; ChatGLM2-32K divides positions.")

    def _and(self, name: str, where: str) -> str:
        before = self.origins.get(name)
        return where if before in (None, where) else f"{before} and {where}"

    def _rotary_dim(self, kind: Kind, given: dict[str, Given], head_dim: int) -> int:
        row, share = self.row, given.get("partial_rotary_factor")
        if row.dim_key and self.fields.has(row.dim_key) and share is None:
            self.origins["rotary_dim"] = row.dim_key
            return self.fields.size(row.dim_key)
        implied = row.partial if kind.partial is None else kind.partial
        if share is None:
            if implied in (None, 1.0):
                self.origins["rotary_dim"] = "the whole head"
                return head_dim
            self.origins["rotary_dim"] = (
                f"{implied} of the head, implied by model_type {self.model_type} ({row.source})"
            )
            return int(head_dim * implied)
        value = number(self.fields.source, share.where, share.value, above=0.0)
        if value > 1.0 or (value < 1.0 and row.partial is None):
            must = "it must be at most 1" if row.partial is not None else f"{self.model_type} rotates the whole head"
            raise self.fields.error(share.where, must, shown(share.value), "Remove it.")
        if row.dim_key and self.fields.has(row.dim_key) and self.fields.size(row.dim_key) != int(head_dim * value):
            must = f"it must agree with {row.dim_key}={self.fields.size(row.dim_key)} of head_dim={head_dim}"
            raise self.fields.error(share.where, must, shown(share.value), "Remove the wrong one.")
        self.origins["rotary_dim"] = f"{share.where} · head_dim"
        return int(head_dim * value)

    def _indexer(self, kind: Kind, rope: Rope) -> dict[str, Rope]:
        if self.row.indexer is None or not kind.indexer or not self.fields.has("index_head_dim"):
            return {}
        width = self.fields.size("index_head_dim")
        self.origins["indexer"] = f"index_head_dim and model_type {self.model_type} ({self.row.source})"
        offset = max(width - rope.rotary_dim, 0) if self.row.trailing else 0
        pairing, dim = cast(Pairing, self.row.indexer), rope.rotary_dim
        try:
            return {
                "indexer": Rope(width, rope.base, pairing, rotary_dim=dim, rotary_offset=offset, scaling=rope.scaling)
            }
        except RopeError as e:
            raise RopeError(f"{self.fields.source}: index_head_dim: {e}") from None

    def _softmax_factor(self, schemes: list[Scaling]) -> float:
        factors = {s.softmax_factor for s in schemes} if self.row.softmax_factor else {1.0}
        factor = max(factors, default=1.0)
        if not math.isfinite(factor):
            raise self.fields.error("mscale_all_dim", "its square must be finite", "one that is not", "Mend it.")
        return factor

    def _query_scale(self) -> QueryScale | None:
        if self.row.query_constant_key and self.fields.has(self.row.query_constant_key):
            key = self.row.query_constant_key
            self.origins["query_scale"] = key
            return QueryScale(constant=number(self.fields.source, key, self.fields.get(key), above=0.0))
        if self.row.query_constant:
            constant = float(self._head_dim(Kind())) ** self.row.query_constant
            return QueryScale(constant=constant, scales_keys=self.row.scales_keys)
        if self.row.query_latent:
            self.origins["query_scale"] = "the root of hidden_size / q_lora_rank"
            return QueryScale(constant=math.sqrt(self.fields.size("hidden_size") / self.fields.size("q_lora_rank")))
        if not self.row.query_beta:
            return None
        for section, values in self.keys.sections.items():
            beta = values.get("llama_4_scaling_beta")
            if beta is not None:
                where = f"{section}.llama_4_scaling_beta"
                self.origins["query_scale"] = where
                return QueryScale(
                    beta=number(self.fields.source, where, beta, at_least=0.0),
                    original_max_position_embeddings=checked_length(
                        self.fields.source,
                        f"{section}.original_max_position_embeddings",
                        values.get("original_max_position_embeddings"),
                    ),
                )
        return None
