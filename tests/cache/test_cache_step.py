"""One forward pass with a cache: its attributes, what it stores, and misuse, which raises and changes nothing."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention_oracle as written_out
from cache_model import (
    EXACT,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MODEL,
    ROPES,
    cache_of,
    distances,
    run,
    run_whole_row,
    state,
    stopped,
    unchanged,
)
from ropewalk import CacheStep, KVCache, Rope, RopeError, Rotation

ROPE, TURN = Rope(HEAD_DIM, 1e4, "half"), ROPES["default"][1]


def store(step: CacheStep) -> None:
    """Append random keys and values in every layer."""
    k = torch.ones(*step.order.shape, *step._kept.heads, dtype=step._kept.stores[0].dtype)
    for i in range(len(step._kept.stores)):
        step.layer(i).append(k, k)


@pytest.fixture
def no_extra_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a ring have as many slots as the window, so several tokens overwrite keys that they see."""
    for module in ("plan", "ring"):
        monkeypatch.setattr(f"ropewalk.cache.{module}.MOST_TOKENS", 1)


@pytest.mark.usefixtures("no_extra_slots")
def test_attributes_of_a_step() -> None:
    cache = KVCache(1, 2, 1, 2, window=3, sinks=1)
    padded = cache.step(2, attention_mask=torch.tensor([[0, 1], [1, 1]]))
    store(padded)
    assert padded.mask[
        0, 0, 0
    ].all()  # padding attends to all keys, because some kernels return NaN for a fully masked query
    step = cache.step(3)
    assert step.positions.tolist() == step.order.tolist() == [[1, 2, 3], [2, 3, 4]]
    # The cached tokens, slot by slot, then the new tokens.
    none = 2**62
    assert step.key_positions.tolist() == [[0, none, none, none, 1, 2, 3], [0, 1, none, none, 2, 3, 4]]
    assert torch.equal(step.key_order, step.key_positions)
    assert step.mask[1, 0].int().tolist() == [[1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 1, 1, 1]]
    store(step)
    one = cache.step(1)
    assert one.key_positions.tolist() == one.key_order.tolist() == [[0, 4, 2, 3], [0, 4, 5, 3]]
    assert one.mask[:, 0, 0].all()


@pytest.mark.usefixtures("no_extra_slots")
@pytest.mark.parametrize("size", [{"capacity": 5}, {"window": 3}])
def test_order_and_positions_are_independent(size: dict[str, int]) -> None:
    cache, none = KVCache(1, 1, 1, 2, **size), 2**62
    store(cache.step(2, positions=torch.tensor([8, 8])))
    one = cache.step(1, positions=torch.tensor([3]))
    assert one.positions.tolist() == [[3]]
    assert one.order.tolist() == [[2]]
    assert one.key_positions[0].tolist() == [8, 8, 3, none, none][: one.key_order.shape[1]]
    assert one.key_order[0].tolist() == [0, 1, 2, none, none][: one.key_order.shape[1]]
    assert one.mask[0, 0, 0].tolist() == [True, True, True, False, False][: one.key_order.shape[1]]
    store(one)
    two = cache.step(2, attention_mask=torch.tensor([[1, 0]]), positions=torch.tensor([5, 6]))
    assert two.order.tolist() == [[3, 3]]
    assert two.positions.tolist() == [[5, 6]]  # the positions that were passed for padding
    if "window" in size:
        assert two.key_order.tolist() == [[0, 1, 2, 3, none]]
        assert two.key_positions.tolist() == [[8, 8, 3, 5, none]]
        assert two.mask[0, 0, 0].tolist() == [False, True, True, True, False]
    store(two)
    assert cache.position.tolist() == [6]


def test_padding_alone_leaves_the_next_position() -> None:
    cache = KVCache(1, 2, 1, 2, capacity=5)
    store(cache.step(1, positions=torch.tensor([[7], [40]]), attention_mask=torch.tensor([[0], [1]])))
    assert cache.position.tolist() == [0, 41]
    assert cache.step(1).positions.tolist() == [[0], [41]]


@pytest.mark.usefixtures("no_extra_slots")
def test_no_slot_is_written_twice() -> None:
    """On a GPU, the order of two writes to one slot is undefined."""
    step = KVCache(1, 2, 1, 2, window=3, sinks=2).step(9, attention_mask=torch.tensor([[1] * 9, [1] * 7 + [0] * 2]))
    for slots in step._plan.slots[1].tolist():
        assert sorted(slot for slot in slots if slot < 5) == [0, 1, 2, 3, 4]


