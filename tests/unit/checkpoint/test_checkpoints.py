"""A run on one process and its checkpoints: what is saved, when, what it resumes from, and what it refuses."""

import io
import json
import logging
import os
import pickle
import re
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, default_planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.utils.serialization import config as serialization

from tests.support.foreign import Payload
from tests.support.helpers import TinyRun, built, mentions
from tests.support.manifests import flip, forge, manifest_of
from tests.support.object_stores import Flaky
from tests.support.whole_runs import assert_equal, trained
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint import staging as staging_module
from titanlite.checkpoint.dcp_read import UnsafeCheckpoint, unpickle_metadata
from titanlite.checkpoint.dcp_write import ShardWriter, around_data
from titanlite.checkpoint.initial import find_checkpoint
from titanlite.checkpoint.manifest import DAMAGED, METADATA, SUPERSEDED, Progress, folder_name
from titanlite.checkpoint.resume import RunSettings
from titanlite.checkpoint.save_overhead import SaveClock
from titanlite.checkpoint.staging import Staging
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.files import lock_file
from titanlite.runtime.private_torch.checkpoint import StorageInfo
from titanlite.storage.storage import MANIFEST, LocalStorage, ObjectStorage, open_storage

pytestmark = pytest.mark.usefixtures("single_process_group", "_unlocked")


@pytest.fixture
def _unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that failed in this process would hold its folder as long as pytest holds the error."""
    monkeypatch.setattr("titanlite.run.run_folder._lock", lambda path: None)
    monkeypatch.setattr(LocalStorage, "claim", lambda self, timeout: None)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run whose folder tests copy: the first test that needs it trains."""
    return TinyRun(tmp_path_factory.mktemp("trained"))


def folder(tiny: TinyRun, name: str = "tiny") -> Path:
    return tiny.folder / "outputs" / name / "checkpoints"


def steps(tiny: TinyRun, name: str = "tiny") -> list[int]:
    return manifests.committed_steps(LocalStorage(str(folder(tiny, name)), "").list())


def checkpoint(tiny: TinyRun, step: int, name: str = "tiny") -> Path:
    return folder(tiny, name) / folder_name(step)


# Saving beside training


