"""Run every Python block of docs/ and README.md, in order, in one namespace for each page.

    ```python           runs; its asserts must hold
    ```pycon            runs; what it prints must match to the letter
    ```python no-run    is not run
    <!-- python         runs as far as a line -->, and readers do not see it: asserts that hold what the page says

A page runs in a new folder, as if it were pasted into an empty one. A block may write a file that a later block reads.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib
import inspect
import json
import re
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ropewalk

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r" *(?P<fence>`{3,}|~{3,})(?P<info>.*)")
_HIDDEN = re.compile(r"(?P<fence><!--) (?P<info>py.*)")
_MISSPELT = {"py", "py3", "python3", "python-repl", "doctest", "ipython"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its opening fence (from 1), its language and its code."""

    page: Path
    line: int
    language: str
    code: str
    runs: bool

    @property
    def where(self) -> str:
        folder = ROOT / "docs" if self.page.is_relative_to(ROOT / "docs") else self.page.parent
        return f"{self.page.relative_to(folder)}:{self.line}"

    def run(self, namespace: dict[str, Any]) -> None:
        """Execute the block. Errors name the page and the line, as for any Python file."""
        if self.language == "pycon":
            self._run_doctest(namespace)
        else:
            padded = "\n" * self.line + self.code
            # optimize=0 keeps asserts. dont_inherit: the block does not get the __future__ imports of this file.
            exec(compile(padded, str(self.page), "exec", dont_inherit=True, optimize=0), namespace)

    def _run_doctest(self, namespace: dict[str, Any]) -> None:
        test = doctest.DocTestParser().get_doctest(self.code, {}, self.where, str(self.page), self.line)
        assert test.examples, f"{self.where}: a pycon block without >>> checks nothing"
        test.globs = namespace
        said: list[str] = []
        result = doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False)
        if result.failed:
            raise AssertionError("".join(said))


def blocks_of(page: Path) -> list[Block]:
    """Return the Python blocks of a page. Raise for an unclosed fence, an unknown marker or a misspelt language."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.fullmatch(lines[number]) or _HIDDEN.fullmatch(lines[number])
        if opening is None:
            number += 1
            continue
        start = number
        fence = opening["fence"]
        closing = re.compile(r"-->" if fence == "<!--" else rf" *{fence[0]}{{{len(fence)},}}\s*")
        number += 1
        while number < len(lines) and not closing.fullmatch(lines[number]):
            number += 1
        if number == len(lines):
            raise AssertionError(f"{page}:{start + 1}: this fence is never closed")
        block = _block(page, start + 1, opening["info"].split(), lines[start + 1 : number])
        found += [] if block is None else [block]
        number += 1
    return found


def _block(page: Path, line: int, info: list[str], code: list[str]) -> Block | None:
    language, markers = (info[0], info[1:]) if info else ("", [])
    if language.lower() in _MISSPELT or (
        language not in {"python", "pycon"} and language.lower() in {"python", "pycon"}
    ):
        raise AssertionError(f"{page}:{line}: write ```python or ```pycon, not ```{language}, or it would not run")
    if language not in {"python", "pycon"}:
        return None
    unknown = [marker for marker in markers if marker != "no-run" and "=" not in marker]
    if unknown:
        raise AssertionError(f"{page}:{line}: unknown marker {unknown[0]!r}; the only one is no-run")
    return Block(page, line, language, textwrap.dedent("\n".join(code)) + "\n", runs="no-run" not in markers)


def run(blocks: list[Block], folder: Path) -> dict[Block, Exception | None]:
    """Run the blocks of a page. Return the error of each block, or None. Blocks after a failure do not run."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outcomes: dict[Block, Exception | None] = {}
    with contextlib.chdir(folder), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for block in blocks:
            if not block.runs:
                continue
            try:
                block.run(namespace)
            except Exception as failure:
                outcomes[block] = failure
                break
            outcomes[block] = None
    return outcomes


