"""PyTorch's flight recorder: each rank's latest collectives on GPUs, which PyTorch writes to a file at a timeout."""

from collections.abc import MutableMapping
from pathlib import Path

VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Environment variables that name the files. PyTorch adds the rank."""


def keep_traces(environ: MutableMapping[str, str], folder: Path) -> None:
    """Let PyTorch write traces to nccl-rank-N in a folder, unless the user has named other files.

    Call it before the process group starts. PyTorch's own choice is a folder that all runs of a user share.
    """
    if not any(name in environ for name in VARIABLES):
        environ[VARIABLES[0]] = str(folder.absolute() / "nccl-rank-")
