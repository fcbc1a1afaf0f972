"""vLLM's M-RoPE on flat tokens: positions of three axes, and a table of cos and sin."""

import torch

from ropewalk import Axes, Rope


def mrope(query, key, positions, head_size, cos_sin_cache, is_neox, mrope_section):
    """query and key: `[tokens, heads · head_size]`; positions: `[3, tokens]`. Returns both, rotated."""
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    cos = torch.cat([part[axis] for axis, part in enumerate(cos.split(list(mrope_section), dim=-1))], dim=-1)
    sin = torch.cat([part[axis] for axis, part in enumerate(sin.split(list(mrope_section), dim=-1))], dim=-1)
    cos, sin, size = cos[:, None], sin[:, None], 2 * cos.shape[-1]
    neox = is_neox

    def rotated(x):
        heads = x.unflatten(-1, (-1, head_size))
        head, rest = heads[..., :size].float(), heads[..., size:]
        a, b = head.chunk(2, dim=-1) if neox else (head[..., ::2], head[..., 1::2])
        first, second = a * cos - b * sin, b * cos + a * sin
        out = torch.cat((first, second), dim=-1) if neox else torch.stack((first, second), dim=-1).flatten(-2)
        return torch.cat((out.type_as(x), rest), dim=-1).flatten(-2)

    return rotated(query), rotated(key)


TARGET = "mrope"
GIVEN = {
    "rope": Rope(64, 10000.0, "interleaved", axes=Axes.sections((8, 12, 12))),
}
BUGS = {
    # vLLM Ascend 5664: in the section of the height, sin is taken from the table of cos.
    "not_a_rotation__vllm_ascend_5664": [
        ("    sin = torch", "    sin[1] = cos_sin_cache[positions[1]].chunk(2, dim=-1)[0]\n    sin = torch"),
        ('"interleaved"', '"half"'),
    ],
    # vLLM 49290: the kernel for three axes always rotates halves, also for models of interleaved pairs (GLM-OCR).
    "wrong_pairing__vllm_49290": [("neox = is_neox", "neox = True")],
}
