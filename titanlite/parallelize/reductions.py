"""Decisions about the reduction of gradients over ranks, from the sizes of a step."""

from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.schema import Parallelism, Training
from titanlite.mesh import context_rank, data_parallel_rank, shard_degree_of

GPUS_OF_A_NODE = 8
"""Largest shard group that is taken to be connected by NVLink."""
MANY_TOKENS = 2**14
"""Tokens of a micro-batch from which on blocks need more memory in backward than the loss."""


def can_wait(mesh: DeviceMesh, training: Training) -> bool:
    """Return True if backward can wait for the reduce-scatter of the head.

    FSDP would keep its input beside the backward pass of the last block, which is the peak of memory: 2 GiB of Llama 3
    8B. It takes some 5 ms on the links within a node, which is little beside a step of many tokens.
    """
    sequences = training.local_batch_size or training.global_batch_size // data_parallel_rank(mesh)[1]
    tokens = sequences * training.seq_len // context_rank(mesh)[1]
    return shard_degree_of(mesh) <= GPUS_OF_A_NODE and tokens >= MANY_TOKENS


def keeps_reduced_gradients(
    mesh: DeviceMesh, parallelism: Parallelism, training: Training, *, updates_in_backward: bool
) -> bool:
    """Return True if the output of each reduce-scatter becomes the gradients of a unit, and lasts until after backward.

    Otherwise FSDP frees the output within backward: it converts it, copies it to the host, adds it to the gradients of
    another micro-batch, or lets an optimizer use it.
    """
    at_once = data_parallel_rank(mesh)[1] * (training.local_batch_size or training.global_batch_size)
    adds_gradients = training.global_batch_size > at_once and parallelism.fsdp_reduce_gradients == "each"
    is_converted = training.dtype != training.mixed_precision_reduce
    return not (adds_gradients or is_converted or training.enable_cpu_offload or updates_in_backward)
