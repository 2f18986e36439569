"""Expert parallelism without processes: what is refused, the memory check, the plan and the placements."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.helpers import world
from tests.support.operators import OperatorNames
from tests.support.plans import traced
from titanlite.config.load import load
from titanlite.models.base import build_on_meta, expert_layers
from titanlite.models.deepseek_v3 import DeepseekV3, DeepseekV3Args
from titanlite.models.experts import Experts
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.models.qwen3_moe import Qwen3Moe, Qwen3MoeArgs
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.kernels import set_kernels
from titanlite.parallelize.activation_checkpoint import apply_activation_checkpoint
from titanlite.parallelize.materialize import draw_weights
from titanlite.runtime.errors import UserError
from titanlite.techniques.expert.exchange import AllToAllExchange, check_experts
from titanlite.tools.plan.gpu_kernels import EXPERT_SKEW, FakeCpuKernels
from titanlite.tools.plan.trace import fake_ranks, parallelized
from titanlite.tools.plan.workload import workload_of

KEY = "parallelism.expert_parallel_degree"
SMALL: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512, "head_dim": 16}
MOE = Qwen3MoeArgs(hidden_dim=24, n_experts=8, n_active_experts=2, max_seq_len=64, **SMALL)


def test_models_that_are_refused() -> None:
    model = build_on_meta(Qwen3Moe, MOE)
    check_experts(model, 4, 4)
    check_experts(model, 2, 16)
    with pytest.raises(UserError, match=r"^3 .* 8 experts"):
        check_experts(model, 3, 3)
    with pytest.raises(UserError, match=r"^2 .* 128 .*\[24, 64\]"):
        check_experts(model, 2, 256)
    check_experts(model, 2, 16, tensor=2)
    check_experts(model, 2, 48)
    with pytest.raises(UserError, match=r"^2 .* 24 .*\[64\]"):
        check_experts(model, 2, 48, tensor=2)
    llama = build_on_meta(Llama3, Llama3Args(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=99))
    with pytest.raises(UserError, match=r"experts.* Llama3"):
        check_experts(llama, 2, 2)


def test_experts_on_ranks_that_also_split_them() -> None:
    """Rank 0 of shard 4 x tensor 2 with experts on 2: a quarter of each expert's matrices, in both dims."""
    config = load(
        "train_configs/debug.toml",
        ["--model.name=qwen3_moe", f"--{KEY}=2", "--parallelism.tensor_parallel_degree=2"],
        world_size=8,
    )
    with fake_ranks(8):
        model, _ = parallelized(config, Qwen3Moe, MOE, world_size=8, kernels=FakeCpuKernels())
        for name, local in {"w1": [4, 32, 12], "w2": [4, 12, 32], "w3": [4, 32, 12], "router": [2, 64]}.items():
            weight = model.get_parameter(f"layers.0.feed_forward.{name}")
            assert isinstance(weight, DTensor)
            assert [*weight.to_local().shape] == local, name
        assert model.get_parameter("layers.0.feed_forward.w1").shape == (8, 64, 24)


class CountedReads(CpuKernels):
    reads = 0

    def read_counts(self, *tensors: Tensor, **sizes: int) -> tuple[list[int], list[int], int]:
        self.reads += 1
        return super().read_counts(*tensors, **sizes)


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("policy", ["none", "op", "full"])
def test_recomputation_does_not_wait_for_counts_again(policy: Any) -> None:
    """Two micro-batches are in flight, as in a pipeline, and one is recomputed twice."""
    model = Qwen3Moe(MOE)
    draw_weights(model, device=torch.device("cpu"), seed=0)
    model.init_buffers()
    kernels = CountedReads()
    set_kernels(model, kernels)
    batches = torch.arange(128).view(2, 2, 32)
    expected = [torch.autograd.grad(model(batch).square().mean(), [*model.parameters()]) for batch in batches]
    for layer in expert_layers(model):
        layer.exchange = AllToAllExchange(world(), kernels)
    apply_activation_checkpoint(model, [policy] * 2)
    losses = [model(batch).square().mean() for batch in batches]
    first = torch.autograd.grad(losses[0], [*model.parameters()], retain_graph=True)
    found = torch.autograd.grad(losses[1], [*model.parameters()]), first
    again = torch.autograd.grad(losses[0], [*model.parameters()]) if policy == "full" else first
    assert kernels.reads == 2 * len(batches)
    for gradients, others in zip([*found, again], [expected[1], expected[0], expected[0]], strict=True):
        torch.testing.assert_close(gradients, others)


