"""A fused qkv in, q, k and v out: the values are passed on as they are."""

import torch


def split_and_rotate(qkv, num_heads, num_kv_heads, head_size, positions, cos_sin_cache):
    """qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_size]`. Returns tensors `[tokens, heads, head_size]`."""
    heads = qkv.unflatten(-1, (-1, head_size))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    turn = torch.complex(cos, sin)[:, None]

    def rotated(x):
        half = turn.shape[-1]
        z = torch.complex(x[..., :half].float(), x[..., half : 2 * half].float()) * turn
        return torch.cat((z.real, z.imag, x[..., 2 * half :].float()), dim=-1).type_as(x)

    return rotated(q), rotated(k), v


TARGET = "split_and_rotate"
GIVEN = {
    "pairing": "half",
}
