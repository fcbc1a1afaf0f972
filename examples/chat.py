"""Chat for as long as you like in a fixed amount of memory: attention sinks and a sliding window.

    python examples/chat.py --turns 300

The cache keeps the first tokens of the conversation, the sinks, and the newest ones, the window.
All others are evicted. Here the sinks are the system prompt, so the model still follows it when
most of the conversation is gone. Positions are counted inside the cache (StreamingLLM). So the
model, which was trained on rows of 47 tokens, never meets a larger distance.

The conversation is small enough to be learned in seconds. The system prompt is the model's name, a
letter. The user says two digits, and the model answers with their sum. To "??" it tells its name.
"""

from __future__ import annotations

import argparse
import random

import torch
from small_gpt import GPT
from torch import Tensor, nn

import ropewalk

NAMES, CHARACTERS = "abcdefgh", "012345678abcdefgh?=\n"
SINKS, WINDOW = 2, 40  # the system prompt has two tokens


def encode(texts: list[str]) -> Tensor:
    return torch.tensor([[CHARACTERS.index(c) for c in text] for text in texts])


def sum_of_digits() -> tuple[str, str]:
    """Return what the user says, and the right answer."""
    a, b = random.randrange(5), random.randrange(5)
    return f"{a}{b}=", str(a + b)


def conversation(name: str, turns: int = 9) -> str:
    """Return a text to learn from, in which the user asks for the name in one of four turns."""
    lines = [("??=", name) if random.random() < 0.25 else sum_of_digits() for _ in range(turns)]
    return f"{name}\n" + "".join(f"{question}{answer}\n" for question, answer in lines)


def train(model: GPT, steps: int, rows: int = 16) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = encode([conversation(name) for name in random.choices(NAMES, k=rows)])
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"training, step {step} of {steps}: loss {loss.item():.2f}")


class Chat:
    """A conversation in a cache of fixed size.

    Attributes:
        text: the whole conversation, most of which the cache has evicted.
        logits: the logits of the next token, [vocabulary].
    """

    def __init__(self, model: GPT, system: str, sinks: int = SINKS) -> None:
        self.model, self.text = model, ""
        self.cache = ropewalk.KVCache(batch=1, window=WINDOW, sinks=sinks, **model.sizes)
        self.read(system)

    @torch.inference_mode()
    def read(self, text: str) -> None:
        self.text += text
        self.logits = self.model(encode([text]), self.cache.step(len(text)))[0, -1]

    def say(self, text: str) -> str:
        """Append what the user says, and return the reply, which ends with the line."""
        self.read(text)
        reply = ""
        while len(reply) < 8 and (character := CHARACTERS[int(self.logits.argmax())]) != "\n":
            reply += character
            self.read(character)
        self.read("\n")
        return reply

    def memory(self) -> int:
        """Return the size of the cached keys and values in bytes."""
        return sum(tensor.nbytes for tensor in (*self.cache.keys, *self.cache.values))


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat over many turns in a cache of fixed size.")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--turns", type=int, default=300)
    options = parser.parse_args()

    torch.manual_seed(0)
    random.seed(0)
    model = GPT(len(CHARACTERS), hidden=64)
    train(model, options.steps)
    for sinks in (SINKS, 0):
        chat = Chat(model, "g\n", sinks)
        at_first = chat.memory()
        asked = [sum_of_digits() for _ in range(options.turns)]
        right = sum(chat.say(question) == answer for question, answer in asked)
        print(f"{sinks} sinks, {right} of {options.turns} sums right, name: {chat.say('??=')}")
        size = f"{at_first:,} bytes at first, {chat.memory():,} now"
        print(f"  {len(chat.text):,} tokens; memory: {size}")
        again = Chat(model, chat.text, sinks)  # in one pass, all keys and values computed again
        difference = float((again.logits - chat.logits).abs().max())
        print(f"  largest difference from one pass over the whole text: {difference:.0e}")


if __name__ == "__main__":
    main()
