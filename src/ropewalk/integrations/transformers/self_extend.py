"""Self-Extend inside a model of transformers: a rotation of q and k, and an attention function that merges two passes.

The position of each key travels with it, in four more channels that hold its bytes. So whatever a cache does with keys
(static slots, padding, beams, cropping), the positions follow. Only attention in this file reads these channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropewalk._checks import error
from ropewalk._layout import Layout
from ropewalk.attention.attend import attend as attend_dense
from ropewalk.attention.self_extend import SelfExtend

NAME = "ropewalk_self_extend"  # in transformers' registry of attention functions
_CARRIED, _BYTES = "ropewalk_self_extend", 4


def rotate(extended: SelfExtend, positions: Tensor, q: Tensor, k: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return q `[batch, heads, 2 · seq, channels]`, rotated for both passes, and k with its positions."""
    if layout != "bhsd" or q.shape[-1] != extended.rope.head_dim:
        must = f"q must be [batch, heads, seq, {extended.rope.head_dim}] where the model rotates it"
        raise error("accelerate", must, f"{layout} of {list(q.shape)}", "Self-Extend cannot be used with this model.")
    q, k = extended.at(positions)(q.transpose(1, 2), k.transpose(1, 2), layout="bshd")
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    parts = [positions & 255, positions >> 8 & 255, positions >> 16 & 255, positions >> 24]  # each exact in 16 bits
    parts_of_heads = torch.stack(parts, -1).to(k.dtype).unsqueeze(-3).expand(*k.shape[:3], _BYTES)
    setattr(q, _CARRIED, (extended, positions))
    return q, torch.cat((k, parts_of_heads), dim=-1)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as transformers' attention functions do. Layers without Self-Extend use PyTorch's."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    carried: tuple[SelfExtend, Tensor] | None = getattr(query, _CARRIED, None)
    if carried is None and key.shape[-1] == query.shape[-1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    used = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if carried is None or key.shape[-1] != query.shape[-1] + _BYTES or used:
        must = "q and k must reach attention as they were rotated, without softcap, s_aux and position_bias"
        got = ", ".join(used) or "others"
        raise error("accelerate", must, got, "Self-Extend cannot be used with this model or this cache.")
    extended, positions = carried
    parts = key[:, 0, :, -_BYTES:].float()
    if not torch.compiler.is_compiling() and bool((parts != parts.round()).any()):
        fix = "Use a dynamic or a static cache."
        raise error("accelerate", "a cache must return keys as they were stored", "other keys", fix)
    places = (parts.long() << 8 * torch.arange(_BYTES, device=parts.device)).sum(-1)
    q, k, v = (x.transpose(1, 2) for x in (query, key[..., :-_BYTES], value))
    scale = options.get("scaling") or q.shape[-1] ** -0.5
    two = extended.at(positions.expand(len(q), -1), places)
    dropout = options.get("dropout", 0.0)
    out = attend_dense(q, k, v, rotation=two, mask=attention_mask, scale=scale, causal=False, dropout=dropout)
    return out, None


def register() -> None:
    """Add the attention function, and a mask that is always a tensor, to transformers' registries."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def mask(*arguments: Any, **options: Any) -> Tensor:
        skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(*arguments, **{**options, **skip})  # type: ignore[return-value]

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
