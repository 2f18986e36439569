"""Pages of the site that are made from the code are complete, and samples of output in docs/ are current."""

import ast
from pathlib import Path

import pytest

from scripts.reference import GENERATED, PACKAGE, PAGES, command_page, commands, error_texts, errors
from scripts.samples import printed, renewed, with_samples
from titanlite.tools.cli import make_parser

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: made() for name, made in GENERATED.items()}


@pytest.mark.long
def test_pages_have_no_escape_that_the_site_would_show(pages: dict[str, str]) -> None:
    """Python-Markdown knows fewer than GitHub: it would show the backslash, and take <name> for HTML."""
    assert {name for name, page in pages.items() if "\\<" in page} == set()


@pytest.mark.long
def test_pages_are_made_with_the_site_and_not_committed(pages: dict[str, str]) -> None:
    assert [*pages] == ["config.md", "cli.md", "errors.md"]
    assert not any((DOCS / name).exists() for name in pages)


def test_pages_of_areas_are_there() -> None:
    assert {page for _, page in PAGES.values() if not (DOCS / page).exists()} == {"config.md"}
    assert {folder for folder in PAGES if not (PACKAGE / folder).is_dir()} == set()


def test_every_command_and_option_is_there() -> None:
    page = command_page()
    shown = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert shown == [parser.prog for parser in commands(make_parser())]
    assert len(shown) > 20
    for parser in commands(make_parser()):
        section = page.partition(f"## {parser.prog}\n")[2].partition("\n## ")[0]
        for option in parser.format_usage().replace("[", " ").replace("]", " ").split():
            assert not option.startswith("--") or option == "--help" or option in section, (parser.prog, option)


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


@pytest.mark.long
def test_errors_that_users_meet_are_listed() -> None:
    texts = [error.text for error in errors()]
    assert len(texts) > 380
    for part in (
        "does not fit",
        "could not be saved",
        "was trained with other settings",
        "is being trained by",
        "unknown key",
        "not finite",
        "updates parameters one by one, and Muon",  # a technique's own
    ):
        assert any(part in text for text in texts), part


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
