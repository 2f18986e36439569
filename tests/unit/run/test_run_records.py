"""Records of a run never keep it from resuming; a run folder that cannot be made is one line."""

import json
import logging
import math
import multiprocessing
import os
import platform
import re
import resource
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import TinyRun, built, mentions, train_on_this_rank
from titanlite.checkpoint.manifest import folder_name
from titanlite.config.load import load
from titanlite.data.tokens import TokenStore
from titanlite.metrics.loggers import Loggers
from titanlite.run.records import RecordFile
from titanlite.run.run_folder import open_run_folder
from titanlite.runtime.console import LogFileHandler, hide_secrets
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.files import checked_name, read_small
from titanlite.schema import Metrics
from titanlite.tools import cli
from titanlite.train import finish
from titanlite.train import train as train_run

VALIDATION = "--lr_scheduler.warmup_steps=0 --validation.enable=true --validation.freq=1 --validation.path={}"
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda text: text[:30] + b"\xff\xfe\x00" + text[33:],
    "empty": lambda text: b"",
    "another JSON": lambda text: b"[1, 2]",
    "no id": lambda text: b'{"starts": []}',
    "an id that is a path": lambda text: json.dumps({**json.loads(text), "id": "../../victim"}).encode(),
    "an id that is no text": lambda text: json.dumps({**json.loads(text), "id": 7}).encode(),
    "no list of starts": lambda text: json.dumps({**json.loads(text), "starts": 3}).encode(),
    "deep": lambda text: b"[" * 100_000,
}


def train(tiny: TinyRun, *options: str) -> Path:
    """Train, and return the folder of the run, which is not locked any more."""
    run = train_on_this_rank(
        tiny.config("--checkpoint.interval=1", *VALIDATION.format(tiny.text).split(), *options), 0, 1
    )
    assert run.folder.lock is not None
    run.folder.lock.close()
    return run.folder.path


