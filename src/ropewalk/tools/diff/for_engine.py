"""Find out whether an engine has the ropes of a model, and the command with which it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropewalk._checks import RopeError, without_fix
from ropewalk.configs.engine_ropes import ropes_for_engines
from ropewalk.configs.hf import find_text, text_path
from ropewalk.configs.reader import LENGTHS as _LENGTHS
from ropewalk.engines import ConfigRope, Engine, Flags, put, spellings
from ropewalk.rope.rope import Rope
from ropewalk.tools.diff.rope_difference import difference
from ropewalk.tools.diff.text import frequencies, layers

LENGTHS = (*_LENGTHS, "model_max_length", "max_seq_length", "seq_len")
"""The keys with which vLLM (model_arch_config_convertor.py) or SGLang (hf_transformers/common.py) limits the length."""

Configs = list[tuple[ConfigRope, list[int]]]


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


def find_command(
    chosen: Engine,
    configs: Configs,
    old: Mapping[str, Any],
    written: Mapping[str, Any],
    own: Mapping[int, Rope | None],
    length: int,
    model: str,
) -> tuple[list[str], list[str]]:
    """Return the first command with which the engine has certain ropes, and why there is none, as sentences.

    Args:
        chosen: the engine, whose arguments are known.
        configs: the ropes of the config, for text tokens, each with the indices of its layers.
        old: the `rope_parameters` of the config.
        written: the config of the text model in the schema of transformers 5, with the ropes that the engine must have.
        own: these ropes, by the indices of the layers.
        length: the length to configure, up to which the ropes are compared, in tokens.
        model: the model in the command.

    Returns:
        The command, followed by the same in Python if the engine has both, or []; and the reasons for none, or [].
    """
    override, first = chosen.override, configs[0][0]
    if isinstance(override, Flags):
        return _flags(chosen, override, configs, own, length, model)
    read, path = find_text(first.whole)[0], text_path(first.whole)
    if override is None or len(path) > override.deepest:
        return [], ["no argument of it reaches the text model inside of this config"]
    scaled = next((rope for rope in own.values() if rope is not None and rope.scaling is not None), None)
    section, parameters = {**old, **first.section}, written.get("rope_parameters") or {}
    alone = chosen.reads(first.file_format)  # then it has its own config around that of the text model
    keys = {key: written[key] for key in LENGTHS if key in written}
    keys |= {"max_seq_len": length} if alone else {}  # which vLLM adds to a params.json
    reasons: list[str] = []
    for new in spellings(parameters, scaled):
        applied = {"rope_parameters": override.applied(section, new, len(path))}
        text = {**written, **applied}
        try:
            _, found = ropes_for_engines(text if alone else put(first.whole, read, text), chosen)
        except RopeError as e:
            reasons = reasons or [f"with the keys of its argument, the config cannot be read ({without_fix(e)})"]
            continue
        apart, unknown = apart_of(chosen, found, own, length)
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
    length: int,
    model: str,
) -> tuple[list[str], list[str]]:
    """As `find_command`, for an engine whose arguments state one rope."""
    kept = [entry for entry in configs if entry[0].window is not None and entry[0].model_type in override.keep_windows]
    changed = [entry for entry in configs if entry not in kept]
    for config, indices in kept:
        read, meant = chosen.answer(config).rope, own[indices[0]]
        if config.rope.scaling is None and (config.window or 0) <= (config.longest or 0):
            meant = config.rope  # no position in its window is new to the model
        if apart := "it has no rope" if read is None or meant is None else _difference(meant, read, length):
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
    apart = _difference(meant, flags[1], length)
    return ([], [apart]) if apart else ([override.command(model, flags[0], length)], [])
