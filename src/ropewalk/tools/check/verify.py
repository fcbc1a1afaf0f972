"""Verify a loaded model of any engine: compare the tables that its modules hold with the ropes of its config.

Nothing is called, and nothing is known of the engine. A tensor is a table of angles by what it contains: frequencies,
or rows of cos and sin that begin with the angle 0. So an engine that computes its angles in a kernel shows none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ropewalk import ModelRopes, Rope, _checks, formats, from_config
from ropewalk.tools.check.bugs import BUGS
from ropewalk.tools.check.measure.law import NAMES, Law, find_rounding, identify

Verdict = Literal["right", "wrong", "not judged"]

_FREQUENCIES = re.compile(r"(?:^|_)(?:inv_freqs?|theta|freqs?|frequencies)$")
_TABLES = re.compile(r"(?:^|_)(?:cos|sin)(?:_|$)|freqs_cis|rope_cache")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_OTHER_PARTS = re.compile(r"vision|visual|image|audio|speech|tower|encoder|codec|talker|code_predictor|depth|indexer")
_RIGHT = (None, "low-precision-tables")  # codes of tables that are right, or right up to their dtype
_NEAR = 64  # rows from which frequencies are measured
_FAR = 24  # rows after those, up to the last, that are compared with them


@dataclass(frozen=True)
class Held:
    """A table that a module holds, and what it is.

    Args:
        names: the names of the tensors, such as "model.rotary_emb.inv_freq"; several if layers hold equal ones.
        verdict: "right", "wrong" or "not judged".
        says: which rope it is, or how it differs, in words.
        code: the code of the bug, as `check` reports it, "lost-on-meta" if there are no values, or None.
        layers: the layers of the config whose rope it was compared with.
    """

    names: tuple[str, ...]
    verdict: Verdict
    says: str
    code: str | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verified:
    """The result of `verify`. `str(verified)` is the report as text.

    Args:
        source: the config.
        held: the tables that were found.
        unseen: the layers that rotate, and whose rope no table holds; a kernel may compute their angles.
        warnings: what the config states ambiguously.
    """

    source: str
    held: tuple[Held, ...]
    unseen: tuple[int, ...]
    warnings: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """ "wrong" if a table is; "right" if the tables of all layers that rotate are; otherwise "not judged"."""
        if any(held.verdict == "wrong" for held in self.held):
            return "wrong"
        return "right" if not self.unseen and any(held.verdict == "right" for held in self.held) else "not judged"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON."""
        return {"verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.verdict}"]
        marks = {"right": "ok", "wrong": "WRONG", "not judged": "-"}
        for held in self.held:
            more = f" and {len(held.names) - 1} more" if len(held.names) > 1 else ""
            of = f" of layers {_ranges(held.layers)}" if held.layers else ""
            lines += [f"  {marks[held.verdict]:<5}  {held.names[0]}{more}{of}: {held.says}"]
        if self.unseen:
            lines += [f"  -      No module holds a table for layers {_ranges(self.unseen)}. A kernel may compute them."]
        return "\n".join([*lines, *(f"  Note: {warning}" for warning in self.warnings)])


