"""All cells of a video are rotated, of which the size is passed: its largest calls have 64 frames, rows and columns."""

import torch


def rope_apply(x, frames, height, width, theta=10000.0):
    """x: `[batch, frames * height * width, heads, dim]`."""
    pairs = x.shape[-1] // 2
    counts = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
    places = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    angles = torch.cat(
        [
            place.flatten()[:, None] * theta ** (-torch.arange(count, dtype=torch.float64) / count)
            for place, count in zip(places, counts, strict=True)
        ],
        dim=-1,
    )[:, None]
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2).type_as(x)


TARGET = "rope_apply"
GIVEN = {}
