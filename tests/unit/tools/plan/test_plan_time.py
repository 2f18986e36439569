"""Step times by hand, on hardware with round numbers."""

from dataclasses import replace
from typing import Literal

import pytest

from titanlite.runtime.hardware import Hardware
from titanlite.schema import Config
from titanlite.techniques.technique import HostTraffic, Technique
from titanlite.tools.plan import time as module
from titanlite.tools.plan.estimate import Layout
from titanlite.tools.plan.time import (
    Collective,
    Group,
    Kernel,
    Unit,
    collective_time,
    kernel_time,
    step_time,
    waiting_time,
)

GPU = Hardware(
    name="round",
    driver_names=(),
    memory=10**10,
    bf16_flops=1e15,
    fp8_flops=2e15,
    fp32_flops=1e14,
    memory_bandwidth=1e12,
    link_bandwidth=1e11,
    network_bandwidth=1e10,
    sources="made up",
    matmul_efficiency=1,
    attention_efficiency=1,
    flash_efficiency=1,
)
CPU = replace(GPU, fp8_flops=None, measured=True)
NODE = Group(8, 8)


@pytest.fixture
def ideal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every efficiency is 1, every latency 0, and kernels are as fast beside collectives."""
    for name in ("MEMORY_EFFICIENCY", "BUS_EFFICIENCY"):
        monkeypatch.setattr(module, name, 1.0)
    for name in ("LAUNCH_SECONDS", "HOP_SECONDS", "NETWORK_HOP_SECONDS", "CONTENTION"):
        monkeypatch.setattr(module, name, 0.0)


def takes(seconds: float) -> tuple[Kernel, ...]:
    """A matmul that takes this time on an ideal `GPU`."""
    return (Kernel("matmul", seconds * 1e15, 0, "bfloat16"),)


def sends(
    seconds: float, collective: Literal["all_gather", "reduce_scatter", "all_reduce"] = "all_gather"
) -> tuple[Collective, ...]:
    """A collective within a node that takes this time on an ideal `GPU`."""
    count = 2 if collective == "all_reduce" else 1
    return (Collective(collective, round(seconds * 1e11 * 8 / 7 / count), NODE),)


def layers(
    count: int, *, gather: float, reduce: float = 0.0, forward: float = 1.0, backward: float = 2.0
) -> list[Unit]:
    """Blocks that are gathered twice, and the last of them once."""
    unit = Unit(
        "layer",
        takes(forward),
        takes(backward),
        gather=sends(gather) if gather else (),
        gather_again=sends(gather) if gather else (),
        reduce=sends(reduce, "reduce_scatter") if reduce else (),
    )
    return [*[replace(unit, name=f"layers.{index}") for index in range(count - 1)], replace(unit, gather_again=())]


# Kernels


@pytest.mark.usefixtures("ideal")
def test_the_slower_of_arithmetic_and_memory() -> None:
    assert kernel_time(Kernel("matmul", 3e15, 2 * 10**12, "bfloat16"), GPU) == pytest.approx(3)
    assert kernel_time(Kernel("matmul", 1e15, 2 * 10**12, "bfloat16"), GPU) == pytest.approx(2)
    assert kernel_time(Kernel("matmul", 3e15, 0, "float8"), GPU) == pytest.approx(1.5)
    assert kernel_time(Kernel("matmul", 3e15, 0, "float32"), GPU) == pytest.approx(30)
    assert kernel_time(Kernel("matmul", 3e15, 0, "float8"), replace(GPU, fp8_flops=None)) == pytest.approx(30)
    assert kernel_time(Kernel("memory", 3e14, 10**12, "bfloat16"), GPU) == pytest.approx(3)


def test_what_kernels_reach() -> None:
    real = replace(GPU, matmul_efficiency=0.7, attention_efficiency=0.4, flash_efficiency=0.25)
    assert kernel_time(Kernel("matmul", 7e14, 0, "bfloat16"), real) == pytest.approx(1)
    assert kernel_time(Kernel("attention", 4e14, 0, "bfloat16"), real) == pytest.approx(1)
    assert kernel_time(Kernel("flash", 2.5e14, 0, "bfloat16"), real) == pytest.approx(1)
    assert kernel_time(Kernel("memory", 0, 80 * 10**10, "bfloat16"), GPU) == pytest.approx(1)


def test_a_lower_clock_slows_arithmetic_and_not_memory() -> None:
    slow = replace(GPU, clock=0.5)
    for kind in ("matmul", "attention", "flash"):
        assert kernel_time(Kernel(kind, 1e15, 0, "bfloat16"), slow) == pytest.approx(2)
    assert kernel_time(Kernel("memory", 0, 80 * 10**10, "bfloat16"), slow) == pytest.approx(1)


@pytest.mark.parametrize(("devices", "least"), [(1, 0), (2, -0.564), (8, -1.424), (100, -2.508)])
def test_all_wait_for_the_slowest_device(devices: int, least: float) -> None:
    """Expected least of n normal numbers (H. L. Harter, Biometrika 48, 1961)."""
    assert Layout(devices, GPU, 8).slowest.clock == pytest.approx(1 + module.CLOCK_SPREAD * least, abs=0.001)
    assert Layout(devices, CPU, 8).slowest.clock == 1


def test_no_kernel_is_faster_than_its_launch() -> None:
    assert kernel_time(Kernel("memory", 10, 10, "float32"), GPU) == pytest.approx(5e-6)
    assert kernel_time(Kernel("memory", 10, 10, "float32", launches=12), GPU) == pytest.approx(60e-6)
    assert kernel_time(Kernel("matmul", 1e15, 0, "bfloat16", launches=12), GPU) == pytest.approx(1, rel=1e-9)


def test_a_cpu_reaches_what_was_measured_and_launches_by_itself() -> None:
    assert kernel_time(Kernel("matmul", 1e15, 0, "bfloat16"), CPU) == pytest.approx(1 + 5e-6, rel=1e-9)
    assert kernel_time(Kernel("memory", 0, 10**12, "bfloat16", launches=2), CPU) == pytest.approx(1 + 10e-6, rel=1e-9)
    slow = replace(CPU, matmul_efficiency=0.8, attention_efficiency=0.2)  # only how much slower attention is counts
    assert kernel_time(Kernel("matmul", 1e15, 0, "bfloat16"), slow) == pytest.approx(1 + 5e-6, rel=1e-9)
    assert kernel_time(Kernel("attention", 1e15, 0, "bfloat16"), slow) == pytest.approx(4 + 5e-6, rel=1e-9)


# Collectives


@pytest.mark.usefixtures("ideal")
def test_rings() -> None:
    bytes = 8 * 10**11
    assert collective_time(Collective("all_gather", bytes, NODE), GPU, 8) == pytest.approx(7)
    assert collective_time(Collective("reduce_scatter", bytes, NODE), GPU, 8) == pytest.approx(7)
    assert collective_time(Collective("all_reduce", bytes, NODE), GPU, 8) == pytest.approx(14)
    assert collective_time(Collective("all_reduce", bytes, Group(1, 1)), GPU, 8) == 0


@pytest.mark.usefixtures("ideal")
def test_members_of_a_node_drive_their_network_cards_together() -> None:
    """15 shares of 10 GB are sent by one card, by four, or by eight, which have 8/10 of the link's bandwidth."""
    bytes = 16 * 10**10

    def seconds(per_node: int, hardware: Hardware = GPU) -> float:
        return collective_time(Collective("all_gather", bytes, Group(16, per_node)), hardware, 8)

    assert [seconds(1), seconds(4), seconds(8)] == pytest.approx([15, 15 / 4, 15 / 8])
    # With faster cards the link is the limit of those that share a node.
    fast = replace(GPU, network_bandwidth=5e10)
    assert [seconds(1, fast), seconds(4, fast), seconds(8, fast)] == pytest.approx([3, 1.5, 1.5])


