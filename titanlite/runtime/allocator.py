"""Settings of the CUDA caching allocator. PyTorch reads them from the environment when a process first uses its GPU."""

from collections.abc import Mapping, MutableMapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with allocator settings. PyTorch takes the first that is set and ignores the others."""

EXPANDABLE = "expandable_segments:True"
"""Segments that grow in place. Blocks of different sizes then share one address range for each stream, so that memory
is not lost to fragmentation (PyTorch's notes on CUDA, "Optimizing memory usage")."""


def use_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Choose expandable segments, unless the user has set allocator settings of any kind.

    Call it before torch is imported. The settings have no effect without a GPU.
    """
    if not any(name in environ for name in VARIABLES):
        environ["PYTORCH_ALLOC_CONF"] = EXPANDABLE


def allocator_settings(environ: Mapping[str, str]) -> str:
    """Return the settings in effect, for the first lines of a run."""
    return next((f"{environ[name]} ({name})" for name in VARIABLES if name in environ), "PyTorch's defaults")
