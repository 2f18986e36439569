"""The contract of techniques: what the rest of titanlite asks of each. Never imports torch.

A technique is a subclass of `Technique` that overrides the hooks that it needs. The checks of a config, the checks of
preflight, the first lines of a run, training, `titanlite plan` and `titanlite inspect` iterate over techniques and call
these hooks. What changes the layers of a model is no hook: its order matters, and `parallelize/__init__.py` lists it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from titanlite.schema import Config

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.batch import Batch
    from titanlite.data.tokenizer import Tokenizer
    from titanlite.loss import LossFunction, Targets
    from titanlite.models.base import Model
    from titanlite.models.frozen import OpenModel
    from titanlite.models.registry import ModelSpec
    from titanlite.observer import StepObserver
    from titanlite.ops.cross_entropy import SplitVocabulary
    from titanlite.optim.state_memory import StateMemory, WeightAverage
    from titanlite.run.records import RecordFile
    from titanlite.runtime.hardware import Hardware
    from titanlite.runtime.process_group import Ranks
    from titanlite.step import Gradients, Passes

Conflict = tuple[str, str]
"""Dotted key, and what is wrong."""
Options = dict[str, Any]
"""Values by dotted key."""
Attempt = Callable[[str, Sequence[str], Callable[[], Any]], Any]
"""(key, reads, check): runs a check, and returns its result. A UserError becomes a problem of the key; then, and where
an option that the check reads has a known problem, the result is None."""


class Claim(StrEnum):
    """What one technique at most can do in a run."""

    LAYERS = "changes the linear layers"
    MATMULS = "computes matmuls in a format of its own"
    TRAINED = "chooses which parameters are trained"
    PARAMETERS = "keeps parameters in memory of its own"
    GRADIENTS = "handles gradients in its own way"
    UPDATE = "changes the update of the optimizer"


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
    folder: Path
    open_records: "Callable[[str], RecordFile | None]"
    """Opens a file of records in the run's folder, by name; None on ranks that do not write."""
    paused: Callable[[], AbstractContextManager[None]]
    """Excludes a block within a step from the time of the step."""
    state: "Callable[[], dict[str, torch.Tensor]]"
    """Returns the tensors of a checkpoint, by name."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What the gradients of a step belong to."""

    model: "Model"
    """As it is trained, with memory."""
    optimizer: "torch.optim.Optimizer"
    mesh: "DeviceMesh"
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """State of the guard and of `Gradients`, in the checkpoint that the run resumes from."""
    should_skip: "Callable[[torch.Tensor], torch.Tensor] | None" = None
    """See `StepGuard.should_skip`. Default: a loss that is not finite."""


Hook = TypeVar("Hook", bound=Callable[..., Any])


def reads(*keys: str) -> Callable[[Hook], Hook]:
    """Name the options and sections that a check reads. It is skipped while one of them has a known problem."""

    def mark(hook: Hook) -> Hook:
        hook.__dict__["reads"] = keys
        return hook

    return mark


def reads_of(hook: Callable[..., Any]) -> tuple[str, ...]:
    """Return what `reads` names; nothing for the hooks of `Technique` itself."""
    return getattr(hook, "reads", ())


