"""What a step does, operator by operator: memory that comes and goes, arithmetic, and messages.

Every storage is one record: how large it is, from when to when, and what it is for. What it is for may become known
later (a gradient is an output of a reduce-scatter first), so records are added up when all is over.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from titanlite.observer import StepObserver
from titanlite.runtime.private_torch import run_random_operators_plainly

aten = torch.ops.aten
CATEGORIES: tuple[str, ...] = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "all-gather",
    "reduce-scatter",
    "other",
)
"""What memory is for. all-gather: gathered parameters and their buffers. reduce-scatter: gradients of whole parameters,
until they are reduced, and their buffers. other: gradients of activations, what the optimizer holds for a moment,
inputs, tables."""


@dataclass
class Storage:
    """Memory behind one or several tensors."""

    category: str
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """(moment, bytes from then on)."""


class Operator(NamedTuple):
    """One kernel on this rank."""

    moment: int
    phase: int
    """Place in `Recorder.phases`."""
    name: str
    kind: Literal["matmul", "attention", "memory"]
    flops: int
    dtype: str
    reads: tuple[tuple[int, int], ...]
    """(number of the storage, bytes of the tensor)."""
    writes: tuple[tuple[int, int], ...]


class Sent(NamedTuple):
    """One message of this rank."""

    phase: int
    collective: Literal["all_gather", "reduce_scatter", "all_reduce"]
    """An all-to-all is here as an all-gather, which takes as long."""
    bytes: int
    """Of the whole, unsharded tensor."""
    axis: str
    """shard, replicate, world, or neighbours: a part of a shard group."""
    ranks: tuple[int, ...]
    unit: str
    """Whose parameters or gradients it brings; empty: it is about the whole step."""


class Recorder(TorchDispatchMode, StepObserver):
    """Records what is done to fake tensors while it is active, in this thread.

    Args:
        fakes: the mode whose tensors count. Others are phantoms: DTensor makes some to learn shapes.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._fakes = fakes
        self.moment = 0
        self.storages: list[Storage] = []
        self.operators: list[Operator] = []
        self.sent: list[Sent] = []
        self.phases: list[tuple[int, str]] = [(0, "start")]
        """(moment, name of the phase from then on)."""
        self._number_of: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._categories: list[str] = []
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._unit = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks stay compiled: what they run counts, and not how they came to be."""
        return True

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """What new memory is for, within."""
        self._categories.append(name)
        try:
            yield
        finally:
            self._categories.pop()

    def during(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with `category` around each call."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.category(name):
                return function(*args, **kwargs)

        return wrapped

    @contextmanager
    def collective(self, category: str, unit: str) -> Iterator[None]:
        before, self._unit = self._unit, unit or self._unit
        try:
            with self.category(category):
                yield
                self._find_resized()
        finally:
            self._unit = before

    def name_group(self, group: dist.ProcessGroup, axis: str) -> None:
        self._groups[group.group_name] = axis, tuple(dist.get_process_group_ranks(group))

    def phase(self, name: str) -> None:
        if name in ("forward", "backward"):
            return  # the FSDP units have phases of their own
        self.moment += 1
        self.phases.append((self.moment, name))

    def label(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what the memory of these is for."""
        for tensor in tensors:
            for number, _ in self._tensors(tensor):
                self.storages[number].category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not FakeTensor for kind in types):
            return NotImplemented  # of a DTensor, this rank's part comes again; of float8's wrappers, what is in them
        result = func(*args, **(kwargs or {}))
        self.moment += 1
        inputs = self._tensors((args, kwargs))
        known = len(self.storages)
        outputs = self._tensors(result)
        if func.namespace == "c10d":
            self._message(func, args, inputs)
        elif inputs or outputs:
            self._operator(func, args, kwargs or {}, result, inputs, outputs, known)
        return result

    def _tensors(self, tree: Any) -> list[tuple[int, Tensor]]:
        """Those that count, with the numbers of their storages."""
        found = []
        for leaf in tree_iter(tree):
            for tensor in _plain(leaf) if isinstance(leaf, Tensor) else ():
                if (number := self._number(tensor)) is not None:
                    found.append((number, tensor))
        return found

    def _number(self, tensor: Tensor) -> int | None:
        """Of the tensor's storage; a new one gets its record."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self._fakes:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._number_of:
            self._check_size(storage, self._number_of[key])
        else:
            number = len(self.storages)
            self.storages.append(Storage(self._category_now(), [(self.moment, storage.nbytes())]))
            self._number_of[key] = number
            self._alive[key] = weakref.ref(storage, lambda _: self._freed(key))
        return self._number_of[key]

    def _category_now(self) -> str:
        if self._categories:
            return self._categories[-1]
        in_backward = torch._C._current_graph_task_id() != -1
        # In backward, gradients are on only where forward is done again (activation checkpointing).
        return "other" if in_backward and not torch.is_grad_enabled() else "activations"

    def _find_resized(self) -> None:
        """Storages also change their size without any operator: FSDP allocates and frees gathered parameters so."""
        for key, reference in [*self._alive.items()]:
            if (storage := reference()) is not None:
                self._check_size(storage, self._number_of[key])

    def _check_size(self, storage: torch.UntypedStorage, number: int) -> None:
        size = storage.nbytes()
        if size != self.storages[number].sizes[-1][1]:
            self._resized(number, size)
            if size and self._categories:
                self.storages[number].category = self._categories[-1]

    def _freed(self, key: int) -> None:
        del self._alive[key]
        self._resized(self._number_of.pop(key), 0)

    def _resized(self, number: int, size: int) -> None:
        self.moment += 1
        self.storages[number].sizes.append((self.moment, size))

    def _operator(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Any], outputs: list[Any], known: int
    ) -> None:
        is_new = any(number >= known for number, _ in outputs)
        if not (is_new or func._schema.is_mutable) or func.__name__.startswith(("empty", "new_empty", "detach")):
            return  # a view, or memory that nothing is written to
        kind, flops = _flops(func, args, kwargs, result)
        operand = inputs[0][1] if inputs else outputs[0][1]
        dtype = "float8" if "float8" in str(operand.dtype) else str(operand.dtype).removeprefix("torch.")
        reads = tuple((number, _bytes(tensor)) for number, tensor in inputs)
        writes = tuple((number, _bytes(tensor)) for number, tensor in outputs)
        phase = len(self.phases) - 1
        self.operators.append(Operator(self.moment, phase, str(func), kind, flops, dtype, reads, writes))

    def _message(self, func: Any, args: Any, inputs: list[Any]) -> None:
        collective = COLLECTIVES.get(str(func._overloadpacket))
        group = next((leaf for leaf in args if isinstance(leaf, torch.ScriptObject) and _is_group(leaf)), None)
        if group is None or collective is None:
            return
        if self._unit and str(func._overloadpacket) == "c10d.alltoall_base_":
            collective = "reduce_scatter"  # on gloo; optimizers exchange for other reasons, and in no unit
        size = max((tensor.numel() * tensor.element_size() for _, tensor in inputs), default=0)
        unboxed = dist.ProcessGroup.unbox(group)
        if unboxed.group_name not in self._groups:
            self.name_group(unboxed, "neighbours")
        axis, ranks = self._groups[unboxed.group_name]
        self.sent.append(Sent(len(self.phases) - 1, collective, size, axis, ranks, self._unit))


COLLECTIVES: dict[str, Literal["all_gather", "reduce_scatter", "all_reduce"]] = {
    "c10d._allgather_base_": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.allreduce_": "all_reduce",
    "c10d.alltoall_base_": "all_gather",
}


ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (0, 2, 4),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (1, 5, 7),
}
"""Kernels of which PyTorch's table knows nothing: place of the query among the arguments, products of scores and
values' size that they make, place of is_causal."""


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Literal["matmul", "attention", "memory"], int]:
    """(kind, floating point operations) of a kernel. Of causal attention half: kernels leave the rest out."""
    packet = func._overloadpacket
    name = str(packet)
    if name in ATTENTION:
        first, products, causal = ATTENTION[name]
        B, N, L, H = args[first].shape
        flops = products * 2 * B * N * L * args[first + 1].shape[2] * H
        is_causal = kwargs.get("is_causal", args[causal] if len(args) > causal else False)
        return "attention", flops // 2 if is_causal else flops
    if name.startswith("torch_attn._varlen_attn"):
        is_backward = name.endswith("backward")
        (T, N, H), L = args[is_backward].shape, args[8 if is_backward else 5]
        return "attention", (5 if is_backward else 2) * T * N * H * L  # at most: as if each row were one document
    formula = flop_registry.get(packet) or (flop_registry[aten.addmm] if packet is aten.addmm_ else None)
    if formula is not None:
        return "matmul", int(formula(*args, **kwargs, out_val=result))
    return "memory", 0


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """What a tensor is made of: of a DTensor, this rank's part."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _bytes(tensor: Tensor) -> int:
    """That a kernel moves to read or write it: an expanded tensor is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _is_group(leaf: Any) -> bool:
    return "ProcessGroup" in str(leaf._type())


run_random_operators_plainly(Recorder)
