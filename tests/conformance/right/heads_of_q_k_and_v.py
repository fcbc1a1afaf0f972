"""The heads of q, k and v in one tensor, of which the values are passed on."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rotate_qkv(qkv, num_heads, num_kv_heads, cos, sin):
    """qkv: `[batch, seq, num_heads + 2 · num_kv_heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    rotated = num_heads + num_kv_heads
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((turn(qkv[:, :, :rotated], cos, sin), qkv[:, :, rotated:]), dim=2)


TARGET = "rotate_qkv"
GIVEN = {"pairing": "half"}
BUGS = {
    # The rotation writes to the `data` of q and k, which autograd does not see.
    "no_gradient__in_place_data": [
        ("return torch.cat((turn(qkv[:, :, :rotated]", "qkv.data[:, :, :rotated] = turn(qkv.data[:, :, :rotated]"),
        ("cos, sin), qkv[:, :, rotated:]), dim=2)", "cos, sin)"),
    ],
    # The fused kernel rotates as many heads of keys as of queries, and so the values if there are fewer keys.
    "value_changed__as_many_keys_as_queries": [("num_heads + num_kv_heads\n", "num_heads + num_heads\n")],
    # Two heads are rotated at a time. With an odd number of heads of q and k the last pair takes a head of v.
    "value_changed__rotated_if_heads_are_odd": [
        ("num_heads + num_kv_heads\n", "num_heads + num_kv_heads + (num_heads + num_kv_heads) % 2\n"),
    ],
}
