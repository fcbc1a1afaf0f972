"""Compare how engines rotate for one config."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from ropewalk import _checks
from ropewalk.configs.engine_ropes import ropes_for_engines
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.reader import SECTIONS
from ropewalk.engines import ENGINES, TRAINERS, TRANSFORMERS_4, Answer, ConfigRope, engine, lost_in_4
from ropewalk.rope.rope import Rope
from ropewalk.tools.diff.lengths import longest_of
from ropewalk.tools.diff.overridden import overridden
from ropewalk.tools.diff.rope_difference import difference, farthest
from ropewalk.tools.diff.text import Result, engines_text
from ropewalk.tools.diff.verdict import judge


class EngineDiff(Result):
    """A comparison of the rotations of engines for one config. `facts` is all of it as a dict of JSON values."""

    @property
    def verdict(self) -> Literal["agree", "differ", "not judged"]:
        """The result in one word.

        "differ": an engine rotates differently from the first one, or rejects the config. "agree": at least two engines
        were judged, and they rotate identically; or the only selected engine runs the config. "not judged": neither, or
        an engine that `names` selects could not be judged, or a key was ignored, so another config was compared.
        """
        return self.facts["verdict"]  # type: ignore[no-any-return]

    @property
    def bitwise(self) -> bool:
        """Whether all engines agree, and each is known to rotate bitwise equally to the first one."""
        found = [one["verdict"] for row in self.facts["ropes"] for at in row["at"] for one in at["engines"].values()]
        return self.verdict == "agree" and all(one is None or one["word"] == "bitwise equal" for one in found)

    def text(self, *, verbose: bool = False) -> str:
        """Return the comparison as text for a terminal.

        Args:
            verbose: whether to show also what each engine does, in which of its files, and how it rounds.
        """
        return engines_text(self.facts, verbose=verbose)


def engines(
    source: Any,
    *,
    length: int | None = None,
    names: Collection[str] = (),
    trainers: bool = False,
    override: Mapping[str, Any] | None = None,
    pairing: str | None = None,
    base: float | None = None,
    factor: float | None = None,
    ignore: Collection[str] = (),
    download: bool = False,
) -> EngineDiff:
    """Compare how inference engines rotate for one config of Hugging Face.

    No engine is run. For each engine, at the version that the result names, ropewalk has rules that reproduce its
    functions for computing frequencies, and a table of its models and of the keys that the file of each model reads.
    The result says which parts were recorded from the running engine. An engine is not judged if it does not have the
    model, or if what it reads for the model was not recorded. With several positions (M-RoPE), text is compared.

    Args:
        source: as in `from_config`. A file of another format is compared as the config.json of the same model,
            converted for transformers, except in the engine that reads the file itself (llama.cpp for GGUF).
        length: the length that the engines are configured for, in tokens. It is also the length of the longest sequence
            that is compared. None means the longest of the length that the config states and that of its scaled
            context, or twice that length if the frequencies change only beyond it.
        names: the engines to compare, from `ropewalk.diff.ENGINES`, `MORE_ENGINES` and `TRAINERS`, such as "vllm". An
            empty collection means those of `ENGINES`, and transformers 4 if it loses the rope. The first one that was
            judged and runs the config is the reference for the others.
        trainers: compare all trainers as well.
        override: keys with which each engine is started, as in vLLM's --hf-overrides, SGLang's
            --json-model-override-args and `from_pretrained`. Each engine replaces or merges them in its own way.
        pairing, base, factor, ignore, download: as in `from_config`.

    Returns:
        An `EngineDiff`, with the result as text (`.text()`) and as data (`.facts`).

    Raises:
        RopeError: the config cannot be read or states no length, or an engine is unknown.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        fix = f"Pass a tuple, e.g. names=({str(names)!r},)."
        raise _checks.error("diff.engines", "names must be a collection", _checks.shown(names), fix)
    if override is not None and not (isinstance(override, Mapping) and override):
        fix = "Pass the keys and values that the engine is started with, or omit it."
        raise _checks.error("diff.engines", "override must have at least one key", _checks.shown(override), fix)
    _check_sections(override or {})
    named = [engine("diff.engines", name) for name in dict.fromkeys(names)]
    asked = (*(named or ENGINES.values()), *(TRAINERS.values() if trainers else ()))
    chosen = list({entry.name: entry for entry in asked}.values())
    ropes, config_ropes = ropes_for_engines(
        source, *chosen, pairing=pairing, base=base, factor=factor, ignore=ignore, download=download
    )
    if not named and config_ropes and all(lost_in_4(config) for config, _ in config_ropes):
        chosen.append(TRANSFORMERS_4)
    changed = {each.name: overridden(each, ropes, config_ropes, override) for each in chosen if override}
    setting = longest_of("diff.engines", length, ropes, *(one for each in changed.values() for one in each.ropes))
    rows = []
    for config, layers in config_ropes:
        answers = {e.name: changed[e.name].answer(layers[0]) if override else e.answer(config) for e in chosen}
        rows.append(_compare_rope(config, layers, answers, ropes, setting))
    facts = {
        "source": ropes.source,
        "model_type": ropes.model_type,
        "model": config_ropes[0][0].model.partition("/")[0] if config_ropes else ropes.model_type,
        "layers": len(ropes.layers),
        "max_position_embeddings": ropes.max_position_embeddings,
        "trained_length": ropes.trained_length,
        "length": setting,
        "ignored": list(ignore),
        "override": dict(override or {}),
        "unchanged": [name for name, each in changed.items() if each.unchanged],
        "engines": [{"name": entry.name, "version": entry.version} for entry in chosen],
        "ropes": rows,
        "beside": beside_the_ropes(ropes, chosen),
        "not_compared": not_compared(ropes),
        "warnings": list(ropes.warnings),
    }
    states = {entry.name: _state(entry.name, facts) for entry in chosen}
    verdict = "not judged" if ignore else _verdict(states, {entry.name for entry in named})
    running = [name for name in ("vLLM", "SGLang") if states.get(name) in ("same", "differs")]
    after = {name: changed[name].ropes[0] if override else ropes for name in running}
    is_static = all(rope is None or rope.is_static for each in after.values() for rope in each.layers)
    limits = {name: each.max_position_embeddings or setting for name, each in after.items()}
    few = [name for name, limit in limits.items() if limit < setting and is_static and length is None]
    says = f"no more than max_position_embeddings, {min(limits.values(), default=0):,} tokens, so raise it, too."
    more = [f"{' and '.join(few)} accept{'s' * (len(few) == 1)} {says}"] if few else []
    return EngineDiff({**facts, "warnings": [*ropes.warnings, *more], "states": states, "verdict": verdict})


