"""Make the sample of output in README.md anew: train debug.toml, and put its lines in place of those that are there.

    python scripts/samples.py             # three minutes on 2 CPU cores

A line of the sample stands for the line of the run that begins with the same word, of steps also the same number. "..."
alone stands for lines that are left out, and at the end of a line for the rest of it.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
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
        if line == "...":
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


def main() -> None:
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
