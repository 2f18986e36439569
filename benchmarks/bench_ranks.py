"""Ranks that are forks, beside ranks that are new processes: CPU time, wall time and memory of a start of debug.toml
under run_train.sh, and the time from SIGKILL of a rank to the end of the next step.

    python benchmarks/bench_ranks.py [--runs N] [--ranks 2 4] [--record FILE.jsonl]

Both take turns. A thread that is planted in every Python process makes the launcher start new processes. The data is
prepared before, and a start ends with its first step.
"""

import argparse
import ctypes
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from record import add_record_option, record

from titanlite.run.proc import descendants

ROOT = Path(__file__).parents[1]
OPTIONS = "--lr_scheduler.warmup_steps=0", "--metrics.log_freq=1", "--validation.enable=false"
START = "--training.steps=1", "--checkpoint.enable=false"
KILLED = "--training.steps=1000", "--checkpoint.interval=1000"
PLANTED = "import threading, time\nthreading.Thread(target=time.sleep, args=[10**6], daemon=True).start()\n"
PR_SET_CHILD_SUBREAPER = 36
CONTENDERS = "forks", "new processes"


def mebibytes(pid: int) -> float:
    """Return the memory of a process, with its share of what several processes share (PSS)."""
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def run(folder: str, contender: str, ranks: int, *, kills: bool) -> dict[str, float]:
    """Run once, and return what was measured."""
    environ = os.environ | {"NPROC": str(ranks), "MAX_RESTARTS": str(int(kills))}
    environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if contender == "new processes":
        environ["PYTHONPATH"] = f"{folder}/site"
    words = [f"--job.dump_folder={folder}", f"--job.name=run-{time.time_ns()}", *OPTIONS, *(KILLED if kills else START)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    found: dict[str, float] = {}
    killed = 0.0
    with subprocess.Popen(
        [str(ROOT / "run_train.sh"), *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if not (match := re.match(r"step +(\d+)  loss", line)):
                continue
            if not kills:
                found["start, wall"] = time.monotonic() - began
            if kills and not killed and match[1] == "3":
                processes = {job.pid: "", **descendants(job.pid)}
                victims = [pid for pid, command in processes.items() if "titanlite train" in command]
                found["memory"] = sum(map(mebibytes, processes))
                killed = time.monotonic()
                os.kill(victims[-1], signal.SIGKILL)
            elif killed and len(found) == 1:
                found["from SIGKILL to the next step"] = time.monotonic() - killed
                job.send_signal(signal.SIGTERM)
    assert job.returncode == (75 if kills else 0), f"exit code {job.returncode}"
    while True:
        try:  # the fork server's end is not the launcher's to wait for
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not kills:
        found["start, CPU"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    add_record_option(parser)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whose CPU time counts, too
    values: dict[tuple[str, int], dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "site").mkdir()
        (Path(folder) / "site" / "sitecustomize.py").write_text(PLANTED)
        run(folder, "forks", 1, kills=False)  # prepares the data
        for number in range(options.runs):
            for ranks in options.ranks:
                for contender in CONTENDERS if number % 2 else CONTENDERS[::-1]:
                    measured = run(folder, contender, ranks, kills=False) | run(folder, contender, ranks, kills=True)
                    for name, value in measured.items():
                        by_contender = values.setdefault((name, ranks), {name: [] for name in CONTENDERS})
                        by_contender[contender].append(value)
    print(f"{'':42}{'forks':>9}{'processes':>11}   medians of {options.runs}")
    for (name, ranks), found in values.items():
        unit = "MiB" if name == "memory" else "s"
        forks, processes = (statistics.median(found[contender]) for contender in CONTENDERS)
        print(f"{name}, {ranks} ranks, {unit}".ljust(42) + f"{forks:9.1f}{processes:11.1f}")
        record(
            options.record, name=f"{name}, {ranks} ranks, forks / new processes",
            pairs=(found["forks"], found["new processes"]), better="lower",
        )  # fmt: skip


if __name__ == "__main__":
    main()
