"""Aim (https://aimstack.io) as a logger:  pip install aim, then

    [metrics]
    loggers = ["examples/aim_logger.py:Aim"]

`aim up` shows the runs of the folder .aim below the current folder. A resumed run continues its run at Aim, where a
step that is logged again replaces itself.
"""

from pathlib import Path
from typing import Any

import tomli


class Aim:
    """One run at Aim for each run. Aim chooses its name, which is kept in the folder of the run."""

    def __init__(self, folder: Path, *, step: int) -> None:
        import aim  # pyright: ignore[reportMissingImports]

        name = folder / "aim.txt"
        known = name.read_text() if name.exists() else None
        self.run: Any = aim.Run(known, experiment=folder.name, capture_terminal_logs=False)
        name.write_text(self.run.hash)
        self.run["config"] = tomli.loads((folder / "config.toml").read_text())

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self.run.track(metrics, step=step)

    def close(self) -> None:
        self.run.close()
