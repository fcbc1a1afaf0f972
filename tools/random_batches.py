"""Compare positions.from_processor with get_rope_index of the installed transformers, on random batches of every model.

    python tools/random_batches.py                   1,000 batches of each model; several minutes on one core
    python tools/random_batches.py --count 50        fewer
    python tools/random_batches.py glm4v qwen2_vl    only these models

Each batch is padded to a multiple of 8. Its packed rows are compared with get_rope_index of each row alone. The status
is 1 if a batch differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recording import files, multimodal

from ropewalk.positions import from_processor


def differs(model: str, seed: int) -> str:
    """Return what differs for one random batch, or an empty string."""
    draw = random.Random(seed)
    config, rows, sound = multimodal.random_rows(model, draw)
    batch = multimodal.batch_of(rows, model, draw, multiple=8)
    placed = from_processor(config, batch)
    real = torch.tensor(batch["attention_mask"]).bool()
    theirs, deltas = multimodal.rope_index(model, config, batch, sound=sound)
    if not torch.equal(placed.positions[:, real], theirs[:, real]):
        return "positions"
    if not torch.equal(placed.next - real.sum(1), deltas):
        return "next"
    tensors = {key: torch.tensor(value) for key, value in batch.items() if key != "mm_token_type_ids"}
    if not torch.equal(from_processor(config, tensors).positions, placed.positions):
        return "positions without mm_token_type_ids"
    alone: list[Any] = []
    for row in rows:
        one = multimodal.batch_of([row], model, draw)
        one["attention_mask"] = [[1] * len(row.ids)]
        if "image_grid_thw" in one or "video_grid_thw" in one or model not in multimodal.OMNI:
            alone.append(multimodal.rope_index(model, config, one, sound=sound)[0][:, 0])
        else:
            alone.append(torch.arange(len(row.ids)).expand(3, -1))
    packed = torch.cat(alone, dim=1)
    if model == "hunyuan_vl":  # it counts the images of a batch, and not of a row
        packed[-1], placed.positions[-1] = 0, 0
    return "" if torch.equal(placed.positions[:, real], packed) else "packed positions"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=multimodal.MODELS)
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    files.quiet()
    wrong = 0
    for model in options.models:
        found = {seed: what for seed in range(options.count) if (what := differs(model, seed))}
        wrong += len(found)
        print(f"{model}: {options.count - len(found)} of {options.count} are equal", dict(list(found.items())[:3]))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
