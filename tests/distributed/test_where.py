"""`titanlite parity --where` on 2 and 4 processes: the planted errors of each layout are named."""

from pathlib import Path

import pytest

from tests.dumps import PLANTED, compared, dumped, options
from tests.helpers import TinyRun, run_ranks
from tests.layouts import degrees
from titanlite.tools import cli
from titanlite.tools.report.value_dump import TOKENS

LAYOUTS = [(2, 1), (1, 2), (2, 2)]
SWAPPED = {0: 1, 1: 0}
"""The rank whose samples each of two ranks reads."""


def _dump_all(rank: int, world_size: int, tiny: TinyRun, layouts: list[tuple[int, int]]) -> None:
    for layout in layouts:
        name = "x".join(map(str, layout))
        cases = {"right-1": ([], 1), "right-2": ([], 2), **{error: case[:2] for error, case in PLANTED.items()}}
        for error, (more, step) in cases.items():
            words = options(*degrees(*layout), *more, name=f"{name}-{error.replace(' ', '-')}")
            config = tiny.config(*words, world_size=world_size)
            dumped(rank, world_size, config, tiny.folder / f"{name} {error}", step=step)
        words = options(*degrees(*layout), name=f"{name}-swapped")
        from_rank = SWAPPED.get(rank, rank)
        config = tiny.config(*words, world_size=world_size)
        dumped(rank, world_size, config, tiny.folder / f"{name} swapped", from_rank=from_rank)


@pytest.mark.nightly
def test_planted_errors_are_named_on_each_layout(tiny: TinyRun) -> None:
    for step in (1, 2):
        run_ranks(_dump_one, 1, tiny, f"one-{step}", step)
    for world_size in (2, 4):
        layouts = [it for it in LAYOUTS if it[0] * it[1] == world_size]
        run_ranks(_dump_all, world_size, tiny, layouts, timeout=240)
    for layout in LAYOUTS:
        name = "x".join(map(str, layout))
        for step in (1, 2):
            found = compared(tiny, f"{name} right-{step}", f"one-{step}")
            assert found.first is None, (layout, step)
            assert found.left_out == 0
        for error, (_, step, key) in PLANTED.items():
            first = compared(tiny, f"{name} {error}", f"one-{step}").first
            assert first is not None, (layout, error)
            assert first.key.startswith(key), (layout, error, first)
        first = compared(tiny, f"{name} swapped", "one-1").first
        assert first is not None
        assert first.key == TOKENS


def _dump_one(rank: int, world_size: int, tiny: TinyRun, name: str, step: int) -> None:
    dumped(rank, world_size, tiny.config(*options(name=name)), tiny.folder / name, step=step)


@pytest.mark.nightly
def test_the_command_runs_both_sides(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    config, folder = str(tiny.toml), str(tiny.folder / "before")
    assert cli.run(["parity", config, "--where", "1x2", "compile.enable=true"]) == 0
    captured = capfd.readouterr()
    assert captured.out.splitlines()[0] == "A: 1x2; B, the reference: compile.enable=true; step 1"
    assert captured.out.splitlines()[-1] == "equal"
    assert "are in one dump only" in captured.out.splitlines()[-2]  # what is within compiled blocks
    rows = {line.split()[0] for line in captured.out.splitlines()}
    assert {"layers.0", "layers.2", "head"} <= rows

    assert cli.run(["parity", config, "--where", "1x2", "1x1 training.mixed_precision_param=bfloat16"]) == 0
    capfd.readouterr()
    assert cli.run(["parity", config, "--where", "debug.seed=1", "1x1", "--step=2"]) == 1
    assert TOKENS in capfd.readouterr().err
    where = tiny.folder / "outputs" / "tiny-where"
    Path(folder).symlink_to(where / "b")
    assert cli.run(["parity", "--where", str(where / "b"), folder]) == 0
