"""One process of tests/parallel/test_context.py: `python context_parallel_worker.py RANK SIZE RENDEZVOUS`.

Each rank has some of 40 tokens. Two layers are compared with the whole sequence, which every rank computes in float64
by written-out formulas. The last line of output is JSON: each check with its error.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attention_oracle as written_out
import processes
from cache_model import EXACT, HEADS, HIDDEN, KV_HEADS, MODEL, ROPES
from ropewalk import RopeError
from ropewalk.parallel import ContextParallel
from ropewalk.positions import context_parallel

SEQ, WINDOW = 40, 7
DOCUMENTS = {
    "whole": (SEQ,),
    "packed": (5, 1, 25),
    "cut by itself": (8, 16, 16),
}  # the packed documents are followed by padding
PARAMETERS = [parameter for layer in MODEL for parameter in layer.parameters()]
ORDERS = ("contiguous", "head-tail", "striped")


def row(documents: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the document of each token and its position in the document. Padding forms one more document."""
    lengths = [*documents, SEQ - sum(documents)]
    return [d for d, n in enumerate(lengths) for _ in range(n)], [i for n in lengths for i in range(n)]


def inputs(batch: int) -> tuple[Tensor, Tensor]:
    """Return the hidden states, and the weights with which the outputs are summed to the loss."""
    x, factor = torch.randn(2, batch, SEQ, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, factor


def differentiated(out: Tensor, factor: Tensor, x: Tensor) -> list[Tensor]:
    """Return the gradients of the loss to x and to each parameter."""
    return list(torch.autograd.grad((out * factor).sum(), [x, *PARAMETERS]))


@functools.cache
def wanted(documents: str, rope: str, window: int, batch: int) -> tuple[Tensor, list[Tensor]]:
    """Return the output of the whole sequence on one rank, and its gradients."""
    document, position = row(DOCUMENTS[documents])
    seen = [[j <= i < j + window and document[i] == document[j] for j in range(SEQ)] for i in range(SEQ)]
    x, factor = inputs(batch)
    out = x.requires_grad_()
    for layer in MODEL:
        weights = dict(layer.named_parameters())
        at = written_out.pairs(torch.tensor(position))
        attended = written_out.attention(
            out, weights, heads=HEADS, kv_heads=KV_HEADS, rotary=ROPES[rope][1], at=at, seen=torch.tensor(seen)
        )
        out = out + attended
    return out.detach(), differentiated(out, factor, x)


def check(
    places: Tensor,
    documents: str,
    *,
    rope: str = "default",
    window: int = SEQ,
    batch: int = 2,
    compiled: bool = False,
) -> None:
    """Compare outputs and gradients of this rank's tokens, and the gradients of parameters, summed over the ranks."""
    ends = torch.tensor([sum(DOCUMENTS[documents][:i]) for i in range(len(DOCUMENTS[documents]) + 1)])
    described = ROPES[rope][0]
    positions = torch.tensor(row(DOCUMENTS[documents])[1])[places]
    rotation = None if described is None else described.at(positions, dtype=torch.float64)
    context = ContextParallel(places, cu_seqlens=None if documents == "whole" else ends)
    near = (context.places[:, None] - context.key_places < window)[None, None]
    x, factor = (part[:, places] for part in inputs(batch))
    out = x.requires_grad_()
    for layer in MODEL:
        run: Any = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        out = out + run(out, rotation, cache=context, mask=None if window == SEQ else near)
    ours = differentiated(out, factor, x)
    for gradient in ours[1:]:
        dist.all_reduce(gradient)
    outputs, gradients = wanted(documents, rope, window, batch)
    assert type(out) is Tensor  # not a subclass that waits for a collective
    for mine, theirs in zip([out, *ours], [outputs[:, places], gradients[0][:, places], *gradients[1:]], strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


def checks(rank: int, size: int) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for order in ORDERS:
        places = context_parallel(SEQ, rank, size, order)  # type: ignore[arg-type]
        for documents in ("whole", "packed"):
            found[f"{order}, {documents}"] = functools.partial(check, places, documents)
        found[f"{order}, a mask"] = functools.partial(check, places, "whole", window=WINDOW)
    alone = [begin + context_parallel(n, rank, size, "head-tail") for begin, n in ((0, 8), (8, 16), (24, 16))]
    found["each document by itself"] = functools.partial(check, torch.cat(alone), "cut by itself")
    any_order = torch.randperm(SEQ, generator=torch.Generator().manual_seed(0)).chunk(size)[rank]
    found["any order"] = functools.partial(check, any_order, "packed", rope="YaRN, partial", window=WINDOW)
    found["int32, not rotated"] = functools.partial(check, any_order.int(), "packed", rope="none")
    found["one row"] = functools.partial(check, any_order, "whole", batch=1)
    if size == 2:  # compilation is slow, and the graph does not depend on the number of ranks
        found["compiled"] = functools.partial(check, any_order, "packed", compiled=True)
    return found


def refused(places: Tensor, message: str, documents: tuple[int, ...] | None = None) -> None:
    """Check that every rank raises, so that no rank waits for the others."""
    with pytest.raises(RopeError, match=re.escape(f"ContextParallel: {message}")):
        ContextParallel(places, cu_seqlens=None if documents is None else torch.tensor(documents))


def refusals(rank: int, size: int) -> dict[str, Callable[[], None]]:
    own, packed = context_parallel(SEQ, rank, size, "head-tail"), torch.tensor([0, 5, SEQ])
    positions = context_parallel(SEQ, rank, size, "head-tail", packed)
    counts = [SEQ // size - 1] + [SEQ // size] * (size - 1)
    each_once = f"the places of all ranks together must be 0 to {SEQ - 1}, each once, got place"
    return {
        "the places of rank 0 on every rank": lambda: refused(
            torch.arange(SEQ // size), f"{each_once} 0 more than once"
        ),
        "positions of packed documents": lambda: refused(positions, f"{each_once} 0 more than once", (0, 5, SEQ)),
        "places outside the sequence": lambda: refused(own + 100, f"{each_once} 100.", (0, 5, SEQ)),
        "negative places": lambda: refused(own - 1, f"{each_once} -1."),
        "numbers of tokens": lambda: refused(
            own[: counts[rank]], f"every rank must have the same number of tokens, got {counts} from rank 0 on."
        ),
    }


def main(rank: int, size: int) -> None:
    wrong = {}
    for name, run in {**checks(rank, size), **refusals(rank, size)}.items():
        try:
            run()
        except Exception as e:  # continue with the other checks
            wrong[name] = f"{type(e).__name__}: {e}"
        else:
            wrong[name] = ""
    sys.stdout.write(f"{json.dumps(wrong)}\n")


if __name__ == "__main__":
    processes.main(main)
