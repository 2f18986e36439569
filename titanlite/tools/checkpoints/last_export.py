"""Export of a run's last checkpoint at its end: `titanlite checkpoint export` as a process of its own."""

import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.checkpoint.manifest import folder_name
from titanlite.data.tokenizer import is_shipped
from titanlite.runtime.files import put_aside_unless_file
from titanlite.runtime.signals import shielding_children

if TYPE_CHECKING:
    from titanlite.train import Run

logger = logging.getLogger(__name__)

BEGIN = "from titanlite.runtime.signals import end_with; end_with({})\nfrom titanlite.tools.cli import main; main()"
"""Program of the process: it ends when this one does, however it ended."""
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")
"""Variables that would make a process take part in the training."""


def export_last(run: "Run", *, give_up: Callable[[], bool] = lambda: False) -> bool:
    """Export the last checkpoint of a complete run if `last_save_in_hf` asks for it, unless it is exported.

    A failure is a warning with the command to repeat it. Code and tokenizer are those of the run: an export takes
    neither from a checkpoint.

    Args:
        give_up: whether to end without it. The next start exports it.

    Returns:
        False if it was given up.
    """
    config, step = run.config.checkpoint, run.checkpoints.newest
    if not config.last_save_in_hf or not step or run.setup.ranks.rank:
        return True
    name = folder_name(step)
    checkpoints = config.folder or str(run.folder.checkpoints)
    is_local = config.folder is not None and "://" not in config.folder
    place = (Path(str(config.folder)) if is_local else run.folder.path) / "exports" / f"hf-{name}"
    log = run.folder.logs / f"export-{name}.log"
    if place.exists():
        return True
    words = ["checkpoint", "export", f"{checkpoints}/{name}", "--out", str(place), "--dtype", config.export_dtype]
    if run.config.model.file:
        words += ["--model-file", run.config.model.file]
    if not is_shipped(run.config.data.tokenizer):
        words += ["--tokenizer", str(run.folder.tokenizer)]
    words += [word for glob in config.export_drop for word in ("--drop", glob)]
    by_hand = f"By hand: {shlex.join(['titanlite', *words])}"
    environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    logger.info(f"exporting step {step} to {place}")
    command = [sys.executable, "-c", BEGIN.format(os.getpid()), *words]
    put_aside_unless_file(log)
    with open(log, "ab") as output, shielding_children():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
    while process.poll() is None:
        if give_up():
            process.kill()
            process.wait()
            logger.warning(f"the export of step {step} was stopped. {by_hand}")
            return False
        time.sleep(0.05)
    if process.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        reason = (errors or lines or [f"exit code {process.returncode}"])[-1]
        logger.warning(f"the export of step {step} failed: {reason} (log: {log}). {by_hand}")
    return True
