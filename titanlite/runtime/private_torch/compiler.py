"""torch.compile: what it has compiled, how long that took, and its caches."""

import sys
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config


def without_autograd_cache() -> AbstractContextManager[None]:
    """Compile without torch.compile's cache of traced code (AOTAutograd). Inductor's own cache stays on.

    Its key (torch 2.13) has the shape of a whole DTensor, but not that of a rank's part. So a run with 4-bit moments,
    started after one with 8-bit moments, got the other's code and failed.
    """
    return functorch_config.patch(enable_autograd_cache=False)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` has been called: calling the module then compiles its forward."""
    return module._compiled_call_impl is not None


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process. Does not import the compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def compile_seconds() -> float:
    """Return the wall time that torch.compile has spent in this process. Does not import the compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0


def mark_dynamic(tensor: Tensor, *, dim: int) -> None:
    """Let the compiler expect a dim with another size in each batch, so that it need not recompile for it."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
