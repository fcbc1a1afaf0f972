"""Replace the tables of GPT-J and CodeGen, in which each attention looks up its positions in its own table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk._checks import error
from ropewalk._layout import Pairing
from ropewalk.integrations.transformers.angles import WHO, Angles, exact, from_tables
from ropewalk.integrations.transformers.compare import rounded_to
from ropewalk.integrations.transformers.dispatch import Place
from ropewalk.integrations.transformers.probe import Form
from ropewalk.rope import Rope
from ropewalk.rotation.api import Rotation

NAME = "embed_positions"


def has_table(module: nn.Module) -> bool:
    """Return whether a module is an attention that stores its own table of sin and cos."""
    return module._buffers.get(NAME) is not None and "Attention" in type(module).__name__


class TableAngles(Angles):
    """The replacement of the table of an attention.

    The attention gathers rows of its table (by `torch.gather` or an index) and splits them into sin and cos. Gathering
    rows of this object returns a `TableRows`, and splitting the `TableRows` returns the same Rotation twice.

    Args:
        table: the original table, `[positions, 2 · pairs]`, with sin and then cos.
        rope: the rope whose angles are used. None uses the angles of the table.
    """

    def __init__(self, table: Tensor, rope: Rope | None, forms: Mapping[Place, Form], pairing: Pairing) -> None:
        super().__init__(forms, pairing)
        self.register_buffer("table", table, persistent=False)
        self.rope = rope

    @property
    def device(self) -> torch.device:
        return self.table.device  # type: ignore[return-value]

    @property
    def shape(self) -> torch.Size:
        return self.table.shape  # type: ignore[return-value]

    def repeat(self, *_: int) -> TableAngles:
        """Return this object itself, because the sequences of a batch can share it."""
        return self

    def __getitem__(self, position_ids: Tensor) -> TableRows:
        return TableRows(self, position_ids)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.gather and not kwargs:
            table, _, positions = args
            return TableRows(table, positions[..., 0])
        return NotImplemented

    def rotation(self, position_ids: Tensor) -> Rotation:
        """Return the Rotation at positions `[batch, seq]`."""
        if self.rope is not None:
            return exact(self.rope, self.table, position_ids)  # type: ignore[arg-type]
        rows: Tensor = self.table[position_ids].float()  # type: ignore[index]
        sin, cos = torch.split(rows, rows.shape[-1] // 2, dim=-1)
        return from_tables(cos, sin, self.pairing, 1.0)


class TableRows:
    """Rows of a `TableAngles`, which the attention splits into sin and cos.

    Args:
        table: the replaced table.
        position_ids: the numbers of the rows, `[batch, seq]`.
    """

    def __init__(self, table: TableAngles, position_ids: Tensor) -> None:
        self.table, self.position_ids = table, position_ids

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.position_ids.shape, self.table.shape[-1]))

    def to(self, *_: Any) -> TableRows:
        """Return the rows unchanged, because ropewalk chooses the dtype of cos and sin."""
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.split:
            rotation = args[0].table.rotation(args[0].position_ids)
            return rotation, rotation
        return NotImplemented


def check_table(name: str, table: Tensor, rope: Rope) -> None:
    """Raise a RopeError unless the table has the rope's sin and cos, within the error of float32 angles and casts."""
    if table.is_meta:
        raise error(WHO, f"{name} must have values", "a model on the meta device", "Load the weights first.")
    pairs = table.shape[-1] // 2
    inv_freq = torch.from_numpy(rope.inv_freq)
    if pairs == inv_freq.numel():
        rows = table.detach().to("cpu", torch.float64)
        positions = torch.arange(len(rows), dtype=torch.float64)[:, None]
        angles = positions * inv_freq
        tolerance = 2 * torch.finfo(rounded_to(table)).eps + 2e-6 + positions * 2.0**-22
        if bool(((rows - torch.cat((angles.sin(), angles.cos()), dim=-1)).abs() <= tolerance).all()):
            return
    raise error(
        WHO,
        f"{name} must have sin and cos of {rope}",
        f"a table of {pairs} pairs with other numbers",
        "If the config was changed on purpose, use angles='theirs', which uses the model's own numbers.",
    )