def check(block: Block, outcomes: dict[Block, Exception | None]) -> None:
    """Fail if the block failed, naming page and line. Skip it if an earlier block of its page failed."""
    if block not in outcomes:
        pytest.skip(f"did not run, because {list(outcomes)[-1].where} failed")
    if (failure := outcomes[block]) is not None:
        # Start the traceback at the page; the frames above belong to this file.
        frame = failure.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename != str(block.page):
            frame = frame.tb_next
        told = "".join(traceback.format_exception(type(failure), failure, frame))
        pytest.fail(f"{block.where}\n{told}", pytrace=False)


REFERENCE = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
BLOCKS = {page: blocks_of(page) for page in PAGES}


@pytest.fixture(scope="module")
def outcomes_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[Block, Exception | None]]:
    """Run a page when its first block is tested, and reuse the outcomes for its other blocks."""

    def outcomes(page: Path) -> dict[Block, Exception | None]:
        folder = tmp_path_factory.mktemp(page.stem)
        if page.name == "README.md":  # which is read in a clone
            (folder / "examples").symlink_to(ROOT / "examples")
        return run(BLOCKS[page], folder)

    return functools.cache(outcomes)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.where, marks=() if block.runs else pytest.mark.skip(reason="marked no-run"))
        for blocks in BLOCKS.values()
        for block in blocks
    ],
)
def test_block(block: Block, outcomes_of: Callable[[Path], dict[Block, Exception | None]]) -> None:
    check(block, outcomes_of(block.page))


