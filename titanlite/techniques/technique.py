"""The contract of techniques: what the rest of titanlite asks of each. Never imports torch.

A technique is a subclass of `Technique` that overrides the hooks that it needs. The checks of a config, the checks of
preflight, the first lines of a run, training, `titanlite plan` and `titanlite inspect` iterate over techniques and call
these hooks. What changes the layers of a model is no hook: its order matters, and `parallelize/__init__.py` lists it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from titanlite.schema import Config

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.batch import Batch
    from titanlite.loss import LossFunction
    from titanlite.models.base import Model
    from titanlite.models.registry import ModelSpec
    from titanlite.observer import StepObserver
    from titanlite.ops.cross_entropy import SplitVocabulary
    from titanlite.optim.state_memory import StateMemory
    from titanlite.run.records import RecordFile
    from titanlite.runtime.hardware import Hardware
    from titanlite.runtime.process_group import Ranks
    from titanlite.step import Step
    from titanlite.techniques.average.weights import WeightAverage
    from titanlite.techniques.offload.updates import HostUpdates

Hook = TypeVar("Hook", bound=Callable[..., Any])
Value = TypeVar("Value")

Conflict = tuple[str, str]
"""Dotted key, and what is wrong."""
Options = dict[str, Any]
"""Values by dotted key."""
Attempt = Callable[[str, Sequence[str], Callable[[], Any]], Any]
"""(key, reads, check): runs a check, and returns its result. A UserError becomes a problem of the key; then, and where
an option that the check reads has a known problem, the result is None."""


class Claim(StrEnum):
    """What at most one technique may do in a run."""

    LAYERS = "changes the linear layers"
    MATMULS = "computes matmuls in a format of its own"
    TRAINED = "chooses which parameters are trained"
    PARAMETERS = "keeps parameters in memory of its own"
    GRADIENTS = "handles gradients in its own way"
    UPDATE_KERNEL = "chooses the kernel that updates parameters"
    """Its rounding depends on which elements it gets: those of a slice, or of a shard. Updates in backward only choose
    when it runs, so they do not claim it."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What an observer of training may read of a run."""

    model: "Model"
    replicas: "Mapping[nn.Parameter, int]"
    """For each parameter, the number of ranks that hold the same shard."""
    mesh: "DeviceMesh"
    ranks: "Ranks"
    device: "torch.device"
    steps: int
    """Steps of the whole run."""
    open_records: "Callable[[str], RecordFile | None]"
    """Opens a file of records in the run's folder, by name; None on ranks that do not write."""
    paused: Callable[[], AbstractContextManager[None]]
    """Excludes a block within a step from the time of the step."""
    state: "Callable[[], dict[str, torch.Tensor]]"
    """Returns the tensors of a checkpoint, by name."""


class HostTraffic(NamedTuple):
    """Bytes of a step."""

    link: float = 0.0
    """Over the link from a GPU to its host."""
    memory: float = 0.0
    """Read and written by the host while the GPU waits."""
    beside_forward: float = 0.0
    """Read and written by the host beside the next forward pass, which waits for it."""


def unchanged(value: Value) -> Value:
    """Return the value."""
    return value


def nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of a run that techniques provide: those of one technique, or of all that a config uses together.

    Only one technique of a run may provide a step, a memory, an average or a vocabulary.
    """

    step_cls: "type[Step] | None" = None
    """Class of the optimizer step. A technique that has one claims `Claim.GRADIENTS`."""
    memory: "StateMemory | None" = None
    """Memory of parameters, moments or the average that PyTorch does not allocate. Where it makes the optimizer update
    slice by slice, the technique claims `Claim.UPDATE_KERNEL`."""
    updates: "Callable[[Model, torch.optim.Optimizer, torch.device], HostUpdates | None]" = nothing
    """(parallelized model with memory, optimizer, device of training) -> the thread that updates parameters in host
    memory."""
    average: "Callable[[Model, StateMemory | None, Callable[[], None]], WeightAverage] | None" = None
    """(parallelized model with memory, memory, what must be called when weights have changed) -> the average of weights
    that checkpoints keep and validation measures."""
    batch: "Callable[[Batch], Batch]" = unchanged
    """Adds tensors to a batch, or gives this rank its part of each sequence."""
    loss: "Callable[[LossFunction], LossFunction]" = unchanged
    """Returns the loss of what `batch` returns."""
    vocabulary: "SplitVocabulary | None" = None
    """Ranks that have parts of the head's vocabulary. None: the head is whole."""
    after_update: "Callable[[Model], Callable[[], None]]" = lambda _: nothing
    """Returns what must be called at the start, and whenever weights have changed."""
    observers: "Callable[[Observed], Sequence[StepObserver]]" = lambda _: ()
    """Returns observers of training."""


