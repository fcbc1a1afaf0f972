"""Classes that replace the classes of rotary modules, one for each way in which such a module gets positions.

A rotary module keeps its object, buffers and attributes. Only its class changes, to one that derives from the original
class and overrides the call. So other code finds, casts, saves and initializes the module as before.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk._checks import error, shown
from ropewalk.attention.self_extend import SelfExtend
from ropewalk.formats import Width, narrow, widen
from ropewalk.integrations.tables import rotation_of
from ropewalk.integrations.transformers import self_extend
from ropewalk.integrations.transformers.functions import Form, Place, attach, cos_and_sin, install
from ropewalk.rope.rope import Rope


@dataclass(frozen=True)
class Replacement:
    """What a replaced module computes. It is plain data, because it is copied and pickled with the model.

    Args:
        ropes: maps each layer type to the ropes of its angles: one, or one for each part of a head. The only key is
            None if the module is called without a layer type. If ropes is None, the angles are the module's own.
        width: the format of the module's tables.
        forms: maps each function that rotates by these tables to the way in which it rotates.
        extended: maps layer types to the Self-Extend of their attention.
        attention: with Self-Extend, the name of the attention function that the model used before.
    """

    ropes: Mapping[str | None, tuple[Rope, ...]] | None
    width: Width
    forms: Mapping[Place, Form]
    extended: Mapping[str | None, SelfExtend] = field(default_factory=dict)
    attention: str = ""


class Angles(nn.Module):
    """The base class. A call returns tables like those of the original, with the Rotation attached to them.

    It overrides the call and not `forward`, so other libraries may wrap `forward`, before or after the replacement.
    """

    ropewalk: Replacement
    _has_batch_axis = False

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        """Return whether this class can replace the class of a tower's rotary module."""
        raise NotImplementedError

    @classmethod
    def sample(cls, module: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        """Return arguments for a test call of a tower's module, and the positions `[axes, tokens]` that they describe.

        Args:
            module: the original module.
            rows: positions `[axes, tokens]`, different on each axis, for modules that take positions.
        """
        raise NotImplementedError

    def _exact(self, positions: Tensor, x: Tensor, shape: tuple[int, ...], kind: str | None = None) -> Any:
        """Return tables `[*shape, columns]` of exact angles. Those of several parts of a head are joined.

        Args:
            positions: as for `Rope.at`.
            x: a tensor on the device of the model and in its dtype. Rotations are float64 if x is, and float32
                otherwise.
            shape: shape of the tables without their last axis.
            kind: the layer type.
        """
        made = self.ropewalk
        dtype = torch.float64 if x.dtype is torch.float64 else None
        ropes = (made.ropes or {})[kind]
        rotations = [rope.at(positions, device=x.device, dtype=dtype) for rope in ropes]
        if made.width == "complex":
            tables: Any = torch.complex(rotations[0].cos, rotations[0].sin).reshape(*shape, -1)
        else:
            parts = ([widen(t.to(x.dtype), made.width) for t in (r.cos, r.sin)] for r in rotations)
            tables = tuple(torch.cat(part, dim=-1).reshape(*shape, -1) for part in zip(*parts, strict=True))
        if (extended := made.extended.get(kind)) is None:
            return attach(tables, rotations[0], made.forms)
        # Code that does not see what is attached cannot attend in two passes: NaN shows it.
        return attach(tuple(table * math.nan for table in tables), rotations[0], made.forms, (extended, positions))

    def _own(self, dtype: torch.dtype, *arguments: Any, **keywords: Any) -> Any:
        """Return the tables that the original computes from these arguments, whose tensors are float32.

        The attached Rotation is float32. The tables are cast to `dtype`, as the original would have done.
        """
        made = self.ropewalk
        returned = super().__call__(*arguments, **keywords)
        cos, sin = (narrow(table, made.width).contiguous() for table in cos_and_sin(returned))
        if not self._has_batch_axis:
            cos, sin = cos.flatten(0, -2), sin.flatten(0, -2)
        elif cos.shape[0] == 1:
            cos, sin = cos[0], sin[0]
        rotation = rotation_of(cos, sin, "half", next(iter(made.forms.values())).pairing)
        if not isinstance(returned, Tensor):
            returned = returned[0].to(dtype), returned[1].to(dtype)
        return attach(returned, rotation, made.forms)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for place in self.ropewalk.forms:
            install(place)
        if self.ropewalk.extended:
            self_extend.register()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the two classes from which `_new` derives the class again."""
        kind, original = type(self).__bases__
        return _new, (kind, original), self.__dict__

    def extra_repr(self) -> str:
        ropes = self.ropewalk.ropes
        if ropes is None:
            return "the model's own angles"
        each = {kind: "; ".join(map(str, parts)) for kind, parts in ropes.items()}
        return ", ".join(text if kind is None else f"{kind}: {text}" for kind, text in each.items())


def insert(module: Any, kind: type[Angles], replacement: Replacement) -> None:
    """Replace the class of a rotary module."""
    module.__class__ = _replaced_class(kind, type(module))
    module.ropewalk = replacement
    if replacement.extended:
        self_extend.register()
        module.config._attn_implementation = self_extend.NAME


def remove(module: Angles) -> None:
    """Give a rotary module its original class again."""
    if module.ropewalk.extended:
        module.config._attn_implementation = module.ropewalk.attention  # type: ignore[union-attr]
    del module.ropewalk
    module.__class__ = type(module).__bases__[1]


_classes: dict[tuple[type, type], type[Angles]] = {}


def _replaced_class(kind: type[Angles], original: type) -> type[Angles]:
    """Derive the class of a replaced module from a kind and the module's original class, whose name it keeps."""
    if (kind, original) not in _classes:
        _classes[kind, original] = type(original.__name__, (kind, original), {"__module__": __name__})
    return _classes[kind, original]


def _new(kind: type[Angles], original: type) -> Angles:
    made = _replaced_class(kind, original)
    return made.__new__(made)


class TextAngles(Angles):
    """The rotary module of a text model, which is called with hidden states and positions."""

    _has_batch_axis = True

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return the tables of these tokens.

        Args:
            x: hidden states, of which only device and dtype matter.
            position_ids: `[batch, seq]` or `[axes, batch, seq]`. One row may serve all axes, or the whole batch.
            layer_type: the layer type, for models whose rotary module has several.
        """
        ropes = self.ropewalk.ropes
        if ropes is None:
            keywords = {} if layer_type is None else {"layer_type": layer_type}
            return self._own(x.dtype, x[..., :1].float(), position_ids, **keywords)
        if layer_type not in ropes:
            must = f"the layer type must be one of {', '.join(map(shown, ropes))}"
            raise error("accelerate", must, shown(layer_type), _RESTORE)
        axes = ropes[layer_type][0].axes
        if position_ids.ndim == 3 and position_ids.shape[0] == 1:
            position_ids = position_ids[0]
        if position_ids.ndim == 2 and axes is not None:
            position_ids = position_ids.expand(axes.count, -1, -1)
        if position_ids.ndim != 2 and (position_ids.ndim != 3 or axes is None or axes.count != position_ids.shape[0]):
            several = "" if axes is None else f" or [{axes.count}, batch, seq]"
            must = f"position_ids must be [batch, seq]{several}"
            raise error("accelerate", must, f"shape {tuple(position_ids.shape)}", _RESTORE)
        shape = position_ids.shape[-2:]
        if shape[0] == 1:
            position_ids = position_ids.squeeze(-2)
        return self._exact(position_ids, x, shape, layer_type)


_RESTORE = "Call restore(model) to use the model's own rotation."


class GridAngles(Angles):
    """Modules that take positions of patches `[tokens, axes]`: integers, or floats in SAM 3."""

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        return _has_frequencies(module) and _parameters(module) == ["x", "position_ids"]

    @classmethod
    def sample(cls, module: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        return (torch.zeros(rows.shape[1], 1, device=rows.device), rows.T), rows

    def __call__(self, x: Tensor, position_ids: Tensor) -> Any:
        """Return the tables of these patches."""
        if self.ropewalk.ropes is None:
            return self._own(x.dtype, x[..., :1].float(), position_ids)
        shape = position_ids.shape[:-1]
        if position_ids.is_floating_point():
            position_ids = position_ids.float()  # a buffer that was cast with the model
        return self._exact(position_ids.movedim(-1, 0), x, shape)


class BatchAngles(GridAngles):
    """Modules that take positions of patches of a batch, `[batch, tokens, axes]` (Gemma 4)."""

    @classmethod
    def sample(cls, module: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        (x, positions), _ = super().sample(module, rows)
        return (x[None], positions[None]), rows


class CentreAngles(Angles):
    """Modules that take pixels (DINOv3).

    A position is 2π times a coordinate of the centre of a patch, which lies between −1 and 1. The tower's own functions
    compute the centres and, in training, apply the shift, jitter and rescale of its config.
    """

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        return (
            _has_frequencies(module)
            and _parameters(module) == ["pixel_values"]
            and all(callable(function) for function in _centre_functions(module))
        )

    @classmethod
    def sample(cls, module: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        height, width = _sides(module)
        pixels = torch.zeros(1, 1, 1, 1, device=rows.device).expand(1, 1, 3 * height, 5 * width)
        return (pixels,), _centres(module, pixels, augmented=False)

    def __call__(self, pixel_values: Tensor) -> Any:
        """Return the tables of the patches of these images."""
        if self.ropewalk.ropes is None:
            return self._own(pixel_values.dtype, pixel_values[:1, :1].float())
        positions = _centres(self, pixel_values, augmented=self.training)
        return self._exact(positions, pixel_values, positions.shape[1:])


class FixedAngles(Angles):
    """Modules without positions: images have a fixed size, and the class token is last (Llama 4)."""

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        return module._buffers.get("freqs_ci") is not None and _parameters(module) == ["hidden_states"]

    @classmethod
    def sample(cls, module: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        return (rows,), _fixed_positions(module, rows.device)

    def __call__(self, hidden_states: Tensor) -> Any:
        """Return the tables of the tower's tokens."""
        if self.ropewalk.ropes is None:
            return self._own(hidden_states.dtype, hidden_states)
        positions = _fixed_positions(self, hidden_states.device)
        return self._exact(positions, hidden_states, self.get_buffer("freqs_ci").shape[:-1])


TOWERS = (GridAngles, CentreAngles, FixedAngles)


def _has_frequencies(module: nn.Module) -> bool:
    return module._buffers.get("inv_freq") is not None


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _centre_functions(module: nn.Module) -> tuple[Any, Any]:
    """Return the functions of the tower's file that compute the centres of patches and augment them."""
    names = inspect.unwrap(type(module).forward).__globals__
    return names.get("get_patches_center_coordinates"), names.get("augment_patches_center_coordinates")


def _sides(module: nn.Module) -> tuple[int, int]:
    """Return the height and width of a patch, in pixels."""
    patch: Any = module.config.patch_size  # type: ignore[union-attr]
    return (patch, patch) if isinstance(patch, int) else (patch[0], patch[1])


def _centres(module: nn.Module, pixels: Tensor, *, augmented: bool) -> Tensor:
    """Return positions `[axes, patches]`: float64, or float32 if they are augmented.

    In float32, the augmentation draws the same random numbers as in the tower's own code.
    """
    height, width = _sides(module)
    centres, augment = _centre_functions(module)
    dtype = torch.float32 if augmented else torch.float64
    positions: Tensor = centres(
        pixels.shape[-2] // height, pixels.shape[-1] // width, dtype=dtype, device=pixels.device
    )
    if augmented:
        config: Any = module.config
        positions = augment(
            positions, shift=config.pos_embed_shift, jitter=config.pos_embed_jitter, rescale=config.pos_embed_rescale
        )
    return 2 * math.pi * positions.T


def _fixed_positions(module: nn.Module, device: torch.device) -> Tensor:
    """Return positions `[axes, tokens]`: columns and rows counted from 1, and 0 for the class token."""
    config: Any = module.config
    patches = torch.arange((config.image_size // config.patch_size) ** 2, device=device)
    side = config.image_size // config.patch_size
    positions = torch.stack((patches % side, torch.div(patches, side, rounding_mode="floor"))) + 1
    return torch.nn.functional.pad(positions, (0, 1))
