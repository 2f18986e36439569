"""Samples of output in docs/ are current."""

from pathlib import Path

import pytest

from scripts.samples import printed, with_samples

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.nightly
def test_samples_of_the_pages_are_current() -> None:
    for page in ("plan.md", "see_the_run.md"):
        text = (DOCS / page).read_text()
        assert with_samples(text, printed) == text, "run: python scripts/samples.py docs"
