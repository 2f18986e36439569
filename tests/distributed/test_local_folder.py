"""Checkpoints that go to a disk of each node first, on two ranks that are two nodes."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import TinyRun, run_ranks, train_on_this_rank
from tests.layouts import degrees
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import folder_name
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.run import run_folder
from titanlite.runtime.errors import RunError
from titanlite.schema import Config
from titanlite.storage.storage import LocalStorage


def nothing_wrong(rank: int, done: list[int]) -> None: ...


def slow_shared_place(rank: int, done: list[int]) -> None:
    """The copy of step 2 begins when step 5 is done."""
    begin = LocalStorage.begin

    def begin_later(self: LocalStorage, folder: str) -> str:
        deadline = time.monotonic() + 60
        while folder == folder_name(2) and done[0] < 5:
            assert time.monotonic() < deadline, "training waits for the copy"
            time.sleep(0.01)
        return begin(self, folder)

    LocalStorage.begin = begin_later  # type: ignore[method-assign]


def failing_shared_place(rank: int, done: list[int]) -> None:
    """Rank 1 cannot write its part of step 4 there."""
    create = LocalStorage.create

    def fail(self: LocalStorage, name: str) -> Any:
        if name.startswith(f".staging-{folder_name(4)}") and name.endswith("__1_0.distcp"):
            raise OSError(errno.EIO, "Input/output error", name)
        return create(self, name)

    LocalStorage.create, LocalStorage.PATIENCE = fail, 0.2  # type: ignore[method-assign]


def full_local_disk(rank: int, done: list[int]) -> None:
    """Rank 1 cannot write its part of step 4 to its disk."""
    create = LocalStorage.create

    def full(self: LocalStorage, name: str) -> Any:
        is_local = name.startswith(f"{folder_name(4)}-") and name.endswith("__1_0.distcp")
        return create(self, "/dev/full" if is_local else name)

    LocalStorage.create = full  # type: ignore[method-assign]


def node_lost(rank: int, done: list[int]) -> None:
    """The disk of node 1 is empty."""
    if rank == 1:
        shutil.rmtree(os.path.expandvars(os.environ["DISKS"]) + "/node-1")


Trouble = Callable[[int, list[int]], None]
Started = tuple[str, int, int | None]


def start_in_turn(rank: int, world_size: int, starts: list[tuple[Config, str, Trouble]]) -> list[Started]:
    """Train again and again. Return for each start: the error, the last step, and the step from which it resumed."""
    run_folder._lock = lambda path: None  # a run that failed would hold it as long as its error is held
    end_step, originals = MetricsRecorder.end_step, (LocalStorage.begin, LocalStorage.create, LocalStorage.PATIENCE)
    results: list[Started] = []
    for config, nodes, trouble in starts:
        os.environ["NODE"], done = nodes[rank], [0]
        os.environ["DISKS"] = str(Path(str(config.checkpoint.local_folder)).parent)

        def recorded(self: Any, step: int, *args: Any, done: list[int] = done, **kwargs: Any) -> None:
            done[0] = step
            end_step(self, step, *args, **kwargs)
            time.sleep(0.1)  # a failed copy ends within a step

        MetricsRecorder.end_step = recorded  # type: ignore[method-assign]
        trouble(rank, done)
        try:
            run = train_on_this_rank(config, rank, world_size)
            results.append(("", done[0], run.progress.step))
        except RunError as error:
            results.append((str(error), done[0], None))
        LocalStorage.begin, LocalStorage.create, LocalStorage.PATIENCE = originals  # type: ignore[method-assign]
    return results


@pytest.mark.slow
def test_two_nodes_with_disks_of_their_own(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE", "0")
    local = f"--checkpoint.local_folder={tiny.folder}/node-$NODE"

    def start(name: str, nodes: str, trouble: Trouble, *, steps: int = 8) -> tuple[Config, str, Trouble]:
        options = [f"--job.name={name}", f"--training.steps={steps}", "--checkpoint.interval=2", local]
        return tiny.config(*options, *degrees(1, 2), world_size=2), nodes, trouble

    starts = [
        start("slow", "01", slow_shared_place, steps=6),
        start("moved", "01", failing_shared_place, steps=20),
        start("moved", "10", nothing_wrong),
        start("lost", "01", failing_shared_place, steps=20),
        start("lost", "01", node_lost),
        start("full", "01", full_local_disk, steps=6),
    ]
    of_ranks = run_ranks(start_in_turn, 2, starts, timeout=400)
    assert of_ranks[0] == of_ranks[1]  # the same errors, after the same step
    slow, failed, moved, failed_too, lost, full = of_ranks[0]

    def storage(name: str) -> LocalStorage:
        return LocalStorage(f"{tiny.folder}/outputs/{name}/checkpoints", "")

    def log(name: str) -> str:
        return (tiny.folder / "outputs" / name / "logs" / "rank-0.log").read_text()

    assert slow == ("", 6, 0)
    for message, last, _ in (failed, failed_too):
        assert message.startswith("the checkpoint of step 4 could not be saved: rank 1: ")
        assert "Input/output error" in message
        assert last <= 8
    assert moved in [("", 8, 4), ("", 8, 6)], "saves on the nodes' disks are copied by whichever rank is there"
    # The copy of step 6 may succeed while the run ends for that of step 4, which is of no use then.
    assert lost in [("", 8, 2), ("", 8, 6)]
    gone = "which was not copied yet, is deleted: 1 of its 5 files are on no node of this start"
    assert gone in log("lost") or lost == ("", 8, 6)
    assert full == ("", 6, 0)
    assert "checkpoint.local_folder: rank 1: [Errno 28] No space left on device" in log("full")
    superseded = "which was not copied yet, is deleted: the run has continued elsewhere since, to step 6" in log(
        "moved"
    )
    assert not superseded or moved == ("", 8, 6)
    of_moved = [2, 6, 8] if superseded else [2, 4, 6, 8]
    of_lost = [2, 4, 6, 8] if lost == ("", 8, 2) else [2, 6, 8]
    for name, steps in {"slow": [2, 4, 6], "moved": of_moved, "lost": of_lost, "full": [2, 4, 6]}.items():
        listing = storage(name).list()
        assert sorted(listing) == [folder_name(step) for step in steps]
        for folder, sizes in listing.items():
            manifests.verify(storage(name), folder, sizes)
        assert tiny.losses(name)[:6] == tiny.losses("slow")
    assert not [path for node in (0, 1) for path in tiny.folder.glob(f"node-{node}/*/*")]
