"""A run that finished exits 0, always: many short 4-process runs in a row, and how each ended.

python benchmarks/exit_storm.py [--runs 50] [--record FILE.jsonl]
"""

import argparse
import collections
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from record import add_record_option, record

ROOT = Path(__file__).parents[1]
OPTIONS = [
    "--config", "debug.toml", "--training.steps=3", "--lr_scheduler.warmup_steps=0", "--model.args.n_layers=2",
    "--model.args.dim=96",
    "--model.args.hidden_dim=64", "--parallelism.data_parallel_replicate_degree=2", "--metrics.log_freq=1",
]  # fmt: skip
GOOD = "exit 0, finished True, aborts in the output False"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    add_record_option(parser)
    arguments = parser.parse_args()
    runs: int = arguments.runs
    endings: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for index in range(runs):
            options = [*OPTIONS, f"--job.dump_folder={folder}", f"--job.name=run-{index}"]
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            environment = os.environ | {"NPROC": "4", "PATH": path}
            result = subprocess.run(
                [str(ROOT / "run_train.sh"), *options], capture_output=True, text=True, env=environment, check=False
            )
            finished = "3 steps done" in result.stdout
            noise = "terminate called" in result.stderr or "SIGABRT" in result.stderr
            endings[f"exit {result.returncode}, finished {finished}, aborts in the output {noise}"] += 1
            print(f"{index + 1}/{runs}", dict(endings), flush=True)
    record(
        arguments.record, name="finished 4-process runs that did not exit with 0", value=runs - endings[GOOD],
        unit=f"of {runs}", better="lower", aim="0",
    )  # fmt: skip


if __name__ == "__main__":
    main()
