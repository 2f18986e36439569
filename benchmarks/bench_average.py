"""Validation loss of averaged weights beside that of the weights, before the learning rate decays.

    python benchmarks/bench_average.py [--steps 140] [--seeds 0 1 2] [--decay 0.9] [--section.key=value ...]

Each seed is a run of train_configs/debug.toml with a constant learning rate after the warm-up: the phase in which a run
could be extended. Both losses are of the same validation, so their difference has no noise of the data.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--decay", type=float, default=0.9)
    options, overrides = parser.parse_known_args()
    print("| seed | weights | EMA | difference |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            words = [
                f"--job.dump_folder={folder}", f"--job.name=seed-{seed}", f"--debug.seed={seed}",
                f"--training.steps={options.steps}", f"--validation.freq={options.steps}",
                "--lr_scheduler.decay_ratio=0.0", f"--average.decay={options.decay}", "--checkpoint.enable=false",
                f"--data.cache_folder={folder}/data_cache", *overrides,
            ]  # fmt: skip
            subprocess.run([sys.executable, "-m", "titanlite", "train", "debug", *words], check=True, stdout=2)
            lines = Path(folder, f"seed-{seed}", "validation.jsonl").read_text().splitlines()
            record = json.loads(lines[-1])
            plain, average = record["loss"], record["average"]["loss"]
            print(f"| {seed} | {plain:.4f} | {average:.4f} | {average - plain:+.4f} |", flush=True)


if __name__ == "__main__":
    main()
