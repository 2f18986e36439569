"""How titanlite grows: with processes, ranks, parameters and layers.

    python benchmarks/scaling.py volume      # bytes that a step sends, against what FSDP must send
    python benchmarks/scaling.py host        # the host's own seconds of a step on fake ranks, 1 to 4,096
    python benchmarks/scaling.py processes   # tokens a second on 1, 2 and 4 processes of this machine

`volume` counts the collectives of a real step on gloo. Theory: FSDP gathers each parameter for forward and backward,
and reduces its gradient once; backward has no need of the embedding, and finds the head still gathered. A replica
(HSDP) all-reduces its shards of the gradients once more.

`host` makes steps as one rank of many, without a network and without arithmetic: what is left is what the host does,
and that must not grow with ranks. Its calls of functions are counted, which no busy machine changes; its CPU time is
measured as well.
"""

import argparse
import cProfile
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import add_record_option, record
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite import train as train_module
from titanlite.checkpoint.manager import Progress
from titanlite.checks.preflight import preflight
from titanlite.config.load import load
from titanlite.mesh import loss_group
from titanlite.ops.cpu import CpuKernels
from titanlite.optim import build_optimizer
from titanlite.parallelize.materialize import allocate
from titanlite.runtime.allocator import cores
from titanlite.runtime.console import start_logging
from titanlite.runtime.private_torch.tracing import FakeTensorMode
from titanlite.runtime.process_group import Ranks, process_group, read_ranks
from titanlite.schema import Config
from titanlite.step import StepResult, train_step
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.tools.plan.estimate import model_of
from titanlite.tools.plan.trace import parallelized
from titanlite.train import Run, build, train

ROOT = Path(__file__).parents[1]
SMALL = [
    "--model.args.dim=64",
    "--model.args.n_heads=2",
    "--model.args.n_kv_heads=1",
    "--model.args.hidden_dim=128",
    "--training.seq_len=16",
    "--validation.enable=false",
    "--checkpoint.enable=false",
    "--metrics.loggers=[]",
]
LAYOUTS = [(1, 2), (1, 4), (2, 2), (2, 1)]
COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "alltoall_base_": "reduce-scatter",  # so it is done on gloo
    "allreduce_": "all-reduce",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["volume", "host", "processes", "volume-rank", "host-rank"])
    parser.add_argument("--steps", type=int, default=20, help="measured, each time")
    parser.add_argument("--runs", type=int, default=5)
    add_record_option(parser)
    arguments, options = parser.parse_known_args()
    match arguments.what:
        case "volume":
            volume(arguments.record, options)
        case "host":
            host(arguments.record, arguments.steps)
        case "processes":
            processes(arguments.record, arguments.runs)
        case "volume-rank":
            volume_of_this_rank(options)
        case "host-rank":
            host_of_rank_0(arguments.steps, options)


def run(world_size: int, *arguments: str) -> dict[str, Any]:
    """What a subcommand for one rank prints, as the only process or under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    command = [sys.executable, *(launcher if world_size > 1 else []), __file__, *arguments]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=600
    )
    return json.loads(result.stdout.splitlines()[-1])


# Communication volume


class Messages(TorchDispatchMode):
    """Bytes of the whole tensors that collectives work on, by what they do and over how many ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        if name.startswith("c10d::") and (kind := COLLECTIVES.get(name.removeprefix("c10d::"))):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            size = max(tensor.nbytes for tensor in tensors)
            if size > 1024:  # not the metrics that ranks agree on
                self.bytes[kind] += size
                self.count[kind] += 1
        return func(*args, **(kwargs or {}))


def volume(path: Path | None, options: list[str]) -> None:
    print("MB of whole tensors a step   sent   theory  ratio  collectives")
    for replicate, shard in LAYOUTS:
        degrees = [
            f"--parallelism.data_parallel_replicate_degree={replicate}",
            f"--parallelism.data_parallel_shard_degree={shard}",
        ]
        found = run(replicate * shard, "volume-rank", *degrees, *options)
        theory = theory_of(found["parameters"], found["embedding"], found["head"], replicate=replicate, shard=shard)
        for kind in theory:
            sent, must = found["bytes"].get(kind, 0), theory[kind]
            ratio = sent / must
            print(
                f"{replicate} x {shard}  {kind:<18} {sent / 1e6:8.2f} {must / 1e6:8.2f} {ratio:6.3f} "
                f"{found['count'].get(kind, 0):5}"
            )
            name = f"bytes of {kind}s, {replicate} x {shard}, sent / theory"
            record(path, name=name, value=ratio, low=ratio, high=ratio, better="lower", aim="1.00")


