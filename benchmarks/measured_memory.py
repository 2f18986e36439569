"""What a step of training holds in memory, measured on the CPU: every tensor that PyTorch's allocator gives and takes.

    python benchmarks/measured_memory.py --config FILE.toml [--processes 2] [--steps 3] [--section.key=value]

Trains the config's model on random tokens, in gloo processes of one thread each, through titanlite's own step. The
profiler reports each allocation and each release; their sum over time is what was held. No data is read. Memory that
does not come from PyTorch's allocator (Python, libraries, buffers inside of gloo) is not seen.
"""

import argparse
import multiprocessing
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from titanlite.batch import Batch
from titanlite.config.load import load
from titanlite.data.packing import TokenSequence
from titanlite.data.samples import as_batch
from titanlite.guard import StepGuard
from titanlite.loss import Targets
from titanlite.mesh import data_parallel_rank
from titanlite.models.base import Model
from titanlite.models.registry import resolve_model
from titanlite.ops import pick_kernels
from titanlite.ops.kernels import Kernels
from titanlite.optim import build_optimizer
from titanlite.optim.quantized import inner_tensors, is_quantized
from titanlite.parallelize import DTYPES, build_mesh, materialize, parallelize
from titanlite.parallelize.frozen import parallelize_frozen
from titanlite.parallelize.materialize import allocate, draw_weights
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.process_group import seed_step
from titanlite.schema import Config
from titanlite.step import build_step
from titanlite.techniques import parts_of, places
from titanlite.tools.plan.estimate import planned_targets

SPAN, OPTIMIZER_STEP = "measured: ", "Optimizer.step#"
TIMEOUT = timedelta(seconds=120)  # of one collective
PAUSE = 2e-3  # seconds


@dataclass(frozen=True)
class Measured:
    """Memory of one rank, in bytes. Steady state: all steps after the first one, which makes the optimizer's states."""

    peak: int
    """Peak of the steady state, without the buffers of gloo inside a collective."""
    peak_with_gloo: int
    """The same with the buffers of gloo, which other backends do not have."""
    peak_first: int
    """Peak of the first step."""
    states: int
    """Bytes that are live between two steps, without a batch."""
    batch: int
    """Tokens and labels of all micro-batches of a step; they are live in the whole step."""
    breakdown: dict[str, int]
    """Bytes of the states, from the objects themselves: parameters, optimizer, buffers."""
    phases: dict[str, int]
    """`peak` of each part of a step."""


class Change(NamedTuple):
    time: int
    address: int
    size: int
    """Bytes; negative for a release."""
    by_collective: bool


class Held(NamedTuple):
    """Bytes that are live from a time on."""

    time: int
    tensors: int
    with_buffers: int
    """The same with the buffers of a running collective."""


