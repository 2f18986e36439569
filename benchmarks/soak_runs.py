"""The runs of a soak: without faults, with faults, without faults on the same rank counts; and their comparison."""

import argparse
import json
import math
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soak_compare import Made, different, makers, missing_or_twice, read_losses, read_made, segments, wrong_samples
from soak_faults import KINDS, Fault, Scene, layout_for, to_launcher
from soak_hosts import Hosts, environ
from soak_job import Ended, Job, Layout, one_line
from soak_survive import LIMIT, as_record, await_moment, conclude, problems, randomness, strike

from titanlite.checkpoint.manifest import MANIFEST, Manifest, folder_name
from titanlite.runtime.signals import STOPPED

RANKS = 2
"""Ranks at first, and of the run that nothing interrupts."""
SEQUENCES, MICRO_BATCH = 16, 4
"""training.global_batch_size and training.local_batch_size."""
VALIDATION_INTERVALS = 5
"""Saves between validations."""
TRIES = 3
"""Starts that may fail in a row before the soak gives up."""


@dataclass
class Soak:
    """State of a soak.

    Args:
        out: folder of all that it writes.
    """

    out: Path
    options: argparse.Namespace
    faults: list[Fault]
    hosts: Hosts | None
    job: Job | None = None
    ranks: int = RANKS
    starts: list[tuple[str, int]] = field(default_factory=list)
    """Name and rank count of each start of the run with faults."""
    problems: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def records(self) -> Path:
        return self.out / "records"

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def write(self, event: str, **record: object) -> None:
        """Add a line to the record of the soak, without this machine's paths."""
        line = json.dumps({"event": event, **record}).replace(str(self.out), "FOLDER")
        with (self.out / "soak.jsonl").open("a") as file:
            file.write(line + "\n")

    def problem(self, text: str) -> None:
        print(f"  PROBLEM: {text}", flush=True)
        self.problems.append(text)

    def start(self, name: str, layout: Layout, *words: str) -> Job:
        words = ("--config", str(self.out / "soak.toml"), *words)
        prefixes, more = [()], {}
        if layout.hosts > 1:
            assert self.hosts is not None
            prefixes, more = [self.hosts.prefix(host, str(self.out)) for host in range(layout.hosts)], environ()
        self.job = Job(self.out, name, layout, words, prefixes, **more)
        return self.job

    def start_run(self, coming: Sequence[Fault]) -> Job:
        """Start the run with the faults, as often as it takes until it trains.

        Raises:
            Ended: it does not train.
        """
        for _ in range(TRIES):
            layout = layout_for(self.ranks, coming)
            name = f"start-{len(self.starts) + 1:04d}"
            folders = f"--job.dump_folder={self.records}", f"--checkpoint.folder={self.checkpoints}"
            job = self.start(name, layout, *folders)
            self.starts.append((name, layout.ranks))
            self.write("start", name=name, **layout._asdict())
            try:
                job.wait_until(job.trains, LIMIT)
                return job
            except Ended as ended:
                if set(job.codes()) == {0}:  # the last step was saved, but not its record
                    return job
                self.problem(f"{name} does not train: {ended}")
                job.kill()
        raise Ended(f"{TRIES} starts in a row did not train")

    def made(self, starts: Sequence[tuple[str, int]]) -> list[Made]:
        """Return the attempts of starts."""
        sizes = {"sequences": SEQUENCES, "micro_batch": MICRO_BATCH}
        return [one for name, ranks in starts for one in read_made(self.out / "hooks", name, ranks, **sizes)]


def run(state: Soak) -> None:
    """Run without faults, with faults, and without faults on the same rank counts.

    Raises:
        Ended: a run does not train.
    """
    steps = state.options.steps
    print(f"{state.out.name}: {steps} steps without faults, on {RANKS} ranks", flush=True)
    complete(state, state.start("reference", Layout(RANKS), f"--job.dump_folder={state.out / 'reference'}"))
    print(f"{steps} steps with {len(state.faults)} faults", flush=True)
    job = state.start_run(state.faults)
    for number, fault in enumerate(state.faults):
        if (time.monotonic() - state.began) / 60 > state.options.minutes:
            print(f"{state.options.minutes} minutes are over: no further faults", flush=True)
            state.write("late", faults_left=len(state.faults) - number)
            break
        job = survive(state, job, fault, state.faults[number + 1 :])
    complete(state, job)
    ranks_of = {step: one.ranks for step, one in makers(state.made(state.starts)).items()}
    parts = segments(ranks_of)
    if parts == [(steps, RANKS)]:
        return  # the first run is the one to compare with
    print(f"{steps} steps without faults, on the same rank counts: {parts}", flush=True)
    for number, (last, ranks) in enumerate(parts):
        words = f"--job.dump_folder={state.out / 'same-ranks'}", f"--training.steps={last}"
        complete(state, state.start(f"same-ranks-{number + 1:03d}", Layout(ranks), *words))


