"""The keys of torchtitan 0.2, with their defaults there and their names here; the names in 0.2 of keys of 0.1; and
`translate`, for keys whose value changes or depends on other keys.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """What is known of a key of torchtitan."""

    default: Any
    """torchtitan's."""
    to: str = ""
    """Name of the key here; "" if it has no counterpart."""
    value_type: type | None = None
    """Type of its values; None: any."""
    note: str = ""
    """Why there is no counterpart, and what to do instead."""
    loses: bool = False
    """Whether training depends on the key where it has another value than its default, which does nothing."""


FLOAT8 = "quantize.linear.float8"
"""Section of float8, and a name of its converter. The other name is float8."""
MX = "quantize.linear.mx"
SAME: dict[str, dict[str, Any]] = {
    "job": {"dump_folder": "outputs"},
    "model": {"name": "llama3", "flavor": "debugmodel"},
    "metrics": {"log_freq": 10},
    "profiling": {
        "enable_profiling": False, "enable_memory_snapshot": False, "profile_freq": 10, "profiler_active": 1,
        "profiler_warmup": 3,
    },
    "optimizer": {"name": "AdamW", "lr": 8e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
    "lr_scheduler": {"warmup_steps": 200, "decay_ratio": float, "decay_type": "linear", "min_lr_factor": 0.0},
    "training": {
        "local_batch_size": 8, "global_batch_size": -1, "seq_len": 2048, "max_norm": 1.0, "steps": 10000,
        "dtype": "float32", "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32",
        "enable_cpu_offload": False,
    },
    "parallelism": {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "context_parallel_degree": 1,
        "tensor_parallel_degree": 1, "expert_parallel_degree": 1, "fsdp_reshard_after_forward": "default",
        "pipeline_parallel_degree": 1, "pipeline_parallel_schedule": "1F1B", "pipeline_parallel_layers_per_stage": int,
        "module_fqns_per_model_part": list,
        "pipeline_parallel_first_stage_less_layers": 1, "pipeline_parallel_last_stage_less_layers": 1,
    },
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
    "compile": {"enable": False},
    "checkpoint": {
        "enable": False, "folder": "checkpoint", "load_step": -1, "interval": 500, "async_mode": "disabled",
        "keep_latest_k": 10, "last_save_in_hf": False, "export_dtype": "float32", "initial_load_path": str,
    },
    "validation": {"enable": False, "freq": 10},
    "comm": {"init_timeout_seconds": int, "train_timeout_seconds": int},
    FLOAT8: {
        "enable_fsdp_float8_all_gather": False, "precompute_float8_dynamic_scale_for_fsdp": False, "recipe_name": str,
        "filter_fqns": [], "emulate": False,
    },
    "debug": {"seed": int, "deterministic": False},
}  # fmt: skip
"""Keys with the same name here, by section: torchtitan's default, or the type of a key that has none."""

OTHERS: dict[str, tuple[str, Any]] = {
    "metrics.enable_tensorboard": ("metrics.loggers", False),
    "parallelism.pipeline_parallel_microbatch_size": ("training.local_batch_size", 1),
    "metrics.enable_wandb": ("metrics.loggers", False),
    "model.tokenizer_path": ("data.tokenizer", str),
    "model.hf_assets_path": ("data.tokenizer", "./tests/assets/tokenizer"),
    "hf_transformers.model": ("model.path", str),
    "model.converters": (f"{FLOAT8}.enable", []),
    f"{MX}.recipe_name": (f"{FLOAT8}.recipe_name", "mxfp8_cublas"),
    f"{MX}.filter_fqns": (f"{FLOAT8}.filter_fqns", ["output"]),
    "training.dataset": ("data.path", "c4_test"),
    "training.dataset_path": ("data.path", str),
    "training.dataloader.num_workers": ("data.num_workers", 0),
    "training.seed": ("debug.seed", int),
    "training.deterministic": ("debug.deterministic", False),
    "checkpoint.initial_load_in_hf": ("checkpoint.initial_load_path", False),
    "checkpoint.initial_load_model_only": ("checkpoint.initial_load", True),
    "validation.dataset": ("validation.path", "c4_validation"),
    "validation.dataset_path": ("validation.path", str),
    "validation.local_batch_size": ("validation.sequences", 8),
    "validation.steps": ("validation.sequences", -1),
}  # fmt: skip
"""Keys with another name here: that name, and torchtitan's default, or the type of a key that has none."""

LOSES: dict[str, tuple[Any, str]] = {
    "the schedule always spans training.steps": (None, "lr_scheduler: total_steps"),
    "titanlite has no such axis: use FSDP, HSDP, context, expert, tensor or pipeline parallelism, and activation "
    "checkpointing or training.enable_cpu_offload where memory is short":
        (1, "parallelism: expert_tensor_parallel_degree"),
    "a schedule is one of PyTorch's: set parallelism.pipeline_parallel_schedule":
        ("", "parallelism: pipeline_parallel_schedule_csv"),
    "model.file names a model of your own; what else this code does is lost":
        ("", "job: custom_config_module; experimental: custom_import custom_args_module"),
    "optimizer.in_backward = true does this, if training.max_norm is 0 and nothing is accumulated":
        (False, "optimizer: early_step_in_backward"),
    "a run resumes all of its checkpoint; checkpoint.initial_load takes parts of another one":
        ([], "checkpoint: exclude_from_loading"),
    "the number of processes is fixed, and they synchronize in each step": (False, "fault_tolerance: enable"),
    "experts are balanced by the router's counts":
        (False, "debug: moe_force_load_balance; training: debug_moe_force_load_balance"),
}  # fmt: skip
"""Keys without a counterpart on which training depends unless they have this value, by what to do instead."""

DROPS = """
    compile: components backend;
    profiling: save_traces_folder save_memory_snapshot_folder;
    job: print_config save_config_file description config_file;
    metrics: save_tb_folder save_for_all_ranks disable_color_printing;
    model: print_after_conversion;
    optimizer: implementation;
    training: gc_freq gc_debug;
    parallelism: enable_compiled_autograd pipeline_parallel_expert_parallel_overlap expert_parallel_comm_backend
        context_parallel_rotate_method context_parallel_load_balancer disable_loss_parallel
        enable_async_tensor_parallel;
    checkpoint: create_seed_checkpoint enable_first_step_checkpoint last_save_model_only load_only
        enable_ft_dataloader_checkpoints initial_load_in_hf_quantized;
    training.dataloader: persistent_workers pin_memory prefetch_factor;
    validation.dataloader: num_workers persistent_workers pin_memory prefetch_factor;
    activation_checkpoint: early_stop memory_budget per_op_sac_force_recompute_mm_shapes_by_fqns
        visualize_memory_budget_pareto preserve_rng_state determinism_check debug;
    quantize.grouped_mm.float8: fqns;
    quantize.linear.mx: mxfp8_dim1_cast_kernel_choice;
    quantize.grouped_mm.mx: recipe_name fqns;
    comm: trace_buf_size save_traces_folder save_traces_file_prefix mode;
    memory_estimation: enable disable_fake_mode;
    fault_tolerance: replica_id process_group process_group_timeout_ms group_size min_replica_size
        semi_sync_method sync_steps should_quantize fragment_sync_delay fragment_update_alpha
        module_fqns_per_model_fragment num_fragments;
    validation: seq_len;
    debug: deterministic_warn_only
"""
"""Keys without a counterpart on which training does not depend, by section."""


def _keys(text: str) -> Iterator[str]:
    """Yield the dotted keys of "section: name name; section: name"."""
    for group in text.split(";"):
        section, _, names = group.partition(":")
        yield from (f"{section.strip()}.{name}" for name in names.split())


_SAME = {
    f"{section}.{name}": (f"{section}.{name}", default)
    for section, keys in SAME.items()
    for name, default in keys.items()
}
RULES: dict[str, Rule] = {
    **{
        key: Rule(None, to, default) if isinstance(default, type) else Rule(default, to, type(default))
        for key, (to, default) in (_SAME | OTHERS).items()
    },
    **{
        key: Rule(default, "", type(default) if default is not None else None, note, loses=True)
        for note, (default, keys) in LOSES.items()
        for key in _keys(keys)
    },
    **{key: Rule(None, note="has no counterpart, and training does not depend on it") for key in _keys(DROPS)},
}
RULES["compile.components"] = RULES["compile.components"]._replace(default=["model", "loss"], value_type=list)

TRANSFORMERS = "transformers_modeling_backend"
RENAMED_IN_0_2 = {
    "job.print_args": "job.print_config",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.compile": "compile.enable",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "memory_estimation.enabled": "memory_estimation.enable",
    **{key.removeprefix("quantize.linear."): key for key in RULES if key.startswith(f"{FLOAT8}.")},
}
"""Names in torchtitan 0.2 of the keys that 0.1 alone has."""
TOKENIZER_OF_0_1 = "./torchtitan/datasets/tokenizer/tokenizer.model"

C4_SPLITS = {"c4": "train", "c4_validation": "validation"}
OPTIMIZERS: tuple[str, ...] = ("Adam", "AdamW")
"""The optimizers that torchtitan has."""
SOFTMAX_EXPERTS = {
    "softmax_scores": True, "n_shared_experts": 2, "n_groups": 1, "n_active_groups": 1, "routed_scaling_factor": 1.0,
    "balance_rate": 5e-3, "q_rank": 0, "norm_eps": 1e-5,
}  # fmt: skip
"""Arguments of the models of DeepSeek-V2, which torchtitan has as flavors of deepseek_v3."""
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"llama3/{size}": ("llama3", size, {}) for size in ("8B", "70B", "405B")},
    **{f"qwen3/{size}": ("qwen3", size, {}) for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    "qwen3/30B-A3B": ("qwen3_moe", "30B-A3B", {}),
    "qwen3/235B-A22B": ("qwen3_moe", "235B-A22B", {"rope_theta": 5e6}),
    "llama3/debugmodel": ("llama3", "debug", {
        "dim": 256, "n_heads": 16, "n_kv_heads": 16, "hidden_dim": 768, "rope_theta": 5e5, "rope_scaling_factor": 8.0,
    }),
    "qwen3/debugmodel": ("qwen3", "debug", {
        "n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "hidden_dim": 3072, "head_dim": 128, "rope_theta": 1e6,
    }),
    "deepseek_v3/debugmodel": ("deepseek_v3", "debug", {
        "n_layers": 6, "n_heads": 16, "n_kv_heads": 16, "hidden_dim": 256, "dense_hidden_dim": 1024, "kv_rank": 512,
        "nope_dim": 128, "rope_dim": 64, "v_dim": 128, "n_active_experts": 3, **SOFTMAX_EXPERTS,
    }),
    "deepseek_v3/16B": ("deepseek_v3", "Moonlight-16B-A3B", {
        "rope_theta": 1e4, "dense_hidden_dim": 10944, "vocab_size": 102400, **SOFTMAX_EXPERTS,
    }),
    "deepseek_v3/671B": ("deepseek_v3", "671B", {"norm_eps": 1e-5}),
    "gpt_oss/debugmodel": ("gpt_oss", "debug", {
        "n_heads": 64, "n_kv_heads": 8, "hidden_dim": 2880, "n_active_experts": 4, "rope_theta": 1.5e5,
        "rope_scaling_factor": 32.0, "window": 128, "vocab_size": 201088, "balance_rate": 5e-3,
    }),
    "gpt_oss/20b": ("gpt_oss", "20B", {}),
    "gpt_oss/120b": ("gpt_oss", "120B", {}),
    "transformers_modeling_backend/debugmodel": ("transformers", "", {
        "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 16, "intermediate_size": 768, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    }),
    "transformers_modeling_backend/full": ("transformers", "", {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128,
        "intermediate_size": 11008, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    }),
    "qwen3/debugmodel_moe": ("qwen3_moe", "debug", {
        "n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "hidden_dim": 768, "head_dim": 128, "n_experts": 64,
        "n_active_experts": 8, "rope_theta": 1e6,
    }),
}  # fmt: skip
"""Family and flavor here of each of torchtitan's models, and the arguments that make it the same model."""
VOCABULARIES = {"llama3": 128256, "qwen3": 151936, "deepseek_v3": 129280, "gpt_oss": 201088}
DEBUG_VOCABULARY = 2048
FAMILIES = {shape.partition("/")[0] for shape in SHAPES}
MASKS_DOCUMENTS = ("deepseek_v3/16B", "deepseek_v3/671B")
"""Models that attend within documents although their flavor names no kernel."""


@dataclass(frozen=True)
class OldConfig:
    """A config of torchtitan; keys that it lacks have torchtitan's defaults."""

    given: dict[str, Any]
    world_size: int | None = None
    is_0_1: bool = False

    def __getitem__(self, key: str) -> Any:
        return self.given.get(key, RULES[key].default)

    @property
    def is_pipeline(self) -> bool:
        return self["parallelism.pipeline_parallel_degree"] > 1

    @property
    def model_parallel_degree(self) -> int:
        """Number of ranks that read the same data."""
        axes = ("tensor", "pipeline", "context")
        tensor, pipeline, context = (max(1, self[f"parallelism.{axis}_parallel_degree"]) for axis in axes)
        return tensor * pipeline * context

    @property
    def data_parallel_degree(self) -> int | None:
        """Number of ranks that read different data; None if the number of processes is not known."""
        return self.world_size and self.world_size // self.model_parallel_degree

    @property
    def base_flavor(self) -> str:
        """The flavor without its ending that names a kernel. With that ending, attention is within documents."""
        return re.sub(r"_(flex|varlen)(_attn)?$", "", self["model.flavor"])

    @property
    def float8(self) -> bool:
        return any(name in ("float8", FLOAT8) for name in self["model.converters"])

    @property
    def mxfp8(self) -> bool:
        return MX in self["model.converters"] and not self.float8


class Outcome(NamedTuple):
    """Translation of a value: settings of titanlite, a remark, and whether training changes all the same."""

    writes: dict[str, Any]
    note: str = ""
    lost: bool = False


def translate(key: str, value: Any, old: OldConfig) -> Outcome:
    """Return the translation of a key and its value: another name, except for the keys below."""
    rule, note, lost = RULES[key], "", False
    to, nothing = rule.to, "does nothing at this value"
    if not to:
        off = value == rule.default or (rule.default == 1 and value < 1)  # a degree below 1 is 1
        off = off or (key == "lr_scheduler.total_steps" and value == old["training.steps"])
        return Outcome({}, nothing if off and rule.loses else rule.note, lost=rule.loses and not off)
    match key:
        case "training.dataset_path" | "validation.dataset_path" | "validation.local_batch_size":
            return Outcome({}, f"is part of {to}")
        case "training.global_batch_size" if value <= 0:
            local, ranks = old["training.local_batch_size"], old.data_parallel_degree
            if not ranks:
                note = f"means {local} for each data parallel rank: migrate with --world-size N, or set it yourself"
                return Outcome({}, note, lost=True)
            value, note = local * ranks, f"{local} for each of {ranks} ranks"
        case "parallelism.tensor_parallel_degree" | "parallelism.pipeline_parallel_degree":
            value = max(1, value)
        case "parallelism.pipeline_parallel_microbatch_size":
            return Outcome({}, f"is {to}" if old.is_pipeline else "does nothing without a pipeline")
        case "parallelism.module_fqns_per_model_part" if not old.is_pipeline:
            return Outcome({}, "does nothing without a pipeline")
        case _ if key.startswith("parallelism.pipeline_parallel_") and not old.is_pipeline:
            return Outcome({}, "does nothing without a pipeline")
        case "training.local_batch_size" if old.is_pipeline:
            value = old["parallelism.pipeline_parallel_microbatch_size"]
            note = "parallelism.pipeline_parallel_microbatch_size: what passes through the stages at once"
        case "metrics.enable_tensorboard" | "metrics.enable_wandb":
            value = [name for name in ("tensorboard", "wandb") if old[f"metrics.enable_{name}"]]
        case _ if key.startswith("profiling."):
            if not (old["profiling.enable_profiling"] or old["profiling.enable_memory_snapshot"]):
                return Outcome({}, "does nothing while profiling is off")
            if old["profiling.profile_freq"] > old["training.steps"]:
                return Outcome({}, "no window ends within training.steps")
        case "lr_scheduler.warmup_steps":
            value = min(value, old["training.steps"])  # torchtitan cuts it to that
        case "model.name":
            if value not in FAMILIES:
                note = (
                    "not the same here: see titanlite/models for what there is, or name a file of yours in model.file"
                )
                lost = True
            if value == TRANSFORMERS and not old["hf_transformers.model"]:
                note, lost = "hf_transformers.model names no model", True
            value, _, _ = SHAPES.get(f"{value}/{old.base_flavor}", (value, "", {}))
            if value in ("qwen3_moe", "gpt_oss") or (value == "deepseek_v3" and old.base_flavor != "671B"):
                note = "the bias that balances experts is added to the router's logits here, and to its probabilities "
                note += "there (model.args.balance_rate)"
        case "model.flavor":
            return _flavor(value, old)
        case "hf_transformers.model":
            if not value or old["model.name"] != TRANSFORMERS:
                return Outcome({}, nothing)
            note = "a folder with its config.json: fetch it from the hub, and set model.args.vocab_size to its own"
        case "model.hf_assets_path" if old["model.tokenizer_path"]:
            return Outcome({}, "model.tokenizer_path goes before it")
        case "model.converters":
            others = [str(name) for name in value if name not in ("float8", FLOAT8, MX if old.mxfp8 else "")]
            notes = [f"no counterpart of {', '.join(others)}"] if others else []
            value, note, lost = old.float8 or old.mxfp8, "; ".join(notes), bool(notes)
        case "quantize.linear.mx.recipe_name" | "quantize.linear.mx.filter_fqns" if not old.mxfp8:
            return Outcome({}, f"does nothing without the converter {MX} alone")
        case "quantize.linear.mx.recipe_name":
            note = "" if value.endswith("rceil") else "scales are rounded up here, as those of mxfp8_cublas_rceil"
            return Outcome({to: "mxfp8", f"{FLOAT8}.skip_small": False}, note, lost=not value.startswith("mxfp8"))
        case "quantize.linear.float8.filter_fqns":
            # torchtitan leaves out small layers if this is among the names, by torchao's limits, which are ours too
            names = [name for name in value if name != "auto_filter_small_kn"]
            small = {f"{FLOAT8}.skip_small": names != value} if old.float8 else {}
            return Outcome({to: names, **small})
        case "optimizer.name" if value not in OPTIMIZERS:
            note, lost = "is not torchtitan's: give its arguments in optimizer.args", True
        case "training.dataset" | "validation.dataset":
            return _dataset(value, to, old[f"{key}_path"])
        case "validation.steps":
            batch, ranks = old["validation.local_batch_size"], old.data_parallel_degree
            if value >= 0 and not ranks:
                return Outcome({}, f"{to} = {value * batch} for each data parallel rank is the same")
            value, note = (value * batch * (ranks or 1), "") if value >= 0 else (0, "all there are")
        case "compile.enable":
            value = value and "model" in old["compile.components"]
        case "activation_checkpoint.mode" if value == "memory_budget":
            value, note = "selective", "the nearest; it costs memory or time, and changes no loss"
        case "activation_checkpoint.selective_ac_option":
            if old["activation_checkpoint.mode"] != "selective":
                return Outcome({}, "is for mode selective")
            value = int(value) if value.isdecimal() else value
        case "checkpoint.folder":
            if value == rule.default:
                return Outcome({}, "checkpoints are in the folder of the run, <dump_folder>/<name>/checkpoints")
            value = value if "://" in value else os.path.join(old["job.dump_folder"], value)
        case "checkpoint.load_step" if value <= 0:
            return Outcome({}, "the newest is the default")
        case "checkpoint.initial_load_in_hf":
            if not value or old["checkpoint.initial_load_path"]:
                return Outcome({}, f"{to} is recognized as what it is" if value else nothing)
            value = old["model.hf_assets_path"]
        case "checkpoint.initial_load_model_only":
            if not old["checkpoint.initial_load_path"]:
                return Outcome({}, "is for checkpoint.initial_load_path")
            note = "" if value else "of torchtitan's checkpoints the model alone is read; the optimizer begins anew"
            value, lost = ["model"], not value
    return Outcome({} if value is None else {to: value}, note, lost)


def _flavor(value: str, old: OldConfig) -> Outcome:
    base, name = old.base_flavor, old["model.name"]
    shape = SHAPES.get(f"{name}/{base}")
    if shape is None and name in FAMILIES:
        known = ", ".join(shape.partition("/")[2] for shape in SHAPES if shape.startswith(f"{name}/"))
        note = f"no such shape of {name} is the same here (there are {known}): give its sizes in model.args"
        return Outcome({"model.flavor": value}, note, lost=True)
    _, flavor, args = shape or (name, value, {})
    note, lost = "", False
    if old.is_0_1 and name == "llama3":
        args = args | {"rope_scaling_factor": 1.0}
        note = "the tokenizer gives the vocabulary's size, as in 0.1, rounded up to a multiple of 128"
    elif shape and name in VOCABULARIES:  # the flavor gave the vocabulary's size, whatever the tokenizer
        args = {"vocab_size": DEBUG_VOCABULARY if flavor == "debug" else VOCABULARIES[name], **args}
    if name == "deepseek_v3":  # yarn is for sequences of more than 4,096 tokens there, and for all or none here
        is_long = old["training.seq_len"] > 4096
        args = args | {"rope_scaling_factor": 40.0 if is_long else 1.0}
        if is_long and args.get("softmax_scores"):
            note, lost = "the scale of attention for sequences of more than 4,096 tokens (mscale) is another one", True
    writes = {"model.flavor": flavor} if flavor else {}
    writes |= {f"model.args.{field}": size for field, size in args.items()}
    masks = base != value or f"{name}/{base}" in MASKS_DOCUMENTS
    return Outcome(writes | ({"data.document_mask": True} if masks else {}), note, lost)


def _dataset(value: str, to: str, path: str | None) -> Outcome:
    name = value.lower()
    if name == "c4_test":
        note = "" if path else "a folder of torchtitan's checkout: copy it, or name other text"
        return Outcome({to: path or "tests/assets/c4_test"}, note)
    if name not in C4_SPLITS:
        note = "is made by code of yours: name its files, and the field of their text in data.text_field"
        return Outcome({to: path or value}, note, lost=True)
    path = path or "allenai/c4"
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) or os.path.exists(path):
        return Outcome({to: path})
    note = "all of it is fetched and made into tokens first, where torchtitan streams"
    return Outcome({to: f"hf://{path}:en:{C4_SPLITS[name]}"}, note)