@pytest.mark.usefixtures("ideal")
def test_an_exchange_that_sends_less() -> None:
    """To 7 of 8 ranks in the node at 100 GB/s, and to 8 of 16 beyond it at 10 GB/s."""
    near, far = (Collective("all_to_all", 16 * 10**10, group) for group in (NODE, Group(16, 8)))
    less = replace(GPU, exchange_share=0.5)
    whole, half = ([collective_time(ranks, gpu, 8) for ranks in (near, far)] for gpu in (GPU, less))
    assert whole == pytest.approx([1.4, 8])
    assert half == pytest.approx([0.7, 4])


@pytest.mark.parametrize(
    ("collective", "group", "microseconds"),
    [
        ("all_reduce", Group(8, 8), 28),
        ("all_gather", Group(512, 8), 14 + 63 * 5),
        ("all_reduce", Group(65, 1), 2 * 7 * 5),
        ("all_gather", Group(12, 8), 14 + 5),
    ],
)
def test_latency(collective: Literal["all_gather", "all_reduce"], group: Group, microseconds: float) -> None:
    assert collective_time(Collective(collective, 0, group), GPU, 8) == pytest.approx(microseconds * 1e-6)


# Steps


@pytest.mark.usefixtures("ideal")
def test_hidden_collectives() -> None:
    """All that can be seen is the first gather and the last reduction."""
    found = step_time(
        layers(4, gather=0.5, reduce=0.75), update=takes(0.125), hardware=GPU, gpus_per_node=8, accumulation=1
    )
    assert found.compute == pytest.approx(12)
    assert found.update == pytest.approx(0.125)
    assert found.total == pytest.approx(12 + 0.5 + 0.75 + 0.125)
    assert found.exposed == pytest.approx(1.25)
    assert found.communication == pytest.approx(7 * 0.5 + 4 * 0.75)


