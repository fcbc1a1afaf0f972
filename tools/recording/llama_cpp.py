"""engine_rules/rules_of_llama_cpp.json: the keys that llama.cpp's converter writes for small configs, and their effect.

The converter is run unchanged. Of the C++ code, only the lines that compute YaRN's attention factor and the functions
that fill ggml's table are compiled. They come from `--source DIR`, which is a clone of llama.cpp, or its copy in the
source package of llama-cpp-python (vendor/llama.cpp). A search in the source of a model's loader shows which keys it
reads.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import files
from .engines import record
from .model import CannotRecordError

_CLASSES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
}
_FILLED = {
    "vocab_size": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_local_experts": 2,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
}


def converter(source: Path) -> Any:
    """Import the converter."""
    for folder in (source, source / "gguf-py"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("conversion")
    except ImportError as error:
        raise CannotRecordError(f"the converter does not load: {error}") from error


def convert(source: Path, config: dict[str, Any], name: str = "") -> tuple[str, dict[str, Any], dict[str, list[float]]]:
    """Run the converter. Return the architecture, the keys, and the tensors of factors that it writes.

    Args:
        source: the folder of llama.cpp.
        config: the config.
        name: the class of the model. If it is "", `_CLASSES` names it.
    """
    conversion, gguf = converter(source), importlib.import_module("gguf")
    name = name or _CLASSES[config["model_type"]]
    given = json.loads(json.dumps({**_FILLED, **config, "architectures": [name]}))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(given))
        out = Path(folder) / "model.gguf"
        kind = gguf.LlamaFileType.ALL_F32
        model_class = conversion.get_model_class(name)
        model_class.no_mtp = True  # as with --no-mtp: layers that predict further tokens are left out
        model = model_class(Path(folder), kind, out, hparams=given, dry_run=True)
        model = getattr(model, "impl", model)  # the class for Mistral selects one of two
        model.set_gguf_parameters()
        tensors = {name: tensor.tolist() for name, tensor in model.generate_extra_tensors()}
        keys = {key: value.value for part in model.gguf_writer.kv_data for key, value in part.items()}
    architecture = gguf.MODEL_ARCH_NAMES[model.model_arch]
    if f"{architecture}.context_length" not in keys:
        raise CannotRecordError("the converter wrote no context_length")
    return architecture, {key.removeprefix(f"{architecture}."): value for key, value in keys.items()}, tensors


_PROGRAM = """
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define LLAMA_LOG_WARN(...)
enum { LLAMA_ROPE_SCALING_TYPE_NONE, LLAMA_ROPE_SCALING_TYPE_LINEAR, LLAMA_ROPE_SCALING_TYPE_YARN,
       LLAMA_ROPE_SCALING_TYPE_LONGROPE };
