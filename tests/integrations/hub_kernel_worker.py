"""Compare models of transformers before and after the kernel for the hub, in a process of its own: FOLDER.

Prints one JSON object for each model. If `kernels` is installed, transformers turns functions into modules when it is
imported, and `kernels` replaces what such a module does for all models of a file. Other tests must not see that.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

installed = importlib.metadata.version
# transformers 5.23 asks for kernels 0.18.2, which PyPI does not have. What it calls is also in 0.17.
importlib.metadata.version = lambda name: "0.18.2" if name == "kernels" else installed(name)

import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, KernelConfig  # noqa: E402
from transformers.utils import kernel_config  # noqa: E402

from kernels import (  # noqa: E402
    LocalLayerRepository,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
    use_kernelized_func,
)

FOLDER = Path(sys.argv[1])
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,  # sharper attention than a new model's: what is rotated wrongly shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
# The layer of each model, and the keys of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("RotaryPosEmb", {"num_key_value_heads": 2}),
    "qwen3": ("RotaryPosEmb", {"num_key_value_heads": 2, "head_dim": 32}),
    "phi": ("RotaryPosEmb", PARTIAL),
    "gpt_neox": ("RotaryPosEmbPartial", PARTIAL),
    "cohere": ("RotaryPosEmbInterleaved", {"num_key_value_heads": 2}),
}
# transformers names the functions of the other models for kernels.
NAMED_HERE = {"gpt_neox": "GPTNeoXAttention", "cohere": "CohereAttention"}
IDS = torch.tensor([[5, 17, 90, 3, 44, 61, 8, 29], [0, 0, 0, 71, 13, 100, 26, 4]])
MASK = (IDS != 0).long()
BATCH = {"input_ids": IDS, "attention_mask": MASK, "position_ids": (MASK.cumsum(-1) - 1).clamp(min=0)}


def function_of(name: str) -> Any:
    """Return the rotating function of a modeling file, with its name for kernels."""
    file = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if name in NAMED_HERE:
        file.apply_rotary_pos_emb = use_kernel_forward_from_hub("rotary_pos_emb")(file.apply_rotary_pos_emb)
        use_kernelized_func(file.apply_rotary_pos_emb)(getattr(file, NAMED_HERE[name]))
    return file.apply_rotary_pos_emb


def step(model: Any) -> dict[str, Tensor]:
    """Return loss and gradients."""
    model.zero_grad()
    loss = model(**BATCH, labels=IDS.masked_fill(IDS == 0, -100)).loss
    loss.backward()
    gradients = [p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None]
    return {"loss": loss.detach(), "gradients": torch.cat(gradients)}


@torch.no_grad()
def answers(model: Any) -> dict[str, Tensor]:
    """Return logits and generated tokens."""
    tokens = model.generate(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=8, min_new_tokens=8)
    return {"logits": model(**BATCH).logits[MASK.bool()], "tokens": tokens[:, IDS.shape[1] :]}


def with_kernel(model: Any, function: Any, layer: str) -> dict[str, Tensor]:
    """Return the same as `step` and `answers`, after the kernel was switched on for training and for inference."""
    model.train()  # these models have no dropout
    model.set_use_kernels(True, KernelConfig({"rotary_pos_emb": f"{FOLDER}:{layer}"}, use_local_kernel=True))
    assert function.forward.__func__.__qualname__ == f"{layer}.forward"
    found = step(model)
    model.eval()
    assert function.forward.__func__.__qualname__ == f"{layer}.forward"  # a kernel for training also serves inference
    model.kernel_config = None
    with use_kernel_mapping({"rotary_pos_emb": {"cpu": LocalLayerRepository(FOLDER, layer_name=layer)}}):
        model.set_use_kernels(True)
    assert function.forward.__func__.__qualname__ == f"{layer}.forward"
    return found | answers(model)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference, relative to that of the first tensor."""
    return float((a.double() - b.double()).norm() / a.double().norm())


def compare(name: str) -> dict[str, Any]:
    """Return for each dtype the distances of the model's own results and of the kernel's from those in float64."""
    function, (layer, keys) = function_of(name), MODELS[name]
    assert isinstance(function, nn.Module), f"transformers does not use kernels {installed('kernels')}"
    config = AutoConfig.for_model(name, **SIZES, **keys)
    models = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        models[dtype] = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    own = {dtype: step(model) | answers(model) for dtype, model in models.items()}  # before `function` is replaced
    result: dict[str, Any] = {"name": name}
    exact = own.pop(torch.float64)
    for dtype, before in own.items():
        after = with_kernel(models[dtype], function, layer)
        result[str(dtype)] = {
            key: {
                "own": distance(exact[key], before[key]),
                "kernel": distance(exact[key], after[key]),
                "between": distance(before[key], after[key]),
            }
            for key in exact
        }
    return result


transformers.logging.set_verbosity_error()
kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")  # a KernelConfig is otherwise for GPUs only
results = [compare(name) for name in MODELS]
assert "ropewalk" not in sys.modules
sys.stdout.write(json.dumps(results))
