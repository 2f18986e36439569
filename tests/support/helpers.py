"""Helpers of many tests: tiny runs, and functions that run on several gloo processes."""

import json
import math
import multiprocessing
import os
import pickle
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from titanlite.config.load import load
from titanlite.schema import Config

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.train import Run

TINY_TOML = """
[model.args]
dim = 42
n_layers = 1
n_heads = 3
n_kv_heads = 1
hidden_dim = 70
vocab_size = 259
[training]
steps = 6
seq_len = 32
global_batch_size = 8
mixed_precision_param = "float32"
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.0
[metrics]
log_freq = 1
loggers = []
[checkpoint]
interval = 100
"""
"""No dimension divides by 4, so that uneven shards are the rule. There is one block: a run is over sooner."""
THREE_BLOCKS = "--model.args.n_layers=3"


def mentions(text: str, *words: object) -> bool:
    """Tell whether a text has all these words (keys, files, numbers, values), in any order, in whatever sentence."""
    return all(re.search(rf"(?<!\w){re.escape(str(word))}(?!\w)", text) for word in words)


LONGEST = 600
"""Seconds that a test waits for other processes: machines that are busy take ten times as long as idle ones."""


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for what another thread or process does. It fails after some time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def closed_stdout() -> Iterator[None]:
    """Make standard output a pipe whose reader has ended, as `| head` leaves it."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream, open(os.devnull, "w") as nowhere:
        with redirect_stdout(stream):
            yield
        os.dup2(nowhere.fileno(), writer)  # closing writes what is left


class TinyRun:
    """A folder with some text and a config."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "text"
        self.text.mkdir()
        words = random.Random(0)
        for name in ("a", "b", "c"):
            sentence = " ".join(words.choice(["one", "two", "three", "four", "five"]) for _ in range(800))
            (self.text / f"{name}.txt").write_text(sentence)
        self.toml = folder / "tiny.toml"
        self.toml.write_text(f'[data]\npath = "{self.text}"\n[job]\ndump_folder = "{folder}/outputs"\n{TINY_TOML}')

    def with_short_documents(self) -> "TinyRun":
        """Let the text be many short documents of odd lengths, so that sequences hold several of them."""
        for file in self.text.iterdir():
            file.unlink()
        words = ["one", "two", "three", "four", "five"]
        lines = [" ".join(words[(i * k) % 5] for k in range(i % 9 + 1)) for i in range(600)]
        (self.text / "short.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
        return self

    def config(self, *overrides: str, world_size: int = 1) -> Config:
        return load(self.toml, overrides, world_size=world_size)

    def records(
        self, name: str = "tiny", outputs: str = "outputs", *, file: str = "metrics.jsonl"
    ) -> list[dict[str, Any]]:
        """metrics.jsonl of a run, or another file of records."""
        return [json.loads(line) for line in (self.folder / outputs / name / file).read_text().splitlines()]

    def losses(self, name: str = "tiny", outputs: str = "outputs") -> list[float]:
        return [record["loss"] for record in self.records(name, outputs)]


needs_forks = pytest.mark.skipif(sys.gettrace() is not None, reason="no forks beside a tracer, as coverage is one")


def built(rank: int, world_size: int, config: Config, observer: Any = None) -> "Run":
    """Build a run in the process group that is there already."""
    import torch

    from titanlite.checks.preflight import preflight
    from titanlite.runtime.process_group import Ranks
    from titanlite.tools.convert.source import open_model
    from titanlite.tools.convert.weights import open_weights
    from titanlite.tools.ingest.prepare import prepare_text
    from titanlite.tools.tasks.read import open_tasks
    from titanlite.train import build

    ranks, device = Ranks(rank, world_size, rank, world_size), torch.device("cpu")
    return build(
        config,
        preflight(config, ranks, device, open_model=open_model, open_tasks=open_tasks),
        ranks=ranks,
        device=device,
        prepare_text=prepare_text,
        open_weights=open_weights,
        phase=observer,
    )


def train_on_this_rank(config: Config, rank: int, world_size: int, observer: Any = None) -> Any:
    """Train in the process group that is there already; returns the run."""
    from titanlite.tools.checkpoints.last_export import export_last
    from titanlite.train import finish, train

    run = built(rank, world_size, config, observer)
    train(run)
    finish(run)
    export_last(run)
    return run


def world() -> "ProcessGroup":
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    return dist.group.WORLD


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone, like that of training on one process."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _clear_sharding_prop_cache()  # else DTensors of the next group are on meshes of this one


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """Call function(rank, world_size, *args) on each of world_size processes of a process group.

    Returns what each rank returned. The results that the ranks write count, not the exit codes of the processes.
    A rank that raises, or that is not done in time, fails the test with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank_main, args=(function, rank, world_size, args, backend, folder))
            for rank in range(world_size if backend != "fake" else 1)
        ]
        for process in processes:
            process.start()
        deadline, results = time.monotonic() + LONGEST, []
        for rank, process in enumerate(processes):
            results.append(_result(Path(folder, str(rank)), process, deadline))
            if results[-1][0]:  # the others may wait for this one
                deadline = min(deadline, time.monotonic() + 10)
        for process in processes:
            process.kill()
            process.join()
    failures = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


@contextmanager
def fake_mesh(rank: int, degrees: tuple[int, ...]) -> Iterator["DeviceMesh"]:
    """A mesh on which this process is one of the ranks, and the others are not there.

    Its axes have names of this rank's own: PyTorch caches which part of a tensor a rank has by meshes that look alike.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from titanlite.runtime.private_torch.tracing import fake_process_group

    names = tuple(f"{axis}_of_rank_{rank}" for axis in range(len(degrees)))
    with fake_process_group(math.prod(degrees), rank=rank):
        yield init_device_mesh("cpu", degrees, mesh_dim_names=names)


def run_in_turn(function: Callable[..., Any], world_size: int, configs: Sequence[Any], **options: Any) -> list[Any]:
    """Call function(rank, world_size, config) for each config, or what stands for one, in turn, in one process group.

    To start a process group takes longer than a tiny run. Returns for each config what each rank returned.
    """
    by_rank = run_ranks(_in_turn, world_size, function, list(configs), **options)
    return [list(results) for results in zip(*by_rank, strict=True)]


def _in_turn(rank: int, world_size: int, function: Callable[..., Any], configs: Sequence[Any]) -> list[Any]:
    results = []
    for config in configs:
        if "torch._dynamo" in sys.modules:  # a run is a process of its own, where no other model was compiled
            sys.modules["torch"].compiler.reset()
        results.append(function(rank, world_size, config))
    return results


def _rank_main(
    function: Callable[..., Any], rank: int, world_size: int, args: Sequence[Any], backend: str, folder: str
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if backend == "fake":
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        else:
            store = _store(rank, world_size, Path(folder, "port"))
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        result = None, function(rank, world_size, *args)
        dist.barrier()
    except BaseException:
        result = traceback.format_exc(), None
    staging = Path(folder, f".{rank}")
    staging.write_bytes(pickle.dumps(result))
    staging.rename(Path(folder, str(rank)))
    os._exit(0)


def _store(rank: int, world_size: int, path: Path) -> Any:
    """Return a store on a port that rank 0 gets from the kernel. Another process could take one that is only free."""
    from torch.distributed import TCPStore

    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        staging = path.with_suffix(".staging")
        staging.write_text(str(store.port))
        staging.rename(path)
        return store
    while not path.exists():
        time.sleep(0.01)
    return TCPStore("127.0.0.1", int(path.read_text()), world_size)


def _result(path: Path, process: Any, deadline: float) -> tuple[str | None, Any]:
    while not path.exists():
        if time.monotonic() > deadline:
            return "not done in time", None
        if not process.is_alive() and not path.exists():
            return f"died with exit code {process.exitcode}", None
        time.sleep(0.01)
    return pickle.loads(path.read_bytes())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def titanlite(*arguments: str, **environ: str) -> tuple[int, list[str], list[str]]:
    """Run a command; return its exit code, and the lines of its standard output and standard error."""
    command = [sys.executable, "-m", "titanlite", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environ
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LONGEST, check=False)
    return result.returncode, result.stdout.splitlines(), result.stderr.splitlines()


def run_train(*arguments: str, cwd: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run run_train.sh in a folder, with this interpreter."""
    script = Path(__file__).parents[2] / "run_train.sh"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | environ
    return subprocess.run(
        [str(script), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
        timeout=LONGEST,
        check=False,
    )
