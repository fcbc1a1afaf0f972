"""`Architecture`: what a model_type of Hugging Face implies about rotation, and the steps that read its config.

`models.py` has one `Architecture` for each model_type, which is called its row. Some fields of a row may be functions
of the `Reader`, for models with an exception. A model in which several steps differ has a subclass in `families/`,
which overrides some methods. Layers of the same kind, such as "sliding_attention", share a rope.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, cast

from ropewalk._checks import argument, check_pairing, error, integer, number, possible, shown
from ropewalk._checks import length as checked_length
from ropewalk.configs.axes_rules import TEXT_ONLY, AxesRule
from ropewalk.configs.layers import ALL, NO_ROPE, Kind, Pattern, check_kinds
from ropewalk.configs.reader import DEFAULT, PAIRING_KEY, TRAINED, ConfigValue, Reader, other_pairing
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Pairing, Rope
from ropewalk.schemes import Scaling

KindRule = Pattern | Callable[[Reader, int], list[str]] | None  # the kinds of a number of layers


@dataclass(frozen=True)
class QueryScale:
    """A factor that an architecture applies to q in addition to the rotation, dimensionless.

    With n = (position + offset) / original_max_position_embeddings, the factor is
    constant · (1 + beta · ln(1 + floor(n))) · (1 + n)^power. If `logarithmic`, it is
    constant · max(1, ln(position + offset) / ln(original_max_position_embeddings)).

    Args:
        constant: the part of the factor that is the same at every position (ESM: head_dim^-0.5).
        scales_keys: whether the model also multiplies k by `constant`.
        beta: how strongly the factor grows with the position (Ministral 3: `llama_4_scaling_beta`).
        original_max_position_embeddings: the number of tokens after which the factor first grows. It has an effect only
            if beta or power is not 0, or if `logarithmic`.
        offset: tokens that are added to the position (Llama 4 and Beam count positions from 1).
        power: exponent of the factor that grows without steps (Beam: 0.1).
        logarithmic: whether the factor grows with the logarithm of the position (Grok 2).
        only_unrotated: whether the factor applies only in layers without rotation (Llama 4, Beam), and not in all.
    """

    constant: float = 1.0
    scales_keys: bool = False
    beta: float = 0.0
    original_max_position_embeddings: int = 1
    offset: int = 0
    power: float = 0.0
    logarithmic: bool = False
    only_unrotated: bool = False

    def at(self, position: int) -> float:
        """Return the factor for the query at `position`, in tokens."""
        place, length = position + self.offset, self.original_max_position_embeddings
        growth = 1.0 + self.beta * math.log(1 + place // length)
        if self.logarithmic:
            growth = max(1.0, math.log(max(place, 1)) / math.log(length))
        if self.power:  # by logarithms, since a float cannot hold every int
            growth *= math.exp(self.power * (math.log(length + place) - math.log(length)))
        return self.constant * growth

    @property
    def llama_4_scaling_beta(self) -> float | None:
        """The value of the key `llama_4_scaling_beta` that states this factor, or None."""
        return self.beta if self.beta and not self.only_unrotated else None


@dataclass(frozen=True)
class HeadQueryScale:
    """A learned factor of q for each head, scale · ln(position + 1) + bias (Mistral Large 4).

    Args:
        scale, bias: one number for each head of each layer, dimensionless: `scale[layer][head]`.
    """

    scale: tuple[tuple[float, ...], ...]
    bias: tuple[tuple[float, ...], ...]
    llama_4_scaling_beta: ClassVar[None] = None

    def __post_init__(self) -> None:
        who, heads = "HeadQueryScale", sorted({len(layer) for layer in (*self.scale, *self.bias)})
        if len(self.scale) != len(self.bias) or len(heads) != 1 or heads == [0]:
            must, got = "scale and bias must have a number for each head of each layer", f"{heads} numbers"
            raise error(who, must, got, "Pass equally many for every layer.")
        for name in ("scale", "bias"):
            for i, layer in enumerate(getattr(self, name)):
                for head, value in enumerate(layer):
                    number(who, f"{name}[{i}][{head}]", value)

    def at(self, position: int, layer: int) -> tuple[float, ...]:
        """Return the factor of each head of a layer for the query at `position`, in tokens."""
        layer = integer("HeadQueryScale.at", "layer", layer, at_least=0, at_most=len(self.scale) - 1)
        log = math.log(integer("HeadQueryScale.at", "position", position, at_least=0) + 1)
        return tuple(s * log + b for s, b in zip(self.scale[layer], self.bias[layer], strict=True))


@dataclass(frozen=True)
class Architecture:
    """The facts that a model_type implies about rotation, and the steps that read its config.

    Args:
        source: the code from which these facts were taken.
        pairing: "half" or "interleaved", or a function that returns one of them.
        head_dim_keys: keys of the head size. The first one with a value is used.
        head_dim_divides: whether the head size is hidden / heads if the config has no key for it. If False, a missing
            key is an error.
        hidden, heads: keys of the width and of the number of heads.
        layers: keys of the number of layers, or a function that returns this number.
        partial_keys: top-level keys of the fraction of the head that rotates.
        partial: the rotated fraction if the config has no key for it. None means that the whole head always rotates.
        dim_key: key of the number of channels that rotate, for models that state it instead of a fraction.
        kinds: maps the name of each kind of layer to a `Kind`, or to None if layers of this kind do not rotate.
        length_key: key of the longest length, in tokens, for models that do not state it as others do.
        pattern: assigns a kind to each layer if the config has no `layer_types`. If it is a function, from the reader
            and the number of layers, `layer_types` is not read.
        flat: whether `rope_parameters` is one object for all kinds of layers. If False, it has an object for each kind.
        sections: what the class in transformers 5 reads if a config has `rope_scaling` and `rope_parameters`:
            "rope_scaling" (in place of the other), "rope_parameters", "merged" (`rope_scaling` counts, and only the
            objects for kinds of layers in `rope_parameters`), or "nested or rope_scaling" (only one of these).
        listed: whether the base and the fraction may be lists with an entry for each layer.
        switch: a key, its values for which the model rotates, and its value in the model's class if the config does not
            have it. For any other value, no layer rotates.
        null_base: whether a base of null means that no layer rotates.
        null_window: the kind of every layer if `sliding_window` is null; "" if a null has no effect.
        output_order: "half" if the model's code reads interleaved pairs and writes them in half order (DeepSeek-V3).
        query_beta: whether the key `llama_4_scaling_beta` makes the model scale q by its position.
        query_scale: a function that returns another factor of q.
        learned: a function that returns the scheme whose numbers are in the checkpoint, from the reader, the scheme of
            the config and the number of rotated channels.
        backwards: whether each pair rotates by minus its angle.
        rotates_values: whether the model also rotates the values, and rotates the attention's output back.
        axes: the rule that assigns the pairs to the axes of the positions (M-RoPE); None if tokens have one position.
        check: a function that raises a RopeError for configs that no `Rope` describes, or adds warnings.
        more_keys: a function that adds what the config defines in its own way to the collected rope keys, which are its
            second argument.
        trained_length: a function that returns the trained length, in tokens, if no scheme determines it.
        keys_without_effect: maps keys that seem to be about rotation, but have no effect in the model's code, to the
            reason.
        fixed: maps a key to the only supported value, and to a description of what other values mean.
        in_transformers: whether transformers contains the model's code.
        own_config: whether only the model's own code reads this model_type, so that `to_hf_config` cannot write it.
        known: whether the model_type is in the table. False for the rows that are built from a passed pairing.
        refusal: why no `Rope` describes the model, in whole sentences, with an alternative if there is one; "" if one
            does.
    """

    source: str
    pairing: str | Callable[[Reader], str] = "half"
    head_dim_keys: tuple[str, ...] = ("head_dim",)
    head_dim_divides: bool = True
    hidden: tuple[str, ...] = ("hidden_size",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    layers: tuple[str, ...] | Callable[[Reader], int] = ("num_hidden_layers",)
    partial_keys: tuple[str, ...] = ("partial_rotary_factor",)
    partial: float | None = None
    dim_key: str = ""
    kinds: Mapping[str, Kind | None] = field(default_factory=lambda: {ALL: Kind()})
    length_key: str = ""
    pattern: KindRule = None
    flat: bool = False
    sections: str = "rope_scaling"
    listed: bool = False
    switch: tuple[str, tuple[object, ...], object] | None = None
    null_base: bool = False
    null_window: str = ""
    output_order: str | None = None
    query_beta: bool = False
    query_scale: Callable[[Reader], QueryScale | HeadQueryScale | None] | None = None
    learned: Callable[[Reader, Scaling | None, int], Scaling] | None = None
    backwards: bool = False
    rotates_values: bool = False
    axes: AxesRule | None = None
    check: Callable[[Reader], None] | None = None
    more_keys: Callable[[Reader, dict[str, ConfigValue]], None] | None = None
    trained_length: Callable[[Reader], int | None] | None = None
    keys_without_effect: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    in_transformers: bool = True
    own_config: bool = False
    known: bool = True
    refusal: str = ""

    def name_and_source(self, c: Reader) -> str:
        """Return "model_type (source)" for messages."""
        return f"{c.get('model_type')} ({self.source})"

    def choose_sections(self, c: Reader) -> None:
        """Let the config state a value twice if transformers' code decides which one counts."""
        if not (self.in_transformers and self.known):
            return
        c.follow_transformers(self.sections)
        if not c.sections and c.config.get("rope_theta") is not None and not c.has("rope_parameters"):
            from ropewalk.configs.tables.default_bases import DEFAULT_SECTIONS

            default = DEFAULT_SECTIONS.get(str(c.get("model_type")))
            if default is not None:
                c.sections[DEFAULT] = default
                c.stated_twice.update(default)
                said = ", ".join(f"{key} {shown(value)}" for key, value in default.items())
                c.assume(f"the file has no rope_parameters, so transformers takes those of its class: {said}.")

    def refuse_unsupported(self, c: Reader) -> None:
        """Raise a RopeError if the config describes what no `Rope` does. Add any warning about several axes."""
        if self.refusal:
            must = "must name a model that a Rope describes"
            raise c.error("model_type", must, repr(c.get("model_type")), self.refusal)
        for key, (value, other_meaning) in self.fixed.items():
            if c.has(key) and c.get(key) != value:
                raise c.error(key, f"must be {shown(value)}", shown(c.get(key)), f"Not supported yet: {other_meaning}.")
        if self.axes is not None and c.text_only:
            c.warnings.append(TEXT_ONLY)
        elif self.axes is not None and self.axes.warning:
            c.warnings.append(self.axes.warning)
        if self.check is not None:
            self.check(c)

    def implied_pairing(self, c: Reader) -> str:
        """Return the pairing of the original weights, "half" or "interleaved"."""
        return self.pairing(c) if callable(self.pairing) else self.pairing

    def read_pairing(self, c: Reader) -> Pairing:
        """Return the pairing of the weights: that of the model, or what `ropewalk convert` has written into the config.

        Raises:
            RopeError: the config or the caller contradicts the pairing.
        """
        implied = self.implied_pairing(c)
        source = self.source if self.known else None
        # No engine reads rope_interleaved, which is in SmolLM2's files. Rows that use rope_interleave read it earlier.
        for key in ("rope_interleaved", "rope_interleave"):
            flag = None if key in c.read_keys else c.get(key)
            if flag is not None and flag is not (implied == "interleaved"):
                must = f"must agree with the pairing {implied!r}{'' if source is None else f' ({source})'}"
                fix = f"If the model's own code does not read it, pass {argument('ignore', (c.path + key,))}."
                raise c.unread(key, must, shown(flag), fix)
        model_type = c.get("model_type")
        if c.has(PAIRING_KEY):
            implied = check_pairing(c.source, c.get(PAIRING_KEY))
            source = f"{PAIRING_KEY}, from ropewalk convert"
        if c.passed_pairing not in (None, implied):
            raise c.error(
                "model_type",
                f"{model_type} requires the pairing {implied!r} ({source})",
                argument("pairing", c.passed_pairing),
                other_pairing(),
            )
        c.origins["pairing"] = "passed by the caller" if source is None else f"model_type {model_type} ({source})"
        return cast(Pairing, implied)

    def section_keys(self) -> frozenset[str]:
        """Return the valid keys in `rope_scaling` and `rope_parameters` that are not parameters of a scheme."""
        beta = frozenset({"llama_4_scaling_beta"}) if self.query_beta else frozenset()
        return beta | (frozenset() if self.axes is None else self.axes.other_keys)

    def axes_of(self, c: Reader, rope_keys: dict[str, ConfigValue], rotary_dim: int) -> Axes | None:
        """Return the axis of each pair, or None if tokens have one position or the caller passed `text_only`."""
        if self.axes is None or c.text_only:
            return None
        axes, where = self.axes.read(c, rope_keys, rotary_dim // 2, self.name_and_source(c))
        c.record_origin("axes", where)
        return axes

    def axis_names(self, ropes: Mapping[str, Rope | None]) -> tuple[str, ...]:
        """Return the names of the axes of the positions; () if tokens have one position."""
        counts = [rope.axes.count for rope in ropes.values() if rope is not None and rope.axes is not None]
        return self.axes.names[-max(counts) :] if self.axes is not None and counts else ()

    def kinds_of_layers(self, c: Reader) -> list[str]:
        """Return the kind of each layer: a name in `kinds`, or `NO_ROPE`."""
        if callable(self.layers):
            count = self.layers(c)
        else:
            c.origins["layers"] = c.first_present(self.layers)
            count = c.layers(self.layers)
        if self.switch is not None and self._switched_off(c, *self.switch):
            return [NO_ROPE] * count
        if self.null_base and not c.has(inner := "rope_parameters.rope_theta") and c.is_null("rope_theta", inner):
            c.origins["layer_types"] = "rope_theta is null, so nothing rotates"
            return [NO_ROPE] * count
        if self.null_window and c.is_null("sliding_window"):
            effect = "nothing rotates" if self.null_window == NO_ROPE else "every layer rotates"
            c.origins["layer_types"] = f"sliding_window is null, so {effect}"
            return [self.null_window] * count
        if callable(self.pattern):
            return self.pattern(c, count)
        kinds = None
        if self.pattern is not None and self.pattern.overrides_layer_types:
            kinds = self.pattern.kinds(c, count)
        if kinds is None and set(self.kinds) == {ALL}:
            return [ALL] * count
        if kinds is None and (names := c.layer_list("layer_types", count)) is not None:
            kinds = check_kinds(c, "layer_types", names, self.kinds)
        if kinds is None and self.pattern is not None:
            kinds = self.pattern.kinds(c, count)
        if kinds is None:
            raise c.error("layer_types", "must be given, since the layers differ", "none", c.missing_list_fix)
        return kinds

    def _switched_off(self, c: Reader, key: str, rotating: tuple[object, ...], default: object) -> bool:
        """Whether the value of the `switch` is not one of those for which the model rotates."""
        missing = not c.has(key) and not c.is_null(key)
        value = default if missing else c.get(key)
        if value in rotating:
            return False
        reason = f"{key} is {shown(value)}{' in this class by default' if missing else ''}, so nothing rotates"
        c.origins["layer_types"] = reason
        bases = [
            *filter(c.has, sorted(self.base_keys())),
            *(f"{s}.rope_theta" for s in c.sections if c.has(f"{s}.rope_theta")),
        ]
        c.warnings += [f"{base} has no effect: {reason}." for base in bases]
        return True

    @property
    def nested(self) -> bool:
        """Whether `rope_parameters` has objects for kinds of layers: several rotate, or one without a base key."""
        rotating = [kind for kind in self.kinds.values() if kind is not None]
        return len(self.kinds) > 1 and not self.flat and (len(rotating) > 1 or not rotating[0].bases)

    def collect(self, c: Reader, name: str, kind: Kind) -> dict[str, ConfigValue]:
        """Collect the keys that define the rope of a kind of layer, from the top level and from nested objects.

        Args:
            c: the config.
            name: the name of the kind in `kinds`.
            kind: the `Kind` of this name.

        Returns:
            A dict from the names that transformers 5 uses for the keys (`rope_theta`, `rope_type`, ...) to the values.

        Raises:
            RopeError: two keys state different values for one parameter, and which one counts is not known.
        """
        rope_keys: dict[str, ConfigValue] = {}
        if not c.nested and self.sections in ("rope_scaling", "rope_parameters"):  # this key counts at the top level
            c.add(rope_keys, TRAINED, c.get(TRAINED), TRAINED)
        for section in c.sections:
            if section == c.nested:
                sections = [(k.section if k else "") or other for other, k in self.kinds.items() if self.nested]
                c.add_nested(rope_keys, kind.section or name, sections, self.section_keys())
            else:
                c.add_flat(rope_keys, section, scaled=kind.scaled, with_base="rope_theta" in kind.bases)
        places = ((kind.bases, "rope_theta"), (self.partial_keys, "partial_rotary_factor"), ((TRAINED,), TRAINED))
        for names, key in places:
            for config_key in names:
                if self.listed and isinstance(c.get(config_key), list):
                    for i, value in enumerate(c.layer_list(config_key, len(c.layer_kinds)) or []):
                        if c.layer_kinds[i] == name:
                            c.add(rope_keys, key, value, f"{config_key}[{i}]")
                else:
                    c.add(rope_keys, key, c.get(config_key), config_key)
        if not c.strict:  # a class that has no such key at the top level ignores it
            for key, known in (("rope_theta", self.base_keys()), ("partial_rotary_factor", self.partial_keys)):
                if key not in known and key in rope_keys:
                    c.add(rope_keys, key, c.get(key), key)
        if self.more_keys is not None:
            self.more_keys(c, rope_keys)
        return rope_keys

    def base(self, c: Reader, name: str, kind: Kind, rope_keys: dict[str, ConfigValue]) -> float:
        """Return the base of a kind of layer: stated by the config, passed by the caller, or implied by the model.

        Raises:
            RopeError: the base is required but missing, or the passed base contradicts the config.
        """
        entry = rope_keys.get("rope_theta")
        if entry is not None:
            base = c.check_base(entry.where, entry.value)
            c.record_origin("base", entry.origin or entry.where)
            return base
        if c.passed_base is not None:
            c.origins["base"] = "passed by the caller"
            return c.passed_base
        if kind.bases:
            key = kind.bases[0]
        else:
            section = kind.section or (name if len(self.kinds) > 1 and not self.flat else "")
            key = ".".join(filter(None, ("rope_parameters", section, "rope_theta")))
        if c.lost_base:
            from ropewalk.configs.tables.default_bases import DEFAULT_BASES

            model_type = str(c.get("model_type"))
            default = DEFAULT_BASES.get(f"{model_type}.{name}", DEFAULT_BASES.get(model_type, 10_000.0))
            c.record_origin("base", f"the default of {model_type} in transformers, which does not read the stated one")
            c.assume(f"So the base is {default:g}, the default of {model_type} in transformers.")
            return default
        # transformers 5 always writes rope_theta into rope_parameters, so there it was lost. It rejects a base of null.
        if kind.implied_base is None or c.has("rope_parameters") or c.is_null(key):
            fix = f"Add {key}{possible(', or pass ' + argument('base'), 'base')}."
            raise c.error(key, "must be given, since it is the base", "null" if c.is_null(key) else "none", fix)
        c.record_origin("base", f"implied by model_type {self.name_and_source(c)}")
        if "rope_theta" in kind.bases:  # newer configs of this model_type state the base, so the key may have been lost
            c.assume(
                f"the file has no {key}, so the base is {kind.implied_base:g}, as in {c.get('model_type')} before "
                "that key existed. If the model is newer, the key was lost."
            )
        return kind.implied_base

    def shape(
        self, c: Reader, name: str, kind: Kind, rope_keys: dict[str, ConfigValue], scheme: Scaling | None
    ) -> tuple[int, int, int]:
        """Return head_dim, rotary_dim and rotary_offset of a kind of layer, in channels."""
        head_dim = c.per_layer_size(name, "head_dim") or self._head_dim(c, kind)
        if scheme is not None and scheme.whole_head:
            return head_dim, head_dim, 0
        return head_dim, self._rotary_dim(c, rope_keys, head_dim), 0

    def _head_dim(self, c: Reader, kind: Kind) -> int:
        keys = tuple(key for key in (kind.head_dim_key, *self.head_dim_keys) if key)
        key = c.first_present(keys) if keys else ""
        if key and c.has(key):
            c.record_origin("head_dim", key)
            return c.channels(key)
        if not self.head_dim_divides:
            fix = f"Add it: in {c.get('model_type')} it is not hidden_size / num_attention_heads."
            raise c.error(key, "must be given", "none", fix)
        heads = (kind.heads_key, *self.heads) if kind.heads_key else self.heads
        c.record_origin("head_dim", c.quotient(self.hidden, heads))
        fix = f"It is required if {key} is not given." if key else ""
        return c.head_width(self.hidden, heads, "head_dim", fix=fix)

    def _rotary_dim(self, c: Reader, rope_keys: dict[str, ConfigValue], head_dim: int) -> int:
        """Return the number of channels of a head that rotate."""
        entry = rope_keys.get("partial_rotary_factor")
        has_dim_key = bool(self.dim_key) and c.has(self.dim_key)
        if has_dim_key and entry is None:
            c.record_origin("rotary_dim", self.dim_key)
            return c.channels(self.dim_key)
        if entry is None:
            if self.partial in (None, 1.0):
                c.record_origin("rotary_dim", "the whole head")
                return head_dim
            where = f"{self.partial} of the head, implied by model_type {self.name_and_source(c)}"
            c.record_origin("rotary_dim", where)
            return int(head_dim * self.partial)
        value = number(c.source, entry.where, entry.value, above=0.0)
        if value > 1.0 or (value < 1.0 and self.partial is None):
            whole = f"must be 1, since {c.get('model_type')} rotates the whole head"
            must = "must be at most 1" if self.partial is not None else whole
            fix = (
                "It is a fraction of the head." if value > 1.0 else "Remove it: the model's own code does not read it."
            )
            raise c.error(entry.where, must, shown(entry.value), fix)
        if has_dim_key and c.channels(self.dim_key) != int(head_dim * value):
            channels = c.channels(self.dim_key)
            if c.strict:
                must = f"must agree with {self.dim_key}={channels} of head_dim={head_dim}"
                raise c.error(entry.where, must, shown(entry.value), "Remove the wrong one.")
            c.warn_of_unread({self.dim_key: channels}, f"{entry.where} ({shown(entry.value)})")
        c.record_origin("rotary_dim", f"{entry.where} · head_dim")
        return int(head_dim * value)

    def extra_ropes(self, c: Reader, name: str, rope: Rope) -> dict[str, Rope]:
        """Return the ropes, by name, that a kind of layer has in addition to the rope of q and k."""
        return {}

    def softmax_factor(self, c: Reader, schemes: list[Scaling]) -> float:
        """Return the factor that multiplies the softmax scale of the attention, dimensionless."""
        return 1.0

    def read_query_scale(self, c: Reader) -> QueryScale | HeadQueryScale | None:
        """Return the factor by which the model multiplies q in addition to the rotation, or None if there is none."""
        if self.query_scale is not None:
            return self.query_scale(c)
        entry = c.section_value("llama_4_scaling_beta") if self.query_beta else None
        if entry is None:
            return None
        section, beta = entry
        where = f"{section}.llama_4_scaling_beta"
        c.origins["query_scale"] = where
        length = c.sections[section].get(TRAINED)
        return QueryScale(
            beta=number(c.source, where, beta, at_least=0.0),
            original_max_position_embeddings=checked_length(c.source, f"{section}.{TRAINED}", length),
        )

    # for to_hf_config

    def base_keys(self) -> set[str]:
        """Return the top-level keys of bases, which `to_hf_config` replaces."""
        return {base for kind in self.kinds.values() if kind is not None for base in kind.bases}

    def needs_fraction(self, config: Mapping[str, object]) -> bool:
        """Whether a written config must state the fraction of the head that rotates."""
        return self.partial is not None and not (self.dim_key and config.get(self.dim_key) is not None)

    def keys(self) -> set[str]:
        """Return the keys about rotation that are valid for this model_type, even if a config does not need them."""
        own = {kind.head_dim_key for kind in self.kinds.values() if kind is not None}
        own |= {self.dim_key, *self.head_dim_keys, *self.partial_keys, *self.fixed}
        pattern = set() if self.pattern is None or callable(self.pattern) else self.pattern.keys()
        return (self.base_keys() | own | pattern) - {""}
