"""Races between CUDA streams: two accesses of the same bytes, one of them a write, that no wait orders.

The checker follows every operator that PyTorch dispatches, on the device that computes nothing. Operators on pinned
memory are those of a stream that copies, or of the host, which is a stream too: what it does comes before all that is
queued later, and after what it has waited for. It knows three things:

- **Order.** Each stream has a clock that counts its operators, and a vector of clocks: of each stream, the last
  operator that it has waited for. Events carry a vector from the stream that records them to those that wait for them.
  PyTorch reports events, waits and synchronizations through its GPU trace hooks.
- **Accesses.** For each range of bytes, the last write and the last read of each stream. Tensors of one storage overlap
  by their bytes, whatever their shapes.
- **Reuse.** The caching allocator gives memory that was freed to the next tensor of its stream without a wait. So what
  is known of a range stays when it is freed. Only `record_stream` makes the allocator wait, for the streams it names.

A collective is an operator of the stream that calls it: NCCL's own stream waits for that one, and is waited for.
Functional collectives of a process group are operators of a stream of its own. `wait_tensor` waits for the collective
that made its argument, and for those of the group before it. Not seen: kernels within compiled code and
within composite operators, and collectives of `async_op=True` before their wait.
"""

import sys
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WITHOUT_KERNEL = {
    "_reshape_alias", "_unsafe_view", "alias", "detach", "empty", "empty_like", "empty_strided", "is_pinned",
    "lift_fresh", "new_empty", "new_empty_strided", "record_grad_output_stream", "record_stream", "resize_",
    "resize_storage_bytes_", "set_",
}  # fmt: skip
"""Operators that touch no memory of a device. Views are told by themselves."""
CALLED = -1
"""Event behind the operators before a functional collective, which waits for them."""
HOST = -(2**62)
"""Stream of the host's operators, of all threads."""
PLUMBING = (
    "/utils/_", "/_ops.py", "/_library/", "contextlib.py", "/_tensor.py", "/c10d_logger.py", "/autograd/", "/_dynamo/",
    "/torch/_compile.py",
)  # fmt: skip
"""Files of PyTorch that are left out of an access's place."""


class Access(NamedTuple):
    """One operator's access to a range of bytes."""

    stream: int
    time: int
    """Of the stream's clock."""
    operator: str
    writes: bool
    place: str
    life: int
    """Number of the allocation that the bytes belonged to."""


class Race(NamedTuple):
    """Two accesses without an order."""

    before: Access
    after: Access

    def __str__(self) -> str:
        kinds = " after ".join("write" if access.writes else "read" for access in (self.after, self.before))
        memory = "the same tensor" if self.before.life == self.after.life else "memory that was freed"
        return (
            f"{kinds} of {memory}: {self.after.operator} on stream {self.after.stream:#x} ({self.after.place}), "
            f"{self.before.operator} on stream {self.before.stream:#x} ({self.before.place})"
        )


class Clocks:
    """Order of the operators of all streams."""

    def __init__(self) -> None:
        self._vectors: dict[int, dict[int, int]] = {}
        """Of each stream: the clock of each other stream that it has waited for, and its own."""
        self._events: dict[int, dict[int, int]] = {}
        self._host: dict[int, int] = {}
        """What the host has waited for. It holds for all that the host starts afterwards."""

    def tick(self, stream: int) -> int:
        """Count an operator of a stream, and return its time."""
        vector = self._vector(stream)
        self._merge(vector, self._host)
        vector[HOST] = self._vector(HOST).get(HOST, 0)
        vector[stream] = vector.get(stream, 0) + 1
        return vector[stream]

    def is_before(self, access: Access, stream: int) -> bool:
        """Return whether the next operator of a stream comes after an access."""
        return access.time <= self._vector(stream).get(access.stream, 0)

    def record(self, event: int, stream: int) -> None:
        self._events[event] = dict(self._vector(stream))

    def wait(self, event: int, stream: int) -> None:
        self._merge(self._vector(stream), self._events.get(event, {}))

    def forget(self, event: int) -> None:
        self._events.pop(event, None)

    def wait_on_host(self, vectors: Iterable[dict[int, int]]) -> None:
        for vector in vectors:
            self._merge(self._host, vector)

    def event_on_host(self, event: int) -> None:
        self.wait_on_host([self._events.get(event, {})])

    def stream_on_host(self, stream: int) -> None:
        self.wait_on_host([self._vector(stream)])

    def device_on_host(self) -> None:
        self.wait_on_host([*self._vectors.values()])

    def _vector(self, stream: int) -> dict[int, int]:
        return self._vectors.setdefault(stream, {})

    @staticmethod
    def _merge(vector: dict[int, int], other: dict[int, int]) -> None:
        for stream, time in other.items():
            if vector.get(stream, 0) < time:
                vector[stream] = time


