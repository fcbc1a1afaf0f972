"""One config of Hugging Face being read: the verbs that models need. Each notes where its value came from.

`Fields` notes every key that is handed out, so that a key about rotation which nothing read is found without a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from ropewalk._checks import RopeError, check_pairing, number, short, shown, within
from ropewalk._checks import length as checked_length
from ropewalk.configs import hf_scheme
from ropewalk.configs.fields import Fields, Given
from ropewalk.rope import Pairing, Rope
from ropewalk.schemes import ALIASES, Scaling

SECTIONS = ("rope_scaling", "rope_parameters")
TRAINED = "original_max_position_embeddings"
MARK = "ropewalk_pairing"
"""What `ropewalk convert` writes where the rows of q and k are in another pairing than the model's own code has."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


class Reader:
    """One config being read, what was passed to `from_config`, and what there is to say about it.

    Attributes:
        fields: the config.
        origins: name of a value → where it came from.
        warnings: what a reader should know.
        longest: max_position_embeddings or its like, in tokens, or None.
        sections: `rope_scaling` and `rope_parameters`, as far as they are given.
    """

    def __init__(
        self, fields: Fields, *, pairing: str | None = None, base: float | None = None, text_only: bool = False
    ) -> None:
        if pairing is not None:
            check_pairing("from_config", pairing)
        self.fields = fields
        self.passed_pairing = pairing
        self.passed_base = None if base is None else number("from_config", "base", base, above=1.0)
        self.text_only = text_only
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []
        self._scaled = False
        self.longest = self._longest()
        self.sections = {name: self.section(name) for name in SECTIONS if fields.get(name) is not None}
        self.nested = any(isinstance(v, Mapping) for v in self.sections.get("rope_parameters", {}).values())

    def _longest(self) -> int | None:
        key = self.fields.first(_LENGTHS)
        return checked_length(self.fields.source, key, self.fields.get(key)) if self.fields.has(key) else None

    def section(self, name: str) -> Mapping[str, Any]:
        """An object of rope parameters."""
        values = self.fields.get(name)
        if not isinstance(values, Mapping):
            raise self.fields.error(name, "it must be an object or null", shown(values), "Write null for no scaling.")
        return values

    def note(self, name: str, where: str) -> None:
        """Say where a value came from, beside where other kinds of layers have it from."""
        before = self.origins.get(name)
        known = before is not None and where in before.split(" and ")
        self.origins[name] = where if before is None else before if known else f"{before} and {where}"

    # pairing

    def pairing(self, implied: str, source: str | None) -> Pairing:
        """The pairing that the architecture implies, unless what is passed or stated contradicts it.

        Args:
            implied: "half" or "interleaved".
            source: where that can be seen; None where the caller passed the pairing.
        """
        # SmolLM2's files have the first, which no engine reads; where the second decides, it has been read.
        for key in ("rope_interleaved", "rope_interleave"):
            said = None if key in self.fields.read else self.fields.get(key)
            if said is not None and said is not (implied == "interleaved"):
                must = f"it must agree with the pairing {implied!r}{'' if source is None else f' ({source})'}"
                cure = f"If the model's own code does not read it, pass ignore=({self.fields.path + key!r},)."
                raise self.fields.error(key, must, shown(said), cure)
        model_type = self.fields.get("model_type")
        if self.fields.has(MARK):
            implied, source = check_pairing(self.fields.source, self.fields.get(MARK)), f"{MARK}, by ropewalk convert"
        if self.passed_pairing not in (None, implied):
            raise self.fields.error(
                "model_type",
                f"{model_type} has pairing {implied!r} ({source})",
                f"pairing={self.passed_pairing!r}",
                "For weights permuted to another pairing, use dataclasses.replace(rope, pairing=...).",
            )
        self.origins["pairing"] = "passed by the caller" if source is None else f"model_type {model_type} ({source})"
        return cast(Pairing, implied)

    # what the keys say about a kind of layer

    def is_without(self, section: str) -> bool:
        """Whether nested `rope_parameters` say null of a kind of layer: it does not rotate."""
        parameters = self.sections.get("rope_parameters", {})
        return self.nested and section in parameters and parameters[section] is None

    def add(self, given: dict[str, Given], key: str, value: Any, where: str) -> None:
        """Add what stands under a key; the same thing said twice must agree."""
        if value is None:
            return
        key = "rope_type" if key == "type" else key
        if key == "rope_type" and isinstance(value, str):
            value = ALIASES.get(value, value)
        if isinstance(value, Mapping):
            raise self.not_flat(where)
        before = given.get(key)
        if before is None:
            given[key] = Given(value, where)
        elif before.value != value:
            must = f"it must agree with {before.where}, which is {shown(before.value)}"
            cure = f"Which one is the model's? ignore=({self.fields.path + where!r},) passes over this one."
            raise self.fields.error(where, must, shown(value), cure)

    def not_flat(self, where: str) -> RopeError:
        """The error that a parameter is an object."""
        return self.fields.error(
            where,
            "the parameters must be flat for this model_type",
            "an object",
            "Only architectures whose layers differ have one for each layer type.",
        )

    def add_flat(self, given: dict[str, Given], section: str, *, scaled: bool, based: bool) -> None:
        """Add what a section says.

        Args:
            given: what is known so far.
            section: its name.
            scaled: whether its scaling is meant for these layers.
            based: whether its base is, where its scaling is not.
        """
        for key, value in self.sections[section].items():
            where = f"{section}.{short(key)}"
            if scaled or (key == "rope_theta" and based) or key == "partial_rotary_factor":
                self.add(given, str(key), value, where)
            elif isinstance(value, Mapping):
                raise self.not_flat(where)

    def add_nested(self, given: dict[str, Given], name: str, names: Iterable[str]) -> None:
        """Add what the part of `rope_parameters` called `name` says; `names` are those of all parts."""
        names = list(dict.fromkeys(names))
        values = self.sections["rope_parameters"]
        for key, value in values.items():
            if isinstance(value, Mapping) and key not in names:
                where, must = f"rope_parameters.{short(key)}", f"the layer types must be among {', '.join(names)}"
                raise self.fields.error(where, must, shown(key), "Is it a layer type of another model?")
        mine = values.get(name)
        if mine is not None and not isinstance(mine, Mapping):
            must, cure = "it must be an object or null", "Write null for layers that do not rotate."
            raise self.fields.error(f"rope_parameters.{name}", must, shown(mine), cure)
        for key, value in (mine or {}).items():
            where = f"rope_parameters.{name}.{short(key)}"
            before = given.get(str(key))
            if key == "partial_rotary_factor" and value is not None and before is not None and before.value != value:
                self.warnings.append(
                    f"{where} is {shown(value)} and decides for these layers; {before.where}, {shown(before.value)}, "
                    "does not."
                )
                del given[str(key)]
            self.add(given, str(key), value, where)
        for key, value in values.items():
            # Some files hold the flat parameters beside the nested ones; then both must agree.
            if key in names or value is None:
                continue
            where = f"rope_parameters.{short(key)}"
            known = str(key) in given
            self.add(given, str(key), value, where)
            if not known and str(key) in given:
                given[str(key)] = Given(value, where, own=False)

    # sizes and numbers

    def own_size(self, name: str, layers: list[str], size: str) -> int | None:
        """`per_layer_config` (written by transformers 5): a size that the layers of kind `name` have of their own."""
        entries = self.fields.get("per_layer_config")
        if entries is None:
            return None
        if not isinstance(entries, Mapping):
            cure = "Its keys are the numbers of layers."
            raise self.fields.error("per_layer_config", "it must be an object", shown(entries), cure)
        sizes = {}
        for key, entry in entries.items():
            index = int(key) if str(key).isdecimal() and len(str(key)) < 8 else len(layers)
            if not isinstance(entry, Mapping) or index >= len(layers):
                where, must = f"per_layer_config.{shown(key)}", "it must be an object under a layer's number"
                raise self.fields.error(where, must, shown(entry), f"There are layers 0 to {len(layers) - 1}.")
            if layers[index] == name and entry.get(size) is not None:
                inner = Fields(entry, f"{self.fields.source}: per_layer_config.{key}")
                sizes[inner.size(size)] = key
        if len(sizes) > 1:
            must, cure = f"layers of kind {name} must have the same {size}", "Not supported yet."
            raise self.fields.error("per_layer_config", must, str(sorted(sizes)), cure)
        if sizes:
            self.note("head_dim", "per_layer_config")
        return next(iter(sizes), None)

    def head_dim(
        self, keys: tuple[str, ...], hidden: tuple[str, ...], heads: tuple[str, ...], *, needed: str = ""
    ) -> int:
        """Channels of a head: the first of `keys` that is given, else hidden / heads.

        Args:
            keys: keys that state it.
            hidden, heads: keys of the width of the model and of its number of heads.
            needed: the model_type, where head_dim is not hidden / heads and so must be given.
        """
        key = self.fields.first(keys) if keys else ""
        if key and self.fields.has(key):
            self.note("head_dim", key)
            return self.fields.size(key)
        if needed:
            cure = f"In {needed} it is not hidden_size / num_attention_heads."
            raise self.fields.error(key, "it must be given", "none", cure)
        cure = f"It is needed where {key} is not given." if key else ""
        self.origins["head_dim"] = f"{self.fields.first(hidden)} / {self.fields.first(heads)}"
        return self.fields.head_width(hidden, heads, "head_dim", cure=cure)

    def base(self, given: dict[str, Given], implied: tuple[float, str] | None, *, key: str, newer: bool) -> float:
        """The base that is given or passed, or else implied.

        Args:
            given: what the keys say of this kind of layer.
            implied: the base of a config that states none, and who says so; None where that is an error.
            key: the name of the base in messages.
            newer: whether models of this type state it by now, so that a file without it may have lost it.
        """
        stated = given.get("rope_theta")
        if stated is not None:
            base = self.fields.base(stated.where, stated.value, self.passed_base)
            self.note("base", stated.where)
            return base
        if self.passed_base is not None:
            self.origins["base"] = "passed by the caller"
            return self.passed_base
        # transformers 5 always writes rope_theta into rope_parameters: where there are some without it, it was lost.
        if implied is None or self.fields.has("rope_parameters"):
            cure = f"Add {key}, or pass base=... to from_config."
            raise self.fields.error(key, "the base must be given", "none", cure)
        base, source = implied
        self.note("base", f"implied by model_type {source}")
        if newer:
            self.warnings.append(
                f"the file states no {key}; {base:g} is what model_type {source.split(' (')[0]} meant before that key "
                "existed. If the model is newer, the key was lost."
            )
        return base

    def rotary_dim(
        self, given: dict[str, Given], head_dim: int, *, share: float | None, dim_key: str, source: str
    ) -> int:
        """Channels of a head that rotate.

        Args:
            given: what the keys say of this kind of layer.
            head_dim: channels of a head.
            share: the share of the head where no key says it; None: the whole head, and no share is accepted.
            dim_key: key of the number of channels, or "".
            source: model_type and source of the architecture.
        """
        stated = given.get("partial_rotary_factor")
        by_number = bool(dim_key) and self.fields.has(dim_key)
        if by_number and stated is None:
            self.note("rotary_dim", dim_key)
            return self.fields.size(dim_key)
        if stated is None:
            if share in (None, 1.0):
                self.note("rotary_dim", "the whole head")
                return head_dim
            self.note("rotary_dim", f"{share} of the head, implied by model_type {source}")
            return int(head_dim * share)
        value = number(self.fields.source, stated.where, stated.value, above=0.0)
        if value > 1.0 or (value < 1.0 and share is None):
            whole = f"{source.split(' (')[0]} rotates the whole head"
            must, cure = "it must be at most 1" if share is not None else whole, "Its own code does not read it."
            raise self.fields.error(
                stated.where, must, shown(stated.value), "It is a share of the head." if value > 1.0 else cure
            )
        if by_number and self.fields.size(dim_key) != int(head_dim * value):
            must = f"it must agree with {dim_key}={self.fields.size(dim_key)} of head_dim={head_dim}"
            raise self.fields.error(stated.where, must, shown(stated.value), "Which one is the model's?")
        self.note("rotary_dim", f"{stated.where} · head_dim")
        return int(head_dim * value)

    def scheme(self, given: dict[str, Given], beside: frozenset[str]) -> Scaling | None:
        """The scheme that the keys describe; `beside` are keys of sections that say something else."""
        origins: dict[str, str] = {}
        scheme = hf_scheme.read(self.fields, given, self.longest, origins, self.warnings, beside)
        if scheme is not None and not self._scaled:
            self._scaled = True
            self.origins.pop("scaling", None)  # that of layers without one
        if scheme is not None or not self._scaled:
            for name, where in origins.items():
                self.note(name, where)
        return scheme

    def section_value(self, key: str) -> tuple[str, Any] | None:
        """The first section that gives a key, and its value; None if none does."""
        for section, values in self.sections.items():
            if values.get(key) is not None:
                return section, values[key]
        return None

    def indexer(self, rope: Rope, pairing: str, *, trailing: bool, source: str) -> dict[str, Rope]:
        """The second rope of layers with an indexer (DeepSeek-V3.2), of as many channels as the first.

        Args:
            rope: that of the layer.
            pairing: that of the indexer in the model's own code; `indexer_rope_interleave` decides where it is given.
            trailing: the last of its channels rotate, not the first.
            source: model_type and source of the architecture.
        """
        if not self.fields.has("index_head_dim"):
            return {}
        width = self.fields.size("index_head_dim")
        self.origins["indexer"] = f"index_head_dim and model_type {source}"
        key = "indexer_rope_interleave"
        if self.fields.has(key):
            stated = "interleaved" if self.fields.boolean(key, True) else "half"
            self.origins["indexer"] = f"index_head_dim and {key}"
            if stated != pairing:
                self.warnings.append(
                    f"{key} makes the pairing of the indexer {stated!r}; that of {source} is {pairing!r}."
                )
            pairing = stated
        offset = max(width - rope.rotary_dim, 0) if trailing else 0
        try:
            made = Rope(
                width,
                rope.base,
                cast(Pairing, pairing),
                rotary_dim=rope.rotary_dim,
                rotary_offset=offset,
                scaling=rope.scaling,
            )
        except RopeError as e:
            raise within(f"{self.fields.source}: index_head_dim", e) from None
        return {"indexer": made}
