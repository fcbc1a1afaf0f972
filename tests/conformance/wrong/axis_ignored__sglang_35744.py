"""SGLang 35744: a fused kernel for norm and rotation takes positions of three axes and reads only the first row."""

import torch

from ropewalk import Axes, Rope


def fused_qk_rmsnorm_rope(q, k, q_weight, k_weight, eps, cos_sin_cache, positions, mrope_section):
    """q and k: `[tokens, heads, dim]`; positions: `[3, tokens]`; pairs t, h, w, t, h, w, ... and t at the end."""
    axis = torch.zeros(cos_sin_cache.shape[-1] // 2, dtype=torch.long)
    for a in (1, 2):
        axis[a : 3 * mrope_section[a] : 3] = a
    rows = cos_sin_cache[positions[:1].expand(3, -1)]
    cos, sin = rows.chunk(2, dim=-1)
    pair = torch.arange(len(axis))
    cos, sin = cos[axis, :, pair].T[:, None], sin[axis, :, pair].T[:, None]

    def finished(x, weight):
        y = x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps) * weight.float()
        a, b, rest = y.split((len(axis), len(axis), y.shape[-1] - 2 * len(axis)), dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).type_as(x)

    return finished(q, q_weight), finished(k, k_weight)


TARGET = "fused_qk_rmsnorm_rope"
GIVEN = {
    "rope": Rope(64, 10000.0, "half", axes=Axes.interleaved((12, 10, 10))),
}
REPAIR = [
    ("positions[:1].expand(3, -1)", "positions"),
]
