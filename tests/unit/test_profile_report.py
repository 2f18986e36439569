"""`titanlite profile`: where the time of a trace went, in traces made by hand and in one of a real run."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers import TinyRun, train_on_this_rank
from titanlite.config.load import dump
from titanlite.tools import cli
from titanlite.tools.plan.command import share_of_process
from titanlite.tools.plan.estimate import Layout, plan
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.schedule import CollectiveTime
from titanlite.tools.report.intervals import gaps, intersection, length, union
from titanlite.tools.report.profile_analysis import Analysis, Collective, Gap, Operator, analyse, collective_name
from titanlite.tools.report.profile_command import profile_lines
from titanlite.tools.report.profile_plan import Prediction, predict
from titanlite.tools.report.trace_file import Event, read_trace

GEMM = "ampere_sgemm_128x64_tn"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(name: str, category: str, begin: float, end: float, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    """An event of a trace, in microseconds."""
    names = {"operator": "External id", "collective": "Collective name"}
    args = {names[key]: value for key, value in arguments.items()}
    pid = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else 99
    return {
        "ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "pid": pid, "tid": thread,
        "args": args,
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
    event("aten::linear", "cpu_op", 1010, 1080, operator=4),
    event("aten::addmm", "cpu_op", 1030, 1070, operator=5),
    event("aten::copy_", "cpu_op", 1600, 1610, operator=6),
    event(GEMM, "kernel", 1100, 1300, thread=7, operator=5),
    event("triton_fused", "kernel", 1300, 1400, thread=7),
    event(GEMM, "kernel", 1500, 1800, thread=7, operator=5),
    event(GATHER, "kernel", 1200, 1450, thread=20),
    event(SCATTER, "kernel", 1700, 2050, thread=20),
    event("Memcpy DtoH", "gpu_memcpy", 1850, 1950, thread=9, operator=6),
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


def in_microseconds(found: Analysis) -> dict[str, float]:
    names = ("total", "compute", "communication", "exposed", "transfers", "idle")
    return {name: round(1e6 * getattr(found, name), 3) for name in names}


def test_unions_intersections_and_gaps() -> None:
    a = union([(5, 7), (1, 3), (2, 4), (4, 4.5), (9, 9), (6, 6.5)])
    assert a == [(1, 4.5), (5, 7)]
    assert length(a) == 5.5
    b = union([(0, 1), (3, 6), (6.5, 10)])
    assert intersection(a, b) == intersection(b, a) == [(3, 4.5), (5, 6), (6.5, 7)]
    assert gaps(a, 0, 8) == [(0, 1), (4.5, 5), (7, 8)]
    assert gaps(a, 2, 6) == [(4.5, 5)]
    assert gaps(a, 1, 3) == gaps([], 4, 4) == []
    assert gaps([], 0, 1) == [(0, 1)]


def test_a_trace_of_a_gpu(tmp_path: Path) -> None:
    """Compute [1100, 1400] and [1500, 1800]; the all-gather has 200 of its 250 us beside it, the reduce-scatter 100 of
    350. The copy within the reduce-scatter does not count; the memset of 20 us does."""
    trace = read_trace(write(tmp_path / "t.json.gz", ON_GPU, deviceProperties=[{"name": "NVIDIA H100 80GB HBM3"}] * 8))
    assert (trace.rank, trace.world_size, trace.device, trace.devices) == (3, 8, "NVIDIA H100 80GB HBM3", 8)
    found = analyse(trace)
    assert (found.first, found.last, found.steps) == (7, 7, 1)
    assert in_microseconds(found) == {
        "total": 1120, "compute": 600, "communication": 600, "exposed": 300, "transfers": 20, "idle": 200,
    }  # fmt: skip
    assert found.hidden_share == pytest.approx(0.5)
    expected = [Collective("reduce-scatter", 1, 350e-6, 100e-6), Collective("all-gather", 1, 250e-6, 200e-6)]
    for one, other in zip(found.collectives, expected, strict=True):
        assert (one.name, one.calls) == (other.name, other.calls)
        assert (one.total, one.hidden) == pytest.approx((other.total, other.hidden))
    assert found.phases == pytest.approx({"forward": 500e-6, "backward": 500e-6})


def test_operators_have_their_own_time_on_host_and_device(tmp_path: Path) -> None:
    """The work of a GPU counts for the operator that launched it, and under its own name if none did."""
    operators = {it.name: it for it in analyse(read_trace(write(tmp_path / "t.json.gz", ON_GPU))).operators}
    expected = [
        Operator("aten::addmm", 1, 40e-6, 500e-6),
        Operator(SCATTER, 1, 0, 350e-6),
        Operator(GATHER, 1, 0, 250e-6),
        Operator("aten::copy_", 1, 10e-6, 100e-6),
        Operator("triton_fused", 1, 0, 100e-6),
        Operator("Memset", 1, 0, 20e-6),
        Operator("aten::linear", 1, 30e-6, 0),
    ]
    assert [*operators] == [it.name for it in expected]
    for it in expected:
        one = operators[it.name]
        assert (one.calls, one.host, one.device) == pytest.approx((it.calls, it.host, it.device))


def test_idle_gaps_name_phase_and_neighbours(tmp_path: Path) -> None:
    first, *others = analyse(read_trace(write(tmp_path / "t.json.gz", ON_GPU))).gaps
    assert first == Gap(7, 0.0, first.seconds, "forward", "", GEMM)
    assert first.seconds == pytest.approx(100e-6)
    assert [(it.phase, it.before, it.after) for it in others] == [("forward", GATHER, GEMM), ("", SCATTER, "Memset")]
    assert [1e6 * it.since for it in others] == pytest.approx([450, 1050])


def test_a_trace_of_a_cpu(tmp_path: Path) -> None:
    """Compute [100, 300], [400, 500], and [700, 800] in autograd's thread. Operators within gloo's threads, and those
    that wait, are none. FSDP's reduce-scatter over gloo is an all-to-all."""
    found = analyse(read_trace(write(tmp_path / "t.json.gz", ON_CPU)))
    assert in_microseconds(found) == {
        "total": 1000, "compute": 400, "communication": 340, "exposed": 220, "transfers": 0, "idle": 380,
    }  # fmt: skip
    assert [(it.name, round(1e6 * it.total), round(1e6 * it.hidden)) for it in found.collectives] == [
        ("all-gather", 290, 100),
        ("reduce-scatter", 50, 20),
    ]
    host = {it.name: round(1e6 * it.host) for it in found.operators}
    assert host["aten::add"] == 100
    assert host["autograd::engine::evaluate_function: AddBackward0"] == 60


