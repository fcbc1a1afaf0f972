"""The channels of k that are not rotated are copied from q, which shows only if some are not rotated."""

import torch


def rope_2c(x, y, cos, sin, positions):
    """x and y: `[tokens, heads, dim]`; cos and sin: `[length, rotary_dim / 2]`."""
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    width = 2 * cos.shape[-1]

    def rotated(t, rest):
        a, b = t[..., :width].chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((turned, rest[:, :1, width:].expand(-1, t.shape[1], -1)), dim=-1)

    first = rotated(x, x)
    first[..., width:] = x[..., width:]
    second = rotated(y, x)
    return first, second


TARGET = "rope_2c"
GIVEN = {}
REPAIR = [("    return first, second", "    second[..., width:] = y[..., width:]\n    return first, second")]
