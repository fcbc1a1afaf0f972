"""Compile the kernels for NVIDIA's sm_90 and sm_80 and AMD's gfx942, without a GPU, and inspect the machine code.

The arguments and options are those of the launcher.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import EIGHT_BITS
from kernel_cases import DTYPES, PAIRINGS
from ropewalk._layout import Options
from ropewalk.kernels import gpu, gpu_plans
from ropewalk.kernels.gpu_plans import Launch
from ropewalk.kernels.visible import StoreArguments, VisibleKeys

triton = pytest.importorskip("triton", reason="Triton is not installed, so nothing can be compiled")

SM_80, SM_90, GFX942 = ("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)
NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
}


def arguments(launch: Launch) -> dict[str, Any]:
    """Return the arguments of a launch by name."""
    plan, tensors = launch
    return dict(zip(getattr(gpu.kernels(), plan.kernel).arg_names, tensors, strict=False)) | plan.numbers


def compiled(launch: Launch, target: tuple[str, Any, int], *known: Any) -> Any:
    """Compile a kernel as Triton does for this launch: numbers are not specialized, and pointers are aligned.

    known: further properties of pointers.
    """
    named, function = arguments(launch), getattr(gpu.kernels(), launch[0].kernel)
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        value = named[name]
        if name.isupper():
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = f"*{NAMES[value.dtype]}", [["tt.divisibility", 16], *known]
        else:
            signature[name] = "i32"
    source = triton.compiler.ASTSource(function, signature, constants, attributes)
    options = {**launch[0].options, "num_warps": launch[0].warps}
    return triton.compile(source, target=triton.backends.compiler.GPUTarget(*target), options=options)


def rotation(dtype: torch.dtype, pairing: str, **how: Any) -> Launch:
    """Return the launch for the heads of Llama 3, or for other sizes; in place if `in_place`."""
    head_dim, pairs, offset = how.get("sizes", (128, 64, 0))
    layout, table = how.get("layout", "bshd"), how.get("table", torch.float32)
    tensors = [torch.empty((2, 16, heads, head_dim), dtype=dtype) for heads in (32, 8)]
    if layout == "bhsd":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    outputs = tensors if how.get("in_place") else [torch.empty_like(x) for x in tensors]
    cos, sin = torch.empty(2, 16, pairs, dtype=table), torch.empty(2, 16, pairs, dtype=table)
    return gpu_plans.rotation_launch(
        tensors, outputs, cos, sin, Options(layout, pairing == "interleaved", offset, how.get("inverse", False))
    )


def sass(program: Any, folder: Path) -> Counter[str]:
    """Count each instruction in the machine code. "STACK" is the size of the stack in bytes."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    binary = folder / "kernel.cubin"
    binary.write_bytes(program.asm["cubin"])

    def dumped(option: str) -> str:
        return subprocess.run(
            [tools / "cuobjdump", option, binary], capture_output=True, text=True, check=True, env={"PATH": str(tools)}
        ).stdout

    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?([A-Z][\w.]*)", dumped("-sass"), re.MULTILINE)
    (stack,) = re.findall(r"STACK:(\d+)", dumped("-res-usage"))
    counted = Counter(lines)
    assert counted["EXIT"], "nothing was read"
    return counted + Counter({"STACK": int(stack)})


def named(instructions: Counter[str], *names: str) -> set[str]:
    return {name for name in instructions if name.split(".")[0] in names}


SPILLS = ("LDL", "STL", "STACK")
FUSED = ("FFMA", "DFMA", "HFMA2", "FFMA2")


@pytest.mark.parametrize("how", [{}, {"inverse": True}, {"in_place": True}, {"layout": "bhsd"}], ids=str)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rotation_for_nvidia(dtype: torch.dtype, pairing: str, how: dict[str, Any], tmp_path: Path) -> None:
    launch = rotation(dtype, pairing, **how)
    found = sass(compiled(launch, SM_90), tmp_path)
    # Of q and of k: whole vectors, and nothing through shared memory. Two adjacent pairs of float32 need two numbers of
    # a table, which are 64 bits.
    tables = {"LDG.E.64"} if dtype == torch.float32 and pairing == "interleaved" else set()
    assert named(found, "LDG") == {"LDG.E.128"} | tables
    assert named(found, "STG") == {"STG.E.128"}
    # 64 bytes for each thread of q's programs and of k's.
    assert found["STG.E.128"] == 2 * gpu_plans.tile.bytes // 16
    assert not named(found, *SPILLS, "LDS", "STS", "BAR")
    assert not named(found, "FFMA", "DFMA", "FFMA2")


