"""Train a config with several learning rates, one after the other, and print a table.

    python examples/sweep.py [CONFIG] [LR ...]          # default: debug, with 1e-3, 3e-3 and 1e-2

Each run is an ordinary one, in outputs/<config>-lr-<rate>. A sweep that was interrupted resumes: runs that are complete
only print their row. `titanlite report outputs/debug-lr-*` draws them.
"""

import sys
from pathlib import Path

import titanlite


def main() -> None:
    name, *rates = [*sys.argv[1:], *["debug"][len(sys.argv) - 1 :]]
    rows = []
    for rate in [float(rate) for rate in rates] or [1e-3, 3e-3, 1e-2]:
        config = titanlite.load_config(name, {"job.name": f"{Path(name).stem}-lr-{rate:g}", "optimizer.lr": rate})
        records = titanlite.run_training(config)
        best = min((record["loss"] for record in records.validation if record["loss"] is not None), default=None)
        rows.append((rate, records.column("loss")[-1], best))
    print(f"{'lr':>8}  {'last loss':>9}  {'best validation loss':>20}")
    for rate, last, best in rows:
        print(f"{rate:8.1e}  {last:9.4f}  {best if best is not None else float('nan'):20.4f}")


if __name__ == "__main__":
    main()
