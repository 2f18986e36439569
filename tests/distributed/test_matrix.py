"""Every cell of the matrix (tests/matrix.py), which docs/combinations.md and docs/combinations.csv show."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.matrix import (
    FEW,
    NUMBERS,
    PAGE,
    ROWS,
    STEPS,
    Cell,
    Matrix,
    beyond,
    cells_of,
    lines_of,
    numbers,
    page,
    read_numbers,
    refusal,
)
from tests.support.faults import FAULTS
from tests.support.helpers import TinyRun


def assert_equal(matrix: Matrix, cells: Sequence[Cell]) -> None:
    found = zip(cells, matrix.differences(cells), strict=True)
    assert {cell: problems for cell, differences in found if (problems := beyond(cell[0], differences))} == {}


def test_cells_train_as_one_process(tiny: TinyRun) -> None:
    assert_equal(Matrix(tiny, steps=FEW), cells_of("quick"))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS := 2))
def test_further_cells_train_as_one_process(tiny: TinyRun, part: int) -> None:
    """Cells that are compared with the same run are in one part."""
    cells = sorted(cells_of("slow"), key=lambda cell: (ROWS[cell[0]].like or cell[0], cell))
    half = -(-len(cells) // PARTS)
    assert_equal(Matrix(tiny, steps=FEW, compiles=False), cells[part * half : (part + 1) * half])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROWS)
def test_every_cell_trains_as_one_process(tiny: TinyRun, name: str) -> None:
    assert_equal(Matrix(tiny, steps=STEPS), cells_of("all", name))


HEAP_CHECKS = Path("/lib/x86_64-linux-gnu/libc_malloc_debug.so.0")
"""Part of glibc that aborts a process whose heap is damaged."""


@pytest.mark.nightly
@pytest.mark.skipif(not HEAP_CHECKS.exists(), reason="needs glibc's checks of the heap")
@pytest.mark.parametrize("turn", range(10))
def test_rows_that_once_crashed_and_hung(tiny: TinyRun, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`malloc(): unaligned tcache chunk` once, and a hang of gloo: run until the cause is known or 1,000 are clean."""
    monkeypatch.setenv("LD_PRELOAD", str(HEAP_CHECKS))
    monkeypatch.setenv("MALLOC_CHECK_", "3")
    rows = [f"reproducible sequences, {title}" for title in ("Llama 3", "bfloat16", "gpt-oss, bfloat16")]
    assert_equal(Matrix(tiny, steps=FEW), [(name, layout) for name in rows for layout in ("c2", "s2 c2")])


def test_other_cells_are_refused_with_the_key_of_the_option(tiny: TinyRun) -> None:
    expected = {
        (name, layout): {*keys.split(", ")} for name, row in ROWS.items() for layout, keys in row.refused.items()
    }
    assert {cell: refusal(tiny, *cell) for cell in expected} == expected


FIRST_OF_EACH_CELL = {fault.cell: name for name, fault in reversed(FAULTS.items()) if fault.cell in cells_of("quick")}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*FIRST_OF_EACH_CELL.values()], marks=pytest.mark.slow, id="one of each cell"),
        pytest.param([*FAULTS], marks=pytest.mark.nightly, id="all"),
    ],
)
def test_each_fault_turns_its_cell_red(tiny: TinyRun, names: Sequence[str]) -> None:
    """The same cells are green without the faults, in the tests above."""
    cells = [FAULTS[name].cell for name in names]
    assert {*cells} <= {*cells_of("all")}
    found = Matrix(tiny, steps=FEW).differences(cells, faults=names)
    assert [
        name for name, cell, differences in zip(names, cells, found, strict=True) if not beyond(cell[0], differences)
    ] == []


def test_the_page_and_its_numbers_are_those_of_the_matrix() -> None:
    """`python -m tests.matrix ROW` renews a row of both."""
    written = read_numbers()
    for name, lines in written.items():
        differences = {line.layout: line.difference for line in lines if not line.refused}
        assert {*differences} == {layout for _, layout in cells_of("all", name)}
        assert lines_of(name, differences) == lines
        assert all(float(difference) <= max(ROWS[name].tolerance, 1e-6) for difference in differences.values())
    assert numbers(written) == NUMBERS.read_text()
    assert page(written) == PAGE.read_text()
