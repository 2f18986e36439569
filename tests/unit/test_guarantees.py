"""docs/guarantees.md and the README."""

import re
from pathlib import Path

import pytest

from tests.guarantees import LINK, PAGE, with_lines


def test_each_guarantee_links_to_its_tests_by_line() -> None:
    text = PAGE.read_text()
    items = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(items) > 30
    assert [item for item in items if not LINK.search(item)] == []
    assert with_lines(text) == text, "python -m tests.guarantees sets the lines"


def test_a_test_that_is_gone_is_named() -> None:
    with pytest.raises(ValueError, match=r"test_guarantees.py has no test_gone"):
        with_lines('[test](../tests/unit/test_guarantees.py#L1 "test_gone")')


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = Path("README.md").read_text()
    assert len(text.splitlines()) < 120
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not Path(link).exists()] == []
