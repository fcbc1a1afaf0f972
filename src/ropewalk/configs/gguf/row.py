"""GgufRow: the facts that an architecture of llama.cpp implies and its files do not state.

Keys are written without the architecture prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ropewalk.rope import Pairing

SOURCE = "llama.cpp src/llama-model.cpp, llama_model_rope_type"

BASE, BASE_SWA = "rope.freq_base", "rope.freq_base_swa"
DIM, DIM_SWA, SECTIONS = "rope.dimension_count", "rope.dimension_count_swa", "rope.dimension_sections"
HEAD, HEAD_SWA, HEAD_MLA = "attention.key_length", "attention.key_length_swa", "attention.key_length_mla"
KV_HEADS, ROPE_PATTERN = "attention.head_count_kv", "attention.rope_pattern"
ORIGINAL = "rope.scaling.original_context_length"

ALL, NO_ROPE = "all", "no rope"
"""Kinds of layers if all layers are alike."""
Axes = Literal["one", "mrope", "imrope", "mrope if sections"]


@dataclass(frozen=True)
class Kind:
    """How the layers of one kind get their rope.

    Args:
        bases: keys of the base. The first one with a value is used. rope.freq_base is the base of the model. If it is
            missing, base=... of from_config or the implied base of the row replaces it.
        implied_base: the base if none of `bases` has a value and rope.freq_base is not among them. None makes that an
            error.
        scaled: whether the scaling of the model applies to this kind.
        own_head: whether attention.key_length_swa and rope.dimension_count_swa are read for it.
    """

    bases: tuple[str, ...] = (BASE,)
    implied_base: float | None = None
    scaled: bool = True
    own_head: bool = False


@dataclass(frozen=True)
class Every:
    """One of every n layers (the last, or the first) is `kind`, and the others are `rest`. A key may override n."""

    n: int
    kind: str
    rest: str
    key: str = ""
    first: bool = False


@dataclass(frozen=True)
class Layers:
    """Which layers of an architecture are of which kind, and how each kind rotates.

    Args:
        kinds: maps the name of a kind to how it gets its rope, or to None if it does not rotate.
        otherwise: the kinds if the file has no list: a pattern, or one kind for all layers. None requires the list.
        key: key of a list with an entry for each layer; "" if llama.cpp reads none.
        flagged, unflagged: the kind for an entry that is true or greater than 0, and for one that is false or 0.
        window: whether all layers rotate alike if attention.sliding_window is 0 or missing.
        fixed: whether `otherwise` always applies. A list must then agree with it.
        count: the only number of layers for which the layers differ; None for any.
        no_window: the reason why attention.sliding_window must not be 0; "" if it may be 0.
    """

    kinds: Mapping[str, Kind | None]
    otherwise: Every | str | None
    key: str = ""
    flagged: str = ""
    unflagged: str = ""
    window: bool = False
    fixed: bool = False
    count: int | None = None
    no_window: str = ""


@dataclass(frozen=True)
class ImpliedBase:
    """The base of files that state none, its origin, and a warning about it."""

    value: float
    origin: str
    warning: str


@dataclass(frozen=True)
class GgufRow:
    """What an architecture implies.

    Args:
        pairing: "interleaved" is LLAMA_ROPE_TYPE_NORM, "half" is NEOX, MROPE and IMROPE. None if it is not known.
        source: the code that shows the exceptions of this architecture.
        refusal: the reason why no Rope describes it; "" if one does.
        layers: which layers are of which kind; None if all layers are alike.
        latent: whether it has multi-head latent attention: the last rope.dimension_count channels of a head rotate.
        scales_softmax: whether llama.cpp multiplies the softmax scale by YaRN's factor (DeepSeek).
        indexer: pairing of a second rope, which rotates the first channels; None if there is none.
        axes: the positions of a token. With "mrope if sections", a token has several positions if the file has
            rope.dimension_sections, and the pairing is then "half".
        whole_head: whether rope.dimension_count must be the whole head.
        implied_base: the base of files that state none; None makes a missing base an error.
        finetuned_is_switch: whether nothing rotates if rope.scaling.finetuned is false.
        freqs: whether the tensor rope_freqs.weight is read, and whether it is required.
        longrope: whether the tensors of short and long factors are read: if rope.scaling.type is longrope, or whenever
            the file has them.
        alpha: whether rope.scaling.alpha is read.
        yarn_betas: whether yarn_beta_fast and yarn_beta_slow are read.
        yarn_log: the meaning of yarn_log_multiplier: mscale_all_dim, or a tenth of it; "" if it is not read.
        yarn_log_is_mscale: whether mscale equals mscale_all_dim. If not, it is 1.
        yarn_warning: a warning for files with YaRN, or "".
        temperature_length: key of the length for attention.temperature_scale; "" if that is not read.
    """

    pairing: Pairing | None
    source: str = SOURCE
    refusal: str = ""
    layers: Layers | None = None
    latent: bool = False
    scales_softmax: bool = False
    indexer: Pairing | None = None
    axes: Axes = "one"
    whole_head: bool = False
    implied_base: ImpliedBase | None = None
    finetuned_is_switch: bool = False
    freqs: Literal["", "read", "needed"] = ""
    longrope: Literal["", "by type", "by tensors"] = ""
    alpha: bool = False
    yarn_betas: bool = False
    yarn_log: Literal["", "whole", "tenth"] = ""
    yarn_log_is_mscale: bool = False
    yarn_warning: str = ""
    temperature_length: str = ""

    def kinds(self) -> dict[str, Kind | None]:
        """Return how each kind of layer gets its rope."""
        return {ALL: Kind(), NO_ROPE: None} | dict(self.layers.kinds if self.layers is not None else {})

    def reads(self) -> frozenset[str]:
        """Return the keys that this architecture reads and others may not."""
        names = {HEAD_MLA} if self.latent else set()
        names |= set() if self.axes == "one" else {SECTIONS}
        if self.layers is not None:
            names.add(self.layers.key)
            for kind in filter(None, self.layers.kinds.values()):
                names |= {*kind.bases} | ({HEAD_SWA, DIM_SWA} if kind.own_head else set())
        return frozenset(names)