def _check_sections(keys: Mapping[str, Any]) -> None:
    """Raise unless rope parameters in an override are an object or null."""
    for key, value in keys.items():
        if key in SECTIONS and not (value is None or isinstance(value, Mapping)):
            must, fix = f"{key} in an override must be an object", 'Pass e.g. {"rope_type": "yarn", "factor": 4}.'
            raise _checks.error("diff.engines", must, _checks.shown(value), fix)
        if isinstance(value, Mapping):
            _check_sections(value)


def _state(name: str, facts: Mapping[str, Any]) -> str:
    """Return what the comparison found about an engine: "same", "differs", "refused", "absent" or "unknown"."""
    entries = [entry for row in facts["ropes"] for entry in row["engines"] if entry["name"] == name]
    same = [at["engines"][name]["apart"]["same"] for row in facts["ropes"] for at in row["at"] if name in at["engines"]]
    if found := [why for why in ("absent", "refused", "unknown") if any(entry["why"] == why for entry in entries)]:
        return found[0]
    if not all(entry["judged"] for entry in entries):
        return "unknown"
    return "same" if all(same) and name not in facts["beside"] else "differs"


def _verdict(states: Mapping[str, str], named: Collection[str]) -> str:
    found = list(states.values())
    if "differs" in found or "refused" in found:
        return "differ"
    unjudged = {name for name, state in states.items() if state in ("absent", "unknown")}
    return "not judged" if unjudged and (unjudged & set(named) or len(found) - len(unjudged) < 2) else "agree"


