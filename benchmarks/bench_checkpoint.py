"""What a checkpoint costs training: saving asynchronously against waiting for it, and what the rest of a save takes.

    python benchmarks/bench_checkpoint.py [--size 66MB | 1GB | debug | 25M] [--processes 2] [--saves 10]
                                          [--memory | --copies] [--record FILE]

One training run; before each save some steps without any, then, in turn, a save by each contender: synchronous (sync),
titanlite's default (async), PyTorch's own dcp.async_save in a thread (plain), and the same with its stager and cached
plans (stager). What counts is the time from the beginning of the save to the end of the step in which it ends, less as
many usual steps. Prints medians; --memory saves 20 times by the default alone and prints the host memory after saves 3
and 20. --copies compares 10 steps with a local copy at their beginning with 10 steps without one, in turn.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from record import Better, add_record_option, ratios, record
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from titanlite.checkpoint.history import RunHistory
from titanlite.checkpoint.local import build_copies
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.manifest import Progress
from titanlite.checkpoint.resume import RunSettings
from titanlite.checkpoint.save import build_saver
from titanlite.checkpoint.save_overhead import SaveClock, between
from titanlite.checks.preflight import preflight
from titanlite.config.load import load
from titanlite.runtime.allocator import cores
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.process_group import pick_device, process_group, read_ranks
from titanlite.state import flat, state_of
from titanlite.storage.storage import open_storage
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.train import Run, build

ROOT = Path(__file__).parents[1]
SIZES = {
    "66MB": ["--model.args.n_layers=7", "--model.args.dim=240", "--model.args.n_heads=6", "--model.args.n_kv_heads=2",
             "--model.args.hidden_dim=800", "--training.seq_len=128", "--training.global_batch_size=16"],
    "1GB": ["--model.args.n_layers=12", "--model.args.dim=768", "--model.args.n_heads=12", "--model.args.n_kv_heads=4",
            "--model.args.hidden_dim=2816", "--training.seq_len=128", "--training.global_batch_size=4"],
    "debug": [],
    "25M": ["--model.args.n_layers=14", "--model.args.dim=384", "--model.args.n_heads=6", "--model.args.n_kv_heads=2",
            "--model.args.hidden_dim=1152"],
}  # fmt: skip
QUIET_STEPS = {"66MB": 6, "1GB": 3, "debug": 6, "25M": 6}
LOCAL_INTERVAL = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="66MB")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--copies", action="store_true")
    add_record_option(parser)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        measure(arguments)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(arguments.processes)]
    threads = max(1, cores() // arguments.processes)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        subprocess.run(
            [sys.executable, *(launcher if arguments.processes > 1 else []), __file__, *sys.argv[1:],
             "--folder", folder],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)}, check=True,
        )  # fmt: skip


def measure(arguments: argparse.Namespace) -> None:
    ranks = read_ranks(os.environ)
    options = [*SIZES[arguments.size], f"--job.dump_folder={arguments.folder}", "--training.steps=100000"]
    config = load(ROOT / "train_configs" / "debug.toml", options, world_size=ranks.world_size)
    device = pick_device(ranks)
    with process_group(ranks, device):
        run = build(config, preflight(config, ranks, device), ranks=ranks, device=device, prepare_text=prepare_text)
        contest = Contest(run, quiet=QUIET_STEPS[arguments.size], size=arguments.size, path=arguments.record)
        if arguments.copies:
            contest.copies(arguments.saves)
        else:
            contest.memory() if arguments.memory else contest.hold(arguments.saves)
    os._exit(0)


class Contest:
    def __init__(self, run: Run, *, quiet: int, size: str, path: Path | None) -> None:
        """Results are recorded in `path`."""
        self.run = run
        self.quiet = quiet
        self.size = size
        self.path = path
        self.step_number = 0
        self.clock = SaveClock(torch.device("cpu"))
        self.group: Any = dist.new_group(backend="gloo")
        self.folder = Path(run.folder.path)
        self.stager: DefaultStager | None = None
        self.planner: dcp.DefaultSavePlanner | None = None

    def step(self) -> None:
        batches = list(islice(self.run.batches, self.run.accumulation))
        self.run.train_step(batches, decide=self.run.guard.decide)
        self.step_number += 1
        self.clock.step()

    def manager(self, name: str, mode: str) -> CheckpointManager:
        changes = {"async_mode": mode, "keep_latest_k": 1, "local_interval": LOCAL_INTERVAL * (name == "local")}
        section = self.run.config.checkpoint.model_copy(update=changes)
        storage, state = open_storage(str(self.folder / name), owner=name), self.run.state
        saver = build_saver(section, storage, torch.device("cpu"), whole_config="")
        history, settings = RunHistory(storage, [], None, False), RunSettings(lambda samples: {}, [])
        copies = None
        if name == "local":
            copies = build_copies(state, shared=saver, history=history, settings=settings, timeout_seconds=600)
        return CheckpointManager(section, state, saver=saver, history=history, settings=settings, copies=copies)

    def hold(self, saves: int) -> None:
        managers = {"sync": self.manager("sync", "disabled"), "async": self.manager("async", "async")}
        contenders: dict[str, Callable[[], Callable[[], bool]]] = {
            "sync": lambda: self.save(managers["sync"]),
            "async": lambda: self.save(managers["async"]),
            "plain": self.plain,
            "stager": self.staged,
        }
        blocked: dict[str, list[float]] = {name: [] for name in contenders}
        self.saves: dict[str, list[dict[str, Any]]] = {"sync": [], "async": []}
        for turn in range(saves + 1):
            for name, begin in contenders.items():
                for _ in range(self.quiet):
                    self.step()
                self.clock.begin_save()
                has_ended = begin()
                while not self.everywhere(has_ended()):
                    self.step()
                seconds = self.clock.end_save().seconds()
                if turn and seconds is not None:  # the first save takes memory and makes plans
                    blocked[name].append(seconds)
        state = sum(local_tensor(t).numel() * local_tensor(t).element_size() for t in flat(self.state()).values())
        self.report(blocked, managers, state)

    def save(self, manager: CheckpointManager) -> Callable[[], bool]:
        name = "async" if manager.is_background else "sync"
        manager.save(Progress(self.step_number, 0), last=False)

        def has_ended() -> bool:
            self.saves[name] += manager.watch()
            return not manager.is_saving()

        return has_ended

    def plain(self) -> Callable[[], bool]:
        folder = self.folder / "plain"
        writer = dcp.FileSystemWriter(folder, overwrite=True)
        future: Future = dcp.async_save(self.state(), storage_writer=writer, process_group=self.group)  # pyright: ignore
        return future.done

    def staged(self) -> Callable[[], bool]:
        if self.stager is None:
            options = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_non_blocking_copy=False)
            self.stager, self.planner = DefaultStager(options), dcp.DefaultSavePlanner(enable_plan_caching=True)
        writer = dcp.FileSystemWriter(self.folder / "stager", overwrite=True)
        response = dcp.async_save(
            self.state(), storage_writer=writer, process_group=self.group, async_stager=self.stager,
            planner=self.planner,
        )  # fmt: skip
        assert isinstance(response, AsyncSaveResponse)
        response.staging_completion.result()  # else the next update changes what is copied
        return response.upload_completion.done

    def state(self) -> Any:
        return state_of(self.run.model, self.run.optimizer)

    def everywhere(self, ended: bool) -> bool:
        flag = torch.tensor([not ended], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return not flag.item()

    def report(self, blocked: dict[str, list[float]], managers: dict[str, CheckpointManager], state: int) -> None:
        if dist.get_rank() != 0:
            return
        usual = statistics.median(between(a, b) for a, b in self.clock._undisturbed)
        print(f"{dist.get_world_size()} process(es), torch {torch.__version__}, a step {usual * 1e3:.0f} ms")
        medians = {name: statistics.median(seconds) for name, seconds in blocked.items()}
        for name, seconds in blocked.items():
            spread = f"{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f}"
            print(f"  {name:6} training held up for {medians[name] * 1e3:6.0f} ms ({spread})")
        for name in ("async", "plain", "stager"):
            print(f"  {name} / sync {medians[name] / medians['sync']:.2f}")
            pairs = ratios(blocked[name], blocked["sync"])
            value, low, high = medians[name] / medians["sync"], min(pairs), max(pairs)
            better, aim = ("lower", "< 0.5") if name == "async" else ("none", "")
            self.note(f"{name} / synchronous save", value=value, low=low, high=high, better=better, aim=aim)
        plans = [one["planning_seconds"] for one in self.saves["sync"]]  # nothing trains beside it
        print(f"  planning, first and then: {plans[0] * 1e3:.0f} and {statistics.median(plans[1:]) * 1e3:.1f} ms")
        print(f"  second plan / first plan {statistics.median(plans[1:]) / plans[0]:.3f}")
        self.note("second plan / first plan", values=[plan / plans[0] for plan in plans[1:]], aim="< 0.2")
        written = self.saves["async"][-1]["bytes"]
        whole = sum(t.numel() * t.element_size() for t in flat(self.state()).values())
        print(f"  bytes of state {whole:,}, written / state {written / whole:.4f}")
        shares = [one["bytes"] / whole for one in self.saves["async"]]
        self.note("bytes written / bytes of state", values=shares, aim="< 1.02")
        for name, saves in self.saves.items():
            parts = [key for key in saves[0] if key.endswith("seconds") and key != "blocking_seconds"]
            usual = {key: round(statistics.median(one[key] for one in saves[1:]), 3) for key in parts}
            print(f"  {name:6} {usual}")

    def memory(self) -> None:
        manager, after = self.manager("async", "async"), {}
        for save in range(1, 21):
            self.step()
            manager.save(Progress(self.step_number, 0), last=False)
            while manager.is_saving():
                self.step()
                manager.watch()
            after[save] = resident()
        if dist.get_rank() == 0:
            print(f"  host memory after save 3 {after[3] / 2**20:.0f} MiB, after save 20 {after[20] / 2**20:.0f} MiB")
            print(f"  after save 20 / after save 3 {after[20] / after[3]:.3f}")
            late = [after[save] for save in range(16, 21)]  # the spread is that of the last five saves
            value, low, high = (size / after[3] for size in (after[20], min(late), max(late)))
            self.note("host memory after save 20 / after save 3", value=value, low=low, high=high, aim="< 1.05")
            value, low, high = (size / 2**20 for size in (after[20], min(late), max(late)))
            self.note("host memory after save 20", value=value, low=low, high=high, unit="MiB")

    def copies(self, pairs: int) -> None:
        """Compare steps with and without a local copy."""
        manager, with_copy, without = self.manager("local", "async"), [], []
        for pair in range(pairs + 1):
            for is_copied in (pair % 2 == 0, pair % 2 == 1):
                dist.barrier()
                began = time.perf_counter()
                if is_copied:
                    manager.copy(Progress(self.step_number, 0))
                for _ in range(LOCAL_INTERVAL):
                    self.step()
                if pair:  # the first copy takes memory and makes plans
                    (with_copy if is_copied else without).append(time.perf_counter() - began)
        manager.finish()
        if dist.get_rank() == 0:
            added = [(a / b - 1) * 100 for a, b in zip(with_copy, without, strict=True)]
            usual, whole = statistics.median(without) / LOCAL_INTERVAL, sum(with_copy) / sum(without)
            print(f"{dist.get_world_size()} process(es), torch {torch.__version__}, a step {usual * 1e3:.0f} ms")
            print(f"  local copies every {LOCAL_INTERVAL} steps add {statistics.median(added):.2f} % (median), "
                  f"{100 * whole - 100:.2f} % (all; {min(added):.2f} to {max(added):.2f}, {pairs} pairs)")  # fmt: skip
            self.note("steps with local copies / without", values=[1 + each / 100 for each in added], aim="< 1.01")

    def note(self, name: str, *, better: Better = "lower", **result: Any) -> None:
        """Record what one rank has printed."""
        case = f"{self.size}, {dist.get_world_size()} process(es)"
        record(self.path, name=f"{name}, {case}", better=better, **result)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
