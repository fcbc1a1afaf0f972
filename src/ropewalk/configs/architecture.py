"""What a row of the architecture table says: all that a model_type implies about rotation and its config does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ALL = "all"
NO_ROPE = "no rope"


@dataclass(frozen=True)
class Kind:
    """How the layers of one kind get their rope.

    Args:
        bases: keys at the top of a config that give the base; where several are given, they must agree.
        implied_base: the base where a config states none; None where that is an error.
        scaled: whether a scaling that is given for the whole model is meant for this kind.
        partial: share of the head that turns where the config does not say; None takes the architecture's.
        head_dim_key: key of the size of a head where this kind has one of its own, before the architecture's.
        section: name of its part of nested `rope_parameters`; "" is the name of the kind.
        attention_factor: that of a YaRN scaling, in a flat config, that states none; None takes YaRN's own.
        prefix: what stands before the keys of the sizes of its heads (MLA), in a config without `per_layer_config`.
        indexer: whether its layers have the second rope that the architecture names.
    """

    bases: tuple[str, ...] = ("rope_theta",)
    implied_base: float | None = None
    scaled: bool = True
    partial: float | None = None
    head_dim_key: str = ""
    section: str = ""
    attention_factor: float | None = None
    prefix: str = ""
    indexer: bool = True


@dataclass(frozen=True)
class Every:
    """Of each n layers one is `hit` (the last, or the first), the others are `miss`; n may stand under a key."""

    n: int
    hit: str
    miss: str
    key: str = ""
    first: bool = False


@dataclass(frozen=True)
class NoRopeLayers:
    """A list with 0 where a layer does not rotate; without it, every interval-th layer does not (0: all rotate).

    `holds_base`: the other entries are the base. Without `interval_key`, the list must be given.
    """

    key: str = "no_rope_layers"
    interval_key: str = "no_rope_layer_interval"
    interval: int = 4
    holds_base: bool = False


@dataclass(frozen=True)
class Indices:
    """A list with the numbers of the layers that are `hit`; without it, none is, or all are."""

    key: str
    hit: str = ALL
    miss: str = NO_ROPE
    all_without: bool = False


@dataclass(frozen=True)
class Coded:
    """A list with a number for each layer that stands for its kind, read where there is no `layer_types`."""

    key: str
    names: Mapping[int, str]


@dataclass(frozen=True)
class DensePrefix:
    """Cohere 2 MoE: sliding layers turn, and full ones do where their MLP is dense.

    The first `first_k_dense_replace` layers have dense MLPs and, for which of them slide, a pattern of their own. If
    that is not 1, no full layer turns.
    """

    dense_full: str


@dataclass(frozen=True)
class Repeated:
    """A list of kinds of layers that is repeated over all of them."""

    key: str


@dataclass(frozen=True)
class Architecture:
    """What a model_type implies.

    Args:
        source: where this can be seen.
        pairing: "half" or "interleaved".
        interleave_key: key that makes the pairing half where it is false.
        head_dim_keys: keys of the size of a head; the first that is given counts.
        head_dim_divides: whether hidden / heads is the size of a head where no key gives it; else that is an error.
        hidden, heads, layers: keys of those sizes.
        attentions: attentions in each of the layers that are counted; each is a layer of `ModelRopes`.
        partial_keys: keys at the top that give the share of the head that turns.
        partial: that share where no key gives it; None: the whole head turns, and no share is accepted.
        dim_key: key of the number of channels that turn, instead of a share.
        trailing: the last channels of the head turn, not the first.
        latent: MLA: the head is qk_nope_head_dim + qk_rope_head_dim channels, and the last of them turn.
        output_order: "half" where pairs are read interleaved and written in half order (DeepSeek-V3).
        base_factor_key: key of a number that the implied base is multiplied by.
        null_window: kind of every layer where `sliding_window` is null; "" where that changes nothing.
        null_base: a base that is null means that nothing rotates.
        per_layer: bases and shares may be lists with an entry for each layer.
        kinds: name of a kind of layer → how it gets its rope; None where it does not rotate.
        pattern: which layer is of which kind where the config has no `layer_types`.
        layer_types_key: key of the list that says of which kind each layer is.
        flat: `rope_parameters` are never nested, though the layers differ.
        switch: a key and the values of which it must have one, or nothing rotates.
        softmax_factor: whether the softmax scale is multiplied by the square of m(mscale_all_dim).
        query_constant: q is multiplied by head_dim^query_constant before it is turned (ESM).
        query_constant_key: q is multiplied by what stands under this key.
        scales_keys: whether k is multiplied by the same constant.
        query_latent: q is multiplied by the root of hidden_size / q_lora_rank (LongCat).
        query_beta: whether q is scaled by position with `llama_4_scaling_beta`.
        indexer: a second rope in each layer: its pairing (DeepSeek-V3.2's indexer).
        rotates_values: the values are turned with the keys, and the output back (DeepSeek-V4).
        axes: positions of a token.
        idle: keys that look like rotation and have no effect.
        fixed: a key → the only value that is supported.
        refusal: why this cannot be a `Rope`; None if it can.
    """

    source: str
    pairing: str = "half"
    interleave_key: str = ""
    head_dim_keys: tuple[str, ...] = ("head_dim",)
    head_dim_divides: bool = True
    hidden: tuple[str, ...] = ("hidden_size",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    attentions: int = 1
    partial_keys: tuple[str, ...] = ("partial_rotary_factor",)
    partial: float | None = None
    dim_key: str = ""
    trailing: bool = False
    latent: bool = False
    output_order: str | None = None
    base_factor_key: str = ""
    null_window: str = ""
    null_base: bool = False
    per_layer: bool = False
    kinds: Mapping[str, Kind | None] = field(default_factory=lambda: {ALL: Kind()})
    pattern: Every | NoRopeLayers | Indices | Repeated | Coded | DensePrefix | None = None
    layer_types_key: str = "layer_types"
    flat: bool = False
    switch: tuple[str, tuple[object, ...]] | None = None
    softmax_factor: bool = False
    query_constant: float = 0.0
    query_constant_key: str = ""
    scales_keys: bool = False
    query_latent: bool = False
    query_beta: bool = False
    indexer: str | None = None
    rotates_values: bool = False
    axes: int = 1
    idle: tuple[str, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    refusal: str | None = None
