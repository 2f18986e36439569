"""`titanlite profile`: where the time of a trace went, in traces made by hand and in one of a real run."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers import TinyRun, mentions, train_on_this_rank
from titanlite.tools import cli
from titanlite.tools.report.profile_command import Profile, read_profile

GEMM = "ampere_sgemm_128x64_tn"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(name: str, category: str, begin: float, end: float, thread: int = 1, collective: str = "") -> dict[str, Any]:
    """An event of a trace, in microseconds."""
    pid = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else 99
    return {
        "ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "pid": pid, "tid": thread,
        "args": {"Collective name": collective},
    }  # fmt: skip


def write(path: Path, events: list[dict[str, Any]], **about: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {"titanlite": {"rank": 3, "world_size": 8}, "deviceProperties": [], **about, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(tree).encode()))
    return path


ON_GPU = [
    event("step 7", "user_annotation", 1000, 2000),
    event("forward", "user_annotation", 1000, 1500),
    event("all-gather layers.0", "user_annotation", 1005, 1009),
    event("backward", "user_annotation", 1500, 2000),
    event("aten::linear", "cpu_op", 1010, 1080),
    event("aten::addmm", "cpu_op", 1030, 1070),
    event("aten::copy_", "cpu_op", 1600, 1610),
    event(GEMM, "kernel", 1100, 1300, thread=7),
    event("triton_fused", "kernel", 1300, 1400, thread=7),
    event(GEMM, "kernel", 1500, 1800, thread=7),
    event(GATHER, "kernel", 1200, 1450, thread=20),
    event(SCATTER, "kernel", 1700, 2050, thread=20),
    event("Memcpy DtoH", "gpu_memcpy", 1850, 1950, thread=9),
    event("Memset", "gpu_memset", 2100, 2120, thread=9),
    event("nccl:all_gather", "gpu_user_annotation", 1200, 1450, thread=20),
    {"ph": "M", "name": "process_name", "pid": 99, "tid": 0, "args": {"name": "python"}},
]
ON_CPU = [
    event("step 1", "user_annotation", 0, 1000),
    event("forward", "user_annotation", 0, 650),
    event("backward", "user_annotation", 650, 1000),
    event("aten::mm", "cpu_op", 100, 300),
    event("c10d::_allgather_base_", "cpu_op", 300, 320),
    event("gloo:all_gather", "user_annotation", 310, 600, thread=2),
    event("aten::copy_", "cpu_op", 320, 590, thread=2),
    event("aten::mul", "cpu_op", 400, 500),
    event("autograd::engine::evaluate_function: AddBackward0", "cpu_op", 690, 850, thread=3),
    event("aten::add", "cpu_op", 700, 800, thread=3),
    event("gloo:all_to_all", "user_annotation", 780, 830, thread=2),
]


def in_microseconds(found: Profile) -> dict[str, float]:
    names = ("total", "compute", "communication", "exposed", "idle")
    return {name: round(1e6 * getattr(found, name), 3) for name in names}


def of_collectives(found: Profile) -> dict[str, tuple[int, int]]:
    """Return the microseconds of each collective, and those that are hidden."""
    return {name: (round(1e6 * it.total), round(1e6 * it.hidden)) for name, it in found.collectives.items()}


def test_collectives_of_one_name_that_overlap_count_once(tmp_path: Path) -> None:
    """Two all-gathers at [0, 100] and [50, 150], beside compute at [40, 60] and before the step."""
    events = [
        event("step 1", "user_annotation", 0, 200),
        event(GATHER, "kernel", -50, 100, thread=20),
        event(GATHER, "kernel", 50, 150, thread=21),
        event(GEMM, "kernel", 40, 60, thread=7),
        event(GEMM, "kernel", -90, -50, thread=7),
    ]
    [found] = read_profile(write(tmp_path / "t.json.gz", events)).collectives.values()
    assert (found.calls, found.total, found.hidden) == (2, pytest.approx(150e-6), pytest.approx(20e-6))


def test_a_trace_of_a_cpu(tmp_path: Path) -> None:
    """Compute [100, 300], [400, 500], and [700, 800] in autograd's thread. Operators within gloo's threads, and those
    that wait, are none. FSDP's reduce-scatter over gloo is an all-to-all."""
    found = read_profile(write(tmp_path / "t.json.gz", ON_CPU))
    assert in_microseconds(found) == {
        "total": 1000, "compute": 400, "communication": 340, "exposed": 220, "idle": 380,
    }  # fmt: skip
    assert of_collectives(found) == {"all-gather": (290, 100), "reduce-scatter": (50, 20)}


