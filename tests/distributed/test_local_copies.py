"""Local copies: what a run resumes from after a failure, and what never counts. Each half of the ranks is a machine."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import matrix
from tests.matrix import SPARSE
from tests.support.helpers import (
    LONGEST,
    TinyRun,
    mentions,
    one_process,
    run_in_turn,
    titanlite,
    train_on_this_rank,
    wait_until,
)
from tests.support.layouts import degrees, whole
from tests.support.whole_runs import assert_equal
from titanlite.checkpoint.local import LocalCopies
from titanlite.checkpoint.manifest import Manifest, folder_name
from titanlite.checks.memory import check_model_memory, copies_in_memory
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.models.base import build_on_meta
from titanlite.models.registry import resolve_model
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.files import Room
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config
from titanlite.state import flat
from titanlite.storage.storage import LocalStorage
from titanlite.train import Run

INTERVAL, FAILS_AT, STEPS = 3, 8, 11
NEWEST, BEFORE, REFUSED = 6, 3, -1
"""Steps of the copies that are left when a run fails after step 8; for a start that is refused."""
LOCAL = [f"--checkpoint.local_interval={INTERVAL}", "--checkpoint.local_folder=~/copies", f"--training.steps={STEPS}"]


class Failed(Exception):
    """The failure of a rank, which ends all."""


def copies_of(home: Path) -> Path:
    """Return the folder of the only run that has copies on a machine."""
    [run] = (home / "copies").iterdir()
    return run


def shard(home: Path, rank: int, step: int = NEWEST) -> Path:
    """Return the file that a rank has written, on a machine."""
    return copies_of(home) / folder_name(step) / f"__{rank}_0.distcp"


SAVE = LocalCopies.save


def without_skipping(self: LocalCopies, *args: Any, **options: Any) -> None:
    """Wait for the copy before, which a busy machine may still be making."""
    SAVE(self, *args, **options | {"waits": True})


def train_until_failure(
    config: Config, rank: int, world_size: int, home: Path, fails_at: int = FAILS_AT, newest: int = NEWEST
) -> None:
    """Train until step 8 is done and the copy of step 6 is whole, and fail."""
    patch = pytest.MonkeyPatch()
    end_step = MetricsRecorder.end_step

    def wait_for(path: Path) -> None:
        wait_until((path / "manifest.json").exists, LONGEST)

    def fail(self: Any, step: int, *args: Any, **options: Any) -> None:
        end_step(self, step, *args, **options)
        if step == config.checkpoint.interval + 1:
            wait_for(Path(config.job.dump_folder, str(config.job.name), "checkpoints", folder_name(step - 1)))
        if step == fails_at:
            copies = home / "copies"  # a busy machine may still be making it
            wait_until(lambda: [*copies.glob(f"*/{folder_name(newest)}/manifest.json")], LONGEST)
            raise Failed

    patch.setattr(MetricsRecorder, "end_step", fail)
    patch.setattr(LocalCopies, "save", without_skipping)
    try:
        with pytest.raises(Failed):
            train_on_this_rank(config, rank, world_size)
    finally:
        patch.undo()
    torch.distributed.barrier()


Spoil = Callable[[list[Path], Path], Config | None]
"""Spoils what is left, given the folders of the machines and that of the run. It may return another config."""


Resumed = tuple[int, dict[str, torch.Tensor], list[bool]]
"""Where a run resumed, its values at the end, and which machines have copies."""


def fail_and_resume(
    rank: int, world_size: int, given: tuple[Config, list[Path], Sequence[Spoil]]
) -> dict[Spoil, Resumed]:
    """Fail; then, from what is left, spoil and train to the end, with each of several ways to spoil it."""
    config, homes, spoils = given
    home = homes[rank * len(homes) // world_size]
    os.environ["HOME"] = str(home)
    torch.compiler.set_stance("force_eager")  # torchao's optimizers compile their update
    train_until_failure(config, rank, world_size, home)
    run_folder = Path(config.job.dump_folder, str(config.job.name))
    left = run_folder.with_name(f"{run_folder.name}-left")
    found = {}
    for number, spoil in enumerate(spoils):
        if rank == 0:
            for index, folder in enumerate((run_folder, *homes)):
                if number:
                    shutil.rmtree(folder)
                    shutil.copytree(left / str(index), folder)
                elif len(spoils) > 1:
                    shutil.copytree(folder, left / str(index))
            spoil(homes, run_folder)
        torch.distributed.barrier()
        found[spoil] = resume_alone(config, rank, world_size, homes)
    return found


def resume_alone(config: Config, rank: int, world_size: int, homes: list[Path]) -> Resumed:
    try:
        run = train_on_this_rank(config, rank, world_size)
    except UserError:
        return REFUSED, {}, [any(home.glob("copies/*/step-*")) for home in homes]
    torch.distributed.barrier()  # the copies are deleted
    return run.position.progress.step, state_of(run), [any((home / "copies").iterdir()) for home in homes]


def state_of(run: Run) -> dict[str, torch.Tensor]:
    """Return the weights, buffers, moments and averages at the end."""
    return {name: whole(tensor) for name, tensor in flat(run.checkpoints.state.tensors()).items()}


def undisturbed(rank: int, world_size: int, config: Config) -> dict[str, torch.Tensor]:
    torch.compiler.set_stance("force_eager")
    return state_of(train_on_this_rank(config, rank, world_size))


def machines(tiny: TinyRun, name: str, count: int = 2) -> list[Path]:
    homes = [tiny.folder / name / f"machine-{number}" for number in range(count)]
    for home in homes:
        home.mkdir(parents=True)
    return homes


# What is spoiled, and the step at which the run resumes.


def nothing(homes: list[Path], run: Path) -> None: ...


def empty_machine(homes: list[Path], run: Path) -> None:
    shutil.rmtree(homes[1] / "copies")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def one_flipped(homes: list[Path], run: Path) -> None:
    flip(shard(homes[0], 0))


def one_cut(homes: list[Path], run: Path) -> None:
    os.truncate(shard(homes[1], 1), 1000)


def both_flipped(homes: list[Path], run: Path) -> None:
    flip(shard(homes[0], 1))
    flip(shard(homes[1], 1))


def both_cut_and_the_one_before(homes: list[Path], run: Path) -> None:
    for home in homes:
        for step in (NEWEST, BEFORE):
            os.truncate(shard(home, 1, step), 1000)


def manifests_flipped(homes: list[Path], run: Path) -> None:
    for home in homes:
        flip(copies_of(home) / folder_name(NEWEST) / "manifest.json")


def of_another_run(homes: list[Path], run: Path) -> None:
    """The run begins anew, with another id: its folder is gone."""
    shutil.rmtree(run)


def checkpoints_are_gone(homes: list[Path], run: Path) -> None:
    """Step 4 was saved, and its folder is not there: perhaps it is not mounted."""
    shutil.rmtree(run / "checkpoints" / folder_name(4))


def older_than_a_later_start(homes: list[Path], run: Path) -> None:
    """The run was started without these machines, from its beginning, and did steps that count."""
    record = json.loads((run / "run.json").read_text())
    record["starts"].append(record["starts"][-1] | {"step": 0})
    (run / "run.json").write_text(json.dumps(record))


def a_copied_run(homes: list[Path], run: Path) -> None:
    """Copies are those of the run at their path. A copied folder has the same id."""
    for home in homes:
        copies = copies_of(home)
        copies.rename(copies.with_name(f"{copies.name.partition('-')[0]}-00000000"))


def two_copies_of_one_step(homes: list[Path], run: Path) -> None:
    """A machine comes back with a copy of another time. It does not count, and harms the others in nothing."""
    folder = copies_of(homes[1]) / folder_name(NEWEST)
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    files = {name: replace(record, crc32="00000000") for name, record in manifest.files.items()}
    (folder / "manifest.json").write_bytes(replace(manifest, files=files, saved_at=manifest.saved_at + 1).to_json())


def another_checkpoint_of_that_step(homes: list[Path], run: Path) -> None:
    path = run / "checkpoints" / folder_name(4) / "manifest.json"
    manifest = Manifest.from_json(path.read_bytes())
    path.write_bytes(replace(manifest, saved_at=manifest.saved_at + 1).to_json())


def damaged_base(homes: list[Path], run: Path) -> None:
    """A damaged checkpoint is no reason to lose the copies that followed it."""
    flip(run / "checkpoints" / folder_name(4) / "manifest.json")


SAVES = "--checkpoint.interval=4"
CASES: dict[Spoil, tuple[int, list[str]]] = {
    nothing: (NEWEST, degrees(1, 2)),
    empty_machine: (NEWEST, degrees(1, 2)),
    one_flipped: (NEWEST, degrees(1, 2)),
    one_cut: (NEWEST, degrees(2, 1)),
    both_flipped: (BEFORE, degrees(2, 1)),
    both_cut_and_the_one_before: (0, degrees(1, 2)),
    manifests_flipped: (BEFORE, degrees(1, 2)),
    of_another_run: (0, degrees(1, 2)),
    checkpoints_are_gone: (REFUSED, [*degrees(1, 2), SAVES]),
    older_than_a_later_start: (0, degrees(1, 2)),
    a_copied_run: (0, degrees(1, 2)),
    two_copies_of_one_step: (NEWEST, degrees(1, 2)),
    another_checkpoint_of_that_step: (4, [*degrees(2, 1), SAVES]),
    damaged_base: (NEWEST, [*degrees(1, 2), SAVES]),
}
"""{what is spoiled: (step at which the run resumes, options)}"""


@pytest.mark.long
def test_the_newest_whole_copy_counts_and_gives_the_same_bits(tiny: TinyRun) -> None:
    """With a whole copy of each file on either of two machines, at most 3 steps are done again."""
    by_options: dict[tuple[str, ...], list[Spoil]] = {}
    for spoil, (_, options) in CASES.items():
        by_options.setdefault(tuple(options), []).append(spoil)
    given = []
    for number, (options, spoils) in enumerate(by_options.items()):
        config = tiny.config(*LOCAL, *options, f"--job.name=failing-{number}", world_size=2)
        given.append((config, machines(tiny, f"machines-{number}"), spoils))
    layouts = [degrees(1, 2), degrees(2, 1)]
    steps = f"--training.steps={STEPS}"
    names = [f"--job.name=whole-{number}" for number in range(2)]
    configs = [tiny.config(steps, *layout, name, world_size=2) for layout, name in zip(layouts, names, strict=True)]
    ends = run_in_turn(undisturbed, 2, configs)
    found = run_in_turn(fail_and_resume, 2, given)
    for spoil, (step, options) in CASES.items():
        [ranks] = [[of_rank[spoil] for of_rank in ranks] for ranks in found if spoil in ranks[0]]
        assert [resumed for resumed, _, _ in ranks] == [step] * 2, spoil.__name__
        expected = ends[[options[:2] == layout[:2] for layout in layouts].index(True)]
        for (resumed, values, left), of_rank in zip(ranks, expected, strict=True):
            assert_equal(values, of_rank if resumed != REFUSED else {})
            kept = spoil in (of_another_run, a_copied_run, checkpoints_are_gone)
            assert left == [kept] * 2, "a checkpoint has replaced the copies"


TWO_HEADS = [f"--model.args.{size}" for size in ("vocab_size=260", "n_heads=2", "n_kv_heads=2", "dim=32")]
QUANTIZED = ["--optimizer.name=torchao.optim.AdamW8bit", *TWO_HEADS, "--model.args.dim=256"]
ROWS = {
    2: {"quantized": [*degrees(1, 2), *QUANTIZED]},
    4: {
        "replicas": [*degrees(2, 2), "--average.decay=0.9"],
        "tensor": [*degrees(1, 1, tensor=2, pipeline=2), *TWO_HEADS, "--training.local_batch_size=2",
                   "--model.args.n_layers=2"],
        "experts": [*degrees(1, 4, expert=2), SPARSE],
    },
}  # fmt: skip
"""Options of runs by the number of ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("size", ROWS)
def test_each_kind_of_state_comes_back_from_a_neighbour(tiny: TinyRun, size: int) -> None:
    """The ranks are on two machines, one of which is replaced by an empty one."""
    wholes, failing = (
        [
            tiny.config(*LOCAL, *words, f"--job.name={kind}-{name}", world_size=size)
            for name, words in ROWS[size].items()
        ]
        for kind in ("whole", "failing")
    )
    ends = run_in_turn(undisturbed, size, wholes)
    given = [(config, machines(tiny, str(config.job.name)), [empty_machine]) for config in failing]
    for name, end, ranks in zip(ROWS[size], ends, run_in_turn(fail_and_resume, size, given), strict=True):
        for of_rank, expected in zip(ranks, end, strict=True):
            resumed, values, _ = of_rank[empty_machine]
            assert resumed == NEWEST, name
            assert_equal(values, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS := 8))
