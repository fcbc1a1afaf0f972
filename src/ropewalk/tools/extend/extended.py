"""`extend`: what to type so that engines run a model on longer texts than its config states."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk import _checks
from ropewalk._checks import RopeError
from ropewalk.configs.engine_ropes import ropes_for_engines
from ropewalk.configs.hf import find_text
from ropewalk.configs.tables.gguf import HF_MODEL_TYPES
from ropewalk.engines import ENGINES, MORE_ENGINES, Engine, Flags, engine
from ropewalk.engines._config import ConfigRope, to_finite
from ropewalk.rope.rope import Rope
from ropewalk.tools.diff.between_engines import beside_the_ropes
from ropewalk.tools.diff.for_engine import LENGTHS, Configs, apart_of, find_command
from ropewalk.tools.extend import plan as plans
from ropewalk.tools.extend.plan import METHODS, Plan, Source
from ropewalk.tools.extend.text import extended_text

DEFAULT = ("vllm", "sglang", "llama.cpp", "transformers")


@dataclass(frozen=True)
class Extended:
    """What a model needs to run on longer texts.

    Args:
        facts: the whole result as a dict of JSON values.
        source: the config that was read.
        plans: the methods with their factors, the best first; () if the config reaches the length as it is.
    """

    facts: Mapping[str, Any]
    source: Source = field(repr=False)
    plans: tuple[Plan, ...] = field(repr=False)

    @property
    def complete(self) -> bool:
        """Whether every engine that was asked for has a command, or needs none beside the config."""
        return all(entry["commands"] or entry["reads"] for entry in self.facts["engines"])

    def text(self) -> str:
        """Return the result as text for a terminal."""
        return extended_text(self.facts)

    def config(self, *, version: int = 5) -> dict[str, Any]:
        """Return the whole config with the first plan, in the schema of transformers 4 or 5.

        Raises:
            RopeError: the config reaches the length as it is, or the schema cannot state its ropes.
        """
        if not self.plans:
            must = "the config must not reach the length as it is"
            got = f"{self.facts['stated_length']:,} tokens for {self.facts['target']:,}"
            raise _checks.error(self.facts["source"], must, got, "Use it unchanged, or pass a method.")
        return plans.config_of(self.source, self.plans[0].ropes, self.facts["target"], version)[1]


def extend(
    source: Any,
    target: int | None = None,
    *,
    engines: Collection[str] = DEFAULT,
    method: str | Mapping[str, float] | None = None,
    new_factor: float | None = None,
    original: int | None = None,
    decimal: int | None = None,
    model: str = "MODEL",
    **options: Any,
) -> Extended:
    """Find the config and the command of each engine with which a model reads texts of a length.

    A command is returned only if the engine's rules, applied to the config with its arguments, give the ropes that are
    meant, up to this length. Of engines without such arguments, the rules are applied to the config that `write`
    writes. No engine is run, and no weights are read.

    Args:
        source: as in `diff.engines`.
        target: the length to reach, in tokens. None means that of the config.
        engines: names of `ropewalk.diff.ENGINES` or `MORE_ENGINES`.
        method: "llama3", "yarn", "linear", "ntk" (a larger base) or "dynamic". None means that of the config, or
            YaRN if its authors recommend it, or else Llama 3's scheme, and YaRN for engines that do not have it. A dict
            maps methods, the best first, to their factors; an engine gets the first that it has.
        new_factor: the factor of the scheme. None for twice the target, divided by the length before scaling, or once
            with YaRN if the authors recommend that.
        original: the length before scaling, in tokens. None for that of the config, which linear scaling hides.
        decimal: the least length that is meant as well, if the config states one from there on: 200k may be 200,000.
        model: the model in the commands: a folder, a hub id, or a GGUF file for llama.cpp.
        options: `pairing`, `base`, `factor`, `ignore` and `download` of `from_config`.

    Raises:
        RopeError: the config cannot be read, states no length, or has a scheme for which no other factor is known; an
            argument is invalid; or no method that was asked for can be stated.
    """
    chosen = [engine("ropewalk extend", name, {**ENGINES, **MORE_ENGINES}) for name in dict.fromkeys(engines)]
    if new_factor is not None:
        new_factor = _checks.number("ropewalk extend", _checks.option("new_factor"), new_factor, at_least=1.0)
    ways = dict(method) if isinstance(method, Mapping) else {} if method is None else {method: new_factor}
    for name in ways:
        _checks.choice("ropewalk extend", _checks.option("method"), name, tuple(METHODS))
    read = plans.read_source(source, **options)
    target = read.length if target is None else _checks.length("ropewalk extend", "to", target)
    target = read.length if (decimal or target) <= read.length < target else target
    file_format = read.text.file_format
    models = {entry.name: model if not file_format or entry.reads(file_format) else "MODEL" for entry in chosen}
    now = plans.scheme_of(read.text)
    if original is not None and now is not None and not plans.hides_original(read):
        must = f"{_checks.option('original')} must not be given for a config with a scaling, which states that length"
        raise _checks.error("ropewalk extend", must, f"{original:,}", "Omit it.")
    original = None if original is None else _checks.length("ropewalk extend", "original", original)
    length = read.length if original is None else round(original * getattr(now, "factor", 1.0))
    unscaled = original or read.text.trained_length or (length if now is None else 0)
    if (new_factor is not None or isinstance(method, str)) and target <= unscaled:
        must = f"to must be more than the {unscaled:,} tokens of the config if a method or a factor is passed"
        raise _checks.error("ropewalk extend", must, f"{target:,}", "Omit them: no scaling is needed.")
    reaches = target <= length and method is None and new_factor is None
    ways = ways or dict.fromkeys(plans.methods(read, target, original), new_factor)
    made = [] if reaches else [plans.make(read, target, name, factor, original) for name, factor in ways.items()]
    made = made if made and made[0].layers else made[:1]
    rows = []
    find = _extended if made and made[0].layers else _as_it_is
    for entry in chosen:
        far = made and _may_see_all(read, entry, made[0])
        row = {**_row(entry), "why_not": [far]} if far else find(read, entry, made, target, models[entry.name])
        if row["commands"]:
            row["notes"] += _notes(row, read, made, target, models[entry.name])
        elif find is _extended and method is None and not far and not row["reads"]:
            row["why_not"] += _others(read, entry, target, ways)
        rows.append(row)
    facts = {
        "source": read.text.source,
        "model_type": read.ropes.model_type,
        "layers": len(read.ropes.layers),
        "target": target,
        "stated_length": max(read.length, read.stated),
        "trained_length": read.ropes.trained_length,
        "reaches": reaches,
        "scaling": getattr(now, "rope_type", None),
        "ignored": list(options.get("ignore", ())),
        "asked": {"method": method, "factor": next(iter(ways.values())), "original": original},
        "recommended_for": plans.recommended(read, target, original),
        "plans": [_plan_facts(read, entry) for entry in made],
        "replaces": _replaces(read, made),
        "engines": rows,
        "warnings": [*read.text.warnings, *plans.length_notes(read, target, new_factor)],
    }
    return Extended(facts, read, tuple(made))


def _plan_facts(source: Source, made: Plan) -> dict[str, Any]:
    before = source.ropes.config or {}
    new = {k: v for k, v in made.written.items() if before.get(k, ...) != v and (made.layers or k in LENGTHS)}
    return {"method": made.method, "factor": made.factor, "layers": made.layers, "config": new}


def _replaces(source: Source, made: list[Plan]) -> list[str]:
    """Return the keys of the file that the new ones replace, and that must leave it."""
    stated = find_text(source.whole)[1]
    written = made[0].written if made and made[0].layers else stated
    return [key for key in ("rope_scaling", "rope_theta") if key in stated and key not in written]


def _may_see_all(source: Source, chosen: Engine, plan: Plan) -> str:
    """Return why layers that stay as they are may see the whole text in an engine, or ""."""
    kept = any(rope is not None and i not in plan.layers for i, rope in enumerate(source.text.layers))
    model = source.text.model_type
    if not kept or chosen.windows is None or model in chosen.windows:
        return ""
    return f"its code was not found to apply windows to {model}, so layers that are not scaled may see the whole text"


def _as_it_is(source: Source, chosen: Engine, made: list[Plan], target: int, model: str) -> dict[str, Any]:
    """Return the command for a config whose ropes reach the length as they are."""
    override, row, length = chosen.override, _row(chosen), min(target, source.length)
    _, read = ropes_for_engines(source.whole, chosen, **source.asked)
    any_rope = ConfigRope(Rope(2, 10_000.0, "half"), model=source.text.model_type, whole=source.whole)
    answers = [chosen.answer(config) for config, _ in read or [(any_rope, [])]]
    loads = all(answer.why in ("", "unknown") for answer in answers)
    if not (read or loads):
        return {**row, "why_not": [f"it {answer.refusal}" for answer in answers]}
    if override is None:
        return _by_its_file(source, chosen, read, source.text.layers, length, model)
    if isinstance(override, Flags):
        commands = [override.command(model, "", target)]
    else:
        commands = [f(model, plans.longer(source, target), target) for f in (override.write, override.python) if f]
    own = dict(enumerate(source.text.layers))
    apart, unknown = apart_of(chosen, read, own, length)
    beside = [*beside_the_ropes(source.text, [chosen]).values()]
    said = " ".join(apart)
    notes = list(dict.fromkeys(n for config, _ in read for n in chosen.answer(config).notes if n not in said))
    if not (apart or unknown or beside):
        return {**row, "commands": commands, "notes": notes}
    if not (unknown or beside):
        with contextlib.suppress(RopeError):  # the model's own code does not read the schema of transformers 5
            same = Plan("none", 1.0, [], source.ropes, plans.config_of(source, source.ropes, target)[0], source.text)
            if (found := _extended(source, chosen, [same], target, model))["commands"]:
                return {**found, "plan": None, "notes": [f"Without its arguments, {each}" for each in apart]}
    why = unknown or [*apart, *beside, *notes]
    if unknown or beside or any(apart_of(chosen, read, own, length, short=False)):
        within = loads and all((config.longest or target) >= target for config, _ in read)
        return {**row, "why_not": why, "length": commands[0] if within else ""}
    row["notes"] = [f"Short texts are rotated otherwise: {each}" for each in why]
    return {**row, "commands": commands}


def _extended(source: Source, chosen: Engine, made: list[Plan], target: int, model: str) -> dict[str, Any]:
    """Return the command of an engine for the first plan whose ropes it computes, or why there is none."""
    row = _row(chosen)
    if chosen.override is None:
        return _written(source, chosen, made[0], target, model)
    flags = isinstance(chosen.override, Flags)  # which replace no keys of a config
    try:
        old = {} if flags else source.ropes.to_hf_config(version=5).get("rope_parameters") or {}
    except RopeError:  # the model's own code loads this config, and arguments were not tried on that
        why = [f"it {a.refusal}" for config, _ in source.configs if (a := chosen.answer(config)).why == "absent"][:1]
        return {**row, "why_not": why} if why else _written(source, chosen, made[0], target, model)
    reasons: dict[str, list[str]] = {}
    for number, plan in enumerate(made):
        own = dict(enumerate(plan.text.layers))
        forms, why = find_command(chosen, source.configs, old, plan.written, own, target, model)
        if forms:
            return {**row, "plan": number, "commands": forms}
        for reason in why:
            reasons.setdefault(reason, []).append(plan.method)
    said = [why if len(names) == len(made) else f"{' and '.join(names)}: {why}" for why, names in reasons.items()]
    return {**row, "why_not": said}


def _written(source: Source, chosen: Engine, plan: Plan, target: int, model: str) -> dict[str, Any]:
    """Return the schema in which an engine without arguments for this reads the ropes of a plan, or why in none."""
    own, why_not = plans.version_of(source), list[str]()
    for version in (own, 4 if own == 5 else 5):
        with contextlib.suppress(RopeError):  # this schema cannot state the ropes
            _, read = ropes_for_engines(plans.config_of(source, plan.ropes, target, version)[1], chosen)
            row = _by_its_file(source, chosen, read, plan.text.layers, target, model)
            if row["reads"]:
                other = "" if version == own else f" --version {version}"
                return {**row, "plan": 0, "reads": f"the config that --write{other} writes"}
            why_not = why_not or row["why_not"]
    return {**_row(chosen), "why_not": why_not}


def _by_its_file(
    source: Source, chosen: Engine, read: Configs, layers: Sequence[Rope | None], length: int, model: str
) -> dict[str, Any]:
    """Return whether an engine without arguments for this has the ropes of `layers` from its file, or why not."""
    if source.text.file_format:
        return {**_row(chosen), "why_not": ["it reads a config.json, which is not what was passed"]}
    apart, unknown = apart_of(chosen, read, dict(enumerate(layers)), length)
    has_them = {"reads": "the config as it is", "length": chosen.for_length(model, length)}
    return {**_row(chosen), **({} if apart or unknown else has_them), "why_not": [*unknown, *apart]}


def _others(source: Source, chosen: Engine, target: int, tried: Mapping[str, Any]) -> list[str]:
    """Return a sentence about the other methods for which an engine has a command, if there are any."""
    found = []
    for name in METHODS.keys() - tried.keys():
        with contextlib.suppress(RopeError):  # the config cannot state it
            row = _extended(source, chosen, [plans.make(source, target, name, None)], target, "MODEL")
            found += [name] if row["commands"] or row["reads"] else []
    return [f"It can with {_checks.option('method')} {' or '.join(sorted(found))}"] if found else []


def _notes(row: Mapping[str, Any], source: Source, made: list[Plan], target: int, model: str) -> list[str]:
    """Return what limits the length of an engine besides the config, and where its ropes differ, as sentences."""
    plan, notes = None if row["plan"] is None else made[row["plan"]], list[str]()
    if row["name"] == "llama.cpp" and plan is not None and len({source.text.window(i) for i in plan.layers}) > 1:
        notes.append("Its arguments do not change layers with a window, whose positions are not new to the model.")
    if row["name"] == "llama.cpp" and target > source.stated:
        names = [name for name, own in HF_MODEL_TYPES.items() if own.split("/")[-1] == source.text.model_type]
        key = f"{names[0] if len(names) == 1 else '<general.architecture>'}.context_length=int:{target}"
        who = "It serves" if plan is None or plan.method != "yarn" else "Builds before its pull request 28030 serve"
        notes.append(f"{who} no more than the file states, unless you add --override-kv {key}.")
    reads = row["name"] == "llama.cpp" and plan and _written(source, ENGINES["llama.cpp"], plan, target, "")["reads"]
    if row["name"] == "llama.cpp" and plan and (reads or source.text.file_format == "GGUF file"):
        around = "Programs that run llama-server without them, such as Ollama (not its older versions)"
        read = f"read them from a GGUF file that convert_hf_to_gguf.py makes from {reads}"
        notes.append(f"{around}, {read if reads else 'need another GGUF file: pass the config.json of the model'}.")
    notes += ["In Ollama, -c is num_ctx, which can be 4,096 by default."] * (row["name"] == "llama.cpp")
    has_mtp = any(value and ("mtp" in key or "nextn" in key) for key, value in find_text(source.whole)[1].items())
    if row["name"] == "vLLM" and has_mtp and plan is not None and "--hf-overrides" in row["commands"][0]:
        notes.append("Its MTP layers do not get this argument, and rotate as the file says. With --write, they get it.")
    limit = _tokenizer_limit(Path(model)) if row["name"] == "vLLM" else None
    if limit is not None and limit < target:
        why = f"tokenizer_config.json states model_max_length {limit:,.0f}, and vLLM accepts no more"
        notes.append(f"{why}, unless you set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 before the command.")
    if source.text.file_format and model == "MODEL":
        is_flat = row["reads_config"] and not find_text(source.whole)[0]
        nested = " If its config.json has a text_config, put the keys into that." if is_flat else ""
        notes.append(f"MODEL is this model in a format that it reads.{nested}")
    return notes


def _tokenizer_limit(folder: Path) -> float | None:
    """Return the model_max_length of the tokenizer in the folder of a model, in tokens, or None."""
    try:
        return to_finite(json.loads((folder / "tokenizer_config.json").read_bytes()).get("model_max_length"))
    except (OSError, ValueError, AttributeError):
        return None


def _row(chosen: Engine) -> dict[str, Any]:
    about = {"name": chosen.name, "version": chosen.version, "reads_config": not isinstance(chosen.override, Flags)}
    return {**about, "plan": None, "commands": [], "reads": "", "why_not": [], "length": "", "notes": []}
