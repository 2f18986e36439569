"""The backward pass that is running."""

from collections.abc import Callable

import torch
from torch.autograd import Variable


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread, which may recompute forward."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running ends."""
    Variable._execution_engine.queue_callback(function)
