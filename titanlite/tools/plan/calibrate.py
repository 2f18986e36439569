"""The `titanlite calibrate` command: what this machine reaches, measured into a device file for `plan --gpu`.

Every rank measures at the same time, as in training, where the others also take power and memory bandwidth. Each rate
is that of one large matmul, attention, copy or collective; `plan` has the rest from peaks.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.runtime.errors import UserError
from titanlite.runtime.files import check_out, write_atomically
from titanlite.runtime.hardware import hardware_of
from titanlite.runtime.process_group import Ranks, pick_device, process_group, read_ranks
from titanlite.tools.plan.time import BUS_EFFICIENCY, MEMORY_EFFICIENCY

Call = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
"""(whole buffer, this rank's part, group): runs one collective."""
COLLECTIVES: dict[str, Call] = {
    "all_gather": lambda whole, part, group: dist.all_gather_into_tensor(whole, part, group=group),
    "reduce_scatter": lambda whole, part, group: dist.reduce_scatter_tensor(part, whole, group=group),
    "all_reduce": lambda whole, part, group: dist.all_reduce(whole, group=group),
}
Values = dict[str, float | str]


def calibrate(out: Path) -> None:
    """Measure this machine's GPU into a file for plan --gpu.

    Measure a matmul, attention, a copy, and with several processes their links, for some seconds. Nothing else should
    run. A CPU needs no file: plan --gpu cpu measures it.

    Args:
        out (OUT.toml): file to write; it must not exist

    Example:
        h100.toml
    """
    check_out(out)
    if not out.parent.is_dir():
        raise UserError(f"titanlite calibrate: {out}: there is no folder {out.parent}")
    ranks = read_ranks(os.environ)
    device = pick_device(ranks)
    if device.type == "cpu":
        raise UserError("titanlite calibrate: no GPU to measure; titanlite plan --gpu cpu measures this machine's CPU")
    with process_group(ranks, device):
        values = measure_gpu(device) | measure_links(device, ranks)
    if ranks.rank == 0:
        texts = {key: json.dumps(value) if isinstance(value, str) else f"{value:.4g}" for key, value in values.items()}
        text = "".join(f"{key} = {text}\n" for key, text in texts.items())
        write_atomically(out, text)
        print(f"{text}wrote {out}; use it with: titanlite plan my.toml --world-size N --gpu {out}")


def measure_gpu(device: torch.device) -> Values:
    """Return the shares of its peaks that a GPU reaches. A GPU that is not in the table has its own rates as peaks.

    All operands are random, because a GPU draws less power for equal numbers, and then runs at a higher clock.
    """

    def rate(work: Callable[[], object], size: float) -> float:
        return size / _seconds(work, device)

    size, heads, length, width = 8192, 32, 8192, 128
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    matmul = rate(lambda: a @ b, 2 * size**3)
    whole = a.float()
    float32 = rate(lambda: whole @ whole, 2 * size**3)
    target = torch.empty_like(whole)
    copied = rate(lambda: target.copy_(whole), 2 * whole.nbytes)
    shape = (1, heads, length, width)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)

    def attend() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    flops = 3.5 * 2 * heads * length**2 * width  # backward is 2.5 forwards; half of the scores
    attention = rate(attend, flops)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = rate(attend, flops)
    sources = f"titanlite calibrate, {date.today()}, torch {torch.__version__}"
    found: Values = {"sources": sources, "memory_bandwidth": copied / MEMORY_EFFICIENCY}
    known = hardware_of(device)
    if known:
        peak, found["base"] = known.bf16_flops, known.name
    else:
        peak = matmul
        found |= {
            "memory": torch.cuda.get_device_properties(device).total_memory,
            "bf16_flops": matmul,
            "fp32_flops": float32,
            "link_bandwidth": 32e9,  # assumed unless measured: PCIe 4 x16, and 10 Gbit/s between nodes
            "network_bandwidth": 1.25e9,
        }
    name = known.name if known else torch.cuda.get_device_name(device)
    shares = {"matmul": matmul, "attention": attention, "flash": flash}
    return found | {"name": name} | {f"{key}_efficiency": min(1.0, share / peak) for key, share in shares.items()}


def measure_links(device: torch.device, ranks: Ranks) -> Values:
    """Return bandwidths within a node and, for each GPU, between nodes; only those that this job has.

    `plan` takes a share of them (`BUS_EFFICIENCY`), so they are larger than measured. All ranks call this together.
    """
    within, nodes = ranks.local_world_size, ranks.world_size // ranks.local_world_size
    found: Values = {}
    size = 2**28
    if within > 1:
        groups = [dist.new_group(range(node * within, (node + 1) * within)) for node in range(nodes)]
        group = groups[ranks.rank // within]
        assert isinstance(group, dist.ProcessGroup)
        found["link_bandwidth"] = bandwidth_at("all_gather", group, device, size, calls=5) / BUS_EFFICIENCY
    if nodes > 1:
        world = dist.group.WORLD
        assert world is not None
        found["network_bandwidth"] = bandwidth_at("all_gather", world, device, size, calls=5) / within / BUS_EFFICIENCY
    return found


def bandwidth_at(name: str, group: dist.ProcessGroup, device: torch.device, size: int, *, calls: int) -> float:
    """Return the bytes a second that pass each member of a ring in collectives of `size` bytes. Each byte of an
    all-reduce passes twice. All members make as many calls."""
    members = group.size()
    part = torch.zeros(max(1, size // 4 // members), device=device)
    whole = torch.zeros(len(part) * members, device=device)
    seconds = _seconds(lambda: COLLECTIVES[name](whole, part, group), device, calls=calls)
    return size * (members - 1) / members / seconds * (2 if name == "all_reduce" else 1)


def _seconds(work: Callable[[], object], device: torch.device, *, calls: int = 20) -> float:
    """Return the median seconds of a call. A first call prepares."""
    found = []
    for _ in range(calls + 1):
        began = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        found.append(max(time.perf_counter() - began, 1e-9))
    return statistics.median(found[1:])