@pytest.mark.usefixtures("single_process_group")
def test_shared_experts_are_computed_while_tokens_are_sent() -> None:
    """There are all-to-alls of weights, tokens and results, and of their gradients."""
    args = DeepseekV3.flavors["debug"]
    assert isinstance(args, DeepseekV3Args)
    layer = Experts(args)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 8, args.dim, requires_grad=True)
    alone = layer(x)
    expected = torch.autograd.grad(alone.square().sum(), [x, *layer.parameters()])
    layer.exchange = AllToAllExchange(world(), CpuKernels())
    with OperatorNames() as forward:
        found = layer(x)
    with OperatorNames() as backward:
        gradients = torch.autograd.grad(found.square().sum(), [x, *layer.parameters()])
    assert matmuls_beside(forward.names) == [0, 3, 0]
    assert matmuls_beside(backward.names) == [0, 2 * 3, 0]
    torch.testing.assert_close((found, *gradients), (alone, *expected))


def matmuls_beside(names: list[str]) -> list[int]:
    """Return the number of matmuls between the beginning and the end of each all-to-all."""
    begins = [place for place, name in enumerate(names) if "all_to_all_single" in name]
    ends = [place for place, name in enumerate(names) if "wait_tensor" in name]
    return [sum("aten.mm" in name for name in names[begin:end]) for begin, end in zip(begins, ends, strict=True)]


@pytest.mark.long
def test_a_plan_counts_what_is_computed_while_tokens_are_sent() -> None:
    found = traced(
        "--model={name='deepseek_v3', flavor='debug', args={dim=64, n_layers=2, hidden_dim=24, vocab_size=512}}",
        "--training.global_batch_size=4",
        "--parallelism.expert_parallel_degree=2",
        world_size=4,
        gpu=True,
    )
    block = next(unit for unit in workload_of(found, fuse=True, gpus_per_node=8).units if unit.name == "layers.1")
    shared = 3 * 2 * 64 * 64 * 24
    for waits, flops in ((block.forward_waits, shared), (block.backward_waits, 2 * shared)):
        assert [sum(kernel.flops for kernel in wait.beside) for wait in waits] == [0, flops, 0]


@pytest.mark.long
def test_a_plan_counts_the_exchange_of_tokens() -> None:
    """64 tokens have 64 bfloat16 values and two of 8 experts: of 28 pairs, 12 are on one of the two ranks. Forward is
    recomputed."""
    found = traced(
        "--model={name='qwen3_moe', flavor='debug', args={dim=64, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=16, "
        "hidden_dim=24, vocab_size=512}}",
        "--training.global_batch_size=4",
        "--parallelism.expert_parallel_degree=2",
        "--activation_checkpoint.mode=full",
        world_size=4,
        gpu=True,
    )
    each = 64 * (2 - 12 / 28) / 2
    weights, sent, received = (rows * 2 for rows in (64 * 8, 2 * round(each) * 64, 2 * round(EXPERT_SKEW * each) * 64))
    sizes: dict[str, list[int]] = {}
    for transfer in found.sent:
        if transfer.collective == "all_to_all":
            sizes.setdefault(found.phases[transfer.phase][1], []).append(transfer.bytes)
            assert (transfer.axis, transfer.ranks) == ("expert", (0, 1))
    moved = [weights, sent, received]
    assert sizes == {"forward layers.0": moved, "backward layers.0": [sent, weights, sent, received, weights]}
    workload = workload_of(found, fuse=False, gpus_per_node=8)
    block = next(unit for unit in workload.units if unit.name == "layers.0")
    assert [sent.bytes for sent in block.forward_waits] == moved
    # The two ranks that share an expert gather a quarter of the experts each, in bfloat16.
    assert 3 * 8 * 64 * 24 // 2 * 2 in [sent.bytes for sent in block.gather if sent.group.size == 2]
