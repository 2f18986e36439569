"""A step trace: one real step on fake tensors. The model, the techniques, the optimizer and the step are those of
training; ranks, memory and values do not exist."""

import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.batch import Batch
from titanlite.loss import Targets, TokenLoss
from titanlite.mesh import ACTIVATION_AXES, axis_groups, data_parallel_rank, loss_group, world_group
from titanlite.models.base import Model, ModelArgs, build_on_meta, unique_parameters
from titanlite.observer import OnPhase
from titanlite.ops.kernels import FLASH_PACKAGES, Kernels
from titanlite.optim import build_optimizer
from titanlite.optim.checks import check_optimizer
from titanlite.parallelize import build_mesh, parallelize
from titanlite.parallelize.frozen import parallelize_frozen
from titanlite.parallelize.fsdp import fsdp_units
from titanlite.parallelize.materialize import allocate
from titanlite.runtime.dtensor import from_local_like
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.private_torch.fsdp import observe_fsdp
from titanlite.runtime.private_torch.tensors import fused_adamw_, local_tensor
from titanlite.runtime.private_torch.tracing import (
    FakeTensorMode,
    ValueNeeded,
    fake_process_group,
    propagate_shardings_without_modes,
    without_fake_tensors,
)
from titanlite.schema import Config
from titanlite.step import Step, build_step
from titanlite.techniques import parts_of, places
from titanlite.tools.plan.gpu_kernels import FakeCpuKernels, GpuKernels
from titanlite.tools.plan.recorder import Recorder
from titanlite.tools.plan.unroll import Blocks

BACKEND = "aot_eager_decomp_partition"
"""Backend of torch.compile in a trace."""
MICRO_BATCHES = 2
"""Number of traced micro-batches: the second adds to gradients of the first, and further ones are like the second."""


def trace_step(
    config: Config,
    model_cls: type[Model],
    args: ModelArgs,
    *,
    world_size: int,
    gpu: bool,
    targets: Targets | None = None,
    rank: int = 0,
    passes: "Passes | None" = None,
) -> Recorder:
    """Return the record of a step on a rank. The optimizer has its states already.

    Args:
        rank: 0 has the largest shards, and the first stage of a pipeline.
        gpu: whether the kernels are those of an NVIDIA GPU, or those of this machine's CPU.
        targets: of the config; see `planned_targets`. Their model is made here. Default: labels only.
        passes: take the step's forward and backward passes from another record, and trace the rest.

    Raises:
        UserError: the model, the loss or the optimizer needs values, which fake tensors lack.
    """
    _, accumulation = config.training.batch_split(config.parallelism.degrees(world_size).data_parallel)
    if accumulation > 1 and config.optimizer.in_backward:
        raise UserError("gradients do not last until after backward, and this step would have several backward passes")
    attention = config.training.attention_backend
    kernels = GpuKernels(compiles=config.compile.enable, attention=attention) if gpu else FakeCpuKernels()
    with fake_ranks(world_size, rank=rank), _fresh_compiler(config):
        model, mesh = parallelized(config, model_cls, args, world_size=world_size, kernels=kernels)
        models = {"": model}
        if targets:
            frozen = targets.frozen
            other = parallelize_frozen(frozen, config, mesh=mesh, kernels=kernels, compile_backend=BACKEND)
            models[f"{frozen.section}."] = other
            targets.use(other)
        loss_group(mesh)  # the group is made here, because its ranks are values, which fake tensors lack
        parts = parts_of(config, mesh)
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            recorder = Recorder(
                fakes, gpu=gpu, flash=attention in ("flash", *FLASH_PACKAGES) or config.debug.is_deterministic
            )
            if model.kept_on_host:
                model.kept_on_host.allocate = recorder.during("offloaded", model.kept_on_host.allocate)
            recorder.name_group(world_group(mesh), "world")
            for axis, group in (_groups_of_parameters(model) | axis_groups(mesh)).items():
                recorder.name_group(group, axis, inside=axis in ACTIVATION_AXES)
            phases = ExitStack()
            for prefix, network in models.items():
                observe_fsdp(network, recorder, prefix=prefix)
                phases.enter_context(_forward_phases(network, recorder, prefix=prefix))
            with recorder, phases:
                for prefix, network in models.items():
                    with recorder.category("other"):
                        allocate(network, torch.device("cpu"), torch.device("cpu"))
                    category = targets.frozen.section if targets and prefix else "parameters"
                    recorder.label((p for _, p in unique_parameters(network)), category)
                optimizer: Any = _TracedOptimizer(fake_optimizer(config, model, kernels), recorder)
                after_update = recorder.during("other", parts.after_update(model))
                with recorder.category("other"):
                    if any(parameter not in optimizer.state for parameter in _trained(optimizer)):
                        fill_states(optimizer, one_by_one=config.optimizer.in_backward)
                    outer = parts.outer(model) if parts.outer else None
                    average = parts.average(model, None, after_update) if parts.average else None
                    batches = [*map(parts.batch, _batches(config, data_parallel_rank(mesh)[1], model))]
                    recorder.micro_batches = len(batches)
                states = (value for state in optimizer.state.values() for value in state.values())
                recorder.label((value for value in states if isinstance(value, Tensor)), "optimizer")
                if outer:
                    recorder.label(outer.tensors.values(), "outer")
                if average:
                    recorder.label(average.tensors.values(), "average")
                if config.optimizer.in_backward:
                    _label_gradients(model, recorder)
                marked = marked_step(parts.step_cls or Step, recorder, passes)
                train_step = build_step(
                    config, model, optimizer, mesh=mesh, kernels=kernels, parts=replace(parts, step_cls=marked),
                    targets=targets,
                )  # fmt: skip
                train_step.loss_function = recorder.during("logits", train_step.loss_function)
                untraced = train_step.partial_sums(accumulation) - train_step.partial_sums(len(batches))
                with recorder.category("reduce-scatter"):
                    own_shards = [local_tensor(parameter) for parameter in _trained(optimizer)]
                    waiting = [torch.empty_like(shard) for shard in own_shards for _ in range(untraced)]
                recorder.unit("step")
                after_update()  # the call after the update of the step before
                train_step(batches, on_phase=recorder.on_phase)
                recorder.unit("end")
                del waiting
    return recorder


