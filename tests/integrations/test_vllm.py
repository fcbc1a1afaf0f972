"""Test the plugin for vLLM with a stub of vLLM. The tests with vLLM itself are in tests/engines."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
import ropewalk
import stub_vllm
from ropewalk import Rope, RopeError
from ropewalk.integrations import vllm
from ropewalk.integrations.vllm import __main__ as program
from ropewalk.integrations.vllm import layers, plugin, ropes

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "engines" / "vllm.json").read_text())
ROWS = GOLDEN["rows"]
HEAD, TOKENS = 16, 5
POSITIONS = torch.tensor([0, 3, 100_000, 7, 2])


def recorded(model: str, class_name: str = "") -> dict[str, Any]:
    return next(row for row in ROWS if row["model"] == model and class_name in row["class"])


def layer_of(row: dict[str, Any]) -> Any:
    sections = {"mrope_section": row["mrope_section"]} if row["class"] == "MRotaryEmbedding" else {}
    return SimpleNamespace(**{"mixed_b": None, "scaling_factor": None, "mrope_interleaved": False, **row, **sections})


def table_of(row: dict[str, Any]) -> Tensor:
    """Compute rows 0 and 1 of vLLM's float32 table by its formula, from the recorded frequencies."""
    inv_freq = torch.tensor(row["inv_freq"], dtype=torch.float32)
    angles = torch.outer(torch.arange(2) / row.get("positions_divided_by", 1.0), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * row["attention_factor_from_cache"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['class']}")
def test_ropes_of_recorded_layers(row: dict[str, Any]) -> None:
    """Compare frequencies and attention factors of every layer that vLLM built from real configs."""
    name, layer = row["class"], layer_of(row)
    length = min(row["max_model_len"], row.get("max_trained_positions", math.inf))
    rope = ropes.rope_of(name, layer, int(length))
    assert (rope.head_dim, rope.rotary_dim) == (row["head_size"], row["rotary_dim"])
    assert rope.pairing == ("half" if row.get("is_neox_style", True) else "interleaved")
    assert ropes.difference(rope, table_of(row)) == ""
    wanted = torch.tensor(row["inv_freq"], dtype=torch.float64) / row.get("positions_divided_by", 1.0)
    torch.testing.assert_close(torch.from_numpy(rope.inv_freq), wanted, rtol=5e-7, atol=0)
    assert rope.attention_factor == pytest.approx(row["attention_factor_from_cache"], rel=1e-7)


def test_classes_recorded() -> None:
    """The next tests build by hand what the recordings lack."""
    missing = set(ropes.SCHEMES) - {row["class"] for row in ROWS}
    assert missing == {"NTKScalingRotaryEmbedding", "DynamicNTKAlphaRotaryEmbedding"}


def test_ntk() -> None:
    """Compare with vLLM's formula for "ntk", and with Hunyuan's alpha."""
    numbers = {"head_size": 16, "rotary_dim": 16, "base": 10_000.0, "is_neox_style": True}
    found = ropes.rope_of("NTKScalingRotaryEmbedding", SimpleNamespace(scaling_factor=4.0, mixed_b=None, **numbers), 64)
    wanted = [float(w / mpmath.mpf(4) ** (mpmath.mpf(2) / 16)) for w in oracle.inv_freq(40_000.0, 16)]
    assert found.inv_freq == pytest.approx(wanted, rel=1e-14)
    found = ropes.rope_of("DynamicNTKAlphaRotaryEmbedding", SimpleNamespace(scaling_alpha=50.0, **numbers), 64)
    assert found.inv_freq == pytest.approx([float(w) for w in oracle.ntk(10_000.0, 16, 50.0)], rel=1e-14)


def test_dynamic_ntk_beyond_its_length_is_left_alone() -> None:
    """vLLM never scales it, although the config of the model does."""
    row = recorded("grag-llama-3.1-8b-cpt-dynamic")
    assert row["max_model_len"] > row["max_trained_positions"]
    rope = ropes.rope_of(row["class"], layer_of(row), row["max_model_len"])
    assert ropes.difference(rope, table_of(row)).startswith("inv_freq[1] 0.814617")


@pytest.mark.parametrize("wrong", ["a frequency", "the factor", "columns", "rows", "meta"])
def test_a_table_that_differs_is_named(wrong: str) -> None:
    row = recorded("mistral-7b-instruct-v0.3")
    table = table_of(row)
    if wrong == "a frequency":
        table[1, 64 + 5] *= 1 + 2e-6  # the sine of pair 5
    elif wrong == "the factor":
        table *= 1 + 1e-6
    elif wrong == "columns":
        table = table[:, :64]
    elif wrong == "rows":
        table = table[:1]
    else:
        table = table.to("meta")
    said = {"a frequency": "inv_freq[5] ", "the factor": "attention factor 1.00000"}
    found = ropes.difference(ropes.rope_of(row["class"], layer_of(row), 128), table)
    assert found.startswith(said.get(wrong, "a table (")), found


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("LinearScalingRotaryEmbedding", {"scaling_factors": [1.0, 4.0]}, "one scaling factor, got 2"),
        ("NTKScalingRotaryEmbedding", {"scaling_factor": 2.0, "mixed_b": 0.5}, "mixed_b of NTK must be None, got 0.5"),
        ("FourierRotaryEmbedding", {}, "got FourierRotaryEmbedding"),
    ],
)
def test_layers_without_a_rope(name: str, changed: dict[str, Any], said: str) -> None:
    row = {**recorded("mistral-7b-instruct-v0.3"), **changed}
    with pytest.raises(RopeError, match=said):
        ropes.rope_of(name, layer_of(row), 128)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> stub_vllm.Stub:
    """Install a stub of vLLM with the plugin enabled, for engines of up to 128 tokens."""
    monkeypatch.setenv("VLLM_PLUGINS", "other,ropewalk")
    monkeypatch.setattr(layers, "LAYERS", type(layers.LAYERS)())
    made = stub_vllm.install(monkeypatch)
    vllm.register()
    return made


