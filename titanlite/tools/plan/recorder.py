"""Recorder of a step, operator by operator: memory as it is allocated and freed, FLOPs, and collectives.

Each storage has one record: its sizes over time and its category. The category may become known later, as a gradient is
an output of a reduce-scatter first. Records are therefore added up at the end.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from titanlite.observer import Phase
from titanlite.ops.attention import seen_causally
from titanlite.ops.tiled_attention import backward_in_tiles, forward_in_tiles
from titanlite.runtime.dtypes import name_of
from titanlite.runtime.private_torch.tensors import is_in_backward, storage_key, wrapped_tensors
from titanlite.runtime.private_torch.tracing import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    changed_arguments,
    is_mutating,
    run_random_operators_plainly,
    unboxed_group,
)
from titanlite.tools.plan.gpu_kernels import attention_scratch
from titanlite.tools.plan.time import CollectiveName, KernelKind

aten = torch.ops.aten
CATEGORIES: tuple[str, ...] = (
    *("parameters", "gradients", "optimizer", "activations"),
    *("logits", "all-gather", "reduce-scatter", "other", "teacher", "outer", "average", "offloaded"),
)
"""Categories of memory. all-gather: gathered parameters and their buffers. reduce-scatter: gradients of whole
parameters, until they are reduced, and their buffers. other: gradients of activations, temporary tensors of the
optimizer, inputs, tables. teacher: its parameters. outer: weights and momentum of the outer optimizer. average: that of
the weights. offloaded: activations on the host."""


@dataclass
class Storage:
    """Memory behind one or several tensors."""

    category: str
    stream: int = 0
    """Number of the CUDA stream that allocates it; 0 computes."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """(time, bytes from then on). Time counts operators, changes of sizes and phases."""


class Operator(NamedTuple):
    """One kernel on this rank."""

    time: int
    phase: int
    """Place in `Recorder.phases`."""
    name: str
    kind: KernelKind
    flops: int
    dtype: str
    reads: tuple[tuple[int, int], ...]
    """(number of the storage, bytes of the tensor)."""
    writes: tuple[tuple[int, int], ...]
    category: str = ""
    """Category given to new memory; empty in the model's own forward and backward."""


class Sent(NamedTuple):
    """One collective of this rank."""

    phase: int
    collective: CollectiveName
    """An all-to-all of even parts of weights or gradients counts as an all-gather, which takes as long."""
    bytes: int
    """Size of the whole, unsharded tensor; of an all-to-all, of all that a rank sends."""
    axis: str
    """Axis of the mesh, world, or neighbours: a part of a shard group."""
    ranks: tuple[int, ...]
    unit: str
    """FSDP unit whose parameters or gradients are communicated; empty for other collectives."""
    is_inside: bool = False
    """True for activations, for which the kernels of a unit wait."""
    beside: slice = slice(0)
    """Those of `Recorder.operators` that do not wait for it."""


class Mark(NamedTuple):
    """A place in a record."""

    time: int
    sent: int
    """Number of collectives before it."""


