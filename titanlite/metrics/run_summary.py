"""First and last lines of a run: its parts at the start, the places of its results at the end."""

import logging
import os
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import Progress
from titanlite.config.warnings import find_warnings
from titanlite.data.packing import BestFit
from titanlite.data.samples import Samples, Source
from titanlite.data.sources import store_of
from titanlite.guard import SpikeFound
from titanlite.mesh import axis_sizes, data_parallel_rank
from titanlite.metrics.durations import format_phases
from titanlite.models.base import Model, trainable_parameters, unique_parameters
from titanlite.models.decoder import Decoder
from titanlite.models.layers import LayerOfHeads
from titanlite.optim.groups import format_groups, parameter_groups
from titanlite.optim.state_size import state_dtypes
from titanlite.run.run_folder import RunFolder
from titanlite.runtime.allocator import allocator_settings
from titanlite.runtime.console import hide_secrets, install_hint, shell_command
from titanlite.runtime.dtypes import torch_dtype
from titanlite.runtime.errors import RunStopped
from titanlite.runtime.private_torch.fsdp import mixed_precision
from titanlite.runtime.process_group import why_no_gpu
from titanlite.runtime.signals import STOPPED, StoppedBySignal
from titanlite.schedule import BatchSizes
from titanlite.schema import Config
from titanlite.storage.storage import Storage
from titanlite.techniques import used

logger = logging.getLogger(__name__)


def report_start(
    config: Config,
    *,
    model: Model,
    whole: Model,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    samples: Samples,
    progress: Progress,
    accumulation: int,
    steps: int,
    listens: bool,
) -> None:
    """Log the first lines of a run.

    Args:
        listens: whether signals ask the run to stop.
    """
    training = config.training
    parameters = sum(parameter.numel() for _, parameter in unique_parameters(whole))
    ranks = data_parallel_rank(mesh)[1]
    share = training.global_batch_size // ranks
    readers = f"{ranks} processes" if mesh.size() == ranks else f"{ranks} groups of {mesh.size() // ranks} processes"
    axes = " x ".join(f"{axis} {size}" for axis, size in axis_sizes(mesh).items())
    logger.info(f"model    {config.model.title} {config.model.flavor or ''}".rstrip() + f", {parameters:,} parameters")
    logger.info("types    " + ", ".join(f"{what} {name}" for what, name in types_of(model, optimizer).items()))
    if isinstance(model, Decoder):
        device = torch.device(mesh.device_type)
        name = model.attention_backend(model.kernels, config, device)
        chosen = " (PyTorch's choice)" if training.attention_backend == "auto" and name != "tiles" else ""
        compute = torch_dtype(training.mixed_precision_param)
        others = {module.kernel_name(device, compute) for module in model.modules() if isinstance(module, LayerOfHeads)}
        logger.info("; ".join([f"kernels  attention by {name}{chosen}", *sorted(filter(None, others))]))
    has_units = any(isinstance(module, FSDPModule) for module in model.modules())
    logger.info(f"applied  {', '.join(applied(config, blocks=len(whole.layers), has_units=has_units))}")
    logger.info(
        f"mesh     {axes} on {mesh.device_type}; "
        f"global batch {training.global_batch_size} = {readers} x {accumulation} micro-batches x "
        f"{share // accumulation} sequences of {training.seq_len} tokens"
    )
    _report_device(mesh)
    for number, line in enumerate(format_groups(parameter_groups(config.optimizer, whole))):
        logger.info(("         " if number else "updates  ") + line)
    for source in samples.sources:
        _report_source(source, share=source.weight / sum(other.weight for other in samples.sources))
    for stage in config.data.stages:
        shares = [f"{weight / sum(stage.weights.values()):.2%} {name}" for name, weight in stage.weights.items()]
        logger.info(f"         until {stage.until_tokens:,} tokens: {', '.join(shares)}")
    total = BatchSizes.of(training).after(progress.samples_seen, steps - progress.step)
    logger.info(f"saves    {saves_of(config)}")
    if listens and config.checkpoint.enable:
        logger.info("stop     Ctrl-C saves a checkpoint first, and the same command resumes")
    passes = [f"{passes:.2f} of {name}" for name, passes in samples.passes(total).items()] or ["not known yet"]
    logger.info(f"length   {steps:,} steps, {total:,} sequences; passes over the data: {', '.join(passes)}")
    if training.epochs is not None:
        rest = samples.limit(training.epochs) - total
        logger.info(f"         the last {rest} sequences do not fill a batch of {training.global_batch_size}: left out")
    for warning in find_warnings(config, steps=steps):
        logger.warning(warning)
    if progress.step >= steps:
        logger.info(f"this run is complete at step {progress.step}; to continue it, raise training.{training.length}")
    elif progress.step:
        logger.info(f"resuming after step {progress.step}, {progress.samples_seen:,} sequences into the data")


