"""inv_freq is cast to the dtype of q before it is multiplied by the positions, so it is right with float32 tensors."""

import torch


def turned_by_a_quarter(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class RotaryTransform(torch.nn.Module):
    def __init__(self, n_embd, n_head, base_freq=10000):
        super().__init__()
        dim = n_embd // n_head
        self.register_buffer("inv_freq", 1.0 / (base_freq ** (torch.arange(0, dim, 2).float() / dim)))

    def forward(self, q, k):
        t = torch.arange(q.shape[-2]).float()
        angles = torch.outer(t, self.inv_freq.to(q.dtype).float())
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return q * cos + turned_by_a_quarter(q) * sin, k * cos + turned_by_a_quarter(k) * sin


TARGET = "RotaryTransform"
GIVEN = {}
REPAIR = [("self.inv_freq.to(q.dtype).float()", "self.inv_freq")]