def test_the_notebook_runs() -> None:
    notebook = json.loads((ROOT / "examples" / "rope.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 8
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for number, cell in enumerate(cells):
            exec(compile(cell, f"rope.ipynb[{number}]", "exec", dont_inherit=True, optimize=0), namespace)


def test_every_public_name_is_in_the_reference() -> None:
    entries = re.findall(r"^::: ropewalk\.(\w+)$", REFERENCE, re.MULTILINE)
    assert sorted(entries) == sorted(ropewalk.__all__)


def test_the_reference_gives_types_that_the_defaults_have() -> None:
    wrong = []
    for name in ropewalk.__all__:
        public = getattr(ropewalk, name)
        members = [public, *(member for _, member in inspect.getmembers(public, inspect.isfunction))]
        for member in members:
            if callable(member) and member.__module__.startswith("ropewalk"):
                for parameter in inspect.signature(member).parameters.values():
                    if parameter.default is None and not re.search(r"\b(None|Any)\b", str(parameter.annotation)):
                        wrong.append((name, member.__name__, str(parameter)))
    assert wrong == []


@pytest.mark.parametrize("module", ["diff", "parallel", "plots", "positions"])
def test_what_dir_lists_is_in_the_reference(module: str) -> None:
    entry = re.search(rf"^::: ropewalk\.{module}\n    options:\n      members: \[([^]]+)\]", REFERENCE, re.MULTILINE)
    assert entry is not None
    assert sorted(re.findall(r"\w+", entry[1])) == sorted(
        name for name in dir(getattr(ropewalk, module)) if not name.isupper()
    )


def test_the_first_page_of_the_reference_names_every_other_page() -> None:
    folder = ROOT / "docs" / "reference"
    linked = re.findall(r"^\| \[\w+\]\((\w+)\.md\) \|", (folder / "index.md").read_text("utf-8"), re.MULTILINE)
    assert sorted([*linked, "index"]) == sorted(page.stem for page in folder.iterdir())


def test_examples_in_docstrings_have_the_heading_that_the_site_shows_as_code() -> None:
    sources = (ROOT / "src").rglob("*.py")
    assert [path.name for path in sources if re.search(r"^ *Example:$", path.read_text("utf-8"), re.MULTILINE)] == []


def test_names_and_descriptions_of_arguments_begin_on_one_line() -> None:
    """The generator of the site reads `name: description` in one line, and merges other entries with a warning."""
    entries = [
        (path.name, line)
        for path in (ROOT / "src").rglob("*.py")
        for indent, section in re.findall(
            r"^( *)(?:Args|Attributes):\n((?:\1 {4}.*\n|\n(?=\1 {4}))+)", path.read_text("utf-8"), re.MULTILINE
        )
        for line in re.findall(rf"^{indent} {{4}}(\S.*)$", section, re.MULTILINE)
    ]
    assert len(entries) > 1000
    assert [entry for entry in entries if ": " not in entry[1]] == []


def test_what_a_scheme_of_your_own_needs_is_in_the_reference() -> None:
    used = set(re.findall(r"\bschemes\.([A-Za-z]+)\b", (ROOT / "docs" / "schemes" / "index.md").read_text("utf-8")))
    listed = re.search(r"^::: ropewalk\.schemes\n    options:\n      members: \[(.*)\]", REFERENCE, re.MULTILINE)
    assert listed is not None
    there = {*listed[1].split(", "), *ropewalk.__all__, *re.findall(r"^::: ropewalk\.schemes\.(\w+)", REFERENCE, re.M)}
    assert used >= {"register", "unregister", "default", "SCHEMES"}
    assert used <= there


WRITTEN_BY_SCRIPTS = {"model-types.md", "transformers-models.md"}


def visible(page: Path) -> str:
    """Return a page without the blocks that its readers do not see."""
    return re.sub(r"^<!-- .*?-->$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_the_site_can_be_read_in_a_day() -> None:
    """All pages together have at most 45,000 words, with code and tables, except those that scripts write."""
    words = sum(len(visible(page).split()) for page in PAGES[1:] if page.name not in WRITTEN_BY_SCRIPTS)
    assert 40_000 <= words <= 45_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_code_scrolls_sideways(page: Path) -> None:
    blocks = re.findall(r"^ *```.*?^ *```$", visible(page), re.DOTALL | re.MULTILINE)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 85] == []


def test_the_page_of_model_types_is_what_its_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    script = importlib.import_module("model_types")
    assert script.PAGE.read_text("utf-8") == script.page()


# The runner itself: it must be able to fail.


def _page(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(textwrap.dedent(text), encoding="utf-8")
    return page


def test_wrong_output_fails_and_names_page_and_line(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        """\
        ```python
        two = 2
        ```

        ```pycon
        >>> two
        2
        >>> two + 1
        4
        ```
        """,
    )
    blocks = blocks_of(page)
    outcomes = run(blocks, tmp_path)
    with pytest.raises(
        pytest.fail.Exception, match=r'(?s)page\.md", line 8, in page\.md:5.*Expected:\n    4\nGot:\n    3'
    ):
        check(blocks[1], outcomes)


def test_only_no_run_is_left_out_and_comments_run(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        """\
        ```python no-run
        raise SystemError("never run")
        ```

        ````markdown
        ```python
        raise SystemError("shown, not a block")
        ```
        ````

        ```text
        raise SystemError("no Python")
        ```

        ```python title="kept"
        kept = True
        ```

        <!-- A comment. -->
        <!-- python
        assert kept

        assert not kept
        -->
        """,
    )
    blocks = blocks_of(page)
    assert [(block.line, block.runs) for block in blocks] == [(1, False), (15, True), (20, True)]
    outcomes = run(blocks, tmp_path)
    assert outcomes[blocks[1]] is None
    with pytest.raises(pytest.fail.Exception, match=r'(?s)page\.md", line 23, .*AssertionError'):
        check(blocks[2], outcomes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python norun\n```\n", r"page\.md:1: unknown marker 'norun'"),
        ("```py\n```\n", r"page\.md:1: write ```python"),
        ("```Python\n```\n", r"page\.md:1: write ```python"),
        ("A\n\n```python\nx = 1\n", r"page\.md:3: this fence is never closed"),
        ("<!-- python\nx = 1\n", r"page\.md:1: this fence is never closed"),
        ("<!-- pycon x\n-->\n", r"page\.md:1: unknown marker 'x'"),
    ],
)
def test_what_would_silently_not_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        blocks_of(_page(tmp_path, text))


def test_a_pycon_block_that_checks_nothing_fails(tmp_path: Path) -> None:
    blocks = blocks_of(_page(tmp_path, "```pycon\nx = 1\n```\n"))
    with pytest.raises(pytest.fail.Exception, match="checks nothing"):
        check(blocks[0], run(blocks, tmp_path))
