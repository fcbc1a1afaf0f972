"""Train a language model on many GPUs: FSDP2, tensor and context parallel, checkpoints that any mesh resumes.

    torchrun --nproc-per-node 8 examples/train_many_gpus.py --tensor 2 --context 2 --checkpoint runs/first

The ranks form a mesh with three axes, data × context × tensor. The axis `data` divides the rows of the batch over the
ranks, `context` the tokens of each row, and `tensor` the heads, the hidden channels and the vocabulary. FSDP2 divides
the parameters over `data` and `context`. The size of `data` is the number of ranks divided by the sizes of the other
two axes. Up to rounding, the losses do not depend on the mesh. Without a GPU, the script runs on the CPU with gloo.

If the script is stopped, the same command resumes from the last checkpoint, also with another number of processes or
another mesh. The model, --steps and --learning-rate must be those of the checkpoint, since the learning rate of each
step depends on them. Several machines need a `--checkpoint` that they share. The model learns the bytes of any file
(`--text`).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor.parallel as tp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

import ropewalk
from ropewalk.parallel import ContextParallel, attention_plan


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.attention = ropewalk.RotaryAttention(hidden, heads, num_kv_heads=kv_heads, qk_norm=1e-6)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotation: ropewalk.Rotation, context: ContextParallel | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, cache=context)
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, hidden)  # of bytes
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens: Tensor, rotation: ropewalk.Rotation, context: ContextParallel | None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotation, context)
        return self.head(self.norm(x))

    @torch.no_grad()
    def init_weights(self, device: torch.device) -> None:
        """Draw each whole parameter on every rank, from equal generators, and keep this rank's shard of it."""
        generator = torch.Generator(device).manual_seed(0)
        for parameter in self.parameters():
            whole = torch.ones(parameter.shape, device=device)
            if parameter.ndim > 1:  # all but the weights of norms
                whole.normal_(std=0.02, generator=generator)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


