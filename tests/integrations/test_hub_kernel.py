"""Test the kernel for Hugging Face's hub: the folder, its layers, and models of transformers that use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import oracle
import toolchain
from ropewalk import Rotation
from ropewalk.kernels import cpu
from rotating_functions import rotating_function

kernels = pytest.importorskip("kernels", "0.17")

ROOT = Path(__file__).resolve().parents[2]
TOOL, WORKER = ROOT / "tools" / "hub_kernel.py", Path(__file__).with_name("hub_kernel_worker.py")
BATCH, HEADS, TOKENS, CHANNELS = 3, 4, 5, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := cpu.unavailable():
        toolchain.skip(f"the CPU kernels are {reason}")
    path = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, TOOL, path], check=True, timeout=300, stdout=subprocess.DEVNULL)
    return path


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Any:
    return kernels.get_local_kernel(folder)


def tables(pairs: int, width: str, dtype: torch.dtype, *, rows: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return cos and sin of angles that differ in each row and token, as a rotary module returns them."""
    angles = torch.linspace(-3, 3, rows * TOKENS * pairs, dtype=torch.float64).reshape(rows, TOKENS, pairs)
    found = []
    for table in (angles.cos().to(dtype), angles.sin().to(dtype)):
        wide = {"halves": torch.cat((table, table), -1), "each": table.repeat_interleave(2, -1), "half": table}
        found.append(wide[width])
    return found[0], found[1]


def expected(x: Tensor, cos: Tensor, sin: Tensor, case: Case, *, inverse: bool = False) -> tuple[Tensor, Tensor]:
    """Return x `[batch, heads, tokens, channels]` rotated in float64, and the error of float32 and one rounding."""
    _, pairing, pairs, width = case
    step = 2 if width == "each" else 1
    narrow = [t.double().numpy()[:, None, :, ::step][..., :pairs] for t in (cos, sin)]
    exact, terms = map(torch.from_numpy, oracle.rotate_by_tables(x.double().numpy(), *narrow, pairing, inverse=inverse))
    # Two products and their sum. In float64, those of the oracle are rounded as well.
    arithmetic = 3 * terms * (2.0**-52 if x.dtype == torch.float64 else 2.0**-24)
    return exact, arithmetic + (exact.abs() + arithmetic) * torch.finfo(x.dtype).eps / 2


def assert_rotated(y: Tensor, x: Tensor, cos: Tensor, sin: Tensor, case: Case, *, inverse: bool = False) -> None:
    exact, bound = expected(x, cos, sin, case, inverse=inverse)
    assert y.dtype == x.dtype
    assert bool(((y.double() - exact).abs() <= bound).all())


Case = tuple[str, str, int, str]  # layer, pairing, number of pairs, width of the tables
CASES: list[Case] = [
    ("RotaryPosEmb", "half", 8, "halves"),
    ("RotaryPosEmb", "half", 8, "half"),
    ("RotaryPosEmbPartial", "half", 4, "halves"),  # as wide as tables of half width for the whole head
    ("RotaryPosEmbPartial", "half", 3, "halves"),
    ("RotaryPosEmbInterleaved", "interleaved", 8, "each"),
    ("RotaryPosEmbInterleaved", "interleaved", 3, "each"),
    ("RotaryPosEmbInterleavedHalves", "interleaved", 4, "halves"),
]


def vectors(dtype: torch.dtype, heads: int = HEADS) -> Tensor:
    return torch.randn(BATCH, heads, TOKENS, CHANNELS, dtype=dtype)


