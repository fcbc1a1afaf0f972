"""Plan what `accelerate` replaces, and check the whole plan before the model is changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk import formats
from ropewalk._checks import RopeError, error, shown, with_context
from ropewalk._layout import Pairing
from ropewalk.attention.self_extend import SelfExtend
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.read import read_config
from ropewalk.configs.tables import towers as vision_towers
from ropewalk.formats import Width
from ropewalk.integrations.transformers import compare, modules
from ropewalk.integrations.transformers.compare import WHO
from ropewalk.integrations.transformers.functions import Form, Place, functions_of, original, probe
from ropewalk.integrations.transformers.modules import Angles, Replacement
from ropewalk.rope.rope import Rope


@dataclass
class Plan:
    """What `accelerate` is going to replace.

    Args:
        replacements: a dict from the name of a rotary module to its new kind and what it then computes.
        ropes, left_alone, warnings: as in `Accelerated`.
    """

    replacements: dict[str, tuple[type[Angles], Replacement]] = field(default_factory=dict)
    ropes: dict[str, Rope] = field(default_factory=dict)
    left_alone: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def functions(self) -> list[Place]:
        """The functions to replace."""
        return list(dict.fromkeys(place for _, made in self.replacements.values() for place in made.forms))


def plan(
    model: nn.Module,
    *,
    exact: bool,
    rope: Rope | SelfExtend | Mapping[str, Rope | SelfExtend] | None,
    length: int | None,
) -> Plan:
    """Plan the replacement of every rotary module. With `exact`, compare each with the config.

    A vision tower that is not supported keeps its own rotation, and `left_alone` lists it with the reason.

    Args:
        model: the model.
        exact: whether to use the angles of the config. Otherwise, the original modules compute them.
        rope: the caller's ropes, instead of those of the config.
        length: the longest sequence in tokens, or None.

    Raises:
        RopeError: a module of the text model does not fit its config or is not supported, the model has nothing to
            replace, `rope` does not fit, or `length` is missing or not needed.
    """
    result, configs, given = Plan(), _Configs(model), _Given(rope)
    ropes: list[Rope] = []
    towers: dict[str, type[Angles]] = {}
    for name, module in model.named_modules():
        if (kind := _kind_of_tower(module)) is not None:
            towers[name] = kind
        elif compare.is_rotary(module):
            config = compare.own_config(module, configs.text)
            if configs.is_text(config):
                ropes += _plan_text(result, model, name, configs if exact else None, given, length)
            else:
                result.left_alone.append(f"{name}: it is not part of the text model")
    for name, kind in towers.items():
        try:
            _plan_tower(result, model, name, kind, configs if exact else None)
        except RopeError as e:
            result.left_alone.append(f"{name}: {e}")
    if not result.replacements:
        got = "; ".join(result.left_alone) or type(model).__name__
        fix = "Models without rotary positions, or with angles computed elsewhere, are not supported."
        raise error(WHO, "the model must have a rotary module that is called with positions", got, fix)
    if exact:
        given.check_kinds()
        compare.check_length(length, ropes)
    return result


def _plan_text(
    result: Plan, model: nn.Module, name: str, configs: _Configs | None, given: _Given, length: int | None
) -> Iterable[Rope]:
    """Add the rotary module of a text model to the plan, and return its ropes."""
    module = model.get_submodule(name)
    kinds = compare.kinds_of(module)
    width = compare.width(name, module, kinds)
    # First functions of the model around this module, since a tower next to it may have some for the same format.
    forms, failed = _forms(model.get_submodule(name.rpartition(".")[0]), width)
    if not forms:
        forms, failed = _forms(model, width)
    ropes: dict[str | None, tuple[Rope, ...]] | None = None
    found: list[Rope] = []
    if configs is not None:
        config = compare.own_config(module, configs.text)
        read = configs.ropes_of(config, next(iter(forms.values())).pairing if forms else None)
        by_kind = {kind: compare.find_rope(name, module, kind, _ropes_of_kind(read, kind)) for kind in kinds}
        _check_channels(name, forms, by_kind.values())
        for kind, rope in by_kind.items():
            compare.check_axes(name, module, kind, rope, width)
        by_kind = {kind: given.instead_of(rope, name, kind, read) for kind, rope in by_kind.items()}
        found = list(by_kind.values())
        if length is not None:
            by_kind = {kind: rope.at_length(length) for kind, rope in by_kind.items()}
        ropes = {kind: (rope,) for kind, rope in by_kind.items()}
        result.ropes.update((name if kind is None else f"{name}:{kind}", rope) for kind, rope in by_kind.items())
        result.warnings += [warning for warning in read.warnings if warning not in result.warnings]
    extended = {kind: given.extended[name, kind] for kind in kinds if (name, kind) in given.extended}
    result.warnings += [f"{name} attends in two passes: {each}" for each in extended.values()]
    attention = _attention(model, module, forms, found) if extended else ""
    _add(result, name, modules.TextAngles, Replacement(ropes, width, forms, extended, attention), failed)
    return found


def _attention(model: nn.Module, module: Any, forms: Mapping[Place, Form], ropes: Iterable[Rope]) -> str:
    """Return the name of the model's attention function, if Self-Extend can replace it."""
    devices = {parameter.device for parameter in model.parameters()}
    together = forms and all(form.at == 2 and form.order == "same" and form.whole != "last" for form in forms.values())
    pairings = {form.pairing for form in forms.values()} | {rope.pairing for rope in ropes}
    registered = getattr(model, "_supports_attention_backend", False) and hasattr(module, "config")
    if not (together and len(pairings) == 1 and registered and len(devices) == 1):
        must = (
            "for Self-Extend, the model must rotate q and k in one function and attend through transformers' registry"
        )
        raise error(WHO, f"{must}, on one device", type(model).__name__, "Pass a Rope instead.")
    return str(module.config._attn_implementation)


