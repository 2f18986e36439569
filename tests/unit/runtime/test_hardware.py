"""The table of devices, files that describe others, and what is measured of a CPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.helpers import mentions
from titanlite.runtime.errors import UserError
from titanlite.runtime.hardware import HARDWARE, Hardware, hardware_of, host_memory
from titanlite.runtime.process_group import Ranks, gpu_index, why_no_gpu
from titanlite.tools.plan.hardware import find_hardware, load_hardware

WHOLE = """
memory_gib = 80
bf16_flops = 400e12
fp32_flops = 50e12
memory_bandwidth = 2e12
link_bandwidth = 100e9
network_bandwidth = 10e9
"""


def file_of(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_hardware(file_of(folder, text))
    return str(caught.value).splitlines()


# Memory of the host


V1, V2 = "memory.limit_in_bytes", "memory.max"


@pytest.mark.parametrize(
    ("own", "limits", "least"),
    [
        ("0::/", {"": (V2, "max")}, None),
        ("0::/", {"": (V2, "5000000")}, 5000000),
        ("0::/a/b", {"": (V2, "max"), "a": (V2, "900000"), "a/b": (V2, "max")}, 900000),
        ("0::/a/b", {"a": (V2, "900000"), "a/b": (V2, "800000")}, 800000),
        ("0::/a/b", {"a": (V2, "800000"), "a/b": (V2, "900000"), "a/b/c": (V2, "7")}, 800000),
        ("0::/../x", {"": (V2, "900000"), "x": (V2, "max")}, 900000),
        ("5:cpu,cpuacct:/c\n4:memory:/docker/x\n0::/", {"memory/docker": (V1, "900000")}, 900000),
        ("4:hugetlb,memory:/docker/x", {"memory": (V1, "900000")}, 900000),  # a container sees its own as the first
        ("4:memory:/a/b", {"memory/a": (V1, "900000"), "memory/a/b": (V1, "9223372036854771712")}, 900000),
        ("4:cpu:/a", {"a": (V2, "7")}, None),
        ("damaged", {"": (V2, "7")}, None),
        (None, {"": (V2, "7")}, None),
    ],
)
def test_the_memory_of_a_host_is_the_least_limit_of_its_groups(
    own: str | None, limits: dict[str, tuple[str, str]], least: int | None, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    if own is not None:
        (tmp_path / "proc/self/cgroup").write_text(f"{own}\n")
    for folder, (name, value) in limits.items():
        place = tmp_path / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{value}\n")
    physical = host_memory(tmp_path / "nothing")
    assert physical > 2**28
    assert host_memory(tmp_path) == (least or physical)


# The table


def test_every_name_stands_for_one_device() -> None:
    for hardware in HARDWARE:
        for name in (hardware.name, *hardware.driver_names):
            assert find_hardware(name) is hardware
    drivers = [name for hardware in HARDWARE for name in hardware.driver_names]
    assert len(set(drivers)) == len(drivers) == 15


@pytest.mark.parametrize("hardware", HARDWARE, ids=lambda hardware: hardware.name)
def test_values_are_of_the_right_size(hardware: Hardware) -> None:
    """A factor of 1,000 or of two (sparsity) would be seen."""
    assert 20 * 2**30 < hardware.memory < 300 * 2**30
    assert hardware.fp32_flops < hardware.bf16_flops
    if hardware.fp8_flops:
        assert hardware.fp8_flops == pytest.approx(2 * hardware.bf16_flops, rel=0.02)
    assert hardware.network_bandwidth < hardware.link_bandwidth < hardware.memory_bandwidth
    # Of the memory, a device reads all in 8 to 60 ms, and for each byte that it reads it does 100 to 500 FLOPs.
    assert 0.008 < hardware.memory / hardware.memory_bandwidth < 0.06
    assert 100 < hardware.bf16_flops / hardware.memory_bandwidth < 500
    assert "assumed" in hardware.sources
    assert "data sheet" in hardware.sources or "white paper" in hardware.sources
    assert not hardware.measured
    assert hardware.overlaps


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("H20", ["H200 or H200-NVL?"]),
        ("A100", ["A100-40 or A100-80", "A100-PCIe-80?"]),
        ("abacus", ["'abacus'", "A100-40, A100-80"]),
    ],
)
def test_unknown_names(name: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        find_hardware(name)
    assert mentions(str(caught.value), *words, "MI300X", "cpu", "file")


def test_a_gpu_of_this_machine_has_the_memory_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=12345))
    assert hardware_of(device) == replace(find_hardware("H200"), memory=12345)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200 MIG 1g.18gb")
    assert hardware_of(device) is None
    assert hardware_of(torch.device("cpu")) is None


# Files


def test_a_complete_file(tmp_path: Path) -> None:
    assert load_hardware(file_of(tmp_path, WHOLE)) == Hardware(
        name="mine",
        driver_names=(),
        memory=80 * 2**30,
        bf16_flops=400e12,
        fp8_flops=None,
        fp32_flops=50e12,
        memory_bandwidth=2e12,
        link_bandwidth=100e9,
        network_bandwidth=10e9,
        sources="mine.toml",
    )


def test_a_file_with_a_base(tmp_path: Path) -> None:
    found = load_hardware(file_of(tmp_path, 'base = "h100"\nnetwork_bandwidth = 12_500_000_000\nname = "cloud"'))
    h100 = find_hardware("H100")
    sources = f"mine.toml; the rest: {h100.sources}"
    assert found == replace(h100, name="cloud", driver_names=(), network_bandwidth=12.5e9, sources=sources)
    assert load_hardware(file_of(tmp_path, 'base = "h100"\nmemory = 50_000_000_000')).memory == 50_000_000_000
    assert load_hardware(file_of(tmp_path, 'base = "h100"\nmemory_gib = 0.5')).memory == 2**29
    shares = "clock = 0.5\nflash_efficiency = 0.25\nexchange_share = 0.125\n"
    found = load_hardware(file_of(tmp_path, f'base = "h100"\n{shares}'))
    assert (found.clock, found.flash_efficiency, found.exchange_share) == (0.5, 0.25, 0.125)
    assert len(problems_of(tmp_path, f'base = "h100"\n{shares.replace("0.", "1.")}')) == 3


def test_all_problems_of_a_file_are_reported(tmp_path: Path) -> None:
    text = """