class TestLayers:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}-{case[3]}")
    def test_forward_and_backward(self, kernel: Any, case: Case, dtype: torch.dtype) -> None:
        layer = getattr(kernel.layers, case[0])()
        cos, sin = tables(case[2], case[3], dtype)
        for axis in (1, 2, -2):
            q, k, q_grad, k_grad = vectors(dtype), vectors(dtype, 2), vectors(dtype), vectors(dtype, 2)
            given = [x if axis == 1 else x.transpose(1, 2) for x in (q, k)]
            rotated = layer(*(x.requires_grad_() for x in given), cos, sin, axis)
            grads = [x if axis == 1 else x.transpose(1, 2) for x in (q_grad, k_grad)]
            found = torch.autograd.grad(rotated, given, grads)
            for x, y, grad, to_x in zip((q, k), rotated, (q_grad, k_grad), found, strict=True):
                y, to_x = (t.detach() if axis == 1 else t.detach().transpose(1, 2) for t in (y, to_x))
                assert_rotated(y, x.detach(), cos, sin, case)
                assert_rotated(to_x, grad, cos, sin, case, inverse=True)

    def test_only_q(self, kernel: Any) -> None:
        cos, sin = tables(8, "halves", torch.float32)
        q = vectors(torch.float32)
        rotated, none = kernel.layers.RotaryPosEmb()(q, None, cos, sin)
        assert none is None
        assert_rotated(rotated, q, cos, sin, CASES[0])

    def test_rows_share_a_table(self, kernel: Any) -> None:
        cos, sin = tables(8, "halves", torch.float32, rows=1)
        q = vectors(torch.float32)
        for shared, axis in (((cos, sin), 1), ((cos[0], sin[0]), 0), ((cos[0], sin[0]), -3)):
            assert_rotated(kernel.apply_rotary_pos_emb(q, None, *shared, axis)[0], q, cos, sin, CASES[0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_vision(self, kernel: Any, dtype: torch.dtype) -> None:
        cos, sin = (table[0] for table in tables(8, "halves", torch.float32, rows=1))
        q = vectors(dtype)[0].transpose(0, 1)
        for y in kernel.layers.RotaryPosEmbVision()(q, q, cos, sin):
            assert_rotated(y.transpose(0, 1)[None], q.transpose(0, 1)[None], cos[None], sin[None], CASES[0])

    def test_gradients_reach_the_angles(self, kernel: Any) -> None:
        """Tables of full width repeat each angle, so its gradient is the sum of both halves."""
        angles, q = torch.randn(BATCH, TOKENS, 8, dtype=torch.float64, requires_grad=True), vectors(torch.float64)
        both = torch.cat((angles, angles), -1)
        formula = rotating_function("half")
        found, wanted = (
            torch.autograd.grad((function(q, q, both.cos(), both.sin())[0] ** 3).sum(), angles, retain_graph=True)[0]
            for function in (kernel.layers.RotaryPosEmb(), formula)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)

    def test_compiled(self, kernel: Any, compiler: str) -> None:
        cos, sin = tables(8, "halves", torch.float32)
        q, grad = vectors(torch.float32).requires_grad_(), vectors(torch.float32)
        layer = torch.compile(kernel.layers.RotaryPosEmb(), fullgraph=True)
        y, _ = layer(q, q.detach(), cos, sin)
        # Inductor may fuse a product and a sum, which saves a rounding.
        assert_rotated(y.detach(), q.detach(), cos, sin, CASES[0])
        assert_rotated(torch.autograd.grad(y, q, grad)[0], grad, cos, sin, CASES[0], inverse=True)

    @pytest.mark.parametrize(
        ("columns", "arguments", "message"),
        [
            (CHANNELS, {"pairing": "neox"}, "pairing must be one of 'half', 'interleaved', got 'neox'"),
            (CHANNELS, {"width": "full"}, "width must be one of 'halves', 'each', 'half', got 'full'"),
            (7, {}, "cos must have an even number of columns"),
            (CHANNELS + 2, {}, "and rotate at most the 16 channels of a head"),
            (CHANNELS, {"unsqueeze_dim": 3}, "cos and unsqueeze_dim must be"),
            (CHANNELS, {"unsqueeze_dim": 2}, "q in layout 'bshd' must have 5 tokens, one for each position, got 4"),
        ],
    )
    def test_bad_input(self, kernel: Any, columns: int, arguments: dict[str, Any], message: str) -> None:
        table = torch.ones(BATCH, TOKENS, columns)
        with pytest.raises(ValueError, match=message):
            kernel.apply_rotary_pos_emb(vectors(torch.float32), None, table, table, **arguments)


class TestFolder:
    def test_what_kernels_reads(self, folder: Path, kernel: Any) -> None:
        [loaded] = [found for found in kernels.get_loaded_kernels() if found.module is kernel]
        metadata = loaded.metadata
        assert (str(metadata.name), metadata.version, metadata.python_depends) == ("ropewalk", 1, [])
        assert metadata.id == kernel.__name__
        for name in ("cuda", "rocm", "cpu", "metal", "xpu"):
            alone = kernels.importer.Metadata.read_from_file(folder / "build" / f"torch-{name}" / "metadata.json")
            assert str(alone.backend.backend_type).lower() == name

    def test_only_what_a_rotation_needs(self, folder: Path) -> None:
        variant = folder / "build" / "torch-cuda"
        assert {path.name for path in variant.iterdir() if path.is_dir()} == {"integrations", "kernels", "rotation"}

    def test_both_kinds_of_kernels_are_loaded(self, kernel: Any) -> None:
        assert sys.modules[f"{kernel.__name__}.kernels.cpu"].unavailable() is None
        pytest.importorskip("triton")
        assert callable(sys.modules[f"{kernel.__name__}.kernels.gpu"].kernels().rotate.fn)

    def test_an_installed_ropewalk_keeps_its_names(self, kernel: Any) -> None:
        found = [pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[f"{name}.Rotation"] for name in ("ropewalk", kernel.__name__)]
        assert found[0] is Rotation
        assert found[1] is sys.modules[f"{kernel.__name__}.rotation.api"].Rotation
        assert getattr(torch.ops, kernel.__name__).rotate.default is not torch.ops.ropewalk.rotate.default

    def test_pure_python_computes_the_same(self, folder: Path, kernel: Any, recwarn: pytest.WarningsRecorder) -> None:
        alone = kernels.get_local_kernel(folder / "build" / "torch-cpu")
        assert sys.modules[f"{alone.__name__}.kernels.cpu"].unavailable() is not None
        cos, sin = tables(8, "halves", torch.float32)
        q = vectors(torch.bfloat16)
        assert torch.equal(*(m.apply_rotary_pos_emb(q, None, cos, sin)[0] for m in (alone, kernel)))
        assert not recwarn.list

    def test_modules_of_wheels(self, folder: Path, tmp_path: Path) -> None:
        names = {
            "ropewalk-0.1.0-cp312-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": "_cpu.abi3.so",
            "ropewalk-0.1.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": "_cpu.cpython-311-x86.so",
            "ropewalk-0.1.0-cp312-abi3-macosx_11_0_arm64.whl": "_cpu.abi3.so",
            "ropewalk-0.1.0-cp312-abi3-win_amd64.whl": "_cpu.pyd",
        }
        for name, module in names.items():
            with zipfile.ZipFile(tmp_path / name, "w") as archive:
                archive.writestr(f"ropewalk/kernels/{module}", name)
                archive.writestr("ropewalk/kernels/_cpu.pyi", "")
        made = tmp_path / "made"
        subprocess.run(
            [sys.executable, TOOL, made, *(tmp_path / name for name in names)],
            check=True, timeout=300, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        found = {
            path.parts[-3].removeprefix("torch-stable-abi210-cpu-"): sorted(p.name for p in path.parent.glob("_cpu.*"))
            for path in made.glob("build/torch-stable-*/kernels/__init__.py")
        }
        assert found == {
            "x86_64-linux": ["_cpu.abi3.so", "_cpu.cpython-311-x86.so"],
            "aarch64-darwin": ["_cpu.abi3.so"],
            "x86_64-windows": ["_cpu.pyd"],
        }

    def test_refuses_a_folder_with_files(self, folder: Path) -> None:
        ran = subprocess.run([sys.executable, TOOL, folder], capture_output=True, text=True, timeout=300)
        assert ran.returncode == 1
        assert ran.stderr == f"{folder} is not empty.\n"


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Any]:
    pytest.importorskip("transformers", "5.23")
    ran = subprocess.run(
        [sys.executable, WORKER, folder],
        env=os.environ | {"ROPEWALK_BACKEND": "kernel", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return {found["name"]: found for found in json.loads(ran.stdout)}


class TestModels:
    """Loss and gradients of a training step, and logits and tokens of rows with left padding."""

    @pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gpt_neox", "cohere"])
    def test_equal_to_the_models_own_function(self, models: dict[str, Any], name: str) -> None:
        found = models[name]["torch.float32"]
        assert found["tokens"]["between"] == found["logits"]["between"] == found["loss"]["between"] == 0
        assert found["gradients"]["between"] <= 2.0**-24  # the order in which two gradients of k are added

    @pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gpt_neox", "cohere"])
    def test_bfloat16_is_as_near_to_float64(self, models: dict[str, Any], name: str) -> None:
        """The kernel makes a part of the model's roundings. By chance, which the processor decides, all of them may
        cancel better, but not by a whole bit."""
        found = models[name]["torch.bfloat16"]
        assert found["loss"]["between"] <= 2.0**-8  # one rounding
        for key in ("logits", "gradients"):
            assert found[key]["kernel"] <= 2 * found[key]["own"]
