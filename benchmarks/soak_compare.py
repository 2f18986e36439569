"""Comparison of a run with faults and runs without: which attempt made each step, its samples and its loss."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from soak_job import read_attempt

MASK = (1 << 64) - 1
MOST_SHOWN = 5


class Made(NamedTuple):
    """Attempt of a start that made steps, with the hash of each step's samples as far as all ranks wrote theirs."""

    start: str
    ranks: int
    resumed: int
    last: int
    samples: dict[int, int]


def read_made(hooks: Path, start: str, ranks: int, *, sequences: int, micro_batch: int) -> list[Made]:
    """Return the attempts of a start, in their order.

    Args:
        sequences: of the global batch.
        micro_batch: the largest number of sequences in one forward pass of a rank.
    """
    share = sequences // ranks
    accumulation = share // min(share, micro_batch)
    found = []
    for path in sorted((hooks / start).glob("*/steps")):
        attempt = read_attempt(path)
        hashes = [_read_hashes(path.with_name(f"samples-{rank}")) for rank in range(ranks)]
        complete = min(map(len, hashes)) // accumulation
        samples = {
            attempt.resumed + 1 + step: sum(
                sum(of_rank[step * accumulation : (step + 1) * accumulation]) for of_rank in hashes
            ) & MASK
            for step in range(complete)
        }  # fmt: skip
        found.append(Made(start, ranks, attempt.resumed, attempt.last, samples))
    return found


def _read_hashes(path: Path) -> list[int]:
    data = path.read_bytes() if path.exists() else b""
    return [int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data) - 7, 8)]


def makers(attempts: Iterable[Made]) -> dict[int, Made]:
    """Return for each step the attempt that made it last, which is the one whose result the run keeps."""
    found: dict[int, Made] = {}
    for attempt in attempts:
        found = {step: one for step, one in found.items() if step <= attempt.resumed}
        found |= dict.fromkeys(range(attempt.resumed + 1, attempt.last + 1), attempt)
    return found


def segments(ranks: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return (last step, ranks) of each stretch of steps with the same rank count.

    Args:
        ranks: rank count of each step.
    """
    found: list[tuple[int, int]] = []
    for step, count in sorted(ranks.items()):
        if found and found[-1][1] == count:
            found.pop()
        found.append((step, count))
    return found


def read_losses(path: Path) -> dict[int, list[float]]:
    """Return the losses of each step in metrics.jsonl: one, unless something is wrong."""
    found: dict[int, list[float]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        found.setdefault(record["step"], []).append(record["loss"])
    return found


def missing_or_twice(losses: Mapping[int, Sequence[float]], steps: int) -> list[str]:
    """Return what is wrong with the steps of a run's records."""
    missing = [step for step in range(1, steps + 1) if step not in losses]
    twice = [step for step, values in losses.items() if len(values) > 1]
    beyond = [step for step in losses if step > steps]
    named = {"missing": missing, "there twice": twice, "beyond the last": beyond}
    return [f"metrics.jsonl: {len(found)} steps are {what}: {_few(found)}" for what, found in named.items() if found]


def different(what: str, found: Mapping[int, object], expected: Mapping[int, object]) -> list[str]:
    """Return a line if values by step are not the same."""
    steps = [step for step in sorted({*found, *expected}) if found.get(step) != expected.get(step)]
    if not steps:
        return []
    shown = [f"step {step}: {found.get(step)}, expected {expected.get(step)}" for step in steps[:MOST_SHOWN]]
    return [f"{what}: {len(steps)} steps differ: {'; '.join(shown)}"]


def wrong_samples(attempts: Iterable[Made], expected: Mapping[int, int | None]) -> list[str]:
    """Return a line for each attempt, of lost steps too, that trained on other samples than expected."""
    found = []
    for attempt in attempts:
        wanted = {step: expected.get(step) for step in attempt.samples}
        found += different(f"samples of {attempt.start} on {attempt.ranks} ranks", attempt.samples, wanted)
    return found


def _few(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:MOST_SHOWN])) + (", ..." if len(steps) > MOST_SHOWN else "")
