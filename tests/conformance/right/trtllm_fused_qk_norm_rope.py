"""TensorRT-LLM: norm and rotation in place in one flat qkv, with the base as an argument."""

import torch


@torch.no_grad()
def fused_qk_norm_rope(
    qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, base, is_neox, position_ids
):
    """qkv: `[tokens, (num_heads_q + num_heads_k + num_heads_v) · head_dim]`; position_ids: `[tokens]`."""
    heads = qkv.view(len(qkv), -1, head_dim)
    angles = position_ids[:, None, None] * base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    cos, sin = angles.cos(), angles.sin()
    for part, weight in (
        (heads[:, :num_heads_q], q_weight),
        (heads[:, num_heads_q : num_heads_q + num_heads_k], k_weight),
    ):
        x = part.float()
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight
        if is_neox:
            a, b = x.chunk(2, dim=-1)
            part.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
        else:
            a, b = x[..., ::2], x[..., 1::2]
            part.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2))


TARGET = "fused_qk_norm_rope"
GIVEN = {"pairing": "half"}
