"""A small language model like Llama, with RMSNorm, rotary attention and SwiGLU, for bytes or a small vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

import ropewalk
from ropewalk import _checks

EPS = 1e-5
"""ε of every RMSNorm, as in Llama 2 and 3 and in llama2.c."""


@dataclass(frozen=True)
class Size:
    """Sizes of a `LanguageModel`.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        hidden_size: channels of the model.
        intermediate_size: channels inside the SwiGLU.
        num_layers: number of layers.
        num_heads: number of query heads. Each has `head_dim = hidden_size / num_heads` channels, an even number.
        num_kv_heads: number of key and value heads, a divisor of num_heads. None means num_heads.
        tied: whether the output head shares the weight of the token embedding.
        absolute: "learned" or "sinusoidal" adds a vector for each absolute position to the embedding. None adds none.
        max_positions: number of learned positions, in tokens; only for "learned".
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = cast(int, None)  # an int from __post_init__ on
    tied: bool = False
    absolute: Literal["learned", "sinusoidal"] | None = None
    max_positions: int | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_heads


class SwiGLU(nn.Module):
    """The layer that computes down(silu(gate(x)) · up(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden_size, size.intermediate_size, bias=False)
        self.up_proj = nn.Linear(size.hidden_size, size.intermediate_size, bias=False)
        self.down_proj = nn.Linear(size.intermediate_size, size.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the SwiGLU to x `[..., hidden_size]`. The result has the same shape."""
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A layer of the model: x + attention(norm(x)), followed by x + SwiGLU(norm(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.hidden_size, eps=EPS)
        self.self_attn = ropewalk.RotaryAttention(size.hidden_size, size.num_heads, num_kv_heads=size.num_kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden_size, eps=EPS)
        self.mlp = SwiGLU(size)

    def forward(
        self, x: Tensor, rotation: ropewalk.Rotation | ropewalk.TwoPass | None, cache: ropewalk.LayerCache | None = None
    ) -> Tensor:
        """Apply the block to x `[batch, seq, hidden_size]`. The result has the same shape.

        `rotation` is as for `LanguageModel.forward`, and `cache` is the part of the cache for this layer.
        """
        x = x + self.self_attn(self.input_layernorm(x), rotation, cache=cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LanguageModel(nn.Module):
    """A language model from tokens to the logits of the next token.

    Parameters have the names of Hugging Face's Llama without the prefix `model.`. The initial weights are drawn from
    torch's global generator; call `torch.manual_seed` first.

    Args:
        size: the sizes.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(size.vocab_size, size.hidden_size)
        if size.max_positions is not None:
            self.embed_positions = nn.Embedding(size.max_positions, size.hidden_size)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.hidden_size, eps=EPS)
        self.lm_head = nn.Linear(size.hidden_size, size.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if size.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        tokens: Tensor,
        rotation: ropewalk.Rotation | ropewalk.TwoPass | None,
        *,
        positions: Tensor | None = None,
        cache: ropewalk.CacheStep | None = None,
    ) -> Tensor:
        """Compute the logits of the token after each token.

        Args:
            tokens: int64 `[batch, seq]`.
            rotation: the rotation of these tokens, which all layers share: `rope.at(positions)`,
                `SelfExtend.at(...)`, or `step.rotation(rope)` with a cache. None disables rotation.
            positions: absolute position of each token, int64 `[seq]` or `[batch, seq]`. Required if `size.absolute` is
                set, and allowed only then.
            cache: `KVCache.step(seq)`, for tokens that follow cached ones.

        Returns:
            `[batch, seq, vocab_size]`.

        Raises:
            RopeError: positions are missing, not allowed, or beyond the learned ones.
        """
        x = self.embed_tokens(tokens)
        if (positions is None) != (self.size.absolute is None):
            raise _checks.error(
                "LanguageModel",
                f"positions must be passed if and only if absolute is set (absolute={self.size.absolute!r})",
                "None" if positions is None else f"a tensor of shape {tuple(positions.shape)}",
                "Pass the positions of the rotation to rope.at instead.",
            )
        if positions is not None:
            x = self._add_positions(x, positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotation, None if cache is None else cache.layer(i))
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def _add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the vectors of absolute positions to x."""
        if self.size.absolute == "learned":
            rows = self.embed_positions.num_embeddings
            if int(positions.max()) >= rows:
                must, got = f"positions must be below max_positions={rows}", str(int(positions.max()))
                raise _checks.error("LanguageModel", must, got, "There is no learned vector there.")
            return x + cast(Tensor, self.embed_positions(positions))
        # Vaswani et al. 2017 (1706.03762), sections 3.4 and 3.5: the embedding is multiplied by √width.
        width = self.size.hidden_size
        speeds = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
        angles = positions.to(torch.float64).unsqueeze(-1) * speeds
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return torch.add(waves.to(x.dtype), x, alpha=width**0.5)
