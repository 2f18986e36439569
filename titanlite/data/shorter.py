"""Samples cut into shorter sequences, for `training.seq_len_ramp`: the same tokens in the same order."""

import torch
from torch.utils.data import Dataset

from titanlite.batch import Batch
from titanlite.data.samples import Samples
from titanlite.schedule import SequenceLengths


class ShorterSequences(Dataset[Batch]):
    """Samples of a run, each cut into sequences of the length of its step.

    A document that is cut keeps its positions, which count from its start, and attention does not reach its part in the
    sequence before.
    """

    def __init__(self, samples: Samples, lengths: SequenceLengths) -> None:
        self.samples = samples
        self.lengths = lengths

    def __getitems__(self, samples: list[int]) -> Batch:
        return cut_sequences(self.samples.__getitems__(samples), self.lengths.at(samples[0]))


def cut_sequences(batch: Batch, seq_len: int) -> Batch:
    """Cut each sequence of a batch into sequences of `seq_len` tokens, which divides their length."""
    boundaries = {}
    if "boundaries" in batch:
        cuts = torch.arange(0, batch["tokens"].numel() + 1, seq_len, dtype=torch.int32)
        boundaries["boundaries"] = torch.unique(torch.cat([batch["boundaries"], cuts]))
    rows = {name: values for name, values in batch.items() if name not in boundaries}
    return {name: values.reshape(-1, seq_len, *values.shape[2:]) for name, values in rows.items()} | boundaries
