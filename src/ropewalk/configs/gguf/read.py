"""Read the ropes of a GGUF file, as llama.cpp interprets its keys and tensors.

Source: llama.cpp as vendored in llama-cpp-python 0.3.36: src/llama-model.cpp (load_hparams,
get_rope_factors), src/llama-context.cpp (the attention factor of YaRN), src/models/*.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from ropewalk._checks import RopeError, argument, check_pairing, nearest, number, shown, unreadable_file
from ropewalk.configs.architecture import QueryScale
from ropewalk.configs.axes_rules import TEXT_ONLY
from ropewalk.configs.explain import ranges
from ropewalk.configs.fields import Assumed, Fields
from ropewalk.configs.gguf import header
from ropewalk.configs.gguf.architectures import ARCHITECTURES
from ropewalk.configs.gguf.keys import Keys
from ropewalk.configs.gguf.layers import kinds_of_layers
from ropewalk.configs.gguf.row import (
    BASE,
    DIM,
    DIM_SWA,
    HEAD,
    HEAD_MLA,
    HEAD_SWA,
    ORIGINAL,
    SECTIONS,
    SOURCE,
    Kind,
)
from ropewalk.configs.gguf.scheme import SchemeReader
from ropewalk.configs.gguf.several_axes import NAMES, axes_of
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.source import without_keys
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Pairing, Rope
from ropewalk.schemes import Scaling


def read(
    path: Path, *, pairing: str | None, base: float | None, text_only: bool, ignore: tuple[str, ...] = ()
) -> ModelRopes:
    """Read the ropes of a GGUF file. See `from_config` for arguments and errors."""
    try:
        values, tensors = header.read(path)
    except RopeError:
        raise
    except (OSError, ValueError) as e:
        raise unreadable_file(str(path), e) from e
    values = without_keys(values, ignore, str(path))
    return _Reader(Keys(Fields(values, str(path), base=base)), tensors, pairing, base, text_only).read()


class _Reader:
    """The contents of a file with the arguments of `from_config`, and the methods that compute its ropes."""

    def __init__(
        self,
        keys: Keys,
        tensors: Mapping[str, tuple[float, ...]],
        pairing: str | None,
        base: float | None,
        text_only: bool,
    ) -> None:
        self.keys = keys
        self.row = keys.row
        self.tensors = tensors
        self.passed_pairing = pairing
        self.passed_base = base
        self.text_only = text_only

    def read(self) -> ModelRopes:
        keys = self.keys
        self.sections = self._sections()
        pairing = self._pairing()
        keys.refuse_unsupported()
        layers = kinds_of_layers(keys)
        of_row = self.row.kinds()
        kinds = {name: of_row[name] for name in dict.fromkeys(layers)}
        rotating = {name: kind for name, kind in kinds.items() if kind is not None}
        shapes = {name: (*self._shape(kind), self._base(kind)) for name, kind in rotating.items()}
        query_scale = self._query_scale()
        ropes: dict[str, Rope | None] = dict.fromkeys(kinds)
        scheme, others = None, {}
        with keys.fields.prefix_errors():
            if rotating:
                self.scaling = SchemeReader(keys, self.tensors)
                scheme = self.scaling.read()
                self._check_unscaled(list(rotating.values()), scheme)
            for name, kind in rotating.items():
                head_dim, rotary_dim, offset, base = shapes[name]
                own = scheme if kind.scaled else None
                axes = self._axes(rotary_dim)
                rope = Rope(
                    head_dim, base, pairing, rotary_dim=rotary_dim, rotary_offset=offset, scaling=own, axes=axes
                )
                ropes[name] = rope
                others.update(self._indexer(rope))
        return ModelRopes(
            layers=tuple(ropes[name] for name in layers),
            model_type=keys.architecture,
            source=keys.fields.source,
            trained_length=self._trained_length(scheme),
            max_position_embeddings=keys.longest,
            extra_ropes=others,
            softmax_factor=self._softmax_factor(scheme),
            query_scale=query_scale,
            layer_kinds=() if self.row.layers is None else tuple(layers),
            axis_names=NAMES[: max((r.axes.count for r in ropes.values() if r is not None and r.axes), default=0)],
            origins=keys.origins,
            warnings=tuple(keys.warnings),
        )

    def _sections(self) -> tuple[int, ...] | None:
        """Return the number of pairs of each axis, or None if tokens have one position."""
        fields, key, axes = self.keys.fields, self.keys.key(SECTIONS), self.row.axes
        value = fields.get(key)
        if axes == "one" or (axes == "mrope if sections" and value is None):
            return None
        if not isinstance(value, tuple) or len(value) != 4 or not all(type(n) is int and n >= 0 for n in value):
            raise fields.error(key, "must be a list of 4 numbers of pairs", shown(value), "Convert the model again.")
        if axes == "mrope if sections" and not (value[0] and value[1]):
            return None
        if not any(value):
            raise fields.error(
                key, "must assign at least one pair to an axis", shown(value), "Convert the model again."
            )
        if value[3]:
            fix = "The content of the fourth row of positions is not known. Read the model's config.json instead."
            raise fields.error(key, "must not assign pairs to a fourth axis", shown(value), fix)
        if self.text_only:
            self.keys.warnings.append(TEXT_ONLY)
        return value

    def _axes(self, rotary_dim: int) -> Axes | None:
        """Return the axis of each pair, or None if tokens have one position.

        Add warnings if the sections do not cover exactly the rotated pairs, or leave pairs to the fourth axis of ggml.
        """
        if self.sections is None:
            return None
        pairs, covered = rotary_dim // 2, sum(self.sections)
        axes = axes_of(self.sections, pairs, is_interleaved=self.row.axes == "imrope")
        if covered != pairs and not self.text_only:
            effect = (
                f"repeats the sections from pair {covered} on"
                if covered < pairs
                else f"ignores the sections beyond pair {pairs - 1}"
            )
            self.keys.warnings.append(
                f"{self.keys.key(SECTIONS)} = {list(self.sections)} covers {covered} pairs, but {pairs} rotate: "
                f"llama.cpp {effect}. The model's own code may not."
            )
        fourth = [i for i, a in enumerate(axes.axis) if a == 3]
        if fourth and self.text_only:
            self.keys.warnings.append(
                f"llama.cpp does not rotate pairs {ranges(fourth)} of text tokens, since no axis of {SECTIONS} covers "
                "them. These ropes rotate them, as the model does."
            )
        elif fourth:
            self.keys.warnings.append(
                f"no axis of {SECTIONS} covers pairs {ranges(fourth)}: llama.cpp gives them a fourth row of positions "
                "filled with 0, so pass zeros to reproduce it. The model's own code gives them the time."
            )
        if self.text_only:
            return None
        self.keys.origins["axes"] = self.keys.key(SECTIONS)
        return axes

    def _pairing(self) -> Pairing:
        if self.passed_pairing is not None:
            check_pairing("from_config", self.passed_pairing)
        if self.row.pairing is None:
            if self.passed_pairing is None:
                known = [name for name, row in ARCHITECTURES.items() if row.pairing]
                raise self.keys.fields.error(
                    "general.architecture",
                    "must be one that ropewalk knows",
                    shown(self.keys.architecture),
                    f"The file does not define its rotation.{nearest(self.keys.architecture, known)} If all layers "
                    f"rotate alike, pass {argument('pairing', 'half')} (NEOX in llama.cpp) or "
                    f"{argument('pairing', 'interleaved')} (NORM).",
                )
            self.keys.origins["pairing"] = "passed by the caller"
            return cast(Pairing, self.passed_pairing)
        pairing: Pairing = self.row.pairing if self.sections is None else "half"  # MROPE always has the half pairing
        if self.passed_pairing not in (None, pairing):
            raise self.keys.fields.error(
                "general.architecture",
                f"{self.keys.architecture} requires the pairing {pairing!r} ({SOURCE})",
                f"pairing={self.passed_pairing!r}",
                "For weights permuted to another pairing, use dataclasses.replace(rope, pairing=...).",
            )
        name = "NORM" if pairing == "interleaved" else "NEOX" if self.sections is None else "MROPE"
        self.keys.origins["pairing"] = f"general.architecture {self.keys.architecture}: {name} ({SOURCE})"
        return pairing

    def _shape(self, kind: Kind) -> tuple[int, int, int]:
        """Return head_dim, rotary_dim and rotary_offset of a kind of layer, in channels."""
        head_dim = self._head_dim(kind)
        rotary_dim = self._rotary_dim(kind, head_dim)
        if not self.row.latent:
            return head_dim, rotary_dim, 0
        key = self.keys.key(DIM)
        if not self.keys.fields.has(key) or rotary_dim >= head_dim:
            must = f"must be less than the {head_dim} channels of the head"
            raise self.keys.fields.error(key, must, shown(self.keys.fields.get(key)), "Convert the model again.")
        self.keys.origins["rotary_dim"] = f"{key}, the last of the head"
        return head_dim, rotary_dim, head_dim - rotary_dim

    def _head_dim(self, kind: Kind) -> int:
        fields = self.keys.fields
        names = (HEAD_SWA if kind.own_head else "", HEAD_MLA if self.row.latent else "", HEAD)
        own = fields.first_present(tuple(self.keys.key(name) for name in names if name))
        if fields.has(own):
            self._record_origin("head_dim", own)
            return fields.channels(own)
        if self.row.latent:
            fix = "Its head_dim is not embedding_length / head_count. Convert the model again."
            raise fields.error(own, "must be given", "none", fix)
        own, width, heads = (self.keys.key(n) for n in (HEAD, "embedding_length", "attention.head_count"))
        fix = f"It is required if {own} is not given."
        self._record_origin("head_dim", f"{width} / {heads}")
        return fields.head_width((width,), (heads,), own, fix=fix)

    def _rotary_dim(self, kind: Kind, head_dim: int) -> int:
        names = (DIM_SWA, DIM) if kind.own_head else (DIM,)
        key = self.keys.fields.first_present(tuple(self.keys.key(name) for name in names))
        if not self.keys.fields.has(key):
            self._record_origin("rotary_dim", "the whole head")
            return head_dim
        self._record_origin("rotary_dim", key)
        rotary_dim = self.keys.fields.channels(key)
        if self.row.whole_head and rotary_dim != head_dim:
            raise self.keys.fields.error(
                key,
                f"must be the whole head of {head_dim} channels for {self.keys.architecture}",
                str(rotary_dim),
                "llama.cpp refuses other values. Convert the model again.",
            )
        return rotary_dim

    def _base(self, kind: Kind) -> float:
        """Return the base of a kind of layer, from the first key in `bases` that has a value, or the implied base."""
        keys = {name: self.keys.key(name) for name in kind.bases}
        name = next((name for name, key in keys.items() if self.keys.fields.has(key)), BASE if BASE in keys else "")
        if name == BASE:
            return self._model_base()
        if name:
            self._record_origin("base", keys[name])
            return number(self.keys.fields.source, keys[name], self.keys.fields.get(keys[name]), above=1.0)
        if kind.implied_base is None:
            fix = "llama.cpp uses 10000, which may not be the model's base. Convert the model again."
            key = " or ".join(keys.values()) or self.keys.key(BASE)
            raise self.keys.fields.error(key, "must be given, since it is the base", "none", fix)
        self._record_origin("base", f"implied by {self.keys.architecture}: {kind.implied_base:g} in sliding layers")
        return kind.implied_base

    def _model_base(self) -> float:
        key = self.keys.key(BASE)
        if self.keys.fields.has(key):
            self._record_origin("base", key)
            return self.keys.fields.check_base(key, self.keys.fields.get(key))
        if self.passed_base is not None:
            self._record_origin("base", "passed by the caller")
            return self.passed_base
        implied = self.row.implied_base
        if implied is None:
            fix = f"llama.cpp uses 10000, which may not be the model's base. Pass {argument('base')}."
            raise self.keys.fields.error(key, "must be given, since it is the base", "none", fix)
        self._record_origin("base", f"implied: {implied.origin}")
        self.keys.warnings.append(
            Assumed(f"the file has no {key}, for which llama.cpp uses {implied.value:g}. {implied.warning}")
        )
        return implied.value

    def _trained_length(self, scheme: Scaling | None) -> int | None:
        if self.keys.original is not None:
            return self.keys.original
        return self.keys.longest if scheme is None else scheme.trained_length(self.keys.longest)

    def _record_origin(self, name: str, where: str) -> None:
        """Record the key that a value came from. If kinds of layers have different origins, "and" joins them."""
        previous = self.keys.origins.get(name)
        self.keys.origins[name] = where if previous in (None, where) else f"{previous} and {where}"

    def _check_unscaled(self, kinds: list[Kind], scheme: Scaling | None) -> None:
        """Raise a RopeError if rope.scaling.attn_factor would multiply cos and sin of layers without a scheme."""
        key = self.keys.key("rope.scaling.attn_factor")
        if scheme is not None and not all(kind.scaled for kind in kinds) and self.keys.fields.get(key) not in (None, 1):
            fix = "A factor for sliding layers, which have no scaling, is not supported yet."
            raise self.keys.fields.error(key, "must be 1 or missing", shown(self.keys.fields.get(key)), fix)

    def _indexer(self, rope: Rope) -> dict[str, Rope]:
        if self.row.indexer is None:
            return {}
        key = self.keys.key("attention.indexer.key_length")
        width = self.keys.fields.channels(key)
        self.keys.origins["indexer"] = key
        return {"indexer": Rope(width, rope.base, self.row.indexer, rotary_dim=rope.rotary_dim, scaling=rope.scaling)}

    def _softmax_factor(self, scheme: Scaling | None) -> float:
        """Return the factor by which llama.cpp multiplies the softmax scale (DeepSeek), dimensionless."""
        if not self.row.scales_softmax or scheme is None:
            return 1.0
        if self.scaling.kind != "yarn":
            must = f"must be yarn for {self.keys.architecture}"
            fix = "With another type llama.cpp changes the softmax scale, which is not supported."
            raise self.keys.fields.error(self.keys.key("rope.scaling.type"), must, scheme.rope_type, fix)
        yarn_factor = self.scaling.yarn_factor
        if yarn_factor != 1.0:
            self.keys.warnings.append(
                f"llama.cpp multiplies cos and sin by {yarn_factor:.6g} and also the softmax scale by its square. The "
                "model's own code may not."
            )
        factor = scheme.softmax_factor * yarn_factor * yarn_factor
        if not math.isfinite(factor):
            key = self.keys.key("rope.scaling.yarn_log_multiplier")
            must = "must give a finite softmax factor"
            raise self.keys.fields.error(key, must, "infinity", "Released models have about 0.1.")
        return factor

    def _query_scale(self) -> QueryScale | None:
        """Return the factor of q that grows with its position (Ministral 3, Mistral Large 3), or None."""
        name = self.row.temperature_length
        beta = self.keys.number("attention.temperature_scale", at_least=0.0) if name else None
        if not beta:
            return None
        length = self.keys.length(name)
        if length is None and name == ORIGINAL:
            length = self.keys.longest
        length = self.keys.require(name, length, "attention.temperature_scale needs it.")
        self.keys.origins["query_scale"] = self.keys.key("attention.temperature_scale")
        return QueryScale(beta=beta, original_max_position_embeddings=cast(int, length))
