"""Every option of titanlite: one frozen model per TOML section. No torch here.

Names follow torchtitan 0.2 wherever the idea is the same. Everything is defined globally: no option means something
else on another number of processes.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Job(Section):
    dump_folder: Name = "outputs"
    """Folder that holds all runs, and the cache of prepared data."""
    name: Annotated[str, Field(pattern=r"^[^./\\][^/\\]*$")] | None = None
    """Name of the run: its folder is <dump_folder>/<name>. Default: the config file's name without .toml."""


class ModelSelection(Section):
    name: Name | None = None
    """Model family: llama3 (the default), qwen3 or qwen3_moe. With file, the class in it, if it defines several."""
    file: Name | None = None
    """A model of your own instead: a .py file (relative to the TOML file that names it), or a module:
    package.module."""
    flavor: Name | None = None
    """Named shape of the family. Default: debug, or else the first that it has."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Fields of the shape to change, for example dim = 512."""

    @property
    def title(self) -> str:
        """What it is called, wherever its file is."""
        return self.name or (re.split(r"[/.]", self.file.removesuffix(".py"))[-1] if self.file else "llama3")


class DataSource(Section):
    """One of several sources: [[data.sources]]."""

    path: Name | list[Name]
    """As data.path."""
    name: Name | None = None
    """What it is called in metrics. Default: the last part of its path."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Its share of the tokens is this over the sum of all weights."""
    epochs: PositiveInt | None = None
    """Most passes over it in the whole run; a run that would need more is refused. Default: no limit."""

    @property
    def title(self) -> str:
        """Its name in metrics."""
        path = self.path if isinstance(self.path, str) else "".join(self.path[:1])
        parts = [part for part in re.split(r"[:/]+", path) if part.strip(".~") and not re.search(r"[*?[]", part)]
        return self.name or (parts[-1] if parts else "data")


class Data(Section):
    path: Name | list[Name] | None = None
    """What to train on: files, folders or globs of text (.txt, .jsonl, .parquet, source code, ...; one, or a list), a
    folder or URL of tokens prepared before, python://file.py:Class for sequences that your own code makes, or
    stdlib:// for the source of Python's own standard library, which is also the default."""
    sources: list[DataSource] = Field(default_factory=list)
    """Several of these, mixed in exact shares, instead of path."""
    tokenizer: Name = "bytes"
    """bytes (one token a byte), the name of a tokenizer that titanlite ships, or a path: a tiktoken rank file, such as
    Llama 3's tokenizer.model, or a tokenizer.json of Hugging Face, or its folder."""
    add_bos: bool = True
    """Documents begin with the tokenizer's beginning-of-document token."""
    add_eos: bool = True
    """Documents end with the tokenizer's end-of-document token."""
    text_field: Name = "text"
    """Where JSON lines and tables hold the text of a document."""
    shuffle: bool = True
    """Read in another order in each epoch; false reads in the order of the files."""
    packing: Literal["stream", "best_fit"] = "stream"
    """How documents become sequences: stream cuts one long stream of them, wherever a sequence is full; best_fit puts
    whole documents together, cuts only those longer than a sequence, and pads what stays empty."""
    document_mask: bool = False
    """Attention stays within documents, and positions start anew with each."""
    on_change: Literal["error", "continue", "restart"] = "error"
    """When a run goes on and its data is not what it was: refuse; or go on in each source that is still the same, and
    begin the others; or begin all data anew."""
    cache_folder: Name | None = None
    """Where text is kept once it is turned into tokens. Default: <dump_folder>/data_cache."""
    num_workers: Count = 0
    """Processes that read ahead, on every rank; 0 reads in the training process. Never changes what is read."""

    def all_sources(self) -> list[DataSource]:
        """Those that it names, one way or the other."""
        return self.sources or [DataSource(path=self.path or "stdlib://")]


