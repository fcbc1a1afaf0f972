"""A small language model as Llama is built: RMSNorm, attention with rotation, SwiGLU. Bytes, or any small alphabet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import ropewalk


@dataclass(frozen=True)
class Size:
    """Sizes of a `LanguageModel`, in channels, heads, layers and tokens of the alphabet."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tied: bool = True


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.hidden_size, eps=1e-5)
        self.self_attn = ropewalk.RotaryAttention(size.hidden_size, size.num_heads, num_kv_heads=size.num_kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden_size, eps=1e-5)
        self.mlp = SwiGLU(size)

    def forward(self, x: Tensor, rotation: ropewalk.Rotation | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        return x + self.mlp(self.post_attention_layernorm(x))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden_size, size.intermediate_size, bias=False)
        self.up_proj = nn.Linear(size.hidden_size, size.intermediate_size, bias=False)
        self.down_proj = nn.Linear(size.intermediate_size, size.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LanguageModel(nn.Module):
    """Tokens → logits of the next token. The rotation is made once by the caller and handed to every layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(size.vocab_size, size.hidden_size)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(size.hidden_size, size.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if size.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor, rotation: ropewalk.Rotation | None) -> Tensor:
        """tokens `[batch, seq]` → logits `[batch, seq, vocab_size]`."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.lm_head(self.norm(x))
