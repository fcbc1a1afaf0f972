"""Each pair is multiplied by a 2 × 2 matrix, and the rest of a larger head is passed on."""

import torch


def rope(x, cos, sin):
    """x: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, pairs]`. Pairs are interleaved."""
    matrix = torch.stack((torch.stack((cos, -sin), dim=-1), torch.stack((sin, cos), dim=-1)), dim=-2)[:, :, None]
    width = 2 * cos.shape[-1]
    pairs = x[..., :width].unflatten(-1, (-1, 2)).to(matrix.dtype)
    turned = (matrix @ pairs.unsqueeze(-1)).squeeze(-1).flatten(-2)
    return torch.cat((turned.type_as(x), x[..., width:]), dim=-1)


TARGET = "rope"
GIVEN = {"pairing": "interleaved"}
BUGS = {
    # The columns of the first row are exchanged.
    "not_a_rotation__first_row": [("(cos, -sin)", "(-sin, cos)")],
}
