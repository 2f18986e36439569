"""Records of the operators that run, and of what they make."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Operators with their arguments, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


class OperatorNames(TorchDispatchMode):
    """Names of the operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """The largest tensor that an operator makes, and the number of matmuls.

    Args:
        but: shapes that do not count.
    """

    def __init__(self, *, but: Sequence[Sequence[int]] = ()) -> None:
        super().__init__()
        self.but = [sorted(shape) for shape in but]
        self.numel = 0
        self.matmuls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        self.matmuls += func in (aten.mm.default, aten.mm.out, aten.addmm_.default)
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and sorted(t.shape) not in self.but]
        self.numel = max(self.numel, *sizes, 0)
        return result


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the most memory that a function takes on a CPU, beyond what there was before. Its result counts."""
    seen: Any = profile(profile_memory=True)
    with seen:
        function()
    changes = [event for event in seen.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))


def kept_tensors(out: Tensor) -> list[Tensor]:
    """Return what autograd keeps for the backward pass of a tensor."""
    nodes, kept = list[Any]([out.grad_fn]), list[Tensor]()
    for node in nodes:
        names = [name for name in dir(node) if name == "saved_tensors" or name.startswith("_saved_")]
        kept += [leaf for leaf in tree_leaves([getattr(node, name) for name in names]) if isinstance(leaf, Tensor)]
        nodes += [following for following, _ in node.next_functions if following and following not in nodes]
    return kept
