"""Build a run: every part of it, in the order in which data flows."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.batch import Batch
from titanlite.build_model import State, build_frozen_teacher, build_loss_function, build_state
from titanlite.checkpoint.exports import Exports
from titanlite.checkpoint.load import OpenWeights, newest_saved, resume_settings
from titanlite.checkpoint.manager import CheckpointManager, Progress
from titanlite.checks.preflight import ResolvedConfig
from titanlite.config.load import dump
from titanlite.config.schema import Config
from titanlite.data.loader import MicroBatches, build_loader
from titanlite.data.samples import Samples, Source
from titanlite.data.sources import PrepareText, open_data
from titanlite.data.verify import while_checking
from titanlite.guard import StepGuard
from titanlite.loss import LossFunction
from titanlite.mesh import data_parallel_rank, loss_group, world_group
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.models.base import Model
from titanlite.observer import CurrentPhase, Phase, StepObserver
from titanlite.ops.kernels import Kernels
from titanlite.optim.norm import count_parameter_replicas
from titanlite.parallelize import build_mesh
from titanlite.run.run_folder import RunFolder, open_run_folder, record_start
from titanlite.run.timeouts import PhaseTimeouts
from titanlite.runtime.console import hide_secrets
from titanlite.runtime.process_group import Ranks
from titanlite.runtime.ranks import check_same_everywhere
from titanlite.schedule import count_steps
from titanlite.storage.storage import open_storage
from titanlite.techniques.context import split_batch
from titanlite.techniques.distill.teacher import Teacher
from titanlite.techniques.in_backward import InBackward
from titanlite.techniques.layer_health import build_layer_health
from titanlite.techniques.loss_scale import build_loss_scale
from titanlite.techniques.profiling import build_profilers
from titanlite.techniques.tensor import count_output_replicas
from titanlite.validation import Validator


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that the training loop works with."""

    config: Config
    ranks: Ranks
    folder: RunFolder
    mesh: DeviceMesh
    group: dist.ProcessGroup
    """Ranks whose token losses are summed."""
    world: dist.ProcessGroup
    """All processes."""
    model: Model
    replicas: dict[nn.Parameter, int]
    """Ranks that hold the same part, of each parameter."""
    optimizer: torch.optim.Optimizer
    in_backward: InBackward | None
    loss_function: LossFunction
    teacher: Teacher | None
    guard: StepGuard
    samples: Samples
    micro_batches: MicroBatches
    batches: Generator[Batch, None, None]
    accumulation: int
    """Micro-batches in a step."""
    validator: Validator
    checkpoints: CheckpointManager
    progress: Progress
    """Progress at the start: of the checkpoint that the run resumes from."""
    steps: int
    """Steps of the whole run."""
    metrics: MetricsRecorder
    phase: CurrentPhase

    @cached_property
    def observers(self) -> list[StepObserver]:
        """Observers of training that the config asks for."""
        device = torch.device(self.mesh.device_type)
        profilers = build_profilers(
            self.config.profiling,
            run=self.folder.path, ranks=self.ranks, steps=self.steps, device=device,
            not_training=self.metrics.profiling,
        )  # fmt: skip
        place = self.folder.layers, self.progress.step
        outputs = count_output_replicas(self.model, self.mesh)
        options = {"replicas": self.replicas, "world": self.world, "outputs": outputs, "device": device}
        return [*profilers, *build_layer_health(self.config.metrics.layers, self.model, place, **options)]


@dataclass(frozen=True, kw_only=True)
class _Resumed:
    """Parts that a checkpoint restores, or that are new without one."""

    checkpoints: CheckpointManager
    progress: Progress
    samples: Samples
    guard: StepGuard


