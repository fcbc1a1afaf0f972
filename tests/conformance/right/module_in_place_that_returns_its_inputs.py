"""The module of an engine: it rotates query and key in place, whatever their strides, and returns them."""

import torch


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style):
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, rotary_dim, is_neox_style
        inv_freq = base ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)
        angles = torch.arange(max_position_embeddings).float()[:, None] * inv_freq
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)

    @torch.no_grad()
    def forward(self, positions, query, key):
        """query and key: `[tokens, heads · head_size]`."""
        cos, sin = self.cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
        for tensor in (query, key):
            x = tensor.view(len(cos), -1, self.head_size)[..., : self.rotary_dim]
            if self.is_neox_style:
                a, b = x.float().chunk(2, dim=-1)
                x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
            else:
                a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
                x.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2))
        return query, key


TARGET = "RotaryEmbedding"
GIVEN = {"ignore": ["no-gradient"]}
BUGS = {
    # All tokens get the position of the first, which calls with one token do not show.
    "one_position__of_the_first_token": [
        ("positions.flatten()", "positions[..., :1].flatten()"),
        ("GIVEN = {", 'import ropewalk\n\nGIVEN = {"rope": ropewalk.Rope(64, 10_000.0, "half"), '),
    ],
}
