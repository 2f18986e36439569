"""Metrics of a run: measured over the steps since the last record, and written at log steps.

Time of checkpoints, validation and compilation is not step time. The host waits for the device at log steps only.
"""

import logging
import math
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from titanlite.data.loader import MicroBatches
from titanlite.data.samples import Samples
from titanlite.guard import SkippedStep
from titanlite.metrics.clock import StepClock, phase_seconds
from titanlite.metrics.durations import format_seconds
from titanlite.metrics.loggers import Loggers
from titanlite.metrics.progress_line import ProgressLine
from titanlite.metrics.rank_watch import RankMetrics, RankWatch, gather_metrics, slowest_rank
from titanlite.observer import CurrentPhase, Phase
from titanlite.run.records import RecordFile
from titanlite.run.run_folder import RunFolder
from titanlite.runtime.hardware import peak_flops
from titanlite.runtime.private_torch.compiler import compile_seconds, compiled_graphs
from titanlite.runtime.ranks import host_names
from titanlite.schedule import is_due
from titanlite.schema import Metrics
from titanlite.step import StepResult

logger = logging.getLogger(__name__)


# Watch over torch.compile: the time that it takes, and recompiles after the first steps.


COMPILED_AFTER = 2
"""Steps after which nothing should be compiled any more."""


