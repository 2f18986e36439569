"""Training: the loop over optimizer steps."""

import gc
from functools import partial
from itertools import islice

import torch

from titanlite.build import Run
from titanlite.checkpoint.manager import Progress
from titanlite.guard import StoppedByGuard
from titanlite.metrics.clock import phase_seconds
from titanlite.metrics.run_summary import report_end, report_start
from titanlite.observer import Observers, Phase
from titanlite.optim import set_learning_rate
from titanlite.run.stop import AgreedStop
from titanlite.runtime.errors import RunStopped
from titanlite.runtime.process_group import freeze_garbage_collector, seed_step
from titanlite.runtime.signals import StoppedBySignal, StopRequests
from titanlite.schedule import learning_rate
from titanlite.step import train_step
from titanlite.techniques.distill.divergence import cached_output
from titanlite.techniques.float8 import weight_scaler


def train(run: Run, stop_requests: StopRequests | None = None) -> RunStopped | None:
    """Train from the run's progress to its last step.

    Args:
        stop_requests: asked in every step.

    Returns:
        the reason, where a rule of the config or a request stopped the run earlier.
    """
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
    try:
        with run.metrics.shown(str(run.config.job.name), steps=run.steps, step=run.progress.step):
            _loop(run, stop_requests or StopRequests())
    except StoppedBySignal as stopped:
        run.phase.phase(Phase.CHECKPOINT)
        run.checkpoints.save_if_newer(_progress(run, stopped.taken))
        return stopped
    except StoppedByGuard as stopped:
        run.phase.phase(Phase.CHECKPOINT)
        run.metrics.record_skipped(stopped.skipped, run.micro_batches, run.samples)
        if not stopped.in_part:
            run.checkpoints.save_if_newer(_progress(run, stopped.taken))
        return stopped
    run.phase.phase(Phase.END)
    return None


def _loop(run: Run, stop_requests: StopRequests) -> None:
    config, metrics, checkpoints, validator = run.config, run.metrics, run.checkpoints, run.validator
    scale_weights = weight_scaler(run.model, config.quantize.linear.float8)
    scale_weights()
    metrics.clock.follow(run.model)
    observer = Observers(*run.observers, run.phase, metrics.phase_memory)
    stop = AgreedStop(stop_requests, torch.device(run.mesh.device_type))
    samples = run.progress.samples_seen
    for step in range(run.progress.step + 1, run.steps + 1):
        last = step == run.steps
        observer.begin_step(step)
        batches = list(islice(run.batches, run.accumulation))
        metrics.begin_step(step, last=last)
        seed_step(config.debug.seed, step, run.ranks.rank)
        lr = learning_rate(step, peak=config.optimizer.lr, steps=run.steps, config=config.lr_scheduler)
        set_learning_rate(run.optimizer, lr)
        result = train_step(
            run.model,
            batches,
            optimizer=run.optimizer,
            group=run.group,
            world=run.world,
            replicas=run.replicas,
            max_norm=config.training.max_norm,
            loss_function=run.loss_function,
            teacher=cached_output if config.teacher.cache else run.teacher,
            decide=run.guard.decide,
            in_backward=run.in_backward,
            loss_scale=run.guard.loss_scale,
            reduce_once=config.parallelism.fsdp_reduce_gradients == "last",
            stop_flag=stop.flag(),
            observer=observer,
        )
        observer.phase(Phase.METRICS)
        scale_weights()
        if step == run.progress.step + 1:
            freeze_garbage_collector()
        samples += config.training.global_batch_size
        metrics.end_step(step, result, lr=lr, samples=samples, shares=partial(run.samples.shares, samples), last=last)
        metrics.record_saves(checkpoints.watch())
        run.guard.remember(step, result)
        saves, stops = checkpoints.is_due(step, last=last), stop.is_agreed(result.stop_flags) and not last
        if saves or stops or metrics.is_due(step, last=last):
            metrics.record_skipped(run.guard.check(run.world), run.micro_batches, run.samples)
        if stops:
            raise stop_requests.stopped(step)
        if validator.is_due(step, last=last):
            with metrics.not_training(waits_for_device=True), checkpoints.not_training():
                observer.phase(Phase.VALIDATION)
                if record := validator.run(run.model, stops=stop.is_asked if not last else None):
                    metrics.record_validation(step, record)
        if saves:
            with metrics.not_training(waits_for_device=not checkpoints.is_background):
                observer.phase(Phase.CHECKPOINT)
                checkpoints.save(_progress(run, step), last=last)


def _progress(run: Run, step: int) -> Progress:
    """Return the progress at the end of a step of this start."""
    samples = run.progress.samples_seen + (step - run.progress.step) * run.config.training.global_batch_size
    return Progress(step, samples, run.samples.state(samples), run.guard.state())


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
