"""Every option has a reason: a shipped config sets it, or the table below names who asks for it."""

import re

import pytest
import tomli

from titanlite.config.describe import tables
from titanlite.config.load import ConfigError, load
from titanlite.config.shipped import shipped_folder
from titanlite.migrate.rules import RULES

REASONS = {
    "base": "DESIGN 3",
    "job.dump_folder": "torchtitan",
    "job.name": "DESIGN 3",
    "job.max_failed_restarts": "issue 22",
    "data.sources": "users.md 7",
    "data.sources.N.path": "users.md 7",
    "data.sources.N.name": "users.md 7",
    "data.sources.N.weight": "users.md 7",
    "data.sources.N.epochs": "users.md 7",
    "data.add_bos": "users.md 3",
    "data.add_eos": "users.md 3",
    "data.text_field": "users.md 3",
    "data.chat_template": "issue 23",
    "data.shuffle": "torchtitan",
    "data.packing": "users.md 8",
    "data.document_mask": "users.md 8",
    "data.on_change": "users.md 7",
    "data.cache_folder": "users.md 4",
    "model.file": "users.md 20",
    "training.epochs": "users.md 6",
    "training.max_duration": "issue 22",
    "training.max_norm": "torchtitan",
    "training.loss": "issue 23",
    "training.z_loss": "issue 20",
    "training.dtype": "torchtitan",
    "training.mixed_precision_reduce": "torchtitan",
    "training.attention_backend": "issue 20",
    "training.enable_cpu_offload": "torchtitan",
    "guard.nonfinite": "users.md 24",
    "freeze.parameters": "issue 23",
    "freeze.dtype": "issue 23",
    "lora.rank": "issue 23",
    "lora.alpha": "issue 23",
    "lora.targets": "issue 23",
    "lora.quantize_base": "issue 23",
    "teacher.path": "issue 23",
    "teacher.cache": "issue 23",
    "teacher.config": "issue 23",
    "teacher.dtype": "issue 23",
    "teacher.fsdp_reshard_after_forward": "issue 23",
    "teacher.enable_cpu_offload": "issue 23",
    "distill.ratio": "issue 23",
    "distill.temperature": "issue 23",
    "distill.kind": "issue 23",
    "guard.max_consecutive_skips": "users.md 24",
    "guard.spike_sigma": "users.md 24",
    "parallelism.fsdp_reshard_after_forward": "torchtitan",
    "parallelism.fsdp_forward_prefetch": "DESIGN 3",
    "parallelism.fsdp_reduce_gradients": "issue 20",
    "parallelism.context_parallel_degree": "issue 25",
    "parallelism.expert_parallel_degree": "issue 25",
    "parallelism.tensor_parallel_degree": "issue 25",
    "parallelism.fsdp_backward_prefetch": "DESIGN 3",
    "activation_checkpoint.per_block": "issue 19",
    "quantize.linear.float8.enable": "torchtitan",
    "quantize.linear.float8.recipe_name": "torchtitan",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": "torchtitan",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": "torchtitan",
    "quantize.linear.float8.filter_fqns": "torchtitan",
    "quantize.linear.float8.skip_small": "users.md 27",
    "quantize.linear.float8.emulate": "torchtitan",
    "optimizer.name": "torchtitan",
    "optimizer.beta1": "torchtitan",
    "optimizer.beta2": "torchtitan",
    "optimizer.eps": "torchtitan",
    "optimizer.weight_decay": "torchtitan",
    "optimizer.state_dtype": "issue 20",
    "optimizer.in_backward": "issue 20",
    "optimizer.args": "users.md 26",
    "optimizer.groups": "users.md 26",
    "optimizer.groups.N.match": "users.md 26",
    "optimizer.groups.N.name": "users.md 26",
    "optimizer.groups.N.lr": "users.md 26",
    "optimizer.groups.N.weight_decay": "users.md 26",
    "optimizer.groups.N.args": "users.md 26",
    "offload.optimizer": "memory ladder",
    "offload.parameters": "memory ladder",
    "offload.path": "memory ladder",
    "lr_scheduler.decay_ratio": "torchtitan",
    "checkpoint.enable": "torchtitan",
    "checkpoint.folder": "torchtitan",
    "checkpoint.local_folder": "issue 22",
    "checkpoint.async_mode": "torchtitan",
    "checkpoint.keep_latest_k": "torchtitan",
    "checkpoint.keep_every": "users.md 10",
    "checkpoint.last_save_in_hf": "torchtitan",
    "checkpoint.export_every": "issue 21",
    "checkpoint.export_dtype": "torchtitan",
    "checkpoint.export_drop": "issue 21",
    "checkpoint.load_step": "torchtitan",
    "checkpoint.allow_changes": "users.md 11",
    "checkpoint.initial_load_path": "torchtitan",
    "checkpoint.initial_load": "users.md 12",
    "checkpoint.allow_missing": "users.md 12",
    "checkpoint.allow_unexpected": "users.md 12",
    "validation.sources": "users.md 35",
    "validation.sources.N.path": "users.md 35",
    "validation.sources.N.name": "users.md 35",
    "metrics.loggers": "issue 24",
    "metrics.loss_by_source": "issue 24",
    "profiling.enable_profiling": "torchtitan",
    "profiling.profile_freq": "torchtitan",
    "profiling.profiler_active": "torchtitan",
    "profiling.profiler_warmup": "torchtitan",
    "profiling.enable_memory_snapshot": "torchtitan",
    "metrics.layers.freq": "issue 24",
    "comm.init_timeout_seconds": "torchtitan",
    "comm.train_timeout_seconds": "torchtitan",
    "comm.compile_timeout_seconds": "issue 22",
    "comm.validation_timeout_seconds": "issue 22",
    "comm.save_timeout_seconds": "users.md 33",
    "debug.seed": "torchtitan",
    "debug.deterministic": "torchtitan",
}
"""Options that no shipped config sets: option -> who asks for it.

torchtitan: one of its options translates to this one, so its users look for it. users.md: the number of a line there.
DESIGN: a section. memory ladder: offloading to disk is its last rung (docs/memory.md).
"""
FORMS = r"torchtitan|users\.md ([1-9]|[12]\d|3[0-6])|issue (19|2\d)|DESIGN [1-7]|memory ladder"


