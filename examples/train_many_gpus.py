"""Train a small language model on many GPUs with FSDP2 and, optionally, tensor and context parallelism.

    torchrun --nproc-per-node 8 examples/train_many_gpus.py --tensor 2 --context 2

The ranks form a mesh with three axes, context × data × tensor. The axis `data` divides the rows of the batch over the
ranks, `tensor` the heads of each layer, and `context` the tokens of each row. The size of `data` is the number of ranks
divided by the sizes of the other two axes. Without a GPU, the script runs on the CPU with gloo. Up to rounding, the
losses do not depend on the mesh.

The model learns the bytes of any file (`--text`).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ropewalk
from ropewalk.parallel import ContextParallel, HeadwiseParallel


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.attention = ropewalk.RotaryAttention(hidden, heads, num_kv_heads=kv_heads, qk_norm=1e-6)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor, rotation: ropewalk.Rotation, context: ContextParallel | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, cache=context)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(
        self, tokens: Tensor, labels: Tensor, rotation: ropewalk.Rotation, context: ContextParallel | None
    ) -> Tensor:
        """The mean loss over the tokens of this rank."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotation, context)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shard heads, hidden channels and, in the norms, the sequence over `tensor`; then all parameters by FSDP2."""
    if mesh["tensor"].size() > 1:
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.attention_norm": SequenceParallel(),
            "blocks.*.attention": HeadwiseParallel(sequence_parallel=True),
            "blocks.*.mlp_norm": SequenceParallel(),
            "blocks.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], plan)
    # A Rotation stays float32 under this policy. Gradients are computed in bfloat16. They are summed over the
    # ranks in float32.
    on_gpu = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = on_gpu if mesh.device_type == "cuda" else MixedPrecisionPolicy()
    # FSDP2 shards over `context` as well, as one axis with `data`: over two axes, it would copy along the first.
    ranks = mesh["context", "data"]._flatten("fsdp")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=ranks, mp_policy=policy)


def batch(text: Tensor, step: int, rows: int, seq: int) -> Tensor:
    """Random rows of seq + 1 bytes, `[rows, seq + 1]`, the same on every rank."""
    starts = torch.randint(len(text) - seq, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + seq + 1] for start in starts.tolist()])


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    data = dist.get_world_size() // (options.tensor * options.context)
    shape = (options.context, data, options.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("context", "data", "tensor"))

    torch.manual_seed(0)  # every rank begins with the same parameters
    model = LanguageModel(options.layers, options.hidden, options.heads, options.kv_heads).to(device)
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    rope = ropewalk.Rope(head_dim=options.hidden // options.heads, base=10_000.0, pairing="half")
    group = mesh["context"].get_group()
    text = torch.frombuffer(bytearray(Path(options.text).read_bytes()), dtype=torch.uint8).long()
    for step in range(options.steps):
        tokens = batch(text, step, options.rows, options.seq).chunk(data)[mesh.get_local_rank("data")]
        context = ContextParallel(options.seq, group, device=device)
        inputs, labels = (tokens.to(device)[:, context.places + shift] for shift in (0, 1))
        rotation = rope.at(context.positions)  # for all tokens that attention on this rank receives
        loss = model(inputs, labels, rotation, context if options.context > 1 else None)
        optimizer.zero_grad()
        loss.backward()
        # With --tensor, PyTorch logs once that it reduces the norm over one axis of the mesh after another.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        mean = loss.detach()
        dist.all_reduce(mean)  # the ranks along `tensor` have the same loss
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.5f}", flush=True)
    if options.save is not None:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        checkpoint.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=options.save)
    dist.destroy_process_group()


def find_problem(options: argparse.Namespace) -> str | None:
    """Return the error message for options that do not fit the number of processes, or None."""
    ranks, shared = int(os.environ.get("WORLD_SIZE", "0")), options.tensor * options.context
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not ranks:
        return "start it with torchrun, e.g. torchrun --nproc-per-node 8 examples/train_many_gpus.py"
    if ranks % shared:
        return f"--tensor {options.tensor} times --context {options.context} must divide the {ranks} processes"
    if options.rows % (ranks // shared):
        return f"--rows {options.rows} must be a multiple of {ranks // shared}, the processes along `data`"
    if options.hidden % (2 * options.heads):
        return f"--hidden {options.hidden} must be a multiple of {2 * options.heads}, which is 2 times --heads"
    for name, divisor in (("--kv-heads", options.kv_heads), ("--tensor", options.tensor)):
        if options.heads % divisor:
            return f"--heads {options.heads} must be a multiple of {name} {divisor}"
    if options.seq % (2 * shared):
        return f"--seq {options.seq} must be a multiple of {2 * shared}, which is 2 times --tensor times --context"
    if not Path(options.text).is_file():
        return f"--text must be a file, got {options.text}"
    if (size := Path(options.text).stat().st_size) <= options.seq:
        return f"--text must have more bytes than --seq {options.seq}, got {size} in {options.text}"
    if torch.cuda.is_available() and on_machine > torch.cuda.device_count():
        return f"each process needs its own GPU, got {on_machine} processes for {torch.cuda.device_count()} GPUs"
    return None


def positive(text: str) -> int:
    """Parse an option that counts something."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=positive, default=1, help="ranks that share the heads of each layer")
    parser.add_argument("--context", type=positive, default=1, help="ranks that share the tokens of each row")
    parser.add_argument("--text", default=__file__, help="a file to learn [this script]")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--rows", type=positive, default=16, help="rows of a batch, in total over all ranks")
    parser.add_argument("--seq", type=positive, default=512, help="tokens in a row")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hidden", type=positive, default=512)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--kv-heads", type=positive, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--save", help="folder for a checkpoint, which is written after the last step")
    options = parser.parse_args()
    if (problem := find_problem(options)) is not None:
        parser.error(problem)
    train(options)


if __name__ == "__main__":
    main()
