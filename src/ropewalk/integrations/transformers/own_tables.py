"""GPT-J and CodeGen have no rotary module: each attention looks its positions up in a table of its own."""

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
    """Whether this is an attention with such a table: rows of sin and then cos."""
    return module._buffers.get(NAME) is not None and "Attention" in type(module).__name__


class TableAngles(Angles):
    """In the place of the table: what is looked up in it becomes a Rotation.

    Their attention gathers rows from it (`torch.gather` or an index) and splits them into sin and cos; both become the
    same Rotation.

    Args:
        table: the model's own, `[positions, 2 · pairs]`; sin, then cos.
        rope: whose angles are taken; None for those of the table.
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
        """One table for each row of the batch: nothing needs to be copied."""
        return self

    def __getitem__(self, position_ids: Tensor) -> Looked:
        return Looked(self, position_ids)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.gather and not kwargs:
            table, _, positions = args
            return Looked(table, positions[..., 0])
        return NotImplemented

    def rotation(self, position_ids: Tensor) -> Rotation:
        """The rotation of these tokens `[batch, seq]`."""
        if self.rope is not None:
            return exact(self.rope, self.table, position_ids)  # type: ignore[arg-type]
        rows: Tensor = self.table[position_ids].float()  # type: ignore[index]
        sin, cos = torch.split(rows, rows.shape[-1] // 2, dim=-1)
        return from_tables(cos, sin, self.pairing, 1.0)


class Looked:
    """Rows of the table, which are split into sin and cos next."""

    def __init__(self, table: TableAngles, position_ids: Tensor) -> None:
        self.table, self.position_ids = table, position_ids

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.position_ids.shape, self.table.shape[-1]))

    def to(self, *_: Any) -> Looked:
        """The dtype of the tables is ours."""
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
    """Raise unless the table has this rope's sin and cos, up to float32 drift and the cast that it had."""
    if table.is_meta:
        raise error(WHO, f"{name} must have its numbers", "a model on the meta device", "Load the weights first.")
    pairs = table.shape[-1] // 2
    wanted = torch.from_numpy(rope.inv_freq)
    if pairs == wanted.numel():
        rows = table.detach().to("cpu", torch.float64)
        places = torch.arange(len(rows), dtype=torch.float64)[:, None]
        angles = places * wanted
        tolerance = 2 * torch.finfo(rounded_to(table)).eps + 2e-6 + places * 2.0**-22
        if bool(((rows - torch.cat((angles.sin(), angles.cos()), dim=-1)).abs() <= tolerance).all()):
            return
    raise error(
        WHO,
        f"{name} must have sin and cos of {rope}",
        f"a table of {pairs} pairs with other numbers",
        "Was the config changed after the model was built? angles='theirs' takes the model's own numbers.",
    )
