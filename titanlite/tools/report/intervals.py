"""Arithmetic of time intervals: unions, intersections and gaps of (begin, end) pairs."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same times. Empty ones are left out."""
    found: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(disjoint: Iterable[Interval]) -> float:
    """Return the summed length of disjoint intervals."""
    return sum(end - begin for begin, end in disjoint)


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times in both of two unions."""
    found: list[Interval] = []
    first = second = 0
    while first < len(one) and second < len(other):
        begin, end = max(one[first][0], other[second][0]), min(one[first][1], other[second][1])
        if begin < end:
            found.append((begin, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return found


def gaps(disjoint: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """Return the times from begin to end that a union leaves out."""
    found: list[Interval] = []
    for start, stop in disjoint:
        if start >= end:
            break
        if start > begin:
            found.append((begin, start))
        begin = max(begin, stop)
    if begin < end:
        found.append((begin, end))
    return found