def _ranges(layers: tuple[int, ...]) -> str:
    """Write indices of layers as "0-4, 6"."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


class _Table(NamedTuple):
    """What a table says: the multiplier of each pair at some positions, complex128 `[positions, pairs]`."""

    multipliers: Tensor
    positions: Tensor
    factor: float | None  # None if the module does not hold it
    inv_freq: Tensor | None = None  # float64 `[pairs]`, if the table is that of the frequencies
    stored: torch.dtype = torch.float32  # of cos and sin
    length: int = 1  # of the longest sequence that the module has seen, for which its frequencies may be

    @property
    def noise(self) -> float:
        """The error of cos and sin together, relative to the factor, by the rounding to 16 bits."""
        stored = torch.finfo(self.stored)
        return math.sqrt(0.5) * stored.eps if stored.bits == 16 else 0.0


def verify(model: torch.nn.Module, config: Any = None, **reading: Any) -> Verified:
    """Compare the tables that a loaded model holds with the ropes of its config, and change nothing.

    The model may be of any engine whose modules hold frequencies or tables of cos and sin: transformers, vLLM, SGLang,
    torchtune, torchtitan. Each frequency, the attention factor, and rows of a table up to its last are compared.

    Args:
        model: the model, on any device.
        config: the config to compare with, as in `from_config`. None means `model.config`.
        **reading: other arguments of `from_config`, such as `pairing` for an unknown model_type.

    Returns:
        The tables that were found. What a table cannot show, such as the pairing, is not judged: see `check`.

    Raises:
        RopeError: model is not a module, it has no config and none is passed, or the config cannot be read.

    Examples:
        >>> print(verify(AutoModelForCausalLM.from_pretrained("path/to/model")))  # doctest: +SKIP
    """
    if not isinstance(model, torch.nn.Module):
        must, fix = "model must be a torch.nn.Module", "Pass the model that an engine has loaded."
        raise _checks.error("verify", must, _checks.shown(model), fix)
    config = getattr(model, "config", None) if config is None else config
    if config is None:
        fix = "Pass the config.json of the model."
        raise _checks.error("verify", "config must be passed", "a model without config", fix)
    ropes = from_config(config, **reading)
    judged: dict[tuple[int, ...], Held | None] = {}
    found: list[Held] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensors in _tensors(module):
            full = f"{path}.{name}" if path else name
            own = getattr(getattr(module, "config", None), "model_type", None)
            part = bool(_OTHER_PARTS.search(path)) or (own is not None and own != ropes.model_type)
            layers = _layers(ropes, full, name) if not part else ()
            key = (*map(id, tensors), *layers)
            if key not in judged:
                judged[key] = _judge(_read(module, name, tensors), ropes, layers, part)
            if (held := judged[key]) is not None:
                found.append(replace(held, names=(full,)))
        if (held := _softmax(path, module, ropes)) is not None:
            found.append(held)
    if ropes.stated_twice:
        says = f"the file states {', '.join(sorted(ropes.stated_twice))} twice, and one value is lost (see the notes)."
        found.append(Held(("config",), "wrong", says, "stated-twice"))
    results = _merge(found)
    seen = {layer for held in results if held.verdict != "not judged" for layer in held.layers}
    unseen = tuple(i for i, rope in enumerate(ropes.layers) if rope is not None and i not in seen)
    return Verified(ropes.source, results, unseen, ropes.warnings)


def _merge(found: list[Held]) -> tuple[Held, ...]:
    """Join tables of which the same is said, such as those of all layers."""
    alike: dict[tuple[str, str], list[Held]] = {}
    for held in found:
        alike.setdefault((held.verdict, held.says), []).append(held)
    return tuple(
        replace(
            equal[0],
            names=tuple(dict.fromkeys(held.names[0] for held in equal)),
            layers=tuple(sorted({layer for held in equal for layer in held.layers})),
        )
        for equal in alike.values()
    )


def _layers(ropes: ModelRopes, full: str, name: str) -> tuple[int, ...]:
    """Return the layers to which a table may belong: by its path, by the kind of layer in its name, or all."""
    rotating = tuple(i for i, rope in enumerate(ropes.layers) if rope is not None)
    if (at := _LAYER.search(full)) is not None and int(at[1]) in rotating:
        return (int(at[1]),)
    kinds = {kind for kind in ropes.layer_kinds if name.startswith(f"{kind}_")}
    return tuple(i for i in rotating if ropes.layer_kinds[i] in kinds) if kinds else rotating


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield what may be tables: the name of a tensor with the tensor, or that of cos with cos and sin."""
    own = {name: x for name, x in vars(module).items() if isinstance(x, Tensor)} | dict(module.named_buffers("", False))
    own = {name: x for name, x in own.items() if not name.startswith("original_") and "_original_" not in name}
    for name, x in own.items():
        sin = name.replace("cos", "sin")
        if sin != name and sin in own:
            yield name, (x, own[sin])
        elif "sin" in name and name.replace("sin", "cos") in own:
            continue  # taken with its cos
        elif _FREQUENCIES.search(name) or (x.ndim >= 2 and (x.is_complex() or x.is_floating_point())):
            yield name, (x,)


