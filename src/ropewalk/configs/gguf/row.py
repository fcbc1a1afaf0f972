"""`GgufRow`: what an architecture of llama.cpp implies about rotation and its files do not state.

All keys are named without the architecture prefix: "rope.freq_base" stands for "llama.rope.freq_base" in a Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ropewalk.configs.architecture import QueryScale
from ropewalk.configs.layers import ALL, NO_ROPE, Kind, Pattern
from ropewalk.rope.rope import Pairing

SOURCE = "llama.cpp src/llama-model.cpp, llama_model_rope_type"

BASE, BASE_SWA = "rope.freq_base", "rope.freq_base_swa"
DIM, DIM_SWA, SECTIONS = "rope.dimension_count", "rope.dimension_count_swa", "rope.dimension_sections"
HEAD, HEAD_SWA, HEAD_MLA = "attention.key_length", "attention.key_length_swa", "attention.key_length_mla"
HEAD_MLA_SWA, BASE_COMPRESSED = "attention.key_length_mla_swa", "attention.compress_rope_freq_base"
KV_HEADS, ROPE_PATTERN = "attention.head_count_kv", "attention.rope_pattern"
ORIGINAL = "rope.scaling.original_context_length"

NOT_ALL_LAYERS = "Its layers do not all rotate alike, which is not supported yet."
MODEL_KIND = Kind((BASE,))
"""Layers with the base and the scaling of the model."""
LEADING = "dense full_attention"
"""The kind of the first layers with full attention that rotate (`Layers.leading`)."""


@dataclass(frozen=True)
class Layers:
    """The kinds of layers of an architecture, and the pattern that assigns a kind to each layer.

    Args:
        kinds: maps the name of each kind to a `Kind`, or to None if layers of this kind do not rotate. If a kind has
            neither its base nor an implied one, `GgufRow.implied_base` or the argument base of from_config replaces
            rope.freq_base, if that is among the keys of its base.
        pattern: the pattern, or the kind of all layers.
        alike_without_window: whether all layers rotate alike if attention.sliding_window is 0 or missing.
        ignores_list: whether llama.cpp ignores the list of a `LayerFlags`, which must agree with that without it.
        count: the number of layers that a model must have for its layers to differ. None means any number.
        alike: the kind of the layers of a model with another number of layers.
        leading: key of the number of first layers that rotate where other layers with full attention do not, or "".
        zero_window_refusal: the reason why attention.sliding_window must not be 0; "" if it may be 0.
    """

    kinds: Mapping[str, Kind | None]
    pattern: Pattern | str
    alike_without_window: bool = False
    ignores_list: bool = False
    count: int | None = None
    alike: str = ALL
    leading: str = ""
    zero_window_refusal: str = ""


@dataclass(frozen=True)
class Indexer:
    """The indexer of an architecture, a second attention that rotates as many channels as q and k.

    Args:
        pairing: its pairing.
        kind: the kind of layers that have it.
        tail: whether the last channels of its head rotate instead of the first.
        optional: whether a file without attention.indexer.key_length has none.
    """

    pairing: Pairing
    kind: str = ALL
    tail: bool = False
    optional: bool = False


@dataclass(frozen=True)
class ImpliedBase:
    """The base of files that do not state it, where this rule comes from, and a warning for the user."""

    value: float
    origin: str
    warning: str


@dataclass(frozen=True)
class GgufRow:
    """The facts that an architecture implies about rotation.

    Args:
        pairing: "interleaved" for LLAMA_ROPE_TYPE_NORM, "half" for NEOX, MROPE and IMROPE. None if it is not known.
        source: the code of llama.cpp from which the other fields were taken.
        refusal: the reason why no `Rope` describes the architecture; "" if one does.
        layers: which layers are of which kind; None if all layers are alike.
        drafts: whether all its blocks only predict further tokens.
        latent: whether the last rope.dimension_count channels of a head rotate, as in multi-head latent attention.
        rotates_values: whether it also rotates the values, and the attention's output back.
        scales_softmax: whether llama.cpp multiplies the softmax scale by YaRN's factor (DeepSeek).
        indexer: its indexer, or None.
        axes: how many positions a token has. With "one", it has one. With "mrope" and "imrope", it has several, and the
            axes of the pairs are consecutive or alternate. "mrope if sections" means "mrope" with the pairing "half" if
            the file has rope.dimension_sections, and else "one".
        whole_head: "required" if rope.dimension_count must be the whole head, "always" if the whole head rotates
            whatever the key says, else "".
        implied_base: the base of files that do not state it. None makes a missing base an error.
        finetuned_is_switch: whether nothing rotates if rope.scaling.finetuned is false.
        freqs: "read" if llama.cpp reads the tensor rope_freqs.weight, "needed" if the tensor is required, else "".
        longrope: when llama.cpp reads the tensors of short and long factors: "by type" if rope.scaling.type is
            longrope, "by tensors" whenever the file has them, or "" for never.
        alpha: whether rope.scaling.alpha is read.
        yarn_betas: the defaults of yarn_beta_fast and yarn_beta_slow, or None if these keys are not read.
        yarn_attention: the attention factor of YaRN: "computed", for which yarn_attn_factor is not read; "extra" if
            that key is a further factor; or "one" if it is always 1.
        yarn_log: what yarn_log_multiplier is: "whole" for mscale_all_dim, "tenth" for a tenth of it, or "".
        yarn_log_is_mscale: whether mscale equals mscale_all_dim. If False, mscale is 1.
        yarn_warning: a warning for files with YaRN, or "".
        warning: a warning for all files, or "".
        temperature_length: key of the length that attention.temperature_scale refers to; "" if neither is read.
        query_scale: a factor of q that no key states.
    """

    pairing: Pairing | None
    source: str = SOURCE
    refusal: str = ""
    layers: Layers | None = None
    drafts: bool = False
    latent: bool = False
    rotates_values: bool = False
    scales_softmax: bool = False
    indexer: Indexer | None = None
    axes: Literal["one", "mrope", "imrope", "mrope if sections"] = "one"
    whole_head: Literal["", "required", "always"] = ""
    implied_base: ImpliedBase | None = None
    finetuned_is_switch: bool = False
    freqs: Literal["", "read", "needed"] = ""
    longrope: Literal["", "by type", "by tensors"] = ""
    alpha: bool = False
    yarn_betas: tuple[float, float] | None = None
    yarn_attention: Literal["computed", "extra", "one"] = "computed"
    yarn_log: Literal["", "whole", "tenth"] = ""
    yarn_log_is_mscale: bool = False
    yarn_warning: str = ""
    warning: str = ""
    temperature_length: str = ""
    query_scale: QueryScale | None = None

    def kinds(self) -> dict[str, Kind | None]:
        """Return a dict from the name of each kind of layer to its `Kind`, or to None if such layers do not rotate."""
        own = {} if self.layers is None else self.layers.kinds
        return {ALL: MODEL_KIND, NO_ROPE: None, LEADING: MODEL_KIND, **own}

    def specific_keys(self) -> frozenset[str]:
        """Return the keys that llama.cpp reads for this architecture but not for every architecture."""
        names = {HEAD_MLA} if self.latent else set()
        names |= set() if self.axes == "one" else {SECTIONS}
        if self.layers is not None:
            names |= {self.layers.leading}
            names |= set() if isinstance(self.layers.pattern, str) else self.layers.pattern.keys()
            for kind in filter(None, self.layers.kinds.values()):
                names |= {*kind.bases, kind.head_dim_key, kind.dim_key}
        return frozenset(names - {""})
