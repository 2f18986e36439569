"""What states on disk cost in time and save in memory: seconds of a step, and the most memory a process takes.

    python benchmarks/bench_offload.py [--dim 512] [--layers 8] [--steps 6] [--path FOLDER] [--only NAME]

Trains a model on the CPU, each variant in a process of its own. Anonymous memory is what the process cannot do without;
pages of files are what the system could take back at any time. Bytes are those that the disk has read and written, as
Linux counts them. The states' files are in FOLDER: it should be on the disk that is to be measured.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from record import add_record_option, record

from titanlite.config.load import load

ROOT = Path(__file__).parents[1]
DISK = ["offload.optimizer=disk"]
RESHARD = ["parallelism.fsdp_reshard_after_forward=always"]
VARIANTS: dict[str, list[str]] = {
    "memory": RESHARD,
    "CPU offload": [*RESHARD, "training.enable_cpu_offload=true"],
    "moments on disk": [*RESHARD, *DISK],
    "moments on disk, bfloat16": [*RESHARD, *DISK, "optimizer.state_dtype=bfloat16"],
    "moments and parameters on disk": [
        *RESHARD, *DISK, "offload.parameters=disk", "training.enable_cpu_offload=true"
    ],
}  # fmt: skip
SIZES = ["training.seq_len=64", "training.global_batch_size=1", "metrics.log_freq=1"]
NOT_MEASURED = ["checkpoint.enable=false", "validation.enable=false", "metrics.loggers=[]"]
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--path", default=None)
    parser.add_argument("--only", default="")
    add_record_option(parser)
    arguments = parser.parse_args()
    width = {"dim": arguments.dim, "hidden_dim": 4 * arguments.dim, "n_heads": 8, "n_kv_heads": 4}
    model = {**width, "n_layers": arguments.layers, "vocab_size": 8192}
    context = multiprocessing.get_context("spawn")
    first: Made | None = None
    print("| | step, s | anonymous, MiB | of files, MiB | read a step, MiB | written a step, MiB | last loss |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.path) as folder:
        for number, (name, options) in enumerate(VARIANTS.items()):
            if arguments.only not in name:
                continue
            places = [f"job.dump_folder={folder}", f"job.name=run-{number}", f"training.steps={arguments.steps}"]
            shape = [f"model.args.{key}={value}" for key, value in model.items()]
            words = [f"--{option}" for option in (*SIZES, *NOT_MEASURED, *shape, *places, *options)]
            with context.Pool(1) as pool:
                made = pool.apply(measure, (words,))
            print(
                f"| {name} | {statistics.median(made.seconds):.2f} | {made.anonymous / MIB:,.0f} "
                f"| {made.of_files / MIB:,.0f} | {made.read / MIB:,.0f} | {made.written / MIB:,.0f} "
                f"| {made.last_loss:.6f} |",
                flush=True,
            )
            first = made if name == "memory" else first
            if not first:
                continue
            case = f"{name}, dim {arguments.dim}, {arguments.layers} layers"
            relative = [seconds / statistics.median(first.seconds) for seconds in made.seconds]
            path = arguments.record
            record(path, name=f"time of a step / all in memory, {case}", values=relative, better="lower")
            memory_saved = made.anonymous / first.anonymous
            record(path, name=f"anonymous memory / all in memory, {case}", value=memory_saved, better="lower")
            record(
                path, name=f"last loss - all in memory, {case}", value=made.last_loss - first.last_loss, better="none"
            )


@dataclass
class Made:
    """By one run; sizes in bytes, what is read and written for a step."""

    seconds: list[float]
    anonymous: int
    of_files: int
    read: float
    written: float
    last_loss: float


def measure(words: list[str]) -> Made:
    """One run. The first step does not count for time: it also takes memory."""
    from titanlite.checks.preflight import preflight
    from titanlite.runtime.process_group import pick_device, process_group, read_ranks
    from titanlite.step import Step
    from titanlite.tools.ingest.prepare import prepare_text
    from titanlite.train import build, finish, train

    ranks = read_ranks({})
    device = pick_device(ranks)
    moments: list[tuple[float, dict[str, int]]] = []
    call = Step.__call__

    def watched(step: Step, *args: Any, **kwargs: Any) -> Any:
        moments.append((time.perf_counter(), disk_bytes()))
        return call(step, *args, **kwargs)

    Step.__call__ = watched  # pyright: ignore[reportAttributeAccessIssue]
    config = load(ROOT / "train_configs" / "debug.toml", words)
    with process_group(ranks, device):
        run = build(config, preflight(config, ranks, device), ranks=ranks, device=device, prepare_text=prepare_text)
        with Peaks() as peaks:
            train(run)
            moments.append((time.perf_counter(), disk_bytes()))
        finish(run)
    steps = list(pairwise(moments[1:]))
    seconds = [after[0] - start[0] for start, after in steps]
    counts = ([after[1][key] - start[1][key] for start, after in steps] for key in ("read_bytes", "write_bytes"))
    read, written = map(statistics.median, counts)
    last = json.loads(run.folder.records("metrics").read_text().splitlines()[-1])["loss"]
    return Made(seconds, peaks.most["RssAnon"], peaks.most["RssFile"], read, written, last)


def memory() -> dict[str, int]:
    """Resident bytes of this process."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "RssFile:")}


def disk_bytes() -> dict[str, int]:
    """That this process has had read and written so far."""
    pairs = [line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()]
    return {name: int(value) for name, value in pairs}


class Peaks(threading.Thread):
    """The most of each kind of memory, looked at every 20 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = memory()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            self.most = {name: max(size, self.most[name]) for name, size in memory().items()}

    def __enter__(self) -> "Peaks":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


if __name__ == "__main__":
    main()
