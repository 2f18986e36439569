"""Training, top to bottom: build the parts of a run, resume, loop over optimizer steps, finish."""

import gc
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.batch import Batch
from titanlite.checkpoint.history import RunHistory, claim
from titanlite.checkpoint.initial import OpenWeights
from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.manifest import Progress
from titanlite.checkpoint.resume import RunSettings, newest_saved, resume_settings
from titanlite.checkpoint.save import build_saver
from titanlite.data.loader import MicroBatches, build_loader
from titanlite.data.samples import Samples, Source
from titanlite.data.sources import PrepareText, open_data
from titanlite.data.tokenizer import byte_sizes
from titanlite.data.verify import while_checking
from titanlite.guard import SpikeFound, StepGuard, StoppedByGuard, rollbacks_of
from titanlite.mesh import build_mesh, data_parallel_rank, loss_group, world_group
from titanlite.metrics.clock import phase_seconds
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.metrics.run_summary import report_end, report_start
from titanlite.models.base import Model
from titanlite.observer import CurrentPhase, Observers, Phase, StepObserver
from titanlite.ops import pick_kernels
from titanlite.ops.kernels import Kernels
from titanlite.optim import build_optimizer, set_learning_rate
from titanlite.parallelize import DTYPES, materialize, parallelize
from titanlite.rollback import after_rollbacks, go_back
from titanlite.run.endings import FAILED
from titanlite.run.records import RecordFile, read_records
from titanlite.run.run_folder import RunFolder, open_run_folder, record_start
from titanlite.run.timeouts import PhaseTimeouts
from titanlite.runtime.console import hide_secrets
from titanlite.runtime.errors import RunStopped
from titanlite.runtime.process_group import Ranks, freeze_garbage_collector, seed_step
from titanlite.runtime.ranks import AgreedStop, check_same_everywhere, on_rank_0
from titanlite.runtime.signals import StoppedBySignal, StopRequests
from titanlite.schedule import BatchSizes, SequenceLengths, count_steps, is_due, learning_rate
from titanlite.schema import Config, Training, dump
from titanlite.state import TrainingState, flat, model_state
from titanlite.step import Step, StepResult, build_step
from titanlite.storage.storage import open_storage
from titanlite.techniques import choose_trained, parts_of, places
from titanlite.techniques.technique import Observed, Parts, nothing
from titanlite.validation import Validator

if TYPE_CHECKING:
    from titanlite.checks.preflight import RunInputs
    from titanlite.models.frozen import FrozenModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all parts of a run are built from."""

    config: Config
    inputs: "RunInputs"
    written: str
    """The config as TOML, without secrets."""
    ranks: Ranks
    device: torch.device
    mesh: DeviceMesh
    kernels: Kernels
    folder: RunFolder
    techniques: Parts
    phase: CurrentPhase


@dataclass(kw_only=True)
class Run:
    """Everything that the training loop works with. A rollback replaces what depends on the progress."""

    setup: Setup
    config: Config
    ranks: Ranks
    folder: RunFolder
    state: TrainingState
    all_stages: Model
    """The model; with a pipeline, one with the stages of all ranks, on the meta device."""
    train_step: Step
    guard: StepGuard
    samples: Samples
    micro_batches: MicroBatches
    batches: Generator[Batch, None, None]
    validator: Validator
    checkpoints: CheckpointManager
    progress: Progress
    """Progress at the start, or after the last rollback: of the checkpoint that the run resumes from."""
    steps: int
    """Steps of the whole run."""
    metrics: MetricsRecorder
    phase: CurrentPhase
    observers: list[StepObserver]
    """Observers of training that the config asks for."""

    @property
    def model(self) -> Model:
        return self.train_step.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.state.optimizer

    @property
    def mesh(self) -> DeviceMesh:
        return self.train_step.mesh

    @property
    def reads_weights(self) -> bool:
        """Whether something reads the weights after each step, and not through FSDP."""
        is_followed = self.state.average is not None or self.state.weights_changed is not nothing
        return is_followed or any(observer.reads_weights for observer in self.observers)

    def samples_at(self, step: int) -> int:
        """Return the samples that the run has seen by the end of a step."""
        return self.micro_batches.first_of(step + 1)

    def continue_at(self, progress: Progress) -> None:
        """Replace what depends on the progress."""
        setup = self.setup
        self.progress = progress
        self.guard.resume(progress.step, progress.guard)
        self.train_step.resume(progress.guard)
        self.micro_batches, self.batches = build_batches(setup, self.samples, self.validator.sources, progress)
        self.steps = steps_of(self.config.training, self.samples, progress)
        self.metrics.go_back(progress.step, steps=self.steps, samples=progress.samples_seen)
        self.observers = build_observers(
            setup, self.train_step, self.checkpoints, self.metrics, progress, steps=self.steps
        )

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches in a step after training.batch_ramp."""
        return self.config.training.batch_split(data_parallel_rank(self.mesh)[1])[1]