def all_options() -> set[str]:
    return {option.key for table in tables() for option in table.options}


def set_by_shipped_configs() -> set[str]:
    """Dotted keys in the files of train_configs/. A table of free form, such as model.args, is one option."""
    options, found = all_options(), set[str]()

    def walk(tree: dict[str, object], prefix: str) -> None:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if key in options or not isinstance(value, dict):
                found.add(key)
            else:
                walk(value, f"{key}.")

    for file in shipped_folder().glob("*.toml"):
        walk(tomli.loads(file.read_text()), "")
    return found


def test_every_option_is_set_by_a_shipped_config_or_asked_for() -> None:
    options = all_options()
    assert sorted(options - set_by_shipped_configs() - REASONS.keys()) == [], "name in REASONS who asks for them"
    assert sorted(REASONS.keys() - options) == [], "reasons of options that are gone"
    assert len(options) <= 139


def test_reasons_hold() -> None:
    """A reason has one of the known forms; torchtitan's options are those that `config migrate` translates to."""
    assert [reason for reason in REASONS.values() if not re.fullmatch(FORMS, reason)] == []
    translated = {rule.to for rule in RULES.values()} | {"data.shuffle"}  # migrate writes it where data is set
    assert [option for option, reason in REASONS.items() if reason == "torchtitan" and option not in translated] == []


@pytest.mark.parametrize(
    ("removed", "near"),
    [
        ("checkpoint.interval_minutes=5", "did you mean checkpoint.interval?"),
        ("checkpoint.verify=size", ""),
        ("checkpoint.on_save_error=warn", ""),
        ("compile.cache_folder=x", "did you mean data.cache_folder?"),
        ("guard.spike_window=8", ""),
    ],
)
def test_removed_options_are_unknown_keys(removed: str, near: str) -> None:
    key = removed.partition("=")[0]
    with pytest.raises(ConfigError) as error:
        load(shipped_folder() / "debug.toml", [f"--{removed}"])
    assert str(error.value).startswith(f"{key}: unknown key" + (f", {near}" if near else ""))
