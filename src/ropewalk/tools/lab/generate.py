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

LARGEST_CACHE = 2**31
"""Maximum size of keys and values in bytes. It allows 524,288 tokens with the text model of the lab."""

AT_ONCE = 128
"""Tokens of the prompt in one pass. The memory for attention grows with this number times the number of tokens."""


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
        RopeError: an argument is out of range, or there are too many tokens for learned positions or LARGEST_CACHE.
    """
    _checks.integer("generate", "tokens", tokens, at_least=1)
    _checks.number("generate", "temperature", temperature, at_least=0.0)
    _checks.integer("generate", "seed", seed, at_least=0, at_most=2**63 - 1)
    if not prompt or not all(0 <= token < model.size.vocab_size for token in prompt):
        raise _checks.error(
            "generate",
            f"prompt must be tokens from 0 to {model.size.vocab_size - 1}, at least one",
            _checks.shown(prompt),
            "Pass at least one token.",
        )
    longest = model.size.max_positions
    if longest is not None and len(prompt) + tokens > longest:
        raise _checks.error(
            "generate",
            f"prompt and tokens together must be at most {longest}, because the positions of this model are learned",
            f"{len(prompt)} and {tokens}",
            "Generate fewer tokens.",
        )
    for_each = 2 * model.size.num_layers * model.size.num_kv_heads * model.size.head_dim * 4  # keys, values; float32
    if (len(prompt) + tokens) * for_each > LARGEST_CACHE:
        raise _checks.error(
            "generate",
            f"prompt and tokens together must be at most {LARGEST_CACHE // for_each:,}, whose keys and values take "
            f"{LARGEST_CACHE / 2**30:g} GiB",
            f"{len(prompt):,} and {_checks.shown(tokens)}",
            "Generate fewer tokens.",
        )
    return _generate(model, rope, prompt, tokens, temperature, torch.Generator().manual_seed(seed))


@torch.no_grad()
def _generate(
    model: LanguageModel,
    rope: ropewalk.Rope | None,
    prompt: list[int],
    tokens: int,
    temperature: float,
    chance: torch.Generator,
) -> Iterator[int]:
    size, length = model.size, len(prompt) + tokens
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
        RopeError: the file is no checkpoint of a byte model, or an argument is out of range.
    """
    model, rope, _ = checkpoint.load(file)
    if model.size.vocab_size != 256:
        raise _checks.error(
            "generate",
            "the model must be a byte model with 256 tokens",
            f"{model.size.vocab_size} tokens in {file}",
            "Pass the checkpoint of a text model.",
        )
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
