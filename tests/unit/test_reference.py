"""Pages that scripts/reference.py makes for the site, and samples of output in docs/."""

from pathlib import Path

import pytest

from scripts.samples import printed, with_samples


@pytest.mark.nightly
def test_samples_of_the_pages_are_current() -> None:
    for page in ("plan.md", "see_the_run.md"):
        text = Path("docs", page).read_text()
        assert with_samples(text, printed) == text, "run: python scripts/samples.py docs"
