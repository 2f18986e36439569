"""Several ranks and their checkpoints: a failure of one rank ends all at the same step; rank 0 decides for all."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import TinyRun, mentions, run_in_turn, run_ranks, train_on_this_rank
from tests.support.layouts import degrees, trained
from tests.support.object_stores import s3_server_that_fails
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint import staging
from titanlite.checkpoint.dcp_write import ShardWriter
from titanlite.checkpoint.manifest import folder_name
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.runtime.errors import RunError
from titanlite.schema import Config
from titanlite.storage.storage import LocalStorage, ObjectStorage, open_storage


def checkpoints(tiny: TinyRun, name: str = "tiny") -> LocalStorage:
    return LocalStorage(f"{tiny.folder}/outputs/{name}/checkpoints", "")


def steps(tiny: TinyRun, name: str = "tiny") -> list[int]:
    return manifests.committed_steps(checkpoints(tiny, name).list())


# Each spoils the save of step 4, on one rank. The value is a part of the error message that every rank must raise.


def disk_full(patch: pytest.MonkeyPatch, run_folder: Path) -> None:
    create = LocalStorage.create

    def into_nothing(self: LocalStorage, name: str, size: int = 0) -> Any:
        return create(self, "/dev/full") if name.endswith("__1_0.distcp") else create(self, name, size)

    patch.setattr(LocalStorage, "create", into_nothing)


def folder_lost(patch: pytest.MonkeyPatch, run_folder: Path) -> None:
    shutil.rmtree(run_folder / "checkpoints", ignore_errors=True)
    (run_folder / "checkpoints").write_text("in the way")


def shard_lost(patch: pytest.MonkeyPatch, run_folder: Path) -> None:
    write = ShardWriter.write_data

    def write_and_lose(self: ShardWriter, *args: Any) -> Any:
        results = write(self, *args)
        (run_folder / "checkpoints" / self.folder / self.name).unlink()
        return results

    patch.setattr(ShardWriter, "write_data", write_and_lose)


def no_memory_to_stage(patch: pytest.MonkeyPatch, run_folder: Path) -> None:
    def fail(*args: Any) -> Any:
        raise MemoryError("no host memory")

    patch.setattr(staging, "_copy", fail)


Trouble = Callable[[pytest.MonkeyPatch, Path], None]
TROUBLE: dict[Trouble, tuple[int, str]] = {
    disk_full: (1, f"rank 1: [Errno {errno.ENOSPC}] No space left on device: '/dev/full'"),
    folder_lost: (0, "checkpoints"),
    shard_lost: (1, "__1_0.distcp is missing"),
    no_memory_to_stage: (1, "rank 1: MemoryError('no host memory')"),
}


def failing(rank: int, world_size: int, given: tuple[Config, Trouble]) -> tuple[str, int]:
    """Train with failing saves on one rank from step 4; returns the error and the last step that was done."""
    config, trouble = given
    done, patch = [0], pytest.MonkeyPatch()
    end_step = MetricsRecorder.end_step

    def recorded(self: Any, step: int, *args: Any, **kwargs: Any) -> None:
        done[0] = step
        end_step(self, step, *args, **kwargs)
        if step == 4 and rank == TROUBLE[trouble][0]:
            run_folder = Path(config.job.dump_folder) / str(config.job.name)
            while not (run_folder / "checkpoints" / folder_name(2)).exists():
                time.sleep(0.01)
            trouble(patch, run_folder)
        time.sleep(0.05)

    patch.setattr(MetricsRecorder, "end_step", recorded)
    try:
        train_on_this_rank(config, rank, world_size)
    except RunError as error:
        return str(error), done[0]
    finally:
        patch.undo()
    return "", done[0]


def test_a_failed_save_ends_every_rank_at_the_same_step(tiny: TinyRun) -> None:
    cases = [*((trouble, "async") for trouble in TROUBLE), (disk_full, "disabled")]
    names = [f"{trouble.__name__}-{mode}" for trouble, mode in cases]
    options = ["--checkpoint.interval=2", "--training.steps=20", *degrees(1, 2)]
    configs = [
        tiny.config(*options, f"--checkpoint.async_mode={mode}", f"--job.name={name}", world_size=2)
        for name, (_, mode) in zip(names, cases, strict=True)
    ]
    troubles = [trouble for trouble, _ in cases]
    found = run_in_turn(failing, 2, [*zip(configs, troubles, strict=True)])
    for name, (trouble, mode), [(message, last), other] in zip(names, cases, found, strict=True):
        assert other == (message, last), name
        assert "step 4" in message, name
        assert TROUBLE[trouble][1] in message, name
        assert last <= (4 if mode == "disabled" else 6), name  # it fails, and that ends the step under way
        assert steps(tiny, name) == ([] if trouble is folder_lost else [2]), name


def trained_with_swapped_shards(rank: int, world_size: int, tiny: TinyRun, config: Config) -> list[list[float]]:
    """Train, exchange the two files of the newest checkpoint, and train again; returns the losses of both."""
    trained(rank, world_size, config)
    losses = [tiny.losses()]
    dist.barrier()
    if rank == 0:
        root = checkpoints(tiny).root / folder_name(4)
        for name, new in (("__0_0.distcp", "x"), ("__1_0.distcp", "__0_0.distcp"), ("x", "__1_0.distcp")):
            (root / name).rename(root / new)
    dist.barrier()
    trained(rank, world_size, config)
    return [*losses, tiny.losses()]


def test_two_shards_swapped(tiny: TinyRun) -> None:
    config = tiny.config("--checkpoint.interval=2", "--training.steps=4", *degrees(1, 2), world_size=2)
    before, after = run_ranks(trained_with_swapped_shards, 2, tiny, config)[0]
    assert before == after
    log = (tiny.folder / "outputs" / "tiny" / "logs" / "rank-0.log").read_text()
    assert f"{folder_name(4)}/__" in log
    assert steps(tiny) == [2, 4]


def staged_bytes(rank: int, world_size: int, config: Config) -> tuple[int, int, int]:
    """Return bytes: staged by this rank for the last save, for the first one, and the whole local state."""
    staged: list[int] = []
    copy = staging.Staging.copy

    def recorded(self: Any) -> Any:
        buffers = copy(self)
        staged.append(sum(buffer.nbytes for buffer in buffers.values()))
        return buffers

    staging.Staging.copy = recorded  # type: ignore[method-assign]
    train_on_this_rank(config, rank, world_size)
    return staged[-1], staged[0], len(staged)  # the last save of a run is of the state itself


def test_replicas_share_the_writing(tiny: TinyRun) -> None:
    config = tiny.config("--training.steps=3", "--checkpoint.interval=1", *degrees(2, 1), world_size=2)
    of_ranks = run_ranks(staged_bytes, 2, config)
    first = of_ranks[0][1]
    assert [entry[1:] for entry in of_ranks] == [(first, 2)] * 2
    assert sum(entry[0] for entry in of_ranks) == first, "each tensor is copied and written by one replica"
    assert max(entry[0] for entry in of_ranks) < 0.6 * first


def trained_there(rank: int, world_size: int, config: Config, environment: dict[str, str]) -> dict[str, Any]:
    os.environ.update(environment)  # test processes are forked from one that was started before the server
    return trained(rank, world_size, config)


@pytest.mark.nightly
def test_a_run_whose_checkpoints_are_on_an_s3_server(tiny: TinyRun, s3: str) -> None:
    expected = run_ranks(trained, 2, tiny.config("--job.name=whole", world_size=2))[0]
    place = f"{s3}/{tiny.folder.name}/run"
    store = [f"--checkpoint.folder={place}", "--checkpoint.interval=3", "--checkpoint.keep_latest_k=1"]
    environment = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    run_ranks(trained_there, 2, tiny.config("--training.steps=3", *store, world_size=2), environment)
    final = run_ranks(trained_there, 2, tiny.config(*store, world_size=2), environment)[0]
    assert tiny.losses() == tiny.losses("whole")
    for name, value in expected.items():
        assert (value == final[name]).all(), name
    storage = open_storage(place)
    listing = storage.list()
    assert [*listing] == [folder_name(6)]
    manifests.verify(storage, folder_name(6), listing[folder_name(6)])
    # Another layout reads it, too.
    run_ranks(trained_there, 1, tiny.config("--training.steps=7", *store), environment)
    assert len(tiny.losses()) == 7
    assert torch.tensor(tiny.losses()).isfinite().all()


def given_up(rank: int, world_size: int, config: Config, environment: dict[str, str]) -> str:
    """Train with a store that is given up after 2 seconds, and return the error."""
    os.environ.update(environment)  # test processes are forked from one that was started before the server
    end_step = MetricsRecorder.end_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStorage, "PATIENCE", 2.0)
        patch.setattr(MetricsRecorder, "end_step", lambda *words, **more: (time.sleep(0.05), end_step(*words, **more)))
        try:
            train_on_this_rank(config, rank, world_size)
        except RunError as error:
            return str(error)
    return ""


def test_a_store_that_answers_503_ends_every_rank(tiny: TinyRun) -> None:
    """It answers to every write with 503, once the run has claimed its place. Training continues meanwhile."""

    def answers(method: str, path: str) -> int:
        return 503 if method in ("PUT", "POST") and "owner.json" not in path else 200

    options = "--training.steps=1000000", "--checkpoint.interval=3", "--metrics.log_freq=1000"
    with s3_server_that_fails(answers) as url:
        environment = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
        config = tiny.config(*options, f"--checkpoint.folder={url}", world_size=2)
        first, second = run_ranks(given_up, 2, config, environment)
    assert first == second
    assert mentions(first, "step 3", "rank 0")
    assert f"{url}/step-00000003/.owner-" in first
