"""The pairs of the time come first. Ernie 4.5 VL has them last, behind height and width in turn."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_dim, base=500000.0):
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, q, k, position_ids):
        """q and k: `[batch, seq, heads, head_dim]`; position_ids: `[batch, seq, 3]`, the time first."""
        inv_freq = self.base ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        time, height, width = (position_ids[:, :, None].float() * inv_freq[:, None]).unbind(-1)
        area = torch.stack((height[..., 20::2], width[..., 21::2]), dim=-1).flatten(-2)
        angles = torch.cat((time[..., :20], area), dim=-1)[:, :, None]
        cos, sin = angles.cos(), angles.sin()

        def turn(x):
            a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).type_as(x)

        return turn(q), turn(k)


TARGET = "Rotary"
GIVEN = {
    "config": {
        "model_type": "ernie4_5_vl_moe",
        "text_config": {
            "model_type": "ernie4_5_vl_moe_text",
            "hidden_size": 2560,
            "num_attention_heads": 20,
            "num_hidden_layers": 28,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [22, 22, 20]},
        },
    }
}
REPAIR = [
    ("(height[..., 20::2], width[..., 21::2])", "(height[..., :44:2], width[..., 1:44:2])"),
    ("(time[..., :20], area)", "(area, time[..., 44:])"),
]
