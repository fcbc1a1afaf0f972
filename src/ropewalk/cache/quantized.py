"""Stores that keep keys and values in 8 bits, with a scale for each token and head."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk.cache.plain import PlainStore
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.store import quantize


class QuantizedStore(PlainStore):
    """Rotated keys, and values, in 8 bits: each head of a token is `scale` times a row of int8 or e4m3 numbers.

    The largest number of a head becomes 127 in int8, and 448 in e4m3, so scale = max|x| / 127 or max|x| / 448. A head
    of D channels takes D + 4 bytes: 0.516 of bfloat16 if D is 128.

    A number x is kept with an error of at most scale / 2 in int8, and max(|x| / 16, scale / 1024) in e4m3. So the score
    q·k changes by at most

        int8:  Σ|qᵢ| · scale / 2
        e4m3:  Σ|qᵢ| · max(|kᵢ| / 16, scale / 1024)

    plus roundings of float32. `read` rounds once more, to `dtype`, and each `rotate` quantizes the keys again. A head
    with a number that is not finite reads as NaN.

    Attributes:
        keys, values: the 8-bit numbers, `[batch, slots of a row, kv_heads, head_dim]`, int8 or float8_e4m3fn.
        key_scales, value_scales: the scales, float32 `[batch, slots of a row, kv_heads]`.
        dtype: dtype of the keys and values that are written and read.
    """

    kept: torch.dtype
    key_scales: Tensor
    value_scales: Tensor

    def __init__(
        self, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        self.keys, self._values = (torch.zeros(shape, dtype=self.kept, device=device) for _ in range(2))
        self.key_scales, self.value_scales = (torch.zeros(shape[:3], device=device) for _ in range(2))
        self.dtype = dtype

    @property
    def _tensors(self) -> list[Tensor]:
        return [self.keys, self.key_scales, self.values, self.value_scales]

    def _dequantize(self, x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)  # the 8 bits are exact in it, so the result is rounded once
        return x.to(wide).mul_(scales[..., None]).to(dtype)

    def write(self, slots: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        for kept, new in zip(self._tensors, (*quantize(k, self.kept), *quantize(v, self.kept)), strict=True):
            kept.index_put_(slots, new)

    def read(self, count: int) -> tuple[Tensor, Tensor]:
        keys, key_scales, values, value_scales = (x[:, :count] for x in self._tensors)
        return self._dequantize(keys, key_scales, self.dtype), self._dequantize(values, value_scales, self.dtype)

    def rotate(self, rotation: Rotation, rows: Tensor | None) -> None:
        keys, scales = (x if rows is None else x.index_select(0, rows) for x in (self.keys, self.key_scales))
        wide = torch.promote_types(self.dtype, torch.float32)
        rotated = rotation(self._dequantize(keys, scales, wide), layout="bshd")
        for kept, new in zip((self.keys, self.key_scales), quantize(rotated, self.kept), strict=True):
            kept[slice(None) if rows is None else rows] = new


class Int8Store(QuantizedStore):
    kept = torch.int8


class Fp8Store(QuantizedStore):
    kept = torch.float8_e4m3fn


STORES: dict[str, type[QuantizedStore]] = {"int8": Int8Store, "fp8": Fp8Store}
"""The names that a cache takes as `store`."""
