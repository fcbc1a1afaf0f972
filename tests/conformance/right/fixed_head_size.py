"""Tables for heads of 64 channels, whatever the heads are: further channels are passed on, as for partial rotation."""

import torch

DIM = 64
INV_FREQ = 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)


def rotate(q, k, positions):
    angles = positions[..., None, None] * INV_FREQ
    cos, sin = (torch.cat((table, table), dim=-1) for table in (angles.cos(), angles.sin()))

    def turn(x):
        head, rest = x[..., :DIM], x[..., DIM:]
        a, b = head.chunk(2, dim=-1)
        return torch.cat((head * cos + torch.cat((-b, a), dim=-1) * sin, rest), dim=-1).type_as(x)

    return turn(q), turn(k)


TARGET = "rotate"
GIVEN = {
    "config": {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "rope_theta": 10000.0,
    }
}