def build(
    config: Config,
    resolved: ResolvedConfig,
    *,
    ranks: Ranks,
    device: torch.device,
    prepare_text: PrepareText | None = None,
    open_weights: OpenWeights | None = None,
    phase: CurrentPhase | None = None,
) -> Run:
    """Build every part of a run, and resume from the run's newest checkpoint.

    Args:
        prepare_text: makes tokens of data that is text. Without it, text is refused.
        open_weights: opens weights of other programs. Without it, a run begins from titanlite's checkpoints only.
        phase: remembers the phase. Default: one that gives each phase its timeout.

    Raises:
        UserError: the parts do not fit together, or the data or the checkpoint do not fit the config.
    """
    phase = phase or PhaseTimeouts(config.comm)
    mesh = build_mesh(config.parallelism, world_size=ranks.world_size, device_type=device.type)
    folder = open_run_folder(config.job, config.data, ranks.rank, partial(newest_saved, config.checkpoint))
    phase.phase(Phase.DATA_PREPARATION)
    samples, validation_sources = _open_samples(config, resolved, folder=folder, mesh=mesh, prepare_text=prepare_text)
    phase.phase(Phase.MODEL)
    state = build_state(config, resolved, mesh=mesh, device=device, folder=folder)
    phase.phase(Phase.CHECKPOINT_LOAD)
    checkpoints = _open_checkpoints(
        config, resolved, state, samples, mesh=mesh, device=device, folder=folder, open_weights=open_weights
    )
    resumed = _resume(config, checkpoints, samples, mesh=mesh, device=device, folder=folder, ranks=ranks)
    teacher = build_frozen_teacher(config, resolved, kernels=state.kernels, mesh=mesh, device=device)
    micro_batches, batches = _load_batches(config, resumed, mesh=mesh, device=device)
    return Run(
        config=config,
        ranks=ranks,
        folder=folder,
        mesh=mesh,
        group=loss_group(mesh),
        world=world_group(mesh),
        model=state.model,
        replicas=count_parameter_replicas(state.model, world_group(mesh)),
        optimizer=state.optimizer,
        in_backward=_build_in_backward(config, state, resumed.guard),
        loss_function=build_loss_function(config, state.kernels, resumed.samples),
        teacher=teacher,
        guard=resumed.guard,
        samples=resumed.samples,
        micro_batches=micro_batches,
        batches=while_checking(batches, [*samples.sources, *validation_sources], folder.data_cache, ranks),
        accumulation=config.training.batch_split(micro_batches.ranks)[1],
        validator=_build_validator(config, resolved, state.kernels, validation_sources, mesh=mesh, device=device),
        checkpoints=resumed.checkpoints,
        progress=resumed.progress,
        steps=_count_steps(config, resumed),
        metrics=_build_recorder(config, state, teacher, resumed.progress, folder, mesh, phase),
        phase=phase,
    )


def _open_samples(
    config: Config, resolved: ResolvedConfig, *, folder: RunFolder, mesh: DeviceMesh, prepare_text: PrepareText | None
) -> tuple[Samples, list[Source]]:
    """Open the training data, which must be the same on all ranks, and the validation sources."""
    group, cache = world_group(mesh), resolved.teacher_cache
    samples, validation_sources = open_data(
        config.data,
        config.validation,
        seq_len=config.training.seq_len,
        seed=config.debug.seed,
        tokenizer=resolved.tokenizer,
        cache_folder=folder.data_cache,
        group=group,
        prepare_text=prepare_text,
        teach=cache.teach if cache else None,
    )
    check_same_everywhere(f"{samples.settings} {cache and cache.settings}", "the training data", group=group)
    return samples, validation_sources


def _open_checkpoints(
    config: Config,
    resolved: ResolvedConfig,
    state: State,
    samples: Samples,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    folder: RunFolder,
    open_weights: OpenWeights | None,
) -> CheckpointManager:
    spec, allow_changes = resolved.model, config.checkpoint.allow_changes
    return CheckpointManager(
        config.checkpoint,
        storage=open_storage(config.checkpoint.folder or str(folder.checkpoints), owner=folder.run_id),
        model=state.model,
        optimizer=state.optimizer,
        mesh=mesh,
        device=device,
        settings=resume_settings(
            config, model_args=resolved.model.args, data=samples.settings, teacher=resolved.teacher_fingerprint
        ),
        may_change=["data.*"] if config.data.on_change != "error" else [],
        whole_config=hide_secrets(dump(config)),
        timeout_seconds=config.comm.save_timeout_seconds,
        flush=state.disk.flush if state.disk else None,
        open_weights=(lambda path: open_weights(path, spec, allow_changes)) if open_weights else None,
        exports=Exports(
            config.checkpoint,
            run=folder.path,
            model_file=config.model.file,
            is_first_rank=dist.get_rank() == 0,
        ),
    )


