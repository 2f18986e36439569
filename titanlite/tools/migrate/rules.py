"""The keys of torchtitan 0.1 and 0.2, their defaults there, and what becomes of each one here. Data for `migrate`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titanlite.tools.migrate import translate as t
from titanlite.tools.migrate.translate import FLOAT8, Convert, Old, Outcome


@dataclass(frozen=True)
class Rule:
    default: Any
    value_type: type | None
    """Type of its values; None for any."""
    convert: Convert
    to: str = ""
    """The key of titanlite."""
    note: str = ""
    """Reason that there is none, and what to do instead."""
    loses: bool = False
    """True if training changes without the key, unless it has its default, which does nothing."""


def _to(to: str, default: Any, convert: Convert | None = None, value_type: type | None = None) -> Rule:
    def same(value: Any, old: Old) -> Outcome:
        return Outcome({} if value is None else {to: value})

    return Rule(default, value_type or type(default), convert or same, to)


def _part_of(to: str, default: Any, value_type: type) -> Rule:
    return Rule(default, value_type, lambda value, old: Outcome({}, f"is part of {to}"), to)


def _lose(default: Any, note: str) -> Rule:
    def convert(value: Any, old: Old) -> Outcome:
        off = value == default or (default == 1 and value < 1)  # of degrees
        return Outcome({}, "does nothing at this value") if off else Outcome({}, note, lost=True)

    return Rule(default, type(default), convert, note=note, loses=True)


def _drop(note: str) -> Rule:
    return Rule(None, None, lambda value, old: Outcome({}, note), note=note)


COMPONENTS = "the model's blocks are compiled and the loss is not; compile.enable is false if this does not name model"

SAME: dict[str, dict[str, Any]] = {
    "job": {"dump_folder": "outputs"},
    "metrics": {"log_freq": 10},
    "optimizer": {"lr": 8e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
    "lr_scheduler": {"decay_type": "linear", "min_lr_factor": 0.0},
    "training": {
        "local_batch_size": 8, "seq_len": 2048, "max_norm": 1.0, "steps": 10000, "enable_cpu_offload": False,
        "dtype": "float32", "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32",
    },
    "parallelism": {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "context_parallel_degree": 1,
        "expert_parallel_degree": 1, "fsdp_reshard_after_forward": "default",
    },
    "checkpoint": {
        "enable": False, "interval": 500, "async_mode": "disabled", "keep_latest_k": 10,
        "last_save_in_hf": False, "export_dtype": "float32",
    },
    "validation": {"enable": False, "freq": 10},
    "debug": {"deterministic": False},
}  # fmt: skip
"""Same name, same meaning: torchtitan's defaults, by section."""

