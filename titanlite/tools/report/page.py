"""`titanlite report`: one HTML page about runs that needs no network, or the same page served while a run trains."""

import html
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import write_atomically
from titanlite.tools.report.charts import report_of
from titanlite.tools.report.run_records import RunRecords, read_run

TEMPLATE = Path(__file__).with_name("page.html")
WATCH_SECONDS = 5
"""Time between two looks of a served page at the records."""
SILENT_SECONDS = 10.0
"""Time for which a connection to a served page may be silent: a browser asks at once."""


def report(runs: Sequence[Path], *, out: Path | None = None, watch: bool = False, port: int = 8765) -> None:
    """Write an HTML page about runs, or serve it while they train.

    The page needs no network. Several runs are drawn in the same charts.

    Args:
        runs (RUN): folder of a run, such as outputs/debug
        out (FILE): page to write; default: report.html in the folder of the first run
        watch: serve the page on this machine alone, and keep it current
        port: port of --watch; default: 8765; 0: any

    Raises:
        UserError: a folder is no run, a file cannot be written, or a package is missing.

    Example:
        outputs/debug
        outputs/first outputs/second --out compare.html
        outputs/debug --watch
    """
    if out and not out.parent.is_dir():
        raise UserError(f"titanlite report: --out {out}: there is no folder {out.parent}")
    if find_spec("plotly") is None:
        raise UserError(f"plotly is not installed: {install_hint('report')}")
    if watch:
        serve(runs, port=port)
        return
    found = [read_run(path) for path in runs]
    _check_names(found)
    place = out or runs[0] / "report.html"
    try:
        write_atomically(place, page(found))
    except OSError as error:
        raise UserError(f"{error.filename or place}: {error.strerror}") from None
    print(f"wrote {place}")


def _check_names(runs: Sequence[RunRecords]) -> None:
    names = [run.name for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two runs are called {twice}: name each once, and rename one of two folders of the same name")


def page(runs: Sequence[RunRecords], *, watch_seconds: int = 0) -> str:
    """Return the page.

    Args:
        watch_seconds: time between two looks at report.json of the server; 0 for a page that stands alone.
    """
    from plotly.offline import get_plotlyjs

    values = {
        "title": html.escape(", ".join(run.name for run in runs)).encode(errors="replace").decode(),
        "watch": str(watch_seconds),
        "report": to_json(report_of(runs)),
        "plotly": get_plotlyjs().replace("</script", "<\\/script"),
    }
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(values)  # in one pass: a run may be called $report


def to_json(report: dict[str, Any]) -> str:
    """Return a report as JSON for a script element, which any "<" in a name could end. NaN becomes null."""
    return json.dumps(_finite(report), separators=(",", ":")).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# While a run trains


class _Handler(BaseHTTPRequestHandler):
    """Answers to GET, for the page and its report.json.

    Args:
        timeout: seconds for which a connection may be silent.
    """

    def __init__(self, *args: Any, paths: Sequence[Path], timeout: float) -> None:
        self._paths, self._timeout = paths, timeout
        super().__init__(*args)

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self._timeout)

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
            self.send_error(403)  # a page of another site that resolves its own name to this machine
        elif self.path not in ("/", "/report.json"):
            self.send_error(404)
        else:
            with suppress(ConnectionError, TimeoutError):  # the reader went away
                self._answer()

    def _answer(self) -> None:
        try:
            runs = [read_run(path) for path in self._paths]
        except UserError as error:
            self.send_error(503, explain=str(error))
            return
        is_page = self.path == "/"
        body = (page(runs, watch_seconds=WATCH_SECONDS) if is_page else to_json(report_of(runs))).encode(
            errors="replace"
        )
        self.send_response(200)
        self.send_header("Content-Type", f"{'text/html' if is_page else 'application/json'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for each request."""


def server(paths: Sequence[Path], *, port: int, timeout: float = SILENT_SECONDS) -> ThreadingHTTPServer:
    """Return a server of the page on this machine alone. It only reads.

    Args:
        timeout: seconds after which a silent connection is closed.

    Raises:
        UserError: the port is taken, or a folder is no run.
    """
    _check_names([read_run(path) for path in paths])
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, paths=paths, timeout=timeout))
    except (OSError, OverflowError) as error:
        raise UserError(f"--port: {port} cannot be used: {error}") from None


def serve(paths: Sequence[Path], *, port: int) -> None:
    with server(paths, port=port) as serving:
        print(f"http://127.0.0.1:{serving.server_port}  (Ctrl-C ends it)", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            return
