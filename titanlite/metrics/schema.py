"""Form of the records of a run: the fields of its JSON lines files, with types and units (docs/running.md).

`RecordFile` writes them. Readers, such as `titanlite report`, take names and units from here.
"""

from typing import Any, NamedTuple

SCHEMA = 2
"""Version of the form, in each record as `schema`. A field that goes, or changes its type or unit, makes a new version.
A field that joins does not. Records of version 1 have neither `schema` nor `time` and `phase_seconds`."""


class Field(NamedTuple):
    """Field of a record."""

    type: type
    unit: str
    """Unit of a number, or of the numbers in a table."""
    optional: bool = False
    """The field may be missing, or null."""


COMMON = {
    "schema": Field(int, ""),
    "step": Field(int, "steps"),
    "time": Field(float, "s since 1970"),
}
METRICS = {
    **COMMON,
    "loss": Field(float, "nats a token", optional=True),
    "grad_norm": Field(float, "", optional=True),
    "added_loss": Field(float, "nats a token", optional=True),
    "distill_loss": Field(float, "nats a token", optional=True),
    "lr": Field(float, ""),
    "samples": Field(int, "sequences"),
    "data_shares": Field(dict, "share of 1"),
    "source_losses": Field(dict, "nats a token", optional=True),
    "phase_seconds": Field(dict, "s"),
    "tokens_per_second": Field(float, "tokens/s"),
    "step_seconds": Field(float, "s"),
    "data_wait_seconds": Field(float, "s a step"),
    "own_seconds_slowest": Field(float, "s a step", optional=True),
    "own_seconds_median": Field(float, "s a step", optional=True),
    "slowest_rank": Field(int, "", optional=True),
    "slowest_host": Field(str, "", optional=True),
    "compile_seconds": Field(float, "s", optional=True),
    "memory_gib": Field(float, "GiB"),
    "num_alloc_retries": Field(int, "", optional=True),
    "tflops_per_device": Field(float, "TFLOP/s"),
    "mfu": Field(float, "share of 1", optional=True),
    "mfu_causal": Field(float, "share of 1", optional=True),
    "busiest_expert": Field(float, "times the mean", optional=True),
}
"""metrics.jsonl: one record a log step. A model or a loss of the user's own may add numbers."""
VALIDATION = {
    **COMMON,
    "loss": Field(float, "nats a token", optional=True),
    "sources": Field(dict, ""),
}
"""validation.jsonl: one record a validation."""
SAVES = {
    **COMMON,
    "blocking_seconds": Field(float, "s", optional=True),
    "staging_seconds": Field(float, "s"),
    "planning_seconds": Field(float, "s"),
    "writing_seconds": Field(float, "s"),
    "total_seconds": Field(float, "s"),
    "bytes": Field(int, "bytes"),
}
"""checkpoints.jsonl: one record a save."""

LAYERS = {**COMMON, "layers": Field(dict, "")}
"""layers.jsonl: one record every `metrics.layers.freq` steps. By layer, and by parameters, gradients, updates and
activations: norm (L2), rms, max (largest absolute value), zeros and nonfinite (shares of 1)."""
MEMORY = {
    **COMMON,
    "world_size": Field(int, "ranks"),
    "source": Field(str, ""),
    "phases": Field(dict, "bytes"),
}
"""memory.jsonl: one record a start, of rank 0 (`PhaseMemory`). `phases` has the bytes at the end of each phase."""


def find_faults(record: dict[str, Any], fields: dict[str, Field]) -> list[str]:
    """Return what in a record is not of the form. Further numbers are no fault."""
    faults = [f"{name} is missing" for name, field in fields.items() if name not in record and not field.optional]
    for name, value in record.items():
        field = fields.get(name, Field(float, ""))
        types = (int, float) if field.type is float else (field.type,)
        if value is None and not field.optional and name in fields:
            faults.append(f"{name} is null")
        elif value is not None and (type(value) not in types):
            faults.append(f"{name} is {type(value).__name__}, not {field.type.__name__}")
    return faults
