"""Find the scheme that llama.cpp applies to a GGUF file. The schemes read their own keys and tensors (`from_gguf`)."""

from __future__ import annotations

from ropewalk._checks import choice, integer
from ropewalk.configs.gguf.header import FREQS, LONG, SHORT
from ropewalk.configs.gguf.keys import FACTOR, FORMER_FACTOR, Keys
from ropewalk.schemes import BY_NAME, SCHEMES, Scaling

_TYPE = "rope.scaling.type"


def read(c: Keys) -> tuple[Scaling | None, str]:
    """Return the scheme that llama.cpp applies to the file, or None if there is none, and the type of the scaling.

    Raises:
        RopeError: a parameter is missing or invalid, or llama.cpp does not read a key or tensor about rotation.
    """
    kind = _kind(c)
    _check_tensors(c, kind)
    scheme = None if kind == "none" else SCHEMES[kind].from_gguf(c)
    if scheme is None:
        c.read_keys -= {c.full(FACTOR), c.full(FORMER_FACTOR)}
        without_type = (scheme for scheme in BY_NAME.values() if scheme.gguf and not scheme.in_configs)
        scheme = next(filter(None, (scheme.from_gguf(c) for scheme in without_type)), None)
    c.refuse_unused(kind)
    if scheme is not None:
        c.warnings += scheme.warnings(c.longest, named="context_length", trained=c.original)
    elif c.row.freqs == "read" and c.get("rope.freq_base") == 500_000 and (c.longest or 0) > 8192:
        means = "which scales the frequencies: llama.cpp then scales nothing. Convert the model again"
        c.warnings.append(f"if the model is Llama 3.1 to 3.3, the file has lost the tensor {FREQS}, {means}.")
    if kind == "yarn" and c.row.yarn_warning:
        c.warnings.append(c.row.yarn_warning)
    return scheme, kind


def _kind(c: Keys) -> str:
    """Return the scaling type that llama.cpp applies, and record its origin."""
    key, scaling_type = c.full(_TYPE), c.get(_TYPE)
    if scaling_type is not None:
        choice(c.source, key, scaling_type, ("none", *(name for name, scheme in SCHEMES.items() if scheme.gguf)))
    by_tensors = c.row.longrope == "by tensors" and not c.tensors.keys().isdisjoint({SHORT, LONG})
    if by_tensors and scaling_type != "yarn":
        c.origins["scaling"] = f"{LONG}, which overrides {_TYPE} in {c.architecture}"
        return "longrope"
    if scaling_type is not None:
        c.origins["scaling"] = key
        return str(scaling_type)
    if c.number(FACTOR, at_least=0.0) not in (None, 0.0, 1.0):
        c.origins["scaling"] = f"no {key} is given, for which llama.cpp uses linear"
        return "linear"
    c.origins["scaling"] = f"no {key} is given"
    return "none"


def _check_tensors(c: Keys, kind: str) -> None:
    """Raise a RopeError if llama.cpp does not read a factor tensor of the file, or if a required one is missing."""
    longrope, row, again = kind == "longrope", c.row, "Convert the model again."
    expected = {SHORT, LONG} if longrope else {FREQS}
    reads = row.longrope if longrope else row.freqs
    for name in c.tensors:
        if name not in expected or not reads:
            must = f"must be a tensor that llama.cpp reads for {c.architecture} with scaling {kind!r}"
            raise c.error(name, must, "another one", c.fix(again))
    if (reads or row.longrope == "by tensors") and not c.tensors:
        _refuse_split_file(c)
    if longrope and (missing := sorted(expected - c.tensors.keys())):
        raise c.error(missing[0], "must be given with scaling 'longrope'", "none", again)
    if FREQS not in c.tensors and row.freqs == "needed":
        raise c.error(FREQS, f"must be given for {c.architecture}", "none", again)
    if kind not in ("none", "longrope") and c.tensors:
        raise c.error(FREQS, f"must not be combined with scaling {kind!r}", "both", "This is not supported yet.")


def _refuse_split_file(c: Keys) -> None:
    """Raise a RopeError if the model has several files, since another one may contain the factor tensors."""
    key = "split.count"
    if c.has(key) and integer(c.source, key, c.get(key), at_least=0) > 1:
        must = "must be at most 1, since another file may contain factor tensors"
        raise c.error(key, must, str(c.get(key)), "Merge the files with llama-gguf-split --merge.")
