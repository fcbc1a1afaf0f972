"""`Architecture`: what a model_type of Hugging Face implies about rotation, and the methods that read its config.

`models.py` has one `Architecture` for each model_type, which is called its row. A model that needs other code has a
subclass in `families/`, which overrides some methods. Layers of the same kind, such as "sliding_attention", share a
rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ropewalk._checks import length as checked_length
from ropewalk._checks import number, shown
from ropewalk.configs.axes_rules import TEXT_ONLY, AxesRule
from ropewalk.configs.fields import ConfigValue
from ropewalk.configs.layer_ropes import LayerRopes, QueryScale
from ropewalk.configs.layers import ALL, NO_ROPE, Pattern, read_kinds
from ropewalk.configs.reader import TRAINED, Reader
from ropewalk.rope.axes import Axes
from ropewalk.rope.rope import Rope
from ropewalk.schemes import Scaling


@dataclass(frozen=True)
class Kind:
    """The facts that a model_type implies about one kind of layer that rotates.

    Args:
        bases: top-level keys that state the base. If a config has several of them, their values must be equal.
        implied_base: the base if the config has none of these keys. None means that a missing base is an error.
        scaled: whether the scaling of the model applies to this kind of layer.
        head_dim_key: key of the head size of this kind, which is looked up before `Architecture.head_dim_keys`; "" if
            there is none.
        section: key of this kind in nested `rope_parameters`; "" if the key is the name of the kind.
    """

    bases: tuple[str, ...] = ("rope_theta",)
    implied_base: float | None = None
    scaled: bool = True
    head_dim_key: str = ""
    section: str = ""


@dataclass(frozen=True)
class Architecture:
    """The facts that a model_type implies about rotation, and the methods that read its config.

    Args:
        source: the code from which these facts were taken.
        pairing: "half" or "interleaved".
        head_dim_keys: keys of the head size. The first one with a value is used.
        head_dim_divides: whether the head size is hidden / heads if the config has no key for it. If False, a missing
            key is an error.
        hidden, heads, layers: keys of the width, the number of heads and the number of layers.
        partial_keys: top-level keys of the fraction of the head that rotates.
        partial: the rotated fraction if the config has no key for it. None means that the whole head always rotates.
        dim_key: key of the number of channels that rotate, for models that state it instead of a fraction.
        kinds: maps the name of each kind of layer to a `Kind`, or to None if layers of this kind do not rotate.
        pattern: assigns a kind to each layer if the config has no `layer_types`.
        flat: whether `rope_parameters` is one object for all kinds of layers. If False, it has an object for each kind.
        switch: a key, and its values for which the model rotates. For any other value, no layer rotates.
        null_window: the kind of every layer if `sliding_window` is null; "" if a null has no effect.
        output_order: "half" if the model's code reads interleaved pairs and writes them in half order (DeepSeek-V3).
        query_beta: whether the key `llama_4_scaling_beta` makes the model scale q by its position.
        axes: the rule that assigns the pairs to the axes of the positions (M-RoPE); None if tokens have one position.
        keys_without_effect: maps keys that seem to be about rotation, but have no effect in the model's code, to the
            reason.
        fixed: maps a key to the only supported value, and to a description of what other values mean.
        in_transformers: whether transformers contains the model's code.
    """

    source: str
    pairing: str = "half"
    head_dim_keys: tuple[str, ...] = ("head_dim",)
    head_dim_divides: bool = True
    hidden: tuple[str, ...] = ("hidden_size",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    partial_keys: tuple[str, ...] = ("partial_rotary_factor",)
    partial: float | None = None
    dim_key: str = ""
    kinds: Mapping[str, Kind | None] = field(default_factory=lambda: {ALL: Kind()})
    pattern: Pattern | None = None
    flat: bool = False
    switch: tuple[str, tuple[object, ...]] | None = None
    null_window: str = ""
    output_order: str | None = None
    query_beta: bool = False
    axes: AxesRule | None = None
    keys_without_effect: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    in_transformers: bool = True

    known = True
    """Whether the model_type is in the table. False for the rows that are built from a passed pairing."""

    is_supported = True
    """Whether `Rope` can describe the model. False for the rows of model_types that ropewalk refuses."""

    rotates_values = False
    """Whether the model also rotates the values, and rotates the attention's output back (DeepSeek-V4)."""

    def name_and_source(self, c: Reader) -> str:
        """Return "model_type (source)" for messages."""
        return f"{c.fields.get('model_type')} ({self.source})"

    def read(self, c: Reader) -> LayerRopes:
        """Read the ropes of all layers from a config.

        Raises:
            RopeError: the config lacks a required value, has an invalid one, or contradicts itself.
        """
        self.check(c)
        pairing = c.pairing(self.pairing_of(c), self.source if self.known else None)
        layers = self.kinds_of_layers(c)
        ropes: dict[str, Rope | None] = {NO_ROPE: None}
        extra_ropes: dict[str, Rope] = {}
        schemes: list[Scaling] = []
        for name in dict.fromkeys(layers):
            kind = self.kinds.get(name)
            if kind is None or c.is_null_kind(kind.section or name):
                ropes[name] = None
                continue
            rope_keys = self.collect(c, name, kind, layers)
            base = self.base(c, name, kind, rope_keys)
            scheme = c.scheme(rope_keys, self.other_keys())
            head_dim, rotary_dim, offset = self.shape(c, name, kind, rope_keys, scheme, layers)
            axes = self.axes_of(c, rope_keys, rotary_dim)
            with c.fields.prefix_errors():
                rope = Rope(
                    head_dim, base, pairing, rotary_dim=rotary_dim, rotary_offset=offset, scaling=scheme, axes=axes
                )
            ropes[name] = rope
            schemes += [] if scheme is None else [scheme]
            extra_ropes.update(self.extra_ropes(c, name, rope))
        c.warnings += [w for s in dict.fromkeys(schemes) for w in s.warnings(c.longest)]
        return LayerRopes(
            layers=tuple(ropes[name] for name in layers),
            model_type=str(c.fields.get("model_type")),
            source=c.fields.source,
            trained_length=self.trained_length(c, schemes),
            max_position_embeddings=c.longest,
            layer_kinds=tuple(layers),
            config=dict(c.fields.config),
            extra_ropes=extra_ropes,
            softmax_factor=self.softmax_factor(c, schemes),
            query_scale=self.query_scale(c),
            rotates_values=self.rotates_values,
            output_order=self.output_order if pairing == "interleaved" else None,
            axis_names=self.axis_names(ropes),
        )

    def check(self, c: Reader) -> None:
        """Raise a RopeError if a key in `fixed` has an unsupported value. Add any warning about several axes."""
        for key, (value, other_meaning) in self.fixed.items():
            if c.fields.has(key) and c.fields.get(key) != value:
                received = shown(c.fields.get(key))
                raise c.fields.error(key, f"must be {shown(value)}", received, f"Not supported yet: {other_meaning}.")
        if self.axes is not None and c.text_only:
            c.warnings.append(TEXT_ONLY)
        elif self.axes is not None and self.axes.warning:
            c.warnings.append(self.axes.warning)

    def other_keys(self) -> frozenset[str]:
        """Return the valid keys in `rope_scaling` and `rope_parameters` that are not parameters of a scheme."""
        beta = frozenset({"llama_4_scaling_beta"}) if self.query_beta else frozenset()
        return beta | (frozenset() if self.axes is None else self.axes.other_keys)

    def axes_of(self, c: Reader, rope_keys: dict[str, ConfigValue], rotary_dim: int) -> Axes | None:
        """Return the axis of each pair, or None if tokens have one position or the caller passed `text_only`."""
        if self.axes is None or c.text_only:
            return None
        axes, where = self.axes.read(c.fields, rope_keys, rotary_dim // 2, self.name_and_source(c))
        c.record_origin("axes", where)
        return axes

    def axis_names(self, ropes: Mapping[str, Rope | None]) -> tuple[str, ...]:
        """Return the names of the axes of the positions; () if tokens have one position."""
        counts = [rope.axes.count for rope in ropes.values() if rope is not None and rope.axes is not None]
        return self.axes.names[-max(counts) :] if self.axes is not None and counts else ()

    def pairing_of(self, c: Reader) -> str:
        """Return the pairing that the architecture implies for this config."""
        return self.pairing

    def number_of_layers(self, c: Reader) -> int:
        """Return the number of layers."""
        c.origins["layers"] = c.fields.first_present(self.layers)
        return c.fields.layers(self.layers)

    def kinds_of_layers(self, c: Reader) -> list[str]:
        """Return the kind of each layer: a name in `kinds`, or `NO_ROPE`."""
        fields, origins, count = c.fields, c.origins, self.number_of_layers(c)
        if self.switch is not None:
            key, values = self.switch
            if fields.get(key) not in values:
                origins["layer_types"] = f"{key} is {shown(fields.get(key))}, so nothing rotates"
                return [NO_ROPE] * count
        if self.null_window and fields.is_null("sliding_window"):
            effect = "nothing rotates" if self.null_window == NO_ROPE else "every layer rotates"
            origins["layer_types"] = f"sliding_window is null, so {effect}"
            return [self.null_window] * count
        if self.pattern is not None and self.pattern.overrides_layer_types:
            kinds = self.pattern.kinds(fields, count, origins)
            if kinds is not None:
                return kinds
        if set(self.kinds) == {ALL}:
            return [ALL] * count
        kinds = read_kinds(fields, "layer_types", self.kinds, count, origins)
        if kinds is None and self.pattern is not None:
            kinds = self.pattern.kinds(fields, count, origins)
        if kinds is None:
            fix = "Add a list with one entry for each layer."
            raise fields.error("layer_types", "must be given, since the layers differ", "none", fix)
        return kinds

    def collect(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, ConfigValue]:
        """Collect the keys that define the rope of a kind of layer, from the top level and from nested objects.

        Args:
            c: the reader of the config.
            name: the name of the kind in `kinds`.
            kind: the `Kind` of this name.
            layers: the name of the kind of each layer of the model.

        Returns:
            A dict from the names that transformers 5 uses for the keys (`rope_theta`, `rope_type`, ...) to the values.

        Raises:
            RopeError: two keys state different values for the same parameter.
        """
        rope_keys: dict[str, ConfigValue] = {}
        for key in kind.bases:
            c.add(rope_keys, "rope_theta", c.fields.get(key), key)
        for key in self.partial_keys:
            c.add(rope_keys, "partial_rotary_factor", c.fields.get(key), key)
        c.add(rope_keys, TRAINED, c.fields.get(TRAINED), TRAINED)
        self.add_sections(c, rope_keys, name, kind)
        return rope_keys

    def add_sections(self, c: Reader, rope_keys: dict[str, ConfigValue], name: str, kind: Kind) -> None:
        """Add the keys of `rope_scaling` and `rope_parameters` that apply to a kind of layer to `rope_keys`."""
        for section in c.sections:
            if section == "rope_parameters" and c.nested:
                sections = [(k.section if k is not None else "") or other for other, k in self.kinds.items()]
                c.add_nested(rope_keys, kind.section or name, sections)
            else:
                c.add_flat(rope_keys, section, scaled=kind.scaled, with_base="rope_theta" in kind.bases)

    def base(self, c: Reader, name: str, kind: Kind, rope_keys: dict[str, ConfigValue]) -> float:
        """Return the base of a kind of layer: stated by the config, passed by the caller, or implied by the model."""
        implied = None if kind.implied_base is None else (kind.implied_base, self.name_and_source(c))
        if kind.bases:
            key = kind.bases[0]
        else:
            section = kind.section or (name if len(self.kinds) > 1 and not self.flat else "")
            key = ".".join(filter(None, ("rope_parameters", section, "rope_theta")))
        return c.base(rope_keys, implied, key=key, newer="rope_theta" in kind.bases)

    def shape(
        self,
        c: Reader,
        name: str,
        kind: Kind,
        rope_keys: dict[str, ConfigValue],
        scheme: Scaling | None,
        layers: list[str],
    ) -> tuple[int, int, int]:
        """Return head_dim, rotary_dim and rotary_offset of a kind of layer, in channels."""
        head_dim = c.per_layer_size(name, layers, "head_dim") or self.head_dim(c, kind)
        if scheme is not None and scheme.whole_head:
            return head_dim, head_dim, 0
        return (
            head_dim,
            c.rotary_dim(
                rope_keys, head_dim, fraction=self.partial, dim_key=self.dim_key, source=self.name_and_source(c)
            ),
            0,
        )

    def head_dim(self, c: Reader, kind: Kind) -> int:
        """Return the number of channels of a head."""
        keys = tuple(key for key in (kind.head_dim_key, *self.head_dim_keys) if key)
        needed = "" if self.head_dim_divides else str(c.fields.get("model_type"))
        return c.head_dim(keys, self.hidden, self.heads, needed=needed)

    def extra_ropes(self, c: Reader, name: str, rope: Rope) -> dict[str, Rope]:
        """Return the ropes, by name, that a kind of layer has in addition to the rope of q and k."""
        return {}

    def trained_length(self, c: Reader, schemes: list[Scaling]) -> int | None:
        """Return the length in tokens that the model was trained on before scaling, or None if it is not known."""
        lengths = [scheme.trained_length(c.longest) for scheme in schemes]
        known = [length for length in lengths if length is not None]
        return c.longest if not lengths else min(known) if len(known) == len(lengths) else None

    def softmax_factor(self, c: Reader, schemes: list[Scaling]) -> float:
        """Return the factor that multiplies the softmax scale of the attention, dimensionless."""
        return 1.0

    def query_scale(self, c: Reader) -> QueryScale | None:
        """Return the factor by which the model multiplies q in addition to the rotation, or None if there is none."""
        entry = c.section_value("llama_4_scaling_beta") if self.query_beta else None
        if entry is None:
            return None
        section, beta = entry
        where = f"{section}.llama_4_scaling_beta"
        c.origins["query_scale"] = where
        length = c.sections[section].get(TRAINED)
        return QueryScale(
            beta=number(c.fields.source, where, beta, at_least=0.0),
            original_max_position_embeddings=checked_length(c.fields.source, f"{section}.{TRAINED}", length),
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
        return (self.base_keys() | own | (set() if self.pattern is None else self.pattern.keys())) - {""}

    def keys_without_ropes(self, version: int) -> dict[str, object]:
        """Return the keys to add to a written config in which no layer rotates."""
        return {}

    def why_unwritable(self, version: int) -> str:
        """Return why the model's code cannot read the schema of transformers `version`, 4 or 5; "" if it can."""
        if not self.in_transformers and version == 5:
            return "Pass version=4: the model's own code reads those keys only."
        return ""
