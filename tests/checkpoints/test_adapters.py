"""Convert LoRA adapters: the matrices A are copied, and the rows of the matrices B move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_families import save
from checkpoint_files import CONFIG, refused, run, write_model
from ropewalk import RopeError
from ropewalk.tools import convert as checkpoints
from ropewalk.tools.convert.verify import verify


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj"]}
INNER = "base_model.model.model.layers.{}.self_attn.{}_proj.{}"


def write_adapter(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | changes))
    generator, tensors = torch.Generator().manual_seed(2), {}
    for layer in range(2):
        for name, rows in (("q", 32), ("k", 16), ("v", 16)):
            tensors[INNER.format(layer, name, "lora_A.weight")] = torch.randn(2, 32, generator=generator)
            tensors[INNER.format(layer, name, "lora_B.weight")] = torch.randn(rows, 2, generator=generator)
            tensors[INNER.format(layer, name, "lora_magnitude_vector")] = torch.randn(rows, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return tensors


class TestAdapters:
    def test_only_what_makes_outputs_moves(self, model: Path, tmp_path: Path) -> None:
        old = write_adapter(tmp_path / "a", base_model_name_or_path=str(model))
        output = run(tmp_path / "a", tmp_path / "b", "--to", "interleaved", "--verify")
        assert "note: The adapter now fits a model whose q and k are interleaved" in output
        new = load_file(tmp_path / "b" / "adapter_model.safetensors")
        for name, tensor in old.items():
            moves = ("q_proj" in name or "k_proj" in name) and "lora_A" not in name
            for row in range(len(tensor)):
                head, i = divmod(row, 8)
                expected_row = head * 8 + (2 * i if i < 4 else 2 * (i - 4) + 1) if moves else row
                assert torch.equal(new[name][expected_row], tensor[row])
        refused("got 'interleaved'", tmp_path / "b", tmp_path / "c", "--to", "interleaved", target=model)
        run(tmp_path / "b", tmp_path / "c", "--to", "half")
        file = "adapter_model.safetensors"
        assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()
        assert json.loads((tmp_path / "b" / "adapter_config.json").read_text()) == json.loads(
            (tmp_path / "a" / "adapter_config.json").read_text()
        )

    def test_the_config_of_its_model(self, model: Path, tmp_path: Path) -> None:
        write_adapter(tmp_path / "a", base_model_name_or_path="someone/else")
        match = (
            "base_model_name_or_path of the adapter must be a folder with the config of its model, got 'someone/else'"
        )
        refused(match, tmp_path / "a", tmp_path / "b", "--to", "interleaved", target=model)
        run(tmp_path / "a", tmp_path / "b", "--to", "interleaved", "--base-config", model)
        run(tmp_path / "b", tmp_path / "c", "--to", "half", "--base-config", model / "config.json")

    def test_other_adapters(self, model: Path, tmp_path: Path) -> None:
        write_adapter(tmp_path / "a", peft_type="IA3")
        match = "must hold a LoRA adapter, got peft_type 'IA3'"
        refused(match, tmp_path / "a", tmp_path / "b", "--to", "interleaved", target=model)

    def test_biases(self, tmp_path: Path) -> None:
        """PEFT saves them with bias="all", also those of projections that have no matrices A and B."""
        model = write_model(tmp_path / "model", config=CONFIG | {"attention_bias": True})
        old = write_adapter(tmp_path / "a", base_model_name_or_path=str(model), bias="all")
        names = INNER.format(0, "q", "base_layer.bias"), INNER.format(1, "k", "bias")
        old = {name: tensor for name, tensor in old.items() if "k_proj" not in name}
        old |= {name: torch.randn(rows) for name, rows in zip(names, (32, 16), strict=True)}
        save_file(old, tmp_path / "a" / "adapter_model.safetensors", {"format": "pt"})
        run(tmp_path / "a", tmp_path / "b", "--to", "interleaved", "--verify")
        file = tmp_path / "b" / "adapter_model.safetensors"
        new = load_file(file)
        for name in names:
            assert torch.equal(new[name][:8], old[name][[0, 4, 1, 5, 2, 6, 3, 7]])
        plan = checkpoints.plan(checkpoints.read(tmp_path / "a"), "interleaved")
        verify(plan, tmp_path / "b", lambda _: None)
        for layer, name in enumerate(names):
            save_file(new | {name: new[name].flip(0)}, file)
            with pytest.raises(RopeError, match=f"layer {layer} must give the same attention"):
                verify(plan, tmp_path / "b", lambda _: None)

    def test_other_tensors(self, model: Path, tmp_path: Path) -> None:
        tensors = write_adapter(tmp_path / "a", base_model_name_or_path=str(model))
        name = INNER.format(0, "q", "lora_C.weight")
        save_file(tensors | {name: torch.ones(32, 2)}, tmp_path / "a" / "adapter_model.safetensors")
        match = f"got {name}. Its rows cannot be reordered. If it belongs to quantised weights, convert before"
        refused(match, tmp_path / "a", tmp_path / "b", "--to", "interleaved", target=model)

    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
    def test_in_peft(self, tmp_path: Path) -> None:
        """A model with its adapter, and both converted and merged: the weights of one are the other's, moved."""
        peft = pytest.importorskip("peft")
        base = save("llama", tmp_path / "model")
        base.name_or_path = str(tmp_path / "model")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
        for name in ("model", "adapter"):
            run(tmp_path / name, tmp_path / f"{name}-2", "--to", "interleaved", *(
                ["--base-config", tmp_path / "model"] if name == "adapter" else []
            ))  # fmt: skip

        def merged(suffix: str) -> Any:
            plain = type(base.get_base_model() if hasattr(base, "get_base_model") else base)
            loaded = plain.from_pretrained(tmp_path / f"model{suffix}")
            return peft.PeftModel.from_pretrained(loaded, tmp_path / f"adapter{suffix}").merge_and_unload()

        merged("").save_pretrained(tmp_path / "merged")
        run(tmp_path / "merged", tmp_path / "merged-2", "--to", "interleaved")
        expected = load_file(tmp_path / "merged-2" / "model.safetensors")
        for name, tensor in merged("-2").state_dict().items():
            if name in expected:
                torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
