"""Tables per head in the CPU kernels, with every instruction set, against float64 and bit for bit the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, bits, check_rotation, check_table_gradient, shape
from ropewalk._layout import Options
from ropewalk.kernels import cpu
from ropewalk.rotation import reference


def tables(*size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_and_sizes(level: str, threads: None, layout: str, pairing: str) -> None:
    """Several blocks of tokens for two threads; more pairs than the buffer holds; permuted and gapped tables."""
    torch.manual_seed(1)
    q = torch.randn(shape(layout, 1, 331, 3, 128))
    check_rotation(cpu, [q, q], *tables(1, 3, 331, 64), layout, pairing, level=level)
    other = [table.transpose(1, 2) for table in tables(1, 331, 3, 64)]
    check_rotation(cpu, [q], *other, layout, pairing, 0, True, level=level)
    apart = [table[..., ::2] for table in tables(1, 3, 331, 80)]
    check_rotation(cpu, [q], *apart, layout, pairing, 5, level=level)
    alike = [table.expand(1, 3, 331, 64) for table in tables(1, 1, 331, 64)]
    check_rotation(cpu, [q], alike[0], tables(1, 3, 331, 64)[1], layout, pairing, level=level)
    wide = torch.randn(shape(layout, 1, 3, 2, 1030))
    wide_tables = tables(1, 2, 3, 513, dtype=torch.float64)
    check_rotation(cpu, [wide], *wide_tables, layout, pairing, 3, level=level)
    for batch, seq, heads in ((1, 0, 2), (1, 3, 0), (1, 1, 1)):
        x = torch.randn(shape(layout, batch, seq, heads, 6))
        check_rotation(cpu, [x], *tables(batch, heads, seq, 2), layout, pairing, 1, level=level)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_gradient(level: str, dtype: torch.dtype, layout: str, pairing: str) -> None:
    torch.manual_seed(2)
    tensors, grads = ([torch.randn(shape(layout, 2, 5, 7, 80)).to(dtype) for _ in range(2)] for _ in range(2))
    for count in (1, 2):
        given = tensors[:count], grads[:count]
        made = check_table_gradient(cpu, *given, 29, layout, pairing, 7, per_head=True)
        plain = reference.table_gradient(*given, 29, Options(layout, pairing == "interleaved", 7), True)
        for mine, other in zip(made, plain, strict=True):
            assert torch.equal(bits(mine + 0.0), bits(other + 0.0))  # a sum that starts with 0 is +0
