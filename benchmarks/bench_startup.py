"""How long the command takes to answer: python's own start, help, and what reads a config. Best and median of N runs.

    python benchmarks/bench_startup.py [--runs N]

The commands take turns, so that a machine that is slow for a while is slow for all of them.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

CONFIG = str(Path(__file__).parents[1] / "train_configs" / "debug.toml")
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "titanlite --help": ["-m", "titanlite", "--help"],
    "titanlite train --help": ["-m", "titanlite", "train", "--help"],
    "titanlite config show": ["-m", "titanlite", "config", "show", "--config", CONFIG],
    "titanlite config schema": ["-m", "titanlite", "config", "schema"],
    "titanlite config check": ["-m", "titanlite", "config", "check", "--config", CONFIG],
}


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the command takes to answer.")
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    for arguments in COMMANDS.values():
        seconds(arguments)  # fills caches of files and of bytecode
    times = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    print(f"{'':26}{'best':>8}{'median':>9}   of {runs} runs, seconds")
    for name, taken in times.items():
        print(f"{name:26}{min(taken):8.3f}{statistics.median(taken):9.3f}")


if __name__ == "__main__":
    main()
