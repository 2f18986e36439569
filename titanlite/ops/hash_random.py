"""Random bits without a generator: a hash of a salt and an index. An element has the same bits on every layout and
device, and no part of a tensor needs the draws of another."""

import hashlib

from torch import Tensor

BITS = 48
"""Random bits of each index."""
MULTIPLIER = -7046029254386353131
ROUNDS = (30, -4658895280553007687), (27, -7723592293110705685)
"""Shifts and factors of splitmix64's finalizer, as signed numbers."""


def salt(text: str) -> int:
    """Return a 63 bit integer, one for each text, such as "seed/name of a parameter"."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True) >> 1


def random_bits(salt: int | Tensor, indices: Tensor) -> Tensor:
    """Return `BITS` random bits for each index: splitmix64's finalizer, which wraps around.

    Args:
        indices: int64 of any shape.

    Returns:
        int64 of the same shape, from 0 to 2^48 - 1.
    """
    x = indices * MULTIPLIER + salt
    for shift, factor in ROUNDS:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x >> 16) & ((1 << BITS) - 1)