enum { LLM_ARCH_OTHER, LLM_ARCH_DEEPSEEK2 };
@FUNCTIONS@
int main(int, char ** v) {
    struct { float yarn_ext_factor, yarn_attn_factor, rope_freq_scale; int rope_scaling_type; } cparams;
    struct { float rope_yarn_log_mul, rope_attn_factor; } hparams;
    struct { int arch; } model;
    model.arch = atoi(v[1]);
    cparams.rope_scaling_type = atoi(v[2]);
    cparams.rope_freq_scale = atof(v[3]);
    cparams.yarn_ext_factor = atof(v[4]);
    cparams.yarn_attn_factor = atof(v[5]);
    hparams.rope_yarn_log_mul = atof(v[6]);
    hparams.rope_attn_factor = atof(v[7]);
    @CONTEXT@
    const int n_dims = atoi(v[8]), n_ctx_orig = atoi(v[9]);
    const float freq_base = atof(v[10]);
    float dims[2];
    ggml_rope_yarn_corr_dims(n_dims, n_ctx_orig, freq_base, atof(v[11]), atof(v[12]), dims);
    const float theta_scale = powf(freq_base, -2.0f / n_dims);
    std::vector<float> factors;
    const float scale_of_layer = atof(v[13]) > 0 ? atof(v[13]) : cparams.rope_freq_scale;
    for (char ** each = v + 14; *each; each++) factors.push_back(atof(*each));
    std::vector<float> cache(n_dims);
    for (float position : {0.0f, 1.0f}) {
        const float * each = factors.empty() ? nullptr : factors.data();
        ggml_rope_cache_init(position, scale_of_layer, each, dims, n_dims, cparams.yarn_ext_factor,
                             cparams.yarn_attn_factor, cache.data(), 1.0f, theta_scale);
        for (float x : cache) printf("%.9g ", x);
        printf("\\n");
    }
}
"""


def _cut(source: Path, file: str, start: str, end: str) -> str:
    """Return the lines of a file from the one with `start` to the next one with `end`, both included."""
    text = (source / file).read_text()
    found = re.search(f"^[^\\n]*{re.escape(start)}.*?{re.escape(end)}[^\\n]*$", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise CannotRecordError(f"{file} has no lines from {start!r} to {end!r}")
    return found[0]


@functools.cache
def build(source: Path) -> Path:
    """Compile `_PROGRAM` with the lines of llama.cpp, and return the path of the executable."""
    folder = Path(tempfile.mkdtemp(prefix="llama-cpp-rope-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    operators = "ggml/src/ggml-cpu/ops.cpp"
    functions = [
        _cut(source, "ggml/src/ggml.c", "static float ggml_rope_yarn_corr_dim(", "\n}\n"),
        _cut(source, "ggml/src/ggml.c", "void ggml_rope_yarn_corr_dims(", "\n}\n"),
        _cut(source, operators, "static float rope_yarn_ramp(", "\n}\n"),
        _cut(source, operators, "static void rope_yarn(", "\n}\n"),
        _cut(source, operators, "static void ggml_rope_cache_init(", "\n}\n"),
    ]
    start = "if (cparams.rope_scaling_type == LLAMA_ROPE_SCALING_TYPE_NONE) {"
    context = _cut(source, "src/llama-context.cpp", start, "cparams.yarn_attn_factor *= hparams.rope_attn_factor;")
    code = _PROGRAM.replace("@FUNCTIONS@", "\n".join(functions)).replace("@CONTEXT@", context)
    (folder / "rope.cpp").write_text(code)
    command = ["g++", "-std=c++17", "-O1", "-o", str(folder / "rope"), str(folder / "rope.cpp")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        raise CannotRecordError(f"the lines of llama.cpp do not compile: {built.stderr[:400]}")
    return folder / "rope"


def loader(source: Path, architecture: str) -> str:
    """Return the source of the loader of an architecture."""
    name = {"gpt-oss": "openai-moe"}.get(architecture, architecture)
    for file in (source / "src" / "models").glob("*.cpp"):
        if re.sub("[^a-z0-9]", "", file.stem) == re.sub("[^a-z0-9]", "", name):
            return file.read_text()
    raise CannotRecordError(f"there is no loader of {architecture}")


def table(
    source: Path, written: tuple[str, dict[str, Any], dict[str, list[float]]], size: int, setting: int, *, sliding: bool
) -> tuple[Tensor, Tensor]:
    """Return cos and sin at positions 0 and 1, in a context for `setting` tokens.

    Args:
        source: the folder of llama.cpp.
        written: the result of `convert`.
        size: the number of channels that rotate.
        setting: the context, in tokens.
        sliding: whether the layer has a sliding window, and its own base and scale.
    """
    architecture, keys, tensors = written
    reader = loader(source, architecture)

    def read(key: str, otherwise: float) -> float:
        """Return a key of YaRN, or `otherwise` if the loader of the architecture does not read it."""
        named = f"LLM_KV_ROPE_SCALING_YARN_{key.upper()}"
        short = {"log_multiplier": "LLM_KV_ROPE_SCALING_YARN_LOG_MUL"}.get(key, named)
        return float(keys.get(f"rope.scaling.yarn_{key}", otherwise)) if short in reader else otherwise

    types = ("none", "linear", "yarn", "longrope")
    factor = float(keys.get("rope.scaling.factor", 0.0))
    base, scale = float(keys.get("rope.freq_base", 10_000.0)), 1.0 / factor if factor else 1.0
    if sliding:
        base = base if "base_train_swa  = hparams" in reader or "base_train_swa = hparams" in reader else 10_000.0
        base = float(keys.get("rope.freq_base_swa", base)) if "ROPE_FREQ_BASE_SWA" in reader else base
        scale = scale if "scale_train_swa = hparams" in reader else 1.0
    trained = int(keys.get("rope.scaling.original_context_length", keys["context_length"]))
    lists = [tensors[name] for name in ("rope_freqs.weight",) if name in tensors]
    lists += [tensors[name] for name in (_factors_name(setting > trained),) if name in tensors]
    multiplier = read("log_multiplier", 0.0) / (0.1 if architecture.startswith("deepseek") else 1.0)
    numbers = [
        int(architecture == "deepseek2"),
        types.index(str(keys.get("rope.scaling.type", "none" if factor in (0.0, 1.0) else "linear"))),
        scale,
        read("ext_factor", -1.0),
        read("attn_factor", 1.0),
        multiplier,
        float(keys.get("rope.scaling.attn_factor", 1.0)),
        size,
        trained,
        base,
        read("beta_fast", 32.0),
        read("beta_slow", 1.0),
        0.0,
        *(lists[0] if lists else []),
    ]
    command = [str(build(source)), *(repr(number) for number in numbers)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = torch.tensor([[float(x) for x in line.split()] for line in output.splitlines()], dtype=torch.float32)
    return found[:, ::2], found[:, 1::2]


def probe(source: Path, config: dict[str, Any], setting: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin at positions 0 and 1, in a context for `setting` tokens."""
    size = int(config.get("qk_rope_head_dim") or config["head_dim"])
    return table(source, convert(source, config), size, setting, sliding=False)


def _factors_name(long: bool) -> str:
    """Return the name of the tensor of factors for short or long contexts."""
    return f"rope_factors_{'long' if long else 'short'}.weight"


def llama_cpp(row: dict[str, Any], source: Path | None = None) -> dict[str, Any]:
    """Record a row again."""
    if source is None or not (source / "conversion").is_dir():
        raise CannotRecordError("pass a clone of llama.cpp, or the copy in llama-cpp-python's source, as --source")
    return record(row, lambda config, _, setting: probe(source, config, setting), (AssertionError,))


GOLDEN = files.Golden(
    "engine_rules/rules_of_llama_cpp.json", lambda row: str(row["case"]), llama_cpp, "torch", source=True
)
