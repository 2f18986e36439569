"""The soak of benchmarks/soak.py: its list of faults, its comparison with a run without faults, its report."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Parts:
    """Modules of the soak, imported as its script does."""

    def __init__(self) -> None:
        names = "compare", "faults", "hooks", "job", "report", "survive"
        self.compare, self.faults, self.hooks, self.job, self.report, self.survive = (
            cast(Any, import_module(f"soak_{name}")) for name in names
        )


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield Parts()
    for name in [name for name in sys.modules if name.startswith("soak_")]:
        sys.modules.pop(name)


def test_a_disk_is_filled_only_if_it_is_small_and_its_own(soak: Parts, tmp_path: Path) -> None:
    assert not soak.faults.has_room_to_fill(tmp_path)


def hooks(folder: Path, resumed: int, steps: int, *files: list[int]) -> None:
    """Write what the hooks of an attempt leave."""
    folder.mkdir(parents=True)
    lines = [f"resumed {resumed} 1.0", *(f"step {resumed + step + 1} {step + 2}.0" for step in range(steps))]
    (folder / "steps").write_text("\n".join(lines) + "\nstep 99")
    for rank, hashes in enumerate(files):
        (folder / f"samples-{rank}").write_bytes(b"".join(value.to_bytes(8, "little") for value in hashes) + b"\1")


def test_the_comparison_finds_other_samples_and_losses(soak: Parts, tmp_path: Path) -> None:
    hooks(tmp_path / "a" / "000", 0, 3, [1, 2, 3, 4, 5, 6, 7], [10, 20, 30, 40, 50, 60])
    hooks(tmp_path / "b" / "000", 2, 2, [22, 44, 44, 88])
    sizes = {"sequences": 4, "micro_batch": 1}
    first = soak.compare.read_made(tmp_path, "a", 2, **sizes)
    assert [(one.resumed, one.last, one.samples) for one in first] == [(0, 3, {1: 33, 2: 77, 3: 121})]
    attempts = [*first, *soak.compare.read_made(tmp_path, "b", 1, **sizes)]
    assert attempts[1].samples == {3: 198}
    kept = soak.compare.makers(attempts)
    assert {step: one.ranks for step, one in kept.items()} == {1: 2, 2: 2, 3: 1, 4: 1}
    assert soak.compare.segments({step: one.ranks for step, one in kept.items()}) == [(2, 2), (4, 1)]
    assert soak.compare.wrong_samples(attempts, {1: 33, 2: 77, 3: 121}) == [
        "samples of b on 1 ranks: 1 steps differ: step 3: 198, expected 121"
    ]
    assert soak.compare.wrong_samples(first, {1: 33, 2: 77, 3: 121, 4: 5}) == []

    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {step}, "loss": {step}.5}}\n' for step in (1, 2, 4, 4, 6)))
    losses = soak.compare.read_losses(metrics)
    assert soak.compare.missing_or_twice(losses, 5) == [
        "metrics.jsonl: 2 steps are missing: 3, 5",
        "metrics.jsonl: 1 steps are there twice: 4",
        "metrics.jsonl: 1 steps are beyond the last: 6",
    ]
    assert soak.compare.different("loss", losses, losses) == []
    assert soak.compare.different("loss", {1: [1.5]}, {1: [1.5000001], 2: [2.5]}) == [
        "loss: 2 steps differ: step 1: [1.5], expected [1.5000001]; step 2: None, expected [2.5]"
    ]
