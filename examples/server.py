"""Serve many requests at once with a PagedKVCache: continuous batching and a shared prefix.

    python examples/server.py

All requests begin with the same system prompt, whose keys and values are computed once and shared.
A step of the server admits waiting requests, if there are enough blocks for all that they may
write. Then one forward pass reads the next piece of each prompt, and writes the next token of each
text. When a request ends, its blocks are free for others.

The model has random weights, and writes nonsense. But every request gets the same nonsense as when
it runs alone, as the last line of the output says.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

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


class Server:
    def __init__(self, model: GPT, system: list[int]) -> None:
        self.model, self.system_length = model, len(system)
        self.cache = ropewalk.PagedKVCache(blocks=BLOCKS, block_size=BLOCK_SIZE, **model.sizes)
        self.system_row = self.cache.admit()
        self.forward([self.system_row], [system])
        self.most = self.unpromised = self.cache.free_blocks
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by row of the cache

    @torch.inference_mode()
    def forward(self, rows: list[int], tokens: list[list[int]]) -> Tensor:
        """Append tokens to rows, and return the logits after the last ones, [rows, vocabulary]."""
        longest = max(len(new) for new in tokens)
        padded = torch.tensor([new + [0] * (longest - len(new)) for new in tokens])
        last = torch.tensor([len(new) - 1 for new in tokens])
        is_real = torch.arange(longest) <= last[:, None]
        step = self.cache.step(longest, rows=rows, attention_mask=is_real)
        return self.model(padded, step)[torch.arange(len(rows)), last]

    def blocks(self, request: Request) -> int:
        """Return how many blocks the request may need, beside the full blocks that it shares."""
        tokens = self.system_length + len(request.prompt) + request.count
        return -(-tokens // BLOCK_SIZE) - self.system_length // BLOCK_SIZE

    def submit(self, request: Request) -> None:
        if self.blocks(request) > self.most:
            raise ValueError(f"the request may need {self.blocks(request)} of {self.most} blocks")
        request.unread = list(request.prompt)
        self.waiting.append(request)

    def step(self) -> None:
        """Admit requests, run the model once for all of them, and free those that have ended."""
        while self.waiting and self.blocks(self.waiting[0]) <= self.unpromised:
            request = self.waiting.popleft()
            self.unpromised -= self.blocks(request)
            self.running[self.cache.fork(self.system_row)] = request
        if not self.running:
            return
        pieces = [request.unread[:CHUNK] for request in self.running.values()]
        logits = self.forward(list(self.running), pieces)
        for (row, request), of_row in zip(list(self.running.items()), logits, strict=True):
            request.unread = request.unread[CHUNK:]
            if not request.unread:
                request.unread = [int(of_row.argmax())]
                request.text += request.unread
            if len(request.text) == request.count:
                self.cache.free(row)
                self.unpromised += self.blocks(self.running.pop(row))


@torch.inference_mode()
def alone(model: GPT, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that follow the prompt, with a KVCache for this request only."""
    cache = ropewalk.KVCache(batch=1, capacity=len(prompt) + count, **model.sizes)
    text, new = [], prompt
    for _ in range(count):
        new = [int(model(torch.tensor([new]), cache.step(len(new)))[0, -1].argmax())]
        text += new
    return text


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
            counts = f"{len(server.running)} run, {len(server.waiting)} wait"
            print(f"step {steps}: {counts}, {server.cache.free_blocks} blocks are free")
    equal = sum(each.text == alone(model, system + each.prompt, each.count) for each in requests)
    print(f"{steps} steps; {equal} of {len(requests)} texts are those of the request alone")


if __name__ == "__main__":
    main()
