"""Lengths of the sentences of a page. `python -m tests.sentences PAGE ...` lists those of more than 25 words."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 25
END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z(\d`*]|titanlite|torchtitan)")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page in Markdown. Code in a line is a word; headings, tables and blocks are left out."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    lines = ["" if line.startswith(("    ", "|", "#", "![")) else line for line in text.splitlines()]
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*] )|\n(?=\d+\. )", "\n".join(lines)):
        plain = re.sub(r"`[^`]*`", "CODE", paragraph)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        yield from (" ".join(it.split()) for it in END.split(plain) if len(it.split()) > 2)


def long_sentences(text: str) -> list[str]:
    return [it for it in sentences(text) if len(it.split()) > MOST_WORDS]


def main() -> None:
    for page in sys.argv[1:]:
        for sentence in long_sentences(Path(page).read_text()):
            print(f"{page}: {len(sentence.split())} words: {sentence}")


if __name__ == "__main__":
    main()
