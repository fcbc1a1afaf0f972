"""The command line, run as users run it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ropewalk
from command_line import check_here, run
from ropewalk import _checks
from ropewalk.tools import cli
from ropewalk.tools.commands import doctor
from ropewalk.tools.commands._options import Length

CONFIG = Path(__file__).parents[1] / "golden" / "models" / "llama-3.1-8b.json"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(CONFIG.read_text())["config"]))
    return path


def test_explain(config: Path) -> None:
    ran = run("explain", config)
    assert ran.exit_code == 0
    assert ran.stdout.rstrip("\n") == ropewalk.from_config(config).explain()
    assert run("explain", config.parent).stdout == ran.stdout


def test_explain_as_json(config: Path) -> None:
    ran = run("explain", config, "--json", "--length", 5)
    assert json.loads(ran.stdout) == ropewalk.from_config(config).facts(5)


def test_explain_lists_the_model_types() -> None:
    ran = run("explain", "--list")
    assert ran.exit_code == 0
    lines = [line.split(maxsplit=1) for line in ran.stdout.splitlines()]
    assert [words for words in lines if words[:1] == ["llama"]] == [["llama", "half"], ["llama", "interleaved"]]
    assert ["gpt2", "learned absolute positions."] in lines
    listed = json.loads(run("explain", "--list", "--json").stdout)
    assert [listed[group][name] for group, name in (
        ("Text models", "llama"),
        ("Text models", "gptj"),
        ("Text models", "gemma3_text"),
        ("Models whose tokens have several positions (M-RoPE)", "qwen2_vl_text"),
        ("Models that contain a text model", "qwen2_5_omni"),
        ("Vision towers", "pixtral"),
        ("Diffusion transformers of diffusers, by _class_name", "FluxTransformer2DModel"),
        ("Architectures of llama.cpp, in GGUF files", "gemma3"),
        ("Models that are refused, and why", "bloom"),
    )] == [
        "half",
        "interleaved",
        "half; layers differ",
        "half; time, height, width",
        "read from thinker_config",
        "height, width",
        "interleaved; image, row, column",
        "half",
        "ALiBi.",
    ]  # fmt: skip
    for wrong in (("config.json",), ("--length", "5"), ("--download",)):
        refused = run("explain", "--list", *wrong)
        assert refused.exit_code == 2
        assert "has no effect with --list. Drop one of them." in refused.stderr


def test_explain_of_an_unknown_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mine", "head_dim": 8, "num_hidden_layers": 1}))
    refused = run("explain", path)
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith(f"Error: {path}: model_type must be one that ropewalk knows")
    assert refused.stderr.count("\n") == 1
    ran = run("explain", path, "--pairing", "interleaved", "--base", 1e4)
    assert ran.exit_code == 0
    assert "passed by the caller" in ran.stdout


def test_explain_of_nothing(tmp_path: Path) -> None:
    refused = run("explain", tmp_path / "nowhere")
    assert refused.exit_code == 1
    assert "the config must be an existing file" in refused.stderr


@pytest.mark.parametrize("arguments", [("explain",), ("explain", "x", "--length", "0"), ("unravel",)])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_doctor() -> None:
    ran = run("doctor")
    assert ran.exit_code == 0
    assert f"ropewalk    {ropewalk.__version__}" in ran.stdout
    assert "reference   usable on every device" in ran.stdout
    assert "cpu kernel  usable: " in ran.stdout or "cpu kernel  not usable: not built" in ran.stdout


def test_doctor_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ran = run("doctor")
    assert ran.exit_code == 0
    assert "not usable: torch cannot be imported" in ran.stdout


def test_doctor_says_what_is_not_installed() -> None:
    assert doctor._version("no-such-package-of-ours") == "not installed"


def test_demo_passes_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ropewalk.tools.demo

    asked: list[Path] = []
    monkeypatch.setattr(ropewalk.tools.demo, "run", lambda folder, say: (asked.append(folder), say("done")))
    ran = run("demo", "--folder", tmp_path)
    assert (ran.stdout, asked) == ("done\n", [tmp_path])


@pytest.mark.parametrize("command", [["-m", "ropewalk"], ["-c", "from ropewalk.tools.cli import main; main()"]])
def test_as_a_process(command: list[str], config: Path) -> None:
    command = [sys.executable, *command, "explain", str(config)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert "llama3: factor 8.0" in ran.stdout


def test_version() -> None:
    assert run("--version").stdout == f"ropewalk, version {ropewalk.__version__}\n"


def write(tmp_path: Path, **values: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "llama", "head_dim": 8, "num_hidden_layers": 2, "rope_theta": 1e4, **values})
    )
    return path


def test_explain_of_params_json(tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text(
        json.dumps({"dim": 4096, "n_layers": 32, "n_heads": 32, "rope_theta": 5e5, "use_scaled_rope": True})
    )
    assert "Pass --factor 8.0 (Llama 3.1) or --factor 32.0 (Llama 3.2 1B and 3B)" in fails("explain", path)
    assert "llama3: factor 8.0" in run("explain", path, "--factor", 8).stdout


def test_explain_text_only(tmp_path: Path) -> None:
    scaling = {"type": "mrope", "mrope_section": [4, 2, 2]}
    path = write(
        tmp_path, model_type="qwen2_vl_text", head_dim=None, hidden_size=64, num_attention_heads=4, rope_scaling=scaling
    )
    words = "3 positions for each token; time: pairs 0-3; height: pairs 4-5; width: pairs 6-7"
    assert words in run("explain", path).stdout
    assert words not in run("explain", path, "--text-only").stdout
    assert "text only" in run("explain", path, "--text-only").stdout


def test_text_only_has_no_effect_on_models_of_one_axis(config: Path) -> None:
    """A script can pass it for every text model, as the help states."""
    assert run("explain", config, "--text-only").stdout == run("explain", config).stdout
    assert "no effect on text models of one axis" in " ".join(run("explain", "--help").stdout.split())


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ropewalk", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=600, env={**os.environ, **environment})


def one_line(stderr: str) -> bool:
    return stderr.startswith("Error: ") and stderr.count("\n") == 1


EVIL = "x\x1b[31mRED\x07\ud800 \u4e2d\u6587 \u2603"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_every_encoding_of_the_output(tmp_path: Path, encoding: str) -> None:
    """Characters that the terminal lacks, and bytes that are not text, are written as escapes."""
    path = write(tmp_path, model_type=EVIL)
    for arguments, code in ((("--pairing", "half"), 0), ((), 1), (("--pairing", "half", "--json"), 0)):
        ran = process("explain", path, *arguments, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
        assert ran.returncode == code, ran.stderr
        both = ran.stdout + ran.stderr
        assert b"Traceback" not in both
        assert b"\x1b" not in both
        assert b"\x07" not in both
        if "--json" in arguments:
            assert json.loads(ran.stdout)["model_type"] == EVIL
        else:
            assert rb"x\x1b[31mRED\x07\ud800" in both.replace(rb"\\", b"\\")


def test_help_lists_every_command_in_one_section() -> None:
    sections = re.split(r"\n\n(?=[A-Z].*:\n)", run("--help").stdout)[2:]  # after usage and options
    listed = [line.split()[0] for section in sections for line in section.splitlines()[1:] if line.startswith("  ")]
    commands = {
        "bench",
        "check",
        "convert",
        "demo",
        "diff",
        "doctor",
        "explain",
        "explore",
    }
    assert len(sections) == 2
    assert sorted(word for word in listed if word in commands) == sorted(commands)


@pytest.mark.parametrize("arguments", [["explain", "CONFIG"], ["--help"]])
def test_a_closed_pipe(config: Path, arguments: list[str]) -> None:
    """As in `ropewalk doctor | true`, it ends silently with exit status 1, like other commands of click."""
    command = [sys.executable, "-m", "ropewalk", *(str(config) if a == "CONFIG" else a for a in arguments)]
    read, written = os.pipe()
    os.close(read)
    try:
        ran = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, timeout=600)
    finally:
        os.close(written)
    assert (ran.returncode, ran.stderr) == (1, b"")


def test_a_full_disk_is_no_traceback(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli.click, "echo", full)
    ran = run("explain", config)
    assert ran.exit_code == 1
    assert isinstance(ran.exception, (SystemExit, OSError))


@pytest.mark.parametrize("name", sorted(cli.main.commands))
def test_the_examples_of_the_help_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command with arguments or several options shows examples, and their options and arguments are accepted."""
    monkeypatch.chdir(tmp_path)
    command = cli.main.commands[name]
    examples = re.findall(rf"\bropewalk {name}\b(.*)", command.epilog or "")
    assert examples or name in ("demo", "doctor")
    for words in map(shlex.split, examples):
        for file in (Path(word) for word in words if word.endswith(".safetensors")):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        command.make_context(name, words)


