"""Read a whole text of the target's length: what the model finds again in it, and its loss by position."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from typing import Any

from ropewalk.tools.extend.subject import Subject

MOST = 4
"""How often `filled` reads a text, at most."""

_NAMES = ("London", "Paris", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Athens", "Dublin", "Oslo")
_LENGTH = 64  # tokens of a passage
_BLOCKS = 16


def filled(subject: Subject, target: int, steps: Any, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the model finds, and its losses: without scaling, and with what reaches the target.

    That is the method that was found, also with target / stated length as the factor, and Self-Extend.
    """
    method, factor, ratio = found["method"], found["factor"], subject.factor * target / subject.stated
    ways: list[tuple[Any, ...]] = [("none", 1.0)]
    if method is not None:
        ways += [(method, ratio)] if 1.0 < ratio < factor else []
        ways.append((method, factor))
    if (row := found["self_extend"]) is not None:
        ways.append((row["method"], row["factor"], row["window"]))

    def read(target: int, *way: Any) -> dict[str, Any]:
        return _read(subject, target, *way)

    return [{"method": way[0], "factor": way[1], **steps.do(target, read, target, *way)} for way in dict.fromkeys(ways)]


def _read(subject: Subject, target: int, *way: Any) -> dict[str, Any]:
    tokens, questions, body = lay(subject, target)
    losses, right = subject.read(tokens, *way)
    found = []
    for distance, spans in questions:  # `right` begins with the second token
        random_passage, real, key = ([bool(one) for one in right[start - 1 : end - 1]] for start, end in spans)
        shares = {"random": statistics.mean(random_passage), "real": statistics.mean(real), "key": all(key)}
        found.append({"distance": distance, **shares})
    blocks = losses[: body - 1].chunk(_BLOCKS)
    return {"found": found, "losses": [float(block.mean()) for block in blocks]}


def lay(subject: Subject, target: int) -> tuple[list[int], list[tuple[int, list[tuple[int, int]]]], int]:
    """Put passages and pass keys into the text, and repeat them at its end, one after another, the nearest first.

    Returns:
        The tokens; for each distance the spans of the answers: a random passage, a real one and a pass key; and the
        number of tokens before the questions.
    """
    draw, words, end = random.Random(0), sorted(set(subject.tokens)), subject.encode(".\n")
    keys = [subject.encode(f" {draw.randrange(10_000, 100_000)}") for _ in _NAMES]
    told = [[*subject.encode(f"\nThe pass key for {name} is"), *key] for name, key in zip(_NAMES, keys, strict=True)]
    room = 2 * _LENGTH + max(map(len, told)) + len(end)
    count = max(2, min(len(_NAMES), target // (3 * room)))
    body = target - sum(2 * _LENGTH + len(sentence) for sentence in told[:count])
    tokens = subject.tokens[:body]
    questions = []
    for i, (sentence, key) in enumerate(zip(told[:count], keys, strict=False)):
        now, at = len(tokens), (body - room) * (count - 1 - i) // (count - 1)
        passage = [draw.choice(words) for _ in range(_LENGTH)]
        tokens[at : at + _LENGTH] = passage
        tokens[at + 2 * _LENGTH : at + 2 * _LENGTH + len(sentence) + len(end)] = [*sentence, *end]
        tokens += [*passage, *tokens[at + _LENGTH : at + 2 * _LENGTH], *sentence]
        middle, last = now + _LENGTH, len(tokens)
        questions.append((now - at, [(now + 1, middle), (middle + 1, middle + _LENGTH), (last - len(key), last)]))
    return tokens, questions, body
