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


# The name of each mutant, the text to replace, and what replaces it.
MUTANTS = {
    "kernels/triton_kernels.py": [
        ("sign of sin", "a * c - b * s", "a * c + b * s"),
        ("inverse is forward", "s = s * -1.0", "s = s * 1.0"),
        ("sign of 0 in the inverse", "s = s * -1.0", "s = 0.0 - s"),
        ("float64 in float32", "compute: tl.constexpr = tl.float64 if", "compute: tl.constexpr = tl.float32 if"),
        ("k by the programs of q", "            program - q_programs, k,", "            program, k,"),
        (
            "heads beyond the last",
            "here = (token < tokens) & (head < heads)\n    x_rows",
            "here = (token < tokens) & (head < heads + 1)\n    x_rows",
        ),
        (
            "tokens beyond the last",
            "here = (token < tokens) & (head < heads)\n    x_rows",
            "here = (token < tokens + 1) & (head < heads)\n    x_rows",
        ),
        (
            "pairs beyond the last",
            "        inside = here & (tl.arange(0, BLOCK_P)[None, None, :] < PAIRS)\n        tl.store",
            "        inside = here & (tl.arange(0, BLOCK_P)[None, None, :] < PAIRS + 1)\n        tl.store",
        ),
        ("rows of the batch share a table", "cos_rows = _rows(cos, batch,", "cos_rows = _rows(cos, 0 * batch,"),
        ("32-bit tokens", "token.to(tl.int64) * x_t", "token * x_t"),
        ("32-bit batch", "(rest // token_blocks).to(tl.int64)", "(rest // token_blocks)"),
        (
            "head copied to its offset only",
            "DENSE)\n        _copy(x_rows, y_rows, x_d, y_d, here, OFFSET + 2 * PAIRS, HEAD_DIM, BLOCK_P, DENSE)",
            "DENSE)",
        ),
        (
            "head not copied before its offset",
            "_copy(x_rows, y_rows, x_d, y_d, here, 0, OFFSET, BLOCK_P, DENSE)",
            "pass",
        ),
        ("gradient of the first block of heads", "for block in range(BLOCKS):", "for block in range(1):"),
        ("gradient to sin", "h * a - g * b", "h * a + g * b"),
        ("quadrant not rounded", "(phase + (1 << 61)) >> 62", "phase >> 62"),
        (
            "last coefficient",
            "u * 6.8874821400921976273e-12 + -1.7571791752800344071e-9",
            "u * 0.0 + -1.7571791752800344071e-9",
        ),
        (
            "cosine of Triton",
            "of_sin = tl.where((quadrant & 2)",
            "of_sin = tl.sin(phase.to(tl.float64) * 3.4061215800304893e-19)\n    of_sin = tl.where((quadrant & 8)",
        ),
        ("attention to the next token", "key[None, :] <= last_key", "key[None, :] <= last_key + 1"),
        ("attention of one query to the next token", "(key <= last_key)", "(key <= last_key + 1)"),
        ("attention one token before the window", "of_token - window + 1, 0)", "of_token - window, 0)"),
        ("attention without the factor of earlier keys", "sums *= factor[:, None]", "pass"),
        ("attention of parts with other maxima", "new_sums * new_factor[:, None]", "new_sums"),
        ("attention of lanes with other maxima", "tl.sum(weights * factor, axis=0", "tl.sum(weights, axis=0"),
        (
            "attention reads values behind the last key",
            "v_rows[:, None] + channel, mask=here[:, None] & inside",
            "v_rows[:, None] + channel, mask=inside",
        ),
        ("attention of sinks by near queries", "f_rows = far_q", "f_rows = q"),
        ("attention of sinks twice", "begin = tl.maximum(begin, front)", "pass"),
        ("attention of sinks instead of the window", "tl.maximum(part - front, 0)", "part"),
        ("attention to the next sink", "tl.minimum(last_sink, front - 1)", "front - 1"),
        ("attention over a part of the parts", "for start in range(0, splits, BLOCK_S)", "for start in range(1)"),
        ("attention counts keys that are not there", "tl.minimum(count, tl.load(counts", "(tl.load(counts"),
        ("attention in 32 bits", "RING) if RING else key).to(tl.int64)", "RING) if RING else key)"),
        ("NaN of 8 bits is a number", "bits ^= (bits + 0x80) & 0x4000", "bits &= -0x4001"),
        ("no scales of keys", "score *= k_scale[None, :]", "pass"),
        ("no scales of values", "weight *= v_scale[None, :]", "pass"),
        ("no scales of keys for one query", "score *= k_scale\n", "pass\n"),
        ("no scales of values for one query", "weight *= v_scale\n", "pass\n"),
        ("scales behind the last key", "slot * vs_t, mask=here, other=0.0", "slot * vs_t"),
        ("values of 8 bits in float16", "tl.bfloat16 if DOT", "tl.float16 if DOT"),
        ("step of 8 bits ignores NaN", "bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF", "bits = tl.abs(x)"),
        ("step of 8 bits without the rest of a head", "largest = tl.maximum(largest, _largest(z, rest))", "pass"),
        (
            "step of 8 bits without the second of pairs",
            "_largest(a, inside), _largest(b,",
            "_largest(a, inside), _largest(a,",
        ),
        (
            "step of 8 bits not rounded to the dtype",
            "    a, b = a.to(given), b.to(given)\n    if SCALED",
            "    if SCALED",
        ),
        ("step of 8 bits with tiny scales", "tl.where(scale < 2.0**-100, 2.0**-100, scale)", "scale"),
        ("step of e4m3 rounds half up", "size + 0x7FFFF + (size >> 20 & 1)", "size + 0x80000"),
        ("step of e4m3 without subnormal numbers", "tl.where(size < 0x3C800000, subnormal, normal)", "normal"),
        ("step of e4m3 without signs", "| (bits >> 24 & 0x80)", ""),
        ("step of int8 truncates", "code = (x + 1.5 * 2.0**23).to(tl.int32, bitcast=True)", "code = x.to(tl.int32)"),
        (
            "step of int8 in slots that do not exist",
            "tl.store(rows, scale, mask=there)",
            "tl.store(rows, scale, mask=here)",
        ),
    ],
    "kernels/gpu_plans.py": [
        ("fused products", '"enable_fp_fusion": False', '"enable_fp_fusion": True'),
        ("tables as wide as they come", "// (2 if interleaved else 1)", ""),
        (
            "unit of strides too large",
            "while any(stride % limit for stride in strides):",
            "while any(stride % limit for stride in strides[:3]):",
        ),
        ("strides without a unit", "unit = _unit(list(rows.values()), limit) if dense else 1", "unit = 1"),
        (
            "dense channels taken for granted",
            "dense = all(strides[-1] == 1 for strides in named.values())",
            "dense = True",
        ),
        ("dense tables taken for granted", "dense = cos[-1] == sin[-1] == 1 or shape[-1] == 1", "dense = True"),
        ("an only row of a table has a stride", "at < 0 or shape[at] == 1", "at < 0"),
        (
            "unit of an only row forgotten",
            "_unit([*cos[:-1], *sin[:-1]], limit",
            "_unit([c * (n > 1) for n, c in zip(shape, cos[:-1])], limit",
        ),
        ("nothing copied", '"COPY": not in_place', '"COPY": False'),
        (
            "attention with weights of 16 bits",
            "torch.float16: 2}.get(dtypes[3], 3)",
            "torch.float16: 1}.get(dtypes[3], 1)",
        ),
        ("narrow loads of 8 bits", "_VECTOR // dtypes[2].itemsize", "_VECTOR // dtype.itemsize"),
        ("step writes values of latent rows", "(2 if has_values else 1)", "2"),
        ("attention in TF32", '4, 2, "tf32x3")', '4, 2, "tf32")'),
        ("planned for any dtype", "[(x.dtype, x.stride()) for", "[(tensors[0].dtype, x.stride()) for"),
        ("small tiles", "tile.bytes // 2 // element_size", "16 // element_size // 2"),
    ],
}