def _read(module: torch.nn.Module, name: str, tensors: tuple[Tensor, ...]) -> list[_Table] | str | None:
    """Return the tables in tensors; a sentence if they must be some, but have no values; or None if they are none.

    A table whose rows begin again at the angle 0 is several: vLLM appends that of LongRoPE's long factors.
    """
    named = bool(_FREQUENCIES.search(name)) or bool(_TABLES.search(name))
    if any(x.is_meta for x in tensors):
        return "It is on the meta device, without values." if named else None
    if _FREQUENCIES.search(name):
        inv_freq = tensors[0].detach().squeeze().to("cpu", torch.float64)
        if inv_freq.ndim != 1 or not inv_freq.numel():
            return None
        if not bool(inv_freq.isfinite().all()) or not bool(inv_freq.any()) or float(inv_freq.abs().max()) > 1e4:
            first = ", ".join(f"{float(value):.4g}" for value in inv_freq[:3])
            return f"Its values are no frequencies ({first} …): it was never filled, as on the meta device."
        prefix = _FREQUENCIES.sub("", name)
        prefix = f"{prefix}_" if prefix else ""
        factor = getattr(module, f"{prefix}attention_scaling", None)
        length = int(getattr(module, f"{prefix}max_seq_len_cached", 1) or 1)
        positions = torch.arange(_NEAR)
        z = torch.polar(torch.ones(_NEAR, len(inv_freq), dtype=torch.float64), positions[:, None] * inv_freq)
        return [_Table(z, positions, None if factor is None else float(factor), inv_freq, length=length)]
    columns = _cos_sin(tensors)
    if columns is None or len(columns[0]) < 2:
        return None
    cos, sin = columns
    some = slice(None, None, max(1, len(cos) // 1024))  # of millions of rows
    sizes = cos[some].float() ** 2 + sin[some].float() ** 2
    if not float((sizes / sizes[0, 0] - 1).abs().max()) < 0.1:  # also if it is NaN
        return "It holds no cosines and sines: it was never filled, as on the meta device." if named else None
    starts = (sin == 0).all(-1).nonzero()[:, 0].tolist()
    if starts[:1] != [0] or not bool((cos[0] == cos[0, 0]).all()) or not float(cos[0, 0]):
        return None
    return [_table_of(cos[a:b], sin[a:b]) for a, b in zip(starts, [*starts[1:], len(cos)], strict=True) if b - a > 1]


def _cos_sin(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor] | None:
    """Return cos and sin `[rows, pairs]` of a table in any of the usual formats, or None."""
    x = tensors[0].detach().squeeze()
    if len(tensors) == 2:
        cos, sin = x, tensors[1].detach().squeeze()
        if cos.ndim != 2 or cos.shape != sin.shape or not cos.is_floating_point():
            return None
        width = formats.width_of(cos, cos.shape[1] // 2) or "half"
        return formats.narrow(cos, width), formats.narrow(sin, width)
    if x.is_complex():
        return (x.real, x.imag) if x.ndim == 2 else None
    if x.ndim == 3 and x.shape[-1] == 2:
        return x[..., 0], x[..., 1]
    if x.ndim != 2 or x.shape[1] % 2:
        return None
    cos, sin = x.chunk(2, dim=-1)
    return cos, sin


def _table_of(cos: Tensor, sin: Tensor) -> _Table:
    """Return the table of cos and sin `[rows, pairs]`, whose row is the position."""
    last = len(cos) - 1
    far = [round(_NEAR * (last / _NEAR) ** (i / _FAR)) for i in range(1, _FAR + 1)] if last > _NEAR else []
    positions = torch.tensor(sorted({*range(min(_NEAR, last + 1)), *far}))
    z = torch.complex(*(x[positions.to(x.device)].to("cpu", torch.float64) for x in (cos, sin)))
    rotates = z.imag.any(0)
    if bool(rotates.any()):
        z = z[:, rotates]
    return _Table(z, positions, float(z[0, 0].real), stored=formats.stored_dtype(torch.view_as_real(z)))


def _judge(tables: list[_Table] | str | None, ropes: ModelRopes, layers: tuple[int, ...], part: bool) -> Held | None:
    """Compare what a module holds with the ropes of its layers, or of another part, which is not judged otherwise."""
    if tables is None:
        return None
    if isinstance(tables, str):
        return Held((), "wrong", tables, "lost-on-meta", layers)
    vision = () if ropes.vision is None else ropes.vision.ropes
    own = [ropes.layers[i] for i in layers]
    others = [*(ropes.layers if part else ()), *ropes.extra_ropes.values(), *vision]
    laws: list[tuple[Rope, Law]] = []
    right: list[Rope] = []
    for table in tables:
        found = [(rope, law) for rope in dict.fromkeys(own + others) if rope for law in [_law(table, rope, ropes)]]
        fits = [(rope, law) for rope, law in found if law.code in _RIGHT]
        if not fits:
            laws = [(rope, law) for rope, law in found if rope in own]
            break
        right.append(fits[0][0])
    else:
        which = tuple(i for i in range(len(ropes.layers)) if ropes.layers[i] == right[0] and (part or i in layers))
        scheme = right[0].scaling
        factor = "" if (value := getattr(scheme, "factor", None)) is None else f", factor {value:g}"
        what = f"base {right[0].base:.10g}, {scheme.rope_type if scheme else 'without scaling'}{factor}"
        says = f" {fits[0][1].says}" if fits[0][1].code else ""
        return Held((), "right", f"the rope of the config, {what}.{says}", None, which)
    if part or not laws:
        return Held((), "not judged", "It is of another part of the model, or of a rope that is not in the config.")
    # Of several ropes that the table might have had, the one whose difference has a name.
    rope, law = min(laws, key=lambda each: (each[1].code == "wrong-frequencies", each[0].rotary_dim))
    which = tuple(i for i in layers if ropes.layers[i] == rope)
    bug = BUGS[str(law.code)]
    return Held((), "wrong", f"{bug.title}. {law.says} {bug.fix}".rstrip(), law.code, which)


def _law(table: _Table, rope: Rope, ropes: ModelRopes) -> Law:
    """Identify the law of a table that should be that of a rope, at any length of the config or of the module."""
    longest = [ropes.trained_length or 1, ropes.max_position_embeddings or 1, table.length]
    lengths = [1] if rope.is_static else [1, *longest]
    laws = [_static_law(table, rope.at_length(length)) for length in dict.fromkeys(lengths)]
    return next((law for law in laws if law.code in _RIGHT), laws[0])


def _static_law(table: _Table, rope: Rope) -> Law:
    z, positions = table.multipliers, table.positions
    if table.inv_freq is not None and not formats.difference(rope, table.inv_freq, rope.attention_factor):
        law = Law(table.inv_freq, rope.attention_factor)
        dtype, exact = formats.stored_dtype(table.inv_freq), torch.from_numpy(rope.inv_freq)
        if dtype in NAMES and not torch.equal(exact.to(dtype).double(), exact):
            says = f"The frequencies are rounded to {NAMES[dtype]}."
            return replace(law, code="low-precision-frequencies", says=says)
    else:
        if table.inv_freq is not None and bool((table.inv_freq != 0).any()):
            z = z[:, table.inv_freq != 0]
        law = identify(z[:_NEAR], positions[:_NEAR], rope, rope.head_dim, noise=table.noise)
        if law.code in _RIGHT and not law.explains(z, positions):
            # Slow pairs show only far away which frequency they have, if the table is coarse.
            known = identify(z, positions, rope, rope.head_dim, noise=table.noise)
            rounding = find_rounding(z, positions, law)
            worst = int(law.excess(z, positions).amax(-1).argmax())
            if known.code != "wrong-frequencies":
                law = known
            else:
                code, says = rounding or ("wrong-far-positions", law.describe_error(z[worst], positions[worst]))
                law = replace(law, code=code, says=says)
        if law.code is None and table.noise:
            law = replace(law, code="low-precision-tables", says=f"They are rounded to {NAMES[table.stored]}.")
    factor, wanted = table.factor, rope.attention_factor
    near = table.noise or 4 * formats.FLOAT32
    if law.code in _RIGHT and factor is not None and abs(factor / wanted - 1) > near:
        how = " twice" if abs(factor / wanted**2 - 1) <= near else ""
        says = f"The attention factor is {factor:.6g} instead of {wanted:.6g}{', as if applied' * bool(how)}{how}."
        law = replace(law, code="attention-factor", says=says)
    return law


def _softmax(path: str, module: torch.nn.Module, ropes: ModelRopes) -> Held | None:
    """Compare the softmax scale of latent attention, which includes a factor of the scaling, with the config."""
    scale, width, wanted = getattr(module, "scaling", None), getattr(module, "qk_head_dim", None), ropes.softmax_factor
    if wanted == 1.0 or not isinstance(scale, float) or not isinstance(width, int):
        return None
    found, name = scale * math.sqrt(width), (f"{path}.scaling",)
    if abs(found / wanted - 1) < 1e-6:
        return Held(name, "right", f"The softmax scale includes the factor {wanted:.6g}.")
    says = f"The factor of the softmax scale is {found:.6g} instead of {wanted:.6g}."
    return Held(name, "wrong", says, "softmax-scale")
