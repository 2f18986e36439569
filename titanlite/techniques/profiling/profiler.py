"""Profiles of a running job: windows of steps that torch.profiler records, and snapshots of GPU memory.

A window is the last `profiler_active` steps up to a multiple of `profile_freq`. Windows depend on the step's number
only: every rank opens the same ones, and so does a resumed run. Each rank writes its own files:

    profile/step-00000100/rank-0.json.gz         Chrome trace, which ui.perfetto.dev opens
    profile/step-00000100/rank-0.txt             torch.profiler's table of operators
    profile/step-00000100/memory-rank-0.pickle   memory snapshot, which pytorch.org/memory_viz opens

Nothing here is used while `[profiling]` is off.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titanlite.observer import Phase, StepObserver
from titanlite.runtime.private_torch.tensors import dump_memory_snapshot, record_memory_history
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Profiling

logger = logging.getLogger(__name__)

MEMORY_HISTORY = 100_000
"""Allocations and frees in a memory snapshot, as in torchtitan. Each entry takes some KB of host memory."""
OPERATORS = 30
"""Rows of a table of operators."""
PROFILE = "profile"
"""Folder of a run with its profiles."""


class Profiler(StepObserver):
    """Observer that records windows of steps, with the phases of a step as named ranges. FSDP names its own.

    A trace that cannot be written is reported, and training continues.

    Args:
        run: folder of the run.
        steps: steps of the whole run. A window that would end later is not opened.
        not_training: excludes a block from step time.
    """

    def __init__(
        self,
        config: Profiling,
        *,
        run: Path,
        ranks: Ranks,
        steps: int,
        device: torch.device,
        not_training: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.config = config
        self._run, self._ranks, self._steps = run, ranks, steps
        self._device, self._not_training = device, not_training
        self._profile: profile | None = None
        self._begins = 0
        """First step of the open window; 0 while none is open."""
        self._step = 0
        self._is_complete = False
        """The last step of the window is done."""
        self._ranges: list[record_function] = []
        """Open ranges of the loop: the step, and its phase."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its own lines about start and stop
        if config.profile_freq > steps:  # the check of a config knows it already, unless training.epochs is set
            logger.warning(f"profiling.profile_freq: no window ends within the {steps} steps of the run")
        if config.enable_memory_snapshot:
            record_memory_history(max_entries=MEMORY_HISTORY)

    def begin_step(self, step: int) -> None:
        """Close the window that is complete, and open one that begins with this step."""
        if self._is_complete:
            self._close()
        self._leave(0)
        self._step = step
        last = -(-step // self.config.profile_freq) * self.config.profile_freq
        first = last - self.config.profiler_active + 1
        if self.config.enable_profiling and last <= self._steps and step >= first - self.config.profiler_warmup:
            self._open(records=step >= first)
        if self._begins:
            self._enter(f"step {step}")
            self._enter("data")

    def phase(self, name: Phase) -> None:
        """Begin a range for the phase, within a window. The phase after a window's last step closes the window."""
        if self._is_complete:
            self._close()
        if self._begins:
            self._leave(1)
            self._enter(name)
        if name is Phase.METRICS:  # the last phase of every step
            self._is_complete = self._step % self.config.profile_freq == 0

    def close(self) -> None:
        """End with the run: write the window that is complete, and drop one that is not."""
        if self._is_complete:
            self._close()
        elif self._begins:
            logger.info(f"the run ends within a profiling window: no profile of steps {self._begins} to {self._step}")
            self._stop()

    def _open(self, *, records: bool) -> None:
        """Set up the profiler, or with `records` begin to record, unless that is done."""
        if self._profile is not None and (self._begins or not records):
            return
        with self._not_training():
            if self._profile is None:
                activities = [ProfilerActivity.CPU]
                if self._device.type == "cuda":
                    activities.append(ProfilerActivity.CUDA)
                self._profile = profile(activities=activities, record_shapes=True)
                self._profile.prepare_trace()
            if records:
                self._profile.start_trace()
                self._begins = self._step

    def _enter(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._ranges.append(opened)

    def _leave(self, depth: int) -> None:
        """End ranges until `depth` of them are open."""
        while len(self._ranges) > depth:
            self._ranges.pop().__exit__(None, None, None)

    def _stop(self) -> profile | None:
        """End the recording, and return the profiler; None if none was open."""
        self._leave(0)
        stopped, self._profile = self._profile, None
        if stopped is not None and self._begins:
            stopped.stop_trace()
        self._begins, self._is_complete = 0, False
        return stopped

    def _close(self) -> None:
        """Write the files of a window."""
        first, last, began = self._begins, self._step, time.perf_counter()
        folder = self._run / PROFILE / f"step-{last:08d}"
        with self._not_training():
            stopped = self._stop()
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if stopped is not None and first:
                    path = folder / f"rank-{self._ranks.rank}.json.gz"
                    with _staging(path) as staging:
                        stopped.export_chrome_trace(str(staging))
                    path.with_name(f"rank-{self._ranks.rank}.txt").write_text(_operators(stopped, self._device))
                    logger.info(
                        f"profile of steps {first} to {last}: {path}, {path.stat().st_size / 2**20:.1f} MiB in "
                        f"{time.perf_counter() - began:.1f} s. ui.perfetto.dev opens it; the .txt beside it "
                        "has the operators with the longest time"
                    )
                if self.config.enable_memory_snapshot:
                    path = save_memory_snapshot(folder, self._ranks.rank)
                    logger.info(f"memory snapshot after step {last}: {path}. pytorch.org/memory_viz opens it")
            except (OSError, RuntimeError) as error:  # a profile is worth no run
                logger.warning(f"{folder}: the profile cannot be written: {error}. Training continues without it")


def _operators(stopped: profile, device: torch.device) -> str:
    """Return torch.profiler's table of the operators with the longest own time."""
    by = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    return stopped.key_averages().table(sort_by=by, row_limit=OPERATORS, max_name_column_width=60)


@contextmanager
def _staging(path: Path) -> Iterator[Path]:
    """Yield a path to write to. It becomes `path` at the end of the block, or goes away after an error."""
    staging = path.with_name(f".staging-{path.name}")
    try:
        yield staging
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def save_memory_snapshot(folder: Path, rank: int, dump: Callable[[Path], object] = dump_memory_snapshot) -> Path:
    """Write a rank's memory snapshot to a folder, which is made if necessary. Return its path.

    Args:
        dump: writes the snapshot to a path.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"memory-rank-{rank}.pickle"
    with _staging(path) as staging:
        dump(staging)
    return path
