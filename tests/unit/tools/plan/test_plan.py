"""The plan against exact arithmetic, and against itself."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support.plans import layout_of, planned, profiled, read, shapes, traced
from titanlite.tools.plan import estimate
from titanlite.tools.plan.estimate import Layout, model_of, trace
from titanlite.tools.plan.memory import profile
from titanlite.tools.plan.recorder import Recorder
from titanlite.tools.plan.search import Layouts
from titanlite.tools.plan.trace import trace_step
from titanlite.tools.plan.unroll import Blocks, NotAlike, unrolled


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    yield
    assert not dist.is_initialized()


HSDP = "--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=2"
"""On 4 ranks, with 2 micro-batches."""


def elements_on(shards: int) -> int:
    """Return the elements on the first rank, which has the first rows, and at least one of each matrix."""
    return sum(-(-shape[0] // shards) * shape[1:].numel() for shape in shapes())


def test_states_are_exact_arithmetic() -> None:
    found, elements = profiled(*HSDP, world_size=4), elements_on(2)
    assert found.most("parameters") == 4 * elements
    assert found.phases["update"]["gradients"] == 4 * elements
    steps = 4 * len(shapes())  # AdamW counts them for each parameter
    assert found.most("optimizer") == 8 * elements + steps


def test_workers_exchange_weights_once_in_a_round() -> None:
    """Gradients do not go over replicas, and a checkpoint has the state of each worker."""
    rounds = *HSDP, "--outer.every=10", "--training.steps=20"
    plain, workers = (planned(*rounds, *words, world_size=4) for words in ((), ("--outer.over_replicas",)))
    elements, axis = elements_on(2), ("all_reduce", "replicate")
    assert plain.traffic.pop(axis) == 4 * elements
    assert workers.traffic.pop(axis) == 4 * elements // 10
    within, world = ("all_reduce", "shard"), ("all_reduce", "world")
    count, norm = 8, 4  # of a worker's tokens, which are of all ranks otherwise, and of its gradients
    assert workers.traffic.pop(within) == count + norm
    assert workers.traffic == plain.traffic | {world: plain.traffic[world] - count}
    steps = 4 * len(shapes())
    assert workers.state - plain.state == pytest.approx((12 * elements + steps) / 2, abs=1)


@pytest.mark.long
def test_states_in_other_types() -> None:
    options = "--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16", "--average.decay=0.9", "--outer.every=5"
    found, elements = profiled(*options, world_size=2), elements_on(2)
    assert found.most("parameters") == 2 * elements
    assert found.most("optimizer") == pytest.approx(4 * elements, abs=8 * len(shapes()))
    assert found.most("average") == pytest.approx(4 * elements, abs=8), "float32"
    assert found.most("outer") == pytest.approx(8 * elements, abs=8), "weights and momentum in float32"


STATES = ("parameters", "gradients", "optimizer")


GLM = "--model.name=glm4_moe", "--model.args.head_dim=16", "--model.args.dense_hidden_dim=320"
NEVER = "--parallelism.fsdp_reshard_after_forward=never"
nightly = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("overrides", "blocks"),
    [
        nightly(["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=3"], 12),
        nightly(["--parallelism.data_parallel_replicate_degree=2", NEVER], 8),
        nightly(["--model.name=olmo3", "--model.args.window=24"], 18),
        nightly(["--optimizer.name=Muon"], 8),
        nightly(["--training.local_batch_size=2", "--parallelism.fsdp_forward_prefetch=2"], 12),
        pytest.param([*GLM, "--model.args.n_dense_layers=2"], 9, marks=pytest.mark.slow),
        pytest.param(["--training.local_batch_size=2"], 7, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_step_of_many_blocks_from_one_of_few(
    overrides: list[str], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of each phase and of each pool of the allocator, kernels and collectives are those of the whole trace."""
    config = read(*overrides, f"--model.args.n_layers={blocks}", world_size=4)
    layout, depths = layout_of(4, gpus_per_node=4), list[int]()

    def traced_step(config: Any, model_cls: Any, args: Any, **options: Any) -> Recorder:
        depths.append(args.n_layers)
        return trace_step(config, model_cls, args, **options)

    monkeypatch.setattr(estimate, "trace_step", traced_step)
    found = trace(config, layout)
    few, whole = depths  # the passes of few blocks, and all but the passes of the whole model
    assert few < whole == blocks
    monkeypatch.setattr(estimate, "few_blocks", lambda *_: ())
    assert found == trace(config, layout)


