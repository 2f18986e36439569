"""Exports of a run's checkpoints beside training: `titanlite checkpoint export` as a process of its own."""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from titanlite.checkpoint.manifest import folder_name
from titanlite.checkpoint.state import model_state, selected, to_globs
from titanlite.models.added import added_parameters
from titanlite.models.base import Model
from titanlite.models.quantized import scales_of
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.runtime.signals import shielding_children
from titanlite.schema import Checkpoint
from titanlite.storage.storage import open_storage

logger = logging.getLogger(__name__)

NICE = 10
"""Nice value of the processes: training comes first."""
BEGIN = "from titanlite.runtime.signals import end_with; end_with({})\nfrom titanlite.tools.cli import main; main()"
"""Program of the processes: they end when training does, however it ended."""
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")
"""Variables that would make a process take part in the training."""


class Exports:
    """Exports of a run, one after the other. Only rank 0 has any.

    A failure is reported and never ends the run.

    Args:
        run: folder of the run.
        model_file: `model.file` of the run, which an export does not take from the checkpoint.
        tokenizer: path of the run's tokenizer, likewise.
        is_first_rank: exports start in this process.
    """

    def __init__(
        self,
        config: Checkpoint,
        *,
        run: Path,
        model_file: str | None = None,
        tokenizer: str | None = None,
        is_first_rank: bool,
    ) -> None:
        self.config = config
        self.checkpoints = config.folder or str(run / "checkpoints")
        self.exports = f"{config.folder}/exports" if config.folder else str(run / "exports")
        self.logs = run / "logs"
        self._named = {"--model-file": model_file, "--tokenizer": tokenizer}
        self.is_active = is_first_rank and config.enable
        self._waiting: list[int] = []
        self._running: tuple[int, subprocess.Popen[bytes]] | None = None

    def saved(self, step: int) -> None:
        """Export the checkpoint of a step that was committed or loaded, if it is one of those to export."""
        if self.config.export_every and step % self.config.export_every == 0:
            self.start(step)

    def start(self, step: int) -> None:
        """Export the checkpoint of a step, unless it is exported. An export that was killed resumes."""
        if self.is_active and step not in self.unfinished() and not self._is_done(step):
            self._waiting.append(step)
            self.poll()

    def unfinished(self) -> set[int]:
        """Return the steps whose checkpoints are still needed."""
        running = self._running
        return {*self._waiting, *([running[0]] if running else [])}

    def poll(self) -> None:
        """Report an export that has ended, and start the next one."""
        if self._running is not None and self._running[1].poll() is not None:
            step, process = self._running
            self._running = None
            self._report(step, process.returncode)
        if self._running is None and self._waiting:
            step = self._waiting[0]
            try:
                self._running = step, self._begin(step)
            except OSError as error:
                logger.warning(f"the export of step {step} could not be started: {error}")
            del self._waiting[0]

    def finish(self, *, last: int = 0, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait for all exports.

        Args:
            last: step of the run's last checkpoint, which `last_save_in_hf` exports; 0 for none.
            give_up: whether to end without the rest, which the next start resumes.

        Returns:
            whether all have ended.
        """
        if last and self.config.last_save_in_hf:
            self.start(last)
        if self._running is not None:
            logger.info(f"waiting for the export of step {self._running[0]}")
        while self.unfinished():
            if give_up():
                self.stop()
                return False
            self.poll()
            time.sleep(0.05)
        return True

    def stop(self) -> None:
        """End the process that runs, and forget the others."""
        self._waiting.clear()
        if self._running is not None:
            step, process = self._running
            process.kill()
            process.wait()
            self._running = None
            logger.warning(f"the export of step {step} was stopped. By hand: {shlex.join(self._command(step))}")

    def _is_done(self, step: int) -> bool:
        with suppress(Exception):  # a store that cannot be read: the export itself finds out
            written = open_storage(self.exports).list().get(f"hf-{folder_name(step)}", {})
            return not {"config.json", "adapter_config.json"}.isdisjoint(written)
        return False

    def _place(self, step: int) -> str:
        return f"{self.exports}/hf-{folder_name(step)}"

    def _log(self, step: int) -> Path:
        return self.logs / f"export-{folder_name(step)}.log"

    def _command(self, step: int) -> list[str]:
        words = ["titanlite", "checkpoint", "export", f"{self.checkpoints}/{folder_name(step)}"]
        words += ["--out", self._place(step), "--dtype", self.config.export_dtype]
        words += [word for option, value in self._named.items() if value for word in (option, value)]
        return words + [word for glob in self.config.export_drop for word in ("--drop", glob)]

    def _begin(self, step: int) -> "subprocess.Popen[bytes]":
        environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if "://" not in self.exports:
            os.makedirs(self.exports, exist_ok=True)
        command = [sys.executable, "-c", BEGIN.format(os.getpid()), *self._command(step)[1:]]
        with open(self._log(step), "ab") as log, shielding_children():
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        return process

    def _report(self, step: int, code: int) -> None:
        if code == 0:
            logger.info(f"exported step {step} to {self._place(step)}")
            return
        lines = self._log(step).read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        reason = errors[-1] if errors else (lines[-1] if lines else "no output")
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed: {reason}"
        by_hand = shlex.join(self._command(step))
        logger.warning(f"the export of step {step} {ended} (log: {self._log(step)}). By hand: {by_hand}")


def check_exports(config: Checkpoint, model: Model | None) -> None:
    """Check that Hugging Face's format has a place for each tensor of a model that the run exports.

    Args:
        model: None if it is unknown.

    Raises:
        ConfigError: the format is unknown, has no place for a tensor that `export_drop` does not name, or has one for
            a tensor that it names.
    """
    wanted = "last_save_in_hf" if config.last_save_in_hf else "export_every" if config.export_every else None
    if wanted is None or model is None:
        return
    key = f"checkpoint.{wanted}"
    if (form := model.formats.hugging_face) is None:
        reason = f"{type(model).__name__} has no table of Hugging Face's names: give it `formats`"
        raise ConfigError([Problem(key, f"{reason} (docs/add_a_model.md)")])
    state = model_state(model)
    known = {*added_parameters(model), *scales_of(state).values()}  # PEFT's format has a place for adapters
    if needed := to_globs(name for name in state if selected(name, config.export_drop) and form.tensors.find(name)):
        reason = (
            f"{form.architecture} needs {', '.join(needed[:3])}: only tensors without a place there can be left out"
        )
        raise ConfigError([Problem("checkpoint.export_drop", reason)])
    lost = [name for name in state if name not in known and not form.tensors.find(name)]
    if globs := to_globs(name for name in lost if not selected(name, config.export_drop)):
        fix = f"checkpoint.export_drop = {json.dumps([*config.export_drop, *globs])}"
        reason = f"{form.architecture} has no place for {', '.join(globs)}"
        raise ConfigError([Problem(key, f"{reason}: to export without, set {fix}")])
