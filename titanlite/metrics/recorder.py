"""Figures of a run: measured over the steps since the last line, written to the console, metrics.jsonl and TensorBoard.

Time spent on checkpoints and on compiling is not step time. The device is waited for at log steps only.
"""

import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.schema import Metrics
from titanlite.data.loader import MicroBatches
from titanlite.data.samples import Samples
from titanlite.guard import SkippedStep
from titanlite.metrics.loggers import Logger, TensorBoard
from titanlite.metrics.records import reopen_records, write_record
from titanlite.parallelize.compile import CompileWatch
from titanlite.runtime.hardware import peak_flops
from titanlite.runtime.run_folder import RunFolder
from titanlite.runtime.user_code import find_object
from titanlite.step import StepResult

logger = logging.getLogger(__name__)


class MetricsRecorder:
    """Times the loop, and writes a record at log steps.

    Args:
        folder: where metrics.jsonl and TensorBoard's files are. What they hold beyond `step`, of a run that was killed
            after its last checkpoint, is forgotten, so that no step is there twice.
        step: the step that the run goes on from.
        tokens_per_step: of the global batch.
        model_flops: `Model.flops_per_token` at this sequence length, full and causal.
    """

    def __init__(
        self,
        config: Metrics,
        *,
        folder: RunFolder,
        step: int,
        tokens_per_step: int,
        model_flops: tuple[float, float],
        device: torch.device,
        compute_type: str,
        group: dist.ProcessGroup,
    ) -> None:
        self.config = config
        self.tokens_per_step = tokens_per_step
        self.model_flops = model_flops
        self.device = device
        self.peak_flops = peak_flops(device, compute_type)
        self.group = group
        self.writes = dist.get_rank(group) == 0
        self._compiling = CompileWatch()
        self._folder = folder
        self._jsonl = None
        self._saves = None
        self._validation = None
        self._skipped = None
        if self.writes:
            self._jsonl = reopen_records(folder.metrics, step)
            self._saves = reopen_records(folder.saves, step)
            self._validation = reopen_records(folder.validation, step) if folder.validation.exists() else None
        loggers: list[type[Logger]] = [TensorBoard] if config.enable_tensorboard else []
        loggers += [find_object(name) for name in config.loggers]
        self._loggers: list[Logger] = []
        for kind in loggers if self.writes else ():
            try:
                self._loggers.append(kind(folder.path, step=step))
            except Exception:
                logger.warning(f"{kind.__name__} failed, and gets no figures:", exc_info=True)
        self._start_window()

    def _start_window(self) -> None:
        self._started = time.perf_counter()
        self._steps = 0
        self._waited = 0.0
        self._excluded = 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    @contextmanager
    def not_training(self, *, waits_for_device: bool) -> Iterator[None]:
        """What happens here (a checkpoint) is not counted as time of steps; work that a GPU still has to do is.

        Args:
            waits_for_device: what happens here would wait for that work.
        """
        if waits_for_device and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        with self._compiling.apart():
            yield
        self._excluded += time.perf_counter() - started

    def is_due(self, step: int, *, last: bool) -> bool:
        """Log steps, the first and the last."""
        return step % self.config.log_freq == 0 or step == 1 or last

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
        """Count a step. If one is due, write a record.

        Args:
            samples: consumed so far.
            shares: asked at log steps for each source's part of them.
        """
        self._steps += 1
        self._compiling.end_step()
        if not self.is_due(step, last=last):
            return
        loss, grad_norm, added_loss = (float(figure) for figure in (result.loss, result.grad_norm, result.added_loss))
        elapsed = time.perf_counter() - self._started - self._excluded
        compiled = self._compiling.take_seconds()
        waited, memory, compile_seconds, spared, recompiles = self._largest(
            self._waited, peak_memory(self.device), compiled, compiled - elapsed, self._compiling.recompiles
        )
        if compile_seconds:
            elapsed = -spared  # of the rank that waited least for others to compile
        tokens_per_second = self.tokens_per_step * self._steps / elapsed
        flops, causal_flops = (
            flops * tokens_per_second / dist.get_world_size(self.group) for flops in self.model_flops
        )
        record = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "added_loss": added_loss,
            "lr": lr,
            "samples": samples,
            "tokens_per_second": tokens_per_second,
            "step_seconds": elapsed / self._steps,
            "data_wait_seconds": waited / self._steps,
            **({"compile_seconds": compile_seconds} if compile_seconds else {}),
            "memory_gib": memory,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "mfu_causal": causal_flops / self.peak_flops if self.peak_flops else None,
            "data_shares": shares(),
            **{name: float(figure) for name, figure in result.model_metrics.items()},
        }
        self._write(record)
        if self.writes:
            self._compiling.warn(int(recompiles))
        self._start_window()

    def record_saves(self, saves: Iterable[dict[str, Any]]) -> None:
        """Write a record of each checkpoint that was saved."""
        for record in saves:
            if self._saves:
                write_record(self._saves, record)
            self._draw(record, "checkpoint/")

    def record_validation(self, step: int, record: dict[str, Any]) -> None:
        """Write the figures of a validation."""
        record = {"step": step, **record}
        if self.writes:
            logger.info(_validation_line(record))
            self._validation = self._validation or self._folder.validation.open("a")
            write_record(self._validation, record)
        self._draw(record, "validation/")

    def record_skipped(self, steps: Iterable[SkippedStep], batches: MicroBatches, samples: Samples) -> None:
        """Write a record of each step that was left out, with the samples that the loss of their micro-batch accuses,
        or all of them if none does.

        Args:
            batches: which samples are in which micro-batch.
        """
        for skipped in steps if self.writes else ():
            suspect = [[not math.isfinite(loss) for loss in losses] for losses in skipped.micro_losses]
            accused = batches.of_step(skipped.step, suspect)
            located = [samples.locate(sample) for sample in accused]
            record = {
                **asdict(skipped),
                "samples": accused,
                "sequences": [[samples.sources[source].name, epoch, index] for source, epoch, index in located],
            }
            self._skipped = self._skipped or self._folder.skipped.open("a")
            write_record(self._skipped, record)

    def _largest(self, *figures: float) -> list[float]:
        """The largest of each figure over all ranks."""
        largest = torch.tensor(figures, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest.tolist()

    def _write(self, record: dict[str, Any]) -> None:
        if not self.writes:
            return
        logger.info(_line(record))
        if self._jsonl:
            write_record(self._jsonl, record)
        self._draw(record, "")

    def _draw(self, record: dict[str, Any], prefix: str) -> None:
        """Hand a record to the loggers. One that fails is done with; the run goes on."""
        figures = dict(_flat({name: value for name, value in record.items() if name != "step"}, prefix))
        for logs in [*self._loggers]:
            try:
                logs.log(figures, step=record["step"])
            except Exception:
                logger.warning(f"{type(logs).__name__} failed, and gets no more figures:", exc_info=True)
                self._loggers.remove(logs)

    def close(self) -> None:
        for file in (self._jsonl, self._saves, self._validation, self._skipped):
            if file:
                file.close()
        for logs in self._loggers:
            try:
                logs.close()
            except Exception:
                logger.warning(f"{type(logs).__name__} failed to close:", exc_info=True)


def _flat(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Every figure that there is, those of tables inside by their path."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif value is not None:
            yield prefix + name, value


def _line(record: dict[str, Any]) -> str:
    mfu = f"{record['mfu']:.1%}" if record["mfu"] is not None else "n/a"
    compiling = f"  compile {record['compile_seconds']:.1f} s" if "compile_seconds" in record else ""
    return (
        f"step {record['step']:>5}  loss {record['loss']:.4f}  "
        f"grad_norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"{record['step_seconds']:.3f} s/step  data {record['data_wait_seconds'] / record['step_seconds']:.1%}  "
        f"memory {record['memory_gib']:.2f} GiB  {record['tflops_per_device']:.2f} TFLOP/s  MFU {mfu}{compiling}"
    )


def _validation_line(record: dict[str, Any]) -> str:
    parts = []
    for name, source in record["sources"].items():
        bits = "" if source["bits_per_byte"] is None else f", {source['bits_per_byte']:.4f} bits per byte"
        parts.append(f"{name} {source['loss']:.4f}{bits} ({source['sequences']:,} sequences)")
    return f"step {record['step']:>5}  validation loss {record['loss']:.4f}: {'; '.join(parts)}"


def peak_memory(device: torch.device) -> float:
    """GiB: on a GPU, the most that PyTorch has reserved; on the CPU, the most that the process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
