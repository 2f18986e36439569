"""Reserved memory, and memory of compiled blocks: what a plan knows of PyTorch's allocator and of fusion."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import mentions
from tests.support.plans import planned
from titanlite.runtime.private_torch.process_groups import all_gather
from titanlite.runtime.private_torch.tracing import FakeTensorMode
from titanlite.tools.plan.allocator import GRANULES, Change, PoolSize, replay, reserved
from titanlite.tools.plan.estimate import Layout
from titanlite.tools.plan.fusion import fused_sizes
from titanlite.tools.plan.gpu_kernels import attention_scratch
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.recorder import Operator, Recorder, Storage
from titanlite.tools.plan.search import Candidate, may_fit, nothing_fits
from titanlite.tools.plan.trace import fake_ranks

MIB = 2**20
GIB = 2**30


def changes(*sizes: tuple[int, int], stream: int = 0) -> list[Change]:
    """Return changes of the compute stream's storages: (storage, MiB)."""
    return [Change(storage, stream, size * MIB) for storage, size in sizes]


def test_a_pool_grows_only_where_no_hole_fits() -> None:
    found = replay(changes((1, 10), (2, 30), (3, 20), (1, 0), (2, 0), (4, 35), (5, 5), (6, 1), (7, 6)))
    # Holes of 10 and 30 are one of 40. 35 and 5 fill it; 6 goes to the end.
    assert found[0, False] == PoolSize(peak=66 * MIB, end=66 * MIB)
    found = replay(changes((1, 10), (2, 30), (1, 0), (3, 11)))
    assert found[0, False] == PoolSize(peak=41 * MIB, end=51 * MIB), "the hole of 10 stays empty"


def test_each_stream_has_a_pool_and_small_tensors_have_their_own() -> None:
    found = replay([*changes((1, 10), (1, 0)), *changes((2, 10), (3, 1), stream=3), Change(4, 0, 100)])
    assert found == {
        (0, False): PoolSize(10 * MIB, 10 * MIB),
        (3, False): PoolSize(10 * MIB, 10 * MIB),
        (3, True): PoolSize(MIB, MIB),
        (0, True): PoolSize(512, 512),
    }
    assert reserved(found) == 2 * GRANULES[False] + 2 * GRANULES[True] == 44 * MIB


def recorded(sizes: dict[int, tuple[int, int, int]], operators: list[tuple[str, list[int], list[int]]]) -> Recorder:
    """Return a record of one block's forward.

    Args:
        sizes: (MiB, time when allocated, time when freed) by storage.
        operators: (kind, reads, writes) at the times 10, 20, ...
    """
    with FakeTensorMode() as fakes:
        recorder = Recorder(fakes)
    recorder.unit("forward layers.0")
    for size, begin, end in sizes.values():
        recorder.storages.append(Storage("activations", 0, [(begin, size * MIB), (end, 0)]))
    for place, (kind, reads, writes) in enumerate(operators, start=1):
        tensors = [tuple((number, sizes[number][0] * MIB) for number in numbers) for numbers in (reads, writes)]
        recorder.operators.append(Operator(10 * place, 1, "", kind, 0, "", *tensors))  # pyright: ignore
    return recorder


def test_what_lives_in_a_kernel_has_no_memory_and_its_inputs_live_to_its_end() -> None:
    """gate, up = matmuls; wide = float32 of gate; h = wide * up; out = matmul of h."""
    sizes = {0: (8, 10, 32), 1: (8, 20, 42), 2: (16, 30, 43), 3: (8, 40, 52), 4: (4, 50, 99)}
    operators = [("matmul", [], [0]), ("matmul", [], [1]), ("memory", [0], [2]), ("memory", [2, 1], [3])]
    found = fused_sizes(recorded(sizes, [*operators, ("matmul", [3], [4])]))
    assert found[2] == []
    assert found[0] == [(10, 8 * MIB), (42 - 1.5, 0)], "gate is read by the kernel of h, at 40"
    assert found[3][0] == (40, 8 * MIB)
    assert 4 not in found


