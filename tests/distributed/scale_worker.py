"""The processes of tests/distributed/test_scale.py: `python scale_worker.py SIZE FOLDER`.

The last line of output is JSON: for each mesh, without and with activation checkpointing, the formulas and the count.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the folder of modules that tests share
sys.path.append(str(Path(__file__).parents[2] / "tools"))

import scale

import processes


def compare(rank: int, size: int) -> None:
    compared = []
    for data, context, tensor in ((1, 4, 1), (1, 2, 2), (2, 2, 1)):
        sizes = {"tokens": 64, "hidden": 64, "heads": 8, "kv_heads": 4}
        plan = scale.Plan(data=data, context=context, tensor=tensor, **sizes)
        meshes = scale.example.build_mesh("cpu", tensor, context)
        for recompute in (False, True):
            counted = scale.count(plan, *meshes, contextlib.nullcontext(), recompute=recompute).bytes
            formulas = scale.formulas(plan, recompute=recompute, fused_norm=False)
            compared.append(({name: number for name, number in formulas.items() if number}, counted))
    sys.stdout.write(json.dumps(compared))


if __name__ == "__main__":
    processes.main(compare)
