"""When to save, what a checkpoint holds, and how a run goes on from one. Wraps torch.distributed.checkpoint (DCP)."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import titanlite
from titanlite.checkpoint import storage
from titanlite.checkpoint.storage import Manifest
from titanlite.config.schema import Checkpoint
from titanlite.errors import UserError
from titanlite.job import RunFolder
from titanlite.models.base import unique_parameters

logger = logging.getLogger(__name__)

State = dict[str, dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    samples: int = 0


class CheckpointManager:
    """Saves and loads the parameters and optimizer states of a run, sharded: every rank its own part.

    Args:
        data: fingerprint of the data and its order; a run goes on only where it is the same.
    """

    def __init__(
        self,
        config: Checkpoint,
        *,
        folder: RunFolder,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        data: str,
    ) -> None:
        self.config = config
        self.folder = folder
        self._checkpoints = folder.checkpoints
        self.model = model
        self.optimizer = optimizer
        self.mesh = mesh
        self.data = data

    def is_due(self, step: int, *, last: bool) -> bool:
        return self.config.enable and (last or step % self.config.interval == 0)

    def save(self, progress: Progress) -> None:
        """Write and commit a checkpoint.

        Raises:
            CheckpointException: on every rank, if any rank fails; nothing is committed then.
        """
        started = time.perf_counter()
        if dist.get_rank() == 0:
            storage.begin(self._checkpoints, progress.step)
        dist.barrier()
        staging = storage.staging_path(self._checkpoints, progress.step)
        metadata = dcp.save(self._state(), storage_writer=dcp.FileSystemWriter(staging, sync_files=True))
        if dist.get_rank() == 0:
            files = storage.file_sizes(staging)
            written = {entry.relative_path for entry in (metadata.storage_data or {}).values()}
            if missing := sorted(written - files.keys()):
                raise OSError(f"{staging} lacks {missing[0]}: all nodes must share job.dump_folder")
            storage.commit(self._checkpoints, self._manifest(progress, files))
        dist.barrier()
        logger.info(f"saved checkpoint of step {progress.step} in {time.perf_counter() - started:.2f} s")

    def load_newest(self) -> Progress:
        """Load the newest whole checkpoint of the run, in place. Without one, the run is at its beginning.

        Rank 0 looks and decides for all: a network file system may show others an older list, and at many ranks the
        same checks on each would be a storm.

        Raises:
            UserError: it is damaged, of another model, or of other data.
        """
        if not self.config.enable:
            return Progress()
        manifest = _told_by_rank_0(self._newest)
        if manifest is None:
            return Progress()
        checkpoint = self._checkpoints / storage.folder_name(manifest.step)
        state = self._state()  # only now: it gives an optimizer without state one, of a step that it counts
        _told_by_rank_0(lambda: _check_same_model(state, checkpoint))
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint))
        return Progress(manifest.step, manifest.samples)

    def _newest(self) -> Manifest | None:
        """The manifest of the newest checkpoint."""
        steps = storage.committed_steps(self._checkpoints)
        if not steps:
            return None
        checkpoint = self._checkpoints / storage.folder_name(steps[-1])
        try:
            manifest = storage.read_manifest(checkpoint)
        except ValueError as error:
            raise UserError(f"damaged checkpoint: {error}. Remove {checkpoint} to go on from the one before") from None
        if manifest.data != self.data:
            raise UserError(
                f"the data, its order or seq_len is not what {checkpoint} was trained with (fingerprint "
                f"{manifest.data} there, {self.data} now). Restore it, or give the new run a job.name of its own"
            )
        return manifest

    def _state(self) -> State:
        """{model: {name: tensor}, optimizer: {state.name.moment: tensor}}, the tensors those in use, so that loading
        into them is loading. A shared parameter is there once. Learning rates and decay are not state: they come from
        the config."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        names = [name for name, _ in unique_parameters(self.model)]
        model = get_model_state_dict(self.model)
        buffers = [name for name, _ in self.model.named_buffers() if name in model]
        return {
            "model": {name: _plain(model[name]) for name in names + buffers},
            "optimizer": {key: _plain(value) for key, value in optimizer.items() if key.startswith("state.")},
        }

    def _manifest(self, progress: Progress, files: dict[str, int]) -> Manifest:
        names = self.mesh.mesh_dim_names or ()
        return Manifest(
            step=progress.step,
            samples=progress.samples,
            run_id=self.folder.run_id,
            data=self.data,
            mesh=dict(zip(names, self.mesh.shape, strict=True)),
            versions={"titanlite": titanlite.__version__, "torch": torch.__version__},
            files=files,
        )


def _plain(tensor: Any) -> Any:
    """The same memory without float8's tensor subclass around a local shard: a checkpoint must load without torchao."""
    inner = getattr(tensor.to_local(), "_tensor", None) if isinstance(tensor, DTensor) else None
    if not isinstance(tensor, DTensor) or inner is None:
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(inner, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _told_by_rank_0(find: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank; a UserError there is one everywhere."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [find()]
        except UserError as error:
            told = [error]
    dist.broadcast_object_list(told)
    if isinstance(told[0], UserError):
        raise told[0]
    return told[0]


def _check_same_model(state: State, checkpoint: Path) -> None:
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    here = {
        f"{part}.{name}": tuple(tensor.shape) for part, tensors in state.items() for name, tensor in tensors.items()
    }
    there = {name: tuple(getattr(entry, "size", ())) for name, entry in stored.items()}
    different = [name for name in (here | there) if here.get(name) != there.get(name)]
    if not different:
        return
    name = different[0]
    raise UserError(
        f"{checkpoint} is of another model: {name} is {_shape(there.get(name))} there and {_shape(here.get(name))} "
        f"in the config ({len(different)} tensors differ). Restore [model], or give the new run a job.name of its own"
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
