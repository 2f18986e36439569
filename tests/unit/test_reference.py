"""The list of errors that the site is built with is complete, and samples of output in docs/ are current."""

import ast
from pathlib import Path

import pytest

from scripts.reference import error_texts
from scripts.samples import printed, renewed, with_samples

DOCS = Path(__file__).parents[2] / "docs"


CODE = """
def check_size(size):
    if size < 1:
        raise UserError(f"size {size}: " "expected a positive number" if size else "no size at all")
    logger.warning(f"size {size} is large")
    text = f"{size} is odd"
    if size % 2:
        raise UserError(text)
    raise ValueError("of the code's own")

def why_not(path):
    return f"{path} cannot be read"

def find_conflicts(config):
    yield "training.steps", "must be positive"

def other():
    return "some text"
"""


def test_errors_of_code() -> None:
    assert set(error_texts(ast.parse(CODE))) == {
        "size ...: expected a positive number",
        "no size at all",
        "... is odd",
        "warning: size ... is large",
        "... cannot be read",
        "must be positive",
    }


def test_a_sample_gets_the_values_of_a_run() -> None:
    sample = [
        "mesh     replicate 1 x shard 1",
        "...",
        "data     train: 90.00%; 12 tokens (...); unigram entropy 5, ...",
        "step     1  loss 7.0  lr 1 ...",
        "step    20  validation loss 4.0",
    ]
    output = [
        "model    other", "mesh     replicate 1 x shard 2", "saves    every step",
        "data     train: 100.00%; 13 tokens (outputs/data); unigram entropy 6, the loss",
        "step     1  loss 7.5  lr 2  more here",
        "step    10  loss 6.0", "step    20  loss 5.0", "step    20  validation loss 4.5",
    ]  # fmt: skip
    assert renewed(sample, output) == [
        "mesh     replicate 1 x shard 2",
        "...",
        "data     train: 100.00%; 13 tokens (...); unigram entropy 6, ...",
        "step     1  loss 7.5  lr 2 ...",
        "step    20  validation loss 4.5",
    ]
    with pytest.raises(ValueError, match="prints no line like: kernels"):
        renewed(["kernels  plain"], output)


def test_a_command_of_a_page_gets_its_output() -> None:
    page = "    $ titanlite plan debug --json\n    old\n\nText.\n\n    $ titanlite inspect outputs/debug\n    kept\n\n"
    asked = []

    def run(words: list[str]) -> str:
        asked.append(words)
        return "new\n  lines\n"

    assert with_samples(page, run) == page.replace("    old\n", "    new\n      lines\n")
    assert asked == [["plan", "debug", "--json"]]
    shortened = "    $ titanlite plan debug\n    memory 1\n    ...\n"
    assert with_samples(shortened, lambda _: "memory 2\ntime 3\n") == shortened.replace("1", "2")


@pytest.mark.nightly
def test_samples_of_the_pages_are_current() -> None:
    for page in ("plan.md", "see_the_run.md"):
        text = (DOCS / page).read_text()
        assert with_samples(text, printed) == text, "run: python scripts/samples.py docs"
