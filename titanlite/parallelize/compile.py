"""torch.compile, block by block: where compiled code is kept, what it takes of a run's time, and whether it ends."""

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlite.config.schema import Compile
from titanlite.models.base import Model

logger = logging.getLogger(__name__)

SETTLED_AFTER = 2
"""Steps after which nothing should be compiled any more."""


def compile_blocks(model: Model, *, backend: str = "inductor") -> None:
    """Compile each block in place. Blocks are alike, so the compiler works once for all of them; compiling in place
    (`block.compile()`, not `torch.compile(block)`) leaves parameter names alone."""
    for block in model.layers:
        block.compile(fullgraph=True, backend=backend)


def use_cache(config: Compile) -> None:
    """Let the compiler keep its work where the next start finds it; its own choice is a temporary folder. Triton's
    files go below. A folder that cannot be written to gives a warning.

    To be called before torch._dynamo is imported, as the first model on the meta device does: it settles the folder.
    """
    if not config.enable or os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    try:
        folder = Path(config.cache_folder).expanduser() if config.cache_folder else _default_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # the latter: no home
        logger.warning(f"compile.cache_folder: {error}; compiled code is kept in a temporary folder")
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute())


def _default_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "titanlite" / "compile"


class CompileWatch:
    """What torch.compile does in this process from here on. It reads the compiler's own counters, step by step, and
    never imports the compiler."""

    def __init__(self) -> None:
        self._steps = 0
        self._expected = self._graphs = _graphs()
        self._expects_more = True
        self._seconds = _seconds()
        self._reason = ""
        self._told = 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is compiled here is not part of a step. The first time is expected to: validation needs no backward."""
        seconds, graphs = _seconds(), _graphs()
        yield
        self._seconds += _seconds() - seconds
        if (more := _graphs() - graphs) and self._expects_more:
            self._expects_more = False
            self._expected += more
            self._graphs += more

    def end_step(self) -> None:
        self._steps += 1
        graphs = _graphs()
        if self._steps <= SETTLED_AFTER:
            self._expected = graphs
        elif graphs > self._graphs:
            self._reason = _last_reason()
        self._graphs = graphs

    def take_seconds(self) -> float:
        """Spent on compiling for steps since it was asked before."""
        before, self._seconds = self._seconds, _seconds()
        return max(self._seconds - before, 0.0)

    @property
    def recompiles(self) -> int:
        """Graphs that were compiled when everything should have been."""
        return max(self._graphs - self._expected, 0)

    def warn(self, recompiles: int) -> None:
        """If there are more than before.

        Args:
            recompiles: the most of any rank.
        """
        if recompiles > self._told:
            reason = self._reason or "on another rank (TORCH_LOGS=recompiles says why)"
            logger.warning(f"compile: {recompiles} recompiles since step {SETTLED_AFTER} of this start: {reason}")
        self._told = max(self._told, recompiles)


def _graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def _seconds() -> float:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0


def _last_reason() -> str:
    """Why a block was compiled again: the check that failed, as the compiler put it."""
    metrics = sys.modules["torch._dynamo.utils"].get_compilation_metrics()
    reasons = [one.recompile_reason for one in metrics if one.recompile_reason]
    return " ".join(reasons[-1].split()) if reasons else "no reason is known"