CONVERTED: dict[str, Rule] = {
    "metrics.enable_tensorboard": _to("metrics.loggers", False, t.loggers),
    "parallelism.tensor_parallel_degree": _to("parallelism.tensor_parallel_degree", 1, t.degree),
    "metrics.enable_wandb": _to("metrics.loggers", False, t.loggers),
    "model.name": _to("model.name", "llama3", t.model),
    "model.flavor": _to("model.flavor", "debugmodel", t.flavor),
    "model.tokenizer_path": _to("data.tokenizer", None, t.tokenizer, str),
    "model.hf_assets_path": _to("data.tokenizer", "./tests/assets/tokenizer", t.assets),
    "model.converters": _to("quantize.linear.float8.enable", [], t.converters),
    "optimizer.name": _to("optimizer.name", "AdamW", t.optimizer),
    "lr_scheduler.warmup_steps": _to("lr_scheduler.warmup_steps", 200, t.warmup),
    "lr_scheduler.decay_ratio": _to("lr_scheduler.decay_ratio", None, value_type=float),
    "lr_scheduler.lr_min": _to("lr_scheduler.min_lr_factor", 0.0),
    "lr_scheduler.total_steps": Rule(None, int, t.total_steps, note=t.SPAN, loses=True),
    "training.global_batch_size": _to("training.global_batch_size", -1, t.global_batch),
    "training.dataset": _to("data.path", "c4_test", t.dataset("data.path", "training.dataset_path")),
    "training.dataset_path": _part_of("data.path", None, str),
    "training.dataloader.num_workers": _to("data.num_workers", 0),
    "training.compile": _to("compile.enable", False, t.compile_model),
    "training.seed": _to("debug.seed", None, value_type=int),
    "training.deterministic": _to("debug.deterministic", False),
    "debug.seed": _to("debug.seed", None, value_type=int),
    "compile.enable": _to("compile.enable", False, t.compile_model),
    "compile.components": Rule(["model", "loss"], list, lambda value, old: Outcome({}, COMPONENTS), note=COMPONENTS),
    "activation_checkpoint.mode": _to("activation_checkpoint.mode", "selective", t.checkpointing),
    "activation_checkpoint.selective_ac_option": _to("activation_checkpoint.selective_ac_option", "2", t.selective),
    "checkpoint.enable_checkpoint": _to("checkpoint.enable", False),
    "checkpoint.folder": _to("checkpoint.folder", "checkpoint", t.folder),
    "checkpoint.load_step": _to("checkpoint.load_step", -1, t.load_step),
    "checkpoint.initial_load_path": _to("checkpoint.initial_load_path", None, value_type=str),
    "checkpoint.initial_load_in_hf": _to("checkpoint.initial_load_path", False, t.initial_in_hf),
    "checkpoint.initial_load_model_only": _to("checkpoint.initial_load", True, t.initial_parts),
    "checkpoint.initial_load_model_weights_only": _to("checkpoint.initial_load", True, t.initial_parts),
    "profiling.enable_profiling": _to("profiling.enable_profiling", False, t.profiling("enable_profiling")),
    "profiling.enable_memory_snapshot": _to(
        "profiling.enable_memory_snapshot", False, t.profiling("enable_memory_snapshot")
    ),
    "profiling.profile_freq": _to("profiling.profile_freq", 10, t.profiling("profile_freq")),
    "profiling.profiler_active": _to("profiling.profiler_active", 1, t.profiling("profiler_active")),
    "profiling.profiler_warmup": _to("profiling.profiler_warmup", 3, t.profiling("profiler_warmup")),
    "comm.init_timeout_seconds": _to("comm.init_timeout_seconds", None, value_type=int),
    "comm.train_timeout_seconds": _to("comm.train_timeout_seconds", None, value_type=int),
    "validation.dataset": _to(
        "validation.path", "c4_validation", t.dataset("validation.path", "validation.dataset_path")
    ),
    "validation.dataset_path": _part_of("validation.path", None, str),
    "validation.local_batch_size": _part_of("validation.sequences", 8, int),
    "validation.steps": _to("validation.sequences", -1, t.validation_steps),
    **{
        f"{section}.enable_fsdp_float8_all_gather": _to(f"{FLOAT8[1]}.enable_fsdp_float8_all_gather", False)
        for section in FLOAT8
    },
    **{
        f"{section}.precompute_float8_dynamic_scale_for_fsdp": _to(
            f"{FLOAT8[1]}.precompute_float8_dynamic_scale_for_fsdp", False
        )
        for section in FLOAT8
    },
    **{f"{section}.recipe_name": _to(f"{FLOAT8[1]}.recipe_name", None, value_type=str) for section in FLOAT8},
    **{f"{section}.filter_fqns": _to(f"{FLOAT8[1]}.filter_fqns", [], t.float8_filter) for section in FLOAT8},
    **{f"{section}.emulate": _to(f"{FLOAT8[1]}.emulate", False) for section in FLOAT8},
}

LOSES: dict[str, tuple[Any, str]] = {
    "titanlite has no such axis: use FSDP, HSDP, context, expert or tensor parallelism, and activation checkpointing "
    "or training.enable_cpu_offload where memory is short": (
        1,
        "parallelism: pipeline_parallel_degree expert_tensor_parallel_degree",
    ),
    "model.file names a model of your own; what else this code does is lost": (
        "",
        "job: custom_config_module; experimental: custom_import custom_args_module",
    ),
    "optimizer.in_backward = true does this, if training.max_norm is 0 and nothing is accumulated": (
        False,
        "optimizer: early_step_in_backward",
    ),
    "a run resumes all of its checkpoint; checkpoint.initial_load takes parts of another one": (
        [],
        "checkpoint: exclude_from_loading",
    ),
    "quantized weights are not read: take them in bfloat16": (False, "checkpoint: initial_load_in_hf_quantized"),
    "the number of processes is fixed, and they synchronize in each step": (False, "fault_tolerance: enable"),
    "experts are balanced by the router's counts": (
        False,
        "debug: moe_force_load_balance; training: debug_moe_force_load_balance",
    ),
}
"""No counterpart, and training changes unless the value is this one: by what to do instead."""

