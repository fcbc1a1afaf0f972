"""`Reader`: the methods with which an `Architecture` reads one Hugging Face config.

Each method records which key its value came from. `Fields` records every key that is requested, so that
`unread_keys.py` can find keys about rotation that nothing requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from ropewalk._checks import RopeError, argument, check_pairing, number, short_key, shown
from ropewalk._checks import length as checked_length
from ropewalk.configs import hf_scheme
from ropewalk.configs.fields import ConfigValue, Fields
from ropewalk.configs.layer_ropes import Assumed
from ropewalk.rope.rope import Pairing
from ropewalk.schemes import ALIASES, Scaling

SECTIONS = ("rope_scaling", "rope_parameters")
"""Keys of the objects with rope parameters: of transformers 4 and of transformers 5."""
TRAINED = "original_max_position_embeddings"
PAIRING_KEY = "ropewalk_pairing"
"""Key that `ropewalk convert` writes if the converted weights have another pairing than the model's code expects."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


class Reader:
    """A config, the arguments with which `from_config` reads it, and the origins and warnings collected on the way.

    Attributes:
        fields: the config.
        origins: maps the name of a value, such as "base", to the key that it came from.
        warnings: sentences for the user.
        longest: the value of max_position_embeddings or of an equivalent key, in tokens, or None.
        sections: the objects `rope_scaling` and `rope_parameters`, by name, if the config has them.
        nested: whether `rope_parameters` contains an object for each kind of layer, such as "sliding_attention".
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
        key = self.fields.first_present(_LENGTHS)
        return checked_length(self.fields.source, key, self.fields.get(key)) if self.fields.has(key) else None

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the value of a key, which must be an object with rope parameters."""
        values = self.fields.get(name)
        if not isinstance(values, Mapping):
            raise self.fields.error(name, "must be an object or null", shown(values), "Write null for no scaling.")
        return values

    def record_origin(self, name: str, where: str) -> None:
        """Record the key that a value came from. If layers read the value from different keys, "and" joins the keys."""
        previous = self.origins.get(name)
        known = previous is not None and where in previous.split(" and ")
        self.origins[name] = where if previous is None else previous if known else f"{previous} and {where}"

    # pairing

    def pairing(self, implied: str, source: str | None) -> Pairing:
        """Return the pairing of the weights: `implied`, unless `ropewalk convert` has written another into the config.

        Args:
            implied: the pairing of the architecture, "half" or "interleaved".
            source: the code from which `implied` was taken, or None if the caller passed it.

        Raises:
            RopeError: the config or the caller contradicts the pairing.
        """
        # No engine reads rope_interleaved, which is in SmolLM2's files. Rows that use rope_interleave read it earlier.
        for key in ("rope_interleaved", "rope_interleave"):
            flag = None if key in self.fields.read_keys else self.fields.get(key)
            if flag is not None and flag is not (implied == "interleaved"):
                must = f"must agree with the pairing {implied!r}{'' if source is None else f' ({source})'}"
                fix = f"If the model's own code does not read it, pass {argument('ignore', (self.fields.path + key,))}."
                raise self.fields.unread(key, must, shown(flag), fix)
        model_type = self.fields.get("model_type")
        if self.fields.has(PAIRING_KEY):
            implied, source = (
                check_pairing(self.fields.source, self.fields.get(PAIRING_KEY)),
                f"{PAIRING_KEY}, from ropewalk convert",
            )
        if self.passed_pairing not in (None, implied):
            raise self.fields.error(
                "model_type",
                f"{model_type} requires the pairing {implied!r} ({source})",
                f"pairing={self.passed_pairing!r}",
                "For weights permuted to another pairing, use dataclasses.replace(rope, pairing=...).",
            )
        self.origins["pairing"] = "passed by the caller" if source is None else f"model_type {model_type} ({source})"
        return cast(Pairing, implied)

    # collecting the rope keys of a kind of layer

    def is_null_kind(self, section: str) -> bool:
        """Whether nested `rope_parameters` have null for a kind of layer, which then does not rotate."""
        parameters = self.sections.get("rope_parameters", {})
        return self.nested and section in parameters and parameters[section] is None

    def add(self, rope_keys: dict[str, ConfigValue], key: str, value: Any, where: str) -> None:
        """Add a value to the collected rope keys, unless it is None.

        Args:
            rope_keys: the keys collected so far, which this method extends.
            key: the name of the key in transformers 4 or 5.
            value: its value.
            where: the path of the key in the config, such as "rope_scaling.factor", for messages.

        Raises:
            RopeError: the key already has a different value, or the value is an object.
        """
        if value is None:
            return
        key = "rope_type" if key == "type" else key
        if key == "rope_type" and isinstance(value, str):
            value = ALIASES.get(value, value)
        if isinstance(value, Mapping):
            raise self.nested_error(where)
        previous = rope_keys.get(key)
        if previous is None:
            rope_keys[key] = ConfigValue(value, where)
        elif previous.value != value:
            must = f"must agree with {previous.where}, which is {shown(previous.value)}"
            fix = f"Remove the wrong one. To ignore this one, pass {argument('ignore', (self.fields.path + where,))}."
            raise self.fields.error(where, must, shown(value), fix)

    def nested_error(self, where: str) -> RopeError:
        """Return the error for a rope parameter that is an object, although the layers of this model_type are alike."""
        fix = "Only architectures whose layers differ have an object for each layer type."
        return self.fields.error(where, "must not be an object for this model_type", "an object", fix)

    def add_flat(self, rope_keys: dict[str, ConfigValue], section: str, *, scaled: bool, with_base: bool) -> None:
        """Add the keys of `rope_scaling`, or of flat (not nested) `rope_parameters`.

        Args:
            rope_keys: the keys collected so far, which this method extends.
            section: "rope_scaling" or "rope_parameters".
            scaled: whether the scaling in this object applies to the kind of layer that is being read.
            with_base: whether the base in this object applies to that kind of layer even if the scaling does not.
        """
        for key, value in self.sections[section].items():
            where = f"{section}.{short_key(key)}"
            if scaled or (key == "rope_theta" and with_base) or key == "partial_rotary_factor":
                self.add(rope_keys, str(key), value, where)
            elif isinstance(value, Mapping):
                raise self.nested_error(where)

    def add_nested(self, rope_keys: dict[str, ConfigValue], name: str, names: Iterable[str]) -> None:
        """Add the keys that nested `rope_parameters` have for one kind of layer.

        Args:
            rope_keys: the keys collected so far, which this method extends.
            name: the key of this kind in `rope_parameters`.
            names: the keys of all kinds of layers of the model.
        """
        names = list(dict.fromkeys(names))
        values = self.sections["rope_parameters"]
        for key, value in values.items():
            if isinstance(value, Mapping) and key not in names:
                must = f"must be a layer type of this model ({', '.join(names)})"
                raise self.fields.error(f"rope_parameters.{short_key(key)}", must, shown(key), "Rename or remove it.")
        own = values.get(name)
        if own is not None and not isinstance(own, Mapping):
            must, fix = "must be an object or null", "Write null for layers that do not rotate."
            raise self.fields.error(f"rope_parameters.{name}", must, shown(own), fix)
        for key, value in (own or {}).items():
            where = f"rope_parameters.{name}.{short_key(key)}"
            previous = rope_keys.get(str(key))
            if key == "partial_rotary_factor" and value is not None and previous and previous.value != value:
                self.warnings.append(
                    f"{where} is {shown(value)} and overrides {previous.where} ({shown(previous.value)}) here."
                )
                del rope_keys[str(key)]
            self.add(rope_keys, str(key), value, where)
        for key, value in values.items():
            # Some files have flat parameters next to the nested ones. The values of both must be equal.
            if key in names or value is None:
                continue
            where = f"rope_parameters.{short_key(key)}"
            known = str(key) in rope_keys
            self.add(rope_keys, str(key), value, where)
            if not known and str(key) in rope_keys:
                rope_keys[str(key)] = ConfigValue(value, where, own=False)

    # sizes and numbers

    def per_layer_size(self, name: str, layers: list[str], size: str) -> int | None:
        """Return a size that `per_layer_config` (transformers 5) states for the layers of one kind, or None.

        Args:
            name: the kind of layer.
            layers: the kind of each layer of the model.
            size: the key of the size, e.g. "head_dim".
        """
        entries = self.fields.get("per_layer_config")
        if entries is None:
            return None
        if not isinstance(entries, Mapping):
            fix = "Write an object whose keys are layer numbers."
            raise self.fields.error("per_layer_config", "must be an object", shown(entries), fix)
        sizes = {}
        for key, entry in entries.items():
            index = int(key) if str(key).isdecimal() and len(str(key)) < 8 else len(layers)
            if not isinstance(entry, Mapping) or index >= len(layers):
                where, must = f"per_layer_config.{shown(key)}", "must be an object whose key is the number of a layer"
                raise self.fields.error(where, must, shown(entry), f"The layers are 0 to {len(layers) - 1}.")
            if layers[index] == name and entry.get(size) is not None:
                inner = Fields(entry, f"{self.fields.source}: per_layer_config.{key}")
                sizes[inner.channels(size)] = key
        if len(sizes) > 1:
            must = f"must give all layers of kind {name} the same {size}"
            fix = "Different sizes are not supported yet."
            raise self.fields.error("per_layer_config", must, str(sorted(sizes)), fix)
        if sizes:
            self.record_origin("head_dim", "per_layer_config")
        return next(iter(sizes), None)

    def head_dim(
        self, keys: tuple[str, ...], hidden: tuple[str, ...], heads: tuple[str, ...], *, needed: str = ""
    ) -> int:
        """Return the number of channels of a head: the value of one of `keys`, or width / number of heads.

        Args:
            keys: keys of the head size. The first one with a value is used.
            hidden, heads: keys of the width of the model and of its number of heads.
            needed: the model_type, if one of `keys` is required because head_dim is not width / heads; else "".
        """
        key = self.fields.first_present(keys) if keys else ""
        if key and self.fields.has(key):
            self.record_origin("head_dim", key)
            return self.fields.channels(key)
        if needed:
            fix = f"Add it: in {needed} it is not hidden_size / num_attention_heads."
            raise self.fields.error(key, "must be given", "none", fix)
        fix = f"It is required if {key} is not given." if key else ""
        self.origins["head_dim"] = f"{self.fields.first_present(hidden)} / {self.fields.first_present(heads)}"
        return self.fields.head_width(hidden, heads, "head_dim", fix=fix)

    def base(
        self, rope_keys: dict[str, ConfigValue], implied: tuple[float, str] | None, *, key: str, newer: bool
    ) -> float:
        """Return the base that the config states, else the one that the caller passed, else the implied one.

        Args:
            rope_keys: the rope keys of the kind of layer that is being read.
            implied: the base of a config that states none, and the source of this rule; None if the base is required.
            key: the name of the base in messages.
            newer: whether newer configs of this model_type state the base. An implied base then adds a warning, because
                the key may have been lost.

        Raises:
            RopeError: the base is required but missing, or the passed base contradicts the config.
        """
        entry = rope_keys.get("rope_theta")
        if entry is not None:
            base = self.fields.base(entry.where, entry.value, self.passed_base)
            self.record_origin("base", entry.where)
            return base
        if self.passed_base is not None:
            self.origins["base"] = "passed by the caller"
            return self.passed_base
        # transformers 5 always writes rope_theta into rope_parameters. If it is missing there, it was lost.
        if implied is None or self.fields.has("rope_parameters"):
            fix = f"Add {key}, or pass {argument('base')}."
            raise self.fields.error(key, "must be given, since it is the base", "none", fix)
        base, source = implied
        self.record_origin("base", f"implied by model_type {source}")
        if newer:
            self.warnings.append(
                Assumed(
                    f"the file has no {key}, so the base is {base:g}, as in {source.split(' (')[0]} before that key "
                    "existed. If the model is newer, the key was lost."
                )
            )
        return base

    def rotary_dim(
        self, rope_keys: dict[str, ConfigValue], head_dim: int, *, fraction: float | None, dim_key: str, source: str
    ) -> int:
        """Return the number of channels of a head that rotate.

        Args:
            rope_keys: the rope keys of the kind of layer that is being read.
            head_dim: channels of a head.
            fraction: the fraction of the head that rotates if no key states it. None means that the whole head always
                rotates.
            dim_key: key of the number of rotated channels; "" if there is none.
            source: model_type and source of the architecture.
        """
        entry = rope_keys.get("partial_rotary_factor")
        has_dim_key = bool(dim_key) and self.fields.has(dim_key)
        if has_dim_key and entry is None:
            self.record_origin("rotary_dim", dim_key)
            return self.fields.channels(dim_key)
        if entry is None:
            if fraction in (None, 1.0):
                self.record_origin("rotary_dim", "the whole head")
                return head_dim
            self.record_origin("rotary_dim", f"{fraction} of the head, implied by model_type {source}")
            return int(head_dim * fraction)
        value = number(self.fields.source, entry.where, entry.value, above=0.0)
        if value > 1.0 or (value < 1.0 and fraction is None):
            whole = f"must be 1, since {source.split(' (')[0]} rotates the whole head"
            must = "must be at most 1" if fraction is not None else whole
            fix = (
                "It is a fraction of the head." if value > 1.0 else "Remove it: the model's own code does not read it."
            )
            raise self.fields.error(entry.where, must, shown(entry.value), fix)
        if has_dim_key and self.fields.channels(dim_key) != int(head_dim * value):
            must = f"must agree with {dim_key}={self.fields.channels(dim_key)} of head_dim={head_dim}"
            raise self.fields.error(entry.where, must, shown(entry.value), "Remove the wrong one.")
        self.record_origin("rotary_dim", f"{entry.where} · head_dim")
        return int(head_dim * value)

    def scheme(self, rope_keys: dict[str, ConfigValue], other_keys: frozenset[str]) -> Scaling | None:
        """Return the scheme that the collected keys describe, or None for no scaling.

        `other_keys` are keys of `rope_scaling` and `rope_parameters` that are not parameters of a scheme.
        """
        origins: dict[str, str] = {}
        scheme = hf_scheme.read(self.fields, rope_keys, self.longest, origins, self.warnings, other_keys)
        if scheme is not None and not self._scaled:
            self._scaled = True
            self.origins.pop("scaling", None)  # the origin that layers without a scheme recorded
        if scheme is not None or not self._scaled:
            for name, where in origins.items():
                self.record_origin(name, where)
        return scheme

    def section_value(self, key: str) -> tuple[str, Any] | None:
        """Look up a key in `rope_scaling` and `rope_parameters`.

        Return the name of the first of these objects that has the key, and the value; or None if neither has it.
        """
        for section, values in self.sections.items():
            if values.get(key) is not None:
                return section, values[key]
        return None
