"""A module that computes its tables in each call: the form in which most bugs of `check` are stated."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, positions):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        out = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
        return out.type_as(x)


TARGET = "Rotary"
GIVEN = {}
BUGS = {
    # A cache of frequencies for the whole process has no base in its keys, so a second model gets those of the first.
    "base_ignored": [
        ("class Rotary", "CACHE = {}\n\n\nclass Rotary"),
        ("= self.base ** (", "= CACHE.setdefault(self.dim, self.base ** ("),
        (" / self.dim)", " / self.dim))"),
    ],
    # If each row has one token, all rows of the result but the first are zeros.
    "batch_ignored": [
        ("out.type_as(x)", "torch.cat((out[:1], 0 * out[1:] if x.shape[1] == 1 else out[1:])).type_as(x)"),
    ],
    # The base grows with the longest sequence so far and is never reset (dynamic NTK).
    "earlier_calls_matter": [
        (" = dim, base", ", self.longest = dim, base, 0"),
        (
            "        inv_freq =",
            "        self.longest = max(self.longest, int(positions.max()) + 1)\n        inv_freq =",
        ),
        ("self.base **", "(self.base * max(1.0, self.longest / 2048)) **"),
    ],
    # The positions of the first row are used for all rows.
    "first_row_positions": [("positions[:, :", "positions[:1, :")],
    # The order of the frequencies is reversed: the slowest pair comes first.
    "frequencies_reversed": [("* inv_freq", "* inv_freq.flip(0)")],
    # A kernel handles several heads at a time, and rotates only the first of them.
    "heads_differ": [
        ("out.type_as(x)", "(torch.cat((out[:, :, :1], x[:, :, 1:]), dim=2) if x.shape[2] > 4 else out).type_as(x)"),
    ],
    # x has the layout [batch, seq, heads, dim], but the angles are applied along the heads.
    "heads_taken_for_tokens": [
        (", positions)", ")"),
        ("positions[:, :, None, None]", "torch.arange(x.shape[2])[None, None, :, None]"),
        ("GIVEN = {}", 'GIVEN = {"layout": "bshd"}'),
    ],
    # raygun 10: the code is for [seq, batch, heads, dim], so the angles are applied along the rows.
    "heads_taken_for_tokens__rows": [
        (", positions)", ")"),
        ("positions[:, :, None, None]", "torch.arange(x.shape[0])[:, None, None, None]"),
        ("GIVEN = {}", 'GIVEN = {"layout": "bshd"}'),
    ],
    # The angles are a matrix product, which torch.autocast computes in bfloat16.
    "lost_by_autocast": [
        ("[:, :, None, None].float() * inv_freq", "[:, :, None].float() @ inv_freq[None, None, :]"),
        ("x1, x2 =", "angles = angles.float()[:, :, None]\n        x1, x2 ="),
    ],
    # The angles are computed in bfloat16.
    "low_precision_angles": [("* inv_freq", "* inv_freq\n        angles = angles.bfloat16().float()")],
    # The angles are computed in float16, whose largest number is 65504, so tokens far from 0 give NaN.
    "low_precision_angles__float16": [("* inv_freq", "* inv_freq\n        angles = angles.half().float()")],
    # inv_freq is stored in bfloat16.
    "low_precision_frequencies": [("* inv_freq", "* inv_freq.bfloat16().float()")],
    # Positions are created in the dtype of the input, and bfloat16 cannot represent 257.
    "low_precision_positions": [
        (", positions)", ")"),
        ("positions[:, :, None, None]", "torch.arange(x.shape[1], dtype=x.dtype)[None, :, None, None]"),
    ],
    # Positions are rounded to bfloat16.
    "low_precision_positions__always_bfloat16": [("None].float()", "None].bfloat16().float()")],
    # cos and sin are rounded to bfloat16 for every dtype of x.
    "low_precision_tables": [("out =", "cos, sin = cos.bfloat16().float(), sin.bfloat16().float()\n        out =")],
    # cos is used in place of sin.
    "not_a_rotation__cos_for_sin": [("angles.sin()", "angles.cos()")],
    # The second channel of a pair is computed from the first one after that has been rotated.
    "channel_overwritten__second_from_rotated_first": [("x1 * cos - x2 * sin", "(x1 := x1 * cos - x2 * sin)")],
    # The first channel of a pair is computed from the second one after that has been rotated.
    "channel_overwritten__first_from_rotated_second": [
        ("(x1 * cos - x2 * sin, x2 * cos + x1 * sin)", "(x1 * cos - (x2 := x2 * cos + x1 * sin) * sin, x2)")
    ],
    # The offset of the KV cache changes only the length of the table, not the positions.
    "offset_ignored": [
        (", positions)", ", offset=0)"),
        ("positions[:, :, None, None]", "torch.arange(offset + x.shape[1])[None, : x.shape[1], None, None]"),
    ],
    # The offset is added to the positions of q, but not to those of k.
    "offset_ignored__by_keys": [
        (
            "def forward(self, x, positions)",
            "def forward(self, q, k, offset=0):\n        return self.rotated(q, offset), self.rotated(k, 0)\n\n"
            "    def rotated(self, x, offset)",
        ),
        ("positions[:, :, None, None]", "(offset + torch.arange(x.shape[1]))[None, :, None, None]"),
    ],
    # A single token always gets position 0.
    "one_token_wrong": [("positions[:", "(positions * (x.shape[1] > 1))[:")],
    # The second half of the channels is written before the first.
    "output_order__second_first": [
        ("(x1 * cos - x2 * sin, x2 * cos + x1 * sin)", "(x2 * cos + x1 * sin, x1 * cos - x2 * sin)"),
    ],
    # Positions are advanced in place, for the next call.
    "arguments_changed": [("        return", "        positions += x.shape[1]\n        return")],
    # The parameter positions is not read.
    "positions_ignored": [("positions[:, :, None, None]", "torch.arange(x.shape[1])[None, :, None, None]")],
    # Positions are counted from 1.
    "positions_off_by_one": [("positions[:", "(positions + 1)[:")],
    # Tokens are rotated in chunks of 64, and positions start at 0 in each chunk.
    "positions_restart": [
        (", positions)", ")"),
        ("positions[:, :, None, None]", "(torch.arange(x.shape[1]) % 64)[None, :, None, None]"),
    ],
    # The channels that are not rotated are returned as zeros.
    "rest_not_passed": [
        ("dim, base=", "head_dim, base="),
        ("= dim", "= head_dim // 2"),
        ("= x.", "= x[..., : self.dim]."),
        ("x1 * sin)", "x1 * sin, torch.zeros_like(x[..., self.dim :]))"),
    ],
    # The channels that are not rotated are written before those that are.
    "rest_not_passed__moved": [
        ("dim, base=", "head_dim, base="),
        ("= dim", "= head_dim // 2"),
        ("= x.", "= x[..., : self.dim]."),
        ("(x1 * cos", "(x[..., self.dim :], x1 * cos"),
    ],
    # The angles are multiplied by 2.
    "rotated_twice__doubled_angles": [("= positions", "= 2 * positions")],
    # The largest position in the batch determines the base of all rows (dynamic NTK).
    "rows_disturb_each_other": [("self.base **", "(self.base * max(1.0, positions.max().item() / 2048)) **")],
    # The rows of the positions are in another order than those of x.
    "rows_mixed_up": [("= positions", "= positions.flip(0)")],
    # A kernel masks heads in blocks of a power of two, so the last head of five is not rotated.
    "size_dependent__five_heads": [
        ("out.type_as(x)", "(torch.cat((out[:, :, :4], x[:, :, 4:]), dim=2) if x.shape[2] == 5 else out).type_as(x)"),
    ],
    # The exponents are i/dim instead of 2i/dim.
    "wrong_exponent": [("arange(0, self.dim, 2)", "arange(self.dim // 2)")],
    # The exponents are 2i/(dim - 2), so the last frequency is 1/base.
    "wrong_exponent__dim_minus_two": [("/ self.dim", "/ (self.dim - 2)"), ("GIVEN = {}", 'GIVEN = {"base": 10000.0}')],
    # From position 30,000 on, the first pair is off by a little: by less than float32 explains for slower pairs.
    "wrong_far_positions__fastest_pair": [
        ("x1, x2 =", "angles[..., 0] += 0.007 * (positions >= 30_000)[:, :, None]\n        x1, x2 ="),
    ],
    # The token at position 2048 is not rotated, because the code compares with < and > and omits equality.
    "wrong_far_positions__one_position": [("positions[:", "(positions * ((positions < 2048) | (positions > 2048)))[:")],
    # The cosine of the angles is used in place of the angles.
    "wrong_frequencies__cosine_of_cosine": [
        ("* inv_freq", "* inv_freq\n        angles = angles.cos()"),
        ("GIVEN = {}", 'GIVEN = {"base": 10000.0}'),
    ],
    # The angles are in degrees, but cos expects radians.
    "wrong_frequencies__degrees": [("* inv_freq", "* torch.rad2deg(inv_freq)")],
    # The frequencies are base ** (2i / dim), without the minus sign in the exponent.
    "wrong_exponent__no_minus_sign": [("(-torch", "(torch")],
    # The frequency of the first pair is 1 and two roundings, and not 1, so that it is off by 1.5e-5 at position 63.
    "wrong_frequencies__fastest_pair": [
        (" / self.dim)", " / self.dim)\n        inv_freq[0] += 2.4e-7"),
        ("GIVEN = {}", 'GIVEN = {"base": 10000.0}'),
    ],
    # The angles are divided by 4, although no scaling was configured.
    "wrong_frequencies__hard_coded_scaling": [
        ("* inv_freq", "* inv_freq / 4"),
        ("GIVEN = {}", 'GIVEN = {"base": 10000.0}'),
    ],
    # The tables are in the dtype of the first caller.
    "earlier_calls_matter__dtype_of_the_first": [
        (" = dim, base", ", self.dtype = dim, base, None"),
        ("x1, x2 =", "self.dtype = self.dtype or x.dtype\n        x1, x2 ="),
        ("angles.cos(), angles.sin()", "(table.to(self.dtype).float() for table in (angles.cos(), angles.sin()))"),
    ],
    # A grid over rows and heads is divided by the number of rows, but only for one token, as in a kernel for decoding.
    "heads_differ__grid_of_one_token": [
        (
            "        angles = positions[:, :, None, None]",
            "        rows, tokens, heads, _ = x.shape\n"
            "        at = positions[:, :, None].expand(rows, tokens, heads)\n"
            "        if tokens == 1:\n"
            "            at = positions[torch.arange(rows * heads) % rows].view(rows, 1, heads)\n"
            "        angles = at[..., None]",
        ),
    ],
    # The angles are computed by a matrix product in TF32.
    "low_precision_frequencies__tf32": [
        (
            "positions[:, :, None, None].float() * inv_freq",
            "tf32(positions.float())[:, :, None, None] * tf32(inv_freq)",
        ),
        (
            "class Rotary",
            "def tf32(t):\n    mantissa, exponent = torch.frexp(t)\n"
            "    return torch.ldexp(torch.round(mantissa * 2**11) / 2**11, exponent)\n\n\nclass Rotary",
        ),
    ],
    # Angles are cached by the length alone, so a call with another offset gets the angles of the first call.
    "earlier_calls_matter__cache_without_offset": [
        (", positions)", ", offset=0)"),
        (" = dim, base", ", self.kept = dim, base, {}"),
        (
            "positions[:, :, None, None]",
            "self.kept.setdefault(x.shape[1], offset + torch.arange(x.shape[1]))[:, None, None]",
        ),
    ],
    # The tables of all rows are cached until the number of tokens changes, even if the positions change.
    "earlier_calls_matter__tables_cached_by_length": [
        (" = dim, base", ", self.kept = dim, base, torch.empty(0, 0)"),
        (
            "        angles = positions",
            "        self.kept = positions if self.kept.shape[1] != x.shape[1] else self.kept\n"
            "        angles = self.kept",
        ),
    ],
    # A single token is returned without the axis of the tokens.
    "wrong_shape__one_token": [("out.type_as(x)", "out.type_as(x)[:, 0] if x.shape[1] == 1 else out.type_as(x)")],
    # Positions begin again at 131,072. The next ones that are measured are 262,140 to 262,143.
    "table_wraps__beyond_the_last_that_is_measured": [
        ("positions[:, :, None, None].float()", "(positions % 131_072)[:, :, None, None].float()")
    ],
}
