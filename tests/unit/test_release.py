"""A release: its notes, and the workflow that publishes it."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

- not yet

## [0.2.0] - 2026-12-01

- see [data](docs/data.md#mixture), [a site](https://a.b/c) and [below](#here)

### Fixed

## [0.1.0]

- first
"""


def notes(*words: str) -> str:
    return runpy.run_path(str(ROOT / "scripts" / "release_notes.py"))["notes"](*words)


def test_notes_are_the_entry_of_the_version() -> None:
    assert notes(CHANGELOG, "0.1.0") == "- first\n"
    assert notes(CHANGELOG, "0.3.0") == "- not yet\n"
    text = "- see [data]({}docs/data.md#mixture), [a site](https://a.b/c) and [below](#here)\n\n### Fixed\n"
    assert notes(CHANGELOG, "0.2.0") == text.format("")
    assert notes(CHANGELOG, "0.2.0", "https://host/me/it") == text.format("https://host/me/it/blob/v0.2.0/")
    with pytest.raises(ValueError, match=r"0\.3\.0"):
        notes("# Changelog\n", "0.3.0")
    assert notes((ROOT / "CHANGELOG.md").read_text(), "0.1.0")


def test_the_site_of_a_release_says_what_to_clone() -> None:
    pytest.importorskip("mkdocs")
    from scripts.site_hooks import on_page_markdown

    page, text = SimpleNamespace(file=SimpleNamespace(src_uri="index.md")), (ROOT / "docs/index.md").read_text()
    for address in ("", "https://host/me/it"):
        found = on_page_markdown(text, page, SimpleNamespace(repo_url=address), cast(Any, None))
        assert f"git clone {address or 'URL'} titanlite" in found


def test_a_tag_is_checked_before_it_is_published() -> None:
    workflow: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}, "`on` is a boolean in YAML"
    jobs = workflow["jobs"]
    assert "scripts/release.sh" in [step.get("run") for step in jobs["build"]["steps"]]
    assert (ROOT / "scripts" / "release.sh").stat().st_mode & 0o100
    waits = {
        name: {job["needs"]} if isinstance(job.get("needs"), str) else {*job.get("needs", [])}
        for name, job in jobs.items()
    }
    assert all(name == "build" or "build" in before or "pypi" in before for name, before in waits.items())
    allowed = {
        name: {key for key, value in job.get("permissions", {}).items() if value == "write"}
        for name, job in jobs.items()
    }
    assert allowed["build"] == set()
    assert (jobs["pypi"]["environment"], allowed["pypi"]) == ("pypi", {"id-token"}), "no token is stored"
    assert not any("secrets." in str(job) for job in jobs.values())
