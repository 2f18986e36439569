"""`titanlite checkpoint`: its output for checkpoints in each state, also while a run changes them; what it deletes."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.support.helpers import TinyRun, mentions
from tests.support.manifests import CONTENTS, save
from titanlite.checkpoint.initial import find_checkpoint
from titanlite.checkpoint.manifest import Manifest, checkpoints_of, committed_steps, folder_name
from titanlite.storage.storage import MANIFEST, LocalStorage, ObjectStorage, open_storage
from titanlite.tools import cli


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty place for the checkpoints of a run."""
    if request.param == "disk":
        yield str(tmp_path / "run" / "checkpoints")
    else:
        yield f"memory://{tmp_path.name}/run"
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{tmp_path.name}"):
            memory.rm(f"/{tmp_path.name}", recursive=True)


def change(place: str, name: str, content: bytes) -> None:
    """Change a file of a checkpoint, which titanlite never does."""
    with open_storage(place).create(name) as file:
        file.write(content)


def steps(place: str) -> list[int]:
    return committed_steps(open_storage(place).list())


class Command:
    """Runs `titanlite checkpoint`."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.capfd = capfd

    def __call__(self, *arguments: str, code: int = 0) -> list[str]:
        """Lines of standard output."""
        assert cli.run(["checkpoint", *arguments]) == code
        output = self.capfd.readouterr()
        self.errors = output.err.splitlines()
        assert code or not self.errors
        return output.out.splitlines()

    def table(self, path: str) -> list[list[str]]:
        """Rows of `list`, without where and the head."""
        _, head, *rows = self("list", path)
        assert head.split() == ["step", "age", "size", "state"]
        return [[cell.strip() for cell in re.split(r"\s{2,}", row.strip())] for row in rows]

    def refusal(self, *arguments: str) -> str:
        self(*arguments, code=2)
        [line] = self.errors
        return line


@pytest.fixture
def titanlite(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(capfd)


# list


def test_list_shows_each_state(titanlite: Command, tmp_path: Path) -> None:
    place = str(tmp_path / "run" / "checkpoints")
    for step in range(1, 8):
        save(place, step, age=200 * step)
    folders = {step: Path(place, folder_name(step)) for step in range(1, 8)}
    (folders[2] / ".metadata").write_bytes(b"6")
    (folders[3] / MANIFEST).write_bytes(b"{")
    (folders[4] / MANIFEST).unlink()
    open_storage(place).quarantine(folder_name(5), "damaged")
    open_storage(place).quarantine(folder_name(6), "superseded")
    folders[7].rename(Path(place, ".deleted-step-00000007-me"))
    save(place, 8, publish=False)
    Path(place, "notes").mkdir()
    (folders[1] / "loop").symlink_to("loop")
    Path(place, folder_name(9)).symlink_to(folder_name(9))
    listed = titanlite.table(str(tmp_path / "run"))
    *rows, damaged = zip(*(listed.pop(1) for _ in range(3)), strict=True)
    assert rows == [("2", "3", "4"), ("2.9 MiB",) * 3]
    assert listed == [
        ["1", "3 min", "2.9 MiB", "whole"],
        ["5", "2.9 MiB", "damaged: quarantined earlier"],
        ["6", "2.9 MiB", "superseded"],
        ["7", "2.9 MiB", "being deleted"],
        ["8", "2.9 MiB", "being written"],
    ]
    words = ([".metadata", 1, 2], ["manifest.json", "line 1 column 2"], ["manifest.json", "missing"])
    assert all(mentions(state, "damaged", *its) for state, its in zip(damaged, words, strict=True))
    assert titanlite.table(str(folders[2])) == [["2", "2.9 MiB", damaged[0]]]
    assert titanlite.table(str(folders[1]) + "/") == [["1", "3 min", "2.9 MiB", "whole"]]


def test_list_of_a_folder_of_runs(titanlite: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("outputs/b/checkpoints", "outputs/a/checkpoints", "outputs/group/c/elsewhere"):
        save(run, 1)
    Path("outputs/data_cache/step").mkdir(parents=True)
    lines = titanlite("list")
    assert [line for line in lines if "/" in line] == [
        "outputs/a/checkpoints", "outputs/b/checkpoints", "outputs/group/c/elsewhere",
    ]  # fmt: skip
    assert len(lines) == 9
    assert mentions(titanlite.refusal("show", "outputs"), "outputs", *(line for line in lines if "/" in line))


@pytest.mark.parametrize("what", ["list", "verify"])
def test_what_a_run_deletes_while_it_is_read_is_not_damaged(
    what: str, titanlite: Command, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(place, 1)
    save(place, 2)
    kind = type(open_storage(place))
    read = kind.read

    def lose_and_read(storage: Any, name: str, *args: Any) -> bytes:
        if name.startswith(folder_name(1)) and 1 in steps(place):
            open_storage(place, owner="me").delete(folder_name(1))
        return read(storage, name, *args)

    monkeypatch.setattr(kind, "read", lose_and_read)
    lines = titanlite(what, place)
    assert steps(place) == [2]
    assert [line.split() for line in lines[1:] if "step " not in line or what == "verify"] == (
        [["step", "2:", "whole,", "2", "files,", "2.9", "MiB"]]
        if what == "verify"
        else [["2", "3", "min", "2.9", "MiB", "whole"]]
    )


def test_half_deleted_is_neither_damaged_nor_marked(titanlite: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "memory://half/run"
    save(place, 1)
    read = ObjectStorage.read

    def lose_and_read(storage: ObjectStorage, name: str, *args: Any) -> bytes:
        if name.endswith(".distcp"):
            storage._remove(folder_name(1), [MANIFEST, "__0_0.distcp"])
        return read(storage, name, *args)

    try:
        monkeypatch.setattr(ObjectStorage, "read", lose_and_read)
        assert titanlite("verify", place)[1:] == ["step 1: being written"]
        assert sorted(open_storage(place).list()[folder_name(1)]) == [".metadata", ".owner-me"]
    finally:
        fsspec.filesystem("memory").rm("/half", recursive=True)


# verify


def test_verify_names_what_is_damaged(titanlite: Command, place: str) -> None:
    for step in (1, 2, 3, 4):
        save(place, step)
    flipped = f"{folder_name(2)}/__0_0.distcp"
    change(place, flipped, b"y" + CONTENTS["__0_0.distcp"][1:])
    change(place, f"{folder_name(3)}/.metadata", b"")
    change(place, f"{folder_name(4)}/{MANIFEST}", b"")
    assert [row[-1] for row in titanlite.table(place)][:2] == ["whole", "whole"], "sizes do not show it"
    out = titanlite("verify", place, code=2)
    assert [line.split(":")[1].strip().split(",")[0] for line in out[1:]] == ["whole", *["damaged"] * 3]
    url = open_storage(place).url
    names = ("step-00000002/__0_0.distcp", "step-00000003/.metadata", "step-00000004/manifest.json")
    assert [name for name, line in zip(names, titanlite.errors, strict=True) if f"{url}/{name}" not in line] == []


# prune


def test_prune_keeps_the_newest(titanlite: Command, place: str) -> None:
    for step in (1, 2, 3, 4, 5, 12):
        save(place, step)
    assert titanlite("prune", place, "--keep-latest-k", "2", "--keep-every=2", "--dry-run") == [
        "would delete step 1, 2.9 MiB", "would delete step 3, 2.9 MiB",
    ]  # fmt: skip
    assert steps(place) == [1, 2, 3, 4, 5, 12]
    assert titanlite("prune", place, "--keep-latest-k", "2", "--keep-every=2") == [
        "deleted step 1, 2.9 MiB", "deleted step 3, 2.9 MiB",
    ]  # fmt: skip
    assert sorted(open_storage(place).list()) == [folder_name(step) for step in (2, 4, 5, 12)]
    assert len(titanlite("prune", place, "--keep-latest-k=1")) == 3
    assert titanlite("prune", place, "--keep-latest-k=1") == []
    assert [line.split(":")[0] for line in titanlite("verify", place)[1:]] == ["step 12"]


def test_prune_leaves_what_another_run_has_saved(titanlite: Command, place: str) -> None:
    for step, run_id in {1: "me", 2: "other", 3: "me", 4: "other", 5: "me"}.items():
        save(place, step, run_id=run_id)
    printed = titanlite("prune", place, "--keep-latest-k=2")
    assert sorted(line.split()[:2] for line in printed) == [["deleted", "step"], ["step", "2"], ["step", "4"]]
    assert steps(place) == [2, 3, 4, 5]


def test_prune_refuses_if_the_newest_is_damaged(titanlite: Command, place: str) -> None:
    for step in (1, 2, 3):
        save(place, step)
    change(place, f"{folder_name(3)}/.metadata", b"")
    error = titanlite.refusal("prune", place, "--keep-latest-k=1")
    assert mentions(error, f"{open_storage(place).url}/step-00000003", ".metadata", "0 bytes", 2)
    assert steps(place) == [1, 2, 3]


def test_prune_leaves_what_is_quarantined(titanlite: Command, place: str) -> None:
    for step in (1, 2, 3, 9):
        save(place, step)
    save(place, 10, publish=False)
    storage = open_storage(place)
    storage.quarantine(folder_name(2), "damaged")
    storage.quarantine(folder_name(9), "superseded")
    assert titanlite("prune", place, "--keep-latest-k=1") == ["deleted step 1, 2.9 MiB"]
    assert steps(place) == [3]
    assert len(storage.list()) == 4, "what a run is writing stays, too"


# show


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of 3 steps, with checkpoints of step 2 and 3."""
    run = TinyRun(tmp_path_factory.mktemp("trained"))
    assert cli.run(["train", "--config", str(run.toml), "--training.steps=3", "--checkpoint.interval=2"]) == 0
    return run


