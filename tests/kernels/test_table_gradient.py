"""The kernel for the gradient to cos and sin, with every instruction set, against float64 sums."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, check_table_gradient, shape, unchanged
from ropewalk._layout import Options
from ropewalk.kernels import cpu

pytestmark = pytest.mark.usefixtures("poisoned")


check = partial(check_table_gradient, cpu)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(level: str, dtype: torch.dtype, layout: str, pairing: str) -> None:
    torch.manual_seed(0)
    for head_dim, pairs, offset in ((2, 1, 0), (6, 3, 0), (80, 40, 0), (96, 17, 31), (512, 256, 0)):
        sizes = [shape(layout, 2, 5, heads, head_dim) for heads in (3, 1)]
        tensors, grads = ([torch.randn(size).to(dtype) for size in sizes] for _ in range(2))
        check(tensors, grads, pairs, layout, pairing, offset)
        check(tensors[:1], grads[:1], pairs, layout, pairing, offset)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_strides(level: str, pairing: str) -> None:
    torch.manual_seed(1)
    dense = torch.randn(2, 5, 3, 80)
    fused = torch.randn(2, 5, 7, 80)[:, :, 2:5]
    apart = torch.randn(2, 5, 3, 160)[..., ::2]
    rotated = torch.randn(2, 3, 5, 80).transpose(1, 2)
    one = torch.ones(()).expand(2, 5, 3, 80)  # the gradient of .sum()
    for x in (dense, fused, apart, rotated, one):
        for grad in (dense.flip(0), fused, apart, rotated, one):
            check([x], [grad], 29, "bshd", pairing, 7)
            check([x, dense], [grad, one], 29, "bshd", pairing, 7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty(level: str, layout: str) -> None:
    """Without heads the gradient is 0. Without tokens or rows it is empty."""
    for batch, seq, heads in ((2, 5, 0), (1, 0, 3), (0, 5, 3), (1, 1, 1)):
        x = torch.randn(shape(layout, batch, seq, heads, 8))
        check([x], [torch.randn_like(x)], 3, layout, "half", 1)


def test_many_tokens(level: str, threads: None) -> None:
    torch.manual_seed(2)
    x, grad = torch.randn(3, 331, 2, 64), torch.randn(3, 331, 2, 64)
    check([x], [grad], 32, "bshd", "half", 0)
    made = []
    for count in (1, 2):
        torch.set_num_threads(count)
        made.append(torch.stack(cpu.table_gradient([x], [grad], 32, Options("bshd", False, 0))))
    assert unchanged(*made)
