"""docs/guarantees.md: each promise has tests, and these exist."""

import re
from pathlib import Path

LINK = re.compile(r"\[(?P<name>test_\w+)\]\(\.\./(?P<file>tests/\S+?\.py)\)")


def test_each_promise_names_tests_that_exist() -> None:
    text = Path("docs/guarantees.md").read_text()
    promises = re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE)
    rows = re.findall(r"^\| (\d+) \| (.*)", text, re.MULTILINE)
    assert [*map(int, promises)] == [*range(1, len(promises) + 1)]
    assert {number for number, _ in rows} == {*promises}
    assert len(rows) > 30
    assert [row for _, row in rows if not LINK.search(row)] == []
    linked = [(match["file"], match["name"]) for match in LINK.finditer(text)]
    assert [(file, name) for file, name in linked if f"\ndef {name}(" not in Path(file).read_text()] == []