def test_every_row_of_the_matrix_comes_back_from_a_neighbour(tiny: TinyRun, part: int) -> None:
    """On the first of its layouts, half of whose ranks lose their machine; states on disk are refused."""
    tiny, by_size = tiny.with_short_documents(), dict[int, dict[str, list[str]]]()
    for number, (name, row) in enumerate(matrix.ROWS.items()):
        layout = row.layouts.split(",")[0]
        words = [*matrix.words_of(row, layout), *matrix.on_layout(layout), *LOCAL]
        if any(word.endswith("=disk") for word in words):
            with pytest.raises(ConfigError) as refused:
                tiny.config(*words, world_size=matrix.size_of(layout))
            assert [problem.key for problem in refused.value.problems] == ["checkpoint.local_interval"]
        elif number % PARTS == part:
            by_size.setdefault(matrix.size_of(layout), {})[name] = matrix.in_folder(tiny, words)
    wrong: dict[str, Any] = {}
    for size, rows in by_size.items():
        titles = {name: str(number) for number, name in enumerate(rows)}
        whole, failing = (
            [
                tiny.config(*words, f"--job.name={kind}-{size}-{titles[name]}", world_size=size)
                for name, words in rows.items()
            ]
            for kind in ("whole", "failing")
        )
        ends = run_in_turn(undisturbed, size, whole)
        homes = [machines(tiny, f"machines-{size}-{title}") for title in titles.values()]
        cases = [(config, places, [empty_machine]) for config, places in zip(failing, homes, strict=True)]
        for name, found, end in zip(rows, run_in_turn(fail_and_resume, size, cases), ends, strict=True):
            for of_rank, expected in zip(found, end, strict=True):
                resumed, values, _ = of_rank[empty_machine]
                same = values.keys() == expected.keys() and all(
                    torch.equal(values[key], expected[key]) for key in values
                )
                if (resumed, same) != (NEWEST, True):
                    wrong[name] = resumed, same
    assert wrong == {}


