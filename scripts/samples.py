"""Make the samples of output in README.md and docs/ anew: run their commands, and put the lines in place of old ones.

    python scripts/samples.py             # five minutes on 2 CPU cores
    python scripts/samples.py docs        # two of them: without the training of README.md

In docs/, a block of code that begins with "$ titanlite ..." and names a shipped config is a command with its output. In
README.md, the sample is the output of a training of debug.toml. A line of a sample stands for the line of the run that
begins with the same word, of steps also the same number. "..." alone stands for lines that are left out, and at the end
of a line for the rest of it.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from titanlite.config.shipped import shipped_names

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"^    \$ titanlite (.*)\n((?:    .*\n)+)", re.MULTILINE)
"""Command of a page, and its output."""
FIRST = "    model    "
"""Beginning of the sample in README.md."""


def renewed(sample: list[str], output: list[str]) -> list[str]:
    """Return the lines of a sample with the values of an output.

    Raises:
        ValueError: the output has no line like one of the sample's.
    """
    rest = iter(output)
    made = []
    for line in sample:
        if line.strip() == "...":
            made.append(line)
            continue
        key = key_of(line)
        found = next((other for other in rest if key_of(other) == key), None)
        if found is None:
            raise ValueError(f"the run prints no line like: {line}")
        made.append(shortened(found, like=line))
    return made


def key_of(line: str) -> str:
    """Return what tells lines of a run apart: the first word, of a step also its number and what follows."""
    step = re.match(r"step +(\d+)  (validation|loss)", line)
    return f"step {step[1]} {step[2]}" if step else line.split(" ")[0]


def shortened(line: str, *, like: str) -> str:
    """Return a line with the rest left out where that of the sample has it left out."""
    if "(...)" in like:
        line = re.sub(r"\([^()]*\)(?=; unigram)", "(...)", line)
    if not like.endswith(" ..."):
        return line
    return " ".join([*line.split(" ")[: len(like.removesuffix(" ...").split(" "))], "..."])


def with_samples(text: str, run: Callable[[list[str]], str]) -> str:
    """Return a page with the output of its commands that name a shipped config.

    Args:
        run: returns what `titanlite` prints with these words.
    """

    def sample(block: re.Match[str]) -> str:
        words = shlex.split(block[1])
        if not {*shipped_names()} & {*words}:
            return block[0]
        old = [line.removeprefix("    ") for line in block[2].splitlines()]
        output = run(words).rstrip().splitlines()
        new = renewed(old, output) if any("..." in line for line in old) else output
        return "\n".join(["    $ titanlite " + block[1], *(f"    {line}".rstrip() for line in new), ""])

    return BLOCK.sub(sample, text)


def printed(words: list[str]) -> str:
    command = [sys.executable, "-m", "titanlite", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        page.write_text(with_samples(page.read_text(), printed))
    if sys.argv[1:] == ["docs"]:
        return
    text = README.read_text()
    start = text.index(FIRST)
    end = re.compile(r"\n(?! {4})").search(text, start)
    assert end
    sample = [line.removeprefix("    ") for line in text[start : end.start()].splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "titanlite", "train", "debug"]
        output = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.splitlines()
    block = "\n".join(f"    {line}" for line in renewed(sample, output))
    README.write_text(text[:start] + block + text[end.start() :])


if __name__ == "__main__":
    main()
