"""The table of docs/gpu.md, from what is recorded. Needs neither a CUDA build nor a GPU."""

import json

from tests.null_gpu.record import PAGE, RECORDED, with_table
from tests.null_gpu.variants import VARIANTS


def test_the_page_has_what_was_recorded() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run: python tests/null_gpu/record.py --table"


def test_every_config_is_recorded() -> None:
    assert [*json.loads(RECORDED.read_text())] == [variant.name for variant in VARIANTS]
