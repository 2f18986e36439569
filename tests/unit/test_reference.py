"""Samples of output and tables in docs/ that scripts write."""

from pathlib import Path

import pytest

from scripts import models
from scripts.samples import printed, with_samples
from tests.null_gpu.record import PAGE, with_table
from titanlite.models.registry import MODELS


@pytest.mark.nightly
def test_samples_of_the_pages_are_current() -> None:
    for page in ("plan.md", "see_the_run.md"):
        text = Path("docs", page).read_text()
        assert with_samples(text, printed) == text, "run: python scripts/samples.py docs"


def test_the_table_of_the_null_gpu_shows_what_is_recorded() -> None:
    assert with_table(PAGE.read_text()) == PAGE.read_text(), "run: python tests/null_gpu/record.py --table"


@pytest.mark.long
def test_the_table_of_models_is_that_of_the_code() -> None:
    assert models.TITLES.keys() == MODELS.keys()
    page = models.PAGE.read_text()
    assert models.with_table(page) == page, "run: python scripts/models.py"
