"""Replacements of the rotary modules of vision towers, one class for each way in which such a module gets positions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk._checks import describe, error
from ropewalk._layout import Pairing
from ropewalk.integrations.transformers.angles import WHO, ModuleAngles, dtype_for
from ropewalk.integrations.transformers.dispatch import Place
from ropewalk.integrations.transformers.probe import Form, Width
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation, create_unchecked

PERMUTE = "permute_input_for_window_attn"


class TowerAngles(ModuleAngles):
    """The base class of the modules that replace the rotary modules of towers.

    Args:
        ropes: the ropes whose angles are used: one, or one for each part of a head that is rotated separately. With
            several ropes, a tuple of Rotations replaces cos and sin. None uses the angles of the original module.
        in_windows: whether the tower permutes the tables into the order of its windows before it rotates.
    """

    def __init__(
        self,
        original: nn.Module,
        width: Width,
        ropes: tuple[Rope, ...] | None,
        forms: Mapping[Place, Form],
        pairing: Pairing,
        *,
        in_windows: bool,
    ) -> None:
        super().__init__(original, width, forms, pairing)
        self.ropes = ropes
        self.in_windows = in_windows
        self.parts = next(iter(forms.values())).parts

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        """Return whether this class can replace the module."""
        raise NotImplementedError

    @classmethod
    def sample(cls, original: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        """Return arguments for a test call of the original, and the positions `[axes, tokens]` that they describe.

        Args:
            original: the original module.
            rows: positions `[axes, tokens]`, different on each axis, for modules that take positions.
        """
        raise NotImplementedError

    def exact(self, x: Tensor, positions: Tensor) -> Any:
        """Return the Rotation at positions `[axes, tokens]`, in place of the tables that the original returns."""
        return self._wrap_rotations(
            [rope.at(positions, device=x.device, dtype=dtype_for(x)) for rope in self.ropes or ()]
        )

    def original_angles(self, *arguments: Any) -> Any:
        """Call the original with these arguments, and return the Rotation by the tables that it computes."""
        returned = self.original(*arguments)
        columns = 2 * self.tables(returned)[0].shape[-1]
        size = columns // self.parts
        rotations = []
        for part, part_tables in enumerate(split_parts(returned, self.parts)):
            cos, sin = self.tables(part_tables)
            if cos.dtype is not torch.float32:
                must = "the tables of the tower must be float32"
                raise error(WHO, must, describe(cos), "Use angles='exact'.")
            if self.parts == 1:
                cos, sin = (table.reshape(-1, table.shape[-1]) for table in (cos, sin))
            tables = cos.contiguous(), sin.contiguous()
            rotations.append(create_unchecked(*tables, self.pairing, columns, size, part * size, 1.0, False))
        return self._wrap_rotations(rotations)

    def _wrap_rotations(self, rotations: list[Rotation]) -> Any:
        """Wrap the Rotations, one for each part of a head, as the tower's code expects its tables."""
        if len(rotations) > 1:
            return self.as_tables(tuple(rotations))
        return self.as_tables(Blocks(rotations[0]) if self.in_windows else rotations[0])

    def extra_repr(self) -> str:
        return "the model's own angles" if self.ropes is None else "; ".join(map(str, self.ropes))


def split_parts(returned: Any, parts: int) -> list[Any]:
    """Split the tables that an original returned into those of each part of a head."""
    if isinstance(returned, Tensor):
        return [returned]
    cos, sin = (table.chunk(parts, dim=-1) for table in returned)
    return list(zip(cos, sin, strict=True))


