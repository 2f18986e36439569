"""The samples of a run: global sample index -> one sequence, on any number of ranks and workers.

Samples are numbered 0, 1, 2, ... over the whole run. The mixture of its stage maps a sample to a source and to a number
within it, and the source's order maps that number to an epoch and a sequence. The position of a run is the number of
samples that it has consumed and, if its data was changed, the origin of the present data.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from titanlite.batch import Batch
from titanlite.data.packing import SequenceReader, Stream, TokenSequence
from titanlite.runtime.errors import UserError

logger = logging.getLogger(__name__)


# Map each sample to a source: exact shares, in O(1), from the sample's index alone.
#
# Weights become whole numbers that add up to a period. The j-th of the c samples that a source has in a period is due
# at (j + 1/2) / c of it, and samples are in the order in which they are due. So at every point each source has had its
# share but for about one sample.


MOST_PERIOD = 2**16


class Mixture:
    """Order in which the samples of several sources alternate.

    Args:
        weights: one number for each source, not all zero; only their ratios count.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        counts = np.array(_whole_numbers(weights), dtype=np.int64)
        owner = np.repeat(np.arange(len(counts)), counts)
        number = np.concatenate([np.arange(count) for count in counts])
        # (2 j + 1) / 2c compared without rounding: numbers stay below 2^53.
        due = (2 * number + 1) / (2 * counts[owner])
        order = np.lexsort((owner, due))
        self.counts_in_period = counts
        self._source = owner[order]
        self._number = number[order]
        self._places = [np.flatnonzero(self._source == source) for source in range(len(counts))]

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (source, number of samples of that source before this one)."""
        period, place = divmod(sample, len(self._source))
        source = int(self._source[place])
        return source, period * int(self.counts_in_period[source]) + int(self._number[place])

    def counts(self, samples: int) -> list[int]:
        """Count the samples of each source among the first `samples` samples."""
        periods, rest = divmod(samples, len(self._source))
        return [
            periods * int(count) + int(np.searchsorted(places, rest))
            for count, places in zip(self.counts_in_period, self._places, strict=True)
        ]

    def index(self, source: int, number: int) -> int:
        """Return the sample that `locate` maps to (source, number)."""
        period, place = divmod(number, int(self.counts_in_period[source]))
        return period * len(self._source) + int(self._places[source][place])


def _whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the ratio of the weights: exact, or rounded to 1 / MOST_PERIOD if the period is long."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MOST_PERIOD:
        return [int(share * period) for share in shares]
    parts = [max(1, int(share * MOST_PERIOD)) if share else 0 for share in shares]
    read = [i for i, share in enumerate(shares) if share]
    by_remainder = sorted(read, key=lambda i: parts[i] - shares[i] * MOST_PERIOD)
    for i in by_remainder[: max(0, MOST_PERIOD - sum(parts))]:
        parts[i] += 1
    return parts


# Global sample index -> sequence, in O(1) time and memory.
#
# Samples are numbered 0, 1, 2, ... over the whole run. Each pass over the data is a permutation of its own, given by a
# keyed Feistel network over the smallest power of four that holds all sequences; what falls outside is mapped again
# until it falls inside (cycle walking: Black and Rogaway, 2002), at most four times on average.


ROUNDS = 8


@dataclass(frozen=True)
class Order:
    """Order in which `sequences` sequences are read: a function of the seed, or without `shuffle` their own order."""

    sequences: int
    seed: int
    shuffle: bool = True
    window: int | None = None
    """Sequences that are shuffled together, one window after the other; None: all."""

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (epoch, sequence) of a global sample index."""
        epoch, position = divmod(sample, self.sequences)
        if not self.shuffle:
            return epoch, position
        key = (self.seed << 32) + epoch
        if self.window is None:
            return epoch, permute(position, self.sequences, key=key)
        number, place = divmod(position, self.window)
        first = number * self.window
        size = min(self.window, self.sequences - first)
        return epoch, first + permute(place, size, key=((key << 48) + number + 1))

    def needed(self, sample: int) -> int:
        """Return the number of sequences that must be there to locate a sample of the first epoch."""
        window = (self.window if self.shuffle else None) or 1
        return (sample // window + 1) * window


UNKNOWN = 1 << 62
"""Number of sequences of a source that still grows, for an order that is in its first epoch for sure."""


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


@dataclass(frozen=True)
class Source:
    """Source of a mixture."""

    name: str
    sequences: SequenceReader
    fingerprint: str
    """Hash of all that the sequences depend on."""
    weight: float = 1.0
    marks_documents: bool = False
    """Whether batches have what `titanlite.batch` lists for documents that attention keeps apart."""
    counts_bytes: bool = True
    """Whether the bytes of the text are known from its tokens."""

    @property
    def is_growing(self) -> bool:
        """Whether tokens of the source are still being made."""
        return isinstance(self.sequences, Stream) and not self.sequences.store.is_complete

    def read(self, number: int) -> TokenSequence:
        return self.sequences.read(number)


@dataclass(frozen=True)
class Origin:
    """Start of the present data: the sample with which its mixture began, and the number of samples of each source, by
    fingerprint, that were read before it."""

    since: int = 0
    consumed: dict[str, int] = field(default_factory=dict)


class Stage(NamedTuple):
    """Part of a run with weights of its own."""

    end: int
    """First sample after the stage."""
    weights: Mapping[str, float]
    """Weights by the name of the source. Sources without a weight are not read."""


class Stretch(NamedTuple):
    """Samples in a row that one mixture maps to sources."""

    start: int
    end: float
    """First sample after the stretch; infinite for the last one."""
    mixture: Mixture
    before: list[int]
    """Samples of each source before the start."""

    def consumed(self, samples: int) -> list[int]:
        """Count the samples of each source before a sample of the stretch."""
        counts = self.mixture.counts(samples - self.start)
        return [before + count for before, count in zip(self.before, counts, strict=True)]


class Samples(Dataset[Batch]):
    """All samples of a run.

    Args:
        stages: of the run's beginning, in their order. After them, sources have their own weights.
        shuffle, window: of each source's `Order`.
        origin: start of the present data, in a run whose data was changed.
        numbers_tokens: whether batches have `draws`.
        marks_padding: whether batches have `padding`.
        seq_len: tokens of a sequence. With it, a run with another length resumes at the same tokens.

    Raises:
        UserError: two sources hold the same tokens.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        stages: Sequence[Stage] = (),
        shuffle: bool = True,
        window: int | None = None,
        origin: Origin | None = None,
        numbers_tokens: bool = False,
        marks_padding: bool = False,
        seq_len: int | None = None,
    ) -> None:
        self.seq_len = seq_len
        self.numbers_tokens = numbers_tokens
        self.marks_padding = marks_padding
        self.sources = sorted(sources, key=lambda source: source.name)  # their order in the config does not matter
        self.seed = seed
        self.stages = stages
        self.shuffle = shuffle
        self.window = window
        self.origin = origin or Origin()
        self.orders = [Order(len(source.sequences), seed, shuffle, window) for source in self.sources]
        self._stretches = self._make_stretches()
        names = {source.fingerprint: source.name for source in sources}
        if twice := next((s for s in sources if names[s.fingerprint] != s.name), None):
            raise UserError(
                f"data.sources: {twice.name} and {names[twice.fingerprint]} hold the same tokens: name them once, with "
                "both weights"
            )

    def _make_stretches(self) -> list[Stretch]:
        start = self.origin.since
        before = [self.origin.consumed.get(source.fingerprint, 0) for source in self.sources]
        found: list[Stretch] = []
        for end, weights in (*self.stages, (math.inf, self._last_weights)):
            if end > start:
                mixture = Mixture([weights.get(source.name, 0.0) for source in self.sources])
                found.append(Stretch(start, end, mixture, before))
                if end < math.inf:
                    start = int(end)
                    before = found[-1].consumed(start)
        return found

    @property
    def _last_weights(self) -> dict[str, float]:
        return {source.name: source.weight for source in self.sources}

    def _stretch(self, sample: int) -> Stretch:
        return next(stretch for stretch in self._stretches if sample < stretch.end)

    def locate(self, sample: int) -> tuple[int, int, int]:
        """Return (source, epoch, sequence) of a global sample index."""
        stretch = self._stretch(sample)
        source, number = stretch.mixture.locate(sample - stretch.start)
        return source, *self._order(source, number := stretch.before[source] + number).locate(number)

    def _order(self, source: int, number: int) -> Order:
        """Return the order of a source, of which a sample is read. Waits for sequences that are still made."""
        reader = self.sources[source].sequences
        if not isinstance(reader, Stream) or (
            reader.store.is_complete and len(reader) == self.orders[source].sequences
        ):
            return self.orders[source]
        has_all = reader.wait_for(self.orders[source].needed(number))
        order = replace(self.orders[source], sequences=len(reader) if has_all else UNKNOWN)
        if has_all:
            self.orders[source] = order
        return order

    def __getitems__(self, samples: list[int]) -> Batch:
        """Return the batch of these samples, by global sample index."""
        located = [self.locate(sample) for sample in samples]
        sequences = [self.sources[source].read(sequence) for source, _, sequence in located]
        batch = as_batch(sequences, mark_documents=self.sources[0].marks_documents)
        seq_len = batch["tokens"].shape[1]
        if self.numbers_tokens:
            batch["draws"] = torch.tensor(samples).unsqueeze(1) * seq_len + torch.arange(seq_len)
        if self.marks_padding:
            lengths = torch.tensor([seq_len - sequence.padding for sequence in sequences])
            batch["padding"] = torch.arange(seq_len) >= lengths.unsqueeze(1)
        return batch

    def consumed(self, samples_seen: int) -> list[int]:
        """Count the samples of each source among the first `samples_seen` of the run."""
        return self._stretch(samples_seen).consumed(samples_seen)

    def shares(self, samples_seen: int) -> dict[str, float]:
        """Return each source's share, from 0 to 1, of the first `samples_seen` samples of the run."""
        names = [source.name for source in self.sources]
        return {name: count / samples_seen for name, count in zip(names, self.consumed(samples_seen), strict=True)}

    def passes(self, samples_seen: int) -> dict[str, float]:
        """Return the passes over each source in the first `samples_seen` samples of the run, but for sources that still
        grow."""
        consumed = zip(self.sources, self.consumed(samples_seen), strict=True)
        return {source.name: count / len(source.sequences) for source, count in consumed if not source.is_growing}

    def limit(self, epochs: int) -> int:
        """Return the largest number of samples of the run that reads no source more often than `epochs` times."""
        limits = [epochs * len(source.sequences) for source in self.sources]
        for start, end, mixture, before in self._stretches:
            left = [max(0, limit - read) for limit, read in zip(limits, before, strict=True)]
            further = [mixture.index(i, left[i]) for i, share in enumerate(mixture.counts_in_period) if share]
            if (found := start + min(further)) < end:
                return found
        raise AssertionError("the last mixture has no end")

    # Resuming

    def settings(self, samples_seen: float = math.inf) -> dict[str, Any]:
        """Return the settings that must match on resume: with them, seed and origin give the tokens of every sample
        index below `samples_seen`. Stages that begin later may still change."""
        found: dict[str, Any] = {"data.shuffle": self.shuffle}
        if self.shuffle and self.window is not None:
            found["data.shuffle_window"] = self.window
        start = 0
        for end, weights in (*self.stages, (math.inf, self._last_weights)):
            if start < samples_seen or start == 0:
                for source in self.sources:
                    if weight := weights.get(source.name, 0.0):
                        key = f"data.sources.{source.name}" + (f" from sample {start}" if start else "")
                        found[key] = f"{source.fingerprint} x {weight!r}"
            start = end
        return found

    def state(self, samples_seen: int) -> dict[str, Any]:
        """Return the entry `data` of a checkpoint's manifest, in types of JSON."""
        consumed = zip([source.fingerprint for source in self.sources], self.consumed(samples_seen), strict=True)
        return {
            **({"seq_len": self.seq_len} if self.seq_len else {}),
            "meaning": self.settings(samples_seen),
            "origin": asdict(self.origin),
            "consumed": {**self.origin.consumed, **dict(consumed)},
        }

    def convert(self, samples_seen: int, state: Mapping[str, Any]) -> int:
        """Return the number of samples that have the tokens of the first `samples_seen` of a run, which may have had
        another length then.

        Args:
            state: entry of a checkpoint, see `state`; or another one with the `seq_len` of that time.
        """
        then = state.get("seq_len") or _length_of(state.get("meaning", {})) or self.seq_len
        return -(-samples_seen * then // self.seq_len) if then and self.seq_len else samples_seen

    def resume(
        self, state: dict[str, Any], samples_seen: int, on_change: Literal["error", "continue", "restart"]
    ) -> "Samples":
        """Return the samples of a run that resumes.

        Args:
            state: entry of the checkpoint, see `state`.
            samples_seen: samples that the run has consumed, see `convert`.
            on_change: `data.on_change`, for data that differs from the checkpoint's.
        """
        if state.get("meaning") == self.settings(samples_seen):
            origin = Origin(**state["origin"])
        else:
            # With "error", loading the checkpoint has failed before, unless checkpoint.allow_changes names the data.
            consumed = {} if on_change == "restart" else self._consumed_by_now(state.get("consumed", {}))
            origin = Origin(samples_seen, consumed)
            for source in self.sources:
                at = origin.consumed.get(source.fingerprint, 0)
                logger.info(f"data changed: {source.name} continues after {at:,} of its sequences (data.on_change)")
        options = {"seed": self.seed, "stages": self.stages, "shuffle": self.shuffle, "window": self.window}
        options |= {"numbers_tokens": self.numbers_tokens, "marks_padding": self.marks_padding}
        return Samples(self.sources, **options, origin=origin, seq_len=self.seq_len)

    def _consumed_by_now(self, consumed: Mapping[str, int]) -> dict[str, int]:
        """Return the samples of each source that a run has consumed, by fingerprint. Those of a source that had another
        length become as many of its present length as have their tokens."""
        found = dict(consumed)
        for source in self.sources:
            if source.fingerprint in consumed:
                continue
            for other, count in consumed.items():
                if (then := _other_length(source.fingerprint, other)) and self.seq_len:
                    del found[other]
                    found[source.fingerprint] = _same_tokens(source, count, then=then, now=self.seq_len)
        return found


def _other_length(fingerprint: str, other: str) -> int | None:
    """Return the length of sequences with which another fingerprint is that of the same tokens in the same packing."""
    (tokens, _, _), (others, _, length) = fingerprint.rpartition("-"), other.rpartition("-")
    return int(length) if tokens and tokens == others and length.isdecimal() else None


def _length_of(settings: Mapping[str, Any]) -> int | None:
    """Return the length of the sequences of a checkpoint whose state does not have it: of before."""
    fingerprints = (
        str(value).rpartition(" x ")[0] for key, value in settings.items() if key.startswith("data.sources")
    )
    lengths = (fingerprint.rpartition("-")[2] for fingerprint in fingerprints if "-" in fingerprint)
    return next((int(length) for length in lengths if length.isdecimal()), None)


def _same_tokens(source: Source, count: int, *, then: int, now: int) -> int:
    """Return the sequences of length `now` that have the tokens of `count` sequences of length `then`, in as many
    epochs. No token of the epoch in which the run is comes again, if sequences are in the order of the files."""
    reader, epoch = source.sequences, 0
    if not source.is_growing:
        is_stream = isinstance(reader, Stream)
        of_epoch = (len(reader.store) - 1) // then if is_stream else round(len(reader) * now / then)
        epoch, count = divmod(count, max(1, of_epoch))
    return epoch * len(reader) + min(-(-count * then // now), len(reader))


def as_batch(sequences: Sequence[TokenSequence], *, mark_documents: bool) -> Batch:
    """Stack B sequences into a batch, see `titanlite.batch`."""
    batch = {
        "tokens": torch.from_numpy(np.stack([sequence.tokens for sequence in sequences])),
        "labels": torch.from_numpy(np.stack([sequence.labels for sequence in sequences])),
    }
    if not mark_documents:
        return batch
    seq_len = len(sequences[0].tokens)
    positions = np.empty((len(sequences), seq_len), dtype=np.int64)
    documents = np.empty((len(sequences), seq_len), dtype=np.int32)
    for i, sequence in enumerate(sequences):
        lengths = np.diff(sequence.starts, append=seq_len)
        positions[i] = np.arange(seq_len) - np.repeat(sequence.starts, lengths)
        documents[i] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    starts = [sequence.starts + i * seq_len for i, sequence in enumerate(sequences)]
    boundaries = np.concatenate([*starts, [len(sequences) * seq_len]]).astype(np.int32)
    return batch | {
        "positions": torch.from_numpy(positions),
        "documents": torch.from_numpy(documents),
        "boundaries": torch.from_numpy(boundaries),
    }
