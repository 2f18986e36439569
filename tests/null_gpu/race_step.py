"""Steps of a small model on rank 0, under the race checker.

    python race_step.py [--world=2] [--plant=NAME] [--section.key=value ...]

Prints the numbers of operators and streams, then one line for each race. A plant is a race, or what would be one.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from measure import build_step, read_config, tell_sizes_of_parts
from races import RaceChecker

from titanlite.parallelize.reductions import ReduceScatter
from titanlite.runtime.private_torch.tensors import local_tensor

OPTIONS = [
    "--training.seq_len=8192", "--training.local_batch_size=2", "--training.mixed_precision_param=bfloat16",
    "--compile.enable=false",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--plant", default="", choices=["", *PLANTS])
    options, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's graphs are beyond the stand-in
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(options.world)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    world = options.world
    dist.init_process_group("cuda:nccl", store=dist.HashStore(), rank=0, world_size=world, device_id=device)
    tell_sizes_of_parts()
    if not any("global_batch_size" in override for override in overrides):
        overrides.append(f"--training.global_batch_size={2 * world}")
    config = read_config("debug", [*OPTIONS, *overrides], world)
    with RaceChecker() as checker:
        see_updates(checker)
        if options.plant:
            PLANTS[options.plant]()
        step = build_step(config, device, world)
        for _ in range(2):
            step()
    print(json.dumps([checker.operators, len(checker.streams)]))
    for race in checker.races:
        print(race)
    sys.stdout.flush()
    os._exit(0)


def see_updates(checker: RaceChecker) -> None:
    """Let the checker see what the thread of updates does."""
    import titanlite.techniques.offload.updates as module

    update = module._update

    def seen(*arguments: Any) -> None:
        with checker:
            update(*arguments)

    module._update = seen


def before_update(function: Callable[[list[Tensor]], None]) -> None:
    """Call a function with the gradients of each step, before the optimizer uses them."""
    import titanlite.step as module

    update = module.update

    def planted(optimizer: torch.optim.Optimizer, **options: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        function([local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None])
        update(optimizer, **options)

    module.update = planted


def gradient_on_another_stream() -> None:
    """A gradient is read on a stream that did not wait for it."""
    side = torch.cuda.Stream()

    def read(gradients: list[Tensor]) -> None:
        with torch.cuda.stream(side):
            gradients[0].sum()

    before_update(read)


def freed_block() -> None:
    """A tensor is freed while another stream reads it, and its memory is used again."""
    side = torch.cuda.Stream()

    def reuse(gradients: list[Tensor]) -> None:
        tensor = torch.ones(12345, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.sum()
        del tensor
        torch.zeros(12345, device="cuda")

    before_update(reuse)


def recorded_block() -> None:
    """The same with `record_stream`: no race."""
    side = torch.cuda.Stream()

    def reuse(gradients: list[Tensor]) -> None:
        tensor = torch.ones(12345, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.sum()
        tensor.record_stream(side)
        del tensor
        torch.zeros(12345, device="cuda")

    before_update(reuse)


def share_without_its_condition() -> None:
    """Gradients that FSDP frees within backward are in the pool of the compute stream."""
    import titanlite.parallelize.reductions as module

    module.keeps_reduced_gradients = lambda *_, **__: True


def leave_out_waits(method: str, *callers: str) -> None:
    """Let a method of streams do nothing where these functions call it."""
    wait = getattr(torch.cuda.Stream, method)

    def planted(self: Any, other: Any) -> None:
        if sys._getframe(1).f_code.co_name not in callers:
            wait(self, other)

    setattr(torch.cuda.Stream, method, planted)


def no_wait_at_the_end() -> None:
    """The compute stream does not wait for reductions when backward ends. Since PyTorch 2.15 the root waits for all."""
    leave_out_waits("wait_event", "finalize_backward", "_root_post_backward_final_callback", "_end_backward_iteration")


def no_wait_before_a_reduction() -> None:
    """The stream of reductions does not wait for the gradients."""
    leave_out_waits("wait_stream", "foreach_reduce", "allocate")


def another_thread() -> None:
    """Another thread works on the default stream after FSDP has let the stream of reductions wait, and before the
    output is allocated in memory that this thread has freed."""
    allocate = ReduceScatter.allocate

    def planted(self: Any, size: Any, *, dtype: Any, device: Any) -> Tensor:
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            with torch.cuda.stream(torch.cuda.default_stream()):
                torch.ones(int(size[0]), dtype=dtype, device=device)
        return allocate(self, size, dtype=dtype, device=device)

    ReduceScatter.allocate = planted


def another_thread_without_a_wait() -> None:
    """The same, where the output is not awaited."""
    another_thread()
    leave_out_waits("wait_stream", "allocate")


def backward_raises(at_last: Callable[[Any], None] = lambda _: None) -> None:
    """Backward raises in the second step. All memory of the step is freed and used again, then come further steps.

    Args:
        at_last: called with the model, when the memory has been used again.
    """
    from titanlite.step import Step

    accumulate, calls = Step.accumulate, [0]

    def planted(step: Any, *arguments: Any) -> Any:
        model = step.model
        calls[0] += 1
        if calls[0] != 2:
            return accumulate(step, *arguments)

        def fail(*_: Any) -> None:
            raise RuntimeError("planted")

        handle = model.layers[2].register_full_backward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            accumulate(step, *arguments)
        handle.remove()
        model.zero_grad()
        gc.collect()
        free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        [torch.zeros(2**19, device="cuda") for _ in range(free // 2**21)]  # 2 MiB: from 1 MiB on a pool is shared
        at_last(model)
        return accumulate(step, *arguments)

    Step.accumulate = planted  # pyright: ignore[reportAttributeAccessIssue]


def backward_raises_and_nothing_waits() -> None:
    """The same, where a step leaves its reductions as they are. FSDP's state is put right after the reuse only."""
    import titanlite.step as module

    module.finish_reductions = lambda _: None
    backward_raises(at_last=lambda model: model.reset_iter_state())