@dataclass(frozen=True)
class Passes:
    """Passes of a step of a small model, which stand for those of the whole model; see `unroll`."""

    recorder: Recorder
    blocks: Blocks


def marked_step(step_cls: type[Step], recorder: Recorder, passes: Passes | None) -> type[Step]:
    """Return the class of a step that marks the begin and the end of its passes, and what they hand to the update.

    Args:
        passes: make the gradients and losses of these passes, in memory laid out alike, in place of running any.
    """

    class MarkedStep(step_cls):
        def accumulate(self, batches: Sequence[Batch], on_phase: OnPhase) -> TokenLoss:
            begin = recorder.mark()
            if passes is None:
                losses = super().accumulate(batches, on_phase)
                for name, parameter in unique_parameters(self.model):
                    if parameter.grad is not None:
                        recorder.hand(name, parameter.grad)
                values = {"total": losses.total, "cross entropy": losses.cross_entropy, **losses.metrics}
                for name, value in values.items():
                    recorder.hand(f"loss {name}", value)
            else:
                losses = self._stand_in(passes)
            recorder.passes = begin, recorder.mark()
            return losses

        def _stand_in(self, passes: Passes) -> TokenLoss:
            handed, memory = passes.recorder.handed, dict[Any, Tensor]()

            def made(name: str) -> Tensor:
                like, its_block, block = passes.blocks.of_name(name)
                one = handed[like]
                key = one.storage, (block or 0) - (its_block or 0)
                if key not in memory:
                    memory[key] = torch.empty(one.elements, dtype=one.dtype)
                    recorder.stand_in(memory[key], one.storage, its_block, block)
                return memory[key].as_strided(one.size, one.stride, one.offset)

            for name, parameter in unique_parameters(self.model):
                if passes.blocks.of_name(name)[0] in handed:
                    parameter.grad = from_local_like(made(name), parameter)
            total, cross_entropy, *metrics = (name for name in handed if name.startswith("loss "))
            named = {name.removeprefix("loss "): made(name) for name in metrics}
            return TokenLoss(made(total), made(cross_entropy), named)

    return MarkedStep


def parallelized(
    config: Config,
    model_cls: type[Model],
    args: ModelArgs,
    *,
    world_size: int,
    kernels: Kernels,
) -> tuple[Model, DeviceMesh]:
    """Return the parallelized model, with its tensors still on the meta device, and its mesh of CPUs.

    A compiled block is traced and partitioned as the default compiler does it, and its parts run operator by operator.
    It keeps for backward what a compiled block keeps; its temporary memory is larger.
    """
    model = build_on_meta(model_cls, args)
    mesh = build_mesh(config.parallelism, world_size=world_size, device_type="cpu")
    parallelize(model, config, mesh=mesh, kernels=kernels, compile_backend=BACKEND)
    return model, mesh


def _groups_of_parameters(model: Model) -> dict[str, dist.ProcessGroup]:
    """Return the process groups of the axes that parameters know, by name. Those of experts are no axes of the mesh."""
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    return {axis: mesh.get_group(axis) for mesh in meshes for axis in mesh.mesh_dim_names or ()}


