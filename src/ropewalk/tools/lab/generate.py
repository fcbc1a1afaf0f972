"""Generate text from a prompt, byte by byte, with a KV cache."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import ropewalk
from ropewalk import _checks
from ropewalk.tools.lab import checkpoint
from ropewalk.tools.lab.model import LanguageModel

AT_ONCE = 128
"""Tokens of the prompt in one pass. The memory for attention grows with this number times the number of tokens."""


@torch.no_grad()
def generate(
    model: LanguageModel,
    rope: ropewalk.Rope | None,
    prompt: list[int],
    *,
    tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[int]:
    """Generate the tokens that follow a prompt, one at a time.

    Args:
        model: the model.
        rope: the rope of the model. A scheme that depends on the length is resolved for prompt and tokens together.
        prompt: at least one token.
        tokens: number of tokens to generate, at least 1.
        temperature: divisor of the logits, at least 0. 0 selects the most likely token.
        seed: seed of the random draws. Equal seeds give equal tokens.

    Raises:
        RopeError: the model has learned positions, and the text becomes longer than these.
    """
    size, length, chance = model.size, len(prompt) + tokens, torch.Generator().manual_seed(seed)
    # The last generated token is never an input, so the cache needs no slot for it.
    cache = ropewalk.KVCache(size.num_layers, 1, size.num_kv_heads, size.head_dim, capacity=length - 1)
    rope = None if rope is None else rope.at_length(length)
    new = prompt
    for _ in range(tokens):
        for begin in range(0, len(new), AT_ONCE):
            part = new[begin : begin + AT_ONCE]
            step = cache.step(len(part))
            logits = model(
                torch.tensor([part]),
                None if rope is None else step.rotation(rope),
                positions=step.positions if size.absolute else None,
                cache=step,
            )[0, -1]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            # Subtract the largest logit first, so that small temperatures do not overflow.
            scaled = (logits.double() - logits.max()) / temperature
            token = int(torch.multinomial(torch.softmax(scaled, dim=-1), 1, generator=chance))
        yield token
        new = [token]


def run(file: Path, prompt: str, *, tokens: int, temperature: float, seed: int, write: Callable[[str], object]) -> str:
    """Write the prompt and the generated text. Bytes that are not valid UTF-8 become �.

    Args:
        file: a checkpoint of a byte model.
        prompt, tokens, temperature, seed: as for `generate`.
        write: called with the text, piece by piece.

    Returns:
        A line with the time to the first token and the tokens per second.

    Raises:
        RopeError: the file is no checkpoint of a byte model, the prompt is empty, or the temperature is not at least 0.
    """
    model, rope, _ = checkpoint.load(file)
    if model.size.vocab_size != 256:
        raise _checks.error(
            "generate",
            "the model must be a byte model with 256 tokens",
            f"{model.size.vocab_size} tokens in {file}",
            "Pass the checkpoint of a text model.",
        )
    if not prompt:
        raise _checks.error("generate", "prompt must have at least one character", "''", "Pass some text to continue.")
    if not temperature >= 0:
        must = "temperature must be at least 0"
        raise _checks.error("generate", must, str(temperature), "Pass 0 to always select the most likely byte.")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    encoded = prompt.encode(errors="surrogateescape")  # the shell may pass bytes that are not UTF-8
    following = generate(model, rope, list(encoded), tokens=tokens, temperature=temperature, seed=seed)
    write(encoded.decode(errors="replace"))
    times = [time.perf_counter()]
    for token in following:
        write(decoder.decode(bytes([token])))
        times.append(time.perf_counter())
    write(decoder.decode(b"", final=True) + "\n")
    first = f"first token after {times[1] - times[0]:.2f} s"
    return first if tokens == 1 else f"{first}, then {(tokens - 1) / (times[-1] - times[1]):.0f} tokens per second"
