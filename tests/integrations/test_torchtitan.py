"""Test the override for torchtitan with a stub of torchtitan, against recordings of its own modules and mpmath."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oracle
import stub_torchtitan
from ropewalk import RopeError
from stub_torchtitan import Stub

CASES = json.loads((Path(__file__).parents[1] / "golden" / "torchtitan.json").read_text())["cases"]
LLAMA = {"theta": 5e5, "scaling": "llama"}
YARN = {"scaling": "yarn", "rope_factor": 32.0, "original_seq_len": 2048}
FAR = [0, 1, 255, 4095, 131_071, 2**31 - 1]


@pytest.fixture(scope="module")
def titan() -> Iterator[Stub]:
    with stub_torchtitan.installed() as stub:
        yield stub


def inputs(tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = oracle.golden_q((tokens, 3, dim)), oracle.golden_k((tokens, 1, dim))
    return torch.from_numpy(q), torch.from_numpy(k)


class TestRecorded:
    """Compare with recordings of torchtitan's own modules (golden/README.md)."""

    @pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
    def test_frequencies_and_pairs(self, titan: Stub, case: dict[str, Any]) -> None:
        rope = titan.build(case["class"], **case["params"]).rope
        assert (rope.pairing, rope.rotary_dim, rope.head_dim) == (case["layout"], case["rotary_dim"], case["head_dim"])
        assert rope.attention_factor == 1.0
        # Powers of base in float32, and the angle of a rounded cos and sin: at most 4.4e-7 over the cases.
        np.testing.assert_allclose(rope.inv_freq, case["inv_freq"], rtol=5e-7)

    @pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
    @pytest.mark.parametrize("folded", [True, False], ids=["tokens folded", "a batch"])
    def test_rotated_q_and_k(self, titan: Stub, case: dict[str, Any], folded: bool) -> None:
        positions = torch.tensor(case["positions"])
        q = torch.from_numpy(oracle.golden_q(case["q_shape"]))[:, : case["q_heads"]].transpose(1, 2)
        k = torch.from_numpy(oracle.golden_k(case["k_shape"]))[:, : case["k_heads"]].transpose(1, 2)
        module = titan.build(case["class"], **case["params"])
        if folded:
            rotated = [x.unsqueeze(0) for x in module(q[0], k[0], positions)]
        else:
            rotated = module(q, k, positions.unsqueeze(0))
        # Their product of position and frequency is rounded to float32: the bound of the peers in test_golden.py.
        bound = 2**0.5 * (positions.view(1, -1, 1, 1) * 2.0**-23 + 1e-6)
        for name, got in zip(("q", "k"), rotated, strict=True):
            theirs = torch.tensor(case[f"{name}_rot"]).view(got.transpose(1, 2).shape).transpose(1, 2)
            assert ((got - theirs).abs() <= bound).all()


class TestExact:
    """Compare with mpmath."""

    @pytest.mark.parametrize(
        ("name", "values", "wanted"),
        [
            ("ComplexRoPE", {}, oracle.inv_freq(1e4, 32)),
            ("ComplexRoPE", LLAMA, oracle.by_parts(5e5, 32, 8, 1, 4, 8192)),
            ("CosSinRoPE", LLAMA, oracle.by_parts(5e5, 32, 8, 1, 4, 8192)),  # which torchtitan's own does not have
            (
                "ComplexRoPE",
                {**LLAMA, "scaling_factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 6.0},
                oracle.by_parts(5e5, 32, 32, 2, 6, 8192),
            ),
            (
                "ComplexRoPE",
                {**LLAMA, "original_max_position_embeddings": 4096},
                oracle.by_parts(5e5, 32, 8, 1, 4, 4096),
            ),
            ("ComplexRoPE", YARN, oracle.yarn(1e4, 32, 32, 2048)),
            ("CosSinRoPE", {**YARN, "truncate": False}, oracle.yarn(1e4, 32, 32, 2048, truncate=False)),
            ("CosSinRoPE", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}, oracle.yarn(1e4, 32, 32, 2048, 16, 2)),
            ("ComplexRoPE", {**YARN, "rope_factor": 0.5}, oracle.inv_freq(1e4, 32)),
        ],
    )
    def test_rotation_and_gradient(self, titan: Stub, name: str, values: dict[str, Any], wanted: list[Any]) -> None:
        module = titan.build(name, dim=32, **values)
        assert module.rope.inv_freq == pytest.approx([float(w) for w in wanted], rel=1e-14)
        cos, sin = (table[:, None] for table in oracle.cos_sin(FAR, [float(w) for w in wanted]))
        pairing = "interleaved" if name == "ComplexRoPE" else "half"
        q, k = (x.requires_grad_() for x in inputs(len(FAR), 32))
        rotated = module(q, k, torch.tensor(FAR))
        outwards = [torch.from_numpy(oracle.golden_k(x.shape)) for x in rotated]
        torch.autograd.backward(rotated, outwards)
        for x, y, outward in zip((q, k), rotated, outwards, strict=True):
            exact, size = oracle.rotate_by_tables(x.detach().numpy(), cos, sin, pairing)
            # cos and sin are off by 2⁻²⁵ (and 7.3e-10 at 2³¹), and three operations round by 2⁻²⁴ of each term.
            assert (np.abs(y.detach().numpy() - exact) <= 2**-22 * size + 1e-8).all()
            exact, size = oracle.rotate_by_tables(outward.numpy(), cos, sin, pairing, inverse=True)
            assert x.grad is not None
            assert (np.abs(x.grad.numpy() - exact) <= 2**-22 * size + 1e-8).all()