def fails(*arguments: object) -> str:
    """Run a command that must fail with one line. Return the line."""
    ran = run(*arguments)
    status = 2 if arguments[0] == "diff" else 1  # of diff, 1 means that engines or configs differ
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (status, "", 1), ran.output
    return ran.stderr


class TestMessagesNameOptions:
    """A message names the option of the running command. In Python, the same message names the argument."""

    @pytest.mark.parametrize(
        ("changes", "option"),
        [
            ({"rope_flavour": "it's vanilla"}, "--ignore rope_flavour"),
            ({"rope flavour": 1}, "--ignore 'rope flavour'"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "--ignore rope_scaling.beta_fast"),
            ({"model_type": "mine"}, "--pairing half"),
            ({"model_type": "mistral", "rope_theta": None}, "--base 10000"),
        ],
    )
    def test_the_option_works(self, tmp_path: Path, changes: dict[str, object], option: str) -> None:
        path = write(tmp_path, **changes, max_position_embeddings=64)
        for command in (["explain"], ["diff"], ["explore", "--no-open", "-o", str(tmp_path / "page.html")]):
            message = fails(*command, path)
            assert option.replace("10000", "BASE") in message
            assert not re.search(r"\w=[('\w]", message)
            ran = run(*command, path, *shlex.split(option))
            assert ran.exit_code == 0 or command == ["diff"]
            assert "Error:" not in ran.stderr
        with pytest.raises(ropewalk.RopeError, match=r"(ignore=\('rope|pairing='half'|base=BASE)"):
            ropewalk.from_config(path)

    @pytest.mark.parametrize(
        ("changes", "options"),
        [
            ({"model_type": "mine", "architectures": ["LlamaForCausalLM"]}, []),
            ({"model_type": "mine", "rope_scaling": {"mrope_section": [4, 2, 2]}}, ["--pairing", "half"]),
            ({"model_type": "mine", "rope_scaling": {"factor": 2.0}}, ["--pairing", "half"]),
            ({}, ["--pairing", "interleaved"]),
            ({"model_type": "mistral", "rope_theta": None}, []),
            ({"model_type": "qwen2_vl"}, []),
            ({"vision_config": 5}, []),
            ({"model_type": "chatglm", "rope_ratio": 8.0, "_name_or_path": "chatglm2"}, []),
            ({"model_type": "mistral_large4_text", "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}, []),
            ({"model_type": None, "dim": 64, "n_layers": 2, "n_heads": 4, "use_scaled_rope": True}, []),
            ({"model_type": None, "dim": 64, "n_layers": 2, "n_heads": 4, "rope_x": 1}, []),
            ({"rope_flavour": "vanilla"}, []),
            (None, []),
        ],
    )
    def test_no_command_speaks_python(
        self,
        tmp_path: Path,
        changes: dict[str, object] | None,
        options: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A fix names only what the command can do, or nothing."""
        check_here(monkeypatch)
        path, page = tmp_path / "config.json", tmp_path / "page.html"
        (tmp_path / "model.safetensors").touch()
        (tmp_path / "mine.py").write_text("def rotate(q, cos, sin): return q")
        if changes is not None:
            write(tmp_path, **{"architectures": ["LlamaModel"], **changes})
            config = {key: value for key, value in json.loads(path.read_text()).items() if value is not None}
            path.write_text(json.dumps(config))
        source = "owner/name" if changes is None else path
        for command in (
            ("explain", source),
            ("diff", source),
            ("diff", source, source),
            ("explore", source, "--no-open", "-o", page),
            ("convert", tmp_path, tmp_path / "new", "--to", "interleaved"),
            ("check", f"{tmp_path / 'mine.py'}:rotate", "--config", source),
        ):
            ran = run(*command, *options)
            assert isinstance(ran.exception, SystemExit), ran.output
            assert "Error: " in ran.stderr or command[0] == "check"
            known = {option for p in cli.main.commands[str(command[0])].params for option in p.opts}
            assert set(re.findall(r"(?<![\w-])--[a-z-]+", ran.stderr)) <= known, ran.stderr
            python = r"\w=[('\w{]|dataclasses|\w\(\.\.\.|from_config\(|Rope by hand"
            assert not re.search(python, ran.stderr), ran.stderr

    def test_engines(self, config: Path) -> None:
        for arguments in (("diff", config, "--engines", "vlm"), ("extend", config, "--for", "vlm")):
            option = "--engines" if arguments[0] == "diff" else "--for"
            message = fails(*arguments)
            assert f"{option} must be one of 'transformers', 'vllm'" in message
            assert f"Pass one of them as {option}. Did you mean 'vllm'?" in message
        for program in ("ollama", "koboldcpp", "LM-Studio", "LM Studio", "llama-server", "Jan", "GPT4All"):
            assert "Did you mean 'llama.cpp'?" in fails("extend", config, "--for", program)
        for program in ("TRL", "axolotl", "LLaMA-Factory", "ms-swift", "HF", "unsloth"):
            assert "Did you mean 'transformers'?" in fails("extend", config, "--for", program)
        for program in ("mlx-vlm", "mlx_vlm", "sglang-jax", "KTransformers", "nano-vllm", "transformers.js"):
            assert "Did you mean" not in fails("diff", config, "--engines", program)

    def test_download(self) -> None:
        assert "If it is a hub id, pass --download, or pass the path" in fails("explain", "owner/name")

    def test_only_during_a_command(self, tmp_path: Path) -> None:
        run("explain", tmp_path)
        assert _checks.argument("length") == "length=LENGTH"


class TestLengths:
    @pytest.mark.parametrize(
        ("text", "tokens"), [("128k", "131,072"), ("32K", "32,768"), ("1M", "1,048,576"), ("5", "5")]
    )
    def test_of_explain(self, config: Path, text: str, tokens: str) -> None:
        assert f"at length         {tokens} tokens" in run("explain", config, "--length", text).stdout

    def test_in_all_commands(self) -> None:
        """Every option that is a number of tokens has the type."""
        options = [(command.name, p) for command in cli.main.commands.values() for p in command.params]
        lengths = {(name, p.opts[0]): p for name, p in options if isinstance(p.type, Length)}
        assert lengths.keys() == {
            ("explain", "--length"), ("diff", "--length"), ("explore", "--length"), ("explore", "--trained-length"),
            ("bench", "--tokens"), ("convert", "--max-positions"), ("extend", "--to"), ("extend", "--original"),
        }  # fmt: skip
        said = {
            name for (name, _), p in lengths.items() if re.search(r"; (4k is 4,096|128k is 131,072)\.", str(p.help))
        }
        assert said == {name for name, _ in lengths}

    @pytest.mark.parametrize("text", ["", "k", "1.5k", "-1k", "1kk", "12x", "0k", "128 k", "4000000M"])
    def test_other_text(self, config: Path, text: str) -> None:
        refused = run("explore", config, "--length", text)
        assert refused.exit_code == 2
        assert "--length" in refused.stderr
        assert ("32768, 32k or 1M" in refused.stderr) != (text in ("-1k", "0k", "4000000M"))


class TestStandardInput:
    def explain(self, source: str, given: bytes) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "ropewalk", "explain", source]
        ran = subprocess.run(command, input=given, capture_output=True, timeout=60)
        return ran.returncode, ran.stdout.decode(), ran.stderr.decode()

    @pytest.mark.parametrize("source", ["-", "/dev/stdin"])
    def test_explain_reads_it(self, config: Path, source: str) -> None:
        code, told, _ = self.explain(source, config.read_bytes())
        assert code == 0
        assert told.splitlines()[0] == "/dev/stdin (model_type llama)"
        assert told.splitlines()[1:] == run("explain", config).stdout.splitlines()[1:]

    def test_it_is_bounded_like_a_file(self) -> None:
        code, _, message = self.explain("-", b" " * (2 * 2**20 + 1))
        assert code == 1
        assert message.startswith("Error: /dev/stdin: the file must have at most 2,097,152 bytes, got more.")


def test_a_file_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * 10)
    expected = f"Error: {path}: the config must be JSON or a GGUF file, got a file of weights. Pass its folder.\n"
    assert fails("explain", path) == expected


def test_doctor_as_json() -> None:
    facts = json.loads(run("doctor", "--json").stdout)
    lines = run("doctor").stdout.splitlines()
    assert [f"{name:<10}  {fact}" for name, fact in facts.items()] == lines
    assert facts["ropewalk"] == ropewalk.__version__
    assert "reference" in facts


def test_verify(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaModel

    given = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    LlamaModel(LlamaConfig(**given)).save_pretrained(tmp_path)
    ran = run("verify", tmp_path)
    assert ran.exit_code == 0
    assert "ok     rotary_emb.inv_freq of layers 0-1" in ran.stdout
    (tmp_path / "other.json").write_text(json.dumps({**given, "model_type": "llama", "rope_theta": 5e5}))
    ran = run("verify", tmp_path, "--config", tmp_path / "other.json", "--json")
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["held"][0]["code"] == "wrong-base"
    assert run("verify", tmp_path / "none").exit_code == 2
