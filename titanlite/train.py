"""Training: `build` makes every part in order, `train` is the loop."""

import logging
from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice

import torch

from titanlite.checkpoint.files import open_files
from titanlite.checkpoint.manager import CheckpointManager, Progress
from titanlite.config.schema import Config
from titanlite.data.loader import Batch, MicroBatches, Samples, build_loader
from titanlite.data.prepare import open_tokens
from titanlite.job import (
    Ranks,
    RunFolder,
    check_same_everywhere,
    config_hash,
    open_run_folder,
    record_start,
    seed_step,
    settings_of_meaning,
)
from titanlite.metrics import MetricsRecorder
from titanlite.models.base import Model
from titanlite.optim import build_optimizer, set_learning_rate
from titanlite.parallelize import build_mesh, materialize, parallelize
from titanlite.parallelize.mesh import data_parallel_group, data_parallel_rank
from titanlite.preflight import Ingredients
from titanlite.report import report_end, report_start
from titanlite.schedule import learning_rate
from titanlite.step import train_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Everything that the loop works with."""

    config: Config
    ranks: Ranks
    folder: RunFolder
    device: torch.device
    model: Model
    optimizer: torch.optim.Optimizer
    batches: Generator[Batch, None, None]
    accumulation: int
    checkpoints: CheckpointManager
    metrics: MetricsRecorder
    progress: Progress


def build(config: Config, ingredients: Ingredients, *, ranks: Ranks, device: torch.device) -> Run:
    """Every part of a run, in the order in which data flows; goes on from the run's newest checkpoint."""
    training, seed = config.training, config.debug.seed
    mesh = build_mesh(config.parallelism, world_size=ranks.world_size, device_type=device.type)
    group, (data_rank, data_ranks) = data_parallel_group(mesh), data_parallel_rank(mesh)
    folder = open_run_folder(config.job, config.data, rank=ranks.rank)
    tokens = open_tokens(config.data, tokenizer=ingredients.tokenizer, cache_folder=folder.data_cache)
    samples = Samples(tokens, seq_len=training.seq_len, seed=seed)
    check_same_everywhere(samples.fingerprint, "the training data", group=group)

    model = ingredients.build_model()
    parallelize(
        model,
        mesh=mesh,
        parallelism=config.parallelism,
        training=training,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        float8=config.quantize.linear.float8,
    )
    materialize(model, device=device, offload=training.enable_cpu_offload, seed=seed)
    optimizer = build_optimizer(model, config.optimizer)
    checkpoints = CheckpointManager(
        config.checkpoint,
        files=open_files(config.checkpoint.folder or str(folder.checkpoints), owner=folder.run_id),
        model=model,
        optimizer=optimizer,
        mesh=mesh,
        device=device,
        settings=settings_of_meaning(config, model_args=ingredients.args, data=tokens.fingerprint),
        config_hash=config_hash(config),
    )
    progress = checkpoints.load(has_saved=folder.has_saved)
    record_start(folder, config, ranks=ranks, device=device, mesh=mesh)

    micro_batch_size, accumulation = training.batch_split(data_ranks)
    micro_batches = MicroBatches(
        start=progress.samples,
        global_batch_size=training.global_batch_size,
        micro_batch_size=micro_batch_size,
        rank=data_rank,
        ranks=data_ranks,
    )
    batches = build_loader(samples, micro_batches, num_workers=config.data.num_workers, device=device)
    metrics = MetricsRecorder(
        config.metrics,
        folder=folder,
        step=progress.step,
        tokens_per_step=training.global_batch_size * training.seq_len,
        flops_per_token=model.flops_per_token(training.seq_len),
        device=device,
        compute_type=training.mixed_precision_param,
        group=group,
    )
    report_start(config, model=model, mesh=mesh, tokens=tokens, progress=progress, accumulation=accumulation)
    return Run(config, ranks, folder, device, model, optimizer, batches, accumulation, checkpoints, metrics, progress)


def train(run: Run) -> None:
    """From the run's progress to its last step."""
    config, metrics, checkpoints = run.config, run.metrics, run.checkpoints
    steps, step, samples = config.training.steps, run.progress.step, run.progress.samples
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
            group=metrics.group,
            max_norm=config.training.max_norm,
        )
        samples += config.training.global_batch_size
        metrics.end_step(step, result, lr=lr, samples=samples, last=step == steps)
        metrics.record_saves(checkpoints.watch())
        if checkpoints.is_due(step, last=step == steps):
            with metrics.not_training(waits_for_device=not checkpoints.is_background):
                checkpoints.save(Progress(step, samples), last=step == steps)


def finish(run: Run) -> None:
    """Close what is open, and say where everything is."""
    run.batches.close()
    run.metrics.record_saves(run.checkpoints.finish())
    run.metrics.close()
    report_end(run.config, folder=run.folder, checkpoints=run.checkpoints.files, resumed_at=run.progress.step)
