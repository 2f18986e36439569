"""What titanlite costs: steps through its whole loop, against a plain PyTorch loop written by hand (plain_llama.py).

    python benchmarks/bench_step.py [--processes 2] [--runs 5] [--dtype DTYPE] [--compile-plain] [--section.key=value]

Both train a Llama of 5.5 M parameters on 8 sequences of 256 tokens, or one of other sizes (`SIZES`). Each is in
processes of its own, so that neither profits from the other's settings, and they take turns of a few steps, so that
they meet the same noise. On several processes the plain loop uses FSDP2 as its documentation shows it, and in
bfloat16 on one process autocast. Options but sizes are titanlite's alone: --compile.enable=true,
--parallelism.data_parallel_replicate_degree=2. Prints the medians of all runs, and the ratio plain / titanlite of
turns that follow each other: above 1, titanlite is faster. Its spread is that of the runs: each has processes of its
own, which differ by some percent for as long as they live.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from plain_llama import take_turns
from record import add_record_option, ratios, record

from titanlite.checkpoint.manifest import Progress
from titanlite.checks.preflight import preflight
from titanlite.config.load import load
from titanlite.data.sources import open_tokens
from titanlite.runtime.allocator import cores
from titanlite.runtime.console import LOGGER
from titanlite.runtime.process_group import pick_device, process_group, read_ranks
from titanlite.schema import Config
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.train import build, train

TURN, TURNS, WARM_UP = 5, 6, 2
ROOT = Path(__file__).parents[1]
MODEL = {"dim": 256, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 704, "vocab_size": 2048}
SEQ_LEN, BATCH = 256, 8
SAME = [
    *(f"--model.args.{name}={value}" for name, value in MODEL.items()),
    f"--training.seq_len={SEQ_LEN}",
    f"--training.global_batch_size={BATCH}",
    "--validation.enable=false",
    "--checkpoint.enable=false",
]
SIZES = "--model.args.", "--training.seq_len=", "--training.global_batch_size="
"""Options that the plain loop has, too: with dim 64 and one sequence, a step is what the host does."""
Turn = Callable[[], None]


@dataclass
class Steps:
    """Measurements of one run of a contender."""

    seconds: list[float]
    """Seconds per step, for each turn."""
    mib: float
    """Peak memory of one process, in MiB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compile-plain", action="store_true", help="compile the plain loop")
    parser.add_argument("--turn", type=int, default=TURN, help="steps that are timed together")
    parser.add_argument("--turns", type=int, default=TURNS, help="in a run, beside those that warm up")
    parser.add_argument("--contender", action="store_true", help=argparse.SUPPRESS)
    add_record_option(parser)
    arguments, options = parser.parse_known_args()
    if arguments.contender:
        compete(options, arguments.turn, arguments.turns)
        return
    results: dict[str, list[Steps]] = {"plain": [], "titanlite": []}
    with tempfile.TemporaryDirectory() as folder:
        places = [f"--job.dump_folder={folder}"]
        ours = [*places, *SAME, f"--training.mixed_precision_param={arguments.dtype}", *options]
        same = [*places, *SAME, *(word for word in options if word.startswith(SIZES))]
        settings = settings_of_plain(load(ROOT / "train_configs" / "debug.toml", same), arguments.dtype)
        settings |= {"turn": arguments.turn, "turns": WARM_UP + arguments.turns, "compile": arguments.compile_plain}
        lengths = [f"--turn={arguments.turn}", f"--turns={arguments.turns}"]
        words = {"plain": plain_words(settings), "titanlite": titanlite_words([*lengths, *ours])}
        for _ in range(arguments.runs):
            for name, measured in alternate(words, arguments.processes, arguments.turns).items():
                results[name].append(measured)
    report(results, arguments, options)


def titanlite_words(options: Sequence[str]) -> list[str]:
    return [__file__, "--contender", *options]


def plain_words(settings: dict[str, Any]) -> list[str]:
    return [str(ROOT / "benchmarks" / "plain_llama.py"), json.dumps(settings)]


