"""States in files instead of memory: the same bits, less memory, and nothing left behind."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.helpers import TinyRun, built, mentions, train_on_this_rank
from tests.support.plans import layout_of, planned, read
from tests.support.whole_runs import assert_equal, parameters_of, trained, values_of
from titanlite.checkpoint.manifest import folder_name
from titanlite.config.load import load
from titanlite.optim.rounding import SlicedAdamW
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.techniques import places
from titanlite.techniques.offload import disk as offload
from titanlite.techniques.offload.disk import DiskMemory
from titanlite.tools.cli import run as run_command
from titanlite.tools.plan.estimate import estimate, trace
from titanlite.tools.plan.output import plan_lines, plan_record
from titanlite.train import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are mapped, and dropped, as Linux does it")

MOMENTS = ["--offload.optimizer=disk"]
EVERYTHING = [*MOMENTS, "--offload.parameters=disk", "--training.enable_cpu_offload"]
BFLOAT16 = ["--optimizer.state_dtype=bfloat16", "--training.dtype=bfloat16"]


@pytest.fixture
def _tiny_slices(monkeypatch: pytest.MonkeyPatch, single_process_group: None) -> None:
    """Many in each parameter, and several writes a step. A run that failed does not hold its folder."""
    monkeypatch.setattr("titanlite.optim.rounding.SMALL_SLICE", 512)
    monkeypatch.setattr("titanlite.techniques.offload.disk.WINDOW", 2**17)
    monkeypatch.setattr("titanlite.run.run_folder._lock", lambda path: None)


def folder(tiny: TinyRun, name: str = "tiny") -> Path:
    return tiny.folder / "outputs" / name / "offload"


def mapped(folder: Path) -> list[str]:
    """Files of a folder that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder.absolute()}/" in line]


@pytest.mark.long
@pytest.mark.usefixtures("_tiny_slices")
@pytest.mark.parametrize(
    "types",
    [
        pytest.param([], id="float32", marks=pytest.mark.nightly),
        pytest.param(BFLOAT16[:1], id="bfloat16 moments"),
        pytest.param(BFLOAT16, id="bfloat16", marks=pytest.mark.nightly),
    ],
)
def test_the_same_bits_from_files_without_a_name(tiny: TinyRun, types: list[str]) -> None:
    types = [*types, "--training.steps=3"]
    expected = values_of(train_on_this_rank(tiny.config("--job.name=memory", *types), 0, 1))
    for options, files in ((MOMENTS, 1), (EVERYTHING[1:], 1), (EVERYTHING, 2)):
        name = f"disk-{len(options)}"
        run = train_on_this_rank(tiny.config(f"--job.name={name}", *types, *options), 0, 1)
        assert_equal(values_of(run), expected)
        assert tiny.losses(name) == tiny.losses("memory")
        lines = mapped(folder(tiny, name))
        assert len(lines) == files
        assert all(line.endswith("(deleted)") for line in lines), "they vanish with the process, however it ends"
        assert [*folder(tiny, name).iterdir()] == []
        spans = [range(*(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]
        state = run.optimizer.state[next(iter(run.model.parameters()))]
        assert any(local_tensor(state["exp_avg_sq"]).data_ptr() in span for span in spans) == (MOMENTS[0] in options)
        weights = [local_tensor(parameter).data_ptr() for parameter in run.model.parameters()]
        assert all(any(weight in span for span in spans) for weight in weights) == (options != MOMENTS)
    assert mapped(folder(tiny, "memory")) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_slices_are_adamw_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, threads: int
) -> None:
    """Lengths that are no multiple of what the kernel computes at once; and threads, which divide each slice anew."""
    monkeypatch.setattr("titanlite.optim.rounding.SMALL_SLICE", 2**14)
    request.addfinalizer(lambda: torch.set_num_threads(1))
    torch.set_num_threads(threads)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    torch.manual_seed(0)
    values = [torch.randn(size) for size in (0, 1, 7, 2**14, 2**14 + 1, 3 * 2**14 + 37, 100_003)]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in "12")
    names = {str(number): parameter for number, parameter in enumerate(ours)}
    sliced = SlicedAdamW(
        [{"params": ours}], names, state_dtype=torch.float32, seed=0,
        memory=DiskMemory(tmp_path), **options,
    )  # fmt: skip
    whole = torch.optim.AdamW(theirs, fused=True, **options)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = other.grad = torch.randn_like(mine)
        sliced.step()
        whole.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        for key, value in whole.state[other].items():
            assert torch.equal(sliced.state[mine][key], value), key


