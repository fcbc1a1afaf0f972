"""Parameters with names that say nothing have the roles that their use in the code says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk import RopeError, conformance
from ropewalk.tools.check.find import uses


def powers(i: float, j: int, m: int) -> Tensor:
    return torch.outer(torch.arange(j), 1.0 / (i ** (torch.arange(0, m, 2).float() / m)))


def exponential(i: float, m: int) -> Tensor:
    return torch.exp(torch.arange(0, m, 2) * -(math.log(i) / m))


def between(i: float, j: float, m: int) -> Tensor:
    return (j / i) ** torch.linspace(0, 1, m) * i


def of_an_area(i: tuple[int, int]) -> Tensor:
    rows, columns = i
    return torch.zeros(1 + rows * columns)


def on_a_device(j: int, device: str) -> Tensor:
    return torch.arange(j, device=device) * torch.ones(1, device=device).to(device)


def of_a_square(j: int, m: int) -> Tensor:
    sides = torch.meshgrid(torch.arange(j), torch.arange(j), indexing="ij")
    return torch.stack(sides, dim=-1).expand(m // 4, -1, -1, -1)


def of_two_sides(i: int, j: int) -> Tensor:
    return torch.arange(i)[:, None] + torch.arange(j)


def of_both_tables(a: Tensor, b: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = b
    return by_tables(a, cos, sin)


def from_a_place(i: int, j: int) -> Tensor:
    return torch.arange(i, i + j)


def counted_before(j: int, i: int = 0, k: float = 0.0) -> Tensor:
    tokens = torch.arange(j).float()
    places = tokens[None] + i
    tokens = torch.ones(j)
    return places * (tokens + k)


def counted(j: tuple[int, int]) -> Tensor:
    rows, columns = j
    return torch.arange(columns)[None] + rows


def counted_again(j: tuple[int, int]) -> Tensor:
    rows, columns = j
    columns = 3
    return torch.arange(columns) + rows


def passed_on(j: tuple[int, int]) -> Tensor:
    rows, columns = j
    return of_two_sides(rows, columns)


def of_other_parts(a: Tensor) -> Tensor:
    u, v = a.chunk(2)
    return u * v


def of_halves(a: Tensor, b: Tensor) -> Tensor:
    u, v = a.chunk(2, dim=-1)
    return torch.cat((u * torch.cos(b) - v * torch.sin(b), v * torch.cos(b) + u * torch.sin(b)), dim=-1)


def of_pairs(a: Tensor, b: Tensor, m: int) -> Tensor:
    angles = b[..., None].float() * 100.0 ** (-torch.arange(m // 2) / (m // 2))
    z = torch.view_as_complex(a.float().view(*a.shape[:-1], -1, 2))
    return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2).type_as(a)


def of_one_vector(a: Tensor, m: int, base: float) -> Tensor:
    n, out = len(a), a.clone()
    for i in range(0, n, 2):
        angle = m * base ** (-i / n)
        out[i] = a[i] * math.cos(angle) - a[i + 1] * math.sin(angle)
    return out


def by_tables(a: Tensor, c: Tensor, s: Tensor) -> Tensor:
    c, s = c.unsqueeze(1), s.unsqueeze(1)
    u, v = a.chunk(2, dim=-1)
    return a * c + torch.cat((-v, u), dim=-1) * s


def of_rows(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    return of_halves(a, rows[b])


def of_two(one: Tensor, other: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    def turn(each: Tensor) -> Tensor:
        return of_pairs(each, b, 64)

    return tuple(turn(each) for each in (one, other))


def of_tokens_and_heads(a: Tensor, n: int, m: int) -> Tensor:
    return a.view(a.shape[0], -1, n, m)


class Frequencies:
    def __init__(self, i: float, m: int, c: Any) -> None:
        self.i, self.half, self.c = i, m // 2, c.rope_theta

    def __call__(self, b: Tensor, like: Tensor) -> Tensor:
        return (b[:, None] * self.i ** (-torch.arange(self.half) / self.half)).to(like.dtype)


@dataclass
class Unhashable:
    """Of so many channels and heads. As a dataclass, it cannot be hashed, and has an `__init__` without a source."""

    m: int
    n: int

    def __post_init__(self) -> None:
        self.width = self.m // self.n

    def __call__(self, a: Tensor) -> Tensor:
        return a.chunk(self.width)[0]


@pytest.mark.parametrize(
    ("code", "roles"),
    [
        (powers, {"i": "base", "j": "length", "m": "dim"}),
        (exponential, {"i": "base", "m": "dim"}),
        (between, {"i": "table"}),
        (of_an_area, {"i": "sides"}),
        (on_a_device, {"j": "length"}),
        (of_a_square, {"j": "width", "m": "half"}),
        (of_two_sides, {"i": "height", "j": "width"}),
        (of_both_tables, {"a": "tokens", "b": "table"}),
        (from_a_place, {"i": "offset", "j": "length"}),
        (counted, {"j": "sides"}),
        (counted_again, {}),
        (passed_on, {"j": "sides"}),
        (of_other_parts, {"a": "tokens"}),
        (of_halves, {"a": "tokens", "b": "angles"}),
        (of_pairs, {"a": "tokens", "b": "positions", "m": "dim"}),
        (of_one_vector, {"a": "tokens", "m": "positions", "base": "base"}),
        (by_tables, {"a": "tokens", "c": "cos", "s": "sin"}),
        (of_rows, {"a": "tokens", "b": "positions", "rows": "angles"}),
        (of_two, {"one": "tokens", "other": "tokens", "b": "positions"}),
        (of_tokens_and_heads, {"a": "like", "n": "num_heads", "m": "head_size"}),
        (Frequencies, {"i": "base", "m": "dim", "c": "config"}),
        (Unhashable, {"m": "embed_dim", "n": "num_heads"}),
        (Unhashable(8, 2), {"a": "tokens"}),
        (Frequencies(1.0, 2, SimpleNamespace(rope_theta=1)), {"b": "positions", "like": "like"}),
        (lambda a, b: a.chunk(b), {"a": "tokens"}),
        ((lambda a: a.chunk(2), lambda a: a + 1)[0], {}),  # a line does not say which of two it is
        (lambda a, n: a.astype(float)[..., 2:] + torch.arange(end=n), {"a": "tokens"}),
        (counted_before, {"j": "length", "i": "offset"}),
        (math.sqrt, {}),
    ],
)
def test_roles(code: Callable[..., Any], roles: dict[str, str]) -> None:
    assert uses.roles(code) == roles


def test_a_call_is_found_by_use_alone() -> None:
    report = conformance.check(of_two, base=100.0)
    assert (report.codes, report.found["pairing"]) == ([], "interleaved"), str(report)
    assert conformance.check((powers, lambda x, t: of_halves(x, t[:, None]).type_as(x)), base=100.0).codes == []


def test_a_guess_that_does_not_rotate_accuses_nobody() -> None:
    def unchanged(a: Tensor, b: Tensor) -> Tensor:
        return (a.chunk(2, dim=-1), a)[1]

    with pytest.raises(RopeError, match="a name whose meaning is known, got a, b"):
        conformance.check(unchanged)
