"""`titanlite calibrate`: the file that it writes, and what `plan` does with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite import cli
from titanlite.plan import calibrate
from titanlite.plan.time import Collective, Group, Kernel, collective_time, kernel_time
from titanlite.runtime.errors import UserError
from titanlite.runtime.hardware import find_hardware, host_memory, load_hardware
from titanlite.runtime.process_group import Ranks
from titanlite.runtime.rates import Rates, rate_at, rates_text, read_rates

CPU = torch.device("cpu")
RATES = Rates(
    matmul={"bfloat16": ((1e9, 1e14), (1e11, 4e14))},
    attention={"float32": ((1e9, 2e13),)},
    memory=((1e6, 1e12), (1e8, 3e12)),
    launch_seconds=4e-6,
    hop_seconds=3e-6,
    links={"all_gather": 3e11, "reduce_scatter": 2e11},
    network={"all_reduce": 2e10},
    to_device=5e10,
    to_host=4e10,
)


BANDWIDTHS = "expected bytes a second for some of all_gather, reduce_scatter, all_reduce"


def file_of(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_rates_between_sizes_and_beyond_them() -> None:
    curve = ((1e2, 10.0), (1e4, 1000.0), (1e6, 1000.0))
    expected = {1: 10, 100: 10, 1e3: 100, 1e4: 1000, 1e5: 1000, 1e9: 1000}
    assert {size: rate_at(curve, size) for size in expected} == pytest.approx(expected)
    assert rate_at(((5.0, 3.0),), 1) == rate_at(((5.0, 3.0),), 9) == 3


def test_a_file_keeps_what_was_measured(tmp_path: Path) -> None:
    found = load_hardware(file_of(tmp_path, 'base = "H100"\n' + rates_text(RATES)))
    assert found.rates == RATES
    assert replace(found, rates=None, name="H100", sources="", driver_names=()) == replace(
        find_hardware("H100"), sources="", driver_names=()
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rates = 3", "rates: expected a table as `titanlite calibrate` writes it, got 3"),
        ("[rates]\nmemmory = [[1, 2]]", "rates: memmory: unknown key, did you mean memory?"),
        ("[rates]\nlaunch_seconds = 0", "rates: launch_seconds: expected a number above 0, got 0"),
        ("[rates]\nlinks = 3", f"rates: links: {BANDWIDTHS}"),
        ("[rates.network]\nall_to_all = 1e9", f"rates: network: {BANDWIDTHS}"),
        ("[rates.links]\nall_gather = 0", f"rates: links: {BANDWIDTHS}"),
        ("[rates.matmul]\nint8 = [[1, 2]]", "rates: matmul: expected a table with some of bfloat16, float32, float8"),
        *(
            (
                f"[rates]\nmemory = {curve}",
                "rates: memory: expected pairs of numbers above 0, [[size, rate], ...], in the order of their sizes",
            )
            for curve in ("[]", "[[1]]", "[[1, -2]]", "[[2, 1], [1, 1]]", "[[1, true]]")
        ),
    ],
)
def test_mistakes_in_rates(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_hardware(file_of(tmp_path, 'base = "H100"\n' + text))
    assert str(error.value) == f"{message} (mine.toml)"


def test_measured_rates_replace_assumptions() -> None:
    """Times by hand: 1e10 FLOPs are half-way between the sizes of the curve, at 2e14 FLOP/s."""
    plain = find_hardware("H100")
    gpu = replace(plain, rates=RATES)
    matmul = Kernel("matmul", 4e10, 4, "bfloat16", launches=4)
    assert kernel_time(matmul, gpu) == pytest.approx(4e10 / 2e14)
    assert kernel_time(matmul, plain) == pytest.approx(4e10 / (0.62 * 989e12))
    assert kernel_time(Kernel("attention", 1e12, 4, "float32"), gpu) == pytest.approx(1e12 / 2e13)
    not_measured = Kernel("attention", 1e12, 4, "bfloat16")
    assert kernel_time(not_measured, gpu) == kernel_time(not_measured, plain)
    assert kernel_time(Kernel("memory", 0, 10**9, "float32"), gpu) == pytest.approx(1e9 / 3e12)
    assert kernel_time(Kernel("memory", 0, 4, "float32", launches=3), gpu) == pytest.approx(12e-6)
    small = Collective("all_gather", 8, Group(8, 8))
    assert collective_time(small, gpu, 8) == pytest.approx(7 * 3e-6, rel=1e-4)
    assert collective_time(small, plain, 8) == pytest.approx(7 * 2e-6, rel=1e-4)


def test_each_collective_has_its_measured_bandwidth() -> None:
    """Long collectives of 8 GPUs in a node, and of two nodes. The rest has 0.8 of the data sheet's rate."""
    plain = find_hardware("H100")
    gpu = replace(plain, rates=RATES)
    expected = {"all_gather": 3e11, "reduce_scatter": 2e11, "all_reduce": 0.8 * 450e9 / 2}
    for op, bus in expected.items():
        found = collective_time(Collective(op, 8 * 10**12, Group(8, 8)), gpu, 8)  # pyright: ignore
        assert found == pytest.approx(7e12 / bus, rel=1e-4)
    across = collective_time(Collective("all_reduce", 16 * 10**12, Group(16, 8)), gpu, 8)
    assert across == pytest.approx(2 * 15e12 / (8 * 2e10), rel=1e-4)
    slower = collective_time(Collective("reduce_scatter", 16 * 10**12, Group(16, 8)), gpu, 8)
    assert slower == pytest.approx(15e12 / 2e11, rel=1e-4), "links are slower than eight network cards"


