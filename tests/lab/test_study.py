"""Test the study: what runs in which order, that a stopped study loses nothing, and the files that it writes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

import ropewalk
import tiny_lab
from ropewalk.tools import cli
from ropewalk.tools.lab import study, tasks
from ropewalk.tools.lab.study import Study

METHODS = [
    "none",
    "PI",
    "NTK",
    "by parts",
    "Llama 3",
    "YaRN",
    "PI dynamic",
    "NTK dynamic",
    "YaRN dynamic",
    "Self-Extend",
]
TUNES = ["none", "PI", "NTK", "YaRN", "larger base"]
BASELINES = ["learned", "sinusoidal", "no positions"]
COPY = tiny_lab.COPY


@dataclasses.dataclass(frozen=True)
class Watched(tasks.Copy):
    """The tiny copy task. It records its calls, and stops the process in one of them, as Ctrl-C does."""

    steps: ClassVar[list[int]] = []
    measured: ClassVar[list[int]] = []
    streams: ClassVar[list[int]] = []
    stop_at_step: ClassVar[int | None] = None
    stop_at_measure: ClassVar[int | None] = None

    @classmethod
    def reset(cls, *, step=None, measure=None):
        cls.steps.clear()
        cls.measured.clear()
        cls.streams.clear()
        cls.stop_at_step, cls.stop_at_measure = step, measure

    def batches(self, seed, *, longest, sequences):
        self.streams.append(seed)
        at = super().batches(seed, longest=longest, sequences=sequences)

        def watched(step):
            if len(self.steps) == self.stop_at_step:
                raise KeyboardInterrupt
            self.steps.append(step)
            return at(step)

        return watched

    def measure(self, model, plan, length):
        if len(self.measured) == self.stop_at_measure:
            raise KeyboardInterrupt
        self.measured.append(length)
        return super().measure(model, plan, length)


WATCHED = Watched(**{field.name: getattr(COPY, field.name) for field in dataclasses.fields(COPY)})


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run a whole study once. Return its folder, result and lines."""
    folder, said = tmp_path_factory.mktemp("lab") / "out", []
    result = study.run(Study([COPY, tiny_lab.TEXT], [3, 4], baselines=True), folder, said.append)
    return folder, result, said


def test_what_runs_and_in_which_order(ran):
    _, result, said = ran
    kinds = [("trained", m) for m in METHODS] + [("tuned", m) for m in TUNES] + [(m, m) for m in BASELINES]
    found = [(row["seed"], row["task"], row["model"], row["method"]) for row in result["rows"]]
    assert found == [(seed, task, *kind) for seed in (3, 4) for task in ("copy", "text") for kind in kinds]
    assert " threads, 36 of 36 parts to do, saved in " in said[0]
    assert said[1] == "You can stop it with Ctrl-C and resume with the same command."


def test_every_row_has_every_measure_at_every_length(ran):
    for row in ran[1]["rows"]:
        measures = {"copy": ["accuracy", "loss"], "text": ["perplexity", "last"]}[row["task"]]
        for measure in measures:
            assert len(row[measure]) == 5
        if row["task"] == "text":
            # Means over 32 positions of windows of 16, 32, 64, 128 and 256 tokens.
            assert [len(means) for means in row["by_position"]] == [0, 1, 2, 4, 8]


def test_equal_ropes_have_equal_rows(ran):
    """Dynamic methods within the trained range, and NTK and dynamic NTK at 4 times it, agree bit for bit."""
    rows = {(row["task"], row["seed"], row["model"], row["method"]): row for row in ran[1]["rows"]}
    for task, measure in (("copy", "loss"), ("text", "perplexity")):
        row = {m: rows[task, 3, "trained", m][measure] for m in METHODS}
        for method in ("PI dynamic", "NTK dynamic", "YaRN dynamic", "Self-Extend"):
            assert row[method][:2] == row["none"][:2]
            assert row[method][2] != row["none"][2]
        assert row["NTK"][3] == row["NTK dynamic"][3]
        assert row["PI"][3] == row["PI dynamic"][3]
        assert row["YaRN"][:2] != row["none"][:2]
        assert rows[task, 3, "trained", "none"][measure] != rows[task, 4, "trained", "none"][measure]


