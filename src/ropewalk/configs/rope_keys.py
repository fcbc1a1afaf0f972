"""The keys of a config that decide rotation: collected for a kind of layer, agreeing, and none left over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk._checks import nearest, short, shown
from ropewalk.configs.architecture import Architecture, Coded, Indices, Kind, NoRopeLayers
from ropewalk.configs.fields import ROPE_WORDS, Fields
from ropewalk.schemes import ALIASES

SECTIONS = ("rope_scaling", "rope_parameters")
SHARED = ("rope_type", "rope_theta", "partial_rotary_factor")
# Sizes of the heads of multi-head latent attention.
LATENT = ("v_head_dim", "qk_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "head_dim")
_TRAINED = "original_max_position_embeddings"

# Parameters of schemes that have no meaning at the top of a config.
_MISPLACED = frozenset(
    {"attention_factor", "beta_fast", "beta_slow", "high_freq_factor", "long_factor", "low_freq_factor", "mscale",
     "mscale_all_dim", "rope_type", "short_factor"}
)  # fmt: skip
# Keys that other keys are misspelt into.
_LIKELY = (*SECTIONS, "rope_theta", "partial_rotary_factor", "head_dim", "max_position_embeddings", _TRAINED)


# Far above any config: each key that is not known is compared with those it may be misspelt from.
_MAX_KEYS = 4096


@dataclass(frozen=True)
class Given:
    """A value and the key it stands under."""

    value: Any
    where: str


class RopeKeys:
    """The rope keys of one config."""

    def __init__(self, fields: Fields, architecture: Architecture) -> None:
        self.fields = fields
        self.architecture = architecture
        self.sections = {name: self._section(name) for name in SECTIONS if fields.get(name) is not None}
        self.nested = any(isinstance(v, Mapping) for v in self.sections.get("rope_parameters", {}).values())
        self._refuse_strays()

    def _section(self, name: str) -> Mapping[str, Any]:
        values = self.fields.get(name)
        if not isinstance(values, Mapping):
            raise self.fields.error(name, "it must be an object or null", shown(values), "Remove or mend it.")
        return values

    def is_without(self, name: str) -> bool:
        """Whether nested `rope_parameters` say null of a kind of layer: it does not rotate."""
        parameters = self.sections.get("rope_parameters", {})
        return self.nested and name in parameters and parameters[name] is None

    def of_kind(self, name: str, kind: Kind, layers: list[str]) -> dict[str, Given]:
        """What is said about a kind of layer; the same thing said twice must agree. `layers`: the kind of each."""
        given: dict[str, Given] = {}
        for base in kind.bases:
            self._add_each(given, "rope_theta", base, name, layers)
        pattern = self.architecture.pattern
        if isinstance(pattern, NoRopeLayers) and pattern.holds_base and isinstance(self.fields.get(pattern.key), list):
            for i, base in enumerate(self.fields.get(pattern.key)):
                self._add(given, "rope_theta", base or None, f"{pattern.key}[{i}]")
        for key in self.architecture.partial_keys:
            self._add_each(given, "partial_rotary_factor", key, name, layers)
        self._add(given, _TRAINED, self.fields.get(_TRAINED), _TRAINED)
        for section, values in self.sections.items():
            if section == "rope_parameters" and self.nested:
                self._add_nested(given, name, values)
            else:
                self._add_flat(given, kind, section, values)
        return given

    def _add_each(self, given: dict[str, Given], key: str, where: str, name: str, layers: list[str]) -> None:
        """What stands under a key: one value, or a list with that of each layer."""
        if not self.architecture.per_layer or not isinstance(self.fields.get(where), list):
            self._add(given, key, self.fields.get(where), where)
            return
        for i, value in enumerate(self.fields.listed(where, len(layers)) or []):
            if layers[i] == name:
                self._add(given, key, value, f"{where}[{i}]")

    def _add_flat(self, given: dict[str, Given], kind: Kind, section: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            where = f"{section}.{short(key)}"
            mine = key == "rope_theta" and "rope_theta" in kind.bases
            if kind.scaled or mine or key == "partial_rotary_factor":
                self._add(given, "rope_type" if key == "type" else str(key), value, where)
            elif isinstance(value, Mapping):
                raise self._not_flat(where)
        if kind.attention_factor is not None and given.get("rope_type", Given("", "")).value == "yarn":
            implied = f"implied by {self.fields.get('model_type')} ({self.architecture.source})"
            given.setdefault("attention_factor", Given(kind.attention_factor, implied))

    def _add_nested(self, given: dict[str, Given], name: str, values: Mapping[str, Any]) -> None:
        kinds = self.architecture.kinds
        names = [(kind.section if kind is not None else "") or other for other, kind in kinds.items()]
        for key, value in values.items():
            if isinstance(value, Mapping) and key not in names:
                raise self.fields.error(
                    f"rope_parameters.{short(key)}",
                    f"the layer types must be among {', '.join(dict.fromkeys(names))}",
                    shown(key),
                    "Mend the name.",
                )
            if not isinstance(value, Mapping) and key not in names and value is not None:
                # Some files hold the flat parameters beside the nested ones; then both must agree.
                self._add(given, "rope_type" if key == "type" else str(key), value, f"rope_parameters.{short(key)}")
        own = kinds[name]
        name = (own.section if own is not None else "") or name
        mine = values.get(name)
        if mine is None:
            return
        if not isinstance(mine, Mapping):
            raise self.fields.error(
                f"rope_parameters.{name}", "it must be an object or null", shown(mine), "Remove or mend it."
            )
        for key, value in mine.items():
            self._add(given, "rope_type" if key == "type" else str(key), value, f"rope_parameters.{name}.{short(key)}")

    def _add(self, given: dict[str, Given], key: str, value: Any, where: str) -> None:
        if value is None:
            return
        if key == "rope_type" and isinstance(value, str):
            value = ALIASES.get(value, value)
        if isinstance(value, Mapping):
            raise self._not_flat(where)
        before = given.get(key)
        if before is None:
            given[key] = Given(value, where)
        elif before.value != value:
            raise self.fields.error(
                where,
                f"it must agree with {before.where}, which is {shown(before.value)}",
                shown(value),
                "Remove the wrong one.",
            )

    def _not_flat(self, where: str) -> Exception:
        return self.fields.error(
            where,
            "the parameters must be flat for this model_type",
            "an object",
            "Only architectures whose layers differ have one for each layer type.",
        )

    def _refuse_strays(self) -> None:
        row = self.architecture
        if not any(row.kinds.values()):
            return  # it rotates nothing, whatever its config says
        kinds = [kind for kind in row.kinds.values() if kind is not None]
        bases = {base for kind in kinds for base in kind.bases}
        mine = {*SECTIONS, *bases, *row.partial_keys, row.dim_key, _TRAINED, *row.idle, *row.head_dim_keys}
        mine |= {"rope_interleaved", "head_dim", "max_position_embeddings"}
        if isinstance(row.pattern, NoRopeLayers):
            mine |= {row.pattern.key, row.pattern.interval_key}
        if isinstance(row.pattern, Indices | Coded):
            mine.add(row.pattern.key)
        mine |= {*row.fixed, row.base_factor_key, row.interleave_key}
        for key, value in row.fixed.items():
            if self.fields.has(key) and self.fields.get(key) != value:
                raise self.fields.error(
                    key, f"it must be {shown(value)}", shown(self.fields.get(key)), "Not supported yet."
                )
        if row.switch is not None:
            mine.add(row.switch[0])
        mine |= {kind.head_dim_key for kind in kinds}
        mine |= {kind.prefix + key for kind in kinds for key in LATENT}
        mine |= {"index_head_dim"}
        if len(self.fields.config) > _MAX_KEYS:
            raise self.fields.error("a config", f"it must have at most {_MAX_KEYS} keys", "more", "Is this a config?")
        for key, value in self.fields.config.items():
            if key in mine or value is None or key in ("layer_types", row.layer_types_key):
                continue
            words = str(key).lower().split("_")
            if (
                ROPE_WORDS.intersection(words)
                or words[0].startswith("rope")
                or key in _MISPLACED
                or nearest(str(key), _LIKELY, likeness=0.8)
            ):
                raise self.fields.error(
                    shown(key),
                    "a key about rotation must be one that this model_type reads",
                    shown(value),
                    f"It would have no effect.{nearest(str(key), sorted(mine - {''}))} Mend or remove it.",
                )
