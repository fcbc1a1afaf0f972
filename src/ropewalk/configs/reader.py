"""`Fields`: a config of any format with typed access to its keys. `Reader`: the same for Hugging Face's format.

Errors name the file and the key. Every key that is requested is recorded, so that `unread_keys.py` can find keys about
rotation that nothing requested. What was found out on the way, origins and warnings, is collected as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ropewalk._checks import (
    MAX_HEAD_DIM,
    Assumed,
    RopeError,
    error,
    integer,
    length,
    number,
    option,
    possible,
    short_key,
    shown,
    with_context,
)
from ropewalk.configs.source import Request
from ropewalk.configs.weights import Weights
from ropewalk.schemes import ALIASES

# The deepest models have about a hundred layers. The bound keeps a corrupt file from exhausting memory.
MAX_LAYERS = 10_000
# Larger than any size in a model. The bound keeps float arithmetic from overflowing.
_MAX_SIZE = 2**53


ROPE_WORDS = frozenset({"rope", "rotary", "theta", "yarn", "ntk"})
"""A key with one of these words concerns rotation. Ignoring such a key silently can break a model."""


SECTIONS = ("rope_scaling", "rope_parameters")
"""Keys of the objects with rope parameters: of transformers 4 and of transformers 5."""
DEFAULT = "rope_parameters of the class"
"""The name in messages of the section that a class has for files without one."""
TRAINED = "original_max_position_embeddings"
PAIRING_KEY = "ropewalk_pairing"
"""Key that `ropewalk convert` writes if the converted weights have another pairing than the model's code expects."""
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


def _name(key: object) -> str:
    """Return the name that transformers 5 gives a key of a section."""
    return "rope_type" if key == "type" else str(key)


