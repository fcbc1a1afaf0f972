"""Find the config.json of a hub id (`owner/name`) in the local cache of `huggingface_hub`, or download the file."""

from __future__ import annotations

import re
from pathlib import Path

from ropewalk._checks import argument, error, error_from, missing_package, possible

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def is_id(path: Path) -> bool:
    """Whether the path looks like a hub id and no file or folder has that name."""
    name = path.as_posix()
    return _ID.fullmatch(name) is not None and path.suffix not in (".json", ".gguf", ".yaml") and not path.exists()


def config_path(name: str, *, download: bool) -> Path:
    """Return the path of a model's config.json.

    Args:
        name: the id of the model.
        download: whether the config may be downloaded if it is not in the cache.

    Raises:
        RopeError: huggingface_hub is not installed, the config is not in the cache, or the download failed.
    """
    must = "config must be an existing file, or the hub id of a model in the cache of huggingface_hub"
    in_python = ", or AutoConfig.from_pretrained(...) of transformers"
    alternatives = f"the path of its config.json{possible(in_python)}."
    try:
        import huggingface_hub as hub
    except ImportError:
        raise missing_package(f"{name} is not a file, but may be a hub id", "huggingface_hub", "hub") from None
    cached = hub.try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    if not download:
        how = possible(f"If it is a hub id, pass {argument('download', True)}, or pass", "download") or "Pass"
        raise error(name, must, "neither", f"{how} {alternatives}")
    try:
        # This fails at once where the hub cannot be reached, whereas hf_hub_download tries again for half a minute.
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"))
        return Path(hub.hf_hub_download(name, "config.json"))
    except Exception as e:  # errors of the network, the hub or the disk
        fix = f"If the model exists, download it by hand, or pass {alternatives}"
        raise error_from(f"{name}: config.json cannot be downloaded", e, fix) from e