def made(
    stub: stub_vllm.Stub, name: str = "RotaryEmbedding", *, neox: bool = True, rotary_dim: int = HEAD, **kw: Any
) -> Any:
    layer = getattr(stub.package, name)(HEAD, rotary_dim, 64, 10_000.0, neox, torch.bfloat16, **kw)
    stub.package._ROPE_DICT[len(stub.package._ROPE_DICT)] = layer
    return layer


def fused(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return a fused projection, and its slices q with 3 heads and k with one head."""
    whole = torch.randn(TOKENS, 5 * HEAD, generator=torch.Generator().manual_seed(0)).to(dtype)
    return whole, whole[:, : 3 * HEAD], whole[:, 3 * HEAD : 4 * HEAD]


def wanted(x: Tensor, positions: Tensor, *, pairing: str = "half", rotary_dim: int = HEAD) -> Tensor:
    """Rotate [tokens, heads · HEAD] with base 10,000 by the oracle."""
    angles = oracle.reduced(positions.tolist(), [float(w) for w in oracle.inv_freq(10_000.0, rotary_dim)])
    heads = x.double().reshape(len(x), -1, HEAD).numpy()
    turned = np.stack([oracle.rotate(heads[:, h], angles, pairing) for h in range(heads.shape[1])], axis=1)
    return torch.from_numpy(turned).reshape(x.shape)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [HEAD, 8])
def test_rotates_slices_in_place(stub: stub_vllm.Stub, neox: bool, rotary_dim: int) -> None:
    layer = made(stub, neox=neox, rotary_dim=rotary_dim)
    whole, q, k = fused()
    before = whole.clone()
    returned = layer(POSITIONS, q, k)
    assert returned == (q, k) or (returned[0] is q and returned[1] is k)
    how = {"pairing": "half" if neox else "interleaved", "rotary_dim": rotary_dim}
    torch.testing.assert_close(q.double(), wanted(before[:, :48], POSITIONS, **how), atol=1e-6, rtol=0)
    torch.testing.assert_close(k.double(), wanted(before[:, 48:64], POSITIONS, **how), atol=1e-6, rtol=0)
    assert torch.equal(whole[:, 64:], before[:, 64:])
    assert layer.calls == 1


def test_without_a_key(stub: stub_vllm.Stub) -> None:
    layer = made(stub)
    _, q, _ = fused()
    before = q.clone()
    returned = layer(POSITIONS, q)
    assert returned[0] is q
    assert returned[1] is None
    torch.testing.assert_close(q.double(), wanted(before, POSITIONS), atol=1e-6, rtol=0)
    new, none = layer.forward_native(POSITIONS, before)
    assert none is None
    assert torch.equal(new, q)


def test_a_pairing_that_is_changed_later(stub: stub_vllm.Stub) -> None:
    """Ernie 4.5 sets `is_neox_style` on a layer after it was built."""
    layer = made(stub, neox=True)
    layer.is_neox_style = False
    _, q, k = fused()
    before = q.clone()
    layer(POSITIONS, q, k)
    torch.testing.assert_close(q.double(), wanted(before, POSITIONS, pairing="interleaved"), atol=1e-6, rtol=0)
    assert layer.rope.pairing == "interleaved"


def test_new_tensors_where_vllm_returns_new_ones(stub: stub_vllm.Stub) -> None:
    """DeepSeek's layer has three axes, slices of wider heads, and offsets."""
    layer = made(stub, "DeepseekScalingRotaryEmbedding", neox=False)
    wide = torch.randn(TOKENS, 2, HEAD + 8)
    q, k = wide[..., 8:], torch.randn(TOKENS, 1, HEAD)
    before = wide.clone()
    offsets = torch.full((TOKENS,), 11)
    turned, _ = layer(POSITIONS, q, k, offsets)
    assert turned.shape == q.shape
    assert torch.equal(wide, before)
    flat = wanted(before[..., 8:].reshape(TOKENS, -1), POSITIONS + 11, pairing="interleaved")
    torch.testing.assert_close(turned.double().reshape(TOKENS, -1), flat, atol=1e-6, rtol=0)


def test_forward_native_changes_nothing(stub: stub_vllm.Stub) -> None:
    layer = made(stub)
    whole, q, k = fused()
    before = whole.clone()
    new_q, new_k = layer.forward_native(POSITIONS, q, k)
    assert torch.equal(whole, before)
    torch.testing.assert_close(new_q.double(), wanted(before[:, :48], POSITIONS), atol=1e-6, rtol=0)
    torch.testing.assert_close(new_k.double(), wanted(before[:, 48:64], POSITIONS), atol=1e-6, rtol=0)


def test_one_rounding_in_bfloat16(stub: stub_vllm.Stub) -> None:
    """The table of the layer is bfloat16, but the rotation does not read it."""
    layer = made(stub)
    _, q, k = fused(torch.bfloat16)
    before = q.clone()
    layer(POSITIONS, q, k)
    exact = wanted(before, POSITIONS)
    assert torch.equal(q, exact.bfloat16()) or bool(((q.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all())


@pytest.mark.parametrize("shape", [(TOKENS, 48), (1, TOKENS, 48), (TOKENS, 3, HEAD)])
def test_other_shapes_of_queries_and_positions(stub: stub_vllm.Stub, shape: tuple[int, ...]) -> None:
    layer = made(stub)
    q = torch.randn(shape)
    before = q.clone().reshape(TOKENS, 48)
    new, _ = layer.forward_native(POSITIONS[None], q)
    assert new.shape == shape
    layer(POSITIONS[None], q)
    torch.testing.assert_close(q.double().reshape(TOKENS, 48), wanted(before, POSITIONS), atol=1e-6, rtol=0)
    assert torch.equal(new, q)


def test_a_vllm_that_has_other_attributes(stub: stub_vllm.Stub) -> None:
    """Its layer keeps working as before."""
    layer = made(stub, "Llama3RotaryEmbedding")
    assert layer.reason.startswith("AttributeError: ")
    assert layer(POSITIONS, torch.zeros(TOKENS, HEAD)) == "by vLLM"
    stub.config.model_config = None
    layer = made(stub)
    assert "vLLM must have a model" in layer.reason
    stub.config.additional_config = object()
    assert "vLLM must have a model" in made(stub).reason


def test_keyword_arguments(stub: stub_vllm.Stub) -> None:
    numbers = {"head_size": HEAD, "rotary_dim": HEAD, "rows": 64, "base": 1e4}
    layer = stub.package.RotaryEmbedding(**numbers, is_neox_style=True, dtype=torch.float32)
    assert str(layer.rope) == "Rope(head_dim=16, base=10000.0, pairing='half')"


def test_compiled(stub: stub_vllm.Stub) -> None:
    layer = made(stub)
    whole, q, k = fused()
    before = whole.clone()
    compiled = torch.compile(lambda p, a, b: layer(p, a, b), fullgraph=True, backend="aot_eager")
    new_q, new_k = compiled(POSITIONS, q, k)
    assert torch.equal(whole, before)
    torch.testing.assert_close(new_q.double(), wanted(before[:, :48], POSITIONS), atol=1e-6, rtol=0)
    torch.testing.assert_close(new_k.double(), wanted(before[:, 48:64], POSITIONS), atol=1e-6, rtol=0)
    assert layer.calls == 0


def test_angles_are_computed_once_in_a_pass(stub: stub_vllm.Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM writes the positions of every pass into one buffer."""
    count = []
    at = Rope.at
    monkeypatch.setattr(Rope, "at", lambda self, p, **kw: count.append(self) or at(self, p, **kw))
    layer, other = made(stub), made(stub, "LinearScalingRotaryEmbedding", scaling_factors=[4.0])
    buffer = POSITIONS.clone()
    for shift, seen in ((0, 2), (5, 5)):
        buffer.copy_(POSITIONS + shift)
        with stub.forward_pass():
            for _ in range(3):
                _, q, k = fused()
                before = q.clone()
                layer(buffer, q, k)
                torch.testing.assert_close(q.double(), wanted(before, POSITIONS + shift), atol=1e-6, rtol=0)
            other(buffer, q, k)
            assert len(count) == seen
            elsewhere = torch.arange(TOKENS)  # other positions in the same pass
            _, q, k = fused()
            before = q.clone()
            layer(elsewhere, q, k)
            torch.testing.assert_close(q.double(), wanted(before, elsewhere), atol=1e-6, rtol=0)
            assert len(count) == seen + 1


def test_a_layer_whose_table_differs_keeps_its_rotation(stub: stub_vllm.Stub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="vllm.ropewalk"):
        layer = made(stub, "NTKScalingRotaryEmbedding")
    _, q, k = fused()
    before = q.clone()
    assert layer(POSITIONS, q, k) == layer.forward_native(POSITIONS, q, k) == "by vLLM"
    assert torch.equal(q, before)
    assert layer.rope is None
    assert "NTKScalingRotaryEmbedding keeps vLLM's rotation: ropewalk in vLLM: vLLM's table must agree" in caplog.text
    assert "Rope" not in layer.extra_repr()


@pytest.mark.parametrize(("interleaved", "axis"), [(False, (0, 0, 1, 1, 1, 2, 2, 2)), (True, (0, 1, 2, 0, 1, 2, 0, 1))])
def test_positions_of_three_axes(stub: stub_vllm.Stub, interleaved: bool, axis: tuple[int, ...]) -> None:
    """In M-RoPE, a pair rotates by the position on its axis.

    Text, whose positions have one axis, is rotated by that one.
    """
    layer = made(stub, "MRotaryEmbedding", mrope_section=[2, 3, 3], interleaved=interleaved)
    positions = torch.tensor([[0, 5, 9, 7, 100_000], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
    whole, q, k = fused()
    before = whole.clone()
    new_q, new_k = layer(positions, q, k)
    assert torch.equal(whole, before)
    inv_freq = [float(w) for w in oracle.inv_freq(10_000.0, HEAD)]
    angles = np.stack(
        [oracle.reduced(positions[a].tolist(), inv_freq[j : j + 1])[:, 0] for j, a in enumerate(axis)], axis=-1
    )
    for new, old in ((new_q, before[:, :48]), (new_k, before[:, 48:64])):
        heads = old.double().reshape(TOKENS, -1, HEAD).numpy()
        for h in range(heads.shape[1]):
            turned = torch.from_numpy(oracle.rotate(heads[:, h], angles, "half"))
            found = new.reshape(TOKENS, -1, HEAD)[:, h].double()
            torch.testing.assert_close(found, turned, atol=1e-6, rtol=0)
    with stub.forward_pass():
        text, _ = layer(POSITIONS, q, k)
        torch.testing.assert_close(text.double(), wanted(before[:, :48], POSITIONS), atol=1e-6, rtol=0)
        assert torch.equal(layer(positions, q, k)[0], new_q)


def test_yarn_with_three_axes_only_when_asked(stub: stub_vllm.Stub, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM mistakes the length of its own longer table for the trained length. The stub does not scale at all."""
    how: dict[str, Any] = {"mrope_section": [2, 3, 3], "interleaved": False, "factor": 4.0}
    assert made(stub, "MRotaryEmbedding", **how).rope is None
    stub.config.additional_config = {"ropewalk": {"override": True}}
    with caplog.at_level("WARNING", logger="vllm.ropewalk"):
        layer = made(stub, "MRotaryEmbedding", **how)
    assert "MRotaryEmbedding rotates by its attributes. vLLM's table has attention factor 1 instead of" in caplog.text
    assert layer.rope.scaling.original_max_position_embeddings == 64
    yarn = oracle.yarn(10_000.0, HEAD, 4.0, 64)
    assert layer.rope.inv_freq == pytest.approx([float(w) for w in yarn], rel=1e-12)


@pytest.mark.parametrize("asked", [True, {"override": 1}, {"overide": True}, {}])
def test_bad_options_are_refused(stub: stub_vllm.Stub, asked: Any) -> None:
    stub.config.additional_config = {"ropewalk": asked}
    layer = made(stub)
    assert 'additional_config["ropewalk"] must be {"override": True}' in layer.reason


def test_attributes_of_vllms_layer_are_kept(stub: stub_vllm.Stub) -> None:
    """Fused kernels read its table, and other code checks its class and name."""
    layer = made(stub)
    assert isinstance(layer, stub.package.RotaryEmbedding)
    assert type(layer).__name__ == "RotaryEmbedding"
    assert layer.name == "rotary_embedding"
    assert layer.cos_sin_cache.shape == (64, HEAD)
    assert layer.cos_sin_cache.dtype is torch.bfloat16
    assert layer.extra_repr() == "head_size=16, Rope(head_dim=16, base=10000.0, pairing='half')"
    assert layer.state_dict() == {}


def test_report(stub: stub_vllm.Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made(stub)
    made(stub, "NTKScalingRotaryEmbedding")
    made(stub, "FourierRotaryEmbedding")
    _, q, k = fused()
    layer(POSITIONS, q, k)
    worker = stub.worker()
    [state] = vllm.report(SimpleNamespace(collective_rpc=lambda name: [getattr(worker, name)()]))
    assert state["layers"] == [
        {"class": "RotaryEmbedding", "rope": "Rope(head_dim=16, base=10000.0, pairing='half')", "calls": 1}
    ]
    ntk, fourier = state["left"]
    assert fourier == {"class": "FourierRotaryEmbedding", "why": "ropewalk has no rope for this class"}
    assert ntk["class"] == "NTKScalingRotaryEmbedding"
    assert "inv_freq[" in ntk["why"]
    json.dumps(state)  # it goes from process to process
    monkeypatch.setattr(ropewalk, "backends", lambda: {"reference": "usable", "cpu kernel": "not usable: not built"})
    assert "It runs in plain PyTorch: the cpu kernel is not usable: not built" in program.describe([state])
    monkeypatch.undo()
    said = program.describe([state])
    assert said.startswith("vLLM rotates through ropewalk.\n")
    assert "1 rotations by Rope(head_dim=16, base=10000.0, pairing='half')" in said
    assert "FourierRotaryEmbedding keeps vLLM's rotation" in said


def test_report_of_workers_that_do_not_know_the_plugin() -> None:
    for text in ("Method '{}' is not implemented.", "RPC failed: 'Worker' object has no attribute '{}'"):

        def rpc(name: str, text: str = text) -> None:
            raise NotImplementedError(text.format(name))

        with pytest.raises(RopeError, match="the plugin must be active"):
            vllm.report(SimpleNamespace(collective_rpc=rpc))

    def broken(name: str) -> None:
        raise TimeoutError(f"RPC call to {name} timed out.")

    with pytest.raises(TimeoutError):
        vllm.report(SimpleNamespace(collective_rpc=broken))

    async def later(name: str) -> None: ...

    with pytest.raises(RopeError, match=r"llm must be a vllm.LLM, got SimpleNamespace. Call await llm.coll"):
        vllm.report(SimpleNamespace(collective_rpc=later))


@pytest.mark.parametrize("names", [None, "", "other", "ropewalk2", "other, ropewalk"])
def test_off_unless_it_is_named(names: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if names is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", names)
    stub = stub_vllm.install(monkeypatch)
    vllm.register()
    assert stub.registry == {}
    assert not hasattr(stub.worker, "ropewalk_state")


def test_registering_again_changes_nothing(stub: stub_vllm.Stub) -> None:
    before = dict(stub.registry)
    vllm.register()
    assert stub.registry == before
    assert set(before) == set(ropes.SCHEMES) - {"Phi3LongRoPEScaledRotaryEmbedding"}
    names = os.environ["VLLM_PLUGINS"].split(",")
    assert names[:2] == ["other", "ropewalk"]
    assert re.fullmatch(r"ropewalk-[0-9a-f]{16}", ",".join(names[2:]))
    assert issubclass(stub.package.Phi3LongRoPEScaledRotaryEmbedding, layers.Layer)  # its name is replaced


def test_two_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "ropewalk")
    stub = stub_vllm.install(monkeypatch)
    stub.registry["RotaryEmbedding"] = dict
    stub.package.MRotaryEmbedding = list
    said = r"no other plugin may replace .*, got dict \(builtins\), list \(builtins\)"
    with pytest.raises(RopeError, match=said):
        vllm.register()
    assert stub.registry == {"RotaryEmbedding": dict}


def test_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "ropewalk")
    stub = stub_vllm.install(monkeypatch)
    del stub.modules["vllm.model_executor.custom_op"].op_registry_oot
    with pytest.raises(RopeError, match=rf"vLLM must be installed, .*tested with {plugin.TESTED}"):
        vllm.register()


def test_the_entry_point() -> None:
    [found] = importlib.metadata.entry_points(group="vllm.general_plugins", name="ropewalk")
    assert found.load() is vllm.register


def test_the_program_reports_why_the_plugin_is_inactive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert program.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("vLLM does NOT rotate through ropewalk.")
    assert "got no such variable. Set VLLM_PLUGINS=ropewalk." in said
    monkeypatch.setenv("VLLM_PLUGINS", "ropewalk")
    idle = {"process": 7, "layers": [], "left": [{"class": "MRotaryEmbedding", "why": "no rope"}]}
    monkeypatch.setattr(program, "run", lambda: [idle])
    assert program.main() == 1
    said = "got none in worker 7; layers that keep vLLM's rotation: [{'class': 'MRotaryEmbedding', 'why': 'no rope'}]"
    assert said in capsys.readouterr().err
    monkeypatch.setattr(program, "run", lambda: [{"process": 7, "layers": [{"rope": "R", "calls": 3}], "left": []}])
    assert program.main() == 0
    assert capsys.readouterr().out == "vLLM rotates through ropewalk.\nworker 7: 3 rotations by R\n"