def applied(config: Config, *, blocks: int, has_units: bool) -> list[str]:
    """Describe the techniques that the config asks for.

    Args:
        has_units: see `parallelize.fsdp.has_units`.
    """
    recompute, resharding = config.activation_checkpoint.mode, config.parallelism.fsdp_reshard_after_forward
    fsdp = f"FSDP of {blocks} blocks, reshard_after_forward {resharding}"
    found = [fsdp if has_units else "no FSDP (one process has all weights, in the compute dtype)"]
    found += [f"activation checkpointing {recompute}"] if recompute != "none" else []
    found += [f"compile of {blocks} blocks"] if config.compile.enable else []
    return [*found, *filter(None, (technique.summary(config) for technique in used(config)))]


def saves_of(config: Config) -> str:
    """Describe when checkpoints are saved, and where."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return "no checkpoint (checkpoint.enable = false)"
    folder = checkpoint.folder or Path(config.job.dump_folder, str(config.job.name), "checkpoints")
    kept = f"the newest {checkpoint.keep_latest_k} are kept" if checkpoint.keep_latest_k else "all are kept"
    manner = "while training waits" if checkpoint.async_mode == "disabled" else "in the background"
    return f"every {checkpoint.interval:,} steps and the last, {manner}, to {hide_secrets(str(folder))}; {kept}"


def _report_device(mesh: DeviceMesh) -> None:
    """Log what a run depends on beside its config: the device, and on CPUs why there is no GPU if there are some."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mesh.device_type == "cpu":
        has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
        if reason := why_no_gpu(has_gpus=has_gpus, cuda_version=torch.version.cuda, visible=visible):
            logger.warning(reason)
        from titanlite.ops.cpu import describe_cpu

        logger.info(f"device   {describe_cpu()}")
        return
    from torch.cuda import nccl

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    logger.info(
        f"device   {properties.name}, {properties.total_memory / 2**30:.1f} GiB; float32 matmuls "
        f"of {torch.get_float32_matmul_precision()} precision; NCCL {'.'.join(map(str, nccl.version()))}; allocator "
        f"{allocator_settings(os.environ)}"
    )


