"""Watch over torch.compile: the time that it takes, and recompiles after the first steps."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from titanlite.runtime.private_torch.compiler import compile_seconds, compiled_graphs, last_recompile_reason

logger = logging.getLogger(__name__)

COMPILED_AFTER = 2
"""Steps after which nothing should be compiled any more."""


class CompileWatch:
    """Counter of what torch.compile does in this process, step by step. It never imports the compiler."""

    def __init__(self) -> None:
        self._steps = 0
        self._expected = self._graphs = compiled_graphs()
        self._expects_more = True
        self._seconds = compile_seconds()
        self._reason = ""
        self._warned = 0

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Exclude a block from the time of steps. Its first compilation is no recompile: validation has no backward."""
        seconds, graphs = compile_seconds(), compiled_graphs()
        yield
        self._seconds += compile_seconds() - seconds
        if (more := compiled_graphs() - graphs) and self._expects_more:
            self._expects_more = False
            self._expected += more
            self._graphs += more

    def end_step(self) -> None:
        self._steps += 1
        graphs = compiled_graphs()
        if self._steps <= COMPILED_AFTER:
            self._expected = graphs
        elif graphs > self._graphs:
            self._reason = last_recompile_reason() or "no reason is known"
        self._graphs = graphs

    def take_seconds(self) -> float:
        """Return the seconds that steps have spent compiling since the last call."""
        before, self._seconds = self._seconds, compile_seconds()
        return max(self._seconds - before, 0.0)

    @property
    def recompiles(self) -> int:
        """Number of graphs compiled after step COMPILED_AFTER."""
        return max(self._graphs - self._expected, 0)

    def warn(self, recompiles: int) -> None:
        """Log a warning if there are more recompiles than at the last call.

        Args:
            recompiles: the largest number of any rank.
        """
        if recompiles > self._warned:
            reason = self._reason or "on another rank (TORCH_LOGS=recompiles gives the reason)"
            logger.warning(f"compile: {recompiles} recompiles since step {COMPILED_AFTER} of this start: {reason}")
        self._warned = max(self._warned, recompiles)
