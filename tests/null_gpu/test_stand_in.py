"""Promises of the stand-in for a GPU: memory, counts and zeros."""

import json

import pytest

from tests.null_gpu.conftest import RunPython

pytestmark = pytest.mark.null_gpu

COUNT = """
import ctypes, os, tempfile
library = ctypes.CDLL(os.environ["LD_PRELOAD"])
def count(call):
    library.null_gpu_start(None)
    call()
    with tempfile.NamedTemporaryFile("r") as file:
        assert not library.null_gpu_stop(file.name.encode())
        return {tuple(line.split("\\t")[:2]): int(line.split("\\t")[2]) for line in file}
"""


def printed(run_python: RunPython, *lines: str, **environ: str) -> object:
    """The value of the last line, an expression, in a process with torch on the stand-in."""
    *others, last = lines
    code = "\n".join(["import json, torch", *others, f"print(json.dumps({last}))"])
    return json.loads(run_python("-c", code, **environ).stdout.splitlines()[-1])


def test_the_device_is_an_h100(run_python: RunPython) -> None:
    found = printed(run_python, "[torch.cuda.get_device_name(), torch.cuda.get_device_capability()]")
    assert found == ["NVIDIA H100 80GB HBM3", [9, 0]]
    many = printed(
        run_python, "[torch.cuda.device_count(), torch.cuda.get_device_properties(1).total_memory]",
        NULL_GPU_DEVICES="2", NULL_GPU_BYTES=str(2**34),
    )  # fmt: skip
    assert many == [2, 2**34]


@pytest.mark.parametrize("uses", [False, True])
def test_a_fork_of_a_process_that_has_used_the_device_has_none(run_python: RunPython, uses: bool) -> None:
    found = printed(
        run_python,
        "import ctypes, os",
        f"library = ctypes.CDLL(os.environ['LD_PRELOAD']); {uses} and library.cuInit(0)",
        "pid = os.fork()",
        "pid or os._exit(library.cuInit(0))",
        "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
    )
    assert found == (3 if uses else 0)  # cudaErrorInitializationError


def test_memory_is_counted_and_ends(run_python: RunPython) -> None:
    found = printed(
        run_python,
        "x = torch.empty(2**30, dtype=torch.uint8, device='cuda')",
        "before = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()",
        "try: torch.empty(2**37, dtype=torch.uint8, device='cuda')",
        "except torch.OutOfMemoryError: pass",
        "[*before, torch.cuda.memory_stats()['num_ooms'], torch.cuda.mem_get_info()[0]]",
    )
    assert found == [2**30, 2**30, 1, 85017624576 - 2**30 - 2**29]


@pytest.mark.parametrize("expandable", ["False", "True"])
def test_a_full_device_makes_the_allocator_retry(run_python: RunPython, expandable: str) -> None:
    """Blocks of 20 GiB are cached, and none holds 40: they are freed first. Expandable segments need not be."""
    found = printed(
        run_python,
        "make = lambda gib: torch.empty(gib * 2**30, dtype=torch.uint8, device='cuda')",
        "blocks = [make(20) for _ in range(3)]; blocks.clear(); large = make(40)",
        "torch.cuda.memory_stats()['num_alloc_retries']",
        PYTORCH_ALLOC_CONF=f"expandable_segments:{expandable}",
    )
    assert found == (0 if expandable == "True" else 1)


def test_kernels_and_waits_are_counted(run_python: RunPython) -> None:
    result = run_python(
        "-c",
        "import torch" + COUNT + "x = torch.zeros(8, 8, device='cuda'); torch.mm(x, x)\n"
        "made = count(lambda: (x + 1, torch.mm(x, x)))\n"
        "assert sum(n for (what, _), n in made.items() if what == 'kernel') == 2, made\n"
        "assert any(what == 'kernel' and name.startswith('cublas') for what, name in made), made\n"
        "assert not any(what == 'wait' for what, _ in made), made\n"
        "assert any(what == 'wait' for what, _ in count(lambda: x.sum().item()))\n"
        "pageable = torch.empty(8, 8)\n"
        "assert ('wait', 'cudaMemcpyAsync to pageable memory') in count(lambda: pageable.copy_(x, non_blocking=True))\n"
        "pinned = torch.empty(8, 8).pin_memory()\n"
        "assert not any(what == 'wait' for what, _ in count(lambda: pinned.copy_(x, non_blocking=True)))\n"
        "print('counted')",
    )
    assert result.stdout.strip() == "counted"


def test_values_are_zero_and_all_is_true(run_python: RunPython) -> None:
    found = printed(
        run_python,
        "x = torch.full((3,), 7.0, device='cuda')",
        "sent = torch.tensor([1.5, 2.5], device='cuda')",
        "[sent.tolist(), x.tolist(), bool(x.isfinite().all()), bool((x > 1).any()), (sent + 1).tolist()]",
    )
    assert found == [[1.5, 2.5], [0, 0, 0], True, False, [0, 0]]


def test_collectives_of_ranks_that_are_not_there(run_python: RunPython) -> None:
    result = run_python(
        "-c",
        "import torch, torch.distributed as dist" + COUNT + "torch.cuda.set_device(0)\n"
        "dist.init_process_group('nccl', store=dist.HashStore(), rank=0, world_size=8)\n"
        "x = torch.zeros(8, device='cuda'); dist.all_reduce(x)\n"
        "part = torch.zeros(1, device='cuda', dtype=torch.bfloat16)\n"
        "made = count(lambda: (dist.all_reduce(x), dist.all_gather_into_tensor(x.bfloat16(), part)))\n"
        "print(sorted(name for what, name in made if what == 'collective'), flush=True)\n"
        "import os; os._exit(0)",
    )
    assert result.stdout.strip() == str(["all-gather, bfloat16, of 8", "all-reduce sum, float32, of 8"])


SPLIT = """
import ctypes, multiprocessing, os
library = ctypes.CDLL(os.environ["LD_PRELOAD"])

class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]

def split(communicator, color, key):
    part, size, place = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    assert not library.ncclCommSplit(communicator, color, key, ctypes.byref(part), None)
    if not part:
        return None, None
    library.ncclCommCount(part, ctypes.byref(size)), library.ncclCommUserRank(part, ctypes.byref(place))
    return part, [size.value, place.value]

def found(rank, answers):
    whole = ctypes.c_void_p()
    library.ncclCommInitRank(ctypes.byref(whole), 5, known, rank)
    pair, of_pair = split(whole, rank // 2 if rank < 4 else -1, rank)
    _, again = split(pair, rank % 2, 0) if pair else (None, None)
    _, reversed_ = split(whole, 0, 5 - rank)
    answers.put((rank, of_pair, again, reversed_))

known, answers = Id(), multiprocessing.Queue()
library.ncclGetUniqueId(ctypes.byref(known))
processes = [multiprocessing.Process(target=found, args=(rank, answers)) for rank in range(5)]
[process.start() for process in processes]
print(sorted(answers.get(timeout=60) for _ in processes))
[process.join() for process in processes]
"""


def test_ranks_that_split_a_communicator_find_their_part(run_python: RunPython) -> None:
    """Pairs of ranks, parts of a pair, and all ranks in the reverse order. One rank is in no pair."""
    pairs = [[2, 0], [2, 1], [2, 0], [2, 1], None]
    alone = [[1, 0]] * 4 + [None]
    backwards = [[5, 4 - rank] for rank in range(5)]
    expected = [(rank, *found) for rank, found in enumerate(zip(pairs, alone, backwards, strict=True))]
    assert run_python("-c", SPLIT).stdout.strip() == str(expected)