class TestCall:
    def test_positions_none_are_counted(self, titan: Stub) -> None:
        module, (q, k) = titan.build("ComplexRoPE"), inputs(6, 8)
        exact, _ = oracle.rotate_by_tables(q.numpy(), *oracle_tables(range(6)), "interleaved")
        np.testing.assert_allclose(module(q, k)[0], exact, atol=1e-6)
        both = module(q.view(2, 3, 3, 8), k.view(2, 3, 1, 8))  # two sequences, each from 0
        exact, _ = oracle.rotate_by_tables(q.numpy(), *oracle_tables([0, 1, 2, 0, 1, 2]), "interleaved")
        np.testing.assert_allclose(both[0].flatten(0, 1), exact, atol=1e-6)

    def test_positions_of_one_sequence_are_those_of_all(self, titan: Stub) -> None:
        module, (q, k) = titan.build("CosSinRoPE"), inputs(6, 8)
        rotated = module(q.view(2, 3, 3, 8), k.view(2, 3, 1, 8), torch.tensor([[7, 0, 9]], dtype=torch.int32))
        exact, _ = oracle.rotate_by_tables(k.numpy(), *oracle_tables([7, 0, 9, 7, 0, 9]), "half")
        np.testing.assert_allclose(rotated[1].flatten(0, 1), exact, atol=1e-6)

    def test_positions_that_change_in_place(self, titan: Stub) -> None:
        """No call stores anything for the next one."""
        module, (q, k), positions = titan.build("ComplexRoPE"), inputs(3, 8), torch.tensor([0, 1, 2])
        with torch.inference_mode():
            module(q, k, positions)
            positions.data.copy_(torch.tensor([5, 3, 4]))
            exact, _ = oracle.rotate_by_tables(q.numpy(), *oracle_tables([5, 3, 4]), "interleaved")
            np.testing.assert_allclose(module(q, k, positions)[0], exact, atol=1e-6)

    @pytest.mark.parametrize("name", ["ComplexRoPE", "CosSinRoPE"])
    def test_compiled_as_one_graph(self, titan: Stub, name: str) -> None:
        torch.compiler.reset()
        module, positions = titan.build(name), torch.tensor([0, 3, 2**31 - 1, 7, 2])
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for given in (positions, None):
            q, k = (x.requires_grad_() for x in inputs(5, 8))
            rotated = compiled(q, k, given)
            torch.autograd.backward(rotated, [torch.ones_like(x) for x in rotated])
            tables = oracle_tables(range(5) if given is None else given.tolist())
            pairing = "interleaved" if name == "ComplexRoPE" else "half"
            exact, _ = oracle.rotate_by_tables(q.detach().numpy(), *tables, pairing)
            np.testing.assert_allclose(rotated[0].detach(), exact, atol=1e-6)
            exact, _ = oracle.rotate_by_tables(np.ones(k.shape), *tables, pairing, inverse=True)
            np.testing.assert_allclose(k.grad, exact, atol=1e-6)  # type: ignore[arg-type]

    def test_a_wrong_shape(self, titan: Stub) -> None:
        q, k = inputs(3, 8)
        with pytest.raises(RopeError):
            titan.build("ComplexRoPE")(q, k, torch.tensor([0, 1]))


def oracle_tables(positions: Any) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = oracle.cos_sin(positions, [float(w) for w in oracle.inv_freq(1e4, 8)])
    return cos[:, None], sin[:, None]


class TestModule:
    def test_holds_no_numbers(self, titan: Stub) -> None:
        """Checkpoints of torchtitan contain nothing of its rotary modules, and the buffer keeps its name."""
        module = titan.build("ComplexRoPE", max_seq_len=131_072)
        assert [name for name, _ in module.named_buffers()] == ["cache"]
        assert module.cache.numel() == 0
        assert module.state_dict() == {}
        assert str(module.rope) in str(module)

    def test_built_on_the_meta_device(self, titan: Stub) -> None:
        with torch.device("meta"):
            module = titan.build("CosSinRoPE")
        assert module.cache.is_meta
        module.to_empty(device="cpu")
        exact, _ = oracle.rotate_by_tables(inputs(3, 8)[0].numpy(), *oracle_tables(range(3)), "half")
        np.testing.assert_allclose(copy.deepcopy(module)(*inputs(3, 8))[0], exact, atol=1e-6)

    def test_is_still_one_of_torchtitan(self, titan: Stub) -> None:
        """FusedMLA checks whether its rope is a ComplexRoPE, and models read fields of the config."""
        config = titan.config("ComplexRoPE", theta=5e5, max_seq_len=77, sharding_config="theirs")
        made = titan.module.rope(config)
        assert isinstance(made, titan.ComplexRoPE.Config)
        assert (made.max_seq_len, made.sharding_config, made.theta) == (77, "theirs", 5e5)
        assert isinstance(titan.build("ComplexRoPE"), titan.ComplexRoPE)


