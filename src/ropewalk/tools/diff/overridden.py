"""Compute the ropes that an engine has after a launch override, by what its own code does with the keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ropewalk._checks import RopeError, without_fix
from ropewalk.configs.engine_ropes import ropes_for_engines
from ropewalk.configs.hf import find_text
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.engines import Answer, ConfigRope, Engine, Flags, Override, put

_LOST = "its override leaves rope_parameters without rope_theta, which it needs (TypeError or KeyError)"


@dataclass(frozen=True)
class Overridden:
    """What an engine reads after an override.

    Args:
        engine: the engine.
        ropes: the ropes of the config that it then has; () if it was not judged.
        configs: maps each layer that rotates to its rope.
        note: what it does with the keys, as a sentence.
        lost: whether the override replaced the object with the base by one without it.
        unchanged: whether the engine has the same ropes as without the override.
        stop: why it rejects the override, or was not judged; "" if neither.
        why: as in `Answer`, of `stop`.
    """

    engine: Engine
    ropes: tuple[ModelRopes, ...] = ()
    configs: Mapping[int, ConfigRope] = field(default_factory=dict)
    note: str = ""
    lost: bool = False
    unchanged: bool = False
    stop: str = ""
    why: Literal["refused", "unknown"] = "unknown"

    def answer(self, layer: int) -> Answer:
        """Return the rope that the engine has in a layer."""
        config = self.configs.get(layer)
        if config is None:
            return Answer(None, refusal=self.stop or "the layer then does not rotate", why=self.why)
        found = self.engine.answer(config)
        if self.lost and (self.engine.files == "transformers" or "the code of transformers" in " ".join(found.notes)):
            return Answer(None, refusal=_LOST, why="refused", source=found.source)
        return replace(found, notes=(self.note, *found.notes))


def overridden(
    engine: Engine, ropes: ModelRopes, configs: list[tuple[ConfigRope, list[int]]], keys: Mapping[str, Any]
) -> Overridden:
    """Return what an engine reads of a config if it is started with an override of keys."""
    override, first = engine.override, configs[0][0]
    if not isinstance(override, Override):
        own = ", but flags of its own" if isinstance(override, Flags) else " that was looked up"
        return Overridden(engine, stop=f"it has no argument that overrides keys of a config{own}")
    path, _ = find_text(first.whole)
    if engine.files == "transformers" and "rope_theta" in keys:
        return Overridden(engine, stop="its models take no argument rope_theta (TypeError)", why="refused")
    try:
        written = find_text(ropes.to_hf_config(version=5))[1]
        parameters = dict(written.get("rope_parameters") or {})
        if not _is_nested(parameters):  # with keys that only engines read
            parameters = {**{k: v for k, v in first.read_section().items() if k != "type"}, **parameters}
        after = override.apply(put(first.whole, path, {**written, "rope_parameters": parameters}), keys)
        text = find_text(after)[1]
        new = text.get("rope_parameters") or {}
        lost = "rope_theta" not in new and not _is_nested(new) and not (path and engine.files == "transformers")
        gone = ({"rope_theta"} | parameters.keys() & {"partial_rotary_factor"}) - new.keys()
        base = override.bases.get(engine.answer(first).source.split(",")[0], 10_000.0)
        if lost and not path and (base is None or keys.get("rope_scaling") is not None):  # whose setter writes None
            return Overridden(engine, stop=_LOST, why="refused")
        if (lost and path) or ("partial_rotary_factor" in gone and (lost or "rope_theta" in keys)):
            without = " and ".join(sorted(gone))
            return Overridden(engine, stop=f"how it rotates without {without} was not recorded, so state this, too")
        if lost:
            after = {**after, "rope_parameters": {**new, "rope_theta": base}}
        found, read = ropes_for_engines(after, engine)
    except RopeError as e:
        return Overridden(engine, stop=f"the config after its override cannot be read ({without_fix(e)})")
    how = "merges" if override.merges == ("below the top" if path else "at the top") else "replaces"
    note = f"Its override {how} rope_parameters, of which rope_scaling is another name ({override.source})."
    note += f" No rope_theta is left, so the base is {base:g}." if lost else ""
    now = _by_layer(read)
    before = {i: engine.answer(config).rope for i, config in _by_layer(configs).items()}
    unchanged = before == {i: engine.answer(config).rope for i, config in now.items()}
    return Overridden(engine, (found,), now, note, lost, unchanged)


def _by_layer(configs: list[tuple[ConfigRope, list[int]]]) -> dict[int, ConfigRope]:
    return {i: config for config, indices in configs for i in indices}


def _is_nested(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values())
