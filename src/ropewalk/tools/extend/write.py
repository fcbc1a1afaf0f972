"""Write the folder of a model with the extended config, and links to its other files."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

from ropewalk import _checks
from ropewalk.tools.extend.extended import Extended, extend
from ropewalk.tools.extend.plan import version_of

_WHO = "ropewalk extend"


def write(extended: Extended, source: Path, folder: Path, *, version: int | None = None) -> Extended:
    """Write a new folder with the extended config.json, and links to the other files beside the config that was read.

    The source is not changed. The folder appears when it is complete. Links are relative, so that they also work where
    both folders are mounted together.

    Args:
        extended: the result of `extend`.
        source: the folder or the config.json that was read. Nothing is linked beside other sources.
        folder: the new folder.
        version: the version of transformers whose schema is written, 4 or 5. None means that of the file.

    Returns:
        The result with commands for the folder, which replaces no keys, if the engine has these ropes from it as well.

    Raises:
        RopeError: the folder exists, the source has another format, or the config has no such schema.
        OSError: a file cannot be written.
    """
    if folder.exists() or folder.is_symlink():
        raise _checks.error(_WHO, "the folder to write must not exist", str(folder), "Pass another one.")
    if extended.source.text.file_format:
        raise _checks.error(_WHO, "--write needs a config.json", str(source), "Pass the engine its arguments instead.")
    config = extended.config(version=version or version_of(extended.source))
    beside = source if source.is_dir() else source.parent if source.name == "config.json" else None
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for file in [] if beside is None else sorted(beside.iterdir()):
            if file.name != "config.json" and file.resolve() not in (part.resolve(), folder.resolve()):
                (part / file.name).symlink_to(os.path.relpath(file.resolve(), part.resolve()))
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        part.chmod(0o755)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    names = [row["name"] for row in extended.facts["engines"]]
    read = extend(folder, extended.facts["target"], engines=names, model=str(folder))
    rows = []
    for old, new in zip(extended.facts["engines"], read.facts["engines"], strict=True):
        same = old["commands"] and new["commands"] and new["reads_config"]
        rows.append(new if old["reads"] else {**new, "plan": old["plan"]} if same else old)
    return dataclasses.replace(extended, facts={**extended.facts, "engines": rows})
