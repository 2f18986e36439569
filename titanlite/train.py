"""Training, top to bottom: build the parts of a run, resume, loop over optimizer steps, finish."""

import gc
import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.after_step import AfterStep, CopyLocally, EndedStep, Save, Validate
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
from titanlite.guard import Rollback, SkippedStep, SpikeFound, StepGuard, StoppedByGuard, rollbacks_of
from titanlite.mesh import build_mesh, data_parallel_rank, loss_group, world_group
from titanlite.metrics.clock import phase_seconds
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.metrics.run_summary import report_end, report_start
from titanlite.models.base import Model
from titanlite.observer import CurrentPhase, Observers, Phase
from titanlite.ops import pick_kernels
from titanlite.ops.kernels import Kernels
from titanlite.optim import build_optimizer, set_learning_rate
from titanlite.parallelize import DTYPES, materialize, parallelize
from titanlite.position import Position
from titanlite.rollback import after_rollbacks
from titanlite.run.endings import FAILED
from titanlite.run.records import RecordFile, read_records
from titanlite.run.run_folder import RunFolder, open_run_folder, record_start
from titanlite.run.timeouts import PhaseTimeouts
from titanlite.runtime.console import hide_secrets
from titanlite.runtime.errors import RunStopped
from titanlite.runtime.process_group import Ranks, freeze_garbage_collector, seed_step
from titanlite.runtime.ranks import AgreedStop, check_same_everywhere, on_rank_0
from titanlite.runtime.signals import StoppedBySignal, StopRequests
from titanlite.schedule import BatchSizes, SequenceLengths, count_steps, learning_rate
from titanlite.schema import Config, Training, dump
from titanlite.state import TrainingState, flat, model_state
from titanlite.step import Step, build_step
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
    """Everything that the training loop works with."""

    setup: Setup
    state: TrainingState
    all_stages: Model
    """The model; with a pipeline, one with the stages of all ranks, on the meta device."""
    train_step: Step
    guard: StepGuard
    validator: Validator
    checkpoints: CheckpointManager
    metrics: MetricsRecorder
    after_step: list[AfterStep]
    """What happens after a step where it is due, in this order."""
    position: Position
    """A rollback replaces it, and nothing else."""

    @property
    def config(self) -> Config:
        return self.setup.config

    @property
    def folder(self) -> RunFolder:
        return self.setup.folder

    @property
    def model(self) -> Model:
        return self.train_step.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.state.optimizer

    @property
    def batches(self) -> Generator[Batch, None, None]:
        """This rank's micro-batches, on its device."""
        return self.position.batches

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches in a step after training.batch_ramp."""
        return self.config.training.batch_split(data_parallel_rank(self.setup.mesh)[1])[1]


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
    phase.enter(Phase.DATA_PREPARATION)
    samples, validation_sources = build_data(setup, prepare_text)
    phase.enter(Phase.MODEL)
    model, all_stages = build_model(setup)
    state = build_state(setup, model)
    phase.enter(Phase.CHECKPOINT_LOAD)
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
    validator = build_validator(setup, validation_sources)
    metrics = build_metrics(setup, all_stages, progress, steps=steps_of(config.training, samples, progress))
    return Run(
        setup=setup,
        state=state,
        all_stages=all_stages,
        train_step=train_step,
        guard=guard,
        validator=validator,
        checkpoints=checkpoints,
        metrics=metrics,
        after_step=[
            Validate(config.validation, validator, state, checkpoints, metrics),
            Save(config.checkpoint, checkpoints, metrics),
            CopyLocally(config.checkpoint, checkpoints, is_target=config.guard.on_spike == "rollback"),
        ],
        position=build_position(setup, samples, validation_sources, progress, train_step, state, metrics),
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
    setup.phase.enter(Phase.SHARDING)
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
    setup.phase.enter(Phase.OPTIMIZER)
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


def build_position(
    setup: Setup,
    samples: Samples,
    validation_sources: Sequence[Source],
    progress: Progress,
    train_step: Step,
    state: TrainingState,
    metrics: MetricsRecorder,
) -> Position:
    """Build what follows from the progress: which samples come, from a loader that checks all sources, and observers of
    the steps from there on."""
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
    steps, folder, is_first = steps_of(training, samples, progress), setup.folder.path, setup.ranks.rank == 0
    observed = Observed(
        model=train_step.model,
        replicas=train_step.replicas,
        mesh=setup.mesh,
        ranks=setup.ranks,
        device=setup.device,
        steps=steps,
        open_records=lambda name: RecordFile(folder / name, progress.step) if is_first else None,
        paused=metrics.paused,
        state=lambda: flat(state.tensors()),
    )
    return Position(
        progress=progress,
        steps=steps,
        samples=samples,
        micro_batches=micro_batches,
        batches=while_checking(batches, [*samples.sources, *validation_sources], setup.folder.data_cache, setup.ranks),
        observers=[*setup.techniques.observers(observed)],
    )


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
    config, position = run.config, run.position
    report_start(
        config,
        model=run.model,
        whole=run.all_stages,
        optimizer=run.optimizer,
        mesh=run.setup.mesh,
        samples=position.samples,
        progress=position.progress,
        accumulation=run.accumulation,
        steps=position.steps,
        listens=stop_requests is not None,
    )
    try:
        with ExitStack() as end:
            end.callback(run.state.finish)
            run.metrics.clock.follow(run.model)
            while spike := _loop_until_spike(run, stop_requests or StopRequests()):
                go_back(run, spike)
    except StoppedBySignal as stopped:
        run.setup.phase.enter(Phase.CHECKPOINT)
        run.checkpoints.save_if_newer(_progress(run, stopped.taken))
        return stopped
    except StoppedByGuard as stopped:
        run.setup.phase.enter(Phase.CHECKPOINT)
        _record_skipped(run, stopped.skipped)
        # Not a state in which some parameters alone are of a later step, not one from before this start, and not one
        # before a spike, which an empty window would let pass.
        if not (stopped.in_part or isinstance(stopped, SpikeFound)) and stopped.taken >= run.position.progress.step:
            run.checkpoints.save_if_newer(_progress(run, stopped.taken))
        return stopped
    except Exception:
        run.metrics.close(FAILED)
        raise
    run.setup.phase.enter(Phase.END)
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
    config, position, metrics = run.config, run.position, run.metrics
    observer, leaves_updates = Observers(*position.observers, run.setup.phase), not _reads_weights(run)
    stop, first = AgreedStop(stop_requests, torch.device(run.setup.mesh.device_type)), position.progress.step + 1
    run.state.begin()
    if run.checkpoints.owes_save:  # of the copy's own step, as every copy and checkpoint is of a due step
        observer.on_phase(Phase.CHECKPOINT)
        run.checkpoints.save(_progress(run, position.progress.step), last=False)
    for step in range(first, position.steps + 1):
        observer.begin_step(step)
        batches = position.next_batches(step)
        last = step == position.steps
        metrics.begin_step(step, last=last)
        seed_step(config.debug.seed, step, run.setup.ranks.rank)
        lr = _learning_rate(config, position, step)
        set_learning_rate(run.optimizer, lr)
        result = run.train_step(
            batches,
            decide=run.guard.decide,
            stop_flag=stop.flag(),
            on_phase=observer.on_phase,
            leaves_updates=leaves_updates,
        )
        run.state.end_step(step, result.skip_reason)
        observer.on_phase(Phase.METRICS)
        if step == first:
            freeze_garbage_collector()
        samples = position.samples_at(step)
        shares = partial(position.samples.shares, samples)
        metrics.end_step(step, result, lr=lr, samples=samples, shares=shares, last=last)
        metrics.record_saves(run.checkpoints.watch())
        run.guard.remember(step, result)
        is_agreed = stop.is_agreed(result.stop_flags)  # collective; on a GPU, of the step before
        stops, due = is_agreed and not last, [task for task in run.after_step if task.is_due(step, last=last)]
        if due or stops or metrics.records(step, last=last):
            _record_skipped(run, run.guard.check(run.train_step.world))  # waits for the device; raises StoppedByGuard
        if stops:
            raise stop_requests.stopped(step)
        ended = EndedStep(
            number=step,
            is_last=last,
            progress=partial(_progress, run, step),
            on_phase=observer.on_phase,
            is_stop_asked=stop.is_asked,
        )
        for task in due:
            task.run(ended)


def _reads_weights(run: Run) -> bool:
    """Return whether something reads the weights after each step, and not through FSDP."""
    is_followed = run.state.average is not None or run.state.weights_changed is not nothing
    return is_followed or any(observer.reads_weights for observer in run.position.observers)


def _learning_rate(config: Config, position: Position, step: int) -> float:
    scheduler, peak = config.lr_scheduler, config.optimizer.lr
    if not scheduler.counts_tokens:
        return learning_rate(step, peak=peak, end=position.steps, config=scheduler)
    before, now, end = (
        position.samples_at(number) * config.training.seq_len for number in (step - 1, step, position.steps)
    )
    return learning_rate(now, peak=peak, end=end, size=now - before, config=scheduler)


def _progress(run: Run, step: int) -> Progress:
    """Return the progress at the end of a step."""
    return run.position.progress_at(step, run.guard.state() | run.train_step.checkpoint_state())


def _record_skipped(run: Run, skipped: Iterable[SkippedStep]) -> None:
    run.metrics.record_skipped(skipped, run.position.micro_batches, run.position.samples)


def go_back(run: Run, spike: SpikeFound) -> None:
    """Return to the newest checkpoint, which is from before the spike, and continue with the samples after its step.

    All is as in a start that resumes there, with the window and the counts of the checkpoint. The decision is among the
    records of skipped steps, where each start finds it. One that is lost is made again, because training comes to the
    same spike.
    """
    config, position, last = run.config, run.position, spike.skipped[-1]
    gc.unfreeze()
    position.close()
    run.setup.phase.enter(Phase.CHECKPOINT_LOAD)
    loaded = run.checkpoints.go_back()
    loaded = replace(loaded, samples_seen=position.samples.convert(loaded.samples_seen, loaded.data))
    seen = position.samples_at(last.step)
    decision = Rollback(loaded.step, loaded.saved_at, seen, run.guard.rollbacks + 1, config.training.seq_len)
    _record_skipped(run, [*spike.skipped[:-1], replace(last, rollback=decision)])
    logger.warning(
        f"back to step {loaded.step}, over the spike of step {last.step}: the sequences {loaded.samples_seen:,} to "
        f"{decision.samples - 1:,} are left out (rollback {decision.rollbacks} of {config.guard.max_rollbacks})"
    )
    samples = position.samples.resume(loaded.data, loaded.samples_seen, config.data.on_change)
    progress = after_rollbacks(loaded, [decision], samples)
    run.guard.resume(progress.step, progress.guard)
    run.train_step.resume(progress.guard)
    run.position = build_position(
        run.setup, samples, run.validator.sources, progress, run.train_step, run.state, run.metrics
    )
    run.metrics.go_back(progress.step, steps=run.position.steps, samples=progress.samples_seen)


def finish(run: Run, stopped: RunStopped | None = None) -> None:
    """Close all files and workers, and report where everything is."""
    gc.unfreeze()
    run.position.close()
    run.metrics.record_saves(run.checkpoints.finish())
    run.metrics.close(stopped.exit_code if stopped else 0)
    report_end(
        run.config,
        steps=run.position.steps,
        folder=run.folder,
        checkpoints=run.checkpoints.storage,
        resumed_at=run.position.progress.step,
        stopped=stopped,
        seconds=phase_seconds(run.setup.phase),
    )
