"""vLLM 51049: several heads of a warp share the exchange of a partial rotation, and only the first head gets partners.

The kernel that norms and rotates qkv is in place. Lanes without rotated channels do not take part in the exchange, so
the later heads of each group of four rotate every channel with itself.
"""

import torch

from ropewalk import Rope


def fused_qk_norm_rope(
    qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, cos_sin_cache, is_neox, position_ids
):
    """qkv: `[tokens, (q + k + v heads) · head_dim]`, changed in place."""
    heads = qkv.detach().view(len(qkv), num_heads_q + num_heads_k + num_heads_v, head_dim)
    cos, sin = cos_sin_cache[position_ids].chunk(2, dim=-1)
    half = cos.shape[-1]
    for h in range(num_heads_q + num_heads_k):
        weight = q_weight if h < num_heads_q else k_weight
        x = heads[:, h].float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
        if is_neox:
            a, b = x[:, :half], x[:, half : 2 * half]
            partners = (b, a) if 2 * half == head_dim or h % 4 == 0 else (a, b)
            first, second = a * cos - partners[0] * sin, b * cos + partners[1] * sin
            rotated = torch.cat((first, second), dim=-1)
        else:
            a, b = x[:, 0 : 2 * half : 2], x[:, 1 : 2 * half : 2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(1)
        heads[:, h] = torch.cat((rotated, x[:, 2 * half :]), dim=-1).type_as(qkv)


TARGET = "fused_qk_norm_rope"
GIVEN = {
    "rope": Rope(128, 10000.0, "half", rotary_dim=64),
}
REPAIR = [
    ("(b, a) if 2 * half == head_dim or h % 4 == 0 else (a, b)", "(b, a)"),
]