@pytest.mark.parametrize(
    ("name", "collective", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL", "", "all-reduce"),
        ("ncclDevKernel_Broadcast_RING_LL", "", "broadcast"),
        ("ncclDevKernel_SendRecv", "", "send and receive"),
        ("ncclDevKernel_Generic_1", "_allgather_base", "all-gather"),
        ("ncclDevKernel_Generic_1", "reduce_scatter_tensor_coalesced", "reduce-scatter"),
        ("ncclDevKernel_Generic_1", "", "other"),
        ("ampere_sgemm_128x64_tn", "", ""),
    ],
)
def test_names_of_collectives(name: str, collective: str, expected: str) -> None:
    assert collective_name(Event(name, "kernel", 0, 1, ("0", "20"), None, collective)) == expected


# The command


def profile(*arguments: object) -> int:
    return cli.run(["profile", *map(str, arguments)])


@pytest.mark.long
@pytest.mark.usefixtures("own_process_group")
def test_a_real_run(tiny: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan's times for a known GPU stand beside those of the trace."""
    options = ["--profiling.enable_profiling=true", "--profiling.profile_freq=3", "--profiling.profiler_active=2"]
    config = tiny.config(*options, "--profiling.profiler_warmup=1", "--training.steps=3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train_on_this_rank(config, 0, 1)
    dist.destroy_process_group()  # a plan makes its own
    run = tiny.folder / "outputs/tiny"
    trace = read_trace(run / "profile/step-00000003/rank-0.json.gz")
    found = analyse(trace)
    assert (found.first, found.last, found.steps) == (2, 3, 2)
    assert [*found.phases] == ["data", "forward", "backward", "update", "metrics"]
    assert found.compute + found.exposed + found.idle == pytest.approx(found.total)
    matmuls = next(it for it in found.operators if it.name == "aten::mm")
    assert matmuls.calls == 2 * 3 * (3 * 7 + 1), "steps; forward and two in backward; layers and the head"
    assert 0 < matmuls.host < found.compute

    capsys.readouterr()
    assert profile(run, "--no-plan", "--top", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"steps 2 to 3, rank 0 of 1 on cpu: {trace.path}"
    assert f"  time                  {1e3 * found.total / 2:7.2f} ms" in lines
    assert lines[lines.index("longest idle gaps") - 2].startswith(f"  {found.operators[2].name[:57]}")
    assert profile(run, "--gpu", "H100", "--gpus-per-node", 4, "--json", "--top", 1) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["first"], record["last"], record["total"]) == (2, 3, found.total)
    assert [it["name"] for it in record["operators"]] == [found.operators[0].name]
    time = plan(config, Layout(1, find_hardware("H100"), 1)).time
    assert {name: record["plan_of_a_step"][name] for name in ("hardware", "total", "compute", "exposed")} == {
        "hardware": "H100", "total": time.total, "compute": time.compute + time.update, "exposed": 0,
    }  # fmt: skip


def test_the_plan_is_printed_beside_what_was_measured(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.json.gz", ON_GPU))
    predicted = Prediction(
        "H100", 1e-3, 8e-4, 5e-4, 1e-4, {"all-gather": 3 * 2**20, "all-reduce": 2**19},
        {"all-gather": CollectiveTime(4e-4, 3.8e-4), "all-reduce": CollectiveTime(1e-4, 2e-5)},
    )  # fmt: skip
    assert predicted.hidden_share == pytest.approx(0.8)
    lines = [*profile_lines(trace, analyse(trace), predicted, reason="", top=1)]
    assert lines[2:9] == [
        "a step                    measured         plan   on H100",
        "  time                     1.12 ms      1.00 ms",
        "  compute                  0.60 ms      0.80 ms",
        "  collectives              0.60 ms      0.50 ms",
        "    not hidden             0.30 ms      0.10 ms",
        "  memory transfers only    0.02 ms",
        "  idle                     0.20 ms",
    ]
    assert lines[9] == "  collectives hidden         50.0%        80.0%"
    assert lines[11:15] == [
        "collectives of a step      calls       time   hidden  not hidden   plan: time   hidden          bytes",
        "  reduce-scatter               1   0.35 ms    28.6%     0.25 ms         none                0.00 MiB",
        "  all-gather                   1   0.25 ms    80.0%     0.05 ms      0.40 ms    95.0%       3.00 MiB",
        "  all-reduce                   0   0.00 ms              0.00 ms      0.10 ms    20.0%       0.50 MiB",
    ]


def test_a_plan_without_times_of_collectives(tmp_path: Path) -> None:
    """The reason and the measured times are printed, nothing else."""
    trace = read_trace(write(tmp_path / "t.json.gz", ON_CPU))
    unknown = Prediction("cpu", None, 8e-4, None, None, {"all-gather": 2**20}, note="the plan has no times")
    assert unknown.hidden_share is None
    lines = [*profile_lines(trace, analyse(trace), unknown, reason="", top=1)]
    assert lines[3:9] == [
        "  time                     1.00 ms",
        "  compute                  0.40 ms      0.80 ms",
        "  collectives              0.34 ms",
        "    not hidden             0.22 ms",
        "  idle                     0.38 ms",
        "  collectives hidden         35.3%",
    ]
    assert lines[9] == "the plan has no times"
    assert (
        lines[12]
        == "  all-gather                   1   0.29 ms    34.5%     0.19 ms         none                1.00 MiB"
    )


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["H100", pytest.param("calibrated", marks=pytest.mark.nightly), "cpu"])
def test_the_prediction_of_a_run_with_collectives(gpu: str, tiny: TinyRun) -> None:
    """Two ranks: FSDP's collectives have a time and a hidden part on a GPU of the table; on a machine whose links were
    calibrated a time, of which nothing is hidden; and no time on a CPU whose links nobody measured."""
    config = tiny.config()
    run = tiny.folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(dump(config))
    trace = read_trace(write(run / "t.json.gz", ON_CPU, titanlite={"rank": 0, "world_size": 2}))
    machine = run / "machine.toml"
    rates = dict.fromkeys(("memory", "bf16_flops", "fp32_flops", "memory_bandwidth"), 1e11) | {"link_bandwidth": 1e8}
    text = "".join(f"{key} = {value}\n" for key, value in rates.items()) + "network_bandwidth = 1e9\n"
    machine.write_text('base = "cpu"\n' + text)
    found = predict(run, trace, config=None, gpu=str(machine) if gpu == "calibrated" else gpu, gpus_per_node=None)
    assert found.bytes["all-gather"] > found.bytes["reduce-scatter"] // 2 > 0
    if gpu == "cpu":
        assert (found.total, found.communication, found.collectives) == (None, None, {})
        assert found.note == (
            "the plan has no times of collectives on cpu, whose links were not measured: titanlite calibrate "
            "writes a file for --gpu"
        )
        return
    times = {name: found.collectives[name] for name in ("all-gather", "reduce-scatter")}
    assert found.note == ""
    assert found.communication == pytest.approx(sum(it.total for it in found.collectives.values()))
    if gpu == "H100":
        assert all(0 < it.hidden < it.total for it in times.values())
        return
    assert [it.hidden for it in found.collectives.values()] == [0.0] * len(found.collectives)
    for name in times:  # two processes share the machine, and reach 0.8 of the bandwidth
        assert times[name].total == pytest.approx(found.bytes[name] / 2 / (0.8 * 1e8 / 2), rel=0.01)


def test_what_is_printed_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "profile/step-00000007/rank-3.json.gz", ON_GPU)
    assert profile(tmp_path, "--rank", 3, "--no-plan", "--top", 2) == 0
    assert (
        capsys.readouterr().out.splitlines()
        == f"""\
step 7, rank 3 of 8 on cpu: {tmp_path}/profile/step-00000007/rank-3.json.gz

a step                    measured
  time                     1.12 ms
  compute                  0.60 ms
  collectives              0.60 ms
    not hidden             0.30 ms
  memory transfers only    0.02 ms
  idle                     0.20 ms
  collectives hidden         50.0%
no plan to compare with: --no-plan

collectives of a step      calls       time   hidden  not hidden
  reduce-scatter               1   0.35 ms    28.6%     0.25 ms
  all-gather                   1   0.25 ms    80.0%     0.05 ms

time of the host by phase: forward 50.0%, backward 50.0%

operators, own time of a step                                    calls       host     device   share
  aten::addmm                                                        1    0.04 ms    0.50 ms   44.6%
  ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernel...       1    0.00 ms    0.35 ms   31.2%

longest idle gaps
   0.10 ms in forward of step 7, 0.00 ms after its begin, between nothing and {GEMM}
   0.05 ms in forward of step 7, 0.45 ms after its begin, between {GATHER[:57]}... and {GEMM}
   0.05 ms in no phase of step 7, 1.05 ms after its begin, between {SCATTER[:57]}... and Memset
""".splitlines()
    )


def test_a_run_whose_config_cannot_be_planned_has_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "profile/step-00000007/rank-0.json.gz", ON_GPU)
    assert profile(tmp_path) == 0
    assert f"no plan to compare with: no config file {tmp_path}/config.toml" in capsys.readouterr().out


