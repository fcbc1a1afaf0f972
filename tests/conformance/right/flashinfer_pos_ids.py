"""FlashInfer's operator without tables: positions of each token, and the base and the scale as arguments."""

import torch


def apply_rope_pos_ids(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """q and k: `[tokens, heads, dim]`. Returns both, rotated."""
    size = rotary_dim or q.shape[-1]
    inv_freq = rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = (pos_ids.double()[:, None, None] / rope_scale) * inv_freq
    cos, sin = angles.cos().float(), angles.sin().float()

    def rotated(x):
        head = x[..., :size].float()
        a, b = (head[..., ::2], head[..., 1::2]) if interleave else head.chunk(2, dim=-1)
        first, second = a * cos - b * sin, b * cos + a * sin
        pairs = torch.stack((first, second), dim=-1).flatten(-2) if interleave else torch.cat((first, second), dim=-1)
        return torch.cat((pairs.type_as(x), x[..., size:]), dim=-1)

    return rotated(q), rotated(k)


TARGET = "apply_rope_pos_ids"
GIVEN = {"pairing": "half", "base": 500_000.0}
BUGS = {
    # The base that is passed is not read.
    "wrong_base__never_read": [("rope_theta ** (", "1e4 ** (")],
    # Only the cosines are rounded.
    "low_precision_tables__of_cos": [("angles.cos().float()", "angles.cos().bfloat16()")],
}
