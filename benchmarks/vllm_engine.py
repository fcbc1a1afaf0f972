"""Time vLLM with and without the plugin. Run it on an idle machine.

    python benchmarks/vllm_engine.py                 two models; requires vLLM, see tests/engines/environment.sh
    python benchmarks/vllm_engine.py --compiled      the same under torch.compile
    python benchmarks/vllm_engine.py --json benchmarks/results/vllm-engine-NAME.json

The models are those of whole_models.py with random weights, in float32 and bfloat16. The tasks are a prefill, and
decoding after a short prompt. An engine without the plugin and one with it run in separate processes. They alternate.
The table shows medians, the 10th and 90th percentiles, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from whole_models import MODELS, cells, compare

from ropewalk.tools.bench import DTYPES

_DONE = "seconds:"


def serve(folder: str, dtype: str, length: int, compiled: bool) -> None:
    """Run an engine that reads lines from stdin and prints the seconds of each.

    A line has the length of a prompt and the number of tokens to generate.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        load_format="dummy",
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=not compiled,
        max_model_len=length,
        max_num_batched_tokens=length,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    print(_DONE, 0, flush=True)
    for line in sys.stdin:
        prompt, new = map(int, line.split())
        sampling = SamplingParams(max_tokens=new, temperature=0.0, detokenize=False, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": [5 + i % 999 for i in range(prompt)]}], sampling, use_tqdm=False)
        print(_DONE, time.perf_counter() - begin, flush=True)


class Engine:
    """An engine in a separate process.

    Args:
        folder: the folder with the config of the model.
        dtype: the dtype of the model.
        length: the longest sequence, in tokens.
        compiled: whether to run under torch.compile.
        on: whether to enable the plugin.
    """

    def __init__(self, folder: Path, dtype: str, length: int, compiled: bool, on: bool) -> None:
        plugins = {"VLLM_PLUGINS": "ropewalk" if on else ""}
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--serve", str(folder), dtype, str(length), str(int(compiled))]
        pipe = subprocess.PIPE
        environment = {**os.environ, **settings, **plugins}
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=quiet, text=True)
        self._read_answer()

    def __call__(self, prompt: int, new: int) -> float:
        """Run a prompt of `prompt` tokens, generate `new` tokens, and return the seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{prompt} {new}\n")
        self.process.stdin.flush()
        return self._read_answer()

    def _read_answer(self) -> float:
        """Wait for the engine and return the seconds that it prints."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(_DONE):
                return float(line.split()[1])
        raise SystemExit("The engine stopped. Run the command with --serve by hand to see why.")

    def close(self) -> None:
        """Let the engine end, and wait for its process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def measure(name: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure both tasks of a model in a dtype, and print and return their rows."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            **MODELS[name],
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
        }
        (Path(folder) / "config.json").write_text(json.dumps(config))
        length = options.tokens + 2 * options.new
        engines = [Engine(Path(folder), dtype, length, options.compiled, on) for on in (False, True)]
        rows = []
        for task, lengths in {
            f"prefill of {options.tokens}": (options.tokens, 1),
            f"{options.new} tokens after 16": (16, options.new),
        }.items():
            row = {"model": name, "dtype": dtype, "task": task, "compiled": options.compiled}
            row |= compare(*(functools.partial(engine, *lengths) for engine in engines), options)
            rows.append(row)
            print(cells(row), flush=True)
        for engine in engines:
            engine.close()
        return rows


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        folder, dtype, length, compiled = sys.argv[2:]
        serve(folder, dtype, int(length), bool(int(compiled)))
        return
    parser = harness.parser(__doc__)
    parser.set_defaults(rounds=7, seconds=600.0)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    out = harness.Results(options, rows=[])
    print("| model | dtype | task | vLLM, s | with ropewalk, s | ratio |\n|---|---|---|---|---|---|")
    for name in options.models:
        for dtype in options.dtypes:
            out.found["rows"] += measure(name, dtype, options)
            out.write()


if __name__ == "__main__":
    main()