def test_the_share_of_a_process() -> None:
    machine = replace(find_hardware("H100"), measured=True)
    assert share_of_process(machine, 4).memory_bandwidth == machine.memory_bandwidth / 4


DAMAGED = {
    "not compressed": b"{}",
    "cut off": gzip.compress(json.dumps({"traceEvents": []}).encode())[:-9],
    "no JSON": gzip.compress(b"{'a'"),
    "a list": gzip.compress(b"[]"),
    "no events": gzip.compress(b"{}"),
    "no time": gzip.compress(json.dumps({"traceEvents": [{"ph": "X", "name": "a"}]}).encode()),
    "infinite": gzip.compress(b'{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": NaN}]}'),
    "empty": b"",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_trace(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile/step-00000007/rank-0.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert profile(tmp_path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path} ")
    assert "is damaged: it is not a trace of torch.profiler" in line or "cannot be read" in line


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: object) -> str:
        assert profile(*arguments) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line.removeprefix("error: ")

    run = tmp_path / "run"
    assert error(run) == f"no folder {run}: name the folder of a run, for example outputs/debug"
    (run / "profile/step-00000002").mkdir(parents=True)
    assert error(run).startswith(f"{run} has no profile: train with --profiling.enable_profiling")
    for step in (5, 10):
        write(run / f"profile/step-{step:08}/rank-1.json.gz", [event("aten::mm", "cpu_op", 0, 1)])
    assert error(run, "--step", 7) == f"{run} has no profile of step 7: there are those of 5, 10"
    folder = run / "profile/step-00000010"
    assert error(run) == f"{folder} has no trace of rank 0: there are those of 1"
    assert error(run, "--rank", 1) == f"{folder}/rank-1.json.gz has no ranges of steps: it is not a trace of titanlite"
    assert error(run, "--step", 0).endswith("argument --step: expected a number of at least 1, got '0'")