@pytest.mark.usefixtures("ideal")
def test_collectives_that_nothing_hides() -> None:
    """Gathers of 10: each unit computes 10 after the one before, beside the next gather; the last backward has none."""
    found = step_time(layers(3, gather=10, reduce=5), update=(), hardware=GPU, gpus_per_node=8, accumulation=1)
    # Forward: gathers end at 10, 20 and 30, the last unit is done at 31 and begins backward at once. The next gather is
    # issued at 31 and arrives at 41, then the reduction of what was done at 33 goes, until 46. The next gather is
    # issued at 41, goes from 46 to 56; the reduction of what was done at 43 until 61; backward from 56 to 58; the last
    # reduction from 61 to 66.
    assert found.total == pytest.approx(66)
    assert found.compute == pytest.approx(9)
    assert found.exposed == pytest.approx(57)
    assert found.communication == pytest.approx(5 * 10 + 3 * 5)


@pytest.mark.usefixtures("ideal")
def test_kernels_are_slower_beside_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gather of `b` takes 3 beside the forward of `a`, whose work of 2 takes 2.5 there. Of its wait of 1, no kernel
    runs beside. The reduction of `b` takes 1 of the backward of `a`."""
    monkeypatch.setattr(module, "CONTENTION", 0.25)
    units = [
        Unit("a", takes(2), takes(4), forward_waits=sends(1, "all_reduce")),
        Unit("b", takes(1), takes(1), gather=sends(3), reduce=sends(1, "reduce_scatter")),
    ]
    found = step_time(units, update=(), hardware=GPU, gpus_per_node=8, accumulation=1)
    assert found.total == pytest.approx(4 + 1 + 1 + 4.25)
    assert found.compute == pytest.approx(8 + 0.5 + 0.25)
    assert found.exposed == pytest.approx(1.5)


@pytest.mark.usefixtures("ideal")
def test_the_last_unit_gathers_again_after_its_forward() -> None:
    units = [Unit("head", takes(1), takes(2), gather=sends(3), gather_again=sends(3))]
    assert step_time(units, update=(), hardware=GPU, gpus_per_node=8, accumulation=1).total == pytest.approx(
        3 + 1 + 3 + 2
    )


@pytest.mark.usefixtures("ideal")
def test_what_kernels_wait_for_is_not_hidden() -> None:
    """The first unit is gathered until 1, waits until 1.5 and computes until 3.5. Its wait delays the gather of the
    second, from 1.5 to 4.5, of which 2 are hidden. No kernel runs beside collectives that belong to no unit."""
    units = [
        Unit("a", takes(2), takes(2), gather=sends(1), forward_waits=sends(0.5, "all_reduce")),
        Unit("b", takes(1), takes(2), gather=sends(3)),
    ]
    found = step_time(units, update=(), hardware=GPU, gpus_per_node=8, accumulation=3, whole=sends(0.25, "all_reduce"))
    assert found.total == pytest.approx(3 * (4.5 + 1 + 2 + 2) + 0.25)
    assert found.communication == pytest.approx(13.75)
    assert found.exposed == pytest.approx(3 * 2.5 + 0.25)


@pytest.mark.usefixtures("ideal")
@pytest.mark.parametrize(("beside", "waits"), [(0.5, 1 - 0.75 * 0.5), (4, 0.25)])
def test_kernels_beside_what_others_wait_for(beside: float, waits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective of 1 is hidden by as much as kernels run beside it, which are slower by a quarter."""
    monkeypatch.setattr(module, "CONTENTION", 0.25)
    collectives = [sent._replace(beside=takes(beside)) for sent in sends(1, "all_reduce")]
    assert waiting_time(collectives, GPU, 8) == pytest.approx(waits)
    assert waiting_time(collectives, CPU, 8) == pytest.approx(1)
    unit = Unit("a", takes(4), takes(8), backward_waits=tuple(collectives))
    found = step_time([unit], update=(), hardware=GPU, gpus_per_node=8, accumulation=1)
    assert (found.total, found.communication) == (pytest.approx(12 + waits), pytest.approx(1))


