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
@pytest.mark.parametrize("part", range(4))
def test_further_cells_train_as_one_process(tiny: TinyRun, part: int) -> None:
    assert_equal(Matrix(tiny, steps=FEW, compiles=False), cells_of("slow")[part::4])


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


@pytest.mark.slow
def test_each_fault_turns_its_cell_red(tiny: TinyRun) -> None:
    """The same cells are green without the faults, in the tests above."""
    cells = [fault.cell for fault in FAULTS.values()]
    assert {*cells} <= {*cells_of("quick"), *cells_of("slow")}
    found = Matrix(tiny, steps=FEW).differences(cells, faults=[*FAULTS])
    assert [
        name for name, cell, differences in zip(FAULTS, cells, found, strict=True) if not beyond(cell[0], differences)
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
