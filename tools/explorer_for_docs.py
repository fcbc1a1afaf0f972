"""Write the explorer's page of ten well-known models, to which the documentation links.

    python tools/explorer_for_docs.py                          write site/explorer/models/index.html, and check the link
    python tools/explorer_for_docs.py PATH                     write PATH
    python tools/explorer_for_docs.py --pictures docs/assets   take the pictures of explorer.md and index.md in Chromium

Run it after building the site. The configs come from the golden files of the tests, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from ropewalk import ModelRopes, from_config, plots

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
PAGE = ROOT / "site" / "explorer" / "models" / "index.html"

MODELS = {
    "Llama 3.1 8B": ("text_models.json", "llama-3.1-8b"),
    "GPT-OSS 120B": ("released.json", "126.json"),
    "Gemma 3 27B": ("text_models.json", "gemma-3-27b-it"),
    "DeepSeek-V3.2": ("text_models.json", "deepseek-v3.2"),
    "Phi-3.5 mini": ("text_models.json", "phi-3.5-mini-instruct"),
    "Qwen3 32B": ("released.json", "088.json"),
    "Qwen3-VL 4B": ("released.json", "093.json"),
    "Mistral 7B v0.3": ("text_models.json", "mistral-7b-instruct-v0.3"),
    "Llama 4 Scout": ("released.json", "101.json"),
    "GLM-5": ("released.json", "106.json"),
}
"""Name of the model → the golden file with its config, and the name or the file of its row there."""

NOTE = (
    "Ten models as their published configs describe them. Layers with different ropes, such as the sliding and the "
    "full attention of Gemma 3, are separate curves."
)
MOST_BYTES = 150_000  # maximum size of a screenshot


def config_of(file: str, name: str) -> dict[str, Any]:
    """Return the config of a row of a golden file."""
    rows = json.loads((GOLDEN / file).read_text(encoding="utf-8"))["rows"]
    (config,) = [row["config"] for row in rows if name in (row.get("name"), row.get("file"))]
    return dict(config)


def models() -> dict[str, ModelRopes]:
    """Return the ropes of the ten models by name."""
    return {name: from_config(config_of(*where)) for name, where in MODELS.items()}


def write(path: Path) -> None:
    """Write the page, and create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plots.explorer(models(), note=NOTE), encoding="utf-8")
    print(f"wrote {path}")


def check_link() -> None:
    """Exit with an error unless the built page of docs/explorer.md links to the explorer's page."""
    text = (PAGE.parents[1] / "index.html").read_text(encoding="utf-8")
    links = {(PAGE.parents[1] / href).resolve() for href in re.findall(r'href="([^":#]+)"', text)}
    if PAGE.parent.resolve() not in links:
        raise SystemExit(f"{PAGE.parents[1] / 'index.html'}: it must link to {PAGE.parent}")


def take_screenshots(folder: Path) -> None:
    """Take screenshots: of the first figure of the page, and the figure of the home page, each in both modes."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from browser import Browser

    with tempfile.TemporaryDirectory() as temporary:
        page, home = (Path(temporary) / name for name in ("index.html", "home.html"))
        write(page)
        home.write_text(plots.explorer(dict(islice(models().items(), 3))), encoding="utf-8")
        for name, shown, first, last, width, scale, dark in (
            ("explorer-light", page, "#frequencies", "#frequencies", 1100, 1.5, False),
            ("explorer-dark", page, "#frequencies", "#frequencies", 1100, 1.5, True),
            ("home-light", home, "#frequencies .chips", "#frequencies .plot", 540, 1.5, False),
            ("home-dark", home, "#frequencies .chips", "#frequencies .plot", 540, 1.5, True),
        ):
            path = folder / f"{name}.webp"
            with Browser(width=width, dark=dark) as browser:
                browser.open(shown)
                height = browser.evaluate("document.documentElement.scrollHeight")
                browser.resize(width, height, scale=scale)
                top, bottom = (
                    browser.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().{side}")
                    for selector, side in ((first, "top"), (last, "bottom"))
                )
                margin = 20 if first == last else 8  # the words above the chips are not in the picture
                clip = {"x": 0, "y": top - margin, "width": width, "height": bottom - top + margin + 10}
                browser.screenshot(path, clip)
            if (size := path.stat().st_size) > MOST_BYTES:
                raise SystemExit(f"{path}: at most {MOST_BYTES} bytes, got {size}")
            print(f"drew {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="write the page to this file, and do not check the link")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="take the screenshots instead")
    options = parser.parse_args()
    if options.pictures is not None:
        take_screenshots(options.pictures)
    else:
        write(options.path or PAGE)
        if options.path is None:
            check_link()


if __name__ == "__main__":
    main()
