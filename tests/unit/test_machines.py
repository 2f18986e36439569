"""Tests of the machines in one process: needs against room, devices, slow pairs, and the table. Faults are planted."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers import TinyRun
from titanlite import cli
from titanlite.parallelize.freeze import freeze
from titanlite.preflight import preflight
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks
from titanlite.selfcheck import needs
from titanlite.selfcheck.command import run
from titanlite.selfcheck.devices import NO_DRIVER_RECORDS, check_arithmetic, check_gpus, driver_records, known_matrices
from titanlite.selfcheck.findings import Job, Result, merge, size_text, table_lines
from titanlite.selfcheck.folder import check_folder
from titanlite.selfcheck.links import slowest_pairs
from titanlite.selfcheck.needs import Need, disk_needs, kept_checkpoints
from titanlite.selfcheck.room import Free, check_disk, check_memory, free_at

CPU = torch.device("cpu")
ALONE = Job(Ranks(0, 1, 0, 1), ["host-a"])
GIB = 2**30


def cluster(nodes: int, within: int) -> Job:
    hosts = [f"host-{rank // within}" for rank in range(nodes * within)]
    return Job(Ranks(0, nodes * within, 0, within), hosts)


def test_a_line_of_several_ranks_comes_once() -> None:
    job = cluster(2, 2)
    results = [Result("a"), Result(problems=["bad"]), OSError(28, "No space left", "/x"), Result(problems=["bad"])]
    merged = merge(results, job)
    assert merged.problems == [
        "rank 1 on host-0 and rank 3 on host-1: bad", "rank 2 on host-1: /x: No space left",
    ]  # fmt: skip
    assert table_lines("disk", merged) == [
        "FAILED   disk               a",
        "           rank 1 on host-0 and rank 3 on host-1: bad",
        "           rank 2 on host-1: /x: No space left",
    ]
    assert table_lines("x", Result("1 GB/s", warnings=["slow"]))[0].startswith("warning  x ")
    assert [size_text(count) for count in (12, 3 * 2**20, 5 * 2**40)] == ["12 bytes", "3 MiB", "5 TiB"]


def test_a_slow_pair_is_named() -> None:
    """Pairs between hosts are slower than pairs in a host, and are compared with each other only."""
    job = cluster(4, 2)
    fast, slow = 10e9, 1e9
    rates = {(rank, (rank + 1) % 8): fast if rank % 2 == 0 else slow for rank in range(8)}
    assert slowest_pairs(rates, job) == Result("in a host 10 to 10 GB/s, between hosts 1 to 1 GB/s")
    rates[3, 4] = 0.2e9
    assert slowest_pairs(rates, job).warnings == [
        "rank 3 on host-1 and rank 4 on host-2: 0.2 GB/s, the median between hosts is 1"
    ]


def test_an_error_names_test_and_rank() -> None:
    """A collective that another rank never joins ends with an exception."""

    def fails() -> Result:
        raise RuntimeError("Timed out waiting 120000ms for recv operation")

    lines: list[str] = []
    with pytest.raises(UserError, match=r"^links: rank 0 on \S+: RuntimeError: Timed out waiting 120000ms"):
        run(iter([("clocks", lambda: Result("0 s apart")), ("links", fails)]), lines.append)
    assert lines == ["ok       clocks             0 s apart"]


# Disk and memory


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        (["interval=10", "keep_latest_k=3"], 100, 4),
        (["interval=10", "keep_latest_k=0"], 95, 10),
        (["interval=60", "keep_latest_k=3"], 100, 2),
        (["interval=10", "keep_latest_k=2", "keep_every=25"], 100, 5),
    ],
)
def test_checkpoints_at_the_same_time(options: list[str], steps: int, expected: int, tiny: TinyRun) -> None:
    config = tiny.config(*(f"--checkpoint.{option}" for option in options))
    assert kept_checkpoints(config.checkpoint, steps) == expected


def test_needs_of_a_run(tiny: TinyRun) -> None:
    config = tiny.config(
        "--checkpoint.interval=2", "--checkpoint.keep_latest_k=1", "--checkpoint.export_every=4",
        "--checkpoint.last_save_in_hf", "--checkpoint.export_dtype=bfloat16",
    )  # fmt: skip
    resolved = preflight(config, ALONE.ranks, CPU)
    model = resolved.model.build()
    count = sum(parameter.numel() for parameter in model.parameters())
    checkpoints, exports, tokens = disk_needs(config, model, resolved.tokenizer, world_size=4, nodes=2)
    assert checkpoints.bytes == 2 * count * (4 + 8)
    assert checkpoints.files == 2 * (4 + needs.SMALL_FILES)
    assert exports.bytes == 2 * count * 2
    assert tokens.bytes == 2 * sum(file.stat().st_size for file in tiny.text.iterdir())
    assert tokens.is_estimate
    sizes = {"world_size": 4, "local_world_size": 2}
    assert needs.staging_bytes(config, model, **sizes) == count * 12 / 2
    assert needs.state_in_host_memory(config, model, **sizes, is_cpu=True) == count * 16 / 2
    assert needs.state_in_host_memory(config, model, **sizes, is_cpu=False) == 0
    local = tiny.config("--checkpoint.folder=/shared", "--checkpoint.local_folder=/fast")
    part = disk_needs(local, model, resolved.tokenizer, world_size=4, nodes=2)[-1]
    assert (part.place, part.bytes, part.files) == ("/fast", count * 12 / 2, 3)
    frozen = tiny.config('--freeze.parameters=["layers.*"]', "--freeze.dtype=bfloat16")
    freeze(model, frozen.freeze)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert 0 < trained < count
    assert needs.checkpoint_bytes(model, frozen) == trained * 12 + (count - trained) * 2
    synchronous = tiny.config("--checkpoint.async_mode=disabled")
    assert needs.staging_bytes(synchronous, model, **sizes) == 0


def test_checkpoints_that_are_there_need_no_more_space(tiny: TinyRun) -> None:
    config = tiny.config("--checkpoint.interval=2", "--checkpoint.keep_latest_k=1")
    resolved = preflight(config, ALONE.ranks, CPU)
    model = resolved.model.build()
    before = disk_needs(config, model, resolved.tokenizer, world_size=1, nodes=1)[0]
    step = tiny.folder / "outputs/tiny/checkpoints/step-00000002"
    step.mkdir(parents=True)
    (step / "data").write_bytes(bytes(1000))
    after = disk_needs(config, model, resolved.tokenizer, world_size=1, nodes=1)[0]
    assert before.bytes - after.bytes == 1000
    assert after.what.endswith(", 1 of them are there")


def disk_of(size: int, *needs_here: Need, files: int | None = None) -> Result:
    return check_disk(lambda: needs_here, ALONE, free=lambda place: Free(1, size, files))


@pytest.mark.usefixtures("single_process_group")
def test_a_disk_that_is_too_small() -> None:
    run = Need("4 checkpoints", "/shared", 8 * GIB, files=100)
    assert disk_of(10 * GIB, run).status == "ok"
    [warning] = disk_of(9 * GIB, run).warnings
    assert warning == "rank 0 on host-a: the run writes 8 GiB and 9 GiB are free (4 checkpoints in /shared)"
    [problem] = disk_of(5 * GIB, run).problems
    assert problem.startswith("rank 0 on host-a: the run writes 8 GiB and 5 GiB are free (4 checkpoints in /shared): ")
    [problem] = disk_of(10 * GIB, run, files=99).problems
    assert problem.endswith("100 files of 4 checkpoints, and the file system takes 99 more (inodes)")
    tokens = Need("tokens", "/cache", 4 * GIB, is_estimate=True)
    assert disk_of(10 * GIB, run, tokens).status == "warning", "both are on one file system"
    apart = check_disk(lambda: [run, tokens], ALONE, free=lambda place: Free(len(place), 10 * GIB, None))
    assert apart.status == "ok"


def test_free_space_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    there, below = free_at(str(tmp_path)), free_at(str(tmp_path / "not/there/yet"))
    assert there.device == below.device
    assert there.bytes > 0


@pytest.mark.usefixtures("single_process_group")
def test_memory_that_is_too_small() -> None:
    results = [check_memory(lambda: (4 * GIB, 2 * GIB), ALONE, lambda size=size: size * GIB) for size in (8, 7, 5)]
    assert [result.status for result in results] == ["ok", "warning", "FAILED"]
    assert results[2].problems == [
        "rank 0 on host-a: needs 6 GiB of memory (2 GiB of it for background saves), and has 5 GiB: set "
        'checkpoint.async_mode = "disabled", or end other programs'
    ]
    assert check_memory(lambda: (0.0, 0.0), ALONE).status == "ok"


# Devices


def test_known_matrices_are_exact_in_bfloat16() -> None:
    left, right = known_matrices(200)
    found = left.to(torch.bfloat16) @ right.to(torch.bfloat16)
    assert torch.equal(found.double(), left.double() @ right.double())
    assert found.abs().max() <= 128
    assert len(found.unique()) > 20
    assert torch.equal(left[:61], left[61:122])


@pytest.mark.usefixtures("single_process_group")
def test_a_device_that_computes_wrong_values() -> None:
    right = check_arithmetic(CPU, ALONE, seconds=0.01)
    assert right.status == "ok"
    assert re.fullmatch(r"bfloat16 matmuls exact, \S+ TFLOP/s", right.value)

    def one_flipped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = a @ b
        found[17, 5] += 1
        return found

    [problem] = check_arithmetic(CPU, ALONE, multiply=one_flipped, seconds=1e-6).problems
    assert problem == (
        "rank 0 on host-a: the CPU computes wrong values: 2 elements in 2 matmuls of 512 x 128 x 512 with known "
        "results: take it out of the job"
    )

    def fails(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access")

    assert "illegal memory access" in check_arithmetic(CPU, ALONE, multiply=fails).problems[0]


def test_records_that_are_not_there() -> None:
    assert check_gpus(CPU, ALONE) == Result("not available: the job runs on CPUs")
    value, problems, warnings = driver_records(0)
    assert value == NO_DRIVER_RECORDS or value.startswith("ECC and throttling not available (")
    assert (problems, warnings) == ([], [])


# The folder and the command


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("place", [lambda path: str(path / "new/run/checkpoints"), lambda path: "memory://selfcheck"])
def test_a_folder_is_left_as_it_was(place: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    result = check_folder(place(tmp_path), ALONE, size=2**20)
    assert result.status == "ok"
    assert "1 MiB: written at" in result.value
    assert [*tmp_path.rglob("*")] == [tmp_path / "new"]


@pytest.mark.usefixtures("single_process_group")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = check_folder(str(tmp_path / "file" / "checkpoints"), ALONE, size=2**20)
    assert result.status == "FAILED"
    assert "Not a directory" in result.problems[0]
    assert check_folder("nosuch://bucket", ALONE).status == "FAILED"


@pytest.mark.long
@pytest.mark.usefixtures("own_process_group")
def test_the_command_of_one_process(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--machines", str(tiny.toml)]
    assert cli.run(words) == 0
    out, err = capfd.readouterr()
    assert err == ""
    lines = out.splitlines()
    names = ["versions, config", "clocks", "checkpoint folder", "disk", "host memory", "arithmetic", "GPUs"]
    assert [line[9:27].strip() for line in lines[:-1] if not line.startswith(" ")] == names
    assert "FAILED" not in out
    assert lines[-1].startswith("no test failed (processes: 1, hosts: 1, time: ")
    assert not (tiny.folder / "outputs").exists()

    assert (
        cli.run([*words, "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0", f"--training.steps={10**12}"]) == 2
    )
    out, err = capfd.readouterr()
    assert err == ""
    assert "FAILED   disk " in out
    assert "1 FAILED: disk (" in out
