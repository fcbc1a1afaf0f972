"""Plan what `accelerate` replaces, and check the whole plan before the model is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ropewalk._checks import RopeError, error, with_context
from ropewalk._layout import Pairing
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.read import from_config
from ropewalk.integrations.transformers import attention_tables, compare, towers
from ropewalk.integrations.transformers.angles import Angles, RotaryAngles
from ropewalk.integrations.transformers.compare import WHO
from ropewalk.integrations.transformers.dispatch import Place, functions_of, original
from ropewalk.integrations.transformers.probe import Form, Width, probe
from ropewalk.integrations.transformers.tower_angles import TowerAngles
from ropewalk.rope import Rope


@dataclass
class Plan:
    """What `accelerate` is going to replace.

    Args:
        replacements: a dict from the name of a module or table to the original module and the replacement. For a table,
            the original module is the attention that stores it.
        forms: a dict from each function to replace to the way in which it rotates.
        ropes, left_alone, warnings: as in `Accelerated`.
    """

    replacements: dict[str, tuple[nn.Module, Angles]] = field(default_factory=dict)
    forms: dict[Place, Form] = field(default_factory=dict)
    ropes: dict[str, Rope] = field(default_factory=dict)
    left_alone: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def plan(model: nn.Module, *, exact: bool, length: int | None) -> Plan:
    """Plan the replacement of every rotary module and attention table. With `exact`, compare each with the config.

    A vision tower that is not supported keeps its own rotation, and `left_alone` lists it with the reason.

    Args:
        model: the model.
        exact: whether to use the angles of the config. Otherwise, the original modules compute them.
        length: the longest sequence in tokens, or None.

    Raises:
        RopeError: a module, table or function of the text model does not fit its config or is not supported, the model
            has nothing to replace, or `length` is missing or not needed.
    """
    result, configs, places = Plan(), _Configs(model.config), functions_of(model)
    ropes: list[Rope] = []
    tower_classes: dict[str, type[TowerAngles]] = {}
    for name, module in model.named_modules():
        if (kind := towers.kind_of(module)) is not None:
            tower_classes[name] = kind
        elif compare.is_rotary(module):
            config = compare.own_config(module, configs.text)
            if configs.is_text(config):
                ropes += _plan_rotary_module(
                    result, model, name, module, places, configs.ropes_of(config) if exact else None, length
                )
            else:
                result.left_alone.append(f"{name}: it is not part of the text model")
        elif attention_tables.has_table(module):
            ropes += _plan_table(result, name, module, places, configs.ropes_of(configs.text) if exact else None)
    for name, kind in tower_classes.items():
        _plan_tower(result, model, name, kind, configs if exact else None)
    if not result.replacements:
        got = "; ".join(result.left_alone) or type(model).__name__
        fix = "Models without rotary positions, or with angles computed elsewhere, are not supported."
        raise error(WHO, "the model must have a rotary module that is called with positions", got, fix)
    if exact:
        compare.check_length(length, ropes)
    return result


def _plan_rotary_module(
    result: Plan,
    model: nn.Module,
    name: str,
    module: nn.Module,
    places: Mapping[Place, Any],
    read: ModelRopes | None,
    length: int | None,
) -> Iterable[Rope]:
    """Add a rotary module to the plan, and return its ropes."""
    # Only functions of the model around this module. A tower next to it may have functions for tables of that format.
    nearby = functions_of(model.get_submodule(name.rpartition(".")[0]))
    places = {place: function for place, function in places.items() if place in nearby} or places
    kinds = compare.kinds_of(module)
    width = compare.width(name, module, kinds)
    forms = _forms(name, places, width)
    ropes: dict[str | None, Rope] | None = None
    rope_list: list[Rope] = []
    if read is not None:
        ropes = {kind: compare.find_rope(name, module, kind, _ropes_of_kind(read, kind)) for kind in kinds}
        rope_list = list(ropes.values())
        _check_channels(name, forms, rope_list)
        for kind, rope in ropes.items():
            compare.check_axes(name, module, kind, rope, width)
        if length is not None:
            ropes = {kind: rope.at_length(length) for kind, rope in ropes.items()}
        result.ropes.update((name if kind is None else f"{name}:{kind}", rope) for kind, rope in ropes.items())
        result.warnings += [warning for warning in read.warnings if warning not in result.warnings]
    result.replacements[name] = (module, RotaryAngles(module, width, ropes, forms, _main_pairing(forms)))
    result.forms.update(forms)
    return rope_list


def _plan_table(
    result: Plan, attention: str, module: nn.Module, places: Mapping[Place, Any], read: ModelRopes | None
) -> Iterable[Rope]:
    """Add the table of an attention to the plan, and return its rope."""
    name, table = f"{attention}.{attention_tables.NAME}", module.get_buffer(attention_tables.NAME)
    forms = _forms(name, places, "half")
    rope = None
    if read is not None:
        rope = read.rope
        _check_channels(name, forms, [rope])
        attention_tables.check_table(name, table, rope)
        result.ropes[name] = rope
    result.replacements[name] = (module, attention_tables.TableAngles(table, rope, forms, _main_pairing(forms)))
    result.forms.update(forms)
    return [] if rope is None else [rope]


def _plan_tower(result: Plan, model: nn.Module, name: str, kind: type[TowerAngles], configs: _Configs | None) -> None:
    """Add a vision tower to the plan. If it is not supported, add it to `left_alone` with the reason."""
    module = model.get_submodule(name)
    try:
        ropes = None if configs is None else configs.tower_of(module.config)
        new = towers.build_replacement(model, name, kind, ropes, result.forms)
    except RopeError as e:
        result.left_alone.append(f"{name}: {e}")
        return
    if ropes is not None:
        names = [name] if len(ropes) == 1 else [f"{name}:{part}" for part in range(len(ropes))]
        result.ropes.update(zip(names, ropes, strict=True))
    result.replacements[name] = (module, new)
    result.forms.update(new.forms)


def _main_pairing(forms: Mapping[Place, Form]) -> Pairing:
    return next(iter(forms.values())).pairing


def _forms(name: str, places: Mapping[Place, Any], width: Width) -> dict[Place, Form]:
    """Return the functions that rotate by tables of the format `width`, and how each rotates.

    Raises:
        RopeError: no function of the model's code rotates pairs in the positive direction.
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
    """Raise a RopeError if the functions rotate other channels than the config states."""
    for rope in ropes:
        if rope.pairing not in {form.pairing for form in forms.values()}:
            how = " and ".join(f"{'.'.join(place)}: {form.pairing}" for place, form in forms.items())
            must = f"{name} must pair channels as its config says ({rope.pairing})"
            raise error(WHO, must, how, "Use angles='theirs'.")
        first = rope.rotary_dim < rope.head_dim and rope.rotary_offset == 0
        if first and all(form.whole == "last" for form in forms.values()):
            must = f"{name} must rotate the first {rope.rotary_dim} channels, as its config says"
            raise error(WHO, must, "a function that rotates the last", "Use angles='theirs'.")


