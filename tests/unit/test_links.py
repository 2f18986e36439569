"""Links of the Markdown pages lead to files and headings: on a code host, and on the site (mkdocs.yml).

Functions that the page about the architecture names exist.
"""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from os.path import normpath
from pathlib import Path
from typing import Any

import pytest

PAGES = [
    *Path().glob("*.md"),
    *(
        page
        for folder in ("docs", "examples", "benchmarks", "tests", ".github")
        for page in sorted(Path(folder).rglob("*.md"))
    ),
]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"""\]\(\s*([^)\s]+)|^\[[^\]]+\]:\s*(\S+)|(?:href|src)=["']([^"']+)""", re.MULTILINE)


def links_of(page: Path) -> Iterator[str]:
    for match in LINK.finditer(CODE.sub("", FENCED.sub("", page.read_text()))):
        link = next(filter(None, match.groups()))
        if not re.match(r"[a-z]+:", link):
            yield link


def on_a_code_host(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def on_the_site(heading: str) -> str:
    """Return the anchor that Python-Markdown gives to a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def anchors_of(page: Path, slug: Callable[[str], str]) -> set[str]:
    text = FENCED.sub("", page.read_text())
    headings = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in re.findall(r"^#+ +(.+?) *$", text, re.M)
    ]
    named = re.findall(r"""(?:id|name)=["']([^"']+)""", text)
    once = {name for name, times in Counter(map(slug, headings)).items() if times == 1}
    return once | {*named}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        anchors = (anchors_of(target, slug) for slug in (on_a_code_host, on_the_site) if target.suffix == ".md")
        if not target.exists() or (anchor and not all(anchor in names for names in anchors)):
            dead.append(link)
    assert dead == []


def test_links_lead_to_files_that_git_has() -> None:
    """A file that git ignores is on this machine only."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout of git")
    files = {Path(name) for name in listed.stdout.splitlines()}
    known = files | {folder for file in files for folder in file.parents}
    targets = ((page, link.partition("#")[0]) for page in PAGES for link in links_of(page))
    assert [(page, path) for page, path in targets if path and Path(normpath(page.parent / path)) not in known] == []


def names_in(tree: ast.AST, before: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield f"{before}{node.name}"
            yield from names_in(node, f"{before}{node.name}.")


def test_the_architecture_names_functions_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", Path("docs/architecture.md").read_text())
    assert len(named) > 40
    modules = {file: {*names_in(ast.parse(Path("titanlite", file).read_text()))} for file, _ in named}
    assert [(file, name) for file, name in named if name not in modules[file]] == []


def test_llms_txt_lists_the_pages_of_the_site_with_what_each_is_about(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import get_files
    from mkdocs.structure.nav import get_navigation

    from scripts.site_hooks import first_sentence, on_page_context

    texts = {
        "index": "# Home",
        "run": "# Run\n\n<!-- not run: all -->\n\n`run.sh` trains on [one](a.md)\nGPU (or 2.5). More.",
        "list": "# List\n\n| a | b |\n|---|---|\n",
    }
    (tmp_path / "docs").mkdir()
    for name, text in texts.items():
        (tmp_path / "docs" / f"{name}.md").write_text(text)
    config: Any = MkDocsConfig(str(tmp_path / "mkdocs.yml"))
    config.load_dict(
        {"site_name": "name", "site_description": "What it is", "use_directory_urls": False, "plugins": [],
         "nav": [{"Home": "index.md"}, {"Train": ["run.md", "list.md"]}]}
    )  # fmt: skip
    assert config.validate() == ([], [])
    files = get_files(config)
    nav = get_navigation(files, config)
    for page in nav.pages:
        page.read_source(config)
    on_page_context({}, page=nav.pages[1], config=config, nav=nav)
    assert not (tmp_path / "site" / "llms.txt").exists(), "with the landing page only"
    on_page_context({}, page=nav.pages[0], config=config, nav=nav)
    assert (tmp_path / "site" / "llms.txt").read_text().splitlines() == [
        "# name", "", "> What it is", "", "## Train", "",
        "- [Run](run.html): run.sh trains on one GPU (or 2.5).", "- [List](list.html)",
    ]  # fmt: skip
    assert first_sentence("# A\n\n    code") == first_sentence("") == ""
