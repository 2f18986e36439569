"""What the command shows after a complete run."""

from collections.abc import Callable

import pytest

from tests.support.helpers import TinyRun, one_process, train_on_this_rank
from titanlite.tools.api import generate
from titanlite.tools.results import GIVEN, NEW, show_results, write_sample

pytestmark = pytest.mark.long


def test_a_small_run_ends_with_its_text_its_report_and_commands(tiny: TinyRun, log: Callable[[], list[str]]) -> None:
    document = (tiny.text / "a.txt").read_text()
    folder = tiny.folder / "outputs" / "tiny"
    with one_process():
        run = train_on_this_rank(tiny.config("--training.steps=3"), 0, 1)
        given, text = write_sample(run)
        before = len(log())
        show_results(run)
    assert given == document[: GIVEN - 1]  # bytes, and the token that begins a document
    new = min(NEW, run.config.training.seq_len - GIVEN)
    assert text == generate(folder, given, max_new_tokens=new, temperature=0.8, top_p=0.95)
    lines = log()[before:]
    assert [line.removeprefix(" " * 11) for line in lines[1:-6]] == text.splitlines()
    assert lines[-6].endswith(str(folder / "report.html"))
    assert any("--training.steps=6" in line for line in lines[-5:])
    assert (folder / "report.html").stat().st_size > 1_000_000  # it holds what draws it
