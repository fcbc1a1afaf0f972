"""Architecture: the facts that a model_type implies about rotation, and the steps that read a config with them.

A model with an exception overrides the one step that differs, in a file of `families/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ropewalk._checks import length as checked_length
from ropewalk._checks import number, shown
from ropewalk.axes import Axes
from ropewalk.configs.axes_rules import TEXT_ONLY, AxesRule
from ropewalk.configs.fields import ConfigValue
from ropewalk.configs.layer_ropes import LayerRopes, QueryScale
from ropewalk.configs.layers import ALL, NO_ROPE, Pattern, read_kinds
from ropewalk.configs.reader import TRAINED, Reader
from ropewalk.rope import Rope
from ropewalk.schemes import Scaling


@dataclass(frozen=True)
class Kind:
    """How the layers of one kind get their rope.

    Args:
        bases: top-level keys that state the base. If several are present, they must agree.
        implied_base: the base of a config that states none. None makes a missing base an error.
        scaled: whether a scaling of the whole model applies to this kind.
        head_dim_key: key of this kind's own head size, which precedes the architecture's keys; "" for none.
        section: name of this kind's part of nested `rope_parameters`. "" means the name of the kind.
    """

    bases: tuple[str, ...] = ("rope_theta",)
    implied_base: float | None = None
    scaled: bool = True
    head_dim_key: str = ""
    section: str = ""


@dataclass(frozen=True)
class Architecture:
    """The row of a model_type: the facts that it implies, and the steps that read its config.

    Args:
        source: the code that shows these facts.
        pairing: "half" or "interleaved".
        head_dim_keys: keys of the head size. The first one with a value is used.
        head_dim_divides: whether the head size is hidden / heads if no key states it. If not, a key is required.
        hidden, heads, layers: keys of the width, the number of heads and the number of layers.
        partial_keys: top-level keys of the share of the head that rotates.
        partial: that share if no key states it. None means that the whole head rotates and no other share is valid.
        dim_key: key of the number of channels that rotate, for models that state it instead of a share.
        kinds: maps the name of each kind of layer to how it gets its rope, or to None if it does not rotate.
        pattern: assigns kinds to layers if the config has no `layer_types`.
        flat: whether `rope_parameters` are flat although the layers differ.
        switch: a key and the values with which the model rotates. With other values nothing rotates.
        null_window: kind of every layer if `sliding_window` is null; "" if a null has no effect.
        output_order: "half" if pairs are read interleaved and written in half order (DeepSeek-V3).
        query_beta: whether q is scaled by position with `llama_4_scaling_beta`.
        axes: how the pairs are assigned to the positions of a token if it has several; None if it has one.
        idle: maps keys that only look like rotation to the reason why they have no effect.
        fixed: maps a key to the only value that this row describes, and to what another value would mean.
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
    idle: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    in_transformers: bool = True

    known = True
    """Whether ropewalk knows the model_type. If not, the caller passed its pairing."""

    describes = True
    """Whether the row reads configs. The row of a refused model_type does not."""

    rotates_values = False
    """Whether the values are rotated like the keys and the output is rotated back (DeepSeek-V4)."""

    def name_and_source(self, c: Reader) -> str:
        """Return "model_type (source)" for messages."""
        return f"{c.fields.get('model_type')} ({self.source})"

    def read(self, c: Reader) -> LayerRopes:
        """Return the ropes of a config.

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
            if kind is None or c.is_without(kind.section or name):
                ropes[name] = None
                continue
            collected = self.collect(c, name, kind, layers)
            base = self.base(c, name, kind, collected)
            scheme = c.scheme(collected, self.other_keys())
            head_dim, rotary_dim, offset = self.shape(c, name, kind, collected, scheme, layers)
            axes = self.axes_of(c, collected, rotary_dim)
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
        """Raise a RopeError if the config asks for a variant that this row does not describe."""
        for key, (value, otherwise) in self.fixed.items():
            if c.fields.has(key) and c.fields.get(key) != value:
                stated = shown(c.fields.get(key))
                raise c.fields.error(key, f"must be {shown(value)}", stated, f"Not supported yet: {otherwise}.")
        if self.axes is not None and c.text_only:
            c.warnings.append(TEXT_ONLY)
        elif self.axes is not None and self.axes.warning:
            c.warnings.append(self.axes.warning)

    def other_keys(self) -> frozenset[str]:
        """Return the keys of the sections that are not parameters of the scheme."""
        beta = frozenset({"llama_4_scaling_beta"}) if self.query_beta else frozenset()
        return beta | (frozenset() if self.axes is None else self.axes.other_keys)

    def axes_of(self, c: Reader, collected: dict[str, ConfigValue], rotary_dim: int) -> Axes | None:
        """Return the axes of a kind of layer, or None if tokens have one position."""
        if self.axes is None or c.text_only:
            return None
        axes, where = self.axes.read(c.fields, collected, rotary_dim // 2, self.name_and_source(c))
        c.note("axes", where)
        return axes

    def axis_names(self, ropes: Mapping[str, Rope | None]) -> tuple[str, ...]:
        """Return the names of the rows of positions; () if tokens have one position."""
        counts = [rope.axes.count for rope in ropes.values() if rope is not None and rope.axes is not None]
        return self.axes.names[-max(counts) :] if self.axes is not None and counts else ()

    def pairing_of(self, c: Reader) -> str:
        """Return the pairing that the architecture implies for this config."""
        return self.pairing

    def count(self, c: Reader) -> int:
        """Return the number of layers."""
        c.origins["layers"] = c.fields.first(self.layers)
        return c.fields.layers(self.layers)

    def kinds_of_layers(self, c: Reader) -> list[str]:
        """Return the kind of each layer: a name in `kinds`, or `NO_ROPE`."""
        fields, origins, count = c.fields, c.origins, self.count(c)
        if self.switch is not None:
            key, values = self.switch
            if fields.get(key) not in values:
                origins["layer_types"] = f"{key} is {shown(fields.get(key))}, so nothing rotates"
                return [NO_ROPE] * count
        if self.null_window and fields.is_null("sliding_window"):
            effect = "nothing rotates" if self.null_window == NO_ROPE else "every layer rotates"
            origins["layer_types"] = f"sliding_window is null, so {effect}"
            return [self.null_window] * count
        if self.pattern is not None and self.pattern.decides:
            decided = self.pattern.kinds(fields, count, origins)
            if decided is not None:
                return decided
        if set(self.kinds) == {ALL}:
            return [ALL] * count
        stated = read_kinds(fields, "layer_types", self.kinds, count, origins)
        if stated is None and self.pattern is not None:
            stated = self.pattern.kinds(fields, count, origins)
        if stated is None:
            cure = "Add a list with one entry for each layer."
            raise fields.error("layer_types", "must be given, since the layers differ", "none", cure)
        return stated

    def collect(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, ConfigValue]:
        """Return the rope keys of a kind of layer. Keys for the same value must agree.

        Args:
            c: the reader.
            name, kind: the kind of layer.
            layers: the kind of each layer of the model.
        """
        collected: dict[str, ConfigValue] = {}
        for key in kind.bases:
            c.add(collected, "rope_theta", c.fields.get(key), key)
        for key in self.partial_keys:
            c.add(collected, "partial_rotary_factor", c.fields.get(key), key)
        c.add(collected, TRAINED, c.fields.get(TRAINED), TRAINED)
        self.add_sections(c, collected, name, kind)
        return collected

    def add_sections(self, c: Reader, collected: dict[str, ConfigValue], name: str, kind: Kind) -> None:
        """Add the keys of `rope_scaling` and `rope_parameters` for a kind of layer."""
        for section in c.sections:
            if section == "rope_parameters" and c.nested:
                sections = [(k.section if k is not None else "") or other for other, k in self.kinds.items()]
                c.add_nested(collected, kind.section or name, sections)
            else:
                c.add_flat(collected, section, scaled=kind.scaled, based="rope_theta" in kind.bases)

    def base(self, c: Reader, name: str, kind: Kind, collected: dict[str, ConfigValue]) -> float:
        """Return the base of a kind of layer."""
        implied = None if kind.implied_base is None else (kind.implied_base, self.name_and_source(c))
        if kind.bases:
            key = kind.bases[0]
        else:
            section = kind.section or (name if len(self.kinds) > 1 and not self.flat else "")
            key = ".".join(filter(None, ("rope_parameters", section, "rope_theta")))
        return c.base(collected, implied, key=key, newer="rope_theta" in kind.bases)

    def shape(
        self,
        c: Reader,
        name: str,
        kind: Kind,
        collected: dict[str, ConfigValue],
        scheme: Scaling | None,
        layers: list[str],
    ) -> tuple[int, int, int]:
        """Return head_dim, rotary_dim and rotary_offset of a kind of layer, in channels."""
        head_dim = c.own_size(name, layers, "head_dim") or self.head_dim(c, kind)
        if scheme is not None and scheme.whole_head:
            return head_dim, head_dim, 0
        return (
            head_dim,
            c.rotary_dim(collected, head_dim, share=self.partial, dim_key=self.dim_key, source=self.name_and_source(c)),
            0,
        )

    def head_dim(self, c: Reader, kind: Kind) -> int:
        """Return the number of channels of a head."""
        keys = tuple(key for key in (kind.head_dim_key, *self.head_dim_keys) if key)
        needed = "" if self.head_dim_divides else str(c.fields.get("model_type"))
        return c.head_dim(keys, self.hidden, self.heads, needed=needed)

    def extra_ropes(self, c: Reader, name: str, rope: Rope) -> dict[str, Rope]:
        """Return further ropes of a kind of layer, by name."""
        return {}

    def trained_length(self, c: Reader, schemes: list[Scaling]) -> int | None:
        """Return the length in tokens that the model was trained on before scaling, or None if it is not known."""
        lengths = [scheme.trained_length(c.longest) for scheme in schemes]
        stated = [length for length in lengths if length is not None]
        return c.longest if not lengths else min(stated) if len(stated) == len(lengths) else None

    def softmax_factor(self, c: Reader, schemes: list[Scaling]) -> float:
        """Return the factor of the softmax scale of the attention, dimensionless."""
        return 1.0

    def query_scale(self, c: Reader) -> QueryScale | None:
        """Return the factor that multiplies q in addition to the rotation, or None."""
        found = c.section_value("llama_4_scaling_beta") if self.query_beta else None
        if found is None:
            return None
        section, beta = found
        where = f"{section}.llama_4_scaling_beta"
        c.origins["query_scale"] = where
        length = c.sections[section].get(TRAINED)
        return QueryScale(
            beta=number(c.fields.source, where, beta, at_least=0.0),
            original_max_position_embeddings=checked_length(c.fields.source, f"{section}.{TRAINED}", length),
        )

    # writing

    def base_keys(self) -> set[str]:
        """Return the top-level keys of bases, which a writer replaces."""
        return {base for kind in self.kinds.values() if kind is not None for base in kind.bases}

    def needs_share(self, config: Mapping[str, object]) -> bool:
        """Whether a written config must state the share of the head that rotates."""
        return self.partial is not None and not (self.dim_key and config.get(self.dim_key) is not None)

    def keys(self) -> set[str]:
        """Return the keys about rotation that this row may read, even if no layer of a config needs them."""
        own = {kind.head_dim_key for kind in self.kinds.values() if kind is not None}
        own |= {self.dim_key, *self.head_dim_keys, *self.partial_keys, *self.fixed}
        return (self.base_keys() | own | (set() if self.pattern is None else self.pattern.keys())) - {""}

    def without_ropes(self, version: int) -> dict[str, object]:
        """Return what a written config needs if nothing rotates."""
        return {}

    def unwritable(self, version: int) -> str:
        """Return why the model's code could not read a config in the schema of this version; "" if it can."""
        if not self.in_transformers and version == 5:
            return "Pass version=4: the model's own code reads those keys only."
        return ""
