"""Runs of a ladder: what trains them, here or on Slurm, and the loss at the end of each."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import torch

from titanlite.config.load import load
from titanlite.run.versions import flat
from titanlite.runtime.console import CHECKOUT
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.signals import STOP_SIGNALS, STOPPED, StoppedBySignal, stop_with_launcher
from titanlite.tools.ladder.sizes import Rung
from titanlite.tools.report.run_records import RunRecords, read_run

WITHOUT_EFFECT = (
    "job", "checkpoint", "metrics", "profiling", "comm", "parallelism", "activation_checkpoint", "compile", "offload",
)  # fmt: skip
"""Sections that change no loss, but for rounding: a run that is finished may have had others."""
LAST_SHARE = 0.1
"""Share of the steps at the end of a run whose mean training loss counts, where the config has no validation."""


def finished(rung: Rung) -> RunRecords | None:
    """Return the records of a run that is finished; None if it is not, or has not begun.

    Raises:
        UserError: it was trained with other options.
    """
    if (rung.folder / "config.toml").is_file():
        was, now = (flat(it.model_dump(mode="json")) for it in (load(rung.folder / "config.toml"), rung.config))
        keys = (it for it in {**was, **now} if it.split(".")[0] not in WITHOUT_EFFECT and it != "data.cache_folder")
        others = [it for it in keys if was.get(it) != now.get(it)]
        if others:
            raise UserError(
                f"{rung.folder} was trained with another {', '.join(others)}: delete that folder, or make another "
                "ladder with --job.name"
            )
    try:
        run = read_run(rung.folder)
    except UserError:  # it has none yet
        return None
    is_done = bool(run.starts) and run.starts[-1]["end"].get("code") == 0 and run.steps[-1] == rung.steps
    return run if is_done else None


def loss_of(run: RunRecords) -> float:
    """Return the last validation loss of a run; without validation, the mean training loss of its last records.

    Raises:
        UserError: it is not finite.
    """
    last = run.steps[-1]
    losses = [record.get("loss") for record in run.validation if record["step"] == last]
    if not losses:
        pairs = zip(run.steps, run.column("loss"), strict=True)
        losses = [loss for step, loss in pairs if step > (1 - LAST_SHARE) * last]
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        raise UserError(f"{run.path} has no finite loss at its end")
    return mean(finite)


def command_of(rung: Rung, processes: int | None) -> list[str]:
    """Return the command that trains a run, as ./run_train.sh calls it."""
    number = processes or torch.cuda.device_count() or 1
    if number == 1:
        return [sys.executable, "-m", "titanlite", "train", "--config", str(rung.toml)]
    launcher = [sys.executable, "-m", "titanlite.tools.launch", "1", str(number), "localhost:0", "0"]
    return [*launcher, "--config", str(rung.toml)]


def train(name: str, command: Sequence[str]) -> None:
    """Train a run until its end. Signals that stop a run are passed on to it.

    Raises:
        RunError: it failed.
        StoppedBySignal: it was stopped, with a checkpoint.
    """
    sys.stdout.flush()
    with subprocess.Popen(command, preexec_fn=stop_with_launcher) as process, _passing_on(process):
        code = process.wait()
    if code == STOPPED:
        raise StoppedBySignal(f"{name} was stopped", taken=0)
    if code:
        raise (UserError if code == 2 else RunError)(f"titanlite ladder: {name} ended with exit code {code}")


@contextmanager
def _passing_on(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    before = {it: signal.signal(it, lambda number, _: process.send_signal(number)) for it in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def slurm_script(configs: Sequence[Path], name: str) -> str:
    """Return a script for sbatch: an array of jobs, each of which is scripts/slurm.sh with a config.

    Raises:
        UserError: this titanlite has no scripts, since it runs from a wheel.
    """
    script = CHECKOUT / "scripts" / "slurm.sh"
    if not script.is_file():
        raise UserError(f"--slurm: there is no {script}: call titanlite of a checkout")
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    others = [line for line in options if not line.startswith(("#SBATCH --job-name", "#SBATCH --nodes"))]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {len(configs)} runs of a ladder, a job each, by scripts/slurm.sh. Options of sbatch stand before FILE.",
            f"#SBATCH --job-name={name}",
            f"#SBATCH --array=0-{len(configs) - 1}",
            "#SBATCH --nodes=1",
            *others,
            f"configs=({shlex.join(map(str, configs))})",
            f"export TITANLITE_ROOT=${{TITANLITE_ROOT:-{shlex.quote(str(CHECKOUT))}}}",
            'exec "$TITANLITE_ROOT/scripts/slurm.sh" --config "${configs[$SLURM_ARRAY_TASK_ID]}" "$@"',
            "",
        ]
    )
