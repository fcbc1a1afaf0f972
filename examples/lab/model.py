"""A small language model like Llama: RMSNorm, rotary attention and SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

import ropewalk

EPS = 1e-5
"""ε of every RMSNorm, as in Llama 2 and 3."""


@dataclass(frozen=True)
class Size:
    """Sizes of a `LanguageModel`.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        hidden_size: channels of the model.
        intermediate_size: channels inside the SwiGLU.
        num_layers: number of layers.
        num_heads: number of heads. Each has `head_dim = hidden_size / num_heads` channels, an even number.
        tied: whether the output head shares the weight of the token embedding.
        absolute: "learned" or "sinusoidal" adds a vector for each absolute position to the embedding. None adds none.
        max_positions: number of learned positions, in tokens; only for "learned".
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    tied: bool = False
    absolute: Literal["learned", "sinusoidal"] | None = None
    max_positions: int | None = None

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
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A layer of the model: x + attention(norm(x)), followed by x + SwiGLU(norm(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.hidden_size, eps=EPS)
        self.self_attn = ropewalk.RotaryAttention(size.hidden_size, size.num_heads)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden_size, eps=EPS)
        self.mlp = SwiGLU(size)

    def forward(self, x: Tensor, rotation: ropewalk.Rotation | ropewalk.TwoPass | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        return x + self.mlp(self.post_attention_layernorm(x))


class LanguageModel(nn.Module):
    """A language model from tokens to the logits of the next token.

    The rope is not part of the model: each call passes a rotation, so the same weights run under every scheme. The
    initial weights are drawn from torch's global generator.
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

    def forward(self, tokens: Tensor, plan: ropewalk.Rope | ropewalk.SelfExtend | None) -> Tensor:
        """Compute the logits of the token after each token.

        Args:
            tokens: int64 `[batch, seq]`, at positions 0 to seq - 1.
            plan: what rotates the queries and keys of all layers. None disables rotation.

        Returns:
            `[batch, seq, vocab_size]`.
        """
        positions = torch.arange(tokens.shape[1])
        x = self._add_positions(self.embed_tokens(tokens), positions)
        rotation = None if plan is None else plan.at(positions)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.lm_head(self.norm(x))

    def _add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the vectors of absolute positions to x, if the model has any."""
        if self.size.absolute is None:
            return x
        if self.size.absolute == "learned":
            return x + self.embed_positions(positions)
        # Vaswani et al. 2017 (1706.03762), sections 3.4 and 3.5: the embedding is multiplied by √width.
        width = self.size.hidden_size
        speeds = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = positions.to(torch.float64).unsqueeze(-1) * speeds
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return torch.add(waves.to(x.dtype), x, alpha=width**0.5)