def _plan_tower(result: Plan, model: nn.Module, name: str, kind: type[Angles], configs: _Configs | None) -> None:
    """Add the rotary module of a vision tower to the plan.

    Raises:
        RopeError: the tower is not supported, or its rotation differs from its config.
    """
    module, owner = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    returned, positions = _call_tower(name, module, kind)
    cos_sin = compare.tables_of(name, returned)
    tables = list(zip(*(table.chunk(_parts(module), dim=-1) for table in cos_sin), strict=True))
    width = _tower_width(name, returned, tables)
    forms: Mapping[Place, Form] = {}
    if len(tables) > 1:
        failed = "it rotates several parts of a head"
    elif hasattr(type(owner), "permute_input_for_window_attn"):
        failed = "the tower reorders them for its windows"
    else:
        forms, failed = _forms(owner, width, shared=True)
    ropes: tuple[Rope, ...] | None = None
    if configs is not None:
        vision = configs.ropes_of(module.config).vision
        ropes = () if vision is None else vision.ropes
        for rope, part in zip(ropes, tables, strict=True):
            compare.check_tower(name, module, rope, part, positions, width)
        _check_channels(name, forms, ropes)
        names = [name] if len(ropes) == 1 else [f"{name}:{part}" for part in range(len(ropes))]
        result.ropes.update(zip(names, ropes, strict=True))
    _add(result, name, kind, Replacement(None if ropes is None else {None: ropes}, width, forms), failed)


def _add(result: Plan, name: str, kind: type[Angles], made: Replacement, failed: str) -> None:
    """Add a replacement to the plan.

    If none of the model's functions can be replaced, they rotate by the exact tables themselves.

    Raises:
        RopeError: there would be nothing to replace, since the angles are also the model's own.
    """
    if not made.forms:
        if made.ropes is None:
            must = f"a function that ropewalk can replace must rotate by the cos and sin of {name}"
            raise error(WHO, must, failed, "angles='theirs' would change nothing.")
        result.warnings.append(f"the model's own functions rotate by the exact cos and sin of {name}: {failed}")
    result.replacements[name] = kind, made


def _forms(owner: nn.Module, width: Width, *, shared: bool = False) -> tuple[dict[Place, Form], str]:
    """Return how functions of the code rotate by tables of the format `width`, and why the others do not."""
    found = {place: probe(original(function), width, shared=shared) for place, function in functions_of(owner).items()}
    failed = [f"{'.'.join(place)} {why}" for place, why in found.items() if isinstance(why, str)]
    forms = {place: form for place, form in found.items() if isinstance(form, Form)}
    return forms, "; ".join(failed) or "no function has parameters cos and sin"


def _check_channels(name: str, forms: Mapping[Place, Form], ropes: Iterable[Rope]) -> None:
    """Raise a RopeError if the functions rotate other channels than the config states."""
    for rope in ropes if forms else ():
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


class _Given:
    """The ropes that the caller passed to `accelerate`: one, one for each kind of layer, or none."""

    def __init__(self, rope: Rope | SelfExtend | Mapping[str, Rope | SelfExtend] | None) -> None:
        self.by_kind: Mapping[str, Rope | SelfExtend] = rope if isinstance(rope, Mapping) else {}
        self.one = None if isinstance(rope, Mapping) else rope
        self.kinds: set[str] = set()  # of the layers that rotate
        self.extended: dict[tuple[str, str | None], SelfExtend] = {}  # of each module and its kind
        for each in self.by_kind.values() if self.one is None else (self.one,):
            if not isinstance(each, (Rope, SelfExtend)):
                must = "rope must be a Rope, a SelfExtend, or a dict with one for each kind of layer"
                raise error(WHO, must, shown(each), "Read that of the model with from_config(model.config).layers[i].")

    def instead_of(self, own: Rope, name: str, kind: str | None, read: ModelRopes) -> Rope:
        """Return the rope for the layers that the module `name` serves, and for which the config states `own`."""
        of_module = kind
        if kind is None:  # the kind of layer for which the config states this rope, if there is one
            layers = zip(read.layer_kinds, read.layers, strict=True)
            kinds = {each for each, rope in layers if rope == own}
            kind = kinds.pop() if len(kinds) == 1 else ""
        self.kinds.add(kind)
        rope = self.one or self.by_kind.get(kind, own)
        if isinstance(rope, SelfExtend):
            self.extended[name, of_module] = rope
            rope = rope.rope
        same = ("head_dim", "rotary_dim", "rotary_offset", "pairing", "axes")
        wrong = [f"{field}={getattr(rope, field)!r}" for field in same if getattr(rope, field) != getattr(own, field)]
        if wrong:
            fix = "Pass dataclasses.replace(own, base=..., scaling=...), with own of from_config(model.config)."
            raise error(WHO, f"rope must rotate the channels of {name} as {own} does", ", ".join(wrong), fix)
        return rope

    def check_kinds(self) -> None:
        """Raise a RopeError if the caller passed one rope for several kinds of layer, or a rope for an unknown kind."""
        known = sorted(self.kinds - {""})
        unknown = [shown(kind) for kind in self.by_kind if kind not in known]
        if unknown or (self.one is not None and len(known) > 1):
            must = f"rope must be a dict whose keys are kinds of layer that rotate ({', '.join(map(shown, known))})"
            fix = "Pass {kind: Rope}. The other kinds keep the rope of the config."
            raise error(WHO, must, ", ".join(unknown) or "one Rope for all kinds", fix)


