# pyright: strict, reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
"""Training, top to bottom: build the parts of a run, resume, loop over optimizer steps, finish."""

import gc
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.batch import Batch
from titanlite.checkpoint.initial import OpenWeights
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.manifest import Progress
from titanlite.checkpoint.resume import newest_saved
from titanlite.checkpoint.settings import resume_settings
from titanlite.checkpoint.state import flat
from titanlite.data.loader import MicroBatches, build_loader
from titanlite.data.samples import Samples, Source
from titanlite.data.sources import PrepareText, open_data
from titanlite.data.verify import while_checking
from titanlite.guard import StepGuard, StoppedByGuard
from titanlite.mesh import build_mesh, data_parallel_rank, loss_group, world_group
from titanlite.metrics.clock import phase_seconds
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.metrics.run_summary import report_end, report_start
from titanlite.models.base import Model
from titanlite.observer import CurrentPhase, Observers, Phase, StepObserver
from titanlite.ops import pick_kernels
from titanlite.ops.kernels import Kernels
from titanlite.optim import build_optimizer, set_learning_rate
from titanlite.optim.state_memory import StateMemory
from titanlite.parallelize import DTYPES, materialize, parallelize
from titanlite.run.records import RecordFile
from titanlite.run.run_folder import RunFolder, open_run_folder, record_start
from titanlite.run.timeouts import PhaseTimeouts
from titanlite.runtime.console import hide_secrets
from titanlite.runtime.errors import RunStopped
from titanlite.runtime.process_group import Ranks, freeze_garbage_collector, seed_step
from titanlite.runtime.ranks import AgreedStop, check_same_everywhere
from titanlite.runtime.signals import StoppedBySignal, StopRequests
from titanlite.schedule import BatchSizes, SequenceLengths, count_steps, is_due, learning_rate
from titanlite.schema import Config, dump
from titanlite.step import Step, StepResult, build_step
from titanlite.storage.storage import open_storage
from titanlite.techniques import choose_trained, parts_of, places
from titanlite.techniques.technique import Observed, Parts
from titanlite.validation import Validator