def complete(state: Soak, job: Job) -> None:
    """Wait for the end of a job that nothing disturbs any more."""
    shown = time.monotonic()
    while not job.ended():
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            print(f"  {job.name}: step {job.last_step()}", flush=True)
        time.sleep(0.1)
    if set(job.codes()) != {0}:
        state.problem(f"{job.name} ended with {job.codes()}: {one_line(job.notable())}")
    if left := job.left():
        state.problem(f"{job.name} left processes: {left}")
        job.kill()


def survive(state: Soak, job: Job, fault: Fault, coming: Sequence[Fault]) -> Job:
    """Make a fault, and return the job that trains after it."""
    kind = KINDS[fault.kind]
    scene = Scene(job, state.checkpoints, state.records, randomness(state.options.seed, fault), state.hosts)
    try:
        await_moment(job, scene, fault, kind, validation=VALIDATION_INTERVALS * state.options.interval)
        outcome, moment = strike(scene, fault, kind)
    except Ended as ended:
        state.problem(f"fault {fault.number}, {kind.title}: {ended}")
        job.kill()
        if kind.repair:
            kind.repair(scene)
        state.ranks = fault.ranks
        return state.start_run(coming)
    if kind.codes:
        job.kill()
        if kind.repair:
            kind.repair(scene)
        state.ranks = fault.ranks
        job = state.start_run(coming)
    conclude(outcome, moment, job)
    if kind.max_restarts:  # what follows comes to a job without restarts
        job = stop(state, job, coming)
    for problem in problems(outcome, kind, continued=not kind.codes):
        state.problem(f"fault {fault.number}, {kind.title}: {problem}")
    state.write("fault", **as_record(outcome))
    print(
        f"{fault.number + 1:3d}/{len(state.faults)}  step {outcome.at_step:4d}  {kind.title}: {outcome.printed[:90]} "
        f"({outcome.codes or 'continues'}; trains again after {outcome.training_seconds:.1f} s, lost {outcome.lost})",
        flush=True,
    )
    return job


def stop(state: Soak, job: Job, coming: Sequence[Fault]) -> Job:
    """Stop a job as planned, and start the next one."""
    to_launcher(signal.SIGTERM)(Scene(job, state.checkpoints, state.records, random.Random(0), state.hosts))
    try:
        job.wait_for_end(LIMIT)
    except Ended as ended:
        state.problem(f"{job.name}: {ended}")
    if any(code != STOPPED for code in job.codes()):
        state.problem(f"{job.name}: a planned stop ended with {job.codes()}")
    job.kill()
    return state.start_run(coming)


def finish(state: Soak) -> int:
    """Compare the runs, write what was found, and return the exit code."""
    steps = state.options.steps
    again = state.out / "same-ranks"
    runs = {"faults": state.records, "reference": state.out / "reference"}
    runs["same_ranks"] = again if again.exists() else runs["reference"]
    curves = {name: read_losses(folder / "soak" / "metrics.jsonl") for name, folder in runs.items()}
    attempts, reference = state.made(state.starts), makers(state.made([("reference", RANKS)]))
    expected = {step: one.samples.get(step) for step, one in reference.items()}
    kept = makers(attempts)
    found = missing_or_twice(curves["faults"], steps)
    found += different("loss, against the run on the same rank counts", curves["faults"], curves["same_ranks"])
    found += different("samples", {step: one.samples.get(step) for step, one in kept.items()}, expected)
    found += wrong_samples(attempts, expected)
    folder = folder_name(steps)
    files = [checksums(state.checkpoints / folder), checksums(runs["same_ranks"] / "soak" / "checkpoints" / folder)]
    if files[0] != files[1] or not files[0]:
        found.append(f"the last checkpoint: {files[0]}, expected {files[1]}")
    for problem in found:
        state.problem(problem)
    ranks = {step: one.ranks for step, one in kept.items()}
    values = {name: [by_step.get(step, [None])[-1] for step in range(1, steps + 1)] for name, by_step in curves.items()}
    (state.out / "curves.json").write_text(json.dumps({**values, "segments": segments(ranks)}))
    pairs = zip(values["faults"], values["reference"], strict=True)
    apart = [math.inf if one is None or other is None else abs(one - other) for one, other in pairs]
    first = next((number + 1 for number, difference in enumerate(apart) if difference), None)
    state.write(
        "end",
        problems=state.problems,
        seconds=round(time.monotonic() - state.began),
        starts=len(state.starts),
        steps=steps,
        steps_trained=sum(one.last - one.resumed for one in attempts),
        hashes=sum(len(one.samples) for one in attempts),
        largest_difference=max(apart),
        first_different_step=first,
        segments=segments(ranks),
        tensors=len(files[0]),
    )
    print(
        f"largest difference of a loss from the uninterrupted run: {max(apart):.2g}, first at step {first}; "
        f"{len(state.problems)} problems in {time.monotonic() - state.began:.0f} s",
        flush=True,
    )
    for problem in state.problems:
        print(f"  {problem}")
    return 1 if state.problems else 0


def checksums(checkpoint: Path) -> dict[str, str]:
    """Return the checksum of each file of tensors of a checkpoint."""
    if not (checkpoint / MANIFEST).exists():
        return {}
    manifest = Manifest.from_json((checkpoint / MANIFEST).read_bytes())
    return {name: record.crc32 for name, record in manifest.files.items() if name.endswith(".distcp")}