@pytest.mark.long
def test_a_checkpoint_holds_the_state_of_its_step_beside_training(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying and writing are slow: the optimizer waits for the copy, training does not wait for the file."""
    expected = trained(tiny.config("--job.name=until-2", "--training.steps=2"))
    happened: list[str] = []
    plans: list[int] = []
    begin, publish, end_step = LocalStorage.begin, LocalStorage.publish, MetricsRecorder.end_step
    copy, plan = staging_module._copy, default_planner.create_default_local_save_plan

    def slow_begin(self: LocalStorage, folder: str) -> str:
        happened.append(f"begin {folder}")
        time.sleep(0.3)
        return begin(self, folder)

    def recorded_publish(self: LocalStorage, folder: str, manifest: bytes) -> None:
        publish(self, folder, manifest)
        happened.append(f"end {folder}")

    def recorded_step(self: Any, step: int, *args: Any, **kwargs: Any) -> None:
        happened.append(f"step {step}")
        end_step(self, step, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "begin", slow_begin)
        patch.setattr(LocalStorage, "publish", recorded_publish)
        patch.setattr(MetricsRecorder, "end_step", recorded_step)
        patch.setattr(staging_module, "_copy", lambda target, source: (time.sleep(0.01), copy(target, source)))
        patch.setattr(
            default_planner, "create_default_local_save_plan", lambda *args: (plans.append(1), plan(*args))[1]
        )
        trained(tiny.config("--checkpoint.interval=2", "--training.steps=5"))
    assert steps(tiny) == [2, 4, 5]
    assert len(plans) == 1
    assert happened.index("step 3") < happened.index("end step-00000002"), "training waited for the save"
    begins_and_ends = [what for what in happened if not what.startswith("step ")]
    assert begins_and_ends == [f"{what} {folder_name(step)}" for step in (2, 4, 5) for what in ("begin", "end")]

    lines = (tiny.folder / "outputs" / "tiny" / "checkpoints.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [2, 4, 5]
    for record in records:
        manifest = manifests.read_manifest(LocalStorage(str(folder(tiny)), ""), folder_name(record["step"]))
        assert record["bytes"] == manifest.size
        parts = [record[f"{part}_seconds"] for part in ("staging", "planning", "writing")]
        assert min(parts) > 0
        assert sum(parts) <= record["total_seconds"] < 30
    assert 0 < records[-1]["blocking_seconds"] < 30  # the last one is waited for

    shutil.copytree(checkpoint(tiny, 2), checkpoint(tiny, 2, "copy"))
    assert_equal(trained(tiny.config("--job.name=copy", "--training.steps=2")), expected)


def test_staging_is_one_allocation_that_is_used_again() -> None:
    """Each buffer is aligned and has a storage of its own, so that a checkpoint writes its bytes alone."""
    staging = Staging(torch.device("cpu"), pin=False)
    state = {"a": torch.randn(1000, 3), "b": torch.randn(()), "c": torch.randn(3, 11).t().bfloat16()}
    state["d"] = torch.empty(0)
    staging.begin(state)
    first = dict(staging.copy())
    assert staging.allocated_bytes == 12_032 + 64 + 128
    starts = [first[name].data_ptr() - first["a"].data_ptr() for name in "abc"]
    assert starts == [0, 12_032, 12_096]
    assert [buffer.untyped_storage().nbytes() for buffer in first.values()] == [12_000, 4, 66, 0]
    state["a"] += 1
    staging.begin(state)
    staging.wait()  # the training thread makes the copy if the other has not yet
    copied = {name: tensor.clone() for name, tensor in state.items()}
    state["a"] += 1
    second = dict(staging.copy())
    assert_equal(second, copied)
    assert [tensor.data_ptr() for tensor in second.values()] == [tensor.data_ptr() for tensor in first.values()]
    state["b"] = torch.randn(4)
    staging.begin(state)
    assert_equal(dict(staging.copy()), state)


def test_a_view_is_written_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    """Uneven shards of FSDP are views of padded ones."""
    storage, whole = open_storage(str(tmp_path)), torch.randn(100_000)
    writer = ShardWriter(storage, storage.begin("step-00000001"), 0, lambda name: whole[10:20])
    [result] = writer._write([WriteItem(index=MetadataIndex("a"), type=WriteItemType.TENSOR)])
    assert result.size_in_bytes < 10_000
    data = (tmp_path / writer.folder / writer.name).read_bytes()
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), whole[10:20])


def test_blocking_time_is_what_steps_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = SaveClock(torch.device("cpu"))

    def step(seconds: float) -> None:
        now[0] += seconds
        clock.step()

    for seconds in (9, 2, 2, 7, 2):  # the first step has no beginning; one was held up by something else
        step(seconds)
    clock.begin_save()
    now[0] += 0.5  # the call itself
    step(3)
    step(2.25)
    assert clock.end_save().seconds() == pytest.approx(0.5 + 3 + 2.25 - 2 * 2)
    for seconds in (2, 2):
        step(seconds)
    clock.begin_save()
    now[0] += 1.5
    assert clock.end_save().seconds() == 1.5  # waited for, with no step in it


@pytest.mark.long
def test_other_modes_save_the_same(tiny: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "titanlite")
    whole_run = trained(tiny.config("--job.name=whole"))
    for mode in ("disabled", "async_with_pinned_mem"):
        options = f"--checkpoint.async_mode={mode}", f"--job.name={mode}"
        trained(tiny.config("--training.steps=3", *options))
        assert_equal(trained(tiny.config(*options)), whole_run)
    notes = [record.getMessage() for record in caplog.records if "async_mode" in record.getMessage()]
    assert [mentions(note, "checkpoint.async_mode", "async") for note in notes] == [True] * 2


def test_the_end_of_a_run_waits_for_a_save_and_records_it(tiny: TinyRun) -> None:
    checkpoints = built(0, 1, tiny.config()).checkpoints
    checkpoints.save(Progress(1, 8), last=False)
    assert [record["step"] for record in checkpoints.finish()] == [1]
    assert steps(tiny) == [1]


# When


@pytest.mark.long
def test_nothing_is_deleted_while_the_newest_is_damaged(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    publish = LocalStorage.publish

    def publish_and_lose(self: LocalStorage, folder: str, manifest: bytes) -> None:
        publish(self, folder, manifest)
        (self.root / folder / "__0_0.distcp").unlink()

    trained(tiny.config("--training.steps=2", "--checkpoint.interval=1"))
    monkeypatch.setattr(LocalStorage, "publish", publish_and_lose)
    trained(tiny.config("--training.steps=3", "--checkpoint.keep_latest_k=1"))
    assert steps(tiny) == [1, 2, 3]
    [warning] = warnings()
    assert mentions(warning, f"{checkpoint(tiny, 3)}/__0_0.distcp")


@pytest.mark.usefixtures("single_process_group")
def test_slow_deletions_of_saves_that_training_waits_for_warn_of_nothing(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """Later saves are committed while old checkpoints are still being deleted."""
    delete = LocalStorage.delete

    def delete_slowly(self: LocalStorage, folder: str) -> None:
        time.sleep(0.3)
        delete(self, folder)

    monkeypatch.setattr(LocalStorage, "delete", delete_slowly)
    options = ("--checkpoint.async_mode=disabled", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2")
    trained(tiny.config("--training.steps=6", *options))
    assert steps(tiny) == [5, 6]
    assert warnings() == []


# The checkpoint at which a run resumes


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped byte": (lambda new: flip(new / "__0_0.distcp", 5000), "__0_0.distcp (model."),
    "a flipped byte of metadata": (lambda new: flip(new / ".metadata"), ".metadata"),
    "no manifest": (lambda new: (new / MANIFEST).unlink(), MANIFEST),
}


FOUR_STEPS = "--training.steps=4", "--checkpoint.interval=2"


def copy_run(tiny: TinyRun, name: str) -> None:
    """Copy a run with checkpoints of steps 2 and 4. The first test that needs it trains."""
    if not steps(tiny, "good"):
        trained(tiny.config(*FOUR_STEPS, "--job.name=good"))
    shutil.copytree(folder(tiny, "good").parent, folder(tiny, name).parent)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    trained_once: TinyRun, damage: str, warnings: Callable[[], list[str]]
) -> None:
    tiny, name = trained_once, damage.replace(" ", "-")
    copy_run(tiny, name)
    spoil, place = DAMAGE[damage]
    spoil(checkpoint(tiny, 4, name))
    run_id = json.loads((folder(tiny, name).parent / "run.json").read_text())["id"]
    staging = folder(tiny, name) / f".staging-{folder_name(5)}-{run_id}"
    staging.mkdir()  # of a save that was killed
    trained(tiny.config(*FOUR_STEPS, f"--job.name={name}"))
    [warning] = warnings()
    assert str(checkpoint(tiny, 4, name)) in warning
    assert place in warning
    assert tiny.losses(name) == tiny.losses("good")  # steps 3 and 4 were done again
    assert [record["step"] for record in tiny.records(name)] == [1, 2, 3, 4]
    assert steps(tiny, name) == [2, 4]
    assert not staging.exists()
    storage = LocalStorage(str(folder(tiny, name)), "")
    manifests.verify(storage, folder_name(4), storage.list()[folder_name(4)])


@pytest.mark.long
def test_links_among_checkpoints_are_no_checkpoints(trained_once: TinyRun, warnings: Callable[[], list[str]]) -> None:
    tiny = trained_once
    copy_run(tiny, "links")
    place, outside = folder(tiny, "links"), tiny.folder / "outside"
    shutil.move(place, outside)
    place.symlink_to(outside)  # of the whole folder: its user's choice
    shutil.copytree(outside / folder_name(4), tiny.folder / "other" / folder_name(4))
    links = {97: folder_name(4), 98: "nothing", 99: str(tiny.folder / "other" / folder_name(4)), 96: folder_name(96)}
    for step, target in links.items():
        (place / folder_name(step)).symlink_to(target)
    (place / folder_name(12)).write_text("a file")
    before = {path: path.read_bytes() for path in tiny.folder.glob("o*/step-00000004/*")}
    assert steps(tiny, "links") == [2, 4]
    options = ("--job.name=links", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2")
    trained(tiny.config("--training.steps=5", *options))
    assert {path: path.read_bytes() for path in tiny.folder.glob("o*/step-00000004/*")} == before
    assert steps(tiny, "links") == [4, 5]
    assert {step: os.readlink(place / folder_name(step)) for step in links} == links
    trained(tiny.config("--training.steps=6", "--checkpoint.load_step=4", *options))  # quarantines what is newer
    assert steps(tiny, "links") == [5, 6]
    assert {step: os.readlink(place / folder_name(step)) for step in links} == links
    assert (tiny.folder / "other" / folder_name(4) / MANIFEST).is_file()
    with pytest.raises(UserError, match=r"load_step.*\b97\b"):
        trained(tiny.config("--checkpoint.load_step=97", *options))
    assert find_checkpoint(str(place / folder_name(99)))[:2] == (str(tiny.folder / "other"), folder_name(4))
    assert not [line for line in warnings() if "superseded" in line or "step-00000097" in line]


@pytest.mark.long
def test_a_checkpoint_of_a_later_format_is_left_as_it_is(trained_once: TinyRun) -> None:
    """An older version of titanlite neither quarantines it nor resumes from the one before."""
    tiny = trained_once
    copy_run(tiny, "later")
    path = checkpoint(tiny, 4, "later") / MANIFEST
    later = replace(manifests.Manifest.from_json(path.read_bytes()), format=manifests.FORMAT + 1).to_json()
    path.write_bytes(later)
    for options in (["--job.name=later"], ["--job.name=new", f"--checkpoint.initial_load_path={path.parents[1]}"]):
        with pytest.raises(UserError, match=rf"{path}\b.*\b{manifests.FORMAT + 1}\b"):
            trained(tiny.config(*options))
    assert path.read_bytes() == later
    assert steps(tiny, "later") == [2, 4]


@pytest.mark.long
def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(trained_once: TinyRun) -> None:
    tiny = trained_once
    copy_run(tiny, "asked")
    flip(checkpoint(tiny, 4, "asked") / "__0_0.distcp", 5000)
    with pytest.raises(UserError, match=r"load_step.*step-00000004/__0_0\.distcp"):
        trained(tiny.config("--checkpoint.load_step=4", "--job.name=asked"))
    assert steps(tiny, "asked") == [2, 4]


@pytest.mark.long
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(trained_once: TinyRun) -> None:
    tiny = trained_once
    copy_run(tiny, "all")
    for step in (2, 4):
        truncate(checkpoint(tiny, step, "all") / "__0_0.distcp")
    for _ in range(2):  # the second start refuses too
        with pytest.raises(UserError, match=r"\bstep-00000002\b.*\bstep-00000004\b"):
            trained(tiny.config("--job.name=all"))
    assert {f"{MANIFEST}.{DAMAGED}", "__0_0.distcp"} <= {path.name for path in checkpoint(tiny, 4, "all").iterdir()}


@pytest.mark.long
def test_checksums_need_no_second_reading(trained_once: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = trained_once
    copy_run(tiny, "read")
    size = manifests.read_manifest(LocalStorage(str(folder(tiny, "read")), ""), folder_name(4)).size
    read, data_read = LocalStorage.read, []

    def counted(self: LocalStorage, name: str, start: int = 0, size: int | None = None) -> bytes:
        data = read(self, name, start, size)
        data_read.append(len(data))
        return data

    monkeypatch.setattr(LocalStorage, "read", counted)
    trained(tiny.config("--training.steps=4", "--job.name=read"))
    assert size * 0.99 < sum(data_read) < size * 1.01


@pytest.mark.long
def test_going_back_to_an_older_step(tiny: TinyRun) -> None:
    options = ["--checkpoint.interval=2", "--training.steps=6"]
    trained(tiny.config(*options))
    losses = tiny.losses()
    with pytest.raises(UserError, match=r"load_step.* step 3 .*2, 4, 6"):
        trained(tiny.config("--checkpoint.load_step=3"))
    back = ["--checkpoint.load_step=2", "--optimizer.lr=1e-3", "--checkpoint.keep_latest_k=1"]
    trained(tiny.config(*options, *back, "--training.steps=4"))
    assert tiny.losses()[:2] == losses[:2]
    assert tiny.losses()[3] != losses[3]
    assert steps(tiny) == [4]
    assert (checkpoint(tiny, 6) / f"{MANIFEST}.{SUPERSEDED}").exists()
    branch = tiny.losses()
    trained(tiny.config(*options, *back))  # the same command again resumes from the newest; step 2 is deleted
    assert tiny.losses()[:4] == branch
    assert steps(tiny) == [6]
    assert not (checkpoint(tiny, 6) / f"{MANIFEST}.{SUPERSEDED}").exists()


@pytest.mark.long
def test_a_run_whose_checkpoints_are_elsewhere_does_not_start_over(
    tiny: TinyRun, warnings: Callable[[], list[str]]
) -> None:
    trained(tiny.config("--training.steps=2"))
    folder(tiny).rename(tiny.folder / "unmounted")
    with pytest.raises(UserError, match="outputs/tiny/checkpoints"):
        trained(tiny.config())
    assert len(tiny.records()) == 2
    with pytest.raises(UserError, match=r"load_step.* step 2 .*none"):
        trained(tiny.config("--job.name=new", "--checkpoint.load_step=2"))
    place = f"--checkpoint.folder={tiny.folder}/unmounted"
    trained(tiny.config("--training.steps=4", place))
    assert len(tiny.records()) == 4
    assert warnings() == []


@pytest.mark.long
def test_a_folder_with_checkpoints_of_another_run_is_refused_and_stays_as_it_is(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of another name, with the same settings or others; the run itself goes on, also in a copied folder."""
    place, outputs = tiny.folder / "shared", tiny.folder / "outputs"
    common = [f"--checkpoint.folder={place}", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2"]

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in place.glob("step-*/*")}

    trained(tiny.config(*common, "--training.steps=2"))
    before = contents()
    for number, options in enumerate(([], ["--debug.seed=7"], [f"--checkpoint.initial_load_path={place}"])):
        with pytest.raises(UserError) as refusal:
            trained(tiny.config(*common, "--training.steps=4", f"--job.name=other-{number}", *options))
        assert str(refusal.value).startswith(f"checkpoint.folder: {place} ")
        assert mentions(str(refusal.value), "checkpoint.initial_load_path", f'"{place}"')
        assert contents() == before
    shutil.copytree(outputs / "tiny", outputs / "copied")
    trained(tiny.config(*common, "--training.steps=3", "--job.name=copied"))
    assert [int(path.name[5:]) for path in sorted(place.glob("step-*"))] == [2, 3]
    shutil.rmtree(outputs / "copied")  # another machine takes the place of the first, which shared this folder only
    trained(tiny.config(*common, "--training.steps=3", "--job.name=copied"))
    assert len({json.loads((outputs / name / "run.json").read_text())["id"] for name in ("tiny", "copied")}) == 1
    # In a folder in which an earlier version has let two runs save, the other's neither count nor are deleted.
    other = place / folder_name(2) / MANIFEST
    other.write_bytes(replace(manifests.Manifest.from_json(other.read_bytes()), run_id="other").to_json())
    trained(tiny.config(*common, "--training.steps=5"))
    assert [int(path.name[5:]) for path in sorted(place.glob("step-*"))] == [2, 4, 5]
    monkeypatch.undo()  # locks are locks again
    monkeypatch.setattr("titanlite.checkpoint.history.CLAIM_TIMEOUT", 0.0)
    with lock_file(place / ".lock"), pytest.raises(UserError) as refusal:
        trained(tiny.config(*common, "--training.steps=6", "--job.name=copied"))
    assert mentions(str(refusal.value), "checkpoint.folder", str(place), f"process {os.getpid()}")


@pytest.mark.long
def test_a_host_without_memory_is_not_damage(trained_once: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = trained_once
    copy_run(tiny, "memory")

    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", no_memory)
        with pytest.raises(RunError, match=r"__0_0\.distcp\b.*DefaultCPUAllocator"):
            trained(tiny.config("--job.name=memory"))
    assert steps(tiny, "memory") == [2, 4]


def test_changed_settings_need_an_option(tiny: TinyRun) -> None:
    trained(tiny.config("--training.steps=1", "--lr_scheduler.warmup_steps=1"))
    other = ["--training.steps=2", "--training.seq_len=16", "--training.global_batch_size=4", "--debug.seed=1"]
    with pytest.raises(UserError) as refusal:
        trained(tiny.config(*other, "--model.args.norm_eps=1e-6", "--optimizer.lr=1e-3"))
    lines = str(refusal.value).splitlines()
    assert mentions(lines[1], "data.sources.text", "data.packing", "training.seq_len")
    changed = [
        ("debug.seed", 0, 1),
        ("model.args.norm_eps", 1e-05, 1e-06),
        ("training.global_batch_size", 8, 4),
        ("training.seq_len", 32, 16),
    ]
    for line, (key, before, now) in zip(lines[2:6], changed, strict=True):
        assert re.match(rf"  {key} .*\b{before}\b.* {now}$", line)
    (tiny.text / "a.txt").write_text("another text " * 100)
    with pytest.raises(UserError, match=r"data\.sources\.text .*\n.*data\.on_change\b") as refusal:
        trained(tiny.config("--training.steps=2"))
    assert not re.search(r"[0-9a-f]{16}", str(refusal.value).replace(str(tiny.folder), "")), "no hashes"
    allowed = '--checkpoint.allow_changes=["training.*", "debug.seed", "data.*"]'
    trained(tiny.config(*other, allowed, "--metrics.log_freq=1", "--optimizer.lr=1e-3"))
    assert [record["samples"] for record in tiny.records()] == [8, 20], "of half the length"
    with pytest.raises(UserError, match=r"\bmodel\.layers\.0\.feed_forward\.w1\b"):
        trained(tiny.config(*other, "--model.args.hidden_dim=64", '--checkpoint.allow_changes=["*"]'))


def test_a_setting_that_an_older_version_did_not_know_is_off() -> None:
    then = replace(manifest_of(1, {}), settings={"model.args.dim": 32, "model.args.gone": 0})
    now: dict[str, Any] = {"model.args.dim": 32, "model.args.new": None, "model.args.gate": False}
    RunSettings(lambda samples: now, []).check(then, "it")
    now["model.args.gate"] = True
    with pytest.raises(UserError, match=r"model\.args\.gate\b.*\bNone\b.*\bTrue\b"):
        RunSettings(lambda samples: now, []).check(then, "it")


@pytest.mark.long
def test_two_jobs_in_one_folder_are_refused(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("titanlite.run.run_folder.LOCK_TIMEOUT", 0.2)
    from titanlite.run.run_folder import open_run_folder

    config = tiny.config()
    first = open_run_folder(config.job, config.data, rank=0)
    message = rf"outputs/tiny is being trained by process {os.getpid()} on "
    with pytest.raises(UserError, match=message):
        open_run_folder(config.job, config.data, rank=0)
    assert first.lock is not None
    first.lock.close()
    assert open_run_folder(config.job, config.data, rank=0).lock is not None


# Beginning from another run's


@pytest.mark.long
def test_initial_load_of_the_model_alone(trained_once: TinyRun) -> None:
    tiny = trained_once
    copy_run(tiny, "source")
    expected = trained(tiny.config("--training.steps=4", "--job.name=source"))
    path = f"--checkpoint.initial_load_path={folder(tiny, 'source').parent}"
    options = ["--job.name=second", path, "--training.seq_len=16", "--lr_scheduler.warmup_steps=1"]
    options += ["--optimizer.lr=0.0"]
    final = trained(tiny.config(*options, "--training.steps=1"))
    for name, value in final.items():
        if not name.endswith(("exp_avg", "exp_avg_sq", "step")):
            assert torch.equal(value, expected[name]), name
    assert final["layers.0.attention.wq.weight.step"] == 1
    assert [record["samples"] for record in tiny.records("second")] == [8]
    # Once the run has a checkpoint of its own, it resumes from that.
    shutil.rmtree(folder(tiny, "source"))
    trained(tiny.config(*options, "--training.steps=2"))
    assert steps(tiny, "second") == [1, 2]


@pytest.mark.long
def test_a_branch_goes_on_where_another_run_was(tiny: TinyRun) -> None:
    """Its steps are those of the run itself, bit for bit, until options differ; and it resumes by itself."""
    constant = ["--lr_scheduler.decay_steps=0"]
    expected = trained(tiny.config(*constant, "--training.steps=4", "--checkpoint.interval=2"))
    branch = [f"--checkpoint.initial_load_path={checkpoint(tiny, 2)}", "--job.name=branch", *constant]
    branch += ['--checkpoint.initial_load=["model", "optimizer", "progress"]', "--checkpoint.interval=1"]
    trained(tiny.config(*branch, "--training.steps=3"))
    assert steps(tiny, "branch") == [3]
    final = trained(tiny.config(*branch, "--training.steps=4"))
    assert all(torch.equal(final[name], tensor) for name, tensor in expected.items())
    whole, found = tiny.records(), tiny.records("branch")
    assert [record["samples"] for record in found] == [record["samples"] for record in whole[2:]]
    assert [record["loss"] for record in found] == [record["loss"] for record in whole[2:]]

    with pytest.raises(UserError, match=r"training\.global_batch_size\b.*\b8\b.*\b4\b"):
        trained(tiny.config(*branch, "--job.name=other", "--training.global_batch_size=4"))
    decays = trained(
        tiny.config(*branch[:-1], "--job.name=decay", "--training.steps=4", "--lr_scheduler.decay_steps=2")
    )
    assert not torch.equal(decays["layers.0.attention.wq.weight"], expected["layers.0.attention.wq.weight"])
    assert steps(tiny) == [2, 4]


@pytest.mark.long
def test_initial_load_lists_what_does_not_fit(tiny: TinyRun, warnings: Callable[[], list[str]]) -> None:
    source = trained(tiny.config("--training.steps=2", "--model.args.n_layers=2", "--model.args.tied_head=true"))
    options = ["--job.name=second", f"--checkpoint.initial_load_path={folder(tiny)}", "--training.steps=1"]
    options += ["--lr_scheduler.warmup_steps=1", "--optimizer.lr=0.0", "--model.args.hidden_dim=71"]
    with pytest.raises(UserError) as refusal:
        trained(tiny.config(*options))
    lines = str(refusal.value).splitlines()
    assert mentions(lines[0], checkpoint(tiny, 2))
    other, missing = "model.layers.0.feed_forward.w1.weight", "model.head.output.weight"
    assert any(mentions(line, "missing", other, [71, 42], [70, 42]) for line in lines)
    assert any(mentions(line, "missing", missing, [259, 42]) for line in lines)
    assert any(mentions(line, "unexpected", "model.layers.1.attention.wq.weight", [42, 42]) for line in lines)
    assert 'checkpoint.allow_missing = ["model.layers.*.feed_forward.w1.weight"' in lines[-2]
    allowed = ['--checkpoint.allow_missing=["model.layers.*.feed_forward.w*", "model.head"]']
    final = trained(tiny.config(*options, *allowed, '--checkpoint.allow_unexpected=["model.layers.1"]'))
    for name in ("tok_embeddings.weight", "layers.0.attention.wq.weight"):
        assert torch.equal(final[name], source[name])
    assert mentions(warnings()[-1], "missing", missing)


def test_initial_load_from_nothing(tiny: TinyRun) -> None:
    path = f"--checkpoint.initial_load_path={tiny.folder}"
    with pytest.raises(UserError, match=r"checkpoint\.initial_load: .*modle"):
        trained(tiny.config(path, '--checkpoint.initial_load=["modle"]'))
    with pytest.raises(UserError, match=f"initial_load_path: .*{tiny.folder}"):
        trained(tiny.config(path))


# Safety: nothing that a checkpoint contains is ever run


def forged_shard(checkpoint: Path, tensor: bytes) -> dict[str, bytes]:
    """The file of shards with its first tensor replaced."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    _, info = min(metadata.storage_data.items(), key=lambda entry: entry[1].offset)
    shards = tensor + (checkpoint / info.relative_path).read_bytes()[info.length :]
    ends, shift = [], len(tensor) - info.length
    for entry in sorted(metadata.storage_data.values(), key=lambda entry: entry.offset):
        if entry.offset:
            entry.offset += shift
        else:
            entry.length = len(tensor)
        end = entry.offset + entry.length
        ends.append([end, f"{zlib.crc32(shards[:end]):08x}"])
    checksums = json.dumps({info.relative_path: ends}).encode()
    return {
        info.relative_path: shards, manifests.CHECKSUMS: checksums, METADATA: pickle.dumps(metadata)
    }  # fmt: skip


def edited(checkpoint: Path, edit: Callable[[Any], object]) -> dict[str, bytes]:
    """The metadata of a checkpoint with a change."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    edit(metadata)
    return {METADATA: pickle.dumps(metadata)}


def first_place(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


def torch_save(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


PAYLOADS: dict[str, tuple[Callable[[str, Path], dict[str, bytes]], str]] = {
    "os.system in .metadata": (
        lambda touch, _: {METADATA: pickle.dumps(Payload(os.system, touch))}, "names posix.system"),
    "a call inside good metadata": (
        lambda touch, path: edited(path, lambda metadata: setattr(metadata, "planner_data", Payload(os.system, touch))),
        "names posix.system"),
    "torch.load in .metadata": (
        lambda touch, _: {METADATA: pickle.dumps(Payload(torch.load, "x"))}, "names torch.serialization.load"),
    "an old protocol": (
        lambda touch, _: {METADATA: b"cposix\nsystem\n(S'" + touch.encode() + b"'\ntR."}, "names posix.system"),
    "not a pickle": (lambda *_: {METADATA: b"#!/bin/sh"}, "metadata"),
    "no metadata": (lambda *_: {METADATA: pickle.dumps([1])}, "metadata"),
    "a call in a shard": (
        lambda touch, path: forged_shard(path, torch_save(Payload(os.system, touch))), "is not a tensor"),
    "a call in a shard of the old format": (
        lambda touch, path: forged_shard(
            path, torch_save(Payload(os.system, touch), _use_new_zipfile_serialization=False)), "is not a tensor"),
    "a bare pickle in a shard": (
        lambda touch, path: forged_shard(path, pickle.dumps(Payload(os.system, touch))), "is not a tensor"),
    "a bytes entry": (lambda touch, path: _bytes_entry(touch, path), "is not a tensor"),
    "a file elsewhere": (
        lambda _, path: edited(
            path, lambda metadata: setattr(first_place(metadata), "relative_path", "../../../etc/passwd")),
        "names ../../../etc/passwd"),
    "a tensor without its data": (
        lambda _, path: edited(
            path, lambda metadata: metadata.state_dict_metadata["model.tok_embeddings.weight"].chunks.clear()),
        "tok_embeddings.weight"),
    "a place outside of its file": (
        lambda _, path: edited(path, lambda metadata: setattr(first_place(metadata), "length", 1 << 50)),
        "lies outside of __0_0.distcp"),
}  # fmt: skip


def _bytes_entry(touch: str, checkpoint: Path) -> dict[str, bytes]:
    changes = forged_shard(checkpoint, torch_save(Payload(os.system, touch)))
    metadata = pickle.loads(changes[METADATA])
    index = min(metadata.storage_data, key=lambda index: metadata.storage_data[index].offset)
    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    return changes | {METADATA: pickle.dumps(metadata)}


@pytest.mark.long
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_malicious_checkpoint_is_refused_and_nothing_runs(payload: str, trained_once: TinyRun) -> None:
    tiny = trained_once
    if not steps(tiny):
        trained(tiny.config("--training.steps=1", "--lr_scheduler.warmup_steps=1"))
    name = payload.replace(" ", "-").replace(".", "-")
    shutil.copytree(folder(tiny), folder(tiny, name))
    touched = tiny.folder / f"touched-{name}"
    make, message = PAYLOADS[payload]
    forge(checkpoint(tiny, 1, name), make(f"touch {touched}", checkpoint(tiny, 1, name)))
    with pytest.raises(UnsafeCheckpoint) as refusal:
        trained(tiny.config("--training.steps=2", f"--job.name={name}"))
    assert message in str(refusal.value)
    assert str(checkpoint(tiny, 1, name)) in str(refusal.value)
    assert not touched.exists()
    assert steps(tiny, name) == [1]


def of_one_tensor(**changes: Any) -> Metadata:
    """Metadata of one tensor of 2 values, with other values of some fields."""
    size = torch.Size([2])
    values: dict[str, Any] = {
        "name": "a", "size": size, "dtype": torch.float32, "offsets": torch.Size([0]), "sizes": size, "fqn": "a",
        "offset": torch.Size([0]), "path": "__0_0.distcp", "at": 0, "length": 9, "extensions": None,
    }  # fmt: skip
    values |= changes
    chunks = values.get("chunks", [ChunkStorageMetadata(values["offsets"], values["sizes"])])
    entry = values.get("entry", TensorStorageMetadata(TensorProperties(dtype=values["dtype"]), values["size"], chunks))
    info = values.get("info", StorageInfo(values["path"], values["at"], values["length"], values["extensions"]))
    index = values.get("index", MetadataIndex(values["fqn"], values["offset"]))
    return Metadata(values.get("entries", {values["name"]: entry}), storage_data=values.get("places", {index: info}))


@pytest.mark.parametrize(
    "changes",
    [
        {"entries": None}, {"entries": [1]}, {"name": 7}, {"entry": 7}, {"entry": None}, {"size": 2}, {"size": ("x",)},
        {"size": (-2,)}, {"size": [2]}, {"dtype": None}, {"dtype": "float32"}, {"chunks": 7}, {"chunks": [7]},
        {"offsets": None}, {"sizes": (1.5,)}, {"places": 7}, {"places": [1]}, {"index": 7}, {"index": "a"}, {"info": 7},
        {"info": None}, {"fqn": 7}, {"path": None}, {"at": "0"}, {"length": None}, {"length": 1.5},
        {"extensions": 7},
    ],
)  # fmt: skip
def test_metadata_of_other_types_is_one_line(changes: dict[str, Any]) -> None:
    right, wanted = unpickle_metadata(pickle.dumps(of_one_tensor()), "x/.metadata"), of_one_tensor()
    assert right.storage_data == wanted.storage_data
    assert str(right.state_dict_metadata).replace("StoredProperties", "TensorProperties") == str(
        wanted.state_dict_metadata
    )
    with pytest.raises(UnsafeCheckpoint, match=r"^x/\.metadata ") as refusal:
        unpickle_metadata(pickle.dumps(of_one_tensor(**changes)), "x/.metadata")
    assert "\n" not in str(refusal.value)


def test_the_payloads_would_run(tmp_path: Path) -> None:
    """An ordinary unpickler runs them: else the test above would prove nothing."""
    touched = tmp_path / "touched"
    pickle.loads(pickle.dumps(Payload(os.system, f"touch {touched}")))
    assert touched.exists()


# Object stores


@pytest.mark.long
def test_a_run_whose_checkpoints_are_in_a_store_that_fails_now_and_then(tiny: TinyRun) -> None:
    Flaky.register()
    try:
        expected = trained(tiny.config("--job.name=whole"))
        store = ["--checkpoint.folder=flaky://bucket/run", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2"]
        for until in (3, 6):
            final = trained(tiny.config(f"--training.steps={until}", *store))
        assert_equal(final, expected)
        storage = open_storage("flaky://bucket/run")
        listing = storage.list()
        assert manifests.committed_steps(listing) == [5, 6]
        assert {*listing} == {folder_name(5), folder_name(6)}
        manifests.verify(storage, folder_name(6), listing[folder_name(6)])
        assert Flaky.failures > 3
    finally:
        Flaky.store.clear()


class ShortReads(ObjectStorage):
    """Reads of some files lack their last byte."""

    of: ClassVar[list[str]] = []
    calls = 0

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        data = super().read(name, start, size)
        is_short = any(re.search(pattern, name) for pattern in ShortReads.of)
        ShortReads.calls += is_short
        return data[:-1] if is_short else data


@pytest.mark.long
def test_a_store_that_returns_too_few_bytes_costs_no_checkpoint(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read again, and then it is the store's fault: the run ends."""
    store = ["--checkpoint.folder=memory://short/run", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"]
    monkeypatch.setattr("titanlite.train.open_storage", ShortReads)
    storage = open_storage("memory://short/run")
    try:
        trained(tiny.config("--training.steps=2", *store))
        for file in ("manifest.json", "__0_0.distcp"):
            monkeypatch.setattr(ShortReads, "of", [file])
            monkeypatch.setattr(ShortReads, "calls", 0)
            with pytest.raises(RunError) as caught:
                trained(tiny.config("--training.steps=3", *store))
            assert re.search(rf"memory://short/run/step-00000002/{file}: \d+ of \d+ bytes", str(caught.value))
            assert ShortReads.calls == 2
            assert manifests.committed_steps(storage.list()) == [1, 2]
            assert not [name for files in storage.list().values() for name in files if "damaged" in name]
    finally:
        storage.fs.store.clear()  # pyright: ignore


@pytest.mark.long
def test_a_store_that_stays_away_ends_the_run(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    Flaky.register()
    monkeypatch.setattr(ObjectStorage, "PATIENCE", 0.2)
    monkeypatch.setattr(Flaky, "chance", 1.0)
    with pytest.raises((RunError, OSError), match="flaky://bucket/run"):
        trained(tiny.config("--checkpoint.folder=flaky://bucket/run"))


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 5), torch.tensor(7.0), torch.empty(0, 3), torch.randn(70, 30).bfloat16(), torch.rand(9) > 0.5],
    ids=lambda tensor: f"{tensor.dtype} {[*tensor.shape]}",
)
def test_a_tensor_is_written_as_torch_save_writes_it(tensor: torch.Tensor) -> None:
    """What is written around the elements is made once for each shape, and not pickled for each tensor."""
    before, after = around_data(tensor.shape, tensor.dtype)
    data = before + tensor.reshape(-1).view(torch.uint8).numpy().tobytes() + after
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    with serialization.patch("save.compute_crc32", False):  # pyright: ignore[reportAttributeAccessIssue]
        stream = io.BytesIO()
        torch.save(tensor, stream)
    assert data == stream.getvalue()
