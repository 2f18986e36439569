"""Activations in host memory (`activation_checkpoint.offload`; arXiv:1602.08124).

What autograd keeps of a block goes to pinned host memory behind the block's forward pass, and comes back while backward
computes the block after it. So a device holds what about two blocks keep, and not all. The last block keeps what it
needs at once. Copies run on a stream of their own; values do not change. On a CPU, which has neither, they are plain.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from titanlite.models.base import Model
from titanlite.runtime.private_torch.tensors import local_tensor, storage_key, wrapped_tensors

LEAST_BYTES = 2**20
"""Size of the smallest tensor that leaves a GPU."""


class Kept(NamedTuple):
    """A tensor that autograd keeps: a view of memory that is on the host."""

    block: "KeptOfBlock"
    number: int
    device: torch.device
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class KeptOfBlock:
    """What autograd keeps of one forward pass of a block.

    Args:
        before: the same of the block before, which backward needs next.
    """

    def __init__(self, before: "KeptOfBlock | None") -> None:
        self.before = before
        self.numbers: dict[Hashable, int] = {}
        """Place in `host` of each storage."""
        self.host: list[Tensor] = []
        self.leaving: list[Tensor] = []
        """Memory of the device that is copied to the host. It is held until the copies are done."""
        self.arrived: list[Tensor] = []
        """Memory of the device with the values of `host`, in backward."""
        self.views = 0
        """Tensors that backward has yet to ask for."""
        self.copied: Any = None
        """Is behind the newest copies, unless the compute stream has waited for them."""


class HostActivations:
    """Moves what the blocks of a parallelized model keep for backward to the host and back.

    Args:
        least_bytes: size of the smallest memory that is moved.
    """

    def __init__(self, model: Model, *, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        self.allocate: Callable[..., Tensor] = torch.empty
        """Allocates memory of the host."""
        self._now: KeptOfBlock | None = None
        """Of the block in forward, unless it is the last one."""
        self._before: KeptOfBlock | None = None
        """Of the block before it in the same forward pass."""
        self._leaving: list[KeptOfBlock] = []
        """Those that hold memory of the device."""
        self._in_backward: KeptOfBlock | None = None
        self._stays: set[Hashable] = set()
        """Storages that stay on the device: of parameters, and of what all blocks get."""
        self._stream: torch.cuda.Stream | None = None
        for network in model.stages or [model]:
            self._surround(network)
        blocks = [*model.layers]
        begin, end = map(cast("Callable[..., Any]", torch.compiler.disable), (self._begin, self._end))
        for block in blocks[:-1]:
            block.register_forward_pre_hook(begin, with_kwargs=True)
        for last in blocks[-1:]:
            last.register_forward_pre_hook(end)

    def _surround(self, network: Any) -> None:
        """Handle what autograd keeps in a network's forward."""
        whole_forward = network.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._end()
            self._before = None
            with saved_tensors_hooks(self._keep, self._give_back):
                return whole_forward(*args, **kwargs)

        network.forward = forward

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the forward pass of a block, whose parameters FSDP has gathered."""
        self._end()
        if not torch.is_grad_enabled():
            return
        self._now = self._before = KeptOfBlock(self._before)
        self._leaving.append(self._now)
        others = [*block.parameters(), *block.buffers(), *_tensors((args[1:], kwargs))]
        self._stays = {key for tensor in others for key in _storages(tensor)}

    def _end(self, *_: Any) -> None:
        """End the forward pass of a block. The device goes on when the copies of the block before it are done."""
        self._now = None
        while len(self._leaving) > 1:
            _let_go(self._leaving.pop(0))

    @torch.no_grad()
    def _keep(self, tensor: Tensor) -> Tensor | Kept:
        """Copy memory that autograd keeps to the host, once for all tensors that share it."""
        block = self._now
        if block is None or wrapped_tensors(tensor):  # subclasses of tensors stay
            return tensor
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), storage.nbytes()
        if key in self._stays or size < self.least_bytes:
            return tensor
        if key not in block.numbers:
            block.numbers[key] = len(block.host)
            memory = tensor.as_strided((size // tensor.element_size(),), (1,), 0)
            block.host.append(self.allocate(memory.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda))
            block.leaving.append(memory)
            self._copy(block, block.host[-1], memory)
        block.views += 1
        view = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return Kept(block, block.numbers[key], tensor.device, tensor.dtype, *view)

    @torch.no_grad()
    def _give_back(self, kept: Tensor | Kept) -> Tensor:
        """Return a tensor that backward asks for. The first one of a block lets those of the block before come, too."""
        if isinstance(kept, Tensor):
            return kept
        block, is_first = kept.block, kept.block is not self._in_backward
        while self._leaving:
            _let_go(self._leaving.pop())
        self._bring_back(block, kept.device)
        _wait(block)
        if is_first:
            self._in_backward = block
            if block.before is not None:
                self._bring_back(block.before, kept.device)
        block.views -= 1
        memory = block.arrived[kept.number]
        if block.views <= 0:
            block.arrived = []
        return memory.view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)

    def _bring_back(self, block: KeptOfBlock, device: torch.device) -> None:
        if not block.arrived:
            block.arrived = [torch.empty_like(host, device=device) for host in block.host]
            for memory, host in zip(block.arrived, block.host, strict=True):
                self._copy(block, memory, host)

    def _copy(self, block: KeptOfBlock, target: Tensor, source: Tensor) -> None:
        """Copy behind what the compute stream has been given so far, and beside what comes."""
        if not (target.is_cuda or source.is_cuda):
            target.copy_(source)
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        block.copied = self._stream.record_event()


def _wait(block: KeptOfBlock) -> None:
    """Let the compute stream wait for the copies of a block."""
    if block.copied is not None:
        torch.cuda.current_stream().wait_event(block.copied)
        block.copied = None


def _let_go(block: KeptOfBlock) -> None:
    """Give the memory back whose copies the compute stream then has waited for."""
    _wait(block)
    block.leaving.clear()


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts, which the arguments of blocks are."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)


def _storages(tensor: Tensor) -> list[Hashable]:
    """Return the storages behind a tensor, which may be a DTensor, or another subclass of plain tensors."""
    local = local_tensor(tensor)
    return [storage_key(plain.untyped_storage()) for plain in wrapped_tensors(local).values() or [local]]