class TestAPassThatRaised:
    def test_that_required_gradients(self) -> None:
        cache, x = cache_of(1, capacity=4), torch.randn(1, 3, HIDDEN, dtype=torch.float64)
        step, before = cache.step(3), state(cache)
        with pytest.raises(RopeError, match="gradients cannot pass through a cache"):
            MODEL[0](x, step.rotation(ROPE, dtype=torch.float64), cache=step.layer(0))
        assert unchanged(cache, before)
        wanted = run_whole_row(x[0], TURN, *distances(3, {"capacity": 4}))
        torch.testing.assert_close(run(cache, x, ROPE)[0], wanted, **EXACT)

    @pytest.mark.parametrize("size", [{"capacity": 9}, {"window": 4}])
    @pytest.mark.parametrize(("after", "got"), [(1, "1 of 2 layers"), (2, "2 of 2 layers, the last of which failed")])
    def test_must_be_rolled_back(self, size: dict[str, int], after: int, got: str) -> None:
        cache, x = cache_of(1, **size), torch.randn(1, 1, HIDDEN, dtype=torch.float64)
        stopped(cache, x, after)
        message = rf"every layer must have appended in the previous step, got {got}\. .*call rollback\(\) first"
        before = state(cache)
        with pytest.raises(RopeError, match=rf"KVCache\.step: {message}"):
            cache.step(1)
        with pytest.raises(RopeError, match=rf"KVCache\.shift: {message}"):
            cache.shift(ROPE, 1)
        assert unchanged(cache, before)
        cache.rollback()
        assert cache.step(1).positions.tolist() == [[0]]

    @pytest.mark.usefixtures("no_extra_slots")
    @pytest.mark.parametrize("after", [1, 2])
    def test_that_overwrote_older_keys(self, after: int) -> None:
        cache, x = cache_of(1, window=2), torch.randn(1, 3, HIDDEN, dtype=torch.float64)
        wanted = run(cache, x, ROPE)
        stopped(cache, x, after)
        with pytest.raises(
            RopeError, match=rf"KVCache\.rollback: with a window, .* got one that {after} of 2 .*reset\(\)"
        ):
            cache.rollback()
        for change in (lambda: cache.step(1), lambda: cache.reset([0])):
            with pytest.raises(RopeError, match="every layer must have appended"):
                change()
        cache.reset()
        assert torch.equal(run(cache, x, ROPE), wanted)

    def test_after_truncation(self) -> None:
        """Drafts that `at` has dropped are not restored."""
        cache, x = cache_of(1, capacity=6), torch.randn(1, 6, HIDDEN, dtype=torch.float64)
        run(cache, x[:, :4], ROPE)
        stopped(cache, torch.randn(1, 2, HIDDEN, dtype=torch.float64), 1, at=torch.tensor([2]))
        cache.rollback()
        assert cache.length.tolist() == cache.position.tolist() == [2]
        out = run(cache, x[:, 2:], ROPE)
        wanted = run_whole_row(x[0], TURN, *distances(6, {"capacity": 6}))
        torch.testing.assert_close(out[0], wanted[2:], **EXACT)


