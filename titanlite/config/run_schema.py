"""Options of how a run is recorded and watched: [metrics], [comm] and [debug]."""

from pydantic import Field

from titanlite.config.types import Count, Name, PositiveInt, Section


class Metrics(Section):
    log_freq: PositiveInt = 10
    """Steps between lines on the console and in metrics.jsonl."""
    enable_tensorboard: bool = True
    """Write TensorBoard events."""
    loggers: list[Name] = Field(default_factory=list)
    """Further loggers of your own: file.py:Class or package.module:Class."""


class Comm(Section):
    init_timeout_seconds: PositiveInt = 1800
    """Longest time that a rank waits for another one in a collective outside of steps and saves: at the start, in
    validation, and in the first two steps, which compile. Then the run ends with an error."""
    train_timeout_seconds: PositiveInt = 300
    """The same in every further step."""
    save_timeout_seconds: PositiveInt = 3600
    """The same while a checkpoint is written, and at the end of the run."""


class Debug(Section):
    seed: Count = 0
    """Seed of the initial weights, of the order of the data and of every other random draw."""
    deterministic: bool = False
    """Use only deterministic kernels, and refuse operators that have none. Slower on GPUs. CPU runs give the same bits
    without it."""
