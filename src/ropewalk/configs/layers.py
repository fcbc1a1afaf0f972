"""Patterns: rules that assign a kind, such as "sliding_attention", to each layer of a config or GGUF file.

All layers of a kind share one rope. The rows of both tables, of model_types and of llama.cpp's architectures, use these
classes. `windows` says over how many positions the layers attend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ropewalk._checks import shown
from ropewalk.configs.reader import Fields

ALL = "all"
"""The kind of all layers that rotate, in a model that has only one such kind."""
NO_ROPE = "no rope"
"""The kind of layers that do not rotate, in a model whose configs have no other name for it."""


@dataclass(frozen=True)
class Kind:
    """The facts that a model implies about one kind of layer that rotates.

    Args:
        bases: keys that state the base. If a config has several of them, their values must be equal. In a GGUF file,
            the first one with a value is used.
        implied_base: the base if the config has none of these keys. None means that a missing base is an error.
        scaled: whether the scaling of the model applies to this kind of layer.
        head_dim_key: key of the head size of this kind, which is looked up before the keys of the model, or "".
        heads_key: the same for the number of heads, in a model without a key of the head size.
        dim_key: the same for the number of channels that rotate, in GGUF files.
        halved: whether only half as many channels rotate as the file states, in GGUF files (Step 3.5).
        section: key of this kind in nested `rope_parameters`; "" if the key is the name of the kind.
        pairing: the pairing of this kind, if it is not that of the model; "" otherwise.
    """

    bases: tuple[str, ...] = ("rope_theta",)
    implied_base: float | None = None
    scaled: bool = True
    head_dim_key: str = ""
    heads_key: str = ""
    dim_key: str = ""
    halved: bool = False
    section: str = ""
    pairing: str = ""


class Pattern(Protocol):
    """The interface of a rule that assigns a kind to each layer."""

    @property
    def overrides_layer_types(self) -> bool:
        """Whether the pattern applies even if the config has `layer_types`."""

    def kinds(self, c: Fields, count: int) -> list[str] | None:
        """Return the kind of each of `count` layers, or None if the config does not define the kinds."""

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""


@dataclass(frozen=True)
class Every:
    """A pattern that repeats every n layers: one layer is of kind `kind`, and the others are of kind `rest`.

    Args:
        n: the number of layers after which the pattern repeats.
        kind, rest: the kinds.
        key: config key that overrides n; "" if there is none.
        first: whether the first of every n layers is of kind `kind`. If False, it is the last.
    """

    n: int
    kind: str
    rest: str
    key: str = ""
    first: bool = False
    overrides_layer_types = False

    def keys(self) -> set[str]:
        return {self.key} - {""}

    def kinds(self, c: Fields, count: int) -> list[str]:
        has_key = bool(self.key) and c.has(self.key)
        n = c.size(self.key) if has_key else self.n
        which = "first" if self.first else "last"
        does = "does not rotate" if self.kind == NO_ROPE else f"is {self.kind}"
        c.origins["layer_types"] = f"{c.full(self.key) if has_key else 'implied'}: the {which} of every {n} {does}"
        return [self.kind if i % n == (0 if self.first else n - 1) else self.rest for i in range(count)]


@dataclass(frozen=True)
class LayerFlags:
    """A config key with a list that has an entry for each layer: 0 or false for layers of kind `rest`.

    Args:
        key: key of the list.
        kind, rest: the kinds.
        otherwise: a pattern, or the kind of all layers, for configs without the list. None makes the list required.
        overrides_layer_types: as in `Pattern`.
    """

    key: str
    kind: str = ALL
    rest: str = NO_ROPE
    otherwise: Pattern | str | None = None
    overrides_layer_types: bool = True

    def keys(self) -> set[str]:
        return {self.key, *(() if isinstance(self.otherwise, str | None) else self.otherwise.keys())}

    def kinds(self, c: Fields, count: int) -> list[str] | None:
        interval_key = self.otherwise.key if isinstance(self.otherwise, Every) else ""
        value = c.get(self.key)
        if value not in (None, []) and not (self.key == interval_key and isinstance(value, int)):
            flags = c.layer_list(self.key, count) or []
            for flag in flags:
                if type(flag) not in c.flag_types or flag < 0:
                    raise c.error(self.key, f"must contain only {c.flags}", shown(flag), c.list_fix)
            c.origins["layer_types"] = f"{c.full(self.key)}{': 0 does not rotate' if self.rest == NO_ROPE else ''}"
            return [self.kind if flag else self.rest for flag in flags]
        if isinstance(self.otherwise, str):
            return [self.otherwise] * count
        if self.otherwise is not None:
            return self.otherwise.kinds(c, count)
        raise c.error(self.key, "must be given, since the layers differ", "none", c.missing_list_fix)


@dataclass(frozen=True)
class LayerIndices:
    """A config key with a list of the indices of the layers of kind `kind`. The other layers are of kind `rest`.

    Args:
        key: key of the list.
        kind, rest: the kinds.
        otherwise: the kind of all layers of a config without the list. None means that their kinds are not known.
        overrides_layer_types: as in `Pattern`.
    """

    key: str
    kind: str = ALL
    rest: str = NO_ROPE
    otherwise: str | None = NO_ROPE
    overrides_layer_types: bool = True

    def keys(self) -> set[str]:
        return {self.key}

    def kinds(self, c: Fields, count: int) -> list[str] | None:
        if not c.has(self.key) and self.otherwise != self.rest:
            return None if self.otherwise is None else [self.otherwise] * count
        indices = c.get(self.key) or []
        if not isinstance(indices, list) or not all(type(i) is int and 0 <= i < count for i in indices):
            must = f"must be a list of layer numbers below {count}"
            raise c.error(self.key, must, shown(indices), c.list_fix)
        does = {NO_ROPE: "do not rotate", ALL: "rotate"}.get(self.kind, f"are {self.kind}")
        chosen = set(indices)
        c.origins["layer_types"] = f"{self.key}: the layers that {does}"
        return [self.kind if i in chosen else self.rest for i in range(count)]


@dataclass(frozen=True)
class LayerCodes:
    """A config key with a list of a number for each layer, and more if `longer`. `names` maps them to kinds."""

    key: str
    names: Mapping[int, str]
    longer: bool = False
    overrides_layer_types: bool = False

    def keys(self) -> set[str]:
        return {self.key}

    def kinds(self, c: Fields, count: int) -> list[str] | None:
        if not c.has(self.key):
            return None
        codes = c.layer_list(self.key, count, self.longer) or []
        for code in codes:
            if type(code) is not int or code not in self.names:
                must = f"must contain only {', '.join(map(str, self.names))}"
                raise c.error(self.key, must, shown(code), "ropewalk knows no other kind of layer.")
        c.origins["layer_types"] = self.key
        return [self.names[code] for code in codes]


_NEW_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_NEW_NAMES |= dict.fromkeys(("deepseek_sparse_attention", "qwen_sparse_attention"), "indexed_attention")


def check_kinds(c: Fields, key: str, names: Sequence[object], known: Collection[str]) -> list[str]:
    """Return the names as a list of kinds, in place of old names, and record their key in `origins`.

    Raises:
        RopeError: a name is not in `known`.
    """
    names = [_NEW_NAMES.get(kind, kind) if isinstance(kind, str) and kind not in known else kind for kind in names]
    for kind in names:
        if not isinstance(kind, str) or kind not in known:
            must = f"must contain only {', '.join(known)}"
            raise c.error(key, must, shown(kind), "ropewalk knows no other kind of layer of this model_type.")
    c.origins["layer_types"] = key
    return [str(kind) for kind in names]


# The rules of the masks of transformers, which the tests record.
_SLIDING = ("sliding_window", "attention_window_size", "local_attention")
_KEYS = {"sliding_attention": _SLIDING, "hybrid_sliding": _SLIDING, "chunked_attention": ("attention_chunk_size",)}
"""Maps the kind of a layer to the keys of its window. The first one with a number counts."""
_EVERY_LAYER = {"doge", "minimax", "ministral3", "mistral", "mixtral", "openai_privacy_filter"}
_EVERY_LAYER |= {"phi3", "phi4_multimodal", "phimoe", "qwen3_moe", "starcoder2"}
"""The model_types that have the window in every layer, whatever `layer_types` says."""
_EVERY_SECOND = {"gemma2", "gpt_oss", "vaultgemma"}
"""The model_types of which layers 0, 2, 4, … have the window if a config has no `layer_types`."""
_BOTH_SIDES = {"modernbert", "openai_privacy_filter", "ultrabert"}
"""The model_types that attend to later tokens as well, up to a distance of the window."""


def windows(config: Mapping[str, Any], model_type: str, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Return a number for each layer that is greater than all distances between its q and k; None if unbounded.

    Nothing is refused, since windows do not change the rotation.

    Args:
        config: the config of the text model.
        model_type: its model_type.
        kinds: the kind of each layer, if the config has no `layer_types`.
    """
    switch = config.get("use_sliding_window", None if model_type.startswith("qwen") else True)
    types, first = config.get("layer_types"), config.get("max_window_layers")
    if model_type in _EVERY_LAYER and not (model_type == "mistral" and types is not None):  # loaded as ministral
        kinds = ["sliding_attention"] * len(kinds)
    elif isinstance(types, list) and len(types) == len(kinds):
        kinds = [kind if isinstance(kind, str) else "" for kind in types]
    elif model_type in _EVERY_SECOND:
        kinds = ["" if i % 2 else "sliding_attention" for i in range(len(kinds))]
    elif model_type == "llama4_text":
        kinds = ["" if kind == NO_ROPE else "chunked_attention" for kind in kinds]
    elif type(first) is int:
        odd = model_type == "qwen2_moe"
        slides = [i % 2 == 0 and i < first if odd else i >= first for i in range(len(kinds))]
        kinds = ["sliding_attention" if slide else "" for slide in slides]
    return tuple(_window(config, model_type, kind) if switch else None for kind in kinds)


def _window(config: Mapping[str, Any], model_type: str, kind: str) -> int | None:
    both = config.get("use_bidirectional_attention")  # its value is the width of both sides
    halved = both == "all" or (both is True and model_type == "gemma3_text")
    for key in _KEYS.get(kind, ()):
        if type(value := config.get(key)) is int and value > 0:
            side = value // 2 if halved or key == "local_attention" else value
            return side + (halved or model_type in _BOTH_SIDES)
    return None
