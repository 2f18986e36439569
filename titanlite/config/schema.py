"""Every option of titanlite: one frozen Pydantic model per TOML section. Never imports torch.

Names follow torchtitan 0.2 wherever the idea is the same. Every option is defined globally: its effect does not depend
on the number of processes.
"""

import math
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from titanlite.config.data_schema import Data, Validation
from titanlite.config.distill_schema import Distill, Teacher
from titanlite.config.optim_schema import Freeze, Lora, LRScheduler, Offload, Optimizer
from titanlite.config.run_schema import Checkpoint, Comm, Debug, Metrics, Profiling
from titanlite.config.types import (
    AttentionBackend,
    Count,
    Duration,
    Name,
    NonNegative,
    PositiveInt,
    Section,
    seconds_of,
)

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
    """Model family: llama3 (the default), qwen3 or qwen3_moe. With model.file: the class to use if the file defines
    several."""
    file: Name | None = None
    """A model of your own instead: a .py file, relative to the TOML file that names it, or a module: package.module."""
    flavor: Name | None = None
    """Named size of the family, for example 8B. Default: debug, or else the first flavor of the family."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Fields of the flavor to change, for example dim = 512. Unless vocab_size is set here, it follows the tokenizer.
    It is the flavor's size where the tokenizer fills at least 99 % of it. Else it is the tokenizer's size, rounded up
    to a multiple of 128."""

    @property
    def title(self) -> str:
        """Name of the model, independent of where its file is."""
        return self.name or (re.split(r"[/.]", self.file.removesuffix(".py"))[-1] if self.file else "llama3")


class Training(Section):
    steps: PositiveInt = 1000
    """Optimizer steps of the whole run. Raise it to resume a finished run."""
    epochs: PositiveInt | None = None
    """Passes over the data, instead of training.steps. The run ends with the last whole batch before a source would be
    read again. Default: training.steps decides."""
    max_duration: Duration | None = None
    """Time after which this start saves a checkpoint and ends with exit code 75, such as 11h30min or 2d. The same
    command resumes. A Slurm job stops before its end without it. Default: no limit."""
    seq_len: PositiveInt = 2048
    """Tokens in a sequence."""
    global_batch_size: PositiveInt = 8
    """Sequences in one optimizer step, over all processes."""
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
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the weights that the optimizer updates. bfloat16 is full bfloat16 training: gradients have that dtype
    too, and updates are rounded stochastically."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the unsharded parameters, and so of compute and activations."""
    mixed_precision_reduce: Literal["bfloat16", "float32"] = "float32"
    """Dtype in which gradients are reduced over processes."""
    attention_backend: AttentionBackend = "auto"
    """Attention kernel of GPUs: flash (FlashAttention-2), cudnn, or efficient, which also takes float32. auto is
    PyTorch's choice, which the start of a run reports. CPUs have one kernel."""
    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer states in host memory."""

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


class Degrees(NamedTuple):
    """Number of ranks along each axis of the mesh, in the order of the axes."""

    replicate: int
    shard: int
    context: int = 1
    tensor: int = 1

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def sharded(self) -> int:
        """Number of ranks that a replica's parameters are sharded over."""
        return self.shard * self.context

    def axes(self) -> dict[str, int]:
        """Return the size of each axis by name: replicate and shard, and further axes of more than one rank."""
        return {name: size for name, size in self._asdict().items() if size > 1 or name in ("replicate", "shard")}

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
    expert_parallel_degree: PositiveInt = 1
    """Neighbouring processes that have different experts of a layer, and send each other tokens. They read different
    data, and shard all other parameters. It must divide the experts, and the shard degree times the context degree."""
    tensor_parallel_degree: PositiveInt = 1
    """Neighbouring processes that split the layers of the model and its vocabulary. It must divide the numbers of
    heads, of feed-forward dims and of tokens in the vocabulary. Use it within a node: layers communicate often."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | PositiveInt = "default"
    """Time at which the gathered parameters of an FSDP unit are freed. always frees them after forward and gathers them
    again for backward (ZeRO-3). never keeps them for backward (ZeRO-2). A number k keeps a 1/k shard (ZeRO++ hpZ).
    default is always, except for the head, which backward needs at once, and for a shard degree of 1, where nothing is
    gathered."""
    fsdp_reduce_gradients: Literal["each", "last"] = "each"
    """Micro-batches after whose backward gradients are reduced. each keeps shards of gradients only. last reduces once
    a step: less communication, but every process keeps the gradients of whole parameters, 4 bytes a parameter."""
    fsdp_forward_prefetch: Count = 0
    """Blocks to all-gather ahead in forward; 0 leaves it to FSDP2, which gathers one ahead."""
    fsdp_backward_prefetch: Count = 0
    """Blocks to all-gather ahead in backward; 0 leaves it to FSDP2, which gathers one ahead."""

    def degrees(self, world_size: int) -> Degrees:
        """Return the degree of each axis; their product is world_size.

        Raises:
            ValueError: the configured degrees do not fit world_size.
        """
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        further = {"context": self.context_parallel_degree, "tensor": self.tensor_parallel_degree}
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
    mode: Literal["none", "selective", "full", "per_block"] = "none"
    """Blocks that recompute their activations in backward instead of keeping them: none, every n-th or some operations
    (selective), all (full), or a list (per_block)."""
    selective_ac_option: Literal["op"] | PositiveInt = "op"
    """Choice of mode selective: a number n checkpoints every n-th block. op checkpoints every block, and keeps the
    results that are expensive to recompute (attention and every second matmul)."""
    per_block: list[Name] = Field(default_factory=list)
    """Recompute policies of mode per_block, in the order of the blocks: ["full x 20", "op x 8", "none x 4"]. Each is
    none, op (see selective_ac_option) or full, with its number of blocks. `titanlite plan --memory-budget-gib` chooses
    them."""


class Compile(Section):
    enable: bool = False
    """Compile each block with torch.compile. Compiled code is kept for the next start, in ~/.cache/titanlite/compile or
    the folder named by the environment variable TORCHINDUCTOR_CACHE_DIR."""


class Float8(Section):
    enable: bool = False
    """Train the linear layers in float8 (needs torchao, the extra float8)."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Granularity of the scales, as torchao names it."""
    enable_fsdp_float8_all_gather: bool = True
    """All-gather parameters in float8 (recipe tensorwise only)."""
    precompute_float8_dynamic_scale_for_fsdp: bool = True
    """Compute the scales of all float8 parameters in one all-reduce after each update, instead of one all-reduce per
    layer before its all-gather. The scales are the same."""
    filter_fqns: list[Name] = Field(default_factory=list)
    """Parts of layer names: layers whose name contains one of them are not converted. The head never is."""
    skip_small: bool = True
    """Do not convert layers that are slower in float8, by the sizes in docs/float8.md."""
    emulate: bool = False
    """Emulate float8 on hardware without it. Slow, for tests."""


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
    lr_scheduler: LRScheduler = LRScheduler()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    debug: Debug = Debug()
