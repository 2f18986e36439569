"""Global sample index -> sequence, in O(1) time and memory.

Samples are numbered 0, 1, 2, ... over the whole run. Each pass over the data is a permutation of its own, given by a
keyed Feistel network over the smallest power of four that holds all sequences; what falls outside is mapped again until
it falls inside (cycle walking: Black and Rogaway, 2002), at most four times on average.
"""

import hashlib
from dataclasses import dataclass

ROUNDS = 8


@dataclass(frozen=True)
class Order:
    """Order in which `sequences` sequences are read: a function of the seed, or without `shuffle` their own order."""

    sequences: int
    seed: int
    shuffle: bool = True

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (epoch, sequence) of a global sample index."""
        epoch, position = divmod(sample, self.sequences)
        if not self.shuffle:
            return epoch, position
        return epoch, permute(position, self.sequences, key=(self.seed << 32) + epoch)


def permute(index: int, size: int, *, key: int) -> int:
    """Return the image of `index` under a pseudo-random permutation of range(size), which `key` chooses."""
    assert 0 <= index < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = _round_keys(key)
    while True:
        index = _feistel(index, half_bits, round_keys)
        if index < size:
            return index


def _round_keys(key: int) -> list[int]:
    digest = hashlib.blake2b(str(key).encode(), digest_size=8 * ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]


def _feistel(index: int, half_bits: int, round_keys: list[int]) -> int:
    mask = (1 << half_bits) - 1
    left, right = index >> half_bits, index & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return left << half_bits | right


def _mix(x: int) -> int:
    """The finalizer of SplitMix64 (Steele et al., 2014)."""
    x &= 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
