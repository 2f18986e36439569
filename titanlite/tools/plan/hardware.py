"""The device that `--gpu` names: a row of the table, a TOML file, or this machine's CPU, which is measured."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli
import torch

from titanlite.ops.cpu import CpuKernels, multiply_by_onednn
from titanlite.runtime.errors import ConfigError, Place, Problem, UserError, did_you_mean, nearest_name
from titanlite.runtime.files import read_small
from titanlite.runtime.hardware import HARDWARE, Hardware, host_memory


def find_hardware(name: str) -> Hardware:
    """Return a device by its name in the table or its driver's name; "cpu" is measured.

    Case, "-", "_" and spaces do not count.

    Raises:
        UserError: there is no such device. The error names the nearest device and all others.
    """
    names = {_plain(alias): hardware for hardware in HARDWARE for alias in (hardware.name, *hardware.driver_names)}
    wanted = _plain(name)
    if wanted == "cpu":
        return _this_cpu()
    if wanted in names:
        return names[wanted]
    longer = [known.name for known in HARDWARE if wanted and _plain(known.name).startswith(wanted)]
    nearest = nearest_name(wanted, names)
    near = longer or ([names[nearest].name] if nearest else [])
    hint = f", did you mean {' or '.join(near)}?" if near else "."
    raise UserError(
        f"the table has no GPU named {name!r}{hint} Known are {', '.join(known.name for known in HARDWARE)} and cpu; "
        "any other can be described in a file: --gpu my_gpu.toml"
    )


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name).lower()


REQUIRED = ("memory", "bf16_flops", "fp32_flops", "memory_bandwidth", "link_bandwidth", "network_bandwidth")
EFFICIENCIES = ("matmul_efficiency", "attention_efficiency", "flash_efficiency", "clock", "exchange_share")
NUMBERS = (*REQUIRED, *EFFICIENCIES, "memory_gib", "fp8_flops", "node_memory")
TEXTS = ("base", "name", "sources")


def load_hardware(path: Path) -> Hardware:
    """Return the device that a TOML file describes, by the fields of `Hardware`.

    `memory_gib` can stand for `memory`. `base = "H100"` takes missing fields from the table, and `base = "cpu"`
    measures them.

    Raises:
        ConfigError: every mistake in the file.
    """
    values = _read(path)
    problems = {key: problem for key, value in values.items() if (problem := _problem_of(key, value))}
    if "memory" in values and "memory_gib" in values:
        problems.setdefault("memory", "stands beside memory_gib; one of them is enough")
    base = None
    given = {"memory" if key == "memory_gib" else key for key in values}
    if "base" in values and "base" not in problems:
        try:
            base = find_hardware(values["base"])
        except UserError as error:
            problems["base"] = str(error)
    if "base" not in values:
        problems |= {key: "missing, and there is no base" for key in REQUIRED if key not in given}
    if problems:
        raise ConfigError([Problem(key, problems[key], Place(0, 0, path.name)) for key in problems])
    values.pop("base", None)
    if "memory_gib" in values:
        values["memory"] = values.pop("memory_gib") * 2**30
    if "memory" in values:
        values["memory"] = int(values["memory"])
    values = {"name": path.stem, "driver_names": (), **values}
    if base:
        return replace(base, **{"sources": f"{path.name}; the rest: {base.sources}", **values})
    return Hardware(**{"sources": path.name, "fp8_flops": None, **values})


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(read_small(path).decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def _problem_of(key: str, value: Any) -> str | None:
    """Return the mistake in an entry of the file, or None."""
    if key in TEXTS:
        return None if isinstance(value, str) and value else f"expected a text, got {value!r}"
    if key not in NUMBERS:
        return f"unknown key{did_you_mean(key, (*NUMBERS, *TEXTS))}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"expected a number, got {value!r}"
    if not math.isfinite(value) or value <= 0:
        return f"expected a number above 0, got {value!r}"
    if key in EFFICIENCIES:
        return None if value <= 1 else f"expected a share, 1 at most, got {value!r}"
    if key != "memory_gib" and value < 1e6:
        return f"got {value!r}: it is counted in single bytes or FLOP/s, as in 989e12"
    return None


def _this_cpu() -> Hardware:
    """Return this machine, measured for about half a second with PyTorch's present number of threads."""
    multiply_by_onednn()
    source, target = torch.ones(2**25), torch.zeros(2**25)  # 128 MiB each: more than most caches hold
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source))
    return Hardware(
        name="cpu",
        driver_names=(),
        memory=host_memory(),
        bf16_flops=_matmul_rate(torch.bfloat16),
        fp8_flops=None,
        fp32_flops=_matmul_rate(torch.float32),
        memory_bandwidth=bandwidth,
        link_bandwidth=bandwidth / 2,
        network_bandwidth=1.25e9,
        sources=f"Measured with {torch.get_num_threads()} threads. Link assumed: a copy through memory. "
        "Network assumed: 10 Gbit/s.",
        measured=True,
    )


@torch.no_grad()
def _matmul_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of square linear layers of the best size, by the kernels of training.

    Small sizes come first, because a slow CPU takes long for 1024.
    """
    best, kernels = 0.0, CpuKernels()
    for size in (256, 512, 1024):
        a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        seconds = _fastest(lambda a=a, b=b: kernels.linear(a, b))
        best = max(best, 2 * size**3 / seconds)
        if 8 * seconds > 0.15:  # the next size takes 8 times as long
            break
    return best


def _fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of repeated calls, made for a twentieth of a second."""
    from torch.utils.benchmark import Timer  # takes half a second, and only a CPU is measured

    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.05).times)