def plant(path: Path, kind: str) -> None:
    """Put something in the place of a small file that has no end, or is no file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**33)  # a file with a hole takes no disk


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "large"])
def test_what_is_no_small_file_is_read_nowhere(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "index.json"
    plant(path, kind)
    for error in (OSError, ValueError):  # of what reads, and of what parses
        with pytest.raises(error, match=re.escape(str(path))):
            read_small(path)
    with pytest.raises(UserError, match=r"data\.path: .*index\.json") as refusal:
        TokenStore(tmp_path)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load(path)
    records = tmp_path / "metrics.jsonl"
    plant(records, kind)
    file = RecordFile(records, 3)
    assert str(records) in caplog.records[-1].message
    if kind in ("pipe", "folder"):
        file.write({"step": 4})
        assert records.is_file()
        assert json.loads(records.read_bytes())["step"] == 4
        assert os.path.lexists(tmp_path / "metrics.jsonl.damaged-1")


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "large"])
def test_a_run_whose_run_json_is_no_small_file_resumes(kind: str, tiny: TinyRun) -> None:
    config, record = tiny.config(), tiny.folder / "outputs" / "tiny" / "run.json"
    record.parent.mkdir(parents=True)
    plant(record, kind)
    run = open_run_folder(config.job, config.data, rank=0, newest_saved=lambda _: (1, "abc"))
    assert run.lock is not None
    run.lock.close()
    assert run.run_id == "abc"
    assert json.loads(record.read_bytes())["id"] == "abc"
    assert os.path.lexists(record.with_name("run.json.damaged-1"))


@pytest.mark.usefixtures("single_process_group")
def test_damaged_run_json_is_renamed_and_the_run_keeps_its_id(tiny: TinyRun, warnings: Callable[[], list[str]]) -> None:
    """The id is that of the newest checkpoint; a new one without checkpoints."""
    config, folder = tiny.config(), tiny.folder / "outputs" / "tiny"
    record = folder / "run.json"

    def opened(**options: Any) -> str:
        run = open_run_folder(config.job, config.data, rank=0, **options)
        assert run.lock is not None
        run.lock.close()
        return run.run_id

    run_id = opened()
    for number, (name, damage) in enumerate(DAMAGE.items(), 1):
        damaged = damage(record.read_bytes())
        record.write_bytes(damaged)
        assert opened(newest_saved=lambda run: (1, run_id if run == folder else None)) == run_id, name
        assert (folder / f"run.json.damaged-{number}").read_bytes() == damaged
        run = json.loads(record.read_bytes())
        assert (run["id"], len(run["starts"])) == (run_id, 1)
        assert mentions(warnings()[-1], record, f"run.json.damaged-{number}", run_id)
    record.write_text('{"id": ""}')
    new = opened()
    assert (len(new), new == run_id) == (32, False)


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_run_with_damaged_records_resumes_and_deletes_nothing_outside(
    tiny: TinyRun, warnings: Callable[[], list[str]]
) -> None:
    """An id is part of the names of folders that a start deletes. Damaged lines move to a file of their own."""
    folder = train(tiny, "--training.steps=2")
    records = [folder / f"{name}.jsonl" for name in ("metrics", "checkpoints", "validation")]
    good = [record.read_bytes().splitlines(keepends=True) for record in records]
    bad = [b"\xff\x00garbage\n", b"[1, 2]\n", b'{"loss": 1.0}\n', b'{"step": "2"}\n', b"null\n", b'{"step": 2, "lo']
    for record, right in zip(records, good, strict=True):
        record.write_bytes(b"".join([bad[0], *right, *bad[1:]]))
    victim = tiny.folder / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    run = json.loads((folder / "run.json").read_bytes())
    (folder / "checkpoints" / ".staging-step-00000000-x").mkdir()
    (folder / "run.json").write_text(json.dumps(run | {"id": "x/../../../../victim"}))

    # The URL is one that a run with a checkpoint does not open.
    train(tiny, "--training.steps=3", "--checkpoint.initial_load_path=s3://me:hunter2@bucket/x?token=hunter2")
    assert (victim / "file").read_text() == "precious"
    assert json.loads((folder / "run.json").read_bytes())["id"] == run["id"], "of the newest manifest"
    saved = [name for name in os.listdir(folder / "checkpoints") if name.startswith("step")]
    assert sorted(saved) == [folder_name(step) for step in (1, 2, 3)]
    for record, right in zip(records, good, strict=True):
        assert (folder / f"{record.name}.damaged-1").read_bytes() == b"".join(bad) + b"\n"
        lines = record.read_bytes().splitlines(keepends=True)
        assert lines[: len(right)] == right
        assert [json.loads(line)["step"] for line in lines[len(right) :]] == [3]
        assert [warning for warning in warnings() if mentions(warning, record, 6, f"{record.name}.damaged-1")]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert "s3://***@bucket/x?token=***" in (folder / "config.toml").read_text()
    assert [path for path in files if b"hunter2" in path.read_bytes()] == [], "no file of a run keeps a key of a URL"
    assert [(folder / name).stat().st_mode & 0o777 for name in ("config.toml", "run.json")] == [0o600] * 2


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", "a\n", "a b", "a..b", "\u0661", 7, None, b"a"])
def test_names_that_may_not_become_paths(name: object) -> None:
    with pytest.raises(ValueError):
        checked_name(name)
    assert checked_name("__0_0.distcp") == "__0_0.distcp"


# Disks that are full


def test_records_wait_for_room_on_the_disk(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = RecordFile(path, None, clock=lambda: 7.0)
    file.write({"step": 1})
    file.write({"step": 2, "loss": math.nan})
    assert mentions("\n".join(warnings()), path, "No space left on device")
    path.unlink()
    file.write({"step": 3})
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [
        {"schema": 2, **record, "time": 7.0} for record in ({"step": 1}, {"step": 2, "loss": None}, {"step": 3})
    ]  # fmt: skip
    [_, again] = warnings()
    assert mentions(again, path)


NAN_AT_STEP_2 = """
from titanlite.loss import TokenLoss, token_loss
calls = []