def test_registered_under_the_name_of_the_flag(titan: Stub) -> None:
    """The override is registered for every rotary module, so none of another class keeps its rotation silently."""
    assert titan.registry == {"ropewalk.integrations.torchtitan.rope": (titan.RoPE.Config, titan.module.rope, False)}
    page = (Path(__file__).parents[2] / "docs" / "torchtitan.md").read_text("utf-8")
    assert set(re.findall(r"--override\.imports (\S+)", page)) == set(titan.registry)


class TestRefused:
    def test_a_class_without_a_rope(self, titan: Stub) -> None:
        said = r"must be configured by .*ComplexRoPE\.Config or .*CosSinRoPE\.Config, got .*MRoPE\.Config\. Train"
        with pytest.raises(RopeError, match=said):
            titan.module.rope(titan.config("MRoPE"))

    def test_a_field_that_is_not_known(self, titan: Stub) -> None:
        said = r"the fields of .*MRoPE\.Config must be known, got also mrope_section\. This version"
        with pytest.raises(RopeError, match=said):
            titan.module.rope_of(titan.config("MRoPE"), "half")

    def test_a_field_that_is_gone(self, titan: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(titan.module, "_READ", titan.module._READ | {"mscale"})
        with pytest.raises(RopeError, match=r"ComplexRoPE\.Config must be known, got no mscale\."):
            titan.module.rope(titan.config("ComplexRoPE"))

    @pytest.mark.parametrize(
        ("values", "says"),
        [
            ({"scaling": "ntk"}, "scaling"),  # which torchtitan reads as none
            ({"scaling": "llama", "scaling_factor": 0.5}, "factor must be"),
            ({**YARN, "beta_fast": 0.5}, "beta_fast must be"),
            ({"theta": 0.0}, "base must be"),
            ({"dim": 7}, "must be even"),
        ],
    )
    def test_a_value(self, titan: Stub, values: dict[str, Any], says: str) -> None:
        """The override itself refuses it, before a model is built."""
        with pytest.raises(RopeError, match=says):
            titan.module.rope(titan.config("ComplexRoPE", **values))


@pytest.fixture(scope="class")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield stub_torchtitan.one_process(tmp_path_factory.mktemp("group"))
    torch.distributed.destroy_process_group()


class TestShards:
    @pytest.mark.parametrize("positions", ["plain", "sharded", "none"])
    @pytest.mark.parametrize("axis", [0, 1], ids=["tokens", "heads"])
    def test_dtensors(self, titan: Stub, one_process: Any, positions: str, axis: int) -> None:
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

        module, (q, k) = titan.build("ComplexRoPE"), inputs(4, 8)
        q, k = (distribute_tensor(x, one_process, [Shard(axis)]).requires_grad_() for x in (q, k))
        given = None if positions == "none" else torch.tensor([9, 0, 4, 2])
        if positions == "sharded":
            assert given is not None
            given = distribute_tensor(given, one_process, [Replicate() if axis else Shard(0)])
        rotated = module(q, k, given)
        assert [type(x) for x in rotated] == [DTensor, DTensor]
        assert [x.placements for x in rotated] == [(Shard(axis),)] * 2
        tables = oracle_tables(range(4) if given is None else [9, 0, 4, 2])
        exact, _ = oracle.rotate_by_tables(q.to_local().detach().numpy(), *tables, "interleaved")
        np.testing.assert_allclose(rotated[0].to_local().detach(), exact, atol=1e-6)
        rotated[1].sum().backward()
        exact, _ = oracle.rotate_by_tables(np.ones(k.shape), *tables, "interleaved", inverse=True)
        assert k.grad.placements == (Shard(axis),)  # type: ignore[union-attr]
        np.testing.assert_allclose(k.grad.to_local(), exact, atol=1e-6)  # type: ignore[union-attr]

    def test_spmd_types_are_kept(self, titan: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
        """The type checker is off while ropewalk rotates. Each result gets the type of its input, if it has one."""
        monkeypatch.setattr(titan, "checking", True)
        monkeypatch.setattr(titan, "events", [])
        module, (q, k) = titan.build("ComplexRoPE"), inputs(4, 8)
        monkeypatch.setattr(module, "_rotate", lambda *args: titan.events.append("rotated") or (q.clone(), k.clone()))
        q._local_type = "of q"  # type: ignore[attr-defined]
        rotated = module(q, k)
        assert titan.events == ["unchecked", "rotated", "checked"]
        assert rotated[0]._local_type == "of q"
        assert not hasattr(rotated[1], "_local_type")
