"""The form of Falcon in transformers 4.31: x has the axes `[batch * heads, seq, dim]`."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_dim, base=10000):
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, query, key, past_key_values_length=0):
        inv_freq = 1.0 / (self.base ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        angles = torch.outer(torch.arange(query.shape[1]).float() + past_key_values_length, inv_freq)
        angles = torch.cat((angles, angles), dim=-1)[None]

        def rotated(x):
            a, b = x.chunk(2, dim=-1)
            return x * angles.cos().type_as(x) + torch.cat((-b, a), dim=-1) * angles.sin().type_as(x)

        return rotated(query), rotated(key)


TARGET = "Rotary"
GIVEN = {"pairing": "half", "base": 10000.0}
BUGS = {
    # The offset is taken away again.
    "offset_ignored__with_one_axis_for_rows_and_heads": [
        ("+ past_key_values_length, inv", "+ past_key_values_length - past_key_values_length, inv")
    ],
}
