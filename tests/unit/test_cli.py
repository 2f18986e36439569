"""From the user's side: bad input is one line and exit code 2; a run that is done exits 0."""

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.helpers import TinyRun, closed_stdout
from titanlite import cli
from titanlite.runtime.arguments import Parser


def titanlite(*arguments: str, **environ: str) -> tuple[int, list[str], list[str]]:
    """Exit code, lines of standard output, lines of standard error."""
    command = [sys.executable, "-m", "titanlite", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environ
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    return result.returncode, result.stdout.splitlines(), result.stderr.splitlines()


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Lines of standard error of a command that exits with 2."""
    assert cli.run(list(arguments)) == 2
    return capfd.readouterr().err.splitlines()


def test_a_run_from_start_to_resume(tiny: TinyRun) -> None:
    command = ("train", "--config", str(tiny.toml), "--training.steps=3", "--metrics.enable_tensorboard=true")
    code, out, err = titanlite(*command)
    assert (code, err) == (0, [])
    run = tiny.folder / "outputs" / "tiny"
    text = "\n".join(out)
    assert "unigram entropy" in text
    assert "step     3  loss" in text
    assert f"checkpoints  {run / 'checkpoints'} (3)" in text
    assert "continue       the same command with --training.steps=6" in text
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock", "checkpoints", "checkpoints.jsonl", "config.toml", "logs", "metrics.jsonl", "run.json", "tensorboard",
    ]  # fmt: skip
    assert "step     3  loss" in (run / "logs" / "rank-0.log").read_text()
    assert list((run / "tensorboard").glob("events*"))

    code, out, _ = titanlite(*command, "--training.steps=5")
    assert code == 0
    assert "resuming after step 3, 24 sequences into the data" in out
    assert [record["step"] for record in tiny.records()] == [1, 2, 3, 4, 5]
    code, out, _ = titanlite(*command, "--training.steps=5")
    assert code == 0
    assert "this run is complete at step 5; to continue it, raise training.steps" in out


def test_a_run_folder_records_how_it_was_made(tiny: TinyRun) -> None:
    from titanlite.config.load import load

    assert titanlite("train", "--config", str(tiny.toml), "--training.steps=2")[0] == 0
    folder = tiny.folder / "outputs" / "tiny"
    assert load(folder / "config.toml") == tiny.config("--training.steps=2")
    run = json.loads((folder / "run.json").read_text())
    start = run["starts"][0]
    assert (start["mesh"], start["processes"], start["device"]) == ({"replicate": 1, "shard": 1}, 1, "cpu")
    assert start["versions"]["torch"] == torch.__version__
    assert "--training.steps=2" in start["command"]
    manifest = json.loads((folder / "checkpoints" / "step-00000002" / "manifest.json").read_text())
    assert manifest["run_id"] == run["id"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--training.stepss=3"], "training.stepss: unknown key, did you mean training.steps? (command line)"),
        (["--training.steps=many"], 'training.steps: expected an integer, got "many" (command line)'),
        (["--parallelism.data_parallel_shard_degree=3"],
         "parallelism.data_parallel_shard_degree: replicate 1 x shard 3 = 3 processes, there are 1: start more "),
        (["--data.path=/no/such"], "data.path: no file or folder /no/such (command line)"),
        (["--data.tokenizer=/no/such"],
         "data.tokenizer: no file /no/such (a tiktoken rank file, a tokenizer.json, or one of the names bytes, "),
        (["--model.args.n_layer=3"],
         "model.args.n_layer: unknown key 'n_layer', did you mean n_layers? (known: vocab_size, max_seq_len, dim,"),
        (["--model.args.vocab_size=100"],
         "data.tokenizer: has 258 tokens, the model only 100 (leave model.args.vocab_size out,"),
        (["--checkpoint.folder=s4://bucket/run"], "checkpoint.folder: Protocol not known: s4"),
        (["--checkpoint.initial_load_path=/no/such"], "checkpoint.initial_load_path: no folder /no/such"),
        (["--training.seq_len=10000"], "training.seq_len: 10000 is more than the 8192 positions of the model"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    options: list[str], message: str, tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = refusal(capfd, "config", "check", "--config", str(tiny.toml), *options)
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {message}")
    assert not (tiny.folder / "outputs").exists()


def test_everything_wrong_is_in_one_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is wrong with the config as such, and what depends on the model, the tokenizer and the machine."""
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

    more = ["--model.args={}", "--model.flavor=debug", "--model.args.vocab_size=5", "--data.tokenizer=bytes"]
    lines = refusal(capfd, "train", "--config", str(tmp_path / "run.toml"), "--optimizer.name=SGD", *more)
    assert [line.partition(" (")[0].removeprefix("error: ") for line in lines] == [
        "metrics.log_freq: expected a number of at least 1, got 0",
        "checkpiont: unknown key, did you mean checkpoint?",
        "quantize.linear.float8.enable: this machine has no float8 units",
        "training.seq_len: 10000 is more than the 8192 positions of the model",
        "data.tokenizer: has 258 tokens, the model only 5",
    ]
    assert lines[3].endswith("(base.toml:2)")


def test_mistakes_of_the_options_are_reported_before_torch_is_imported(tiny: TinyRun) -> None:
    code = "import sys; sys.modules['torch'] = None; from titanlite.cli import main; main()"
    command = [sys.executable, "-c", code, "config", "check", "--config", str(tiny.toml), "--training.stepss=1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    first, second, *_ = result.stderr.splitlines()
    assert first == "error: training.stepss: unknown key, did you mean training.steps? (command line)"
    assert second.startswith("Traceback"), "there is no torch here"


def test_what_depends_on_a_mistake_is_not_reported_too(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    """A default stands in for what is wrong; nobody wrote that, so it is nobody's mistake."""
    options = ["--data.path=/no/such", "--training.seq_lenn=3", "--model.args.vocab_size=x", "--compile.enabel=true"]
    lines = refusal(capfd, "config", "check", "--config", str(tiny.toml), *options)
    assert [line.removeprefix("error: ").split(": ")[0] for line in lines] == [
        "data.path", "training.seq_lenn", "compile.enabel", "model.args.vocab_size",
    ]  # fmt: skip


def test_compiling_needs_a_compiler(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from titanlite.preflight import check_compiler
    from titanlite.runtime.errors import UserError

    command = ("config", "check", "--config", str(tiny.toml))
    monkeypatch.setenv("CXX", "/no/such/c++")
    if not torch.cuda.is_available():
        assert refusal(capfd, *command, "--compile.enable") == [
            "error: compile.enable: compiling for the CPU needs a C++ compiler, and there is no /no/such/c++ (named "
            "by CXX in the environment) (command line)"
        ]
        assert refusal(capfd, *command, "--optimizer.name=torchao.optim.AdamW8bit") == [
            "error: optimizer.name: compiling for the CPU needs a C++ compiler, and there is no /no/such/c++ (named "
            "by CXX in the environment) (command line)"
        ]
    assert cli.run([*command]) == 0
    monkeypatch.setenv("CXX", sys.executable)
    check_compiler(torch.device("cpu"))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tiny.folder))
    with pytest.raises(UserError, match=r"there is no .*\+\+ \(CXX in the environment selects another\)"):
        check_compiler(torch.device("cpu"))
    monkeypatch.setattr("titanlite.preflight.find_spec", lambda name: None)
    with pytest.raises(UserError, match="compiling for a GPU needs triton"):
        check_compiler(torch.device("cuda"))


def test_unreadable_tokenizer(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    (tiny.folder / "bad.model").write_text("no ranks here")
    options = ["--data.tokenizer", str(tiny.folder / "bad.model")]
    [line] = refusal(capfd, "config", "check", "--config", str(tiny.toml), *options)
    assert "is not a tiktoken rank file" in line


def test_empty_data(tiny: TinyRun) -> None:
    for file in tiny.text.iterdir():
        file.write_text("short")
    code, _, err = titanlite("train", "--config", str(tiny.toml))
    assert code == 2
    assert len(err) == 1
    assert err[0].startswith("error: data.path: ")
    assert err[0].endswith("holds 21 tokens, less than one sequence of 32 (and the token after it)")


def test_world_size_that_does_not_divide_the_batch(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert refusal(capfd, "config", "check", "--config", str(tiny.toml)) == [
        "error: training.global_batch_size: 8 is not a multiple of the 3 processes (tiny.toml:16)"
    ]


@pytest.mark.slow
def test_checkpoint_of_another_model(tiny: TinyRun) -> None:
    command = ("train", "--config", str(tiny.toml), "--training.steps=2")
    assert titanlite(*command)[0] == 0
    code, _, err = titanlite(*command, "--model.args.hidden_dim=64")
    assert code == 2
    checkpoint = tiny.folder / "outputs" / "tiny" / "checkpoints" / "step-00000002"
    assert err == [
        f"error: {checkpoint} was trained with other settings, and a resumed run would be another experiment:",
        "error:   model.args.hidden_dim was 70, is 64",
        "error: Restore them, or give the new run another job.name, or accept: "
        'checkpoint.allow_changes = ["model.args.hidden_dim"]',
    ]


@pytest.mark.parametrize("flavor", ["8B", "405B"])
def test_a_model_that_cannot_fit_is_refused_before_anything_is_allocated(
    flavor: str, tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.toml.write_text(f'[model]\nflavor = "{flavor}"\nargs.vocab_size = 128256\n')
    if torch.cuda.is_available():
        pytest.skip("it may fit here")
    [line] = refusal(capfd, "config", "check", "--config", str(tiny.toml))
    size = {"8B": "8,030,261,248 parameters take 119.7 GiB", "405B": "405,853,388,800 parameters take 6,047.7 GiB"}
    assert line.startswith("error: model.flavor: the model does not fit: ")
    assert line.endswith(" (tiny.toml:2)")
    assert size[flavor] in line
    assert "this machine (it has no GPU) has" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "titanlite: unknown command 'trian', did you mean 'train'?"),
        ("verify outputs", "titanlite: unknown command 'verify', did you mean 'checkpoint verify'?"),
        ("xyzzy", "titanlite: unknown command 'xyzzy'"),
        ("config", "titanlite config: name a command: check, show, schema, migrate"),
        ("--verbose", "titanlite: unknown option --verbose"),
        ("train --steps=3", "titanlite train: unknown option --steps, did you mean --training.steps?"),
        ("train --confg debug", "titanlite train: unknown option --confg, did you mean --config?"),
        ("train debug qwen3_8b", "titanlite train: unexpected argument 'qwen3_8b'"),
        ("train debug --config=tiny", "titanlite train: two configs, debug and --config tiny: name one"),
        ("train --config", "titanlite train: argument --config: expected one argument"),
        ("config show --dif", "titanlite config show: unknown option --dif, did you mean --diff?"),
        ("check llama3_8", "no config file llama3_8, did you mean llama3_8b?"),
        ("check configs/debgu.toml", "no config file configs/debgu.toml, did you mean debug?"),
        ("check titanlite", "titanlite is a folder: name a TOML file in it"),
        ("parity", "titanlite parity: no config: name a TOML file, or one that titanlite ships, for example titanlite "
         "parity debug"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line(words: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert refusal(capfd, *words.split()) == [f"error: {message}"]


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
    assert "[rank 3] ZeroDivisionError: division by zero" in capfd.readouterr().err


@pytest.mark.parametrize(("words", "code"), [("train --help", 0), ("config show", 1), ("config schema", 1)])
def test_output_into_a_closed_pipe_has_no_traceback(words: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    with closed_stdout():
        assert cli.run(words.split()) == code
    assert capfd.readouterr().err == ""


def test_a_run_continues_after_the_reader_of_its_log(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    with closed_stdout():
        assert cli.run(["train", str(tiny.toml), "--training.steps=2"]) == 0
    assert capfd.readouterr().err == ""
    assert len(tiny.losses()) == 2


def test_an_error_beside_a_closed_pipe_keeps_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with closed_stdout():
        assert cli.report_errors(lambda: print(1 / 0)) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_first_rank_to_fail_reports_for_all(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun ends the other ranks at once: if only rank 0 reported, its error could be lost."""
    record = tiny.folder / "code"
    monkeypatch.setenv("TITANLITE_EXIT_FILE", str(record))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert len(refusal(capfd, "train", "no_such_config")) == 1
    assert record.read_text() == "2"
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert refusal(capfd, "train", "no_such_config") == []
    assert cli.report_errors(lambda: print(1 / 0)) == 1
    assert record.read_text() == "2", "what follows from the first failure does not hide it"


def test_config_show_prints_what_loads_again(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    from titanlite.config.load import load

    assert cli.run(["config", "show", f"--config={tiny.toml}", "--training.steps=7"]) == 0
    shown = tiny.folder / "shown.toml"
    shown.write_text(capfd.readouterr().out)
    assert load(shown) == tiny.config("--training.steps=7")


def test_config_show_diff_prints_what_differs(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    from titanlite.config.load import load

    assert cli.run(["config", "show", "--diff", "--config", str(tiny.toml), "--training.steps=7"]) == 0
    text = capfd.readouterr().out
    assert "steps = 7  # default: 1000\n" in text
    assert "max_norm" not in text
    shown = tiny.folder / "shown.toml"
    shown.write_text(text)
    assert load(shown) == tiny.config("--training.steps=7")


def test_config_schema_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "schema"]) == 0
    assert json.loads(capfd.readouterr().out)["properties"]["training"] == {"$ref": "#/$defs/Training"}


def commands(parser: Parser) -> Iterator[tuple[str, Parser]]:
    """Every command that runs, with its parser."""
    for name, command in parser.commands.items():
        below = dict(commands(command))
        yield from {f"{name} {inner}": it for inner, it in below.items()}.items() if below else [(name, command)]


COMMANDS = dict(commands(cli.make_parser()))


def test_every_command_is_there() -> None:
    assert list(COMMANDS) == [
        "train", "init", "check", "plan", "parity", "data prepare", "data inspect", "data tokenizer",
        "checkpoint list", "checkpoint verify", "checkpoint show", "checkpoint prune",
        "config check", "config show", "config schema", "config migrate",
    ]  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_each_flag_and_shows_an_example(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    parser = COMMANDS[name]
    assert [action.dest for action in parser._actions if not action.help] == []
    for flag in ("--help", "-h"):
        assert cli.run([*name.split(), flag]) == 0
        text = capfd.readouterr().out
        assert text.startswith(f"usage: titanlite {name} [-h]")
        assert f"\nexample:\n  titanlite {name}" in text
    examples = text.partition("\nexample:\n")[2].partition("\n\n")[0].splitlines()
    for example in examples:
        cli.make_parser().parse(shlex.split(example.partition(" > ")[0])[1:])


def test_help_imports_nothing_heavy() -> None:
    """`train --help` reads the schema; the others need no more than the standard library."""
    commands = [[*name.split(), "--help"] for name in COMMANDS if name != "train"]
    code = (
        f"import sys; from titanlite import cli; codes = [cli.run(words) for words in {commands}]\n"
        "light = {*sys.modules}; codes.append(cli.run(['train', '--help']))\n"
        "assert not {*codes, *light & {'pydantic', 'rich', 'fsspec'}, *sys.modules.keys() & {'torch', 'numpy'}} - {0}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "usage: titanlite [-h] [--version] COMMAND ..."
    assert [line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "] == [
        "train", "init", "check", "plan", "parity", "data", "checkpoint", "config"
    ]  # fmt: skip


def test_the_help_of_train_lists_every_option(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--help"]) == 0
    text = capfd.readouterr().out
    assert (
        "\n[training]\n  --training.steps  integer >= 1; default 1000\n        Optimizer steps of the whole run.\n"
        in text
    )
    assert "\n[[data.sources]]\n  --data.sources.N.path  text | list of text; required\n" in text
    assert max(map(len, text.splitlines())) <= 120


SCRIPT = Path(__file__).parents[2] / "run_train.sh"


def run_train(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | environ
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300, check=False
    )


@pytest.mark.slow
def test_run_train_on_four_processes(tiny: TinyRun) -> None:
    options = ["--parallelism.data_parallel_replicate_degree=2", "--training.steps=4"]
    one = run_train("--config", str(tiny.toml), "--job.name=one", "--training.steps=4", cwd=tiny.folder)
    assert one.returncode == 0, one.stderr
    four = run_train("--config", str(tiny.toml), *options, "--job.name=four", cwd=tiny.folder, NPROC="4")
    assert four.returncode == 0, four.stderr
    assert "mesh     replicate 2 x shard 2 on cpu; global batch 8 = 4 processes x 1 micro-batches x 2" in four.stdout
    assert tiny.losses("four") == pytest.approx(tiny.losses("one"), rel=1e-5)
    logs = tiny.folder / "outputs" / "four" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == [f"rank-{rank}.log" for rank in range(4)]


@pytest.mark.nightly
def test_run_train_on_two_nodes(tiny: TinyRun) -> None:
    """Two machines that share a folder: here both are this one, each with a launcher of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    nodes = {"NNODES": "2", "NPROC": "1", "RDZV_ENDPOINT": endpoint}
    arguments = ["--config", str(tiny.toml), "--training.steps=3"]
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(run_train, *arguments, cwd=tiny.folder, **nodes) for _ in range(2)]
        results = [future.result() for future in futures]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    assert len(tiny.losses()) == 3
    run = json.loads((tiny.folder / "outputs" / "tiny" / "run.json").read_text())
    assert run["starts"][0]["mesh"] == {"replicate": 1, "shard": 2}
    refused = run_train(*arguments, cwd=tiny.folder, NNODES="2")
    assert refused.returncode == 2
    assert "set RDZV_ENDPOINT to host:port" in refused.stderr


def test_run_train_reports_a_mistake_once(tiny: TinyRun) -> None:
    result = run_train("--config", str(tiny.toml), "--training.stepss=3", cwd=tiny.folder, NPROC="4")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: training.stepss: unknown key, did you mean training.steps? (command line)"
    ]


@pytest.mark.slow
def test_run_train_passes_on_the_exit_code_of_a_rank(tiny: TinyRun) -> None:
    for file in tiny.text.iterdir():
        file.write_text("short")  # found out only when the text is read
    result = run_train("--config", str(tiny.toml), cwd=tiny.folder, NPROC="2")
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "less than one sequence of 32" in errors[0]


@pytest.mark.slow
def test_a_run_that_stops_itself_reports_why_and_exits_with_3(tiny: TinyRun) -> None:
    """Weights that overflow: from the user's side, on two processes."""
    result = run_train("--config", str(tiny.toml), "--optimizer.lr=1e36", cwd=tiny.folder, NPROC="2")
    assert result.returncode == 3, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: step 2: loss or gradient is not finite (loss ")
    assert "types    weights float32, compute float32, reduction float32, moments float32" in result.stdout
    skipped = tiny.folder / "outputs" / "tiny" / "skipped.jsonl"
    assert f"stopped: the skipped steps are in {skipped}" in result.stdout
    [record] = [json.loads(line) for line in skipped.read_text().splitlines()]
    assert (record["step"], record["samples"]) == (2, [*range(8, 16)])
    assert [path.name for path in (tiny.folder / "outputs" / "tiny" / "checkpoints").glob("step*")] == ["step-00000001"]


def test_run_train_finds_bare_names(tmp_path: Path) -> None:
    result = run_train("--config", "debgu.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: no config file debgu.toml, did you mean debug?\n"
    assert "Train:" in run_train("--help", cwd=tmp_path).stdout
