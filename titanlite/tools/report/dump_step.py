"""A training run that ends with the dump of one step."""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from titanlite.checks.preflight import preflight
from titanlite.config.load import load
from titanlite.runtime.console import start_logging
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import pick_device, process_group, read_ranks
from titanlite.tools.assemble import assemble
from titanlite.tools.convert.source import open_model
from titanlite.tools.ingest.inputs import find_files
from titanlite.tools.report.value_dump import StepDumped, ValueDump
from titanlite.train import Run, train


def dump_step(path: str, overrides: Sequence[str], *, folder: Path, step: int) -> None:
    """Train on the processes of the environment until a step, and write its values.

    Raises:
        UserError: the parts do not fit together, or the step has too many values.
    """
    ranks = read_ranks(os.environ)
    config = load(path, overrides, world_size=ranks.world_size)
    if config.parallelism.tensor_parallel_degree > 1:
        raise UserError("parallelism.tensor_parallel_degree: values of parts of layers cannot be compared yet: set 1")
    start_logging(ranks.rank)
    device = pick_device(ranks)
    resolved = preflight(config, ranks, device, find_text=find_files, open_model=open_model)
    if ranks.rank == 0:
        shutil.rmtree(folder / "run", ignore_errors=True)
    with process_group(ranks, device, deterministic=config.debug.deterministic):
        run = assemble(config, resolved, ranks=ranks, device=device)
        record(run, folder=folder, step=step)


def record(run: Run, *, folder: Path, step: int) -> None:
    """Train until a step, write its values, and close the run."""
    dtype = run.config.training.mixed_precision_param
    run.observers.append(ValueDump(run.model, run.mesh, folder=folder, step=step, dtype=dtype))
    try:
        with suppress(StepDumped):
            train(run)
    finally:
        run.batches.close()
        run.metrics.close()