def build(
    config: Config,
    inputs: "RunInputs",
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
    phase = phase or PhaseTimeouts(config.comm)
    setup = set_up(config, inputs, ranks=ranks, device=device, phase=phase)
    phase.phase(Phase.DATA_PREPARATION)
    samples, validation_sources = build_data(setup, prepare_text)
    phase.phase(Phase.MODEL)
    model, all_stages = build_model(setup)
    state = build_state(setup, model)
    phase.phase(Phase.CHECKPOINT_LOAD)
    checkpoints = build_checkpoints(setup, state, samples, open_weights)
    progress = checkpoints.load()
    if progress.step:
        progress = replace(progress, samples_seen=samples.convert(progress.samples_seen, progress.data))
        samples = samples.resume(progress.data, progress.samples_seen, config.data.on_change)
        skipped = setup.folder.records("skipped")
        rollbacks = rollbacks_of(read_records(skipped))  # read on rank 0 only
        progress = on_rank_0(world_group(setup.mesh), partial(after_rollbacks, progress, rollbacks, samples))
    record_start(
        setup.folder, setup.written, tokenizer=inputs.tokenizer, step=progress.step, ranks=ranks,
        device=device, mesh=setup.mesh,
    )  # fmt: skip
    guard = StepGuard(
        config.guard,
        device=device,
        step=progress.step,
        state=progress.guard,
        can_go_back=lambda: checkpoints.can_go_back,
    )
    train_step = build_train_step(setup, model, state, guard, progress)
    micro_batches, batches = build_batches(setup, samples, validation_sources, progress)
    steps = steps_of(config.training, samples, progress)
    metrics = build_metrics(setup, all_stages, progress, steps=steps)
    return Run(
        setup=setup,
        config=config,
        ranks=ranks,
        folder=setup.folder,
        state=state,
        all_stages=all_stages,
        train_step=train_step,
        guard=guard,
        samples=samples,
        micro_batches=micro_batches,
        batches=batches,
        validator=build_validator(setup, validation_sources),
        checkpoints=checkpoints,
        progress=progress,
        steps=steps,
        metrics=metrics,
        phase=phase,
        observers=build_observers(setup, train_step, checkpoints, metrics, progress, steps=steps),
    )


def set_up(config: Config, inputs: "RunInputs", *, ranks: Ranks, device: torch.device, phase: CurrentPhase) -> Setup:
    mesh = build_mesh(config.parallelism, world_size=ranks.world_size, device_type=device.type)
    of_run = partial(newest_saved, config.checkpoint, config.job), partial(claim, config.checkpoint)
    folder = open_run_folder(config.job, config.data, ranks.rank, *of_run)
    backend = config.training.attention_backend
    return Setup(
        config=config,
        inputs=inputs,
        written=hide_secrets(dump(config)),
        ranks=ranks,
        device=device,
        mesh=mesh,
        kernels=pick_kernels(device, compiles=config.compile.enable, attention_backend=backend),
        folder=folder,
        techniques=parts_of(config, mesh, folder.path),
        phase=phase,
    )


def build_data(setup: Setup, prepare_text: PrepareText | None) -> tuple[Samples, list[Source]]:
    """Open the data, which must be the same on all ranks: samples of training, and the sources of validation."""
    config, inputs, world = setup.config, setup.inputs, world_group(setup.mesh)
    samples, validation_sources = open_data(
        config.data,
        config.validation,
        seq_len=config.training.seq_len,
        seed=config.debug.seed,
        tokenizer=inputs.tokenizer,
        cache_folder=setup.folder.data_cache,
        group=world,
        prepare_text=prepare_text,
        numbers_tokens=config.training.dropout > 0,
        counts_tokens=inputs.model.model_cls.counts_tokens,
    )
    check_same_everywhere(str(samples.settings()), "the training data", group=world)
    if inputs.tasks:
        check_same_everywhere(str([task.fingerprint for task in inputs.tasks]), "validation.tasks", group=world)
    if targets := inputs.targets:
        check_same_everywhere(str(targets.settings), targets.title, group=world)
    return samples, validation_sources


def build_model(setup: Setup) -> tuple[Model, Model]:
    """Build the model on the meta device, parallelize it, and give it memory and values.

    Returns:
        the model, and the same one; with a pipeline, one with the stages of all ranks, on the meta device.
    """
    config, model = setup.config, setup.inputs.model.build()
    setup.phase.phase(Phase.SHARDING)
    parallelize(model, config, mesh=setup.mesh, kernels=setup.kernels)
    all_stages = model
    if model.stages:
        all_stages = setup.inputs.model.build()
        choose_trained(all_stages, config)
    materialize(
        model,
        device=setup.device,
        dtype=DTYPES[config.training.dtype],
        seed=config.debug.seed,
        on_host="parameters" in places(config),
        memory=setup.techniques.memory,
    )
    return model, all_stages


def build_state(setup: Setup, model: Model) -> TrainingState:
    """Build the optimizer, and what follows the weights."""
    config, techniques, memory = setup.config, setup.techniques, setup.techniques.memory
    setup.phase.phase(Phase.OPTIMIZER)
    reproducible, on_host = config.debug.reproducible_layouts, "parameters" in places(config)
    optimizer = build_optimizer(
        model,
        config.optimizer,
        seed=config.debug.seed,
        memory=memory,
        fused=(setup.device.type == "cuda" and not on_host) or not reproducible,
        reproducible=reproducible,
        kernels=setup.kernels,
    )
    weights_changed = techniques.after_update(model)
    return TrainingState(
        model=model,
        optimizer=optimizer,
        outer=techniques.outer(model) if techniques.outer else None,
        average=techniques.average(model, memory, weights_changed) if techniques.average else None,
        updates=techniques.updates(model, optimizer, setup.device),
        weights_changed=weights_changed,
        flush=memory.flush if memory else None,
    )


def build_checkpoints(
    setup: Setup, state: TrainingState, samples: Samples, open_weights: OpenWeights | None
) -> CheckpointManager:
    config, inputs, folder = setup.config, setup.inputs, setup.folder
    spec, allow_changes = inputs.model, config.checkpoint.allow_changes

    def settings(samples_seen: int) -> dict[str, Any]:
        of_targets = inputs.targets.settings.items() if inputs.targets else ()
        of_inputs = {**samples.settings(samples_seen), **dict(of_targets)}
        return resume_settings(config, model_args=spec.args, inputs=of_inputs)

    storage = open_storage(config.checkpoint.folder or str(folder.checkpoints), owner=folder.run_id)
    history = RunHistory(storage, folder.earlier, config.checkpoint.load_step, folder.has_saved)
    of_run = RunSettings(
        settings,
        may_change=[*allow_changes, *(["data.*"] if config.data.on_change != "error" else [])],
        model=model_state(state.model),
        is_cut=state.is_cut,
        layout=dict(zip(setup.mesh.mesh_dim_names or (), setup.mesh.shape, strict=True)),
    )
    seconds = config.comm.save_timeout_seconds
    saver = build_saver(
        config.checkpoint, storage, setup.device, flush=state.flush, whole_config=setup.written, timeout_seconds=seconds
    )
    copies = None
    if config.checkpoint.local_interval:
        from titanlite.checkpoint.local import build_copies  # few runs make copies

        copies = build_copies(state, shared=saver, history=history, settings=of_run, timeout_seconds=seconds)
    return CheckpointManager(
        config.checkpoint,
        state,
        saver=saver,
        history=history,
        settings=of_run,
        copies=copies,
        open_weights=(lambda path: open_weights(path, spec, allow_changes)) if open_weights else None,
    )


def build_train_step(setup: Setup, model: Model, state: TrainingState, guard: StepGuard, progress: Progress) -> Step:
    """Build the step, and the model of its targets."""
    config, targets = setup.config, setup.inputs.targets
    if targets:
        from titanlite.parallelize.frozen import build_frozen

        frozen = build_frozen(targets.frozen, config, mesh=setup.mesh, kernels=setup.kernels, device=setup.device)
        targets.use(frozen)
    return build_step(
        config,
        model,
        state.optimizer,
        mesh=setup.mesh,
        kernels=setup.kernels,
        parts=setup.techniques,
        targets=targets,
        state=progress.guard,
        should_skip=guard.should_skip,
        updates=state.updates,
    )


def build_batches(
    setup: Setup, samples: Samples, validation_sources: Sequence[Source], progress: Progress
) -> tuple[MicroBatches, Generator[Batch, None, None]]:
    """Return which samples each step of this rank takes, and the loader of their batches, which checks all sources."""
    config, training, (rank, ranks) = setup.config, setup.config.training, data_parallel_rank(setup.mesh)
    micro_batches = MicroBatches(
        progress.samples_seen,
        sizes=BatchSizes.of(training),
        micro_batch_size=training.batch_split(ranks)[0],
        rank=rank,
        ranks=ranks,
        step=progress.step,
        together=setup.mesh["shard"].size() if config.debug.reproducible_layouts else 1,
    )
    dataset = samples
    if training.seq_len_ramp:
        from titanlite.data.shorter import ShorterSequences

        dataset = ShorterSequences(samples, SequenceLengths.of(training, samples=progress.samples_seen))
    workers, split = config.data.num_workers, setup.techniques.batch
    batches = build_loader(dataset, micro_batches, num_workers=workers, device=setup.device, split=split)
    sources = [*samples.sources, *validation_sources]
    return micro_batches, while_checking(batches, sources, setup.folder.data_cache, setup.ranks)


def steps_of(training: Training, samples: Samples, progress: Progress) -> int:
    """Return the steps of the whole run."""
    limit = samples.limit(training.epochs) if training.epochs else None
    return count_steps(training, step=progress.step, samples=progress.samples_seen, limit=limit)


def build_validator(setup: Setup, sources: list[Source]) -> Validator:
    config, (rank, ranks) = setup.config, data_parallel_rank(setup.mesh)
    return Validator(
        config.validation,
        sources,
        setup.inputs.tasks,
        seq_len=config.training.seq_len,
        multiple_of=2 * config.sequence_parts,
        batch_size=config.training.batch_split(ranks)[0],
        token_bytes=byte_sizes(setup.inputs.tokenizer),
        kernels=setup.kernels,
        vocabulary=setup.techniques.vocabulary,
        device=setup.device,
        rank=rank,
        ranks=ranks,
        group=loss_group(setup.mesh),
        split=setup.techniques.batch,
    )


def build_metrics(setup: Setup, all_stages: Model, progress: Progress, *, steps: int) -> MetricsRecorder:
    training, targets = setup.config.training, setup.inputs.targets
    models = [all_stages, targets.frozen] if targets else [all_stages]
    return MetricsRecorder(
        setup.config.metrics,
        folder=setup.folder,
        step=progress.step,
        steps=steps,
        seq_len=training.seq_len,
        samples=progress.samples_seen,
        flops_per_token=flops_counter(models, SequenceLengths.of(training, samples=progress.samples_seen)),
        device=setup.device,
        compute_type=training.mixed_precision_param,
        group=world_group(setup.mesh),
        phase=setup.phase,
    )


def build_observers(
    setup: Setup,
    train_step: Step,
    checkpoints: CheckpointManager,
    metrics: MetricsRecorder,
    progress: Progress,
    *,
    steps: int,
) -> list[StepObserver]:
    folder, ranks = setup.folder.path, setup.ranks
    observed = Observed(
        model=train_step.model,
        replicas=train_step.replicas,
        mesh=setup.mesh,
        ranks=ranks,
        device=setup.device,
        steps=steps,
        open_records=lambda name: RecordFile(folder / name, progress.step) if ranks.rank == 0 else None,
        paused=metrics.paused,
        state=lambda: flat(checkpoints.state.tensors()),
    )
    return [*setup.techniques.observers(observed)]


def flops_counter(
    models: "Sequence[Model | FrozenModel]", lengths: SequenceLengths
) -> Callable[[int, int, bool], float]:
    """Return (first, end, causal) -> mean FLOPs of a token in some models, over the samples from first to end - 1."""

    @cache
    def flops_at(length: int, causal: bool) -> float:  # cached: counting parameters is slow
        return sum(model.flops_per_token(length, causal=causal) for model in models)

    return lambda first, end, causal: lengths.mean(first, end, lambda length: flops_at(length, causal))


def train(run: Run, stop_requests: StopRequests | None = None) -> RunStopped | None:
    """Train from the run's progress to its last step.

    Args:
        stop_requests: signals that ask to stop. The run asks for them at every step.

    Returns:
        why the run stopped before its last step; None if it did not.
    """
    report_start(
        run.config,
        model=run.model,
        whole=run.all_stages,
        optimizer=run.optimizer,
        mesh=run.mesh,
        samples=run.samples,
        progress=run.progress,
        accumulation=run.accumulation,
        steps=run.steps,
        listens=stop_requests is not None,
    )
    try:
        with ExitStack() as end:
            end.callback(run.state.finish)
            run.metrics.clock.follow(run.model)
            while spike := _loop_until_spike(run, stop_requests or StopRequests()):
                go_back(run, spike)
    except StoppedBySignal as stopped:
        run.phase.phase(Phase.CHECKPOINT)
        run.checkpoints.save_if_newer(_progress(run, stopped.taken))
        return stopped
    except StoppedByGuard as stopped:
        run.phase.phase(Phase.CHECKPOINT)
        run.metrics.record_skipped(stopped.skipped, run.micro_batches, run.samples)
        # Not a state in which some parameters alone are of a later step, not one from before this start, and not one
        # before a spike, which an empty window would let pass.
        if not (stopped.in_part or isinstance(stopped, SpikeFound)) and stopped.taken >= run.progress.step:
            run.checkpoints.save_if_newer(_progress(run, stopped.taken))
        return stopped
    except Exception:
        run.metrics.close(FAILED)
        raise
    run.phase.phase(Phase.END)
    return None


def _loop_until_spike(run: Run, stop_requests: StopRequests) -> SpikeFound | None:
    """Return the spike over which the run goes back; None at the end of the run."""
    try:
        _loop(run, stop_requests)
    except SpikeFound as spike:
        if run.guard.rollbacks >= run.config.guard.max_rollbacks:
            raise
        return spike.with_traceback(None)  # the traceback would keep the last batches alive
    return None


def _loop(run: Run, stop_requests: StopRequests) -> None:
    config, metrics = run.config, run.metrics
    run.state.begin()
    observer, leaves_updates = Observers(*run.observers, run.phase), not run.reads_weights
    stop = AgreedStop(stop_requests, torch.device(run.mesh.device_type))
    if run.checkpoints.owes_save:  # of the copy's own step, as every copy and checkpoint is of a due step
        run.phase.phase(Phase.CHECKPOINT)
        run.checkpoints.save(_progress(run, run.progress.step), last=False)
    for step in range(run.progress.step + 1, run.steps + 1):
        observer.begin_step(step)
        batches = list(islice(run.batches, run.micro_batches.count(step)))
        metrics.begin_step(step, last=step == run.steps)
        seed_step(config.debug.seed, step, run.ranks.rank)
        lr = _learning_rate(run, step)
        set_learning_rate(run.optimizer, lr)
        result = run.train_step(
            batches,
            decide=run.guard.decide,
            stop_flag=stop.flag(),
            on_phase=observer.phase,
            leaves_updates=leaves_updates,
        )
        run.state.end_step(step, result.skip_reason)
        observer.phase(Phase.METRICS)
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
        StoppedBySignal, StoppedByGuard: the run stops after this step, or goes back.
    """
    metrics, checkpoints, validator, last = run.metrics, run.checkpoints, run.validator, step == run.steps
    samples = run.samples_at(step)
    metrics.end_step(step, result, lr=lr, samples=samples, shares=partial(run.samples.shares, samples), last=last)
    metrics.record_saves(checkpoints.watch())
    run.guard.remember(step, result)
    is_agreed = stop.is_agreed(result.stop_flags)  # collective; on a GPU, of the step before
    config, stops = run.config, is_agreed and not last
    saves = config.checkpoint.enable and is_due(step, config.checkpoint.interval, last=last)
    copies = config.checkpoint.local_interval and not last and step % config.checkpoint.local_interval == 0
    if saves or copies or stops or metrics.records(step, last=last):
        skipped = run.guard.check(run.train_step.world)  # waits for the device, and raises StoppedByGuard
        metrics.record_skipped(skipped, run.micro_batches, run.samples)
    if stops:
        raise stop_requests.stopped(step)
    if config.validation.enable and is_due(step, config.validation.freq, last=last):
        with metrics.not_training(waits_for_device=True), checkpoints.not_training():

            def measure() -> dict[str, Any] | None:
                observer.phase(Phase.VALIDATION)  # each has its whole timeout
                return validator.run(run.model, stops=stop.is_asked if not last else None)

            if record := measure():
                checkpoints.wait_until_staged()  # the average takes the place of the weights
                average = run.state.average
                record |= average.measured(measure) if average else {}
                metrics.record_validation(step, record)
    if saves:
        with metrics.not_training(waits_for_device=not checkpoints.is_background):
            observer.phase(Phase.CHECKPOINT)
            checkpoints.save(_progress(run, step), last=last)
    if copies:
        checkpoints.copy(_progress(run, step), is_target=config.guard.on_spike == "rollback")


def _learning_rate(run: Run, step: int) -> float:
    scheduler, peak = run.config.lr_scheduler, run.config.optimizer.lr
    if not scheduler.counts_tokens:
        return learning_rate(step, peak=peak, end=run.steps, config=scheduler)
    before, position, end = (
        run.samples_at(number) * run.config.training.seq_len for number in (step - 1, step, run.steps)
    )
    return learning_rate(position, peak=peak, end=end, size=position - before, config=scheduler)


def _progress(run: Run, step: int) -> Progress:
    """Return the progress at the end of a step."""
    samples = run.samples_at(step)
    return Progress(step, samples, run.samples.state(samples), run.guard.state() | run.train_step.checkpoint_state())


def finish(run: Run, stopped: RunStopped | None = None) -> None:
    """Close all files and workers, and report where everything is."""
    gc.unfreeze()
    run.batches.close()
    Observers(*run.observers).close()
    run.metrics.record_saves(run.checkpoints.finish())
    run.metrics.close(stopped.exit_code if stopped else 0)
    report_end(
        run.config,
        steps=run.steps,
        folder=run.folder,
        checkpoints=run.checkpoints.storage,
        resumed_at=run.progress.step,
        stopped=stopped,
        seconds=phase_seconds(run.phase),
    )
