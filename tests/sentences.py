"""Lengths of the sentences of a page. `python -m tests.sentences PAGE ...` lists those of more than 25 words.

A span of code counts as one word, and so does an enumeration of spans: `a`, `b` and `c`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 25
BLOCK = re.compile(r"^ *```.*?^ *```[^\n]*$", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r" *(?:[-*]|\d+\.) +")
SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
LIST = re.compile(r"\bCODE(?:(?:,| and| or|, and|, or) CODE\b)+")
STOP = r"(?:(?<=[.!?])|(?<=[.!?][)\"'])|(?<=[.!?]\*\*)|(?<=[.!?]\)\*\*))"
ABBREVIATIONS = r"(?<!\.\.\.)" + "".join(rf"(?<!\b{it}\.)" for it in (r"e\.g", r"i\.e", "vs", "cf", "etc", "al"))
END = re.compile(rf"{STOP}{ABBREVIATIONS}\s+(?=[\w(\[`*\"])|(?<=[:;])\s+(?=[A-Z(\[\d`*\"]|titanlite|torchtitan)")
"""A stop, also before a bracket, a quotation mark or the end of bold text; a colon or semicolon before a capital."""


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and list items; headings, tables, pictures and blocks of code are left out."""
    found: list[str] = []
    for line in [*BLOCK.sub("", text).splitlines(), ""]:
        item = ITEM.match(line)
        code = line.startswith("    ") and not found and not item  # below a line of text, an indented one is text
        ends = not line.strip() or line.lstrip().startswith(("|", "#", "![")) or code
        if found and (ends or item):
            yield "\n".join(found)
            found = []
        if not ends:
            found.append(line[item.end() :] if item else line)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page in Markdown."""
    for paragraph in paragraphs(text):
        for it in END.split(SPAN.sub("CODE", paragraph)):
            plain = LIST.sub("CODE", " ".join(LINK.sub(r"\1", it).split()))
            if len(plain.split()) > 2:
                yield plain


def long_sentences(text: str) -> list[str]:
    return [it for it in sentences(text) if len(it.split()) > MOST_WORDS]


def main() -> None:
    for page in sys.argv[1:]:
        for sentence in long_sentences(Path(page).read_text()):
            print(f"{page}: {len(sentence.split())} words: {sentence}")


if __name__ == "__main__":
    main()
