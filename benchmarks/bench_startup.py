"""Start-up times of the command: Python itself, help, commands that read a config; and the time to the end of the first
step, against a plain PyTorch loop (plain_llama.py). Best and median of N runs.

    python benchmarks/bench_startup.py [--runs N] [--compile] [--record FILE.jsonl]

The commands take turns, so that a machine that is slow for a while is slow for all of them. Data is prepared before.
With --compile only the first step is timed, of both compiled, with warm caches of the compiler.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import add_record_option, record

CONFIG = str(Path(__file__).parents[1] / "train_configs" / "debug.toml")
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "titanlite --help": ["-m", "titanlite", "--help"],
    "titanlite train --help": ["-m", "titanlite", "train", "--help"],
    "titanlite plan --help": ["-m", "titanlite", "plan", "--help"],
    "titanlite checkpoint prune --help": ["-m", "titanlite", "checkpoint", "prune", "--help"],
    "titanlite config show": ["-m", "titanlite", "config", "show", "--config", CONFIG],
    "titanlite config schema": ["-m", "titanlite", "config", "schema"],
    "titanlite config check": ["-m", "titanlite", "config", "check", "--config", CONFIG],
}
AIMS = {name: "< 0.3 s" for name in COMMANDS if "--help" in name} | {"titanlite config show": "< 0.4 s"}


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def to_first_step(folder: str, *, compiled: bool) -> dict[str, Callable[[], float]]:
    """Contenders: from the start of the command to the line of step 1, in seconds; `plain` prints its own."""
    from bench_step import SAME, settings_of_plain

    from titanlite.config.load import load

    words = [f"--job.dump_folder={folder}", *SAME]
    settings = settings_of_plain(load(CONFIG, words), "float32")
    settings |= {"turns": 0, "turn": 0, "compile": compiled}
    script = str(Path(__file__).with_name("plain_llama.py"))

    def plain() -> float:
        environment = os.environ | {"STARTED": str(time.time())}
        command = [sys.executable, script, json.dumps(settings)]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
        return json.loads(found.stdout)["first"]

    def titanlite() -> float:
        command = [
            sys.executable,
            "-u",
            "-m",
            "titanlite",
            "train",
            "--config",
            CONFIG,
            *words,
            "--training.steps=1",
            "--lr_scheduler.warmup_steps=0",
            f"--compile.enable={str(compiled).lower()}",
        ]
        command += [f"--job.name=run-{time.time_ns()}"]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            next(line for line in process.stdout if line.startswith("step     1 "))
            taken = time.perf_counter() - started
            process.stdout.read()
        return taken

    return {"plain, to the first step": plain, "titanlite train, to the first step": titanlite}


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up times of the command.")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    add_record_option(parser)
    options = parser.parse_args()
    runs: int = options.runs
    commands = {} if options.compile else COMMANDS
    for arguments in commands.values():
        seconds(arguments)  # fills caches of files and of bytecode
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, arguments in commands.items():
            times[name].append(seconds(arguments))
    with tempfile.TemporaryDirectory() as folder:
        contenders = to_first_step(folder, compiled=options.compile)
        for run in range(runs + 1):
            for name, contender in contenders.items():
                taken = contender()
                times.setdefault(name, []).extend([taken] if run else [])  # the first fills caches
    print(f"{'':36}{'best':>8}{'median':>9}   of {runs} runs, seconds")
    for name, taken in times.items():
        print(f"{name:36}{min(taken):8.3f}{statistics.median(taken):9.3f}")
        record(options.record, name=name, values=taken, unit="s", better="lower", aim=AIMS.get(name, ""))
    plain, ours = contenders
    to_the_first = statistics.median(times[ours]) / statistics.median(times[plain])
    how = ", compiled" if options.compile else ""
    print(f"to the first step, titanlite / plain{how}: {to_the_first:.2f}")
    record(
        options.record, name=f"to the first step, titanlite / plain{how}", pairs=(times[ours], times[plain]),
        better="lower", aim="<= 1.3",
    )  # fmt: skip
    first, *others = commands or [""]
    for name in others:
        record(options.record, name=f"{name} / {first}", pairs=(times[name], times[first]), better="lower")


if __name__ == "__main__":
    main()