class TestMisuse:
    """Each misuse raises an error and leaves the cache unchanged."""

    def cache(self, **size: int) -> tuple[KVCache, Tensor]:
        cache, x = cache_of(2, **(size or {"capacity": 9})), torch.randn(2, 5, HIDDEN, dtype=torch.float64)
        run(cache, x[:, :4], ROPE)
        return cache, x[:, 4:]

    def refuses(self, cache: KVCache, step: CacheStep, x: Tensor, rotation: Any, message: str) -> None:
        before = state(cache)
        with torch.no_grad(), pytest.raises(RopeError, match=f"KVCache: {message}"):
            MODEL[0](x, rotation, cache=step.layer(0))
        assert unchanged(cache, before)

    @pytest.mark.parametrize("sinks", [0, 1])
    def test_rotation_of_the_previous_step(self, sinks: int) -> None:
        cache, x = self.cache(window=8, sinks=sinks)
        with torch.no_grad():
            step = cache.step(1)
            rotation = step.rotation(ROPE, dtype=torch.float64)
            for i, layer in enumerate(MODEL):
                layer(x, rotation, cache=step.layer(i))
        step = cache.step(1)
        message = r"with a cache, each step needs its own rotation, .* got the rotation of the previous step\."
        self.refuses(cache, step, x, rotation, message)
        again = step.rotation(ROPE, dtype=torch.float64)
        with torch.no_grad():
            for i, layer in enumerate(MODEL):
                layer(x, again, cache=step.layer(i))

    def test_a_rotation_may_be_reused_for_the_same_positions(self) -> None:
        """The positions may be the same in two steps: with `at`, after padding, or by explicit positions."""
        cache, x = self.cache(capacity=9)
        table, at = ROPE.at(torch.arange(9), dtype=torch.float64), torch.tensor([4, 4])
        rotations: list[Rotation] = []
        nothing = torch.tensor([[0], [0]])
        here = torch.tensor([4])
        again = [{"at": at}, {"positions": here}, {"at": at, "attention_mask": nothing}, {"attention_mask": nothing}]
        for options in ({}, *again, {}):
            step = cache.step(1, **options)
            assert step.positions.tolist() == [[4], [4]]
            rotations = rotations or [table[step.positions], ROPE.at(step.positions, dtype=torch.float64)]
            with torch.no_grad():
                for i, (layer, rotation) in enumerate(zip(MODEL, rotations, strict=True)):
                    layer(x, rotation, cache=step.layer(i))

    def refuses_to_append(self, cache: KVCache, layer: Any, message: str) -> None:
        before, k = state(cache), torch.ones(2, 1, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        with pytest.raises(RopeError, match=f"KVCache: {message}"):
            layer.append(k, k)
        assert unchanged(cache, before)

    def test_a_layer_that_appends_twice(self) -> None:
        cache, _ = self.cache()
        step, k = cache.step(1), torch.ones(2, 1, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        step.layer(0).append(k, k)
        message = "each layer must append once in a step, got a second call"
        self.refuses_to_append(cache, step.layer(0), message)
        step.layer(1).append(k, k)
        self.refuses_to_append(cache, step.layer(1), message)
        assert cache.length.tolist() == [5, 5]

    @pytest.mark.parametrize("by", ["step", "shift", "reset", "reset a row", "rollback"])
    def test_an_outdated_step(self, by: str) -> None:
        cache, _ = self.cache()
        step = cache.step(1)
        {
            "step": lambda: cache.step(1),
            "shift": lambda: cache.shift(ROPE, 3),
            "reset": cache.reset,
            "reset a row": lambda: cache.reset([1]),
            "rollback": cache.rollback,
        }[by]()
        with pytest.raises(RopeError, match="CacheStep: key_positions must be read while the step is the newest"):
            _ = step.key_positions
        self.refuses_to_append(cache, step.layer(0), "a step must be the newest of its cache, .* got an outdated one")

    def test_refused_calls_do_not_outdate_a_step(self) -> None:
        cache, _ = self.cache()
        step = cache.step(1)
        with pytest.raises(RopeError, match="capacity=9, got 10 tokens"):
            cache.step(6)
        with pytest.raises(RopeError, match="delta must be"):
            cache.shift(ROPE, 1.5)  # type: ignore[arg-type]
        store(step)
        assert cache.length.tolist() == [5, 5]

    def test_a_layer_left_out(self) -> None:
        cache, _ = self.cache()
        step = cache.step(1)
        message = "all 2 layers must append, the last one last, got the last one after 0 others"
        self.refuses_to_append(cache, step.layer(LAYERS - 1), message)
        store(step)


class TestCompiledLayerByLayer:
    """The step is planned in eager mode, and each layer is compiled separately."""

    @pytest.mark.parametrize("size", [{"capacity": 12}, {"window": 3, "sinks": 2}])
    def test_two_graphs_and_the_same_numbers(self, size: dict[str, int]) -> None:
        def one(layer: Any, x: Tensor, rotation: Any, cache: Any) -> Tensor:
            return x + layer(x, rotation, cache=cache)

        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(one, fullgraph=True, backend=counter)
        plain, traced = (KVCache(4, 2, KV_HEADS, HEAD_DIM, dtype=torch.float64, **size) for _ in range(2))
        with torch.no_grad():
            for _ in range(4):
                outputs = []
                x = torch.randn(2, 1, HIDDEN, dtype=torch.float64)
                for cache, run_one in ((plain, one), (traced, compiled)):
                    out, step = x, cache.step(1)
                    rotation = step.rotation(ROPE, dtype=torch.float64)
                    for i in range(4):
                        out = run_one(MODEL[i % 2], out, rotation, step.layer(i))
                    outputs.append(out)
                torch.testing.assert_close(*outputs, **EXACT)
        assert traced.length.tolist() == [4, 4]
        assert counter.frame_count == 2  # one for the last layer, which counts the tokens, and one for all others

    def test_alternating_eager_and_compiled_steps(self) -> None:
        x = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
        cache, outputs = cache_of(2, capacity=6), []
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for i in range(6):
            outputs.append((compiled if i % 2 else run)(cache, x[:, i : i + 1], ROPE))
        wanted = [run_whole_row(row, TURN, *distances(6, {"capacity": 6})) for row in x]
        torch.testing.assert_close(torch.cat(outputs, dim=1), torch.stack(wanted), **EXACT)


class Upcast(torch.nn.Module):
    """A norm with float32 output, which autocast produces for some norms on some devices."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class TestAutocast:
    """A float32 model under autocast to bfloat16."""

    @pytest.mark.parametrize("norm", [False, True])
    def test_the_cache_has_the_dtype_of_autocast(self, norm: bool) -> None:
        torch.manual_seed(0)
        layer, x = copy.deepcopy(MODEL[0]).float(), torch.randn(2, 5, HIDDEN)
        if norm:
            layer.q_norm, layer.k_norm = Upcast(), Upcast()  # type: ignore[assignment]
        outputs = []
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            wrong = KVCache(1, 2, KV_HEADS, HEAD_DIM, capacity=5)
            step = wrong.step(3)
            with pytest.raises(RopeError, match=r"k must .* got .* torch.bfloat16 .*Build .* dtype=torch.bfloat16,"):
                layer(x[:, :3], step.rotation(ROPE), cache=step.layer(0))
            cache = KVCache(1, 2, KV_HEADS, HEAD_DIM, capacity=5, dtype=torch.bfloat16)
            for start, stop in ((0, 3), (3, 4), (4, 5)):
                step = cache.step(stop - start)
                outputs.append(layer(x[:, start:stop], step.rotation(ROPE), cache=step.layer(0)))
        ours = torch.cat(outputs, dim=1)
        assert ours.dtype == torch.bfloat16
        theirs = written_out.of_layer(layer, x, TURN)
        # Measured over 200 seeds: 0.016 in values of size 3.4, without a cache.
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=0.02)


class Created(TorchDispatchMode):
    """The numbers of elements of all tensors with new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.sizes.append(x.numel())
        return result


@pytest.mark.parametrize("ragged", [False, True])
@torch.no_grad()
def test_a_step_costs_by_its_tokens_and_not_by_the_capacity(ragged: bool) -> None:
    cache, k = KVCache(1, 2, 1, 4, capacity=100_000), torch.ones(2, 9, 1, 4)
    for seq in (9, 1, 1):
        mask = torch.ones(2, seq) > 0
        mask[1, 0] = not ragged
        with Created() as created:
            step = cache.step(seq, attention_mask=mask, at=cache.position.clone())
            step.layer(0).attend(k[:, :seq], k[:, :seq], k[:, :seq], rotation=step.rotation(Rope(4, 1e4, "half")))
        assert max(created.sizes) <= 2 * 9 * 11
        assert step.key_positions.shape == step.mask.shape[:1] + step.mask.shape[3:] == (2, 100_000)


def test_copies_and_pickles_during_a_step() -> None:
    x = torch.randn(1, 3, HIDDEN, dtype=torch.float64)
    cache = cache_of(1, window=4, sinks=1)
    run(cache, x[:, :2], ROPE)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    others = [copy.deepcopy(cache), torch.load(file, weights_only=False)]
    wanted = run(cache, x[:, 2:], ROPE)
    for other in others:
        assert torch.equal(run(other, x[:, 2:], ROPE), wanted)


def test_memory_is_free_as_soon_as_the_cache_is_dropped() -> None:
    """Without the garbage collector, because a cache on a GPU is large."""
    gc.disable()
    try:
        cache = cache_of(1, capacity=4)
        step = cache.step(1)
        run(cache, torch.randn(1, 1, HIDDEN, dtype=torch.float64), ROPE)
        gone = [weakref.ref(cache.keys[0]), weakref.ref(step.mask)]
        del cache, step
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_refuses_arguments() -> None:
    cache = KVCache(1, 2, 1, 2, capacity=8)
    with pytest.raises(RopeError, match=r"CacheStep\.layer: index must be an integer from 0 to 0, got 1"):
        cache.step(1).layer(1)
    layer, k = cache.step(1).layer(0), torch.ones(2, 1, 1, 2)
    for wrong_k in (k[:1], k[..., :1], k.double(), k.expand(2, 3, 1, 2), k.to("meta")):
        with pytest.raises(RopeError, match=r"KVCache: k must have shape \(2, 1, 1, 2\) in torch.float32 on cpu"):
            layer.append(wrong_k, k)
    with pytest.raises(RopeError, match="KVCache: v must have shape"):
        layer.append(k, k.half())
    with pytest.raises(RopeError, match="KVCache: gradients cannot pass through a cache"):
        layer.append(k.requires_grad_(), k)


def test_what_hides_nothing_costs_nothing() -> None:
    """A window of the layer as long as the cache needs no mask, and sinks no second rotation before they are far."""
    step = KVCache(1, 1, 1, 4, capacity=8).step(8)
    assert step.within(8) is None
    assert step.within(7) is not None
    rope = Rope(4, 1e4, "half")
    for seq, passes in ((6, 1), (7, 2)):
        step = KVCache(1, 1, 1, 4, window=4, sinks=2).step(seq)
        assert step.rotation(rope).passes == passes
        assert step._plan.causal == (passes == 1)
