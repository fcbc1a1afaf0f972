"""Quantised weights: FP8 is converted if the rows of a scale stay together, and other formats are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_files import CONFIG, refused, run, weights, write_model
from ropewalk.tools.convert import layouts


class TestQuantised:
    @pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4"])
    def test_refused_by_name(self, method: str, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", config={**CONFIG, "quantization_config": {"quant_method": method}})
        refused(f"got quant_method {method!r}", source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    @pytest.mark.parametrize("name", ["qweight", "weight.absmax", "weight_scale", "SCB"])
    def test_refused_by_their_tensors(self, name: str, tmp_path: Path) -> None:
        """The config does not state the quantisation."""
        source = write_model(tmp_path / "a")
        tensors = weights() | {f"model.layers.0.self_attn.q_proj.{name}": torch.ones(4, 4)}
        save_file(tensors, source / "model.safetensors")
        refused(
            f"got model.layers.0.self_attn.q_proj.{name}", source, tmp_path / "b", "--to", "interleaved", target=source
        )

    def test_integers(self, tmp_path: Path) -> None:
        q = {"model__layers__0__self_attn__q_proj__weight": torch.ones(32, 32, dtype=torch.int8)}
        source = write_model(tmp_path / "a", **q)
        refused("q_proj.weight of I8", source, tmp_path / "b", "--to", "interleaved", target=tmp_path / "b")

    @pytest.mark.parametrize(("block", "fits"), [(8, True), (16, True), (32, True), (12, False), (4, False)])
    def test_fp8_with_scales(self, block: int, fits: bool, tmp_path: Path) -> None:
        """The numbers are equal if blocks contain whole heads. If rows would leave a block, they are refused."""
        quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [block, 16]}}
        source = write_model(tmp_path / "a", config={**CONFIG, **quantised})
        tensors = weights()
        for name in [name for name in tensors if "_proj" in name]:
            rows, columns = tensors[name].shape
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // block), columns // 16)
        save_file(tensors, source / "model.safetensors")
        if not fits:
            match = f"extend across blocks of {block} rows that share a scale"
            refused(match, source, tmp_path / "b", "--to", "interleaved", target=source)
            return
        run(source, tmp_path / "b", "--to", "interleaved", "--verify")
        written = load_file(tmp_path / "b" / "model.safetensors")

        def numbers(held: dict[str, torch.Tensor], name: str) -> torch.Tensor:
            scale = held[f"{name}_scale_inv"].repeat_interleave(block, 0).repeat_interleave(16, 1)
            return held[name].float() * scale[: len(held[name])]

        for name in ("q_proj", "k_proj", "v_proj"):
            key = f"model.layers.1.self_attn.{name}.weight"
            old, new = numbers(tensors, key), numbers(written, key)
            for row in range(len(old)):
                head, i = divmod(row, 8)
                expected_row = row if name == "v_proj" else head * 8 + (2 * i if i < 4 else 2 * (i - 4) + 1)
                assert torch.equal(new[expected_row], old[row])

    def test_fp8_with_one_scale(self, tmp_path: Path) -> None:
        source = write_model(tmp_path / "a", config={**CONFIG, "quantization_config": {"quant_method": "fp8"}})
        tensors = weights()
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(())}
        save_file(tensors, source / "model.safetensors")
        run(source, tmp_path / "b", "--to", "interleaved", "--verify")
        del tensors[f"{name}_scale_inv"]
        save_file(tensors, source / "model.safetensors")
        refused("with a scale of shape None", source, tmp_path / "c", "--to", "interleaved", target=source)


@pytest.mark.parametrize(
    ("first", "head", "heads", "rotary_dim"), [(128, 192, 128, 64), (512, 576, 1, 64), (0, 128, 32, 128)]
)
def test_blocks_of_128_rows(first: int, head: int, heads: int, rotary_dim: int) -> None:
    """No row leaves its block of 128 in q_b_proj and kv_a_proj_with_mqa of DeepSeek-V3 and in heads of 128 channels."""
    starts = tuple(first + i * head for i in range(heads))
    moved = layouts.row_order(heads * head, [layouts.Part(0, "q", "proj", starts, rotary_dim)], "half")
    assert (moved != np.arange(len(moved))).sum() == heads * (rotary_dim - 2)
    assert (moved // 128 == np.arange(len(moved)) // 128).all()