def _resume(
    config: Config,
    checkpoints: CheckpointManager,
    samples: Samples,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    folder: RunFolder,
    ranks: Ranks,
) -> _Resumed:
    """Load the checkpoint that the run resumes from, if there is one, and record the start in the run's folder."""
    progress = checkpoints.load(has_saved=folder.has_saved)
    if progress.step:
        samples = samples.resume(progress.data, progress.samples_seen, config.data.on_change)
    record_start(folder, config, step=progress.step, ranks=ranks, device=device, mesh=mesh)
    scale = build_loss_scale(config.training, device=device, state=progress.guard)
    guard = StepGuard(config.guard, device=device, step=progress.step, state=progress.guard, loss_scale=scale)
    return _Resumed(checkpoints=checkpoints, progress=progress, samples=samples, guard=guard)


def _build_in_backward(config: Config, state: State, guard: StepGuard) -> InBackward | None:
    if not config.optimizer.in_backward:
        return None
    return InBackward(state.model, state.optimizer, should_skip=guard.should_skip)


def _load_batches(
    config: Config, resumed: _Resumed, *, mesh: DeviceMesh, device: torch.device
) -> tuple[MicroBatches, Generator[Batch, None, None]]:
    """Split each global batch into this rank's micro-batches, and read those ahead."""
    rank, ranks = data_parallel_rank(mesh)
    micro_batches = MicroBatches(
        resumed.progress.samples_seen,
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=config.training.batch_split(ranks)[0],
        rank=rank,
        ranks=ranks,
        step=resumed.progress.step,
    )
    resumed.samples.number_sources = config.metrics.loss_by_source
    split, workers = partial(split_batch, mesh=mesh), config.data.num_workers
    return micro_batches, build_loader(resumed.samples, micro_batches, num_workers=workers, device=device, split=split)


def _count_steps(config: Config, resumed: _Resumed) -> int:
    progress, limit = resumed.progress, resumed.samples.limit(config.training.epochs)
    return count_steps(config.training, step=progress.step, samples=progress.samples_seen, limit=limit)


def _build_validator(
    config: Config,
    resolved: ResolvedConfig,
    kernels: Kernels,
    sources: list[Source],
    *,
    mesh: DeviceMesh,
    device: torch.device,
) -> Validator:
    rank, ranks = data_parallel_rank(mesh)
    return Validator(
        config.validation,
        sources,
        batch_size=config.training.batch_split(ranks)[0],
        token_bytes=resolved.tokenizer.token_bytes(),
        document_mask=config.data.document_mask,
        kernels=kernels,
        device=device,
        rank=rank,
        ranks=ranks,
        group=loss_group(mesh),
        split=partial(split_batch, mesh=mesh),
    )


def _build_recorder(
    config: Config,
    state: State,
    teacher: Teacher | None,
    progress: Progress,
    folder: RunFolder,
    mesh: DeviceMesh,
    phase: CurrentPhase,
) -> MetricsRecorder:
    seq_len = config.training.seq_len
    of_teacher = teacher.flops_per_token if teacher else (0.0, 0.0)
    full, causal = (state.model.flops_per_token(seq_len, causal=it) + of_teacher[it] for it in (False, True))
    return MetricsRecorder(
        config.metrics,
        folder=folder,
        step=progress.step,
        tokens_per_step=config.training.global_batch_size * seq_len,
        model_flops=(full, causal),
        device=state.memory.watch.device,
        compute_type=config.training.mixed_precision_param,
        group=world_group(mesh),
        phase=phase,
        phase_memory=state.memory,
    )
