"""Pass the weights of norms that a module has, of the heads that it rotates, as if they were arguments."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ropewalk.tools.check.find import words


def of_module(module: torch.nn.Module, channels: int) -> dict[str, torch.nn.Module]:
    """Return "q_weight" and "k_weight", or the first if q and k share it, with the norm of a head that has it."""
    found = [
        (name.lower(), norm)
        for name, norm in module.named_modules()
        if "norm" in f"{name} {type(norm).__name__}".lower()
        and [p.shape for p in norm.parameters(recurse=False)] == [(channels,)]
    ]
    if len(found) == 1:
        return {"q_weight": found[0][1]}
    if len(found) == 2:
        found.sort(key=lambda each: "k" in each[0].replace("rank", ""))
        return {"q_weight": found[0][1], "k_weight": found[1][1]}
    return {}


def eps_of(norm: torch.nn.Module) -> float:
    """Return the eps of a norm, which torch takes from the dtype if it is None."""
    stated = [getattr(norm, name) for name in ("eps", "variance_epsilon", "epsilon") if hasattr(norm, name)]
    return next((eps for eps in stated if isinstance(eps, float)), torch.finfo(torch.float32).eps)


def passed(function: Any, norms: dict[str, torch.nn.Module]) -> Any:
    """Return a function that passes the weights of these norms on, and calls another."""

    def with_weights(**given: Any) -> Any:
        weights: dict[str, Tensor] = {role: given.pop(role) for role in norms}
        saved = {role: dict(norm.named_parameters(recurse=False)) for role, norm in norms.items()}
        try:
            for role, norm in norms.items():
                (name,) = saved[role]
                del norm._parameters[name]
                setattr(norm, name, weights[role])
            return function(**given)
        finally:
            for role, norm in norms.items():
                for name, weight in saved[role].items():
                    norm.__dict__.pop(name, None)
                    norm._parameters[name] = weight

    own = (inspect.Parameter(role, inspect.Parameter.KEYWORD_ONLY) for role in norms)
    return words.stands_for(with_weights, function, [*(words.parameters(function) or {}).values(), *own])
