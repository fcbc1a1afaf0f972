"""Compare the override with torchtitan's own modules, if torchtitan is installed (tested with 0.3.0 and b5bcd76)."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stub_torchtitan

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)

NAMES = ["ComplexRoPE", "CosSinRoPE"]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("ComplexRoPE", {"theta": 5e5}),
    ("ComplexRoPE", {"theta": 5e5, "scaling": "llama"}),
    ("ComplexRoPE", {"theta": 5e5, "scaling": "llama", "scaling_factor": 32.0, "high_freq_factor": 6.0}),
    ("ComplexRoPE", {"scaling": "yarn", "rope_factor": 40.0}),
    ("CosSinRoPE", {"theta": 1e6}),
    ("CosSinRoPE", {"scaling": "yarn", "rope_factor": 4.0, "original_seq_len": 1024, "beta_fast": 16.0}),
    ("CosSinRoPE", {"theta": 1.5e5, "scaling": "yarn", "rope_factor": 32.0, "truncate": False}),
]
LENGTH, DIM = 4096, 64


@pytest.fixture(scope="module")
def titan() -> Any:
    """Import torchtitan's rotary modules, and the override as `ours`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torchtitan imports
        from torchtitan.models.common import rope

        from ropewalk.integrations import torchtitan
    return SimpleNamespace(RoPE=rope.RoPE, ComplexRoPE=rope.ComplexRoPE, CosSinRoPE=rope.CosSinRoPE, ours=torchtitan)


def both(titan: Any, name: str, **values: Any) -> tuple[Any, Any]:
    """Build torchtitan's module, and ours from the same config."""
    cls = getattr(titan, name)
    length = {"max_context_length": LENGTH} if folded(titan) else {"max_seq_len": LENGTH}
    config = cls.Config(**{"dim": DIM, **length, **values})
    return config.build(), titan.ours.rope(config).build()


def folded(titan: Any) -> bool:
    """Return whether this torchtitan folds the sequences of a batch into one axis of tokens."""
    return "max_context_length" in {field.name for field in dataclasses.fields(titan.RoPE.Config)}


