"""Test the output and the exit status of `ropewalk check`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import command_line
from ropewalk.tools.commands import check

HERE = Path(__file__).parents[1] / "conformance"
RIGHT = f"{HERE / 'right' / 'flash_attn_reference.py'}:apply_rotary_emb_torch"
WRONG = f"{HERE / 'wrong' / 'cos_and_sin_swapped.py'}:apply_rotary_pos_emb"
CAUTION = f"{HERE / 'wrong' / 'output_order.py'}:Rotary"
run = partial(command_line.run, "check")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    command_line.check_here(monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ((RIGHT,), 0),
        ((WRONG,), 1),
        ((CAUTION,), 0),
        ((CAUTION, "--strict"), 1),
        ((RIGHT, "--strict"), 0),
        (("no/such/file.py:f",), 2),
        ((RIGHT, "--config", "no/such/config.json"), 2),
        ((RIGHT, "--device", "meta"), 2),
        ((f"{HERE / 'right' / 'llama2_c_loop.py'}:rope", "--pairing", "half"), 1),
    ],
)
def test_exit_status(arguments: tuple[str, ...], status: int, here: None) -> None:
    assert run(*arguments).exit_code == status


def test_says_first_what_runs(capfd: pytest.CaptureFixture[str]) -> None:
    ran = run(WRONG)
    assert capfd.readouterr().err.startswith("This runs the code of ")
    assert "cos-and-sin-swapped" in ran.stdout


def test_a_target_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("import time\ndef f(x):\n    time.sleep(600)\n")
    monkeypatch.setattr(check, "_TO_START", 5)
    monkeypatch.delattr("os.killpg")  # as on Windows
    ran = run(f"{tmp_path / 'mine.py'}:f", "--time-limit", "0.5")
    assert (ran.exit_code, ran.stderr) == (2, "Error: check was stopped after 0.5 s (--time-limit).\n")


def test_json_alone_on_stdout() -> None:
    said = json.loads(run(WRONG, "--json").stdout)
    assert said["findings"][0]["code"] == "cos-and-sin-swapped"


def test_with_a_config(tmp_path: Path, here: None) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 500000.0}))
    ran = run(f"{HERE / 'wrong' / 'rotates_backwards__in_a_module.py'}:Rotary", "--config", tmp_path / "config.json")
    assert ran.exit_code == 1
    assert "rotates-backwards" in ran.stdout


def test_messages_about_a_config_name_options_that_work(tmp_path: Path, here: None) -> None:
    config = {"model_type": "mine", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_kind": 3}))
    command = [f"{HERE / 'right' / 'module_of_one_tensor.py'}:Rope", "--config", str(tmp_path / "config.json")]
    for asked, option in (
        ("--pairing half or", ("--pairing", "half")),
        ("--base BASE", ("--base", "10000")),
        ("--ignore rope_kind", ("--ignore", "rope_kind")),
    ):
        ran = run(*command)
        assert ran.exit_code == 2
        assert asked in ran.stderr
        command += option
    assert run(*command).exit_code == 0
    scaled = {"dim": 256, "n_heads": 4, "n_layers": 2, "rope_theta": 500000.0, "use_scaled_rope": True}
    (tmp_path / "config.json").write_text(json.dumps(scaled))
    assert "--factor 8.0" in run(*command[:3]).stderr
    assert "--download" in run(command[0], "--config", "nobody/nothing").stderr


def test_an_ignored_finding_is_reported_and_not_counted(here: None) -> None:
    ran = run(WRONG, "--ignore", "cos-and-sin-swapped")
    assert ran.exit_code == 0
    assert "IGNORED  cos-and-sin-swapped" in ran.stdout
    assert run(CAUTION, "--strict", "--ignore", "output-order").exit_code == 0
    ran = run(WRONG, "--ignore", "swapped")
    assert ran.exit_code == 2
    assert "ignore must be one of 'wrong-device'" in ran.stderr


class TestAnotherProcess:
    """What only a process of its own can test: what is written to stdout by others, the time limit, and Ctrl-C."""

    LOOPS = (
        "    while True:\n        try:\n            pass\n        except BaseException:\n            pass\n",
        "    sum(range(10**13))\n",  # holds the global lock of Python
    )

    def start(self, folder: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
        (folder / "mine.py").write_text(code)
        command = [sys.executable, "-m", "ropewalk", "check", "mine.py:f", *arguments]
        # A shell starts jobs in the background with Ctrl-C ignored, and their processes inherit this.
        heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=folder, text=True, stdout=pipe, stderr=pipe, preexec_fn=heeded)

    def test_what_the_target_prints_goes_to_stderr(self, tmp_path: Path) -> None:
        lines = [
            "import ctypes, os, subprocess",
            "print('printed at import')",
            "os.write(1, b'written at import')",
            "subprocess.run(['echo', 'written by a process'])",
            "def f(x):",
            "    print('printed in a call')",
            "    ctypes.CDLL(None).puts(b'written by C')",
            "    return x",
        ]
        stdout, stderr = self.start(tmp_path, "\n".join(lines), "--json").communicate()
        assert json.loads(stdout)["findings"][0]["code"] == "not-rotated"
        for line in ("printed at import", "written at import", "by a process", "printed in a call", "written by C"):
            assert line in stderr

    def test_the_system_limits_the_time(self, tmp_path: Path) -> None:
        code = "import resource\nprint('limit', resource.getrlimit(resource.RLIMIT_CPU)[0])\ndef f(x):\n    return x\n"
        _, stderr = self.start(tmp_path, code, "--time-limit", "50").communicate()
        assert 50 < int(stderr.partition("limit ")[2].split()[0]) < 120  # with what the process has used before

    @pytest.mark.parametrize("loop", LOOPS)
    def test_the_time_limit_ends_a_loop(self, tmp_path: Path, loop: str) -> None:
        process = self.start(tmp_path, f"def f(x):\n{loop}", "--time-limit", "0.5")
        stdout, stderr = process.communicate()
        assert (process.returncode, stdout) == (2, "")
        assert stderr.endswith("Error: check was stopped after 0.5 s (--time-limit).\n")

    @pytest.mark.parametrize(
        ("code", "got"),
        [
            ("os._exit(0)", "must return from each call, got a process that ended with status 0."),
            ("os.kill(os.getpid(), 9)", "must return from each call, got a process that ended by SIGKILL."),
            ("ctypes.string_at(0)", "must return from each call, got a process that ended by SIGSEGV."),
            ("sys.exit(0)", "mine.py:f must be callable in a known way, and rotate tensors, got SystemExit: "),
        ],
    )
    def test_a_target_that_ends_the_process(self, tmp_path: Path, code: str, got: str) -> None:
        process = self.start(tmp_path, f"import ctypes, os, sys\ndef f(x):\n    {code}\n")
        stdout, stderr = process.communicate(timeout=120)
        assert (process.returncode, stdout) == (2, "")
        assert got in stderr.splitlines()[-1]

    def test_closed_streams(self, tmp_path: Path) -> None:
        code = "import os\ndef f(x):\n    os.closerange(1, 3)\n    return x"
        process = self.start(tmp_path, code)
        assert "not-rotated" in process.communicate(timeout=120)[0]
        assert process.returncode == 1

    def test_a_flood_of_text(self, tmp_path: Path) -> None:
        lines = [
            "import sys",
            "def f(x):",
            "    print('x' * 10**7)",
            "    sys.stderr.write('y' * 10**6)",
            "    return x",
        ]
        process = self.start(tmp_path, "\n".join(lines), "--json")
        stdout, stderr = process.communicate()
        assert json.loads(stdout)["findings"][0]["code"] == "not-rotated"
        assert 100_000 < len(stderr) < 101_000
        assert "The rest of what TARGET prints is not shown." in stderr

    @pytest.mark.parametrize("forked", [True, False])
    def test_processes_that_stay(self, tmp_path: Path, forked: bool) -> None:
        start = "os.fork() or time.sleep(600)" if forked else "subprocess.Popen(['sleep', '600'])"
        once = f"    started or started.append({start})\n    return x"
        code = f"import os, subprocess, time\nstarted = []\ndef f(x):\n{once}"
        stdout, _ = self.start(tmp_path, code, "--json").communicate(timeout=120)  # until nothing keeps stdout open
        assert json.loads(stdout)["findings"][0]["code"] == "not-rotated"

    def test_a_forked_copy_prints_no_second_report(self, tmp_path: Path) -> None:
        code = "import os\nstarted = []\ndef f(x):\n    started or started.append(os.fork() or 1)\n    return x"
        stdout, _ = self.start(tmp_path, code, "--json").communicate(timeout=120)
        assert json.loads(stdout)["findings"][0]["code"] == "not-rotated"

    def test_a_forked_copy_does_not_go_on_with_the_check(self, tmp_path: Path) -> None:
        """If it did, each of its calls could fork again."""
        note = f"open({str(tmp_path / 'calls')!r}, 'a').write(f'{{os.getpid()}}\\n')"
        fork = "forked or forked.append(os.fork() + 1)"
        code = f"import os\nforked = []\ndef f(x):\n    {note}\n    {fork}\n    return x"
        stdout, _ = self.start(tmp_path, code, "--json").communicate(timeout=120)
        assert json.loads(stdout)["findings"][0]["code"] == "not-rotated"
        assert len(set((tmp_path / "calls").read_text().split())) == 1

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_interrupted(self, tmp_path: Path, number: int) -> None:
        process = self.start(tmp_path, "print('started', flush=True)\ndef f(x):\n    while True:\n        pass\n")
        assert process.stderr is not None
        while "started" not in process.stderr.readline():
            pass
        process.send_signal(number)
        _, stderr = process.communicate()
        assert (process.returncode, stderr) == (2, "Error: check was interrupted.\n")
