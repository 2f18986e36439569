"""Checks of techniques that exclude each other, or that need another option. Never imports torch."""

import importlib.util
from collections.abc import Iterator

from titanlite.schema import Config, Lora

Conflict = tuple[str, str]  # dotted key, what is wrong


def check_in_backward(config: Config) -> Iterator[Conflict]:
    optimizer, key = config.optimizer, "optimizer.in_backward"
    if not optimizer.in_backward:
        return
    if config.training.max_norm:
        yield (
            key,
            "updates parameters before the norm of all gradients is known: set training.max_norm = 0 (no clipping)",
        )
    if "Muon" in [group.name or optimizer.name for group in optimizer.groups or [optimizer]]:
        yield (
            key,
            "updates parameters one by one, and Muon updates matrices of all ranks together: choose one of the two",
        )
    if config.guard.nonfinite == "skip":
        yield key, 'cannot skip a step that has begun: set guard.nonfinite = "stop"'
    if config.guard.spike_sigma:
        yield key, "cannot skip a step that has begun: set guard.spike_sigma = 0"


def check_profiling(config: Config) -> Iterator[Conflict]:
    """Find windows that overlap, and windows that never open."""
    profiling, key = config.profiling, "profiling.profile_freq"
    if not profiling.is_used:
        return
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        yield (
            key,
            f"{profiling.profile_freq} steps are too few for profiler_warmup + profiler_active = {needed}: set it to "
            f"{needed} or more",
        )
    elif config.training.epochs is None and profiling.profile_freq > config.training.steps:
        yield (
            key,
            f"no window ends within the {config.training.steps} steps of the run: set it to "
            f"{config.training.steps} or less",
        )


def check_reduce_gradients(config: Config) -> Iterator[Conflict]:
    dtypes = {config.training.mixed_precision_param, config.training.mixed_precision_reduce}
    if config.parallelism.fsdp_reduce_gradients == "last" and dtypes == {"bfloat16"}:
        yield (
            "parallelism.fsdp_reduce_gradients",
            "last would add the gradients of micro-batches in bfloat16: set training.mixed_precision_reduce = "
            '"float32", or "each"',
        )


def check_expert_parallel(config: Config) -> Iterator[Conflict]:
    if config.parallelism.expert_parallel_degree > 1 and config.parallelism.fsdp_min_unit_params:
        yield (
            "parallelism.fsdp_min_unit_params",
            "cannot be combined with parallelism.expert_parallel_degree, whose experts are units of their own: leave "
            "it out",
        )
    keep = config.parallelism.fsdp_reshard_after_forward
    if config.parallelism.expert_parallel_degree > 1 and isinstance(keep, int):
        yield (
            "parallelism.fsdp_reshard_after_forward",
            f"{keep} cannot be combined with parallelism.expert_parallel_degree: set it to always or never",
        )


def check_tensor(config: Config) -> Iterator[Conflict]:
    key = "parallelism.tensor_parallel_degree"
    if config.parallelism.tensor_parallel_degree == 1:
        return
    refused = {
        "quantize.linear.float8.enable": config.quantize.linear.float8.enable,
        "lora.rank": config.lora.rank is not None,
        "teacher.path": config.teacher.is_set,
        "training.loss": config.training.loss is not None,
    }
    for other, is_set in refused.items():
        if is_set:
            yield key, f"cannot be combined with {other} yet: set it to 1, or leave that out"
    keep = config.parallelism.fsdp_reshard_after_forward
    if isinstance(keep, int) and keep > 1:
        yield "parallelism.fsdp_reshard_after_forward", f"FSDP2 cannot combine {keep} with {key}: set default"


def check_float8(config: Config) -> Iterator[Conflict]:
    float8 = config.quantize.linear.float8
    if not float8.enable:
        return
    if importlib.util.find_spec("torchao") is None:
        from titanlite.runtime.console import install_hint

        yield "quantize.linear.float8.enable", f"needs torchao: {install_hint('float8')}"
    keep = config.parallelism.fsdp_reshard_after_forward
    gathers_float8 = float8.enable_fsdp_float8_all_gather and float8.recipe_name == "tensorwise"
    if gathers_float8 and isinstance(keep, int) and keep > 1:
        other = "quantize.linear.float8.enable_fsdp_float8_all_gather"
        yield "parallelism.fsdp_reshard_after_forward", f"FSDP2 cannot combine {keep} with {other}: set that to false"
    if not config.compile.enable and not float8.emulate:
        yield "quantize.linear.float8.enable", "is slower than bfloat16 without compile.enable = true"


def check_float16(config: Config) -> Iterator[Conflict]:
    if config.training.mixed_precision_param != "float16":
        return
    refused = {
        'training.dtype = "bfloat16"': config.training.dtype != "float32",
        "optimizer.in_backward": config.optimizer.in_backward,
        "quantize.linear.float8.enable": config.quantize.linear.float8.enable,
        "lora.quantize_base": config.lora.quantize_base != "none",
    }
    for other, is_set in refused.items():
        if is_set:
            yield "training.mixed_precision_param", f"float16 cannot be combined with {other}: choose one of the two"


def check_lora(config: Config) -> Iterator[Conflict]:
    lora, optimizer = config.lora, config.optimizer
    if lora.rank is None:
        if lora != Lora():
            yield "lora.rank", "is not set, and without it [lora] has no effect: set it, for example to 16"
        return
    if config.freeze.parameters:
        yield "freeze.parameters", "has no effect with lora.rank, which freezes all but the adapters: leave it out"
    if config.quantize.linear.float8.enable:
        yield (
            "quantize.linear.float8.enable",
            "cannot convert layers with adapters: set it to false, or leave out lora.rank",
        )
    if "Muon" in [group.name or optimizer.name for group in optimizer.groups or [optimizer]]:
        yield (
            "optimizer.name",
            "Muon is for whole matrices, and an adapter is two narrow ones: use AdamW with lora.rank",
        )
