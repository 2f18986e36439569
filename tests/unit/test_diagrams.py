"""The diagrams of docs/parallelism.md are those that scripts/diagrams.py draws."""

from pathlib import Path
from xml.etree import ElementTree

from scripts.diagrams import DIAGRAMS

DOCS = Path(__file__).parents[2] / "docs"


def test_diagrams_are_current() -> None:
    drawn = {name: draw() for name, draw in DIAGRAMS.items()}
    kept = {name: (DOCS / "images" / name).read_text() for name in drawn}
    assert {name for name in drawn if drawn[name] != kept[name]} == set(), "make them anew: python scripts/diagrams.py"


def test_each_diagram_is_on_the_page_once() -> None:
    page = (DOCS / "parallelism.md").read_text()
    for name, draw in DIAGRAMS.items():
        assert ElementTree.fromstring(draw()).tag == "{http://www.w3.org/2000/svg}svg"
        assert page.count(f"](images/{name})") == 1