class AllocationRecord:
    """Records PyTorch's CPU allocator within `with`, for this thread and the collectives that it starts.

    Earlier allocations and their releases are not counted. Times are in nanoseconds.
    """

    def __init__(self) -> None:
        self._profile: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._spans: list[tuple[str, int, int]] = []
        self._timeline: list[Held] = []

    def __enter__(self) -> "AllocationRecord":
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        if error[0] is None:
            self._read()

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Name the time within, for `find`. PyTorch itself names the steps of optimizers."""
        return record_function(SPAN + name)

    def find(self, name: str, *, after: int = 0) -> tuple[int, int]:
        """Return begin and end of the first span at `after` or later whose name begins with `name`."""
        return min((begin, end) for known, begin, end in self._spans if known.startswith(name) and begin >= after)

    def held(self, time: int) -> Held:
        before = bisect_right(self._timeline, time, key=lambda held: held.time)
        return self._timeline[before - 1] if before else Held(time, 0, 0)

    def peak(self, begin: int, end: int, *, with_buffers: bool = False) -> int:
        """Return the most bytes that were live between begin and end."""
        within = [self.held(begin), *(held for held in self._timeline if begin <= held.time <= end)]
        return max(held.with_buffers if with_buffers else held.tensors for held in within)

    def _read(self) -> None:
        roots = self._profile.profiler.kineto_results.experimental_event_tree()
        this_thread = next(event.start_tid for event in roots if event.name.startswith(SPAN))
        changes: list[Change] = []
        todo = [(event, False) for event in roots]
        while todo:
            event, by_collective = todo.pop()
            by_collective |= event.name.startswith("c10d::") or event.start_tid != this_thread
            if event.tag == _EventType.Allocation:
                address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
                changes.append(Change(event.start_time_ns, address, size, by_collective))
            elif event.name.startswith((SPAN, OPTIMIZER_STEP)):
                self._spans.append((event.name.removeprefix(SPAN), event.start_time_ns, event.end_time_ns))
            todo += [(child, by_collective) for child in event.children]
        self._timeline = list(add_up(sorted(changes, key=lambda change: change.time)))


def add_up(changes: Iterable[Change]) -> Iterator[Held]:
    """Yield the live bytes after each change.

    Releases by threads that the profiler does not know are missing (see `seen_releases`). But every collective is
    waited for: when the next tensor is allocated, its buffers are gone. And memory at an address is gone when the
    address is allocated again.
    """
    tensors: dict[int, int] = {}
    buffers: dict[int, int] = {}
    held = buffered = 0
    for time_ns, address, size, by_collective in changes:
        if size > 0 and not by_collective:
            buffers, buffered = {}, 0
        held -= tensors.pop(address, 0)
        buffered -= buffers.pop(address, 0)
        if size > 0:
            (buffers if by_collective else tensors)[address] = size
            held, buffered = (held, buffered + size) if by_collective else (held + size, buffered)
        yield Held(time_ns, held, held + buffered)


def seen_releases() -> AbstractContextManager[Any]:
    """Make each wait for a collective a little longer.

    A thread of gloo holds the tensors of a collective that has just ended. The profiler would not see a release by it.
    """
    wait = dist.Work.wait

    def wait_longer(work: dist.Work, *args: Any) -> bool:
        done = wait(work, *args)
        time.sleep(PAUSE)
        return done

    return patch.object(dist.Work, "wait", wait_longer)


def measure_rank(config: Config, rank: int, processes: int, steps: int, meeting: str) -> Measured:
    """On one of the processes that train together. They find each other at the URL `meeting`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes, timeout=TIMEOUT)
    try:
        with AllocationRecord() as record, seen_releases():
            model, optimizer, batch, targets = train(config, record, rank, processes, steps)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return read_off(record, model, optimizer, steps, batch=batch, targets=targets)


def train(
    config: Config, record: AllocationRecord, rank: int, ranks: int, steps: int
) -> tuple[Model, Optimizer, int, Targets | None]:
    """As `titanlite.train` builds and trains, and nothing else. Returns also the bytes of a step's batches. The weights
    of a teacher are random."""
    device, training, seed = torch.device("cpu"), config.training, config.debug.seed
    mesh = build_mesh(config.parallelism, world_size=ranks, device_type="cpu")
    kind, args = resolve_model(config.model.name, config.model.flavor, config.model.args, config.model.file)
    with torch.device("meta"):
        model = kind(replace(args, max_seq_len=training.seq_len))
    kernels = pick_kernels(device)
    parallelize(model, config, mesh=mesh, kernels=kernels)
    parts = parts_of(config, mesh, Path(config.job.dump_folder))
    on_host = "parameters" in places(config)
    materialize(model, device=device, dtype=DTYPES[training.dtype], seed=seed, on_host=on_host, memory=parts.memory)
    optimizer = build_optimizer(model, config.optimizer, seed=seed, memory=parts.memory)
    guard = StepGuard(config.guard, device=device, step=0, state={})
    reader, readers = data_parallel_rank(mesh)
    micro_batch_size, accumulation = training.batch_split(readers)
    source = random_batches(config, micro_batch_size, args.vocab_size, seed=reader)
    targets = planned_targets(config)
    draw_frozen(targets, config, mesh=mesh, kernels=kernels)
    train_step = build_step(
        config, model, optimizer, mesh=mesh, kernels=kernels, parts=parts, targets=targets,
        should_skip=guard.should_skip,
    )  # fmt: skip
    size = 0
    for step in range(1, steps + 1):
        with record.span(f"step {step},"):
            batches = [parts.batch(batch) for batch in islice(source, accumulation)]
            size = sum(tensor.nbytes for batch in batches for tensor in batch.values())
            seed_step(seed, step, rank)
            train_step(batches, decide=guard.decide)
            del batches
    return model, optimizer, size, targets


def draw_frozen(targets: Targets | None, config: Config, *, mesh: DeviceMesh, kernels: Kernels) -> None:
    """Build the frozen model of targets, if there is one, with random weights."""
    device = torch.device("cpu")
    if targets is None:
        return
    model = parallelize_frozen(targets.frozen, config, mesh=mesh, kernels=kernels)
    allocate(model, device, device)
    draw_weights(model, device=device, seed=config.debug.seed)
    targets.use(model)


