"""Print the table of docs/context-parallel.md: what one step sends and holds on a rank of 8, 64 or 1,024 ranks.

    python tools/scale.py

`formulas` computes the numbers of one layer of examples/train_many_gpus.py, with the sizes of an 8B model, from these
sizes: FSDP2 over data × context, HeadwiseParallel over tensor, ContextParallel over context. Not included: the
embedding, the head and the loss, and what exists only while an operator runs. tests/distributed/test_scale.py counts
the same bytes while one rank runs the layer.

A rank sends of its data, if it takes part with P ranks in an all-gather: P − 1 times; in a reduce-scatter: (P − 1) / P;
in an all-reduce: twice that. The ring sends to one rank at a time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """A mesh data × context × tensor, and sizes of a model. Each rank along `data` has one row of `tokens` tokens."""

    tokens: int = 2**20
    data: int = 1
    context: int = 64
    tensor: int = 1
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8

    @property
    def ranks(self) -> int:
        return self.data * self.context * self.tensor


PLANS = (Plan(tokens=2**17, context=8), Plan(), Plan(data=2, tensor=8))


def formulas(plan: Plan, *, recompute: bool, fused_norm: bool = True) -> dict[str, int]:
    """Return the bytes that a rank sends and holds for one layer. bfloat16 has 2 bytes, and float32 has 4.

    Args:
        recompute: whether activation checkpointing computes each layer again in the backward pass.
        fused_norm: whether an RMSNorm keeps only its input and one number for each token, as PyTorch's kernel for GPUs
            does. On the CPU it keeps two copies of the input in float32 instead.
    """
    tokens = plan.tokens // plan.context  # of this rank in attention and in the MLP
    between = tokens // plan.tensor  # of this rank between the two, because the plan is sequence parallel
    q, inner, head_dim = plan.hidden // plan.tensor, 4 * plan.hidden // plan.tensor, plan.hidden // plan.heads
    kv = plan.kv_heads * head_dim // plan.tensor
    fsdp, norms = plan.data * plan.context, 2 * plan.hidden + 2 * head_dim
    parameters = 2 * plan.hidden * (q + kv + inner) + norms
    ring = 2 * tokens * kv * (plan.context - 1)  # k and v, to all other ranks
    ring_home = 2 * tokens * kv * plan.context  # their gradients, to all other ranks and back
    sequence = 4 * between * plan.hidden * (plan.tensor - 1)  # two all-gathers and two reduce-scatters
    of_norms = 2 * norms * (plan.tensor - 1) // plan.tensor  # the all-reduce of their gradients
    in_norms = between * (2 * plan.hidden * (2 if fused_norm else 8) + 2 * 4)
    in_attention = 2 * tokens * (plan.hidden + 3 * q + 3 * kv) + 4 * tokens * plan.heads // plan.tensor
    in_mlp = 2 * tokens * (plan.hidden + 2 * inner)
    return {
        "context forward": 2 * ring,
        "context backward": 2 * ring + 4 * ring_home + recompute * 2 * ring,
        "fsdp forward": 2 * parameters * (fsdp - 1) // fsdp,
        "fsdp backward": (2 + 4) * parameters * (fsdp - 1) // fsdp,
        "tensor forward": 2 * sequence,
        # PyTorch recomputes all but the last reduce-scatter, whose result nothing needs.
        "tensor backward": 2 * sequence + 2 * of_norms + recompute * 2 * sequence * 3 // 4,
        "held": 2 * between * plan.hidden if recompute else in_norms + in_attention + in_mlp,
        "parameters": 4 * parameters // fsdp,
    }


def table() -> str:
    """Return the table of docs/context-parallel.md, in MiB."""
    plain, again = ([formulas(plan, recompute=recompute) for plan in PLANS] for recompute in (False, True))
    rows = (
        ("keys and values sent, forward", again, ["context forward"]),
        ("with their gradients, backward", again, ["context backward"]),
        ("sent by FSDP2", again, ["fsdp forward", "fsdp backward"]),
        ("sent by tensor parallel", again, ["tensor forward", "tensor backward"]),
        ("kept for the backward pass", again, ["held"]),
        ("without checkpointing", plain, ["held"]),
        ("parameters, gradients, AdamW", again, 4 * ["parameters"]),
    )
    lines = [
        ["MiB", *(f"{plan.tokens:,} tokens, {plan.ranks:,} ranks" for plan in PLANS)],
        ["---", *len(PLANS) * ["---:"]],
    ]
    for name, columns, keys in rows:
        lines.append([name, *[f"{sum(one[key] for key in keys) / 2**20:,.0f}" for one in columns]])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(table(), end="")
