"""A killed run loses nothing: two ranks killed at random times, many times, and what they leave is checked each time.

    python benchmarks/crash_storm.py [--kills 50] [--seed 0] [--record FILE.jsonl] [--section.key=value ...]

Half of the kills are aimed at saves. At the end the run is compared, bit for bit, with one that was never killed. Exit
code 1, and the run's folder stays, if anything is not as it must be.
"""

import argparse
import collections
import shutil
import sys
import tempfile
import time
from pathlib import Path

import repository  # noqa: F401
from record import add_record_option, record


def main() -> None:
    from tests.support.crash import CrashRun
    from titanlite.runtime.errors import DamagedCheckpoint

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    add_record_option(parser)
    arguments, options = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="crash-storm-"))
    run = CrashRun(folder, seed=arguments.seed, method="spawn", options=options)
    started = time.monotonic()
    left: collections.Counter[str] = collections.Counter()
    try:
        for kill in range(1, arguments.kills + 1):
            what = run.kill()
            left[what.rpartition(", left ")[2]] += 1
            print(f"{kill}/{arguments.kills}  {what}", flush=True)
        steps = run.finish()
    except (AssertionError, DamagedCheckpoint) as violation:
        note(arguments, lost=1)
        print(f"{violation}\nVIOLATION at start {run.starts}, seed {arguments.seed}; see {folder}")
        sys.exit(1)
    shutil.rmtree(folder)
    note(arguments, lost=0)
    print(f"left by a kill: {dict(left)}")
    seconds = time.monotonic() - started
    print(f"{arguments.kills} kills in {seconds:.0f} s: nothing lost, {steps} steps the same bits as without kills")


def note(arguments: argparse.Namespace, *, lost: int) -> None:
    """The first loss ends the storm."""
    kills = f"of {arguments.kills}"
    name = "kills of a 2-rank run that lost anything"
    record(arguments.record, name=name, value=lost, unit=kills, better="lower", aim="0")


if __name__ == "__main__":
    main()