def _ordered(section: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the keys and values of a section, and rope_type before type, which counts less."""
    return sorted(section.items(), key=lambda entry: entry[0] == "type")


def _meaning(value: Any) -> Any:
    """Return the value of rope_type, by the name that ropewalk uses, or another value as it is."""
    return ALIASES.get(value, value) if isinstance(value, str) else value


def other_pairing() -> str:
    """Return the fix for a passed pairing that contradicts the config."""
    in_python = " For weights permuted to another pairing, use dataclasses.replace(rope, pairing=...)."
    return f"Omit {option('pairing')}.{possible(in_python)}"


@dataclass(frozen=True)
class ConfigValue:
    """A value in a config, and the key that it was read from.

    Attributes:
        value: the value.
        where: the key with its section, e.g. "rope_scaling.factor".
        own: False if `rope_parameters` has objects for kinds of layers and the key is next to these objects. Such a key
            applies to every kind whose scheme reads it. For the other kinds it has no effect, and is not an error.
        origin: what `.origins` says of a value that was computed from the key; "" for the key itself.
    """

    value: Any
    where: str
    own: bool = True
    origin: str = ""


class Fields:
    """A config with typed access to its keys.

    A null value counts as missing. "a.b" names the key b inside the object a, unless the config has a key "a.b".

    Attributes:
        config: the config.
        source: the name of the config, with which every message begins.
        path: the prefix of this config's keys in `from_config(ignore=...)`, e.g. "text_config."; "" at the top level.
        passed_base: the argument `base` of from_config, or None.
        read_keys: the keys that have been requested so far.
        origins: maps the name of a value, such as "base", to the key that it came from.
        warnings: sentences for the user.
    """

    flag_types: tuple[type, ...] = (int, float)
    flags = "numbers of at least 0"
    """The types of the entries of a list of flags, and what these entries are, for messages."""
    list_fix = "Check that it is the list of this model."
    """The fix for a list that does not fit the layers."""
    further_key = "num_nextn_predict_layers"
    """The key of the number of layers that follow the others and predict further tokens."""
    missing_list_fix = "Add a list with one entry for each layer."

    def __init__(self, config: Mapping[str, Any], source: str, path: str = "", *, base: float | None = None) -> None:
        self.config = config
        self.source = source
        self.path = path
        self.passed_base = base
        self.read_keys: set[str] = set()
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []

    def full(self, key: str) -> str:
        """Return the name of a key as messages and origins state it. GGUF files have a prefix before each name."""
        return key

    def record_origin(self, name: str, where: str) -> None:
        """Record the key that a value came from. If layers read the value from different keys, "and" joins the keys."""
        previous = self.origins.get(name)
        known = previous is not None and where in previous.split(" and ")
        self.origins[name] = where if previous is None else previous if known else f"{previous} and {where}"

    def error(self, key: str, must: str, got: str, fix: str) -> RopeError:
        """Return an error about a key. `must` is the requirement on its value, e.g. "must be an object"."""
        return error(self.source, f"{self.full(key)} {must}", got, fix)

    def unread(self, key: str, must: str, got: str, fix: str) -> RopeError:
        """Return an error about a key that ropewalk does not know for this model, and that the caller may ignore."""
        e = self.error(key, must, got, fix)
        e.unread_key = self.path + key
        return e

    def warn(self, text: str) -> None:
        """Add a sentence to the warnings, unless it is there."""
        if text not in self.warnings:
            self.warnings.append(text)

    def assume(self, text: str) -> None:
        """Add a warning about a value that the config does not state or states twice."""
        self.warn(Assumed(text))

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.get(key) is not None

    def get(self, key: str) -> Any:
        """Return the value of the key, or None if it is missing."""
        return self._look_up(key)[1]

    def is_null(self, *keys: str) -> bool:
        """Whether at least one of the keys is present and null."""
        return any(present and value is None for present, value in map(self._look_up, keys))

    def _look_up(self, key: str) -> tuple[bool, Any]:
        """Return whether the key is present, and its value."""
        if key in self.config or "." not in key:
            self.read_keys.add(key)
            return key in self.config, self.config.get(key)
        section, _, inner = key.rpartition(".")
        self.read_keys.add(section)
        values = self.config.get(section)
        return (inner in values, values.get(inner)) if isinstance(values, Mapping) else (False, None)

    def first_present(self, keys: tuple[str, ...]) -> str:
        """Return the first of the keys that has a value, or the first key if none has."""
        return next((key for key in keys if self.has(key)), keys[0])

    def size(self, keys: str | tuple[str, ...], *, at_most: int | None = None, fix: str = "") -> int:
        """Return the value of the first key that has one, as an integer of at least 1."""
        key = self.first_present((keys,) if isinstance(keys, str) else keys)
        value = integer(self.source, self.full(key), self.get(key), at_least=1, at_most=at_most, fix=fix)
        if value > _MAX_SIZE:
            raise self.error(key, "must be at most 2**53", "more", "Check the number.")
        return value

    def channels(self, key: str) -> int:
        """Return the value of the key as a number of channels of a head.

        Every size of a head is read with this method or with `head_width`, so nothing is built for a larger head than a
        `Rope` may have.
        """
        return self._channels(self.full(key), self.get(key))

    def _channels(self, where: str, value: Any) -> int:
        fix = "It is a number of channels of one head."
        return integer(self.source, where, value, at_least=2, at_most=MAX_HEAD_DIM, fix=fix)

    def head_width(self, widths: tuple[str, ...], heads: tuple[str, ...], own: str, *, fix: str = "") -> int:
        """Return width / number of heads, the head_dim of a config that does not have the key `own`."""
        width, count = self.size(widths, fix=fix), self.size(heads, fix=fix)
        if width % count:
            must = f"must be a multiple of {self.full(self.first_present(heads))}={count} if {own} is not given"
            raise self.error(self.first_present(widths), must, str(width), f"Add {own}.")
        return self._channels(self.quotient(widths, heads), width // count)

    def quotient(self, widths: tuple[str, ...], heads: tuple[str, ...]) -> str:
        """Return "width / heads" with the names of the keys that have a value."""
        return " / ".join(self.full(self.first_present(keys)) for keys in (widths, heads))

    def length(self, key: str) -> int | None:
        """Return the value of the key as a number of tokens, or None if it is missing."""
        return length(self.source, self.full(key), self.get(key)) if self.has(key) else None

    def number(self, key: str, *, above: float | None = None, at_least: float | None = None) -> float | None:
        """Return the value of the key as a finite number within the bounds, or None if it is missing."""
        if not self.has(key):
            return None
        return number(self.source, self.full(key), self.get(key), above=above, at_least=at_least)

    def check_base(self, where: str, value: Any) -> float:
        """Return a base from the config as a number. If the caller passed a base, both must be equal.

        Args:
            where: the key of the base, for messages.
            value: the value of the key.
        """
        base = number(self.source, self.full(where), value, above=1.0)
        if self.passed_base not in (None, base):
            must = f"is {base:g}, and base must agree with it"
            fix = f"Omit {option('base')}{possible(', or use dataclasses.replace(rope, base=...)')}."
            raise self.error(where, must, f"{option('base')}={self.passed_base:g}", fix)
        return base

    @contextmanager
    def prefix_errors(self) -> Iterator[None]:
        """Prefix every RopeError raised in this context with the name of the config."""
        try:
            yield
        except RopeError as e:
            raise e if str(e).startswith(self.source) else with_context(self.source, e) from None

    def boolean(self, key: str, default: bool) -> bool:
        """Return the value of the key, which must be true or false, or `default` if it is missing."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", shown(value), "Write true or false.")
        return value

    def layers(self, keys: tuple[str, ...]) -> int:
        """Return the number of layers, at most MAX_LAYERS."""
        return self.size(keys, at_most=MAX_LAYERS)

    def optional_count(self, key: str, *, at_most: int) -> int:
        """Return the value of the key as a number of layers, or 0 if it is missing."""
        return integer(self.source, key, self.get(key), at_least=0, at_most=at_most) if self.has(key) else 0

    def layer_list(self, key: str, count: int, longer: bool = False) -> list[Any] | None:
        """Return the value of the key as a list with one entry for each of `count` layers, or None if it is missing.

        Entries for the layers that `further_key` counts are dropped, and with `longer`, all that follow.
        """
        value, further = self.get(key), self.get(self.further_key)
        if value is None:
            return None
        extra = len(value) - count if isinstance(value, (list, tuple)) else -1
        if extra == 0 or (extra > 0 and (longer or (type(further) is int and extra == further))):
            return list(value[:count])
        got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else shown(value)
        raise self.error(key, f"must be a list with an entry for each of the {count} layers", got, self.list_fix)