memory_gib = -80
bf16_flop = 400e12
fp8_flops = true
fp32_flops = "fast"
memory_bandwidth = 3350
link_bandwidth = nan
sources = ""
"""
    assert [line.partition(":")[0] for line in problems_of(tmp_path, text)] == [
        "memory_gib", "bf16_flop", "fp8_flops", "fp32_flops", "memory_bandwidth", "link_bandwidth", "sources",
        "bf16_flops", "network_bandwidth",
    ]  # fmt: skip


def test_other_problems_of_files(tmp_path: Path) -> None:
    for text, key in (
        ('base = "H1000"\nmemory_gib = 3', "base"),
        ("base = 100", "base"),
        (WHOLE + "memory = 80e9", "memory"),
        ('base = "H100"\n[H100]\nmemory_gib = 3', "H100"),
    ):
        [problem] = problems_of(tmp_path, text)
        assert problem.startswith(f"{key}: ")
    (tmp_path / "mine.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(UserError, match=r"mine\.toml"):
        load_hardware(tmp_path / "mine.toml")
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(UserError, match=str(path)):
            load_hardware(path)


# GPUs of this machine


def test_a_process_has_the_gpu_of_its_rank_on_the_machine() -> None:
    assert gpu_index(Ranks(9, 16, 1, 8), gpus=8, visible=None, is_worker=True) == 1
    assert gpu_index(Ranks(0, 1, 0, 1), gpus=2, visible="3,5", is_worker=False) == 0


def test_a_worker_that_sees_its_own_gpu_alone_uses_it() -> None:
    """`torchrun --virtual-local-rank`. The check before torchrun starts has no local rank, and refuses."""
    assert gpu_index(Ranks(5, 8, 0, 8), gpus=1, visible="5", is_worker=True) == 0
    with pytest.raises(UserError, match=r"\b8 processes.*\b1 GPU\b"):
        gpu_index(Ranks(0, 8, 0, 8), gpus=1, visible="5", is_worker=False)


@pytest.mark.parametrize(
    ("ranks", "gpus", "visible", "words"),
    [
        (Ranks(0, 8, 0, 8), 4, None, ["8 processes", "4 GPUs"]),
        (Ranks(1, 2, 1, 2), 1, "6", ["2 processes", "1 GPU", "CUDA_VISIBLE_DEVICES is 6"]),
        (Ranks(3, 8, 3, 1), 1, "3", ["4 processes", "1 GPU", "CUDA_VISIBLE_DEVICES is 3"]),
    ],
)
def test_fewer_gpus_than_processes(ranks: Ranks, gpus: int, visible: str | None, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        gpu_index(ranks, gpus=gpus, visible=visible, is_worker=True)
    assert mentions(str(caught.value), *words)


def test_gpus_that_pytorch_does_not_use_are_reported() -> None:
    build = why_no_gpu(has_gpus=True, cuda_version=None, visible=None)
    driver = why_no_gpu(has_gpus=True, cuda_version="13.0", visible="0,1")
    assert build is not None
    assert driver is not None
    assert mentions(build, "CPU")
    assert mentions(driver, "13.0")
    assert why_no_gpu(has_gpus=False, cuda_version=None, visible=None) is None
    for visible in ("", "-1"):
        assert why_no_gpu(has_gpus=True, cuda_version="13.0", visible=visible) is None
