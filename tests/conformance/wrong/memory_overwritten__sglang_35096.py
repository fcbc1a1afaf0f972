"""SGLang 35096: the columns are padded to a power of two, and only the rows are masked.

With 48, 80 or 96 channels the kernel also rotates what follows each head in memory, which is the next head.
"""

import torch


def memory(x):
    """All memory from the first element of x to the end of its storage."""
    x = x.detach()
    length = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((length,), (1,))


def apply_rotary_emb(x, cos, sin):
    """x: `[tokens, heads, rope_dim]`, changed in place; cos and sin: `[tokens, rope_dim / 2]`; interleaved pairs."""
    tokens, heads, rope_dim = x.shape
    if cos.shape[-1] != rope_dim // 2:
        raise ValueError("cos and sin must have a column for each pair of x")
    columns = torch.arange(0, 1 << (rope_dim - 1).bit_length(), 2)
    elements = memory(x)
    for token in range(tokens):
        for head in range(heads):
            at = token * x.stride(0) + head * x.stride(1) + columns
            column = columns[at + 1 < len(elements)]
            at = at[at + 1 < len(elements)]
            index = token * (rope_dim // 2) + column // 2
            index = index.clamp(max=cos.numel() - 1)
            c, s = cos.reshape(-1)[index], sin.reshape(-1)[index]
            a, b = elements[at].float(), elements[at + 1].float()
            elements[at] = (a * c - b * s).type_as(x)
            elements[at + 1] = (b * c + a * s).type_as(x)


TARGET = "apply_rotary_emb"
GIVEN = {
    "pairing": "interleaved",
    "layout": "thd",
}
REPAIR = [
    ("torch.arange(0, 1 << (rope_dim - 1).bit_length(), 2)", "torch.arange(0, rope_dim, 2)"),
]
