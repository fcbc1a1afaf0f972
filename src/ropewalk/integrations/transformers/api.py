"""`accelerate`, which makes a model of transformers rotate through ropewalk, and `restore`, which undoes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

import ropewalk
from ropewalk._checks import choice, error, shown
from ropewalk.attention.self_extend import SelfExtend
from ropewalk.integrations.transformers.compare import WHO, is_rotary
from ropewalk.integrations.transformers.functions import install
from ropewalk.integrations.transformers.modules import Angles, insert, remove
from ropewalk.integrations.transformers.plan import plan
from ropewalk.rope.rope import Rope


@dataclass(frozen=True)
class Accelerated:
    """The report of `accelerate`, which lists what was replaced. `str(report)` is the report as text.

    Args:
        angles: "exact" or "theirs", as passed to `accelerate`.
        ropes: maps the name of each replaced module or table to the `Rope` of its angles. If a module has several
            ropes, each has its own entry: the name is followed by a colon and the layer type, or the index of the part
            of a head. The dict is empty with angles="theirs".
        modules: the names of the replaced modules and tables.
        functions: the functions that now rotate through ropewalk.
        left_alone: rotary modules that keep their own rotation, each with the reason.
        warnings: the warnings of `from_config` about the config, modules by whose exact angles the model's own
            functions rotate, each with the reason, and a kernel that is missing.
        length: the length for which the frequencies were computed, in tokens, if they depend on the length. Otherwise
            None.
    """

    angles: str
    ropes: Mapping[str, Rope] = field(hash=False)
    modules: tuple[str, ...]
    functions: tuple[str, ...]
    left_alone: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    length: int | None = None

    def __str__(self) -> str:
        whose = "exact angles" if self.angles == "exact" else "the model's own float32 angles"
        up_to = "" if self.length is None else f" for up to {self.length} tokens"
        lines = [f"rotates through ropewalk, with {whose}{up_to}: {', '.join(self.modules)}"]
        lines += [f"  {name}: {rope}" for name, rope in self.ropes.items()]
        lines += [f"  by {', '.join(self.functions)}"] if self.functions else []
        lines += [f"keeps its own rotation: {name}" for name in self.left_alone]
        lines += [f"note: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def accelerate(
    model: nn.Module,
    *,
    rope: Rope | SelfExtend | Mapping[str, Rope | SelfExtend] | None = None,
    angles: Literal["exact", "theirs"] = "exact",
    length: int | None = None,
) -> Accelerated:
    """Make a model of transformers rotate q and k through ropewalk. `restore(model)` undoes it.

    The model's rotary module then returns exact cos and sin, which carry a `Rotation`. The rotating function in the
    model's modeling file is replaced by one that rotates by it, and that calls the original for tables without a
    `Rotation`, so other models of that file do not change. Weights, state_dict and config do not change either, and
    nothing is added to a saved model. Vision towers are supported like text models. A tower that is not supported keeps
    its own rotation and is reported with the reason.

    Args:
        model: a model of transformers 5 with loaded weights. It may be inside a model of PEFT.
        rope: the rope by which all layers of the text model rotate, instead of that of the config. If the model has
            several kinds of layer, each with its own rope, pass a dict from a kind, as `ModelRopes.layer_kinds` names
            it, to a rope; the other kinds keep that of the config. The attention factor is that of `rope`; a factor of
            the model's softmax scale (DeepSeek's mscale) stays. None means the rope of the config. Instead of a rope,
            pass a `SelfExtend` for attention in two passes, in models whose attention is in transformers' registry.
            Each cached key then has four more channels, with its position. A cache that changes keys, and attention
            with softcap or sinks, are errors at the call.
        angles: "exact" uses the angles of the model's config, as computed by `Rope.at`. "theirs" uses the model's own
            float32 tables, which gives bitwise equal outputs in float32, and works for configs that `from_config`
            cannot read.
        length: the longest sequence that will run, in tokens. It is required for dynamic NTK and LongRoPE with exact
            angles, and refused otherwise.

    Returns:
        An `Accelerated`, which lists what was replaced, and what keeps its own rotation.

    Raises:
        RopeError: the model is accelerated already, has no rotary module, rotates in a way that no `Rotation` describes
            (such as the opposite direction), or has other frequencies than its config states; or `rope` rotates other
            channels than the model. The model is then unchanged.
    """
    _check_model(model)
    choice(WHO, "angles", angles, ("exact", "theirs"))
    if any(isinstance(module, Angles) for module in model.modules()):
        must = "the model must have its own rotation"
        raise error(WHO, must, "one that is accelerated already", "Call restore(model) first.")
    for name, value in (("rope", rope), ("length", length)):
        if angles == "theirs" and value is not None:
            raise error(WHO, f"{name} must be None with angles='theirs'", shown(value), f"Do not pass {name}.")
    planned = plan(model, exact=angles == "exact", rope=rope, length=length)
    for place in planned.functions:
        install(place)
    for name, (kind, replacement) in planned.replacements.items():
        insert(model.get_submodule(name), kind, replacement)
    return Accelerated(
        angles,
        planned.ropes,
        tuple(planned.replacements),
        tuple(".".join(place) for place in planned.functions),
        tuple(planned.left_alone),
        (*planned.warnings, *_kernel_notes(model)),
        length,
    )


def restore(model: nn.Module) -> str:
    """Undo `accelerate`, also on a copy or an unpickled model. The outputs are again bitwise those of the original.

    Returns:
        A report of what was restored, as text.

    Raises:
        RopeError: the model is not accelerated.
    """
    _check_model(model)
    replaced = {name: module for name, module in model.named_modules() if isinstance(module, Angles)}
    if not replaced:
        raise error("restore", "the model must be accelerated", "one that is not", "There is nothing to undo.")
    for module in replaced.values():
        remove(module)
    return f"rotates as transformers does: {', '.join(replaced)}"


def _kernel_notes(model: nn.Module) -> list[str]:
    """Return a note if the model is on a device whose kernel cannot be used."""
    parameter = next(model.parameters(), None)
    name = "" if parameter is None else {"cpu": "cpu kernel", "cuda": "gpu kernel"}.get(parameter.device.type, "")
    state = ropewalk.backends().get(name, "usable")
    return [] if state.startswith("usable") else [f"the rotation runs in plain PyTorch, because the {name} is {state}"]


def _check_model(model: object) -> None:
    part = isinstance(model, nn.Module) and (is_rotary(model) or isinstance(model, Angles))
    if not isinstance(model, nn.Module) or part or not hasattr(getattr(model, "config", None), "model_type"):
        got = type(model).__name__ if isinstance(model, nn.Module) else shown(model)
        fix = "Pass the model that from_pretrained returns, and neither a part of it nor a module that contains it."
        raise error(WHO, "model must be a model of transformers, with its config", got, fix)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft.tuners.adaption_prompt"):
            fix = "Use LoRA, IA3, prompt or prefix tuning instead."
            must = "the model must use its own attention"
            raise error(WHO, must, f"{name}, {type(module).__name__} of PEFT, which has its own rotation", fix)
