"""Each axis has a parameter for its positions, of one row of frames, lines and columns. The lines are used twice."""

import torch


class VideoRope(torch.nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        self.part = head_dim // 3
        self.inv_freq = base ** (-torch.arange(0, self.part, 2).float() / self.part)

    def forward(self, x, t_pos, h_pos, w_pos):
        """x: `[batch, frames, lines, columns, head_dim]`, and the positions of each of these axes."""
        parts = []
        for axis, (part, pos) in enumerate(zip(x.split(self.part, dim=-1), (t_pos, h_pos, h_pos), strict=True)):
            shape = [1, 1, 1, 1, self.part // 2]
            shape[1 + axis] = len(pos)
            angles = (pos[:, None] * self.inv_freq).view(shape)
            a, b = part.float().chunk(2, dim=-1)
            parts += [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
        return torch.cat(parts, dim=-1).type_as(x)


TARGET = "VideoRope"
GIVEN = {"head_dim": 24}
REPAIR = [("(t_pos, h_pos, h_pos)", "(t_pos, h_pos, w_pos)")]