DROPS = {
    "profiles are in the folder of the run, in profile/": "profiling: save_traces_folder save_memory_snapshot_folder",
    "the resolved config is config.toml in the folder of the run; titanlite config show prints it":
        "job: print_args print_config save_config_file",
    "job.name names the run; comments describe it": "job: description config_file",
    "metrics.jsonl and tensorboard/ are in the folder of the run": "metrics: save_tb_folder save_for_all_ranks",
    "the log lists the float8 layers": "model: print_after_conversion",
    "is not needed here": """
        job: use_for_integration_test; metrics: disable_color_printing; optimizer: implementation;
        training: gc_freq gc_debug; parallelism: enable_compiled_autograd;
        checkpoint: create_seed_checkpoint enable_first_step_checkpoint""",
    "goes with a kind of parallelism that is not here": """
        parallelism:
        pipeline_parallel_split_points pipeline_parallel_layers_per_stage pipeline_parallel_schedule
        pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size pipeline_parallel_first_stage_less_layers
        pipeline_parallel_last_stage_less_layers pipeline_parallel_expert_parallel_overlap module_fqns_per_model_part
        expert_parallel_comm_backend context_parallel_rotate_method context_parallel_load_balancer""",
    "data.num_workers processes read ahead, and the loader decides the rest": """
        training.dataloader: persistent_workers pin_memory prefetch_factor;
        validation.dataloader: num_workers persistent_workers pin_memory prefetch_factor""",
    "the last checkpoint is as whole as any":
        "checkpoint: last_save_model_only last_save_model_weights_only",
    "a run saves what it trains; checkpoint.initial_load_path only reads": "checkpoint: load_only",
    "has no option here; it costs memory or time, and changes no loss": """
        activation_checkpoint: early_stop memory_budget
        per_op_sac_force_recompute_mm_shapes_by_fqns visualize_memory_budget_pareto preserve_rng_state determinism_check
        debug; compile: backend; parallelism: disable_loss_parallel enable_async_tensor_parallel;
        float8: force_recompute_fp8_weight_in_bwd""",
    "goes with a converter of model.converters that is not here": """
        mx: use_fp8_dim1_cast_triton_kernel recipe_name filter_fqns; quantize.grouped_mm.float8: fqns;
        quantize.linear.mx: mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns;
        quantize.grouped_mm.mx: recipe_name fqns""",
    "PyTorch's defaults hold": "comm: trace_buf_size save_traces_folder save_traces_file_prefix mode",
    "has no option: titanlite plan predicts the memory of a run": "memory_estimation: enabled enable disable_fake_mode",
    "goes with fault_tolerance.enable": """checkpoint: enable_ft_dataloader_checkpoints; fault_tolerance: replica_id
        process_group process_group_timeout_ms group_size min_replica_size semi_sync_method sync_steps should_quantize
        fragment_sync_delay fragment_update_alpha module_fqns_per_model_fragment num_fragments""",
    "validation sequences are as long as those of training": "validation: seq_len",
    "a deterministic run refuses what has no deterministic kernel": "debug: deterministic_warn_only",
}  # fmt: skip
"""No counterpart, and training does not change: by what there is instead."""


def _keys(text: str) -> Iterator[str]:
    for group in text.split(";"):
        section, _, names = group.partition(":")
        yield from (f"{section.strip()}.{name}" for name in names.split())


RULES: dict[str, Rule] = {
    **{
        f"{section}.{name}": _to(f"{section}.{name}", value)
        for section, keys in SAME.items()
        for name, value in keys.items()
    },
    **CONVERTED,
    **{key: _lose(default, note) for note, (default, keys) in LOSES.items() for key in _keys(keys)},
    **{key: _drop(note) for note, keys in DROPS.items() for key in _keys(keys)},
}

ONLY_IN = {
    "0.1": """float8. mx. job.use_for_integration_test job.print_args lr_scheduler.lr_min training.compile
        parallelism.pipeline_parallel_split_points checkpoint.enable_checkpoint memory_estimation.enabled
        checkpoint.initial_load_model_weights_only checkpoint.last_save_model_weights_only""",
    "0.2": """validation. compile. quantize. debug. training.dataloader. job.print_config model.hf_assets_path
        lr_scheduler.min_lr_factor training.dtype checkpoint.enable memory_estimation.enable
        checkpoint.initial_load_model_only checkpoint.last_save_model_only""",
}
"""Keys that only one version has; sections have a dot at their end."""
