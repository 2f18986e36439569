"""Links of docs/guarantees.md to tests: each names a test and the line on which it begins.

`python -m tests.guarantees` sets the lines anew.
"""

import re
from pathlib import Path

PAGE = Path("docs/guarantees.md")
LINK = re.compile(r"\[test\]\(\.\./(?P<file>tests/\S+?\.py)#L(?P<line>\d+) \"(?P<name>test_\w+)\"\)")


def line_of(file: str, name: str) -> int:
    """Return the line on which a test begins.

    Raises:
        ValueError: the file has no such test.
    """
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        if line.startswith(f"def {name}("):
            return number
    raise ValueError(f"{file} has no {name}")


def with_lines(text: str) -> str:
    """Return the page with the line of each test."""

    def link(match: re.Match[str]) -> str:
        file, name = match["file"], match["name"]
        return f'[test](../{file}#L{line_of(file, name)} "{name}")'

    return LINK.sub(link, text)


if __name__ == "__main__":
    PAGE.write_text(with_lines(PAGE.read_text()))
