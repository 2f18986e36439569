"""What metrics cost: the time in the recorder's calls over the time of the steps, in one run of debug.toml.

    python benchmarks/bench_metrics.py [--steps 60] [--section.key=value ...]

Records are written every 10 steps, with TensorBoard. The first record is left out: it imports TensorBoard. A rank that
waits for others in the recorder's all-gather counts that wait, so this is for one process.
"""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from record import add_record_option, record

from titanlite.checks.preflight import preflight
from titanlite.config.load import load
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.runtime.console import LOGGER
from titanlite.runtime.process_group import pick_device, process_group, read_ranks
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.train import build, train

CONFIG = Path(__file__).parents[1] / "train_configs" / "debug.toml"
SAME = ["--checkpoint.enable=false", "--validation.enable=false", "--metrics.log_freq=10"]
CALLS = ("is_due", "begin_step", "end_step", "record_saves", "record_skipped")
FIRST = 10
"""Steps that are left out."""


class Timed:
    """Recorder of a run that measures the time in its own calls."""

    def __init__(self, recorder: MetricsRecorder) -> None:
        self._recorder = recorder
        self.seconds = 0.0
        self.began = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._recorder, name)
        return self._timed(found) if name in CALLS else found

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **options)
            self.seconds += time.perf_counter() - started
            if call.__name__ == "end_step" and args[0] == FIRST:
                self.seconds, self.began = 0.0, time.perf_counter()
            return result

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    add_record_option(parser)
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--job.dump_folder={folder}", f"--training.steps={arguments.steps}", *SAME, *options]
        config, ranks = load(CONFIG, words, world_size=1), read_ranks(os.environ)
        device = pick_device(ranks)
        logging.getLogger(LOGGER).setLevel(logging.ERROR)
        with process_group(ranks, device):
            resolved = preflight(config, ranks, device)
            made = build(config, resolved, ranks=ranks, device=device, prepare_text=prepare_text)
            timed = Timed(made.metrics)
            train(replace(made, metrics=cast(MetricsRecorder, timed)))
            whole = time.perf_counter() - timed.began
    share = timed.seconds / whole
    steps = arguments.steps - FIRST
    print(f"torch {torch.__version__}, {steps} steps of {whole / steps * 1e3:,.0f} ms, a record every 10")
    print(f"  metrics: {timed.seconds / steps * 1e3:.3f} ms a step, {share:.3%} of its time")
    record(arguments.record, name="metrics, share of a step", value=share, better="lower", aim="< 0.002")


if __name__ == "__main__":
    main()
