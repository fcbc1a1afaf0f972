"""Test that the tables, sentences and plots of the report follow the numbers, which are all invented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiny_lab
from ropewalk.tools.lab import findings, methods, report, tasks
from ropewalk.tools.lab.findings import Results

# Shares copied and losses at |w| = 31, 63, 95, 127, 191, 255, 511: half to 8 times the trained length.
ACCURACY = {
    ("trained", "none"): [1.0, 0.99, 0.4, 0.3, 0.1, 0.05, 0.02],
    ("trained", "PI"): [0.4, 0.5, 0.5, 0.5, 0.5, 0.4, 0.02],
    ("trained", "by parts"): [0.5, 0.6, 0.6, 0.6, 0.5, 0.4, 0.02],
    ("trained", "YaRN"): [0.9, 0.91, 0.9, 0.9, 0.8, 0.7, 0.03],
    ("trained", "PI dynamic"): [1.0, 0.99, 0.95, 0.9, 0.6, 0.4, 0.1],
    ("trained", "NTK dynamic"): [1.0, 0.99, 0.7, 0.35, 0.2, 0.1, 0.05],
    ("trained", "YaRN dynamic"): [1.0, 0.99, 0.97, 0.96, 0.8, 0.7, 0.5],
    ("tuned", "none"): [0.99, 0.99, 0.9, 0.8, 0.6, 0.5, 0.03],
    ("tuned", "PI"): [0.99, 0.99, 0.99, 0.99, 0.98, 0.97, 0.1],
    ("tuned", "NTK"): [0.99, 0.99, 0.99, 0.99, 0.9, 0.8, 0.1],
    ("tuned", "YaRN"): [0.99, 0.99, 0.99, 0.99, 0.98, 0.98, 0.1],
    ("tuned", "larger base"): [0.99, 0.99, 0.99, 0.99, 0.97, 0.96, 0.2],
}


def rows(seeds=(0, 1, 2), changed=None, task="copy"):
    """Return a row for each method of ACCURACY and seed. changed: seed → (model, method) → accuracies."""
    made = []
    for seed in seeds:
        for (model, method), usual in ACCURACY.items():
            values = (changed or {}).get(seed, {}).get((model, method), usual)
            losses = [5 * (1 - value) + 0.001 for value in values]
            made.append(
                {"task": task, "seed": seed, "model": model, "method": method, "accuracy": values, "loss": losses}
            )
    return made


ABOUT = report.describe_task(tasks.COPY)
COLLAPSE = "Without scaling, copying is nearly perfect at the trained length"
PI_TUNE = "100 steps of fine-tuning with PI at 4 times the trained length give an accuracy of at least 0.9 there"
PI_OVER_NTK = "At twice the trained length, accuracy is higher with dynamic PI than with dynamic NTK"


def words(*args, **kwargs):
    return findings.paragraphs(Results(ABOUT, rows(*args, **kwargs)))


def paragraph(told, verdict):
    found = [text for text in told if text.startswith(verdict)]
    return found[0] if found else ""


def test_claims_that_hold_on_every_seed():
    told = words()
    held = paragraph(told, "Expected, and true on all 3 seeds:")
    for says in (COLLAPSE, PI_TUNE, PI_OVER_NTK):
        assert says in held
    assert f"{PI_TUNE}. Accuracy: PI at 4x: 0.97, 0.97, 0.97." in held
    assert paragraph(told, "True on some seeds only:") == paragraph(told, "Expected, but not true") == ""


def test_the_words_follow_a_reversed_ranking():
    swapped = {
        ("trained", "PI dynamic"): ACCURACY["trained", "NTK dynamic"],
        ("trained", "NTK dynamic"): ACCURACY["trained", "PI dynamic"],
    }
    everywhere = words(changed={0: swapped, 1: swapped, 2: swapped})
    assert PI_OVER_NTK in paragraph(everywhere, "Expected, but not true on any of 3 seeds:")
    assert PI_OVER_NTK not in paragraph(everywhere, "Expected, and true on all 3 seeds:")
    once = words(changed={1: swapped})
    assert PI_OVER_NTK not in paragraph(once, "Expected, and true on all") + paragraph(once, "Expected, but not true")
    assert (
        f"{PI_OVER_NTK} (on 2 of 3 seeds). Accuracy: PI dynamic at 2x: 0.90, 0.35, 0.90; "
        "NTK dynamic at 2x: 0.35, 0.90, 0.35." in paragraph(once, "True on some seeds only:")
    )


@pytest.mark.parametrize(
    ("cell", "values", "says"),
    [
        (("trained", "none"), [1.0] * 7, COLLAPSE),
        (("trained", "none"), [0.8, 0.8, 0.4, 0.3, 0.1, 0.05, 0.02], COLLAPSE),
        (("tuned", "PI"), [0.99, 0.99, 0.99, 0.99, 0.9, 0.89, 0.1], PI_TUNE),
        (("tuned", "YaRN"), [0.99, 0.99, 0.99, 0.99, 0.9, 0.89, 0.1], PI_TUNE.replace("with PI", "with YaRN")),
        (("trained", "YaRN dynamic"), [0.9] * 7, "but a dynamic YaRN factor does not increase it"),
    ],
)
def test_copy_claims_can_fail(cell, values, says):
    assert says in paragraph(words(), "Expected, and true on all 3 seeds:")
    assert says in paragraph(words(changed={2: {cell: values}}), "True on some seeds only:")
    everywhere = {key: {cell: values} for key in (0, 1, 2)}
    assert says in paragraph(words(changed=everywhere), "Expected, but not true on any of 3 seeds:")


def test_a_report_of_one_seed_says_so():
    told = words(seeds=[5])
    assert COLLAPSE in paragraph(told, "Expected, and true on this seed:")
    assert paragraph(told, "Methods from").startswith(
        "Methods from best to worst (the order may differ with another seed"
    )
    worse = {("tuned", "PI"): [0.5] * 7}
    assert PI_TUNE in paragraph(words(seeds=[5], changed={5: worse}), "Expected, but not true on this seed:")


def test_orders():
    order = findings._order
    assert order({"a": (1.0, 2.0), "b": (3.0, 4.0), "c": (2.0, 3.0)}, True) == "b > c > a"
    assert order({"a": (1.0, 2.0), "b": (3.0, 4.0), "c": (2.0, 3.0)}, False) == "a > c > b"
    assert order({"a": (1.0, 5.0), "b": (2.0, 3.0)}, True) == "a ≈ b"
    assert order({"a": (1.0, 5.0), "b": (1.0, 5.0)}, True) == "a = b"
    lines = paragraph(words(), "Methods from").split("\n")
    # |w| = 63 is once the trained length: 128 tokens.
    assert (
        "- Accuracy at 1x without fine-tuning: none = PI dynamic = NTK dynamic = YaRN dynamic > YaRN > by parts > PI"
        in lines
    )
    assert "- Accuracy at 4x after fine-tuning: YaRN > PI > larger base > NTK > none" in lines


def test_a_claim_about_what_was_not_measured_is_left_out():
    about = {**ABOUT, "lengths": ABOUT["lengths"][:2], "tokens": ABOUT["tokens"][:2]}
    told = "\n".join(findings.paragraphs(Results(about, rows())))
    assert COLLAPSE not in told
    assert "a fixed PI factor more than doubles the loss" in told
    fewer = [row for row in rows() if row["method"] != "PI"]
    assert "fixed PI factor" not in "\n".join(findings.paragraphs(Results(ABOUT, fewer)))


def text_rows(values):
    """Return rows of the text task. values: (model, method) → perplexities at half to 8 times the trained length."""
    return [
        {"task": "text", "seed": seed, "model": model, "method": method, "perplexity": [v + seed / 1000 for v in each],
         "last": each, "by_position": [[], [1.0], [1.0, 2.0 + seed], [1.0] * 4, [float(i + seed) for i in range(8)]]}
        for seed in (0, 1) for (model, method), each in values.items()
    ]  # fmt: skip


TEXT = {
    ("trained", "none"): [3.5, 3.3, 20.0, 36.0, 35.0],
    ("trained", "PI"): [16.0] * 4 + [20.0],
    ("trained", "NTK"): [3.8, 3.6, 3.5, 18.0, 30.0],
    ("trained", "by parts"): [4.3, 4.5, 4.6, 4.8, 8.9],
    ("trained", "YaRN"): [4.3, 4.4, 4.4, 4.5, 8.3],
    ("trained", "PI dynamic"): [3.5, 3.3, 8.0, 16.0, 26.0],
    ("trained", "NTK dynamic"): [3.5, 3.3, 3.6, 18.0, 28.0],
    ("trained", "YaRN dynamic"): [3.5, 3.3, 3.4, 4.5, 5.2],
    ("trained", "Llama 3"): [5.0, 5.0, 5.0, 5.0, 9.0],
    ("trained", "Self-Extend"): [3.5, 3.3, 3.6, 4.6, 5.4],
    ("tuned", "none"): [3.6, 3.4, 3.25, 3.30, 6.6],
    ("tuned", "PI"): [4.2, 4.0, 3.8, 3.83, 27.0],
    ("tuned", "NTK"): [3.6, 3.3, 3.2, 3.22, 7.8],
    ("tuned", "YaRN"): [3.6, 3.3, 3.2, 3.19, 21.0],
    ("tuned", "larger base"): [3.6, 3.4, 3.2, 3.23, 3.5],
}
BEST = (
    "Without fine-tuning, at {} times the trained length, the perplexity of YaRN dynamic is the lowest of {}, or within"
)
OF_TRIAL = "all methods except Llama 3 and Self-Extend"
TEXT_ABOUT = report.describe_task(tiny_lab.TEXT)


def test_text_claims_hold_for_the_published_ranking():
    told = findings.paragraphs(Results(TEXT_ABOUT, text_rows(TEXT)))
    held = paragraph(told, "Expected, and true on all 2 seeds:")
    assert held.count("\n- ") == sum(claim.task == "text" for claim in findings.CLAIMS) == 17
    assert paragraph(told, "True on some seeds only:") == paragraph(told, "Expected, but not true") == ""


@pytest.mark.parametrize(
    ("cell", "values", "says"),
    [
        (("trained", "none"), [3.5, 3.3, 4.0, 5.0, 6.0], "Without scaling, perplexity explodes"),
        (("trained", "PI"), [16.0, 4.0, 16.0, 16.0, 20.0], "PI without fine-tuning is bad at every length"),
        (("trained", "NTK"), [3.8, 3.6, 5.0, 18.0, 30.0], "NTK with factor 4 works at twice the trained length"),
        (("trained", "YaRN"), [4.3, 3.3, 4.4, 4.5, 8.3], "a fixed YaRN factor increases the perplexity"),
        (("trained", "by parts"), [4.3, 4.5, 4.6, 4.4, 8.9], "YaRN's attention factor helps at 4 times"),
        (("trained", "Self-Extend"), [3.5, 3.3, 3.3, 4.6, 5.4], BEST.format(2, "all methods")),
        (("trained", "Self-Extend"), [3.5, 3.3, 3.6, 4.4, 5.4], BEST.format(4, "all methods")),
        (("trained", "Llama 3"), [5.0, 5.0, 5.0, 5.0, 5.1], BEST.format(8, "all methods")),
        (("trained", "by parts"), [4.3, 4.5, 4.6, 4.8, 5.0], BEST.format(8, OF_TRIAL)),
        (("trained", "PI dynamic"), [3.5, 3.3, 3.5, 16.0, 26.0], "lower with dynamic NTK than with dynamic PI"),
        (("tuned", "YaRN"), [3.6, 3.3, 3.2, 3.25, 21.0], "perplexity there is lower with YaRN than with NTK"),
        (("tuned", "NTK"), [3.6, 3.3, 3.2, 3.5, 7.8], "perplexity there is lower with NTK than without scaling"),
        (("tuned", "PI"), [4.2, 4.0, 3.8, 3.2, 27.0], "perplexity there is lower without scaling than with PI"),
        (("tuned", "none"), [3.6, 3.4, 3.25, 3.3, 3.3], "only the one with the larger base still works"),
        (("tuned", "larger base"), [3.6, 3.4, 3.2, 3.23, 9.0], "only the one with the larger base still works"),
    ],
)  # fmt: skip
def test_each_text_claim_can_fail(cell, values, says):
    told = findings.paragraphs(Results(TEXT_ABOUT, text_rows(TEXT | {cell: values})))
    assert says in paragraph(told, "Expected, but not true on any of 2 seeds:")


DOCS = Path(__file__).parents[2] / "docs"
RECORDED = (DOCS / "assets" / "lab" / "report.txt").read_text("utf-8")


def test_the_recorded_report_has_the_sentences_of_the_program():
    for claim in findings.CLAIMS:
        assert f"\n- {claim.says.format(steps=100)}" in RECORDED
    for method in (*methods.METHODS, *methods.TUNES):
        assert f"\n- {method.name}: {method.what}\n" in RECORDED
    for task in (tasks.COPY, tasks.TEXT):
        for what in task.measures.values():
            assert f"\n{task.name}: {what}; mean of 3 seeds" in RECORDED


def rows_of(table):
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return {
        label.strip(): [cell.strip() for cell in cells]
        for label, *cells in (line.strip("|").split("|") for line in lines)
    }


def test_the_page_has_the_numbers_of_the_recorded_report():
    accuracy, _, perplexity, _ = (rows_of(part) for part in RECORDED.split("mean of 3 seeds")[1:])
    page = (DOCS / "lab.md").read_text("utf-8")
    for heading, recorded in (("**Accuracy of the copy**", accuracy), ("**Perplexity per byte on text**", perplexity)):
        shown = rows_of(page.partition(heading)[2].partition("\n!")[0])
        times = [recorded["× trained length"].index(x) for x in shown["× trained length"]]
        assert shown == {method: [recorded[method][i] for i in times] for method in recorded}


def test_the_page_has_the_recorded_numbers_of_other_positions():
    recorded = {"rope": ["3", *rows_of(RECORDED.partition("loss on the copy")[0])["none"]]}
    tables = (DOCS / "assets" / "lab" / "baselines.txt").read_text("utf-8")
    for _, seeds, table in re.findall(
        r"accuracy of the copy; (one|mean of (\d)) seed[^|]*(.*?)\n\n", tables, re.DOTALL
    ):
        for label, cells in rows_of(table).items():
            recorded[label.removesuffix(", separate training")] = [seeds or "1", *cells]
    head = recorded["× trained length"]
    head[0] = "seeds"
    section = (DOCS / "lab.md").read_text("utf-8").partition("## Learned, sinusoidal and no positions\n")[2]
    shown = rows_of(section.partition("\n## ")[0])
    columns = [head.index(cell) for cell in shown["× trained length"]]
    assert shown == {label: [cells[i] for i in columns] for label, cells in recorded.items()}
    assert set(shown) == {"× trained length", "rope", *methods.BASELINES}


def test_tables_by_hand(tmp_path):
    about = {**ABOUT, "lengths": [63, 127], "tokens": [128, 256]}
    made = [
        {"task": "copy", "seed": seed, "model": model, "method": method, "accuracy": [a, b], "loss": [0.5, 12.0]}
        for seed, a, b in ((0, 0.9, 0.05), (1, 0.8, 0.02), (2, 1.0, 0.02))
        for model, method in (("trained", "none"), ("tuned", "PI"), ("learned", "learned"))
    ]
    lines = report._tables(Results(about, made))
    assert lines[1] == (
        "copy: accuracy of the copy; mean of 3 seeds ± half of their range; trained on up to 128 tokens"
    )
    # Means 0.9 and 0.03; half ranges 0.1 and 0.015, which rounds to even.
    assert lines[3:8] == [
        "| × trained length           |          1 |          2 |",
        "|----------------------------|-----------:|-----------:|",
        "| none                       | 0.90 ±0.10 | 0.03 ±0.02 |",
        "| PI, fine-tuned             | 0.90 ±0.10 | 0.03 ±0.02 |",
        "| learned, separate training | 0.90 ±0.10 | 0.03 ±0.02 |",
    ]
    assert lines[9] == "copy: loss on the copy in nats per symbol; mean of 3 seeds ± half of their range; " + (
        "trained on up to 128 tokens"
    )
    assert lines[13] == "| none                       | 0.500 ±0.000 | 12.0 ±0.0 |"


@pytest.mark.parametrize(
    ("value", "measure", "wanted"),
    [
        (0.0123, "accuracy", 2), (0.0, "loss", 2), (0.00012, "loss", 4), (0.5, "loss", 3),
        (3.28, "last", 2), (99.0, "last", 1), (100.0, "last", 0), (1e6, "last", 0),
    ],
)  # fmt: skip
def test_digits(value, measure, wanted):
    assert findings.decimals(value, measure) == wanted


def test_report_of_one_seed(tmp_path):
    result = {"tasks": [ABOUT], "rows": rows(seeds=[0])}
    said = report.write(result, tmp_path)
    text = (tmp_path / "report.txt").read_text()
    assert said[:-1] == text.split("\n")[: len(said) - 1]
    assert "accuracy of the copy; one seed; trained on up to 128 tokens" in text
    assert "| PI dynamic              | 1.00 | 0.99 | 0.95 | 0.90 | 0.60 | 0.40 | 0.10 |" in text
    assert COLLAPSE in text
    assert "- larger base: base times 50" in text
    assert "Self-Extend" not in text
    assert {path.name for path in tmp_path.glob("*.png")} == {"copy-accuracy.png", "copy-loss.png"}


def test_pictures_show_the_numbers():
    swapped = {("trained", "none"): [0.0] * 7}
    figure = report.draw_figures(Results(ABOUT, rows(changed={1: swapped})))["copy-accuracy"]
    upper, lower = figure.axes
    assert [line.get_label() for line in lower.lines] == ["none", "PI", "NTK", "YaRN", "larger base", "trained length"]
    none = upper.lines[0]
    assert none.get_xdata().tolist() == [0.5, 1, 1.5, 2, 3, 4, 8]
    assert none.get_ydata().tolist() == pytest.approx([2 / 3 * a for a in ACCURACY["trained", "none"]], rel=1e-15)
    band = upper.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0.0, 1.0)
    assert upper.lines[-1].get_xdata() == [1, 1]
    assert upper.get_ylabel() == "accuracy of the copy"
    assert lower.get_xlabel() == "length (× trained length)"
    assert [tick.get_text() for tick in lower.get_xticklabels()] == ["0.5", "1", "1.5", "2", "3", "4", "8"]
    for axes in (upper, lower):
        colours = [line.get_color() for line in axes.lines]
        assert len(set(colours)) == len(colours)


def test_every_method_has_a_colour():
    named = {method.name for method in (*methods.METHODS, *methods.TUNES)} | set(methods.BASELINES)
    assert len(named) <= 10 + len(report._FURTHER_COLOURS)


def test_picture_of_loss_by_position():
    drawn = report.draw_figures(Results(TEXT_ABOUT, text_rows(TEXT)))
    assert list(drawn) == ["text-perplexity", "text-last", "text-positions"]
    line = drawn["text-positions"].axes[0].lines[0]
    assert line.get_xdata().tolist() == [16 + 32 * i for i in range(8)]
    assert line.get_ydata().tolist() == [i + 0.5 for i in range(8)]
    assert drawn["text-perplexity"].axes[0].get_yscale() == "log"
