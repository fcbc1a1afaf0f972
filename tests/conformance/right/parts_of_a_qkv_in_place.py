"""In place on q and k that are parts of a fused qkv, found by their strides."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rotary_embedding(positions, query, key, head_size, cos_sin_cache):
    """query and key: `[tokens, heads · head_size]`, changed in place; the step between tokens may be larger."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    for x in (query, key):
        heads = x.as_strided((x.shape[0], x.shape[1] // head_size, head_size), (x.stride(0), head_size, 1))
        heads.copy_(turn(heads, cos, sin))


TARGET = "rotary_embedding"
GIVEN = {"pairing": "half"}
BUGS = {
    # Flat q and k are reshaped to heads, which copies the parts of a fused qkv, and the copies are rotated in place.
    "strided_input__reshape_copies": [
        (
            "x.as_strided((x.shape[0], x.shape[1] // head_size, head_size), (x.stride(0), head_size, 1))",
            "x.reshape(-1, head_size).view(len(positions), -1, head_size)",
        ),
    ],
    # The step between tokens is taken to be the width of q or k.
    "strided_input__step_of_the_rows": [("(x.stride(0), head_size, 1)", "(x.shape[1], head_size, 1)")],
}