class Training(Section):
    steps: PositiveInt = 1000
    """Optimizer steps of the whole run. Raise it to go on with a finished run."""
    epochs: PositiveInt | None = None
    """Passes over the data, instead of steps: the run ends with the last whole batch before a source would be read
    once more. Default: steps decide."""
    seq_len: PositiveInt = 2048
    """Tokens in a sequence."""
    global_batch_size: PositiveInt = 8
    """Sequences in one optimizer step, over all processes."""
    local_batch_size: PositiveInt | None = None
    """Most sequences in one forward pass of one process. What is more is accumulated. Default: no limit."""
    max_norm: NonNegative = 1.0
    """Gradients are scaled so that their global norm is at most this; 0 turns clipping off."""
    loss: Name | None = None
    """A loss of your own: file.py:function or package.module:function. Default: cross entropy."""
    z_loss: NonNegative = 0.0
    """Weight of a term that keeps logits from drifting: this times log(Z)^2 a token, Z being the sum that softmax
    divides by (arXiv:2204.02311). 1e-4 is usual. The loss that is reported is without it."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of the weights that the optimizer updates. bfloat16 is full bfloat16 training: gradients are of that type
    too, and the optimizer rounds its updates stochastically."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the unsharded parameters, and so of compute and activations."""
    mixed_precision_reduce: Literal["bfloat16", "float32"] = "float32"
    """Type in which gradients are reduced over processes."""
    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer states in host memory."""

    def batch_split(self, data_parallel_degree: int) -> tuple[int, int]:
        """(sequences in one forward pass of one rank, forward passes in a step).

        Raises:
            ValueError: the global batch cannot be split evenly.
        """
        share, rest = divmod(self.global_batch_size, data_parallel_degree)
        if rest:
            raise ValueError(f"{self.global_batch_size} is not a multiple of the {data_parallel_degree} processes")
        micro = min(share, self.local_batch_size or share)
        if share % micro:
            raise ValueError(f"{micro} does not divide the {share} sequences of each process; use a divisor of {share}")
        return micro, share // micro


class Guard(Section):
    nonfinite: Literal["stop", "skip"] = "stop"
    """When the loss or the gradient of a step is NaN or infinite: end the run with exit code 3, or leave the step out.
    Either way weights and optimizer stay what they were, and the run's skipped.jsonl tells which sequences it was."""
    max_consecutive_skips: PositiveInt = 10
    """So many steps left out in a row end the run, with exit code 3."""
    spike_sigma: NonNegative = 0.0
    """Leave out a step whose loss or gradient norm is so many standard deviations above the mean of the last steps; 6
    is usual. 0 never does."""
    spike_window: Annotated[int, Field(ge=8)] = 128
    """How many of the last steps that mean is of. The rule begins when half of them are there."""


class Parallelism(Section):
    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the sharded model (HSDP; DDP when the shard degree is 1)."""
    data_parallel_shard_degree: Literal[-1] | PositiveInt = -1
    """Processes that one copy is sharded over (FSDP); -1 is the rest of the processes."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | PositiveInt = "default"
    """When a unit's gathered parameters are freed: always = after forward and gathered again for backward (ZeRO-3);
    never = kept for backward (ZeRO-2); a number k = a 1/k shard is kept (ZeRO++ hpZ); default = always, but for the
    head, which backward needs at once, and for a shard degree of 1, where nothing is gathered."""
    fsdp_forward_prefetch: Count = 0
    """Blocks to gather ahead in forward; 0 leaves it to FSDP2, which gathers one ahead."""
    fsdp_backward_prefetch: Count = 0
    """Blocks to gather ahead in backward; 0 leaves it to FSDP2, which gathers one ahead."""

    def degrees(self, world_size: int) -> tuple[int, int]:
        """(replicate, shard) degrees whose product is world_size.

        Raises:
            ValueError: there are none.
        """
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if shard == -1:
            shard, rest = divmod(world_size, replicate)
            if rest:
                raise ValueError(f"{world_size} processes cannot be split into {replicate} copies")
        if replicate * shard != world_size:
            raise ValueError(
                f"replicate {replicate} x shard {shard} = {replicate * shard} processes, there are {world_size}"
            )
        return replicate, shard


