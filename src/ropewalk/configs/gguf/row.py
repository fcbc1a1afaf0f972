"""What a row of the table of architectures says: all that an architecture of llama.cpp implies and its file does not.

Keys are written without the architecture before them.
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
"""Kinds of layers where they are all alike."""
Axes = Literal["one", "mrope", "imrope", "mrope if sections"]


@dataclass(frozen=True)
class Kind:
    """How the layers of one kind get their rope.

    Args:
        bases: keys of the base; the first that is given counts. rope.freq_base is the model's: base=... of
            from_config and the implied base of the row stand in for it.
        implied_base: the base where none is given and rope.freq_base is none of them; None where that is an error.
        scaled: whether the scaling of the model is meant for this kind.
        own_head: whether attention.key_length_swa and rope.dimension_count_swa are read for it.
    """

    bases: tuple[str, ...] = (BASE,)
    implied_base: float | None = None
    scaled: bool = True
    own_head: bool = False


@dataclass(frozen=True)
class Every:
    """Of each n layers one is `hit` (the last, or the first), the others are `miss`; n may stand under a key."""

    n: int
    hit: str
    miss: str
    key: str = ""
    first: bool = False


@dataclass(frozen=True)
class Layers:
    """Which layers of an architecture are of which kind, and how each kind rotates.

    Args:
        kinds: name of a kind → how it gets its rope; None where it does not rotate.
        otherwise: the kinds where the file has no list: by a pattern, all the same, or None where it must have one.
        key: key of a list with an entry for each layer; "" where llama.cpp reads none.
        flagged, unflagged: the kind where an entry is true or greater than 0, and where it is false or 0.
        window: whether all layers rotate alike where attention.sliding_window is 0 or not given.
        fixed: whether `otherwise` holds whatever `key` says, which must then say the same.
        count: the only number of layers with which they differ; None for any.
        no_window: why attention.sliding_window must not be 0; "" where it may.
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
    """The base where a file states none, where that comes from, and what a reader should know about it."""

    value: float
    origin: str
    warning: str


@dataclass(frozen=True)
class GgufRow:
    """What an architecture implies.

    Args:
        pairing: "interleaved" is LLAMA_ROPE_TYPE_NORM, "half" is NEOX, MROPE and IMROPE; None where it is not known.
        source: where what is odd about it can be seen.
        refusal: why no Rope describes it; "" where one does.
        layers: which layers are of which kind; None where they are all alike.
        latent: multi-head latent attention: the last rope.dimension_count channels of the head rotate.
        scales_softmax: whether llama.cpp multiplies the scale of the softmax with YaRN's factor (DeepSeek).
        indexer: pairing of a second rope, from the first channel on; None where it has none.
        axes: positions of a token. "mrope if sections": several where rope.dimension_sections says so, and halves are
            paired then.
        whole_head: whether rope.dimension_count must be the whole head.
        implied_base: the base where the file states none; None where that is an error.
        finetuned_is_switch: whether nothing rotates where rope.scaling.finetuned is false.
        freqs: whether the tensor rope_freqs.weight is read, and whether it is needed.
        longrope: whether the tensors of short and long factors are read: where rope.scaling.type says longrope, or
            wherever the file has them.
        alpha: whether rope.scaling.alpha is read.
        yarn_betas: whether yarn_beta_fast and yarn_beta_slow are read.
        yarn_log: what yarn_log_multiplier is: the whole of mscale_all_dim, or a tenth of it; "" where it is not read.
        yarn_log_is_mscale: whether mscale is the same as mscale_all_dim; it is 1 elsewhere.
        yarn_warning: what a reader should know where the scaling is YaRN.
        temperature_length: key of the length that goes with attention.temperature_scale; "" where that is not read.
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
        """How each kind of its layers gets its rope."""
        return {ALL: Kind(), NO_ROPE: None} | dict(self.layers.kinds if self.layers is not None else {})

    def reads(self) -> frozenset[str]:
        """Of the keys that not every architecture reads, those that this one does."""
        names = {HEAD_MLA} if self.latent else set()
        names |= set() if self.axes == "one" else {SECTIONS}
        if self.layers is not None:
            names.add(self.layers.key)
            for kind in filter(None, self.layers.kinds.values()):
                names |= {*kind.bases} | ({HEAD_SWA, DIM_SWA} if kind.own_head else set())
        return frozenset(names)
