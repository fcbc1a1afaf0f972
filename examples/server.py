"""Serve many requests at once from a pool of pages: continuous batching and a shared prefix.

    python examples/server.py

This file owns the blocks of keys and values. ropewalk rotates, stores and attends. All requests
begin with one system prompt, whose full blocks are in the table of each. A step admits waiting
requests, if there are enough blocks for all that they may write. Then one forward pass reads the
next piece of each prompt, and writes the next token of each text.

The model has random weights, and each request gets the same nonsense as when it runs alone.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from small_gpt import GPT
from torch import Tensor

import ropewalk

BLOCKS, BLOCK_SIZE, CHUNK = 40, 16, 8  # a pass reads at most CHUNK tokens of each prompt


@dataclass
class Request:
    prompt: list[int]  # the tokens after the system prompt
    count: int  # tokens to write
    text: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)  # tokens that the model has not read yet
    blocks: list[int] = field(default_factory=list)
    length: int = 0  # tokens in the blocks


class Step:
    """One forward pass over new tokens of some requests. Shorter rows are padded in front."""

    def __init__(self, pools: list[Any], requests: list[Request], new: list[int]) -> None:
        most, longest = max(len(each.blocks) for each in requests), max(new)
        table = [each.blocks + [-1] * (most - len(each.blocks)) for each in requests]
        lengths = torch.tensor([each.length for each in requests])
        self.pools, index = pools, torch.arange(longest)
        self.rows = {"block_table": torch.tensor(table, dtype=torch.int32), "lengths": lengths}
        self.order = (lengths[:, None] - longest + index).clamp(min=0)
        slots = self.rows["block_table"].gather(1, self.order // BLOCK_SIZE)
        slots = slots * BLOCK_SIZE + self.order % BLOCK_SIZE
        self.slots = slots.where(index >= longest - torch.tensor(new)[:, None], -1)

    def rotation(self, rope: ropewalk.Rope) -> ropewalk.Rotation:
        return rope.at(self.order)

    def layer(self, i: int) -> SimpleNamespace:
        return SimpleNamespace(attend=partial(self.attend, self.pools[i]))

    def attend(self, pool: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Do what `ropewalk.AttendingCache` says, in one layer."""
        to = {"slot_mapping": self.slots, **pool}
        q = ropewalk.rotate_and_store(q, k, v, rotation=options["rotation"], **to)
        return ropewalk.paged_attention(q, **pool, **self.rows, scale=options["scale"])


class Server:
    def __init__(self, model: GPT, system: list[int]) -> None:
        layers, *heads = model.sizes.values()
        shape, names = (BLOCKS, BLOCK_SIZE, *heads), ("k_cache", "v_cache")
        self.pools = [{name: torch.zeros(shape) for name in names} for _ in range(layers)]
        self.model, self.free = model, list(range(BLOCKS))
        full = len(system) // BLOCK_SIZE * BLOCK_SIZE
        self.system, self.rest = Request(system[:full], count=0), system[full:]
        if full:
            self.forward([self.system], [system[:full]])
        self.most = self.unpromised = len(self.free)
        self.waiting, self.running = deque[Request](), list[Request]()

    @torch.inference_mode()
    def forward(self, requests: list[Request], tokens: list[list[int]]) -> Tensor:
        """Append tokens to requests, and return the logits after the last ones."""
        longest = max(map(len, tokens))
        for request, new in zip(requests, tokens, strict=True):
            request.length += len(new)
            while len(request.blocks) * BLOCK_SIZE < request.length:
                request.blocks.append(self.free.pop())
        padded = torch.tensor([[0] * (longest - len(new)) + new for new in tokens])
        return self.model(padded, Step(self.pools, requests, list(map(len, tokens))))[:, -1]

    def blocks(self, request: Request) -> int:
        """Return how many blocks the request may need, beside those that it shares."""
        return -(-(len(self.rest) + len(request.prompt) + request.count) // BLOCK_SIZE)

    def submit(self, request: Request) -> None:
        if self.blocks(request) > self.most:
            raise ValueError(f"the request may need {self.blocks(request)} of {self.most} blocks")
        request.unread = self.rest + request.prompt
        request.blocks, request.length = list(self.system.blocks), self.system.length
        self.waiting.append(request)

    def step(self) -> None:
        """Admit requests, run the model once for all of them, and free those that have ended."""
        while self.waiting and self.blocks(self.waiting[0]) <= self.unpromised:
            self.unpromised -= self.blocks(self.waiting[0])
            self.running.append(self.waiting.popleft())
        if not self.running:
            return
        logits = self.forward(self.running, [each.unread[:CHUNK] for each in self.running])
        for request, of_row in zip(list(self.running), logits, strict=True):
            request.unread = request.unread[CHUNK:]
            if not request.unread:
                request.unread = [int(of_row.argmax())]
                request.text += request.unread
            if len(request.text) == request.count:
                self.free += request.blocks[len(self.system.blocks) :]
                self.running.remove(request)
                self.unpromised += self.blocks(request)


@torch.inference_mode()
def alone(model: GPT, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that follow the prompt, each from a pass over the whole text."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def main(count: int = 30) -> None:
    torch.manual_seed(0)
    random.seed(0)
    model, system = GPT(vocabulary=100), random.choices(range(100), k=50)
    lengths = [(random.randint(1, 40), random.randint(1, 40)) for _ in range(count)]
    requests = [Request(random.choices(range(100), k=read), write) for read, write in lengths]
    server, arriving, steps = Server(model, system), deque(requests), 0
    while arriving or server.waiting or server.running:
        if arriving:  # one arrives before each step
            server.submit(arriving.popleft())
        server.step()
        steps += 1
        if steps % 10 == 0:
            print(f"step {steps}: {len(server.running)} run, {len(server.free)} blocks are free")
    equal = sum(each.text == alone(model, system + each.prompt, each.count) for each in requests)
    print(f"{steps} steps; {equal} of {len(requests)} texts are those of the request alone")


if __name__ == "__main__":
    main()