def fake_optimizer(config: Config, model: Model, kernels: Kernels) -> torch.optim.Optimizer:
    """Return the optimizer of a model whose parameters are fake tensors.

    Raises:
        ConfigError: its options are wrong.
    """
    on_gpu = isinstance(kernels, GpuKernels) and "parameters" not in places(config)
    with without_fake_tensors():  # some optimizers read their mesh, which is no fake tensor
        if problems := check_optimizer(config.optimizer, None, dtype=config.training.dtype):  # may allocate, once
            raise ConfigError(problems)
        return build_optimizer(
            model, config.optimizer, seed=0, pick_kernel=lambda _: _update_as_one if on_gpu else None,
            fused=on_gpu or not config.debug.reproducible_layouts,
            reproducible=config.debug.reproducible_layouts, kernels=kernels,
        )  # fmt: skip


def _update_as_one(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, corrections: Tensor, **values: Any
) -> None:
    """Stand for the Triton kernel of `SlicedAdamW`: one kernel that reads and writes the same tensors."""
    fused_adamw_(
        weight, gradient, exp_avg, exp_avg_sq, step=corrections[0, 0], found_inf=None, lr=values["lr"],
        betas=values["betas"], eps=values["eps"], weight_decay=values["weight_decay"],
    )  # fmt: skip


class _TracedOptimizer:
    """Optimizer that makes every step, without a compiler. Fake tensors have no values to decide a skip by."""

    _step_supports_amp_scaling = True  # this optimizer accepts `found_inf`, and ignores it

    def __init__(self, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
        self._optimizer = optimizer
        self._recorder = recorder
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    @torch.compiler.set_stance("force_eager")
    def step(self) -> None:
        with self._recorder.category("other"):
            self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


def _label_gradients(model: Model, recorder: Recorder) -> None:
    """Label each gradient before its update frees it, which is before FSDP's reduction returns."""

    def label(parameter: Tensor) -> None:
        assert parameter.grad is not None
        recorder.label([parameter.grad], "gradients")

    for _, parameter in unique_parameters(model):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(label)


@contextmanager
def _fresh_compiler(config: Config) -> Iterator[None]:
    """Forget compiled code before and after a trace of compiled blocks."""
    if config.compile.enable:
        torch.compiler.reset()
    yield
    if config.compile.enable:
        torch.compiler.reset()


def fill_states(optimizer: torch.optim.Optimizer, *, one_by_one: bool) -> None:
    """Make one step of the optimizer on zeros, so that its states exist, as after a step of training."""
    parameters = _trained(optimizer)
    for together in [[parameter] for parameter in parameters] if one_by_one else [parameters]:
        for parameter in together:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def _trained(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def traced_micro_batches(config: Config, accumulation: int) -> int:
    """Return the number of micro-batches of a traced step: with a pipeline, at least as many as a stage ever keeps."""
    ranks, schedule = config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule
    if ranks > 1 and schedule in ("GPipe", "LoopedBFS"):
        return accumulation
    return min(accumulation, MICRO_BATCHES if ranks == 1 else ranks + 1 if schedule == "1F1B" else 2 * ranks)


def _batches(config: Config, ranks: int, model: Model) -> list[Batch]:
    size, accumulation = config.training.batch_split(ranks)
    seq_len = config.training.seq_len
    batches = []
    for _ in range(traced_micro_batches(config, accumulation)):
        tokens = torch.zeros(size, seq_len, dtype=torch.int64)
        batch = {"tokens": tokens, "labels": torch.zeros_like(tokens)}
        if config.data.document_mask:
            batch["positions"] = torch.zeros_like(tokens)
            batch["documents"] = torch.zeros_like(tokens, dtype=torch.int32)
            batch["boundaries"] = torch.zeros(size + 1, dtype=torch.int32)
        if config.training.dropout:
            batch["draws"] = torch.zeros_like(tokens)
        if model.counts_tokens and config.data.packing == "best_fit":
            batch["padding"] = torch.zeros_like(tokens, dtype=torch.bool)
        batches.append(batch)
    return batches


@contextmanager
def _forward_phases(model: Model, recorder: Recorder, *, prefix: str) -> Iterator[None]:
    """Begin a phase with the forward pass of each FSDP unit.

    Args:
        prefix: of the units' names.
    """
    names = {module: name for name, module in model.named_modules()}

    def begin_forward(module: nn.Module, _: Any) -> None:
        recorder.unit(f"forward {prefix}{names[module]}")

    hook: Any = torch.compiler.disable(begin_forward)  # the compiler would recompile the hook for each phase
    with ExitStack() as stack:
        for unit in fsdp_units(model):
            stack.callback(unit[0].register_forward_pre_hook(hook, prepend=True).remove)
        yield


@contextmanager
def fake_ranks(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """Make this process one of many ranks, whose tensors may be fake, within the context.

    Raises:
        UserError: code within the context asks a fake tensor for values.
    """
    with fake_process_group(world_size, rank=rank), propagate_shardings_without_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except ValueNeeded as error:
            places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
            ours = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/"
            file, line = [place for place in places if not place[0].startswith(ours)][-1]
            raise UserError(
                f"the step cannot be traced: {Path(file).name}:{line} asks for values ({error.func}), and a plan's "
                "tensors have none"
            ) from error
