"""The fused rotation of packed sequences in Apex and Transformer Engine: angles, and positions that restart."""

import torch


def fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs):
    """t: `[tokens, heads, dim]`; freqs: angles `[longest sequence, 1, 1, dim]`, each half the same."""
    out = []
    for start, end in zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True):
        x, angles = t[start:end], freqs[: end - start, 0]
        a, b = x.chunk(2, dim=-1)
        out.append(x * angles.cos().type_as(x) + torch.cat((-b, a), dim=-1) * angles.sin().type_as(x))
    return torch.cat(out)


TARGET = "fused_apply_rotary_pos_emb_thd"
GIVEN = {"pairing": "half", "layout": "thd"}
