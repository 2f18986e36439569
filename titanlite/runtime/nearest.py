"""Suggestions for misspelt names."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that `name` is most like, ignoring case; None if it is like none.

    Args:
        cutoff: least similarity, from 0 to 1, as in `difflib.get_close_matches`.
    """
    by_lower_case = {option.lower(): option for option in reversed([*known])}
    near = get_close_matches(name.lower(), by_lower_case, n=1, cutoff=cutoff)
    return by_lower_case[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean X?" for the nearest known name, or "": the end of an error message."""
    near = nearest_name(name, known)
    return f", did you mean {near}?" if near else ""