def types_of(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the dtypes in use, read from the model and the optimizer instead of the config."""
    units = [mixed_precision(module) for module in model.modules() if isinstance(module, FSDPModule)]
    policies = [policy for policy in units if policy] or [MixedPrecisionPolicy()]  # without units, nothing is converted
    weights = [parameter.dtype for parameter in model.parameters()]
    trained = [parameter.dtype for parameter in trainable_parameters(model).values()]
    types: dict[str, list[torch.dtype]] = {
        "weights": [*weights],
        "compute": [policy.param_dtype or dtype for policy in policies for dtype in trained],
        "reduction": [policy.reduce_dtype or dtype for policy in policies for dtype in trained],
        "moments": [*state_dtypes(optimizer)],
    }
    found = {what: "/".join(sorted({_name(dtype) for dtype in of})) for what, of in types.items()}
    multiplied = {model.kernels.matmul_dtype(dtype) for dtype in types["compute"]}
    if multiplied != {*types["compute"]}:
        found["compute"] += f" (multiplied in {'/'.join(sorted(map(_name, multiplied)))})"
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _report_source(source: Source, *, share: float) -> None:
    if (store := store_of(source)) is None:
        own = f"{len(source.sequences):,} sequences of its own"
        logger.info(f"data     {source.name}: {share:.2%} of the sequences; {own}")
        return
    if source.is_growing:
        logger.info(
            f"data     {source.name}: {share:.2%} of the sequences; {len(store):,} tokens so far ({store.folder})"
        )
        return
    index = store.index
    reader = source.sequences
    fill = reader.fill if isinstance(reader, BestFit) else 1
    entropy = ""
    if "unigram_entropy" in index:  # an index of several folders has none
        nats = index["unigram_entropy"]
        entropy = f"; unigram entropy {nats:.4f} nats, the loss of a model that knows nothing of order"
    documents = f" in {index['documents']:,} documents" if "documents" in index else ""  # special tokens end them
    packed = "" if fill == 1 else f", packed to {fill:.1%}"
    logger.info(
        f"data     {source.name}: {share:.2%} of the sequences; {index['tokens']:,} tokens{documents}{packed} "
        f"({', '.join(str(part.folder) for part in store.parts)}){entropy}"
    )


def report_end(
    config: Config,
    *,
    steps: int,
    folder: RunFolder,
    checkpoints: Storage,
    resumed_at: int,
    stopped: RunStopped | None,
    seconds: Mapping[str, float],
) -> None:
    """Log the last lines of a run: where its results are, its time, and how a stopped one resumes.

    Args:
        resumed_at: step at which this start resumed.
        seconds: of this start, by phase.
    """
    titanlite = shell_command("titanlite")
    resume = f"{titanlite} train {shlex.quote(str(folder.path / 'config.toml'))}"
    done = manifests.committed_steps(checkpoints.list())
    if isinstance(stopped, StoppedBySignal):
        newest = f"step {done[-1]} is saved in {checkpoints.url}" if done else "no checkpoint"
        if not config.checkpoint.enable:
            newest = f"no checkpoint was asked for{f'; {newest}' if done else ''}"
        logger.info(f"{stopped}; {newest}; the same command resumes (exit code {STOPPED})")
        logger.info(f"  time         {format_phases(seconds)}")
        logger.info(f"  resume       {resume}")
        return
    if stopped:
        logger.info(f"stopped: the skipped steps are in {folder.records('skipped')}, with the sequences in question")
        logger.info(f"  the last step taken is {stopped.taken}")
        logger.info(f"  time         {format_phases(seconds)}")
        if done:
            logger.info(f"  checkpoints  {checkpoints.url} ({', '.join(map(str, done))})")
        if isinstance(stopped, SpikeFound):
            more = 2 * max(1, config.guard.max_rollbacks)
            logger.info(f"  to go back more often: the same command with --guard.max_rollbacks={more}")
        elif config.guard.nonfinite == "stop" and done and not config.optimizer.in_backward:
            logger.info("  to skip such steps and resume: the same command with --guard.nonfinite=skip")
        return
    steps = max(steps, resumed_at)
    lines = [
        "",
        f"{config.job.name}: {steps} steps done" + (f", from step {resumed_at} on" if resumed_at else ""),
        f"  time         {format_phases(seconds)}",
        f"  checkpoints  {checkpoints.url} ({', '.join(map(str, done))})" if done else "  no checkpoint was asked for",
        f"  metrics      {folder.records('metrics')}",
        f"  config       {folder.path / 'config.toml'}, versions and commit in run.json beside it",
        *([f"  profile      {folder.path / 'profile'}"] if (folder.path / "profile").is_dir() else []),
    ]
    for line in lines:
        logger.info(line)


def report_next(config: Config, *, steps: int, folder: RunFolder, has_checkpoint: bool) -> None:
    """Log commands that can follow a complete run.

    Args:
        steps: that the run has done.
    """
    titanlite, path = shell_command("titanlite"), shlex.quote(str(folder.path))
    needs = "" if find_spec("plotly") else f", after {install_hint('report')}"
    length = config.training.length
    more = f"--training.{length}={2 * (steps if length == 'steps' else getattr(config.training, length))}"
    # What a checkpoint's config names of code is refused by commands unless the user names it.
    own = f" --model-file {shlex.quote(config.model.file)}" if config.model.file else ""
    if config.model.path and os.path.isdir(os.path.expanduser(config.model.path)):
        own = f" --config {shlex.quote(str(folder.path / 'config.toml'))}"
    lines = [
        "What next?",
        f"  report       {titanlite} report {path}{needs}",
        *([f"  sample       {titanlite} generate {path}{own} --prompt TEXT"] if has_checkpoint else []),
        f"  continue     {titanlite} train {shlex.quote(str(folder.path / 'config.toml'))} {more}",
        f"  another run  the same command with --job.name=second --optimizer.lr={config.optimizer.lr / 2:g}",
    ]
    for line in lines:
        logger.info(line)
