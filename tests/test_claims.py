"""Compare the claims of the pages with the program and with the recorded benchmarks."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ropewalk
from ropewalk import CacheStep, LayerCache, TwoPass
from ropewalk.tools import cli

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import benchmark_picture  # noqa: E402
import benchmark_tables  # noqa: E402

README = (ROOT / "README.md").read_text("utf-8")
INDEX, START, TOUR, SPEED = (
    (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("index", "start", "tour", "speed")
)
REFERENCE = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
PROSE = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md")))
SOURCE = sorted((ROOT / "src").rglob("*.py"))

# No page may say that an existing feature is missing.

_MISSING = re.compile(r"\bnot (?:here |there |supported |implemented |available )?yet\b|\bno compiled\b", re.IGNORECASE)


def _present() -> Iterator[re.Pattern[str]]:
    """Return the names of existing features as pages write them: public names and kernels."""
    for name in ropewalk.__all__:
        # A name that is also a word ("masks") counts only as code: `masks`.
        yield re.compile(rf"`(?:ropewalk\.)?{name}\b" if name.islower() else rf"\b{name}\b")
    for words in (r"compiled kernels?", r"(CPU|GPU|Triton) kernels?", r"other kernels", r"KV caches?"):
        yield re.compile(rf"\b{words}\b", re.IGNORECASE)


PRESENT = tuple(_present())


def stale(text: str) -> list[str]:
    """Return the sentences and table rows of a text that say that an existing feature is missing.

    Below a heading such as "Not here yet", each of them does.
    """
    found = []
    for section in re.split(r"^(?=#)", text, flags=re.MULTILINE):
        heading = section.partition("\n")[0] if section.startswith("#") else ""
        for sentence in re.split(r"\n\s*\n|\n(?=[|*-])|(?<=[.;!?])\s+", section.removeprefix(heading)):
            calls_missing = _MISSING.search(heading) or _MISSING.search(" ".join(sentence.split()))
            if calls_missing and any(name.search(sentence) for name in PRESENT):
                found.append(" ".join(sentence.split()))
    return found


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_calls_missing_what_is_here(page: Path) -> None:
    assert stale(page.read_text("utf-8")) == []


def test_no_text_of_the_program_calls_missing_what_is_here() -> None:
    texts = [
        (path, node.value)
        for path in SOURCE
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(texts) > 1000
    assert [(path.name, said) for path, text in texts for said in stale(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "A page.\n\n## Not here yet\n\nCompiled kernels, positions with several axes.\n",
        "## Not here yet\n\n- `masks.packed`\n- quantised keys\n",
        "| `torch.ops._C.rotary_embedding` and other kernels | **not yet**: plain PyTorch |\n",
        "Both are plain PyTorch: this release of ropewalk has no compiled kernel yet.",
        "A `KVCache` is not here yet.",
        "Attention with SelfExtend is\nnot supported yet.",
    ],
)
def test_a_stale_sentence_is_found(text: str) -> None:
    assert len(stale(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "## Not here yet\n\nPositions with several axes.\n\n## What is here\n\nThe KVCache.\n",
        "The GPU kernels have not been measured on a GPU yet.",
        "Tokens of images are not supported yet. The `KVCache` takes text.",
        "Masks of such a shape are not supported yet.",
    ],
)
def test_a_true_sentence_is_not(text: str) -> None:
    assert stale(text) == []


# The front page.


def cells(label: str) -> list[str]:
    """Return the other cells of the row that starts with this cell, in the table of times."""
    (row,) = (line for line in SPEED.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in row.strip("|").split("|")[1:]]


@pytest.mark.parametrize("page", benchmark_tables.TABLES)
def test_the_tables_of_benchmarks_are_the_recorded_ones(page: str) -> None:
    """If this fails, run tools/benchmark_tables.py."""
    text = (ROOT / page).read_text("utf-8")
    assert benchmark_tables.filled(page, text) == text


def test_a_wrong_number_in_a_table_is_found() -> None:
    wrong = SPEED.replace("| `clone` of q and k | ", "| `clone` of q and k | 9")
    assert benchmark_tables.filled("docs/speed.md", wrong) == SPEED != wrong


@pytest.mark.parametrize("theme", benchmark_picture.THEMES)
def test_the_picture_of_benchmarks_is_drawn_from_the_results(theme: str) -> None:
    """If this fails, run tools/benchmark_picture.py."""
    committed = (ROOT / "docs" / "assets" / f"speed-{theme}.svg").read_text("utf-8")
    assert benchmark_picture.drawn(benchmark_picture.THEMES[theme]) == committed


def test_the_picture_has_a_bar_for_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second machine was measured in one run, only with float32 and 4,096 tokens."""
    for path in benchmark_tables.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    run = json.loads((tmp_path / "amd-zen4-2-cores-run-1.json").read_text("utf-8"))
    run["machine"] |= {"cpu": "Another Make", "cores": 8}
    run["rows"] = [row for row in run["rows"] if row["dtype"] == "float32" and row["tokens"] == 4096]
    for row in run["rows"]:
        row["times_copy"] = {"ropewalk": 1.234, "Hugging Face": 56.78}.get(row["contender"], 2.5)
    (tmp_path / "other-8-cores-run-1.json").write_text(json.dumps(run), "utf-8")
    alone = benchmark_picture.drawn(benchmark_picture.THEMES["light"])
    for module in (benchmark_picture, benchmark_tables):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    both = benchmark_picture.drawn(benchmark_picture.THEMES["light"])
    assert both.count("<rect") - alone.count("<rect") == 4 + 2  # four bars, and a mark for each of two machines
    labels = re.findall(r">([^<]+)</text>", both)
    assert {"Another Make, 8 cores, torch 2.13.0", "1.2×", "57×", "2.5×"} <= set(labels)
    assert set(re.findall(r">([^<]+)</text>", alone)) <= set(labels)
    places = re.findall(r'<rect x="156" y="(\d+)"', both)
    assert len(set(places)) == len(places)
    lengths = [float(length) for length in re.findall(r'<rect x="156" .*? width="([\d.]+)" .*? opacity="0.6"', both)]
    assert max(lengths) == pytest.approx(116.0)  # Hugging Face's formula fills the column
    assert min(lengths) == pytest.approx(116.0 * 1.234 / 56.78, abs=0.05)


