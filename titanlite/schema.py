"""Every option of titanlite: one frozen Pydantic model per TOML section. Never imports torch.

Names follow torchtitan 0.2 wherever the idea is the same. Every option is defined globally: its effect does not depend
on the number of processes.
"""

import math
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# Base class of the sections of a config, and the types of their options.


PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]
AttentionBackend = Literal["auto", "flash", "fa3", "fa4", "cudnn", "efficient"]


DURATION = re.compile(r"(?=.)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)min)?(?:(\d+)s)?")


def seconds_of(duration: str) -> int:
    """Return the seconds of a duration such as 2d, 11h30min or 90s.

    Raises:
        ValueError: the text is no duration.
    """
    if not (match := DURATION.fullmatch(duration)):
        raise ValueError(f"expected a duration such as 2d, 11h30min or 90s, got {duration!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_duration(duration: str) -> str:
    seconds_of(duration)
    return duration


Duration = Annotated[str, AfterValidator(_check_duration)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Checkpoint(Section):
    enable: bool = True
    """Save checkpoints, and resume from the newest one of the run."""
    folder: Name | None = None
    """Folder of the run's checkpoints, shared by all nodes, or a URL (s3://bucket/run, gs://, ...). Default:
    <dump_folder>/<name>/checkpoints."""
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
    local_interval: Count = 0
    """Steps between local copies, from which a run resumes after a failure without the steps since the last save; 0
    makes none."""
    local_folder: Name | None = None
    """Folder of local copies on each machine. Default: /dev/shm/titanlite-<user>, which is memory."""
    local_copies: Literal[1, 2] = 2
    """Machines that keep each local copy: that of its rank, and with 2 the next one too, if there are several."""
    allow_changes: list[Name] = []
    """Settings that may differ from those of the checkpoint on resume, as globs (training.seq_len, model.args.*)."""
    initial_load_path: Name | None = None
    """Weights to start from while this run has no checkpoint of its own. The path is a checkpoint, the folder of a
    run's checkpoints, or weights of Hugging Face (a folder) or torchtitan (a step)."""
    initial_load: list[Name] = ["model"]
    """Parts to load from initial_load_path, as globs (model, optimizer, outer, model.layers.*), or progress: then the
    run goes on at the step, the position in the data and the state of the guard of that checkpoint, as a branch of its
    run."""
    allow_missing: list[Name] = []
    """Tensors that initial_load_path may lack or have in another shape, as globs. They keep their initial values."""
    allow_unexpected: list[Name] = []
    """Tensors of initial_load_path that this model may lack, as globs. They are not loaded."""
    last_save_in_hf: bool = False
    """Export the last checkpoint of the run to a Hugging Face folder, <run>/exports/hf-step-... With a local
    checkpoint.folder it is in <folder>/exports."""
    export_dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Dtype of exported weights."""
    export_drop: list[Name] = []
    """Tensors to leave out of exports, as globs, where Hugging Face's model has no place for them:
    layers.*.feed_forward.bias_E of Qwen3-MoE."""


class Layers(Section):
    freq: Count = 0
    """Steps between records of each layer in layers.jsonl: norms, largest values, zeros and non-finite values of its
    parameters, gradients, updates and outputs. 0 writes none."""


class Metrics(Section):
    log_freq: PositiveInt = 10
    """Steps between lines on the console and in metrics.jsonl."""
    loggers: list[Name] = ["tensorboard"]
    """Loggers beside metrics.jsonl: tensorboard, wandb (Weights & Biases), trackio, mlflow, or a class of your own as
    file.py:Class or package.module:Class. All get the same records."""
    layers: Layers = Layers()


class Profiling(Section):
    enable_profiling: bool = False
    """Write a trace of some steps to <run>/profile, one file a rank, for ui.perfetto.dev, with a table of operators."""
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
    """Longest time that a rank waits for another one at the start, while data and checkpoints are read, and in the
    first two steps, which compile. Then the run ends with an error."""
    train_timeout_seconds: PositiveInt = 300
    """Longest time that a rank waits for another one in a later step."""
    validation_timeout_seconds: PositiveInt = 1800
    """Longest time that a rank waits for another one in validation."""
    save_timeout_seconds: PositiveInt = 3600
    """Longest time that a rank waits for another one while a checkpoint is written, and at the end of the run."""


class Debug(Section):
    seed: Count = 0
    """Seed of the initial weights, of the order of the data and of every other random draw."""
    deterministic: bool = False
    """Use only deterministic kernels, and refuse operators that have none. Slower on GPUs. CPU runs give the same bits
    without it."""
    reproducible_layouts: bool = False
    """Train to the same bits on every layout of replicas, shards and micro-batches, if their numbers are powers of two,
    and after a resume on another one. Implies debug.deterministic. Needs training.local_batch_size, which is part of
    what is computed: another one gives other bits. On CPUs, each process computes with one thread."""
    reproducible_context_degree: PositiveInt = 1
    """Largest parallelism.context_parallel_degree with the same bits, a power of two. Every process computes each
    sequence in the parts of so many processes, also one that has all of them. So it is part of what is computed, and
    takes time where fewer processes share a sequence. Needs reproducible_layouts."""
    hash_freq: Count = 0
    """Steps between hashes of weights and optimizer states in hashes.jsonl, which do not depend on the layout. 0: none,
    or with reproducible_layouts those of the steps with a checkpoint."""

    @property
    def is_deterministic(self) -> bool:
        """Whether only deterministic kernels may be used."""
        return self.deterministic or self.reproducible_layouts


class Teacher(Section):
    path: Name | None = None
    """Weights of the teacher: a checkpoint, the folder of a run (its newest complete checkpoint), a URL of either, or a
    Hugging Face folder. The teacher has the vocabulary of the model, is frozen, and is never in a checkpoint."""
    config: Name | None = None
    """Config file with the model of the teacher, where the weights do not describe it. Default: what is beside the
    weights."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Dtype of the teacher's weights and compute. Default: training.mixed_precision_param."""
    enable_cpu_offload: bool = False
    """Keep the shards of the teacher in host memory."""


class Distill(Section):
    ratio: Fraction = 0.0
    """Share of the teacher in what is minimized: (1 - ratio) * loss + ratio * temperature^2 * divergence. 0 is training
    without a teacher."""
    temperature: Positive = 1.0
    """Divisor of both models' logits before the softmax of the divergence (arXiv:1503.02531)."""
    kind: Literal["forward_kl", "reverse_kl", "js"] = "forward_kl"
    """Divergence of the student p from the teacher q: KL(q, p), KL(p, q), or the mean of both models' KL to their
    average (Jensen-Shannon)."""


class ValidationSource(Section):
    """One of several validation sources."""

    path: Name | list[Name]
    """Text or tokens, as in data.path."""
    name: Name | None = None
    """Name of the source in metrics. Default: the last part of its path."""
    text_field: Name | None = None
    """Field that holds the text of a document. Default: data.text_field."""

    @property
    def title(self) -> str:
        """Name of the source in metrics."""
        path = self.path if isinstance(self.path, str) else "".join(self.path[:1])
        parts = [part for part in re.split(r"[:/]+", path) if part.strip(".~") and not re.search(r"[*?[]", part)]
        return self.name or (parts[-1] if parts else "data")


class DataSource(ValidationSource):
    """One of several data sources, mixed by weight."""

    weight: NonNegative = 1.0
    """Share of the tokens, relative to the sum of all weights. 0 is for a source that only data.stages read."""


class DataStage(Section):
    """Beginning of a run, in which sources have other weights."""

    until_tokens: PositiveInt
    """Tokens of the run at which the stage ends, rounded up to whole sequences."""
    weights: Annotated[dict[Name, NonNegative], Field(min_length=1)]
    """Weight of each source by its name. Sources without one are not read in the stage."""


class Data(Section):
    path: Name | list[Name] | None = None
    """Training data: files, folders, globs or URLs of text (.txt, .jsonl, .parquet, source code, ...), one or a list.
    It can also be a folder or URL of prepared tokens, reader://file.py:function?PATH for a format of your own, or
    python://file.py:Class for sequences from your own code. Without it, stdlib:// is read, the source of Python's
    standard library. A file that is not there from the current folder is looked for beside the config file."""
    sources: list[DataSource] = []
    """Several sources, mixed in exact shares, instead of data.path."""
    stages: list[DataStage] = []
    """Stages at the beginning of the run in which sources have other weights, in their order. After them, the weights
    of data.sources count. Stages that a run has not reached may be changed when it resumes."""
    format: Literal["megatron", "nanogpt", "olmo", "datatrove"] | None = None
    """Format of tokens that another program prepared, where its files do not say it: nanogpt of .bin and olmo of .npy
    without a header, datatrove of .ds without an index. Text, and files that say it, are read as without it."""
    tokenizer: Name = "bytes"
    """Tokenizer: bytes (one token per byte), the name of a shipped tokenizer, or a path. The path is that of a tiktoken
    rank file (Llama 3's tokenizer.model), of Hugging Face's tokenizer.json, or of its folder."""
    add_bos: bool = True
    """Begin each document with the tokenizer's beginning-of-document token."""
    add_eos: bool = True
    """End each document with the tokenizer's end-of-document token."""
    text_field: Name | None = None
    """Field of JSON lines and table columns that holds the text of a document. Default: text, of chats messages."""
    chat_template: Name | None = None
    """Template that renders documents which are chats, JSON lines of messages. It is a Jinja file, also beside the
    config file, or "tokenizer" for that of the tokenizer's folder. The answers that it marks count in the loss.
    Default: documents are text."""
    shuffle: bool = True
    """Shuffle sequences, in another order in each epoch. false reads in the order of the files."""
    shuffle_window: PositiveInt | None = None
    """Shuffle within windows of so many sequences, in the order of the files. Default: all of an epoch is shuffled."""
    prepare: Literal["before", "background"] = "before"
    """Time at which text becomes tokens. before makes all of them before training begins. background lets training
    begin with the first ones, and read on as more are made. It needs shuffle_window or shuffle = false."""
    packing: Literal["stream", "best_fit"] = "stream"
    """Packing of documents into sequences. stream cuts one long stream of documents wherever a sequence is full.
    best_fit puts whole documents together, cuts only those longer than a sequence, and pads the rest."""
    document_mask: bool = False
    """Restrict attention to the own document, and count positions from the start of each document."""
    on_change: Literal["error", "continue", "restart"] = "error"
    """Action on resume with other data. error refuses. continue resumes the unchanged sources and starts the others
    from their beginning. restart starts all data from its beginning."""
    cache_folder: Name | None = None
    """Folder for the tokens made from text, and for copies of remote tokens. Default: <dump_folder>/data_cache."""
    num_workers: Count = 0
    """Processes per rank that read ahead; 0 reads in the training process. The number never changes the batches."""

    def all_sources(self) -> list[DataSource]:
        """Return the sources of the section, whether it gives a path or a list."""
        return self.sources or [DataSource(path=self.path or "stdlib://")]


class Validation(Section):
    enable: bool = False
    """Measure the loss on other data, and its bits per byte of text, or score tasks, or both."""
    freq: PositiveInt = 100
    """Steps between validations. The last step is always followed by one."""
    path: Name | list[Name] | None = None
    """Validation data, as in data.path. stdlib:// without training data from stdlib:// gives a warning."""
    sources: list[ValidationSource] = []
    """Several validation sources, instead of validation.path. Each has a loss of its own."""
    sequences: Count = 256
    """Sequences of each source, the same at each validation; 0 takes all text, to its last token."""
    tasks: list[Name] = []
    """Tasks: files of JSON lines with questions (docs/data.md), also next to the config file, or the names of shipped
    ones, python_cloze and number_choice. Validation gives their accuracy."""

    def all_sources(self) -> list[ValidationSource]:
        """Return the sources of the section, whether it gives a path or a list; none if validation is off."""
        if not self.enable:
            return []
        return self.sources or ([ValidationSource(path=self.path)] if self.path else [])


class OptimizerGroup(Section):
    """A group of parameters with settings of its own."""

    match: Annotated[list[Name], Field(min_length=1)]
    """Globs of parameter names, for example layers.*.attention.* of all attention layers."""
    name: Name | None = None
    """Optimizer of the group. Default: optimizer.name."""
    lr: NonNegative | None = None
    """Peak learning rate of the group. The schedule scales it like optimizer.lr. Default: optimizer.lr."""
    weight_decay: NonNegative | None = None
    """Weight decay of all parameters of the group. Default: optimizer.weight_decay for matrices, else 0."""
    args: dict[str, Any] = {}
    """Further arguments of the class. They add to optimizer.args if the group uses the same optimizer."""


class Optimizer(Section):
    name: Name = "AdamW"
    """Optimizer: AdamW; Muon (for matrices of the layers, with AdamW for the rest); another class of torch.optim, for
    example SGD; or a class of your own: package.module.Class."""
    lr: NonNegative = 3e-4
    """Peak learning rate."""
    beta1: Decay = 0.9
    """Decay of the first moment, for AdamW and other optimizers with a pair of betas."""
    beta2: Decay = 0.95
    """Decay of the second moment, for the same optimizers."""
    eps: NonNegative = 1e-8
    """Term that keeps the division finite, for the same optimizers."""
    weight_decay: NonNegative = 0.1
    """Weight decay of parameters with two or more dimensions; norms and biases have none. It is decoupled, except in
    SGD, Adam and others of torch.optim, where it is an L2 penalty."""
    state_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of AdamW's two moments. bfloat16 takes half the memory, and is rounded stochastically."""
    parametrization: Literal["standard", "mup", "completep"] = "standard"
    """Rules by which learning rates, weight decay, eps and initial values follow the size of the model, so that those
    tuned at base_width suit other widths (mup, arXiv:2203.03466), and other depths than base_depth too (completep,
    arXiv:2505.01618). standard has none. For AdamW and Muon."""
    base_width: PositiveInt | None = None
    """Width (dim) at which the options were tuned. There, mup and completep change nothing."""
    base_depth: PositiveInt | None = None
    """Number of layers at which the options were tuned, for completep."""
    in_backward: bool = False
    """Update each parameter in backward, as soon as its gradient is reduced, and free the gradient, so that all
    gradients never exist at once. It excludes clipping (training.max_norm must be 0), accumulation, Muon and skipped
    steps."""
    args: dict[str, Any] = {}
    """Further arguments of the class, for example momentum = 0.9."""
    groups: list[OptimizerGroup] = []
    """Parameter groups with settings of their own. Each parameter must match exactly one. Default: the groups that
    optimizer.name implies."""

    @property
    def names(self) -> set[str]:
        """Names of the optimizers of all groups."""
        return {group.name or self.name for group in self.groups} or {self.name}


class Freeze(Section):
    parameters: list[Name] = []
    """Globs of parameter names that are not trained, for example tok_embeddings.* or layers.0.*. They have no gradient
    and no optimizer state."""
    dtype: Literal["bfloat16"] | None = None
    """Dtype of frozen parameters. Without updates, bfloat16 loses nothing that compute in bfloat16 keeps. Default:
    training.dtype."""


class Lora(Section):
    rank: PositiveInt | None = None
    """Rank of the adapters (LoRA): they alone are trained, and all other parameters are frozen, with the dtype of
    freeze.dtype. Default: no adapters."""
    alpha: Positive = 16.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: list[Name] = []
    """Globs of the names of linear layers that get an adapter, for example layers.*.attention.w[qv]. Default: all
    linear layers of the blocks."""


class Offload(Section):
    optimizer: Literal["memory", "disk"] = "memory"
    """Place of AdamW's two moments. disk keeps them in files, with a few slices at a time in memory."""
    parameters: Literal["memory", "disk"] = "memory"
    """Place of the parameters that training.enable_cpu_offload keeps on the host. disk keeps them in files."""
    average: Literal["memory", "disk"] = "memory"
    """Place of the average of the weights. disk keeps it in files; a window of many snapshots needs it."""
    path: Name | None = None
    """Folder of those files, on a fast local disk. The files vanish with the process. Default:
    <dump_folder>/<name>/offload."""

    @property
    def is_used(self) -> bool:
        return "disk" in (self.optimizer, self.parameters, self.average)


class Average(Section):
    """Average of the trained weights over steps. Validation measures it beside the weights."""

    decay: Decay = 0.0
    """Decay of an exponential moving average (EMA), which is kept in float32; 0 is none."""
    window: Count = 0
    """Number of last snapshots of the weights whose mean is the average; 0 is none. Each takes the memory of the
    weights."""
    freq: PositiveInt = 1
    """Steps between updates of the average, or between snapshots."""
    enable_cpu_offload: bool = False
    """Keep the average in host memory."""


class Outer(Section):
    """Outer optimizer (DiLoCo, arXiv:2311.08105): SGD with Nesterov momentum, whose gradient is the difference between
    the weights at the beginning and at the end of a round of steps."""

    every: Count = 0
    """Steps of a round, which ends at each multiple; 0 is no outer optimizer."""
    lr: Positive = 0.7
    """Learning rate of the outer optimizer. 1 without momentum changes nothing."""
    momentum: Decay = 0.9
    """Momentum of the outer optimizer."""
    over_replicas: bool = False
    """Each replica (parallelism.data_parallel_replicate_degree) is a worker that trains weights of its own in a round.
    The outer optimizer takes their mean, so replicas exchange weights once a round, and no gradients."""


class LRScheduler(Section):
    warmup_steps: Count = 200
    """Steps of linear warm-up. More than the run has gives a warning."""
    decay_ratio: Fraction | None = None
    """Fraction of all steps over which the rate decays at the end. The rate is stable between warm-up and decay.
    Default: all steps after warm-up."""
    decay_steps: Count | None = None
    """Steps over which the rate decays at the end. It wins over decay_ratio."""
    warmup_tokens: Count | None = None
    """Tokens of linear warm-up. It wins over warmup_steps, and makes the rate a function of tokens and not of steps:
    decay_ratio is a fraction of all tokens, and decay_tokens takes the place of decay_steps."""
    decay_tokens: Count | None = None
    """Tokens over which the rate decays at the end. It needs warmup_tokens, and wins over decay_ratio."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """Final learning rate, as a fraction of the peak."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the rate is a function of tokens."""
        return self.warmup_tokens is not None


LONGEST_NAME = 200
"""Bytes in the name of a run. File systems allow 255, and some files of a run add a suffix."""


def _fits_in_file_name(name: str) -> str:
    if (size := len(name.encode(errors="replace"))) > LONGEST_NAME:
        raise ValueError(f"has {size} bytes, a folder name may have {LONGEST_NAME}: choose a shorter name")
    return name


FolderName = Annotated[str, Field(pattern=r"^[^./\\\x00-\x1f][^/\\\x00-\x1f]*$"), AfterValidator(_fits_in_file_name)]


class Job(Section):
    dump_folder: Name = "outputs"
    """Folder of all runs and of the cache of prepared data."""
    name: FolderName | None = None
    """Name of the run: its folder is <dump_folder>/<name>. A base file never sets it. Default: the config file's name
    without .toml."""
    max_failed_restarts: Count = 3
    """Automatic restarts in a row (by torchrun, Slurm or Kubernetes) that may end without a newer checkpoint. The next
    one stops with exit code 3. A start by hand never does. 0 is no limit."""


class ModelSelection(Section):
    name: Name | None = None
    """Model family: llama3 (the default), deepseek_v3, gemma3, glm4_moe, gpt_oss, olmo3, qwen3, qwen3_moe, qwen3_next,
    smollm3, or transformers for any decoder of that package, which model.path names. With model.file: the class to use
    if the file defines several."""
    path: Name | None = None
    """Config of a model of transformers: a folder with a config.json, or a model type such as olmo2."""
    file: Name | None = None
    """A model of your own instead: a .py file, relative to the TOML file that names it, or a module: package.module."""
    flavor: Name | None = None
    """Named size of the family, for example 8B. Default: debug, or else the first flavor of the family."""
    args: dict[str, Any] = {}
    """Fields of the flavor to change, for example dim = 512. Unless vocab_size is set here, it follows the tokenizer.
    It is the flavor's size where the tokenizer fills at least 99 % of it. Else it is the tokenizer's size, rounded up
    to a multiple of 128."""

    @property
    def title(self) -> str:
        """Name of the model, independent of where its file is."""
        return self.name or (re.split(r"[/.]", self.file.removesuffix(".py"))[-1] if self.file else "llama3")


class BatchStage(Section):
    until_tokens: PositiveInt
    """Tokens of the run before which a step of this stage begins."""
    global_batch_size: PositiveInt
    """Sequences in one optimizer step of this stage, over all processes."""


class LengthStage(Section):
    until_tokens: PositiveInt
    """Tokens of the run before which a step of this stage begins."""
    seq_len: PositiveInt
    """Tokens in a sequence of this stage: a divisor of training.seq_len."""


class Training(Section):
    steps: PositiveInt = 1000
    """Optimizer steps of the whole run. Raise it to resume a finished run."""
    epochs: PositiveInt | None = None
    """Passes over the data, instead of training.steps. The run ends with the last whole batch before a source would be
    read again. Default: training.steps decides."""
    tokens: PositiveInt | None = None
    """Tokens that the whole run is trained on, padding included, instead of training.steps. The step that reaches them
    is the last one. Default: training.steps decides."""
    max_duration: Duration | None = None
    """Time after which this start saves a checkpoint and ends with exit code 75, such as 11h30min or 2d. The same
    command resumes. A Slurm job stops before its end without it. Default: no limit."""
    seq_len: PositiveInt = 2048
    """Tokens in a sequence."""
    global_batch_size: PositiveInt = 8
    """Sequences in one optimizer step, over all processes."""
    batch_ramp: list[BatchStage] = []
    """Stages at the beginning of the run with other global batches, in their order. Forward passes have
    local_batch_size sequences in all of them."""
    seq_len_ramp: list[LengthStage] = []
    """Stages at the beginning of the run with shorter sequences, in their order. Each sequence of training.seq_len is
    cut into sequences of the stage, so that a step has the same tokens."""
    local_batch_size: PositiveInt | None = None
    """Largest number of sequences in one forward pass of one process. Gradients of the rest are accumulated. Default:
    no limit."""
    max_norm: NonNegative = 1.0
    """Largest global norm of the gradients, to which they are clipped; 0 turns clipping off."""
    loss: Name | None = None
    """A loss of your own: file.py:function or package.module:function. Default: cross entropy."""
    z_loss: NonNegative = 0.0
    """Weight of the z-loss, which adds weight * log(Z)^2 per token, with Z the denominator of the softmax
    (arXiv:2204.02311). 1e-4 is usual. The reported loss is without it; metrics report it as added_loss."""
    multi_token_weight: NonNegative = 0.0
    """Weight of the loss of the token after the next, which one more block predicts (arXiv:2412.19437). 0: it is not
    predicted. 0.3 is usual, and 0.1 late in training."""
    dropout: Annotated[float, Field(ge=0, lt=0.99)] = 0.0
    """Share of the embeddings, and of the outputs of attention and feed-forward layers, that training sets to 0,
    rounded to a multiple of 1/256. For runs that read a small text many times: 0.1 to 0.3 is usual."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the weights that the optimizer updates. bfloat16 is full bfloat16 training: gradients have that dtype
    too, and updates are rounded stochastically."""
    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the unsharded parameters, and so of compute and activations. float16 is for GPUs without bfloat16, such
    as V100. The loss is scaled then: steps whose gradients overflow are skipped, and halve the scale."""
    mixed_precision_reduce: Literal["bfloat16", "float32"] = "float32"
    """Dtype in which gradients are reduced over processes."""
    attention_backend: AttentionBackend = "auto"
    """Attention kernel of GPUs: flash (FlashAttention-2), fa3 or fa4 (FlashAttention-3 and -4, from packages of their
    own), cudnn, or efficient, which also takes float32. auto is PyTorch's choice, which the start of a run reports.
    CPUs have one kernel."""
    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer states in host memory."""

    @property
    def length(self) -> str:
        """Name of the option that sets the length of the run."""
        return "epochs" if self.epochs is not None else "steps" if self.tokens is None else "tokens"

    @property
    def batch_sizes(self) -> list[int]:
        """Global batch sizes of all steps."""
        return [*(stage.global_batch_size for stage in self.batch_ramp), self.global_batch_size]

    @property
    def seq_lens(self) -> list[int]:
        """Sequence lengths of all steps."""
        return [*(stage.seq_len for stage in self.seq_len_ramp), self.seq_len]

    @property
    def max_seconds(self) -> int | None:
        """`max_duration` in seconds."""
        return None if self.max_duration is None else seconds_of(self.max_duration)

    def batch_split(self, data_parallel_degree: int) -> tuple[int, int]:
        """Return (sequences in one forward pass of one rank, forward passes in a step).

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
    """Action on a NaN or infinite loss or gradient. stop ends the run with exit code 3, skip skips the step. Weights
    and optimizer states stay unchanged in both cases, and skipped.jsonl lists the sequences of the step."""
    max_consecutive_skips: PositiveInt = 10
    """Number of consecutive skipped steps that ends the run, with exit code 3."""
    spike_sigma: NonNegative = 0.0
    """Skip a step whose loss or gradient norm is this many standard deviations above the mean of the last 128 steps. 6
    is usual; 0 turns the rule off. The rule starts after 64 steps."""
    on_spike: Literal["skip", "rollback"] = "skip"
    """Action on a spike. rollback returns to the newest checkpoint or local copy, which is from before the spike, and
    continues with the sequences after the spike's step. While there is none, the step is skipped."""
    max_rollbacks: Count = 3
    """Number of rollbacks in a run. The spike after them ends the run, with exit code 3."""


class Degrees(NamedTuple):
    """Number of ranks along each axis of the mesh."""

    replicate: int
    shard: int
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def sharded(self) -> int:
        """Number of ranks that a replica's parameters are sharded over."""
        return self.shard * self.context

    def axes(self) -> dict[str, int]:
        """Return the size of each axis by name, in the order of the mesh: replicate and shard, and further axes of more
        than one rank. Stages come first: they communicate least, and may be on other nodes."""
        sizes = {"pipeline": self.pipeline, **self._asdict()}
        return {name: size for name, size in sizes.items() if size > 1 or name in ("replicate", "shard")}

    def __str__(self) -> str:
        """Return for example replicate 2 x shard 8."""
        return " x ".join(f"{axis} {degree}" for axis, degree in self.axes().items())


class Parallelism(Section):
    data_parallel_replicate_degree: PositiveInt = 1
    """Replicas of the sharded model (HSDP; DDP when the shard degree is 1)."""
    data_parallel_shard_degree: Literal[-1] | PositiveInt = -1
    """Processes that shard one replica (FSDP); -1 is all remaining processes."""
    context_parallel_degree: PositiveInt = 1
    """Processes that split each sequence. Parameters are sharded over them, too. training.seq_len must be a multiple of
    twice the degree."""
    context_parallel_method: Literal["ring", "ulysses"] = "ring"
    """What attention sends over a context axis. ring lets each process see the keys and values of all tokens, in one
    all-gather a layer. ulysses exchanges tokens for heads, in two all-to-alls (arXiv:2309.14509), so the degree must
    divide the query heads. It sends less where key heads are as many as query heads; `titanlite plan` tells."""
    expert_parallel_degree: PositiveInt = 1
    """Neighbouring processes that have different experts of a layer, and send each other tokens. They read different
    data, and shard all other parameters. It must divide the experts, and the shard degree times the context degree."""
    tensor_parallel_degree: PositiveInt = 1
    """Neighbouring processes that split the layers of the model and its vocabulary. It must divide the numbers of
    heads, of feed-forward dims and of tokens in the vocabulary. Use it within a node: layers communicate often."""
    pipeline_parallel_degree: PositiveInt = 1
    """Groups of processes that have different blocks of the model, and send each other hidden states. The micro-batches
    of a step pass through them one after the other: a step needs at least as many as there are stages."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order of forward and backward passes, as torch.distributed.pipelining names it. Each process has one stage with
    1F1B and GPipe, and several with the others."""
    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Blocks of a stage. Default: as many as give each process one stage, or two with a schedule that needs several."""
    module_fqns_per_model_part: list[list[Name]] = []
    """Names of the modules of each stage, instead of equal numbers of blocks: [["tok_embeddings", "layers.0"],
    ["layers.1", "head"]]."""
    pipeline_parallel_first_stage_less_layers: Count = 1
    """Blocks that the first stage has less than others, because it has the embedding."""
    pipeline_parallel_last_stage_less_layers: Count = 1
    """Blocks that the last stage has less than others, because it has the head."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | PositiveInt = "default"
    """Time at which the gathered parameters of an FSDP unit are freed. always frees them after forward and gathers them
    again for backward (ZeRO-3). never keeps them for backward (ZeRO-2). A number k keeps a 1/k shard (ZeRO++ hpZ).
    default is always, except for the head, which backward needs at once, for a shard degree of 1, where nothing is
    gathered, and for a pipeline, whose blocks compute several micro-batches in turn."""
    fsdp_reduce_gradients: Literal["each", "last"] = "each"
    """Micro-batches after whose backward gradients are reduced. each keeps shards of gradients only. last reduces once
    a step: less communication, but every process keeps the gradients of whole parameters, 4 bytes a parameter. A shard
    degree of 1 takes last, and so does a pipeline."""
    fsdp_forward_prefetch: Count = 0
    """Units to all-gather ahead in forward; 0 leaves it to FSDP2, which gathers one ahead."""
    fsdp_backward_prefetch: Count = 0
    """Units to all-gather ahead in backward; 0 leaves it to FSDP2, which gathers one ahead."""
    fsdp_min_unit_params: Count = 0
    """Least number of parameters that blocks gather at once: neighbouring blocks become one FSDP unit until it has as
    many. Small blocks then need fewer collectives, and more memory. 0 makes each block a unit."""

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay gathered from forward to backward; those of a pipeline's stage, for a whole step."""
        policy = self.fsdp_reshard_after_forward
        return policy == "never" or (policy == "default" and self.pipeline_parallel_degree > 1)

    def degrees(self, world_size: int) -> Degrees:
        """Return the degree of each axis; their product is world_size.

        Raises:
            ValueError: the configured degrees do not fit world_size.
        """
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        further = {
            "context": self.context_parallel_degree,
            "tensor": self.tensor_parallel_degree,
            "pipeline": self.pipeline_parallel_degree,
        }
        if shard == -1:
            shard, rest = divmod(world_size, replicate * math.prod(further.values()))
            if rest:
                named = [f"{axis} {degree}" for axis, degree in further.items() if degree > 1]
                parts = " x ".join([f"{replicate} replicas", *named])
                raise ValueError(f"{world_size} processes cannot be split into {parts}")
        degrees = Degrees(replicate, shard, **further)
        if (product := math.prod(degrees)) != world_size:
            raise ValueError(f"{degrees} = {product} processes, there are {world_size}")
        return degrees


class ActivationCheckpoint(Section):
    mode: Literal["none", "selective", "full"] = "none"
    """Blocks that recompute their activations in backward instead of keeping them: none, every n-th or some operations
    (selective), or all (full)."""
    selective_ac_option: Literal["op"] | PositiveInt = "op"
    """Choice of mode selective: a number n checkpoints every n-th block. op checkpoints every block, and keeps the
    results that are expensive to recompute (attention and every second matmul)."""
    offload: bool = False
    """Keep what backward needs of blocks in pinned host memory: it goes there behind the forward pass, and comes back
    ahead of the backward pass. With mode full that is the input of each block. The last block stays on the device."""


class Compile(Section):
    enable: bool = False
    """Compile each block with torch.compile. Compiled code is kept for the next start, in ~/.cache/titanlite/compile or
    the folder named by the environment variable TORCHINDUCTOR_CACHE_DIR."""


class Float8(Section):
    enable: bool = False
    """Train the linear layers in float8 (needs torchao, the extra float8)."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = "tensorwise"
    """Granularity of the scales, as torchao names it. mxfp8 (arXiv:2310.10537): one for each 32 values."""
    enable_fsdp_float8_all_gather: bool = True
    """All-gather parameters in float8 (recipe tensorwise only)."""
    precompute_float8_dynamic_scale_for_fsdp: bool = True
    """Compute the scales of all float8 parameters in one all-reduce after each update, instead of one all-reduce per
    layer before its all-gather. The scales are the same."""
    filter_fqns: list[Name] = []
    """Parts of layer names: layers whose name contains one of them are not converted. The head never is."""
    skip_small: bool = True
    """Do not convert layers that are slower in float8, by the sizes in docs/float8.md."""
    emulate: bool = False
    """Emulate float8 on hardware without it. Slow, for tests."""

    @property
    def gathers_float8(self) -> bool:
        """Return whether parameters are all-gathered in float8 where layers are converted."""
        return self.enable_fsdp_float8_all_gather and self.recipe_name == "tensorwise"


class LinearQuantization(Section):
    float8: Float8 = Float8()


class Quantize(Section):
    linear: LinearQuantization = LinearQuantization()


class Config(Section):
    """Resolved config of a run."""

    job: Job = Job()
    model: ModelSelection = ModelSelection()
    data: Data = Data()
    training: Training = Training()
    guard: Guard = Guard()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    freeze: Freeze = Freeze()
    lora: Lora = Lora()
    teacher: Teacher = Teacher()
    distill: Distill = Distill()
    optimizer: Optimizer = Optimizer()
    offload: Offload = Offload()
    outer: Outer = Outer()
    average: Average = Average()
    lr_scheduler: LRScheduler = LRScheduler()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    debug: Debug = Debug()

    @property
    def sequence_parts(self) -> int:
        """Parts of each sequence that are computed apart, by one process or several."""
        return max(self.parallelism.context_parallel_degree, self.debug.reproducible_context_degree)

    def __repr__(self) -> str:
        """Return what differs from the defaults, as TOML."""
        import tomlkit

        changed = tomlkit.dumps(self.model_dump(exclude_defaults=True, exclude_none=True))
        return f"# options that differ from their defaults; titanlite.dump returns all\n{changed}"

    __str__ = __repr__


def dump(config: Config) -> str:
    """Return TOML text with every option, which loads to the same Config. Options that are None are left out."""
    import tomlkit

    return tomlkit.dumps(config.model_dump(exclude_none=True))
