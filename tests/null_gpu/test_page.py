"""The table of docs/plan.md, from what is recorded. Needs neither a CUDA build nor a GPU."""

from tests.null_gpu.record import BEGIN, END, PAGE, with_table


def test_the_page_has_what_was_recorded() -> None:
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert with_table(page) == page, "run: python tests/null_gpu/record.py --table"