class Handed(NamedTuple):
    """A tensor that the passes of a step hand to its update: a gradient or a loss."""

    storage: int
    elements: int
    """Of the storage."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Recorder(TorchDispatchMode):
    """Records the operators on fake tensors while it is active, in this thread.

    Args:
        fakes: the mode whose tensors count. Others have no memory in training: DTensor makes some to learn shapes.
        gpu: whether the kernels stand for those of a GPU.
        flash: whether attention of whole sequences is FlashAttention-2.
    """

    def __init__(self, fakes: FakeTensorMode, *, gpu: bool = False, flash: bool = False) -> None:
        super().__init__()
        self._gpu = gpu
        self._flash = flash
        self._fakes = fakes
        self.time = 0
        self.storages: list[Storage] = []
        self.operators: list[Operator] = []
        self.sent: list[Sent] = []
        self.micro_batches = 0
        """Number of recorded micro-batches."""
        self.phases: list[tuple[int, str]] = [(0, "start")]
        """(time, name of the phase from then on)."""
        self.passes = Mark(0, 0), Mark(0, 0)
        """Begin and end of the forward and backward passes of the step."""
        self.handed: dict[str, Handed] = {}
        """By name of the parameter or the loss."""
        self.handed_storages: dict[int, tuple[int, int | None, int | None]] = {}
        """Where another record has the passes: {storage here: (storage there, number of its block there, and here)}."""
        self._number_of: dict[Hashable, int] = {}
        self._alive: dict[Hashable, weakref.ref[Any]] = {}
        self._categories: list[str] = []
        self._groups: dict[tuple[bool, str], tuple[str, tuple[int, ...]]] = {}
        self._unit = ""
        self._streams: dict[torch.cpu.Stream, int] = {torch.cpu.current_stream(): 0}
        self._on_the_way: dict[int, tuple[int, int]] = {}
        """{storage that is received: (place in `sent`, number of operators before)}."""
        self._received: set[int] = set()
        """Storages that this rank receives from single ranks."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the operators of compiled blocks count, and those of the compiler do not."""
        return True

    @contextmanager
    def category(self, name: str) -> Iterator[None]:
        """Give new memory a category within the context."""
        self._categories.append(name)
        try:
            yield
        finally:
            self._categories.pop()

    def during(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with `category` around each call."""

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

    def name_group(self, group: dist.ProcessGroup, axis: str, *, inside: bool = False) -> None:
        """Name the mesh axis of a process group. Axes that span all ranks can share a group.

        Args:
            inside: activations are communicated over the axis, by functional collectives.
        """
        self._groups[inside, group.group_name] = axis, tuple(dist.get_process_group_ranks(group))

    def on_phase(self, phase: Phase) -> None:
        if phase is Phase.UPDATE:  # forward and backward are divided by FSDP unit
            self.unit(phase)

    def unit(self, name: str) -> None:
        self.time += 1
        self.phases.append((self.time, name))

    def mark(self) -> Mark:
        self.time += 1
        return Mark(self.time, len(self.sent))

    def hand(self, name: str, tensor: Tensor) -> None:
        """Note a tensor that the update gets."""
        if len(found := self._tensors(tensor)) != 1:
            return  # of several tensors, or no fake one: the passes are traced with all blocks
        [(number, plain)] = found
        elements = plain.untyped_storage().nbytes() // plain.element_size()
        self.handed[name] = Handed(
            number, elements, plain.dtype, tuple(plain.shape), plain.stride(), int(plain.storage_offset())
        )

    def stand_in(self, tensor: Tensor, storage: int, its_block: int | None, block: int | None) -> None:
        """Note that a tensor's memory is that of a storage in another record; see `handed_storages`."""
        [(number, _)] = self._tensors(tensor)
        self.handed_storages[number] = storage, its_block, block

    def kept_of_received(self) -> int:
        """Return the bytes received from single ranks whose memory lasts until the newest phase. PyTorch 2.15 frees
        the buffers of a stage when it has used them."""
        end, _ = self.phases[-1]
        return sum(
            [size for time, size in self.storages[storage].sizes if time <= end][-1] for storage in self._received
        )

    def label(self, tensors: Iterable[Tensor], category: str) -> None:
        """Change the category of the tensors' memory."""
        for tensor in tensors:
            for number, _ in self._tensors(tensor):
                self.storages[number].category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tensor_cls is not FakeTensor for tensor_cls in types):
            return NotImplemented  # the subclass calls the operator again with its plain tensors
        packet = str(func.overloadpacket)
        if inner := INNER.get(packet):
            count = len(self.operators)
            with self:  # record the memory of the inner tensors, but count one kernel
                inner(*args)
            del self.operators[count:]
        if func is aten.addmm.dtype_out:  # PyTorch 2.11 decomposes it wrongly for fake tensors
            result = kwargs["out"]
        elif packet == WAIT:  # wait_tensor returns its argument; with fake tensors, a copy
            result = args[0]
        else:
            result = func(*args, **(kwargs or {}))
        self.time += 1
        inputs = self._tensors((args, kwargs))
        known = len(self.storages)
        outputs = self._tensors(result)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, inputs, outputs)
        elif inputs or outputs:
            if not outputs:  # operators on lists of tensors return nothing
                outputs = self._tensors(changed_arguments(func, args, kwargs or {}))
            self._operator(func, args, kwargs or {}, result, inputs, outputs, known)
        return result

    def _tensors(self, tree: Any) -> list[tuple[int, Tensor]]:
        """Return the tensors that count, each with the number of its storage.

        Args:
            tree: arguments or results of an operator, in nested containers.
        """
        found: list[tuple[int, Tensor]] = []
        self._find(tree, found)
        return found

    def _find(self, tree: Any, found: list[tuple[int, Tensor]]) -> None:
        """Add the tensors that count; of a DTensor, this rank's part. Every operator's arguments and results pass
        through here, where PyTorch's pytree takes several times as long."""
        if isinstance(tree, FakeTensor):
            if (number := self._number(tree)) is not None:
                found.append((number, tree))
            return
        if isinstance(tree, Tensor):
            tree = wrapped_tensors(tree)
        if isinstance(tree, dict):
            tree = tree.values()
        elif not isinstance(tree, list | tuple):
            return
        for part in tree:
            self._find(part, found)

    def _number(self, tensor: FakeTensor) -> int | None:
        """Return the number of a tensor's storage. A new storage gets a record. None: the tensor does not count."""
        if tensor.fake_mode is not self._fakes:
            return None
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._number_of:
            self._check_size(storage, self._number_of[key])
        else:
            number = len(self.storages)
            self.storages.append(Storage(self._category_now(), self._stream(), [(self.time, storage.nbytes())]))
            self._number_of[key] = number
            self._alive[key] = weakref.ref(storage, lambda _: self._freed(key))
        return self._number_of[key]

    def _stream(self) -> int:
        """Return the number of the stream that FSDP works on. Those of CPUs are names only."""
        return self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))

    def _category_now(self) -> str:
        if self._categories:
            return self._categories[-1]
        # In backward, gradients are enabled only where activation checkpointing recomputes forward.
        return "other" if is_in_backward() and not torch.is_grad_enabled() else "activations"

    def _find_resized(self) -> None:
        """Record sizes that changed without an operator. FSDP resizes the storages of gathered parameters."""
        for key, reference in [*self._alive.items()]:
            if (storage := reference()) is not None:
                self._check_size(storage, self._number_of[key])

    def _check_size(self, storage: torch.UntypedStorage, number: int) -> None:
        size = storage.nbytes()
        if size != self.storages[number].sizes[-1][1]:
            self._resized(number, size)
            if size and self._categories:
                self.storages[number].category = self._categories[-1]

    def _freed(self, key: Hashable) -> None:
        del self._alive[key]
        self._resized(self._number_of.pop(key), 0)

    def _resized(self, number: int, size: int) -> None:
        self.time += 1
        self.storages[number].sizes.append((self.time, size))

    def _operator(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Any], outputs: list[Any], known: int
    ) -> None:
        is_new = any(number >= known for number, _ in outputs)
        if not (is_new or is_mutating(func)) or func.__name__.startswith(("empty", "new_empty", "detach")):
            return  # a view, or new memory without values
        kind, flops = flops_of(func, args, kwargs, result)
        kind = "flash" if kind == "attention" and self._flash else kind
        operand = inputs[func.overloadpacket is aten.addmm][1] if inputs else outputs[0][1]  # addmm: behind the term
        touched = args[2].numel() if func.overloadpacket in INDEXED else None
        reads = tuple((number, moved_bytes(tensor, touched)) for number, tensor in inputs)
        writes = tuple((number, moved_bytes(tensor, touched)) for number, tensor in outputs)
        phase = len(self.phases) - 1
        category = self._categories[-1] if self._categories else ""
        self.operators.append(
            Operator(self.time, phase, str(func), kind, flops, name_of(operand.dtype), reads, writes, category)
        )
        if self._gpu and kind in ("attention", "flash") and (scratch := attention_scratch(func, args)):
            self.storages.append(Storage("other", self._stream(), [(self.time, scratch), (self.time + 1, 0)]))
            self.time += 1

    def _collective(self, func: Any, args: Any, inputs: list[Any], outputs: list[Any]) -> None:
        collective = COLLECTIVES.get(str(func.overloadpacket))
        if str(func.overloadpacket) == WAIT:
            for number, _ in inputs:  # empty if the tensor is not recorded
                if number in self._on_the_way:
                    place, begin = self._on_the_way.pop(number)
                    self.sent[place] = self.sent[place]._replace(beside=slice(begin, len(self.operators)))
            return
        if str(func.overloadpacket) == "c10d.recv_":
            self._received.update(number for number, _ in inputs)
        group = next((group for leaf in args if (group := unboxed_group(leaf)) is not None), None)
        name = group.group_name if group else args[-1]
        is_inside = (group is None or collective == "send") and (True, name) in self._groups
        if collective is None or not (is_inside or group or (False, name) in self._groups):
            return
        if self._unit and str(func.overloadpacket) == "c10d.alltoall_base_":
            collective = "reduce_scatter"  # FSDP reduces by all-to-alls on gloo
        if group and (False, name) not in self._groups:
            self.name_group(group, "neighbours")
        axis, ranks = self._groups[is_inside, name]
        size = max((tensor.numel() * tensor.element_size() for _, tensor in inputs), default=0)
        if is_inside and collective == "all_gather":  # other collectives have the whole tensor as an input
            size *= len(ranks)
        if is_inside and outputs:
            self._on_the_way[outputs[0][0]] = len(self.sent), len(self.operators)
        self.sent.append(Sent(len(self.phases) - 1, collective, size, axis, ranks, self._unit, is_inside))


