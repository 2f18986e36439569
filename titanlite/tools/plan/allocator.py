"""Reserved memory: a replay of PyTorch's caching allocator with expandable segments, as training sets it on CUDA.

The allocator has a pool for each CUDA stream, and within it one for small tensors. A pool is one segment of addresses,
which grows at its end and never shrinks. So reserved memory is the sum of the pools' highest ends: memory that is free
in one pool does not serve another, and holes between tensors count. Source: c10/cuda/CUDACachingAllocator.cpp.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import NamedTuple

SMALL = 2**20
"""Largest tensor of the small pools, in bytes."""
GRANULES = {True: 2 * 2**20, False: 20 * 2**20}
"""Bytes by which a pool grows: of small tensors, and of others."""
BLOCK = 512
"""Sizes are rounded up to multiples of this."""

PoolName = tuple[int, bool]
"""(number of the stream, whether the pool is of small tensors)."""


class PoolSize(NamedTuple):
    """Bytes of a pool."""

    peak: int
    """Highest sum of tensors."""
    end: int
    """Highest end of a tensor. The difference to the peak is fragmentation."""


class Change(NamedTuple):
    """New size of a storage."""

    storage: int
    stream: int
    bytes: int
    """New size; 0 if the storage is freed."""


def replay(changes: Iterable[Change]) -> dict[PoolName, PoolSize]:
    """Return the size of each pool after these allocations and releases, in the order of time."""
    pools: dict[PoolName, _Pool] = {}
    places: dict[int, tuple[_Pool, int, int]] = {}
    for storage, stream, size in changes:
        if storage in places:
            pool, start, length = places.pop(storage)
            pool.free(start, length)
        if size:
            length = -(-size // BLOCK) * BLOCK
            pool = pools.setdefault((stream, size <= SMALL), _Pool())
            places[storage] = pool, pool.allocate(length), length
    return {name: PoolSize(pool.peak, pool.highest) for name, pool in pools.items()}


def reserved(pools: Mapping[PoolName, PoolSize]) -> int:
    """Return the bytes that pools of these sizes reserve."""
    return sum(-(-pool.end // GRANULES[small]) * GRANULES[small] for (_, small), pool in pools.items())


class _Pool:
    """One expandable segment. The best fit is taken, and the free end only where nothing else fits."""

    def __init__(self) -> None:
        self.peak = 0
        self.highest = 0
        self._end = 0
        """End of the last tensor: free addresses after it are not listed."""
        self._used = 0
        self._by_size: list[tuple[int, int]] = []
        """(length, start) of each free block before the end, sorted."""
        self._starts: dict[int, int] = {}
        """Length by start, of the same blocks."""
        self._ends: dict[int, int] = {}
        """Start by end."""

    def allocate(self, length: int) -> int:
        """Return the start of a new block."""
        place = bisect_left(self._by_size, (length, 0))
        if place < len(self._by_size):
            free, start = self._by_size[place]
            self._remove(free, start)
            if free > length:
                self._add(free - length, start + length)
        else:
            start, self._end = self._end, self._end + length
            self.highest = max(self.highest, self._end)
        self._used += length
        self.peak = max(self.peak, self._used)
        return start

    def free(self, start: int, length: int) -> None:
        self._used -= length
        if (after := start + length) in self._starts:
            length += self._starts[after]
            self._remove(self._starts[after], after)
        if start in self._ends:
            before = self._ends[start]
            length += start - before
            self._remove(start - before, before)
            start = before
        if start + length == self._end:
            self._end = start
        else:
            self._add(length, start)

    def _add(self, length: int, start: int) -> None:
        insort(self._by_size, (length, start))
        self._starts[start] = length
        self._ends[start + length] = start

    def _remove(self, length: int, start: int) -> None:
        del self._by_size[bisect_left(self._by_size, (length, start))]
        del self._starts[start], self._ends[start + length]
