"""One real step on fake tensors: the model, the techniques, the optimizer and the step are those of training; ranks,
memory and values are not there."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite import step
from titanlite.batch import Batch
from titanlite.config.schema import Config
from titanlite.loss import build_loss
from titanlite.models.base import Model, ModelArgs, build_on_meta, unique_parameters
from titanlite.optim import build_optimizer, check_optimizer, in_backward
from titanlite.parallelize import build_mesh, parallelize
from titanlite.parallelize.compile import compile_blocks
from titanlite.parallelize.float8 import weight_scaler
from titanlite.parallelize.fsdp import sharding_units
from titanlite.parallelize.materialize import allocate
from titanlite.parallelize.mesh import data_parallel_group
from titanlite.plan.gpu_kernels import as_on_gpu
from titanlite.plan.recorder import Recorder
from titanlite.runtime.errors import UserError

MICRO_BATCHES = 2
"""The second finds gradients of the first. A third would find nothing new."""


@dataclass(frozen=True)
class StepTrace:
    """What rank 0 did in a step. It has the largest shards."""

    recorder: Recorder
    blocks: int
    micro_batches: int
    """So many were made; more are like the last two."""


def trace_step(
    config: Config,
    kind: type[Model],
    args: ModelArgs,
    *,
    world_size: int,
    gpu: bool,
    steps: int = 1,
) -> StepTrace:
    """Make a step with the optimizer's states in place already.

    Args:
        gpu: as an NVIDIA GPU would do it, else as this machine's CPU.
        steps: recorded steps; one is like the other.

    Raises:
        UserError: the model, the loss or the optimizer asks for values, and there are none.
    """
    if config.optimizer.in_backward and config.training.batch_split(world_size)[1] > 1:
        raise UserError("optimizer.in_backward: updates after each forward pass, and this would have several in a step")
    with ExitStack() as stack, _values_are_missed():
        stack.enter_context(fake_ranks(world_size))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if gpu:
            stack.enter_context(as_on_gpu(fused_norm=not config.compile.enable))
        if config.compile.enable:
            stack.enter_context(_compile_shapes_only())
        model, mesh = parallelized(config, kind, args, world_size=world_size)
        recorder = _record(config, model, mesh, steps)
    micro_batches = min(MICRO_BATCHES, config.training.batch_split(world_size)[1])
    return StepTrace(recorder, len(model.layers), micro_batches)


def parallelized(
    config: Config,
    kind: type[Model],
    args: ModelArgs,
    *,
    world_size: int,
) -> tuple[Model, DeviceMesh]:
    """The model, its tensors still on the meta device, on a mesh of CPUs."""
    model = build_on_meta(kind, args)
    mesh = build_mesh(config.parallelism, world_size=world_size, device_type="cpu")
    parallelize(
        model,
        mesh=mesh,
        parallelism=config.parallelism,
        training=config.training,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        float8=config.quantize.linear.float8,
    )
    return model, mesh


def _record(config: Config, model: Model, mesh: DeviceMesh, steps: int) -> Recorder:
    group = data_parallel_group(mesh)
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        recorder = Recorder(fakes)
        recorder.name_group(group, "world")
        for axis in ("replicate", "shard"):
            if mesh[axis].size() > 1:
                recorder.name_group(mesh.get_group(axis), axis)
        with recorder.recording(), observe(model, recorder):
            with recorder.cause("other"):
                allocate(model, torch.device("cpu"), torch.device("cpu"))
            recorder.label((p for _, p in unique_parameters(model)), "parameters")
            with unset_fake_temporarily():  # some look up their part of a mesh, which is no fake
                check_optimizer(config.optimizer, None, dtype=config.training.dtype)  # others make tables, once
                optimizer = build_optimizer(model, config.optimizer, seed=0)
            optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)  # torchao's compile it
            with recorder.cause("other"):
                _fill_states(optimizer, one_by_one=config.optimizer.in_backward)
                batches = _batches(config, mesh.size())
            states = (value for state in optimizer.state.values() for value in state.values())
            recorder.label((value for value in states if isinstance(value, Tensor)), "optimizer")
            optimizer.step = recorder.during("other", optimizer.step)
            updates = _updates_in_backward(model, optimizer, recorder) if config.optimizer.in_backward else None
            scale_weights = recorder.during("other", weight_scaler(model, config.quantize.linear.float8))
            for _ in range(steps):
                recorder.phase("step")
                scale_weights()  # as after the step before
                step.train_step(
                    model,
                    batches,
                    optimizer=optimizer,
                    group=group,
                    max_norm=config.training.max_norm,
                    loss_function=recorder.during("logits", build_loss(config.training)),
                    in_backward=updates,
                )
            recorder.phase("end")
    return recorder


def _updates_in_backward(model: Model, optimizer: torch.optim.Optimizer, recorder: Recorder) -> in_backward.InBackward:
    """Whose gradients are gone when FSDP's reduction returns: they get their label before they are used."""

    def label(parameter: Tensor) -> None:
        assert parameter.grad is not None
        recorder.label([parameter.grad], "gradients")

    for _, parameter in unique_parameters(model):
        parameter.register_post_accumulate_grad_hook(label)
    return in_backward.InBackward(model, optimizer)


