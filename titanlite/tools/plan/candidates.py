"""Candidates of a search: ways to run a config."""

from dataclasses import dataclass
from typing import Any

from titanlite.schema import Config, Degrees
from titanlite.techniques.technique import Options
from titanlite.tools.plan.estimate import Plan

MODES = ("none", "selective", "full")
WORTH = 1.005
"""Least speed-up for which a candidate that needs more memory is listed beside one that needs less."""


@dataclass(frozen=True)
class Candidate:
    """A way to run the config, with its expected memory and time before it is planned in full."""

    options: Options
    mode: str
    batch: int
    variant: str
    """Words for the options of techniques that the search sets: one of their `variants`."""
    last_resort: str
    """Words for the switch that is on because nothing fits without it. Empty: none is."""
    degrees: Degrees
    reshard: str
    frozen: tuple[str, str] | None = None
    """Word for a frozen model beside the one that is trained, and its `fsdp_reshard_after_forward`."""
    tokens_per_second: float = 0.0
    reserved: float = 0.0
    """Bytes."""
    host_of_node: float = 0.0
    """Bytes of host memory in a node."""

    @property
    def kernels(self) -> tuple[Any, ...]:
        """Options that determine the work of the device."""
        return self.mode, self.batch, self.variant, self.last_resort

    @property
    def title(self) -> str:
        words = [f"{self.degrees}", f"reshard {self.reshard}", f"recompute {self.mode}", f"local batch {self.batch}"]
        words += [" ".join(self.frozen)] if self.frozen else []
        return ", ".join([*words, *filter(None, (self.variant, self.last_resort))])


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    best: list[tuple[Candidate, Plan]]
    """Fastest first; all fit."""
    tried: int


def is_no_better(it: Candidate, other: Candidate) -> bool:
    """Return True if a candidate has the same kernels, is not noticeably faster, and needs no less memory."""
    faster = it.tokens_per_second > other.tokens_per_second * WORTH
    return it.kernels == other.kernels and not faster and it.reserved >= other.reserved


def with_options(config: Config, options: Options) -> Config:
    """Return the config with these options.

    Raises:
        ValueError: the options conflict.
    """
    tree = config.model_dump()
    for key, value in options.items():
        *path, last = key.split(".")
        section = tree
        for name in path:
            section = section[name]
        section[last] = value
    return Config.model_validate(tree)
