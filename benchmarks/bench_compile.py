"""What compiling costs a start: the first without a cache, the next with it, and one that does not compile.

    python benchmarks/bench_compile.py [--runs N] [--config FILE.toml] [--section.key=value ...]

Every start is a process of its own, with two steps of the config. The three take turns N times, each time with a new
cache folder. compile: what the first step spent on compiling. to step 1: from the start of Python to the line of the
first step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import add_record_option, ratios, record

DEBUG = str(Path(__file__).parents[1] / "train_configs" / "debug.toml")
STARTS = ("eager", "cold", "warm")


def start(name: str, config: str, options: list[str], folder: Path) -> tuple[float, float]:
    """Seconds: of compiling, and from the start to the first step's line."""
    command = [sys.executable, "-u", "-m", "titanlite", "train", "--config", config, *options]
    command += [
        "--training.steps=2",
        "--lr_scheduler.warmup_steps=0",
        "--checkpoint.enable=false",
        f"--job.dump_folder={folder}",
        f"--job.name={name}",
    ]
    if name != "eager":
        command.append("--compile.enable=true")
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    began, first = time.perf_counter(), 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables) as run:
        assert run.stdout
        output = []
        for line in run.stdout:
            output.append(line)
            if not first and "step     1 " in line:
                first = time.perf_counter() - began
    if run.returncode or not first:
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(output)}")
    record = json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[0])
    return record.get("compile_seconds", 0.0), first


def main() -> None:
    parser = argparse.ArgumentParser(description="What compiling costs a start.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--config", default=DEBUG)
    add_record_option(parser)
    arguments, options = parser.parse_known_args()
    words = " ".join(options)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    with tempfile.TemporaryDirectory() as folder:
        options.append(f"--data.cache_folder={folder}/data")
        start("eager", arguments.config, options, Path(folder))  # makes the data, fills caches of files and of bytecode
        for number in range(arguments.runs):
            for name in STARTS:
                found[name].append(start(name, arguments.config, options, Path(folder, str(number))))
                print(f"  {name:6}{found[name][-1][0]:9.2f}{found[name][-1][1]:11.2f}", flush=True)
    print(f"{'':8}{'compile':>9}{'to step 1':>11}   seconds, median of {arguments.runs}")
    for name, runs in found.items():
        compiling, first = (statistics.median(times) for times in zip(*runs, strict=True))
        print(f"{name:8}{compiling:9.2f}{first:11.2f}")
    compiling, to_first = ({name: [run[at] for run in runs] for name, runs in found.items()} for at in (0, 1))
    what = f"of {Path(arguments.config).name}{' ' * bool(words)}{words}"
    for name, found_ratios, aim in (
        ("compile seconds, warm / cold cache", ratios(compiling["warm"], compiling["cold"]), "< 0.30"),
        ("to the first step, warm cache / eager", ratios(to_first["warm"], to_first["eager"]), ""),
        ("to the first step, cold cache / eager", ratios(to_first["cold"], to_first["eager"]), ""),
    ):
        spread = f"{min(found_ratios):.3f} to {max(found_ratios):.3f}"
        print(f"{name}: {statistics.median(found_ratios):.3f} ({spread})")
        record(arguments.record, name=f"{name}, {what}", values=found_ratios, better="lower", aim=aim)


if __name__ == "__main__":
    main()
