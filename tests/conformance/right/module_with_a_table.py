"""A module with a table of a fixed length, which raises an error past its end."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, max_positions=2048, base=10000.0):
        super().__init__()
        inv_freq = base ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(max_positions)[:, None].float() * inv_freq
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x, positions):
        rows = positions
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[rows][:, :, None].float(), self.sin[rows][:, :, None].float()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
BUGS = {
    # Frequencies, angles and tables are in bfloat16.
    "low_precision_angles__and_tables": [
        ("* inv_freq", "* inv_freq.bfloat16().float()\n        angles = angles.bfloat16()"),
    ],
    # Positions and inv_freq are multiplied in float16, as after .half(). Their product is rounded as well.
    "low_precision_angles__with_frequencies": [
        ("None].float() * inv_freq", "None].half() * inv_freq.half()\n        angles = angles.float()"),
        ("GIVEN = {}", 'GIVEN = {"base": 10000.0}'),
    ],
    # The exponents of the frequencies are computed in bfloat16.
    "low_precision_frequencies__exponents": [("2).float() /", "2).bfloat16() /")],
    # x is in bfloat16 before it is multiplied, and its gradient is that of float32.
    "low_precision_input": [("x.float().chunk", "(x + (x.bfloat16() - x).detach()).float().chunk")],
    # All calls write to one tensor.
    "result_overwritten": [
        ("        rows = positions", "        rows, self.out = positions, getattr(self, 'out', x.new_empty(1 << 23))"),
        (
            "        return torch.cat",
            "        out = self.out[: x.numel()].view_as(x)\n        return out.copy_(torch.cat",
        ),
        (".type_as(x)", ".type_as(x))"),
    ],
    # Positions past the end of the table get its last row.
    "table_clamps": [("rows = positions", "rows = positions.clamp(max=len(self.cos) - 1)")],
    # Positions past the end of the table start at its first row again.
    "table_wraps": [("rows = positions", "rows = positions % len(self.cos)")],
    # Tokens past the end of the table are not rotated.
    "unrotated_past_table": [
        ("rows = positions", "rows, inside = positions.clamp(max=len(self.cos) - 1), positions < len(self.cos)"),
        ("self.cos[rows]", "self.cos[rows].where(inside[..., None], 1)"),
        ("self.sin[rows]", "self.sin[rows].where(inside[..., None], 0)"),
    ],
    # Tokens past the end of the table are returned as zeros.
    "zeros_past_table": [
        ("rows = positions", "rows, inside = positions.clamp(max=len(self.cos) - 1), positions < len(self.cos)"),
        ("self.cos[rows]", "self.cos[rows].where(inside[..., None], 0)"),
        ("self.sin[rows]", "self.sin[rows].where(inside[..., None], 0)"),
    ],
}
