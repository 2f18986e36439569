"""The soak of benchmarks/soak.py: its list of faults, its comparison with a run without faults, its report."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SVG = "{http://www.w3.org/2000/svg}"


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


def test_faults_are_a_function_of_the_seed(soak: Parts) -> None:
    kinds = list(soak.faults.KINDS)
    options = {"steps": 2000, "every": 30, "kinds": kinds, "margin": 60}
    faults = soak.faults.schedule(7, **options)
    assert faults == soak.faults.schedule(7, **options)
    assert faults != soak.faults.schedule(8, **options)
    steps = [fault.step for fault in faults]
    assert len(faults) == 64
    assert steps == sorted(steps)
    assert 0 < steps[0] < steps[-1] <= 1940
    counts = {kind: sum(fault.kind == kind for fault in faults) for kind in kinds}
    assert counts.pop("ranks") >= 4
    assert min(counts.values()) >= 2
    assert max(counts.values()) <= 4
    ranks = 2
    for fault in faults:
        kind = soak.faults.KINDS[fault.kind]
        assert ranks >= kind.least_ranks
        assert (fault.ranks != ranks) == (fault.kind == "ranks")
        ranks = fault.ranks
    assert {fault.ranks for fault in faults} == {1, 2, 4}


def test_a_start_has_what_the_faults_until_its_end_need(soak: Parts) -> None:
    def layout(*kinds: str) -> Any:
        return soak.faults.layout_for(2, [soak.faults.Fault(0, 1, kind, 2) for kind in kinds])

    assert layout() == (2, 1, 0)
    assert layout("kill-rank", "link") == (2, 1, 0)
    assert layout("link", "kill-rank-restarts") == (2, 2, 0)
    assert layout("disk-records", "link-shortly", "kill-rank-restarts", "nan") == (2, 2, 1)
    assert layout("kill-rank-restarts", "link") == (2, 1, 1)


def test_a_disk_is_filled_only_if_it_is_small_and_its_own(soak: Parts, tmp_path: Path) -> None:
    assert not soak.faults.has_room_to_fill(tmp_path)


def test_hashes_of_samples_do_not_depend_on_the_split(soak: Parts) -> None:
    labels = torch.randint(0, 259, (16, 8), generator=torch.Generator().manual_seed(0))
    whole = soak.hooks.hash_of_sequences(labels)
    assert whole == sum(map(soak.hooks.hash_of_sequences, labels.flip(0).split(4))) & soak.hooks.MASK
    labels[3, 5] += 1
    assert whole != soak.hooks.hash_of_sequences(labels)


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


def outcome(soak: Parts, **changes: Any) -> Any:
    values = {"fault": 0, "kind": "term-rank", "title": "SIGTERM", "planned": 7, "at_step": 7, "ranks": 2, "start": "s"}
    values |= {"codes": (75,), "last_step": 8, "committed": 8, "resumed": 8}
    return soak.survive.Outcome(**{**values, **changes})


def test_what_was_not_survived(soak: Parts) -> None:
    def problems(**changes: Any) -> list[str]:
        return soak.survive.problems(outcome(soak, **changes), soak.faults.KINDS["term-rank"], continued=False)

    assert problems() == []
    assert problems(codes=(1,)) == ["exit codes (1,), expected (75,)"]
    assert problems(left=2) == ["2 processes were left"]
    assert problems(committed=5) == ["resumed after step 8, and step 5 was committed"]
    assert problems(resumed=5, committed=5, lost=3) == ["3 steps were lost, at most 1 may be"]


def test_the_line_that_explains_most(soak: Parts) -> None:
    lines = ["a line", "warning: slow", "stopped after step 3", "error: rank 1 failed", "later"]
    assert soak.job.one_line(lines) == "error: rank 1 failed"
    hang = "hang: no step for 3 s (step 80, forward): rank 1 on node1 sends no heartbeat"
    assert soak.job.one_line([*lines, "  hang: rank 1 on node1", hang]) == hang
    assert soak.job.one_line(lines[:3]) == "stopped after step 3"
    assert soak.job.one_line(["first", "last"]) == "last"
    assert soak.job.one_line([]) == ""


def test_new_lines_of_each_host(soak: Parts, tmp_path: Path) -> None:
    class Written(soak.job.Job):
        def __init__(self) -> None:
            self.outputs = [tmp_path / "0", tmp_path / "1"]

    job = Written()
    for output in job.outputs:
        output.write_text("mesh ...\nstep     1  loss 5\n")
    before = job.printed()
    assert job.notable() == ["mesh ...", "mesh ..."]
    for output in job.outputs:
        with output.open("a") as file:
            file.write("rank 1 of host node0 lags, and all others wait\n[W1123 07:02:59] c10d\n")
            file.write(f"saved checkpoint of step 1\nerror: on {output.name}\n")
    assert job.notable(before) == ["error: on 0", "error: on 1"]


def test_the_table_and_the_picture(soak: Parts, tmp_path: Path) -> None:
    changed = [
        {"training_seconds": 9.0, "noticed_seconds": 0.5, "lost": 0, "printed": "stopped <by> | `SIGTERM`"},
        {"training_seconds": 7.0, "noticed_seconds": 0.25, "lost": 1, "at_step": 30},
        {"kind": "link-shortly", "title": "link cut & restored", "codes": (), "at_step": 40},
    ]
    faults = [soak.survive.as_record(outcome(soak, **changes)) for changes in changed]
    assert soak.report.table(faults)[2:] == [
        "| link cut & restored | 1 | not needed | 0.0, worst 0.0 | 0, worst 0 | continues |  |",
        "| SIGTERM | 2 | 0.4, worst 0.5 | 8.0, worst 9.0 | 0, worst 1 | 75 | `stopped <by> \\| 'SIGTERM'` |",
    ]
    losses = [5.0 - step / 20 for step in range(50)]
    curves = {"reference": losses, "faults": [*losses[:40], *(loss + 1e-6 for loss in losses[40:])]}
    soak.report.draw({**curves, "segments": [[40, 2], [50, 4]]}, faults, tmp_path / "soak.svg")
    labels = {element.text for element in ElementTree.parse(tmp_path / "soak.svg").iter(f"{SVG}text")}
    assert {"link cut & restored", "SIGTERM", "with 3 faults", "without faults, 2 ranks", "4 ranks"} <= labels


def test_the_page_keeps_what_people_wrote(soak: Parts) -> None:
    page = f"Before.\n\n{soak.report.BEGIN}\nold\n{soak.report.END}\n\nAfter.\n"
    new = soak.report.with_results(page, "new\n")
    assert new == f"Before.\n\n{soak.report.BEGIN}\n\nnew\n\n{soak.report.END}\n\nAfter.\n"
    assert soak.report.with_results(new, "new\n") == new
    real = (BENCHMARKS.parent / "docs" / "cluster.md").read_text()
    assert real.count(soak.report.BEGIN) == real.count(soak.report.END) == 1
