"""Hashes of weights and optimizer states, in hashes.jsonl of the run."""

import torch

from titanlite.mesh import pipeline_mesh
from titanlite.observer import Phase, StepObserver
from titanlite.runtime.ranks import gather
from titanlite.schedule import is_due
from titanlite.techniques.reproducible.state_hash import hash_tensors, join_hashes
from titanlite.techniques.technique import Observed


class StateHashes(StepObserver):
    """Writes the hash every `freq` steps, and after the last one."""

    def __init__(self, run: Observed, *, freq: int) -> None:
        self._run, self._freq, self._file = run, freq, run.open_records("hashes.jsonl")
        self._step = 0

    def begin_step(self, step: int) -> None:
        self._step = step

    @torch.no_grad()
    def on_phase(self, phase: Phase) -> None:
        """Write the hash once the optimizer has made its step."""
        if phase is Phase.METRICS and is_due(self._step, self._freq, last=self._step == self._run.steps):
            with self._run.paused():
                hashes = hash_tensors(self._run.state())
                if stages := pipeline_mesh(self._run.mesh):
                    hashes = {name: value for own in gather(hashes, stages.get_group()) for name, value in own.items()}
            if self._file:
                self._file.write({"step": self._step, "hash": join_hashes(hashes), "tensors": hashes})

    def close(self) -> None:
        if self._file:
            self._file.close()