class CompileWatch:
    """Counter of what torch.compile does in this process, step by step. It never imports the compiler."""

    def __init__(self) -> None:
        self._steps = 0
        self._expected, self._expects_more = compiled_graphs(), True
        self._seconds = compile_seconds()

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Exclude a block from the time of steps. Its first compilation is no recompile: validation has no backward."""
        seconds, graphs = compile_seconds(), compiled_graphs()
        yield
        self._seconds += compile_seconds() - seconds
        if (more := compiled_graphs() - graphs) and self._expects_more:
            self._expected, self._expects_more = self._expected + more, False

    def end_step(self) -> None:
        self._steps += 1
        if self._steps <= COMPILED_AFTER:
            self._expected = compiled_graphs()

    def take_seconds(self) -> float:
        """Return the seconds that steps have spent compiling since the last call."""
        before, self._seconds = self._seconds, compile_seconds()
        return max(self._seconds - before, 0.0)

    @property
    def recompiles(self) -> int:
        """Number of graphs compiled after step COMPILED_AFTER of this start."""
        return max(compiled_graphs() - self._expected, 0)


# Memory: its peak, and how often a GPU's allocator ran out of it and tried again.


class Memory:
    """Memory of this rank since the start. Every value is read by the host: nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._warned = 0

    def peak(self) -> float:
        """Return GiB: on a GPU, the most that PyTorch has reserved; on CPU, the most that the process had resident."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device) / 2**30
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

    def retries(self) -> int:
        """Return how often since the start an allocation failed, so that PyTorch freed its cache and tried again."""
        return torch.cuda.memory_stats(self.device)["num_alloc_retries"] if self.device.type == "cuda" else 0

    def warn(self, retries: int, *, step: int) -> None:
        """Log a warning if there are more allocator retries than at the last call.

        Args:
            retries: the largest number of any rank.
        """
        if retries > self._warned:
            logger.warning(
                f"memory: {retries - self._warned} allocator retries up to step {step}: GPU memory is nearly full, and "
                "each retry stops the GPU. Lower training.local_batch_size, or recompute more with "
                "activation_checkpoint.mode (docs/memory.md)"
            )
            self._warned = retries


# Console lines of a step and of a validation.


MUCH_WAITING = 0.01
"""Share of a step that is waiting for data, from which on the console shows it."""


def step_line(record: dict[str, Any], *, steps: int) -> str:
    """Return the line of a record, in 100 columns unless something unusual is in it: waits for data, or compilation.
    metrics.jsonl has all values.

    Args:
        steps: of the whole run.
    """
    left, waits = steps - record["step"], record["data_wait_seconds"] / record["step_seconds"]
    parts = [
        f"step {record['step']:>5}",
        f"loss {record['loss']:.4f}",
        f"distill {record['distill_loss']:.4f}" if "distill_loss" in record else "",
        f"grad_norm {record['grad_norm']:.3f}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
        f"{record['memory_gib']:.3g} GiB",
        f"MFU {record['mfu']:.1%}" if record["mfu"] is not None else f"{record['step_seconds']:.3f} s/step",
        f"{format_seconds(left * record['step_seconds'])} left" if left else "",
        f"data {waits:.1%}" if waits >= MUCH_WAITING else "",
        f"compile {record['compile_seconds']:.1f} s" if "compile_seconds" in record else "",
        f"recompiles {record['recompiles']}" if "recompiles" in record else "",
    ]
    return "  ".join(filter(None, parts))


def validation_line(record: dict[str, Any]) -> str:
    parts = []
    for name, source in record["sources"].items():
        bits = "" if source["bits_per_byte"] is None else f", {source['bits_per_byte']:.4f} bits per byte"
        parts.append(f"{name} {source['loss']:.4f}{bits} ({source['sequences']:,} sequences)")
    for name, task in record.get("tasks", {}).items():
        parts.append(f"{name} {task_text(task)}")
    loss = f" loss {record['loss']:.4f}" if "loss" in record else ""
    average = f"; average of weights {record['average']['loss']:.4f}" if "loss" in record.get("average", {}) else ""
    return f"step {record['step']:>5}  validation{loss}: {'; '.join(parts)}{average}"


def task_text(task: Mapping[str, float]) -> str:
    """Return the metrics of a task, such as acc 0.4200, acc_norm 0.4400 (50 questions)."""
    metrics = ", ".join(f"{metric} {value:.4f}" for metric, value in task.items() if metric != "questions")
    return f"{metrics} ({task['questions']:,} questions)"


class MetricsRecorder:
    """Recorder of a run's metrics, on the console, in JSON lines files and with loggers.

    Args:
        folder: folder of the run. Records of steps after `step`, from a start that was killed, are dropped: they will
            come again.
        step: step at which the run resumes.
        steps: steps of the whole run.
        samples: sequences of `seq_len` tokens that the run has seen before.
        flops_per_token: (first sample, end, causal) -> mean of `Model.flops_per_token` over these samples. Their
            lengths may differ.
        phase: knows the seconds of each phase so far.
    """

    def __init__(
        self,
        config: Metrics,
        *,
        folder: RunFolder,
        step: int,
        steps: int,
        seq_len: int,
        samples: int,
        flops_per_token: Callable[[int, int, bool], float],
        device: torch.device,
        compute_type: str,
        group: dist.ProcessGroup,
        phase: CurrentPhase,
    ) -> None:
        self.config = config
        self.seq_len = seq_len
        self.flops_per_token = flops_per_token
        self.device = device
        self.peak_flops = peak_flops(device, compute_type)
        self._group = group
        self._phase = phase
        self._writes = dist.get_rank(group) == 0
        self._compiling = CompileWatch()
        self.memory = Memory(device)
        self.clock = StepClock(phase, device)
        """Observer of steps and of FSDP's waits."""
        self._hosts = host_names(group)
        self._records = 0
        """Records of this start."""
        if self._writes:
            self._ranks = RankWatch(self._hosts)
            self._skipped = RecordFile(folder.records("skipped"), None)
        self._folder = folder
        self._begin(step, steps=steps, samples=samples)

    def _begin(self, step: int, *, steps: int, samples: int) -> None:
        self.steps, self._samples = steps, samples
        """Steps of the whole run, and sequences that it had seen at the last record."""
        if self._writes:
            self._metrics, self._saves, self._validations = (
                RecordFile(self._folder.records(name), step) for name in ("metrics", "checkpoints", "validation")
            )
            self._loggers = Loggers(self.config.loggers, self._folder.path, step=step)
            self._progress_line = ProgressLine(step=step, steps=steps)

    def go_back(self, step: int, *, steps: int, samples: int) -> None:
        """Continue after an earlier step, as a start that resumes there: records of later steps are dropped.

        Args:
            steps, samples: as of the constructor.
        """
        self.close()
        self._begin(step, steps=steps, samples=samples)
        self.clock.restart()

    @contextmanager
    def not_training(self, *, waits_for_device: bool) -> Iterator[None]:
        """Begin a block that is no training (a checkpoint, a validation). It has a phase of its own, to be called
        within.

        Args:
            waits_for_device: whether the block would wait for work that is queued on a GPU, which is time of steps.
        """
        if waits_for_device and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self._compiling.outside_steps():
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude a block within a step from its time: a trace is written."""
        with self.not_training(waits_for_device=True):
            before = self._phase.position.name
            self._phase.enter(Phase.PROFILING)
            yield
            self._phase.enter(before)

    def records(self, step: int, *, last: bool) -> bool:
        """Return whether to write a record: at log steps, the first and the last."""
        return step == 1 or is_due(step, self.config.log_freq, last=last)

    def begin_step(self, step: int, *, last: bool) -> None:
        """Begin a step, when its data is there. This rank's own time is measured if a record of the step is due."""
        self.clock.begin(is_measured=self.records(step, last=last))

    def end_step(
        self,
        step: int,
        result: StepResult,
        *,
        lr: float,
        samples: int,
        shares: Callable[[], dict[str, float]],
        last: bool,
    ) -> None:
        """Count a step, and write a record if one is due.

        Args:
            samples: number of samples seen so far.
            shares: called at log steps; returns each source's share of the samples.
        """
        self.clock.steps += 1
        self._compiling.end_step()
        if self._writes:
            self._progress_line.end_step(step)
        if not self.records(step, last=last):
            return
        values = [result.loss, result.grad_norm, result.added_loss, result.shard_grad_norm]
        loss, grad_norm, added_loss, shard_grad_norm = torch.stack(values).tolist()
        times = self._times(step, shard_grad_norm, tokens=(samples - self._samples) * self.seq_len)
        tokens_per_second = times["tokens_per_second"] / dist.get_world_size(self._group)
        flops, causal_flops = (
            self.flops_per_token(self._samples, samples, causal) * tokens_per_second for causal in (False, True)
        )
        self._samples = samples
        record = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "added_loss": added_loss,
            "lr": lr,
            "samples": samples,
            **times,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "mfu_causal": causal_flops / self.peak_flops if self.peak_flops else None,
            "data_shares": shares(),
            "phase_seconds": {name: round(seconds, 3) for name, seconds in phase_seconds(self._phase).items()},
            **{name: float(value) for name, value in result.model_metrics.items()},
        }
        if self._writes:
            self._progress_line.record(loss)
            logger.info(step_line(record, steps=self.steps))
            self._metrics.write(record)
            self._loggers.log(record)
        self.clock.restart()

    def _times(self, step: int, grad_norm: float, *, tokens: int) -> dict[str, Any]:
        """Return times and memory of the window: the largest of any rank. Every rank calls it at the same steps.

        Args:
            grad_norm: of this rank's part of the gradients.
            tokens: of the window, on all ranks.
        """
        steps = self.clock.steps
        elapsed, data_wait = self.clock.elapsed(), self.clock.data_wait / steps
        compiled = self._compiling.take_seconds()
        own = RankMetrics(
            own_seconds=self.clock.own_seconds() + data_wait,
            data_wait_seconds=data_wait,
            compile_seconds=compiled,
            compile_minus_elapsed=compiled - elapsed,
            recompiles=self._compiling.recompiles,
            memory_gib=self.memory.peak(),
            num_alloc_retries=self.memory.retries(),
            grad_norm=grad_norm,
        )
        ranks = gather_metrics(own, device=self.device, group=self._group)
        compile_seconds = float(ranks.compile_seconds.max())
        if compile_seconds:  # time of the rank that waited least for others to compile
            elapsed = -float(ranks.compile_minus_elapsed.max())
        retries, recompiles = int(ranks.num_alloc_retries.max()), int(ranks.recompiles.max())
        self._records += 1
        if self._writes:
            self.memory.warn(retries, step=step)
            self._ranks.warn(ranks, step=step, is_steady=self._records > 1 and not compile_seconds)
        return {
            "tokens_per_second": tokens / elapsed,
            "step_seconds": elapsed / steps,
            "data_wait_seconds": float(ranks.data_wait_seconds.max()),
            **slowest_rank(ranks, self._hosts),
            **({"compile_seconds": compile_seconds} if compile_seconds else {}),
            **({"recompiles": recompiles} if recompiles else {}),
            "memory_gib": float(ranks.memory_gib.max()),
            **({"num_alloc_retries": retries} if self.device.type == "cuda" else {}),
        }

    def record_saves(self, saves: Iterable[dict[str, Any]]) -> None:
        """Write a record of each checkpoint that was saved."""
        for record in saves if self._writes else ():
            self._saves.write(record)
            self._loggers.log(record, kind="checkpoints")

    def record_validation(self, step: int, record: dict[str, Any]) -> None:
        """Write the metrics of a validation."""
        record = {"step": step, **record}
        if self._writes:
            logger.info(validation_line(record))
            self._validations.write(record)
            self._loggers.log(record, kind="validation")

    def record_skipped(self, steps: Iterable[SkippedStep], batches: MicroBatches, samples: Samples) -> None:
        """Write a record of each skipped step, with the samples of the micro-batches whose loss is not finite; with all
        samples of the step if there is no such micro-batch.

        Args:
            batches: which samples are in which micro-batch.
        """
        for skipped in steps if self._writes else ():
            is_suspect = [[not math.isfinite(loss) for loss in losses] for losses in skipped.micro_losses]
            suspects = batches.of_step(skipped.step, is_suspect)
            located = [samples.locate(sample) for sample in suspects]
            self._skipped.write(
                {
                    **asdict(skipped),
                    "samples": suspects,
                    "sequences": [[samples.sources[source].name, epoch, index] for source, epoch, index in located],
                }
            )

    def close(self, code: int = 0) -> None:
        """Close all files and loggers.

        Args:
            code: exit code of the run; 1 after an error.
        """
        if self._writes:
            self._progress_line.close()
            for file in (self._metrics, self._saves, self._validations, self._skipped):
                file.close()
            self._loggers.close(code)
