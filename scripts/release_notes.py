"""Print the entry of a version in CHANGELOG.md as the notes of a release:  python scripts/release_notes.py 0.1.0

With TITANLITE_REPOSITORY, the address of the repository, links to files lead there, to the files of that version.
"""

import os
import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def notes(changelog: str, version: str, repository: str = "") -> str:
    """Return the text below the heading of a version, or below Unreleased where the version has none.

    Raises:
        ValueError: there is neither.
    """
    entries = re.split(r"^## \[([^\]]+)\].*\n", changelog, flags=re.MULTILINE)
    found = dict(zip(entries[1::2], entries[2::2], strict=True))
    text = found.get(version, found.get("Unreleased"))
    if text is None:
        raise ValueError(f"CHANGELOG.md has neither [{version}] nor [Unreleased]")
    if repository:
        place = f"{repository.rstrip('/')}/blob/v{version}/"
        text = re.sub(r"(\]\()(?![a-z]+:|#)", rf"\g<1>{place}", text)
    return text.strip() + "\n"


if __name__ == "__main__":
    print(notes(CHANGELOG.read_text(encoding="utf-8"), sys.argv[1], os.environ.get("TITANLITE_REPOSITORY", "")), end="")
