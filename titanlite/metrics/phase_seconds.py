"""Time of a start by phase: where the hours of a run went."""

from collections.abc import Mapping

from titanlite.observer import CurrentPhase, Phase
from titanlite.runtime.private_torch.compiler import compile_seconds

CATEGORIES: tuple[str, ...] = ("start", "compile", "compute", "data", "checkpoint", "validation")


def phase_seconds(phase: CurrentPhase) -> dict[str, float]:
    """Return the seconds of this start so far in each of `CATEGORIES`, on this rank."""
    return by_category(phase.seconds(), compiling=compile_seconds())


def by_category(seconds: Mapping[Phase, float], *, compiling: float) -> dict[str, float]:
    """Return seconds by `CATEGORIES`. Their sum is the time since the start began.

    The host's time counts. On a GPU, the host waits within the steps for what it has queued, so look at the sum of many
    steps.

    Args:
        seconds: of each `Phase`.
        compiling: seconds that torch.compile has taken, within steps.
    """
    found: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    for name, time in seconds.items():
        found[name.category] += time
    found["compile"] = min(compiling, found["compute"])
    found["compute"] -= found["compile"]
    return found


def format_phases(seconds: Mapping[str, float]) -> str:
    """Return one line: the whole time, and each phase's share, without those below 0.1 %."""
    whole = sum(seconds.values())
    parts = [f"{name} {time / whole:.1%}" for name, time in seconds.items() if whole and time / whole >= 0.001]
    return f"{format_seconds(whole)}: {', '.join(parts)}"


def format_seconds(seconds: float) -> str:
    """Return a time in its two largest units: 45 s, 3 min 20 s, 2 h 05 min, 4 d 03 h."""
    whole = round(seconds)
    for large, unit, small, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= unit:
            return f"{whole // unit} {large} {whole % unit // part:02} {small}"
    return f"{whole} s"
