"""Measure the variants on the stand-in, and keep what was found for the tests and for docs/plan.md.

    ./run_tests.sh null_gpu --record [--only NAME]      measure, write recorded.json and the table of docs/plan.md
    python tests/null_gpu/record.py --table             only the table, from what is recorded

Launches and memory that went up are written too: look at the difference before it is committed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.null_gpu.build import build, environment  # noqa: E402
from tests.null_gpu.variants import VARIANTS, Variant  # noqa: E402

RECORDED, PAGE = HERE / "recorded.json", HERE.parents[1] / "docs/plan.md"
BEGIN, END = "<!-- from tests/null_gpu/record.py --table: begin -->", "<!-- end -->"
KEPT = ("torch", "allocated", "reserved", "launches", "collectives", "waits", "retries", "plan")
SHOWN = (
    "8B, batch 1", "8B, batch 2", "8B, batch 2, compiled", "float8 tensorwise, batch 2, compiled", "full AC",
    "full AC, compiled", "accumulation 2", "reproducible layouts, accumulation 2", "HSDP 2 x 4",
    "CPU offload, 64 GPUs", "bfloat16 weights and moments", "Qwen3-Next 80B, 32 GPUs", "context 2, 16,384 tokens",
    "context 64, 1,048,576 tokens, full AC", "tensor 2", "30B-A3B, 16 GPUs, expert 8", "pipeline 2, first stage",
    "70B, 64 GPUs", "70B, 64 GPUs, tensor 8", "405B, 512 H200",
)  # fmt: skip
"""Names of the variants that the page shows."""
COLUMNS = ["allocated", "planned", "reserved", "planned", "launches", "collectives", "waits"]
EAGER_GIB, COMPILED_SHARE = 0.1, 0.01
"""Largest differences between a plan and the peak of allocated memory."""


def plan_error(found: dict[str, Any]) -> float:
    """GiB that the plan is above the peak of allocated memory."""
    return found["plan"]["allocated"] - found["allocated"]


def allowed_plan_error(variant: Variant, recorded: dict[str, Any]) -> float:
    """Largest distance of a plan, in GiB. A known deviation must not grow."""
    aim = COMPILED_SHARE * recorded["allocated"] if variant.is_compiled else EAGER_GIB
    return max(aim, abs(plan_error(recorded)) + 0.01) if "plan" in recorded else aim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    failed = [] if options.table else measure_all([variant for variant in VARIANTS if options.only in variant.name])
    PAGE.write_text(with_table(PAGE.read_text()))
    sys.exit(f"not measured: {', '.join(failed)}" if failed else 0)


def measure_all(variants: list[Variant]) -> list[str]:
    """Measure and keep variants. Return the names of those that failed."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        for variant in variants:
            found = measured(variant, environment(Path(folder)))
            if found is None:
                failed.append(variant.name)
            else:
                keep(variant, found)
    return failed


def measured(variant: Variant, environ: dict[str, str]) -> dict[str, Any] | None:
    """Measure a step in a process of its own. None: the process failed, and has printed why."""
    result = subprocess.run(
        [sys.executable, str(HERE / "measure.py"), *variant.words, "--json"],
        env={**os.environ, **environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"},
        text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    if result.returncode:
        return None
    found = json.loads(result.stdout.splitlines()[-1])
    return {key: found[key] for key in KEPT if key in found}


def keep(variant: Variant, found: dict[str, Any]) -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    recorded[variant.name] = found
    ordered = {variant.name: recorded[variant.name] for variant in VARIANTS if variant.name in recorded}
    RECORDED.write_text(json.dumps(ordered, indent=1) + "\n")
    print(variant.name, *values_of(found), sep=" | ", flush=True)


def table() -> str:
    """Return the Markdown table of docs/plan.md. GiB, and counts of one step."""
    recorded = json.loads(RECORDED.read_text())
    lines = [f"| {' | '.join(['config', *COLUMNS])} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {' | '.join([name, *values_of(recorded[name])])} |" for name in SHOWN]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return the page with its table made again: what stands between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def values_of(found: dict[str, Any]) -> list[str]:
    """Return the cells of COLUMNS."""
    counts: dict[str, int] = {}
    for kind, count in found["collectives"].items():
        name = kind.split(",")[0].split()[0]
        counts[name] = counts.get(name, 0) + count
    plan = found.get("plan", {})
    return [
        f"{found['allocated']:.2f}",
        f"{plan['allocated']:.2f}" if plan else "none",
        f"{found['reserved']:.2f}",
        f"{plan['reserved']:.2f}" if "reserved" in plan else "none",
        f"{found['launches']:,}",
        " + ".join(str(counts.get(name, 0)) for name in ("all-gather", "reduce-scatter", "all-reduce")),
        f"{sum(found['waits'].values())}",
    ]


if __name__ == "__main__":
    main()
