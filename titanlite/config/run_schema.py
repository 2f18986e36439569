"""Options of how a run is saved, recorded and watched: [checkpoint], [metrics], [profiling], [comm] and [debug]."""

import os
from typing import Literal

from pydantic import Field

from titanlite.config.types import Count, Name, PositiveInt, Section


class Checkpoint(Section):
    enable: bool = True
    """Save checkpoints, and resume from the newest one of the run."""
    folder: Name | None = None
    """Folder of the run's checkpoints, shared by all nodes, or a URL (s3://bucket/run, gs://, ...). Default:
    <dump_folder>/<name>/checkpoints."""
    local_folder: Name | None = None
    """Folder on a fast disk of each node, to which checkpoints are written first. They are copied to checkpoint.folder
    in the background, and count from then on. Environment variables ($SLURM_TMPDIR) and ~ are resolved on each node."""
    interval: PositiveInt = 500
    """Steps between saves. The last step is always saved."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """Write in the background, from a copy in host memory (pinned with a GPU), or make training wait (disabled)."""
    keep_latest_k: Count = 10
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_every: Count = 0
    """Keep in addition the checkpoints of steps that are a multiple of this number; 0 keeps none."""
    load_step: PositiveInt | None = None
    """Step to resume from, instead of the newest. Newer checkpoints are quarantined."""
    allow_changes: list[Name] = Field(default_factory=list)
    """Settings that may differ from those of the checkpoint on resume, as globs (training.seq_len, model.args.*)."""
    initial_load_path: Name | None = None
    """Weights to start from while this run has no checkpoint of its own. The path is a checkpoint, the folder of a
    run's checkpoints, or weights of Hugging Face (a folder), torchtitan (a step) or Meta (consolidated.*.pth)."""
    initial_load: list[Name] = Field(default_factory=lambda: ["model"])
    """Parts to load from initial_load_path, as globs (model, optimizer, model.layers.*)."""
    allow_missing: list[Name] = Field(default_factory=list)
    """Tensors that initial_load_path may lack or have in another shape, as globs. They keep their initial values."""
    allow_unexpected: list[Name] = Field(default_factory=list)
    """Tensors of initial_load_path that this model may lack, as globs. They are not loaded."""
    last_save_in_hf: bool = False
    """Export the last checkpoint of the run to a Hugging Face folder, <run>/exports/hf-step-... With checkpoint.folder
    it is in <folder>/exports."""
    export_every: Count = 0
    """Export in addition the checkpoints of steps that are a multiple of this number, beside training; 0 exports
    none."""
    export_dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Dtype of exported weights."""
    export_drop: list[Name] = Field(default_factory=list)
    """Tensors to leave out of exports, as globs, where Hugging Face's model has no place for them:
    layers.*.feed_forward.bias_E of Qwen3-MoE."""

    @property
    def local_path(self) -> str | None:
        """`local_folder` as a path on this node."""
        return os.path.expanduser(os.path.expandvars(self.local_folder)) if self.local_folder else None


class Layers(Section):
    freq: Count = 0
    """Steps between records of each layer in layers.jsonl: norms, largest values, zeros and non-finite values of its
    parameters, gradients, updates and outputs. 0 writes none."""


class Metrics(Section):
    log_freq: PositiveInt = 10
    """Steps between lines on the console and in metrics.jsonl."""
    loggers: list[Name] = Field(default_factory=lambda: ["tensorboard"])
    """Loggers beside metrics.jsonl: tensorboard, wandb (Weights & Biases), trackio, or a class of your own as
    file.py:Class or package.module:Class. All get the same records."""
    loss_by_source: bool = False
    """Record the training loss of each source of the data, as a mean over the steps since the last record."""
    layers: Layers = Field(default_factory=Layers)


class Profiling(Section):
    enable_profiling: bool = False
    """Write a trace of some steps to <run>/profile, one file a rank, for ui.perfetto.dev and `titanlite profile`."""
    profile_freq: PositiveInt = 100
    """Steps between windows. A window ends with each step that is a multiple of this number."""
    profiler_active: PositiveInt = 1
    """Steps in a window."""
    profiler_warmup: Count = 3
    """Steps before each window in which the profiler is set up already, so that its set-up does not show in the
    trace."""
    enable_memory_snapshot: bool = False
    """Write a snapshot of the GPU's memory, with the history of allocations, at each multiple of profile_freq and after
    out-of-memory, for pytorch.org/memory_viz. Independent of enable_profiling. Needs a GPU."""

    @property
    def is_used(self) -> bool:
        return self.enable_profiling or self.enable_memory_snapshot


class Comm(Section):
    init_timeout_seconds: PositiveInt = 1800
    """Longest time that a rank waits for another one at the start, while data and checkpoints are read. Then the run
    ends with an error."""
    compile_timeout_seconds: PositiveInt = 1800
    """The same in the first two steps, which compile."""
    train_timeout_seconds: PositiveInt = 300
    """The same in every further step."""
    validation_timeout_seconds: PositiveInt = 1800
    """The same in validation."""
    save_timeout_seconds: PositiveInt = 3600
    """The same while a checkpoint is written, and at the end of the run."""


class Debug(Section):
    seed: Count = 0
    """Seed of the initial weights, of the order of the data and of every other random draw."""
    deterministic: bool = False
    """Use only deterministic kernels, and refuse operators that have none. Slower on GPUs. CPU runs give the same bits
    without it."""
