"""Run transformers' own tests of a model with every model accelerated, and name the tests that only then fail.

    python tools/transformers_suite.py CHECKOUT llama qwen2_vl ...
    python tools/transformers_suite.py CHECKOUT --theirs llama

CHECKOUT is a clone of transformers at the installed version, whose wheel contains no tests. Run this after a change of
`ropewalk.integrations.transformers`. It takes some minutes for each family. Tests that need the hub, a GPU or several
devices skip themselves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Read by the plugin below, in the process of pytest.
ANGLES = "ROPEWALK_SUITE_ANGLES"


def pytest_configure(config: Any) -> None:
    """Accelerate each model when a test first moves it to a device or sets its mode, in the process of pytest."""
    if ANGLES not in os.environ:
        return
    from transformers import PreTrainedModel

    from ropewalk import RopeError
    from ropewalk.integrations.transformers import accelerate
    from ropewalk.integrations.transformers.modules import Angles

    config.accelerated, config.refused = 0, {}

    def accelerating(method: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            returned = method(self, *args, **kwargs)
            if not any(isinstance(module, Angles) for module in self.modules()):
                try:
                    accelerate(self, angles=os.environ[ANGLES])
                    config.accelerated += 1
                except RopeError as e:
                    reason = f"{type(self).__name__}: {e}"
                    config.refused[reason] = config.refused.get(reason, 0) + 1
            return returned

        return call

    for name in ("to", "train"):
        setattr(PreTrainedModel, name, accelerating(getattr(PreTrainedModel, name)))


def pytest_unconfigure(config: Any) -> None:
    """Print what was accelerated."""
    if ANGLES in os.environ:
        print(f"accelerated {config.accelerated} models", *(f"{n} × {e}" for e, n in config.refused.items()), sep="\n")


def run(checkout: Path, tests: list[str], angles: str | None) -> tuple[set[str], str]:
    """Run tests in their own process. Return the ids of those that failed, and the last lines that were printed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HF_HUB_OFFLINE": "1"}
    if angles is not None:
        environment[ANGLES] = angles
    plain = ("-q", "-p", "transformers_suite", "-o", "log_cli=false", "-rfE", "--tb=no")
    command = [sys.executable, "-m", "pytest", *plain, *tests]
    ran = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    said = [line for line in lines if line.startswith(("FAILED ", "ERROR ", "SUBFAILED"))]
    failed = {f"tests/{line.partition(' tests/')[2].split(' ')[0]}" for line in said}
    return failed, "\n".join(line for line in lines[-40:] if line not in said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("families", nargs="+")
    parser.add_argument("--theirs", action="store_true", help='use angles="theirs"')
    parser.add_argument("-k", default="", help="run only the tests that match, as in pytest")
    arguments = parser.parse_args()
    broken = 0
    for family in arguments.families:
        tests = sorted(str(path) for path in (arguments.checkout / "tests/models" / family).glob("test_modeling_*.py"))
        failed, said = run(arguments.checkout, [*tests, "-k", arguments.k], "theirs" if arguments.theirs else "exact")
        both = run(arguments.checkout, sorted(failed), None)[0] if failed else set()
        print(f"{family}: {said}")
        print(*(f"  fails only if accelerated: {name}" for name in sorted(failed - both)), sep="\n")
        broken += len(failed - both)
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