def _compare_rope(
    config: ConfigRope, layers: list[int], answers: Mapping[str, Answer], ropes: ModelRopes, setting: int
) -> dict[str, Any]:
    """Compare the engines for one rope of the config, and return the facts."""
    window = ropes.window(layers[0])
    compared = (config.rope, *(answer.rope for answer in answers.values()))
    changing = any(rope is not None and not rope.is_static for rope in compared)
    sequences = sorted({min(ropes.trained_length or setting, setting), setting}) if changing else [setting]
    running = [name for name, answer in answers.items() if answer.rope is not None]
    reference = next((name for name in running if answers[name].is_judged), next(iter(running), None))
    at = {n: _compare_at_length(answers, reference, n, setting, window) for n in sequences}
    return {
        "layers": layers,
        "window": window,
        "scheme": "default" if config.rope.scaling is None else config.rope.scaling.rope_type,
        "compared_with": reference,
        "engines": [
            {
                "name": name,
                "refused": answer.refusal or None,
                "why": answer.why or None,
                "judged": answer.is_judged,
                "decided_by": answer.decided_by,
                "seen": answer.evidence,
                "source": answer.source,
                "notes": list(answer.notes),
                "rounding": None if answer.rounding is None else dataclasses.asdict(answer.rounding),
            }
            for name, answer in answers.items()
        ],
        "at": [{"sequence": n, "engines": found} for n, found in at.items()],
    }


def _compare_at_length(
    answers: Mapping[str, Answer], reference: str | None, sequence: int, setting: int, window: int | None
) -> dict[str, dict[str, Any]]:
    """Return facts about the rope of each engine at one length, and about its difference from the reference."""
    if reference is None:
        return {}
    ropes = {name: answer.at(sequence, setting) for name, answer in answers.items()}
    first = ropes[reference]
    known: dict[Rope, dict[str, Any]] = {}
    found = {}
    for name, rope in ropes.items():
        if rope is None or first is None:
            continue
        if rope not in known:
            known[rope] = difference(first, rope, farthest(sequence, window))
        found[name] = {
            "attention_factor": rope.attention_factor,
            "inv_freq": rope.inv_freq.tolist(),
            "apart": known[rope],
            "verdict": None
            if name == reference
            else judge(answers[reference], answers[name], first, rope, known[rope], sequence),
        }
    return found


def not_compared(ropes: ModelRopes) -> list[str]:
    """Return what the config states about the attention, and the comparison leaves out."""
    found = ["which layers rotate"] if None in ropes.layers else []
    found += ["which engines apply its windows"] if any(ropes.window(i) for i in range(len(ropes.layers))) else []
    found += [f"the rope of its {name}" for name in ropes.extra_ropes]
    if ropes.softmax_factor != 1.0:
        found.append(f"the softmax scale, which this config multiplies by {ropes.softmax_factor:.6g}")
    return found


def beside_the_ropes(ropes: ModelRopes, chosen: Collection[Any]) -> dict[str, str]:
    """Return what engines do beside the ropes that the config does not say: a dict from their names to a sentence."""
    unrotated = [i for i, rope in enumerate(ropes.layers) if rope is None]
    scaled = ropes.query_scale is not None and ropes.query_scale.llama_4_scaling_beta is not None
    found = {}
    for each in chosen:
        every = each.no_rope_every.get(ropes.model_type, 0)
        if ropes.model_type in each.null_base and not any(ropes.layers):
            found[each.name] = "It reads a base of null as 10000, and rotates the layers with full attention."
        if every and unrotated != [*range(every - 1, len(ropes.layers), every)]:
            found[each.name] = f"It rotates all but each {every}th layer, whatever the config states."
        if scaled and each.query_scale and not each.reads(ropes.file_format):
            found[each.name] = f"It does not scale q by its position: {each.query_scale}."
    return found
