"""`Reader`: the methods with which an `Architecture` reads one Hugging Face config.

Each method records which key its value came from. `Fields` records every key that is requested, so that
`unread_keys.py` can find keys about rotation that nothing requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ropewalk._checks import RopeError, argument, short_key, shown
from ropewalk.configs.fields import ConfigValue, Fields
from ropewalk.schemes import ALIASES

SECTIONS = ("rope_scaling", "rope_parameters")
"""Keys of the objects with rope parameters: of transformers 4 and of transformers 5."""
TRAINED = "original_max_position_embeddings"
PAIRING_KEY = "ropewalk_pairing"
"""Key that `ropewalk convert` writes if the converted weights have another pairing than the model's code expects."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


class Reader(Fields):
    """A Hugging Face config, with the arguments of `from_config`.

    Attributes:
        passed_pairing: the argument `pairing` of `from_config`, or None.
        text_only: the argument `text_only` of `from_config`.
        longest: the value of max_position_embeddings or of an equivalent key, in tokens, or None.
        sections: the objects `rope_scaling` and `rope_parameters`, by name, if the config has them.
        nested: whether `rope_parameters` contains an object for each kind of layer, such as "sliding_attention".
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        source: str,
        path: str = "",
        *,
        pairing: str | None = None,
        base: float | None = None,
        text_only: bool = False,
    ) -> None:
        super().__init__(config, source, path, base=base)
        self.passed_pairing = pairing
        self.text_only = text_only
        self.longest = self.length(self.first_present(_LENGTHS))
        self.sections = {name: self.section(name) for name in SECTIONS if self.has(name)}
        self.nested = any(isinstance(v, Mapping) for v in self.sections.get("rope_parameters", {}).values())

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the value of a key, which must be an object with rope parameters."""
        values = self.get(name)
        if not isinstance(values, Mapping):
            raise self.error(name, "must be an object or null", shown(values), "Write null for no scaling.")
        return values

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
            fix = f"Remove the wrong one. To ignore this one, pass {argument('ignore', (self.path + where,))}."
            raise self.error(where, must, shown(value), fix)

    def nested_error(self, where: str) -> RopeError:
        """Return the error for a rope parameter that is an object, although the layers of this model_type are alike."""
        fix = "Only architectures whose layers differ have an object for each layer type."
        return self.error(where, "must not be an object for this model_type", "an object", fix)

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
                raise self.error(f"rope_parameters.{short_key(key)}", must, shown(key), "Rename or remove it.")
        own = values.get(name)
        if own is not None and not isinstance(own, Mapping):
            must, fix = "must be an object or null", "Write null for layers that do not rotate."
            raise self.error(f"rope_parameters.{name}", must, shown(own), fix)
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

    def per_layer_size(self, name: str, layers: list[str], size: str) -> int | None:
        """Return a size that `per_layer_config` (transformers 5) states for the layers of one kind, or None.

        Args:
            name: the kind of layer.
            layers: the kind of each layer of the model.
            size: the key of the size, e.g. "head_dim".
        """
        entries = self.get("per_layer_config")
        if entries is None:
            return None
        if not isinstance(entries, Mapping):
            fix = "Write an object whose keys are layer numbers."
            raise self.error("per_layer_config", "must be an object", shown(entries), fix)
        sizes = {}
        for key, entry in entries.items():
            index = int(key) if str(key).isdecimal() and len(str(key)) < 8 else len(layers)
            if not isinstance(entry, Mapping) or index >= len(layers):
                where, must = f"per_layer_config.{shown(key)}", "must be an object whose key is the number of a layer"
                raise self.error(where, must, shown(entry), f"The layers are 0 to {len(layers) - 1}.")
            if layers[index] == name and entry.get(size) is not None:
                inner = Fields(entry, f"{self.source}: per_layer_config.{key}")
                sizes[inner.channels(size)] = key
        if len(sizes) > 1:
            must = f"must give all layers of kind {name} the same {size}"
            fix = "Different sizes are not supported yet."
            raise self.error("per_layer_config", must, str(sorted(sizes)), fix)
        if sizes:
            self.record_origin("head_dim", "per_layer_config")
        return next(iter(sizes), None)

    def section_value(self, key: str) -> tuple[str, Any] | None:
        """Look up a key in `rope_scaling` and `rope_parameters`.

        Return the name of the first of these objects that has the key, and the value; or None if neither has it.
        """
        for section, values in self.sections.items():
            if values.get(key) is not None:
                return section, values[key]
        return None
