"""What a model_type implies about rotation: a row of plain facts, and how a config is read by them.

A model that is odd in some way overrides the one step in which it is, in a file of `families/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ropewalk._checks import length as checked_length
from ropewalk._checks import number, shown
from ropewalk.axes import Axes
from ropewalk.configs.axes_rules import TEXT_ONLY, AxesRule
from ropewalk.configs.fields import Given
from ropewalk.configs.layer_ropes import LayerRopes, QueryScale
from ropewalk.configs.layers import ALL, NO_ROPE, Pattern, listed
from ropewalk.configs.reader import TRAINED, Reader
from ropewalk.rope import Rope
from ropewalk.schemes import Scaling


@dataclass(frozen=True)
class Kind:
    """How the layers of one kind get their rope.

    Args:
        bases: keys at the top of a config that give the base; where several are given, they must agree.
        implied_base: the base where a config states none; None where that is an error.
        scaled: whether a scaling that is given for the whole model is meant for this kind.
        head_dim_key: key of the size of a head where this kind has one of its own, before the architecture's.
        section: name of its part of nested `rope_parameters`; "" is the name of the kind.
    """

    bases: tuple[str, ...] = ("rope_theta",)
    implied_base: float | None = None
    scaled: bool = True
    head_dim_key: str = ""
    section: str = ""


@dataclass(frozen=True)
class Architecture:
    """What a model_type implies.

    Args:
        source: where this can be seen.
        pairing: "half" or "interleaved".
        head_dim_keys: keys of the size of a head; the first that is given counts.
        head_dim_divides: whether hidden / heads is the size of a head where no key gives it; else that is an error.
        hidden, heads, layers: keys of those sizes.
        partial_keys: keys at the top that give the share of the head that rotates.
        partial: that share where no key gives it; None: the whole head rotates, and no share is accepted.
        dim_key: key of the number of channels that rotate, instead of a share.
        kinds: name of a kind of layer → how it gets its rope; None where it does not rotate.
        pattern: which layer is of which kind where the config has no `layer_types`.
        flat: `rope_parameters` are never nested, though the layers differ.
        switch: a key and the values of which it must have one, or nothing rotates.
        null_window: kind of every layer where `sliding_window` is null; "" where that changes nothing.
        output_order: "half" where pairs are read interleaved and written in half order (DeepSeek-V3).
        query_beta: whether q is scaled by position with `llama_4_scaling_beta`.
        axes: how the pairs are shared out over several positions of a token; None where it has one.
        idle: keys that look like rotation → why they have no effect.
        fixed: a key → the only value with which the row describes the model, and what the model does with another.
        in_transformers: whether transformers has its code.
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
    """Whether the model_type is one that ropewalk knows; its pairing was passed otherwise."""

    describes = True
    """Whether it reads anything at all; a refused model_type does not."""

    rotates_values = False
    """Whether the values are rotated with the keys, and the output back (DeepSeek-V4)."""

    def known_by(self, c: Reader) -> str:
        """model_type and source, for messages."""
        return f"{c.fields.get('model_type')} ({self.source})"

    def read(self, c: Reader) -> LayerRopes:
        """The ropes of a config.

        Raises:
            RopeError: it does not say what it must, or says it twice in different ways.
        """
        self.check(c)
        pairing = c.pairing(self.pairing_of(c), self.source if self.known else None)
        layers = self.kinds_of_layers(c)
        ropes: dict[str, Rope | None] = {NO_ROPE: None}
        others: dict[str, Rope] = {}
        schemes: list[Scaling] = []
        for name in dict.fromkeys(layers):
            kind = self.kinds.get(name)
            if kind is None or c.is_without(kind.section or name):
                ropes[name] = None
                continue
            given = self.given(c, name, kind, layers)
            base = self.base(c, name, kind, given)
            scheme = c.scheme(given, self.beside())
            head_dim, rotary_dim, offset = self.shape(c, name, kind, given, scheme, layers)
            axes = self.axes_of(c, given, rotary_dim)
            with c.fields.named():
                rope = Rope(
                    head_dim, base, pairing, rotary_dim=rotary_dim, rotary_offset=offset, scaling=scheme, axes=axes
                )
            ropes[name] = rope
            schemes += [] if scheme is None else [scheme]
            others.update(self.others(c, name, rope))
        c.warnings += [w for s in dict.fromkeys(schemes) for w in s.warnings(c.longest)]
        return LayerRopes(
            layers=tuple(ropes[name] for name in layers),
            model_type=str(c.fields.get("model_type")),
            source=c.fields.source,
            trained_length=self.trained_length(c, schemes),
            max_position_embeddings=c.longest,
            layer_kinds=tuple(layers),
            config=dict(c.fields.config),
            others=others,
            softmax_factor=self.softmax_factor(c, schemes),
            query_scale=self.query_scale(c),
            rotates_values=self.rotates_values,
            output_order=self.output_order if pairing == "interleaved" else None,
            axis_names=self.axis_names(ropes),
        )

    def check(self, c: Reader) -> None:
        """Raise where the config asks for something else than this row describes."""
        for key, (value, otherwise) in self.fixed.items():
            if c.fields.has(key) and c.fields.get(key) != value:
                stated = shown(c.fields.get(key))
                raise c.fields.error(key, f"it must be {shown(value)}", stated, f"{otherwise}: not supported yet.")
        if self.axes is not None and c.text_only:
            c.warnings.append(TEXT_ONLY)
        elif self.axes is not None and self.axes.warning:
            c.warnings.append(self.axes.warning)

    def beside(self) -> frozenset[str]:
        """Keys of sections that say something else than the scheme."""
        beta = frozenset({"llama_4_scaling_beta"}) if self.query_beta else frozenset()
        return beta | (frozenset() if self.axes is None else self.axes.beside)

    def axes_of(self, c: Reader, given: dict[str, Given], rotary_dim: int) -> Axes | None:
        """Which position each pair of a kind of layer takes, where tokens have several."""
        if self.axes is None or c.text_only:
            return None
        axes, where = self.axes.read(c.fields, given, rotary_dim // 2, self.known_by(c))
        c.note("axes", where)
        return axes

    def axis_names(self, ropes: Mapping[str, Rope | None]) -> tuple[str, ...]:
        """What the rows of positions are; () where tokens have one position."""
        counts = [rope.axes.count for rope in ropes.values() if rope is not None and rope.axes is not None]
        return self.axes.names[-max(counts) :] if self.axes is not None and counts else ()

    def pairing_of(self, c: Reader) -> str:
        """The pairing that the architecture implies for this config."""
        return self.pairing

    def count(self, c: Reader) -> int:
        """The number of layers."""
        c.origins["layers"] = c.fields.first(self.layers)
        return c.fields.layers(self.layers)

    def kinds_of_layers(self, c: Reader) -> list[str]:
        """The kind of each layer: a name of `kinds`, or `NO_ROPE`."""
        fields, origins, count = c.fields, c.origins, self.count(c)
        if self.switch is not None:
            key, values = self.switch
            if fields.get(key) not in values:
                origins["layer_types"] = f"{key} is {shown(fields.get(key))}, so nothing rotates"
                return [NO_ROPE] * count
        if self.null_window and fields.is_null("sliding_window"):
            all_or_none = "nothing rotates" if self.null_window == NO_ROPE else "every layer rotates"
            origins["layer_types"] = f"sliding_window is null, so {all_or_none}"
            return [self.null_window] * count
        if self.pattern is not None and self.pattern.decides:
            decided = self.pattern.kinds(fields, count, origins)
            if decided is not None:
                return decided
        if set(self.kinds) == {ALL}:
            return [ALL] * count
        stated = listed(fields, "layer_types", self.kinds, count, origins)
        if stated is None and self.pattern is not None:
            stated = self.pattern.kinds(fields, count, origins)
        if stated is None:
            cure = "Add a list with one entry a layer."
            raise fields.error("layer_types", "it must be given, since the layers differ", "none", cure)
        return stated

    def given(self, c: Reader, name: str, kind: Kind, layers: list[str]) -> dict[str, Given]:
        """What is said about a kind of layer; the same thing said twice must agree. `layers`: the kind of each."""
        given: dict[str, Given] = {}
        for key in kind.bases:
            c.add(given, "rope_theta", c.fields.get(key), key)
        for key in self.partial_keys:
            c.add(given, "partial_rotary_factor", c.fields.get(key), key)
        c.add(given, TRAINED, c.fields.get(TRAINED), TRAINED)
        self.add_sections(c, given, name, kind)
        return given

    def add_sections(self, c: Reader, given: dict[str, Given], name: str, kind: Kind) -> None:
        """Add what `rope_scaling` and `rope_parameters` say about a kind of layer."""
        for section in c.sections:
            if section == "rope_parameters" and c.nested:
                sections = [(k.section if k is not None else "") or other for other, k in self.kinds.items()]
                c.add_nested(given, kind.section or name, sections)
            else:
                c.add_flat(given, section, scaled=kind.scaled, based="rope_theta" in kind.bases)

    def base(self, c: Reader, name: str, kind: Kind, given: dict[str, Given]) -> float:
        """The base of a kind of layer."""
        implied = None if kind.implied_base is None else (kind.implied_base, self.known_by(c))
        if kind.bases:
            key = kind.bases[0]
        else:
            section = kind.section or (name if len(self.kinds) > 1 and not self.flat else "")
            key = ".".join(filter(None, ("rope_parameters", section, "rope_theta")))
        return c.base(given, implied, key=key, newer="rope_theta" in kind.bases)

    def shape(
        self, c: Reader, name: str, kind: Kind, given: dict[str, Given], scheme: Scaling | None, layers: list[str]
    ) -> tuple[int, int, int]:
        """Channels of a head, how many of them rotate, and how many stand before those."""
        head_dim = c.own_size(name, layers, "head_dim") or self.head_dim(c, kind)
        if scheme is not None and scheme.whole_head:
            return head_dim, head_dim, 0
        return (
            head_dim,
            c.rotary_dim(given, head_dim, share=self.partial, dim_key=self.dim_key, source=self.known_by(c)),
            0,
        )

    def head_dim(self, c: Reader, kind: Kind) -> int:
        """Channels of a head."""
        keys = tuple(key for key in (kind.head_dim_key, *self.head_dim_keys) if key)
        needed = "" if self.head_dim_divides else str(c.fields.get("model_type"))
        return c.head_dim(keys, self.hidden, self.heads, needed=needed)

    def others(self, c: Reader, name: str, rope: Rope) -> dict[str, Rope]:
        """Further ropes of a kind of layer, by name."""
        return {}

    def trained_length(self, c: Reader, schemes: list[Scaling]) -> int | None:
        """Tokens the model was trained on before any scaling; None where a scheme leaves it open."""
        lengths = [scheme.trained_length(c.longest) for scheme in schemes]
        stated = [length for length in lengths if length is not None]
        return c.longest if not lengths else min(stated) if len(stated) == len(lengths) else None

    def softmax_factor(self, c: Reader, schemes: list[Scaling]) -> float:
        """What the softmax scale of the attention is multiplied by."""
        return 1.0

    def query_scale(self, c: Reader) -> QueryScale | None:
        """What q is multiplied with beside the rotation."""
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
        """Keys at the top that say bases, which a writer says anew."""
        return {base for kind in self.kinds.values() if kind is not None for base in kind.bases}

    def says_share(self, config: Mapping[str, object]) -> bool:
        """Whether a written config must say the share of the head that rotates."""
        return self.partial is not None and not (self.dim_key and config.get(self.dim_key) is not None)

    def keys(self) -> set[str]:
        """Keys that look like rotation and that this row may ask for, whether or not some layer needs them."""
        own = {kind.head_dim_key for kind in self.kinds.values() if kind is not None}
        own |= {self.dim_key, *self.head_dim_keys, *self.partial_keys, *self.fixed}
        return (self.base_keys() | own | (set() if self.pattern is None else self.pattern.keys())) - {""}

    def without_ropes(self, version: int) -> dict[str, object]:
        """What a written config needs where nothing rotates."""
        return {}

    def unwritable(self, version: int) -> str:
        """Why nobody could read the ropes from a config in the schema of this version; "" if the model's code can."""
        if not self.in_transformers and version == 5:
            return "Its own code reads the keys of version 4 only."
        return ""