def reads(*keys: str) -> Callable[[Hook], Hook]:
    """Name the options and sections that a check reads. It is skipped while one of them has a known problem."""

    def mark(hook: Hook) -> Hook:
        hook.__dict__["reads"] = keys
        return hook

    return mark


def reads_of(hook: Callable[..., Any]) -> tuple[str, ...]:
    """Return what `reads` names; nothing for the hooks of `Technique` itself."""
    return getattr(hook, "reads", ())


def refuse_accumulation(key: str, reason: str, config: Config, world_size: int) -> Iterator[Conflict]:
    """Yield a problem if a step has several forward passes on each process.

    Args:
        reason: what the option `key` does or needs, beginning with the verb.
    """
    try:
        ranks = config.parallelism.degrees(world_size).data_parallel
        size, _ = config.training.batch_split(ranks)
    except ValueError:  # reported of the degrees, or of the batch
        return
    if (passes := max(config.training.batch_sizes) // (size * ranks)) > 1:
        yield (
            key,
            f"{reason}, and a step has {passes} forward passes of {size} sequences on each of the {world_size} "
            f"processes: set training.global_batch_size = {size * ranks}, or raise training.local_batch_size",
        )


class Technique:
    """A technique. Its methods are called for configs that set one of its options."""

    option: ClassVar[str]
    """Dotted key under which problems are reported that name no other."""

    def is_used(self, config: Config) -> bool:
        """Return True if the config turns the technique on. Every technique defines it."""
        raise NotImplementedError

    # Checks

    def claims(self, config: Config) -> dict[Claim, str]:
        """Return what no other technique can do in the same run, and the option that asks for it. Only asked if it is
        used."""
        return {}

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        """Yield what is wrong across options. Imports no torch."""
        yield from ()

    def layout_conflicts(self, config: Config, world_size: int) -> Iterator[Conflict]:
        """Yield what is wrong for a number of processes. Imports no torch."""
        yield from ()

    def check_machine(self, config: Config, device: "torch.device") -> None:
        """Check what this machine must have: packages, hardware.

        Raises:
            UserError: it does not.
        """

    def check_model(self, config: Config, spec: "ModelSpec", model: "Model", world_size: int) -> None:
        """Check that a model on the meta device fits.

        Raises:
            UserError: it does not.
        """

    def column_shards(self, config: Config, model: "Model", world_size: int) -> dict[str, tuple[str, int]]:
        """Return the parameters that the technique shards by another dimension than the first: the option's name and
        the number of shards. Only asked if it is used."""
        return {}

    # The run

    def summary(self, config: Config) -> str:
        """Return the words for the first lines of a run, which list what is applied. Only asked if it is used."""
        return ""

    def choose_trained(self, model: "Model", config: Config) -> None:
        """Change which parameters a model has and trains, in place, before all else.

        Raises:
            ConfigError: the model does not fit.
        """

    def resume_settings(self, config: Config) -> dict[str, Any]:
        """Return the settings that must match when a run resumes, by key: another value is another experiment."""
        return {}

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        """Return the parts of a run that the technique provides. Only asked if it is used.

        Args:
            run: folder of the run.
        """
        return Parts()

    def places(self, config: Config) -> dict[str, str]:
        """Return host or disk for each category of memory that the technique keeps elsewhere than on the device:
        parameters, gradients, optimizer, average, or that of a frozen model."""
        return {}

    # The plan, and what `titanlite inspect` shows

    def suggestions(self, config: Config, *, is_gpu: bool) -> Iterator[tuple[int, Options, str]]:
        """Yield options that lower the memory of a config which may not use the technique, and what they cost: first as
        a number, by which `titanlite plan` sorts them (1: no slower; 3: waits for a disk; 4: much slower), then in
        words."""
        yield from ()

    def variants(self, config: Config, spec: "ModelSpec", hardware: "Hardware") -> list[tuple[str, Options]]:
        """Return what a search of layouts tries: (words for the table, options). Empty: the technique stays as it is.

        The first one needs nothing of the model or the hardware.
        """
        return []

    def host_traffic(self, config: Config, sizes: Mapping[str, float], accumulation: int) -> HostTraffic:
        """Return what a step moves in host memory.

        Args:
            sizes: bytes of each category of `places`, on one rank.
            accumulation: micro-batches of a step.
        """
        return HostTraffic()

    facts: ClassVar[dict[str, Any]] = {}
    """What `titanlite inspect` records of each parameter, with the values of one that the technique leaves alone."""

    def parameter_facts(self, model: "Model", config: Config) -> "dict[nn.Parameter, dict[str, Any]]":
        """Return the facts of the parameters of a parallelized model that the technique changed."""
        return {}
