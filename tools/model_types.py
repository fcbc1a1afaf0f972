"""Write docs/model-types.md, the page of all model types that `from_config` knows.

    python tools/model_types.py

tests/test_docs.py tests that the page is what this script writes.
"""

from __future__ import annotations

from pathlib import Path

from ropewalk.configs.listing import model_types

PAGE = Path(__file__).resolve().parents[1] / "docs" / "model-types.md"
_HEAD = """# Which model types can be read?

These are the values of `model_type` that [`from_config`](models.md) and `ropewalk explain` know, with the
[pairing](pairing.md) of each model and the names of its axes. `ropewalk explain --list` prints this list, and
`ropewalk explain --list --json` prints it as JSON. `tools/model_types.py` writes this page.
"""


def page() -> str:
    """Return the text of the page: a section for each group, with a row for each description."""
    parts = [_HEAD]
    for group, members in model_types().items():
        names: dict[str, list[str]] = {}
        for name, words in members.items():
            names.setdefault(words, []).append(f"`{name}`")
        rows = [f"| {words} | {', '.join(listed)} |" for words, listed in sorted(names.items(), key=_order)]
        head = (f"## {group}", "", f"{len(members)} names:", "", "| description | names |", "|---|---|")
        parts.append("\n".join((*head, *rows, "")))
    return "\n".join(parts)


def _order(row: tuple[str, list[str]]) -> tuple[int, str]:
    return -len(row[1]), row[0]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
