"""The command from the user's side: bad input is one line and exit code 2; a finished run exits 0."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.support.helpers import TinyRun, closed_stdout, mentions
from titanlite.metrics import run_summary
from titanlite.runtime import console
from titanlite.runtime.console import install_hint
from titanlite.runtime.files import lock_file
from titanlite.tools import cli


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Lines of standard error of a command that exits with 2."""
    assert cli.run(list(arguments)) == 2
    return capfd.readouterr().err.splitlines()


def test_packages_are_installed_by_uv_where_the_environment_has_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip` alone would be that of another environment."""
    for has_pip, has_uv, command in [(True, True, "pip"), (False, False, "pip"), (False, True, "uv")]:
        monkeypatch.setattr(console.PathFinder, "find_spec", lambda name, there=has_pip: there)
        monkeypatch.setattr(
            "shutil.which", lambda name, there=has_uv: f"/bin/{name}" if there and name == "uv" else None
        )
        words = install_hint("report").split()
        assert (Path(words[0]).name, "[report]" in words[-1]) == (command, True)
        assert (sys.executable in words) == (command == "uv")


def test_a_hint_leaves_setuptools_importable() -> None:
    code = "from titanlite.runtime.console import install_hint; install_hint('report'); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_folder_records_how_it_was_made(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from titanlite.config.load import load

    command = ["train", "--config", str(tiny.toml), "--training.steps=2"]
    monkeypatch.setattr(sys, "argv", ["titanlite", *command])
    monkeypatch.setattr(run_summary, "find_spec", lambda _: None)  # as if there were no plotly
    assert cli.run(command) == 0
    assert install_hint("report") in capfd.readouterr().out
    folder = tiny.folder / "outputs" / "tiny"
    assert load(folder / "config.toml") == tiny.config("--training.steps=2")
    run = json.loads((folder / "run.json").read_text())
    start = run["starts"][0]
    assert (start["mesh"], start["processes"], start["device"]) == ({"replicate": 1, "shard": 1}, 1, "cpu")
    assert start["versions"]["torch"] == torch.__version__
    assert start["command"] == ["titanlite", *command]
    manifest = json.loads((folder / "checkpoints" / "step-00000002" / "manifest.json").read_text())
    assert manifest["run_id"] == run["id"]


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        (["--data.tokenizer=/no/such"], "data.tokenizer", ["/no/such", "bytes"]),
        (["--checkpoint.initial_load_path=/no/such"], "checkpoint.initial_load_path", ["/no/such"]),
        (["--data.path=http://127.0.0.1:9/tokens"], "data.path", ["http://127.0.0.1:9/tokens"]),
        (["-training.steps=4"], "titanlite config check", ["-training.steps"]),
        (["--metrics.loggers=['os.path:join']"], "metrics.loggers", ["os.path:join", "folder, step", "(a, *p)"]),
        (["--training.seq_len=10000"], "training.seq_len", ["10000", "8192"]),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], key: str, words: list[str], tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    [line] = refusal(capfd, "config", "check", "--config", str(tiny.toml), *options)
    assert line.startswith(f"error: {key}: ")
    assert mentions(line, *words)
    assert not (tiny.folder / "outputs").exists()


def test_check_prints_warnings(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["check", "--here", str(tiny.toml), "--lr_scheduler.warmup_steps=4"]
    assert cli.run([*command, "--training.steps=3"]) == 0
    [warning] = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: lr_scheduler.warmup_steps: ")
    assert cli.run([*command, "--training.epochs=3"]) == 0
    [warning] = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: training.steps"), (
        "the file has steps, and its warm-up is not compared with them"
    )


def test_everything_wrong_is_in_one_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Mistakes of the config itself, and those that depend on the model, the tokenizer and the machine."""
    (tmp_path / "base.toml").write_text("[training]\nseq_len = 10000\n[model]\nargs.n_layer = 3\n")
    text = """\
base = "base.toml"
[metrics]
log_freq = 0
[quantize.linear.float8]
enable = true
[model]
name = "llama3"
args = { dim = "wide" }
flavor = "debgu"
[compile]
enable = true
[data]
tokenizer = "bad.model"
[checkpiont]
[optimizer]
name = "Moun"
"""
    (tmp_path / "run.toml").write_text(text)
    bad = tmp_path / "bad.model"
    bad.write_text("no ranks here")
    options = [f"--data.tokenizer={bad}", "--training.stepss=3"]
    lines = refusal(capfd, "config", "check", "--config", str(tmp_path / "run.toml"), *options)
    assert [line.removeprefix("error: ").split(":")[0] for line in lines] == [
        "metrics.log_freq",  # at once, in the order of the file
        "checkpiont",
        "training.stepss",
        "quantize.linear.float8.enable",  # when torch is imported
        "model.args.dim",
        "model.flavor",
        "optimizer.name",
        "model.args.n_layer",
        "data.tokenizer",
    ]
    places = [line.rpartition(" ")[2].strip("()") for line in lines[3:8]]
    assert places == ["run.toml:5", "run.toml:8", "run.toml:9", "run.toml:16", "base.toml:4"]
    assert "did you mean debug?" in lines[5]
    assert "did you mean Muon?" in lines[6]
    assert "did you mean n_layers?" in lines[7]
    assert lines[2].endswith("(command line)")
    assert lines[8].endswith("(command line)")


@pytest.mark.long
def test_mistakes_of_the_options_are_reported_before_torch_is_imported(tiny: TinyRun) -> None:
    code = "import sys; sys.modules['torch'] = None; from titanlite.tools.cli import main; main()"
    command = [sys.executable, "-c", code, "config", "check", "--config", str(tiny.toml), "--training.stepss=1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    first, second, *_ = result.stderr.splitlines()
    assert first.startswith("error: training.stepss: ")
    assert mentions(first, "training.steps")
    assert second.startswith("Traceback"), "there is no torch here"


def test_what_depends_on_a_mistake_is_not_reported_too(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    """A default stands in for what is wrong; nobody wrote that, so it is nobody's mistake."""
    options = ["--data.path=/no/such", "--training.seq_lenn=3", "--model.args.vocab_size=x", "--compile.enabel=true"]
    lines = refusal(capfd, "config", "check", "--config", str(tiny.toml), *options)
    assert [line.removeprefix("error: ").split(": ")[0] for line in lines] == [
        "data.path", "training.seq_lenn", "compile.enabel", "model.args.vocab_size",
    ]  # fmt: skip


@pytest.mark.usefixtures("own_process_group")
def test_empty_data(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    for file in tiny.text.iterdir():
        file.write_text("short")
    [line] = refusal(capfd, "train", "--config", str(tiny.toml))
    assert line.startswith("error: data.path: ")
    assert mentions(line, 21, 32)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("trian", ["'trian'", "'train'"]),
        ("config", ["titanlite config", "check, show, schema, migrate"]),
        ("train debug qwen3_8b", ["titanlite train", "'qwen3_8b'"]),
        ("train debug --config=tiny", ["titanlite train", "debug", "--config tiny"]),
        ("train --training=3", ["titanlite train", "--training.option=value"]),
        ("check llama3_8", ["llama3_8", "llama3_8b?"]),
        ("parity", ["titanlite parity debug"]),
    ],
)
def test_a_wrong_command_line_is_one_line(command: str, words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    [line] = refusal(capfd, *command.split())
    assert line.startswith("error: ")
    assert mentions(line, *words)


@pytest.mark.parametrize(
    ("words", "config", "overrides"),
    [
        ("train", "debug", []),
        ("train my.toml", "my.toml", []),
        ("train --config=m.toml --compile.enable --data.path t/", "m.toml", ["--compile.enable", "--data.path", "t/"]),
        ("train --compile.enable --training.steps=3 my.toml", "my.toml", ["--compile.enable", "--training.steps=3"]),
        ("train --compile.enable my.toml", "debug", ["--compile.enable", "my.toml"]),  # as in any other place
        ("plan --json my.toml --optimizer.lr -1 --gpu H100", "my.toml", ["--optimizer.lr", "-1"]),
    ],
)  # fmt: skip
def test_overrides_pass_the_parser_untouched(words: str, config: str, overrides: list[str]) -> None:
    options = cli.make_parser().parse(words.split())
    assert (options.config, options.overrides) == (config, overrides)


def test_inputs_may_stand_between_flags() -> None:
    options = cli.make_parser().parse(["data", "prepare", "a", "--out", "o", "b", "--tokenizer", "bytes", "c"])
    assert (options.inputs, options.out, options.tokenizer) == (["a", "b", "c"], "o", "bytes")


def test_other_errors_keep_their_traceback_and_name_the_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert cli.report_errors(lambda: print(1 / 0)) == 1
    assert mentions(capfd.readouterr().err, "[rank 3] ZeroDivisionError")


@pytest.mark.parametrize(("words", "code"), [("train --help", 0), ("config show", 1), ("config schema", 1)])
def test_output_into_a_closed_pipe_has_no_traceback(words: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    with closed_stdout():
        assert cli.run(words.split()) == code
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_a_run_continues_after_the_reader_of_its_log(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    with closed_stdout():
        assert cli.run(["train", str(tiny.toml), "--training.steps=2"]) == 0
    assert capfd.readouterr().err == ""
    assert len(tiny.losses()) == 2


def test_the_first_rank_to_fail_reports_for_all(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun ends the other ranks at once: if only rank 0 reported, its error could be lost."""
    record = tiny.folder / "code"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tiny.folder / "0" / "error.json"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert len(refusal(capfd, "train", "no_such_config")) == 1
    assert record.read_text().startswith("2\n")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert refusal(capfd, "train", "no_such_config") == []
    assert cli.report_errors(lambda: print(1 / 0)) == 1
    assert record.read_text().startswith("2\n"), "what follows from the first failure does not hide it"


@pytest.mark.long
def test_other_ranks_end_after_the_first_to_fail_has_reported(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun ends all ranks when one ends: the first could be ended between its exit code and its error."""
    record = tiny.folder / "code"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tiny.folder / "0" / "error.json"))
    codes = []
    other = threading.Thread(target=lambda: codes.append(cli.run(["train", "no_such_config"])))
    with lock_file(tiny.folder / "code.lock"):
        record.write_text("3")
        other.start()
        other.join(0.5)
        assert other.is_alive()
    other.join(30)
    assert codes == [2]
    assert capfd.readouterr().err == ""
    assert record.read_text() == "3"
