"""Records of the operators that run, and of what they make."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
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
