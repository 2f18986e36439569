"""When to save, what a checkpoint holds, and how a run goes on from one. Wraps torch.distributed.checkpoint (DCP)."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

import titanlite
from titanlite.checkpoint import storage
from titanlite.checkpoint.storage import Manifest
from titanlite.config.schema import Checkpoint
from titanlite.errors import UserError
from titanlite.job import RunFolder

logger = logging.getLogger(__name__)

State = dict[str, dict[str, Any]]


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

        Raises:
            UserError: it is damaged, of another model, or of other data.
        """
        newest = [max(storage.committed_steps(self._checkpoints), default=None) if self.config.enable else None]
        dist.broadcast_object_list(newest)  # rank 0 decides: a network file system may show others an older list
        if newest[0] is None:
            return Progress()
        checkpoint = self._checkpoints / storage.folder_name(newest[0])
        try:
            manifest = storage.read_manifest(checkpoint)
        except ValueError as error:
            raise UserError(f"damaged checkpoint: {error}. Remove {checkpoint} to go on from the one before") from None
        if manifest.data != self.data:
            raise UserError(
                f"the data, its order or seq_len is not what {checkpoint} was trained with (fingerprint "
                f"{manifest.data} there, {self.data} now). Restore it, or give the new run a job.name of its own"
            )
        state = self._state()
        _check_same_model(state, checkpoint)
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint))
        return Progress(manifest.step, manifest.samples)

    def _state(self) -> State:
        """{model: {name: tensor}, optimizer: {state.name.moment: tensor}}, the tensors those in use, so that loading
        into them is loading. Learning rates and decay are not state: they come from the config."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        moments = {key: value for key, value in optimizer.items() if key.startswith("state.")}
        return {"model": get_model_state_dict(self.model), "optimizer": moments}

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
