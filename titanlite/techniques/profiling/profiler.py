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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

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

    reads_weights = False

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
        self._run, self._rank, self._device, self._not_training = run, ranks.rank, device, not_training
        self._freq, self._has_snapshots = config.profile_freq, config.enable_memory_snapshot
        self._step = 0
        self._is_at_end = False
        """The last phase of the step has begun."""
        self._range = ExitStack()
        """The open range: the phase of the loop."""
        self._profile: profile | None = None
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its own lines about start and stop
        if self._freq > steps:  # the check of a config knows it already, unless training.epochs is set
            logger.warning(f"profiling.profile_freq: no window ends within the {steps} steps of the run")
        elif config.enable_profiling:
            warmup, active = config.profiler_warmup, config.profiler_active
            wait, windows = self._freq - warmup - active, steps // self._freq
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
                schedule=schedule(skip_first=1, wait=wait, warmup=warmup, active=active, repeat=windows),  # from step 1
                on_trace_ready=self._write,
                record_shapes=True,
            )
        if self._has_snapshots:
            record_memory_history(max_entries=MEMORY_HISTORY)

    def begin_step(self, step: int) -> None:
        """Move the profiler to this step."""
        self._end_step()
        if self._profile and not self._step:
            self._profile.step_num = step - 1  # of the whole run, which may have been resumed
            self._profile.start()
        self._step = step
        self._move(step)
        self._enter("data")

    def on_phase(self, phase: Phase) -> None:
        """Begin a range for the phase. The phase after a window's last step closes the window."""
        self._end_step()
        self._enter(phase)
        self._is_at_end = phase is Phase.METRICS

    def close(self) -> None:
        """End with the run: write the window that is complete, and drop one that is not."""
        self._end_step()
        self._range.close()
        if self._profile and self._step:
            if self._profile.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
                logger.info(f"the run ends within a profiling window: no profile of step {self._step}")
            self._profile.on_trace_ready = None
            self._profile.stop()

    def _enter(self, name: str) -> None:
        """End the range, and begin the next one."""
        self._range.close()
        self._range.enter_context(record_function(name))

    def _end_step(self) -> None:
        """Write the files of a window if its last step is done."""
        if self._is_at_end and self._step % self._freq == 0:
            self._move(self._step + 1)
            if self._has_snapshots:
                with self._not_training(), self._reporting() as folder:
                    path = save_memory_snapshot(folder, self._rank)
                    logger.info(f"memory snapshot after step {self._step}: {path}. pytorch.org/memory_viz opens it")
        self._is_at_end = False

    def _move(self, step: int) -> None:
        """Tell the profiler that a step begins, unless it knows. Its set-up and its files are no time of steps."""
        self._range.close()
        if self._profile is None or self._profile.step_num >= step:
            return
        before, after = self._profile.current_action, self._profile.schedule(step)
        is_quick = before is after is not ProfilerAction.RECORD_AND_SAVE or before is ProfilerAction.RECORD
        with nullcontext() if is_quick else self._not_training():
            self._profile.step()

    def _write(self, stopped: profile) -> None:
        """Write the trace of a window, and torch.profiler's table of the operators with the longest own time."""
        began, by = time.perf_counter(), "cpu" if self._device.type == "cpu" else "device"
        with self._reporting() as folder:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{self._rank}.json.gz"
            stopped.export_chrome_trace(str(path))
            averages = stopped.key_averages()
            table = averages.table(sort_by=f"self_{by}_time_total", row_limit=OPERATORS, max_name_column_width=60)
            (folder / f"rank-{self._rank}.txt").write_text(table)
            logger.info(
                f"profile until step {self._step}: {path}, {path.stat().st_size / 2**20:.1f} MiB in "
                f"{time.perf_counter() - began:.1f} s. ui.perfetto.dev opens it; the .txt beside it "
                "has the operators with the longest time"
            )
        stopped.profiler = None  # the events, which take memory

    @contextmanager
    def _reporting(self) -> Iterator[Path]:
        """Yield the folder of the window. An error of writing is reported: a profile is worth no run."""
        folder = self._run / PROFILE / f"step-{self._step:08d}"
        try:
            yield folder
        except (OSError, RuntimeError) as error:
            logger.warning(f"{folder}: the profile cannot be written: {error}. Training continues without it")


def save_memory_snapshot(folder: Path, rank: int, dump: Callable[[Path], object] = dump_memory_snapshot) -> Path:
    """Write a rank's memory snapshot to a folder, which is made if necessary. Return its path.

    Args:
        dump: writes the snapshot to a path.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"memory-rank-{rank}.pickle"
    dump(path)
    return path