@pytest.mark.long
def test_texts_of_others_are_shown_and_not_obeyed(titanlite: Command, trained: TinyRun) -> None:
    run, evil = trained.folder / "others", "\x1b]0;title\x07\x1b[2J"
    shutil.copytree(trained.folder / "outputs" / "tiny" / "checkpoints" / "step-00000003", run / "step-00000003")
    path = run / "step-00000003" / MANIFEST
    manifest = Manifest.from_json(path.read_bytes())
    path.write_bytes(replace(manifest, versions={evil: evil}, mesh={evil: 1}, settings={evil: evil}).to_json())
    lines = titanlite("show", str(run))
    assert all(line.isprintable() for line in lines)
    assert sum(line.count("\\x1b]0;title\\x07") for line in lines) == 4
    fields = json.loads(path.read_bytes())
    for change in (
        {"saved_at": 1e300},
        {"saved_at": "x"},
        {"saved_at": float("nan")},
        {"elapsed_seconds": []},
        {evil: 1},
    ):
        path.write_text(json.dumps({**fields, "crc32": None, **change}))
        error = titanlite.refusal("show", str(run))
        assert error.isprintable()
        assert mentions(error, MANIFEST)


@pytest.mark.long
def test_show(titanlite: Command, trained: TinyRun) -> None:
    run = trained.folder / "outputs" / "tiny"
    manifest = json.loads((run / "checkpoints" / "step-00000003" / MANIFEST).read_text())
    path, *lines = titanlite("show", str(run))
    assert path == f"{run}/checkpoints/step-00000003"
    values = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines if "  " in line.strip())
    assert (values["step"], values["samples"], values["run id"]) == ("3", "24", manifest["run_id"])
    assert values["saved at"].startswith(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["saved_at"])))
    assert values["mesh"] == "replicate 1 x shard 1"
    assert {name: values[name] for name in manifest["files"]} == {
        name: f"{file['size']:,} bytes" for name, file in manifest["files"].items()
    }
    assert "  model.args.dim = 42" in lines
    # Of each parameter: itself, its two moments and its number of steps.
    assert mentions(values["tensors"], 48, 12, "35,406 parameters")