def resident_of_files() -> int:
    """Bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:")]
    return int(line.split()[1]) * 1024


@pytest.mark.long
@pytest.mark.parametrize("drops", [True, False])
def test_few_pages_of_files_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops: bool) -> None:
    """96 MiB of moments, of which a few slices of 2 x 1 MiB are. Without dropping them, all are."""
    monkeypatch.setattr("titanlite.optim.rounding.SMALL_SLICE", 2**18)
    monkeypatch.setattr("titanlite.techniques.offload.disk.WINDOW", 2**21)
    if not drops:
        monkeypatch.setattr(offload, "_drop", lambda part: None)
    most: list[int] = []
    changed = DiskMemory.changed

    def looked_at(self: DiskMemory, *tensors: torch.Tensor) -> None:
        changed(self, *tensors)
        most.append(resident_of_files())

    monkeypatch.setattr(DiskMemory, "changed", looked_at)
    weight = nn.Parameter(torch.zeros(12, 2**20))
    disk = DiskMemory(tmp_path)
    optimizer = SlicedAdamW(
        [{"params": [weight]}], {"weight": weight}, state_dtype=torch.float32, seed=0, memory=disk,
        lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
    )  # fmt: skip
    weight.grad = torch.ones_like(weight)
    before = resident_of_files()
    for _ in range(2):
        optimizer.step()
    disk.flush()
    assert weight.max().item() == pytest.approx(-0.2, rel=1e-4)
    assert len(most) == 2 * 12 * 2**20 // 2**18
    if drops:
        assert max(most) - before < 32 * 2**20
        assert resident_of_files() - before < 16 * 2**20
    else:
        assert max(most) - before >= 90 * 2**20


# What is left


@pytest.mark.slow
def test_nothing_is_left_by_a_process_that_is_killed(tiny: TinyRun) -> None:
    code = (
        "import os, pathlib, sys, torch; from titanlite.techniques.offload.disk import DiskMemory\n"
        "disk = DiskMemory(pathlib.Path(sys.argv[1]))\n"
        "tensors = disk.allocate([(torch.Size([1000]), torch.float32)])\n"
        "tensors[0].fill_(1); disk.changed(*tensors); disk.flush(); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(folder(tiny))], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert [*folder(tiny).iterdir()] == []


@pytest.mark.long
@pytest.mark.usefixtures("_tiny_slices")
def test_runs_resume_in_memory_and_on_disk_as_one(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr("titanlite.checkpoint.staging.Staging.begin", lambda self, tensors: names.extend(tensors))
    in_memory = ["--checkpoint.async_mode=disabled", "--training.steps=5"]
    expected = trained(tiny.config("--job.name=whole", *in_memory))
    turns: list[list[str]] = [in_memory, EVERYTHING, MOMENTS]
    for steps, options in enumerate(turns, start=2):
        trained(tiny.config(*options, f"--training.steps={steps}", "--checkpoint.interval=1"))
    assert_equal(trained(tiny.config(*in_memory)), expected)
    assert tiny.losses() == tiny.losses("whole")
    assert (tiny.folder / "outputs" / "tiny" / "checkpoints" / folder_name(3)).is_dir()
    assert names == [], "a copy of the state in memory"


# What goes wrong


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("_tiny_slices")
def test_a_disk_that_is_full_at_the_start(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"^offload\.path: .*/tiny/offload.*0\.00 GiB"):
        train_on_this_rank(tiny.config(*MOMENTS), 0, 1)


def test_too_small_a_disk_is_known_before(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage("/")._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    path = f"--offload.path={tiny.folder}/fast/disk"
    command = ["check", "--here", str(tiny.toml), *MOMENTS, path, "--model.args.n_layers=3"]
    assert run_command([*command, "--model.args.dim=36"]) == 0
    assert run_command([*command, "--model.args.vocab_size=30000"]) == 2
    assert mentions(capfd.readouterr().err, "error: offload.path", f"{tiny.folder}/fast/disk", "0.02 GiB")
    # Four processes of a machine share its disk, and each has a quarter of the states; replicas have all.
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert run_command([*command, "--model.args.dim=36"]) == 0
    assert run_command([*command, "--model.args.dim=36", "--parallelism.data_parallel_replicate_degree=4"]) == 2


@pytest.mark.usefixtures("_tiny_slices")
def test_a_disk_that_fails_while_training(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    run = built(0, 1, tiny.config(*MOMENTS))
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(RunError, match=r"^offload\.path: .*/tiny/offload.*Input/output error$"):
        train(run)


# What is planned


@pytest.mark.long
def test_states_on_disk_are_not_on_the_device() -> None:
    config, layout = read(*EVERYTHING, world_size=8), layout_of(8)
    offloaded = read("--training.enable_cpu_offload", world_size=8)
    traced = trace(offloaded, layout)
    memory, disk = estimate(traced, offloaded, layout), planned(*MOMENTS)
    assert memory.disk == disk.host == 0
    assert disk.disk > 0
    assert {phase["optimizer"] for phase in disk.phases.values()} == {0}
    most = {name: max(phase[name] for phase in disk.phases.values()) for name in ("parameters", "gradients")}
    assert memory.host == disk.disk + sum(most.values())
    found = estimate(traced, config, layout)
    assert (found.disk, found.host) == (disk.disk + most["parameters"], most["gradients"])
    assert found.phases == memory.phases
    assert replace(found.time, total=0.0) == replace(memory.time, total=0.0)
    assert found.time.total > memory.time.total, "updates of states on disk run beside no forward pass"
    [line] = [line for line in plan_lines(found, config) if "on disk" in line]
    assert f"{found.disk / 2**30:.2f} GiB" in line
    assert not any("on disk" in line for line in plan_lines(memory, config))
    assert plan_record(found)["memory"]["disk"] == found.disk


def test_states_on_disk_are_not_in_memory(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before a run: 16 bytes of a parameter, of which 8 or 12 are on disk."""
    assert places(load(tiny.toml, MOMENTS)) == {"optimizer": "disk"}
    assert places(load(tiny.toml, EVERYTHING)) == {"parameters": "disk", "gradients": "host", "optimizer": "disk"}
    config = load(tiny.toml, [])
    count = sum(tensor.numel() for tensor in parameters_of(tiny, []))
    assert config.training.dtype == "float32"
    command = ["check", "--here", str(tiny.toml)]
    for options, size in (([], 16), (MOMENTS, 8), (EVERYTHING, 4)):
        for memory, code in ((size * count, 0), (size * count - 1, 2)):
            module = sys.modules["titanlite.checks.memory"]
            monkeypatch.setattr(module, "host_memory", lambda memory=memory: memory)
            assert run_command([*command, *options]) == code, (options, size)
