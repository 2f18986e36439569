"""Settings that are allowed and probably not meant."""

import json
from collections.abc import Iterator

from titanlite.schema import Config

PIPELINE_OPTIONS = (
    "pipeline_parallel_schedule", "pipeline_parallel_layers_per_stage", "module_fqns_per_model_part",
    "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
)  # fmt: skip
INITIAL_LOAD_OPTIONS = "initial_load", "allow_missing", "allow_unexpected"


def find_warnings(config: Config, *, steps: int | None) -> Iterator[str]:
    """Find settings that are allowed and probably not meant, such as those that a base config brought along.

    Args:
        steps: of the whole run. None: not known yet, as with `training.epochs` before the data is open.
    """
    warmup = config.lr_scheduler.warmup_steps
    if steps is not None and warmup > steps and not config.lr_scheduler.counts_tokens:
        yield (
            f"lr_scheduler.warmup_steps: a warm-up of {warmup} steps never reaches the peak learning rate in a run of "
            f"{steps} steps; set --lr_scheduler.warmup_steps={steps // 10} or another number up to {steps}"
        )
    yield from _without_effect(config)
    if any(_is_stdlib(source.path) for source in config.data.all_sources()):
        return
    for number, source in enumerate(config.validation.all_sources()):
        if _is_stdlib(source.path):
            key = f"validation.sources.{number}.path" if config.validation.sources else "validation.path"
            yield (
                f"{key}: validates on the source of Python's standard library, and the training data is not that; name "
                f"text of your own (--{key}=...), or turn validation off (--validation.enable=false)"
            )


def _without_effect(config: Config) -> Iterator[str]:
    """Find options that are set and have no effect, because of another one."""
    length, degree = config.training.length, config.parallelism.pipeline_parallel_degree
    loads = config.checkpoint.initial_load_path is not None
    reasons = {
        "parallelism": ("pipeline_parallel_degree is 1", PIPELINE_OPTIONS if degree == 1 else ()),
        "training": (f"{length} is set, too", ("steps",) if length != "steps" else ()),
        "checkpoint": ("initial_load_path is not set", () if loads else INITIAL_LOAD_OPTIONS),
        "guard": ("spike_sigma is 0", () if config.guard.spike_sigma else ("on_spike",)),
    }
    for section, (reason, names) in reasons.items():
        values = getattr(config, section)
        for name in names:
            if (value := getattr(values, name)) != type(values).model_fields[name].default:
                yield f"{section}.{name} = {json.dumps(value)} has no effect: {section}.{reason}"


def _is_stdlib(path: str | list[str]) -> bool:
    return any(part.startswith("stdlib://") for part in ([path] if isinstance(path, str) else path))
