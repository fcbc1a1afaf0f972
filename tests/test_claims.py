"""Compare the claims of the pages with the program and with the recorded benchmarks."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ropewalk
from ropewalk import CacheStep, LayerCache, TwoPass, engines
from ropewalk.tools import cli

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import picture  # noqa: E402
import result_tables  # noqa: E402

README = (ROOT / "README.md").read_text("utf-8")
INDEX, START, TOUR, SPEED = (
    (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("index", "start", "tour", "speed")
)
REFERENCE = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SOURCE = sorted((ROOT / "src").rglob("*.py"))

# The front page.


@pytest.mark.parametrize("page", result_tables.TABLES)
def test_the_tables_of_benchmarks_are_the_recorded_ones(page: str) -> None:
    """If this fails, run benchmarks/result_tables.py."""
    text = (ROOT / page).read_text("utf-8")
    assert result_tables.filled(page, text) == text


def test_a_wrong_number_in_a_table_is_found() -> None:
    wrong = SPEED.replace("| `clone` of q and k | ", "| `clone` of q and k | 9")
    assert result_tables.filled("docs/speed.md", wrong) == SPEED != wrong


def test_the_picture_of_benchmarks_is_drawn_from_the_results() -> None:
    """If this fails, run benchmarks/picture.py."""
    committed = (ROOT / "docs" / "assets" / "speed.svg").read_text("utf-8")
    assert picture.drawn() == committed


def outputs(page: str) -> dict[str, str]:
    """Return the commands of explain, extend, diff and check on a page, with what they print there."""
    return dict(re.findall(r"```console\n\$ (ropewalk (?:explain|extend|diff|check)[^\n]*)\n(.*?)```", page, re.DOTALL))


SHOWN = outputs(README) | outputs((ROOT / "docs" / "models.md").read_text("utf-8"))


def one_line(text: str) -> str:
    """Join the lines of a text, since a page wraps what is wider than its column."""
    return re.sub(r"\s*\n\s*", " ", text).strip()


def is_cut_from(shown: str, printed: str) -> bool:
    """Return whether a page shows what was printed, with "..." for what it leaves out."""
    parts = [re.escape(one_line(part)) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    return re.fullmatch(".*".join(parts), one_line(printed)) is not None


@pytest.mark.parametrize("command", SHOWN)
def test_the_outputs_of_commands_are_real(command: str) -> None:
    program = command.replace("ropewalk", f"{sys.executable} -m ropewalk", 1)
    printed = subprocess.run(program, shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert is_cut_from(SHOWN[command], printed), printed


@pytest.mark.parametrize(
    ("shown", "real"),
    [
        ("a\n...\nc  d\n", True),
        ("...\nb\n...\n", True),
        ("a b\n...\n", True),
        ("a\n  b\n", False),
        ("b\n...\n", False),
        ("a\n...\nc d\n", False),
    ],
)
def test_only_dots_leave_something_out(shown: str, real: bool) -> None:
    assert is_cut_from(shown, "a\n  b\n\nc  d\n") is real


def words_of(command: str) -> list[Any]:
    """Return the words of a command of a shell in any order, with JSON as data, or a call of Python as its tree."""
    if command.startswith("AutoModel"):
        return [ast.dump(ast.parse(command))]
    return sorted(
        (json.loads(w) if w.startswith("{") else w for w in shlex.split(command.replace("\\\n", " "))), key=str
    )


def test_the_commands_of_the_page_are_those_of_extend() -> None:
    page = (ROOT / "docs" / "extend.md").read_text("utf-8").partition("## 2.")[0]
    asked, *typed = re.findall(r"^```(?:sh|python no-run)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    program = [sys.executable, "-m", *asked.split()]
    printed = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [words_of(printed[i + 1].strip()) for i, line in enumerate(printed) if line.endswith(" (yarn, factor 4)")]
    assert [words_of(command.strip()) for command in typed] == found
    assert len(found) == 4


@pytest.mark.parametrize("page", [README, INDEX], ids=["README", "index"])
def test_commands_of_a_first_page_can_be_pasted(page: str) -> None:
    """A comment after a command is an argument in zsh, the shell of macOS."""
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    assert "pip install" in commands
    assert "#" not in commands


def test_the_front_page_is_short() -> None:
    assert len(README.splitlines()) <= 110


def test_the_links_of_the_front_page_lead_somewhere() -> None:
    links = [link for link in re.findall(r'(?:\]\(|src(?:set)?=")([^)#"]+)', README) if not link.startswith("https:")]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_drift_of_the_front_page() -> None:
    """The usual float32 product, compared with float64, whose error is below 1e-10 at these positions."""
    positions, exponents = torch.arange(131_072)[:, None], torch.arange(0, 128, 2) / 128
    usual = positions.float() * (1.0 / 500_000.0**exponents)
    exact = positions.double() * 500_000.0 ** -exponents.double()
    assert usual.dtype == torch.float32
    off = max((usual.cos() - exact.cos()).abs().max().item(), (usual.sin() - exact.sin()).abs().max().item())
    assert off == pytest.approx(9.3e-3, rel=0.03)
    assert "up to 9.3e-3" in INDEX


# The other pages.


def recorded_versions() -> dict[str, str]:
    """Return the version of each project whose code ropewalk was compared with, from where it is recorded."""
    groups = (engines.ENGINES, engines.MORE_ENGINES, engines.TRAINERS)
    pins = dict(re.findall(r"^(\w+)==(.+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    golden = [
        json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text("utf-8"))["peer"]
        for name in ("positions/diffusers_positions", "positions/timm_positions", "peers/rotary_embedding_torch")
    ]
    return (
        {engine.name: engine.version for group in groups for engine in group.values()}
        | {"PyTorch": pins["torch"], "Triton": pins["triton"]}
        | {peer["package"]: peer["version"] for peer in golden}
    )


def test_the_page_of_versions_has_those_that_were_recorded() -> None:
    page = (ROOT / "docs" / "versions.md").read_text("utf-8")
    assert dict(re.findall(r"^\| ([\w.-]+) \| (\w*\d[\w.]*)", page, re.MULTILINE)) == recorded_versions()


def test_no_two_pages_and_docstrings_name_different_versions() -> None:
    """A page names one only in what a command prints. The oldest versions that can be used are not meant."""
    versions = recorded_versions()
    names = "|".join(map(re.escape, versions))
    version = r"(\d+\.(?>[\w.]*\w))(?! (?:or|and) (?:newer|later)| on\b)"
    named = re.compile(rf"(?<!before )\b({names})[`\])]*(?:\(http[^)]*\))? {version}")
    wrong = []
    for path in (*PAGES, *SOURCE):
        text = path.read_text("utf-8")
        wrong += [(path.name, *it) for it in named.findall(text) if not f"{versions[it[0]]}.".startswith(f"{it[1]}.")]
        if path.suffix == ".md" and path.name not in ("model-types.md", "versions.md"):
            shown = r"^```(?:console|text)\n.*?^```$|^<!-- .*?-->$"
            prose = re.sub(shown, "", text, flags=re.DOTALL | re.MULTILINE)
            wrong += [(path.name, *it) for it in named.findall(prose)]
    assert wrong == []


def test_the_first_pages_of_the_documentation_name_every_page_and_command() -> None:
    pages = re.findall(r"(?:^|\s)([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert {"attention.md", "lab.md", "speed.md"} <= set(pages)
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", INDEX + START + TOUR))
    assert {"schemes/index.md", "reference/index.md"} <= linked
    assert {page for page in pages if not page.startswith(("schemes/", "reference/"))} - {"index.md"} <= linked
    assert {"start.md", "tour.md"} <= set(re.findall(r"\]\(([\w/-]+\.md)", INDEX))
    for command in cli.main.commands:
        assert f"ropewalk {command} " in TOUR, command
    for name in ("RotaryAttention", "KVCache", "SelfExtend", "RotaryEmbedding"):
        assert name in TOUR, name


def test_what_public_calls_return_is_in_the_reference() -> None:
    """Follow return types from class to class: KVCache.step returns a CacheStep, whose layer returns a LayerCache."""
    pending = [value for name in ropewalk.__all__ if inspect.isclass(value := getattr(ropewalk, name))]
    known: set[type] = set()
    while pending:
        known.add(one := pending.pop())
        for name, member in inspect.getmembers(one, inspect.isfunction):
            for word in re.findall(r"\w+", str(member.__annotations__.get("return"))):
                found = getattr(sys.modules[member.__module__], word, None)
                if not name.startswith("_") and inspect.isclass(found) and found.__module__.startswith("ropewalk"):
                    pending += [] if found in known else [found]
    assert {TwoPass, CacheStep, LayerCache} <= known
    for one in known:
        entry = rf"^::: ropewalk\.([\w.]+\.)?{one.__name__}$|members: .*\b{one.__name__}\b"
        assert re.search(entry, REFERENCE, re.MULTILINE), one
    assert "\n::: ropewalk.plots\n" in REFERENCE