def inputs(titan: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shape = (64,) if folded(titan) else (2, 32)
    q, k = (torch.randn(*shape, heads, DIM).clamp(-2, 2).to(dtype).requires_grad_() for heads in (4, 2))
    return q, k, torch.randint(0, LENGTH, shape)


def near(got: Tensor, theirs: Tensor, positions: Tensor) -> None:
    """Check that both are within the drift of float32 angles, for pairs of length 2√2 at most.

    This is the bound of the golden files.
    """
    bound = 8**0.5 * (positions[..., None, None] * 2.0**-23 + 1e-6)
    assert got.dtype == theirs.dtype
    assert got.shape == theirs.shape
    rounding = theirs.abs().max() * torch.finfo(theirs.dtype).eps
    assert ((got.double() - theirs.double()).abs() <= bound + rounding).all()


@pytest.mark.parametrize(("name", "values"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forwards_and_backwards(titan: Any, name: str, values: dict[str, Any], dtype: torch.dtype) -> None:
    found = []
    for module in both(titan, name, **values):
        q, k, positions = inputs(titan, dtype)
        rotated = module(q, k, positions)
        torch.autograd.backward(rotated, [torch.ones_like(x) for x in rotated])
        found.append([x.detach() for x in (*rotated, q.grad, k.grad)])
    for theirs, ours in zip(*found, strict=True):
        near(ours, theirs, positions)


@pytest.mark.parametrize("name", NAMES)
def test_positions_none_and_of_one_sequence(titan: Any, name: str) -> None:
    theirs, ours = both(titan, name)
    q, k, positions = inputs(titan)
    for given in (None,) if folded(titan) else (None, positions[:1]):
        at = torch.arange(q.shape[-3]) if given is None else given
        for one, other in zip(theirs(q, k, given), ours(q, k, given), strict=True):
            near(other, one, at)


def test_what_torchtitan_does_not_refuse_or_serve(titan: Any) -> None:
    """docs/torchtitan.md names both cases: Llama's scaling in half pairing, and an unknown scaling."""
    with pytest.raises(NotImplementedError):
        both(titan, "CosSinRoPE", scaling="llama")
    length = {"max_context_length" if folded(titan) else "max_seq_len": LENGTH}
    tables = [titan.ComplexRoPE.Config(dim=DIM, scaling=s, **length).build().cache for s in ("none", "ntk")]
    assert torch.equal(*tables)


def test_compiled_as_one_graph(titan: Any) -> None:
    torch.compiler.reset()
    theirs, ours = both(titan, "ComplexRoPE")
    compiled = torch.compile(ours, fullgraph=True)
    (q, k, positions), (other_q, other_k, _) = inputs(titan), inputs(titan)
    for one, other in zip(theirs(q, k, positions), compiled(other_q, other_k, positions), strict=True):
        near(other, one, positions)
        one.sum().backward(retain_graph=True)
        other.sum().backward(retain_graph=True)
    near(other_q.grad, q.grad, positions)  # type: ignore[arg-type]
    near(other_k.grad, k.grad, positions)  # type: ignore[arg-type]


def test_the_flag_on_a_whole_model(titan: Any) -> None:
    """Build a Llama 3 of torchtitan on the meta device, with PyTorch's attention, because its own needs a GPU."""
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.llama3 import llama3_configs

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            axes = [x.view(-1, 32, *x.shape[-2:]).transpose(1, 2) for x in (q, k, v)]
            made = nn.functional.scaled_dot_product_attention(*axes, is_causal=True, enable_gqa=True)
            return made.transpose(1, 2).reshape(q.shape)

    models = []
    for imports in ([], ["ropewalk.integrations.torchtitan.rope"]):
        config = llama3_configs["debugmodel"](attn_backend="flex")
        lines = apply_overrides(OverrideConfig(imports=imports), config)
        assert len(lines) == len(imports) * len(config.layers)
        with torch.device("meta"):
            model = config.build()
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_states(buffer_device=torch.device("cpu"))
        for layer in model.layers.values():
            layer.attention.inner_attention = Attention()
        models.append(model)
    theirs, ours = models
    assert all(isinstance(layer.attention.rope, titan.ours.RopewalkComplexRoPE) for layer in ours.layers.values())
    ours.load_state_dict(theirs.state_dict())  # strict
    assert sum(x.numel() for x in ours.buffers()) == 0
    shape = (64,) if folded(titan) else (2, 32)
    tokens = torch.randint(0, 2048, shape, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).repeat(2).view(shape) + 100
    scores = [model(tokens, positions=positions) for model in models]
    # The angles differ by 132 · 2⁻²⁴; the scores were seen to by 1.4e-6.
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-5)
    for score in scores:
        score.logsumexp(-1).sum().backward()
    for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert (other.grad - one.grad).norm() <= 1e-5 * one.grad.norm()


@pytest.fixture(scope="class")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield stub_torchtitan.one_process(tmp_path_factory.mktemp("group"))
    torch.distributed.destroy_process_group()


class TestShards:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("given", ["plain", "sharded", "none"])
    def test_dtensors(self, titan: Any, one_process: Any, name: str, given: str) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        found = []
        for module in both(titan, name):
            module.cache = distribute_tensor(module.cache, one_process, [Replicate()])  # as Module.parallelize does
            q, k, positions = inputs(titan)
            q, k = (distribute_tensor(x.detach(), one_process, [Shard(x.ndim - 2)]).requires_grad_() for x in (q, k))
            at = {"plain": positions, "sharded": distribute_tensor(positions, one_process, [Replicate()]), "none": None}
            rotated = module(q, k, at[given])
            torch.autograd.backward(rotated, [torch.ones_like(x) for x in rotated])
            found.append((*rotated, q.grad, k.grad))
        at_token = torch.arange(q.shape[-3]) if given == "none" else positions
        for theirs, ours in zip(*found, strict=True):
            assert ours.placements == theirs.placements
            near(ours.to_local().detach(), theirs.to_local().detach(), at_token)


@pytest.fixture(scope="class")
def eight_processes() -> Iterator[Any]:
    """Create a mesh of eight processes, of which only this one exists. Nothing can be sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    torch.distributed.destroy_process_group()


class TestTypes:
    @pytest.mark.parametrize("name", NAMES)
    def test_the_types_of_torchtitans_own(self, titan: Any, eight_processes: Any, name: str) -> None:
        import spmd_types as spmd
        from spmd_types.checker import typecheck

        tokens = (("dp", "cp"),) if folded(titan) else ("dp", "cp")
        found = []
        with spmd.set_current_mesh(eight_processes):
            for module in both(titan, name):
                q, k, positions = inputs(titan)
                with typecheck(local=False):
                    spmd.assert_type(module.cache, spmd.R)
                    spmd.assert_type(positions, {"dp": spmd.V, "cp": spmd.V, "tp": spmd.R}, spmd.PartitionSpec(*tokens))
                    for x in (q, k):
                        spmd.assert_type(x, spmd.V, spmd.PartitionSpec(*tokens, "tp", None))
                    rotated = module(q, k, positions)
                    found.append([(spmd.get_local_type(x), spmd.get_partition_spec(x)) for x in rotated])
                    rotated[0].sum().backward()
                assert q.grad is not None
        assert found[0] == found[1]
        assert found[1][0][1] is not None