def test_show_takes_the_newest_whole_one(titanlite: Command, trained: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(trained.folder / "outputs" / "tiny", run)
    newest = run / "checkpoints" / "step-00000003"
    (newest / ".metadata").write_bytes(b"")
    assert titanlite("show", str(run))[1] == "step      2"
    assert mentions(titanlite.refusal("show", str(newest)), newest, ".metadata", "0 bytes")
    older = run / "checkpoints" / "step-00000002" / ".metadata"
    older.write_bytes(b"x" * older.stat().st_size)
    assert mentions(titanlite.refusal("show", str(run)), older, "checksum")


# The command line


@pytest.mark.parametrize(
    "words",
    [
        "prune .", "prune . --keep-latest-k=0", "list", "show nothing/step-00000001", "list .", "verify .",
        "prune . --keep-latest-k=1", "verify memory://nowhere", "list foo://bucket",
    ],
)  # fmt: skip
def test_bad_input_is_one_line(words: str, titanlite: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert titanlite.refusal(*words.split()).startswith("error: ")


def test_a_disk_that_fails_is_no_mistake_of_the_user(
    titanlite: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error", "disk")

    monkeypatch.setattr(LocalStorage, "list", fail)
    assert titanlite("list", f"{tmp_path}/", code=2) == []  # nothing to look into
    (tmp_path / folder_name(1)).mkdir()
    titanlite("list", str(tmp_path), code=1)
    [error] = titanlite.errors
    assert mentions(error, "[Errno 5]", "'disk'")


# A run whose checkpoints are elsewhere


def test_the_config_of_a_run_says_where_its_checkpoints_are(titanlite: Command, tmp_path: Path, place: str) -> None:
    run = tmp_path / "run_elsewhere"
    run.mkdir()
    save(place, 3)
    save(place, 5)
    (run / "config.toml").write_text(f"[checkpoint]\nfolder = {json.dumps(place)}\n")
    assert [row[0] for row in titanlite.table(str(run))] == ["3", "5"]
    assert [line.split(":")[0] for line in titanlite("verify", str(run))[1:]] == ["step 3", "step 5"]
    assert find_checkpoint(str(run))[:2] == (open_storage(place).url, folder_name(5))
    assert mentions(titanlite.refusal("prune", str(run), "--keep-latest-k", "1"), place), "it deletes what is named"
    assert steps(place) == [3, 5]
    own = str(run / "checkpoints")  # copied here by hand; the place that is named is not there
    save(own, 4)
    (run / "config.toml").write_text(f'[checkpoint]\nfolder = "{tmp_path}/gone"\n')
    assert [row[0] for row in titanlite.table(str(run))] == ["4"]
    assert find_checkpoint(str(run))[:2] == (own, folder_name(4))
    for text in ("[checkpoint]\nfolder = 3\n", "checkpoint = 3\n", "[", "[checkpoint]\n"):
        (run / "config.toml").write_text(text)
        assert checkpoints_of(str(run)) == own
