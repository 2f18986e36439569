"""The page of `titanlite report` in a real browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.run_folders import write_run
from titanlite.tools.report.charts import report_of
from titanlite.tools.report.page import page
from titanlite.tools.report.run_records import read_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=8000 --enable-logging=stderr --v=0"
)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")
@pytest.mark.parametrize(
    "theme", [pytest.param("light", marks=pytest.mark.slow), pytest.param("dark", marks=pytest.mark.nightly)]
)
def test_the_page_in_a_browser(theme: str, tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / "run")), read_run(write_run(tmp_path / "other", lr=0.2))]
    file = tmp_path / "report.html"
    # What plotly has drawn is read back from its own objects.
    read_back = (
        "<script>document.body.dataset.values = JSON.stringify(['loss', 'phases'].map("
        "name => document.getElementById('chart-' + name).data.map(trace => [...trace.x])))</script></body>"
    )
    dark = theme == "dark"
    text = (
        page(runs).replace("</body>", read_back).replace("matchMedia(", f"{json.dumps(dark)} ? {{matches: true}} : (")
    )
    file.write_text(text)
    picture = tmp_path / "page.png"
    words = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={tmp_path}/browser", "--window-size=1280,2400"]
    shown = subprocess.run(
        [*words, "--dump-dom", f"file://{file}"], capture_output=True, text=True, timeout=110, check=True
    )
    assert "CONSOLE" not in shown.stderr, "an error of the page"
    assert f'data-theme="{theme}"' in shown.stdout
    assert int(re.findall(r'data-drawn="(\d+)"', shown.stdout)[0]) == len(report_of(runs)["charts"])
    [values] = re.findall(r'data-values="([^"]*)"', shown.stdout)
    loss, phases = json.loads(values)
    assert loss[0] == [1, 2, 3, 4, 5, 6]
    assert phases[0] == [8 / 3600, 8 / 3600]
    assert "done </script><b>" in shown.stdout.replace("&lt;", "<").replace("&gt;", ">")
    assert "http://" not in page(runs).partition('id="report"')[2].replace("http://www.w3.org", "")
    # On a phone nothing of two runs is cut: what the frame of 390 pixels says of itself is read from the outer page.
    tell = (
        "const cards = [...document.querySelectorAll('.card')];"
        "parent.postMessage(Math.max(...cards.map(card => card.scrollWidth - card.clientWidth)), '*')"
    )
    (tmp_path / "phone.html").write_text(page(runs).replace("</body>", f"<script>{tell}</script></body>"))
    (tmp_path / "frame.html").write_text(
        "<body><script>addEventListener('message', event => { document.body.dataset.cut = event.data; })</script>"
        "<iframe src=phone.html width=390 height=900></iframe></body>"
    )
    frame = [*words, "--dump-dom", f"file://{tmp_path}/frame.html"]
    shown = subprocess.run(frame, capture_output=True, text=True, timeout=110, check=True)
    assert 'data-cut="0"' in shown.stdout
    subprocess.run([*words, f"--screenshot={picture}", f"file://{file}"], capture_output=True, timeout=110, check=True)
    assert len(picture.read_bytes()) > 30_000