def test_the_ranges_in_the_text_of_the_speed_page_are_the_recorded_ones() -> None:
    page = " ".join((ROOT / "docs" / "speed.md").read_text("utf-8").split())

    def medians(contender: str, runs: tuple[str, ...] = benchmark_tables.RUNS, **wanted: Any) -> list[float]:
        return [row["median"] for row in benchmark_tables.rows(runs, contender=contender, **wanted)]

    def ratios_of(above: list[float], below: list[float]) -> list[float]:
        return [a / b for a, b in zip(above, below, strict=True)]

    def over(contender: str, **wanted: Any) -> list[float]:
        return ratios_of(medians("ropewalk", **wanted), medians(contender, **wanted))

    def one_thread(dtype: str) -> list[float]:
        names = ("ropewalk, in place", "vLLM, in place")
        return ratios_of(*(medians(name, benchmark_tables.ONE_THREAD, dtype=dtype, memory="kept") for name in names))

    copied = [x for n in (4096, 16_384) for x in over("copy_", tokens=n, memory="kept")]
    few, many = (over("clone", tokens=n, memory="new", backward=False) for n in (4096, 16_384))
    sizes = [(tokens, backward) for tokens in (4096, 16_384) for backward in (False, True)]
    fresh, held = (
        [x for n, backward in sizes for x in medians("ropewalk", tokens=n, backward=backward, memory=memory)]
        for memory in ("new", "kept")
    )
    found = benchmark_tables.decoding("attention").values()
    cached = [one[name]["times_read"] for one in found for name in benchmark_tables.CACHES[:2] if name in one]
    for sentence, ratios in {
        "in {} times the time of `copy_` for 4,096 tokens and more": copied,
        "Attention over its KV caches takes {} times as long as reading": cached,
        "rotating 4,096 tokens then takes {} times as long as `clone`": few,
        "and 16,384 tokens {} times": many,
        "4,096 tokens and more into new tensors takes {} times as long": ratios_of(fresh, held),
        "ropewalk takes {} times as long as this operator in float32": one_thread("float32"),
        "and {} times in bfloat16": one_thread("bfloat16"),
    }.items():
        assert sentence.format(f"{min(ratios):.1f} to {max(ratios):.1f}") in page


