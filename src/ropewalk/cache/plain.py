"""Stores that keep keys and values as they are: two tensors, or one for the rows of latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk.attention.few_tokens import attend_cached
from ropewalk.kernels.visible import StoreArguments, VisibleKeys
from ropewalk.rotation import qk_norm
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm


class PlainStore:
    """Keys and values as they are: two tensors `[batch, slots of a row, kv_heads, head_dim]`."""

    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __init__(
        self, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        self.keys, self._values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.dtype = dtype

    @property
    def values(self) -> Tensor:
        return self._values

    @property
    def _tensors(self) -> list[Tensor]:
        return [self.keys, self._values]

    def write(self, slots: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        for kept, new in zip(self._tensors, (k, v), strict=False):  # latent rows keep no values
            kept.index_put_(slots, new)

    def rotate_and_write(
        self, slots: Tensor, q: Tensor, k: Tensor, v: Tensor | None, *, rotation: Rotation, norm: QKNorm | None
    ) -> Tensor | None:
        values = None if v is None else self._values
        store = StoreArguments(v, self.keys, values, slots, self.key_scales, self.value_scales)
        rotated: Tensor | None = qk_norm.run_fused(rotation, q, k, layout="bshd", norm=norm, store=store)
        return rotated

    def attend(self, q: Tensor, far_q: Tensor | None, visible: VisibleKeys, *, scale: float) -> Tensor | None:
        if self.key_scales is not None:
            visible = visible._replace(key_scales=self.key_scales, value_scales=self.value_scales)
        return attend_cached(q, far_q, self.keys, self._values, visible, scale=scale)

    def read(self, count: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, :count], self._values[:, :count]

    def rotate(self, rotation: Rotation, rows: Tensor | None) -> None:
        if rows is None:
            rotation.apply_(self.keys, layout="bshd")
            return
        rotated = self.keys.index_select(0, rows)
        rotation.apply_(rotated, layout="bshd")
        self.keys.index_copy_(0, rows, rotated)

    def clear(self, slots: tuple[Tensor | int, Tensor | slice]) -> None:
        for kept in self._tensors:
            kept[slots] = 0

    def reorder(self, rows: Tensor, count: int) -> None:
        for some in [kept[:, :count] for kept in self._tensors]:
            some.copy_(some.index_select(0, rows))


class LatentStore(PlainStore):
    """Rows of latent attention: keys whose first channels are also the values.

    Args:
        latent: number of these channels.
    """

    def __init__(
        self,
        latent: int,
        shape: tuple[int, int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.dtype, self.latent = dtype, latent

    @property
    def values(self) -> Tensor:
        return self.keys[..., : self.latent]

    @property
    def _tensors(self) -> list[Tensor]:
        return [self.keys]

    def rotate_and_write(
        self, slots: Tensor, q: Tensor, k: Tensor, v: Tensor | None, *, rotation: Rotation, norm: QKNorm | None
    ) -> Tensor | None:
        return super().rotate_and_write(slots, q, k, None, rotation=rotation, norm=norm)

    def attend(self, q: Tensor, far_q: Tensor | None, visible: VisibleKeys, *, scale: float) -> Tensor | None:
        return attend_cached(q, far_q, self.keys, self.values, visible, scale=scale)

    def read(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the keys, also as values: PyTorch's fused attention on a CPU supports values of their width only."""
        return self.keys[:, :count], self.keys[:, :count]
