"""Time the rotation on a CPU against copies, the usual code and other libraries.

    python benchmarks/peers.py --json benchmarks/results/NAME.json
    python benchmarks/peers.py --only ropewalk --only Hugging --no-compile --tokens 4096

New tensors are in memory that the process has already used. Cases whose q has at least 16 MiB are also measured with
new tensors in new memory from the system, for contenders that return new tensors. A library is imported only when its
rotation is prepared. The extra `bench` of ropewalk installs all of them but vLLM.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import harness
import numpy as np
import torch
from harness import Case, Contender, eager, full_width, with_inputs
from torch import Tensor

import ropewalk
from ropewalk.tools import bench
from ropewalk.tools.bench import BASE, DTYPES, FLOOR, HEAD_DIM, KV_HEADS, Q_HEADS, Call, Inputs, Rotate

_LARGE = 16 * 2**20  # bytes: glibc's own rule keeps smaller blocks, and maps larger ones anew sooner or later


def meta(case: Case) -> Rotate:
    """Prepare Meta's apply_rotary_emb: complex pairs times cos + i sin. Source: llama, llama/model.py."""
    factor = torch.complex(*case.tables).unsqueeze(-2)

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * factor).flatten(-2).type_as(x)

    return lambda q, k: (rotate(q), rotate(k))


def _ropewalk_table(case: Case, inputs: Inputs) -> Call:
    rope, positions = ropewalk.Rope(HEAD_DIM, BASE, "half"), case.positions
    return Call(lambda: rope.at(positions), lambda rotation: (rotation.cos, rotation.sin))