def test_only_buffers_that_last_are_added_for_untraced_micro_batches() -> None:
    """Stages of a pipeline keep the buffers of what they receive, or free them, as since PyTorch 2.15."""
    with fake_ranks(2), FakeTensorMode() as fakes, Recorder(fakes) as recorder:
        kept, freed = torch.empty(10), torch.empty(20)
        for buffer in (kept, freed, kept):
            dist.recv(buffer, 1)
        del freed, buffer
        recorder.unit("end")
        del kept
    assert recorder.kept_of_received() == 10 * 4


def test_a_collective_has_one_result() -> None:
    """Fake tensors make another one of what is waited for, which is the result itself."""
    with fake_ranks(2), FakeTensorMode() as fakes, Recorder(fakes) as recorder:
        part = torch.ones(1024)
        assert dist.group.WORLD
        whole = all_gather(part, 2, dist.group.WORLD.group_name)
        assert whole.shape == (2048,)
    assert [storage.sizes[0][1] for storage in recorder.storages] == [1024 * 4, 2048 * 4]


def test_gradients_of_weights_come_last_where_that_takes_less_memory() -> None:
    """Two matmuls return gradients. Between them, a third one makes a temporary tensor."""
    operators = [("matmul", [1], [0]), ("matmul", [], [2]), ("matmul", [2], [3]), ("matmul", [], [])]
    large = fused_sizes(recorded({0: (32, 10, 99), 1: (2, 1, 12), 2: (64, 20, 31), 3: (16, 30, 99)}, operators))
    assert 40 < large[3][0][0] < large[1][-1][0] < 41, "the smaller gradient, and then the other one, whose input stays"
    assert large[2][-1][0] < large[0][0][0] < 41, "the temporary tensor is gone before the larger gradient comes"
    small = fused_sizes(recorded({0: (32, 10, 99), 1: (64, 1, 12), 2: (1, 20, 31), 3: (16, 30, 99)}, operators))
    assert small.get(0, [(10, 0)])[0][0] == 10, "as it is written: the large input is freed early"


@pytest.mark.parametrize(("keys", "buffer"), [(32_768, 0), (1_048_576, 2**32)])
def test_scratch_of_flash_attention(keys: int, buffer: int) -> None:
    """Test backward of 128 queries, with 4 query heads for each of 8 key heads of 128 numbers."""
    shapes = ((128, 32), (keys, 8))
    query, key = (torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device="meta") for tokens, heads in shapes)
    operator = SimpleNamespace(overloadpacket="torch_attn._varlen_attn_backward")
    expanded = 2 * keys * 32 * 128 * 2  # gradients of keys and values for each query head
    assert attention_scratch(operator, (None, query, key)) == 128 * 32 * 128 * 4 + expanded + buffer


@pytest.mark.long
def test_a_plan_with_too_much_host_memory_does_not_fit_and_is_not_offered() -> None:
    found, hardware = planned("--training.enable_cpu_offload"), find_hardware("H100")
    assert found.fits
    assert found.host_of_node == 8 * found.host > 8 * 3 * 4 * found.parameters / 8
    small = replace(found, layout=replace(found.layout, hardware=replace(hardware, node_memory=found.host_of_node - 1)))
    assert not small.fits

    layout, options = Layout(8, hardware, 8), {"parallelism.fsdp_reshard_after_forward": "default"}
    without, offload = (
        Candidate(options, ("full", words, 1), replace(found, host=host, pools={(0, False): PoolSize(size, size)}))
        for words, host, size in (("", 0, 900 * GIB), ("CPU offload", 756 * GIB, 60 * GIB))
    )
    assert not may_fit(without.expected, layout)
    assert not may_fit(offload.expected, layout)
    assert may_fit(replace(offload.expected, host=200 * GIB), layout)
    text = nothing_fits([without], [offload], layout)
    assert mentions(text, "900.0 GiB", "CPU offload", "6,048 GiB", "2,048")