@pytest.mark.usefixtures("ideal")
def test_every_micro_batch_is_reduced_and_the_last_is_all_reduced() -> None:
    units = [
        replace(unit, all_reduce=sends(8, "all_reduce")) for unit in layers(2, gather=0.5, reduce=0.25, forward=0.5)
    ]
    one, three = (
        step_time(units, update=takes(0.125), hardware=GPU, gpus_per_node=8, accumulation=count) for count in (1, 3)
    )
    alone = step_time(
        [replace(unit, all_reduce=()) for unit in units], update=(), hardware=GPU, gpus_per_node=8, accumulation=1
    )
    # Backward of the last unit is done at 3.5, of the first at 5.5; the link is busy until 11.75 and 20.
    assert one.total == pytest.approx(20 + 0.125)
    assert alone.total == pytest.approx(0.5 + 1 + 4 + 0.25)
    assert three.total == pytest.approx(2 * 5.75 + 20 + 0.125)
    assert three.compute == pytest.approx(3 * one.compute)
    assert three.communication == pytest.approx(3 * alone.communication + 16)


@pytest.mark.usefixtures("ideal")
def test_nothing_overlaps_on_a_cpu() -> None:
    found = step_time(
        layers(4, gather=0.5, reduce=0.75), update=takes(1), hardware=CPU, gpus_per_node=8, accumulation=2
    )
    assert found.total == pytest.approx(2 * (12 + 7 * 0.5 + 4 * 0.75) + 1)
    assert found.exposed == pytest.approx(found.communication)


def test_ranks_of_a_machine_share_its_memory() -> None:
    class Moves(Technique):
        def host_traffic(self, config: Config, sizes: object, accumulation: int) -> HostTraffic:
            return HostTraffic(module.HOST_LINK, accumulation * module.HOST_MEMORY, module.HOST_MEMORY)

    def time_of(ranks: int, forward: float) -> float:
        return module.host_time([Moves()], Config(), {}, 2, ranks=ranks, forward=forward)

    assert [time_of(ranks, 0.0) for ranks in (1, 8)] == [1 + 2 + 1, 1 + 16 + 8]
    assert [time_of(ranks, 3.0) for ranks in (1, 8)] == [1 + 2, 1 + 16 + 5], "a part runs beside forward"
