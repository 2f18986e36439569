"""docs/guarantees.md names tests that exist."""

import re
from pathlib import Path

LINK = re.compile(r"\[test\]\(\.\./(?P<file>tests/\S+?\.py) \"(?P<name>test_\w+)\"\)")


def test_each_guarantee_names_tests_that_exist() -> None:
    items = [line for line in Path("docs/guarantees.md").read_text().splitlines() if line.startswith("- ")]
    assert len(items) > 30
    assert [item for item in items if not LINK.search(item)] == []
    linked = [(match["file"], match["name"]) for item in items for match in LINK.finditer(item)]
    assert [(file, name) for file, name in linked if f"\ndef {name}(" not in Path(file).read_text()] == []
