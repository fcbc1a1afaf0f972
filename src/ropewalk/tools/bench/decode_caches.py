"""The caches that the decoding benchmark compares, all with the same keys and values, and the memory that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ropewalk

KV, DYNAMIC, STATIC = "ropewalk, KVCache", "transformers, DynamicCache", "transformers, StaticCache"
STORES = {f"ropewalk, {store}": store for store in ("int8", "fp8")}
"""The store of each KVCache that keeps 8 bits for a number."""
LATENT = "ropewalk, latent rows"
"""A KVCache with the rows of multi-head latent attention, which the model does not have."""
OURS = (KV, *STORES, LATENT)
CACHES = (*OURS, DYNAMIC, STATIC)


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model, Qwen 3 0.6B with fewer layers and a small vocabulary, and of latent rows of DeepSeek V2 Lite.

    A row has at most as many channels as all key heads, and its last ones, which are not latent, are rotated.
    """

    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 3072
    layers: int = 4
    vocabulary: int = 1000
    row: int = 576
    latent: int = 512

    def config(self) -> Any:
        """Return the config of transformers for this model."""
        import transformers

        return transformers.Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=True,
        )


@dataclass(frozen=True)
class Fill:
    """The content of the caches.

    Args:
        size: the sizes of the model.
        batch: the number of rows, which hold equal keys and values.
        held: the number of tokens in each row.
        room: the number of tokens that can be added to each row.
        dtype: the dtype of keys and values.
    """

    size: Geometry
    batch: int
    held: int
    room: int
    dtype: torch.dtype

    @property
    def read_bytes(self) -> int:
        """The number of bytes of the held keys and values of one layer."""
        return 2 * self.batch * self.held * self.size.kv_heads * self.size.head_dim * self.dtype.itemsize

    def needed_bytes(self, names: Sequence[str]) -> int:
        """Return the number of bytes of these caches and of the copies that attention over them makes."""
        kept, copied = self.size.layers * self.read_bytes, self.read_bytes  # one layer at a time is copied
        small = kept * (self.size.head_dim + 4) // (self.size.head_dim * self.dtype.itemsize)  # with scales
        rows = kept * self.size.row // (2 * self.size.kv_heads * self.size.head_dim)
        sizes = {DYNAMIC: kept + copied, LATENT: rows, **dict.fromkeys(STORES, small + copied)}
        return sum(sizes.get(name, kept) for name in names) * (self.held + self.room) // self.held

    def draw(self) -> list[tuple[Tensor, Tensor]]:
        """Draw normally distributed keys and values of one row, `[1, held, kv_heads, head_dim]`, for each layer."""
        draw = torch.Generator().manual_seed(self.batch)
        shape = (1, self.held, self.size.kv_heads, self.size.head_dim)
        k, v = ([torch.randn(shape, generator=draw).to(self.dtype) for _ in range(self.size.layers)] for _ in range(2))
        return list(zip(k, v, strict=True))

    def latent_row(self, k: Tensor) -> Tensor:
        """Return keys `[..., kv_heads, head_dim]` as latent rows `[..., 1, row]`: the first channels of all heads."""
        return k.flatten(-2)[..., None, : self.size.row]

    def build(self, name: str, content: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Build the cache of this name, one of `CACHES`, in which each row holds `content`, the result of `draw`."""
        cache = self._makers()[name]()
        rows = [tuple(x.expand(self.batch, -1, -1, -1) for x in layer) for layer in content]
        if name in OURS:
            step = cache.step(self.held)
            for i, (k, v) in enumerate(rows):
                step.layer(i).write(*(self.latent_row(k),) if name == LATENT else (k, v))
        else:
            for i, (k, v) in enumerate(rows):
                cache.update(k.transpose(1, 2), v.transpose(1, 2), i)
        return cache

    def _makers(self) -> dict[str, Callable[[], Any]]:
        import transformers

        size, capacity = self.size, self.held + self.room
        heads = (size.kv_heads, size.head_dim)

        def whole(heads: tuple[int, int] = heads, **options: Any) -> ropewalk.KVCache:
            return ropewalk.KVCache(size.layers, self.batch, *heads, capacity=capacity, dtype=self.dtype, **options)

        return {
            KV: whole,
            **{name: partial(whole, store=store) for name, store in STORES.items()},
            LATENT: partial(whole, (1, size.row), latent=size.latent),
            DYNAMIC: lambda: transformers.DynamicCache(config=size.config()),
            STATIC: lambda: transformers.StaticCache(config=size.config(), max_cache_len=capacity),
        }
