"""Megatron-LM 7103: the mask compares the head's index inside its block with the number of heads.

Blocks of four heads: with 5 or 6 heads the last block also rotates the first heads of the next token, and after the
last token the memory behind the tensor.
"""


def memory(x):
    """All memory from the first element of x to the end of its storage."""
    x = x.detach()
    length = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((length,), (1,))


def rotate_inplace(q, cos, sin):
    """q: `[tokens, heads, dim]`, changed in place; cos and sin: `[tokens, dim]`."""
    tokens, heads, dim = q.shape
    elements, half, block = memory(q), dim // 2, 4
    for token in range(tokens):
        c, s = cos[token, :half], sin[token, :half]
        for start in range(0, heads, block):
            for local in range(block):
                inside = local < heads
                at = token * q.stride(0) + (start + local) * q.stride(1)
                if inside and at + dim <= len(elements):
                    a, b = elements[at : at + half].clone(), elements[at + half : at + dim].clone()
                    elements[at : at + half] = a * c - b * s
                    elements[at + half : at + dim] = b * c + a * s


TARGET = "rotate_inplace"
GIVEN = {
    "pairing": "half",
    "layout": "thd",
}
REPAIR = [
    ("inside = local < heads", "inside = start + local < heads"),
]
