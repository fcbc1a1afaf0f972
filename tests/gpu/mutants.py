"""Break the GPU kernels and their plans one operator at a time, and see the tests of tests/gpu fail. Run by hand.

    python tests/gpu/mutants.py 40            40 mutants, two at a time
    python tests/gpu/mutants.py 40 7          others, of another seed
    python tests/gpu/mutants.py 40 7 attend   those in functions whose names contain the word

For Python outside of kernels, a mutation tester makes such changes (CONTRIBUTING.md). It cannot change code that Triton
compiles. Each mutant is a copy of src/ with one change. A mutant that survives computes the same, or no test sees it.
"""

from __future__ import annotations

import ast
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "ropewalk" / "kernels"
FILES = ("triton_kernels.py", "gpu_plans.py")
# Without a GPU: in Triton's interpreter, then what was compiled, what asks for it, and what is launched.
SUITES = [
    ({"TRITON_INTERPRET": "1"}, "tests/gpu/test_kernels.py"),
    ({"TRITON_INTERPRET": "1"}, "tests/gpu/test_attend.py"),
    ({"TRITON_INTERPRET": "1"}, "tests/gpu/test_step.py"),
    ({}, "tests/gpu/test_compiled.py"),
    ({}, "tests/gpu/test_launch.py"),
]
OTHER: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


def change(node: ast.AST) -> bool:
    """Change an operator, a number, a flag or a mask in place. Return whether the node is one of these."""
    if isinstance(node, ast.BinOp) and type(node.op) in OTHER:
        node.op = OTHER[type(node.op)]()
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OTHER:
        node.ops = [OTHER[type(node.ops[0])]()]
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.keyword) and node.arg == "mask":
        node.value = ast.Constant(None)
    else:
        return False
    return True


def places(text: str, word: str) -> list[int]:
    """Return the numbers of the nodes that can be changed, inside of functions whose names contain the word."""
    tree = ast.parse(text)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and word in function.name
        for statement in function.body
        for node in ast.walk(statement)
    }
    return [n for n, node in enumerate(ast.walk(tree)) if id(node) in inside and change(node)]


def mutant(text: str, place: int) -> tuple[str, str]:
    """Return the line, what was there and what is there now, and the code with the change."""
    tree = ast.parse(text)
    node = list(ast.walk(tree))[place]
    before = ast.unparse(node)
    change(node)
    return f"{getattr(node, 'lineno', '')}: {before} becomes {ast.unparse(node)}", ast.unparse(
        ast.fix_missing_locations(tree)
    )


def survives(file: str, name: str, code: str) -> bool:
    """Whether the tests pass in spite of a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "src"
        shutil.copytree(ROOT / "src", broken, ignore=shutil.ignore_patterns("__pycache__"))
        (broken / "ropewalk" / "kernels" / file).write_text(code, "utf-8")
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


def main(count: int, seed: int = 0, word: str = "") -> int:
    texts = {file: (SOURCE / file).read_text("utf-8") for file in FILES}
    every = [(file, place) for file, text in texts.items() for place in places(text, word)]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    made = [(file, *mutant(texts[file], place)) for file, place in chosen]
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for (file, name, _), survived in zip(made, pool.map(survives, *zip(*made, strict=True)), strict=True):
            print(f"{'SURVIVED' if survived else 'killed  '}  {file}:{name}", flush=True)
            survivors += survived
    print(f"{len(made) - survivors} of {len(made)} killed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), *sys.argv[3:]))
