"""Plan what `accelerate` replaces. The model is not changed before the whole plan has been checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ropewalk._checks import RopeError, error, within
from ropewalk._layout import Pairing
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.read import from_config
from ropewalk.integrations.transformers import compare, own_tables, towers
from ropewalk.integrations.transformers.angles import Angles, RotaryAngles
from ropewalk.integrations.transformers.compare import WHO
from ropewalk.integrations.transformers.dispatch import Place, functions_of, original
from ropewalk.integrations.transformers.probe import Form, Width, probe
from ropewalk.integrations.transformers.tower_angles import TowerAngles
from ropewalk.rope import Rope


@dataclass
class Plan:
    """What `accelerate` replaces.

    `stand_ins` maps the name of a module or table to its module (for a table, its attention) and the replacement.
    """

    stand_ins: dict[str, tuple[nn.Module, Angles]] = field(default_factory=dict)
    forms: dict[Place, Form] = field(default_factory=dict)
    ropes: dict[str, Rope] = field(default_factory=dict)
    left_alone: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def plan(model: nn.Module, *, exact: bool, length: int | None) -> Plan:
    """Compare every rotary module and table of the text model and of vision towers with the config.

    A tower that is not supported is left alone, and listed with the reason.

    Raises:
        RopeError: a module, table or function of the text model does not fit its config, or is not supported.
    """
    result, configs, places = Plan(), _Configs(model.config), functions_of(model)
    ropes: list[Rope] = []
    found: dict[str, type[TowerAngles]] = {}
    for name, module in model.named_modules():
        if (kind := towers.kind_of(module)) is not None:
            found[name] = kind
        elif compare.is_rotary(module):
            config = compare.own_config(module, configs.text)
            if configs.is_text(config):
                ropes += _rotary(
                    result, model, name, module, places, configs.ropes_of(config) if exact else None, length
                )
            else:
                result.left_alone.append(f"{name}: it is not part of the text model")
        elif own_tables.has_table(module):
            ropes += _table(result, name, module, places, configs.ropes_of(configs.text) if exact else None)
    for name, kind in found.items():
        _tower(result, model, name, kind, configs if exact else None)
    if not result.stand_ins:
        got = "; ".join(result.left_alone) or type(model).__name__
        fix = "Models without rotary positions, or with angles computed elsewhere, are not supported."
        raise error(WHO, "the model must have a rotary module that is called with positions", got, fix)
    if exact:
        compare.check_length(length, ropes)
    return result


def _rotary(
    result: Plan,
    model: nn.Module,
    name: str,
    module: nn.Module,
    places: Mapping[Place, Any],
    read: ModelRopes | None,
    length: int | None,
) -> Iterable[Rope]:
    # The functions of the surrounding model, and not those of a neighbouring tower that takes the same tables.
    near = functions_of(model.get_submodule(name.rpartition(".")[0]))
    places = {place: function for place, function in places.items() if place in near} or places
    kinds = compare.kinds_of(module)
    width = compare.width(name, module, kinds)
    forms = _forms(name, places, width)
    ropes: dict[str | None, Rope] | None = None
    found: list[Rope] = []
    if read is not None:
        ropes = {kind: compare.matching(name, module, kind, _of_kind(read, kind)) for kind in kinds}
        found = list(ropes.values())
        _check_channels(name, forms, found)
        for kind, rope in ropes.items():
            compare.check_axes(name, module, kind, rope, width)
        if length is not None:
            ropes = {kind: rope.at_length(length) for kind, rope in ropes.items()}
        result.ropes.update((name if kind is None else f"{name}:{kind}", rope) for kind, rope in ropes.items())
        result.warnings += [warning for warning in read.warnings if warning not in result.warnings]
    result.stand_ins[name] = (module, RotaryAngles(module, width, ropes, forms, _main_pairing(forms)))
    result.forms.update(forms)
    return found


def _table(
    result: Plan, attention: str, module: nn.Module, places: Mapping[Place, Any], read: ModelRopes | None
) -> Iterable[Rope]:
    name, table = f"{attention}.{own_tables.NAME}", module.get_buffer(own_tables.NAME)
    forms = _forms(name, places, "half")
    rope = None
    if read is not None:
        rope = read.rope
        _check_channels(name, forms, [rope])
        own_tables.check_table(name, table, rope)
        result.ropes[name] = rope
    result.stand_ins[name] = (module, own_tables.TableAngles(table, rope, forms, _main_pairing(forms)))
    result.forms.update(forms)
    return [] if rope is None else [rope]


def _tower(result: Plan, model: nn.Module, name: str, kind: type[TowerAngles], configs: _Configs | None) -> None:
    module = model.get_submodule(name)
    try:
        ropes = None if configs is None else configs.tower_of(module.config)
        new = towers.stand_in(model, name, kind, ropes, result.forms)
    except RopeError as e:
        result.left_alone.append(f"{name}: {e}")
        return
    if ropes is not None:
        names = [name] if len(ropes) == 1 else [f"{name}:{part}" for part in range(len(ropes))]
        result.ropes.update(zip(names, ropes, strict=True))
    result.stand_ins[name] = (module, new)
    result.forms.update(new.forms)


def _main_pairing(forms: Mapping[Place, Form]) -> Pairing:
    return next(iter(forms.values())).pairing


def _forms(name: str, places: Mapping[Place, Any], width: Width) -> dict[Place, Form]:
    """The functions that rotate by tables of this width, and how each rotates.

    Raises:
        RopeError: no function of the model's code rotates pairs by plus the angle.
    """
    forms = {place: form for place, function in places.items() if (form := probe(original(function), width))}
    if forms:
        return forms
    raise error(
        WHO,
        f"the model's code must call a function that rotates q and k by the cos and sin of {name}",
        ", ".join(".".join(place) for place in places) or "code without such a function",
        "This model is not supported, because it rotates in the opposite direction or pairs other channels.",
    )


def _check_channels(name: str, forms: Mapping[Place, Form], ropes: Iterable[Rope]) -> None:
    """Raise RopeError if the config describes other channels than the functions rotate."""
    for rope in ropes:
        if rope.pairing not in {form.pairing for form in forms.values()}:
            how = " and ".join(f"{'.'.join(place)}: {form.pairing}" for place, form in forms.items())
            must = f"{name} must pair channels as its config says ({rope.pairing})"
            raise error(WHO, must, how, "Use angles='theirs'.")
        first = rope.rotary_dim < rope.head_dim and rope.rotary_offset == 0
        if first and all(form.whole == "last" for form in forms.values()):
            must = f"{name} must rotate the first {rope.rotary_dim} channels, as its config says"
            raise error(WHO, must, "a function that rotates the last", "Use angles='theirs'.")


def _of_kind(read: ModelRopes, kind: str | None) -> list[Rope]:
    """The ropes of the layers of a kind, or of all layers if the config does not state their kinds."""
    layers = read.layers
    if kind in read.layer_kinds:
        layers = tuple(rope for this, rope in zip(read.layer_kinds, layers, strict=True) if this == kind)
    else:
        layers = (*layers, *read.extra_ropes.values())
    return [rope for rope in dict.fromkeys(layers) if rope is not None]


class _Configs:
    """The text model's config, and the ropes of the configs in the model, each of which is read once."""

    def __init__(self, config: Any) -> None:
        find = getattr(config, "get_text_config", None)
        self.text = config if find is None else find()
        self.read: dict[int, ModelRopes] = {}

    def is_text(self, config: Any) -> bool:
        """Whether this is the config of the text model, or of the other half of an encoder-decoder model."""
        return type(config) is type(self.text)

    def tower_of(self, config: Any) -> tuple[Rope, ...]:
        """The ropes of a tower's config."""
        vision = self.ropes_of(config).vision
        return () if vision is None else vision.ropes

    def ropes_of(self, config: Any) -> ModelRopes:
        if id(config) not in self.read:
            try:
                self.read[id(config)] = from_config(config)
            except RopeError as e:
                raise within(f"{WHO}: angles='theirs' needs no config; from_config cannot read this one", e) from e
        return self.read[id(config)]
