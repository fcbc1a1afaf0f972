"""vLLM's kernel for a fused qkv: a norm for each head of q and k, then the rotation, in place, without a gradient."""

import torch


@torch.no_grad()
def fused_qk_norm_rope(
    qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, cos_sin_cache, is_neox, position_ids
):
    """qkv: `[tokens, (heads of q, k and v) · head_dim]`; cos_sin_cache: `[length, rotary_dim]`."""
    heads = qkv.unflatten(-1, (num_heads_q + num_heads_k + num_heads_v, head_dim))
    rotary_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[position_ids][:, None].chunk(2, dim=-1)
    for start, count, weight in ((0, num_heads_q, q_weight), (num_heads_q, num_heads_k, k_weight)):
        x = heads[:, start : start + count]
        y = x.float()
        y = y * torch.rsqrt((y * y).mean(dim=-1, keepdim=True) + eps) * weight.float()
        head = y[..., :rotary_dim]
        if is_neox:
            a, b = head.chunk(2, dim=-1)
            head = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = head[..., ::2], head[..., 1::2]
            head = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        x.copy_(torch.cat((head, y[..., rotary_dim:]), dim=-1))


TARGET = "fused_qk_norm_rope"
GIVEN = {"pairing": "half"}