@dataclass
class Cell:
    """What is known of a range of bytes."""

    start: int
    end: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)
    """The last read of each stream since the write."""


class Memory:
    """Cells of all bytes that were ever accessed: sorted, and apart from each other."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._cells: list[Cell] = []

    def cells(self, start: int, end: int) -> list[Cell]:
        """Return the cells of a range, which they cover exactly. Cells that reach beyond it are split."""
        for edge in (start, end):
            place = bisect_right(self._starts, edge) - 1
            if place >= 0 and self._cells[place].start < edge < self._cells[place].end:
                cell = self._cells[place]
                self._insert(place + 1, Cell(edge, cell.end, cell.write, dict(cell.reads)))
                cell.end = edge
        place, found = bisect_left(self._starts, start), []
        while start < end:
            if place == len(self._cells) or self._cells[place].start > start:
                after = self._cells[place].start if place < len(self._cells) else end
                self._insert(place, Cell(start, min(end, after)))
            found.append(self._cells[place])
            start, place = self._cells[place].end, place + 1
        return found

    def write(self, start: int, end: int, access: Access) -> None:
        """Let a write be all that is known of a range."""
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        self._starts[first:last], self._cells[first:last] = [start], [Cell(start, end, access)]

    def _insert(self, place: int, cell: Cell) -> None:
        self._starts.insert(place, cell.start)
        self._cells.insert(place, cell)


class RaceChecker(TorchDispatchMode):
    """Mode that checks every operator within it. It sees autograd's threads too, if it is entered before they start,
    and other threads that enter it.

    The trace hooks of PyTorch cannot be taken back, so a process has one checker.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self.operators = 0
        self.streams: set[int] = set()
        self._clocks, self._memory = Clocks(), Memory()
        self._lives: dict[int, int] = {}
        self._life = 0
        self._recorded: dict[int, set[tuple[int, int]]] = {}
        """(bytes, stream) of `record_stream`, by the address of the storage."""
        self._races: dict[tuple[Any, ...], Race] = {}
        self._groups: dict[str, int] = {}
        """Streams of the functional collectives of process groups."""
        torch._C._activate_gpu_trace()
        clocks = self._clocks
        for hook, function in (
            ("event_record", clocks.record),
            ("event_wait", clocks.wait),
            ("event_deletion", clocks.forget),
            ("event_synchronization", clocks.event_on_host),
            ("stream_synchronization", clocks.stream_on_host),
            ("device_synchronization", clocks.device_on_host),
            ("memory_allocation", self._allocated),
            ("memory_deallocation", self._freed),
        ):
            getattr(_gpu_trace, f"register_callback_for_{hook}")(function)

    @property
    def races(self) -> list[Race]:
        """One race for each pair of places."""
        return [*self._races.values()]

    def _allocated(self, address: int) -> None:
        self._life += 1
        self._lives[address] = self._life

    def _freed(self, address: int) -> None:
        """Forget what recorded streams did: the allocator waits for them before it gives the memory away."""
        self._lives.pop(address, None)
        for size, stream in self._recorded.pop(address, ()):
            for cell in self._memory.cells(address, address + size):
                cell.reads.pop(stream, None)
                if cell.write and cell.write.stream == stream:
                    cell.write = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._lock:
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.record_stream.default:
            storage, stream = args[0].untyped_storage(), args[1]
            named = torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )
            self._recorded.setdefault(storage.data_ptr(), set()).add((storage.nbytes(), named.cuda_stream))
        if (
            func.is_view
            or func is torch.ops.aten.record_stream.default
            or func.overloadpacket.__name__ in WITHOUT_KERNEL
        ):
            return func(*args, **kwargs)
        current = torch.cuda.current_stream().cuda_stream
        if func is torch.ops._c10d_functional.wait_tensor.default:
            for _, _, storage in spans(args[0]):
                self._clocks.wait(-storage, current)
            return func(*args, **kwargs)
        written, read = self._arguments(func, args, kwargs)
        result = func(*args, **kwargs)
        made = {span for tensor in tree_leaves(result) for span in spans(tensor)}
        # An operator that changes no argument can return one as it is.
        written |= made if func._schema.is_mutable else made - read
        devices = {tensor.device.type for tensor in tree_leaves((args, kwargs, result)) if isinstance(tensor, Tensor)}
        if devices == {"cpu"}:
            self._operator(str(func), written, read - written, HOST)
            return result
        if func.namespace != "_c10d_functional":
            self._operator(str(func), written, read - written, current)
            if "cpu" in devices and not is_left_to_the_device(func, args, kwargs):
                self._clocks.stream_on_host(current)  # the call has returned
            return result
        group = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)][-1]
        stream = self._groups.setdefault(group, -1 - len(self._groups))
        self._clocks.record(CALLED, current)
        self._clocks.wait(CALLED, stream)
        self._operator(str(func), written, read - written, stream)
        for _, _, storage in written:
            self._clocks.record(-storage, stream)
        return result

    @staticmethod
    def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[set["Span"], set["Span"]]:
        """Return the memory that an operator writes, and what it reads, of its arguments. Schemas of collectives do not
        tell what they write: their outputs, and what others send."""
        written, read = set["Span"](), set["Span"]()
        is_collective = func.namespace == "c10d" and func.overloadpacket.__name__.endswith("_")
        for place, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name) if place >= len(args) else args[place]
            is_output = is_collective and argument.name.startswith(("output", "tensors"))
            found = written if is_output or (argument.alias_info and argument.alias_info.is_write) else read
            found.update(span for tensor in tree_leaves(value) for span in spans(tensor))
        return written, read

    def _operator(self, operator: str, written: set["Span"], read: set["Span"], stream: int) -> None:
        if not (written or read):
            return
        self.operators += 1
        self.streams.add(stream)
        time, place = self._clocks.tick(stream), caller()
        for writes, memory in ((False, read), (True, written)):
            for start, end, storage in memory:
                access = Access(stream, time, operator, writes, place, self._lives.get(storage, 0))
                for cell in self._memory.cells(start, end):
                    others = [cell.write, *(cell.reads.values() if writes else ())]
                    for before in others:
                        if before and not self._clocks.is_before(before, stream):
                            key = before.operator, before.place, operator, place, before.life == access.life
                            self._races.setdefault(key, Race(before, access))
                    if not writes:
                        cell.reads[stream] = access
                if writes:
                    self._memory.write(start, end, access)


Span = tuple[int, int, int]
"""First byte, end, and address of the storage."""


def spans(value: Any) -> Iterator[Span]:
    """Yield the memory that a tensor's elements span, if it is on the device or pinned."""
    while hasattr(value, "_local_tensor"):
        value = value._local_tensor
    if type(value).__name__ == "AsyncCollectiveTensor":
        value = value.elem
    if isinstance(value, Tensor) and value.numel() and type(value) in (Tensor, torch.nn.Parameter):
        if not value.is_cuda and not (value.device.type == "cpu" and value.is_pinned()):
            return
        start = value.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        if start:
            yield start, start + (last + 1) * value.element_size(), value.untyped_storage().data_ptr()


def is_left_to_the_device(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a copy between the host and the device is queued, and the host goes on."""
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("non_blocking") if "non_blocking" in names else len(args)
    return bool(args[place] if place < len(args) else kwargs.get("non_blocking", False))


def caller() -> str:
    """Return the two innermost functions outside of PyTorch's plumbing, with their lines."""
    frame, found = sys._getframe(1), list[str]()
    while frame and len(found) < 2:
        code = frame.f_code
        if code.co_filename != __file__ and not any(part in code.co_filename for part in PLUMBING):
            found.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(found)
