"""The kernel that attends over the keys and values of a cache, against the definition of attention in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attention_cases import EIGHT_BITS, Case, check, define, draw, every_number, in_8_bits, long_rows
from ropewalk import KVCache, Rope, RotaryAttention
from ropewalk.attention.few_tokens import attend_cached
from ropewalk.kernels import backend, cpu
from ropewalk.kernels.visible import VisibleKeys

if not backend.FAST_PATH:
    pytest.skip("no compiled kernel", allow_module_level=True)

import ropewalk.kernels._cpu as _cpu

LEVELS = _cpu.levels()


def attend(case: Case) -> Tensor | None:
    with torch.no_grad():
        return attend_cached(case.q, case.far_q, case.keys, case.values, case.visible, scale=case.scale)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    _cpu.use_level(request.param)
    yield
    _cpu.use_level(LEVELS[-1])


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_definition(level: None, seed: int) -> None:
    case = draw(seed)
    if seed % 3 == 0:  # values of fewer channels than keys, in the same memory, as in latent attention
        case.values = case.keys[..., : seed % case.keys.shape[3] + 1]
    elif seed % 3 == 1:
        case.values = torch.cat([case.values, case.keys[..., seed:]], -1)
    check(case, attend(case))


class TestKeysOf8Bits:
    @pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
    @pytest.mark.parametrize("seed", range(30))
    def test_equals_the_definition(self, level: None, dtype: torch.dtype, seed: int) -> None:
        case = in_8_bits(draw(seed), dtype, (33, 48, 80, 96, 200)[seed % 5])
        check(case, attend(case))

    @pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
    def test_every_number(self, level: None, dtype: torch.dtype) -> None:
        case, expected = every_number(dtype)
        torch.testing.assert_close(attend(case), expected, rtol=0, atol=0, equal_nan=True)

    def test_left_to_python(self) -> None:
        case = in_8_bits(long_rows([10]), torch.int8)
        visible = case.visible
        assert visible.key_scales is not None
        for scales in (None, visible.key_scales[:, :9], visible.key_scales.double()):
            case.visible = visible._replace(key_scales=scales)
            assert attend(case) is None
        case.visible = visible
        assert attend(Case(case.q, None, case.keys.float(), case.values.float(), visible, 1.0)) is None
        assert attend(Case(case.q, None, case.keys, case.values.float(), visible, 1.0)) is None


@pytest.mark.parametrize("lengths", [[1500], [2, 1500], [1500, 2, 2], [700, 800, 900, 2]], ids=str)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_rows_are_divided_among_threads(lengths: list[int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = long_rows(lengths)
        check(case, attend(case))
    finally:
        torch.set_num_threads(before)


class TestNaN:
    def test_in_keys_that_nobody_sees(self) -> None:
        case = long_rows([5, 100])
        case.keys[0, 5:], case.values[0, 5:] = torch.nan, torch.nan
        check(case, attend(case))

    @pytest.mark.parametrize("name", ["keys", "values"])
    def test_in_keys_that_somebody_sees(self, name: str) -> None:
        case = long_rows([5, 100])
        getattr(case, name)[1, 98] = torch.nan
        attended = attend(case)
        assert attended is not None
        assert attended[1].isnan().all()
        assert not attended[0].isnan().any()


class TestLeftToPython:
    @pytest.mark.parametrize("block", [-1, 3])
    def test_blocks_outside_of_the_pool(self, block: int) -> None:
        x = torch.randn(3, 16, 1, 64)
        visible = VisibleKeys(torch.tensor([[20]]), 32, torch.tensor([[0, block]], dtype=torch.int32))
        assert attend(Case(torch.randn(1, 1, 1, 64), None, x, x, visible, 1.0)) is None

    @pytest.mark.parametrize("keys", [17, -1])
    def test_slots_outside_of_a_block(self, keys: int) -> None:
        x = torch.randn(1, 16, 1, 64)
        assert attend(Case(torch.randn(1, 1, 1, 64), None, x, x, VisibleKeys(torch.tensor([[20]]), keys), 1.0)) is None

    def test_gradients(self) -> None:
        case = long_rows([10])
        case.q.requires_grad_()
        assert attend_cached(case.q, None, case.keys, case.values, case.visible, scale=1.0) is None

    def test_float64(self) -> None:
        case = long_rows([10])
        case.q, case.keys, case.values = case.q.double(), case.keys.double(), case.values.double()
        assert attend(case) is None

    def test_transforms(self) -> None:
        case = long_rows([10])
        seen: list[object] = []

        def one(q: Tensor) -> Tensor:
            seen.append(attend_cached(q, None, case.keys, case.values, case.visible, scale=1.0))
            return q

        torch.func.vmap(one)(case.q[None])
        assert seen == [None]


class TestOperator:
    """Under torch.compile the kernel is an operator. Its plain PyTorch is used where the kernel may not run."""

    @pytest.mark.parametrize("seed", range(35))
    def test_reference_equals_the_definition(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu, "attend_plain", lambda *arguments: None)
        case = draw(seed)
        case = case if seed % 3 else in_8_bits(case, EIGHT_BITS[seed % 2])
        arguments = (case.q, case.far_q, case.keys, case.values, *case.visible, case.scale)
        attended = torch.ops.ropewalk.attend_cached(*arguments)
        expected, bound = define(case)
        rounding = expected.abs() * torch.finfo(case.q.dtype).eps / 2 + torch.finfo(case.q.dtype).tiny
        assert bool(((attended.double() - expected).abs() <= 2 * bound + rounding).all())

    @pytest.mark.parametrize(("kept", "width"), [(None, None), (torch.int8, None), (None, 3)], ids=str)
    def test_opcheck(self, kept: torch.dtype | None, width: int | None) -> None:
        case = draw(3) if kept is None else in_8_bits(draw(3), kept)
        case.values = case.values[..., :width]
        arguments = (case.q, case.far_q, case.keys, case.values, *case.visible, case.scale)
        torch.library.opcheck(
            torch.ops.ropewalk.attend_cached.default, arguments, test_utils=("test_schema", "test_faketensor")
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["capacity", "window", "sinks"])
    def test_a_compiled_layer_uses_it(self, kind: str) -> None:
        torch._dynamo.reset()
        size: dict[str, Any] = {"capacity": 40} if kind == "capacity" else {"window": 8, "sinks": 2 * ("sinks" in kind)}
        layer, rope = RotaryAttention(64, 4, num_kv_heads=2).eval(), Rope(16, 1e4, "half")
        counter = CompileCounterWithBackend("inductor")
        compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        outputs: list[list[Tensor]] = []
        graphs: list[int] = []
        for way in (layer, compiled):
            cache = KVCache(1, 2, 2, 16, **size)
            generator = torch.Generator().manual_seed(0)
            outputs.append([])
            with torch.no_grad():
                for _ in range(24):
                    graphs.append(counter.frame_count)
                    step = cache.step(1)
                    x = torch.randn(2, 1, 64, generator=generator)
                    outputs[-1].append(way(x, step.rotation(rope), cache=step.layer(0)))
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)
        assert any(
            node.target is torch.ops.ropewalk.attend_cached.default for g in counter.graphs for node in g.graph.nodes
        )
        assert graphs[-1] == graphs[-12]  # no graph belongs to a number of cached tokens
