"""Modules that replace the rotary module of a vision tower: one class for each way of passing positions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk._checks import described, error
from ropewalk._layout import Pairing
from ropewalk.integrations.transformers.angles import WHO, ModuleAngles, dtype_for
from ropewalk.integrations.transformers.dispatch import Place
from ropewalk.integrations.transformers.probe import Form, Width
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation, unchecked

PERMUTE = "permute_input_for_window_attn"


class TowerAngles(ModuleAngles):
    """The common part of the replacements in towers.

    Args:
        ropes: the rope whose angles are used. If parts of a head are rotated separately, one rope for each part, and
            cos and sin are then replaced by a tuple of Rotations. None uses the angles of the original.
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
        """Whether this class replaces modules like `module`."""
        raise NotImplementedError

    @classmethod
    def sample(cls, original: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        """The arguments of a test call of the original, and the positions `[axes, tokens]` that they mean.

        Args:
            original: the original module.
            rows: positions `[axes, tokens]`, different on each axis, for modules that take positions.
        """
        raise NotImplementedError

    def exact(self, x: Tensor, positions: Tensor) -> Any:
        """The rotation at these positions, in the form in which the original returns its tables."""
        return self._in_place([rope.at(positions, device=x.device, dtype=dtype_for(x)) for rope in self.ropes or ()])

    def theirs(self, *given: Any) -> Any:
        """The rotation by the tables that the original returns."""
        returned = self.original(*given)
        columns = 2 * self.tables(returned)[0].shape[-1]
        size = columns // self.parts
        made = []
        for part, each in enumerate(in_parts(returned, self.parts)):
            cos, sin = self.tables(each)
            if cos.dtype is not torch.float32:
                must = "the tower's own tables must be float32"
                raise error(WHO, must, described(cos), "Use angles='exact'.")
            if self.parts == 1:
                cos, sin = (table.reshape(-1, table.shape[-1]) for table in (cos, sin))
            tables = cos.contiguous(), sin.contiguous()
            made.append(unchecked(*tables, self.pairing, columns, size, part * size, 1.0, False))
        return self._in_place(made)

    def _in_place(self, rotations: list[Rotation]) -> Any:
        if len(rotations) > 1:
            return self.as_returned(tuple(rotations))
        return self.as_returned(Blocks(rotations[0]) if self.in_windows else rotations[0])

    def extra_repr(self) -> str:
        return "the model's own angles" if self.ropes is None else "; ".join(map(str, self.ropes))


def in_parts(returned: Any, parts: int) -> list[Any]:
    """Split the tables that an original returned into those of each part of a head."""
    if isinstance(returned, Tensor):
        return [returned]
    cos, sin = (table.chunk(parts, dim=-1) for table in returned)
    return list(zip(cos, sin, strict=True))


class GridAngles(TowerAngles):
    """For modules that take the positions of the patches, `[tokens, axes]`: integers, or floats (SAM 3)."""

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        return _has_frequencies(module) and _parameters(module) == ["x", "position_ids"]

    @classmethod
    def sample(cls, original: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        return (torch.zeros(rows.shape[1], 1, device=rows.device), rows.T), rows

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        """The rotation of these patches, as the original returns its tables."""
        if self.ropes is None:
            return self.theirs(x[..., :1].float(), position_ids)
        if position_ids.is_floating_point():
            position_ids = position_ids.float()  # a buffer that was cast with the model
        return self.exact(x, position_ids.movedim(-1, 0))


class BatchAngles(GridAngles):
    """For modules that take the positions of the patches of a batch, `[batch, tokens, axes]` (Gemma 4)."""

    @classmethod
    def sample(cls, original: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        (x, positions), _ = super().sample(original, rows)
        return (x[None], positions[None]), rows


class CentreAngles(TowerAngles):
    """For modules that take the pixels: positions are the centres of patches, from −1 to 1, times 2π (DINOv3).

    The tower's own functions compute them and, in training, apply the shift, jitter and rescale of its config.
    """

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        return (
            _has_frequencies(module)
            and _parameters(module) == ["pixel_values"]
            and all(callable(function) for function in _of_centres(module))
        )

    @classmethod
    def sample(cls, original: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        height, width = _sides(original)
        pixels = torch.zeros(1, 1, 1, 1, device=rows.device).expand(1, 1, 3 * height, 5 * width)
        return (pixels,), _centres(original, pixels, augmented=False)

    def forward(self, pixel_values: Tensor) -> Any:
        """The rotation of the patches of these images, as the original returns its tables."""
        if self.ropes is None:
            return self.theirs(pixel_values[:1, :1].float())
        return self.exact(pixel_values, _centres(self.original, pixel_values, augmented=self.original.training))


class FixedAngles(TowerAngles):
    """For modules without positions: patches of an image of fixed size, and the class token at the end (Llama 4)."""

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        return module._buffers.get("freqs_ci") is not None and _parameters(module) == ["hidden_states"]

    @classmethod
    def sample(cls, original: nn.Module, rows: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        return (rows,), _of_fixed(original, rows.device)

    def forward(self, hidden_states: Tensor) -> Any:
        """The rotation of the tower's tokens, as the original returns its table."""
        if self.ropes is None:
            return self.theirs(hidden_states)
        return self.exact(hidden_states, _of_fixed(self.original, hidden_states.device))


class Blocks:
    """Tables that a tower permutes into the order of its windows, in blocks of patches that are merged later.

    Its method reshapes the tables to blocks, selects blocks by their indices, and reshapes the result to patches. It
    then gets the Rotation of these patches.
    """

    def __init__(self, rotation: Rotation, size: int = 1) -> None:
        self.rotation, self.size = rotation, size

    def reshape(self, *shape: int) -> Blocks | Rotation:
        """`[blocks, patches of each, -1]`, or `[patches, -1]`."""
        return Blocks(self.rotation, shape[1]) if len(shape) == 3 else self.rotation

    def __getitem__(self, index: tuple[Tensor, slice, slice]) -> Blocks:
        blocks = index[0]
        rows = blocks[:, None] * self.size + torch.arange(self.size, device=blocks.device)
        return Blocks(self.rotation[rows.flatten()], self.size)


def _has_frequencies(module: nn.Module) -> bool:
    return module._buffers.get("inv_freq") is not None


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _of_centres(original: nn.Module) -> tuple[Any, Any]:
    """Return the functions of the tower's file that compute the centres of patches and augment them."""
    names = inspect.unwrap(type(original).forward).__globals__
    return names.get("get_patches_center_coordinates"), names.get("augment_patches_center_coordinates")


def _sides(original: nn.Module) -> tuple[int, int]:
    """Return the height and width of a patch, in pixels."""
    patch: Any = original.config.patch_size  # type: ignore[union-attr]
    return (patch, patch) if isinstance(patch, int) else (patch[0], patch[1])


def _centres(original: nn.Module, pixels: Tensor, *, augmented: bool) -> Tensor:
    """Positions `[axes, patches]`, float64; in training float32, so that the random numbers match the tower's code."""
    height, width = _sides(original)
    centres, augment = _of_centres(original)
    dtype = torch.float32 if augmented else torch.float64
    places: Tensor = centres(pixels.shape[-2] // height, pixels.shape[-1] // width, dtype=dtype, device=pixels.device)
    if augmented:
        config: Any = original.config
        places = augment(
            places, shift=config.pos_embed_shift, jitter=config.pos_embed_jitter, rescale=config.pos_embed_rescale
        )
    return 2 * math.pi * places.T


def _of_fixed(original: nn.Module, device: torch.device) -> Tensor:
    """Positions `[axes, tokens]`: columns and rows counted from 1, and 0 for the class token."""
    config: Any = original.config
    patches = torch.arange((config.image_size // config.patch_size) ** 2, device=device)
    side = config.image_size // config.patch_size
    places = torch.stack((patches % side, torch.div(patches, side, rounding_mode="floor"))) + 1
    return torch.nn.functional.pad(places, (0, 1))