def test_what_is_on_disk(ran):
    folder, result, said = ran
    assert json.loads((folder / "report.json").read_text()) == result
    text = (folder / "report.txt").read_text().rstrip("\n").split("\n")
    start = said.index("  measuring no positions", said.index("[36/36] text-4-no-positions")) + 1
    assert said[start : start + len(text)] == text
    assert said[-2:] == [f"The report, JSON and plots are in {folder}.", said[-1]]
    assert said[-1].startswith("This run took ")
    pictures = {"copy-accuracy", "copy-loss", "text-perplexity", "text-last", "text-positions"}
    assert {path.stem for path in folder.glob("*.png")} == pictures
    for pattern, count in (("*.safetensors", 36), ("*-measured.json", 36), ("*", 3 * 36)):
        assert len(list((folder / "parts").glob(pattern))) == count
    assert not list(folder.rglob("*.partial"))


def rows_of(folder):
    return study.run(Study([WATCHED], [0]), folder, lambda line: None)["rows"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    Watched.reset()
    rows = rows_of(tmp_path_factory.mktemp("undisturbed"))
    # 4 steps and 5 fine-tunes of 2; 10 methods of 5 lengths, of which 4 dynamic ones have 2 in common with none and 2
    # one with their fixed kind, Llama 3, by parts and PI dynamic may be others everywhere; 5 fine-tunes of 5 lengths.
    assert len(Watched.steps) == 4 + 5 * 2
    return rows, len(Watched.measured)


@pytest.mark.parametrize("stop", [{"step": 3}, {"step": 5}, {"measure": 17}])
def test_a_stopped_study_resumes(stop, undisturbed, tmp_path):
    rows, measured = undisturbed
    Watched.reset(**stop)
    said = []
    with pytest.raises(KeyboardInterrupt):
        study.run(Study([WATCHED], [0]), tmp_path, said.append)
    assert said[-1] == f"Stopped. The completed work is saved in {tmp_path}. Resume with the same command."
    steps, measures = list(Watched.steps), len(Watched.measured)
    Watched.reset()
    assert rows_of(tmp_path) == rows
    # Each step is made once; of the measures only the row that was being measured is begun anew.
    assert len(steps) + len(Watched.steps) == 4 + 5 * 2
    assert measured <= measures + len(Watched.measured) <= measured + 2 * len(COPY.lengths)
    assert measures < measured


def test_a_fine_tune_begins_where_the_training_ended(tmp_path):
    """If its steps are too small to change a float32, it gives the rows of the trained model with the same method."""
    still = dataclasses.replace(COPY, tune_recipe=dataclasses.replace(COPY.tune_recipe, learning_rate=1e-30))
    rows = study.run(Study([still], [0]), tmp_path, lambda line: None)["rows"]
    losses = {(row["model"], row["method"]): row["loss"] for row in rows}
    for method in ("none", "PI", "NTK", "YaRN"):
        assert losses["tuned", method] == losses["trained", method]


def test_fine_tunes_see_other_sequences_than_trainings_and_all_the_same(tmp_path):
    Watched.reset()
    study.run(Study([dataclasses.replace(WATCHED, lengths=(7,))], [0, 1]), tmp_path, lambda line: None)
    trainings, tunes = ({0, 2}, {1, 3})  # of seeds 0 and 1
    assert set(Watched.streams) == trainings | tunes
    # A fine-tune loads its training first.
    assert [stream for stream in Watched.streams if stream < 2] == [0, *[0, 1] * 5]


def test_a_finished_study_only_reports(ran):
    folder, result, _ = ran
    said = []
    again = study.run(Study([COPY, tiny_lab.TEXT], [3, 4], baselines=True), folder, said.append)
    assert again["rows"] == result["rows"]
    assert not any("Ctrl-C" in line or line.startswith("[") for line in said)


def test_other_studies_in_the_same_folder(tmp_path):
    """Other lengths are measured without training, more seeds reuse parts, and another recipe is refused."""
    rows_of(tmp_path)
    Watched.reset()
    rows = study.run(Study([dataclasses.replace(WATCHED, lengths=(3, 7))], [0]), tmp_path, lambda line: None)["rows"]
    assert Watched.steps == []
    assert all(len(row["accuracy"]) == 2 for row in rows)
    rows = study.run(Study([WATCHED], [0, 1]), tmp_path, lambda line: None)["rows"]
    assert len(Watched.steps) == 4 + 5 * 2
    assert {row["seed"] for row in rows} == {0, 1}
    other = dataclasses.replace(WATCHED, recipe=dataclasses.replace(WATCHED.recipe, learning_rate=1.0))
    with pytest.raises(ropewalk.RopeError, match="recipe"):
        study.run(Study([other], [0]), tmp_path, lambda line: None)


def test_fine_tunes_are_of_the_model_that_they_began_with(tmp_path):
    """After another recipe, and after deleting the checkpoints, no rows of the old model are reused."""
    other = dataclasses.replace(COPY, recipe=dataclasses.replace(COPY.recipe, learning_rate=0.1))
    study.run(Study([COPY], [0]), tmp_path / "a", lambda line: None)
    wanted = study.run(Study([other], [0]), tmp_path / "b", lambda line: None)["rows"]
    assert not any(part.is_complete(tmp_path / "a") for part in Study([other], [0]).parts())
    for file in (tmp_path / "a" / "parts").glob("*.safetensors"):
        file.unlink()
    assert study.run(Study([other], [0]), tmp_path / "a", lambda line: None)["rows"] == wanted


@pytest.mark.parametrize("content", ["", "[]", '{"rows": []}'])
def test_rows_that_are_broken_are_named(tmp_path, content):
    (part, *_) = Study([COPY], [0]).parts()
    file = part.files(tmp_path)[1]
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(
        ropewalk.RopeError,
        match=r"copy-0-trained-measured\.json must contain measurements of a model, got .* Delete it",
    ):
        part.rows(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ropewalk.RopeError, match=r"lab: .*file must be a folder where files can be written"):
        study.run(Study([COPY], [0]), tmp_path / "file", print)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--quick"], Study([tasks.COPY], [0])),
        (["--task", "copy", "--quick"], Study([tasks.COPY], [0])),
        (["--task", "text", "--baselines", "--seed", "5"], Study([tasks.TEXT], [5], True)),
        (["--baselines", "--seed", "2"], Study([tasks.COPY, tasks.TEXT], range(2, 5), True)),
    ],
)
def test_the_command_passes_its_options(options, wanted, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(study, "run", lambda what, folder, say: (asked.append((what, folder)), say("done")))
    done = CliRunner().invoke(cli.main, ["lab", *options, "--out", str(tmp_path)])
    assert (done.output, asked) == ("done\n", [(wanted, Path(tmp_path))])


def test_options_that_contradict_each_other(tmp_path):
    done = CliRunner().invoke(cli.main, ["lab", "--quick", "--task", "text", "--out", str(tmp_path / "x")])
    assert done.exit_code == 2
    assert "Error: --quick is the copy task, so it cannot be combined with --task text. Drop one" in done.output
    assert not (tmp_path / "x").exists()


def test_the_model_that_the_help_names(tmp_path, monkeypatch):
    """Run `lab --task text`, then `generate` and `export` with the file that `lab --help` names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "TEXT", tiny_lab.TEXT)
    said = " ".join(CliRunner().invoke(cli.main, ["lab", "--help"]).output.split())
    (named,) = re.findall(r"ropewalk-lab/parts/\S+\.safetensors", said)
    assert CliRunner().invoke(cli.main, ["lab", "--task", "text"]).exit_code == 0
    made = CliRunner().invoke(cli.main, ["generate", named, "--tokens", "3"])
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(cli.main, ["export", named, "m.bin", "--format", "llama2.c", "--max-positions", "32"])
    assert done.exit_code == 0, done.output


def test_ctrl_c_on_the_command_line_is_no_traceback(monkeypatch, tmp_path):
    Watched.reset(step=1)
    monkeypatch.setattr(tasks, "COPY", WATCHED)
    done = CliRunner().invoke(cli.main, ["lab", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "Stopped. The completed work is saved" in done.output
    assert "Aborted!" in done.output