def alternate(words: dict[str, list[str]], processes: int, turns: int) -> dict[str, Steps]:
    """Start each contender, and let them take turns."""
    contenders = {name: Contender(command, processes) for name, command in words.items()}
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in words}
    for index in range(WARM_UP + turns):
        for name in sorted(words, reverse=index % 2 == 1):
            answers[name].append(contenders[name].turn())
    for contender in contenders.values():
        contender.process.wait()
    return {
        name: Steps([record["seconds"] for record in found[WARM_UP:]], found[-1]["mib"])
        for name, found in answers.items()
    }


class Contender:
    """Processes that have taken the first step, and take one turn for each call of `turn`."""

    def __init__(self, words: Sequence[str], processes: int) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, *(launcher if processes > 1 else []), *words]
        threads = max(1, cores() // processes)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self._answer()

    def turn(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender ended with exit code {self.process.wait()}")
        return json.loads(line)


def settings_of_plain(config: Config, dtype: str) -> dict[str, Any]:
    """For plain_llama.py: the same model, and the same tokens, which are prepared here."""
    from titanlite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.data.tokenizer)
    cache = Path(config.job.dump_folder, "data_cache")
    store = open_tokens(
        config.data.path or "stdlib://",
        data=config.data,
        tokenizer=tokenizer,
        cache_folder=cache,
        prepare_text=prepare_text,
    )
    tokens = str(store.folder / "00000.tokens")
    sizes = {"model": {name: config.model.args[name] for name in MODEL}, "seq_len": config.training.seq_len}
    return {**sizes, "batch": config.training.global_batch_size, "tokens": tokens, "dtype": dtype}


def compete(options: list[str], steps: int, turns: int) -> None:
    ranks = read_ranks(os.environ)
    config = load(ROOT / "train_configs" / "debug.toml", options, world_size=ranks.world_size)
    turn = titanlite_turns(config, steps)
    turn()
    if ranks.rank == 0:
        print("{}", flush=True)
    take_turns(turn, WARM_UP + turns, steps, ranks.rank, ranks.world_size)


def titanlite_turns(config: Config, steps: int) -> Turn:
    """Turns of steps through titanlite's own loop, each with its first lines, which are not printed."""
    ranks = read_ranks(os.environ)
    device = pick_device(ranks)
    inputs = preflight(config, ranks, device)
    process_group(ranks, device).__enter__()
    logging.getLogger(LOGGER).setLevel(logging.ERROR)  # standard output is for the answers
    made = build(config, inputs, ranks=ranks, device=device, prepare_text=prepare_text)
    progress = Progress()

    def turn() -> None:
        nonlocal progress
        train(replace(made, steps=progress.step + steps, progress=progress))
        progress = Progress(progress.step + steps, progress.samples_seen + steps * config.training.global_batch_size)

    return turn


def report(results: dict[str, list[Steps]], arguments: argparse.Namespace, options: list[str]) -> None:
    plain = ["plain compiled"] if arguments.compile_plain else []
    how = " ".join([f"{arguments.processes} process(es), {arguments.dtype}", *plain, *options])
    print(f"{how}; torch {torch.__version__}, {arguments.runs} runs of {arguments.turns} turns each")
    for name, runs in results.items():
        times = sorted(1000 * statistics.median(run.seconds) for run in runs)
        memory = statistics.median(run.mib for run in runs)
        spread = f"({times[0]:.1f} to {times[-1]:.1f})"
        print(f"  {name:<10} {statistics.median(times):7.1f} ms/step {spread}, {memory:.0f} MiB")
    both = list(zip(*results.values(), strict=True))
    found = {
        "time of a step": [statistics.median(ratios(plain.seconds, ours.seconds)) for plain, ours in both],
        "peak memory": [plain.mib / ours.mib for plain, ours in both],
    }
    for what, runs in found.items():
        print(f"  plain / titanlite, {what}: {statistics.median(runs):.3f} (runs {min(runs):.3f} to {max(runs):.3f})")
        kind = "compiled" if "--compile.enable=true" in options else arguments.dtype
        aim = ">= 1" if what == "peak memory" else AIMS.get((arguments.processes, kind), "")
        name = f"plain / titanlite, {what}, {how}"
        record(arguments.record, name=name, values=runs, better="higher", aim=aim)


AIMS = {
    (1, "float32"): ">= 1.05",
    (1, "bfloat16"): ">= 1.05",
    (1, "compiled"): ">= 1.15",
    (2, "float32"): ">= 1.05",
}


if __name__ == "__main__":
    main()