def fused_step(dtype: torch.dtype, pairing: str, norm: bool, kept: torch.dtype) -> Launch:
    """Return the launch for Qwen 3's heads, stored in pages."""
    q, k, v = (torch.empty((4, 1, heads, 128), dtype=dtype) for heads in (16, 8, 8))
    pages, table, slots = (
        torch.empty(9, 16, 8, 128, dtype=kept),
        torch.empty(4, 1, 64),
        torch.empty(4, 1, dtype=torch.int64),
    )
    of_norm = (torch.empty(128, dtype=dtype), torch.empty(128, dtype=dtype), 1e-6, False) if norm else None
    scales = torch.empty(pages.shape[:3]) if kept in EIGHT_BITS else None
    store = StoreArguments(v, pages, pages, slots, scales, scales)
    options = Options("bshd", pairing == "interleaved", 0)
    return gpu_plans.step_launch((q, k), (q, pages), table, table, options, of_norm, store)


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_step_for_nvidia(dtype: torch.dtype, pairing: str, norm: bool, tmp_path: Path) -> None:
    """Whole vectors, no spilled registers, and no product fused with a sum."""
    found = sass(compiled(fused_step(dtype, pairing, norm, dtype), SM_90), tmp_path)
    assert named(found, "STG") == {"STG.E.128"}
    assert not named(found, *SPILLS)
    # A division and a root in float64 compile to fused products, two of them in float32 for each of q and k.
    assert not named(found, "FFMA2", *([] if norm else ["DFMA", "FFMA"]))
    assert found["FFMA"] <= 4
    assert found["DADD"] <= 200  # halves are added once, not by every thread


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("kept", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_step_in_8_bits(dtype: torch.dtype, kept: torch.dtype, pairing: str, norm: bool, tmp_path: Path) -> None:
    """Numbers of 8 bits are written in vectors, and computed without native float8."""
    launch = fused_step(dtype, pairing, norm, kept)
    compiled(launch, SM_80)
    found = sass(compiled(launch, SM_90), tmp_path)
    # A thread has 8 numbers of 16 bits, or 4 of 32 bits, in a vector. The scales are the 2 others of 32 bits.
    of_numbers = Counter({"STG.E.64" if dtype == torch.bfloat16 else "STG.E": 4})
    assert {name: found[name] for name in named(found, "STG")} == Counter({"STG.E.128": 2, "STG.E": 2}) + of_numbers
    # The division of float64 has a branch for numbers that are not normal, which may save a number of 64 bits.
    assert sum(found[name] for name in named(found, "LDL", "STL")) <= (2 if norm else 0)
    code = compiled(launch, GFX942).asm["amdgcn"]
    assert re.search(r"\.private_segment_fixed_size:\s+0\b", code)
    assert not re.search(r"v_\w*(fp8|bf8)", code)


def attention(dtype: torch.dtype, rows: tuple[int, int], head_dim: int = 128, **how: Any) -> dict[str, Launch]:
    """Return the launches for 8 key heads, a group and a number of tokens, and many keys or few."""
    keys, (group, tokens), meta = 32768 if how.get("many", True) else 64, rows, {"device": "meta"}
    q = torch.empty(2, tokens, 8 * group, head_dim, dtype=dtype, **meta)
    paged = how.get("paged", False)
    slots, kept = (2 * keys // 16, 16) if paged else (2, keys), how.get("kept", dtype)
    pool = torch.empty(*slots, 8, head_dim, dtype=kept, **meta)
    scales = torch.empty(*slots, 8, **meta) if kept in EIGHT_BITS else None
    blocks = torch.empty(2, keys // 16, dtype=torch.int32, **meta) if paged else None
    of_rows, order = torch.empty(2, dtype=torch.int64, **meta), torch.empty(2, tokens, dtype=torch.int64, **meta)
    counts = of_rows if how.get("counts", paged) else None
    visible = VisibleKeys(order, keys, blocks, counts, None, how.get("sinks", 0), scales, scales)
    launches = gpu_plans.attention_launches(q, None, pool, pool, visible, 0.1, torch.empty_like(q))
    return {launch[0].kernel: launch for launch in launches}


# One query of a key head, 4 that share it, and 8 tokens of each of these 4.
QUERIES = [(1, 1), (4, 1), (4, 8)]


@pytest.mark.parametrize("paged", [False, True], ids=["", "paged"])
@pytest.mark.parametrize("rows", QUERIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_for_nvidia(dtype: torch.dtype, rows: tuple[int, int], paged: bool, tmp_path: Path) -> None:
    """Keys and values are read in whole vectors, asynchronously for tensor cores. No registers are spilled."""
    launches = attention(dtype, rows, paged=paged)
    compiled(launches["attend"], SM_80)
    program = compiled(launches["attend"], SM_90)
    found = sass(program, tmp_path)
    assert not named(found, *SPILLS)
    if rows == (1, 1):
        assert found["LDG.E.128"] >= 8
        assert not named(found, "LDGSTS", "HMMA")
    else:
        assert named(found, "LDGSTS") == {"LDGSTS.E.BYPASS.128"}
        # Scores in one product, and values times weights that are sums of three; both are three products in float32.
        plan, float32 = launches["attend"][0], dtype == torch.float32
        one = plan.numbers["BLOCK_R"] * plan.numbers["BLOCK_N"] * 128 // (16 * 8 * (8 if float32 else 16)) // plan.warps
        assert sum(found[name] for name in named(found, "HMMA")) == (6 if float32 else 4) * one
    assert program.metadata.shared <= 64 * 1024
    assert not named(sass(compiled(launches["combine"], SM_90), tmp_path), *SPILLS)


@pytest.mark.parametrize("kept", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("rows", QUERIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_over_8_bits_for_nvidia(
    dtype: torch.dtype, rows: tuple[int, int], kept: torch.dtype, tmp_path: Path
) -> None:
    """Numbers of 8 bits are read in whole vectors, and become 16 bits in registers. No registers are spilled."""
    launch = attention(dtype, rows, paged=True, kept=kept)["attend"]
    compiled(launch, SM_80)  # where Triton has no float8_e4m3fn
    program = compiled(launch, SM_90)
    found = sass(program, tmp_path)
    assert not named(found, *SPILLS)
    assert program.metadata.shared <= 64 * 1024
    if rows == (1, 1):
        assert found["LDG.E.128"] >= 8
    else:
        assert found["LDGSTS.E.BYPASS.128"] >= 2
        # Scores in the dtype of queries; values times weights that are sums of three, in bfloat16.
        plan = launch[0]
        one = plan.numbers["BLOCK_R"] * plan.numbers["BLOCK_N"] * 128 // (16 * 8 * 16) // plan.warps
        counted = [sum(found[name] for name in named(found, "HMMA") if name.endswith(end)) for end in ("TF32", "BF16")]
        assert counted == ([6 * one, 3 * one] if dtype == torch.float32 else [0, 4 * one])


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tables_per_head_for_nvidia(dtype: torch.dtype, pairing: str, tmp_path: Path) -> None:
    """Loads are as wide as for shared tables, without shared memory. The gradient kernel spills no registers."""
    q, table = torch.empty((2, 16, 32, 128), dtype=dtype), torch.empty(2, 32, 16, 64)
    interleaved = pairing == "interleaved"
    launch = gpu_plans.rotation_launch([q, q], [q, q], table, table, Options("bshd", interleaved, 0, False))
    found = sass(compiled(launch, SM_90), tmp_path)
    tables = {"LDG.E.64"} if dtype == torch.float32 and interleaved else set()
    assert named(found, "LDG") == {"LDG.E.128"} | tables
    assert named(found, "STG") == {"STG.E.128"}
    gradient = gpu_plans.gradient_launch([q, q], [q, q], table, table, Options("bshd", interleaved, 0))
    assert not named(found, *SPILLS, "LDS", "STS", "BAR", "FFMA", "DFMA", "FFMA2")
    assert not named(sass(compiled(gradient, SM_90), tmp_path), *SPILLS, "FFMA", "DFMA", "FFMA2")


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.float64, {}),
        (torch.float64, {"table": torch.float64}),
        (torch.float32, {"table": torch.float64}),
        (torch.bfloat16, {"sizes": (80, 40, 0)}),
        (torch.bfloat16, {"sizes": (192, 32, 128)}),
        (torch.bfloat16, {"sizes": (256, 39, 7)}),
        (torch.float32, {"sizes": (1030, 513, 3)}),
        (torch.float16, {"sizes": (2, 1, 0)}),
    ],
    ids=str,
)
def test_other_rotations_spill_no_registers(
    dtype: torch.dtype, how: dict[str, Any], pairing: str, tmp_path: Path
) -> None:
    found = sass(compiled(rotation(dtype, pairing, **how), SM_90), tmp_path)
    assert not named(found, *SPILLS)
    assert not named(found, "FFMA", "DFMA", "FFMA2")


def test_partial_rotation_moves_whole_vectors(tmp_path: Path) -> None:
    """DeepSeek rotates 64 of 192 channels. The 128 channels before them are copied."""
    found = sass(compiled(rotation(torch.bfloat16, "half", sizes=(192, 32, 128)), SM_90), tmp_path)
    assert named(found, "LDG") == {"LDG.E.128"}
    assert named(found, "STG") == {"STG.E.128"}


def test_unaligned_rows_use_narrow_loads(tmp_path: Path) -> None:
    """Slices of 80 channels from heads of 97: the address of a row may be any multiple of two bytes."""
    x = torch.empty(2, 16, 32, 97, dtype=torch.bfloat16)[..., :80]
    tables = torch.empty(2, 16, 40)
    launch = gpu_plans.rotation_launch([x], [x], tables, tables, Options("bshd", False, 0, False))
    found = sass(compiled(launch, SM_90), tmp_path)
    assert "LDG.E.U16" in found
    assert named(found, "STG") == {"STG.E.U16"}


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradient_to_the_tables_spills_no_registers(dtype: torch.dtype, pairing: str, tmp_path: Path) -> None:
    tensors = [torch.empty((2, 16, heads, 128), dtype=dtype) for heads in (32, 8)]
    of_table = torch.empty(2, 16, 64, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    launch = gpu_plans.gradient_launch(
        tensors, tensors, of_table, of_table, Options("bshd", pairing == "interleaved", 0)
    )
    assert not named(sass(compiled(launch, SM_90), tmp_path), *SPILLS)


@pytest.mark.parametrize("axes", [None, 3])
@pytest.mark.parametrize("positions", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_angles_use_no_library_sine(
    dtype: torch.dtype, positions: torch.dtype, axes: int | None, tmp_path: Path
) -> None:
    tables, steps = torch.empty(4096, 64, dtype=dtype), torch.empty(64, dtype=torch.int64)
    of_positions = torch.empty(4096 if axes is None else (axes, 4096), dtype=positions)
    axis = None if axes is None else steps
    program = compiled(gpu_plans.angles_launch(of_positions, steps, tables, tables, 1.1386294361119891, axis), SM_90)
    found = sass(program, tmp_path)
    assert not named(found, *SPILLS)
    assert not named(found, *FUSED)
    assert not any("SIN" in name or "COS" in name for name in found)
    assert found["DMUL"] > 20
    # All numbers are float64, including the factor. No coefficient was rounded to float32.
    assert not re.search(r"\b0f[0-9A-F]{8}\b", program.asm["ptx"])


# For tensors below 2 GiB, Triton tells AMD's compiler, which then uses other instructions.
SIZES_FOR_AMD = pytest.mark.parametrize("known", [[], [["tt.pointer_range", 32]]], ids=["large", "small"])


@SIZES_FOR_AMD
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rotation_for_amd(dtype: torch.dtype, pairing: str, known: list[Any]) -> None:
    code = compiled(rotation(dtype, pairing), GFX942, *known).asm["amdgcn"]
    tables = {"dwordx2"} if dtype == torch.float32 and pairing == "interleaved" else set()
    assert set(re.findall(r"\b(?:global|buffer|flat)_load_(\w+)", code)) == {"dwordx4"} | tables
    assert set(re.findall(r"\b(?:global|buffer|flat)_store_(\w+)", code)) == {"dwordx4"}
    assert not re.search("v_(pk_)?(fma|fmac)_f32", code)
    assert "scratch_" not in code
    assert re.search(r"\.private_segment_fixed_size:\s+0\b", code)


@SIZES_FOR_AMD
def test_others_for_amd(known: list[Any]) -> None:
    tensors, of_table = [torch.empty(2, 16, 8, 128)], torch.empty(2, 16, 64)
    gradient = gpu_plans.gradient_launch(tensors, tensors, of_table, of_table, Options("bshd", False, 0))
    steps = torch.empty(64, dtype=torch.int64)
    angles = gpu_plans.angles_launch(steps, steps, of_table, of_table, 1.0)
    for launch in (gradient, angles):
        code = compiled(launch, GFX942, *known).asm["amdgcn"]
        assert "scratch_" not in code
        assert re.search(r"\.private_segment_fixed_size:\s+0\b", code)
        assert not re.search("v_(pk_)?(fma|fmac)_f|v_(sin|cos)_f", code)


@pytest.mark.parametrize("kept", [None, *EIGHT_BITS], ids=str)
@pytest.mark.parametrize("rows", QUERIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_for_amd(
    dtype: torch.dtype, rows: tuple[int, int], kept: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native float8 of this GPU, another one, is not used."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for launch in attention(dtype, rows, paged=True, kept=kept or dtype).values():
        program = compiled(launch, GFX942)
        assert program.metadata.shared <= 64 * 1024
        assert re.search(r"\.private_segment_fixed_size:\s+0\b", program.asm["amdgcn"])
        assert not re.search(r"v_\w*(fp8|bf8)", program.asm["amdgcn"])


def strided(size: tuple[int, ...], dtype: torch.dtype, step: int) -> Tensor:
    return torch.empty((*size[:-1], step * size[-1]), dtype=dtype, device="meta")[..., ::step]


BOTH, TABLES, SIZES = (False, True), (torch.float32, torch.float64), ((8, 4, 0), (24, 8, 4))


def rotations() -> Iterator[Launch]:
    for dtype, of_table, (head_dim, pairs, offset), x_step, step, interleaved, inverse, in_place, per_head in product(
        DTYPES, TABLES, SIZES, (1, 2), (1, 2), BOTH, BOTH, BOTH, BOTH
    ):
        tensors = [strided((2, 3, heads, head_dim), dtype, x_step) for heads in (2, 2 if per_head else 1)]
        table = strided((2, 2, 3, pairs) if per_head else (3, pairs), of_table, step)
        outputs = tensors if in_place else [torch.empty_like(x) for x in tensors]
        yield gpu_plans.rotation_launch(tensors, outputs, table, table, Options("bshd", interleaved, offset, inverse))


def gradients() -> Iterator[Launch]:
    for dtype, (head_dim, pairs, offset), step, interleaved, per_head in product(DTYPES, SIZES, (1, 2), BOTH, BOTH):
        tensors = [strided((2, 3, heads, head_dim), dtype, step) for heads in (2, 2 if per_head else 1)]
        of_table = torch.float64 if dtype == torch.float64 else torch.float32
        table = strided((2, 2, 3, pairs) if per_head else (2, 3, pairs), of_table, 1)
        yield gpu_plans.gradient_launch(tensors, tensors, table, table, Options("bshd", interleaved, offset))


def tables_of_positions() -> Iterator[Launch]:
    steps = strided((64,), torch.int64, 1)
    for positions, dtype, several in product((torch.int32, torch.int64), TABLES, BOTH):
        of_positions, table = strided((3, 7) if several else (7,), positions, 1), strided((7, 64), dtype, 1)
        yield gpu_plans.angles_launch(of_positions, steps, table, table, 1.5, steps if several else None)


def fused_steps() -> Iterator[Launch]:
    slots = strided((2, 3), torch.int64, 1)
    for dtype, of_table, of_weight, (head_dim, pairs, offset), x_step, step, interleaved, add_one, kept in product(
        DTYPES,
        TABLES,
        (torch.bfloat16, torch.float32),
        SIZES,
        (1, 2),
        (1, 2),
        BOTH,
        (None, False, True),
        (None, torch.float16, *EIGHT_BITS),
    ):
        if kept in EIGHT_BITS and (of_table, step) != (torch.float32, 1):
            continue  # tables and caches do not meet in the kernel
        q, k, v = (strided((2, 3, heads, head_dim), dtype, x_step) for heads in (2, 1, 1))
        cache = strided((3, 4, 1, head_dim), kept if kept in EIGHT_BITS else dtype, x_step)
        scales = strided((3, 4, 1), torch.float32, 1) if kept in EIGHT_BITS else None
        weight, table = strided((head_dim,), of_weight, 1), strided((3, pairs), of_table, step)
        norm = None if add_one is None else (weight, weight, 1e-6, add_one)
        store = None if kept is None else StoreArguments(v, cache, cache, slots, scales, scales)
        outputs = (q, k if kept is None else cache)
        yield gpu_plans.step_launch((q, k), outputs, table, table, Options("bshd", interleaved, offset), norm, store)


def attentions(kernel: str) -> Iterator[Launch]:
    for dtype, kept, rows, paged, head_dim, counts, sinks, many in product(
        (torch.float16, torch.bfloat16, torch.float32), (None, *EIGHT_BITS), QUERIES, BOTH, (64, 200), BOTH, BOTH, BOTH
    ):
        how = {"paged": paged, "counts": counts, "sinks": sinks, "many": many or kernel == "combine"}
        yield attention(dtype, rows, head_dim, kept=kept or dtype, **how)[kernel]


# Each kernel, with the launches that its launcher can make.
LAUNCHES = {
    "rotate": rotations,
    "table_gradient": gradients,
    "angles": tables_of_positions,
    "step": fused_steps,
    "attend": partial(attentions, "attend"),
    "combine": partial(attentions, "combine"),
}


def variants(launches: Iterable[Launch]) -> list[Launch]:
    """Choose launches such that any three choices that one launch can combine are combined in one of these.

    A choice is the dtype of a tensor, a flag, whether channels before the rotated ones are copied, or how attention is
    computed: whether the cache has pages, and for one query, a few, or several tokens.
    """
    combined: dict[frozenset[Any], Launch] = {}
    for launch in launches:
        named = arguments(launch)
        choices = {name: value for name, value in named.items() if isinstance(value, bool)}
        choices |= {name: value.dtype for name, value in named.items() if isinstance(value, Tensor)}
        choices |= {name: named.get(name, 0) > 0 for name in ("OFFSET", "PAGE")}
        choices |= {name: named.get(name) for name in ("BLOCK_R", "PRECISION")}
        combined.setdefault(frozenset(combinations(sorted(choices.items(), key=repr), 3)), launch)
    chosen = []
    while combined:
        best = max(combined, key=len)
        chosen.append(combined[best])
        combined = {left: launch for threes, launch in combined.items() if (left := threes - best)}
    return chosen


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_every_variant_compiles(kernel: str) -> None:
    launches = LAUNCHES[kernel]
    chosen = variants(launches())
    flags = [name for name, value in chosen[0][0].numbers.items() if isinstance(value, bool)]
    fixed = [flag for flag in flags if {plan.numbers[flag] for plan, _ in chosen} != {False, True}]
    assert not fixed, "no launch here has the other value"
    for launch in chosen:
        compiled(launch, SM_90)


def test_lengths_and_batches_need_no_recompilation() -> None:
    """The constants in the code are the same for one token and many, for one row and several, also for 39 pairs."""
    for head_dim, pairs in ((128, 64), (80, 39)):
        for layout in ("bshd", "bhsd"):
            seen = set()
            for batch, seq in ((1, 1), (1, 2), (2, 1), (3, 17), (1, 4096)):
                size = {"b": batch, "s": seq, "h": 8, "d": head_dim}
                x, tables = torch.empty([size[axis] for axis in layout]), torch.empty(seq, pairs)
                for table in (tables, tables.expand(batch, seq, pairs), torch.empty(batch, seq, pairs)):
                    plan, _ = gpu_plans.rotation_launch([x, x], [x, x], table, table, Options(layout, False, 0, False))
                    seen.add(tuple((name, value) for name, value in plan.numbers.items() if name.isupper()))
            assert len(seen) == 1


def test_no_number_is_compiled_in() -> None:
    """Lengths, counts and strides are not constants, so a new length needs no compilation. Constants are upper case."""
    for kernel, launches in LAUNCHES.items():
        plan, tensors = next(launches())
        for parameter in getattr(gpu.kernels(), kernel).params[len(tensors) :]:
            assert parameter.name in plan.numbers
            assert parameter.is_constexpr or parameter.do_not_specialize, parameter.name