class Reader(Fields):
    """A Hugging Face config, with the arguments of `from_config`.

    Attributes:
        passed_pairing: the argument `pairing` of `from_config`, or None.
        text_only: the argument `text_only` of `from_config`.
        longest: the value of max_position_embeddings or of an equivalent key, in tokens, or None.
        sections: the objects with rope parameters that the model's code reads, by name, the decisive one first.
        strict: whether two values of one parameter are an error. If False, the first one counts, with a warning.
        lost_base: whether the config states a base only where the model's code does not read it.
        stated_twice: the parameters of which the config states a value that the model's code does not read.
        weights: the tensors of the checkpoint, as far as they are known.
        layer_kinds: the kind of each layer, as soon as it is known.
    """

    def __init__(
        self, config: Mapping[str, Any], source: str, path: str, asked: Request, weights: Weights | None = None
    ) -> None:
        super().__init__(config, source, path, base=asked.base)
        self.weights = Weights(None) if weights is None else weights
        self.layer_kinds: list[str] = []
        self.passed_pairing = asked.pairing
        self.text_only = asked.text_only
        self.longest = self.length(self.first_present(LENGTHS))
        self.sections = {name: self.section(name) for name in SECTIONS if self.has(name)}
        self.strict = True
        self.lost_base = False
        self.stated_twice: set[str] = set()

    @property
    def nested(self) -> str:
        """The section that has an object for each kind of layer, such as "sliding_attention"; "" if none has."""
        return next((n for n, s in self.sections.items() if any(isinstance(v, Mapping) for v in s.values())), "")

    def follow_transformers(self, order: str) -> None:
        """Keep the sections that transformers 5 reads by this `Architecture.sections`. The first value counts now."""
        self.strict = False
        self.sections = {name: section for name, section in self.sections.items() if section}
        nested = self.nested == "rope_parameters"
        if order == "rope_parameters" or (order == "nested or rope_scaling" and nested):
            self._drop("rope_scaling", "rope_parameters")
        elif order == "merged" and len(self.sections) > 1 and not nested:
            must, fix = "must have an object for each kind of layer beside rope_scaling", "Remove one of the two."
            raise self.error("rope_parameters", must, "none, which transformers cannot read (KeyError)", fix)
        elif order in ("merged", "nested or rope_scaling") and not nested:
            self._drop("rope_parameters", "its objects for kinds of layers")
        elif order == "rope_scaling" and len(self.sections) > 1:
            self._drop("rope_parameters", "rope_scaling in its place")
        if order in ("merged", "nested or rope_scaling"):
            self._merge()

    def _merge(self) -> None:
        """Take from `rope_scaling` what counts beside `rope_parameters`, whose objects always have a rope_type.

        So `type`, which transformers 4 read too, has no effect, nor have the parameters that belong to it.
        """
        if self.nested == "rope_scaling":
            must, fix = "must be one object for all kinds of layers", "Write objects for kinds into rope_parameters."
            raise self.error("rope_scaling", must, "several objects", fix)
        scaling = self.sections.get("rope_scaling", {})
        if scaling.get("type") is None or scaling.get("rope_type") is not None:
            return
        kinds = [v for v in self.sections.get("rope_parameters", {}).values() if isinstance(v, Mapping)]
        scaled = any(_meaning(kind.get("rope_type", "default")) != "default" for kind in kinds)
        kept = scaling.keys() - {"type"} if scaled else {"rope_theta", "partial_rotary_factor"}
        self.sections["rope_scaling"] = {key: value for key, value in scaling.items() if key in kept}
        self.warn_of_unread({"rope_scaling.type": scaling["type"]}, "rope_type")

    def _drop(self, name: str, read: str) -> None:
        """Drop a section, of which transformers reads only `read`, and warn of what nothing else states."""
        values = self.sections.pop(name, {})
        others = [{_name(k): _meaning(v) for k, v in s.items()} for s in (*self.sections.values(), self.config)]
        lost = {
            f"{name}.{short_key(key)}": value
            for key, value in values.items()
            if value is not None and not any(other.get(_name(key)) == _meaning(value) for other in others)
        }
        self.lost_base = f"{name}.rope_theta" in lost
        self.warn_of_unread(lost, read)

    def warn_of_unread(self, values: Mapping[str, Any], read: str) -> None:
        """Warn of values, by their keys, that have no effect because transformers reads something else."""
        if values:
            self.stated_twice.update(where.rpartition(".")[2].partition("[")[0] for where in values)
            keys = ", ".join(f"{where} ({shown(value)})" for where, value in values.items())
            has, them = ("has", "it") if len(values) == 1 else ("have", "them")
            self.assume(f"{keys} {has} no effect in transformers, which reads {read}. Other programs may read {them}.")

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the value of a key, which must be an object with rope parameters."""
        values = self.get(name)
        if not isinstance(values, Mapping):
            raise self.error(name, "must be an object or null", shown(values), "Write null for no scaling.")
        return values

    def is_null_kind(self, section: str) -> bool:
        """Whether nested parameters have null for a kind of layer, which then does not rotate."""
        return bool(self.nested) and self.sections[self.nested].get(section, "") is None

    def add(self, rope_keys: dict[str, ConfigValue], key: str, value: Any, where: str) -> None:
        """Add a value to the collected rope keys, unless it is None.

        Args:
            rope_keys: the keys collected so far, which this method extends.
            key: the name of the key in transformers 4 or 5.
            value: its value.
            where: the path of the key in the config, such as "rope_scaling.factor", for messages.

        Raises:
            RopeError: the value is an object, or the key has a different value and `strict` is True.
        """
        if value is None:
            return
        key = _name(key)
        if key == "rope_type":
            value = _meaning(value)
        if isinstance(value, Mapping):
            raise self.nested_error(where)
        previous = rope_keys.get(key)
        if previous is None:
            rope_keys[key] = ConfigValue(value, where)
        elif previous.value != value:
            if not self.strict and where.split("[")[0] != previous.where.split("[")[0]:
                self.warn_of_unread({where: value}, f"{previous.where} ({shown(previous.value)})")
                return
            must = f"must agree with {previous.where}, which is {shown(previous.value)}"
            fix = "ropewalk does not know which of them the model's own code reads. Remove the other one."
            if where.split("[")[0] == previous.where.split("[")[0]:
                fix = "Layers of one kind have one rope. Check that it is the list of this model."
            raise self.error(where, must, shown(value), fix)

    def nested_error(self, where: str) -> RopeError:
        """Return the error for a rope parameter that is an object, although this model_type has one rope."""
        must, fix = "must not be an object for this model_type", "All layers have one rope: move its keys out of it."
        return self.error(where, must, "an object", fix)

    def add_flat(self, rope_keys: dict[str, ConfigValue], section: str, *, scaled: bool, with_base: bool) -> None:
        """Add the keys of `rope_scaling`, or of flat (not nested) `rope_parameters`.

        Args:
            rope_keys: the keys collected so far, which this method extends.
            section: "rope_scaling" or "rope_parameters".
            scaled: whether the scaling in this object applies to the kind of layer that is being read.
            with_base: whether the base in this object applies to that kind of layer even if the scaling does not.
        """
        for key, value in _ordered(self.sections[section]):
            where = f"{section}.{short_key(key)}"
            if scaled or (key == "rope_theta" and with_base) or key == "partial_rotary_factor":
                self.add(rope_keys, str(key), value, where)
            elif isinstance(value, Mapping):
                raise self.nested_error(where)

    def add_nested(
        self, rope_keys: dict[str, ConfigValue], name: str, names: Iterable[str], beside: Collection[str]
    ) -> None:
        """Add the keys that a nested section has for one kind of layer.

        Args:
            rope_keys: the keys collected so far, which this method extends.
            name: the key of this kind in the section.
            names: the keys of all kinds of layers of the model; none if they have one rope.
            beside: keys that apply to all kinds of layers if they are beside these objects, and not inside.
        """
        names = list(dict.fromkeys(names))
        section = self.nested
        values = self.sections[section]
        for key, value in values.items():
            if isinstance(value, Mapping) and not names:
                raise self.nested_error(f"{section}.{short_key(key)}")
            if isinstance(value, Mapping) and key not in names:
                must = f"must be a layer type of this model ({', '.join(names)})"
                raise self.error(f"{section}.{short_key(key)}", must, shown(key), "Rename or remove it.")
        own = values.get(name)
        if own is not None and not isinstance(own, Mapping):
            must, fix = "must be an object or null", "Write null for layers that do not rotate."
            raise self.error(f"{section}.{name}", must, shown(own), fix)
        for key, value in _ordered(own or {}):
            self.add(rope_keys, str(key), value, f"{section}.{name}.{short_key(key)}")
        lost = {}
        for key, value in values.items():
            if key in names or value is None:
                continue
            where = f"{section}.{short_key(key)}"
            previous = rope_keys.get(_name(key))
            if self.strict or key in beside:
                self.add(rope_keys, str(key), value, where)
                if previous is None:
                    rope_keys[_name(key)] = ConfigValue(value, where, own=False)
            elif previous is None or previous.value != _meaning(value):
                lost[where] = value
        self.warn_of_unread(lost, f"{section}.{name}")

    def per_layer_size(self, name: str, size: str) -> int | None:
        """Return a size that `per_layer_config` (transformers 5) states for the layers of one kind, or None.

        Args:
            name: the kind of layer.
            size: the key of the size, e.g. "head_dim".
        """
        entries, layers = self.get("per_layer_config"), self.layer_kinds
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