class ActivationCheckpoint(Section):
    mode: Literal["none", "selective", "full", "per_block"] = "none"
    """Which blocks recompute their activations in backward instead of keeping them."""
    selective_ac_option: Literal["op"] | PositiveInt = "op"
    """For mode selective: a number n checkpoints every n-th block; op keeps, in every block, what is expensive to
    recompute (attention and every other matmul)."""
    per_block: list[Name] = Field(default_factory=list)
    """For mode per_block: the recompute policies of the blocks, in order: none, op (as above) or full, with the number
    of blocks: ["full x 20", "op x 8", "none x 4"]. `titanlite plan --memory-budget-gib` chooses them."""


class Compile(Section):
    enable: bool = False
    """Compile each block with torch.compile."""
    cache_folder: Name | None = None
    """Where compiled code is kept for the next start; TORCHINDUCTOR_CACHE_DIR in the environment wins. Default:
    ~/.cache/titanlite/compile, or that below XDG_CACHE_HOME."""


class Float8(Section):
    enable: bool = False
    """Train the linear layers in float8 (needs the extra titanlite[float8])."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Granularity of the scales, as torchao names it."""
    enable_fsdp_float8_all_gather: bool = True
    """Gather parameters in float8 (recipe tensorwise only)."""
    precompute_float8_dynamic_scale_for_fsdp: bool = True
    """Where parameters are gathered in float8: agree on the scales of all of them by one message after each update,
    instead of by one a layer before it is gathered. The scales are the same."""
    filter_fqns: list[Name] = Field(default_factory=list)
    """Layers whose name contains one of these stay as they are; the head always does."""
    skip_small: bool = True
    """Layers that are slower in float8 stay as they are, by the sizes in docs/float8.md."""
    emulate: bool = False
    """Emulate float8 on hardware without it; slow, for tests."""


class LinearQuantization(Section):
    float8: Float8 = Float8()


class Quantize(Section):
    linear: LinearQuantization = LinearQuantization()


class OptimizerGroup(Section):
    """Some of the parameters: [[optimizer.groups]]."""

    match: Annotated[list[Name], Field(min_length=1)]
    """Names of parameters, as globs: layers.*.attention.*"""
    name: Name | None = None
    """The optimizer that updates them. Default: optimizer.name."""
    lr: NonNegative | None = None
    """Peak learning rate; the schedule scales it as it scales optimizer.lr. Default: optimizer.lr."""
    weight_decay: NonNegative | None = None
    """Of all of them. Default: optimizer.weight_decay for matrices, else 0."""
    args: dict[str, Any] = Field(default_factory=dict)
    """As optimizer.args, which they are added to if the optimizer is the same."""


class Optimizer(Section):
    name: Name = "AdamW"
    """AdamW; Muon (for matrices in the layers, and AdamW for all else); another class of torch.optim, as SGD; or a
    class of your own: package.module.Class."""
    lr: NonNegative = 3e-4
    """Peak learning rate."""
    beta1: Decay = 0.9
    """Decay of the first moment, of AdamW and others that take a pair of betas."""
    beta2: Decay = 0.95
    """Decay of the second moment, of the same."""
    eps: NonNegative = 1e-8
    """Keeps the division finite, of the same."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay (but for SGD, Adam and others of torch.optim: L2 penalty) of parameters with two or more
    dimensions; norms and biases have none."""
    state_dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of AdamW's two moments. bfloat16 takes half the memory, and is rounded stochastically."""
    in_backward: bool = False
    """Update each parameter in backward, as soon as its gradient is reduced, and free the gradient: gradients never
    exist all at once. Not with clipping (training.max_norm must be 0), accumulation, Muon, or steps that are left
    out."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class, for example momentum = 0.9."""
    groups: list[OptimizerGroup] = Field(default_factory=list)
    """What is not updated alike. Each parameter must be in exactly one. Default: see name."""


class Offload(Section):
    optimizer: Literal["memory", "disk"] = "memory"
    """Where AdamW's moments are; disk: in files, of which a few slices at a time are in memory."""
    parameters: Literal["memory", "disk"] = "memory"
    """Where the parameters are that training.enable_cpu_offload keeps on the host; disk: in files, too."""
    path: Name | None = None
    """Folder of those files, on a fast local disk. They vanish with the process. Default:
    <dump_folder>/<name>/offload."""

    @property
    def is_used(self) -> bool:
        return "disk" in (self.optimizer, self.parameters)


