"""Record of the operators that run."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorNames(TorchDispatchMode):
    """Names of the operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
