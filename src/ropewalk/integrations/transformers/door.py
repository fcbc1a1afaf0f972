"""accelerate and restore: a model of transformers rotates through ropewalk, and then again as it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ropewalk._checks import choice, error, shown
from ropewalk.integrations.transformers import own_tables
from ropewalk.integrations.transformers.angles import Angles, ModuleAngles
from ropewalk.integrations.transformers.compare import WHO
from ropewalk.integrations.transformers.dispatch import install
from ropewalk.integrations.transformers.not_served import check_served
from ropewalk.integrations.transformers.plan import plan
from ropewalk.rope import Rope


@dataclass(frozen=True)
class Accelerated:
    """What `accelerate` did; `str` says it in words.

    Args:
        angles: "exact" or "theirs".
        ropes: name of a replaced module, with its layer type after a colon (the number of the part of a head, where
            parts rotate by themselves) → the `Rope` whose angles it gives; empty with angles="theirs".
        modules: the names of what was replaced.
        functions: the functions that rotate through ropewalk now.
        left_alone: rotary modules that still rotate as they did, and why.
        warnings: what `from_config` says about the config.
        length: the longest sequence for which the frequencies were chosen, in tokens, where they depend on it.
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
        until = "" if self.length is None else f" for up to {self.length} tokens"
        lines = [f"rotates through ropewalk, with {whose}{until}: {', '.join(self.modules)}"]
        lines += [f"  {name}: {rope}" for name, rope in self.ropes.items()]
        lines += [f"  by {', '.join(self.functions)}"]
        lines += [f"left as it was: {name}" for name in self.left_alone]
        lines += [f"note: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def accelerate(
    model: nn.Module, *, angles: Literal["exact", "theirs"] = "exact", length: int | None = None
) -> Accelerated:
    """Let a model of transformers rotate q and k through ropewalk. `restore(model)` undoes it.

    Its rotary module is replaced by one that gives a `Rotation` where cos and sin were, and the function in its
    modeling file that rotates is replaced by one that hands everything but a `Rotation` to the original: other models
    of the file compute what they did. Weights, state_dict and config stay as they are; nothing of it is saved. Vision
    towers are served as text models are; one that cannot be is left alone, and named with the reason.

    Args:
        model: a model of transformers 5, with its weights loaded; also inside a model of PEFT.
        angles: "exact" takes those of the model's config, as `Rope.at` makes them; "theirs" takes the model's own
            float32 tables, for the same outputs to the bit in float32, and for a config that `from_config` cannot read.
        length: the longest sequence that will run, in tokens; needed for dynamic NTK and LongRoPE with exact angles,
            and refused elsewhere.

    Returns:
        `Accelerated`: what was replaced, by what, and what was left alone.

    Raises:
        RopeError: the model is accelerated already; it has no rotary module, or rotates in a way that no `Rotation`
            describes (the other direction); its numbers are not those of its config. Nothing is changed.
    """
    _check_model(model)
    choice(WHO, "angles", angles, ("exact", "theirs"))
    if any(isinstance(module, Angles) for module in model.modules()):
        must = "the model must rotate as it did when it was built"
        raise error(WHO, must, "one that is accelerated already", "Call restore(model) first.")
    check_served(model.config)
    if angles == "theirs" and length is not None:
        raise error(WHO, "length is for angles='exact'", shown(length), "The model's own angles follow its own rule.")
    planned = plan(model, exact=angles == "exact", length=length)
    for place, form in planned.forms.items():
        install(place, form)
    for old, new in planned.stand_ins.values():
        _put(model, old, new)
    return Accelerated(
        angles,
        planned.ropes,
        tuple(planned.stand_ins),
        tuple(".".join(place) for place in planned.forms),
        tuple(planned.left_alone),
        tuple(planned.warnings),
        length,
    )


def restore(model: nn.Module) -> str:
    """Undo `accelerate`, also on a copy of the model or one from a pickle: it rotates as it did, to the bit.

    Returns:
        What was put back, in words.

    Raises:
        RopeError: the model is not accelerated.
    """
    _check_model(model)
    stand_ins = {name: module for name, module in model.named_modules() if isinstance(module, Angles)}
    if not stand_ins:
        raise error("restore", "the model must be accelerated", "one that is not", "There is nothing to undo.")
    for new in stand_ins.values():
        if isinstance(new, ModuleAngles):
            _replace(model, new, new.original)
        else:
            for owner in model.modules():
                if owner._modules.get(own_tables.NAME) is new:
                    del owner._modules[own_tables.NAME]
                    owner.register_buffer(own_tables.NAME, new.get_buffer("table"), persistent=False)
    return f"rotates as transformers does: {', '.join(stand_ins)}"


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "model_type"):
        got = type(model).__name__ if isinstance(model, nn.Module) else shown(model)
        cure = "Pass what from_pretrained gave: of a module around a model, the model inside."
        raise error(WHO, "model must be a model of transformers, with its config", got, cure)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft.tuners.adaption_prompt"):
            cure = "Take LoRA, IA3, prompt or prefix tuning; those work."
            must = "attention must be the model's own"
            raise error(WHO, must, f"{name}, {type(module).__name__} of PEFT, which rotates by itself", cure)


def _put(model: nn.Module, old: nn.Module, new: Angles) -> None:
    if isinstance(new, ModuleAngles):
        _replace(model, old, new)
    else:
        del old._buffers[own_tables.NAME]
        old._modules[own_tables.NAME] = new


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Everywhere in the model: heads that predict several tokens hold the base model's rotary module too."""
    for owner in list(model.modules()):
        if owner is not new:
            for name, child in owner._modules.items():
                if child is old:
                    owner._modules[name] = new