def random_batches(config: Config, size: int, vocab_size: int, *, seed: int) -> Iterator[Batch]:
    """Batches of `size` sequences, each of two documents, as the loader gives them. They are copies that PyTorch's
    allocator holds, as those on a GPU are; the loader's own are memory of NumPy."""
    seq_len, random = config.training.seq_len, np.random.default_rng(seed)
    starts = np.unique([0, seq_len // 2])
    while True:
        stretches = random.integers(0, vocab_size, (size, seq_len + 1))
        rows = [TokenSequence(stretch[:-1], stretch[1:], starts) for stretch in stretches]
        batch = as_batch(rows, mark_documents=config.data.document_mask)
        yield {name: tensor.clone() for name, tensor in batch.items()}


def read_off(
    record: AllocationRecord, model: Model, optimizer: Optimizer, steps: int, *, batch: int, targets: Targets | None
) -> Measured:
    first, *steady = [record.find(f"step {step},") for step in range(1, steps + 1)]
    updates = [record.find(OPTIMIZER_STEP, after=begin)[0] for begin, _ in steady]
    begin, end = steady[0][0], steady[-1][1]
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = {"parameters": model.parameters(), "optimizer": states, "buffers": model.buffers()}
    if targets and (teacher := targets.model):
        held |= {"teacher": teacher.parameters(), "teacher's buffers": teacher.buffers()}
    return Measured(
        peak=record.peak(begin, end),
        peak_with_gloo=record.peak(begin, end, with_buffers=True),
        peak_first=record.peak(*first),
        states=record.held(end).tensors,
        batch=batch,
        breakdown={name: bytes_of(values) for name, values in held.items()},
        phases={
            "forward and backward": max(record.peak(step[0], at) for step, at in zip(steady, updates, strict=True)),
            "update": max(record.peak(at, step[1]) for step, at in zip(steady, updates, strict=True)),
        },
    )


def bytes_of(values: Iterable[Any]) -> int:
    """Of the memory behind this rank's parts of all tensors among the values; what is shared counts once."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    plain = [
        piece for tensor in tensors for piece in (inner_tensors(tensor).values() if is_quantized(tensor) else [tensor])
    ]
    storages = [local_tensor(tensor).untyped_storage() for tensor in plain]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(config: Config, *, processes: int, steps: int = 3) -> list[Measured]:
    """Train that many steps on new processes of this machine; returns what each rank measured.

    Args:
        config: that was loaded for so many processes.

    Raises:
        UserError: the config asks for what there is not, or steps has no steady state.
    """
    if processes < 1 or steps < 2:
        raise UserError(f"needs at least 1 process and 2 steps, got {processes} and {steps}")
    resolve_model(config.model.name, config.model.flavor, config.model.args, config.model.file)  # raises at once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["titanlite.train"])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(processes, mp_context=context) as pool:
        meeting = f"file://{folder}/ranks"
        futures = [pool.submit(measure_rank, config, rank, processes, steps, meeting) for rank in range(processes)]
        return [future.result() for future in futures]


def main() -> None:
    from record import add_record_option, record  # a script beside this one

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    add_record_option(parser)
    arguments, overrides = parser.parse_known_args()
    try:
        config = load(arguments.config, overrides, world_size=arguments.processes)
        ranks = measure(config, processes=arguments.processes, steps=arguments.steps)
    except UserError as error:
        parser.exit(2, "".join(f"error: {line}\n" for line in str(error).splitlines()))
    print(" ".join([f"{arguments.config}: {arguments.processes} process(es), torch {torch.__version__}", *overrides]))
    peaks = [measured.peak / 2**20 for measured in ranks]
    name = " ".join([f"peak memory of a rank, {arguments.config}, {arguments.processes} process(es)", *overrides])
    record(arguments.record, name=name, value=max(peaks), low=min(peaks), unit="MiB", better="lower")
    for rank, measured in enumerate(ranks):
        sizes = asdict(measured)
        sizes |= sizes.pop("breakdown") | sizes.pop("phases")
        print(f"rank {rank}, MiB")
        for name, size in sizes.items():
            print(f"  {name.replace('_', ' '):<21} {size / 2**20:10,.2f}")


if __name__ == "__main__":
    main()
