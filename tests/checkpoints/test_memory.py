"""The memory of a conversion does not depend on the size of the checkpoint, because only some rows are loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from safetensors.torch import load_file

from checkpoint_files import CONFIG, by_metas_names, write_meta

STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="the peak of a process is read from Linux's /proc")

MIB = 2**20
LARGEST = 75 * MIB
"""Of 256 MiB, in the same proportion as 600 MiB of 2 GiB."""

# Prints the peak of the resident memory before and after, in KiB. Pages of mapped files count as well.
PROGRAM = """
import sys
from pathlib import Path
from ropewalk.tools import convert as checkpoints
from ropewalk.tools.convert import pth, verify
import torch

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1])

source, target, to = sys.argv[1:]
about = {"max_positions": 64} if Path(source, "params.json").exists() else {}
before = peak()
plan = checkpoints.plan(checkpoints.read(Path(source), **about), to)
checkpoints.write(plan, Path(target), lambda *_: None)
print(before, peak(), plan.nbytes)
"""


def write_large(folder: Path, *, layers: int, width: int) -> None:
    """Write a Llama with large q and k, in one file for each layer."""
    config = CONFIG | {"hidden_size": width, "num_attention_heads": width // 128, "head_dim": 128}
    config |= {"num_key_value_heads": width // 128, "num_hidden_layers": layers, "intermediate_size": width}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator, weight_map = np.random.default_rng(0), {}
    for layer in range(layers):
        names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        shape = width, width
        tensors = {
            f"model.layers.{layer}.{name}.weight": generator.integers(0, 2**15, shape, np.uint16).view(np.float16)
            for name in names
        }
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"model.layers.{layer}.{name}.weight": np.ones(width, np.float16) for name in norms}
        if layer == 0:
            tensors |= {
                name: np.ones((16, width), np.float16) for name in ("model.embed_tokens.weight", "lm_head.weight")
            }
            tensors["model.norm.weight"] = np.ones(width, np.float16)
        file = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def convert(source: Path, target: Path, to: str) -> tuple[int, int]:
    """Convert a checkpoint. Return the bytes of memory beyond those of the interpreter, and those of the checkpoint."""
    command = [sys.executable, "-c", PROGRAM, str(source), str(target), to]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    before, after, size = map(int, ran.stdout.split())
    return 1024 * (after - before), size


def test_memory(tmp_path: Path) -> None:
    write_large(tmp_path / "a", layers=2, width=3072)
    tensors = {name: t for file in (tmp_path / "a").glob("*.safetensors") for name, t in load_file(file).items()}
    params = {"dim": 3072, "n_heads": 24, "n_kv_heads": 24}
    write_meta(tmp_path / "c", by_metas_names(tensors), **params)
    for source, target, to in (("a", "b", "interleaved"), ("c", "d", "half")):
        needed, size = convert(tmp_path / source, tmp_path / target, to)
        assert size >= 252 * MIB
        assert needed < LARGEST, f"{source} to {target}: {needed / MIB:.0f} MiB"
