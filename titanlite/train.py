"""Training: `build` makes every part in order, `train` is the loop."""

import gc
import logging
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.batch import Batch
from titanlite.checkpoint.fingerprint import resume_settings
from titanlite.checkpoint.load import saved_run_id
from titanlite.checkpoint.manager import CheckpointManager, Progress
from titanlite.checkpoint.storage import open_storage
from titanlite.config.load import config_hash
from titanlite.config.schema import Config
from titanlite.data.loader import MicroBatches, build_loader
from titanlite.data.samples import Samples
from titanlite.data.sources import PrepareText, open_data
from titanlite.guard import StepGuard, StoppedByGuard
from titanlite.loss import LossFunction, build_loss
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.metrics.run_summary import report_end, report_start
from titanlite.models.base import Model
from titanlite.optim import build_optimizer, set_learning_rate
from titanlite.optim.in_backward import InBackward
from titanlite.parallelize import DTYPES, build_mesh, materialize, parallelize
from titanlite.parallelize.float8 import weight_scaler
from titanlite.parallelize.mesh import data_parallel_group, data_parallel_rank
from titanlite.preflight import ResolvedConfig
from titanlite.runtime.disk import DiskTensors, open_disk
from titanlite.runtime.process_group import Ranks, freeze_garbage_collector, seed_step
from titanlite.runtime.ranks import check_same_everywhere
from titanlite.runtime.run_folder import RunFolder, open_run_folder, record_start
from titanlite.schedule import count_steps, learning_rate
from titanlite.step import train_step
from titanlite.validation import Validator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Everything that the loop works with."""

    config: Config
    ranks: Ranks
    folder: RunFolder
    device: torch.device
    mesh: DeviceMesh
    group: dist.ProcessGroup
    """All ranks that read data."""
    model: Model
    optimizer: torch.optim.Optimizer
    samples: Samples
    micro_batches: MicroBatches
    batches: Generator[Batch, None, None]
    accumulation: int
    loss_function: LossFunction
    guard: StepGuard
    in_backward: InBackward | None
    steps: int
    validator: Validator
    checkpoints: CheckpointManager
    metrics: MetricsRecorder
    progress: Progress


def build(
    config: Config,
    resolved: ResolvedConfig,
    *,
    ranks: Ranks,
    device: torch.device,
    prepare_text: PrepareText | None = None,
) -> Run:
    """Every part of a run, in the order in which data flows; goes on from the run's newest checkpoint.

    Args:
        prepare_text: makes tokens of data that is text. Without it, text is refused.
    """
    training = config.training
    mesh = build_mesh(config.parallelism, world_size=ranks.world_size, device_type=device.type)
    group, (data_rank, data_ranks) = data_parallel_group(mesh), data_parallel_rank(mesh)
    folder = open_run_folder(
        config.job, config.data, rank=ranks.rank, saved_run_id=partial(saved_run_id, config.checkpoint)
    )
    samples, validation_sources = open_data(
        config.data,
        config.validation,
        seq_len=training.seq_len,
        seed=config.debug.seed,
        tokenizer=resolved.tokenizer,
        cache_folder=folder.data_cache,
        group=group,
        prepare_text=prepare_text,
    )
    check_same_everywhere(str(samples.settings), "the training data", group=group)
    model, optimizer, disk = _build_states(config, resolved, mesh=mesh, device=device, folder=folder)
    checkpoints = CheckpointManager(
        config.checkpoint,
        storage=open_storage(config.checkpoint.folder or str(folder.checkpoints), owner=folder.run_id),
        model=model,
        optimizer=optimizer,
        mesh=mesh,
        device=device,
        settings=resume_settings(config, model_args=resolved.model.args, data=samples.settings),
        may_change=["data.*"] if config.data.on_change != "error" else [],
        config_hash=config_hash(config),
        flush=disk.flush if disk else None,
    )
    progress = checkpoints.load(has_saved=folder.has_saved)
    seen = progress.samples_seen
    if progress.step:
        samples = samples.resume(progress.data, seen, config.data.on_change)
    steps = count_steps(training, step=progress.step, samples=seen, limit=samples.limit(training.epochs))
    record_start(folder, config, ranks=ranks, device=device, mesh=mesh)
    micro_batch_size, accumulation = training.batch_split(data_ranks)
    micro_batches = MicroBatches(
        seen,
        global_batch_size=training.global_batch_size,
        micro_batch_size=micro_batch_size,
        rank=data_rank,
        ranks=data_ranks,
        step=progress.step,
    )
    batches = build_loader(samples, micro_batches, num_workers=config.data.num_workers, device=device)
    guard = StepGuard(config.guard, device=device, step=progress.step, state=progress.guard)
    in_backward = InBackward(model, optimizer, should_skip=guard.forbids) if config.optimizer.in_backward else None
    metrics = MetricsRecorder(
        config.metrics,
        folder=folder,
        step=progress.step,
        tokens_per_step=training.global_batch_size * training.seq_len,
        model_flops=(model.flops_per_token(training.seq_len), model.flops_per_token(training.seq_len, causal=True)),
        device=device,
        compute_type=training.mixed_precision_param,
        group=group,
    )
    validator = Validator(
        config.validation,
        validation_sources,
        batch_size=micro_batch_size,
        token_bytes=resolved.tokenizer.token_bytes(),
        document_mask=config.data.document_mask,
        device=device,
        mesh=mesh,
    )
    return Run(
        config, ranks, folder, device, mesh, group, model, optimizer, samples, micro_batches, batches, accumulation,
        build_loss(training), guard, in_backward, steps, validator, checkpoints, metrics, progress,
    )  # fmt: skip


def _build_states(
    config: Config, resolved: ResolvedConfig, *, mesh: DeviceMesh, device: torch.device, folder: RunFolder
) -> tuple[Model, torch.optim.Optimizer, DiskTensors | None]:
    """The model: on the meta device, made parallel, and then with memory and values. Its optimizer. The disk that they
    are on, if it is one."""
    disk = open_disk(config.offload, folder.path)
    model = resolved.model.build()
    parallelize(
        model,
        mesh=mesh,
        parallelism=config.parallelism,
        training=config.training,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        float8=config.quantize.linear.float8,
        pin_memory=not (disk and disk.holds_parameters),
    )
    materialize(
        model,
        device=device,
        offload=config.training.enable_cpu_offload,
        dtype=DTYPES[config.training.dtype],
        seed=config.debug.seed,
        disk=disk if disk and disk.holds_parameters else None,
    )
    return model, build_optimizer(model, config.optimizer, seed=config.debug.seed, disk=disk), disk


def train(run: Run) -> StoppedByGuard | None:
    """From the run's progress to its last step; or to where a rule of the config ends it, which is returned then."""
    report_start(
        run.config,
        model=run.model,
        optimizer=run.optimizer,
        mesh=run.mesh,
        samples=run.samples,
        progress=run.progress,
        accumulation=run.accumulation,
        steps=run.steps,
    )
    config, metrics, checkpoints = run.config, run.metrics, run.checkpoints
    steps, step, samples = run.steps, run.progress.step, run.progress.samples_seen
    scale_weights = weight_scaler(run.model, config.quantize.linear.float8)
    try:
        scale_weights()
        while step < steps:
            step += 1
            with metrics.waiting_for_data():
                batches = list(islice(run.batches, run.accumulation))
            seed_step(config.debug.seed, step, run.ranks.rank)
            lr = learning_rate(step, peak=config.optimizer.lr, steps=steps, config=config.lr_scheduler)
            set_learning_rate(run.optimizer, lr)
            result = train_step(
                run.model,
                batches,
                optimizer=run.optimizer,
                group=run.group,
                max_norm=config.training.max_norm,
                loss_function=run.loss_function,
                judge=run.guard.judge,
                in_backward=run.in_backward,
            )
            scale_weights()
            if step == run.progress.step + 1:
                freeze_garbage_collector()
            samples += config.training.global_batch_size
            last = step == steps
            metrics.end_step(
                step, result, lr=lr, samples=samples, shares=partial(run.samples.shares, samples), last=last
            )
            metrics.record_saves(checkpoints.watch())
            run.guard.keep(step, result)
            saves = checkpoints.is_due(step, last=last)
            if saves or metrics.is_due(step, last=last):
                metrics.record_skipped(run.guard.look(run.group), run.micro_batches, run.samples)
            if run.validator.is_due(step, last=last):
                with metrics.not_training(waits_for_device=True), checkpoints.not_training():
                    metrics.record_validation(step, run.validator.run(run.model))
            if saves:
                with metrics.not_training(waits_for_device=not checkpoints.is_background):
                    checkpoints.save(_progress(run, step), last=last)
    except StoppedByGuard as stopped:
        metrics.record_skipped(stopped.skipped, run.micro_batches, run.samples)
        if not stopped.in_part:
            checkpoints.save_if_newer(_progress(run, stopped.taken))
        return stopped
    except torch.OutOfMemoryError as error:
        error.add_note(f"step {step}")
        raise
    return None


def _progress(run: Run, step: int) -> Progress:
    """Of a step of this start."""
    samples = run.progress.samples_seen + (step - run.progress.step) * run.config.training.global_batch_size
    return Progress(step, samples, run.samples.state(samples), run.guard.state())


def finish(run: Run, stopped: StoppedByGuard | None = None) -> None:
    """Close what is open, and say where everything is."""
    gc.unfreeze()
    run.batches.close()
    run.metrics.record_saves(run.checkpoints.finish())
    run.metrics.close()
    report_end(
        run.config,
        steps=run.steps,
        folder=run.folder,
        checkpoints=run.checkpoints.storage,
        resumed_at=run.progress.step,
        stopped=stopped,
    )
