"""Recognition of configs of torchtitan, which have the same form and other keys."""

from pathlib import Path
from shlex import quote
from typing import Any

FOREIGN_KEYS = {
    "job": "description print_args print_config custom_config_module use_for_integration_test",
    "model": "tokenizer_path hf_assets_path converters print_after_conversion",
    "training": "dataset dataset_path compile gc_freq deterministic seed",
    "parallelism": "pipeline_parallel_degree enable_async_tensor_parallel pipeline_parallel_schedule",
    "metrics": "enable_tensorboard save_tb_folder enable_wandb save_for_all_ranks disable_color_printing",
    "optimizer": "implementation early_step_in_backward",
    "checkpoint": "enable_checkpoint last_save_model_only last_save_model_weights_only "
    "initial_load_in_hf enable_first_step_checkpoint",
    "profiling": "save_traces_folder save_memory_snapshot_folder",
    "compile": "components backend",
    "experimental": "custom_args_module custom_import",
    "memory_estimation": "enable enabled",
    "float8": "enable_fsdp_float8_all_gather filter_fqns",
}
"""Keys of torchtitan 0.1 and 0.2, by section, that titanlite does not have."""


def is_torchtitan(tree: dict[str, Any]) -> bool:
    """Return True if a TOML tree has at least two keys that only torchtitan has."""
    sections = {name: section for name, section in tree.items() if isinstance(section, dict)}
    return sum(key in sections.get(name, {}) for name, keys in FOREIGN_KEYS.items() for key in keys.split()) > 1


def migration_hint(path: Path) -> str:
    """Return the error message for a config of torchtitan, with the command that migrates the file."""
    new = quote(f"{path.stem}_titanlite.toml")
    return (
        f"{path} looks like a torchtitan config. Migrate it first: titanlite config migrate {quote(str(path))} "
        f"--out {new} --world-size N (N: the number of processes)"
    )