def survives(path: str, name: str, old: str, new: str) -> bool:
    """Whether the tests pass in spite of a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "src"
        shutil.copytree(ROOT / "src", broken, ignore=shutil.ignore_patterns("__pycache__"))
        file = broken / "ropewalk" / path
        text = file.read_text()
        if old not in text:
            sys.exit(f"{name}: its text is not in {path}")
        file.write_text(text.replace(old, new, 1))  # in the rotation, which precedes the fused step
        # The finder of an editable install would lead back to src/.
        (broken / "sitecustomize.py").write_text(
            "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        )
        for also, tests in SUITES:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
            environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(broken), "OMP_NUM_THREADS": "1", **also}
            ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            if ran.returncode > 2:  # below 0: it wrote where it must not, and was stopped
                sys.exit(f"{name}: pytest could not run\n{ran.stdout}{ran.stderr}")
            if ran.returncode:
                return False
        return True


def main(words: list[str]) -> int:
    mutants = [(path, *mutant) for path, of_file in MUTANTS.items() for mutant in of_file]
    chosen = [mutant for mutant in mutants if not words or any(word in mutant[1] for word in words)]
    survivors = []
    with ThreadPoolExecutor(2) as pool:
        for (_, name, *_), survived in zip(chosen, pool.map(survives, *zip(*chosen, strict=True)), strict=True):
            print(f"{'SURVIVED' if survived else 'killed  '}  {name}", flush=True)
            survivors += [name] * survived
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