@pytest.mark.long
def test_blocks_that_do_not_repeat_are_all_traced() -> None:
    """Each third block is recomputed, and is taken for the pattern of each second one."""
    options = "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=3"
    config = read(*options, "--model.args.n_layers=9", world_size=2)
    spec = model_of(config)
    few = trace_step(config, spec.model_cls, replace(spec.args, n_layers=7), world_size=2, gpu=True)
    with pytest.raises(NotAlike):
        unrolled(few, few, Blocks(9, 7, front=1, period=2))


@pytest.mark.long
def test_blocks_that_differ_are_all_made(tmp_path: Any) -> None:
    own = tmp_path / "odd_block.py"
    own.write_text(
        "from titanlite.models.llama3 import Llama3\n"
        "from torch import nn\n"
        "class Block(nn.Linear):\n"
        "    def forward(self, x, *others):\n"
        "        return super().forward(x)\n"
        "class Odd(Llama3):\n"
        "    flavors = {'debug': Llama3.flavors['debug']}\n"
        "    def __init__(self, args):\n"
        "        super().__init__(args)\n"
        "        self.layers = nn.ModuleList(Block(64, 64, bias=number == 3) for number in range(args.n_layers))\n"
    )
    config = read(f"--model.file={own}", '--model.name="Odd"', "--model.args.n_layers=6")
    found = trace(config, layout_of(1, gpu=False))
    assert "forward layers.3" in found.profile.phases
    assert "forward layers.4" in found.profile.phases


FLOAT8 = tuple(f"--quantize.linear.float8.{option}" for option in ("enable", "skip_small=false"))
RECIPE = "--quantize.linear.float8.recipe_name"


@pytest.mark.long
def test_a_plan_does_not_depend_on_what_was_planned_before() -> None:
    """DTensor makes tensors of the global shapes to learn results' shapes, once a process. They are not memory."""
    pytest.importorskip("torchao")
    emulated = "--quantize.linear.float8.emulate"
    config = read(*FLOAT8, emulated, "--optimizer.name=Muon", world_size=2)

    def phases() -> dict[str, dict[str, int]]:
        made = trace_step(config, *model_of(config), world_size=2, gpu=True)
        return profile(made).phases

    _clear_sharding_prop_cache()
    fresh, used = phases(), phases()
    assert fresh == used
    assert (
        sum(fresh["step"].values())
        < 1.01 * sum(fresh["step"][category] for category in ("parameters", "optimizer")) + 4e5
    )


@pytest.mark.long
def test_collectives_are_those_of_the_layout() -> None:
    """A block has two all-gathers and one reduce-scatter for each micro-batch; embedding and head have one all-gather.

    A step has one all-reduce over replicas.
    """
    found = traced(*HSDP, world_size=4)
    assert found.micro_batches == 2
    sent = [one for one in found.sent if one.unit]
    counts = {
        name: [(one.collective, one.axis) for one in sent if one.unit == name]
        for name in ("layers.0", "tok_embeddings", "head")
    }
    for name, gathers in (("layers.0", 4), ("tok_embeddings", 2), ("head", 2)):
        assert counts[name].count(("all_gather", "shard")) == gathers
        assert counts[name].count(("reduce_scatter", "shard")) == 2
        assert counts[name].count(("all_reduce", "replicate")) == 1
    block = sum(p.numel() for p in model_of(read()).build().layers[0].parameters())
    gathered = {one.bytes for one in sent if one.unit == "layers.0" and one.collective == "all_gather"}
    reduced = {one.bytes for one in sent if one.unit == "layers.0" and one.collective == "reduce_scatter"}
    assert gathered == {2 * block}  # bfloat16
    assert reduced == {4 * block}
    assert {one.bytes for one in sent if one.collective == "all_reduce" and one.unit == "layers.0"} == {2 * block}


