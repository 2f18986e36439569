"""All that is to be measured on the first GPU at hand, in pieces that fit time limits.

    python benchmarks/gpu.py queue --out FOLDER [--old FOLDER] [--seconds 540] [--only ITEM ...] [--again]
    python benchmarks/gpu.py queue --report FOLDER
    python benchmarks/gpu.py queue --list [--old FOLDER]

Repeat the first line until nothing is left. Each test and each run is written to FOLDER/<name of the GPU>/queue.json
as soon as it has ended, and is not run again with that file, also if it failed. Nothing begins that would take longer
than the seconds left, by its estimate. The page of what is measured, and of what is not, is printed and written beside
it. To continue on another machine, copy the folder there first. Commit it as benchmarks/gpu/<name of the GPU>.

--old: another checkout. Its titanlite runs the same cases in turn with this one: old, new, new, old. Options that it
does not have are left out. To make one:

    git archive --prefix=.old-COMMIT/ COMMIT | tar x

Item 9 needs no GPU: without one, it alone is run, for each queue.json below FOLDER.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from gpu import ROOT, Case, card_line, cases, error_line, execute, measure, write

ITEMS = {
    1: "tests/gpu",
    2: "Old and new",
    3: "124M, beside the plain loop compiled",
    4: "Document mask, windows, sinks",
    5: "Muon",
    6: "Float8, tensorwise",
    7: "The delta rule's kernels",
    8: "Reproducible layouts with a context degree",
    9: "The plan",
    10: "Activations on the host",
}
CHANGES: dict[str, list[str]] = {}
"""Changes that options of this checkout switch off: a name for the page, and the words. Each is a side of item 2."""
NEW, OLD = "new", "old"
WINDOWS = 4
"""Fewer than in gpu.py, because most sides have two turns."""
ALONE = ("too_large", "test_plan.py", "test_no_step_waits")
"""Tests that fill the GPU, or measure time."""
SIDE_BY_SIDE = 6
Found = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """What is measured at once, and named in the file."""

    item: int
    name: str
    seconds: float
    """Estimate."""
    run: Callable[[float], Found]
    """Measure within so many seconds. "failed" and "skipped" say why there is nothing."""


@dataclass(frozen=True)
class Group:
    """Units of which none begins if they do not all fit, or which run side by side."""

    units: list[Unit]
    side_by_side: int = 1


# What is measured


def groups(old: Path | None, tests: Sequence[str] = ()) -> Iterator[Group]:
    """Yield what is to be measured, in this order."""
    context = [name for name in tests if name.endswith("_same_bits[context]")]
    units = {name: Unit(8 if name in context else 1, name, 45, partial(run_test, name)) for name in tests}
    alone = [name for name in tests if any(word in name for word in ALONE)]
    yield Group([units[name] for name in tests if name not in (*alone, *context)], SIDE_BY_SIDE)
    yield from (Group([units[name]]) for name in alone)
    one, eight, plain = "1B, 4 x 4096: ", "8B, 6 layers, 1 x 8192: ", "plain loop, compiled"
    yield turns(2, [f"{one}compiled"], old, before=f"{one}{plain}", changes=CHANGES)
    yield turns(2, [f"{eight}compiled"], old, before=f"{eight}{plain}", changes=CHANGES)
    yield turns(2, [f"{one}compiled, weights and moments on the host"], old, changes=CHANGES)
    for batch, twice in ((12, True), (64, False)):
        names = (plain, f"{plain}, CUDA graphs", "compiled")
        yield turns(3, [f"124M, {batch} x 1024: {name}" for name in names], twice=twice)
    yield turns(4, [f"{one}compiled, document mask"], old)
    for model, others in {
        "Gemma 3 1B, 2 x 4096": (", without windows", ", document mask"),
        "gpt-oss, 8 experts, 4 layers, 2 x 4096": (", document mask",),
    }.items():
        yield turns(4, [f"{model}: compiled{how}" for how in ("", *others)])
    yield turns(5, [f"{one}compiled, Muon"], old)
    yield turns(6, [f"{one}compiled, float8 tensorwise"], old)
    yield turns(6, [f"{eight}compiled, float8 tensorwise"])
    yield Group([Unit(7, "delta rule", 45, run_delta_rule)])
    yield from (Group([units[name]]) for name in context)
    yield turns(8, [f"{eight}reproducible layouts", f"{eight}reproducible layouts, context degree 2"])
    moved = (
        name for mode in ("", ", full AC") for name in (f"compiled{mode}", f"compiled{mode}, activations on the host")
    )
    yield turns(10, [f"{one}{name}" for name in moved])


def turns(
    item: int,
    titles: Sequence[str],
    old: Path | None = None,
    *,
    before: str = "",
    changes: dict[str, list[str]] | None = None,
    twice: bool = False,
) -> Group:
    """Return the runs of some cases by all sides in turn, and if there are several sides, or `twice`, once more in
    reverse. The case `before` runs once."""
    sides: dict[str, tuple[Path, list[str]]] = {OLD: (old, [])} if old else {}
    sides |= {NEW: (ROOT, [])} | {f"{NEW} without {name}": (ROOT, off) for name, off in (changes or {}).items()}
    runs = [(title, side) for title in titles for side in sides]
    order = [(before, NEW, 1)] * bool(before) + [(*run, 1) for run in runs]
    order += [(*run, 2) for run in reversed(runs) if len(sides) > 1 or twice]
    known = {case.title: case for case in cases()}
    units = []
    for title, side, turn in order:
        run = partial(run_case, known[title], *sides[side], is_first=turn == 1, is_planned=(side, turn) == (NEW, 1))
        units.append(Unit(item, f"{title} ({side} {turn})", 85 if "on the host" in title else 45, run))
    return Group(units)


def plans(results: Found, file: Path) -> Group:
    """Return the plans of the cases that ran here."""
    names = [name for name, found in results["cases"].items() if "words" in found]
    units = [Unit(9, f"plan of {name}", 45, partial(run_plan, name, file)) for name in names]
    return Group(units, min(SIDE_BY_SIDE, os.cpu_count() or 1))


# How it is measured


def run_case(case: Case, tree: Path, more: list[str], seconds: float, *, is_first: bool, is_planned: bool) -> Found:
    words, left_out = [*case.words, *more], []
    if tree != ROOT:
        words, left_out = known_words(words, tree)
    profiles = is_first and not case.plain
    found = measure(case, tree=tree, words=words, windows=WINDOWS, profiles=profiles, seconds=seconds)
    if not is_planned:  # plan_accuracy.py plans each case that has words
        found.pop("words", None)
    return found | {"sources": sources(tree), "left_out": left_out}


def known_words(words: Iterable[str], tree: Path) -> tuple[list[str], list[str]]:
    """Split options into those that a checkout has, by its schema, and others."""
    schema = json.loads((tree / "train_configs" / "schema.json").read_text())
    split: tuple[list[str], list[str]] = ([], [])
    for word in words:
        node: Found | None = schema
        for name in word.removeprefix("--").partition("=")[0].split("."):
            if node and "$ref" in node:
                node = schema["$defs"][node["$ref"].rpartition("/")[2]]
            if node and "properties" in node:  # else arguments of a model or an optimizer
                node = node["properties"].get(name)
        split[node is None].append(word)
    return split


@cache
def sources(tree: Path) -> str:
    """The commit of a checkout, or the name of its folder, and a hash of titanlite's files."""
    name = tree.name
    if (tree / ".git").exists():
        name = execute(["git", "rev-parse", "--short", "HEAD"], 60, tree=tree).stdout.strip()
    files = sorted((tree / "titanlite").rglob("*.py"))
    return f"{name} {hashlib.sha256(b''.join(file.read_bytes() for file in files)).hexdigest()[:12]}"