def test_processes_share_a_machine() -> None:
    half = RATES.shared_by(2)
    assert half.matmul["bfloat16"] == ((1e9, 5e13), (1e11, 2e14))
    assert half.attention["float32"] == ((1e9, 1e13),)
    assert half.memory == ((1e6, 5e11), (1e8, 1.5e12))
    assert (half.launch_seconds, half.hop_seconds, half.network) == (4e-6, 3e-6, RATES.network)
    assert half.links == {"all_gather": 1.5e11, "reduce_scatter": 1e11}


@pytest.mark.long
def test_seconds_of_known_work_become_rates() -> None:
    """A timer that gives each call the same time: rates are sizes over it."""

    def timed(work: Any) -> float:
        work()
        return 1e-3

    curve = calibrate.matmul_curve(torch.float32, CPU, timed)
    assert [size for size, _ in curve][:3] == [2 * 64**3, 2 * 128**3, 2 * 256**3]
    assert [rate for _, rate in curve] == pytest.approx([size / 1e-3 for size, _ in curve])
    attention = calibrate.attention_curve(torch.float32, CPU, timed)
    forward = 4 * 4 * 6 * 64**2 * 64 / 2  # two matmuls of 2 FLOPs, half of the scores masked
    assert attention[0] == (forward, pytest.approx(3.5 * forward / 1e-3))
    copies = calibrate.memory_curve(CPU, timed)
    assert copies[0] == (2 * 2**14, pytest.approx(2 * 2**14 / 1e-3))
    assert calibrate.host_seconds(CPU, timed) == 1e-5


def test_a_slow_size_is_the_last() -> None:
    curve = calibrate.matmul_curve(torch.float32, CPU, lambda work: 2 * calibrate.LONGEST_CALL)
    assert len(curve) == 1


def test_the_timer_measures_one_call() -> None:
    import time

    found = calibrate.timer(CPU, 0.05)(lambda: time.sleep(0.004))
    assert 0.004 <= found < 0.1


@pytest.mark.long
def test_the_command_measures_this_machine_and_plan_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hardware = calibrate.measure(CPU, Ranks(0, 1, 0, 1), print, seconds=0.005)
    Path("cpu.toml").write_text(calibrate.file_text(hardware))
    found = load_hardware(Path("cpu.toml"))
    assert (found.name, found.memory, found.measured, found.fp8_flops) == ("cpu", host_memory(), True, None)
    assert found.rates is not None
    assert hardware.rates is not None
    for kind in ("matmul", "attention"):
        for dtype in ("bfloat16", "float32"):
            written, read = hardware.rates.of(kind, dtype), found.rates.of(kind, dtype)
            assert read
            assert [rate for _, rate in read] == pytest.approx([rate for _, rate in written], rel=1e-3)
    assert found.rates.launch_seconds == pytest.approx(hardware.rates.launch_seconds, rel=1e-2)
    assert (found.rates.hop_seconds, found.rates.links, found.rates.to_device) == (None, {}, None)
    assert cli.run(["calibrate", "cpu.toml"]) == 2
    assert "cpu.toml exists; name a new file" in capsys.readouterr().err
    assert cli.run(["calibrate", "none/cpu.toml"]) == 2
    assert "none/cpu.toml: there is no folder none" in capsys.readouterr().err


def test_a_gpu_of_the_table_keeps_its_peaks(tmp_path: Path) -> None:
    measured = replace(find_hardware("H100"), rates=RATES, link_bandwidth=4e11)
    text = calibrate.file_text(measured)
    assert 'base = "H100"' in text
    found = load_hardware(file_of(tmp_path, text))
    assert (found.bf16_flops, found.link_bandwidth, found.rates, found.measured) == (989e12, 4e11, RATES, False)
    assert isinstance(read_rates({}), Rates)