def resume(rank: int, world_size: int, given: tuple[Config, list[Path], Config]) -> Any:
    """Fail with one config, and resume with another. Returns where it resumed, or its error."""
    config, homes, other = given
    home = homes[rank * len(homes) // world_size]
    os.environ["HOME"] = str(home)
    train_until_failure(config, rank, world_size, home)
    try:
        run = train_on_this_rank(other, rank, world_size)
    except UserError as error:
        return str(error)
    return run.position.progress.step


def test_another_layout_loads_and_other_settings_do_not(tiny: TinyRun) -> None:
    """Any layout loads where all files are within reach; a copy of other settings or of no branch never counts."""
    saves = "--checkpoint.interval=4"

    def case(name: str, *other: str, first: list[str] | None = None) -> tuple[Config, list[Path], Config]:
        options = [*LOCAL, f"--job.name={name}", saves]
        return (
            tiny.config(*options, *(first or degrees(1, 2)), world_size=2),
            machines(tiny, name, 1),
            tiny.config(*options, *other, world_size=2),
        )

    batch = "--training.global_batch_size=4"
    found = run_in_turn(
        resume,
        2,
        [
            case("layout", *degrees(2, 1)),
            case("settings", *degrees(1, 2), batch),
            case("allowed", *degrees(1, 2), batch, '--checkpoint.allow_changes=["training.global_batch_size"]'),
            case("branch", *degrees(1, 2), "--checkpoint.load_step=4"),
        ],
    )
    layout, settings, allowed, branch = found
    assert layout == [NEWEST] * 2
    assert mentions(settings[0], "training.global_batch_size", 8, 4)
    assert allowed == [NEWEST] * 2
    assert branch == [4] * 2, "the copy of step 6 is of the branch that the user leaves"


def without_room(rank: int, world_size: int, given: tuple[Config, list[Path]]) -> int:
    """Fail, replace a machine by one without room for what it lacks, and resume. Returns the step."""
    config, homes = given
    os.environ["HOME"] = str(homes[rank])
    train_until_failure(config, rank, world_size, homes[rank])
    if rank == 0:
        empty_machine(homes, Path())
    torch.distributed.barrier()

    def no_room(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        return train_on_this_rank(config, rank, world_size).position.progress.step


def test_a_copy_that_cannot_be_fetched_leaves_the_run_its_checkpoint(tiny: TinyRun) -> None:
    config = tiny.config(*LOCAL, *degrees(1, 2), "--checkpoint.interval=4", "--checkpoint.local_copies=2", world_size=2)
    assert run_in_turn(without_room, 2, [(config, machines(tiny, "room"))]) == [[4, 4]]


def test_a_checkpoint_that_was_due_before_a_copy_is_saved(tiny: TinyRun) -> None:
    """A save that takes minutes may be killed, and the copy of its step is whole."""
    home = tiny.folder / "home"
    with one_process(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        train_until_failure(tiny.config(*LOCAL), 0, 1, home)
        train_on_this_rank(tiny.config(*LOCAL, "--checkpoint.interval=5"), 0, 1)
    saved = [path.name for path in (tiny.folder / "outputs" / "tiny" / "checkpoints").iterdir()]
    assert sorted(saved) == [folder_name(step) for step in (NEWEST, 10, STEPS)]


def test_copies_of_another_history_neither_count_nor_push_out(tiny: TinyRun) -> None:
    """There is no checkpoint: with another seed the run is refused, and a start without these copies leaves them."""
    home, record = tiny.folder / "home", tiny.folder / "outputs" / "tiny" / "run.json"
    with one_process(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        train_until_failure(tiny.config(*LOCAL), 0, 1, home)
        lines = ""
        try:
            train_on_this_rank(tiny.config(*LOCAL, "--debug.seed=1"), 0, 1)
        except UserError as error:
            lines = str(error)
        assert mentions(lines, str(copies_of(home) / folder_name(NEWEST)), "debug.seed", "checkpoint.allow_changes")
        assert re.search(r"debug\.seed\b.*\b0\b.*\b1\b", lines)
        older_than_a_later_start([home], record.parent)
        options = [*LOCAL, "--checkpoint.local_interval=2"]
        train_until_failure(tiny.config(*options), 0, 1, home, fails_at=5, newest=4)
        assert sorted(path.name for path in copies_of(home).glob("step-*")) == [folder_name(2), folder_name(4)]
        assert train_on_this_rank(tiny.config(*options), 0, 1).position.progress.step == 4


@pytest.mark.parametrize("copies", [0.5, 2.5, 4])
def test_a_copy_is_made_where_there_is_room_for_it_and_others(
    tiny: TinyRun, copies: float, warnings: Callable[[], list[str]]
) -> None:
    """Where two fit, the older one makes room for the next. Where none fits, none is written, with one warning."""
    home, config = tiny.folder / "home", tiny.config(*LOCAL, "--checkpoint.local_interval=2")
    reserved: list[int] = []
    reserve = os.posix_fallocate

    def room(folder: Path) -> Room:
        taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return Room(round(copies * size / 0.9) - taken, round(copies * size / 0.9))

    with one_process(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setattr(
            os, "posix_fallocate", lambda file, start, size: (reserved.append(size), reserve(file, start, size))
        )
        train_until_failure(tiny.config(*LOCAL, "--job.name=measured"), 0, 1, home)
        size = (copies_of(home) / folder_name(NEWEST) / "__0_0.distcp").stat().st_size
        assert reserved == [size] * len(reserved) != []
        shutil.rmtree(home)
        patch.setattr("titanlite.checkpoint.local.room_in", room)
        patch.setattr(LocalCopies, "close", lambda self, saved: (self._end_save(), self._saver.close()))
        patch.setattr(LocalCopies, "save", without_skipping)
        train_on_this_rank(config, 0, 1)
    left = [int(path.parent.name[5:]) for path in sorted(home.rglob("step-*/manifest.json"))]
    assert left == ([] if copies < 1 else [8, 10])
    assert len(warnings()) == (copies == 0.5)
    assert all(mentions(line, str(copies_of(home)), "MiB") for line in warnings())


def crowded(rank: int, world_size: int, given: tuple[Config, list[Path]]) -> list[str]:
    """Train where one machine has no room. Returns the files of copies that were written on the way."""
    config, homes = given
    os.environ["HOME"] = str(homes[rank])
    written: list[str] = []
    create = LocalStorage.create

    def recorded(self: LocalStorage, name: str, size: int = 0) -> Any:
        written.extend([name] if "/copies/" in str(self.root) else [])
        return create(self, name, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "create", recorded)
        patch.setattr("titanlite.checkpoint.local.room_in", lambda folder: Room(2**30 * (1 - rank), 2**30))
        train_on_this_rank(config, rank, world_size)
    return written


def full(rank: int, world_size: int, given: tuple[Config, Path]) -> int:
    """Train where the folder of copies is full from its second copy on."""
    config, home = given
    os.environ["HOME"] = str(home)
    patch, create = pytest.MonkeyPatch(), LocalStorage.create

    def into_nothing(self: LocalStorage, name: str, size: int = 0) -> Any:
        is_full = "/copies/" in str(self.root) and NAME.search(name)
        return create(self, "/dev/full") if is_full else create(self, name, size)

    patch.setattr(LocalStorage, "create", into_nothing)
    patch.setattr(LocalCopies, "save", without_skipping)
    try:
        return train_on_this_rank(config, rank, world_size).position.progress.step
    finally:
        patch.undo()


NAME = re.compile(rf"{folder_name(NEWEST)}.*distcp")


def test_a_full_folder_costs_its_copies_and_no_run(tiny: TinyRun) -> None:
    config = tiny.config(*LOCAL, *degrees(1, 2), world_size=2)
    [home] = machines(tiny, "full", 1)
    assert run_in_turn(full, 2, [(config, home)]) == [[0, 0]]
    log = (tiny.folder / "outputs" / "tiny" / "logs" / "rank-0.log").read_text()
    assert log.count("No space left on device") == 1
    assert len(tiny.losses()) == STEPS
    config = tiny.config(*LOCAL, *degrees(1, 2), "--job.name=crowded", world_size=2)
    assert run_in_turn(crowded, 2, [(config, machines(tiny, "crowded"))]) == [[[], []]]
    log = (tiny.folder / "outputs" / "crowded" / "logs" / "rank-0.log").read_text()
    [warning] = [line for line in log.splitlines() if " WARNING " in line]
    assert mentions(warning, "rank 1", "0.0 MiB", "1,024.0 MiB")


@pytest.mark.parametrize("owner", ["link", "file", "another user"])
def test_a_folder_of_someone_else_is_not_used(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    """In /dev/shm anybody can make a folder of this name, and fill it."""
    default, elsewhere = tiny.folder / "copies", tiny.folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("titanlite.checkpoint.local.memory_folder", lambda given: default)
    if owner == "link":
        default.symlink_to(elsewhere)
    elif owner == "file":
        default.touch()
    else:
        default.mkdir()
        monkeypatch.setattr(os, "getuid", lambda: default.stat().st_uid + 1)
    with one_process():
        train_on_this_rank(tiny.config(f"--checkpoint.local_interval={INTERVAL}"), 0, 1)
    assert len(tiny.losses()) == 6
    assert not any(elsewhere.iterdir())
    assert default.is_file() or not any(default.iterdir())


def test_nobody_else_can_read_copies(tiny: TinyRun) -> None:
    home = tiny.folder / "home"
    (home / "copies").mkdir(parents=True)
    (home / "copies").chmod(0o777)
    with one_process(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        train_until_failure(tiny.config(*LOCAL), 0, 1, home)
        assert copies_of(home).stat().st_mode & 0o777 == 0o700
        assert (home / "copies").stat().st_mode & 0o777 == 0o777, "a folder that was given stays as it is"
        code, out, _ = titanlite("checkpoint", "list", str(tiny.folder / "outputs" / "tiny"), HOME=str(home))
    assert code == 0
    assert [line.split()[0] for line in out if line.split()[0].isdecimal()] == [str(BEFORE), str(NEWEST)]


def test_a_folder_that_is_deleted_under_the_run_is_made_again(tiny: TinyRun) -> None:
    """As a cleaner of /tmp does: for nobody else to read, and with the id of its machine."""
    home, found, save = tiny.folder / "home", [], without_skipping

    def delete_after(self: LocalCopies, *args: Any, **options: Any) -> None:
        save(self, *args, **options)
        if len(found) < 2 and self._in_flight is not None:
            wait([self._in_flight])
            found.append((copies_of(home) / "machine").read_text())
            shutil.rmtree(home / "copies")

    with one_process(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setattr("tests.distributed.test_local_copies.without_skipping", delete_after)
        train_until_failure(tiny.config(*LOCAL, "--checkpoint.local_interval=2"), 0, 1, home)
        assert copies_of(home).stat().st_mode & 0o777 == 0o700
        assert [(copies_of(home) / "machine").read_text()] * 2 == found


def test_a_start_names_the_copies_of_a_run_that_is_gone(tiny: TinyRun, warnings: Callable[[], list[str]]) -> None:
    home = tiny.folder / "home"
    with one_process(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        train_until_failure(tiny.config(*LOCAL, "--job.name=gone"), 0, 1, home)
        left = copies_of(home)
        train_on_this_rank(tiny.config(*LOCAL, "--training.steps=2", "--job.name=first"), 0, 1)
        assert warnings() == [], "a run that may go on"
        shutil.rmtree(tiny.folder / "outputs" / "gone")
        train_on_this_rank(tiny.config(*LOCAL, "--training.steps=2", "--job.name=second"), 0, 1)
    [line] = warnings()
    size = sum(path.stat().st_size for path in left.rglob("*") if path.is_file())
    assert mentions(line, left, f"{size / 2**20:,.1f} MiB", tiny.folder / "outputs" / "gone" / "checkpoints")


def test_copies_are_refused_without_checkpoints_and_with_states_on_disk(tiny: TinyRun) -> None:
    disk = ["--offload.optimizer=disk", f"--offload.path={tiny.folder}"]
    for options in (["--checkpoint.enable=false"], disk):
        with pytest.raises(ConfigError) as refused:
            tiny.config(*LOCAL, *options)
        assert [problem.key for problem in refused.value.problems] == ["checkpoint.local_interval"]


@pytest.mark.parametrize(("options", "sharing"), [([], 2), (["--outer.every=2", "--outer.over_replicas"], 1)])
def test_a_run_is_refused_whose_copies_do_not_fit(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, options: list[str], sharing: int
) -> None:
    """Two replicas on a machine share the 4 copies of weights and moments, but for workers, whose moments differ."""
    config = tiny.config("--checkpoint.local_interval=10", *degrees(2, 1), *options, world_size=2)
    model = build_on_meta(*resolve_model("llama3", None, config.model.args))
    count = sum(parameter.numel() for parameter in model.parameters())
    needed = 2 * (16 + 4 * 12 / sharing) * count
    for memory in (needed, needed - 2):
        monkeypatch.setattr("titanlite.checks.memory.host_memory", lambda memory=memory: memory)
        with nullcontext() if memory == needed else pytest.raises(UserError, match="does not fit"):
            check_model_memory(model, config, Ranks(0, 2, 0, 2), torch.device("cpu"))
    monkeypatch.setattr("titanlite.checks.memory.host_memory", lambda: needed)
    two_copies = round(2 * 2 * 12 / sharing * count)
    for room in (two_copies, two_copies - 1, 0):
        monkeypatch.setattr("titanlite.checks.memory.room_in", lambda folder, room=room: Room(0, room))
        with nullcontext() if room != two_copies - 1 else pytest.raises(ConfigError) as refusal:
            check_model_memory(model, config, Ranks(0, 2, 0, 2), torch.device("cpu"))
            continue
        assert [problem.key for problem in refusal.value.problems] == ["checkpoint.local_interval"]


def test_memory_of_copies_is_counted(tiny: TinyRun) -> None:
    def count(machines: int, *options: str) -> int:
        return copies_in_memory(tiny.config("--checkpoint.local_interval=10", *options), machines)

    assert [count(1), count(2), count(2, "--checkpoint.local_copies=1")] == [4, 7, 4]
    assert count(2, "--checkpoint.local_folder=/nvme") == 1, "only what is staged"
    assert copies_in_memory(tiny.config(), 2) == 0
