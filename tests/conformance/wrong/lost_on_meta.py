"""inv_freq is a buffer that no checkpoint contains, so its values are lost if a model is built on the meta device."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x, positions):
        angles = positions[:, :, None, None].float() * self.inv_freq.float()
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)

    def _apply(self, fn, recurse=True):
        """Move the buffer to another device, but keep its dtype."""
        kept = self.inv_freq
        super()._apply(fn, recurse)
        if not kept.is_meta:
            self.inv_freq = kept.to(self.inv_freq.device)
        return self


TARGET = "Rotary"
GIVEN = {"base": 10000.0}
REPAIR = [
    ("persistent=False", "persistent=True"),
]