def _hugging_face_table(case: Case, inputs: Inputs) -> Call:
    """Prepare cos and sin as in LlamaRotaryEmbedding: angles in float32, tables of full width.

    Source: transformers, models/llama/modeling_llama.py.
    """
    inv_freq = (1.0 / (BASE ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))).to(case.device)
    positions = case.positions if case.decode else case.positions[None]

    def run() -> tuple[Tensor, Tensor]:
        angle = (inv_freq[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()

    return Call(run, lambda found: tuple(t[..., : HEAD_DIM // 2].reshape(case.tables[0].shape) for t in found))


USUAL = (
    Contender("Hugging Face", "half", eager(bench.hugging_face)),
    Contender("Hugging Face, compiled", "half", eager(bench.hugging_face, compiled=True)),
    Contender("Meta", "interleaved", eager(meta)),
    Contender("Meta, compiled", "interleaved", eager(meta, compiled=True)),
    Contender("ropewalk, table", "tables", with_inputs(_ropewalk_table), backward=False),
    Contender("Hugging Face, table", "tables", with_inputs(_hugging_face_table), own_angles=True, backward=False),
)


def _rotary_embedding_torch(case: Case) -> Rotate:
    """Prepare rotary-embedding-torch, used as its README shows. Every call computes positions, angles, cos and sin."""
    module = import_module("rotary_embedding_torch").RotaryEmbedding(HEAD_DIM, theta=BASE)

    def rotate(x: Tensor) -> Tensor:
        rotated: Tensor = module.rotate_queries_or_keys(x, seq_dim=-3, offset=case.first)
        return rotated

    return lambda q, k: (rotate(q), rotate(k))


def _onnx_runtime(case: Case, inputs: Inputs) -> Call:
    """Prepare a graph of ONNX Runtime with two RotaryEmbedding nodes, one for q and one for k.

    The graph reads the inputs without copying them. ONNX Runtime allocates the outputs. Its threads stop spinning after
    each call, because spinning threads would slow down the code that is timed next.
    """
    ort = import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(_onnx_model(case), options, providers=["CPUExecutionProvider"])
    q, k = (x.flatten(2) for x in inputs)  # three axes mean [batch, seq, heads · head_dim]
    cos, sin = case.tables
    tensors = {"q": q, "k": k, "positions": torch.arange(case.tokens)[None], "cos": cos, "sin": sin}
    feeds = {name: ort.OrtValue.ortvalue_from_numpy(x.numpy()) for name, x in tensors.items()}
    return Call(
        lambda: session.run_with_ort_values(["q1", "k1"], feeds),
        lambda out: tuple(torch.from_numpy(x.numpy()).view_as(like) for x, like in zip(out, inputs, strict=True)),
    )


def _onnx_model(case: Case) -> bytes:
    onnx = import_module("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    kind = {torch.float32: kinds.FLOAT, torch.bfloat16: kinds.BFLOAT16}[case.dtype]
    nodes = [
        helper.make_node("RotaryEmbedding", [x, "positions", "cos", "sin"], [f"{x}1"], domain="com.microsoft")
        for x in ("q", "k")
    ]
    inputs = [
        *(helper.make_tensor_value_info(x, kind, [None] * 3) for x in ("q", "k")),
        helper.make_tensor_value_info("positions", kinds.INT64, [None] * 2),
        *(helper.make_tensor_value_info(x, kind, [None] * 2) for x in ("cos", "sin")),
    ]
    outputs = [helper.make_tensor_value_info(x, kind, [None] * 3) for x in ("q1", "k1")]
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "rotate", inputs, outputs), opset_imports=domains, ir_version=8)
    serialized: bytes = model.SerializeToString()
    return serialized


def _mlx(case: Case, inputs: Inputs) -> Call:
    """Prepare mx.fast.rope on the CPU. It needs heads before tokens, so these axes are swapped."""
    mx = import_module("mlx.core")
    mx.set_default_device(mx.cpu)
    q, k, *grads = (mx.array(x) for x in inputs)

    def rotate_both(*xs: Any) -> list[Any]:
        keys = {"traditional": False, "base": BASE, "scale": 1.0, "offset": case.first}
        return [mx.fast.rope(x.swapaxes(1, 2), HEAD_DIM, **keys).swapaxes(1, 2) for x in xs]

    def run() -> list[Any]:
        if grads:
            rotated, gradients = mx.vjp(rotate_both, [q, k], grads)
            out = [*rotated, *gradients]
        else:
            out = rotate_both(q, k)
        mx.eval(out)
        return out

    def tensors(out: list[Any]) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(np.array(x.astype(mx.float32))).to(case.dtype) for x in out)

    return Call(run, tensors)


def _jax(case: Case, inputs: Inputs) -> Call:
    """Prepare the formula of Hugging Face's Llama in JAX, compiled by jax.jit for the CPU."""
    jax = import_module("jax")
    jnp = jax.numpy
    tables = [jnp.from_dlpack(t.unsqueeze(-2).contiguous()) for t in full_width(case)]
    q, k, *grads = (jnp.from_dlpack(x) for x in inputs)

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate((-b, a), axis=-1) * sin

    def rotate_both(q: Any, k: Any, cos: Any, sin: Any, *grads: Any) -> tuple[Any, ...]:
        rotated, vjp = jax.vjp(lambda q, k: (rotate(q, cos, sin), rotate(k, cos, sin)), q, k)
        return *rotated, *(vjp(grads) if grads else ())

    jitted = jax.jit(rotate_both)
    return Call(
        lambda: jax.block_until_ready(jitted(q, k, *tables, *grads)),
        lambda out: tuple(torch.utils.dlpack.from_dlpack(x) for x in out),
    )


def _hub_kernel(in_place: bool, case: Case, inputs: Inputs) -> Call:
    """Prepare `apply_rotary` of kernels-community/rotary, loaded from the Hugging Face hub or its local cache.

    It rotates q and k in two calls, in bfloat16 with AVX-512 by a compiled loop, and else by PyTorch. Tables have the
    dtype of q.
    """
    rotate = import_module("kernels").get_kernel("kernels-community/rotary", version=2).apply_rotary
    heads_first = [x.transpose(1, 2) for x in inputs]
    sources = [x.clone() for x in heads_first] if in_place else heads_first
    cos, sin = (t.to(case.dtype)[None, None] for t in case.tables)

    def run() -> tuple[Tensor, ...]:
        results = sources if in_place else [torch.empty_like(x) for x in sources]
        for x, result in zip(sources, results, strict=True):
            rotate(*x.chunk(2, dim=-1), cos, sin, *result.chunk(2, dim=-1), False)
        return tuple(results)

    return Call(run, lambda out: tuple(x.transpose(1, 2) for x in out))


def _vllm(case: Case, inputs: Inputs) -> Call:
    """Prepare vLLM's C++ CPU operator, in place on `[tokens, heads · head_dim]`, with tables in the dtype of q."""
    import_module("vllm._C")
    operator = torch.ops._C.rotary_embedding.default
    q, k = (x.clone() for x in inputs)
    flat_q, flat_k = q.view(-1, Q_HEADS * HEAD_DIM), k.view(-1, KV_HEADS * HEAD_DIM)
    cache = torch.cat(harness.tables(torch.arange(int(case.positions.max()) + 1)), dim=-1).to(case.dtype)
    positions = case.positions
    return Call(lambda: operator(positions, flat_q, flat_k, HEAD_DIM, cache, True), lambda _: (q, k))


PEERS = (
    Contender("rotary-embedding-torch", "interleaved", eager(_rotary_embedding_torch), own_angles=True),
    Contender("ONNX Runtime", "half", with_inputs(_onnx_runtime), backward=False),
    Contender("MLX", "half", with_inputs(_mlx), own_angles=True),
    Contender("JAX", "half", with_inputs(_jax)),
    Contender("hub kernel", "half", with_inputs(partial(_hub_kernel, False)), backward=False),
    Contender("hub kernel, in place", "half", with_inputs(partial(_hub_kernel, True)), backward=False, in_place=True),
    Contender("vLLM, in place", "half", with_inputs(_vllm), backward=False, in_place=True),
)

CONTENDERS = (
    Contender(FLOOR, "copy", with_inputs(bench.copy)),
    Contender("clone", "copy", eager(lambda case: lambda q, k: (q.clone(), k.clone())), backward=False),
    Contender(
        "mul_", "negate", eager(lambda case: lambda q, k: (q.mul_(-1.0), k.mul_(-1.0)), in_place=True),
        backward=False, in_place=True,
    ),
    Contender("ropewalk", "half", eager(bench.ropewalk_of)),
    Contender("ropewalk, in place", "half", with_inputs(bench.ropewalk_in_place), backward=False, in_place=True),
    Contender("ropewalk, compiled", "half", eager(bench.ropewalk_of, compiled=True)),
    *USUAL,
    *PEERS,
)  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 128, 1024, 4096, 16_384])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--no-backward", action="store_true", help="do not time forward + backward")
    parser.add_argument("--no-compile", action="store_true", help="do not time torch.compile")
    options = parser.parse_args(arguments)
    names = harness.select([one.name for one in CONTENDERS], options.only)
    chosen = [one for one in CONTENDERS if one.name in names and not (options.no_compile and "compiled" in one.name)]
    out = harness.Results(options, threads=options.threads, rows=[])
    passes = ("forward",) if options.no_backward else ("forward", "forward + backward")
    cases = [Case(n, DTYPES[name], passes=what) for name in options.dtypes for n in options.tokens for what in passes]
    for memory in harness.memories():
        with harness.using(memory):
            for case in cases:
                if memory == "new" and case.tokens * Q_HEADS * HEAD_DIM * case.dtype.itemsize < _LARGE:
                    continue
                returning = [one for one in chosen if memory != "new" or not (one.in_place or one.does == "tables")]
                rows = harness.measure(case, returning, bench.OnCpu(), options, memory=memory)
                out.add(f"{case.title}, {harness.MEMORY[memory]}", rows)
    return out.found


if __name__ == "__main__":
    main()
