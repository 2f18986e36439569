"""Make the pictures of docs/see_the_run.md: train two small runs, and draw their report.

    python scripts/pictures.py            # needs Chromium: apt install chromium

Takes two minutes on 2 CPU cores.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from titanlite.tools.report.page import page
from titanlite.tools.report.run_records import read_run

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SMALL = "--model.args={dim=96,n_layers=4,n_heads=6,n_kv_heads=2,hidden_dim=256}"
OPTIONS = ["--training.steps=80", "--metrics.log_freq=1", "--validation.freq=20", "--checkpoint.interval=40", SMALL]
BROWSER = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=8000 --window-size=1280,1760"
)


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("error: needs Chromium: apt install chromium")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, lr in (("lr_3e-3", 3e-3), ("lr_1e-3", 1e-3)):
            own = [f"--job.name={name}", f"--optimizer.lr={lr}", "--metrics.layers.freq=10", *OPTIONS]
            subprocess.run([sys.executable, "-m", "titanlite", "train", "debug", *own], cwd=folder, check=True)
        runs = [read_run(folder / "outputs" / name) for name in ("lr_3e-3", "lr_1e-3")]
        for theme in ("light", "dark"):
            file = folder / f"{theme}.html"
            file.write_text(
                page(runs).replace(
                    'setTheme(matchMedia("(prefers-color-scheme: dark)").matches',
                    f"setTheme({json.dumps(theme == 'dark')}",
                )
            )
            words = [browser, *BROWSER.split(), f"--user-data-dir={folder}/browser", f"file://{file}"]
            subprocess.run([*words, f"--screenshot={IMAGES}/report_{theme}.png"], check=True)


if __name__ == "__main__":
    main()