@contextmanager
def _values_are_missed() -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        ours = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/"
        file, line = [place for place in places if not place[0].startswith(ours)][-1]
        raise UserError(
            f"the step cannot be rehearsed: {Path(file).name}:{line} asks for values ({error.func}), and tensors of a "
            "plan have none"
        ) from error


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """A process group whose other members are not there. This process must have none."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _compile_shapes_only() -> Iterator[None]:
    """Trace and split blocks as the default compiler does, and run the parts operator by operator: what is kept for
    backward is what a compiled block keeps, what is held for a moment is more."""
    traced = partial(compile_blocks, backend="aot_eager_decomp_partition")
    torch.compiler.reset()
    # What is drawn again in backward need not be what was drawn in forward: attention, which could draw a dropout mask,
    # stays one operator instead of a pair that also saves the generator's state, and that no recorder could look into.
    no_states = patch(
        "torch._functorch.partitioners.functionalize_rng_ops", lambda _, forward, backward, __: (forward, backward)
    )
    with patch("titanlite.parallelize.compile_blocks", traced), no_states:
        yield
    torch.compiler.reset()


def _fill_states(optimizer: torch.optim.Optimizer, *, one_by_one: bool) -> None:
    """As after a step. What it does is done once more in the recorded one: the first time, DTensor makes whole tensors
    to learn shapes."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for together in [[parameter] for parameter in parameters] if one_by_one else [parameters]:
        for parameter in together:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def _batches(config: Config, ranks: int) -> list[Batch]:
    size, accumulation = config.training.batch_split(ranks)
    seq_len = config.training.seq_len
    batches = []
    for _ in range(min(MICRO_BATCHES, accumulation)):
        tokens = torch.zeros(size, seq_len, dtype=torch.int64)
        batch = {"tokens": tokens, "labels": torch.zeros_like(tokens)}
        if config.data.document_mask:
            batch["positions"] = torch.zeros_like(tokens)
            batch["documents"] = torch.zeros_like(tokens, dtype=torch.int32)
            batch["boundaries"] = torch.zeros(size + 1, dtype=torch.int32)
        batches.append(batch)
    return batches


@contextmanager
def observe(model: Model, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder in which unit the step is, and what FSDP takes memory for."""
    group = fsdp.FSDPParamGroup
    reduce, gather, before, after = fsdp.foreach_reduce, group.unshard, group.pre_backward, group.post_backward
    norm = step.sum_of_squares
    names = {module: name for name, module in model.named_modules()}

    def foreach_reduce(params: Any, gradients: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        recorder.label(gradients, "reduce-scatter")
        with recorder.cause("reduce-scatter"):
            result = reduce(params, gradients, *args, **kwargs)
        sharded = (param.sharded_param.grad for param in params)
        recorder.label((gradient for gradient in sharded if gradient is not None), "gradients")
        return result

    def unshard(self: fsdp.FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        with recorder.cause("all-gather"), recorder.unit(names[self.modules[0]]):
            return gather(self, *args, **kwargs)

    def begin_forward(module: nn.Module, _: Any) -> None:
        recorder.phase(f"forward {names[module]}")

    hook: Any = torch.compiler.disable(begin_forward)  # else it would be compiled anew for each phase

    def pre_backward(self: fsdp.FSDPParamGroup, *args: Any) -> Any:
        recorder.phase(f"backward {names[self.modules[0]]}")
        return before(self, *args)

    def post_backward(self: fsdp.FSDPParamGroup, *args: Any) -> Any:
        recorder.phase(f"reduce {names[self.modules[0]]}")
        with recorder.unit(names[self.modules[0]]):
            return after(self, *args)

    def sum_of_squares(*args: Any) -> Tensor:
        recorder.phase("update")
        return norm(*args)

    with ExitStack() as stack:
        for name in ("wait_for_unshard", "reshard"):
            stack.enter_context(patch.object(group, name, recorder.during("all-gather", getattr(group, name))))
        stack.enter_context(patch.object(fsdp, "foreach_reduce", foreach_reduce))
        stack.enter_context(patch.object(group, "unshard", unshard))
        stack.enter_context(patch.object(step, "sum_of_squares", sum_of_squares))
        for module in (step, in_backward):  # there is no skip_reason that could be asked for
            stack.enter_context(patch.object(module, "update", lambda optimizer, skip: optimizer.step()))
        stack.enter_context(patch.object(group, "pre_backward", pre_backward))
        stack.enter_context(patch.object(group, "post_backward", post_backward))
        for unit in sharding_units(model):
            stack.callback(unit[0].register_forward_pre_hook(hook, prepend=True).remove)
        yield
