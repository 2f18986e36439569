"""Reserved memory, and memory of compiled blocks: what a plan knows of PyTorch's allocator and of fusion."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titanlite.config.load import load
from titanlite.runtime.private_torch.tracing import FakeTensorMode
from titanlite.schema import Degrees
from titanlite.tools.plan.allocator import GRANULES, Change, PoolSize, replay, reserved
from titanlite.tools.plan.candidates import Candidate
from titanlite.tools.plan.estimate import Layout, plan
from titanlite.tools.plan.fusion import LONGEST, fused_sizes
from titanlite.tools.plan.gpu_kernels import attention_scratch
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.recorder import Operator, Recorder, Storage
from titanlite.tools.plan.search import _Search

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


def test_the_smallest_hole_that_fits_is_taken() -> None:
    begin = changes((1, 30), (2, 2), (3, 10), (4, 2), (1, 0), (3, 0))
    assert replay([*begin, *changes((5, 10), (6, 30))])[0, False].end == 44 * MIB
    assert replay([*begin, *changes((5, 11), (6, 20))])[0, False].end == 64 * MIB


def test_free_memory_at_the_end_is_used_before_the_pool_grows() -> None:
    assert replay(changes((1, 10), (2, 30), (2, 0), (3, 40)))[0, False] == PoolSize(50 * MIB, 50 * MIB)


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
        tensors = [tuple((it, sizes[it][0] * MIB) for it in numbers) for numbers in (reads, writes)]
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


def test_operators_that_read_the_same_tensors_are_one_kernel_that_runs_last() -> None:
    """a of x and y, b of x and z: both are made when z is there. A matmul between that reads a waits."""
    sizes = {0: (8, 1, 42), 1: (8, 1, 22), 2: (8, 20, 32), 3: (2, 30, 99), 4: (8, 40, 43), 5: (8, 50, 99)}
    operators = [("matmul", [], []), ("memory", [0, 1], [2]), ("matmul", [2], [3]), ("matmul", [], [4])]
    found = fused_sizes(recorded(sizes, [*operators, ("memory", [0, 4], [5]), ("matmul", [5], [])]))
    assert found[2][0][0] == found[5][0][0] == 50
    assert found[3][0][0] > 50
    assert found[1][-1][0] > 50, "y lives until the kernel that reads it"


def test_a_scale_of_a_whole_tensor_is_complete_before_the_kernel_that_applies_it() -> None:
    """scale = amax of x and y; a and b of x, y and scale; two matmuls read a and b. One kernel makes both."""
    sizes = {0: (8, 1, 52), 1: (8, 1, 52), 2: (0, 10, 62), 3: (4, 20, 32), 4: (4, 40, 52), 5: (1, 30, 99)}
    operators = [("memory", [0, 1], [2]), ("memory", [0, 1, 2], [3]), ("matmul", [3], [5]), ("memory", [0, 1, 2], [4])]
    found = fused_sizes(recorded(sizes, [*operators, ("matmul", [4], [])]))
    assert found[2][0] == (10, 0), "the scale has a kernel of its own"
    assert found[3][0][0] == found[4][0][0] == 40, "a and b come from one kernel"
    assert found[5][0][0] > 40, "the matmul that reads a waits for it"


def test_a_copy_of_what_a_matmul_reads_is_made_by_the_same_kernel() -> None:
    """a of x, and its transpose: one kernel makes both. A matmul's result that depends on a cannot be in it."""
    sizes = {0: (8, 1, 22), 1: (4, 10, 52), 2: (4, 20, 52), 3: (4, 30, 52), 4: (4, 40, 52)}
    operators = [("memory", [0], [1]), ("memory", [1], [2]), ("matmul", [1, 2], [3]), ("memory", [3, 1], [4])]
    found = fused_sizes(recorded(sizes, [*operators, ("matmul", [4], [])]))
    assert found[1][0][0] == found[2][0][0] == 20
    assert found[4][0][0] == 40


