"""The `titanlite profile` command: a summary of a trace that `[profiling]` wrote."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from titanlite.checkpoint.manifest import folder_name, step_of
from titanlite.runtime.errors import UserError
from titanlite.techniques.profiling import PROFILE
from titanlite.tools.report.profile_analysis import Analysis, Collective, Operator, analyse
from titanlite.tools.report.profile_plan import Prediction, predict
from titanlite.tools.report.trace_file import Trace, read_trace

WIDTH = 60
"""Characters of an operator's name."""


def main(
    run: str,
    *,
    step: int | None,
    rank: int,
    config: str | None,
    gpu: str | None,
    gpus_per_node: int | None,
    with_plan: bool,
    top: int,
    as_json: bool,
) -> None:
    """Run `titanlite profile RUN` with the options of its parser.

    Raises:
        UserError: there is no such profile, or its trace is damaged.
    """
    path = find_trace(Path(run), step=step, rank=rank)
    trace = read_trace(path)
    found = analyse(trace)
    planned, reason = None, "--no-plan"
    if with_plan:
        try:
            planned = predict(Path(run), trace, config=config, gpu=gpu, gpus_per_node=gpus_per_node)
        except UserError as error:
            if gpu or config:
                raise
            reason = str(error).partition("\n")[0]
    if as_json:
        record = {**asdict(found), "operators": [asdict(it) for it in found.operators[:top]]}
        about = {"trace": str(path), "rank": trace.rank, "world_size": trace.world_size, "device": trace.device}
        print(json.dumps({**about, **record, "plan_of_a_step": asdict(planned) if planned else None}, indent=1))
        return
    print("\n".join(profile_lines(trace, found, planned, reason=reason, top=top)))


def find_trace(run: Path, *, step: int | None, rank: int) -> Path:
    """Return the path of a trace.

    Args:
        step: last step of the window. None: the newest.

    Raises:
        UserError: the run, the window or the rank has no trace.
    """
    if not run.is_dir():
        raise UserError(f"no folder {run}: name the folder of a run, for example outputs/debug")
    folders = os.listdir(run / PROFILE) if (run / PROFILE).is_dir() else []
    steps = sorted(
        number
        for name in folders
        if (number := step_of(name)) is not None and _ranks(run / PROFILE / name)
    )  # fmt: skip
    if not steps:
        raise UserError(f"{run} has no profile: train with --profiling.enable_profiling (docs/see_the_run.md)")
    if step is not None and step not in steps:
        raise UserError(f"{run} has no profile of step {step}: there are those of {', '.join(map(str, steps))}")
    folder = run / PROFILE / folder_name(step or steps[-1])
    ranks = _ranks(folder)
    if rank not in ranks:
        raise UserError(f"{folder} has no trace of rank {rank}: there are those of {', '.join(map(str, ranks))}")
    return folder / f"rank-{rank}.json.gz"


def _ranks(folder: Path) -> list[int]:
    matches = (re.fullmatch(r"rank-(\d+)\.json\.gz", name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in matches if match)


def profile_lines(trace: Trace, found: Analysis, planned: Prediction | None, *, reason: str, top: int) -> Iterator[str]:
    """Yield the lines of a summary.

    Args:
        reason: reason why there is no plan.
        top: number of operators.
    """
    window = f"step {found.last}" if found.steps == 1 else f"steps {found.first} to {found.last}"
    yield f"{window}, rank {trace.rank} of {trace.world_size} on {trace.device}: {trace.path}"
    yield from _time_lines(found, planned, reason)
    yield from _collective_lines(found, planned)
    yield ""
    whole = sum(found.phases.values())
    phases = (f"{name} {seconds / whole:.1%}" for name, seconds in found.phases.items() if whole)
    yield f"time of the host by phase: {', '.join(phases)}"
    yield ""
    yield from _operator_lines(found.operators[:top], found, on_gpu=trace.is_of_gpu)
    if found.gaps:
        yield ""
        yield "longest idle gaps"
        for gap in found.gaps:
            yield (
                f"{_ms(gap.seconds)} in {gap.phase or 'no phase'} of step {gap.step}, {1e3 * gap.since:,.2f} ms after "
                f"its begin, between {_short(gap.before) or 'nothing'} and {_short(gap.after) or 'nothing'}"
            )


def _time_lines(found: Analysis, planned: Prediction | None, reason: str) -> Iterator[str]:
    yield ""
    yield f"{'a step':24}{'measured':>10}" + (f"{'plan':>13}   on {planned.hardware}" if planned else "")
    rows = [
        ("time", found.total, planned and planned.total),
        ("compute", found.compute, planned and planned.compute),
        ("collectives", found.communication, planned and planned.communication),
        ("  not hidden", found.exposed, planned and planned.exposed),
        *([("memory transfers only", found.transfers, None)] if found.transfers else []),
        ("idle", found.idle, None),
    ]
    for name, measured, predicted in rows:
        yield f"  {name:22}{_ms(measured / found.steps)}" + (f"{_ms(predicted):>13}" if predicted is not None else "")
    if found.hidden_share is not None:
        share = planned.hidden_share if planned else None
        yield f"  {'collectives hidden':22}{found.hidden_share:10.1%}" + (f"{share:13.1%}" if share is not None else "")
    if planned is None:
        yield f"no plan to compare with: {reason}"
    elif planned.note:
        yield planned.note


def _collective_lines(found: Analysis, planned: Prediction | None) -> Iterator[str]:
    """Yield the table of collectives: those that were measured, then those that only the plan has."""
    by_name = planned.collectives if planned else {}
    missing = [Collective(name, 0, 0.0, 0.0) for name in by_name if name not in {it.name for it in found.collectives}]
    if not (found.collectives or missing):
        return
    yield ""
    title = f"{'collectives of a step':24}{'calls':>8}{'time':>11}{'hidden':>9}{'not hidden':>12}"
    yield title + (f"{'plan: time':>13}{'hidden':>9}{'bytes':>15}" if planned else "")
    for it in (*found.collectives, *missing):
        share = f"{it.hidden / it.total:9.1%}" if it.total else f"{'':9}"
        line = (
            f"  {it.name:22}{it.calls / found.steps:8.0f}{_ms(it.total / found.steps)}{share}"
            f"{_ms((it.total - it.hidden) / found.steps):>12}"
        )
        if planned:
            time = by_name.get(it.name)
            line += f"{_ms(time.total):>13}{time.hidden / time.total:9.1%}" if time else f"{'none':>13}{'':9}"
            line += f"{planned.bytes.get(it.name, 0) / 2**20:11,.2f} MiB"
        yield line


def _operator_lines(operators: list[Operator], found: Analysis, *, on_gpu: bool) -> Iterator[str]:
    device = f"{'device':>11}" if on_gpu else ""
    yield f"{'operators, own time of a step':{WIDTH + 2}}{'calls':>8}{'host':>11}{device}{'share':>8}"
    for it in operators:
        device = f"{_ms(it.device / found.steps):>11}" if on_gpu else ""
        share = (it.device if on_gpu else it.host) / found.total
        yield (
            f"  {_short(it.name):{WIDTH}}{it.calls / found.steps:8.0f}{_ms(it.host / found.steps):>11}{device}"
            f"{share:8.1%}"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:7.2f} ms"


def _short(name: str) -> str:
    return name if len(name) <= WIDTH else f"{name[: WIDTH - 3]}..."