def run_test(name: str, seconds: float) -> Found:
    return outcome(execute([sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", name], seconds))


def outcome(result: "subprocess.CompletedProcess[str]") -> Found:
    """Read what pytest printed of one test."""
    lines = result.stdout.strip().splitlines()
    if result.returncode:
        why = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
        last = [line for line in why if "rror" in line][-1:] or why[:1] or [error_line(result)]
        return {"failed": last[0][:300]}
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    return {"skipped": re.sub(r"^SKIPPED \[\d+\] \S+ ", "", skipped[0])} if skipped else {"passed": True}


def collected() -> list[str]:
    """Names of all tests of tests/gpu."""
    result = execute([sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/gpu"], 120)
    if result.returncode:
        print(f"tests/gpu cannot be collected: {error_line(result)}")
    return [line for line in result.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]


def run_delta_rule(seconds: float) -> Found:
    result = execute([sys.executable, str(ROOT / "benchmarks" / "bench_delta_rule.py")], seconds)
    if result.returncode:
        return {"failed": error_line(result)}
    forms = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    has_kernels = any(form["form"].startswith("kernels") for form in forms)
    return {"forms": forms} | ({} if has_kernels else {"skipped": "the kernels need the package fla-core"})


def run_plan(name: str, file: Path, seconds: float) -> Found:
    script = str(ROOT / "benchmarks" / "plan_accuracy.py")
    result = execute([sys.executable, script, "gpu", "--file", str(file), "--only", name], seconds)
    rows = [line for line in result.stdout.splitlines() if line.startswith(f"| {name}")]
    return {"row": rows[0]} if rows else {"failed": error_line(result)}


class Queue:
    """Measures units, and keeps what is found in a file.

    Args:
        deadline: time.monotonic() at which the last unit should have ended.
    """

    def __init__(self, file: Path, deadline: float) -> None:
        self.file, self.deadline = file, deadline
        self.results: Found = json.loads(file.read_text()) if file.exists() else {"cases": {}}
        self._lock = threading.Lock()

    def is_due(self, unit: Unit) -> bool:
        """What was cut off is tried once more."""
        return self.results["cases"].get(unit.name, {"cut_off": 0}).get("cut_off", 2) < 2

    def run(self, group: Group) -> None:
        due = [unit for unit in group.units if self.is_due(unit)]
        if group.side_by_side > 1:
            with ThreadPoolExecutor(group.side_by_side) as pool:
                list(pool.map(self._run, due))
        elif sum(unit.seconds for unit in due) <= self.deadline - time.monotonic():
            for unit in due:
                self._run(unit)

    def _run(self, unit: Unit) -> None:
        left = self.deadline - time.monotonic()
        if unit.seconds > left:
            return
        self._keep(unit, {"cut_off": self.results["cases"].get(unit.name, {}).get("cut_off", 0) + 1})
        began = time.monotonic()
        try:
            found = unit.run(left)
        except subprocess.TimeoutExpired:
            return
        except Exception as error:  # one that fails must not end the others
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        found |= {key: self.results.get(key) for key in ("gpu", "torch")}
        found |= {"at": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "wall_seconds": round(time.monotonic() - began, 1)}
        self._keep(unit, found)
        print(f"{unit.name}: {why_not(found) or found['wall_seconds']}", flush=True)

    def _keep(self, unit: Unit, found: Found) -> None:
        with self._lock:
            self.results["cases"][unit.name] = {"item": unit.item, **found}
            write(self.results, self.file)


def why_not(found: Found | None) -> str:
    """Return why there are no figures, or "" if there are."""
    if found is None:
        return "not run"
    times = f"cut off {found['cut_off']} time(s)" if "cut_off" in found else ""
    return found.get("failed") or found.get("skipped") or times


# The page


def page(results: Found, units: Iterable[Unit]) -> str:
    """What is measured, as Markdown, and what is not."""
    found: dict[str, Found] = results["cases"]
    lines = [f"# {card_line(results)}"]
    for item, title in ITEMS.items():
        if not (names := [name for name in found if found[name]["item"] == item]):
            continue
        passed = sum("passed" in found[name] for name in names)
        lines += ["", f"## {item}. {title}", "", *([f"{passed} tests passed."] if passed else [])]
        for form in (form for name in names for form in found[name].get("forms", [])):
            apart = ", ".join(f"{which} {error:.1e}" for which, error in form["apart"].items())
            what = f"{form['form']}, {form['documents']} document(s): {form['forward_and_backward_ms']} ms"
            lines.append(f"- {what}; from float64 at most {apart}")
        rows = [found[name]["row"] for name in names if "row" in found[name]]
        header = "| case | plan GiB | measured | ratio | plan s/step | measured | ratio |"
        lines += [header, "|" + "---|" * 7, *rows] if rows else speeds(found, names)
    lines += ["", "## Sources", ""]
    lines += [*dict.fromkeys(f"- {one['sources']}" for one in found.values() if "sources" in one)]
    lines += [*dict.fromkeys(f"- old has no {word}" for one in found.values() for word in one.get("left_out", []))]
    unmeasured = {name: why_not(found.get(name)) for name in [*(unit.name for unit in units), *found]}
    lines += ["", "## Unmeasured", "", *(f"- {name}: {why}" for name, why in unmeasured.items() if why)]
    lines += ["", "## Profiles", ""]
    for name, profile in ((name, one["profile"]) for name, one in found.items() if "profile" in one):
        lines.append(f"- {name}: kernels take {profile['kernels_ms']:.1f} ms of {profile['step_ms']:.1f}")
        lines += [f"    - {ms:.2f} ms, {launches} x {kernel}" for ms, launches, kernel in profile["kernels"][:12]]
    return "\n".join(lines) + "\n"


def speeds(found: dict[str, Found], names: Sequence[str]) -> list[str]:
    """Return rows of cases by side, whose turns are one. A * marks a ratio to a run on another card."""
    by_side: dict[str, list[Found]] = defaultdict(list)
    for name, one in found.items():
        if "tokens_per_second" in one:
            by_side[f"{name.rpartition(' ')[0]})"].append(one)

    def speeds_of(row: str) -> list[float]:
        return [speed for one in by_side[row] for speed in one["tokens_per_second"]]

    def ratio(row: str, other: str) -> str:
        if row == other or other not in by_side:
            return ""
        cards = [{one["gpu"] for one in by_side[which]} for which in (row, other)]
        return f"{statistics.median(speeds_of(row)) / statistics.median(speeds_of(other)):.3f}" + "*" * (
            cards[0] != cards[1]
        )

    header = ("case", "tokens/s", "spread", "MFU", "peak GiB", "to old", "to plain, compiled", "to compiled")
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in dict.fromkeys(f"{name.rpartition(' ')[0]})" for name in names):
        if runs := by_side.get(row):
            each, model = speeds_of(row), row.partition(": ")[0]
            mfu = f"{100 * statistics.median(one['mfu'] for one in runs):.1f} %" if "mfu" in runs[0] else ""
            figures = f"{statistics.median(each):,.0f}", f"{min(each):,.0f} to {max(each):,.0f}", mfu
            others = f"{row.rpartition(' (')[0]} ({OLD})", f"{model}: plain loop, compiled ({NEW})"
            ratios = [ratio(row, other) for other in (*others, f"{model}: compiled ({NEW})")]
            memory = f"{max(one['memory_gib'] for one in runs):.1f}"
            lines.append(f"| {' | '.join([row, *figures, memory, *ratios])} |")
    return lines if len(lines) > 2 else []


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "gpu.py queue", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FOLDER", help="where results are written, and found")
    what.add_argument("--report", type=Path, metavar="FOLDER", help="print the pages of what is measured")
    what.add_argument("--list", action="store_true", help="print what would be measured, with estimated seconds")
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="an older checkout")
    parser.add_argument("--seconds", type=float, default=540, help="all should have ended after these")
    parser.add_argument("--only", type=int, nargs="+", choices=ITEMS, default=[*ITEMS], metavar="ITEM", help="1 to 9")
    parser.add_argument("--again", action="store_true", help="forget failures, and what was skipped or cut off")
    options = parser.parse_args(words)
    deadline = time.monotonic() + options.seconds
    if options.old and not (options.old / "train_configs" / "schema.json").exists():
        parser.error(f"--old: {options.old} is no checkout: it has no train_configs/schema.json")
    old = options.old.resolve() if options.old else None
    tests = collected() if {1, 8} & {*options.only} else []
    chosen = [
        Group([unit for unit in group.units if unit.item in options.only], group.side_by_side)
        for group in groups(old, tests)
    ]
    # Without --old, its runs are named as unmeasured.
    units = [unit for group in groups(old or Path("old"), tests) for unit in group.units if unit.item in options.only]
    if options.list:
        print("\n".join(f"{unit.item}  {unit.seconds:4.0f} s  {unit.name}" for unit in units))
        return
    if options.report:
        for file in sorted(options.report.rglob("queue.json")):
            print(page(json.loads(file.read_text()), units))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what runs
    card = card_here()
    if card:
        folder = options.out / re.sub(r"[^a-z0-9]+", "-", card["device"].lower())
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "queue.json"]
    elif not (files := sorted(options.out.rglob("queue.json"))):
        sys.exit("without a GPU, there is nothing to do but plans of cases that a queue.json has")
    for file in files:
        queue = Queue(file.resolve(), deadline)
        known = queue.results["cases"]
        queue.results |= card
        if options.again:
            chosen_again = {name for name in known if why_not(known[name]) and known[name]["item"] in options.only}
            queue.results["cases"] = {name: one for name, one in known.items() if name not in chosen_again}
        for group in chosen if card else []:
            queue.run(group)
        if 9 in options.only:
            queue.run(plans(queue.results, queue.file))
        found = page(queue.results, units)
        file.with_suffix(".md").write_text(found)
        print(found)


def card_here() -> Found:
    """Names and rates of the GPU, by a process that gives its memory back. Empty if torch can use none."""
    result = execute([sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "card"], 120)
    if result.returncode:
        print(f"no GPU: {error_line(result)}")
        return {}
    return json.loads(result.stdout.splitlines()[-1])