def test_a_trace_of_a_gpu(tmp_path: Path) -> None:
    """Compute [1100, 1400] and [1500, 1800]; the all-gather has 200 of its 250 us beside it, the reduce-scatter 100 of
    350. The copy of 100 us within the reduce-scatter and the memset of 20 us are compute, too."""
    gpus = [{"name": "NVIDIA H100 80GB HBM3"}] * 8
    found = read_profile(write(tmp_path / "t.json.gz", ON_GPU, deviceProperties=gpus))
    assert (found.first, found.rank, found.world_size) == (7, 3, 8)
    assert in_microseconds(found) == {
        "total": 1120, "compute": 720, "communication": 600, "exposed": 200, "idle": 200,
    }  # fmt: skip
    assert of_collectives(found) == {"all-gather": (250, 200), "reduce-scatter": (350, 200)}


# The command


def profile(*arguments: object) -> int:
    return cli.run(["profile", *map(str, arguments)])


@pytest.mark.long
@pytest.mark.usefixtures("own_process_group")
def test_a_real_run(tiny: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of operators that torch.profiler made stands below the times of the trace."""
    options = ["--profiling.enable_profiling=true", "--profiling.profile_freq=3", "--profiling.profiler_active=2"]
    config = tiny.config(*options, "--profiling.profiler_warmup=1", "--training.steps=3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train_on_this_rank(config, 0, 1)
    run = tiny.folder / "outputs/tiny"
    path = run / "profile/step-00000003/rank-0.json.gz"
    found = read_profile(path)
    assert (found.first, found.last, found.steps) == (2, 3, 2)
    assert found.compute + found.exposed + found.idle == pytest.approx(found.total)
    assert 0 < found.compute < found.total

    capsys.readouterr()
    assert profile(run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert mentions(lines[0], "steps 2 to 3", "rank 0 of 1", "cpu", path)
    assert ["time", f"{1e3 * found.total / 2:.2f}", "ms"] in [line.split() for line in lines]
    assert f"operators: {path.parent}/rank-0.txt" in lines
    matmuls = next(line.split() for line in lines if line.lstrip().startswith("aten::mm "))
    assert int(matmuls[-1]) == 2 * 3 * (7 + 1), "steps; forward and two in backward; layers and the head"


DAMAGED = {
    "not compressed": b"{}",
    "cut off": gzip.compress(json.dumps({"traceEvents": []}).encode())[:-9],
    "no JSON": gzip.compress(b"{'a'"),
    "no time": gzip.compress(json.dumps({"traceEvents": [{"ph": "X", "name": "a"}]}).encode()),
    "infinite": gzip.compress(b'{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": NaN}]}'),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_trace(content: bytes, tmp_path: Path, refused: Callable[..., str]) -> None:
    path = tmp_path / "profile/step-00000007/rank-0.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert refused("profile", tmp_path).startswith(f"error: {path} ")


def test_mistakes(tmp_path: Path, refused: Callable[..., str]) -> None:
    run = tmp_path / "run"
    assert mentions(refused("profile", run), run)
    (run / "profile/step-00000002").mkdir(parents=True)
    assert mentions(refused("profile", run), run)
    for step in (5, 10):
        for rank in (0, 1):
            write(run / f"profile/step-{step:08}/rank-{rank}.json.gz", [event("aten::mm", "cpu_op", 0, 1)])
    newest = run / "profile/step-00000010"
    assert mentions(refused("profile", run), f"{newest}/rank-0.json.gz", "steps")
    assert mentions(refused("profile", newest / "rank-1.json.gz"), f"{newest}/rank-1.json.gz", "steps")
