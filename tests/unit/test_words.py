"""The words of the house (tests/words.py): its rules on examples, and a count by folder that may only fall."""

from collections import Counter
from pathlib import Path

import pytest

from tests.sentences import LINK, SPAN, long_sentences, sentences
from tests.words import ROOT, docstring_problems, everything, hits_in

LIMITS = {
    "titanlite": 0,
    "docs": 0,
    "tests": 0,
    "benchmarks": 0,
    "examples": 0,
    ".": 0,
}
"""Hits in each folder; "." stands for the files beside them. Lower a limit when its count has fallen; the aim is 0."""


def rules(tmp_path: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rules that a file with this text would break."""
    monkeypatch.setattr("tests.words.ROOT", tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    return [hit.rule for hit in hits_in(tmp_path / name)]


@pytest.mark.slow
def test_counts_fall() -> None:
    hits = [hit for path in everything() for hit in hits_in(path)]
    counts = Counter(hit.path.split("/")[0] if "/" in hit.path else "." for hit in hits)
    risen = {folder: count for folder, count in counts.items() if count > LIMITS.get(folder, 0)}
    shown = [
        f"{hit.path}:{hit.line}: [{hit.rule}] {hit.text}" for hit in hits if LIMITS.get(hit.path.split("/")[0]) == 0
    ]
    assert not risen, "\n".join([f"{risen} against {LIMITS}; `python -m tests.words` lists them", *shown])


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "Return the newest checkpoint.",
        "Bytes of all files.",
        "A folder that is a checkpoint.\n\nArgs:\n    path: of the folder.",
        "tokens and labels [B, L] int64.",
        "(source, count) of each sample.",
        "Equality of two names.",
        "Muon, as in\nhttps://kellerjordan.github.io/posts/muon/",
        "Print the steps:\n\n    step 1\n    step 2",
    ],
)
def test_docstrings_that_are_sentences(text: str) -> None:
    assert docstring_problems(text) == []


@pytest.mark.parametrize("first", ["Of", "What", "Whose", "In which", "Equal", "Also", "That", "To", "If", "Its"])
def test_openings_that_are_fragments(first: str) -> None:
    [problem] = docstring_problems(f"{first} the operands.")
    assert problem == f"begins with {first.split()[0]!r}: begin with a verb or a noun"


def test_a_docstring_ends_as_a_sentence() -> None:
    assert docstring_problems("Bytes of all files") == ["ends with 'of all files': end the sentence"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("A run that goes\non later.", "go on"),
        ("Scales travel in one message.", "message"),
        ("The matrix products of a layer.", "product"),
        ("No CPU units for bfloat16.", "units for bfloat16"),
        ("At any moment it is killed.", "moment"),
        ("Two sharded copies.", "copies"),
        ("The plan rehearses it.", "rehearse"),
        ("Four ways out are named.", "ways out"),
        ("`--nodes-of 8`", "nodes-of"),
        ("The table says more.", "tell, say"),
        ("A damaged one is left aside.", "leave aside"),
        ("See the figures below.", "figure"),
        ("It computes more again.", "compute again"),
        ("From cheap to dear.", "dear"),
    ],
)
def test_words_of_no_field(text: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules(tmp_path, "docs/page.md", text, monkeypatch) == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "Adam keeps a first and a second moment; moments are float32.",
        "The error message names the key.",
        "A commit's message begins with a verb.",
        "The product of the degrees is the world size.",
        "`F.scaled_dot_product_attention` on the dot product.",
        "What tells two tokenizers apart.",
        "Figure 3 shows it.",
        "It copies the weights.",
    ],
)
def test_the_same_words_used_rightly(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules(tmp_path, "docs/page.md", text, monkeypatch) == []


def test_python_is_read_by_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = '''"""Of files."""
# the one that we
# leave aside
def settle(figures: int, messages: list[str]) -> str:
    """Return text."""
    return f"{figures} is told, file.tell()" + "settled" + "product"
'''
    found = rules(tmp_path, "titanlite/part.py", source, monkeypatch)
    assert found == ["docstring", "leave aside", "figure", "settle", "figure", "settle", "tell, say"]
    assert rules(tmp_path, "tests/part.py", source, monkeypatch) == found
    assert rules(tmp_path, "examples/part.py", source, monkeypatch) == found[1:], "docstrings of examples are free"


def test_keys_on_disk_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules(tmp_path, "titanlite/part.py", 'entry = {"meaning": 1}', monkeypatch) == []
    assert rules(tmp_path, "titanlite/part.py", "meaning = 1", monkeypatch) == ["meaning"]


def test_everything_is_looked_at() -> None:
    found = {str(path.relative_to(ROOT)) for path in everything()}
    assert {"README.md", "titanlite/train.py", "docs/data.md", "tests/helpers.py", "train_configs/debug.toml"} <= found


MORE_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")


@pytest.mark.long
def test_sentences_are_short() -> None:
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in MORE_PAGES)]
    pages = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    assert {name: found for name, text in pages.items() if (found := long_sentences(text))} == {}
    lengths = {name: [len(it.split()) for it in sentences(text)] for name, text in pages.items()}
    assert {name: mean for name, found in lengths.items() if (mean := sum(found) / len(found)) >= 18} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# Title\n\nOne sentence ends. It is `a b c` long:\n\n    code\n", ["One sentence ends.", "It is CODE long:"]),
        ("See [the page](x.md): titanlite is\nlast.", ["See the page:", "titanlite is last."]),
        ("- An item of words\n- two of words\n  on two lines", ["An item of words", "two of words on two lines"]),
        ("1. Ten of words\n    on two lines", ["Ten of words on two lines"]),
        ("Text of a page\n    on two lines", ["Text of a page on two lines"]),
        ("- A table follows\n  | a | b c d e |\n  |---|---|\n", ["A table follows"]),
        ("- A block follows\n  ```toml\n  a = 1\n  ```\n  and is left out", ["A block follows", "and is left out"]),
        ("The code `` a ` b `` counts once. ``a``", ["The code CODE counts once."]),
        # ends of sentences
        ("It ends here. torchrun begins one, too.", ["It ends here.", "torchrun begins one, too."]),
        ("(It ends here.) The next one begins.", ["(It ends here.)", "The next one begins."]),
        ("**It ends here.** The next one begins.", ["**It ends here.**", "The next one begins."]),
        ('"It ends here." [The next](x.md) one begins.', ['"It ends here."', "The next one begins."]),
        ("It ends here. 24 GPUs are enough.", ["It ends here.", "24 GPUs are enough."]),
        # none of these ends one
        ("It has e.g. `a` and more, i.e. Words vs. Numbers.", ["It has e.g. CODE and more, i.e. Words vs. Numbers."]),
        ("A run of ... steps takes 0.5 s", ["A run of ... steps takes 0.5 s"]),
        ("It is one: small letters; and more", ["It is one: small letters; and more"]),
        # an enumeration of code
        ("Set `a`, `b` and `c`, or `d`, to one", ["Set CODE, to one"]),
        ("Set `a` to `b`, `c` for d", ["Set CODE to CODE for d"]),
    ],
)
def test_what_a_sentence_is(text: str, found: list[str]) -> None:
    assert [*sentences(text)] == found


def test_what_a_long_sentence_is() -> None:
    assert long_sentences("word " * 25) == []
    assert long_sentences("word " * 26) == [" ".join(["word"] * 26)]
    assert len(long_sentences("- item\n- " + "word " * 26 + "\n\n| " + "word " * 30)) == 1
    assert len(long_sentences("`code` word, " * 13)) == 1


def test_links_are_closed() -> None:
    """A link whose bracket is not closed is text, which the site's builder does not report."""
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in MORE_PAGES), ROOT / "CHANGELOG.md"]
    rest = {path.name: LINK.sub("", SPAN.sub("", path.read_text())) for path in files}
    assert {name: line for name, text in rest.items() for line in text.splitlines() if "](" in line} == {}