class LRScheduler(Section):
    warmup_steps: Count = 200
    """Steps of linear warm-up."""
    decay_ratio: Fraction | None = None
    """Share of all steps that decay at the end; between warm-up and decay the rate is stable. Default: all steps after
    warm-up decay."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """Last learning rate, as a share of the peak."""


class Checkpoint(Section):
    enable: bool = True
    """Save checkpoints, and go on from the newest one of the run."""
    folder: Name | None = None
    """Where the run's checkpoints are kept: a folder that all nodes share, or a URL (s3://bucket/run, gs://, ...).
    Default: <dump_folder>/<name>/checkpoints."""
    interval: PositiveInt = 500
    """Steps between saves. The last step is always saved."""
    interval_minutes: NonNegative = 0.0
    """Save also when so many minutes have passed since the last save; 0 for never."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """Write beside training, from a copy in host memory (pinned, where there is a GPU), or make training wait."""
    keep_latest_k: Count = 10
    """How many of the newest checkpoints stay; 0 keeps all."""
    keep_every: Count = 0
    """Checkpoints of steps that are a multiple of this stay for ever; 0 for none."""
    verify: Literal["size", "checksum", "off"] = "checksum"
    """What is checked before the run goes on from a checkpoint: the size of its files, or what is read of them too. A
    damaged one is left aside, and the one before it is taken."""
    load_step: PositiveInt | None = None
    """Go on from this step instead of the newest; newer checkpoints are left aside."""
    allow_changes: list[Name] = Field(default_factory=list)
    """Settings that may differ from those that a checkpoint was trained with, as globs: training.seq_len,
    model.args.*"""
    initial_load_path: Name | None = None
    """A checkpoint, or the folder of checkpoints of a run, to begin from if this run has none of its own yet."""
    initial_load: list[Name] = Field(default_factory=lambda: ["model"])
    """What to take from initial_load_path, as globs: model, optimizer, model.layers.*"""
    allow_missing: list[Name] = Field(default_factory=list)
    """What initial_load names may be missing there or have another shape, as globs: it keeps its initial values."""
    allow_unexpected: list[Name] = Field(default_factory=list)
    """What initial_load names may be there and not in this model, as globs: it is left out."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """When a checkpoint cannot be written: end the run, or go on until the next save. The last save always counts."""


class Validation(Section):
    enable: bool = False
    """Measure the loss on other data, and the bits per byte of its text."""
    freq: PositiveInt = 100
    """Steps between validations. The last step is always followed by one."""
    path: Name | list[Name] | None = None
    """What to validate on, as data.path."""
    sources: list[DataSource] = Field(default_factory=list)
    """Several of these, instead of path. Each has a loss of its own. They take no weight and no epochs."""
    sequences: Count = 256
    """Sequences of each source, the same ones each time; 0 takes all there are."""

    def all_sources(self) -> list[DataSource]:
        """Those that it names, one way or the other; none if it is not enabled."""
        if not self.enable:
            return []
        return self.sources or ([DataSource(path=self.path)] if self.path else [])


class Metrics(Section):
    log_freq: PositiveInt = 10
    """Steps between lines on the console and in metrics.jsonl."""
    enable_tensorboard: bool = True
    """Write TensorBoard events."""
    loggers: list[Name] = Field(default_factory=list)
    """Loggers of your own, beside that: file.py:Class or package.module:Class."""


class Debug(Section):
    seed: Count = 0
    """Seed of the initial weights, the order of the data and every other random draw."""
    deterministic: bool = False
    """Use only kernels that give the same bits each time, and refuse what has none; slower on GPUs. CPU runs repeat
    without it."""


class Config(Section):
    """The whole of a run: a TOML file, resolved."""

    job: Job = Job()
    model: ModelSelection = ModelSelection()
    data: Data = Data()
    training: Training = Training()
    guard: Guard = Guard()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    optimizer: Optimizer = Optimizer()
    offload: Offload = Offload()
    lr_scheduler: LRScheduler = LRScheduler()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    debug: Debug = Debug()