WAIT = "_c10d_functional.wait_tensor"
COLLECTIVES: dict[str, CollectiveName] = {
    "c10d._allgather_base_": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.allreduce_": "all_reduce",
    "c10d.alltoall_base_": "all_gather",
    "c10d.send": "send",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional.all_to_all_single": "all_to_all",
}


run_random_operators_plainly(Recorder)


# Cost of one operator


INDEXED = {aten.gather, aten.scatter_, aten.scatter_add_}
"""Operators that touch as many elements as their index has: their third argument."""

ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (0, 2, 4),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (1, 5, 7),
    "titanlite.attend_in_tiles": (0, 2, None),
    "titanlite.attend_in_tiles_backward": (1, 5, None),
}
"""Kernels that PyTorch's table of FLOPs lacks: (place of the query among the arguments, number of matmuls over all
scores, place of is_causal; None: it always is)."""
INNER: dict[str, Callable[..., Any]] = {
    "titanlite.attend_in_tiles": forward_in_tiles,
    "titanlite.attend_in_tiles_backward": backward_in_tiles,
}
"""Operators that hold tensors while they run, and what they do."""


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[KernelKind, int]:
    """Return the kind of a kernel and its FLOPs. Causal attention counts as half, as kernels skip masked scores."""
    packet = func.overloadpacket
    name = str(packet)
    if name in ATTENTION:
        first, matmuls, causal = ATTENTION[name]
        B, N, L, H = args[first].shape
        flops = matmuls * 2 * B * N * L * args[first + 1].shape[2] * H
        is_causal = causal is None or kwargs.get("is_causal", args[causal] if len(args) > causal else False)
        return "attention", flops // 2 if is_causal else flops
    if name.startswith("torch_attn._varlen_attn"):
        is_backward = name.endswith("backward")
        (T, N, H), (queries, keys) = args[is_backward].shape, args[8:10] if is_backward else args[5:7]
        seen = keys - queries // 2  # an upper limit: as if each sequence were one document
        place = 13 if is_backward else 9
        sides = kwargs.get("window_size", args[place] if len(args) > place else None) or (-1, 0)
        if sides[0] >= 0:
            window = min(sides[0] + 1, keys)
            seen = seen_causally(window, keys) if queries == keys else min(seen, window)
        return "flash", int((10 if is_backward else 4) * T * N * H * seen)
    formula = flop_registry.get(packet) or (flop_registry[aten.addmm] if packet is aten.addmm_ else None)
    if formula is not None:
        operands = args[:3] if packet is aten.addmm else args  # an argument for the dtype of the result may follow
        return "matmul", int(formula(*operands, **kwargs, out_val=result))
    return "memory", 0


def moved_bytes(tensor: Tensor, touched: int | None) -> int:
    """Return the bytes that a kernel moves to read or write a tensor. An expanded tensor is read once.

    Args:
        touched: largest number of elements that the kernel touches. None: all.
    """
    elements = tensor.numel() if touched is None else min(touched, tensor.numel())
    return min(elements * tensor.element_size(), tensor.untyped_storage().nbytes())
