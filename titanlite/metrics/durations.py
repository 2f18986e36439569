"""Time by category, and in words: what a run records and a report reads. A report imports no torch."""

from collections.abc import Mapping

from titanlite.observer import Phase

CATEGORIES: tuple[str, ...] = ("start", "compile", "compute", "data", "checkpoint", "validation")


def by_category(seconds: Mapping[Phase, float], *, compiling: float) -> dict[str, float]:
    """Return seconds by `CATEGORIES`. Their sum is the time since the start began.

    The host's time counts. On a GPU, the host waits within the steps for what it has queued, so look at the sum of many
    steps.

    Args:
        seconds: of each `Phase`.
        compiling: seconds that torch.compile has taken, within steps.
    """
    found: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    for phase, spent in seconds.items():
        found[phase.category] += spent
    found["compile"] = min(compiling, found["compute"])
    found["compute"] -= found["compile"]
    return found


def format_phases(seconds: Mapping[str, float]) -> str:
    """Return one line: the whole time, and each phase's share, without those below 0.1 %."""
    whole = sum(seconds.values())
    parts = [f"{name} {spent / whole:.1%}" for name, spent in seconds.items() if whole and spent / whole >= 0.001]
    return f"{format_seconds(whole)}: {', '.join(parts)}"


def format_seconds(seconds: float) -> str:
    """Return a time in its two largest units: 45 s, 3 min 20 s, 2 h 05 min, 4 d 03 h."""
    whole = round(seconds)
    for large, unit, small, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= unit:
            return f"{whole // unit} {large} {whole % unit // part:02} {small}"
    return f"{whole} s"