if TYPE_CHECKING:
    from titanlite.checks.preflight import ResolvedConfig
    from titanlite.models.frozen import FrozenModel
    from titanlite.techniques.average.weights import WeightAverage


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that the training loop works with."""

    config: Config
    ranks: Ranks
    folder: RunFolder
    step: Step
    whole: Model
    """The uncut model; on the meta device if this rank holds only some pipeline stages."""
    guard: StepGuard
    samples: Samples
    micro_batches: MicroBatches
    batches: Generator[Batch, None, None]
    validator: Validator
    checkpoints: CheckpointManager
    average: "WeightAverage | None"
    progress: Progress
    """Progress at the start: of the checkpoint that the run resumes from."""
    steps: int
    """Steps of the whole run."""
    metrics: MetricsRecorder
    phase: CurrentPhase
    after_update: Callable[[], None]
    """Is called at the start, and whenever weights have changed."""
    observers: list[StepObserver]
    """Observers of training that the config asks for."""

    @property
    def model(self) -> Model:
        return self.step.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.step.optimizer

    @property
    def mesh(self) -> DeviceMesh:
        return self.step.mesh

    @property
    def accumulation(self) -> int:
        """Micro-batches in a step after training.batch_ramp."""
        return self.config.training.batch_split(data_parallel_rank(self.mesh)[1])[1]


def build(
    config: Config,
    resolved: "ResolvedConfig",
    *,
    ranks: Ranks,
    device: torch.device,
    prepare_text: PrepareText | None = None,
    open_weights: OpenWeights | None = None,
    phase: CurrentPhase | None = None,
) -> Run:
    """Build every part of a run, in the order in which data flows, and resume from the run's newest checkpoint.

    Args:
        prepare_text: makes tokens of data that is text. Without it, text is refused.
        open_weights: opens weights of other programs. Without it, a run begins from titanlite's checkpoints only.
        phase: remembers the phase. Default: one that gives each phase its timeout.

    Raises:
        UserError: the parts do not fit together, or the data or the checkpoint do not fit the config.
    """
    training, targets = config.training, resolved.targets
    phase = phase or PhaseTimeouts(config.comm)
    mesh = build_mesh(config.parallelism, world_size=ranks.world_size, device_type=device.type)
    world = world_group(mesh)
    folder = open_run_folder(config.job, config.data, ranks.rank, partial(newest_saved, config.checkpoint))

    phase.phase(Phase.DATA_PREPARATION)
    samples, validation_sources = build_data(
        config, resolved, cache_folder=folder.data_cache, world=world, prepare_text=prepare_text
    )
    sources = samples.sources

    phase.phase(Phase.MODEL)
    kernels = pick_kernels(device, compiles=config.compile.enable, attention_backend=training.attention_backend)
    parts = parts_of(config, mesh, folder.path)
    model, whole = build_model(
        config, resolved, mesh=mesh, kernels=kernels, device=device, memory=parts.memory, phase=phase
    )
    phase.phase(Phase.OPTIMIZER)
    on_gpu = device.type == "cuda" and "parameters" not in places(config)
    fused = on_gpu or not config.debug.reproducible_layouts
    optimizer = build_optimizer(model, config.optimizer, seed=config.debug.seed, memory=parts.memory, fused=fused)
    after_update = parts.after_update(model)
    average = parts.average(model, parts.memory, after_update) if parts.average else None

    phase.phase(Phase.CHECKPOINT_LOAD)
    whole_config = hide_secrets(dump(config))
    checkpoints = build_checkpoints(
        config, resolved, folder=folder, mesh=mesh, device=device, model=model, optimizer=optimizer, average=average,
        samples=samples, whole_config=whole_config, memory=parts.memory, open_weights=open_weights,
    )  # fmt: skip
    progress = checkpoints.load(has_saved=folder.has_saved)
    if progress.step:
        samples = samples.resume(progress.data, progress.samples_seen, config.data.on_change)
    record_start(
        folder, whole_config, tokenizer=resolved.tokenizer, step=progress.step, ranks=ranks, device=device, mesh=mesh
    )
    limit = samples.limit(training.epochs) if training.epochs else None
    steps = count_steps(training, step=progress.step, samples=progress.samples_seen, limit=limit)
    if targets:
        from titanlite.parallelize.frozen import build_frozen

        targets.use(build_frozen(targets.frozen, config, mesh=mesh, kernels=kernels, device=device))

    lengths = SequenceLengths.of(training, samples=progress.samples_seen)
    micro_batches, batches = build_batches(
        config, samples, progress, mesh=mesh, device=device, lengths=lengths, split=parts.batch
    )
    guard = StepGuard(config.guard, device=device, step=progress.step, state=progress.guard)
    step = build_step(
        config, model, optimizer, mesh=mesh, kernels=kernels, parts=parts, targets=targets, state=progress.guard,
        should_skip=guard.should_skip,
    )  # fmt: skip

    validator = build_validator(
        config, resolved, validation_sources, mesh=mesh, kernels=kernels, device=device, parts=parts
    )
    metrics = MetricsRecorder(
        config.metrics,
        folder=folder,
        step=progress.step,
        steps=steps,
        seq_len=training.seq_len,
        samples=progress.samples_seen,
        flops_per_token=flops_counter([whole, targets.frozen] if targets else [whole], lengths),
        device=device,
        compute_type=training.mixed_precision_param,
        group=world,
        phase=phase,
    )
    observed = Observed(
        model=model,
        replicas=step.replicas,
        mesh=mesh,
        ranks=ranks,
        device=device,
        steps=steps,
        folder=folder.path,
        open_records=lambda name: RecordFile(folder.path / name, progress.step) if ranks.rank == 0 else None,
        paused=metrics.paused,
        state=lambda: flat(checkpoints.state()),
    )
    return Run(
        config=config,
        ranks=ranks,
        folder=folder,
        step=step,
        whole=whole,
        guard=guard,
        samples=samples,
        micro_batches=micro_batches,
        batches=while_checking(batches, [*sources, *validation_sources], folder.data_cache, ranks),
        validator=validator,
        checkpoints=checkpoints,
        average=average,
        progress=progress,
        steps=steps,
        metrics=metrics,
        phase=phase,
        after_update=after_update,
        observers=[*parts.observers(observed)],
    )


def build_data(
    config: Config,
    resolved: "ResolvedConfig",
    *,
    cache_folder: Path,
    world: dist.ProcessGroup,
    prepare_text: PrepareText | None,
) -> tuple[Samples, list[Source]]:
    """Open the data, which must be the same on all ranks: samples of training, and the sources of validation."""
    samples, validation_sources = open_data(
        config.data,
        config.validation,
        seq_len=config.training.seq_len,
        seed=config.debug.seed,
        tokenizer=resolved.tokenizer,
        cache_folder=cache_folder,
        group=world,
        prepare_text=prepare_text,
    )
    check_same_everywhere(str(samples.settings()), "the training data", group=world)
    if resolved.tasks:
        check_same_everywhere(str([task.fingerprint for task in resolved.tasks]), "validation.tasks", group=world)
    if targets := resolved.targets:
        check_same_everywhere(str(targets.settings), targets.title, group=world)
    return samples, validation_sources


def build_model(
    config: Config,
    resolved: "ResolvedConfig",
    *,
    mesh: DeviceMesh,
    kernels: Kernels,
    device: torch.device,
    memory: StateMemory | None,
    phase: CurrentPhase,
) -> tuple[Model, Model]:
    """Build the model on the meta device, parallelize it, and give it memory and values; return also the uncut."""
    training = config.training
    model = resolved.model.build()
    phase.phase(Phase.SHARDING)
    parallelize(model, config, mesh=mesh, kernels=kernels)
    whole = model
    if model.stages:
        whole = resolved.model.build()
        choose_trained(whole, config)
    materialize(
        model,
        device=device,
        dtype=DTYPES[training.dtype],
        seed=config.debug.seed,
        on_host="parameters" in places(config),
        memory=memory,
    )
    return model, whole


def build_checkpoints(
    config: Config,
    resolved: "ResolvedConfig",
    *,
    folder: RunFolder,
    mesh: DeviceMesh,
    device: torch.device,
    model: Model,
    optimizer: torch.optim.Optimizer,
    average: "WeightAverage | None",
    samples: Samples,
    whole_config: str,
    memory: StateMemory | None,
    open_weights: OpenWeights | None,
) -> CheckpointManager:
    spec, allow_changes = resolved.model, config.checkpoint.allow_changes

    def settings(samples_seen: int) -> dict[str, Any]:
        inputs = {**samples.settings(samples_seen), **(resolved.targets.settings if resolved.targets else {})}
        return resume_settings(config, model_args=spec.args, inputs=inputs)

    return CheckpointManager(
        config.checkpoint,
        storage=open_storage(config.checkpoint.folder or str(folder.checkpoints), owner=folder.run_id),
        model=model,
        optimizer=optimizer,
        average=average.tensors if average else None,
        mesh=mesh,
        device=device,
        settings=settings,
        may_change=["data.*"] if config.data.on_change != "error" else [],
        whole_config=whole_config,
        timeout_seconds=config.comm.save_timeout_seconds,
        flush=memory.flush if memory else None,
        open_weights=(lambda path: open_weights(path, spec, allow_changes)) if open_weights else None,
    )


def build_batches(
    config: Config,
    samples: Samples,
    progress: Progress,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    lengths: SequenceLengths,
    split: Callable[[Batch], Batch],
) -> tuple[MicroBatches, Generator[Batch, None, None]]:
    """Return which samples each step of this rank takes, and the loader of their batches."""
    training, (rank, ranks) = config.training, data_parallel_rank(mesh)
    micro_batches = MicroBatches(
        progress.samples_seen,
        sizes=BatchSizes.of(training),
        micro_batch_size=training.batch_split(ranks)[0],
        rank=rank,
        ranks=ranks,
        step=progress.step,
        together=mesh["shard"].size() if config.debug.reproducible_layouts else 1,
    )
    dataset = samples
    if training.seq_len_ramp:
        from titanlite.data.shorter import ShorterSequences

        dataset = ShorterSequences(samples, lengths)
    return micro_batches, build_loader(
        dataset, micro_batches, num_workers=config.data.num_workers, device=device, split=split
    )


def build_validator(
    config: Config,
    resolved: "ResolvedConfig",
    sources: list[Source],
    *,
    mesh: DeviceMesh,
    kernels: Kernels,
    device: torch.device,
    parts: Parts,
) -> Validator:
    rank, ranks = data_parallel_rank(mesh)
    return Validator(
        config.validation,
        sources,
        resolved.tasks,
        seq_len=config.training.seq_len,
        multiple_of=2 * config.sequence_parts,
        batch_size=config.training.batch_split(ranks)[0],
        token_bytes=resolved.tokenizer.token_bytes(),
        kernels=kernels,
        vocabulary=parts.vocabulary,
        device=device,
        rank=rank,
        ranks=ranks,
        group=loss_group(mesh),
        split=parts.batch,
    )


def flops_counter(
    models: "Sequence[Model | FrozenModel]", lengths: SequenceLengths
) -> Callable[[int, int, bool], float]:
    """Return (first, end, causal) -> mean FLOPs of a token in some models, over the samples from first to end - 1."""

    @cache
    def flops_at(length: int, causal: bool) -> float:  # a model counts its parameters for it
        return sum(model.flops_per_token(length, causal=causal) for model in models)

    return lambda first, end, causal: lengths.mean(first, end, lambda length: flops_at(length, causal))


def train(run: Run, stop_requests: StopRequests | None = None) -> RunStopped | None:
    """Train from the run's progress to its last step.

    Args:
        stop_requests: asked in every step.

    Returns:
        why the run stopped before its last step; None if it did not.
    """
    report_start(
        run.config,
        model=run.model,
        whole=run.whole,
        optimizer=run.optimizer,
        mesh=run.mesh,
        samples=run.samples,
        progress=run.progress,
        accumulation=run.accumulation,
        steps=run.steps,
    )
    try:
        _loop(run, stop_requests or StopRequests())
    except (StoppedBySignal, StoppedByGuard) as stopped:
        run.phase.phase(Phase.CHECKPOINT)
        if isinstance(stopped, StoppedByGuard):
            run.metrics.record_skipped(stopped.skipped, run.micro_batches, run.samples)
        if not (isinstance(stopped, StoppedByGuard) and stopped.in_part):
            run.checkpoints.save_if_newer(_progress(run, stopped.taken))
        return stopped
    run.phase.phase(Phase.END)
    return None


def _loop(run: Run, stop_requests: StopRequests) -> None:
    config, metrics = run.config, run.metrics
    run.after_update()
    metrics.clock.follow(run.model)
    observer = Observers(*run.observers, run.phase)
    stop = AgreedStop(stop_requests, torch.device(run.mesh.device_type))
    for step in range(run.progress.step + 1, run.steps + 1):
        observer.begin_step(step)
        batches = list(islice(run.batches, run.micro_batches.count(step)))
        metrics.begin_step(step, last=step == run.steps)
        seed_step(config.debug.seed, step, run.ranks.rank)
        lr = _learning_rate(run, step)
        set_learning_rate(run.optimizer, lr)
        result = run.step(batches, decide=run.guard.decide, stop_flag=stop.flag(), on_phase=observer.phase)
        if run.average:
            run.average.update(step, result.skip_reason)
        observer.phase(Phase.METRICS)
        run.after_update()
        if step == run.progress.step + 1:
            freeze_garbage_collector()
        _after_step(run, step, result, lr=lr, stop=stop, stop_requests=stop_requests, observer=observer)


def _after_step(
    run: Run,
    step: int,
    result: StepResult,
    *,
    lr: float,
    stop: AgreedStop,
    stop_requests: StopRequests,
    observer: StepObserver,
) -> None:
    """Record the step, then validate and save where that is due.

    Raises:
        StoppedBySignal, StoppedByGuard: the run stops after this step.
    """
    metrics, checkpoints, validator, last = run.metrics, run.checkpoints, run.validator, step == run.steps
    samples = _samples_seen(run, step)
    metrics.end_step(step, result, lr=lr, samples=samples, shares=partial(run.samples.shares, samples), last=last)
    metrics.record_saves(checkpoints.watch())
    run.guard.remember(step, result)
    config, stops = run.config, stop.is_agreed(result.stop_flags) and not last
    saves = config.checkpoint.enable and is_due(step, config.checkpoint.interval, last=last)
    if saves or stops or metrics.records(step, last=last):
        metrics.record_skipped(run.guard.check(run.step.world), run.micro_batches, run.samples)
    if stops:
        raise stop_requests.stopped(step)
    if config.validation.enable and is_due(step, config.validation.freq, last=last):
        with metrics.not_training(waits_for_device=True), checkpoints.not_training():

            def measure() -> dict[str, Any] | None:
                observer.phase(Phase.VALIDATION)  # each has its whole timeout
                return validator.run(run.model, stops=stop.is_asked if not last else None)

            if record := measure():
                checkpoints.wait_until_staged()
                record |= run.average.measured(measure) if run.average else {}
                metrics.record_validation(step, record)
    if saves:
        with metrics.not_training(waits_for_device=not checkpoints.is_background):
            observer.phase(Phase.CHECKPOINT)
            checkpoints.save(_progress(run, step), last=last)


def _learning_rate(run: Run, step: int) -> float:
    scheduler, peak = run.config.lr_scheduler, run.config.optimizer.lr
    if not scheduler.counts_tokens:
        return learning_rate(step, peak=peak, end=run.steps, config=scheduler)
    before, position, end = (
        _samples_seen(run, number) * run.config.training.seq_len for number in (step - 1, step, run.steps)
    )
    return learning_rate(position, peak=peak, end=end, size=position - before, config=scheduler)


def _samples_seen(run: Run, step: int) -> int:
    return run.micro_batches.first_of(step + 1)


def _progress(run: Run, step: int) -> Progress:
    """Return the progress at the end of a step of this start."""
    samples = _samples_seen(run, step)
    return Progress(step, samples, run.samples.state(samples), run.guard.state() | run.step.checkpoint_state())


def finish(run: Run, stopped: RunStopped | None = None) -> None:
    """Close all files and workers, and report where everything is."""
    gc.unfreeze()
    run.batches.close()
    Observers(*run.observers).close()
    run.metrics.record_saves(run.checkpoints.finish())
    run.metrics.close()
    report_end(
        run.config,
        steps=run.steps,
        folder=run.folder,
        checkpoints=run.checkpoints.storage,
        resumed_at=run.progress.step,
        stopped=stopped,
        seconds=phase_seconds(run.phase),
    )
