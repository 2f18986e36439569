"""Options of what is updated and how: [freeze], [lora], [optimizer], [offload] and [lr_scheduler]."""

from typing import Annotated, Any, Literal

from pydantic import Field

from titanlite.config.types import Count, Decay, Fraction, Name, NonNegative, Positive, PositiveInt, Section


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
    args: dict[str, Any] = Field(default_factory=dict)
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
    in_backward: bool = False
    """Update each parameter in backward, as soon as its gradient is reduced, and free the gradient, so that all
    gradients never exist at once. It excludes clipping (training.max_norm must be 0), accumulation, Muon and skipped
    steps."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class, for example momentum = 0.9."""
    groups: list[OptimizerGroup] = Field(default_factory=list)
    """Parameter groups with settings of their own. Each parameter must match exactly one. Default: the groups that
    optimizer.name implies."""


class Freeze(Section):
    parameters: list[Name] = Field(default_factory=list)
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
    targets: list[Name] = Field(default_factory=list)
    """Globs of the names of linear layers that get an adapter, for example layers.*.attention.w[qv]. Default: all
    linear layers of the blocks."""
    quantize_base: Literal["none", "int8", "float8"] = "none"
    """Format of the frozen weights of layers with an adapter: int8 or float8 is 8 bits for each weight, and a scale for
    each row."""


class Offload(Section):
    optimizer: Literal["memory", "disk"] = "memory"
    """Place of AdamW's two moments. disk keeps them in files, with a few slices at a time in memory."""
    parameters: Literal["memory", "disk"] = "memory"
    """Place of the parameters that training.enable_cpu_offload keeps on the host. disk keeps them in files."""
    path: Name | None = None
    """Folder of those files, on a fast local disk. The files vanish with the process. Default:
    <dump_folder>/<name>/offload."""

    @property
    def is_used(self) -> bool:
        return "disk" in (self.optimizer, self.parameters)


class LRScheduler(Section):
    warmup_steps: Count = 200
    """Steps of linear warm-up. More than the run has gives a warning."""
    decay_ratio: Fraction | None = None
    """Fraction of all steps over which the rate decays at the end. The rate is stable between warm-up and decay.
    Default: all steps after warm-up."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """Final learning rate, as a fraction of the peak."""
