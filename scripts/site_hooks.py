"""Hooks of the site (mkdocs.yml): pages made from the code, files outside docs/ that are pages, links out of docs/, and
llms.txt (https://llmstxt.org), the index of the site for language models.

Links in the Markdown are those of the repository, so that they work there. On the site, a link to another page of the
site leads to that page. A link to any other file leads to the repository, if TITANLITE_REPOSITORY has its address.
"""

import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.reference import GENERATED  # noqa: E402

PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    **{
        str(page.relative_to(ROOT)): f"benchmarks_{page.name}"
        for folder in ("releases", "archive")
        for page in sorted((ROOT / "benchmarks" / folder).glob("*.md"))
    },
    "README.md": "index.md",
}
"""Pages of the site, by their files in the repository. The site has a landing page of its own."""
LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\(([^)\s:#]+)(#[^)\s]*)?(\s+\"[^\"]*\")?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from the code, and those that lie outside docs/."""
    for page, made in GENERATED.items():
        files.append(File.generated(config, page, content=made()))
    for source, page in PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to pages of the site, or to the repository, which is also what the first command clones."""
    place = next((source for source, name in PAGES.items() if name == page.file.src_uri and name != "index.md"), None)
    source = PurePosixPath(place or f"docs/{page.file.src_uri}")

    def pointed(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], (match[3] or "") + (match[4] or "")
        target = normpath(str(source.parent / path))
        page_name = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if page_name is not None:
            return f"{text}({relpath(page_name, str(PurePosixPath(page.file.src_uri).parent))}{anchor})"
        if not (ROOT / target).exists():
            raise ValueError(f"{source}: a link leads to {target}, which is no file")
        if config.repo_url:
            return f"{text}({config.repo_url.rstrip('/')}/blob/main/{target}{anchor})"
        return text[1:-1]

    if config.repo_url:
        markdown = markdown.replace("git clone URL", f"git clone {config.repo_url}")
    return LINK.sub(pointed, markdown)


def on_page_context(context: Any, page: Page, config: Any, nav: Navigation) -> None:
    """Write llms.txt with the landing page: every page of the navigation, with its first sentence."""
    if not page.is_homepage:
        return
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for entry in nav.items:
        lines += [] if isinstance(entry, Page) else ["", f"## {entry.title}", ""]
        for one in [entry] if isinstance(entry, Page) else entry.children or ():
            if isinstance(one, Page) and not one.is_homepage:
                about = first_sentence(one.markdown or "")
                lines.append(f"- [{one.title}]({one.canonical_url or one.url})" + (about and f": {about}"))
    Path(config.site_dir).mkdir(parents=True, exist_ok=True)
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def first_sentence(markdown: str) -> str:
    """Return the first sentence below the title, without its markup; "" if no prose is there."""
    paragraphs = (text for text in re.split(r"\n\s*\n", markdown) if not re.match(r"# |<!--|!\[", text.strip()))
    prose = next(paragraphs, "")
    if not re.match(r"[\w`*\[]", prose):
        return ""
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", " ".join(prose.split()))
    return re.split(r"(?<=[\w)]\.)\s", plain)[0].rstrip(":")