class Technique:
    """A technique; see above. Its methods are asked for configs that set one of its options."""

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

    def check_disk(self, config: Config, needed: float) -> None:
        """Check that a disk has room.

        Args:
            needed: bytes of all processes of this machine in the place "disk"; see `places`.

        Raises:
            UserError: it has not.
        """

    # The run

    def summary(self, config: Config) -> str:
        """Return the words for the first lines of a run, which list what is applied. Only asked if it is used."""
        return ""

    loss_arguments: ClassVar[tuple[str, ...]] = ()
    """Names of the further arguments that its `Targets` give to the loss function."""

    def open_targets(
        self,
        config: Config,
        *,
        student: "ModelSpec",
        tokenizer: "Tokenizer | None",
        open_model: "OpenModel | None",
        attempt: Attempt,
    ) -> "Targets | None":
        """Open and check what the loss reads beside labels; None if that is nothing, or has problems.

        Args:
            tokenizer: of the data. None if it is not known.
            open_model: None if the command reads no weights.
        """
        return None

    def choose_trained(self, model: "Model", config: Config) -> None:
        """Change which parameters a model has and trains, in place, before all else.

        Raises:
            ConfigError: the model does not fit.
        """

    def resume_settings(self, config: Config) -> dict[str, Any]:
        """Return settings that must match when a run resumes, by key: with another value it were another experiment."""
        return {}

    def after_update(self, model: "Model", config: Config) -> Callable[[], None] | None:
        """Return what must be called at the start, and whenever weights have changed."""
        return None

    def observers(self, config: Config, run: Observed) -> "Sequence[StepObserver]":
        """Return the observers of training that the technique adds."""
        return ()

    def split_batch(self, config: Config, mesh: "DeviceMesh") -> "Callable[[Batch], Batch] | None":
        """Return what adds tensors to a batch, or gives this rank its part of each sequence; None if the technique does
        neither. Only asked if it is used."""
        return None

    def split_loss(self, loss: "LossFunction", config: Config, mesh: "DeviceMesh") -> "LossFunction":
        """Return the loss of what `split_batch` returns. Only asked if it is used."""
        return loss

    def split_vocabulary(self, mesh: "DeviceMesh") -> "SplitVocabulary | None":
        """Return the ranks that have parts of the head's vocabulary; None if the technique leaves it whole. Only asked
        if it is used."""
        return None

    def gradients(self, config: Config, trained: Trained) -> "Gradients | None":
        """Return what handles the gradients of steps; None if the technique leaves that as it is. One that returns it
        has the claim `Claim.GRADIENTS`."""
        return None

    def passes_of_step(self, config: Config, model: "Model", mesh: "DeviceMesh") -> "Passes | None":
        """Return what makes the forward and backward passes of a step; None if the technique leaves that as it is. Only
        asked if it is used.

        Args:
            model: as it is trained, with memory.
        """
        return None

    def state_memory(self, config: Config, run: Path) -> "StateMemory | None":
        """Return the memory of parameters and moments; None if the technique leaves that as it is. One that returns it
        has the claim `Claim.UPDATE`.

        Args:
            run: folder of the run.
        """
        return None

    def weight_average(self, config: Config, model: "Model", memory: "StateMemory") -> "WeightAverage | None":
        """Return the average of weights that checkpoints keep and validation measures; None if there is none. Only
        asked if it is used.

        Args:
            model: as it is trained, with memory.
            memory: of the states of training.
        """
        return None

    def keeps_gradients(self, config: Config) -> bool:
        """Return whether gradients last until after backward. Otherwise parameters are updated within it."""
        return True

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

    last_resort: ClassVar[tuple[str, str] | None] = None
    """(words for the table, switch) of an option that a search of layouts sets only if nothing fits without it."""

    def host_traffic(self, config: Config, sizes: Mapping[str, float], accumulation: int) -> tuple[float, float]:
        """Return the bytes that go over the link from a GPU to its host in a step, and those that the host itself reads
        and writes.

        Args:
            sizes: bytes of each category of `places`, on one rank.
            accumulation: micro-batches of a step.
        """
        return 0.0, 0.0

    def planned_targets(
        self, config: Config, *, read_spec: "Callable[[str, str | None, str], ModelSpec]"
    ) -> "Targets | None":
        """Return the targets for a plan, which need not be there yet. Only asked if it is used.

        Args:
            read_spec: (path, config, section) -> the model of weights.
        """
        return None

    facts: ClassVar[dict[str, Any]] = {}
    """What `titanlite inspect` records of each parameter, with the values of one that the technique leaves alone."""

    def parameter_facts(self, model: "Model", config: Config) -> "dict[nn.Parameter, dict[str, Any]]":
        """Return the facts of the parameters of a parallelized model that the technique changed."""
        return {}