def _ropes_of_kind(read: ModelRopes, kind: str | None) -> list[Rope]:
    """Return the ropes of a layer type. If the config does not state that type, return those of all layers."""
    layers = read.layers
    if kind in read.layer_kinds:
        layers = tuple(rope for layer_kind, rope in zip(read.layer_kinds, layers, strict=True) if layer_kind == kind)
    else:
        layers = (*layers, *read.extra_ropes.values())
    return [rope for rope in dict.fromkeys(layers) if rope is not None]


class _Configs:
    """A reader for the configs inside a model. It reads each config once.

    Attributes:
        text: the config of the text model.
    """

    def __init__(self, config: Any) -> None:
        find = getattr(config, "get_text_config", None)
        self.text = config if find is None else find()
        self.read: dict[int, ModelRopes] = {}

    def is_text(self, config: Any) -> bool:
        """Return whether a config has the class of the text model's config, as for both encoder and decoder."""
        return type(config) is type(self.text)

    def tower_of(self, config: Any) -> tuple[Rope, ...]:
        """Return the ropes of a tower's config."""
        vision = self.ropes_of(config).vision
        return () if vision is None else vision.ropes

    def ropes_of(self, config: Any) -> ModelRopes:
        """Read a config, or return the result of an earlier call.

        Raises:
            RopeError: `from_config` cannot read it.
        """
        if id(config) not in self.read:
            try:
                self.read[id(config)] = from_config(config)
            except RopeError as e:
                raise with_context(
                    f"{WHO}: from_config cannot read the config, which angles='theirs' does not need", e
                ) from e
        return self.read[id(config)]