class _Configs:
    """A reader for the configs inside a model. It reads each config once.

    Attributes:
        text: the config of the text model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, config = model, model.config
        find = getattr(config, "get_text_config", None)
        self.text = config if find is None else find()
        self.read: dict[int, ModelRopes] = {}

    def is_text(self, config: Any) -> bool:
        """Return whether a config has the class of the text model's config, as for both encoder and decoder."""
        return type(config) is type(self.text)

    def ropes_of(self, config: Any, pairing: Pairing | None = None) -> ModelRopes:
        """Read a config, or return the result of an earlier call.

        The numbers are compared with those of the model. So a key that ropewalk does not know is no error here, and
        the pairing of an unknown model_type may be that of the model's function.

        Raises:
            RopeError: `from_config` cannot read it.
        """
        model_type = getattr(config, "model_type", None)
        known = model_type in ARCHITECTURES
        if known and ARCHITECTURES[str(model_type)].backwards:
            must, fix = (
                "the model must rotate each pair by plus its angle",
                "Use from_config(model.config) in your code.",
            )
            raise error(WHO, must, f"{model_type}, which rotates by minus", fix)
        learned = known and ARCHITECTURES[str(model_type)].learned is not None
        weights = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters())} if learned else None
        ignored: tuple[str, ...] = ()
        while id(config) not in self.read:
            try:
                read = read_config(config, pairing=None if known else pairing, ignore=ignored, weights=weights)
            except RopeError as e:
                if e.unread_key is None:
                    unreadable = f"{WHO}: from_config cannot read the config, which angles='theirs' does not need"
                    raise with_context(unreadable, e) from e
                ignored += (e.unread_key,)
            else:
                notes = (f"{key} was not read. The model has the frequencies of the other keys." for key in ignored)
                warnings = (*read.warnings[: len(read.warnings) - len(ignored)], *notes)
                self.read[id(config)] = replace(read, warnings=warnings)
        return self.read[id(config)]


def _kind_of_tower(module: nn.Module) -> type[Angles] | None:
    """Return the class that replaces this module, or None if it is not the rotary module of a known tower."""
    if _model_type(module) not in vision_towers.TOWERS:
        return None
    kind = next((kind for kind in modules.TOWERS if kind.replaces(module)), None)
    return modules.BatchAngles if kind is not None and _parts(module) > 1 else kind


def _parts(module: nn.Module) -> int:
    """Return the number of parts of a head that are rotated separately."""
    row = vision_towers.TOWERS[_model_type(module)]
    return len(row.ropes(96, row.base))


def _model_type(module: nn.Module) -> str:
    return getattr(compare.own_config(module, None), "model_type", None) or ""


def _call_tower(name: str, module: nn.Module, kind: type[Angles]) -> tuple[Any, Tensor]:
    """Call a copy of the module, and return its tables and the test positions `[axes, tokens]`."""
    buffer = next(iter(module.buffers()))
    compare.check_values(name, buffer)
    axes = len(vision_towers.TOWERS[_model_type(module)].axis_names)
    arguments, positions = kind.sample(module, compare.distinct_positions(axes).to(buffer.device))
    try:
        with torch.no_grad():
            return copy.deepcopy(module).eval()(*arguments), positions
    except Exception as e:  # the code of another version may raise anything
        must = f"{name} must take the arguments that ropewalk knows"
        raise error(WHO, must, f"{type(e).__name__}: {e}", "This tower is not supported.") from e


def _tower_width(name: str, returned: Any, tables: list[tuple[Tensor, Tensor]]) -> Width:
    """Return the format of a tower's tables.

    Raises:
        RopeError: the format is not supported.
    """
    if isinstance(returned, Tensor) and returned.is_complex():
        return "complex"
    found = {formats.width_of(cos, cos.shape[-1] // 2) for cos, _ in tables}
    width = found.pop()
    if width is None or found:
        must = f"{name} must return cos and sin with two columns for each pair, or complex numbers"
        raise error(WHO, must, "other tables", "This tower computes its angles in a way that is not supported.")
    return width