@pytest.mark.long
def test_flops_are_those_of_the_model() -> None:
    config = read()
    model = model_of(config).build()
    tokens = config.training.global_batch_size * config.training.seq_len // 4
    operators = traced(*HSDP, world_size=4).operators
    matmuls = sum(operator.flops for operator in operators if operator.kind == "matmul")
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "tok_emb" not in name)
    assert matmuls == 6 * weights * tokens
    attention = sum(operator.flops for operator in operators if operator.kind == "attention")
    whole = (model.flops_per_token(config.training.seq_len) - 6 * weights) * tokens
    # Half of it, as it is causal; but backward repeats one matmul of five to save memory.
    assert attention == pytest.approx(whole / 2 * 7 / 6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "kind"),
    [("training.attention_backend=auto", "attention"), ("training.attention_backend=flash", "flash"),
     ("debug.deterministic=true", "flash"), ("data.document_mask=true", "flash")],
)  # fmt: skip
def test_attention_has_the_rate_of_its_kernel(option: str, kind: str) -> None:
    operators = traced(f"--{option}", world_size=2, gpu=True).operators
    assert {operator.kind for operator in operators if operator.flops} == {"matmul", kind}


@pytest.mark.long
def test_documents_have_no_mask_on_a_gpu() -> None:
    length = 512
    found = traced("--data.document_mask", f"--training.seq_len={length}", world_size=2, gpu=True)
    activations = [size for storage in found.storages if storage.category == "activations" for _, size in storage.sizes]
    sequences = 8
    assert max(activations) >= sequences * length * 160 * 2, "those of the feed-forward layer"
    assert max(activations) < sequences * length**2, "bytes of a mask of one byte"


@pytest.mark.nightly
def test_float8_gathers_half() -> None:
    pytest.importorskip("torchao")
    options = ("--compile.enable=true", *FLOAT8)
    eighth = traced(*options, world_size=2, gpu=True)
    assert "float8" in {operator.dtype for operator in eighth.operators if operator.kind == "matmul"}

    def gathered(made: Recorder) -> int:
        return sum(sent.bytes for sent in made.sent if sent.unit == "layers.0" and sent.collective == "all_gather")

    plain = traced("--compile.enable=true", world_size=2, gpu=True)
    assert gathered(eighth) == pytest.approx(gathered(plain) / 2, rel=0.02)

    # Wrapped weights are still counted as parameters.
    assert profile(eighth).most("parameters") == profiled(world_size=2).most("parameters")


@pytest.mark.slow
def test_mxfp8_matmuls_have_the_rate_of_float8() -> None:
    """All matmuls of blocks, forward and backward, with inputs and weights as wide as before."""
    pytest.importorskip("torchao")
    plain, eighth = (
        traced("--compile.enable", "--activation_checkpoint.mode=selective", *words, world_size=2, gpu=True)
        for words in ((), (*FLOAT8, f"{RECIPE}=mxfp8"))
    )

    def flops(made: Recorder, dtype: str) -> int:
        matmuls = (operator for operator in made.operators if operator.kind == "matmul" and operator.dtype == dtype)
        return sum(matmul.flops for matmul in matmuls if "layers." in made.phases[matmul.phase][1])

    assert flops(eighth, "float8") == flops(plain, "bfloat16") > 0
    assert flops(eighth, "bfloat16") == 0
    assert sum(sent.bytes for sent in eighth.sent) == sum(sent.bytes for sent in plain.sent)
    assert profile(eighth).most("activations") == pytest.approx(profile(plain).most("activations"), rel=0.01)


