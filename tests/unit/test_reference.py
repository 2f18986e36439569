"""Pages that scripts/reference.py makes for the site, and samples of output in docs/."""

from pathlib import Path

import pytest

from scripts.reference import GENERATED, errors
from scripts.samples import printed, with_samples


@pytest.mark.slow
def test_pages_have_no_escape_that_the_site_would_show() -> None:
    """Python-Markdown knows fewer than GitHub: it would show the backslash, and take <name> for HTML."""
    pages = {name: made() for name, made in GENERATED.items()}
    assert [*pages] == ["config.md", "cli.md", "errors.md"]
    assert {name for name, page in pages.items() if "\\<" in page} == set()


@pytest.mark.slow
def test_errors_that_users_meet_are_listed() -> None:
    texts = [error.text for error in errors()]
    assert len(texts) > 380
    for part in (
        "does not fit",
        "could not be saved",
        "was trained with other settings",
        "is being trained by",
        "unknown key",
        "not finite",
        "updates parameters one by one, and Muon",  # a technique's own
    ):
        assert any(part in text for text in texts), part


@pytest.mark.nightly
def test_samples_of_the_pages_are_current() -> None:
    for page in ("plan.md", "see_the_run.md"):
        text = Path("docs", page).read_text()
        assert with_samples(text, printed) == text, "run: python scripts/samples.py docs"
