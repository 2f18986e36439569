"""Report of a soak: the table of docs/cluster.md and its picture, from the files that a soak leaves."""

import json
import math
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
LEFT, WIDTH, TOP, LOSSES, APART, LANE = 250, 690, 24, 250, 90, 17
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #767676 }
.title { font-weight: 600 }
.grid { stroke: #808080; stroke-opacity: 0.3 }
.calm { fill: none; stroke: #74a9e8; stroke-width: 5; stroke-opacity: 0.75 }
.faults { fill: none; stroke: #d9480f; stroke-width: 1.1 }
.apart { fill: none; stroke: #9c36b5; stroke-width: 2.2; stroke-linecap: round }
"""


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
    PICTURE.write_text(picture(curves, faults))
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


# The picture


def picture(curves: Mapping[str, Any], faults: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG: both losses, their difference, and the faults by kind below. Colors suit light and dark pages."""
    steps = len(curves["faults"])
    titles = {fault["kind"]: fault["title"] for fault in sorted(faults, key=lambda fault: fault["kind"])}
    apart_top = TOP + LOSSES + 34
    lanes_top = apart_top + APART + 42
    height = lanes_top + LANE * len(titles) + 34

    def x(step: float) -> float:
        return LEFT + WIDTH * step / steps

    parts = _losses(curves, faults, x)
    parts += _difference(curves, x, apart_top)
    parts += _lanes(titles, faults, x, lanes_top)
    bottom = lanes_top + LANE * len(titles)
    for step in round_ticks(0, steps):
        parts.append(f'<line class="grid" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(svg_text(x(step), bottom + 16, f"{step:g}", anchor="middle"))
    parts.append(svg_text(LEFT + WIDTH / 2, bottom + 30, "optimizer step", anchor="middle"))
    size = f'width="{LEFT + WIDTH + 20}" height="{height}" viewBox="0 0 {LEFT + WIDTH + 20} {height}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>Loss of a run with {len(faults)} faults, '
        f"on that of a run without</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _losses(curves: Mapping[str, Any], faults: Sequence[Mapping[str, Any]], x: Any) -> list[str]:
    known = [loss for name in ("faults", "reference") for loss in curves[name] if loss is not None]
    low, high = math.floor(min(known) * 2) / 2, math.ceil(max(known) * 2) / 2

    def y(loss: float) -> float:
        return TOP + LOSSES * (high - loss) / (high - low)

    parts = [svg_text(16, TOP + 8, "loss (nats a token)", "title")]
    for loss in round_ticks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>')
        parts.append(svg_text(LEFT - 6, y(loss) + 4, f"{loss:g}", anchor="end"))
    for number, (css, name, label) in enumerate(
        (("calm", "reference", "without faults, 2 ranks"), ("faults", "faults", f"with {len(faults)} faults"))
    ):
        parts.append(f'<polyline class="{css}" points="{_points(curves[name], x, y)}"/>')
        line = TOP + 34 + 20 * number
        parts.append(f'<line class="{css}" x1="16" x2="46" y1="{line}" y2="{line}"/>')
        parts.append(svg_text(54, line + 4, label))
    for fault in faults:
        if (loss := curves["faults"][fault["at_step"] - 1]) is not None:
            where = f'cx="{x(fault["at_step"]):.1f}" cy="{y(loss):.1f}"'
            parts.append(f'<circle {where} r="3.2" fill="{color(fault["kind"])}"/>')
    parts.append(
        f'<circle cx="31" cy="{TOP + 74}" r="3.2" fill="{OTHER}"/>' + svg_text(54, TOP + 78, "a fault, by kind below")
    )
    return parts


def _difference(curves: Mapping[str, Any], x: Any, top: int) -> list[str]:
    pairs = zip(curves["faults"], curves["reference"], strict=True)
    apart = [None if one is None or other is None or one == other else abs(one - other) for one, other in pairs]
    known = [math.log10(value) for value in apart if value]
    low, high = (math.floor(min(known)), math.ceil(max(known))) if known else (-8, -6)
    high = max(high, low + 1)

    def y(value: float) -> float:
        return top + APART * (high - math.log10(value)) / (high - low)

    parts = [svg_text(16, top + 8, "difference of the two", "title"), svg_text(16, top + 24, "no dot: the same bits")]
    for power in range(low, high + 1, max(1, (high - low) // 3)):
        at = y(10.0**power)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(svg_text(LEFT - 6, at + 4, f"1e{power}", anchor="end"))
    parts.append(f'<path class="apart" d="{_dots(apart, x, y)}"/>')
    begin = 0
    for last, ranks in curves["segments"]:
        parts.append(svg_text((x(begin) + x(last)) / 2, top + APART + 20, f"{ranks}", anchor="middle"))
        parts.append(f'<line class="grid" x1="{x(last):.1f}" x2="{x(last):.1f}" y1="{top}" y2="{top + APART + 24}"/>')
        begin = last
    return [*parts, svg_text(LEFT - 6, top + APART + 20, "ranks", anchor="end")]


def _lanes(titles: Mapping[str, str], faults: Sequence[Mapping[str, Any]], x: Any, top: int) -> list[str]:
    parts = []
    for number, (kind, title) in enumerate(titles.items()):
        middle = top + LANE * number + LANE / 2
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{middle}" y2="{middle}"/>')
        parts.append(svg_text(LEFT - 6, middle + 4, title.replace("SIGKILL of all, ", ""), anchor="end"))
        for fault in faults:
            if fault["kind"] == kind:
                where = f'x="{x(fault["at_step"]) - 1.5:.1f}" y="{middle - 6}" width="3" height="12"'
                parts.append(f'<rect {where} fill="{color(kind)}"/>')
    return parts


def color(kind: str) -> str:
    return next((value for name, value in GROUPS.items() if kind.startswith(name)), OTHER)


def _points(values: Sequence[float | None], x: Any, y: Any) -> str:
    return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(values, 1) if value is not None)


def _dots(values: Sequence[float | None], x: Any, y: Any) -> str:
    """Return a path with a dot for each value."""
    known = [(step, value) for step, value in enumerate(values, 1) if value is not None]
    return " ".join(f"M{x(step):.1f} {y(value):.1f}h.01" for step, value in known)


def round_ticks(low: float, high: float) -> list[float]:
    """Return four to nine round numbers from low to high."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / width)
    return [round(number * width, 6) for number in range(first, math.floor(high / width + 1e-9) + 1)]


def svg_text(x: float, y: float, text: str, css: str = "", *, anchor: str = "start") -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    named = f' class="{css}"' if css else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
