"""In DeepSeek's attention, a token has one key to rotate. This kernel, in place, touches no other head of it."""

import torch


@torch.no_grad()
def rotary_embedding_mla(positions, q_pe, k_pe, cos_sin_cache):
    """q_pe: `[tokens, heads, dim]`; k_pe: `[tokens, 1, dim]`; cos_sin_cache: `[length, dim]`."""
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)
    for x in (q_pe, k_pe[:, :1]):
        a, b = x[..., ::2].float(), x[..., 1::2].float()
        x.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2))


TARGET = "rotary_embedding_mla"
GIVEN = {"pairing": "interleaved", "ignore": ["no-gradient"]}