def gradients_on_their_way() -> None:
    """The host does not wait for the copies of gradients to its memory."""
    synchronize = torch.cuda.Event.synchronize

    def planted(self: Any) -> None:
        if "backward" not in sys._getframe(1).f_code.co_name:
            synchronize(self)

    torch.cuda.Event.synchronize = planted


def update_of_what_is_gathered() -> None:
    """A unit is updated while its parameters are copied to the device."""
    import titanlite.techniques.offload.updates as module

    update = module._update

    def planted(*arguments: Any) -> None:
        time.sleep(1)
        update(*arguments)

    module._update = planted
    module.HostUpdates.wait = lambda self, module: None


def memory_that_is_still_copied() -> None:
    """Activations are freed while they are copied to the host."""
    import titanlite.techniques.activations.host as module

    module._let_go = lambda block: block.leaving.clear()


def activations_on_their_way() -> None:
    """Backward reads activations while they are copied to the device."""
    import titanlite.techniques.activations.host as module

    module._wait = lambda block: None


def tokens_that_nobody_waits_for() -> None:
    import titanlite.techniques.expert.exchange as module

    module.wait_for_rows = lambda received: received


def tokens_of_another_exchange() -> None:
    """Each wait is for the tokens that were received before."""
    import titanlite.techniques.expert.exchange as module

    wait, received_before = module.wait_for_rows, list[Tensor]()

    def planted(received: Tensor) -> Tensor:
        if received_before:
            wait(received_before.pop())
        received_before.append(received)
        return received

    module.wait_for_rows = planted


PLANTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        gradient_on_another_stream, freed_block, recorded_block, share_without_its_condition, no_wait_at_the_end,
        no_wait_before_a_reduction, another_thread, another_thread_without_a_wait, backward_raises,
        backward_raises_and_nothing_waits, gradients_on_their_way, update_of_what_is_gathered,
        memory_that_is_still_copied, activations_on_their_way,
        tokens_that_nobody_waits_for, tokens_of_another_exchange,
    )
}  # fmt: skip


if __name__ == "__main__":
    main()