class GridAngles(TowerAngles):
    """The replacement of modules that take positions of patches `[tokens, axes]`: integers, or floats in SAM 3."""

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        return _has_frequencies(module) and _parameters(module) == ["x", "position_ids"]

    @classmethod
    def sample(cls, original: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        return (torch.zeros(rows.shape[1], 1, device=rows.device), rows.T), rows

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        """Return the Rotation of these patches, in place of the tables that the original returns."""
        if self.ropes is None:
            return self.original_angles(x[..., :1].float(), position_ids)
        if position_ids.is_floating_point():
            position_ids = position_ids.float()  # a buffer that was cast with the model
        return self.exact(x, position_ids.movedim(-1, 0))


class BatchAngles(GridAngles):
    """The replacement of modules that take positions of patches of a batch, `[batch, tokens, axes]` (Gemma 4)."""

    @classmethod
    def sample(cls, original: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        (x, positions), _ = super().sample(original, rows)
        return (x[None], positions[None]), rows


class CentreAngles(TowerAngles):
    """The replacement of modules that take pixels (DINOv3).

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
    def sample(cls, original: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        height, width = _sides(original)
        pixels = torch.zeros(1, 1, 1, 1, device=rows.device).expand(1, 1, 3 * height, 5 * width)
        return (pixels,), _centres(original, pixels, augmented=False)

    def forward(self, pixel_values: Tensor) -> Any:
        """Return the Rotation of the patches of these images, in place of the tables that the original returns."""
        if self.ropes is None:
            return self.original_angles(pixel_values[:1, :1].float())
        return self.exact(pixel_values, _centres(self.original, pixel_values, augmented=self.original.training))


class FixedAngles(TowerAngles):
    """The replacement of modules without positions: images have a fixed size, and the class token is last (Llama 4)."""

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        return module._buffers.get("freqs_ci") is not None and _parameters(module) == ["hidden_states"]

    @classmethod
    def sample(cls, original: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        return (rows,), _fixed_positions(original, rows.device)

    def forward(self, hidden_states: Tensor) -> Any:
        """Return the Rotation of the tower's tokens, in place of the table that the original returns."""
        if self.ropes is None:
            return self.original_angles(hidden_states)
        return self.exact(hidden_states, _fixed_positions(self.original, hidden_states.device))


class Blocks:
    """A Rotation that a tower permutes into the order of its windows, in blocks of patches that are merged later.

    The tower's code reshapes its tables to blocks, selects blocks by index, and reshapes the result to patches. These
    operations have the same effect on this object, and the last one returns the Rotation of the permuted patches.

    Args:
        rotation: the Rotation of the patches.
        size: the number of patches in a block.
    """

    def __init__(self, rotation: Rotation, size: int = 1) -> None:
        self.rotation, self.size = rotation, size

    def reshape(self, *shape: int) -> Blocks | Rotation:
        """Reshape to `[blocks, patches of a block, -1]`, or to `[patches, -1]`, which returns the Rotation."""
        return Blocks(self.rotation, shape[1]) if len(shape) == 3 else self.rotation

    def __getitem__(self, index: tuple[Tensor, slice, slice]) -> Blocks:
        blocks = index[0]
        rows = blocks[:, None] * self.size + torch.arange(self.size, device=blocks.device)
        return Blocks(self.rotation[rows.flatten()], self.size)


def _has_frequencies(module: nn.Module) -> bool:
    return module._buffers.get("inv_freq") is not None


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _centre_functions(original: nn.Module) -> tuple[Any, Any]:
    """Return the functions of the tower's file that compute the centres of patches and augment them."""
    names = inspect.unwrap(type(original).forward).__globals__
    return names.get("get_patches_center_coordinates"), names.get("augment_patches_center_coordinates")


def _sides(original: nn.Module) -> tuple[int, int]:
    """Return the height and width of a patch, in pixels."""
    patch: Any = original.config.patch_size  # type: ignore[union-attr]
    return (patch, patch) if isinstance(patch, int) else (patch[0], patch[1])


def _centres(original: nn.Module, pixels: Tensor, *, augmented: bool) -> Tensor:
    """Return positions `[axes, patches]`: float64, or float32 if they are augmented.

    In float32, the augmentation draws the same random numbers as in the tower's own code.
    """
    height, width = _sides(original)
    centres, augment = _centre_functions(original)
    dtype = torch.float32 if augmented else torch.float64
    positions: Tensor = centres(
        pixels.shape[-2] // height, pixels.shape[-1] // width, dtype=dtype, device=pixels.device
    )
    if augmented:
        config: Any = original.config
        positions = augment(
            positions, shift=config.pos_embed_shift, jitter=config.pos_embed_jitter, rescale=config.pos_embed_rescale
        )
    return 2 * math.pi * positions.T


def _fixed_positions(original: nn.Module, device: torch.device) -> Tensor:
    """Return positions `[axes, tokens]`: columns and rows counted from 1, and 0 for the class token."""
    config: Any = original.config
    patches = torch.arange((config.image_size // config.patch_size) ** 2, device=device)
    side = config.image_size // config.patch_size
    positions = torch.stack((patches % side, torch.div(patches, side, rounding_mode="floor"))) + 1
    return torch.nn.functional.pad(positions, (0, 1))