def build_mesh(device_type: str, tensor: int, context: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh data × context × tensor, and data × context as one axis, for FSDP2."""
    shape = (dist.get_world_size() // (tensor * context), context, tensor)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "context", "tensor"))
    mesh._flatten("ranks")  # lets DTensor reduce the gradient norm over all ranks at once
    return mesh, mesh["data", "context"]._flatten("fsdp")


def parallelize(
    model: LanguageModel, mesh: DeviceMesh, fsdp: DeviceMesh, dtype: torch.dtype, *, recompute: bool, compiled: bool
) -> None:
    """Shard a model on the meta device: tensor parallel, then activation checkpointing, compilation and FSDP2."""
    if mesh["tensor"].size() > 1:
        plan = {
            # By rows, its output would be an AsyncCollectiveTensor, whose gradient compiled blocks lose (PyTorch 2.13).
            "embed": tp.ColwiseParallel(output_layouts=Shard(1)),
            "blocks.*.attention_norm": tp.SequenceParallel(),
            "blocks.*.mlp_norm": tp.SequenceParallel(),
            "blocks.*.up": tp.ColwiseParallel(input_layouts=Shard(1)),
            "blocks.*.down": tp.RowwiseParallel(output_layouts=Shard(1)),
            "norm": tp.SequenceParallel(),
            # The logits stay sharded over the vocabulary, for loss_parallel.
            "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        tp.parallelize_module(model, mesh["tensor"], plan | attention_plan(model, sequence_parallel=True))
    for name, block in model.blocks.named_children():
        if recompute:
            block = checkpoint_wrapper(block, preserve_rng_state=False)
            model.blocks.register_module(name, block)
        if compiled:
            block.compile(fullgraph=True)
    # A Rotation stays float32 under this policy. Gradients are summed over the ranks in float32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=fsdp, mp_policy=policy)
    # The backward pass begins with the head, so its parameters stay gathered after the forward pass.
    fully_shard([model.norm, model.head], mesh=fsdp, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=fsdp, mp_policy=policy)


class Training(Stateful):
    """What a checkpoint holds. Nothing in it depends on the mesh."""

    def __init__(self, model: LanguageModel, optimizer: torch.optim.Optimizer, schedule: LambdaLR) -> None:
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.step = self.rows_seen = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        progress = {"step": self.step, "rows_seen": self.rows_seen}
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), **progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step, self.rows_seen = state["step"], state["rows_seen"]


def fixed(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a resumed training must repeat: those of the model and of the learning rates."""
    return {
        name: getattr(options, name) for name in ("layers", "hidden", "heads", "kv_heads", "learning_rate", "steps")
    }


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint. DCP writes .metadata when all ranks have written their files."""
    complete = [file.parent for file in folder.glob("step-*/.metadata")]
    return max(complete, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm up during the first tenth of the steps, then follow a cosine down to a tenth of the learning rate."""
    warmup = max(1, steps // 10)
    cosine = math.cos(math.pi * min(1.0, max(0, step - warmup) / max(1, steps - warmup)))
    return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * cosine)


def row(text: Tensor, number: int, seq: int) -> Tensor:
    """Return seq + 1 bytes from a random place, which depends only on the number of the row."""
    start = torch.randint(len(text) - seq, (), generator=torch.Generator().manual_seed(number))
    return text[start : start + seq + 1].long()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss over the tokens of this rank. Under loss_parallel, logits may be sharded."""
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh, fsdp = build_mesh(device.type, options.tensor, options.context)

    with torch.device("meta"):
        model = LanguageModel(options.layers, options.hidden, options.heads, options.kv_heads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # in which the blocks compute
    parallelize(model, mesh, fsdp, dtype, recompute=options.recompute, compiled=options.compile)
    model.to_empty(device=device)
    model.init_weights(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps))
    training = Training(model, optimizer, schedule)
    saving, saving_group = None, dist.new_group(backend="gloo")  # a thread saves, beside the collectives of training
    last = [last_checkpoint(options.checkpoint) if options.checkpoint else None]
    dist.broadcast_object_list(last, group=saving_group)  # every rank loads what rank 0 found
    if last[0]:
        dcp.load({"training": training}, checkpoint_id=last[0], process_group=saving_group)
        if dist.get_rank() == 0:
            print(f"resumed from {last[0]}", flush=True)

    rope = ropewalk.Rope(head_dim=options.hidden // options.heads, base=10_000.0, pairing="half")
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
    data, data_rank = mesh["data"].size(), mesh["data"].get_local_rank()
    rows = options.rows // (data * options.accumulate)  # of this rank in each forward pass
    while training.step < options.steps:
        optimizer.zero_grad()
        loss = torch.zeros((), device=device)
        for i in range(options.accumulate):
            first = training.rows_seen + (i * data + data_rank) * rows
            batch = torch.stack([row(text, first + j, options.seq) for j in range(rows)]).to(device)
            context = ContextParallel(options.seq, mesh["context"].get_group(), device=device)
            inputs, labels = batch[:, context.places], batch[:, context.places + 1]
            rotation = rope.at(context.positions)  # of all tokens that attention on this rank receives
            with tp.loss_parallel():
                logits = model(inputs, rotation, context if options.context > 1 else None)
                part = cross_entropy(logits, labels) / options.accumulate
                part.backward()
            loss += part.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        schedule.step()
        training.step += 1
        training.rows_seen += options.rows

        dist.all_reduce(loss, group=fsdp.get_group())  # the ranks along `tensor` have the same loss
        if dist.get_rank() == 0:
            print(f"step {training.step}: loss {loss.item() / fsdp.size():.5f}, norm {norm.item():.5f}", flush=True)
        if options.checkpoint and (training.step % options.save_every == 0 or training.step == options.steps):
            if saving:
                saving.result()
            folder = options.checkpoint / f"step-{training.step}"
            state = {"training": training, "options": fixed(options)}
            saving = dcp.async_save(state, checkpoint_id=folder, process_group=saving_group)
    if saving:
        saving.result()
    dist.destroy_process_group()


def find_problem(options: argparse.Namespace) -> str | None:
    """Return the error message for options that do not fit each other or the number of processes, or None."""
    ranks, shared = int(os.environ.get("WORLD_SIZE", "0")), options.tensor * options.context
    if not ranks:
        return "start it with torchrun, e.g. torchrun --nproc-per-node 8 examples/train_many_gpus.py"
    if ranks % shared:
        return f"--tensor {options.tensor} times --context {options.context} must divide the {ranks} processes"
    if options.rows % (parts := ranks // shared * options.accumulate):
        return f"--rows {options.rows} must be a multiple of {parts}, the processes along `data` times --accumulate"
    if options.hidden % (8 * options.heads):  # flash attention on GPUs needs a head size that is a multiple of 8
        return f"--hidden {options.hidden} must be a multiple of {8 * options.heads}, which is 8 times --heads"
    for name, divisor in (("--kv-heads", options.kv_heads), ("--tensor", options.tensor)):
        if options.heads % divisor:
            return f"--heads {options.heads} must be a multiple of {name} {divisor}"
    if options.kv_heads % options.tensor and options.tensor % options.kv_heads:
        return f"--tensor {options.tensor} must divide --kv-heads {options.kv_heads} or be a multiple of it"
    if options.seq % (2 * shared):
        return f"--seq {options.seq} must be a multiple of {2 * shared}, which is 2 times --tensor times --context"
    if not 0 < options.learning_rate < math.inf:
        return f"--learning-rate must be positive and finite, got {options.learning_rate}"
    try:
        with options.text.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
        if options.checkpoint:
            options.checkpoint.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=options.checkpoint).close()
    except OSError as error:
        return f"--text must be a file, and --checkpoint a folder in which files can be written, got {error}"
    if size <= options.seq:
        return f"--text must have more bytes than --seq {options.seq}, got {size} in {options.text}"
    if options.checkpoint and (last := last_checkpoint(options.checkpoint)):
        state = {"options": fixed(options)}
        with warnings.catch_warnings(action="ignore"):  # that only this process loads
            dcp.load(state, checkpoint_id=last, no_dist=True)
        for name, value in fixed(options).items():
            if value != (saved := state["options"][name]):
                option = f"--{name.replace('_', '-')}"
                return f"{option} must be {saved}, as in {last}, got {value}; --checkpoint NEW_FOLDER starts again"
    gpus, on_machine = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and on_machine > gpus:
        return f"each process needs its own GPU, got {on_machine} processes for {gpus} GPUs"
    return None


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End every rank with status 2. Rank 0 says why, in one line, before the end of another rank ends it."""
        if os.environ.get("RANK", "0") == "0":
            self.exit(2, f"{self.prog}: error: {message}\n")
        time.sleep(10)
        sys.exit(2)


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=positive, default=1, help="ranks that share the heads of each layer")
    parser.add_argument("--context", type=positive, default=1, help="ranks that share the tokens of each row")
    parser.add_argument("--text", type=Path, default=__file__, help="a file to learn [this script]")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--rows", type=positive, default=16, help="rows of a step, in total over all ranks")
    parser.add_argument("--accumulate", type=positive, default=1, help="forward passes in which a step sees its rows")
    parser.add_argument("--seq", type=positive, default=512, help="tokens in a row")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hidden", type=positive, default=512)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--kv-heads", type=positive, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="after the warm-up")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--compile", action="store_true", help="compile each block with torch.compile")
    parser.add_argument("--checkpoint", type=Path, help="folder to resume from and save to; all are kept")
    parser.add_argument("--save-every", type=positive, default=50, help="steps from one checkpoint to the next")
    options = parser.parse_args()
    if (problem := find_problem(options)) is not None:
        parser.error(problem)
    train(options)


if __name__ == "__main__":
    main()