def theory_of(parameters: int, embedding: int, head: int, *, replicate: int, shard: int) -> dict[str, int]:
    """Bytes by collective, of float32."""
    sent = {}
    if shard > 1:
        sent["all-gather"] = 4 * (parameters + (parameters - embedding - head))
        sent["reduce-scatter"] = 4 * parameters
    if replicate > 1:
        sent["all-reduce"] = 4 * parameters // shard
    return sent


def volume_of_this_rank(options: list[str]) -> None:
    ranks = read_ranks(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        made = build_run([f"--job.dump_folder={folder}", "--checkpoint.enable=false", *options], ranks)
        one_step(made)
        with Messages() as messages:
            one_step(made)
        if ranks.rank == 0:
            sizes = {name: parameter.numel() for name, parameter in made.model.named_parameters()}
            parts = {
                "parameters": sum(sizes.values()),
                "embedding": sum(size for name, size in sizes.items() if name.startswith("tok_embeddings")),
                "head": sum(size for name, size in sizes.items() if name.startswith("head")),
            }
            print(json.dumps({"bytes": messages.bytes, "count": messages.count, **parts}), flush=True)
        dist.barrier()
    os._exit(0)


def build_run(options: list[str], ranks: Ranks) -> Run:
    device = torch.device("cpu")
    config = load(ROOT / "train_configs" / "debug.toml", options, world_size=ranks.world_size)
    if not dist.is_initialized():
        process_group(ranks, device).__enter__()
    start_logging(1)  # no lines on standard output
    return build(config, preflight(config, ranks, device), ranks=ranks, device=device, prepare_text=prepare_text)


def one_step(made: Run) -> None:
    train_step(
        made.model,
        list(islice(made.batches, made.accumulation)),
        optimizer=made.optimizer,
        group=made.group,
        max_norm=1.0,
        loss_function=made.loss_function,
        decide=made.guard.decide,
    )


# The host's part of a step


def host(path: Path | None, steps: int) -> None:
    """Each row against the first of its table."""
    replicas = "--parallelism.data_parallel_replicate_degree"
    # title, what it should be, and of each row: its value, ranks, options
    tables: list[tuple[str, str, list[tuple[int, int, list[str]]]]] = [
        ("ranks, FSDP", "flat", [(ranks, ranks, []) for ranks in (1, 8, 64, 512, 4096)]),
        (
            "ranks, HSDP with shards of 8",
            "flat",
            [(ranks, ranks, [f"{replicas}={ranks // 8}"]) for ranks in (8, 64, 512, 4096)],
        ),
        (
            "layers, 512 ranks",
            "linear",
            [(layers, 512, [f"--model.args.n_layers={layers}"]) for layers in (4, 8, 16, 32)],
        ),
        (
            "size of parameters, 512 ranks",
            "flat",
            [
                (dim, 512, [f"--model.args.dim={dim}", f"--model.args.hidden_dim={3 * dim}"])
                for dim in (256, 1024, 4096)
            ],
        ),
    ]
    for title, aim, rows in tables:
        print(f"{title:<32} step calls    ratio           ms    ratio   loop calls    ratio           ms    ratio")
        firsts: dict[str, float] = {}
        for value, ranks, options in rows:
            found = run(1, "host-rank", f"--steps={steps}", f"--ranks={ranks}", *options)
            line = f"{value:>30,}"
            for what, values in found.items():
                median = statistics.median(values)
                first = firsts.setdefault(what, median)
                line += f" {median:12,.{0 if 'calls' in what else 2}f} {median / first:8.3f}"
                name = f"host's {what}, {title}: {value:,} / {rows[0][0]:,}"
                ratios = [each / first for each in values]
                record(path, name=name, values=ratios, better="lower", aim=aim if "step" in what else "flat")
            print(line, flush=True)


def host_of_rank_0(steps: int, options: list[str]) -> None:
    """As rank 0 of many, of the step, and of the loop around it: calls of functions, and CPU milliseconds of five times
    `steps` steps."""
    torch.set_num_threads(1)
    [world_size] = [int(option.partition("=")[2]) for option in options if option.startswith("--ranks=")]
    options = [option for option in options if not option.startswith("--ranks=")]
    with tempfile.TemporaryDirectory() as folder:
        options = [*SMALL, f"--training.global_batch_size={world_size}", f"--job.dump_folder={folder}", *options]
        loop = costs("loop", the_loop(options, world_size), 40 * steps)  # what a start costs is to vanish
        dist.destroy_process_group()
        found = costs("step", the_step(options, world_size), steps) | loop
    print(json.dumps(found), flush=True)
    os._exit(0)


def costs(what: str, work: Callable[[int], None], steps: int) -> dict[str, list[float]]:
    work(3)
    times = []
    for _ in range(5):
        before = time.process_time()
        work(steps)
        times.append(1000 * (time.process_time() - before) / steps)
    with cProfile.Profile() as profile:
        work(steps)
    calls = sum(entry.callcount for entry in profile.getstats())
    return {f"function calls, {what}": [calls / steps], f"CPU time, {what}": times}


def the_step(options: list[str], world_size: int) -> Callable[[int], None]:
    """The real step on fake tensors: no arithmetic, and more of the host's time an operator than with real ones."""
    config = load(ROOT / "train_configs" / "debug.toml", options, world_size=world_size)
    start(world_size)
    model, mesh = parallelized(config, *model_of(config), world_size=world_size, kernels=CpuKernels())
    FakeTensorMode(allow_non_fake_inputs=True).__enter__()
    cpu = torch.device("cpu")
    allocate(model, cpu, cpu)
    optimizer = build_optimizer(model, config.optimizer, seed=0)
    tokens = torch.zeros(1, config.training.seq_len, dtype=torch.int64)
    group = loss_group(mesh)

    def work(count: int) -> None:
        for _ in range(count):
            batch: Any = {"tokens": tokens, "labels": tokens}
            train_step(model, [batch], optimizer=optimizer, group=group, max_norm=1.0)

    return work


def the_loop(options: list[str], world_size: int) -> Callable[[int], None]:
    """titanlite's own loop, data and metrics, with a step that does nothing and without the first lines."""
    start(world_size)
    made = build_run(options, Ranks(0, world_size, 0, 1))
    zero = torch.zeros(())
    nothing = StepResult(zero, zero, zero, zero, torch.zeros(1), zero, stop_flags=torch.zeros(1))
    train_module.train_step = lambda *_, **__: nothing
    train_module.report_start = lambda *_, **__: None
    progress = Progress()

    def work(count: int) -> None:
        nonlocal progress
        train(replace(made, steps=progress.step + count, progress=progress))
        progress = Progress(progress.step + count, progress.samples_seen + count * world_size)

    return work


def start(world_size: int) -> None:
    """A process group whose other members are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    if not isinstance(dist.new_group, partial):
        dist.new_group = partial(of_fakes, dist.new_group)


def of_fakes(make: Callable[..., Any], *_: Any, **options: Any) -> Any:
    return make(**{**options, "backend": "fake"})  # checkpoints ask for gloo


# Processes of this machine


def processes(path: Path | None, runs: int) -> None:
    """Steps of debug.toml by bench_step's titanlite contender, on 1, 2 and 4 processes."""
    import bench_step

    available = cores()
    config: Config = load(ROOT / "train_configs" / "debug.toml", [], world_size=1)
    tokens = config.training.global_batch_size * config.training.seq_len
    speeds: dict[int, list[float]] = {1: [], 2: [], 4: []}
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--job.dump_folder={folder}", "--checkpoint.enable=false", "--validation.enable=false"]
        for _ in range(runs):
            for count, found in speeds.items():
                found.append(tokens / bench_step.seconds_of_titanlite(count, options))
    print(f"{available} cores    tokens/s (least to most)   ratio to 1 process")
    alone = statistics.median(speeds[1])
    for count, found in speeds.items():
        ratios = [speed / one for speed, one in zip(found, speeds[1], strict=True)]
        print(
            f"{count} processes {statistics.median(found):9,.0f} ({min(found):,.0f} to {max(found):,.0f})   "
            f"{statistics.median(found) / alone:.2f}"
        )
        name = f"tokens a second of debug.toml, {count} processes / 1"
        record(path, name=name, values=ratios, better="higher", aim="")


if __name__ == "__main__":
    main()