def test_gradients_of_weights_come_last_where_that_takes_less_memory() -> None:
    """Two matmuls return gradients. Between them, a third one makes a temporary tensor."""
    operators = [("matmul", [1], [0]), ("matmul", [], [2]), ("matmul", [2], [3]), ("matmul", [], [])]
    large = fused_sizes(recorded({0: (32, 10, 99), 1: (2, 1, 12), 2: (64, 20, 31), 3: (16, 30, 99)}, operators))
    assert 40 < large[3][0][0] < large[1][-1][0] < 41, "the smaller gradient, and then the other one, whose input stays"
    assert large[2][-1][0] < large[0][0][0] < 41, "the temporary tensor is gone before the larger gradient comes"
    small = fused_sizes(recorded({0: (32, 10, 99), 1: (64, 1, 12), 2: (1, 20, 31), 3: (16, 30, 99)}, operators))
    assert small.get(0, [(10, 0)])[0][0] == 10, "as it is written: the large input is freed early"


def test_a_result_of_many_operations_is_stored() -> None:
    """A chain of operations from x, of which the matmul at the end reads the last: the compiler cuts it once."""
    count = LONGEST + 5
    sizes = {0: (8, 1, 12)} | {it: (8, 10 * it, 10 * it + 12) for it in range(1, count + 1)}
    operators = [("memory", [it - 1], [it]) for it in range(1, count + 1)]
    found = fused_sizes(recorded(sizes, [*operators, ("matmul", [count], [])]))
    assert [it for it in range(1, count + 1) if found[it]] == [LONGEST, count]


@pytest.mark.parametrize(("keys", "buffer"), [(32_768, 0), (1_048_576, 2**32)])
def test_scratch_of_flash_attention(keys: int, buffer: int) -> None:
    """Test backward of 128 queries, with 4 query heads for each of 8 key heads of 128 numbers."""
    shapes = ((128, 32), (keys, 8))
    query, key = (torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device="meta") for tokens, heads in shapes)
    operator = SimpleNamespace(overloadpacket="torch_attn._varlen_attn_backward")
    expanded = 2 * keys * 32 * 128 * 2  # gradients of keys and values for each query head
    assert attention_scratch(operator, (None, query, key)) == 128 * 32 * 128 * 4 + expanded + buffer


@pytest.mark.long
def test_a_plan_that_fits_only_with_too_much_host_memory_does_not_fit() -> None:
    options = ["--training.enable_cpu_offload", "--training.global_batch_size=8", "--model.args.n_layers=2"]
    config, hardware = load("train_configs/llama3_8b.toml", options, world_size=8), find_hardware("H100")
    found = plan(config, Layout(8, hardware, 8))
    assert found.fits
    assert found.host_of_node == 8 * found.host > 8 * 3 * 4 * found.parameters / 8
    small = replace(found, layout=replace(found.layout, hardware=replace(hardware, node_memory=found.host_of_node - 1)))
    assert not small.fits


def test_a_search_does_not_offer_offload_that_no_host_holds() -> None:
    config, layout = load("train_configs/llama3_405b.toml", [], world_size=8), Layout(8, find_hardware("H100"), 8)
    pool: Any = None  # nothing is traced
    searching = _Search(config, layout, pool, share=1)
    degrees = Degrees(replicate=1, shard=8)
    without = Candidate({}, "full", 1, "", False, degrees, "default", reserved=900 * GIB)
    offload = replace(without, offload=True, reserved=60 * GIB, host_of_node=6048 * GIB)
    found = searching._confirm([offload], layout.usable, 5)
    assert found.best == []
    assert [reason for _, reason in found.losers] == ["needs 6,048 GiB of host memory in a node"]
    text = searching._nothing_fits([without, offload], layout.usable)
    assert "the least is 900.0 GiB" in text
    assert "CPU offload needs 6,048 GiB of host memory in a node, which has 2,048" in text
