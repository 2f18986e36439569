"""`titanlite report`: one HTML page about runs that needs no network."""

import html
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import check_out, json_text, write_atomically
from titanlite.tools.report.charts import report_of
from titanlite.tools.report.run_records import RunRecords, read_run

TEMPLATE = Path(__file__).with_name("page.html")


def report(runs: Sequence[Path], *, out: Path | None = None) -> None:
    """Write an HTML page about runs.

    The page needs no network. Several runs are drawn in the same charts.

    Args:
        runs (RUN): folder of a run, such as outputs/debug
        out (FILE): page to write; default: report.html in the folder of the first run

    Raises:
        UserError: a folder is no run, a file cannot be written, or a package is missing.

    Example:
        outputs/debug
        outputs/first outputs/second --out compare.html
    """
    place = out or runs[0] / "report.html"
    check_page(place)
    try:
        found = [read_run(path) for path in runs]
        text = page(found)
    except UserError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        about = f"{type(error).__name__}: {error}"
        raise UserError(f"titanlite report: records are not of the form that a run writes ({about})") from None
    names = [run.name for run in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two runs are called {twice}: name each once, and rename one of two folders of the same name")
    write_page(place, text)
    print(f"wrote {place}")


def check_page(place: Path) -> None:
    """Check that a page can be made.

    Raises:
        UserError: there is no such folder, a link or a folder has its name, or a package is missing.
    """
    check_out(place, replaces_file=True)
    if not place.parent.is_dir():
        raise UserError(f"titanlite report: --out {place}: there is no folder {place.parent}")
    if find_spec("plotly") is None:
        raise UserError(f"plotly is not installed: {install_hint('report')}")


def write_page(place: Path, content: str) -> None:
    """Write a page.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_atomically(place, content)
    except OSError as error:
        raise UserError(f"{error.filename or place}: {error.strerror}") from None


def page(runs: Sequence[RunRecords]) -> str:
    """Return the page."""
    from plotly.offline import get_plotlyjs

    values = {
        "title": html.escape(", ".join(run.name for run in runs)).encode(errors="replace").decode(),
        "report": to_json(report_of(runs)),
        "plotly": get_plotlyjs().replace("</script", "<\\/script"),
    }
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(values)  # a run may be called $report


def to_json(report: dict[str, Any]) -> str:
    """Return a report as JSON for a script element, which any "<" in a name could end. NaN becomes null."""
    return json_text(report, separators=(",", ":")).replace("<", "\\u003c")
