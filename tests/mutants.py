"""Proof that the suite can fail: break the library one line at a time and see it go red. Run by hand, outside CI.

    python tests/mutants.py            all mutants, two at a time (about an hour on two cores)
    python tests/mutants.py sin yarn   those whose name contains one of the words

Each mutant is a copy of src/ with one replacement; the text to replace must stand there exactly once. Exit status 1 if a
mutant survives.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Slow compilations are left out. `nearest_first` puts those first that are likely to notice.
SUITE = [
    "tests/kernels/test_misuse.py",
    "tests/kernels/test_backend.py",
    "tests/kernels/test_gradients.py",
    "tests/kernels/test_operators.py",
    "tests/rotation/test_rotation.py",
    "tests/test_golden.py",
    "tests/schemes",
    "tests/test_rope.py",
    "tests/test_fixed_point.py",
    "tests/positions",
    "tests/test_angles.py",
    "tests/test_tables.py",
    "tests/test_layout.py",
    "tests/test_nn.py",
    "tests/attention/test_attention.py",
    "tests/attention/test_masks.py",
    "tests/attention/test_cache_step.py",
    "tests/attention/test_self_extend.py",
    "tests/attention/test_kv_cache.py",
    "tests/configs",
    "tests/rotation/test_gradients.py",
    "tests/rotation/test_transforms.py",
    "tests/lab/test_copying.py",
    "tests/lab/test_methods.py",
    "tests/lab/test_measure.py",
    "tests/lab/test_checkpoint.py",
    "tests/lab/test_lock.py",
    "tests/lab/test_tokenizer.py",
    "tests/lab/test_generate.py",
    "tests/lab/test_model.py",
    "tests/lab/test_export.py",
    "tests/lab/test_files.py",
    "tests/lab/test_report.py",
    "tests/lab/test_study.py",
    "tests/test_checks.py",
    "tests/test_plots.py",
    "tests/programs/test_cli.py",
    "tests/programs/test_demo.py",
    "tests/programs/test_bench.py",
    "tests/kernels/test_at_once.py",
    "tests/test_formats.py",
    "tests/test_numerics.py",
    "tests/attention/test_attending_cache.py",
    "tests/integrations/test_vllm.py",
    "tests/integrations/test_transformers.py",
    "tests/integrations/test_transformers_refused.py",
    "tests/integrations/test_transformers_functions.py",
    "tests/integrations/test_transformers_stays.py",
    "tests/integrations/test_transformers_processes.py",
]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str


REFERENCE, API, OPS = "rotation/reference.py", "rotation/api.py", "rotation/ops.py"
CHECKS = "rotation/checks.py"
SOURCE, HEADER = "configs/source.py", "configs/gguf/header.py"
CHECKPOINT, FILES = "lab/checkpoint.py", "lab/files.py"
GPU, KERNELS = "kernels/gpu.py", "kernels/_gpu.py"
YARN, LLAMA3, DEFAULT = "schemes/yarn.py", "schemes/llama3.py", "schemes/default.py"

SLOW_LEFT_OUT = ["-k", "not inductor and not ompile"]
# Without a GPU: in Triton's interpreter, then what was compiled, and what asks for it.
GPU_SUITES = [({"TRITON_INTERPRET": "1"}, ["tests/gpu/test_kernels.py"]), ({}, ["tests/gpu/test_compiled.py"])]

MUTANTS = [
    # the GPU kernels
    Mutant("gpu: sign of sin", KERNELS, "(a * c - b * s)", "(a * c + b * s)"),
    Mutant("gpu: back is forth", KERNELS, "s = s * -1.0", "s = s * 1.0"),
    Mutant("gpu: sign of 0 back", KERNELS, "s = s * -1.0", "s = 0.0 - s"),
    Mutant("gpu: float64 in float32", KERNELS, "compute: tl.constexpr = tl.float64 if", "compute: tl.constexpr = tl.float32 if"),
    Mutant("gpu: k by the programs of q", KERNELS, "            program - q_programs, k,", "            program, k,"),
    Mutant("gpu: heads beyond the last", KERNELS, "here = (token < tokens) & (head < heads)\n    x_rows", "here = (token < tokens) & (head < heads + 1)\n    x_rows"),
    Mutant("gpu: tokens beyond the last", KERNELS, "here = (token < tokens) & (head < heads)\n    x_rows", "here = (token < tokens + 1) & (head < heads)\n    x_rows"),
    Mutant("gpu: pairs beyond the last", KERNELS, "        inside = here & (tl.arange(0, BLOCK_P)[None, None, :] < PAIRS)\n        tl.store", "        inside = here & (tl.arange(0, BLOCK_P)[None, None, :] < PAIRS + 1)\n        tl.store"),
    Mutant("gpu: rows of the batch share a table", KERNELS, "cos_rows = _rows(cos, batch,", "cos_rows = _rows(cos, 0 * batch,"),
    Mutant("gpu: 32-bit tokens", KERNELS, "token.to(tl.int64) * x_t", "token * x_t"),
    Mutant("gpu: 32-bit batch", KERNELS, "(rest // token_blocks).to(tl.int64)", "(rest // token_blocks)"),
    Mutant("gpu: head copied to its offset only", KERNELS, "DENSE)\n        _copy(x_rows, y_rows, x_d, y_d, here, OFFSET + 2 * PAIRS, HEAD_DIM, BLOCK_P, DENSE)", "DENSE)"),
    Mutant("gpu: head not copied before its offset", KERNELS, "_copy(x_rows, y_rows, x_d, y_d, here, 0, OFFSET, BLOCK_P, DENSE)", "pass"),
    Mutant("gpu: gradient of the first block of heads", KERNELS, "for block in range(BLOCKS):", "for block in range(1):"),
    Mutant("gpu: gradient to sin", KERNELS, "h * a - g * b", "h * a + g * b"),
    Mutant("gpu: quadrant not rounded", KERNELS, "(phase + (1 << 61)) >> 62", "phase >> 62"),
    Mutant("gpu: last coefficient", KERNELS, "u * 6.8874821400921976273e-12 + -1.7571791752800344071e-9", "u * 0.0 + -1.7571791752800344071e-9"),
    Mutant("gpu: cosine of Triton", KERNELS, "of_sin = tl.where((quadrant & 2)", "of_sin = tl.sin(phase.to(tl.float64) * 3.4061215800304893e-19)\n    of_sin = tl.where((quadrant & 8)"),
    Mutant("gpu: fused products", GPU, '"enable_fp_fusion": False', '"enable_fp_fusion": True'),
    Mutant("gpu: tables as wide as they come", GPU, "// (2 if interleaved else 1)", ""),
    Mutant("gpu: unit of strides too large", GPU, "while any(stride % most for stride in strides):", "while any(stride % most for stride in strides[:3]):"),
    Mutant("gpu: strides without a unit", GPU, "unit = _unit(list(rows.values()), most) if dense else 1", "unit = 1"),
    Mutant("gpu: dense channels taken for granted", GPU, "dense = all(of[-1] == 1 for of in named.values())", "dense = True"),
    Mutant("gpu: dense tables taken for granted", GPU, "dense = cos[-1] == sin[-1] == 1 or shape[-1] == 1", "dense = True"),
    Mutant("gpu: an only row of a table has a stride", GPU, "absent = i < missing or shape[i - missing] == 1", "absent = i < missing"),
    Mutant("gpu: unit of an only row forgotten", GPU, "_unit([*cos[:-1], *sin[:-1]], min", "_unit([c * (n > 1) for n, c in zip(shape, cos[:-1])], min"),
    Mutant("gpu: nothing copied", GPU, '"COPY": not in_place', '"COPY": False'),
    Mutant("gpu: small tiles", GPU, "_BYTES_PER_THREAD // 2 // element_size", "max(1, 16 // element_size // 2)"),
    # the rotation
    Mutant("sign of sin in a", REFERENCE, "a * cos - b * sin", "a * cos + b * sin"),
    Mutant("sign of sin in b", REFERENCE, "a * sin + b * cos", "b * cos - a * sin"),
    Mutant("pairing swapped", REFERENCE, 'part.chunk(2, dim=-1) if pairing == "half"', 'part.chunk(2, dim=-1) if pairing != "half"'),
    Mutant("half written as interleaved", REFERENCE, 'if pairing == "half":\n        return', "if False:\n        return"),
    Mutant("partial tail rotated", REFERENCE, "turned_b, after)", "turned_b, -after)"),
    Mutant("interleaved tail rotated", REFERENCE, "turned, after)", "turned, -after)"),
    Mutant("head of the slice dropped", REFERENCE, "(before, turned_a,", "(0 * before, turned_a,"),
    Mutant("offset ignored", REFERENCE, "x.narrow(-1, rotary_offset, 2 * pairs)", "x.narrow(-1, 0, 2 * pairs)"),
    Mutant("output dtype float32", REFERENCE, "- b * sin).to(x.dtype)", "- b * sin).float()"),
    Mutant("two roundings", REFERENCE, "(a * cos - b * sin).to(", "(a * cos).to(x.dtype).sub(b * sin).to("),
    Mutant("float64 in float32", REFERENCE, "torch.float64 if x.dtype == torch.float64 else torch.float32", "torch.float32"),
    Mutant("layout axes swapped", REFERENCE, "table.unsqueeze(heads - count)", "table.unsqueeze(-2)"),
    Mutant("sbhd not transposed", REFERENCE, "table.transpose(0, 1) if tokens < batch else table", "table"),
    Mutant("tables: quadrant cut, not rounded", "_tables.py", "(phase + np.int64(1 << 61)) >> 62", "phase >> 62"),
    Mutant("tables: last coefficient", "_tables.py", "-3.858189007341667731e-13", "0.0"),
    Mutant("tables: factor on cos only", "_tables.py", "cos * factor, sin * factor", "cos * factor, sin"),
    Mutant("tables: unsigned positions wrap", "_tables.py", "if places.dtype == np.uint64 and", "if False and"),
    Mutant("tables: rows after the first part", "_tables.py", "range(0, rows.size, at_once)", "range(0, min(rows.size, at_once), at_once)"),
    Mutant("layouts: thd has a batch", "_layout.py", 'layout.index("b") if "b" in layout else None', 'layout.index("b") if "b" in layout else 0'),
    Mutant("kernels for any device", "kernels/cpu.py", 'if device is not None and device.type != "cpu":', "if False:"),
    Mutant("back is forth", REFERENCE, "-sin if back else sin", "sin"),
    Mutant("table gradient: sign", REFERENCE, "h * a - g * b", "h * a + g * b"),
    Mutant("table gradient: first tensor only", REFERENCE, "d_cos = d_cos + (g * a + h * b).sum(heads)", "d_cos = (g * a + h * b).sum(heads)"),
    Mutant("k with the heads of q", API, "(turned[0], turned[1])", "(turned[0], turned[1].expand_as(q))"),
    Mutant("batch rows after the first ignored", REFERENCE, "    if table.ndim == 1:\n", "    table = table[:1].expand_as(table) if table.ndim == 3 else table\n    if table.ndim == 1:\n"),
    Mutant("in place leaves k", OPS, "for group in [tensors] if", "for group in [tensors[:1]] if"),
    Mutant("in place leaves an unlike k", OPS, "else [[x] for x in tensors]", "else [[tensors[0]] for x in tensors]"),
    Mutant("in place is not told", OPS, "torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])", "pass"),
    Mutant("unlike q and k in one call", CHECKS, "q.dtype == k.dtype", "True"),
    Mutant("in place with learned tables keeps no copy", OPS, "[x.clone() for x in tensors] if learned else tensors", "tensors"),
    Mutant("k not checked", CHECKS, 'for name, x in zip(("q", "k"), tensors, strict=False):\n            tensor_fits(', 'for name, x in (("q", tensors[0]),):\n            tensor_fits('),
    Mutant("quick look forgets the tokens", CHECKS, " or shape[tokens] != table[-2]", ""),
    Mutant("quick look forgets the batch", CHECKS, "(batch is None or table[0] != shape[batch])", "batch is None"),
    Mutant("shared elements", CHECKS, "len(tensors) == 2 and _share_elements(*tensors)", "False"),
    Mutant("a parameter shares nothing", CHECKS, "type(q) not in PLAIN", "type(q) is not Tensor"),
    Mutant("shared elements of other strides", CHECKS, "np.shares_memory(np.asarray(_Addresses(q)), np.asarray(_Addresses(k)), max_work=10_000)", "q.stride() == k.stride()"),
    Mutant("zero tensor to a kernel", "kernels/backend.py", " or x._is_zerotensor()", ""),
    Mutant("quick look forgets the pairs", CHECKS, " or 2 * table[-1] != rotary_dim", ""),
    Mutant("quick look takes four axes", CHECKS, "not 2 <= len(table) <= 3", "not 2 <= len(table)"),
    Mutant("quick look takes sparse tables", CHECKS, "if cos.layout is not torch.strided or sin.layout is not torch.strided:\n        return False", "pass"),
    Mutant("pickled tables unchecked", API, "checks.tables(fields[0], fields[1], rotary_dim=context[2])", "pass"),
    Mutant("pickled pairing unchecked", API, "check_pairing(_WHO, pairing)", "pass"),
    Mutant("pickled offset unchecked", API, 'integer(_WHO, "rotary_offset", rotary_offset, at_least=0, at_most=MAX_HEAD_DIM)', "rotary_offset"),
    Mutant("fields in a file unchecked", API, "lambda context: _checked_context(*context)", "tuple"),
    Mutant("operator unchecked", OPS, "checks.operator_fits(tensors, cos, sin, layout, how[1], in_place=False)", "pass"),
    Mutant("operator in place unchecked", OPS, "checks.operator_fits(tensors, cos, sin, layout, how[1], in_place=True)", "pass"),
    Mutant("operator forgets the offset", CHECKS, "if rotary_offset < 0 or rotary_offset + 2 * cos.shape[-1] > head_dim:", "if False:"),
    Mutant("operator forgets k", CHECKS, "if not can_share_a_call(q, k, layout):", "if False:"),
    Mutant("q changed before k has no memory", OPS, "        checks.have_memory(tensors)  # before the first of two calls\n", "        pass\n"),
    Mutant("factors that float32 cannot hold", "_checks.py", "at_least=2.0**-63, at_most=2.0**63", "above=0.0"),
    Mutant("heads of any size", API, "at_least=end, at_most=MAX_HEAD_DIM", "at_least=end"),
    Mutant("q changed before autograd refuses k", CHECKS, "            _can_be_recorded(x)\n", "            pass\n"),
    Mutant("views that autograd refuses", CHECKS, 'and _creation_meta(x).name != "DEFAULT"', "and False"),
    Mutant("autocast in the reference", OPS, "if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):", "if True:"),
    Mutant("angles operator unchecked", "kernels/operators.py", "positions.dtype not in _INTEGERS or dtype not in _FLOATS or not steps", "False"),
    Mutant("broken kernel is not built", "kernels/cpu.py", "except ModuleNotFoundError:", "except ImportError:"),
    # the demo
    Mutant("demo: reference called kernel", "programs/demo.py", 'if state.startswith("not usable") or "ROPEWALK_BACKEND" in state:', 'if state.startswith("not usable"):'),
    Mutant("demo: kernel denied", "programs/demo.py", 'if state.startswith("not usable") or "ROPEWALK_BACKEND" in state:', "if True:"),
    Mutant("demo: growth claimed unseen", "programs/demo.py", "if drift == sorted(drift) and drift[-1] > drift[0]:", "if drift:"),
    Mutant("inverse turns the same way", API, "-self.sin / square", "self.sin / square"),
    Mutant("inverse keeps the factor", API, "square = self.attention_factor * self.attention_factor", "square = 1.0"),
    Mutant("inverse applies the factor twice", API, "square = self.attention_factor * self.attention_factor", "square = self.attention_factor ** 3"),
    Mutant("inverse forgets its own factor", API, "attention_factor=1.0 / self.attention_factor", "attention_factor=self.attention_factor"),
    Mutant("negative rows wrap", API, "torch.nn.functional.embedding(rows, self.cos), torch.nn.functional.embedding(rows, self.sin)", "self.cos[rows.long()], self.sin[rows.long()]"),
    Mutant("immutable no more", API, 'raise AttributeError(f"Rotation', 'object.__setattr__(self, name, value)\n        return\n        raise AttributeError(f"Rotation'),
    Mutant("batch not checked", CHECKS, "cos.shape[0] != 1 and cos.shape[0] != batch", "False"),
    Mutant("tokens not checked", CHECKS, "if seq != cos.shape[-2]:", "if False:"),
    Mutant("head_dim not checked", CHECKS, "if x.shape[-1] != head_dim:", "if False:"),
    Mutant("tables in bfloat16 pass", CHECKS, "(torch.float32, torch.float64)\n_DTYPES", "(torch.float32, torch.float64, torch.bfloat16)\n_DTYPES"),
    # gradients
    Mutant("backward not conjugated", OPS, "back=not ctx.back", "back=ctx.back"),
    Mutant("backward forgets the offset", OPS, '"pairing": pairing, "rotary_offset": rotary_offset}\n        ctx.back', '"pairing": pairing, "rotary_offset": 0}\n        ctx.back'),
    Mutant("kernel under transforms", "kernels/backend.py", "None if must_be_seen() else _of(tensors)", "_of(tensors)"),
    Mutant("Function under transforms", OPS, "if kernel is None and backend.must_be_seen():", "if False:"),
    Mutant("opaque under functorch", "kernels/backend.py", "        or torch._C._are_functorch_transforms_active()\n", ""),
    Mutant("opaque in forward mode", "kernels/backend.py", "        or torch.autograd.forward_ad._current_level >= 0\n", ""),
    Mutant("several gradients at once", OPS, "torch._C._functorch.is_legacy_batchedtensor(grad) for grad", "False for grad"),
    Mutant("no gradient to cos", OPS, "        if ctx.learned:\n", "        if False:\n"),
    Mutant("gradient to sin of a turn back", OPS, "-d_sin if back else d_sin", "d_sin"),
    Mutant("no Function at all", OPS, "if torch.is_grad_enabled() and (tensors[0]", "if False and (tensors[0]"),
    # angles
    Mutant("cos and sin swapped", "rope.py", "unchecked(cos, sin, self", "unchecked(sin, cos, self"),
    Mutant("attention factor dropped", "rope.py", "factor = self.attention_factor\n        tables =", "factor = 1.0\n        tables ="),
    Mutant("usual angles while compiling", "angles.py", " or device is not None or torch.compiler.is_compiling():", " or device is not None:"),
    Mutant("usual angles for any device", "angles.py", " or device is not None or torch", " or torch"),
    Mutant("usual call while compiling", "rotation/api.py", "if not backend.AT_ONCE or torch.compiler.is_compiling():", "if not backend.AT_ONCE:"),
    Mutant("usual call though another is asked for", "kernels/backend.py", "AT_ONCE = _USES_CPU and cpu.AT_ONCE", "AT_ONCE = cpu.AT_ONCE"),
    Mutant("usual call unseen by functorch", "kernels/cpu.py", "    torch._C._are_functorch_transforms_active,\n", ""),
    Mutant("usual call unseen by modes", "kernels/cpu.py", "    torch._C._len_torch_dispatch_stack,\n", ""),
    Mutant("usual call unseen by the profiler", "kernels/cpu.py", "    torch._C._autograd._profiler_enabled,\n", ""),
    # float32 of deployed code
    Mutant("yarn's share as the ramp", "schemes/yarn.py", "* (1 - kept) + 1.0", "* ((index - first) / (last - first)).clamp(0, 1) + 1.0"),
    Mutant("llama3 blend divided last", "schemes/llama3.py", "blended = (1 - smooth) * kept / self.factor", "blended = (1 - smooth) * (kept / self.factor)"),
    Mutant("steps of the exact frequencies", "rope.py", "angles.cos_sin(positions, steps, inv_freq, factor, device", "angles.cos_sin(positions, self._steps, inv_freq, factor, device"),
    Mutant("float32 frequencies in the caller's thread", "_float32.py", "apart.submit(make, base, rotary_dim).result()", "make(base, rotary_dim)"),
    Mutant("float32 product in float64", "angles.py", "angle = positions.to(torch.float32).unsqueeze(-1) * speeds", "angle = (positions.to(torch.float64).unsqueeze(-1) * speeds).to(torch.float32)"),
    # models of transformers
    Mutant("grid: merge order", "positions/grids.py", "one.transpose(2, 3).flatten()", "one.flatten()"),
    Mutant("axis in float32", "positions/axes.py", 'number.device.type == "mps"', "True"),
    Mutant("augment: one number for both axes", "positions/augmentation.py", "uniform(axes, math.log(", "uniform(1, math.log("),
    Mutant("mrope: behind all of the box", "positions/multimodal.py", "else pieces[-1].max() + 1", "else torch.cat(pieces, 1).max() + 1"),
    Mutant("mrope: order of the product", "positions/multimodal.py", "return (frame * (per_second * seconds)).to(torch.int64)", "return (frame * seconds * per_second).to(torch.int64)"),
    Mutant("mrope: chunks catch up", "positions/multimodal.py", "if time >= len(sizes) * chunk:", "while time >= len(sizes) * chunk:"),
    Mutant("vllm: on without being asked", "integrations/vllm/plugin.py", 'return "ropewalk" in [', 'return True or "ropewalk" in ['),
    Mutant("vllm: on for every name that holds it", "integrations/vllm/plugin.py", '"ropewalk" in [name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(",")]', '"ropewalk" in os.environ.get("VLLM_PLUGINS", "")'),
    Mutant("vllm: registered again", "integrations/vllm/plugin.py", "if getattr(worker, _RPC, None) is not None:", "if False:"),
    Mutant("vllm: another plugin overwritten", "integrations/vllm/plugin.py", "if name in registry]", "if name in {}]"),
    Mutant("vllm: its name for custom_ops lost", "integrations/vllm/plugin.py", 'members["name"] = theirs.name', 'members["name"] = name'),
    Mutant("vllm: LongRoPE not replaced", "integrations/vllm/plugin.py", "setattr(package, name, made)", "pass"),
    Mutant("vllm: every error is the plugin's", 'integrations/vllm/plugin.py', 'if _RPC not in str(e):', 'if False:'),
    Mutant("vllm: pairing read once", "integrations/vllm/layers.py", 'return ropes[getattr(self, "is_neox_style", True), positions.ndim == 1]', "return ropes[True, positions.ndim == 1]"),
    Mutant("vllm: one rotation for all positions of a pass", "integrations/vllm/layers.py", "if found is None or found[1] is not positions:", "if found is None:"),
    Mutant("vllm: one rotation for all ropes of a pass", "integrations/vllm/layers.py", "found = kept.get(id(rope))", "found = kept.get(id(rope)) or next(iter(kept.values()), None)"),
    Mutant("vllm: angles in every layer", "integrations/vllm/layers.py", "kept[id(rope)] = found", "pass"),
    Mutant("vllm: native in place", "integrations/vllm/layers.py", "return self._new(_made(self._rope(self.ropes, positions), positions, offsets), query, key)\n\n    def _heads", 'return self.forward(positions, query, key, offsets)\n\n    def _heads'),
    Mutant("vllm: offsets ignored", "integrations/vllm/layers.py", "positions if offsets is None else positions + offsets", "positions"),
    Mutant("vllm: deepseek in place", "integrations/vllm/plugin.py", '"in_place": name not in _FUNCTIONAL', '"in_place": True'),
    Mutant("vllm: not compared with the table", "integrations/vllm/layers.py", "if differs and not override:", "if False:"),
    Mutant("vllm: factor not compared", "integrations/vllm/ropes.py", "if abs(factor - wanted) > _RELATIVE * wanted:", "if False:"),
    Mutant("vllm: frequencies compared loosely", "integrations/vllm/ropes.py", "_RELATIVE = 5e-7", "_RELATIVE = 5e-5"),
    Mutant("vllm: yarn without its factor", "integrations/vllm/ropes.py", "attention_factor=layer.mscale", "attention_factor=None"),
    Mutant("vllm: yarn always truncates", "integrations/vllm/ropes.py", 'getattr(layer, "truncate", True)', "True"),
    Mutant("vllm: frequencies of a short engine", "integrations/vllm/ropes.py", "return rope.at_length(length)", "return rope.at_length(1)"),
    Mutant("vllm: sections in turn", "integrations/vllm/ropes.py", "if layer.mrope_interleaved else", "if not layer.mrope_interleaved else"),
    Mutant("vllm: length of the longer table", "integrations/vllm/ropes.py", 'getattr(layer, "rows_asked_for", layer.max_position_embeddings)', "layer.max_position_embeddings"),
    Mutant("vllm: overrides unasked", "integrations/vllm/layers.py", '.get("ropewalk", {"override": False})', '.get("ropewalk", {"override": True})'),
    Mutant("vllm: what is asked is not read", "integrations/vllm/layers.py", "override = _override()", "override = False"),
    Mutant("vllm: idle workers are in force", "integrations/vllm/__main__.py", 'if not any(layer["calls"] for layer in each["layers"]):', "if False:"),
    Mutant("transformers: one row of positions for all", "integrations/transformers/angles.py", "position_ids[0] if shared else position_ids", "position_ids[0]"),
    Mutant("transformers: positions of several axes", "integrations/transformers/angles.py", "if position_ids.ndim > 2:", "if position_ids.ndim > 9:"),
    Mutant("transformers: a pickle without dispatchers", "integrations/transformers/angles.py", "for place, form in self.forms.items():\n            install(place, form)", "pass"),
    Mutant("transformers: tables cast by the model", "integrations/transformers/angles.py", "probe = x[..., :1].float()", "probe = x[..., :1]"),
    Mutant("transformers: saved frequencies lost", "integrations/transformers/angles.py", "return self.original.state_dict(", "return super().state_dict("),
    Mutant("transformers: the first channels for the last", "integrations/transformers/dispatch.py", 'offset = head_dim - rotary_dim if form.whole == "last" else 0', "offset = 0"),
    Mutant("transformers: output in the other order", "integrations/transformers/probe.py", "x[..., start:end:2], x[..., start + 1 : end : 2]", "x[..., start + 1 : end : 2], x[..., start:end:2]"),
    Mutant("transformers: other frequencies accepted", "integrations/transformers/compare.py", "_FLOAT32 = 2e-6", "_FLOAT32 = 2.0"),
    Mutant("transformers: another factor accepted", "integrations/transformers/compare.py", "_FACTOR = 1e-6", "_FACTOR = 1.0"),
    Mutant("transformers: cast there and back refused", "integrations/transformers/compare.py", "if torch.equal(built.to(dtype).to(built.dtype), built):", "if built.dtype is dtype:"),
    Mutant("values that cannot be hashed", "schemes/_contract.py", "hash(made)  # a Rope", "pass  # a Rope"),
    Mutant("any number of frequencies", "schemes/_contract.py", " or len(inv_freq) != pairs:", ":"),
    Mutant("a scheme that can be changed", "schemes/_contract.py", "(made.frozen and made.eq)", "made.eq"),
    Mutant("gguf: another base taken for the usual one", "configs/gguf/read.py", "if name == BASE:", "if BASE in keys:"),
    Mutant("attended in another dtype", "attention/attend.py", " or attended.dtype != v.dtype:", ":"),
    Mutant("what is left of a refused benchmark", "programs/bench/report.py", "if not existed:", "if False:"),
    Mutant("gguf: a scheme may lack its keys", "configs/gguf/scheme.py", "if name is not None and (stated is not None or not optional):", "if name is not None and stated is not None:"),
    Mutant("attention factor on cos only", "angles.py", "(angle.sin() * factor)", "angle.sin()"),
    Mutant("attention factor on sin only", "angles.py", "(angle.cos() * factor)", "angle.cos()"),
    Mutant("shift with the factor", "rope.py", "angles.delta_tensor(delta, device), 1.0,", "angles.delta_tensor(delta, device), self.attention_factor,"),
    Mutant("step from float32 inv_freq", "rope.py", "_fixed_point.step(w)", "_fixed_point.step(float(np.float32(w)))"),
    Mutant("step truncated", "_fixed_point.py", "round(turns)", "int(turns // 4096 * 4096)"),
    Mutant("negative positions", "angles.py", "positions.to(torch.int64).unsqueeze(-1) * speeds", "positions.to(torch.int64).abs().unsqueeze(-1) * speeds"),
    Mutant("int32 product", "angles.py", "positions.to(torch.int64).unsqueeze(-1) * speeds", "positions.to(torch.int32).to(torch.int64).unsqueeze(-1) % 2**30 * speeds"),
    Mutant("quadrant off by one", "angles.py", "(phase + (1 << 61)) >> 62", "(phase + (3 << 61)) >> 62"),
    Mutant("quadrant cut, not rounded", "angles.py", "(phase + (1 << 61)) >> 62", "phase >> 62"),
    Mutant("sign of cos by quadrant", "angles.py", "((quadrant + 1) & 2)", "(quadrant & 2)"),
    Mutant("one coefficient", "angles.py", "0.015854344232677915077", "0.015854"),
    Mutant("low part of pi dropped", "angles.py", "_QUARTER_PI_LOW = math.pi / 4 - _QUARTER_PI_HIGH", "_QUARTER_PI_LOW = 0.0"),
    Mutant("steps kept from fake tensors", "kernels/steps.py", "        or type(positions) is not Tensor\n", ""),
    Mutant("16-bit positions pass", "angles.py", "if positions.dtype not in _INTEGERS + _FLOATS:", "if False:"),
    # schemes
    Mutant("head_dim in the exponent", "rope.py", "default.inv_freq(self.base, self.rotary_dim)", "default.inv_freq(self.base, self.head_dim)[: self.rotary_dim // 2]"),
    Mutant("exponent off by one pair", DEFAULT, "-2 * i /", "-2 * (i + 1) /"),
    Mutant("linear multiplies", "schemes/linear.py", "w / self.factor", "w * self.factor"),
    Mutant("yarn ramp swapped", YARN, "w / self.factor * s + w * (1 - s)", "w / self.factor * (1 - s) + w * s"),
    Mutant("yarn ends swapped", YARN, "low, high = self.ramp(base, rotary_dim)", "high, low = self.ramp(base, rotary_dim)"),
    Mutant("yarn ceil for floor", YARN, "math.floor(low), math.ceil(high)", "math.ceil(low), math.ceil(high)"),
    Mutant("yarn floor for ceil", YARN, "math.floor(low), math.ceil(high)", "math.floor(low), math.floor(high)"),
    Mutant("yarn truncate ignored", YARN, "if self.truncate:", "if True:"),
    Mutant("yarn lower clamp dropped", YARN, "max(low, 0), min", "low, min"),
    Mutant("yarn upper clamp dropped", YARN, "min(high, rotary_dim - 1)", "high"),
    Mutant("yarn upper clamp at the last pair", YARN, "min(high, rotary_dim - 1)", "min(high, rotary_dim // 2 - 1)"),
    Mutant("yarn ramp not clamped", YARN, "min(max((i - low) / (high - low), 0.0), 1.0)", "(i - low) / (high - low)"),
    Mutant("yarn ramp without width", YARN, "(low, high + 0.001) if low == high", "(low, high + 1.0) if low == high"),
    Mutant("yarn betas swapped", YARN, "low = self._index_of_turns(self.beta_fast,", "low = self._index_of_turns(self.beta_slow,"),
    Mutant("yarn attention_factor ignored", YARN, "if self.attention_factor is not None:\n            return", "if False:\n            return"),
    Mutant("yarn mscale alone counts", YARN, "if self.mscale and self.mscale_all_dim:", "if self.mscale:"),
    Mutant("yarn mscale upside down", YARN, "self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)", "self._magnitude(self.mscale_all_dim) / self._magnitude(self.mscale)"),
    Mutant("llama3 smooth inverted", LLAMA3, "(1 - smooth) * w / self.factor + smooth * w", "smooth * w / self.factor + (1 - smooth) * w"),
    Mutant("llama3 edge divides by zero", LLAMA3, "if turns <= self.low_freq_factor:", "if turns < self.low_freq_factor:"),
    Mutant("llama3 high ignored", LLAMA3, "if turns > self.high_freq_factor:", "if turns > 8192:"),
    # positions
    Mutant("packed without restart", "positions/tokens.py", "return token - starts[", "return token + 0 * starts["),
    Mutant("packed off by one", "positions/tokens.py", "right=True) - 1", "right=False) - 1"),
    Mutant("ragged ignores offsets", "positions/tokens.py", "offsets.to(torch.int64).unsqueeze(1) +", "0 * offsets.to(torch.int64).unsqueeze(1) +"),
    Mutant("mask counts from one", "positions/tokens.py", "(real.cumsum(dim=1) - 1)", "(real.cumsum(dim=1))"),
    # schemes that depend on the length, and single pairs
    Mutant("dynamic alpha", "schemes/dynamic.py", "- (self.factor - 1)", "- self.factor"),
    Mutant("dynamic scales within the trained length", "schemes/dynamic.py", "if n <= self.max_position_embeddings:", "if n < self.max_position_embeddings:"),
    Mutant("ntk exponent", "schemes/ntk.py", "(rotary_dim / (rotary_dim - 2))", "(rotary_dim / (rotary_dim - 1))"),
    Mutant("longrope switches one token early", "schemes/longrope.py", "n > self.original_max_position_embeddings", "n >= self.original_max_position_embeddings"),
    Mutant("longrope lists swapped", "schemes/longrope.py", "self.long_factor if long else self.short_factor", "self.short_factor if long else self.long_factor"),
    Mutant("longrope attention factor", "schemes/longrope.py", "math.sqrt(1 + math.log", "math.sqrt(math.log"),
    Mutant("longrope mscale ignored", "schemes/longrope.py", "self._magnitude() if mscale is None else mscale", "self._magnitude()"),
    Mutant("proportional share of channels", "schemes/proportional.py", "int(self.partial_rotary_factor * rotary_dim // 2)", "int(self.partial_rotary_factor * rotary_dim)"),
    Mutant("per pair multiplies", "schemes/per_pair.py", "tuple(w / f for", "tuple(w * f for"),
    Mutant("unresolved rope passes", "rope.py", "if self._inv_freq is None:\n            raise self._unresolved()\n        return self._inv_freq", "return self._inv_freq or ()"),
    # attention
    Mutant("softmax factor ignored", "nn.py", "self.head_dim**-0.5 * self.softmax_factor", "self.head_dim**-0.5"),
    Mutant("norm after turning", "nn.py", "self.k_norm(k).to(v.dtype)", "self.q_norm(k).to(v.dtype)"),
    Mutant("far queries turned twice", "attention/attend.py", "rotation.far_queries(q,", "rotation.far_queries(q_near,"),
    Mutant("mask without causality", "attention/attend.py", "return mask & seen if", "return mask if"),
    Mutant("additive mask without causality", "attention/attend.py", "torch.where(seen, mask, -math.inf)", "mask"),
    Mutant("blind query is nan", "attention/attend.py", "scores.masked_fill(blind, 0.0).softmax", "scores.softmax"),
    Mutant("blind query sees", "attention/attend.py", ".softmax(-1).masked_fill(blind, 0.0)", ".softmax(-1)"),
    Mutant("far and near swapped", "attention/attend.py", "torch.where(self.far, _scores(q_far, k_far), _scores(q, k))", "torch.where(self.far, _scores(q, k), _scores(q_far, k_far))"),
    Mutant("neighbouring documents seen", "attention/masks.py", "(start[:, None] == start) & (token", "(token"),
    Mutant("blocks see ahead", "attention/masks.py", "(start[query] == start[key]) & (query >= key)", "(start[query] == start[key])"),
    Mutant("window one longer", "attention/self_extend.py", "distance >= self.window", "distance > self.window"),
    Mutant("window not grouped", "attention/self_extend.py", "self.window - self.window // self.group", "self.window"),
    Mutant("query not grouped", "attention/self_extend.py", "positions // self.group +", "positions +"),
    Mutant("attention factor of far keys", "attention/self_extend.py", "self.rope.shift(keys // self.group - keys,", "self.rope.at(keys // self.group - keys,"),
    # the cache
    Mutant("window one shorter", "attention/kv_cache.py", "in_window = distance < self._slots.ring", "in_window = distance < self._slots.ring - 1"),
    Mutant("causality by position", "attention/kv_cache.py", "mask = torch.arange(count, device=order.device) <= order[:, :, None]", "mask = key_positions[:, None, :] <= given[:, :, None]"),
    Mutant("a row of padding moves on", "attention/kv_cache.py", "torch.where(added > 0, largest + 1, self.position)", "largest + 1"),
    Mutant("sinks let go", "attention/kv_cache.py", "(in_window | (key_order < self.sinks)[:, None] if self.sinks else in_window)", "in_window"),
    Mutant("sinks at true distance", "attention/cache_step.py", "self.positions - excess", "self.positions"),
    Mutant("sinks one farther", "attention/cache_step.py", "self.order - (self._cache._slots.count - 1)", "self.order - self._cache._slots.count"),
    Mutant("padding kept", "attention/slots.py", "real & (order < self.count)", "order < self.count"),
    Mutant("padding kept in the window", "attention/slots.py", "kept = real & ((order", "kept = ((order"),
    Mutant("padding seen", "attention/kv_cache.py", "order.masked_fill(~real, EMPTY)", "order"),
    Mutant("padding sees nothing", "attention/kv_cache.py", "mask = mask | ~real[:, :, None]", "pass"),
    Mutant("several tokens overwrite what is seen", "attention/kv_cache.py", "beside = self._slots.evicts and seq > 1", "beside = False"),
    Mutant("ring written twice", "attention/slots.py", "(order >= total[:, None] - self.ring)", "(order >= 0)"),
    Mutant("overflow kept", "attention/slots.py", "real & (order < self.count)", "real"),
    Mutant("attention factor of shifted keys", "attention/kv_cache.py", "one.shift(by, device", "one.at(torch.as_tensor(by).expand(1, 1) if isinstance(by, int) else by, device"),
    Mutant("shift leaves the next token", "attention/kv_cache.py", "        self.position.add_(delta)\n", ""),
    Mutant("shift moves empty slots", "attention/kv_cache.py", "torch.where(self._key_positions == EMPTY, EMPTY, moved)", "moved"),
    Mutant("draft not forgotten", "attention/kv_cache.py", "masked_fill_(slot >= length[:, None], EMPTY)", "clone()"),
    Mutant("draft still counted", "attention/kv_cache.py", "self.length.copy_(length)", "pass"),
    Mutant("reset keeps keys", "attention/kv_cache.py", "self._key_positions.masked_fill_(chosen[:, None], EMPTY)", "pass"),
    Mutant("two-axis masks pass", "attention/attend.py", "    if mask.ndim != 4:\n        raise", "    if False:\n        raise"),
    Mutant("attend takes any mask", "attention/attend.py", "    if isinstance(mask, Tensor) and mask.ndim != 4:", "    if False:"),
    Mutant("two passes take any mask", "attention/attend.py", '        check_mask("TwoPass.attend", mask, q, k.shape[1])\n', ""),
    Mutant("mask of any size", "attention/attend.py", "if not all(have == 1 or have == want", "if False and not all(have == 1 or have == want"),
    Mutant("window mask one longer", "attention/masks.py", "(distance < window)", "(distance <= window)"),
    Mutant("window mask sees ahead", "attention/masks.py", "((distance >= 0) & (distance < window))", "(distance < window)"),
    Mutant("window blocks one longer", "attention/masks.py", "(query - key < window)", "(query - key <= window)"),
    Mutant("window blocks see ahead", "attention/masks.py", "(query >= key) & (query - key < window)", "(query - key < window)"),
    Mutant("padding blocks see ahead", "attention/masks.py", "real[row, key] & (query >= key)", "real[row, key]"),
    Mutant("padding blocks of one row", "attention/masks.py", "real[row, key] &", "real[0, key] &"),
    Mutant("lengths one longer", "attention/masks.py", "device=attention_mask.device) < attention", "device=attention_mask.device) <= attention"),
    Mutant("mask not cast under autocast", "nn.py", "            mask = mask.to(q.dtype)\n", "            pass\n"),
    Mutant("mask cast outside autocast", "nn.py", "mask.is_floating_point() and torch.is_autocast_enabled(q.device.type)", "mask.is_floating_point()"),
    Mutant("norm keeps float32", "nn.py", "self.k_norm(k).to(v.dtype)", "self.k_norm(k)"),
    Mutant("rotation unchecked", "attention/cache_step.py", "self.step._check_rotation(rotation)", "pass"),
    Mutant("rotation of any shape", "attention/cache_step.py", "if cos.shape[:-1] != self.positions.shape:", "if False:"),
    Mutant("two passes for new keys only", "attention/cache_step.py", "rotation.far.shape[-1] != self.key_positions.shape[1]", "False"),
    Mutant("rotation of the step before passes", "attention/cache_step.py", "if any(other() is cos for other in self._progress.earlier):", "if False:"),
    Mutant("rotation at the same place refused", "attention/kv_cache.py", "before.moves_on and at is None and positions is None", "before.moves_on and positions is None"),
    Mutant("rotation after padding refused", "attention/kv_cache.py", "before is not None and before.moves_on and at", "before is not None and at"),
    Mutant("a layer appends twice", "attention/cache_step.py", "        if self._progress.stored:\n", "        if False:\n"),
    Mutant("an outdated step appends", "attention/cache_step.py", "        if progress.outdated:\n", "        if False:\n"),
    Mutant("a layer left out", "attention/cache_step.py", "if self._is_last and progress.stored() != len(progress.layers) - 1:", "if False:"),
    Mutant("first layer commits", "attention/cache_step.py", "        if self._is_last:\n            self.step._commit()", "        if self._progress is self.step._progress.layers[0]:\n            self.step._commit()"),
    Mutant("keys not committed", "attention/cache_step.py", "        self._cache._key_positions.scatter_(1, self._slot, self.positions)\n", ""),
    Mutant("half a step passed over", "attention/kv_cache.py", "        if 0 < stored < self.num_layers:\n            raise", "        if False:\n            raise"),
    Mutant("overwritten keys rolled back", "attention/kv_cache.py", "if pending is not None and pending.overwrites and 0 <", "if False and 0 <"),
    Mutant("rollback leaves the step open", "attention/kv_cache.py", 'beginning.",\n            )\n        self._drop()\n', 'beginning.",\n            )\n        self._pending = None\n'),
    Mutant("shift leaves the step open", "attention/kv_cache.py", "        self._drop()\n        for keys, one", "        for keys, one"),
    Mutant("reset leaves the step open", "attention/kv_cache.py", "        self._drop()\n        self.length.masked_fill_", "        self.length.masked_fill_"),
    Mutant("reset of rows after half a step", "attention/kv_cache.py", '            self._finished("KVCache.reset")\n', ""),
    Mutant("reset keeps the length", "attention/kv_cache.py", "        self.length.masked_fill_(chosen, 0)\n", ""),
    Mutant("reset keeps the position", "attention/kv_cache.py", "        self.position.masked_fill_(chosen, 0)\n", ""),
    Mutant("reset of rows is of all", "attention/cache_checks.py", "index_fill_(0, rows.to(length), True)", "logical_not()"),
    Mutant("rows beyond the batch", "attention/cache_checks.py", "if first < 0 or last >= batch:", "if first < 0 or last > batch:"),
    Mutant("sinks beside forgotten", "attention/cache_step.py", "else self._key_order < sinks", "else self._key_order < 0"),
    # configs
    Mutant("contradiction passes", "configs/reader.py", "elif before.value != value:", "elif False:"),
    Mutant("share of the top before its own", "configs/reader.py", "                del given[str(key)]\n", "                continue\n"),
    Mutant("key beside nested ones is of all", "configs/reader.py", "if not known and str(key) in given:", "if False:"),
    Mutant("idle key without a warning", "configs/strays.py", 'warnings.append(f"{key} has no effect: {idle[key]}.")', "pass"),
    Mutant("misspelt key unnamed where reading failed", "configs/hf.py", "        if row.describes:", "        if False:"),
    Mutant("another value than the fixed one passes", "configs/architecture.py", "and c.fields.get(key) != value:", "and False:"),
    Mutant("indexer of another pairing", "configs/reader.py", "            pairing = stated\n", "            pass\n"),
    Mutant("ignored in silence", "configs/read.py", "warnings=(*ropes.warnings, *warnings)) if ignored", "warnings=ropes.warnings) if ignored"),
    Mutant("what is not there is ignored", "configs/source.py", "        if key not in place:\n            meant", "        if False:\n            meant"),
    Mutant("downloads unasked", "configs/hub.py", "    if not download:", "    if False:"),
    Mutant("nested text model without its name", "configs/wrappers.py", "whole[\"model_type\"] = _INNER[model_type]", "pass"),
    Mutant("flat keys of a wrapper", "configs/wrappers.py", "if flat is not None and", "if False and"),
    Mutant("layers without attention turn", "configs/families/nemotron.py", "NO_ROPE if absent else ALL", "ALL"),
    Mutant("neighbours in halves", "configs/families/minimind.py", '"interleaved" if c.fields.has("dim") else "half"', '"half"'),
    Mutant("Baichuan 13B rotates", "configs/families/baichuan.py", 'if c.fields.get("hidden_size") != 4096:', "if False:"),
    Mutant("query by the wrong power", "configs/families/scaled_query.py", "** self.power", "** -self.power"),
    Mutant("gguf: own head of sliding layers", "configs/gguf/read.py", "(DIM_SWA, DIM) if kind.own_head else (DIM,)", "(DIM,)"),
    Mutant("gguf: a tenth of mscale", "configs/gguf/scheme.py", 'row.yarn_log == "tenth"', 'row.yarn_log == ""'),
    Mutant("gguf: first of every n", "configs/gguf/layers.py", "at = 0 if pattern.first else n - 1", "at = n - 1"),
    Mutant("unused key passes", "configs/hf_scheme.py", "        elif key in idle:", "        elif True or key in idle:"),
    Mutant("misspelt key passes", "configs/strays.py", "elif _is_about_rotation(str(key)):", "elif False:"),
    Mutant("misplaced key passes", "configs/strays.py", "or key in _MISPLACED", "or False"),
    Mutant("base guessed", "configs/reader.py", 'if implied is None or self.fields.has("rope_parameters"):', "if False:"),
    Mutant("lost base guessed", "configs/reader.py", 'if implied is None or self.fields.has("rope_parameters"):', "if implied is None:"),
    Mutant("su not read", "schemes/longrope.py", '("su",)', "()"),
    Mutant("head_dim worked out though given", "configs/reader.py", "if key and self.fields.has(key):", "if False:"),
    Mutant("head_dim guessed", "configs/reader.py", "        if needed:", "        if False:"),
    Mutant("slice at the front", "configs/families/latent.py", "return still + turned, turned, still", "return still + turned, turned, 0"),
    Mutant("trailing slice at the front", "configs/families/deepseek.py", "head_dim - min(rotary_dim, head_dim)", "0"),
    Mutant("trailing slice of the indexer at the front", "configs/reader.py", "max(width - rope.rotary_dim, 0) if trailing else 0", "0"),
    Mutant("null base turns", "configs/families/olmo_hybrid.py", 'if c.fields.is_null("rope_theta"', 'if False and c.fields.is_null("rope_theta"'),
    Mutant("dense full layers stand still", "configs/families/cohere_moe.py", "rotates = own == 1", "rotates = False"),
    Mutant("dense full layers always turn", "configs/families/cohere_moe.py", "rotates = own == 1", "rotates = True"),
    Mutant("implied factor forgotten", "configs/families/deepseek.py", "if kind is _COMPRESSED and not c.nested", "if False and not c.nested"),
    Mutant("layers of null parameters turn", "configs/reader.py", "return self.nested and section in parameters", "return False and section in parameters"),
    Mutant("entries of other layers", "configs/families/step.py", "if layers[i] == name:", "if i == 0:"),
    Mutant("flat parameters written nested", "configs/hf_write.py", "not row.flat and (len(rotating) > 1 or not rotating[0].bases)", "True"),
    Mutant("null base not written", "configs/hf_write.py", "    if not said:", "    if False:"),
    Mutant("rope_ratio forgotten", "configs/families/chatglm.py", "_BASE * factor", "_BASE"),
    Mutant("one attention a layer", "configs/families/longcat.py", "return 2 * super().count(c)", "return super().count(c)"),
    Mutant("sliding heads of the full size", "configs/families/latent.py", 'c.own_size(name, layers, "qk_nope_head_dim") or', "None or"),
    Mutant("implied share ignored", "configs/reader.py", "if share in (None, 1.0):", "if True:"),
    Mutant("share on llama passes", "configs/reader.py", "(value < 1.0 and share is None)", "False"),
    Mutant("scaling on local layers", "configs/reader.py", "if scaled or (key", "if True or (key"),
    Mutant("nested parameters of another kind", "configs/reader.py", "mine = values.get(name)", "mine = next(iter(values.values()))"),
    Mutant("softmax factor not squared", YARN, "return m * m", "return m"),
    Mutant("output order forgotten", "configs/architecture.py", 'self.output_order if pairing == "interleaved" else None', "None"),
    Mutant("pattern off by one", "configs/layers.py", "at = 0 if self.first else n - 1", "at = 0"),
    Mutant("no_rope_layers inverted", "configs/layers.py", "[ALL if flag else NO_ROPE for", "[NO_ROPE if flag else ALL for"),
    Mutant("query scale a token late", "configs/layer_ropes.py", "1 + position // self", "1 + (position - 1) // self"),
    Mutant("trained length is any length", YARN, "return self.original_max_position_embeddings\n", "return longest\n"),
    Mutant("a scheme of another's name", "schemes/__init__.py", "    if taken:", "    if False:"),
    Mutant("alpha not read", "schemes/dynamic.py", 'NTK if "alpha" in keys else cls', "cls"),
    Mutant("longrope factor not worked out", "schemes/longrope.py", "if \"factor\" in given or longest", "if True or longest"),
    Mutant("several axes pass", "configs/architecture.py", "if self.axes > 1 and not c.text_only:", "if False:"),
    Mutant("another base than the file's", "configs/fields.py", "if passed not in (None, base):", "if False:"),
    Mutant("head_dim rounded down", "configs/fields.py", "if width % count:", "if False:"),
    Mutant("errors without the file", "configs/fields.py", "if str(e).startswith(self.source) else", "if True else"),
    Mutant("meta factor guessed", "configs/meta.py", "if stated is None and factor is None:", "if False:"),
    Mutant("meta pairing", "configs/meta.py", '"interleaved", scaling', '"half", scaling'),
    Mutant("share not written", "configs/hf_write.py", "if share is not None:\n        parameters", "if False:\n        parameters"),
    Mutant("duplicate key passes", "configs/source.py", "if len(result) < len(pairs):", "if False:"),
    # files, messages and the command line, whatever they hold
    Mutant("config: arrays stay arrays", SOURCE, 'if callable(getattr(value, "tolist", None)):', "if False:"),
    Mutant("config: NumPy's floats stay", SOURCE, "type(value) in (str, bool, int, float)", "isinstance(value, str | int | float)"),
    Mutant("config: keys of any size", SOURCE, "key.bit_length() <= 64", "True"),
    Mutant("config: any depth", SOURCE, "if depth > _MAX_DEPTH:", "if False:"),
    Mutant("config: bytes paths", SOURCE, "Path(os.fsdecode(source))", "Path(source)"),
    Mutant("config: any number of keys", "configs/strays.py", "if len(fields.config) > _MAX_KEYS:", "if False:"),
    Mutant("message: huge integers", "_checks.py", "if x.bit_length() > 4096:", "if False:"),
    Mutant("message: raw", "_checks.py", "super().__init__(printable(message))", "super().__init__(message)"),
    Mutant("message: long words likened", "_checks.py", "if len(word) > _MOST_LIKENED:", "if False:"),
    Mutant("message: any length", "_checks.py", "text if len(text) <= _MOST_SHOWN else", "text if True else"),
    Mutant("explain: raw", "configs/explain.py", "map(printable, lines)", "lines"),
    Mutant("explain: infinity", "configs/explain.py", "return ratio if math.isfinite(ratio) else None", "return ratio"),
    Mutant("gguf: a tensor twice", HEADER, "if name in names:", "if False:"),
    Mutant("gguf: long string", HEADER, "if size > _MAX_STRING:", "if False:"),
    Mutant("gguf: long header", HEADER, "if self.position + count > self.most:", "if False:"),
    Mutant("gguf: data behind the header", HEADER, "self.most = self.size", "pass"),
    Mutant("gguf: arrays in arrays", HEADER, "if self.arrays > _MAX_ARRAYS:", "if False:"),
    Mutant("gguf: edge of a block", HEADER, "at, last = 0, len(block) - _U64.size", "at, last = 0, len(block)"),
    Mutant("gguf: seek after strings", HEADER, "self.file.seek(self.position)\n\n", "\n"),
    Mutant("gguf: infinite softmax factor", "configs/gguf/read.py", "if not math.isfinite(factor):", "if False:"),
    Mutant("NTK overflow", "schemes/ntk.py", "if stretched == math.inf:", "if False:"),
    Mutant("dynamic overflow", "schemes/dynamic.py", "if not math.isfinite(alpha):", "if False:"),
    Mutant("tiny factors", "schemes/per_pair.py", "if factor < _LEAST:", "if False:"),
    Mutant("YaRN overflow", YARN, "if not math.isfinite(self.table_factor()) or self.table_factor() <= 0.0:", "if False:"),
    Mutant("params.json: any pairing", "configs/read.py", 'if pairing not in (None, "interleaved"):', "if False:"),
    Mutant("cli: encoding", "programs/cli.py", 'stream.reconfigure(errors="backslashreplace")', "pass"),
    Mutant("cli: closed pipe", "programs/cli.py", "        except BrokenPipeError:  # nobody reads on: click ends in silence, with exit status 1\n            raise\n", ""),
    Mutant("cli: plot path", "programs/cli.py", "    plots.check_path(plot)\n", ""),
    Mutant("plots: backend", "plots.py", "except ValueError as e:  # matplotlib", "except KeyError as e:  # matplotlib"),
    # the files of the lab
    Mutant("moment shapes not compared", CHECKPOINT, "        if kinds[name] != kind:\n", "        if False:\n"),
    Mutant("any number of losses", CHECKPOINT, " or not 1 <= losses.shape[0] <= steps", ""),
    Mutant("not finite", CHECKPOINT, "        if not value.isfinite().all():\n", "        if False:\n"),
    Mutant("squares below 0", CHECKPOINT, 'if name.startswith("exp_avg_sq.") and bool', "if False and bool"),
    Mutant("checksum not compared", CHECKPOINT, "    if _digest(tensors, metadata) != digest:\n", "    if False:\n"),
    Mutant("checksum of tensors alone", CHECKPOINT, "hashlib.sha256(json.dumps([metadata[key] for key in _METADATA[:3]]).encode())", "hashlib.sha256()"),
    Mutant("any scheme by name", CHECKPOINT, "or name not in _SCHEMES)", "or False)"),
    Mutant("extra tensors pass", CHECKPOINT, 'if different := sorted(kinds.keys() - {"losses"} ^ wanted.keys()):', "if different := sorted(wanted.keys() - kinds.keys()):"),
    Mutant("other keys pass", CHECKPOINT, "if keys is not None and value.keys() != set(keys):", "if keys is not None and not set(keys) <= value.keys():"),
    Mutant("rope of other heads", CHECKPOINT, 'if said["head_dim"] != size.head_dim:', "if False:"),
    Mutant("deep JSON", CHECKPOINT, "except (ValueError, RecursionError) as e:", "except ValueError as e:"),
    Mutant("written though not finite", CHECKPOINT, "if not torch.nn.utils.get_total_norm(tensors.values()).isfinite():", "if False:"),
    Mutant("headers of any length", FILES, "if header > LARGEST_HEADER:", "if False:"),
    Mutant("written in place", FILES, "    with writing(file, _beside(file)) as unfinished:", "    with writing(file, file) as unfinished:"),
    Mutant("what was begun stays", FILES, "            with suppress(OSError):\n                unfinished.unlink()\n", "            pass\n"),
    Mutant("a folder file by file", FILES, "            if there:\n                os.rename(folder, old)\n", "            if there:\n                shutil.copytree(folder, old)\n                shutil.rmtree(folder)\n"),
    Mutant("permissions of the library", FILES, "    file.chmod(mode)\n", ""),
    Mutant("errors of the library", FILES, "except (OSError, library.SafetensorError) as e:", "except OSError as e:"),
    Mutant("file replaced without force", FILES, "if file.exists() and not force:", "if False:"),
    Mutant("folder replaced without force", FILES, "if there and not force:", "if False:"),
    Mutant("whatever the folder holds", FILES, "sorted(name for name in there if name not in replaceable or not (folder / name).is_file())", "[]"),
    Mutant("current folder replaced", FILES, "if folder.exists() and (folder == Path.cwd() or os.path.ismount(folder)):", "if False:"),
    Mutant("folder named like a file", FILES, " or not (folder / name).is_file()", ""),
    Mutant("slower export", FILES, "elif e.errno in (errno.ENOTEMPTY, errno.EEXIST):", "elif False:"),
    Mutant("over its checkpoint", "lab/export.py", "path.exists() and path.samefile(file) for path in touched", "False for path in touched"),
    Mutant("tokenizer over the checkpoint", "lab/export.py", "[target, _tokenizer_beside(target)]", "[target]"),
    Mutant("shapes of the config alone", "lab/export.py", "            if kind.shape != shape:\n", "            if False:\n"),
    Mutant("byte 0 ends a piece", "lab/tokenizer.py", 'b"<0x00>"', 'b"\\0"'),
    Mutant("characters of GPT-2", "lab/tokenizer.py", "*range(0xAE, 0x100)", "*range(0xAD, 0x100)"),
    Mutant("space in front", "lab/tokenizer.py", '"pre_tokenizer": {\n                "type": "ByteLevel",\n                "add_prefix_space": False', '"pre_tokenizer": {\n                "type": "ByteLevel",\n                "add_prefix_space": True'),
    Mutant("nobody is kept out", "lab/lock.py", "        lock.acquire(timeout=0)\n", "        pass\n"),
    Mutant("kept after an error", "lab/lock.py", "    finally:\n        with suppress(OSError):  # Windows", "    except ValueError:\n        with suppress(OSError):  # Windows"),
    Mutant("any number of tokens", "lab/generate.py", "(len(prompt) + tokens) * for_each > LARGEST_CACHE", "tokens > 2**40"),
    Mutant("a slot for the last token", "lab/generate.py", "capacity=length - 1)", "capacity=length)"),
    Mutant("layers without bound", "lab/model.py", '    "num_layers": 2**10,\n', ""),
    Mutant("shape of key heads", "lab/model.py", '"self_attn.k_proj": (kv_width, width)', '"self_attn.k_proj": (width, width)'),
    # the study of the lab
    Mutant("a symbol too many counts", "lab/copying.py", "-words.shape[1] :] = True", "-words.shape[1] - 1 :] = True"),
    Mutant("every seed the same", "lab/copying.py", "(_TRAINING, seed, step)", "(_TRAINING, step)"),
    Mutant("dynamic at the trained length", "lab/methods.py", "return rope if n <= trained else", "return rope if n < trained else"),
    Mutant("by parts is YaRN", "lab/methods.py", ", attention_factor=1.0", ""),
    Mutant("an untrained distance", "lab/methods.py", "< trained)", "<= trained)"),
    Mutant("windows begin together", "lab/measure.py", "batch.tokens[:, -tokens:]", "batch.tokens[:, :tokens]"),
    Mutant("loss of what does not count", "lab/measure.py", "logits[mask].double(), targets[mask]", "logits.double().flatten(0, 1), targets.flatten()"),
    Mutant("fine-tunes on what was trained on", "lab/parts.py", "2 * self.seed + (self.method is not None)", "2 * self.seed"),
    Mutant("measured again", "lab/parts.py", "list(self.plans.items())[len(rows) :]", "list(self.plans.items())"),
    Mutant("kept whatever was asked", "lab/parts.py", ' if kept["asked"] == self._asked() else []', ""),
    Mutant("fine-tunes from nothing", "lab/parts.py", "model.load_state_dict(start.state_dict())", "pass"),
    Mutant("worst first", "lab/findings.py", "sign = -1 if more_is_better else 1", "sign = 1 if more_is_better else -1"),
    Mutant("luck is certain", "lab/findings.py", '"Expected, and so on {every}:": all', '"Expected, and so on {every}:": any'),
    Mutant("whole range", "lab/results.py", "min(self.values)) / 2", "min(self.values))"),
]  # fmt: skip


def nearest_first(file: str) -> list[list[str]]:
    """The suite in parts: the tests of this file, those of its folder, which nearly always notice, and all others."""
    path = Path(file)
    folders = ["rotation", "kernels"] if path.parent.name == "rotation" else path.parent.parts
    own = [tests for tests in SUITE if path.stem in tests]
    near = [tests for tests in SUITE if tests not in own and any(f"/{folder}" in tests for folder in folders)]
    others = [tests for tests in SUITE if tests not in own + near]
    return [part for part in (own, near, others) if part]


def survives(mutant: Mutant) -> bool:
    """Whether the suite stays green over this mutant."""
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "src"
        shutil.copytree(ROOT / "src", broken, ignore=shutil.ignore_patterns("__pycache__"))
        file = broken / "ropewalk" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"{mutant.name}: its text stands {text.count(mutant.old)} times in {mutant.file}, not once")
        file.write_text(text.replace(mutant.old, mutant.new))
        # Of an editable install: its finder, which would lead back to src/, and the kernel, which lies outside src/.
        (broken / "sitecustomize.py").write_text(
            "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        )
        if kernel := importlib.util.find_spec("ropewalk.kernels._cpu"):
            shutil.copy(str(kernel.origin), broken / "ropewalk" / "kernels")
        # On the CPU the kernels would do the work of the reference.
        plain = {"ROPEWALK_BACKEND": "reference"} if mutant.file in (REFERENCE, "angles.py") else {}
        suites = [(plain, [*SLOW_LEFT_OUT, *part]) for part in nearest_first(mutant.file)]
        for also, tests in GPU_SUITES if mutant.file in (GPU, KERNELS) else suites:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
            environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(broken), "OMP_NUM_THREADS": "1", **also}
            ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            if ran.returncode > 2:  # below 0: it wrote where it must not, and was stopped
                sys.exit(f"{mutant.name}: pytest could not run\n{ran.stdout}{ran.stderr}")
            if ran.returncode:
                return False
        return True


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    survivors = []
    with ThreadPoolExecutor(2) as pool:
        for mutant, survived in zip(chosen, pool.map(survives, chosen), strict=True):
            print(f"{'SURVIVED' if survived else 'killed  '}  {mutant.name}", flush=True)
            survivors += [mutant.name] * survived
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
