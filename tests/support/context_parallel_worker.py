"""The processes of tests/parallel/test_context.py: `python context_parallel_worker.py SIZE FOLDER`.

Each rank has some of 48 tokens. Two layers are compared with the whole sequence, which every rank computes in float64
by written-out formulas. The last line of output is JSON: each check with its error.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import _functional_collectives as collectives

import attention_oracle as written_out
import oracle
import processes
from attention_oracle import Rotary
from cache_model import EXACT, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MODEL, ROPES
from ropewalk import Axes, Rope
from ropewalk.parallel import ContextParallel

SEQ, WINDOW = 48, 7
DOCUMENTS = {
    "whole": (SEQ,),
    "packed": (5, 0, 1, 25),  # followed by padding
    "multiples": (8, 0, 24),
}
PARAMETERS = [parameter for layer in MODEL for parameter in layer.parameters()]
GRID = torch.randint(0, 50, (2, SEQ), generator=torch.Generator().manual_seed(2))


class OfAxes(Rotary):
    """Rotates token i to the positions GRID[:, i]: the first pair by the first axis, the others by the second."""

    def angles(self, positions: Tensor) -> Tensor:
        return torch.stack(
            [GRID[axis][positions].double() * float(w) for axis, w in zip((0, 1, 1), self.speeds, strict=True)], -1
        )


AXES = (
    Rope(HEAD_DIM, 1e4, "half", axes=Axes((0, 1, 1))),
    OfAxes(oracle.inv_freq(1e4, HEAD_DIM), "half"),
)


def row(documents: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the document of each token and its position in the document. Padding forms one more document."""
    lengths = [*documents, SEQ - sum(documents)]
    return [d for d, n in enumerate(lengths) for _ in range(n)], [i for n in lengths for i in range(n)]


def cu_seqlens(documents: str) -> Tensor | None:
    lengths = torch.tensor(DOCUMENTS[documents])
    return None if documents == "whole" else torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def visible(documents: str, window: int = SEQ) -> Tensor:
    document, _ = row(DOCUMENTS[documents])
    return torch.tensor([[j <= i < j + window and document[i] == document[j] for j in range(SEQ)] for i in range(SEQ)])


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
    position = list(range(SEQ)) if rope == "axes" else row(DOCUMENTS[documents])[1]
    x, factor = inputs(batch)
    out = x.requires_grad_()
    for layer in MODEL:
        rotary, at = AXES[1] if rope == "axes" else ROPES[rope][1], written_out.pairs(torch.tensor(position))
        out = out + written_out.of_layer(layer, out, rotary, at, seen=visible(documents, window))
    return out.detach(), differentiated(out, factor, x)


def rotation_of(context: ContextParallel, rope: str) -> Any:
    if rope == "axes":
        return AXES[0].at(GRID[..., context.places], dtype=torch.float64)
    described = ROPES[rope][0]
    return None if described is None else described.at(context.positions, dtype=torch.float64)


