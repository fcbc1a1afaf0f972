"""Who is measured, of other libraries, each imported when its turn comes; `pip install "ropewalk[bench]"` has them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.programs.bench.case import BASE, HEAD_DIM, Case
from ropewalk.programs.bench.contenders import Call, Contender, eager, full_width
from ropewalk.programs.bench.usual import Turn


def _rotary_embedding_torch(case: Case) -> Turn:
    """As its README says; it finds positions, angles, cos and sin in every call."""
    module = import_module("rotary_embedding_torch").RotaryEmbedding(HEAD_DIM, theta=BASE)
    axis = case.seq_axis - 4

    def one(x: Tensor) -> Tensor:
        turned: Tensor = module.rotate_queries_or_keys(x, seq_dim=axis, offset=case.first)
        return turned

    return lambda q, k: (one(q), one(k))


def _onnx_runtime(case: Case) -> Call:
    """One graph of two RotaryEmbedding nodes; inputs are shared, outputs come from the arena of ONNX Runtime.

    Its threads must not spin while the next contender runs.
    """
    ort = import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(_onnx_model(case), options, providers=["CPUExecutionProvider"])
    # Three axes stand for [batch, seq, heads · head_dim], four for [batch, heads, seq, head_dim].
    q, k = (x.flatten(2) if case.layout == "bshd" else x for x in (case.q, case.k))
    given = {"q": q, "k": k, "positions": torch.arange(case.tokens)[None], "cos": case.cos, "sin": case.sin}
    feeds = {name: ort.OrtValue.ortvalue_from_numpy(x.numpy()) for name, x in given.items()}
    return Call(
        lambda: session.run_with_ort_values(["q1", "k1"], feeds),
        lambda out: tuple(
            torch.from_numpy(x.numpy()).reshape(like.shape) for x, like in zip(out, (case.q, case.k), strict=True)
        ),
    )


def _onnx_model(case: Case) -> bytes:
    onnx = import_module("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    kind = {torch.float32: kinds.FLOAT, torch.bfloat16: kinds.BFLOAT16}[case.dtype]
    axes = 3 if case.layout == "bshd" else 4
    nodes = [
        helper.make_node("RotaryEmbedding", [x, "positions", "cos", "sin"], [f"{x}1"], domain="com.microsoft")
        for x in ("q", "k")
    ]
    inputs = [
        *(helper.make_tensor_value_info(x, kind, [None] * axes) for x in ("q", "k")),
        helper.make_tensor_value_info("positions", kinds.INT64, [None] * 2),
        *(helper.make_tensor_value_info(x, kind, [None] * 2) for x in ("cos", "sin")),
    ]
    outputs = [helper.make_tensor_value_info(x, kind, [None] * axes) for x in ("q1", "k1")]
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "rotate", inputs, outputs), opset_imports=domains, ir_version=8)
    serialized: bytes = model.SerializeToString()
    return serialized


def _mlx(case: Case) -> Call:
    """mx.fast.rope on the CPU, which wants heads before tokens: "bshd" is given as a view."""
    mx = import_module("mlx.core")
    mx.set_default_device(mx.cpu)

    def heads_first(x: Any) -> Any:
        return x.swapaxes(1, 2) if case.layout == "bshd" else x

    def turn(*xs: Any) -> list[Any]:
        keys = {"traditional": False, "base": BASE, "scale": 1.0, "offset": case.first}
        return [heads_first(mx.fast.rope(heads_first(x), HEAD_DIM, **keys)) for x in xs]

    given = [mx.array(x) for x in (case.q, case.k)]
    grads = [mx.array(x) for x in (case.grad_q, case.grad_k) if x is not None]

    def run() -> list[Any]:
        if grads:
            turned, back = mx.vjp(turn, given, grads)
            out = [*turned, *back]
        else:
            out = turn(*given)
        mx.eval(out)
        return out

    def tensors(out: list[Any]) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(np.array(x.astype(mx.float32))).to(case.dtype) for x in out)

    return Call(run, tensors)


def _jax(case: Case) -> Call:
    """Hugging Face's formula, jitted for the CPU."""
    jax = import_module("jax")
    jnp = jax.numpy
    tables = [jnp.from_dlpack(t.contiguous()) for t in full_width(case)]
    given = [jnp.from_dlpack(x) for x in (case.q, case.k)]
    grads = [jnp.from_dlpack(x) for x in (case.grad_q, case.grad_k) if x is not None]

    def one(x: Any, cos: Any, sin: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate((-b, a), axis=-1) * sin

    def turn(q: Any, k: Any, cos: Any, sin: Any, *grads: Any) -> tuple[Any, ...]:
        turned, back = jax.vjp(lambda q, k: (one(q, cos, sin), one(k, cos, sin)), q, k)
        return *turned, *(back(grads) if grads else ())

    jitted = jax.jit(turn)
    return Call(
        lambda: jax.block_until_ready(jitted(*given, *tables, *grads)),
        lambda out: tuple(torch.utils.dlpack.from_dlpack(x) for x in out),
    )


PEERS = (
    Contender("rotary-embedding-torch", "interleaved", eager(_rotary_embedding_torch), own_angles=True),
    Contender("ONNX Runtime", "half", _onnx_runtime, backward=False),
    Contender("MLX", "half", _mlx, own_angles=True),
    Contender("JAX", "half", _jax),
)
