"""Form of docs/decisions.md: short entries of reasons, whose measurements are elsewhere."""

import re
from pathlib import Path

DECISIONS = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text()
ENTRIES = re.findall(r"^### (\d+)\. (.+)\n\n((?:.+\n)+)", DECISIONS, re.MULTILINE)
MEASURED = (
    r"\d ?(?:%|ms\b|ns\b|percent|(?:tokens|samples|GB|GiB|MiB)(?:/s| a second)|MiB\b|GiB\b|times (?:as|faster|slower))"
)


def test_entries_are_numbered_and_have_three_to_five_lines() -> None:
    assert len(ENTRIES) >= 70
    assert sorted(int(number) for number, _, _ in ENTRIES) == [*range(1, len(ENTRIES) + 1)]
    assert len(ENTRIES) == len(re.findall(r"^###", DECISIONS, re.MULTILINE))
    lines = {f"{number}. {title}": len(text.splitlines()) for number, title, text in ENTRIES}
    assert {title: count for title, count in lines.items() if not 3 <= count <= 5} == {}
    assert [line for line in DECISIONS.splitlines() if len(line) > 120] == []


def test_measurements_are_in_benchmarks() -> None:
    found = {f"{number}. {title}": re.findall(MEASURED, text) for number, title, text in ENTRIES}
    assert {title: numbers for title, numbers in found.items() if numbers} == {}