@pytest.mark.long
def test_offload_moves_states_to_the_host() -> None:
    kept = "--average.window=3", "--outer.every=2"
    off, on = planned(*kept), planned(*kept, "--training.enable_cpu_offload", "--average.enable_cpu_offload")
    assert off.host == 0
    assert off.breakdown["average"] == pytest.approx(12 * elements_on(8), abs=8)
    assert off.breakdown["outer"] == pytest.approx(8 * elements_on(8), abs=8)
    on_device = [max(phase[category] for phase in off.phases.values()) for category in (*STATES, "outer", "average")]
    assert on.host == sum(on_device)
    assert off.state == on.host - on_device[STATES.index("gradients")]
    assert all(size > 0 for size in on_device)
    assert [on.breakdown[category] for category in ("parameters", "optimizer", "outer", "average")] == [0] * 4
    assert on.peak < off.peak
    assert on.time.total > off.time.total


@pytest.mark.long
def test_a_search_knows_which_part_of_a_state_each_rank_has() -> None:
    config, layout = read("--average.decay=0.9", "--outer.every=2", world_size=8), layout_of(8)
    searching, work = Layouts(config, layout, share=4), ("none", "", 1)
    for candidate in searching.expect(work, trace(searching.traced_config(work), layout)):
        found, elements = candidate.expected, elements_on(candidate.expected.degrees.shard)
        assert found.breakdown["average"] == pytest.approx(4 * elements, rel=0.02), candidate.title
        assert found.breakdown["outer"] == pytest.approx(8 * elements, rel=0.02), candidate.title


@pytest.mark.long
def test_a_world_of_4096() -> None:
    """More ranks than most matrices have rows: the first rank has the first rows, and of each matrix at least one."""
    world_size = 4096
    found = planned(
        "--training.global_batch_size=4096", "--parallelism.data_parallel_replicate_degree=4", world_size=world_size
    )
    states = sum(max(phase[category] for phase in found.phases.values()) for category in STATES)
    assert states == 16 * elements_on(1024) + 4 * len(shapes())
    assert found.traffic["all_reduce", "replicate"] * 1024 == found.traffic["reduce_scatter", "shard"]
    assert found.time.exposed > 0.5 * found.time.communication, "nothing hides the collectives of a model so small"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_wait_for_the_slowest(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = f"--parallelism.pipeline_parallel_degree={ranks}"
    words = stages, "--training.local_batch_size=1", "--model.args.n_layers=2"
    alike = planned(*words, world_size=4).time.compute
    monkeypatch.setattr(Layout, "slowest", property(lambda layout: replace(layout.hardware, clock=1e-6)))
    assert planned(*words, world_size=4).time.compute > 2 * alike


@pytest.mark.long
def test_collectives_of_split_layers() -> None:
    """A block gathers tokens twice in forward and sums them twice; backward does the same with gradients.

    The gradients of its two norms are all-reduced. Between split modules a rank has half of the tokens.
    """
    options = ["--parallelism.tensor_parallel_degree=2", "--model.args.n_layers=2"]
    found = traced(*options, world_size=2)
    inside = [(found.phases[sent.phase][1], sent) for sent in found.sent if sent.axis == "tensor"]
    assert all(sent.is_inside for _, sent in inside)
    config = read(*options, world_size=2)
    width = dict(model_of(config).build().named_parameters())["layers.1.attention_norm.weight"].numel()
    tokens = config.training.seq_len * config.training.global_batch_size // found.micro_batches
    states = 2 * width * tokens  # bfloat16
    gathered, summed, norm = ("all_gather", states), ("reduce_scatter", states), ("all_reduce", 2 * width)
    for phase, expected in (("forward", {gathered: 2, summed: 2}), ("backward", {gathered: 2, summed: 2, norm: 2})):
        counts = Counter((sent.collective, sent.bytes) for name, sent in inside if name == f"{phase} layers.1")
        assert counts == {key: count * found.micro_batches for key, count in expected.items()}
