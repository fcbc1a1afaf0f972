"""Train a small GPT on the documentation that ships with Python, and let it write.

    python examples/small_gpt.py --prompt "The "

Its tokens are characters. In training, every row of a batch has the positions 0, 1, 2, ..., so one
rotation serves all rows and all layers. For sampling, a KVCache plans each step: first the prompt,
then one character at a time.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics  # what `help("CLASSES")` and the like print
from typing import Any

import torch
from torch import Tensor, nn

import ropewalk

LAYERS, HEADS, KV_HEADS = 2, 4, 2
Rotation = ropewalk.Rotation | ropewalk.TwoPass
Cache = ropewalk.AttendingCache | None
Step = Any  # one of a KVCache, or of the pages in server.py


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = ropewalk.RotaryAttention(hidden, HEADS, num_kv_heads=KV_HEADS)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, rotation: Rotation, cache: Cache) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, cache=cache)
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Tokens [batch, seq] to the logits of the token after each, [batch, seq, vocabulary].

    Without a step, the tokens are whole rows, and attention is causal. With a step, they follow
    those in its cache. Build a KVCache with `**model.sizes`.
    """

    def __init__(self, vocabulary: int, hidden: int = 128) -> None:
        super().__init__()
        head_dim = hidden // HEADS
        self.rope = ropewalk.Rope(head_dim=head_dim, base=10_000.0, pairing="half")
        self.sizes: dict[str, Any]
        self.sizes = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": head_dim}
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor, step: Step | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotation = self.rope.at(positions) if step is None else step.rotation(self.rope)
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, rotation, None if step is None else step.layer(i))
        return self.head(self.norm(x))


def train(model: GPT, text: Tensor, steps: int, rows: int = 8, seq: int = 64) -> float:
    """Train on random pieces of the text, and return the loss of the last ten steps, in nats."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    losses = []
    for step in range(steps):
        pieces = text[torch.randint(len(text) - seq, (rows, 1)) + torch.arange(seq + 1)]
        logits = model(pieces[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: loss {losses[-1]:.2f}", flush=True)
    return sum(losses[-10:]) / len(losses[-10:])


@torch.inference_mode()
def sample(model: GPT, prompt: Tensor, count: int, temperature: float = 0.7) -> Tensor:
    """Return `count` tokens that follow the prompt [seq]."""
    cache = ropewalk.KVCache(batch=1, capacity=len(prompt) + count, **model.sizes)
    new, text = prompt[None], []
    for _ in range(count):
        logits = model(new, cache.step(new.shape[1]))[:, -1]
        new = (logits / temperature).softmax(-1).multinomial(1)
        text.append(new[0])
    return torch.cat(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on characters, and sample.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--count", type=int, default=300, help="characters to write")
    options = parser.parse_args()

    torch.manual_seed(0)
    text = " ".join(" ".join(topics.values()).split())  # without indents and empty lines
    characters = sorted(set(text))
    model = GPT(len(characters))
    loss = train(model, torch.tensor([characters.index(c) for c in text]), options.steps)
    print(f"loss of the last ten steps: {loss:.2f} nats per character")
    prompt = torch.tensor([characters.index(c) for c in options.prompt])
    written = sample(model, prompt, options.count).tolist()
    print(options.prompt + "".join(characters[i] for i in written))


if __name__ == "__main__":
    main()
