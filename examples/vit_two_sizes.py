"""Train a vision transformer at one image size and run it at another, with a rope of two axes.

    python examples/vit_two_sizes.py

Each image has a red and a green square on a noisy background. The four classes say where the red
square lies, seen from the green one: above or below, and left or right. So the model must use the
places of patches, not only what they show. It has no table of positions that a larger image would
outgrow: `rope.at` computes the angles of the rows and columns that an image has.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import ropewalk
from ropewalk import positions

PATCH, LAYERS, HIDDEN, HEADS = 4, 2, 64, 4
HEAD_DIM = HIDDEN // HEADS


def images(count: int, patches: int) -> tuple[Tensor, Tensor]:
    """Return images of patches × patches patches, [count, 3, side, side], and their classes."""
    # The row and the column of both squares, [count, axis, square], different on each axis.
    places = torch.rand(count, 2, patches).argsort(-1)[..., :2]
    side = patches * PATCH
    pixels = 0.1 * torch.randn(count, 3, side, side)
    for square in range(2):  # the red one, then the green one: a patch each
        rows, columns = places[:, :, square].unbind(1)
        patch = torch.zeros(count, patches, patches)
        patch[torch.arange(count), rows, columns] = 1.0
        pixels[:, square] += patch.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    below, right = (places[..., 0] > places[..., 1]).unbind(1)
    return pixels, 2 * below.long() + right.long()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = ropewalk.RotaryAttention(HIDDEN, HEADS, causal=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, rotation: ropewalk.Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class ViT(nn.Module):
    """Images [batch, 3, height, width] of any size to the logits of four classes, [batch, 4]."""

    # Half of the channels rotate by the row of a patch, half by its column.
    axes = ropewalk.Axes.axial((HEAD_DIM // 2, HEAD_DIM // 2))
    rope = ropewalk.Rope(head_dim=HEAD_DIM, base=100.0, pairing="half", axes=axes)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, HIDDEN, kernel_size=PATCH, stride=PATCH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.embed(pixels)  # [batch, hidden, rows, columns]
        rotation = self.rope.at(positions.grid(*patches.shape[2:], device=pixels.device))
        x = patches.flatten(2).mT
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x).mean(1))


def train(model: ViT, steps: int, patches: int, rows: int = 32) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for step in range(steps):
        pixels, classes = images(rows, patches)
        loss = nn.functional.cross_entropy(model(pixels), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


@torch.inference_mode()
def accuracy(model: ViT, patches: int, count: int = 500) -> float:
    pixels, classes = images(count, patches)
    return (model(pixels).argmax(-1) == classes).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a ViT at one size, run it at another.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--trained", type=int, default=8, help="patches on a side, of small images")
    parser.add_argument("--larger", type=int, default=12, help="patches on a side, of large ones")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = ViT()
    train(model, options.steps, options.trained)
    for patches in (options.trained, options.larger):
        side = patches * PATCH
        print(f"{side} × {side} pixels: {accuracy(model, patches):.0%} right (chance: 25%)")


if __name__ == "__main__":
    main()
