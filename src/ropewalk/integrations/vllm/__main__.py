"""`python -m ropewalk.integrations.vllm`: run a small model, and report whether vLLM rotates through ropewalk."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ropewalk
from ropewalk._checks import RopeError, error
from ropewalk.integrations.vllm.plugin import TESTED, WHO, is_enabled, report

# A Llama with 0.3 million parameters, for which vLLM makes random weights (load_format="dummy").
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def run() -> list[dict[str, Any]]:
    """Start an engine with a small model, generate a few tokens without compiling, and return its workers' reports."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    try:
        from vllm import LLM, SamplingParams
    except ImportError as e:
        raise error(
            WHO, "vLLM must be installed", f"{type(e).__name__}: {e}", f"It is tested with vLLM {TESTED}."
        ) from e

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            gpu_memory_utilization=0.1,
        )
        prompt = {"prompt_token_ids": list(range(3, 20))}
        llm.generate([prompt], SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True), use_tqdm=False)
        return report(llm)


def describe(states: list[dict[str, Any]]) -> str:
    """Format the workers' reports as text.

    Raises:
        RopeError: there is no worker, or no layer of a worker has rotated through ropewalk.
    """
    lines = []
    if not states:
        raise error(WHO, "the engine must have a worker", "none", f"It is tested with vLLM {TESTED}.")
    for worker in states:
        if not any(layer["calls"] for layer in worker["layers"]):
            got = f"none in worker {worker['process']}; layers that keep vLLM's rotation: {worker['left'] or 'none'}"
            raise error(WHO, "a layer must have rotated through ropewalk", got, f"It is tested with vLLM {TESTED}.")
        lines += [
            f"worker {worker['process']}: {layer['calls']} rotations by {layer['rope']}" for layer in worker["layers"]
        ]
        kept_layers = [(layer["class"], layer["why"]) for layer in worker["left"]]
        lines += [f"worker {worker['process']}: {name} keeps vLLM's rotation: {why}" for name, why in kept_layers]
    kernels = {name: state for name, state in ropewalk.backends().items() if name != "reference"}
    if not any(state.startswith("usable") for state in kernels.values()):
        lines += [f"It runs in plain PyTorch: the {name} is {state}" for name, state in kernels.items()]
    return "\n".join(["vLLM rotates through ropewalk.", *lines])


def main() -> int:
    """Print the report. The exit status is 0 if the plugin is active, and 1 if it is not."""
    try:
        if not is_enabled():
            got = f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r}" if "VLLM_PLUGINS" in os.environ else "no such variable"
            raise error(WHO, "VLLM_PLUGINS must name ropewalk", got, "Set VLLM_PLUGINS=ropewalk.")
        sys.stdout.write(f"{describe(run())}\n")
    except RopeError as e:
        sys.stderr.write(f"vLLM does NOT rotate through ropewalk. {e}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