def loss(*arguments, **options):
    calls.append(None)
    found = token_loss(*arguments, **options)
    return TokenLoss(found.total, found.cross_entropy * (float("nan") if len(calls) == 2 else 1))
"""


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_full_disk_under_records_stops_neither_training_nor_checkpoints(
    tiny: TinyRun, warnings: Callable[[], list[str]]
) -> None:
    (tiny.folder / "odd.py").write_text(NAN_AT_STEP_2)
    options = [f"--training.loss={tiny.folder / 'odd.py'}:loss", "--guard.nonfinite=skip", "--training.steps=3"]
    config = tiny.config("--checkpoint.interval=1", *options, *VALIDATION.format(tiny.text).split())
    run = built(0, 1, config)
    names = ("metrics.jsonl", "checkpoints.jsonl", "validation.jsonl", "skipped.jsonl")
    for name in names:
        (run.folder.path / name).symlink_to("/dev/full")
    train_run(run)
    finish(run)
    saved = [name for name in os.listdir(run.folder.checkpoints) if name.startswith("step")]
    assert sorted(saved) == [folder_name(step) for step in (1, 2, 3)]
    full = [text for text in warnings() if "No space left on device" in text]
    assert sorted(text.partition(" ")[0] for text in full) == sorted(str(run.folder.path / name) for name in names)


def test_a_run_whose_folder_is_away_ends_at_the_next_record(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "run.json").touch()
    file = RecordFile(folder / "metrics.jsonl", 0)
    file.write({"step": 1})
    (folder / "metrics.jsonl").unlink()  # somebody tidies up: it is begun anew
    file.write({"step": 2})
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [2]
    folder.rename(tmp_path / "renamed")
    (folder / "checkpoints").mkdir(parents=True)  # by a save
    with pytest.raises(UserError, match=str(folder)):
        file.write({"step": 3})
    assert os.listdir(folder) == ["checkpoints"]


def log_with_little_room(folder: Path, standard_error: Any) -> None:
    """Log more than a file may hold. The limit ends with this process."""
    os.dup2(standard_error.fileno(), 2)
    logging.basicConfig(format="%(message)s", force=True)
    loggers = Loggers(Metrics().loggers, folder, step=0)
    sys.dont_write_bytecode = True  # it would be cut, too, and TensorBoard broken from then on
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    for step in range(1, 101):
        loggers.log({"step": step, "loss": 1.0, "slowest_host": "a"})
    loggers.close()


@pytest.mark.long
@pytest.mark.skipif(sys.gettrace() is not None, reason="coverage would have no room for its file either")
def test_tensorboard_without_room_is_put_aside_with_one_warning(tmp_path: Path) -> None:
    """A limit of the size of files stands for a full disk. The thread of the writer ends with an error."""
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    (tmp_path / "config.toml").write_text("[training]\nsteps = 6\n")
    process = context.Process(target=log_with_little_room, args=(tmp_path, writer))
    process.start()
    writer.close()
    with os.fdopen(os.dup(reader.fileno())) as stream:
        printed = stream.read()
    process.join(300)
    assert process.exitcode == 0
    assert "File too large" in printed
    assert printed.count("tensorboard failed") == 1
    files = [*(tmp_path / "tensorboard").iterdir()]
    assert {file.stat().st_size for file in files} == {300}
    assert len(files) <= 3, "a new one at each attempt"


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    handler = LogFileHandler(tmp_path / "rank-0.log")
    for text in ("one", "two"):
        handler.handle(logging.LogRecord("x", logging.INFO, "", 0, text, (), None))
    [line] = capfd.readouterr().err.splitlines()
    assert mentions(line, f"{tmp_path}/rank-0.log", "[Errno 28]")


def test_a_checkpoint_folder_that_cannot_be_written_is_found_by_the_check(
    tiny: TinyRun, refused: Callable[..., str]
) -> None:
    """/sys stands for a read-only file system, and refuses root, too."""
    folder = tiny.folder / "outputs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "checkpoints").symlink_to("/sys/kernel")
    for option in ("--job.name=tiny", "--checkpoint.folder=/sys/kernel"):
        line = refused("check", f"--config={tiny.toml}", option)
        assert line.startswith("error: checkpoint.folder: ")
        assert mentions(line, "/sys/kernel") or mentions(line, "checkpoints")


# Folders that cannot be made


@pytest.mark.usefixtures("single_process_group")
def test_what_open_run_folder_reports(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the config comes first; these are mistakes that it cannot see, or on another machine."""
    (tiny.folder / "file").write_text("")
    (tiny.folder / "outputs").mkdir()
    (tiny.folder / "outputs" / "taken").write_text("")
    config = tiny.config()
    for key, value in (
        ("dump_folder", f"{tiny.folder}/file/x"),
        ("name", "taken"),
        ("dump_folder", "/sys/titanlite"),
    ):
        with pytest.raises(UserError, match=r"^job\.dump_folder, job\.name: "):
            open_run_folder(config.job.model_copy(update={key: value}), config.data, rank=0)

    def is_read_only(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", is_read_only)
    with pytest.raises(UserError, match=r"tiny: Read-only file system"):
        open_run_folder(tiny.config().job, tiny.config().data, rank=0)


LOSS = """
def loss(*args, **options):
    raise ValueError("planted\\nin two lines")
"""


@pytest.mark.long
@pytest.mark.usefixtures("own_process_group")
def test_an_exception_in_training_is_a_few_lines_and_a_traceback_in_the_log(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    (tiny.folder / "failing_loss.py").write_text(LOSS)
    assert cli.run(["train", str(tiny.toml), f"--training.loss={tiny.folder / 'failing_loss.py'}:loss"]) == 1
    lines = capfd.readouterr().err.splitlines()
    log = tiny.folder / "outputs" / "tiny" / "logs" / "rank-0.log"
    assert lines[0].startswith("error: ")
    assert mentions(lines[0], "rank 0", platform.node(), "step 1", "forward", "ValueError: planted")
    assert f'  File "{tiny.folder / "failing_loss.py"}", line 3, in loss' in lines
    assert mentions(lines[-1], log)
    assert len(lines) <= 12
    assert "Traceback (most recent call last)" in log.read_text()
    assert "in two lines" in log.read_text()


def test_secrets_of_urls_are_hidden() -> None:
    for url, hidden in {
        "s3://me:secret@bucket/run": "s3://***@bucket/run",
        "https://h/x?X-Amz-Signature=ab12&part=3": "https://h/x?X-Amz-Signature=***&part=3",
        "https://h/x?part=3&api_key=k": "https://h/x?part=3&api_key=***",
        "s3://bucket/run": "s3://bucket/run",
        "me@example.org": "me@example.org",
    }.items():
        assert hide_secrets(f'path = "{url}"') == f'path = "{hidden}"'


@pytest.mark.long
@pytest.mark.parametrize("kind", ["of titanlite", "own", "a folder of transformers"])
def test_the_commands_of_the_last_lines_work(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those on a checkpoint whose config names code or a folder need the user's word for it."""
    tiny = TinyRun(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from titanlite.models.llama3 import Llama3\n\nclass Mine(Llama3):\n    pass\n")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 384, **sizes}))
    words = {"own": ["--model.file=own.py"], "a folder of transformers": ["--model.name=transformers"]}.get(kind, [])
    if kind.startswith("a folder"):
        tiny.toml.write_text(tiny.toml.read_text().replace("[model.args]", "[model]\npath = 'hf'\n[old]"))
        lines = tiny.toml.read_text().split("[old]")
        tiny.toml.write_text(lines[0] + lines[1][lines[1].index("[training]") :])
    assert cli.run(["train", str(tiny.toml), "--training.steps=2", "--lr_scheduler.warmup_steps=1", *words]) == 0
    out = "".join(capfd.readouterr())
    done = []
    for line in out.partition("What next?")[2].splitlines():
        if (words := line.split())[:1] in (["sample"], ["continue"]):
            command = line.rpartition("titanlite ")[2]
            assert cli.run(shlex.split(command)) == 0, command
            done.append(words[0])
    assert done == ["sample", "continue"]
