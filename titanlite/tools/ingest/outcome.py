"""Report of a preparation: counts by input, and the documents that were left out, with reasons."""

from typing import Any

from titanlite.tools.ingest.encoding import FIRST, Encoded
from titanlite.tools.ingest.formats import File

COUNTS = ("documents", "tokens", "bytes", "empty", "errors", "left_out")
TOTALS = {"bytes": "text_bytes", "empty": "empty", "errors": "errors", "left_out": "left_out"}
MOST_INPUTS = 20
"""Listed in the report; the index has all."""


def new_notes(paths: list[str], files: list[File]) -> dict[str, Any]:
    """The part of an index that is counted here: text_bytes (UTF-8), empty (documents), errors, errors_by_reason,
    first_errors, left_out (binary files), and inputs, with the same counts for each path."""
    inputs = [{"path": path, "files": 0} | dict.fromkeys(COUNTS, 0) for path in paths]
    for file in files:
        inputs[file.source]["files"] += 1
    totals = dict.fromkeys(TOTALS.values(), 0)
    return totals | {"errors_by_reason": {}, "first_errors": [], "inputs": inputs}


def note(notes: dict[str, Any], encoded: Encoded) -> None:
    """Count a chunk."""
    for source, counts in encoded.counts.items():
        for name, count in counts.items():
            notes["inputs"][source][name] += count
        for name, total in TOTALS.items():
            notes[total] += counts[name]
    for reason, count in encoded.reasons.items():
        notes["errors_by_reason"][reason] = notes["errors_by_reason"].get(reason, 0) + count
    notes["first_errors"] = (notes["first_errors"] + encoded.errors)[:FIRST]


def left_out(notes: dict[str, Any]) -> str:
    """Describe the documents that were left out; empty if there are none."""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in notes["errors_by_reason"].items())
    parts = {
        f"{notes['empty']:,} empty documents": notes["empty"],
        f"{notes['left_out']:,} binary files": notes["left_out"],
        f"{notes['errors']:,} that cannot be read ({reasons})": notes["errors"],
    }
    return "; ".join(text for text, count in parts.items() if count)


def report_lines(notes: dict[str, Any]) -> list[str]:
    """Lines on the inputs, and on what was left out."""
    inputs = notes["inputs"]
    lines = [
        f"{it['path']}: {it['files']:,} files, {it['documents']:,} documents, {it['tokens']:,} tokens, "
        f"{it['bytes']:,} bytes"
        for it in inputs[:MOST_INPUTS]
    ]
    if len(inputs) > MOST_INPUTS:
        lines.append(f"and {len(inputs) - MOST_INPUTS:,} more inputs, which the index lists")
    if words := left_out(notes):
        lines.append(f"left out: {words}")
    return lines + [f"  {error}" for error in notes["first_errors"]]
