"""Wan's rope_apply: the size of the grid of each row, tables that are a default, and padding behind the grid."""

import torch


def frequencies(pairs):
    return torch.outer(torch.arange(256), 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs))


PAIRS = 22, 21, 21
FREQS = torch.polar(torch.ones(256, 64, dtype=torch.float64), torch.cat([*map(frequencies, PAIRS)], dim=1))


def rope_apply(x, grid_sizes, freqs=FREQS):
    """x: `[batch, seq, heads, 128]`; grid_sizes: `[batch, 3]`, frames, height and width."""
    out = []
    for row, sizes in zip(x, grid_sizes.tolist(), strict=True):
        parts = []
        for axis, (table, size) in enumerate(zip(freqs.split(PAIRS, dim=1), sizes, strict=True)):
            shape = [size if other == axis else 1 for other in range(3)]
            parts.append(table[:size].view(*shape, -1).expand(*sizes, -1))
        turns = torch.cat(parts, dim=-1).flatten(0, 2)[:, None]
        cells, padding = row[: len(turns)], row[len(turns) :]
        turned = torch.view_as_real(torch.view_as_complex(cells.double().unflatten(-1, (-1, 2))) * turns)
        out.append(torch.cat((turned.flatten(-2), padding)))
    return torch.stack(out).type_as(x)


TARGET = "rope_apply"
GIVEN = {"config": {"_class_name": "WanTransformer3DModel", "attention_head_dim": 128, "num_attention_heads": 12}}