def check(order: Any, documents: str, *, rope: str = "default", batch: int = 2, run: Any = None) -> None:
    """Compare outputs and gradients of this rank's tokens, and the gradients of parameters, summed over the ranks."""
    context = ContextParallel(SEQ, order=order, cu_seqlens=cu_seqlens(documents))
    rotation, places = rotation_of(context, rope), context.places
    x, factor = (part[:, places] for part in inputs(batch))
    out = x.requires_grad_()
    for layer in MODEL:
        out = out + (layer if run is None else run(layer))(out, rotation, cache=context)
    ours = differentiated(out, factor, x)
    for gradient in ours[1:]:
        dist.all_reduce(gradient)
    outputs, gradients = wanted(documents, rope, SEQ, batch)
    assert type(out) is Tensor  # not a subclass that waits for a collective
    for mine, theirs in zip([out, *ours], [outputs[:, places], gradients[0][:, places], *gradients[1:]], strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@torch.no_grad()
def windowed(order: Any, documents: str) -> None:
    """A mask of the user restricts attention to a window. FlexAttention has no backward pass on the CPU."""
    context = ContextParallel(SEQ, order=order, cu_seqlens=cu_seqlens(documents))
    mask = context.block_mask(lambda row, head, query, key: query - key < WINDOW)
    x, rotation = inputs(2)[0][:, context.places], rotation_of(context, "default")
    for layer in MODEL:
        x = x + layer(x, rotation, cache=context, mask=mask)
    with torch.enable_grad():
        right, _ = wanted(documents, "default", WINDOW, 2)
    torch.testing.assert_close(x, right[:, context.places], **EXACT)


def compiled() -> None:
    """Both layers are one graph, also with new objects in each step. Another number of rectangles adds one graph."""
    counter = CompileCounterWithBackend("aot_eager")
    run = functools.cache(lambda layer: torch.compile(layer, backend=counter, fullgraph=True))
    graphs = []
    for documents in ("packed", "packed", "whole", "multiples", "packed"):
        check("head-tail", documents, run=run)
        graphs.append(counter.frame_count)
    assert graphs in ([1, 1, 2, 2, 2], [1, 1, 1, 1, 1]), graphs


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and the weights of the outputs in the loss."""
    generator = torch.Generator().manual_seed(3)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(2, SEQ, n, 8, dtype=torch.float64, generator=generator).to(dtype) for n in heads]


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def in_bfloat16() -> None:
    """The kernel rounds the weights of the softmax, the output of a step and the sum, each to 2⁻⁹ of the largest v."""
    *exact, weights = (x.double() for x in tensors(torch.bfloat16))
    exact = [x.requires_grad_() for x in exact]
    right = dense(*exact, visible("packed"))
    context = ContextParallel(SEQ, cu_seqlens=cu_seqlens("packed"))
    local = [x.detach()[:, context.places].bfloat16().requires_grad_() for x in exact]
    out = context.attend(*local)
    torch.testing.assert_close(
        out.double(), right[:, context.places], rtol=0, atol=3 * 2**-9 * exact[2].abs().max().item()
    )
    theirs = torch.autograd.grad((right * weights).sum(), exact)
    ours = torch.autograd.grad((out * weights[:, context.places]).sum(), local)
    for mine, other in zip(ours, theirs, strict=True):  # measured: 3.5e-2 in gradients of size 5
        torch.testing.assert_close(mine.double(), other[:, context.places], rtol=0, atol=7e-2)


def bytes_kept(size: int) -> None:
    """What a layer keeps for the backward pass: q, k, v and out, the sums, and 48 bytes for each rectangle."""
    heads, kv_heads, head_dim = 2, 1, 8
    for tokens in (2048, 4096, 8192):
        for ends in (None, [0, tokens // 3, size * tokens - 5]):
            kept: dict[int, int] = {}

            def keep(saved: Tensor, kept: dict[int, int] = kept) -> Tensor:
                kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
                return saved

            context = ContextParallel(size * tokens, cu_seqlens=ends)
            q, k, v = (torch.randn(1, tokens, n, head_dim, requires_grad=True) for n in (heads, kv_heads, kv_heads))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
                context.attend(q, k, v)
            total = sum(kept.values())
            of_rectangles = total - tokens * 4 * (2 * (heads + kv_heads) * head_dim + heads)
            assert of_rectangles % 48 == 0, total
            assert 0 < of_rectangles // 48 <= 2 * size + 4, of_rectangles


def bytes_sent(size: int) -> None:
    """Keys and values go round once in each pass, and their gradients once in float32, back to their rank."""
    for dtype in (torch.float32, torch.bfloat16):
        sent: list[int] = []

        def send(x: Tensor, *rest: Any, sent: list[int] = sent, original: Any = collectives.permute_tensor) -> Tensor:
            sent.append(x.numel() * x.element_size())
            result: Tensor = original(x, *rest)
            return result

        context = ContextParallel(SEQ)
        q, k, v, weights = (x[:, context.places].requires_grad_() for x in tensors(dtype))
        numbers = k.numel() + v.numel()
        with patch.object(collectives, "permute_tensor", send):
            out = context.attend(q, k, v)
            assert sent == [numbers * dtype.itemsize] * (size - 1)
            sent.clear()
            (out * weights).sum().backward()
        assert sum(sent) == (size - 1) * numbers * dtype.itemsize + size * numbers * 4


def checks(size: int) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for order in ("contiguous", "head-tail"):
        for documents in ("whole", "packed"):
            found[f"{order}, {documents}"] = functools.partial(check, order, documents)
        found[f"{order}, a window"] = functools.partial(windowed, order, "packed")
    found["per-document"] = functools.partial(check, "per-document", "multiples")
    found["per-document, a window"] = functools.partial(windowed, "per-document", "multiples")
    found["one row, YaRN, partial"] = functools.partial(check, "head-tail", "packed", rope="YaRN, partial", batch=1)
    found["not rotated"] = functools.partial(check, "contiguous", "packed", rope="none")
    found["several axes"] = functools.partial(check, "head-tail", "packed", rope="axes")
    found["bfloat16"] = in_bfloat16
    found["bytes sent"] = functools.partial(bytes_sent, size)
    if size == 2:  # compilation is slow, and the graph does not depend on the number of ranks
        found["compiled"] = compiled
    else:
        found["bytes kept"] = functools.partial(bytes_kept, size)
    return found


def main(_: int, size: int) -> None:
    wrong = {}
    for name, run in checks(size).items():
        try:
            run()
        except Exception as e:  # continue with the other checks
            wrong[name] = f"{type(e).__name__}: {e}"
        else:
            wrong[name] = ""
    sys.stdout.write(f"{json.dumps(wrong)}\n")


if __name__ == "__main__":
    processes.main(main)
