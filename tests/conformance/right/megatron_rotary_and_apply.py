"""Megatron's module, which returns the angles of a length, and the function that rotates `[seq, batch, heads, dim]`."""

import torch


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, kv_channels, rotary_percent, rotary_interleaved=False, rotary_base=10000):
        super().__init__()
        dim = int(kv_channels * rotary_percent)
        self.inv_freq = rotary_base ** (-torch.arange(0, dim, 2).float() / dim)

    def forward(self, max_seq_len, offset=0):
        angles = torch.outer(torch.arange(max_seq_len).float() + offset, self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def apply(t, freqs, rotary_interleaved=False):
    width = freqs.shape[-1]
    x, rest = t[..., :width], t[..., width:]
    a, b = x.chunk(2, dim=-1)
    turned = x * freqs.cos() + torch.cat((-b, a), dim=-1) * freqs.sin()
    return torch.cat((turned.type_as(t), rest), dim=-1)


TARGET = "RotaryEmbedding,apply"
GIVEN = {"pairing": "half", "base": 10000.0}
BUGS = {
    # The angles are those of the first rows, as in a cache of a length.
    "offset_ignored__of_tables": [(".float() + offset", ".float()")],
    # What is an index of a row is taken for an angle.
    "offset_ignored__added_to_angles": [
        ("max_seq_len).float() + offset, self.inv_freq)", "max_seq_len).float(), self.inv_freq) + offset")
    ],
}
