"""GPT-NeoX's class, which makes a row for each token of one axis of x, and its function for tokens before the batch."""

import torch


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)))
        self.seq_len_cached = None

    def forward(self, x, seq_dim=0, seq_len=None):
        if seq_len is None:
            seq_len = x.shape[seq_dim]
        if seq_len != self.seq_len_cached:
            self.seq_len_cached = seq_len
            angles = torch.outer(torch.arange(x.shape[seq_dim]).float(), self.inv_freq).repeat(1, 2)
            self.cos_cached, self.sin_cached = (table[:, None, None] for table in (angles.cos(), angles.sin()))
        return self.cos_cached, self.sin_cached


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, offset: int = 0):
    cos, sin = (table[offset : q.shape[0] + offset].type_as(q) for table in (cos, sin))
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


TARGET = "RotaryEmbedding,apply_rotary_pos_emb"
GIVEN = {"layout": "sbhd"}
BUGS = {
    # The slice of the tables is too short for an offset.
    "raises__with_an_offset": [("q.shape[0] + offset", "q.shape[0] - offset")],
}