def test_the_times_with_the_plugin_of_vllm_are_the_recorded_ones() -> None:
    text = (ROOT / benchmark_tables.RESULTS / "vllm-engine-2-cores-avx512.json").read_text("utf-8")
    ratios = sorted(row["ratio"] for row in json.loads(text)["rows"])
    page = " ".join((ROOT / "docs" / "vllm.md").read_text("utf-8").split())
    assert f"took {ratios[0]:.2f} to {ratios[-1]:.2f} times as long with it" in page
    slow = [f"{ratio - 1:.0%}".replace("%", " %") for ratio in ratios if ratio > 1.05]
    assert f"{' and '.join(slow)} slower in two cases" in page


def test_the_reasons_on_the_front_page_repeat_the_table() -> None:
    (kept, new), (usual, usual_new) = (
        cells(name)[:2] for name in ("**ropewalk, new tensors**", "Hugging Face's formula")
    )
    text = " ".join(README.split())
    assert (
        f"of 4,096 tokens takes {kept} ms, where Hugging Face's formula takes {usual} ms, both in memory that" in text
    )
    assert f"from the operating system, it is {new} against {usual_new} ms" in text


def outputs(page: str) -> dict[str, str]:
    """Return the commands of explain, diff and check on a page, with what they print there."""
    return dict(re.findall(r"```console\n\$ (ropewalk (?:explain|diff|check)[^\n]*)\n(.*?)```", page, re.DOTALL))


SHOWN = outputs(README) | outputs((ROOT / "docs" / "models.md").read_text("utf-8"))


@pytest.mark.parametrize("command", SHOWN)
def test_the_outputs_of_commands_are_real(command: str) -> None:
    program = command.replace("ropewalk", f"{sys.executable} -m ropewalk", 1)
    printed = subprocess.run(program, shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert printed == SHOWN[command]


def test_the_front_page_shows_explain_diff_and_check() -> None:
    assert [command.split()[1] for command in outputs(README)] == ["explain", "diff", "check"]


@pytest.mark.parametrize("page", [README, INDEX], ids=["README", "index"])
def test_commands_of_a_first_page_can_be_pasted(page: str) -> None:
    """A comment after a command is an argument in zsh, the shell of macOS."""
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    assert "pip install" in commands
    assert "#" not in commands


def test_the_links_of_the_front_page_lead_somewhere() -> None:
    links = [link for link in re.findall(r'(?:\]\(|src(?:set)?=")([^)#"]+)', README) if not link.startswith("https:")]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_drift_of_the_front_page() -> None:
    """The usual float32 product, compared with float64, whose error is below 1e-10 at these positions."""
    sentence = r"off by up to ([\d.e-]+) within the first 131,072 positions \(base 500,000, heads of 128\)"
    said = re.search(sentence, " ".join(README.split()))
    assert said
    positions, exponents = torch.arange(131_072)[:, None], torch.arange(0, 128, 2) / 128
    usual = positions.float() * (1.0 / 500_000.0**exponents)
    exact = positions.double() * 500_000.0 ** -exponents.double()
    assert usual.dtype == torch.float32
    off = max((usual.cos() - exact.cos()).abs().max().item(), (usual.sin() - exact.sin()).abs().max().item())
    assert float(said[1]) == pytest.approx(off, rel=0.03)


def test_the_front_page_is_short_and_its_two_commands_stand() -> None:
    lines = README.splitlines()
    assert len(lines) <= 160
    assert 'pip install ".[demo]" && ropewalk demo' in lines
    assert 'pip install -c constraints.txt -e ".[test]" && pytest -n 2' in lines
    assert lines.index("```python") < 15  # code before prose


# The other pages.


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


def test_the_numbers_of_the_home_page_are_those_of_the_readme() -> None:
    """Other tests compare the numbers of the README with the results."""
    for claim in (
        r"within ([\d.e-]+) of those of the float64 frequencies",
        r"up to ([\d.e-]+) within the first 131,072",
        r"4,096 tokens takes ([\d.–]+) ms",
        r"formula takes ([\d.–]+) ms",
        r"more than (\d+) model types",
    ):
        (here,), (there,) = (re.findall(claim, " ".join(page.split())) for page in (INDEX, README))
        assert here == there, claim


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
