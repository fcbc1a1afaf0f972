"""Break the Triton kernels one line at a time, and see the tests of tests/gpu fail. Run by hand, outside CI.

    python tests/gpu/mutants.py            all mutants, two at a time
    python tests/gpu/mutants.py sin        those whose name contains one of the words

For Python outside of kernels, a mutation tester makes such changes (CONTRIBUTING.md). It cannot change code that Triton
compiles. Each mutant is a copy of src/ with one replacement, and the text to replace must stand there exactly once. Exit
status 1 if a mutant survives.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Without a GPU: in Triton's interpreter, then what was compiled, what asks for it, and what is launched.
SUITES = [
    ({"TRITON_INTERPRET": "1"}, "tests/gpu/test_kernels.py"),
    ({"TRITON_INTERPRET": "1"}, "tests/gpu/test_attend.py"),
    ({"TRITON_INTERPRET": "1"}, "tests/gpu/test_step.py"),
    ({}, "tests/gpu/test_compiled.py"),
    ({}, "tests/gpu/test_launch.py"),
]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str


GPU, KERNELS = "kernels/gpu_plans.py", "kernels/triton_kernels.py"
MUTANTS = [
    Mutant("sign of sin", KERNELS, "(a * c - b * s)", "(a * c + b * s)"),
    Mutant("inverse is forward", KERNELS, "s = s * -1.0", "s = s * 1.0"),
    Mutant("sign of 0 in the inverse", KERNELS, "s = s * -1.0", "s = 0.0 - s"),
    Mutant(
        "float64 in float32", KERNELS, "compute: tl.constexpr = tl.float64 if", "compute: tl.constexpr = tl.float32 if"
    ),
    Mutant("k by the programs of q", KERNELS, "            program - q_programs, k,", "            program, k,"),
    Mutant(
        "heads beyond the last",
        KERNELS,
        "here = (token < tokens) & (head < heads)\n    x_rows",
        "here = (token < tokens) & (head < heads + 1)\n    x_rows",
    ),
    Mutant(
        "tokens beyond the last",
        KERNELS,
        "here = (token < tokens) & (head < heads)\n    x_rows",
        "here = (token < tokens + 1) & (head < heads)\n    x_rows",
    ),
    Mutant(
        "pairs beyond the last",
        KERNELS,
        "        inside = here & (tl.arange(0, BLOCK_P)[None, None, :] < PAIRS)\n        tl.store",
        "        inside = here & (tl.arange(0, BLOCK_P)[None, None, :] < PAIRS + 1)\n        tl.store",
    ),
    Mutant(
        "rows of the batch share a table", KERNELS, "cos_rows = _rows(cos, batch,", "cos_rows = _rows(cos, 0 * batch,"
    ),
    Mutant("32-bit tokens", KERNELS, "token.to(tl.int64) * x_t", "token * x_t"),
    Mutant("32-bit batch", KERNELS, "(rest // token_blocks).to(tl.int64)", "(rest // token_blocks)"),
    Mutant(
        "head copied to its offset only",
        KERNELS,
        "DENSE)\n        _copy(x_rows, y_rows, x_d, y_d, here, OFFSET + 2 * PAIRS, HEAD_DIM, BLOCK_P, DENSE)",
        "DENSE)",
    ),
    Mutant(
        "head not copied before its offset",
        KERNELS,
        "_copy(x_rows, y_rows, x_d, y_d, here, 0, OFFSET, BLOCK_P, DENSE)",
        "pass",
    ),
    Mutant("gradient of the first block of heads", KERNELS, "for block in range(BLOCKS):", "for block in range(1):"),
    Mutant("gradient to sin", KERNELS, "h * a - g * b", "h * a + g * b"),
    Mutant("quadrant not rounded", KERNELS, "(phase + (1 << 61)) >> 62", "phase >> 62"),
    Mutant(
        "last coefficient",
        KERNELS,
        "u * 6.8874821400921976273e-12 + -1.7571791752800344071e-9",
        "u * 0.0 + -1.7571791752800344071e-9",
    ),
    Mutant(
        "cosine of Triton",
        KERNELS,
        "of_sin = tl.where((quadrant & 2)",
        "of_sin = tl.sin(phase.to(tl.float64) * 3.4061215800304893e-19)\n    of_sin = tl.where((quadrant & 8)",
    ),
    Mutant("fused products", GPU, '"enable_fp_fusion": False', '"enable_fp_fusion": True'),
    Mutant("tables as wide as they come", GPU, "// (2 if interleaved else 1)", ""),
    Mutant(
        "unit of strides too large",
        GPU,
        "while any(stride % limit for stride in strides):",
        "while any(stride % limit for stride in strides[:3]):",
    ),
    Mutant("strides without a unit", GPU, "unit = _unit(list(rows.values()), limit) if dense else 1", "unit = 1"),
    Mutant(
        "dense channels taken for granted",
        GPU,
        "dense = all(strides[-1] == 1 for strides in named.values())",
        "dense = True",
    ),
    Mutant("dense tables taken for granted", GPU, "dense = cos[-1] == sin[-1] == 1 or shape[-1] == 1", "dense = True"),
    Mutant("an only row of a table has a stride", GPU, "at < 0 or shape[at] == 1", "at < 0"),
    Mutant(
        "unit of an only row forgotten",
        GPU,
        "_unit([*cos[:-1], *sin[:-1]], min",
        "_unit([c * (n > 1) for n, c in zip(shape, cos[:-1])], min",
    ),
    Mutant("nothing copied", GPU, '"COPY": not in_place', '"COPY": False'),
    Mutant("attention to the next token", KERNELS, "key[None, :] <= last_key", "key[None, :] <= last_key + 1"),
    Mutant("attention of one query to the next token", KERNELS, "(key <= last_key)", "(key <= last_key + 1)"),
    Mutant("attention one token before the window", KERNELS, "last - window + 1, 0)", "last - window, 0)"),
    Mutant("attention without the factor of earlier keys", KERNELS, "sums *= factor[:, None]", "pass"),
    Mutant("attention of parts with other maxima", KERNELS, "new_sums * new_factor[:, None]", "new_sums"),
    Mutant(
        "attention of lanes with other maxima", KERNELS, "tl.sum(weights * factor, axis=0", "tl.sum(weights, axis=0"
    ),
    Mutant(
        "attention reads values behind the last key",
        KERNELS,
        "v_rows[:, None] + channel, mask=here[:, None] & inside",
        "v_rows[:, None] + channel, mask=inside",
    ),
    Mutant("attention of sinks by near queries", KERNELS, "f_rows = far_q", "f_rows = q"),
    Mutant("attention of sinks twice", KERNELS, "begin = tl.maximum(begin, front)", "pass"),
    Mutant("attention of sinks instead of the window", KERNELS, "tl.maximum(part - front, 0)", "part"),
    Mutant("attention to the next sink", KERNELS, "tl.minimum(last_sink, front - 1)", "front - 1"),
    Mutant(
        "attention over a part of the parts", KERNELS, "for start in range(0, splits, BLOCK_S)", "for start in range(1)"
    ),
    Mutant(
        "attention counts keys that are not there", KERNELS, "end = tl.minimum(end, tl.load(counts", "(tl.load(counts"
    ),
    Mutant("attention in 32 bits", KERNELS, "key.to(tl.int64)\n        k_rows", "key\n        k_rows"),
    Mutant(
        "attention with weights of 16 bits",
        GPU,
        "torch.float16: 2}.get(dtypes[3], 3)",
        "torch.float16: 1}.get(dtypes[3], 1)",
    ),
    Mutant("NaN of 8 bits is a number", KERNELS, "bits ^= (bits + 0x80) & 0x4000", "bits &= -0x4001"),
    Mutant("no scales of keys", KERNELS, "score *= k_scale[None, :]", "pass"),
    Mutant("no scales of values", KERNELS, "weight *= v_scale[None, :]", "pass"),
    Mutant("no scales of keys for one query", KERNELS, "score *= k_scale\n", "pass\n"),
    Mutant("no scales of values for one query", KERNELS, "weight *= v_scale\n", "pass\n"),
    Mutant("scales behind the last key", KERNELS, "slot * vs_t, mask=here, other=0.0", "slot * vs_t"),
    Mutant("values of 8 bits in float16", KERNELS, "tl.bfloat16 if DOT", "tl.float16 if DOT"),
    Mutant("narrow loads of 8 bits", GPU, "_VECTOR // dtypes[2].itemsize", "_VECTOR // dtype.itemsize"),
    Mutant(
        "step of 8 bits ignores NaN", KERNELS, "bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF", "bits = tl.abs(x)"
    ),
    Mutant(
        "step of 8 bits without the rest of a head", KERNELS, "largest = tl.maximum(largest, _largest(z, rest))", "pass"
    ),
    Mutant(
        "step of 8 bits without the second of pairs",
        KERNELS,
        "_largest(a, inside), _largest(b,",
        "_largest(a, inside), _largest(a,",
    ),
    Mutant(
        "step of 8 bits not rounded to the dtype",
        KERNELS,
        "    a, b = a.to(given), b.to(given)\n    if SCALED",
        "    if SCALED",
    ),
    Mutant("step of 8 bits with tiny scales", KERNELS, "tl.where(scale < 2.0**-100, 2.0**-100, scale)", "scale"),
    Mutant("step of e4m3 rounds half up", KERNELS, "size + 0x7FFFF + (size >> 20 & 1)", "size + 0x80000"),
    Mutant(
        "step of e4m3 without subnormal numbers", KERNELS, "tl.where(size < 0x3C800000, subnormal, normal)", "normal"
    ),
    Mutant("step of e4m3 without signs", KERNELS, "| (bits >> 24 & 0x80)", ""),
    Mutant(
        "step of int8 truncates",
        KERNELS,
        "code = (x + 1.5 * 2.0**23).to(tl.int32, bitcast=True)",
        "code = x.to(tl.int32)",
    ),
    Mutant(
        "step of int8 in slots that do not exist",
        KERNELS,
        "tl.store(rows, scale, mask=there)",
        "tl.store(rows, scale, mask=here)",
    ),
    Mutant("step writes values of latent rows", GPU, "(2 if has_values else 1)", "2"),
    Mutant("attention in TF32", GPU, '4, 2, "tf32x3")', '4, 2, "tf32")'),
    Mutant("planned for any dtype", GPU, "[(x.dtype, x.stride()) for", "[(tensors[0].dtype, x.stride()) for"),
    Mutant("small tiles", GPU, "tile.bytes // 2 // element_size", "16 // element_size // 2"),
]


def survives(mutant: Mutant) -> bool:
    """Whether the tests pass in spite of this mutant."""
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "src"
        shutil.copytree(ROOT / "src", broken, ignore=shutil.ignore_patterns("__pycache__"))
        file = broken / "ropewalk" / mutant.file
        text = file.read_text()
        if mutant.old not in text:
            sys.exit(f"{mutant.name}: its text is not in {mutant.file}")
        file.write_text(text.replace(mutant.old, mutant.new, 1))  # in the rotation, which precedes the fused step
        # The finder of an editable install would lead back to src/.
        (broken / "sitecustomize.py").write_text(
            "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        )
        for also, tests in SUITES:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
            environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(broken), "OMP_NUM_THREADS": "1", **also}
            ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            if ran.returncode > 2:  # below 0: it wrote where it must not, and was stopped
                sys.exit(f"{mutant.name}: pytest could not run\n{ran.stdout}{ran.stderr}")
            if ran.returncode:
                return False
        return True


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    survivors = []
    with ThreadPoolExecutor(2) as pool:
        for mutant, survived in zip(chosen, pool.map(survives, chosen), strict=True):
            print(f"{'SURVIVED' if survived else 'killed  '}  {mutant.name}", flush=True)
            survivors += [mutant.name] * survived
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
