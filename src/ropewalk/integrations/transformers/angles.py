"""Modules that replace a rotary module of a model and return a Rotation instead of cos and sin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk._checks import describe, error, shown
from ropewalk._layout import Pairing
from ropewalk.integrations.transformers.dispatch import Place, install
from ropewalk.integrations.transformers.probe import Form, Width, drop_repeated_columns
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation, create_unchecked

WHO = "accelerate"


class Angles(nn.Module):
    """The base class of the modules that replace rotary modules and tables.

    Each keeps the original module or table, for `restore` and for device moves.

    Args:
        forms: maps each rotating function that the model's code calls to a description of how it rotates. Unpickling
            installs dispatchers for these functions.
        pairing: the pairing of the first of these functions.
    """

    def __init__(self, forms: Mapping[Place, Form], pairing: Pairing) -> None:
        super().__init__()
        self.forms = dict(forms)
        self.pairing = pairing

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for place, form in self.forms.items():
            install(place, form)


class ModuleAngles(Angles):
    """The base class of the modules that replace a rotary module, not a table.

    A replacement has the attributes of the original module, such as `inv_freq` and `config`, and the same state_dict.

    Args:
        original: the original module.
        width: the format of the tables that the original module returns.
    """

    def __init__(self, original: nn.Module, width: Width, forms: Mapping[Place, Form], pairing: Pairing) -> None:
        super().__init__(forms, pairing)
        self.original = original
        self.width = width
        self._register_load_state_dict_pre_hook(_to_original)  # type: ignore[no-untyped-call]
        self.train(original.training)

    def as_tables(self, rotation: Any) -> Any:
        """Return the Rotation twice, in place of cos and sin, or once if the original returns one complex table."""
        return rotation if self.width == "complex" else (rotation, rotation)

    def tables(self, returned: Any) -> tuple[Tensor, Tensor]:
        """Convert what the original module returned to cos and sin with one column for each pair."""
        cos, sin = (returned.real, returned.imag) if self.width == "complex" else returned
        return drop_repeated_columns(cos, self.width), drop_repeated_columns(sin, self.width)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "original":
                raise
            return getattr(self.original, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state_dict of the original, so that a saved model contains nothing of ropewalk."""
        return self.original.state_dict(*args, **kwargs)


class RotaryAngles(ModuleAngles):
    """The replacement for the rotary module of a text model, which is called with hidden states and positions.

    Args:
        ropes: maps each layer type to its `Rope`. The only key is None if the module is called without a layer type. If
            ropes is None, the angles of the original are used.
    """

    def __init__(
        self,
        original: nn.Module,
        width: Width,
        ropes: Mapping[str | None, Rope] | None,
        forms: Mapping[Place, Form],
        pairing: Pairing,
    ) -> None:
        super().__init__(original, width, forms, pairing)
        self.ropes = None if ropes is None else dict(ropes)
        # Text positions have one axis. M-RoPE gives text tokens the same position on all axes, so one axis suffices.
        self.of_text = None if ropes is None else {kind: replace(rope, axes=None) for kind, rope in ropes.items()}

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return the Rotation of these tokens in place of the tables that the original returns.

        Args:
            x: hidden states, of which only device and dtype matter.
            position_ids: `[batch, seq]` or `[axes, batch, seq]`.
            layer_type: the layer type, for models whose rotary module has several.
        """
        if self.ropes is None:
            rotation = self._original_angles(x, position_ids, layer_type)
        else:
            rotation = exact(self._rope(layer_type, position_ids), x, position_ids)
        return self.as_tables(rotation)

    def _rope(self, layer_type: str | None, position_ids: Tensor) -> Rope:
        ropes = (self.of_text if position_ids.ndim == 2 else self.ropes) or {}
        if layer_type in ropes:
            rope = ropes[layer_type]
            if position_ids.ndim == 3 and (rope.axes is None or rope.axes.count != position_ids.shape[0]):
                raise _axes_error(rope, position_ids)
            return rope
        must = f"the layer type must be one of {', '.join(map(shown, ropes))}"
        raise error(WHO, must, shown(layer_type), "Call restore(model) to use the model's own rotation.")

    def _original_angles(self, x: Tensor, position_ids: Tensor, layer_type: str | None) -> Rotation:
        """Create a Rotation from the tables that the original module computes."""
        probe = x[..., :1].float()  # the original casts its tables to the dtype of x
        keywords = {} if layer_type is None else {"layer_type": layer_type}
        returned = self.original(probe, position_ids, **keywords)
        name = "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
        factor = getattr(self.original, name, 1.0)
        return from_tables(*self.tables(returned), self.pairing, factor)

    def extra_repr(self) -> str:
        if self.ropes is None:
            return "the model's own angles"
        return ", ".join(str(rope) if kind is None else f"{kind}: {rope}" for kind, rope in self.ropes.items())


def _to_original(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the keys of a checkpoint, so that they are loaded into the original module inside the replacement."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}original.{key.removeprefix(prefix)}"] = state_dict.pop(key)


def exact(rope: Rope, x: Tensor, position_ids: Tensor) -> Rotation:
    """Return the Rotation at positions `[batch, seq]` or `[axes, batch, seq]`, on the device of x.

    Its tables are float64 if x is float64, and float32 otherwise.
    """
    shared = position_ids.shape[-2] == 1  # one row for the whole batch
    return rope.at(position_ids.squeeze(-2) if shared else position_ids, device=x.device, dtype=dtype_for(x))


def dtype_for(x: Tensor) -> torch.dtype | None:
    """Return the dtype of the tables for hidden states x. None means the default, float32."""
    return torch.float64 if x.dtype is torch.float64 else None


def from_tables(cos: Tensor, sin: Tensor, pairing: Pairing, factor: float) -> Rotation:
    """Create a Rotation from float32 tables `[batch, seq, pairs]`."""
    if cos.dtype is not torch.float32 or cos.ndim != 3 or cos.shape != sin.shape:
        must = "the model's own tables must be float32 [batch, seq, pairs]"
        raise error(WHO, must, f"{describe(cos)} and {describe(sin)}", "Use angles='exact'.")
    if cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    return create_unchecked(
        cos.contiguous(), sin.contiguous(), pairing, 2 * cos.shape[-1], 2 * cos.shape[-1], 0, factor
    )


def _axes_error(rope: Rope, position_ids: Tensor) -> Exception:
    axes = "" if rope.axes is None else f" or [{rope.axes.count}, batch, seq]"
    return error(
        WHO,
        f"position_ids must be [batch, seq]{axes}",
        f"shape {tuple(position_ids.shape)}",
        "Call restore(model) to use the model's own rotation.",
    )
