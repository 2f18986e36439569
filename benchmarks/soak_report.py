"""Report of a soak: the table of docs/cluster.md and its picture, from the files that a soak leaves."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from soak_job import ROOT

PAGE, PICTURE = ROOT / "docs" / "cluster.md", ROOT / "docs" / "images" / "soak.svg"
BEGIN, END = "<!-- from benchmarks/soak.py --report: begin -->", "<!-- end -->"
HEADER = (
    "fault", "times", "noticed after, s", "trains again after, s", "steps lost", "exit code", "printed, for example",
)  # fmt: skip
MOST_CHARACTERS = 110
GROUPS = {"kill": "#c92a2a", "host": "#c92a2a", "term": "#1971c2", "usr1": "#1971c2", "ranks": "#9c36b5",
          "stop": "#e8590c", "link": "#e8590c", "disk": "#2f9e44", "nan": "#0c8599"}  # fmt: skip
"""Color of the marks of a fault, by how its kind begins."""
OTHER = "#846358"


def report(folder: Path) -> int:
    """Write the table and the picture; returns the exit code of the command."""
    records = [json.loads(line) for line in (folder / "soak.jsonl").read_text().splitlines()]
    ends = [record for record in records if record["event"] == "end"]
    if not ends:
        print(f"error: the soak in {folder} has not ended", file=sys.stderr)
        return 2
    curves = json.loads((folder / "curves.json").read_text())
    faults = [record for record in records if record["event"] == "fault"]
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    draw(curves, faults, PICTURE)
    skipped = [record for record in records if record["event"] == "skipped"]
    PAGE.write_text(with_results(PAGE.read_text(), results(ends[-1], faults, skipped)))
    print(f"wrote {PAGE} and {PICTURE}")
    return 0


def with_results(page: str, text: str) -> str:
    """Return a page with the part between its two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def results(end: Mapping[str, Any], faults: Sequence[Mapping[str, Any]], skipped: Sequence[Mapping[str, Any]]) -> str:
    """Return the measured part of the page."""
    counts = ", ".join(f"{ranks} ({last:,})" for last, ranks in end["segments"])
    lost = sum(fault["lost"] for fault in faults)
    lines = [
        f"{end['steps']:,} steps, {len(faults)} faults, {end['starts']} starts, {end['seconds'] / 60:.0f} minutes. "
        f"{end['steps_trained']:,} steps were trained, {lost:,} of them a second time after faults. "
        f"Numbers of ranks, each with its last step: {counts}.",
        "",
        f"- Problems: {len(end['problems'])}." + "".join(f"\n  - {problem}" for problem in end["problems"]),
        f"- Samples: the hash of every step of every start is that without faults ({end['hashes']:,} compared).",
        f"- Losses, and the {end['tensors']} files of tensors of the last checkpoint: the same bits as without faults "
        "on the same rank counts.",
        f"- Losses against the uninterrupted run on 2 ranks: {_first_difference(end)}.",
        "",
        *table(faults),
        *(f"\nSkipped: {one['title']} ({one['reason']})." for one in skipped),
    ]
    return "\n".join(lines) + "\n"


def _first_difference(end: Mapping[str, Any]) -> str:
    if end["first_different_step"] is None:
        return "the same bits"
    return (
        f"the same bits up to step {end['first_different_step'] - 1:,}; after that, other rank counts round "
        f"differently: at most {end['largest_difference']:.1g}"
    )


def table(faults: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of faults survived, by kind."""
    lines = [_line(*HEADER), _line(*["---"] * len(HEADER))]
    for kind in dict.fromkeys(sorted(fault["kind"] for fault in faults)):
        of_kind = [fault for fault in faults if fault["kind"] == kind]
        noticed = [fault["noticed_seconds"] for fault in of_kind if fault["noticed_seconds"] is not None]
        codes = sorted({str(code) for fault in of_kind for code in fault["codes"]}) or ["continues"]
        lines.append(
            _line(
                of_kind[0]["title"],
                str(len(of_kind)),
                _spread(noticed),
                _spread([fault["training_seconds"] for fault in of_kind]),
                _spread([fault["lost"] for fault in of_kind], "{:.0f}"),
                ", ".join(codes),
                _shortened(of_kind[0]["printed"]),
            )
        )
    return lines


def _spread(values: Sequence[float], form: str = "{:.1f}") -> str:
    """Return the median and the worst."""
    return f"{form.format(median(values))}, worst {form.format(max(values))}" if values else "not needed"


def _shortened(text: str) -> str:
    text = text.replace("`", "'")
    return f"`{text[: MOST_CHARACTERS - 3]}...`" if len(text) > MOST_CHARACTERS else f"`{text}`" if text else ""


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def draw(curves: Mapping[str, Any], faults: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw both losses, their difference, and the faults by kind below."""
    import matplotlib  # of the test packages, as what else the soak needs

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ratios = [10, 4, 1 + 0.7 * len({fault["kind"] for fault in faults})]
    sheet, (losses, apart, lanes) = plt.subplots(
        3, sharex=True, figsize=(9.5, 0.4 * sum(ratios)), height_ratios=ratios, layout="constrained"
    )
    steps = range(1, len(curves["faults"]) + 1)
    losses.plot(steps, curves["reference"], color="#74a9e8", linewidth=4, label="without faults, 2 ranks")
    losses.plot(steps, curves["faults"], color="#d9480f", linewidth=1, label=f"with {len(faults)} faults")
    losses.set_ylabel("loss (nats a token)")
    losses.legend()
    pairs = zip(steps, curves["faults"], curves["reference"], strict=True)
    differ = [(step, abs(one - other)) for step, one, other in pairs if None not in (one, other) and one != other]
    apart.semilogy(*zip(*differ, strict=True) if differ else ([], []), ".", color="#9c36b5")
    apart.set_ylabel("difference\n(no dot: none)")
    begin = 0
    for last, ranks in curves["segments"]:
        apart.axvline(last, color="#808080", alpha=0.3)
        apart.text((begin + last) / 2, 1.02, f"{ranks} ranks", transform=apart.get_xaxis_transform(), ha="center")
        begin = last
    for fault in faults:
        step, color = fault["at_step"], color_of(fault["kind"])
        lanes.plot(step, fault["title"], "|", color=color, markersize=10)
        losses.plot(step, curves["faults"][step - 1], ".", color=color)
    lanes.margins(y=0.1)
    lanes.set_xlabel("optimizer step")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "soak"}):
        sheet.savefig(path, transparent=True)
    plt.close(sheet)


def color_of(kind: str) -> str:
    return next((value for name, value in GROUPS.items() if kind.startswith(name)), OTHER)
