"""The kernels called from plain C: build csrc/examples/rotate.c and the program of docs/from-c.md."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import oracle
from toolchain import CC, configure, output

HEAD_DIM, HEADS, KV_HEADS, TOKENS, BASE = 10, 4, 2, 3, 10000.0

# A component is a·c − b·s with |a|, |b| ≤ 1.5. Rounded to float32: cos and sin (2⁻²⁵ each), the products and the
# difference (2⁻²⁴ of them). The error of the angle is at most the position, below 2²⁰, times 2⁻⁵², where a
# long double has 53 bits; the oracle takes the frequency as a float64 too.
ROTATED = 2 * 1.5 * 2**-25 + 2 * 1.5 * 2**-24 + 1.5 * 2**0.5 * (2**-24 + 2**-32)
# A score sums HEAD_DIM products of such numbers, no greater than 1.5·√2, and rounds each product and each sum.
SCORE = HEAD_DIM * (2 * ROTATED * 1.5 * 2**0.5 + ROTATED**2 + (HEAD_DIM + 1) * 2**-24 * 2 * 1.5**2)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("core")
    configure(build, f"-DCMAKE_RUNTIME_OUTPUT_DIRECTORY={build}")
    output("cmake", "--build", build, "--target", "rotate", "--parallel", "2")
    return build / "rotate"


@pytest.mark.parametrize("first", [0, 1_000_000])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_example_agrees_with_the_oracle(example: Path, pairing: str, first: int) -> None:
    printed: dict[str, list[list[float]]] = defaultdict(list)
    for line in output(example, pairing, str(first)).splitlines():
        name, _, _, *values = line.split()
        printed[name].append([float(value) for value in values])
    q, k = (np.array(printed[name]).reshape(TOKENS, -1, HEAD_DIM) for name in "qk")

    # The inputs of the example, by the formulas in its source.
    token, i = np.arange(TOKENS)[:, None], np.arange(HEADS * HEAD_DIM)
    q0 = ((7 * i + 3 * token) % 11 - 5).reshape(TOKENS, HEADS, HEAD_DIM) / 4
    i = i[: KV_HEADS * HEAD_DIM]
    k0 = ((5 * i + 2 * token) % 13 - 6).reshape(TOKENS, KV_HEADS, HEAD_DIM) / 4
    angles = oracle.reduced(range(first, first + TOKENS), oracle.inv_freq(BASE, HEAD_DIM))[:, None]

    exact_q, exact_k = oracle.rotate(q0, angles, pairing), oracle.rotate(k0, angles, pairing)
    np.testing.assert_allclose(q, exact_q, rtol=0, atol=ROTATED)
    np.testing.assert_allclose(k, exact_k, rtol=0, atol=ROTATED)

    scores = iter(printed["scores"])
    for now in range(TOKENS):
        for head in range(HEADS):
            exact = exact_k[: now + 1, head * KV_HEADS // HEADS] @ exact_q[now, head]
            np.testing.assert_allclose(next(scores), exact, rtol=0, atol=SCORE)
    assert next(scores, None) is None


def test_the_program_of_the_page(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands run in other folders than the clone's, and what the example has built is not built again."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "from-c.md").read_text("utf-8")
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (program,) = re.findall(r"^```c\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "decode.c").write_text(program)
    monkeypatch.chdir(root)
    commands = re.sub(r" build(?=[/ ])", f" {example.parent}", re.sub(r"\bdecode\b", f"{tmp_path}/decode", commands))
    output("sh", "-ec", commands.replace("cc ", f"{CC} -Wall -Wextra -Werror ", 1))
    k = np.array(output(tmp_path / "decode").split(), float).reshape(1, 8, 128)
    angles = oracle.reduced([100_000], oracle.inv_freq(500_000.0, 128))[:, None]
    exact = oracle.rotate((np.arange(8 * 128) % 5).reshape(1, 8, 128), angles, "interleaved")
    np.testing.assert_allclose(k, exact, rtol=0, atol=4 / 1.5 * ROTATED)


def test_example_rejects_an_unknown_pairing(example: Path) -> None:
    result = subprocess.run([example, "both"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "interleaved or half" in result.stderr
