"""Targets in a plan, and the frozen model that computes them: which one it is, and what another layout keeps of it."""

from titanlite.checks.preflight import select_model
from titanlite.config.load import load
from titanlite.loss import Targets
from titanlite.models.frozen import FrozenModel
from titanlite.models.registry import ModelSpec
from titanlite.schema import Config
from titanlite.techniques import used
from titanlite.tools.convert.source import open_model
from titanlite.tools.plan.memory import Profile
from titanlite.tools.plan.time import Unit
from titanlite.tools.plan.workload import Workload


def planned_targets(config: Config, *, vocab_size: int) -> Targets:
    """Return the targets of a config. Weights need not be there if a config of theirs is.

    Raises:
        UserError: there are no such weights, or they do not describe their model.
    """
    found = (it.planned_targets(config, vocab_size=vocab_size, read_spec=_read_spec) for it in used(config))
    return next(filter(None, found), None) or Targets()


def _read_spec(path: str, config: str | None, section: str) -> ModelSpec:
    return open_model(path, None, section).spec if config is None else select_model(load(config).model, None)


def prefix_of(frozen: FrozenModel) -> str:
    """Return the prefix of the FSDP units of a frozen model."""
    return f"{frozen.section}."


def is_of(frozen: FrozenModel | None, unit: Unit) -> bool:
    """Return whether an FSDP unit is one of the frozen model."""
    return frozen is not None and unit.name.startswith(prefix_of(frozen))


def kept_bytes(
    frozen: FrozenModel | None, profile: Profile, workload: Workload, reshard: str | None, *, shard: int, world: int
) -> float:
    """Return the bytes that another layout keeps of the frozen model, beyond those of full sharding.

    Args:
        profile: of full sharding over `world` ranks; the model frees what it gathers.
        reshard: its `fsdp_reshard_after_forward` in the other layout.
        shard: shard degree of that layout.
    """
    if frozen is None:
        return 0.0
    more = profile.most(frozen.section) * (world / shard - 1)
    if reshard != "never" or shard == 1:
        return more
    return more + sum(
        max((it.bytes for it in unit.gather), default=0) for unit in workload.units if is_of(frozen, unit)
    )
