"""Recompute policies of blocks, as the config writes them. No torch here."""

from collections.abc import Sequence
from typing import Literal

from titanlite.runtime.nearest import did_you_mean

RecomputePolicy = Literal["none", "op", "full"]
"""Part of a block that backward recomputes: nothing; all but attention and every other matmul; or all."""


def parse_policies(entries: Sequence[str]) -> list[RecomputePolicy]:
    """Return one policy for each block, from entries like "full x 20".

    Raises:
        ValueError: an entry is malformed, or names no policy.
    """
    known: dict[str, RecomputePolicy] = {"none": "none", "op": "op", "full": "full"}
    policies: list[RecomputePolicy] = []
    for entry in entries:
        name, x, count = (part.strip() for part in entry.partition(" x "))
        policy = known.get(name)
        if policy is None:
            hint = did_you_mean(name, known) or "; expected none, op or full"
            raise ValueError(f"{name!r} is no recompute policy{hint}")
        if x and not (count.isdecimal() and int(count)):
            raise ValueError(f"{entry!r}: expected a number of blocks, as in 'full x 20'")
        policies.extend(policy for _ in range(int(count or 1)))
    return policies
