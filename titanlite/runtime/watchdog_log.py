"""Lines of a watchdog on the console, and stacks of its rank in the log."""

import faulthandler
import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from titanlite.runtime.private_torch.process_groups import recent_collectives
from titanlite.runtime.watchdog_board import Aside

logger = logging.getLogger(__name__)


class RankLog:
    """Log of a rank, logs/rank-N.log, written in a thread of its own: the file system may be what hangs.

    Args:
        folder: folder of the logs of all ranks.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.path = folder, folder / f"rank-{rank}.log"
        self._aside = Aside[None]("watchdog log")
        self._file: IO[str] | None = None

    def warn(self, text: str) -> None:
        """Print a line on the console, and in the log."""
        self._aside.post(lambda: logger.warning(text))

    def write_stacks(self, title: str) -> None:
        """Write the stacks of all threads to the log, and this process's latest collectives beside it."""
        self._aside.post(lambda: self._write_stacks(title))

    def _write_stacks(self, title: str) -> None:
        with suppress(OSError):
            with open(self.path, "a") as file:
                print(f"{title}; the main thread is 0x{threading.main_thread().ident or 0:016x}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            self.path.with_name(f"collectives-{self.path.stem}.json").write_bytes(recent_collectives())

    def write_stacks_after(self, seconds: float) -> None:
        """Write the stacks without Python, unless this is called again in time.

        A call outside of Python may keep all Python threads from running, this rank's watchdog among them.
        """
        if self._file is not None:
            faulthandler.dump_traceback_later(seconds, file=self._file)
        else:
            self._aside.post(self._open)

    def _open(self) -> None:
        with suppress(OSError):
            if self._file is None and self.path.exists():
                self._file = open(self.path, "a")  # noqa: SIM115 (open as long as the process)

    def close(self) -> None:
        """End the thread after its lines, which a file system that hangs may keep for ever."""
        faulthandler.cancel_dump_traceback_later()
        self._aside.close(seconds=1)
