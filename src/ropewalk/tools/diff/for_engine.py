"""Find out whether an engine rotates as a config says, and the command with which it does."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any, Literal

from ropewalk import _checks
from ropewalk._checks import RopeError, without_fix
from ropewalk.configs.engine_ropes import find_engine_keys, ropes_for_engines
from ropewalk.configs.hf import find_text, text_path
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.read import read_config
from ropewalk.configs.reader import LENGTHS as _LENGTHS
from ropewalk.engines import ENGINES, ConfigRope, Engine, Flags, engine, put, spellings
from ropewalk.rope.rope import Rope
from ropewalk.tools.diff.between_engines import beside_the_ropes, not_compared
from ropewalk.tools.diff.lengths import longest_of, stated_length
from ropewalk.tools.diff.rope_difference import difference
from ropewalk.tools.diff.text import Result, bullets, frequencies, layers, left_out, section, wrap

LENGTHS = (*_LENGTHS, "model_max_length", "max_seq_length", "seq_len")
"""The keys with which vLLM (model_arch_config_convertor.py) or SGLang (hf_transformers/common.py) limits the length."""

Configs = list[tuple[ConfigRope, list[int]]]


class ForEngine(Result):
    """What an engine needs to rotate as a config says. `facts` is all of it as a dict of JSON values."""

    @property
    def verdict(self) -> Literal["nothing needed", "not trained", "command", "cannot", "not judged"]:
        """The result in a word or two.

        "nothing needed": the engine rotates as the config says. "not trained": it does, but neither training nor
        scaling reaches the length that was passed. "command": it does with `facts["command"]`. "cannot": no known
        argument makes it do so. "not judged": what it reads for the model is not known, or a key was ignored.
        """
        return self.facts["verdict"]  # type: ignore[no-any-return]

    def text(self) -> str:
        """Return the result as text for a terminal."""
        return _text(self.facts)


def for_engine(
    source: Any,
    name: str,
    *,
    length: int | None = None,
    pairing: str | None = None,
    base: float | None = None,
    ignore: Collection[str] = (),
    download: bool = False,
) -> ForEngine:
    """Compare the ropes of a config with those that an engine computes from it, and find a command if they differ.

    A command is returned only if the engine's rules, with the command's keys, give the model's ropes. No engine is run.

    Args:
        source: as in `diff.engines`.
        name: the engine: "transformers", "vllm", "sglang" or "llama.cpp".
        length: as in `diff.engines`.
        pairing, base, ignore, download: as in `from_config`.

    Returns:
        A `ForEngine`, with the result as text (`.text()`) and as data (`.facts`).

    Raises:
        RopeError: the config cannot be read or states no length, or the engine has no known arguments.
    """
    chosen = engine("diff.for_engine", name, {key: each for key, each in ENGINES.items() if each.override})
    ropes, configs = ropes_for_engines(source, chosen, pairing=pairing, base=base, ignore=ignore, download=download)
    setting = longest_of("diff.for_engine", length, ropes)
    apart, unknown = apart_of(chosen, configs, dict(enumerate(ropes.layers)), setting)
    notes = dict.fromkeys(note for config, _ in configs for note in chosen.answer(config).notes)
    beside = beside_the_ropes(ropes, [chosen])
    apart += beside.values()
    command = ""
    loads = all(chosen.answer(config).rope or _refused_by_rule(chosen, config) for config, _ in configs)
    if loads and apart and not unknown and not beside:
        values = configs[0][0].whole
        # With the axes of tokens with several positions, which no rule needs but the written parameters.
        whole = read_config(values, pairing=pairing, base=base, ignore=find_engine_keys(values))
        with contextlib.suppress(RopeError):  # the model's own code does not read the schema of transformers 5
            written = whole.to_hf_config(version=5)
            own = {**dict.fromkeys(range(len(ropes.layers))), **{i: c.rope for c, rows in configs for i in rows}}
            forms, _ = find_command(chosen, configs, written.get("rope_parameters") or {}, written, own, setting)
            command = "".join(forms[:1])
    too_long = _too_long(ropes, length)
    verdict = "command" if command else "cannot" if apart else "not trained" if too_long else "nothing needed"
    verdict = "not judged" if unknown or ignore else verdict
    if verdict in ("nothing needed", "command") and setting > (ropes.max_position_embeddings or setting):
        notes[f"It may accept fewer tokens, unless it gets what `ropewalk extend --to {setting}` prints for it."] = None
    return ForEngine(
        {
            "source": ropes.source,
            "model_type": ropes.model_type,
            "engine": chosen.name,
            "version": chosen.version,
            "layers": len(ropes.layers),
            "length": setting,
            "verdict": verdict,
            "too_long": too_long or None,
            "ignored": list(ignore),
            "differences": unknown or apart,
            "notes": [] if unknown else [note for note in notes if note not in " ".join(apart)],
            "command": command or None,
            "command_source": chosen.override.source if command and chosen.override else None,
            "not_compared": not_compared(ropes),
            "warnings": list(ropes.warnings),
        }
    )


def _refused_by_rule(chosen: Engine, config: ConfigRope) -> bool:
    """Whether the engine loads the config, and then its function for frequencies refuses it, which a command cures."""
    return chosen.apply_rule(config).refusal == chosen.answer(config).refusal


def apart_of(
    chosen: Engine, configs: Configs, own: Mapping[int, Rope | None], setting: int, *, short: bool = True
) -> tuple[list[str], list[str]]:
    """Return how the ropes of the engine differ from those of the model, and why they cannot be judged, as sentences.

    Args:
        chosen: the engine.
        configs: the ropes of the config that the engine reads, each with the indices of its layers.
        own: the ropes of the layers of the model.
        setting: the length that the engine is configured for, in tokens.
        short: whether they are compared for sequences within the trained length, too.
    """
    apart: list[str] = []
    unknown: list[str] = []
    for config, indices in configs:
        answer, place = chosen.answer(config), layers(indices, len(own))
        if not answer.is_judged:
            unread = f"what its file for {config.model} reads was not recorded"
            why = f"it {answer.refusal}" if answer.why == "absent" else answer.refusal or unread
            (apart if answer.why == "absent" else unknown).append(f"{place}: {why}.")
            continue
        if answer.rope is None:
            apart.append(f"{place}: it does not run this config: {answer.refusal}.")
            continue
        found = ""
        for rope in dict.fromkeys(own[i] for i in indices):
            if rope is None:
                found = "it rotates layers that the model does not rotate"
                continue
            # A scheme that depends on the length slows the pairs only beyond the trained one.
            trained = rope.scaling.trained_length(setting) if rope.scaling is not None and short else None
            for sequence in sorted({min(trained or setting, setting), setting}):
                theirs = answer.at(sequence, setting)
                ours = rope if rope.is_static else rope.at_length(sequence)
                found = found or _difference(ours, theirs, sequence)
        if found:
            apart.append(" ".join([f"{place}: {found}.", *answer.notes]))
    return apart, unknown


def _difference(ours: Rope, theirs: Rope | None, sequence: int) -> str:
    if theirs is None:
        return "it has no rope"
    apart = difference(ours, theirs, sequence)
    if apart["same"]:
        return ""
    words = [frequencies(apart)] if apart.get("channels") or apart["inv_freq"]["pairs_that_differ"] else []
    if theirs.attention_factor != ours.attention_factor:
        words.append(f"the attention factor is {theirs.attention_factor:.6g} and not {ours.attention_factor:.6g}")
    return f"for {sequence:,} tokens, {' and '.join(words)}"


def _too_long(ropes: ModelRopes, length: int | None) -> str:
    """Return why the model does not reach the length that the user passed, as a sentence; "" if that is not known."""
    stated, trained = stated_length(ropes), ropes.trained_length
    # Linear scaling does not say whether the stated length is that before or after it.
    schemes = [{} if rope is None or rope.scaling is None else rope.scaling.facts() for rope in ropes.layers]
    times = max((facts["factor"] for facts in schemes if facts.get("rope_type") == "linear"), default=1.0)
    if length is None or stated is None or length <= stated * times:
        return ""
    why = f"its config states {stated:,}"
    if any(schemes) and trained is not None and trained < stated:
        origin = ropes.origins.get("original_max_position_embeddings", "in its config")
        why = f"it was trained for {trained:,} ({origin}), and its scaling reaches {stated:,}"
    return f"The model was not trained for {length:,} tokens: {why}."


def find_command(
    chosen: Engine,
    configs: Configs,
    old: Mapping[str, Any],
    written: Mapping[str, Any],
    own: Mapping[int, Rope | None],
    setting: int,
    *,
    model: str = "MODEL",
    length: int | None = None,
) -> tuple[list[str], list[str]]:
    """Return the first command with which the engine has certain ropes, and why there is none, as sentences.

    Args:
        chosen: the engine, whose arguments are known.
        configs: the ropes of the config, for text tokens, each with the indices of its layers.
        old: the `rope_parameters` of the config.
        written: the config of the text model in the schema of transformers 5, with the ropes that the engine must have.
        own: these ropes, by the indices of the layers.
        setting: the length for which the ropes are compared, in tokens.
        model: the model in the command.
        length: the length to configure, for a config that states it, in tokens. None leaves both as they are.

    Returns:
        The command, followed by the same in Python if the engine has both, or []; and the reasons for none, or [].
    """
    override, first = chosen.override, configs[0][0]
    if isinstance(override, Flags):
        return _flags(chosen, override, configs, own, setting, model=model, length=length)
    read, path = find_text(first.whole)[0], text_path(first.whole)
    if override is None or len(path) > override.deepest:
        return [], ["no argument of it reaches the text model inside of this config"]
    scaled = next((rope for rope in own.values() if rope is not None and rope.scaling is not None), None)
    section, parameters = {**old, **first.section}, written.get("rope_parameters") or {}
    alone = chosen.reads(first.file_format)  # then it has its own config around that of the text model
    keys = {} if length is None else {key: written[key] for key in LENGTHS if key in written}
    keys |= {"max_seq_len": length} if alone and length is not None else {}  # which vLLM adds to a params.json
    reasons: list[str] = []
    for new in spellings(parameters, scaled):
        applied = {"rope_parameters": override.applied(section, new, len(path))}
        text = {**written, **applied}
        try:
            _, found = ropes_for_engines(text if alone else put(first.whole, read, text), chosen)
        except RopeError as e:
            reasons = reasons or [f"with the keys of its argument, the config cannot be read ({without_fix(e)})"]
            continue
        apart, unknown = apart_of(chosen, found, own, setting)
        if not (apart or unknown):
            replaced = put({}, path, {**keys, "rope_parameters": new})
            forms = (override.write, override.python)
            return [form(model, replaced, length) for form in forms if form is not None], []
        answers = [chosen.answer(config) for config, _ in found]
        if all(answer.rope is not None and answer.rope.scaling is None for answer in answers):
            apart = list(dict.fromkeys(note for answer in answers for note in answer.notes)) or apart
        reasons = reasons or [*unknown, *apart]
    return [], reasons


def _flags(
    chosen: Engine,
    override: Flags,
    configs: Configs,
    own: Mapping[int, Rope | None],
    setting: int,
    *,
    model: str,
    length: int | None,
) -> tuple[list[str], list[str]]:
    """As `find_command`, for an engine whose arguments state one rope."""
    kept = [entry for entry in configs if entry[0].window is not None and entry[0].model_type in override.keep_windows]
    changed = [entry for entry in configs if entry not in kept]
    for config, indices in kept:
        read, meant = chosen.answer(config).rope, own[indices[0]]
        if config.rope.scaling is None and (config.window or 0) <= (config.longest or 0):
            meant = config.rope  # no position in its window is new to the model
        if apart := "it has no rope" if read is None or meant is None else _difference(meant, read, setting):
            place = layers(indices, len(own))
            return [], [f"its arguments change only layers without a window, and this config others: {place}: {apart}"]
    if len(changed) != 1:
        differ = len({own[indices[0]] for _, indices in changed}) > 1
        unknown = "what its arguments do to the layers with a window was not looked up for this model"
        return [], ["its arguments state one rope, and the layers of this model differ" if differ else unknown]
    [(config, indices)] = changed
    answer, meant = chosen.answer(config), own[indices[0]]
    if answer.rope is None or meant is None:
        return [], [f"it does not run this config ({answer.refusal})"]
    flags = override.write(config, answer.rope, meant)
    if isinstance(flags, str):
        return [], [flags]
    apart = _difference(meant, flags[1], setting)
    return ([], [apart]) if apart else ([override.command(model, flags[0], length)], [])


def _text(facts: Mapping[str, Any]) -> str:
    name = f"{facts['engine']} {facts['version']}"
    up_to = f"up to {facts['length']:,} tokens"
    verdicts = {
        "nothing needed": f"The rope needs nothing: {name} rotates as the config says, {up_to}.",
        "not trained": f"{name} rotates as the config says, which does not scale for this length. "
        f"`ropewalk extend --to {facts['length']}` looks for a command that does.",
        "command": f"{name} does not rotate as the config says, but it does with the command below, {up_to}.",
        "cannot": f"{name} does not rotate as the config says. No argument that was looked up makes it do so.",
        "not judged": f"{name} was not judged for this config.",
    }
    lines = [f"{facts['source']} (model_type {facts['model_type']})", "", *left_out(facts)]
    lines += wrap(" ".join(filter(None, (facts["too_long"], verdicts[facts["verdict"]]))), "")
    lines += bullets([*facts["differences"], *facts["notes"]])
    if facts["command"] is not None:
        lines += ["", "the command", f"  {facts['command']}"]
    if facts["not_compared"]:
        lines += ["", *wrap(f"Not compared: {'; '.join(facts['not_compared'])}.", "")]
    defined = f", and the command is defined in {facts['command_source']}" if facts["command"] is not None else ""
    lines += ["", *wrap(f"This was checked with ropewalk's rules for {name}{defined}. No engine was run.", "")]
    lines += section("warnings", (f"! {warning}" for warning in facts["warnings"]))
    return "\n".join(map(_checks.printable, lines))
